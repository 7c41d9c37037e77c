"""Functions caught before autograd: a product with a quantized weight stays one operator instead of a transpose and a
matmul.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.tensors.base import FUNCTIONS, NinferTensor, refusal


def check_dtype(name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    """Activations must have the weight's compute dtype, as with a dense layer; autocast casts them itself. Tangents of
    forward mode, which the operators would drop, are refused.
    """
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise UnsupportedOperation(
            f"{name}: products with quantized weights have no forward-mode derivative; use reverse mode, or dequantize() the "
            "weight"
        )
    if not x.is_floating_point():
        raise UnsupportedOperation(f"{name}: a quantized weight multiplies floating activations, found {x.dtype}")
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise UnsupportedOperation(
            f"{name}: activations are {x.dtype} and the weight computes in {dtype}; cast one of them with .to(dtype)"
        )


def autocast_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a product of `x` runs: the autocast dtype under autocast, which leaves float64 alone."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """A region where products of `x` run in the dtype of their activations."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def linear(input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` for a quantized weight [N, K] and activations [..., K]."""
    if not isinstance(weight, NinferTensor) or isinstance(input, NinferTensor):
        raise refusal("linear with a quantized activation or bias", (input, weight, bias))
    check_dtype("linear", input, weight.compute_dtype)
    return weight.product(input, bias)


def embedding(
    input: torch.Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """`F.embedding` for a quantized table: rows in the table's compute dtype. Padding and sparsity concern gradients
    only.
    """
    if max_norm is not None:
        raise refusal("embedding with max_norm", (weight,), "it would rewrite the table; drop max_norm")
    return weight.look_up(input, weight.compute_dtype)


FUNCTIONS[F.linear] = linear
FUNCTIONS[F.embedding] = embedding
