# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Tile decoders of ggml's K-quants: 256 codes, small integer scales (and minima) under binary16 super scales.

Source of the fields: spec/layouts.md 8; of the arithmetic: `kernels.reference_gguf`. In every block a run of 32 code bytes covers
columns at distance 32: field f of byte l is column 32 f + l of the run, so each field of a unit has a scale of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ninfer_torch.kernels.triton.fields import byte_field, field, half, joined_field, load_pair, load_u16, load_u32
from ninfer_torch.kernels.triton.tiles import Lanes, register

# q4_k and q5_k: units of 8 bytes, four to a run of 64 columns


@triton.jit
def _scale_and_minimum(words, unit, SET: tl.constexpr):
    """d * scale and dmin * minimum of sub-block 2 * run + SET, their 6-bit codes from the block's 12 packed bytes."""
    part = (unit % 16 // 4 * 2 + SET).to(tl.uint32)
    shift, late = part % 4 * 8, part >= 4
    first, second, third = words[3] >> shift, words[4] >> shift, words[5] >> shift
    scale = tl.where(late, (third & 15) | ((first >> 2) & 48), first & 63)
    minimum = tl.where(late, ((third >> 4) & 15) | ((second >> 2) & 48), second & 63)
    return half(words[2]) * field(scale, 0, 6, 0, 0), half(words[2] >> 16) * field(minimum, 0, 6, 0, 0)


@triton.jit
def _load_header(base, block, BYTES: tl.constexpr, keep, ALIGN: tl.constexpr):
    """d and dmin in one word, then the twelve bytes of scales and minima in three."""
    return (
        load_u32(base, block, BYTES, 0, 0, 0, keep, ALIGN),
        load_u32(base, block, BYTES, 4, 0, 0, keep, ALIGN),
        load_u32(base, block, BYTES, 8, 0, 0, keep, ALIGN),
        load_u32(base, block, BYTES, 12, 0, 0, keep, ALIGN),
    )


@triton.jit
def _load_q4_k(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block = p0 + row * (K // 256 * 144), unit // 16
    low, high = load_pair(base, block, 144, 16, unit % 16, 8, keep, ALIGN)
    return (low, high) + _load_header(base, block, 144, keep, ALIGN)


@triton.jit
def _code_q4_k(words, LANE: tl.constexpr):
    return byte_field(words[0], words[1], LANE % 8, 4 * (LANE // 8), 4, 0, 0)


@triton.jit
def _load_q5_k(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block = p0 + row * (K // 256 * 176), unit // 16
    low, high = load_pair(base, block, 176, 48, unit % 16, 8, keep, ALIGN)
    tops_low, tops_high = load_pair(base, block, 176, 16, unit % 4, 8, keep, ALIGN)
    run = (unit % 16 // 4 * 2).to(tl.uint32)
    return (low, high) + _load_header(base, block, 176, keep, ALIGN) + (tops_low >> run, tops_high >> run)


@triton.jit
def _code_q5_k(words, LANE: tl.constexpr):
    BYTE: tl.constexpr = LANE % 8
    AT: tl.constexpr = 8 * (BYTE % 4)
    return joined_field(words[BYTE // 4], AT + 4 * (LANE // 8), 4, words[6 + BYTE // 4], AT + LANE // 8, 1, 0, 0)


# q2_k, q3_k and q6_k: units of 4 bytes, eight to a run of 128 columns, a scale for 16 columns


@triton.jit
def _scale_shift(unit, SET: tl.constexpr):
    """Bit of the scale byte of field SET inside the word of two fields' scale bytes."""
    return (unit % 8 // 4 * 8 + SET % 2 * 16).to(tl.uint32)


@triton.jit
def _load_q2_k(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block = p0 + row * (K // 256 * 84), unit // 16
    half_block = unit % 16 // 8
    return (
        load_u32(base, block, 84, 16, unit % 16, 4, keep, ALIGN),
        load_u32(base, block, 84, 80, 0, 0, keep, ALIGN),
        load_u32(base, block, 84, 0, half_block, 8, keep, ALIGN),
        load_u32(base, block, 84, 4, half_block, 8, keep, ALIGN),
    )


@triton.jit
def _code_q2_k(words, LANE: tl.constexpr):
    return field(words[0], 8 * (LANE % 4) + 2 * (LANE // 4), 2, 0, 0)


@triton.jit
def _scale_q2_k(words, unit, SET: tl.constexpr):
    packed = words[2 + SET // 2] >> _scale_shift(unit, SET)
    return half(words[1]) * field(packed, 0, 4, 0, 0), half(words[1] >> 16) * field(packed, 4, 4, 0, 0)


@triton.jit
def _load_q3_k(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block = p0 + row * (K // 256 * 110), unit // 16
    mask = load_u32(base, block, 110, 0, unit % 8, 4, keep, ALIGN)
    return (
        load_u32(base, block, 110, 32, unit % 16, 4, keep, ALIGN),
        mask >> (unit % 16 // 8 * 4).to(tl.uint32),
        load_u32(base, block, 110, 96, 0, 0, keep, ALIGN),
        load_u32(base, block, 110, 100, 0, 0, keep, ALIGN),
        load_u32(base, block, 110, 104, 0, 0, keep, ALIGN),
        load_u16(base, block, 110, 108, 0, 0, keep, ALIGN),
    )


@triton.jit
def _code_q3_k(words, LANE: tl.constexpr):
    AT: tl.constexpr = 8 * (LANE % 4)
    return joined_field(words[0], AT + 2 * (LANE // 4), 2, words[1], AT + LANE // 4, 1, 0, 4)


@triton.jit
def _scale_q3_k(words, unit, SET: tl.constexpr):
    """Scale 8 n + 2 SET + i of a block: its four low bits in nibble n of byte 2 SET + i, two high ones in the last word."""
    half_block = (unit % 16 // 8).to(tl.uint32)
    shift = _scale_shift(unit, SET)
    low = (words[2 + SET // 2] >> (shift + 4 * half_block)) & 15
    high = (words[4] >> (shift + 4 * half_block + SET // 2 * 2)) & 3
    return half(words[5]) * field(low | high << 4, 0, 6, 0, 32), 0.0


@triton.jit
def _load_q6_k(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block = p0 + row * (K // 256 * 210), unit // 16
    half_block = unit % 16 // 8
    item = half_block * 16 + unit % 8
    return (
        load_u32(base, block, 210, 0, item, 4, keep, ALIGN),
        load_u32(base, block, 210, 32, item, 4, keep, ALIGN),
        load_u32(base, block, 210, 128, unit % 16, 4, keep, ALIGN),
        load_u32(base, block, 210, 192, half_block, 8, keep, ALIGN),
        load_u32(base, block, 210, 196, half_block, 8, keep, ALIGN),
        load_u16(base, block, 210, 208, 0, 0, keep, ALIGN),
    )


@triton.jit
def _code_q6_k(words, LANE: tl.constexpr):
    """Columns 0 to 63 of a run of 128 have the low nibbles of its 64 bytes, columns 64 to 127 the high ones."""
    FIELD: tl.constexpr = LANE // 4
    AT: tl.constexpr = 8 * (LANE % 4)
    return joined_field(words[FIELD % 2], AT + 4 * (FIELD // 2), 4, words[2], AT + 2 * FIELD, 2, 0, 32)


@triton.jit
def _scale_q6_k(words, unit, SET: tl.constexpr):
    return half(words[5]) * field(words[3 + SET // 2] >> _scale_shift(unit, SET), 0, 8, 128, 128), 0.0


_FAMILY = "gguf_k"
_EIGHTS = Lanes(8, 2, 32, 1, run=4, sets=2)
_FOURS = Lanes(4, 4, 32, 1, run=8, sets=4)

register("gguf_q2_k", _FAMILY, (_load_q2_k, _code_q2_k, _scale_q2_k), _FOURS, alignment=4, kind="minimum")
register("gguf_q3_k", _FAMILY, (_load_q3_k, _code_q3_k, _scale_q3_k), _FOURS, alignment=2)
register("gguf_q4_k", _FAMILY, (_load_q4_k, _code_q4_k, _scale_and_minimum), _EIGHTS, alignment=8, kind="minimum")
register("gguf_q5_k", _FAMILY, (_load_q5_k, _code_q5_k, _scale_and_minimum), _EIGHTS, alignment=8, kind="minimum")
register("gguf_q6_k", _FAMILY, (_load_q6_k, _code_q6_k, _scale_q6_k), _FOURS, alignment=2)
