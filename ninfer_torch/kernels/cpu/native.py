"""The operators over the native kernels: checks, memory and addresses; the computing is C++ (`src/`).

Activations may be float32, bfloat16 or float16 and have any strides. Other dtypes and empty matrices go to the reference, whose results
these equal: `dequantize` and `embedding` bit for bit, products within criterion A16, or A8 where the policy permits it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ninfer_torch.errors import NinferError, UnsupportedOperation
from ninfer_torch.formats import FORMATS
from ninfer_torch.kernels import fallback
from ninfer_torch.kernels.cpu import _native
from ninfer_torch.kernels.grids import grid
from ninfer_torch.kernels.precision import may_quantize
from ninfer_torch.layouts import Geometry, slice_rows

__all__ = [
    "INSTRUCTION_SETS",
    "dequantize",
    "embedding",
    "expert_linear",
    "expert_linear_backward",
    "instruction_sets",
    "linear",
    "linear_backward",
    "use",
    "used",
    "uses_matrix_units",
]

INSTRUCTION_SETS = ("scalar", "avx2", "avx512", "avx512_bf16", "neon", "dotprod")
"""Every instruction set with kernels of its own, on each processor from portable to fastest. `avx512` stands for AVX-512 F, BW, DQ, VL
and VNNI, `avx512_bf16` for BF16 and VBMI besides; `neon` is any 64-bit ARM, `dotprod` its byte products of ARMv8.2."""

_GRIDS = ("iq4_nl", "even_signs", "signs", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s")
_FORMAT = {name: index for index, name in enumerate(name for name, record in FORMATS.items() if record.quantized)}
_FLOATS_ONLY = {name for name, record in FORMATS.items() if record.family == "row_float"}  # no int8 product
_DTYPE = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_tables = [grid(name).contiguous() for name in _GRIDS]  # kept alive here, read by address
_native.set_grids(*(table.data_ptr() for table in _tables))

Planes = Sequence[torch.Tensor]


def instruction_sets() -> tuple[str, ...]:
    """The instruction sets this processor can run, slowest first."""
    return tuple(name for index, name in enumerate(INSTRUCTION_SETS) if _native.supported(index))


def use(name: str | None = None) -> str:
    """Compute with the instruction set `name` from now on (None: the fastest), and return its name.

    Raises UnsupportedOperation for one that this processor cannot run.
    """
    global _isa
    runnable = instruction_sets()
    name = name or runnable[-1]
    if name not in runnable:
        raise UnsupportedOperation(
            f"NINFER_TORCH_CPU: this processor cannot run {name!r}; it runs {', '.join((*runnable, 'reference'))}"
        )
    _isa = INSTRUCTION_SETS.index(name)
    return name


def used() -> str:
    """The instruction set that computes now."""
    return INSTRUCTION_SETS[_isa]


_isa = 0
_forced = os.environ.get("NINFER_TORCH_CPU")
use(None if _forced == "reference" else _forced)


def _addresses(planes: Planes) -> tuple[int, int, int]:
    """Where the (up to three) planes begin; their rows follow one another without gaps."""
    for plane in planes:
        if not plane.is_cpu:
            raise UnsupportedOperation(
                f"activations are on the CPU and the weight is on {plane.device}; move one of them"
            )
        if not plane.is_contiguous():
            raise NinferError(f"a plane of shape {list(plane.shape)} has strides {plane.stride()}, expected contiguous")
    first, second, third, *_ = *(plane.data_ptr() for plane in planes), 0, 0
    return first, second, third


def dequantize(planes: Planes, format: str, geometry: Sequence[int], out_dtype: torch.dtype) -> torch.Tensor:
    """All values of a matrix, [N, K] in `out_dtype`: exact in float32, rounded once to a narrower type."""
    dtype = _DTYPE.get(out_dtype)
    if dtype is None:
        return fallback.dequantize(planes, format, geometry, out_dtype)
    out = torch.empty((geometry[0], geometry[1]), dtype=out_dtype)
    where = _addresses(planes)
    _native.dequantize(_isa, _FORMAT[format], *where, *geometry, out.data_ptr(), dtype, torch.get_num_threads())
    return out


def embedding(
    ids: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], out_dtype: torch.dtype
) -> torch.Tensor:
    """Rows `ids` of a matrix, [*ids.shape, K] in `out_dtype`; only these rows are read."""
    dtype = _DTYPE.get(out_dtype)
    if dtype is None:
        return fallback.embedding(ids, planes, format, geometry, out_dtype)
    rows = ids.to(torch.int64).contiguous()
    count = rows.numel()
    out = torch.empty((*ids.shape, geometry[1]), dtype=out_dtype)
    weight = (_isa, _FORMAT[format], *_addresses(planes), *geometry)
    if not _native.embedding(*weight, rows.data_ptr(), count, out.data_ptr(), dtype, torch.get_num_threads()):
        found = f"{int(rows.min())} to {int(rows.max())}"
        raise IndexError(f"embedding: ids must lie in [0, {geometry[0]}), found {found}")
    return out


def _is_vector(bias: torch.Tensor | None, length: int) -> bool:
    return bias is None or (bias.dtype in _DTYPE and bias.dim() == 1 and bias.shape[0] == length and bias.is_cpu)


_MATRIX_UNITS = bool(_native.matrix_units())
_FASTEST = INSTRUCTION_SETS.index(instruction_sets()[-1])
_LEAST_ROWS, _LEAST_INT8_ROWS = 16, 48
"""Activation rows from which matrix units are faster than the vector kernels, and where those may quantize to int8
(`benchmarks/cpu_linear.py`)."""


def uses_matrix_units() -> bool:
    """Whether products of many bfloat16 rows go to the processor's matrix units (AMX) now."""
    return _MATRIX_UNITS and _isa == _FASTEST


def _in_tiles(x: torch.Tensor, int8: bool) -> bool:
    """Whether a product with activations x [..., K], which may run as `int8`, goes to the processor's matrix units (AMX).

    They multiply bfloat16, so weights are rounded to it: criterion A16T, as on a GPU's tensor cores.
    """
    least = _LEAST_INT8_ROWS if int8 else _LEAST_ROWS
    return uses_matrix_units() and x.dtype == torch.bfloat16 and x.numel() >= least * x.shape[-1]


def linear(
    x: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], bias: torch.Tensor | None, policy: str
) -> torch.Tensor:
    """`x @ W.T + bias` for x [..., K] and W [N, K]; the result [..., N] has x's dtype."""
    dtype, rows, columns = _DTYPE.get(x.dtype), geometry[0], geometry[1]
    if dtype is None or not columns or not _is_vector(bias, rows):
        return fallback.linear(x, planes, format, geometry, bias, policy)
    shape = x.shape
    if shape[-1] != columns:
        raise UnsupportedOperation(f"linear: input of shape {list(shape)} does not end in K = {columns}")
    x = x.contiguous()
    int8 = may_quantize(policy, x.dtype)
    out = torch.empty((*shape[:-1], rows), dtype=x.dtype)
    bias_at, bias_dtype = 0, 0
    if bias is not None:
        bias = bias.contiguous()
        bias_at, bias_dtype = bias.data_ptr(), _DTYPE[bias.dtype]
    _native.linear(
        _isa,
        _FORMAT[format],
        *_addresses(planes),
        *geometry,
        x.data_ptr(),
        x.numel() // columns,
        out.data_ptr(),
        dtype,
        bias_at,
        bias_dtype,
        int8,
        _in_tiles(x, int8 and format not in _FLOATS_ONLY),
        torch.get_num_threads(),
    )
    return out


def linear_backward(grad: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int]) -> torch.Tensor:
    """`grad @ W` for grad [..., N] and W [N, K]: the gradient of `linear` in its activations, [..., K]."""
    matrix = Geometry(*geometry)
    if grad.dtype not in _DTYPE:
        return fallback.linear_backward(grad, planes, format, geometry)
    rows = grad.reshape(-1, matrix.rows).to(torch.float32).contiguous()
    total = torch.zeros((rows.shape[0], matrix.columns))
    step = max(1, fallback.CHUNK // max(matrix.columns, 1))
    for begin in range(0, matrix.rows, step):
        end = min(begin + step, matrix.rows)
        part, place = slice_rows(format, planes, matrix, begin, end)
        total.addmm_(rows[:, begin:end], dequantize(part, format, place, torch.float32))
    return total.to(grad.dtype).reshape(*grad.shape[:-1], matrix.columns)


def expert_linear(
    x: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], offsets: torch.Tensor, policy: str
) -> torch.Tensor:
    """`x[t] @ W[e].T` for tokens sorted by expert: x [T, K], W the bank [E*N, K], result [T, N].

    `offsets` int32 [E] are the cumulative ends of the experts' token ranges, as in `torch._grouped_mm`; tokens after the last
    are zero. Only experts that are hit are read.
    """
    dtype, columns, experts = _DTYPE.get(x.dtype), geometry[1], offsets.numel()
    if dtype is None or not columns:
        return fallback.expert_linear(x, planes, format, geometry, offsets, policy)
    if x.dim() != 2 or x.shape[1] != columns:
        raise UnsupportedOperation(f"expert_linear: input of shape {list(x.shape)}, expected [T, K] with K = {columns}")
    if not experts or geometry[0] % experts:
        raise UnsupportedOperation(f"expert_linear: {geometry[0]} rows are no bank of {experts} experts")
    x, ends = x.contiguous(), offsets.to(torch.int32).contiguous()
    out = torch.empty((x.shape[0], geometry[0] // experts), dtype=x.dtype)
    fine = _native.expert_linear(
        _isa,
        _FORMAT[format],
        *_addresses(planes),
        *geometry,
        x.data_ptr(),
        x.shape[0],
        ends.data_ptr(),
        experts,
        out.data_ptr(),
        dtype,
        may_quantize(policy, x.dtype),
        torch.get_num_threads(),
    )
    if not fine:
        raise UnsupportedOperation(f"expert_linear: offsets must ascend within 0..{x.shape[0]}, found {ends.tolist()}")
    return out


def expert_linear_backward(
    grad: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], offsets: torch.Tensor
) -> torch.Tensor:
    """`grad[t] @ W[e]`: the gradient of `expert_linear` in its activations, [T, K]."""
    bank, begin = Geometry(*geometry), 0
    rows = bank.rows // offsets.numel()
    out = grad.new_zeros((grad.shape[0], bank.columns))
    for expert, end in enumerate(offsets.tolist()):
        if end > begin:
            part, place = slice_rows(format, planes, bank, expert * rows, (expert + 1) * rows)
            out[begin:end] = linear_backward(grad[begin:end], part, format, place)
        begin = end
    return out
