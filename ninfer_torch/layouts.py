"""Closed registry of storage layouts: where an object's words lie.

A layout is a function from (format, shape, divisors) to *planes*: dense arrays at fixed offsets inside one object's bytes.
Sizes, zero-copy views, row slices and row gathers are generic over planes and written once, here. Source: spec/layouts.md.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ninfer_torch.errors import LayoutError
from ninfer_torch.formats import (
    FORMATS,
    BlockFloatFormat,
    DirectFormat,
    Format,
    GgufFormat,
    GroupedFormat,
    RowFloatFormat,
    get_format,
)

__all__ = [
    "LAYOUTS",
    "RESOURCE_ENCODING",
    "TILE_ROWS",
    "Geometry",
    "Layout",
    "Plane",
    "align_up",
    "block_scale_rows",
    "encoded_bytes",
    "gather_rows",
    "get_layout",
    "join_rows",
    "layout_of",
    "plane_names",
    "planes_of",
    "slice_rows",
    "split_planes",
    "swizzle_scales",
    "unswizzle_scales",
]

RESOURCE_ENCODING = "raw_bytes_v1"
"""The one encoding of resources: the object's bytes are the resource (spec/layouts.md 9)."""

TILE_ROWS = 128
"""Rows of one swizzled scale tile of `block_scale_k16_m128x4_v1`."""

_MAX_RANK = 16


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True)
class Plane:
    """One dense C-order array inside an object.

    `offset` is in bytes from the object's start. `rows_per_index` says how many logical rows one index of the first axis covers:
    1 for a plane whose rows are the matrix's rows, more where rows share an entry (scale tiles, divisors), 0 for a plane of a
    direct format, which has no rows.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows_per_index: int

    @property
    def nbytes(self) -> int:
        """Bytes of the plane."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Offset of the first byte after the plane."""
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Layout:
    """A storage layout: the formats it accepts and the planes it makes of a shape."""

    name: str
    formats: tuple[str, ...]
    alignment: int
    place: Callable[[Any, tuple[int, ...], int], tuple[Plane, ...]]

    def planes(self, format: str | Format, shape: Sequence[int], divisors: int = 1) -> tuple[Plane, ...]:
        """The planes of an object of this layout, in file order.

        Raises LayoutError for a format this layout does not hold, a shape it refuses, or illegal `divisors`.
        """
        record = get_format(format)
        if record.name not in self.formats:
            raise LayoutError(
                f"layout {self.name} does not hold format {record.name}; it holds {', '.join(self.formats)}"
            )
        if divisors != 1 and not isinstance(record, BlockFloatFormat):
            raise LayoutError(f"format {record.name} has no divisors, found divisors = {divisors}")
        return self.place(record, _checked_shape(record, shape), divisors)


def _checked_shape(record: Format, shape: Sequence[int]) -> tuple[int, ...]:
    shape = tuple(shape)
    if len(shape) > _MAX_RANK or any(extent < 1 for extent in shape):
        raise LayoutError(f"shape {list(shape)}: expected at most {_MAX_RANK} positive extents")
    if record.quantized and len(shape) != 2:
        raise LayoutError(f"format {record.name} holds matrices [N, K], found shape {list(shape)}")
    return shape


def _place_contiguous(record: DirectFormat, shape: tuple[int, ...], divisors: int) -> tuple[Plane, ...]:
    return (Plane("words", 0, shape, record.dtype, rows_per_index=0),)


def _place_row_split(record: GroupedFormat, shape: tuple[int, ...], divisors: int) -> tuple[Plane, ...]:
    rows, columns = shape
    groups = align_up(columns, 128) // record.group
    codes = Plane("codes", 0, (rows, groups, record.base_bytes), torch.uint8, 1)
    high = Plane("high", align_up(codes.end, 256), (rows, groups, record.high_bytes), torch.uint8, 1)
    scales = Plane("scales", align_up(high.end, 256), (rows, groups), torch.float16, 1)
    return (codes, high, scales) if record.high_bytes else (codes, scales)


def _place_block_scale(record: BlockFloatFormat, shape: tuple[int, ...], divisors: int) -> tuple[Plane, ...]:
    rows, columns = shape
    if rows % TILE_ROWS or columns % 64:
        raise LayoutError(f"format {record.name} needs N % 128 = 0 and K % 64 = 0, found shape {[rows, columns]}")
    if divisors < 1 or rows % divisors or (rows // divisors) % TILE_ROWS:
        raise LayoutError(f"divisors = {divisors} does not cut {rows} rows into equal runs of whole 128-row tiles")
    codes = Plane("codes", 0, (rows, columns // 2), torch.uint8, 1)
    tiles = (rows // TILE_ROWS, columns // 64, 32, 4, 4)
    scales = Plane("scales", align_up(codes.end, 256), tiles, torch.uint8, TILE_ROWS)
    return codes, scales, Plane("divisors", scales.end, (divisors,), torch.float32, rows // divisors)


def _place_row_scale(record: RowFloatFormat, shape: tuple[int, ...], divisors: int) -> tuple[Plane, ...]:
    rows, columns = shape
    codes = Plane("codes", 0, (rows, columns), torch.uint8, 1)
    return codes, Plane("scales", align_up(codes.end, 256), (rows,), record.scale_dtype, 1)


def _place_row_interleaved(record: RowFloatFormat, shape: tuple[int, ...], divisors: int) -> tuple[Plane, ...]:
    rows, columns = shape
    return (Plane("records", 0, (rows, columns + 2), torch.uint8, 1),)


def _place_gguf_blocks(record: GgufFormat, shape: tuple[int, ...], divisors: int) -> tuple[Plane, ...]:
    rows, columns = shape
    if columns % record.block_values:
        raise LayoutError(f"format {record.name} needs K % {record.block_values} = 0, found shape {[rows, columns]}")
    return (Plane("blocks", 0, (rows, columns // record.block_values * record.block_bytes), torch.uint8, 1),)


def _names(kind: type[Format]) -> tuple[str, ...]:
    return tuple(name for name, record in FORMATS.items() if isinstance(record, kind))


_RECORDS = (
    Layout("contiguous_le_v1", _names(DirectFormat), 256, _place_contiguous),
    Layout("row_split_k128_v1", _names(GroupedFormat), 256, _place_row_split),
    Layout("block_scale_k16_m128x4_v1", _names(BlockFloatFormat), 256, _place_block_scale),
    Layout("row_scale_v1", ("fp8_e4m3fn_row_bf16",), 256, _place_row_scale),
    Layout("row_interleaved_v1", ("fp8_e4m3fn_row_fp16",), 256, _place_row_interleaved),
    Layout("gguf_blocks_v1", _names(GgufFormat), 256, _place_gguf_blocks),
)

LAYOUTS: Mapping[str, Layout] = MappingProxyType({record.name: record for record in _RECORDS})
"""Every registered tensor layout by canonical name."""

_LAYOUT_OF = {name: layout for layout in _RECORDS for name in layout.formats}


def get_layout(name: str | Layout) -> Layout:
    """The record of a canonical layout name. Raises LayoutError, listing the known names, for any other."""
    if isinstance(name, Layout):
        return name
    try:
        return LAYOUTS[name]
    except (KeyError, TypeError):
        raise LayoutError(f"unknown storage layout {name!r}; known: {', '.join(LAYOUTS)}") from None


def layout_of(format: str | Format) -> Layout:
    """The one layout that holds a format."""
    return _LAYOUT_OF[get_format(format).name]


def planes_of(format: str | Format, shape: Sequence[int], divisors: int = 1) -> tuple[Plane, ...]:
    """The planes of an object of `format` in its layout, in file order."""
    return layout_of(format).planes(format, shape, divisors)


@functools.cache
def plane_names(format: str) -> tuple[str, ...]:
    """Names of the planes of a quantized format, in file order; they are the same for every shape."""
    return tuple(plane.name for plane in planes_of(format, (TILE_ROWS, 256)))


def encoded_bytes(format: str | Format, shape: Sequence[int], divisors: int = 1) -> int:
    """Bytes of a complete object: the end of its last plane. No layout pads its tail."""
    return planes_of(format, shape, divisors)[-1].end


def split_planes(payload: torch.Tensor, planes: Sequence[Plane]) -> tuple[torch.Tensor, ...]:
    """Zero-copy views of the planes of one object over its bytes.

    `payload` is a contiguous uint8 vector holding the whole object. Raises LayoutError when its length differs.
    """
    expected = planes[-1].end
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != expected:
        raise LayoutError(f"payload is {payload.dtype} {list(payload.shape)}, expected {expected} bytes as uint8")
    return tuple(payload[plane.offset : plane.end].view(plane.dtype).view(plane.shape) for plane in planes)


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Block scales from natural order [N, K/16] to tiles [N/128, K/64, 32, 4, 4] (spec/layouts.md 5.3)."""
    rows, groups = scales.shape
    return scales.reshape(rows // TILE_ROWS, 4, 32, groups // 4, 4).permute(0, 3, 2, 1, 4).contiguous()


def unswizzle_scales(tiles: torch.Tensor) -> torch.Tensor:
    """Block scales from tiles [N/128, K/64, 32, 4, 4] to natural order [N, K/16]."""
    row_tiles, column_tiles = tiles.shape[:2]
    return tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * TILE_ROWS, column_tiles * 4)


class Geometry(NamedTuple):
    """Where a matrix lies in its parent object; plain integers, so that it passes through operators as `int[]`.

    The matrix has `rows` x `columns` elements: the rows [row_begin, row_begin + rows) of a parent of `parent_rows` rows. Planes whose
    rows are the matrix's rows hold just these rows; planes that share entries between rows (scale tiles, divisors) stay
    the parent's, and `row_begin` finds the entry. `divisors` counts the parent's divisor words.
    """

    rows: int
    columns: int
    row_begin: int
    parent_rows: int
    divisors: int = 1

    @classmethod
    def whole(cls, shape: Sequence[int], divisors: int = 1) -> Geometry:
        """The geometry of a complete object of shape [N, K]."""
        return cls(shape[0], shape[1], 0, shape[0], divisors)


Planes = Sequence[torch.Tensor]


def slice_rows(
    format: str | Format, planes: Planes, geometry: Geometry, begin: int, end: int
) -> tuple[tuple[torch.Tensor, ...], Geometry]:
    """Rows [begin, end) of a matrix, without a copy.

    Returns the narrowed planes and their geometry. Raises LayoutError for a range outside the matrix.
    """
    if not 0 <= begin <= end <= geometry.rows:
        raise LayoutError(f"rows [{begin}, {end}) lie outside a matrix of {geometry.rows} rows")
    shared = isinstance(get_format(format), BlockFloatFormat)
    narrowed = [planes[0].narrow(0, begin, end - begin)] + [
        plane if shared else plane.narrow(0, begin, end - begin) for plane in planes[1:]
    ]
    return tuple(narrowed), geometry._replace(rows=end - begin, row_begin=geometry.row_begin + begin)


def gather_rows(
    format: str | Format, planes: Planes, geometry: Geometry, index: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], Geometry]:
    """Rows `index` (int64 [n]) of a matrix, still packed, as new planes.

    Blocks, codes and scales move whole. For nvfp4 the scale tiles are rebuilt, padded to whole tiles, and every row keeps its divisor
    word, so the result has one divisor per row of its padded parent.
    """
    if isinstance(get_format(format), BlockFloatFormat):
        return _block_scale_parent(*block_scale_rows(planes, geometry, index))
    gathered = tuple(plane.index_select(0, index) for plane in planes)
    return gathered, Geometry(index.numel(), geometry.columns, 0, index.numel())


def join_rows(
    format: str | Format, parts: Sequence[tuple[Planes, Geometry]]
) -> tuple[tuple[torch.Tensor, ...], Geometry]:
    """The rows of several matrices of one format and width, one after another, as new planes."""
    columns, rows = parts[0][1].columns, sum(geometry.rows for _, geometry in parts)
    if isinstance(get_format(format), BlockFloatFormat):
        natural = [block_scale_rows(planes, geometry) for planes, geometry in parts]
        codes, scales, divisors = (torch.cat(pieces) for pieces in zip(*natural, strict=True))
        return _block_scale_parent(codes, scales, divisors)
    joined = tuple(torch.cat(pieces) for pieces in zip(*(planes for planes, _ in parts), strict=True))
    return joined, Geometry(rows, columns, 0, rows)


def block_scale_rows(
    planes: Planes, geometry: Geometry, index: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of an nvfp4 matrix (all, or `index` int64 [n]) in natural order: codes [n, K/2], scales [n, K/16], divisors [n]."""
    codes, tiles, divisors = planes
    if index is None:
        index = torch.arange(geometry.rows, device=codes.device)
    else:
        codes = codes.index_select(0, index)
    parent = index + geometry.row_begin
    lane = parent % TILE_ROWS
    scales = tiles[parent // TILE_ROWS, :, lane % 32, lane // 32].reshape(index.numel(), geometry.columns // 16)
    return codes, scales, divisors.index_select(0, parent // (geometry.parent_rows // geometry.divisors))


def _block_scale_parent(
    codes: torch.Tensor, scales: torch.Tensor, divisors: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], Geometry]:
    """Planes of natural nvfp4 rows: scale tiles padded to whole tiles, one divisor per row of the padded parent."""
    count, groups = scales.shape
    padded = align_up(max(count, 1), TILE_ROWS)
    tiles = swizzle_scales(torch.nn.functional.pad(scales, (0, 0, 0, padded - count)))
    row_divisors = torch.nn.functional.pad(divisors, (0, padded - count), value=1.0)
    return (codes, tiles, row_divisors), Geometry(count, groups * 16, 0, padded, padded)
