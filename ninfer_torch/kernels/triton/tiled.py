# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Products with many activation rows: decoded tiles of W as the left operand of the tensor cores.

Lanes are not interleaved into matrix order. A lane of a tile of units is a [BLOCK_N, BLOCK_U] matrix by itself; it multiplies the
activations of its own columns, and the lanes' products add up. So that those activations are contiguous, `permute_kernel` first lays
x out as lane planes [lanes, rows, units], padded with zeros to whole blocks; with few rows the kernel reads x where it lies.

Weights are rounded to x's dtype (criterion A16T). With PAIRED the rounding's remainder is multiplied as well, which keeps bfloat16
within A16; float32 products are IEEE, never tf32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ninfer_torch.kernels.triton.tiles import first_column, offset_of, set_of


@triton.jit
def permute_kernel(
    out, x, M, K, x_row, x_column, rows, units,
    TILE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """out[lane, m, unit] = x[m, column of the lane of the unit], zero outside x; out is [lanes, rows, units]."""
    m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M))[:, None].to(tl.int64)
    unit = tl.program_id(1) * BLOCK_U + tl.arange(0, BLOCK_U)[None, :]
    column = first_column(unit, TILE)
    inside = (m < rows) & (unit < units)
    for lane in tl.static_range(TILE.bytes * TILE.fields):
        at = column + offset_of(lane, TILE)
        value = tl.load(x + m * x_row + at.to(tl.int64) * x_column, mask=(m < M) & (at < K), other=0.0)
        tl.store(out + (m + lane * rows.to(tl.int64)) * units + unit, value, mask=inside)


@triton.jit
def expert_tile(offsets, tile, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of the tile-th block of BLOCK_M rows, counted expert by expert, and the rows [first, end) left from the block's
    start to the expert's end. The expert is EXPERTS or more where there are fewer blocks.
    """
    index = tl.arange(0, EXPERTS_PADDED)
    ends = tl.load(offsets + index, mask=index < EXPERTS, other=0)
    begins = tl.load(offsets + index - 1, mask=(index > 0) & (index < EXPERTS), other=0)
    blocks = tl.where(index < EXPERTS, (ends - begins + BLOCK_M - 1) // BLOCK_M, 0)
    last_block = tl.cumsum(blocks, axis=0)
    expert = tl.sum((last_block <= tile).to(tl.int32), axis=0)
    mine = index == expert
    first = tl.sum(tl.where(mine, begins + (tile - last_block + blocks) * BLOCK_M, 0), axis=0)
    return expert, first, tl.sum(tl.where(mine, ends, 0), axis=0)


@triton.jit
def add_product(total, weight, x, PAIRED: tl.constexpr, WIDE: tl.constexpr):
    """total + weight @ x for a float32 weight tile and an activation tile, as the kernel's flags say."""
    if WIDE:
        return tl.dot(weight, x.to(tl.float32), total, input_precision="ieee")
    else:
        near = weight
        if PAIRED:  # cut to the eight significant bits of bfloat16, so that `near` is exact in x's dtype
            near = (weight.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
            total = tl.dot((weight - near).to(x.dtype), x, total, input_precision="ieee")
        return tl.dot(near.to(x.dtype), x, total, input_precision="ieee")


@triton.jit
def weight_of(words, unit, LANE: tl.constexpr, TILE: tl.constexpr):
    """The float32 weights of a lane; what depends on the scale set alone is computed once a set."""
    scale, extra = TILE.scale(words, unit, set_of(LANE, TILE))
    if TILE.kind == "divisor":
        return TILE.code(words, LANE) * (scale / extra)
    elif TILE.kind == "minimum":
        return TILE.code(words, LANE) * scale - extra
    else:
        return TILE.code(words, LANE) * scale


@triton.jit
def tiled_kernel(
    out, x, bias, offsets, plane0, plane1, plane2, table,
    M, N, K, x_row, x_column, rows, units, row_begin, run_rows, steps, steps_per_split,
    TILE: tl.constexpr, ALIGN: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr,
    PERMUTED: tl.constexpr, PAIRED: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """out[split, m, n] = sum over the split's columns of x[m] W[n] (+ bias[n]); out is [splits, M, N].

    With PERMUTED x is lane planes [lanes, rows, units] and x_row, x_column are unused. With EXPERTS W is a bank [EXPERTS * N, K],
    blocks of rows are cut expert by expert, and rows of no expert are left as they are.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    row = tl.minimum(n, N - 1).to(tl.int64)[:, None]
    first_step, last_step = split * steps_per_split, tl.minimum((split + 1) * steps_per_split, steps)
    if EXPERTS > 0:
        expert, first_m, end_m = expert_tile(offsets, tl.program_id(1), EXPERTS, EXPERTS_PADDED, BLOCK_M)
        row += tl.minimum(expert, EXPERTS - 1).to(tl.int64) * N
        last_step = tl.where(expert < EXPERTS, last_step, first_step)
    else:
        first_m, end_m = tl.program_id(1) * BLOCK_M, M
    m = (first_m + tl.arange(0, BLOCK_M)[None, :]).to(tl.int64)
    plane0 = plane0.to(tl.pointer_type(tl.uint8), bitcast=True)
    plane1 = plane1.to(tl.pointer_type(tl.uint8), bitcast=True)
    plane2 = plane2.to(tl.pointer_type(tl.uint8), bitcast=True)
    if PERMUTED:
        x_rows = x + m * units
    else:
        x_rows = x + tl.minimum(m, M - 1) * x_row

    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for step in range(first_step, last_step):
        start = step * BLOCK_U
        unit = start + tl.arange(0, BLOCK_U)[None, :]
        keep = None if EVEN else first_column(unit, TILE) < K
        words = TILE.load(plane0, plane1, plane2, table, row, unit, K, row_begin, run_rows, keep, ALIGN)
        x_unit = start + tl.arange(0, BLOCK_U)[:, None]
        for lane in tl.static_range(TILE.bytes * TILE.fields):
            if PERMUTED:
                value = tl.load(x_rows + (lane * rows.to(tl.int64) * units + x_unit))
            else:
                at = first_column(x_unit, TILE) + offset_of(lane, TILE)
                value = (
                    tl.load(x_rows + at * x_column) if EVEN else tl.load(x_rows + at * x_column, mask=at < K, other=0.0)
                )
            total = add_product(total, weight_of(words, unit, lane, TILE), value, PAIRED, WIDE)

    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    target = out + (split.to(tl.int64) * M + m) * N + n[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=(n[:, None] < N) & (m < end_m))


@triton.jit
def backward_kernel(
    out, grad, offsets, plane0, plane1, plane2, table,
    M, N, K, grad_row, grad_column, row_begin, run_rows,
    TILE: tl.constexpr, ALIGN: tl.constexpr, EVEN: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """out[m, k] = sum over n of grad[m, n] W[n, k]: one accumulator a lane, blocks of rows as in `tiled_kernel`."""
    unit = tl.program_id(0) * BLOCK_U + tl.arange(0, BLOCK_U)[None, :]
    column = first_column(unit, TILE)
    keep = None if EVEN else column < K
    expert_row = tl.zeros((1,), tl.int64)
    end_n = N
    if EXPERTS > 0:
        expert, first_m, end_m = expert_tile(offsets, tl.program_id(1), EXPERTS, EXPERTS_PADDED, BLOCK_M)
        expert_row += tl.minimum(expert, EXPERTS - 1).to(tl.int64) * N
        end_n = tl.where(expert < EXPERTS, N, 0)
    else:
        first_m, end_m = tl.program_id(1) * BLOCK_M, M
    m = (first_m + tl.arange(0, BLOCK_M)[:, None]).to(tl.int64)
    plane0 = plane0.to(tl.pointer_type(tl.uint8), bitcast=True)
    plane1 = plane1.to(tl.pointer_type(tl.uint8), bitcast=True)
    plane2 = plane2.to(tl.pointer_type(tl.uint8), bitcast=True)

    lanes: tl.constexpr = TILE.bytes * TILE.fields
    totals = ()
    for _ in tl.static_range(lanes):
        totals = totals + (tl.zeros((BLOCK_M, BLOCK_U), tl.float32),)
    for first_n in range(0, end_n, BLOCK_N):
        n = first_n + tl.arange(0, BLOCK_N)
        row = tl.minimum(n, N - 1).to(tl.int64)[:, None] + expert_row[:, None]
        words = TILE.load(plane0, plane1, plane2, table, row, unit, K, row_begin, run_rows, keep, ALIGN)
        value = tl.load(
            grad + m * grad_row + n[None, :].to(tl.int64) * grad_column, mask=(m < end_m) & (n[None, :] < N), other=0.0
        )
        new_totals = ()
        for lane in tl.static_range(lanes):
            weight = weight_of(words, unit, lane, TILE)
            if WIDE:
                total = tl.dot(value.to(tl.float32), weight, totals[lane], input_precision="ieee")
            else:
                total = tl.dot(value, weight.to(value.dtype), totals[lane], input_precision="ieee")
            new_totals = new_totals + (total,)
        totals = new_totals
    for lane in tl.static_range(lanes):
        at = column + offset_of(lane, TILE)
        tl.store(out + m * K + at, totals[lane].to(out.dtype.element_ty), mask=(m < end_m) & (at < K))
