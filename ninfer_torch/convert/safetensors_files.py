"""The safetensors files of a folder: found by the index, opened once, read by rows.

Nothing is mapped: rows are read into memory of their own, since the pages of a mapping would stay with the process, and a
conversion would end with its whole source resident. Headers are read and checked here too, because the format's own
library maps a file to read its header, which a file larger than memory may not allow.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from ninfer_torch.errors import ConversionError

__all__ = ["INDEX", "StoredTensor", "find_shards", "open_shards"]

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)


_LARGEST_HEADER = 100_000_000
"""Bytes of a header that the format allows."""

_METADATA = "__metadata__"


class _File:
    """An open safetensors file; `header` maps tensor names to (dtype, shape, first byte).

    Raises ConversionError for a header that is not one, and for tensors that do not fill the rest of the file exactly.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stream = open(path, "rb")  # noqa: SIM115 (open as long as a tensor refers to it)
        size = os.fstat(self.stream.fileno()).st_size
        length = int.from_bytes(self.stream.read(8), "little")
        self.start = 8 + length
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            self._fail(f"a header of {length} bytes in a file of {size}")
        try:
            members = json.loads(self.stream.read(length), object_pairs_hook=_once)
            members.pop(_METADATA, None)
            self.header = {name: _entry(entry) for name, entry in members.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._fail(f"its header cannot be read ({error})")
        end = 0
        for name, (dtype, shape, begin, after) in sorted(self.header.items(), key=lambda item: item[1][2:]):
            wanted = math.prod(shape) * _DTYPES[dtype].itemsize if dtype in _DTYPES else after - begin
            if begin != end or after - begin != wanted:
                self._fail(
                    f"tensor {name!r}, {dtype} {list(shape)}, lies at bytes {begin} to {after} of the data, expected "
                    f"{wanted} bytes from {end}"
                )
            end = after
        if self.start + end != size:
            self._fail(f"its tensors end at byte {self.start + end} of {size}; is the download complete?")

    def _fail(self, reason: str) -> NoReturn:
        self.stream.close()
        raise ConversionError(f"{self.path}: not a readable safetensors file: {reason}")

    def read(self, offset: int, count: int) -> torch.Tensor:
        """`count` bytes from `offset` in the data section, uint8. Raises ConversionError where the file has fewer."""
        data = torch.empty(count, dtype=torch.uint8)
        rest, position = data.numpy().data, self.start + offset
        while rest:
            done = os.preadv(self.stream.fileno(), [rest], position)
            if not done:
                raise ConversionError(f"{self.path}: the file ends at byte {position}, {len(rest)} bytes too early")
            rest, position = rest[done:], position + done
        return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a name occurs twice")
    return members


def _entry(entry: dict[str, Any]) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, first byte, byte after the last) of a tensor. Raises ValueError for numbers that are no counts."""
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not isinstance(entry["dtype"], str) or not all(
        type(number) is int and number >= 0 for number in (*shape, begin, end)
    ):
        raise ValueError(f"found {entry}")
    return entry["dtype"], shape, begin, end


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file: `dtype` is the file's own word for it, such as `BF16`."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    data: _File

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) of the leading axis; a scalar gives itself.

        Raises ConversionError for a type of words that torch has no dtype for.
        """
        if not self.shape:
            return self.whole()
        return self._words(begin * math.prod(self.shape[1:]), (end - begin, *self.shape[1:]))

    def whole(self) -> torch.Tensor:
        """The complete tensor."""
        return self._words(0, self.shape)

    def _words(self, first: int, shape: tuple[int, ...]) -> torch.Tensor:
        if self.dtype not in _DTYPES:
            raise ConversionError(
                f"{self.file}: tensor {self.name!r} holds {self.dtype} words, which torch cannot hold"
            )
        dtype = _DTYPES[self.dtype]
        data = self.data.read(self.offset + first * dtype.itemsize, math.prod(shape) * dtype.itemsize)
        return data.view(dtype).view(shape)


def find_shards(folder: Path) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """The weight files of a folder, and the index's map from tensor to file where there is an index.

    Raises ConversionError for a folder without weights, a broken index and a missing shard.
    """
    if (folder / _SINGLE).is_file():
        return (_SINGLE,), None
    index = folder / INDEX
    if not index.is_file():
        others = sorted(
            path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".gguf", ".safetensors"}
        )
        raise ConversionError(
            f"{folder}: expected {_SINGLE} or {INDEX}, found {', '.join(others) or 'no weight files'}"
        )
    try:
        indexed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = tuple(sorted(set(indexed.values())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(
            f"{index}: expected a JSON object with a weight_map of tensor names to file names ({error!r})"
        ) from error
    for shard in shards:
        if not isinstance(shard, str) or os.path.basename(shard) != shard:
            raise ConversionError(f"{index}: {shard!r} is not a bare file name")
        if not (folder / shard).is_file():
            count = sum(file == shard for file in indexed.values())
            raise ConversionError(f"{folder / shard}: missing shard; {INDEX} places {count} tensors there")
    return shards, indexed


def open_shards(folder: Path, shards: Sequence[str]) -> dict[str, StoredTensor]:
    """Every tensor of the files, by name. Raises ConversionError for a broken file and a tensor in two files."""
    found: dict[str, StoredTensor] = {}
    for shard in shards:
        try:
            data = _File(folder / shard)
        except OSError as error:
            raise ConversionError(f"{folder / shard}: not a readable safetensors file: {error}") from error
        for name, (dtype, shape, begin, _) in sorted(data.header.items()):
            if name in found:
                raise ConversionError(f"{folder / shard}: tensor {name!r} lies in {found[name].file} too")
            found[name] = StoredTensor(name, shard, dtype, shape, begin, data)
    return found
