"""The safetensors files of a folder: found by the index, opened once, read by rows.

Rows are read into memory of their own, not mapped: the pages of a mapping would stay with the process, and a conversion
would end with its whole source resident.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

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


class _File:
    """An open safetensors file whose header has been checked by its own library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stream = open(path, "rb")  # noqa: SIM115 (open as long as a tensor refers to it)
        length = int.from_bytes(self.stream.read(8), "little")
        self.header: dict[str, Any] = json.loads(self.stream.read(length))
        self.start = 8 + length

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
            with safe_open(str(folder / shard), framework="pt", device="cpu") as handle:
                names = list(handle.keys())
            data = _File(folder / shard)
        except (SafetensorError, OSError) as error:
            raise ConversionError(f"{folder / shard}: not a readable safetensors file: {error}") from error
        for name in names:
            if name in found:
                raise ConversionError(f"{folder / shard}: tensor {name!r} lies in {found[name].file} too")
            entry = data.header[name]
            found[name] = StoredTensor(
                name, shard, entry["dtype"], tuple(entry["shape"]), entry["data_offsets"][0], data
            )
    return found
