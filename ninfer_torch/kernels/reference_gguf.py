"""Exact decoders of the eighteen `gguf_*` block formats: the oracle every other kernel is measured against.

A decoder turns blocks, uint8 [..., block bytes], into their values, float32 [..., block values], in plain torch on any
device. The fields of each block are split in the order of the table in spec/layouts.md 8. The arithmetic is that of
llama.cpp's reference dequantisation (`dequantize_row_*` of ggml-quants.c), one float32 operation at a time: first the
scale of a group, then scale times code, then the minimum is taken off. Any bytes decode; a scale that is infinite or
NaN spreads as IEEE arithmetic says.

The tables of the iq formats are in `grids`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType

import torch
from torch import Tensor

from ninfer_torch.errors import LayoutError
from ninfer_torch.formats import FORMATS, GgufFormat
from ninfer_torch.kernels.grids import grid

__all__ = ["BLOCK_DECODERS"]

_Decoder = Callable[[Tensor], Tensor]
_decoders: dict[str, _Decoder] = {}

BLOCK_DECODERS: Mapping[str, _Decoder] = MappingProxyType(_decoders)
"""Format name -> decoder of blocks, uint8 [..., block bytes] -> float32 [..., block values].

The blocks may have any strides and alignment. A decoder raises LayoutError for blocks of another dtype or length.
"""


def _decodes(name: str) -> Callable[[_Decoder], _Decoder]:
    """Enter a decoder in `BLOCK_DECODERS`, behind a check of what it is given."""
    record = FORMATS[name]
    if not isinstance(record, GgufFormat):
        raise TypeError(f"{name} is not a block format")
    block_bytes = record.block_bytes

    def register(decoder: _Decoder) -> _Decoder:
        @wraps(decoder)
        def checked(blocks: Tensor) -> Tensor:
            if blocks.dtype != torch.uint8 or blocks.ndim == 0 or blocks.shape[-1] != block_bytes:
                found = f"{str(blocks.dtype).removeprefix('torch.')} {list(blocks.shape)}"
                raise LayoutError(f"{name}: expected blocks uint8 [..., {block_bytes}], found {found}")
            return decoder(blocks)

        _decoders[name] = checked
        return checked

    return register


# Words and bit fields


def _words(field: Tensor, dtype: torch.dtype) -> Tensor:
    """Little-endian words [..., bytes / word size] of a byte field; the copy aligns them."""
    return field.clone(memory_format=torch.contiguous_format).view(dtype)


def _half(field: Tensor) -> Tensor:
    """The binary16 words of a byte field, as float32."""
    return _words(field, torch.float16).to(torch.float32)


def _fields(words: Tensor, bits: int, count: int) -> Tensor:
    """The lowest `count` fields of `bits` bits of every word, lowest first: [..., n] -> [..., n, count]."""
    shifts = torch.arange(0, bits * count, bits, dtype=words.dtype, device=words.device)
    return (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1)


def _planes(field: Tensor, bits: int) -> Tensor:
    """Bytes cut into fields of `bits` bits, the lowest field of every byte first: [..., n] -> [..., 8 / bits * n]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=field.device).unsqueeze(-1)
    return (field.unsqueeze(-2) >> shifts).bitwise_and_((1 << bits) - 1).flatten(-2)


def _runs_of_planes(field: Tensor, bits: int, run: int) -> Tensor:
    """`_planes` of every `run` bytes, one run after the other: [..., n] -> [..., 8 / bits * n]."""
    return _planes(field.unflatten(-1, (field.shape[-1] // run, run)), bits).flatten(-2)


def _nibbles(field: Tensor) -> Tensor:
    """The nibbles of every byte, low before high, as int32: [..., n] -> [..., 2 n]."""
    return _fields(field, 4, 2).flatten(-2).to(torch.int32)


def _signed(codes: Tensor, zero: int) -> Tensor:
    """int8 codes whose stored word is `code + zero`; words are below 128."""
    return codes.view(torch.int8) - zero


# Reconstruction


def _by_group(values: Tensor, groups: int) -> Tensor:
    return values.unflatten(-1, (groups, values.shape[-1] // groups))


def _scaled(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 scale * code: codes [..., block values] in as many equal groups as there are scales [..., groups].

    Codes that are already float32 are overwritten.
    """
    return _by_group(codes, scales.shape[-1]).to(torch.float32).mul_(scales.unsqueeze(-1)).flatten(-2)


def _scaled_less_minimum(codes: Tensor, scales: Tensor, minima: Tensor) -> Tensor:
    """float32 scale * code - minimum, both [..., groups]."""
    values = _by_group(_scaled(codes, scales), scales.shape[-1])
    return values.sub_(minima.unsqueeze(-1)).flatten(-2)


def _entries(name: str, indices: Tensor) -> Tensor:
    """The grid entries at integer indices [..., n], laid end to end: int8 [..., n * entry values]."""
    table = grid(name, indices.device)
    rows = table.index_select(0, indices.reshape(-1).to(torch.int32))
    return rows.view(*indices.shape, table.shape[1]).flatten(-2)


# Plain formats: one binary16 scale d for the block


@_decodes("gguf_q4_0")
def _q4_0(blocks: Tensor) -> Tensor:
    d, qs = blocks.split((2, 16), -1)
    return _scaled(_signed(_planes(qs, 4), 8), _half(d))


@_decodes("gguf_q5_0")
def _q5_0(blocks: Tensor) -> Tensor:
    d, qh, qs = blocks.split((2, 4, 16), -1)
    high = _fields(qh, 1, 8).flatten(-2)
    return _scaled(_signed(_planes(qs, 4) | high << 4, 16), _half(d))


@_decodes("gguf_q8_0")
def _q8_0(blocks: Tensor) -> Tensor:
    d, qs = blocks.split((2, 32), -1)
    return _scaled(_words(qs, torch.int8), _half(d))


@_decodes("gguf_q2_0")
def _q2_0(blocks: Tensor) -> Tensor:
    """ggml type 42, spec/layouts.md 8.1."""
    d, qs = blocks.split((2, 16), -1)
    return _scaled(_signed(_fields(qs, 2, 4).flatten(-2), 1), _half(d))


# K-quants: 256 values, integer scales (and minima) of groups under binary16 super scales


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales and eight 6-bit minima in the 12 bytes that q4_k and q5_k share, as float32.

    The first four of each are the low six bits of bytes 0..3 and 4..7; the top two bits of these bytes complete the
    last four, whose low nibbles are in bytes 8..11: scales in the low nibble, minima in the high one.
    """
    scales, minima, low = packed.split((4, 4, 4), -1)
    late_scales = low & 15 | scales >> 6 << 4
    late_minima = low >> 4 | minima >> 6 << 4
    return (
        torch.cat((scales & 63, late_scales), -1).to(torch.float32),
        torch.cat((minima & 63, late_minima), -1).to(torch.float32),
    )


@_decodes("gguf_q2_k")
def _q2_k(blocks: Tensor) -> Tensor:
    packed, qs, d, dmin = blocks.split((16, 64, 2, 2), -1)
    scales = _half(d) * (packed & 15).to(torch.float32)
    minima = _half(dmin) * (packed >> 4).to(torch.float32)
    return _scaled_less_minimum(_runs_of_planes(qs, 2, 32), scales, minima)


@_decodes("gguf_q3_k")
def _q3_k(blocks: Tensor) -> Tensor:
    hmask, qs, packed, d = blocks.split((32, 64, 12, 2), -1)
    low, high = packed.split((8, 4), -1)
    scales = _signed(_planes(low, 4) | _planes(high, 2) << 4, 32)
    codes = _runs_of_planes(qs, 2, 32) | _planes(hmask, 1) << 2
    return _scaled(_signed(codes, 4), _half(d) * scales.to(torch.float32))


@_decodes("gguf_q4_k")
def _q4_k(blocks: Tensor) -> Tensor:
    d, dmin, packed, qs = blocks.split((2, 2, 12, 128), -1)
    scales, minima = _scales_and_minima(packed)
    return _scaled_less_minimum(_runs_of_planes(qs, 4, 32), _half(d) * scales, _half(dmin) * minima)


@_decodes("gguf_q5_k")
def _q5_k(blocks: Tensor) -> Tensor:
    d, dmin, packed, qh, qs = blocks.split((2, 2, 12, 32, 128), -1)
    scales, minima = _scales_and_minima(packed)
    codes = _runs_of_planes(qs, 4, 32) | _planes(qh, 1) << 4
    return _scaled_less_minimum(codes, _half(d) * scales, _half(dmin) * minima)


@_decodes("gguf_q6_k")
def _q6_k(blocks: Tensor) -> Tensor:
    ql, qh, scales, d = blocks.split((128, 64, 16, 2), -1)
    codes = _runs_of_planes(ql, 4, 64) | _runs_of_planes(qh, 2, 32) << 4
    return _scaled(_signed(codes, 32), _half(d) * _words(scales, torch.int8).to(torch.float32))


# Codebook of sixteen values


@_decodes("gguf_iq4_nl")
def _iq4_nl(blocks: Tensor) -> Tensor:
    d, qs = blocks.split((2, 16), -1)
    return _scaled(_entries("iq4_nl", _planes(qs, 4)), _half(d))


@_decodes("gguf_iq4_xs")
def _iq4_xs(blocks: Tensor) -> Tensor:
    d, scales_h, scales_l, qs = blocks.split((2, 2, 4, 128), -1)
    high = _fields(scales_h, 2, 4).flatten(-2)
    scales = _signed(_fields(scales_l, 4, 2).flatten(-2) | high << 4, 32)
    return _scaled(_entries("iq4_nl", _runs_of_planes(qs, 4, 16)), _half(d) * scales.to(torch.float32))


# Grids of magnitudes with separate signs: one sign byte, or the seven low bits of one of even parity, for eight values


def _half_steps(d: Tensor, steps: Tensor, unit: float) -> Tensor:
    """float32 d * (steps + 1/2) * unit, left to right."""
    return _half(d) * (steps.to(torch.float32) + 0.5) * unit


def _signs_and_scale(words: Tensor) -> tuple[Tensor, Tensor]:
    """What the int32 words [..., n] of iq2_xxs and iq3_xxs hold, each for 32 values.

    Returns the sign factors, int8 [..., 32 n], and the 4-bit scales above them, [..., n].
    """
    return _entries("even_signs", _fields(words, 7, 4).flatten(-2)), words >> 28 & 15


@_decodes("gguf_iq2_xxs")
def _iq2_xxs(blocks: Tensor) -> Tensor:
    d, qs = blocks.split((2, 64), -1)
    indices, packed = qs.unflatten(-1, (8, 8)).split((4, 4), -1)
    signs, scales = _signs_and_scale(_words(packed, torch.int32).squeeze(-1))
    return _scaled(_entries("iq2_xxs", indices.flatten(-2)) * signs, _half_steps(d, scales, 0.25))


@_decodes("gguf_iq2_xs")
def _iq2_xs(blocks: Tensor) -> Tensor:
    d, qs, scales = blocks.split((2, 64, 8), -1)
    words = _words(qs, torch.int16)
    codes = _entries("iq2_xs", words & 511) * _entries("even_signs", words >> 9 & 127)
    return _scaled(codes, _half_steps(d, _nibbles(scales), 0.25))


@_decodes("gguf_iq2_s")
def _iq2_s(blocks: Tensor) -> Tensor:
    d, qs, signs, qh, scales = blocks.split((2, 32, 32, 8, 8), -1)
    indices = qs.to(torch.int32) | _fields(qh, 2, 4).flatten(-2).to(torch.int32) << 8
    return _scaled(_entries("iq2_s", indices) * _entries("signs", signs), _half_steps(d, _nibbles(scales), 0.25))


@_decodes("gguf_iq3_xxs")
def _iq3_xxs(blocks: Tensor) -> Tensor:
    d, qs, packed = blocks.split((2, 64, 32), -1)
    signs, scales = _signs_and_scale(_words(packed, torch.int32))
    return _scaled(_entries("iq3_xxs", qs) * signs, _half_steps(d, scales, 0.5))


@_decodes("gguf_iq3_s")
def _iq3_s(blocks: Tensor) -> Tensor:
    d, qs, qh, signs, scales = blocks.split((2, 64, 8, 32, 4), -1)
    indices = qs.to(torch.int32) | _fields(qh, 1, 8).flatten(-2).to(torch.int32) << 8
    odd = 2 * _nibbles(scales) + 1
    return _scaled(_entries("iq3_s", indices) * _entries("signs", signs), _half(d) * odd.to(torch.float32))


# Ternary grid with a shift of one eighth


def _shifted_ternary(qs: Tensor, high: Tensor, negative: Tensor) -> Tensor:
    """float32 grid values plus or minus 1/8, [..., 256].

    The 8-bit indices [..., 32] come with three higher bits each; `negative` [..., n] is 1 for equal runs shifted down.
    """
    indices = qs.to(torch.int32) | high.to(torch.int32) << 8
    points = _by_group(_entries("iq1_s", indices).to(torch.float32), negative.shape[-1])
    shifts = 0.125 - 0.25 * negative.to(torch.float32)
    return points.add_(shifts.unsqueeze(-1)).flatten(-2)


@_decodes("gguf_iq1_s")
def _iq1_s(blocks: Tensor) -> Tensor:
    d, qs, qh = blocks.split((2, 32, 16), -1)
    words = _words(qh, torch.int16)
    codes = _shifted_ternary(qs, _fields(words, 3, 4).flatten(-2), words < 0)
    odd = 2 * (words >> 12 & 7) + 1
    return _scaled(codes, _half(d) * odd.to(torch.float32))


@_decodes("gguf_iq1_m")
def _iq1_m(blocks: Tensor) -> Tensor:
    """The binary16 super scale has no field: its nibbles, lowest first, are the top nibbles of the four scale words."""
    qs, qh, packed = blocks.split((32, 16, 8), -1)
    tops = packed[..., 1::2] >> 4
    d = _half(tops[..., 0::2] | tops[..., 1::2] << 4)
    odd = 2 * _fields(_words(packed, torch.int16), 3, 4).flatten(-2) + 1
    flags = _fields(qh, 4, 2).flatten(-2)
    codes = _shifted_ternary(qs, flags & 7, flags >> 3)
    return _scaled(codes, d * odd.to(torch.float32))
