# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Tile decoder of nvfp4: E2M1 codes, swizzled E4M3FN scales, divisors by the row's place in the parent (spec/layouts.md 5)."""

from __future__ import annotations

import triton
import triton.language as tl

from ninfer_torch.kernels.triton.fields import e2m1, e4m3, load_pair, load_u8
from ninfer_torch.kernels.triton.tiles import Lanes, register


@triton.jit
def _load(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    low, high = load_pair(p0 + row * (K // 2), unit, 8, 0, 0, 0, keep, ALIGN)
    parent = row + row_begin
    lane = (parent % 128).to(tl.int32)
    tiles = p1 + (parent // 128) * (K // 64 * 512)
    scale = load_u8(tiles, unit // 4, 512, (lane % 32) * 16 + (lane // 32) * 4 + unit % 4, keep)
    divisor = tl.load(p2.to(tl.pointer_type(tl.float32), bitcast=True) + parent // run_rows)
    return low, high, scale, divisor


@triton.jit
def _code(words, LANE: tl.constexpr):
    BYTE: tl.constexpr = LANE % 8
    return e2m1(words[BYTE // 4], 8 * (BYTE % 4) + 4 * (LANE // 8))


@triton.jit
def _scale(words, unit, SET: tl.constexpr):
    return e4m3(words[2], 0), words[3]


register("nvfp4", "block_float", (_load, _code, _scale), Lanes.consecutive(8, 2), alignment=8, kind="divisor")
