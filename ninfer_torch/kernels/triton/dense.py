# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Rows of a quantized matrix as dense values: dequantize, and embedding, which takes them in any order.

Exact: launched with `enable_fp_fusion=False`, every product, difference and quotient is one correctly rounded binary32 operation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ninfer_torch.kernels.triton.tiles import first_column, offset_of, set_of


@triton.jit
def reconstruct(code, scale, extra, KIND: tl.constexpr):
    """The exact value of a code, rounded after every operation."""
    if KIND == "divisor":
        return tl.div_rn(code * scale, extra)
    elif KIND == "minimum":
        return code * scale - extra
    else:
        return code * scale


@triton.jit
def rows_kernel(
    out, ids, plane0, plane1, plane2, table,
    count, N, K, row_begin, run_rows,
    TILE: tl.constexpr, ALIGN: tl.constexpr, EVEN: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """out[i] = W[i], or W[ids[i]] (NaN where an id lies outside the matrix), for i < count; out is [count, K]."""
    index = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    stored = index < count
    if GATHER:
        row = tl.load(ids + index, mask=stored, other=0).to(tl.int64)
        inside = (row >= 0) & (row < N)
        row = tl.where(inside, row, 0)
    else:
        row = tl.where(stored, index, 0)
    unit = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)[None, :]
    column = first_column(unit, TILE)
    words = TILE.load(
        plane0.to(tl.pointer_type(tl.uint8), bitcast=True),
        plane1.to(tl.pointer_type(tl.uint8), bitcast=True),
        plane2.to(tl.pointer_type(tl.uint8), bitcast=True),
        table, row, unit, K, row_begin, run_rows, None if EVEN else column < K, ALIGN,
    )  # fmt: skip
    for lane in tl.static_range(TILE.bytes * TILE.fields):
        scale, extra = TILE.scale(words, unit, set_of(lane, TILE))
        value = reconstruct(TILE.code(words, lane), scale, extra, TILE.kind)
        if GATHER:
            value = tl.where(inside, value, float("nan"))
        at = column + offset_of(lane, TILE)
        tl.store(out + index * K + at, value.to(out.dtype.element_ty), mask=stored & (at < K))
