# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Products with few activation rows, bound by the bytes of the weight: float32 multiply-adds on codes as they leave the words.

A program owns BLOCK_N rows of W and BLOCK_M rows of x; its threads lie along K, so that loads of code words are wide and the sum over
K is reduced once, at the end. Scales multiply sums of whole units instead of weights, and minima the sums of x beneath them. Criterion
A16: products of exact codes and activations, summed in float32. Any strides of x; no permuted copy of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ninfer_torch.kernels.triton.tiles import first_column, offset_of


@triton.jit
def expert_of(offsets, token, EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr):
    """The expert of a token: how many experts' ranges end at or before it. EXPERTS for a token after the last range."""
    expert = tl.arange(0, EXPERTS_PADDED)
    ends = tl.load(offsets + expert, mask=expert < EXPERTS, other=2147483647)
    return tl.sum((ends <= token).to(tl.int32), axis=0)


@triton.jit
def zeros_for(COUNT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr):
    """A tuple of COUNT float32 zero tiles."""
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros((BLOCK_N, BLOCK_U), tl.float32),)
    return tiles


@triton.jit
def small_m_kernel(
    out, x, bias, offsets, plane0, plane1, plane2, table,
    M, N, K, x_row, x_column, row_begin, run_rows, steps, steps_per_split,
    TILE: tl.constexpr, ALIGN: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_U: tl.constexpr,
):  # fmt: skip
    """out[split, m, n] = sum over the split's columns of x[m] W[n] (+ bias[n]); out is [splits, M, N].

    With EXPERTS, BLOCK_M is 1, W is a bank [EXPERTS * N, K] and row m takes its expert's matrix; a row of no expert is zero.
    """
    first_row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first_m = tl.program_id(1) * BLOCK_M
    split = tl.program_id(2)
    row = tl.minimum(first_row, N - 1).to(tl.int64)[:, None]
    owned = True
    if EXPERTS > 0:
        expert = expert_of(offsets, first_m, EXPERTS, EXPERTS_PADDED)
        owned = expert < EXPERTS
        row += tl.minimum(expert, EXPERTS - 1).to(tl.int64) * N
    plane0 = plane0.to(tl.pointer_type(tl.uint8), bitcast=True)
    plane1 = plane1.to(tl.pointer_type(tl.uint8), bitcast=True)
    plane2 = plane2.to(tl.pointer_type(tl.uint8), bitcast=True)

    lanes: tl.constexpr = TILE.bytes * TILE.fields
    lanes_per_set: tl.constexpr = lanes // TILE.sets
    totals = zeros_for(BLOCK_M, BLOCK_N, BLOCK_U)
    for step in range(split * steps_per_split, tl.minimum((split + 1) * steps_per_split, steps)):
        unit = step * BLOCK_U + tl.arange(0, BLOCK_U)[None, :]
        column = first_column(unit, TILE)
        keep = None if EVEN else column < K
        words = TILE.load(plane0, plane1, plane2, table, row, unit, K, row_begin, run_rows, keep, ALIGN)
        for s in tl.static_range(TILE.sets):
            sums = zeros_for(BLOCK_M, BLOCK_N, BLOCK_U)
            plain_sums = zeros_for(BLOCK_M, 1, BLOCK_U)
            for i in tl.static_range(lanes_per_set):
                code = TILE.code(words, s * lanes_per_set + i)
                at = column + offset_of(s * lanes_per_set + i, TILE)
                new_sums = ()
                new_plain = ()
                for m in tl.static_range(BLOCK_M):
                    x_pointer = x + tl.minimum(first_m + m, M - 1).to(tl.int64) * x_row + at * x_column
                    value = tl.load(x_pointer) if EVEN else tl.load(x_pointer, mask=at < K, other=0.0)
                    value = value.to(tl.float32)
                    new_sums = new_sums + (sums[m] + code * value,)
                    new_plain = new_plain + (plain_sums[m] + value,)
                sums = new_sums
                plain_sums = new_plain
            scale, extra = TILE.scale(words, unit, s)
            if TILE.kind == "divisor":
                scale = scale / extra
            new_totals = ()
            for m in tl.static_range(BLOCK_M):
                total = totals[m] + scale * sums[m]
                if TILE.kind == "minimum":
                    total -= extra * plain_sums[m]
                new_totals = new_totals + (total,)
            totals = new_totals

    for m in tl.static_range(BLOCK_M):
        y = tl.sum(totals[m], axis=1)
        if HAS_BIAS:
            y += tl.load(bias + first_row, mask=first_row < N, other=0.0).to(tl.float32)
        if EXPERTS > 0:
            y = tl.where(owned, y, 0.0)
        target = out + (split.to(tl.int64) * M + first_m + m) * N + first_row
        width = tl.where(first_m + m < M, N, 0)
        tl.store(target, y.to(out.dtype.element_ty), mask=first_row < width)


@triton.jit
def reduce_kernel(out, partials, bias, count, N, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """out = the sum of partials [SPLITS, count] in ascending order (+ bias [N], repeated)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    source = partials + at
    for _ in range(SPLITS):
        total += tl.load(source, mask=at < count, other=0.0)
        source += count
    if HAS_BIAS:
        total += tl.load(bias + at % N, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)
