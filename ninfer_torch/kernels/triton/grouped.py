# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Tile decoders of the grouped formats: row-split planes of base bytes, high bits and binary16 scales (spec/layouts.md 3)."""

from __future__ import annotations

import triton
import triton.language as tl

from ninfer_torch.kernels.triton.fields import (
    byte_field,
    field,
    half,
    joined_field,
    load_pair,
    load_u16,
    load_u32,
)
from ninfer_torch.kernels.triton.tiles import Lanes, register


@triton.jit
def _load_q4(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    groups = tl.cdiv(K, 128) * 2
    low, high = load_pair(p0 + row * (groups * 32), unit, 8, 0, 0, 0, keep, ALIGN)
    scale = load_u16(p1 + row * (groups * 2), unit // 4, 2, 0, 0, 0, keep, ALIGN)
    return low, high, scale


@triton.jit
def _code_q4(words, LANE: tl.constexpr):
    return byte_field(words[0], words[1], LANE % 8, 4 * (LANE // 8), 4, 8, 8)


@triton.jit
def _load_q5(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    groups = tl.cdiv(K, 128) * 2
    low, high = load_pair(p0 + row * (groups * 32), unit, 8, 0, 0, 0, keep, ALIGN)
    # A load no wider than the codes' keeps one layout of threads for both.
    tops = load_u32(p1 + row * (groups * 8), unit // 2, 4, 0, 0, 0, keep, ALIGN) >> (unit % 2 * 16).to(tl.uint32)
    scale = load_u16(p2 + row * (groups * 2), unit // 4, 2, 0, 0, 0, keep, ALIGN)
    return low, high, scale, tops


@triton.jit
def _code_q5(words, LANE: tl.constexpr):
    BYTE: tl.constexpr = LANE % 8
    COLUMN: tl.constexpr = 2 * BYTE + LANE // 8
    return joined_field(words[BYTE // 4], 8 * (BYTE % 4) + 4 * (LANE // 8), 4, words[3], COLUMN, 1, 16, 16)


@triton.jit
def _load_q6(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    groups = tl.cdiv(K, 128) * 2
    low, high = load_pair(p0 + row * (groups * 32), unit, 8, 0, 0, 0, keep, ALIGN)
    even, odd = load_pair(p1 + row * (groups * 16), unit // 2, 8, 0, 0, 0, keep, ALIGN)
    tops = tl.where(unit % 2 == 0, even, odd)
    scale = load_u16(p2 + row * (groups * 2), unit // 4, 2, 0, 0, 0, keep, ALIGN)
    return low, high, scale, tops


@triton.jit
def _code_q6(words, LANE: tl.constexpr):
    BYTE: tl.constexpr = LANE % 8
    COLUMN: tl.constexpr = 2 * BYTE + LANE // 8
    return joined_field(words[BYTE // 4], 8 * (BYTE % 4) + 4 * (LANE // 8), 4, words[3], 2 * COLUMN, 2, 32, 32)


@triton.jit
def _load_q8(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    groups = tl.cdiv(K, 128) * 4
    low, high = load_pair(p0 + row * (groups * 32), unit, 8, 0, 0, 0, keep, ALIGN)
    scale = load_u16(p1 + row * (groups * 2), unit // 4, 2, 0, 0, 0, keep, ALIGN)
    return low, high, scale


@triton.jit
def _code_q8(words, LANE: tl.constexpr):
    return byte_field(words[0], words[1], LANE, 0, 8, 128, 128)


@triton.jit
def _load_q2(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    groups = tl.cdiv(K, 128) * 2
    word = load_u32(p0 + row * (groups * 16), unit, 4, 0, 0, 0, keep, ALIGN)
    scale = load_u16(p1 + row * (groups * 2), unit // 4, 2, 0, 0, 0, keep, ALIGN)
    return word, word, scale


@triton.jit
def _code_q2(words, LANE: tl.constexpr):
    return field(words[0], 8 * (LANE % 4) + 2 * (LANE // 4), 2, 0, 1)


@triton.jit
def _load_t2(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    groups = tl.cdiv(K, 128)
    word = load_u32(p0 + row * (groups * 32), unit, 4, 0, 0, 0, keep, ALIGN)
    scale = load_u16(p1 + row * (groups * 2), unit // 8, 2, 0, 0, 0, keep, ALIGN)
    return word, word, scale


@triton.jit
def _code_t2(words, LANE: tl.constexpr):
    return field(words[0], 8 * (LANE % 4) + 2 * (LANE // 4), 2, 2, 2)


@triton.jit
def _scale(words, unit, SET: tl.constexpr):
    return half(words[2]), 0.0


register("q2_g64_fp16", "grouped", (_load_q2, _code_q2, _scale), Lanes.consecutive(4, 4), alignment=4)
register("t2_g128_fp16", "grouped", (_load_t2, _code_t2, _scale), Lanes.consecutive(4, 4), alignment=4)
register("q4_g64_fp16", "grouped", (_load_q4, _code_q4, _scale), Lanes.consecutive(8, 2), alignment=8)
register("q5_g64_fp16", "grouped", (_load_q5, _code_q5, _scale), Lanes.consecutive(8, 2), alignment=8)
register("q6_g64_fp16", "grouped", (_load_q6, _code_q6, _scale), Lanes.consecutive(8, 2), alignment=8)
register("q8_g32_fp16", "grouped", (_load_q8, _code_q8, _scale), Lanes.consecutive(8, 1), alignment=8)
