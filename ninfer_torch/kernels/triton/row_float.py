# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Tile decoders of fp8 rows: E4M3FN codes with one scale a row, in two planes or in records (spec/layouts.md 6, 7)."""

from __future__ import annotations

import triton
import triton.language as tl

from ninfer_torch.kernels.triton.fields import brain, e4m3, fetch, half, load_pair, load_u16
from ninfer_torch.kernels.triton.tiles import Lanes, register


@triton.jit
def _load_codes(row_start, unit, K, keep, ALIGN: tl.constexpr):
    """Eight codes of a row. ALIGN 1 stands for any K: the last unit can be cut short, so its bytes are loaded one by one."""
    if ALIGN == 1:
        low = tl.zeros([row_start.shape[0], unit.shape[1]], tl.uint32)
        high = low
        for byte in tl.static_range(4):
            low |= fetch(row_start + (unit * 8 + byte), unit * 8 + byte < K).to(tl.uint32) << (8 * byte)
            high |= fetch(row_start + (unit * 8 + byte + 4), unit * 8 + byte + 4 < K).to(tl.uint32) << (8 * byte)
        return low, high
    else:
        return load_pair(row_start, unit, 8, 0, 0, 0, keep, ALIGN)


@triton.jit
def _load_split(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    low, high = _load_codes(p0 + row * K, unit, K, keep, ALIGN)
    return low, high, load_u16(p1, row, 2, 0, 0, 0, None, ALIGN)


@triton.jit
def _load_records(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    record = p0 + row * (K + 2)
    low, high = _load_codes(record, unit, K, keep, ALIGN)
    return low, high, load_u16(record + K, 0, 2, 0, 0, 0, None, ALIGN)


@triton.jit
def _code(words, LANE: tl.constexpr):
    return e4m3(words[LANE // 4], LANE % 4)


@triton.jit
def _scale_bf16(words, unit, SET: tl.constexpr):
    return brain(words[2]), 0.0


@triton.jit
def _scale_fp16(words, unit, SET: tl.constexpr):
    return half(words[2]), 0.0


register(
    "fp8_e4m3fn_row_bf16",
    "row_float",
    (_load_split, _code, _scale_bf16),
    Lanes.consecutive(8, 1),
    alignment=8,
    row_extra=0,
)
register(
    "fp8_e4m3fn_row_fp16",
    "row_float",
    (_load_records, _code, _scale_fp16),
    Lanes.consecutive(8, 1),
    alignment=8,
    row_extra=2,
)
