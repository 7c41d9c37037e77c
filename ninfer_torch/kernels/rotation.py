"""`ninfer::hadamard`: the rotation that folded weights expect of their inputs. Source: spec/container.md 7.

An operator of its own, because a compiler that fuses ten butterflies into one loop computes each input a thousand
times.
"""

from __future__ import annotations

from typing import Any

import torch

from ninfer_torch.errors import LayoutError, UnsupportedOperation

__all__ = ["ROTATION_BLOCK", "hadamard"]

ROTATION_BLOCK = 1024
"""Columns that one Walsh-Hadamard matrix mixes."""

_SIDE = 32
"""A block is a square of this side: ten butterflies as five along each axis, on rows of contiguous values."""


def _butterflies(values: torch.Tensor) -> torch.Tensor:
    """Ten stages of sums and differences per block, then one division by 32, all in the dtype of `values`."""
    signs = 1 - 2 * torch.arange(2, dtype=values.dtype, device=values.device).view(2, 1, 1)
    squares = values.reshape(-1, _SIDE, _SIDE).contiguous()
    blocks = squares.shape[0]
    for _ in range(2):
        for reach in (1, 2, 4, 8, 16):
            upper, lower = squares.view(blocks, _SIDE // (2 * reach), 2, reach, _SIDE).split(1, 2)
            squares = torch.addcmul(upper, lower, signs)  # upper + lower, upper - lower
        squares = squares.view(blocks, _SIDE, _SIDE).transpose(1, 2).contiguous()
    return squares.div_(_SIDE).view(values.shape)


_library = torch.library.Library("ninfer", "FRAGMENT")
_library.define("hadamard(Tensor values) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("hadamard", _butterflies, "CompositeExplicitAutograd")


@torch.library.register_fake("ninfer::hadamard", lib=_library)
def _(values: torch.Tensor) -> torch.Tensor:
    return values.new_empty(values.shape)


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return torch.ops.ninfer.hadamard(grad)  # the matrix is symmetric


torch.library.register_autograd("ninfer::hadamard", _backward, lib=_library)


def hadamard(values: torch.Tensor) -> torch.Tensor:
    """The normalised Walsh-Hadamard transform, in natural order, of every 1024 consecutive values of the last axis.

    `H[i, j] = (-1)^popcount(i & j) / 32`, its own inverse. Sums are rounded in the dtype of `values`, float32 or
    float64. Raises LayoutError for a last axis of another size and UnsupportedOperation for another dtype.
    """
    if values.dim() == 0 or values.shape[-1] % ROTATION_BLOCK:
        raise LayoutError(
            f"hadamard: a last axis of whole blocks of {ROTATION_BLOCK} expected, found {list(values.shape)}"
        )
    if values.dtype not in (torch.float32, torch.float64):
        raise UnsupportedOperation(f"hadamard sums in float32 or float64, found {values.dtype}")
    return torch.ops.ninfer.hadamard(values)
