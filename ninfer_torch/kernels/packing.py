"""Codes, scales and divisors to planes and back, for every layout that has them.

*Unpacked* words are what a format's arithmetic speaks of: integer codes (or E2M1/E4M3FN words), scales in natural
order, divisors. *Planes* are how a layout stores them. Both directions move words and never judge them: illegal words
survive a round trip, and `checks` is where they are refused. Source: spec/layouts.md 3, 5, 6, 7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ninfer_torch.errors import FormatError, LayoutError
from ninfer_torch.formats import BlockFloatFormat, Format, GroupedFormat, RowFloatFormat, get_format
from ninfer_torch.layouts import (
    TILE_ROWS,
    Geometry,
    Plane,
    align_up,
    layout_of,
    planes_of,
    swizzle_scales,
    unswizzle_scales,
)

__all__ = [
    "PACKERS",
    "UNPACKERS",
    "join_planes",
    "pack_codes",
    "row_divisors",
    "row_scales",
    "unpack_codes",
    "unpack_lanes",
]

Unpacked = tuple[Tensor, Tensor, "Tensor | None"]

_LANE_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The word that holds the lanes of one byte, one lane per byte, by lanes per byte."""


def pack_codes(
    format: str | Format, codes: Tensor, scales: Tensor, divisors: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The planes of a complete object, in file order, from its codes and scales.

    | Family      | codes                               | scales                                    | divisors   |
    |-------------|-------------------------------------|-------------------------------------------|------------|
    | grouped     | int8 [N, K] or [N, groups, G]       | float16 [N, ceil(K/G)] or [N, groups]     | None       |
    | row float   | uint8 E4M3FN words [N, K]           | bfloat16 or float16, as the format, [N]   | None       |
    | block float | uint8 E2M1 words [N, K]             | uint8 E4M3FN words in natural [N, K/16]   | float32 [d] |

    Grouped matrices [N, K] are padded as spec/layouts.md 3.4 says; codes of three axes are physical groups, padding
    included, and are taken as they are. Raises FormatError for another dtype (nothing is cast) or a code that has no
    word in the format, LayoutError for extents that do not belong together.
    """
    record, pack = _entry(PACKERS, format)
    return pack(record, codes, scales, divisors)


def unpack_codes(format: str | Format, planes: Sequence[Tensor], geometry: Geometry) -> Unpacked:
    """The codes, scales and divisors of a matrix or row view: the inverse of `pack_codes`.

    Grouped formats give int8 codes [N, groups, G] and float16 scales [N, groups], physical padding included; the others
    what `pack_codes` takes. The divisors of an nvfp4 view are the fewest words that cut its rows into equal runs of one
    divisor each, so that `pack_codes` accepts them wherever the view can be an object of its own.
    """
    record, unpack = _entry(UNPACKERS, format)
    return unpack(record, planes, geometry)


def join_planes(planes: Sequence[Tensor], specs: Sequence[Plane]) -> bytes:
    """One object's payload: its planes at their offsets, with zero bytes in the gaps.

    Raises LayoutError when a plane's dtype or shape is not the one of its spec.
    """
    pieces: list[Any] = []
    end = 0
    for plane, spec in zip(_fitting(planes, specs), specs, strict=True):
        pieces += [bytes(spec.offset - end), plane.detach().reshape(-1).view(torch.uint8).cpu().numpy().data]
        end = spec.end
    return b"".join(pieces)


def row_scales(tiles: Tensor, geometry: Geometry) -> Tensor:
    """The nvfp4 scale words uint8 [rows, K/16] of a matrix's rows, from its parent's tiles."""
    first = geometry.row_begin // TILE_ROWS
    last = align_up(geometry.row_begin + geometry.rows, TILE_ROWS) // TILE_ROWS
    return unswizzle_scales(tiles[first:last]).narrow(0, geometry.row_begin - first * TILE_ROWS, geometry.rows)


def row_divisors(divisors: Tensor, geometry: Geometry) -> Tensor:
    """The nvfp4 divisor float32 [rows] of each row, found by the row's position in the parent (spec/layouts.md 5.6)."""
    rows = torch.arange(geometry.row_begin, geometry.row_begin + geometry.rows, device=divisors.device)
    return divisors.index_select(0, rows // (geometry.parent_rows // geometry.divisors))


def _entry(table: Mapping[str, Callable[..., Any]], format: str | Format) -> tuple[Format, Callable[..., Any]]:
    record = get_format(format)
    try:
        return record, table[layout_of(record).name]
    except KeyError:
        raise FormatError(f"format {record.name} is not made of codes and scales; its words are the plane's") from None


def _fitting(planes: Sequence[Tensor], specs: Sequence[Plane]) -> tuple[Tensor, ...]:
    """The planes, once each has the dtype and shape of its spec."""
    found = [(plane.dtype, tuple(plane.shape)) for plane in planes]
    expected = [(spec.dtype, spec.shape) for spec in specs]
    if found != expected:
        raise LayoutError(f"planes are {found}, expected {expected}")
    return tuple(planes)


def _require(name: str, tensor: Tensor | None, dtype: torch.dtype, record: Format) -> Tensor:
    if tensor is None or tensor.dtype != dtype:
        found = "none" if tensor is None else tensor.dtype
        raise FormatError(f"format {record.name}: {name} are {found}, expected {dtype}")
    return tensor


def _refuse_divisors(divisors: Tensor | None, record: Format) -> None:
    if divisors is not None:
        raise FormatError(f"format {record.name} has no divisors, found {divisors.numel()}")


def _matrix_shape(codes: Tensor) -> tuple[int, int]:
    if codes.dim() != 2:
        raise LayoutError(f"codes have shape {list(codes.shape)}, expected a matrix [N, K]")
    return codes.shape[0], codes.shape[1]


# Lanes: fields of `width` bits inside bytes, lowest lane in the lowest bits.


@cache
def _lane_table(width: int, device: torch.device) -> Tensor:
    """For each byte value its lanes, one per byte, joined in one word: one lookup unpacks one byte."""
    with torch.inference_mode(False):
        values = torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(-1)
        shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=device)
        lanes = (values >> shifts) & ((1 << width) - 1)
        return lanes.view(_LANE_WORDS[8 // width]).flatten()


def unpack_lanes(packed: Tensor, width: int) -> Tensor:
    """Bytes uint8 [..., n] to lanes uint8 [..., n * 8 / width] of `width` (1, 2, 4 or 8) bits, lowest bits first."""
    if width == 8:
        return packed
    words = _lane_table(width, packed.device).index_select(0, packed.reshape(-1).to(torch.int32))
    return words.view(torch.uint8).view(*packed.shape[:-1], packed.shape[-1] * 8 // width)


def _pack_lanes(lanes: Tensor, width: int) -> Tensor:
    """Lanes uint8 [..., n], each below 2**width, to uint8 [..., n * width / 8]."""
    if width == 8:
        return lanes
    slots = lanes.unflatten(-1, (-1, 8 // width))
    packed = slots[..., 0].clone()
    for slot in range(1, 8 // width):
        packed |= slots[..., slot] << (slot * width)
    return packed


# row_split_k128_v1 (spec/layouts.md 3)


def _pack_row_split(
    record: GroupedFormat, codes: Tensor, scales: Tensor, divisors: Tensor | None
) -> tuple[Tensor, ...]:
    _refuse_divisors(divisors, record)
    codes, scales = _require("codes", codes, torch.int8, record), _require("scales", scales, torch.float16, record)
    if codes.dim() == 3:
        shape = (codes.shape[0], codes.shape[1] * record.group)
    else:
        shape = _matrix_shape(codes)
        codes, scales = _pad_groups(record, codes, scales)
    _check_representable(record, codes)
    words = (codes.view(torch.uint8) + record.bias) & ((1 << record.bits) - 1)
    base = _pack_lanes(words & ((1 << record.base_bits) - 1), record.base_bits)
    high = (_pack_lanes(words >> record.base_bits, record.high_bits),) if record.high_bits else ()
    return _fitting((base, *high, scales), planes_of(record, shape))


def _pad_groups(record: GroupedFormat, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [N, K] and scales [N, ceil(K/G)] to physical [N, groups, G] and [N, groups] (spec/layouts.md 3.4)."""
    rows, columns = codes.shape
    logical = -(-columns // record.group)
    if scales.shape != (rows, logical):
        raise LayoutError(f"scales have shape {list(scales.shape)}, expected {[rows, logical]} for {[rows, columns]}")
    physical_columns = align_up(columns, 128)
    codes = torch.nn.functional.pad(codes, (0, physical_columns - columns))
    scales = torch.nn.functional.pad(scales, (0, physical_columns // record.group - logical))
    return codes.unflatten(1, (-1, record.group)), scales


def _check_representable(record: GroupedFormat, codes: Tensor) -> None:
    lowest = -record.bias if record.bias else -(1 << (record.bits - 1))
    highest = lowest + (1 << record.bits) - 1
    if codes.numel() and (codes.amin() < lowest or codes.amax() > highest):
        row, group, lane = ((codes < lowest) | (codes > highest)).nonzero()[0].tolist()
        raise FormatError(
            f"format {record.name} has no word for code {int(codes[row, group, lane])} at row {row}, column "
            f"{group * record.group + lane}; its words are {lowest}..{highest}"
        )


def _unpack_row_split(record: GroupedFormat, planes: Sequence[Tensor], geometry: Geometry) -> Unpacked:
    words = unpack_lanes(planes[0], record.base_bits)
    if record.high_bits:
        words = words | (unpack_lanes(planes[1], record.high_bits) << record.base_bits)
    if record.bias:
        codes = words - record.bias
    else:
        sign = 1 << (record.bits - 1)
        codes = (words ^ sign) - sign
    return codes.view(torch.int8), planes[-1], None


# block_scale_k16_m128x4_v1 (spec/layouts.md 5)


def _pack_block_scale(
    record: BlockFloatFormat, codes: Tensor, scales: Tensor, divisors: Tensor | None
) -> tuple[Tensor, ...]:
    codes, scales = _require("codes", codes, torch.uint8, record), _require("scales", scales, torch.uint8, record)
    divisors = _require("divisors", divisors, torch.float32, record)
    rows, columns = _matrix_shape(codes)
    specs = planes_of(record, (rows, columns), divisors.numel())
    if scales.shape != (rows, columns // record.group):
        raise LayoutError(f"scales have shape {list(scales.shape)}, expected {[rows, columns // record.group]}")
    if codes.numel() and codes.amax() > 15:
        row, column = (codes > 15).nonzero()[0].tolist()
        raise FormatError(f"0x{int(codes[row, column]):02x} at row {row}, column {column} is not an E2M1 word (0..15)")
    return _fitting((_pack_lanes(codes, 4), swizzle_scales(scales), divisors), specs)


def _unpack_block_scale(record: BlockFloatFormat, planes: Sequence[Tensor], geometry: Geometry) -> Unpacked:
    codes, tiles, divisors = planes
    return unpack_lanes(codes, 4), row_scales(tiles, geometry), _view_divisors(divisors, geometry)


def _view_divisors(divisors: Tensor, geometry: Geometry) -> Tensor:
    run = geometry.parent_rows // geometry.divisors
    if geometry.rows == geometry.parent_rows and run % TILE_ROWS == 0:
        return divisors
    per_row = row_divisors(divisors, geometry)
    words = per_row.view(torch.int32).tolist()
    borders = [row for row, (above, below) in enumerate(pairwise(words), start=1) if above != below]
    return per_row[:: max(1, math.gcd(geometry.rows, *borders))].clone(memory_format=torch.contiguous_format)


# row_scale_v1 and row_interleaved_v1 (spec/layouts.md 6, 7)


def _row_words(
    record: RowFloatFormat, codes: Tensor, scales: Tensor, divisors: Tensor | None
) -> tuple[Tensor, Tensor, tuple[Plane, ...]]:
    _refuse_divisors(divisors, record)
    codes = _require("codes", codes, torch.uint8, record)
    scales = _require("scales", scales, record.scale_dtype, record)
    specs = planes_of(record, _matrix_shape(codes))
    if scales.shape != codes.shape[:1]:
        raise LayoutError(f"scales have shape {list(scales.shape)}, expected one per row, [{codes.shape[0]}]")
    return codes, scales, specs


def _pack_row_scale(
    record: RowFloatFormat, codes: Tensor, scales: Tensor, divisors: Tensor | None
) -> tuple[Tensor, ...]:
    codes, scales, specs = _row_words(record, codes, scales, divisors)
    return _fitting((codes, scales), specs)


def _unpack_row_scale(record: RowFloatFormat, planes: Sequence[Tensor], geometry: Geometry) -> Unpacked:
    codes, scales = planes
    return codes, scales, None


def _pack_row_interleaved(
    record: RowFloatFormat, codes: Tensor, scales: Tensor, divisors: Tensor | None
) -> tuple[Tensor, ...]:
    codes, scales, specs = _row_words(record, codes, scales, divisors)
    return _fitting((torch.cat([codes, scales.contiguous().view(torch.uint8).view(-1, 2)], dim=1),), specs)


def _unpack_row_interleaved(record: RowFloatFormat, planes: Sequence[Tensor], geometry: Geometry) -> Unpacked:
    codes, scale_bytes = planes[0].split([geometry.columns, 2], dim=1)
    # The two bytes of a scale can lie at an odd address, which no 2-byte view may have: copy them out first.
    scales = scale_bytes.clone(memory_format=torch.contiguous_format).view(record.scale_dtype).flatten()
    return codes, scales, None


PACKERS: Mapping[str, Callable[..., tuple[Tensor, ...]]] = MappingProxyType(
    {
        "row_split_k128_v1": _pack_row_split,
        "block_scale_k16_m128x4_v1": _pack_block_scale,
        "row_scale_v1": _pack_row_scale,
        "row_interleaved_v1": _pack_row_interleaved,
    }
)
"""The packer of each layout that holds codes and scales, by layout name."""

UNPACKERS: Mapping[str, Callable[..., Unpacked]] = MappingProxyType(
    {
        "row_split_k128_v1": _unpack_row_split,
        "block_scale_k16_m128x4_v1": _unpack_block_scale,
        "row_scale_v1": _unpack_row_scale,
        "row_interleaved_v1": _unpack_row_interleaved,
    }
)
"""The unpacker of each layout that holds codes and scales, by layout name."""
