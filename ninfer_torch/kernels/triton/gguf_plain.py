# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Tile decoders of ggml's plain blocks: one binary16 scale for 32 or 64 codes, and the codebook of iq4_nl and iq4_xs.

Source of the fields: spec/layouts.md 8; of the arithmetic: `kernels.reference_gguf`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ninfer_torch.kernels.grids import grid
from ninfer_torch.kernels.triton.fields import byte_field, field, half, joined_field, load_pair, load_u16, load_u32
from ninfer_torch.kernels.triton.tiles import Lanes, register


@triton.jit
def _load_q4_0(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block = p0 + row * (K // 32 * 18), unit // 2
    low, high = load_pair(base, block, 18, 2, unit % 2, 8, keep, ALIGN)
    return low, high, load_u16(base, block, 18, 0, 0, 0, keep, ALIGN)


@triton.jit
def _code_q4_0(words, LANE: tl.constexpr):
    return byte_field(words[0], words[1], LANE % 8, 4 * (LANE // 8), 4, 0, 8)


@triton.jit
def _load_q5_0(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block = p0 + row * (K // 32 * 22), unit // 2
    low, high = load_pair(base, block, 22, 6, unit % 2, 8, keep, ALIGN)
    tops = load_u32(base, block, 22, 2, 0, 0, keep, ALIGN) >> (unit % 2 * 8).to(tl.uint32)
    return low, high, load_u16(base, block, 22, 0, 0, 0, keep, ALIGN), tops


@triton.jit
def _code_q5_0(words, LANE: tl.constexpr):
    BYTE: tl.constexpr = LANE % 8
    NIBBLE: tl.constexpr = LANE // 8
    return joined_field(words[BYTE // 4], 8 * (BYTE % 4) + 4 * NIBBLE, 4, words[3], 16 * NIBBLE + BYTE, 1, 0, 16)


@triton.jit
def _load_q8_0(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block = p0 + row * (K // 32 * 34), unit // 4
    low, high = load_pair(base, block, 34, 2, unit % 4, 8, keep, ALIGN)
    return low, high, load_u16(base, block, 34, 0, 0, 0, keep, ALIGN)


@triton.jit
def _code_q8_0(words, LANE: tl.constexpr):
    return byte_field(words[0], words[1], LANE, 0, 8, 128, 128)


@triton.jit
def _load_q2_0(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block = p0 + row * (K // 64 * 18), unit // 4
    word = load_u32(base, block, 18, 2, unit % 4, 4, keep, ALIGN)
    return word, word, load_u16(base, block, 18, 0, 0, 0, keep, ALIGN)


@triton.jit
def _code_q2_0(words, LANE: tl.constexpr):
    return field(words[0], 8 * (LANE % 4) + 2 * (LANE // 4), 2, 0, 1)


@triton.jit
def _scale(words, unit, SET: tl.constexpr):
    return half(words[2]), 0.0


def _nibble_pairs(device: torch.device) -> torch.Tensor:
    """For each byte the codebook entries of its two nibbles, each plus 128, the low nibble's in the low byte: int16 [256]."""
    values = grid("iq4_nl").flatten().to(torch.int32) + 128
    pairs = torch.arange(256)
    words = values[pairs & 15] | values[pairs >> 4] << 8
    return words.to(torch.int16).to(device)


@triton.jit
def _pairs(table, low, high):
    """The codes of eight bytes of nibbles, two to a word."""
    pairs = ()
    for byte in tl.static_range(8):
        index = ((low if byte < 4 else high) >> (8 * (byte % 4))) & 255
        pairs = pairs + (tl.load(table.to(tl.pointer_type(tl.uint16), bitcast=True) + index).to(tl.uint32),)
    return pairs


@triton.jit
def _load_iq4_nl(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block = p0 + row * (K // 32 * 18), unit // 2
    low, high = load_pair(base, block, 18, 2, unit % 2, 8, keep, ALIGN)
    return _pairs(table, low, high) + (load_u16(base, block, 18, 0, 0, 0, keep, ALIGN),)


@triton.jit
def _load_iq4_xs(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block = p0 + row * (K // 256 * 136), unit // 16
    low, high = load_pair(base, block, 136, 8, unit % 16, 8, keep, ALIGN)
    head = load_u32(base, block, 136, 0, 0, 0, keep, ALIGN)
    return _pairs(table, low, high) + (head, load_u32(base, block, 136, 4, 0, 0, keep, ALIGN))


@triton.jit
def _code_pair(words, LANE: tl.constexpr):
    return field(words[LANE % 8], 8 * (LANE // 8), 8, 0, 128)


@triton.jit
def _scale_iq4_nl(words, unit, SET: tl.constexpr):
    return half(words[8]), 0.0


@triton.jit
def _scale_iq4_xs(words, unit, SET: tl.constexpr):
    """The scale of 32 columns: four low bits in scales_l, two high ones in scales_h, less 32."""
    part = (unit % 16 // 2).to(tl.uint32)
    code = ((words[9] >> (4 * part)) & 15) | (((words[8] >> (16 + 2 * part)) & 3) << 4)
    return half(words[8]) * field(code, 0, 6, 0, 32), 0.0


_FAMILY = "gguf_plain"
register(
    "gguf_q4_0",
    _FAMILY,
    (_load_q4_0, _code_q4_0, _scale),
    Lanes(8, 2, 16, 1, run=2),
    alignment=2,
)
register(
    "gguf_q5_0",
    _FAMILY,
    (_load_q5_0, _code_q5_0, _scale),
    Lanes(8, 2, 16, 1, run=2),
    alignment=2,
)
register("gguf_q8_0", _FAMILY, (_load_q8_0, _code_q8_0, _scale), Lanes.consecutive(8, 1), alignment=2)
register("gguf_q2_0", _FAMILY, (_load_q2_0, _code_q2_0, _scale), Lanes.consecutive(4, 4), alignment=2)
register(
    "gguf_iq4_nl",
    _FAMILY,
    (_load_iq4_nl, _code_pair, _scale_iq4_nl),
    Lanes(8, 2, 16, 1, run=2),
    alignment=2,
    table=_nibble_pairs,
)
register(
    "gguf_iq4_xs",
    _FAMILY,
    (_load_iq4_xs, _code_pair, _scale_iq4_xs),
    Lanes(8, 2, 16, 1, run=2),
    alignment=8,
    table=_nibble_pairs,
)
