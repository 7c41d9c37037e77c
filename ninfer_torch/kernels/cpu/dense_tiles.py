"""Many bfloat16 activation rows on a processor with matrix units (AMX), which PyTorch's dense product already drives.

Rows of the weight are decoded into a tile of bfloat16 values that stays in the cache, and the tile is multiplied as a dense weight. That is
criterion A16T: weights are rounded to the activations' dtype, as on a GPU's tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from ninfer_torch.layouts import Geometry, slice_rows

__all__ = ["LEAST_INT8_ROWS", "LEAST_ROWS", "matrix_units", "multiply"]

LEAST_ROWS = 16
"""Activation rows below which the vector kernels are faster (`benchmarks/cpu_linear.py`)."""

LEAST_INT8_ROWS = 160
"""The same where the vector kernels may quantize activations to int8."""

_TILE = 1 << 20
"""Values in a tile: 2 MiB, a share of the second-level cache."""

Decode = Callable[[Sequence[torch.Tensor], str, Sequence[int], torch.dtype], torch.Tensor]


def matrix_units() -> bool:
    """Whether this processor multiplies bfloat16 tiles in hardware that PyTorch uses."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(supported and supported() and torch.backends.mkldnn.is_available())


def multiply(
    x: torch.Tensor,
    planes: Sequence[torch.Tensor],
    format: str,
    geometry: Sequence[int],
    bias: torch.Tensor | None,
    decode: Decode,
) -> torch.Tensor:
    """`x @ W.T + bias` for bfloat16 x [M, K], W [N, K] and bias [N]; `decode` is `dequantize`. The result is bfloat16 [M, N]."""
    matrix = Geometry(*geometry)
    step = max(1, _TILE // matrix.columns)
    if matrix.rows <= step:
        return F.linear(x, decode(planes, format, geometry, x.dtype), bias)
    out = torch.empty((x.shape[0], matrix.rows), dtype=x.dtype)
    for begin in range(0, matrix.rows, step):
        end = min(begin + step, matrix.rows)
        part, place = slice_rows(format, planes, matrix, begin, end)
        tile = decode(part, format, place, x.dtype)
        out[:, begin:end] = F.linear(x, tile, None if bias is None else bias[begin:end])
    return out
