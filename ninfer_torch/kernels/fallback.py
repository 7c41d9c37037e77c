"""The operators computed by the reference decode, on any device: decode some rows, multiply, go on.

Extra memory stays below 64 MiB whatever the matrix: weights are decoded in chunks of `CHUNK` elements and activations are widened to
float32 in blocks of as many. Products are accumulated in float32 (float64 for float64 activations), criterion A16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.kernels.reference import decode
from ninfer_torch.layouts import Geometry, gather_rows, slice_rows

CHUNK = 1 << 20
"""Elements decoded or widened at a time: 4 MiB of float32, and a small multiple of it for the decoder's temporaries."""

Planes = Sequence[torch.Tensor]


def _spans(count: int, width: int) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of `count` rows, each of about CHUNK elements of `width` columns, at least one row."""
    step = max(1, CHUNK // max(width, 1))
    for begin in range(0, count, step):
        yield begin, min(begin + step, count)


def _decoded(
    planes: Planes, format: str, geometry: Geometry, dtype: torch.dtype
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Row ranges of a matrix with their values in `dtype`."""
    for begin, end in _spans(geometry.rows, geometry.columns):
        yield begin, end, decode(format, *slice_rows(format, planes, geometry, begin, end)).to(dtype)


def _accumulator(x: torch.Tensor) -> torch.dtype:
    if not x.is_floating_point():
        raise UnsupportedOperation(f"a quantized weight multiplies floating activations, found {x.dtype}")
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def dequantize(planes: Planes, format: str, geometry: Sequence[int], out_dtype: torch.dtype) -> torch.Tensor:
    """All values of a matrix, [N, K] in `out_dtype`: exact in float32, rounded once to a narrower type."""
    matrix = Geometry(*geometry)
    out = planes[0].new_empty((matrix.rows, matrix.columns), dtype=out_dtype)
    for begin, end, values in _decoded(planes, format, matrix, torch.float32):
        out[begin:end] = values
    return out


def linear(
    x: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], bias: torch.Tensor | None, policy: str
) -> torch.Tensor:
    """`x @ W.T + bias` for x [..., K] and W [N, K]; the result [..., N] has x's dtype."""
    matrix, compute = Geometry(*geometry), _accumulator(x)
    if x.shape[-1] != matrix.columns:
        raise UnsupportedOperation(f"linear: input of shape {list(x.shape)} does not end in K = {matrix.columns}")
    rows = x.reshape(-1, matrix.columns)
    out = x.new_empty((rows.shape[0], matrix.rows))
    for begin, end, weight in _decoded(planes, format, matrix, compute):
        part_bias = None if bias is None else bias[begin:end].to(compute)
        for first, last in _spans(rows.shape[0], matrix.columns):
            product = rows[first:last].to(compute).contiguous() @ weight.T  # one stride, one order of summation
            out[first:last, begin:end] = product if part_bias is None else product.add_(part_bias)
    return out.reshape(*x.shape[:-1], matrix.rows)


def linear_backward(grad: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int]) -> torch.Tensor:
    """`grad @ W` for grad [..., N] and W [N, K]: the gradient of `linear` in its activations, [..., K]."""
    matrix, compute = Geometry(*geometry), _accumulator(grad)
    rows = grad.reshape(-1, matrix.rows)
    out = torch.empty((rows.shape[0], matrix.columns), dtype=grad.dtype, device=grad.device)
    for first, last in _spans(rows.shape[0], max(matrix.columns, matrix.rows)):
        total = grad.new_zeros((last - first, matrix.columns), dtype=compute)
        for begin, end, weight in _decoded(planes, format, matrix, compute):
            total.addmm_(rows[first:last, begin:end].to(compute), weight)
        out[first:last] = total
    return out.reshape(*grad.shape[:-1], matrix.columns)


def embedding(
    ids: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], out_dtype: torch.dtype
) -> torch.Tensor:
    """Rows `ids` of a matrix, [*ids.shape, K] in `out_dtype`; only these rows are read."""
    matrix = Geometry(*geometry)
    flat = ids.reshape(-1).long()
    if flat.numel() and not flat.is_cuda and not bool(((flat >= 0) & (flat < matrix.rows)).all()):
        raise IndexError(f"embedding: ids must lie in [0, {matrix.rows}), found {int(flat.min())} to {int(flat.max())}")
    out = planes[0].new_empty((flat.numel(), matrix.columns), dtype=out_dtype)
    for begin, end in _spans(flat.numel(), matrix.columns):
        out[begin:end] = decode(format, *gather_rows(format, planes, matrix, flat[begin:end]))
    return out.reshape(*ids.shape, matrix.columns)


def _experts(
    planes: Planes, format: str, geometry: Sequence[int], offsets: torch.Tensor
) -> Iterator[tuple[int, int, Planes, Geometry]]:
    """For each expert that is hit: its token range, planes and geometry. `offsets` are cumulative ends, int32 [E]."""
    bank = Geometry(*geometry)
    rows, begin = bank.rows // offsets.numel(), 0
    for expert, end in enumerate(offsets.tolist()):
        if end > begin:
            yield begin, end, *slice_rows(format, planes, bank, expert * rows, (expert + 1) * rows)
        begin = end


def expert_linear(
    x: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], offsets: torch.Tensor, policy: str
) -> torch.Tensor:
    """`x[t] @ W[e].T` for tokens sorted by expert: x [T, K], W the bank [E*N, K], result [T, N].

    `offsets` int32 [E] are the cumulative ends of the experts' token ranges, as in `torch._grouped_mm`; tokens after the last
    are zero.
    """
    out = x.new_zeros((x.shape[0], geometry[0] // offsets.numel()))
    for begin, end, part, matrix in _experts(planes, format, geometry, offsets):
        out[begin:end] = linear(x[begin:end], part, format, matrix, None, policy)
    return out


def expert_linear_backward(
    grad: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], offsets: torch.Tensor
) -> torch.Tensor:
    """`grad[t] @ W[e]`: the gradient of `expert_linear` in its activations, [T, K]."""
    out = grad.new_zeros((grad.shape[0], geometry[1]))
    for begin, end, part, matrix in _experts(planes, format, geometry, offsets):
        out[begin:end] = linear_backward(grad[begin:end], part, format, matrix)
    return out
