# mypy: allow-untyped-defs
"""What a kernel knows of a format: its tile decoder, and which columns the decoder's lanes are.

A row is a sequence of *units*, each the bytes that one thread decodes at a time. A unit holds `bytes` code bytes of `fields` fields;
field f of byte b is lane `f * bytes + b` and the column `first_column(unit) + f * field_step + b * byte_step`. The lanes of one of
the `sets` equal runs of fields share a scale. A kernel loads a tile of units, then walks its lanes:

    words = tile.load(plane0, plane1, plane2, table, row, unit, K, row_begin, run_rows, keep, ALIGN)
    scale, extra = tile.scale(words, unit, SET)
    code = tile.code(words, LANE)

`row` is int64 [N, 1], `unit` int32 [1, U]; codes are exact float32 [N, U], scales float32 [N, U] or [N, 1]. `kind` says what a value is: "scale",
code * scale; "minimum", code * scale - extra; "divisor", code * scale / extra.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["TILES", "Lanes", "Tile", "TileDecoder", "first_column", "offset_of", "register", "set_of"]


class Tile(NamedTuple):
    """The compile-time half of a tile decoder, handed to kernels as one constant.

    `key` is a digest of the functions' sources: Triton's disk cache names constants by their text.
    """

    load: Any
    code: Any
    scale: Any
    bytes: int
    fields: int
    field_step: int
    byte_step: int
    run: int
    sets: int
    kind: str
    key: str


@dataclass(frozen=True)
class TileDecoder:
    """A format's tile decoder with what the host must know.

    `alignment` is the largest power of two (at most 8) that divides every address of a word when rows start at multiples of it. Where
    rows are K code bytes and `row_extra` others, their start depends on K. `table` makes the decoder's lookup table.
    """

    tile: Tile
    family: str
    alignment: int
    row_extra: int | None
    table: Callable[[torch.device], torch.Tensor] | None

    @property
    def lanes(self) -> int:
        """Columns of one unit."""
        return self.tile.bytes * self.tile.fields

    def alignment_of(self, planes: Sequence[torch.Tensor], columns: int) -> int:
        """Bytes that divide the addresses of all words of these planes; 1 also stands for a last unit that is cut short."""
        alignment = math.gcd(self.alignment, *[plane.data_ptr() for plane in planes])
        if self.row_extra is None:
            return alignment
        return math.gcd(alignment, columns + self.row_extra) if columns % self.lanes == 0 else 1


TILES: dict[str, TileDecoder] = {}
"""The tile decoder of each quantized format, by canonical format name."""


@dataclass(frozen=True)
class Lanes:
    """How the lanes of a unit lie: see the module. `run` is the number of units whose columns interleave."""

    bytes: int
    fields: int
    field_step: int
    byte_step: int
    run: int = 1
    sets: int = 1

    @classmethod
    def consecutive(cls, bytes: int, fields: int) -> Lanes:
        """The fields of a byte are neighbours, and so are bytes: a unit covers consecutive columns."""
        return cls(bytes, fields, 1, fields)


def register(
    format: str,
    family: str,
    functions: tuple[Any, Any, Any],
    lanes: Lanes,
    *,
    alignment: int,
    kind: str = "scale",
    row_extra: int | None = None,
    table: Callable[[torch.device], torch.Tensor] | None = None,
) -> None:
    """Enter a format's decoder `functions` (load, code, scale) in TILES; the rest is that of `Tile` and `TileDecoder`."""
    sources = "".join(getattr(function, "cache_key", "") for function in functions)  # none under the interpreter
    key = hashlib.sha256(sources.encode()).hexdigest()[:16]
    load, code, scale = functions
    tile = Tile(load, code, scale, **dataclasses.asdict(lanes), kind=kind, key=key)
    TILES[format] = TileDecoder(tile, family, alignment, row_extra, table)


@triton.jit
def first_column(unit, TILE: tl.constexpr):
    """The column of each unit's lane 0."""
    if TILE.run == 1:
        return unit * (TILE.bytes * TILE.fields)
    else:
        span = TILE.run * TILE.bytes * TILE.fields
        return (unit // TILE.run) * span + (unit % TILE.run) * (TILE.bytes * TILE.byte_step)


@triton.jit
def offset_of(LANE: tl.constexpr, TILE: tl.constexpr):
    """The column of a lane less that of its unit's lane 0."""
    return (LANE // TILE.bytes) * TILE.field_step + (LANE % TILE.bytes) * TILE.byte_step


@triton.jit
def set_of(LANE: tl.constexpr, TILE: tl.constexpr):
    """The scale set of a lane."""
    return (LANE // TILE.bytes) * TILE.sets // TILE.fields
