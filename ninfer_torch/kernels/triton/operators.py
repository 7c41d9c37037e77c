"""The operators on a CUDA (or ROCm) device: arguments checked, a launch chosen, kernels started. Nothing here waits for the device.

What the kernels do not cover, float64 activations, is computed by the reference on the device (`kernels.fallback`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import triton

from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.kernels import fallback
from ninfer_torch.kernels.triton import block_float, gguf_i, gguf_k, gguf_plain, grouped, row_float  # noqa: F401
from ninfer_torch.kernels.triton.dense import rows_kernel
from ninfer_torch.kernels.triton.launch import Launch, splits_of
from ninfer_torch.kernels.triton.small_m import reduce_kernel, small_m_kernel
from ninfer_torch.kernels.triton.tiled import backward_kernel, permute_kernel, tiled_kernel
from ninfer_torch.kernels.triton.tiles import TILES, TileDecoder
from ninfer_torch.kernels.tuning import Card, choose, enabled

__all__ = ["OPERATORS"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Planes = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Matrix:
    """A quantized matrix as kernels take it: three plane arguments, a table, its geometry and its decoder."""

    decoder: TileDecoder
    arguments: tuple[torch.Tensor, ...]
    rows: int
    columns: int
    row_begin: int
    run_rows: int
    alignment: int

    @classmethod
    def of(
        cls, name: str, planes: Planes, format: str, geometry: Sequence[int], *others: torch.Tensor | None
    ) -> Matrix:
        """Raises UnsupportedOperation unless the planes and the `others` lie on one device."""
        decoder, device = TILES[format], planes[0].device
        for tensor in (*planes, *others):
            if tensor is not None and tensor.device != device:
                raise UnsupportedOperation(
                    f"{name}: found tensors on {device} and {tensor.device}, expected one device"
                )
        rows, columns, row_begin, parent_rows, divisors = geometry
        whole = [plane if plane.is_contiguous() else plane.contiguous() for plane in planes]
        table = whole[0] if decoder.table is None else _table(format, device)
        arguments = (*whole, *[whole[0]] * (3 - len(whole)), table)
        alignment = decoder.alignment_of(whole, columns)
        return cls(decoder, arguments, rows, columns, row_begin, parent_rows // max(divisors, 1), alignment)

    def steps(self, block_units: int) -> int:
        """Blocks of units along a row."""
        return triton.cdiv(self.columns, self.decoder.lanes * block_units)

    def constants(self, block_units: int) -> dict[str, Any]:
        even = self.columns % (self.decoder.lanes * block_units) == 0
        return {"TILE": self.decoder.tile, "ALIGN": self.alignment, "EVEN": even, "BLOCK_U": block_units}


@functools.cache
def _table(format: str, device: torch.device) -> torch.Tensor:
    make = TILES[format].table
    if make is None:
        raise UnsupportedOperation(f"format {format} has no lookup table")
    with torch.inference_mode(False):
        return make(device)


@functools.cache
def _architecture(device: torch.device) -> int:
    """Compute capability times ten, 0 for a device that has none."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def card_of(device: torch.device) -> Card:
    """The card that stored launches belong to."""
    from ninfer_torch.kernels.triton.offline import source_hash

    return Card(torch.cuda.get_device_name(device), _architecture(device), source_hash())


@functools.cache
def _place(device: torch.device) -> tuple[int, Card | None]:
    """Architecture, and the card where its stored launches count."""
    return _architecture(device), card_of(device) if device.type == "cuda" and enabled() else None


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@contextlib.contextmanager
def _switched(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device):
        yield


_STAY = contextlib.nullcontext()


def _on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Kernels start on the current device; switch only where it is another."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _STAY
    return _switched(device)


def _options(launch: Launch, fused: bool = True) -> dict[str, Any]:
    """Compiler options; `fused` allows a product and a sum to round once, which exact values forbid."""
    return {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": fused}


def _padded_experts(experts: int) -> int:
    return triton.next_power_of_2(max(experts, 1))


def _matrix_of(x: torch.Tensor, width: int, name: str) -> torch.Tensor:
    if x.dim() == 0 or x.shape[-1] != width:
        raise UnsupportedOperation(f"{name}: input of shape {list(x.shape)} does not end in {width}")
    return x.reshape(-1, width)


def _rows(
    out: torch.Tensor, matrix: Matrix, ids: torch.Tensor | None, count: int, launch: Launch | None = None
) -> torch.Tensor:
    if out.numel() == 0:
        return out
    launch = launch or choose("rows", matrix.decoder.family, torch.float32, count, *_place(out.device))
    grid = (triton.cdiv(count, launch.block_n), matrix.steps(launch.block_u))
    with _on(out.device):
        rows_kernel[grid](
            out, out if ids is None else ids, *matrix.arguments,
            count, matrix.rows, matrix.columns, matrix.row_begin, matrix.run_rows,
            GATHER=ids is not None, BLOCK_N=launch.block_n, **matrix.constants(launch.block_u),
            **_options(launch, fused=False),
        )  # fmt: skip
    return out


def dequantize(planes: Planes, format: str, geometry: Sequence[int], out_dtype: torch.dtype) -> torch.Tensor:
    """All values of a matrix, [N, K] in `out_dtype`: exact in float32, rounded once to a narrower type."""
    if out_dtype not in DTYPES:
        return fallback.dequantize(planes, format, geometry, out_dtype)
    matrix = Matrix.of("dequantize", planes, format, geometry)
    out = planes[0].new_empty((matrix.rows, matrix.columns), dtype=out_dtype)
    return _rows(out, matrix, None, matrix.rows)


def embedding(
    ids: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], out_dtype: torch.dtype
) -> torch.Tensor:
    """Rows `ids` of a matrix, [*ids.shape, K] in `out_dtype`. An id outside the matrix gives a row of NaN: nothing waits for it."""
    if out_dtype not in DTYPES:
        return fallback.embedding(ids, planes, format, geometry, out_dtype)
    matrix = Matrix.of("embedding", planes, format, geometry, ids)
    out = planes[0].new_empty((*ids.shape, matrix.columns), dtype=out_dtype)
    return _rows(out, matrix, ids.contiguous(), ids.numel())


def _permute(x: torch.Tensor, matrix: Matrix, launch: Launch, rows: int) -> tuple[torch.Tensor, int, int]:
    """The lane planes of x for `rows` blocks of rows, with their extents: rows and units padded to whole blocks."""
    padded_rows, units = rows * launch.block_m, matrix.steps(launch.block_u) * launch.block_u
    planes = x.new_empty((matrix.decoder.lanes, padded_rows, units))
    block_m, block_u = 16, 64
    grid = (triton.cdiv(padded_rows, block_m), triton.cdiv(units, block_u))
    permute_kernel[grid](
        planes, x, x.shape[0], matrix.columns, x.stride(0), x.stride(1), padded_rows, units,
        TILE=matrix.decoder.tile, BLOCK_M=block_m, BLOCK_U=block_u, enable_fp_fusion=True,
    )  # fmt: skip
    return planes, padded_rows, units


def _product(
    out: torch.Tensor,
    x: torch.Tensor,
    matrix: Matrix,
    bias: torch.Tensor | None,
    launch: Launch,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """out [M, N] = x [M, K] times a matrix of N rows or, with `offsets`, a bank of such."""
    (count, width), experts = out.shape, 0 if offsets is None else offsets.numel()
    row_blocks = triton.cdiv(count, launch.block_m)
    if offsets is not None and launch.kernel == "tiled":
        row_blocks = count // launch.block_m + min(experts, count)
    grid = (triton.cdiv(width, launch.block_n), row_blocks)
    steps = matrix.steps(launch.block_u)
    splits = splits_of(launch, grid[0] * grid[1], steps, _processors(x.device))
    per_split = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, per_split)
    target = out if splits == 1 else x.new_empty((splits, *out.shape), dtype=torch.float32)
    fused = bias if splits == 1 else None
    constants = {
        **matrix.constants(launch.block_u),
        "HAS_BIAS": fused is not None,
        "EXPERTS": experts,
        "EXPERTS_PADDED": _padded_experts(experts),
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
    }
    head = (target, x, out if fused is None else fused, out if offsets is None else offsets)
    place = (matrix.row_begin, matrix.run_rows)
    with _on(x.device):
        if launch.kernel == "small_m":
            small_m_kernel[(*grid, splits)](
                *head, *matrix.arguments, count, width, matrix.columns, x.stride(0), x.stride(1), *place, steps, per_split,
                **constants, **_options(launch),
            )  # fmt: skip
        else:
            rows = units = 0
            if launch.permuted:
                blocks = triton.cdiv(count, launch.block_m) + (
                    1 if experts else 0
                )  # a block may start at an expert's row
                x, rows, units = _permute(x, matrix, launch, blocks)
                head = (target, x, *head[2:])
            tiled_kernel[(*grid, splits)](
                *head, *matrix.arguments,
                count, width, matrix.columns, x.stride(0), x.stride(-1), rows, units, *place, steps, per_split,
                PERMUTED=launch.permuted, PAIRED=launch.paired, WIDE=launch.wide, **constants, **_options(launch),
            )  # fmt: skip
        if splits > 1:
            reduce_kernel[(triton.cdiv(out.numel(), 1024),)](
                out, target, out if bias is None else bias, out.numel(), width,
                SPLITS=splits, HAS_BIAS=bias is not None, BLOCK=1024, enable_fp_fusion=True,
            )  # fmt: skip
    return out


def linear(
    x: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], bias: torch.Tensor | None, policy: str
) -> torch.Tensor:
    """`x @ W.T + bias` for x [..., K] and W [N, K]; the result [..., N] has x's dtype."""
    if x.dtype not in DTYPES:
        return fallback.linear(x, planes, format, geometry, bias, policy)
    matrix = Matrix.of("linear", planes, format, geometry, x, bias)
    rows = _matrix_of(x, matrix.columns, "linear")
    out = x.new_empty((rows.shape[0], matrix.rows))
    if out.numel():
        launch = choose("linear", matrix.decoder.family, x.dtype, rows.shape[0], *_place(x.device))
        _product(out, rows, matrix, bias, launch)
    return out.reshape(*x.shape[:-1], matrix.rows)


def expert_linear(
    x: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], offsets: torch.Tensor, policy: str
) -> torch.Tensor:
    """`x[t] @ W[e].T` for tokens sorted by expert: x [T, K], W the bank [E*N, K], offsets int32 [E] cumulative ends."""
    if x.dtype not in DTYPES:
        return fallback.expert_linear(x, planes, format, geometry, offsets, policy)
    matrix = Matrix.of("expert_linear", planes, format, geometry, x, offsets)
    rows = _matrix_of(x, matrix.columns, "expert_linear")
    out = x.new_zeros((rows.shape[0], matrix.rows // offsets.numel()))
    if out.numel():
        launch = _expert_launch("expert_linear", matrix, rows, offsets)
        _product(out, rows, matrix, None, launch, offsets)
    return out


def _expert_launch(operation: str, matrix: Matrix, x: torch.Tensor, offsets: torch.Tensor) -> Launch:
    rows = triton.cdiv(x.shape[0], offsets.numel())
    return choose(operation, matrix.decoder.family, x.dtype, rows, *_place(x.device))


def _gradient(
    out: torch.Tensor, grad: torch.Tensor, matrix: Matrix, launch: Launch, offsets: torch.Tensor | None
) -> None:
    """out [M, K] = grad [M, N] times a matrix of N rows or, with `offsets`, a bank of such."""
    (count, width), experts = grad.shape, 0 if offsets is None else offsets.numel()
    row_blocks = (
        triton.cdiv(count, launch.block_m) if offsets is None else count // launch.block_m + min(experts, count)
    )
    with _on(grad.device):
        backward_kernel[(matrix.steps(launch.block_u), row_blocks)](
            out, grad, out if offsets is None else offsets, *matrix.arguments,
            count, width, matrix.columns, grad.stride(0), grad.stride(1), matrix.row_begin, matrix.run_rows,
            EXPERTS=experts, EXPERTS_PADDED=_padded_experts(experts), WIDE=launch.wide,
            BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, **matrix.constants(launch.block_u), **_options(launch),
        )  # fmt: skip


def linear_backward(grad: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int]) -> torch.Tensor:
    """`grad @ W` for grad [..., N] and W [N, K]: the gradient of `linear` in its activations, [..., K]."""
    if grad.dtype not in DTYPES:
        return fallback.linear_backward(grad, planes, format, geometry)
    matrix = Matrix.of("linear_backward", planes, format, geometry, grad)
    rows = _matrix_of(grad, matrix.rows, "linear_backward")
    out = grad.new_empty((rows.shape[0], matrix.columns))
    if out.numel():
        launch = choose("backward", matrix.decoder.family, grad.dtype, rows.shape[0], *_place(grad.device))
        _gradient(out, rows, matrix, launch, None)
    return out.reshape(*grad.shape[:-1], matrix.columns)


def expert_linear_backward(
    grad: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], offsets: torch.Tensor
) -> torch.Tensor:
    """`grad[t] @ W[e]`: the gradient of `expert_linear` in its activations, [T, K]."""
    if grad.dtype not in DTYPES:
        return fallback.expert_linear_backward(grad, planes, format, geometry, offsets)
    bank = Matrix.of("expert_linear_backward", planes, format, geometry, grad, offsets)
    matrix = replace(bank, rows=bank.rows // offsets.numel())
    rows = _matrix_of(grad, matrix.rows, "expert_linear_backward")
    out = grad.new_zeros((rows.shape[0], matrix.columns))
    if out.numel():
        _gradient(out, rows, matrix, _expert_launch("backward", matrix, rows, offsets), offsets)
    return out


OPERATORS: Mapping[str, Callable[..., torch.Tensor]] = MappingProxyType(
    {
        operator.__name__: operator
        for operator in (dequantize, linear, linear_backward, embedding, expert_linear, expert_linear_backward)
    }
)
"""The implementation of each `torch.ops.ninfer` operator for CUDA tensors, by name."""
