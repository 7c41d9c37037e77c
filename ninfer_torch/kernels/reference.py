"""Exact reconstruction of quantized matrices in float32: the oracle of every faster kernel.

Plain vectorised torch on any device. Each value is one correctly rounded binary32 operation on exact operands, so the
words are the same everywhere: a product of scale and code, or for nvfp4 one division of an exact product. Source:
spec/layouts.md 3.5, 5.4, 6, 7, 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ninfer_torch.errors import FormatError
from ninfer_torch.formats import (
    FORMATS,
    BlockFloatFormat,
    Format,
    GgufFormat,
    GroupedFormat,
    RowFloatFormat,
    get_format,
)
from ninfer_torch.kernels.packing import row_divisors, row_scales, unpack_codes, unpack_lanes
from ninfer_torch.kernels.reference_gguf import BLOCK_DECODERS
from ninfer_torch.layouts import Geometry

__all__ = ["DECODERS", "decode", "e2m1_table", "e4m3_table"]

Decoder = Callable[[Any, Sequence[Tensor], Geometry], Tensor]


def decode(format: str | Format, planes: Sequence[Tensor], geometry: Geometry) -> Tensor:
    """The float32 values [rows, columns] of a matrix or row view, contiguous and bit-exact.

    All rows at once: temporaries are a small multiple of the result, so callers with large matrices slice or gather
    rows first. Illegal words decode too (`checks` refuses them). Raises FormatError for a direct format, whose plane is
    already its values.
    """
    record = get_format(format)
    if record.name not in DECODERS:
        raise FormatError(f"format {record.name} is not quantized: its plane holds the values; use it as a tensor")
    return DECODERS[record.name](record, planes, geometry)


def _e2m1_value(word: int) -> float:
    sign = -1.0 if word & 0x8 else 1.0
    return sign * (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[word & 0x7]


def _e4m3_value(word: int) -> float:
    sign = -1.0 if word & 0x80 else 1.0
    exponent, fraction = word >> 3 & 0xF, word & 0x7
    if word & 0x7F == 0x7F:
        return sign * float("nan")
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (8 + fraction) * 2.0 ** (exponent - 10)


def _device_table(values: Sequence[float], device: torch.device) -> Tensor:
    # A cached tensor outlives the call that made it, which may run in inference mode.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


@cache
def e2m1_table(device: torch.device) -> Tensor:
    """The float32 value of each of the 16 E2M1 words (spec/layouts.md 5.2)."""
    return _device_table([_e2m1_value(word) for word in range(16)], device)


@cache
def e4m3_table(device: torch.device) -> Tensor:
    """The float32 value of each of the 256 E4M3FN words; 0x7f and 0xff are NaN (spec/layouts.md 5.3)."""
    return _device_table([_e4m3_value(word) for word in range(256)], device)


def _look_up(table: Tensor, words: Tensor) -> Tensor:
    return table.index_select(0, words.reshape(-1).to(torch.int32)).view(words.shape)


def _decode_grouped(record: GroupedFormat, planes: Sequence[Tensor], geometry: Geometry) -> Tensor:
    codes, scales, _ = unpack_codes(record, planes, geometry)
    # Code 0 under a negative scale is -0.0, which only a product of floats gives.
    values = codes.to(torch.float32).mul_(scales.to(torch.float32).unsqueeze(-1))
    return values.flatten(1)[:, : geometry.columns].contiguous()


def _decode_block_float(record: BlockFloatFormat, planes: Sequence[Tensor], geometry: Geometry) -> Tensor:
    codes, tiles, divisors = planes
    values = _look_up(e2m1_table(codes.device), unpack_lanes(codes, 4)).unflatten(1, (-1, record.group))
    values.mul_(_look_up(e4m3_table(codes.device), row_scales(tiles, geometry)).unsqueeze(-1))
    # A divisor tensor on the device: torch may turn division by a host scalar into a product with its reciprocal.
    return values.flatten(1).div_(row_divisors(divisors, geometry).unsqueeze(-1))


def _decode_row_float(record: RowFloatFormat, planes: Sequence[Tensor], geometry: Geometry) -> Tensor:
    codes, scales, _ = unpack_codes(record, planes, geometry)
    return _look_up(e4m3_table(codes.device), codes).mul_(scales.to(torch.float32).unsqueeze(-1))


def _decode_gguf(record: GgufFormat, planes: Sequence[Tensor], geometry: Geometry) -> Tensor:
    blocks = planes[0].unflatten(1, (-1, record.block_bytes))
    return BLOCK_DECODERS[record.name](blocks).flatten(1)


_FAMILY_DECODERS: Mapping[type[Format], Decoder] = {
    GroupedFormat: _decode_grouped,
    BlockFloatFormat: _decode_block_float,
    RowFloatFormat: _decode_row_float,
    GgufFormat: _decode_gguf,
}

DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {name: _FAMILY_DECODERS[type(record)] for name, record in FORMATS.items() if record.quantized}
)
"""The decoder of each quantized format, by format name: (record, planes, geometry) -> float32 [rows, columns]."""
