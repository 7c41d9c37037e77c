"""Reading a GGUF file's header, with every count, length and offset checked before it is used.

The `gguf` package's reader refuses a file that holds one type it does not know and trusts what the header says; here
an unknown type is only a fact about one tensor, and a hostile field is an error that names it. Source of the
structure: spec/conversion.md 6.3.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ninfer_torch.errors import ConversionError
from ninfer_torch.formats import FORMATS, GgufFormat
from ninfer_torch.layouts import align_up

__all__ = ["GGML_TYPES", "GgmlType", "GgufArray", "GgufFile", "GgufTensor", "MetadataValue"]

GGUF_VERSION = 3
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
HEADER_BYTES = 24
"""Magic, version and the two counts."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GgmlType:
    """A ggml tensor type: `block_values` consecutive elements of a row in `block_bytes` bytes (0: size not known here).

    `encoding` is what a `SourceTensor` of this type calls it, empty where nothing here can decode it; `advice` then
    says what can be done.
    """

    number: int
    name: str
    block_values: int
    block_bytes: int
    encoding: str = ""
    advice: str = ""


_REQUANTIZE = "quantize the original model again to one of the types this version reads"

_PLAIN = (
    GgmlType(0, "f32", 1, 4, "fp32"),
    GgmlType(1, "f16", 1, 2, "fp16"),
    GgmlType(24, "i8", 1, 1, "int8"),
    GgmlType(25, "i16", 1, 2, "int16"),
    GgmlType(26, "i32", 1, 4, "int32"),
    GgmlType(27, "i64", 1, 8, "int64"),
    GgmlType(28, "f64", 1, 8, "fp64"),
    GgmlType(30, "bf16", 1, 2, "bf16"),
)
_REGISTERED = tuple(
    GgmlType(record.ggml_type, name.removeprefix("gguf_"), record.block_values, record.block_bytes, name)
    for name, record in FORMATS.items()
    if isinstance(record, GgufFormat)
)
# Decoded by the `gguf` package. ggml's nvfp4 has other blocks than the registered format of that name.
_DECODED = (
    GgmlType(3, "q4_1", 32, 20, "q4_1"),
    GgmlType(7, "q5_1", 32, 24, "q5_1"),
    GgmlType(34, "tq1_0", 256, 54, "tq1_0"),
    GgmlType(35, "tq2_0", 256, 66, "tq2_0"),
    GgmlType(39, "mxfp4", 32, 17, "mxfp4"),
    GgmlType(40, "nvfp4", 64, 36, "ggml_nvfp4"),
)
# Not in the registry of formats, but their words are those of t2_g128_fp16 (spec/conversion.md 6.3).
_TERNARY = (
    GgmlType(142, "pq2_0", 128, 34, "pq2_0"),
    GgmlType(143, "ptq1_0", 128, 28, "ptq1_0"),
)
_UNDECODED = (
    GgmlType(9, "q8_1", 0, 0, advice=_REQUANTIZE),
    GgmlType(15, "q8_k", 256, 292, advice=_REQUANTIZE),
    GgmlType(41, "q1_0", 128, 18, advice=_REQUANTIZE),
)

GGML_TYPES: Mapping[int, GgmlType] = {
    kind.number: kind for kind in _PLAIN + _REGISTERED + _DECODED + _TERNARY + _UNDECODED
}
"""The ggml types known here, by number: plain words, registered, ternary and merely decoded blocks, and the others."""

_TYPE_42 = 42
_OLD_42_VALUES, _OLD_42_BYTES = 128, 34
"""The block that an early fork stored under type 42 (spec/layouts.md 8.1)."""


@dataclass(frozen=True)
class GgufArray:
    """An array in the metadata: its element type (GGUF number) and length. The elements stay in the file."""

    element_type: int
    count: int


MetadataValue = int | float | bool | str | GgufArray


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's place in the file.

    `shape` is row-major (slowest axis first), `offset` counts bytes from the start of the file, `nbytes` is 0 where the
    type's size is not known.
    """

    name: str
    shape: tuple[int, ...]
    type: GgmlType
    offset: int
    nbytes: int


_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _STRING, _ARRAY, _UINT32 = 7, 8, 9, 4
_LEAST_KEY_BYTES = 8 + 4 + 1
_LEAST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


class _Cursor:
    """A position in the header; every step checks that the bytes it wants are in the file."""

    def __init__(self, data: mmap.mmap, file: str) -> None:
        self.data = data
        self.file = file
        self.size = len(data)
        self.offset = 0

    def fail(self, message: str) -> NoReturn:
        raise ConversionError(f"{self.file}: {message}")

    def skip(self, count: int, what: str) -> int:
        """Steps over `count` bytes and returns where they begin."""
        begin = self.offset
        if count > self.size - begin:
            self.fail(f"{what} at byte {begin} takes {count} bytes, but the file ends at byte {self.size}")
        self.offset = begin + count
        return begin

    def number(self, layout: str, what: str) -> int:
        begin = self.skip(struct.calcsize(layout), what)
        return struct.unpack_from(layout, self.data, begin)[0]

    def string(self, what: str) -> str:
        length = self.number("<Q", f"the length of {what}")
        begin = self.skip(length, what)
        try:
            return self.data[begin : begin + length].decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} at byte {begin} is not UTF-8 ({error.reason})")

    def count(self, least_bytes: int, what: str) -> int:
        """A u64 count of things of at least `least_bytes` bytes each, for which the rest of the file must have room."""
        count = self.number("<Q", f"the number of {what}")
        room = (self.size - self.offset) // least_bytes
        if count > room:
            self.fail(f"the header promises {count} {what}, but the rest of the file has room for at most {room}")
        return count


def _read_value(cursor: _Cursor, kind: int, what: str) -> MetadataValue:
    if kind == _STRING:
        return cursor.string(what)
    if kind == _ARRAY:
        return _read_array(cursor, what)
    if kind not in _SCALARS:
        cursor.fail(f"{what} has value type {kind}, expected one of 0 to 12")
    value = cursor.number(_SCALARS[kind], what)
    if kind != _BOOL:
        return value
    if value > 1:
        cursor.fail(f"{what} is a bool with byte {value}, expected 0 or 1")
    return bool(value)


def _read_array(cursor: _Cursor, what: str) -> GgufArray:
    element_type = cursor.number("<I", f"the element type of {what}")
    if element_type in _SCALARS:
        width = struct.calcsize(_SCALARS[element_type])
        count = cursor.count(width, f"elements of {what}")
        cursor.skip(count * width, what)
    elif element_type == _STRING:
        count = cursor.count(8, f"strings of {what}")
        for index in range(count):
            cursor.skip(cursor.number("<Q", what), f"string {index} of {what}")
    else:
        cursor.fail(f"{what} is an array of value type {element_type}, expected a scalar type or string")
    return GgufArray(element_type, count)


def _read_prefix(cursor: _Cursor) -> None:
    cursor.skip(4, "the magic number")
    if cursor.data[:4] != b"GGUF":
        cursor.fail(f"not a GGUF file: it begins with {cursor.data[:4]!r}, expected b'GGUF'")
    version = cursor.number("<I", "the version")
    if version == GGUF_VERSION:
        return
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version > 0xFFFF and swapped <= 0xFFFF:
        cursor.fail(f"a big-endian GGUF file of version {swapped}; only little-endian version {GGUF_VERSION} is read")
    cursor.fail(
        f"a GGUF file of version {version}; only version {GGUF_VERSION} is read; convert the model again with a "
        "current llama.cpp"
    )


def _read_alignment(cursor: _Cursor, metadata: Mapping[str, MetadataValue], kinds: Mapping[str, int]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if kinds.get("general.alignment", _UINT32) != _UINT32 or not isinstance(alignment, int):
        cursor.fail(f"general.alignment has value type {kinds['general.alignment']}, expected {_UINT32} (uint32)")
    if alignment < 1 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment}, expected a power of two")
    return alignment


def _read_tensor(cursor: _Cursor, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """(name, row-major shape, type number, offset in the data section)."""
    name = cursor.string(f"the name of tensor {index}")
    what = f"tensor {name!r}"
    rank = cursor.number("<I", f"the rank of {what}")
    if not 1 <= rank <= MAX_DIMENSIONS:
        cursor.fail(f"{what} has {rank} dimensions, expected 1 to {MAX_DIMENSIONS}")
    extents = [cursor.number("<Q", f"dimension {axis} of {what}") for axis in range(rank)]
    if 0 in extents:
        cursor.fail(f"{what} has dimensions {extents}, expected every extent to be at least 1")
    number = cursor.number("<I", f"the type of {what}")
    return name, tuple(reversed(extents)), number, cursor.number("<Q", f"the offset of {what}")


def _tensor_bytes(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: GgmlType) -> int:
    if not kind.block_values:
        return 0
    if shape[-1] % kind.block_values:
        cursor.fail(
            f"tensor {name!r} of type {kind.name} has {shape[-1]} columns, expected a multiple of {kind.block_values}"
        )
    return math.prod(shape) // kind.block_values * kind.block_bytes


class GgufFile:
    """A GGUF file of version 3, mapped read-only, its header read and checked.

    Opening reads the header only. Raises ConversionError, naming the file, the field or tensor, what was found and what
    was expected, for anything the header gets wrong: counts and lengths beyond the file, illegal dimensions, duplicate
    names, tensors that overlap or end past the file. `name` is the file's name without its path, `size` its bytes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.name = self.path.name
        try:
            with open(path, "rb") as stream:
                self.size = os.fstat(stream.fileno()).st_size
                if self.size < HEADER_BYTES:
                    raise ConversionError(
                        f"{self.name}: {self.size} bytes, too few for a GGUF header of {HEADER_BYTES}"
                    )
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ConversionError(f"{self.name}: cannot be opened ({error.strerror or error})") from error
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self._read(_Cursor(self._map, self.name))

    def _read(self, cursor: _Cursor) -> None:
        _read_prefix(cursor)
        tensor_count = cursor.count(_LEAST_TENSOR_BYTES, "tensors")
        key_count = cursor.count(_LEAST_KEY_BYTES, "metadata keys")
        self.metadata: dict[str, MetadataValue] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        kinds: dict[str, int] = {}
        for index in range(key_count):
            begin = cursor.offset
            key = cursor.string(f"metadata key {index}")
            if key in self.metadata:
                cursor.fail(f"metadata key {key!r} occurs twice")
            kinds[key] = cursor.number("<I", f"the value type of {key!r}")
            self.metadata[key] = _read_value(cursor, kinds[key], f"metadata value {key!r}")
            self._spans[key] = (begin, cursor.offset)
        self.alignment = _read_alignment(cursor, self.metadata, kinds)
        entries = [_read_tensor(cursor, index) for index in range(tensor_count)]
        data_start = align_up(cursor.offset, self.alignment)
        self.tensors: dict[str, GgufTensor] = {}
        for name, shape, number, offset in entries:
            if name in self.tensors:
                cursor.fail(f"tensor {name!r} occurs twice")
            if offset % self.alignment:
                cursor.fail(f"tensor {name!r} begins at data offset {offset}, expected a multiple of {self.alignment}")
            kind = GGML_TYPES.get(number) or GgmlType(number, "unknown", 0, 0, advice=_REQUANTIZE)
            nbytes = _tensor_bytes(cursor, name, shape, kind)
            self.tensors[name] = GgufTensor(name, shape, kind, data_start + offset, nbytes)
        self._check_spans(cursor)

    def _check_spans(self, cursor: _Cursor) -> None:
        ordered = sorted(self.tensors.values(), key=lambda tensor: tensor.offset)
        for tensor, follower in zip(ordered, [*ordered[1:], None], strict=False):
            room = (follower.offset if follower else self.size) - tensor.offset
            if tensor.nbytes > room or tensor.offset >= self.size:
                cursor.fail(self._wrong_span(tensor, follower, room))

    def _wrong_span(self, tensor: GgufTensor, follower: GgufTensor | None, room: int) -> str:
        end = tensor.offset + tensor.nbytes
        found = f"tensor {tensor.name!r} of type {tensor.type.name} takes bytes {tensor.offset} to {end}"
        old = math.prod(tensor.shape) // _OLD_42_VALUES * _OLD_42_BYTES
        if (
            tensor.type.number == _TYPE_42
            and not tensor.shape[-1] % _OLD_42_VALUES
            and 0 <= room - old < self.alignment
        ):
            return (
                f"tensor {tensor.name!r} of type 42 has room for {room} bytes: that is the older block of "
                f"{_OLD_42_VALUES} values in {_OLD_42_BYTES} bytes ({old} bytes), expected ggml's Q2_0 block of 64 "
                f"values in 18 bytes ({tensor.nbytes} bytes); convert the model again to types 142/143 or another type"
            )
        if follower is None or end > self.size:
            return f"{found}, but the file ends at byte {self.size}; is the download complete?"
        return f"{found} and overlaps tensor {follower.name!r}, which begins at byte {follower.offset}"

    def numbers(self, key: str) -> tuple[int | float, ...]:
        """The elements of an array of numbers in the metadata. Raises ConversionError for any other value."""
        value = self.metadata[key]
        if not isinstance(value, GgufArray) or value.element_type not in _SCALARS:
            raise ConversionError(f"{self.name}: metadata {key!r} is {value!r}, expected an array of numbers")
        _, end = self._spans[key]
        layout = _SCALARS[value.element_type]
        begin = end - value.count * struct.calcsize(layout)
        return tuple(number for (number,) in struct.iter_unpack(layout, self._map[begin:end]))

    def strings(self, key: str) -> tuple[str, ...]:
        """The elements of an array of strings in the metadata; what is not UTF-8 in them is replaced.

        Raises ConversionError for any other value.
        """
        value = self.metadata[key]
        if not isinstance(value, GgufArray) or value.element_type != _STRING:
            raise ConversionError(f"{self.name}: metadata {key!r} is {value!r}, expected an array of strings")
        begin, _ = self._spans[key]
        cursor = _Cursor(self._map, self.name)
        cursor.offset = begin
        cursor.skip(cursor.number("<Q", key) + 4 + 4 + 8, key)  # the key, two types and the count
        found = []
        for _ in range(value.count):
            length = cursor.number("<Q", key)
            at = cursor.skip(length, key)
            found.append(self._map[at : at + length].decode("utf-8", "replace"))
        return tuple(found)

    def metadata_bytes(self, key: str) -> bytes:
        """One metadata entry as it lies in the file: key, value type and value."""
        begin, end = self._spans[key]
        return self._map[begin:end]

    def rows(self, tensor: GgufTensor) -> Bytes:
        """A tensor's bytes, not copied: uint8 [leading extent, bytes per row]; a vector has one row per block.

        Pages of the file that were read before leave the process, which keeps them only in the system's cache: a reader
        of the whole file stays small. Earlier results stay valid.
        """
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)
        rows = tensor.shape[0] if len(tensor.shape) > 1 else tensor.shape[0] // tensor.type.block_values
        return self._bytes[tensor.offset : tensor.offset + tensor.nbytes].reshape(rows, -1)
