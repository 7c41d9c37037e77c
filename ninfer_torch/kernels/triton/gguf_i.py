# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Tile decoders of ggml's codebook formats: an index into a grid gives eight (or twice four) values, a bit each their signs.

Source of the fields: spec/layouts.md 8; of the arithmetic: `kernels.reference_gguf`; of the grids: `kernels.grids`. A unit is eight
columns. Grid entries are loaded as words of four bytes; signs are applied to four bytes at once.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from ninfer_torch.kernels.grids import grid
from ninfer_torch.kernels.triton.fields import byte_field, field, half, load_pair, load_u8, load_u16, load_u32
from ninfer_torch.kernels.triton.tiles import Lanes, register


def _grid(name: str, device: torch.device) -> torch.Tensor:
    return grid(name, device)


@triton.jit
def _eight(table, index):
    """Grid entries of eight bytes."""
    wide = tl.load(table.to(tl.pointer_type(tl.uint64), bitcast=True) + index)
    return wide.to(tl.uint32), (wide >> 32).to(tl.uint32)


@triton.jit
def _four(table, index):
    """Grid entries of four bytes."""
    return tl.load(table.to(tl.pointer_type(tl.uint32), bitcast=True) + index)


@triton.jit
def _signed(magnitudes, signs):
    """Four bytes of magnitude (1 to 127) with the sign bits 0 to 3 of `signs`, each plus 128: bytes that never carry."""
    spread = ((signs & 15) * 0x00204081) & 0x01010101
    return ((magnitudes ^ 0x80808080) ^ (spread * 255)) + spread


@triton.jit
def _even(signs):
    """Seven sign bits (above them anything) and the eighth that makes their number even."""
    seven = signs & 127
    parity = seven ^ (seven >> 4)
    parity = parity ^ (parity >> 2)
    parity = (parity ^ (parity >> 1)) & 1
    return seven | parity << 7


@triton.jit
def _code(words, LANE: tl.constexpr):
    return byte_field(words[0], words[1], LANE, 0, 8, 0, 128)


# Magnitudes and signs: iq2 and iq3


@triton.jit
def _load_iq2_xxs(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block, part = p0 + row * (K // 256 * 66), unit // 32, unit % 32 // 4
    low, high = _eight(table, load_u8(base, block, 66, part * 8 + unit % 4 + 2, keep))
    packed = load_u32(base, block, 66, 6, part, 8, keep, ALIGN)
    signs = _even(packed >> (unit % 4 * 7).to(tl.uint32))
    d = load_u16(base, block, 66, 0, 0, 0, keep, ALIGN)
    return _signed(low, signs), _signed(high, signs >> 4), d, packed >> 28


@triton.jit
def _load_iq2_xs(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block = p0 + row * (K // 256 * 74), unit // 32
    word = load_u16(base, block, 74, 2, unit % 32, 2, keep, ALIGN)
    low, high = _eight(table, word & 511)
    signs = _even(word >> 9)
    scale = load_u8(base, block, 74, unit % 32 // 4 + 66, keep) >> (unit % 4 // 2 * 4).to(tl.uint32)
    return _signed(low, signs), _signed(high, signs >> 4), load_u16(base, block, 74, 0, 0, 0, keep, ALIGN), scale


@triton.jit
def _load_iq2_s(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block, item = p0 + row * (K // 256 * 82), unit // 32, unit % 32
    top = load_u8(base, block, 82, item // 4 + 66, keep) >> (item % 4 * 2).to(tl.uint32)
    low, high = _eight(table, load_u8(base, block, 82, item + 2, keep) | (top & 3) << 8)
    signs = load_u8(base, block, 82, item + 34, keep)
    scale = load_u8(base, block, 82, item // 4 + 74, keep) >> (item % 4 // 2 * 4).to(tl.uint32)
    return _signed(low, signs), _signed(high, signs >> 4), load_u16(base, block, 82, 0, 0, 0, keep, ALIGN), scale


@triton.jit
def _load_iq3_xxs(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block, item = p0 + row * (K // 256 * 98), unit // 32, unit % 32
    indices = load_u16(base, block, 98, 2, item, 2, keep, ALIGN)
    packed = load_u32(base, block, 98, 66, item // 4, 4, keep, ALIGN)
    signs = _even(packed >> (item % 4 * 7).to(tl.uint32))
    low, high = _four(table, indices & 255), _four(table, indices >> 8)
    d = load_u16(base, block, 98, 0, 0, 0, keep, ALIGN)
    return _signed(low, signs), _signed(high, signs >> 4), d, packed >> 28


@triton.jit
def _load_iq3_s(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block, item = p0 + row * (K // 256 * 110), unit // 32, unit % 32
    indices = load_u16(base, block, 110, 2, item, 2, keep, ALIGN)
    tops = load_u8(base, block, 110, item // 4 + 66, keep) >> (item % 4 * 2).to(tl.uint32)
    low = _four(table, (indices & 255) | (tops & 1) << 8)
    high = _four(table, (indices >> 8) | (tops & 2) << 7)
    signs = load_u8(base, block, 110, item + 74, keep)
    scale = load_u8(base, block, 110, item // 8 + 106, keep) >> (item % 8 // 4 * 4).to(tl.uint32)
    return _signed(low, signs), _signed(high, signs >> 4), load_u16(base, block, 110, 0, 0, 0, keep, ALIGN), scale


@triton.jit
def _quarter_steps(words, unit, SET: tl.constexpr):
    return half(words[2]) * (field(words[3], 0, 4, 0, 0) + 0.5) * 0.25, 0.0


@triton.jit
def _half_steps(words, unit, SET: tl.constexpr):
    return half(words[2]) * (field(words[3], 0, 4, 0, 0) + 0.5) * 0.5, 0.0


@triton.jit
def _odd_nibble(words, unit, SET: tl.constexpr):
    return half(words[2]) * (2.0 * field(words[3], 0, 4, 0, 0) + 1.0), 0.0


# Ternary points moved by one eighth: iq1


@triton.jit
def _shifted_points(table, index, negative):
    """Points of the grid as signed bytes, and the shift of all eight."""
    low, high = _eight(table, index)
    return low, high, 0.125 - 0.25 * field(negative, 0, 1, 0, 0)


@triton.jit
def _load_iq1_s(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    base, block, item = p0 + row * (K // 256 * 50), unit // 32, unit % 32
    word = load_u16(base, block, 50, 34, item // 4, 2, keep, ALIGN)
    top = (word >> (item % 4 * 3).to(tl.uint32)) & 7
    low, high, shift = _shifted_points(table, load_u8(base, block, 50, item + 2, keep) | top << 8, word >> 15)
    return low, high, load_u16(base, block, 50, 0, 0, 0, keep, ALIGN), word >> 12, shift


@triton.jit
def _load_iq1_m(p0, p1, p2, table, row, unit, K, row_begin, run_rows, keep, ALIGN: tl.constexpr):
    """The super scale's nibbles, lowest first, are the top nibbles of the four scale words."""
    base, block, item = p0 + row * (K // 256 * 56), unit // 32, unit % 32
    flags = load_u8(base, block, 56, item // 2 + 32, keep) >> (item % 2 * 4).to(tl.uint32)
    low, high, shift = _shifted_points(table, load_u8(base, block, 56, item, keep) | (flags & 7) << 8, flags >> 3)
    first, second = load_pair(base, block, 56, 48, 0, 0, keep, ALIGN)
    d = ((first >> 12) & 15) | ((first >> 24) & 0xF0) | ((second >> 4) & 0xF00) | ((second >> 16) & 0xF000)
    words = tl.where(item < 16, first, second)
    scale = words >> (item % 16 // 8 * 16 + item % 8 // 2 * 3).to(tl.uint32)
    return low, high, d, scale, shift


@triton.jit
def _shifted_code(words, LANE: tl.constexpr):
    return byte_field(words[0], words[1], LANE, 0, 8, 128, 128) + words[4]


@triton.jit
def _odd_scale(words, unit, SET: tl.constexpr):
    return half(words[2]) * (2.0 * field(words[3], 0, 3, 0, 0) + 1.0), 0.0


for _format, _load, _value, _scale, _alignment, _table in (
    ("gguf_iq2_xxs", _load_iq2_xxs, _code, _quarter_steps, 2, "iq2_xxs"),
    ("gguf_iq2_xs", _load_iq2_xs, _code, _quarter_steps, 2, "iq2_xs"),
    ("gguf_iq2_s", _load_iq2_s, _code, _quarter_steps, 2, "iq2_s"),
    ("gguf_iq3_xxs", _load_iq3_xxs, _code, _half_steps, 2, "iq3_xxs"),
    ("gguf_iq3_s", _load_iq3_s, _code, _odd_nibble, 2, "iq3_s"),
    ("gguf_iq1_s", _load_iq1_s, _shifted_code, _odd_scale, 2, "iq1_s"),
    ("gguf_iq1_m", _load_iq1_m, _shifted_code, _odd_scale, 8, "iq1_s"),
):
    register(
        _format,
        "gguf_i",
        (_load, _value, _scale),
        Lanes.consecutive(8, 1),
        alignment=_alignment,
        table=functools.partial(_grid, _table),
    )
