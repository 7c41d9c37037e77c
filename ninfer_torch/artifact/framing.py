"""Frames of the files of a container: headers, payload starts, and how the payload is cut over files.

Source of the rules: spec/container.md 2, 3, 11 and 13.1. Everything is little-endian; no torch here.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ninfer_torch.artifact.records import FileRecord
from ninfer_torch.errors import ArtifactError

__all__ = [
    "ENTRY_MAGIC",
    "HEADER_BYTES",
    "LEGACY_VERSIONS",
    "MAX_JSON_BYTES",
    "PAGE",
    "PART_MAGIC",
    "VERSION",
    "EntryHeader",
    "PartHeader",
    "Piece",
    "part_name",
    "pieces",
    "plan_files",
]

HEADER_BYTES = 32
PAGE = 4096
VERSION = 3
LEGACY_VERSIONS = (1, 2)
"""Older container versions, read but never written: one file, a shorter header without an id."""
ENTRY_MAGIC = b"NINFER\x00" + bytes([VERSION])
PART_MAGIC = b"NINPRT\x00" + bytes([VERSION])

MAX_JSON_BYTES = 1 << 28
"""Longest directory that is read: a broken header must not ask for all memory, and real ones stay under 2^24 bytes."""

_HEADER = struct.Struct("<8sQ16s")
_LEGACY_HEADER = struct.Struct("<8sQ")
_HEADERS = {VERSION: _HEADER} | dict.fromkeys(LEGACY_VERSIONS, _LEGACY_HEADER)
_NO_ID = bytes(16)


def _page_up(value: int) -> int:
    return -(-value // PAGE) * PAGE


@dataclass(frozen=True)
class EntryHeader:
    """The first bytes of an entry file: 32 in version 3, 16 in versions 1 and 2, whose `artifact_id` reads as zeros."""

    json_bytes: int
    artifact_id: bytes
    version: int = VERSION

    @property
    def header_bytes(self) -> int:
        """Bytes before the JSON text."""
        return _HEADERS[self.version].size

    @property
    def payload_start(self) -> int:
        """File offset of the entry's payload segment."""
        return _page_up(self.header_bytes + self.json_bytes)

    def pack(self) -> bytes:
        return _HEADER.pack(ENTRY_MAGIC, self.json_bytes, self.artifact_id)

    @classmethod
    def parse(cls, data: bytes, file_bytes: int, where: str) -> EntryHeader:
        """The header in `data`, the first HEADER_BYTES bytes of a file of `file_bytes` bytes, or all of a shorter one.

        Raises ArtifactError of kind `framing` for a short file, another magic or version, or an impossible JSON length.
        """

        def check(condition: bool, reason: str) -> None:
            if not condition:
                raise ArtifactError(f"{where}: header: {reason}", kind="framing")

        check(len(data) >= len(ENTRY_MAGIC), f"the file is {file_bytes} bytes long, expected at least {HEADER_BYTES}")
        magic = data[: len(ENTRY_MAGIC)]
        check(magic[:6] != PART_MAGIC[:6], "this is a continuation file of an artifact, open its entry file")
        check(
            magic[:7] == ENTRY_MAGIC[:7],
            f"found magic {magic.hex(' ')}, expected {ENTRY_MAGIC.hex(' ')} (not a .ninfer file)",
        )
        version = magic[7]
        check(version in _HEADERS, _unknown_version(version))
        size = _HEADERS[version].size
        check(len(data) >= size, f"the file is {file_bytes} bytes long, expected at least {size}")
        _, json_bytes, *rest = _HEADERS[version].unpack(data[:size])
        artifact_id = rest[0] if rest else _NO_ID
        room = file_bytes - size
        check(
            1 <= json_bytes <= room, f"json_bytes is {json_bytes}, expected 1 to {room} in a file of {file_bytes} bytes"
        )
        check(json_bytes <= MAX_JSON_BYTES, f"json_bytes is {json_bytes}, expected at most {MAX_JSON_BYTES}")
        return cls(json_bytes, artifact_id, version)


def _unknown_version(found: int) -> str:
    older = " and ".join(map(str, LEGACY_VERSIONS))
    return (
        f"found container version {found}, expected version {', '.join(map(str, LEGACY_VERSIONS))} or {VERSION}. Install a "
        f"newer ninfer-torch (pip install --upgrade ninfer-torch), or have the program that wrote the file write version "
        f"{VERSION}; `ninfer-torch upgrade OLD NEW` does that for versions {older} only"
    )


@dataclass(frozen=True)
class PartHeader:
    """The first 32 bytes of a continuation file: its index in `files`, and the id of the set."""

    index: int
    artifact_id: bytes

    def pack(self) -> bytes:
        return _HEADER.pack(PART_MAGIC, self.index, self.artifact_id)

    def check(self, data: bytes, file_bytes: int, payload_bytes: int, where: str) -> None:
        """Compare a file's first bytes and length with what this header and `payload_bytes` demand.

        Raises ArtifactError of kind `file`.
        """

        def check(condition: bool, reason: str) -> None:
            if not condition:
                raise ArtifactError(f"{where}: {reason}", kind="file")

        check(len(data) >= HEADER_BYTES, f"the file is {file_bytes} bytes long, expected at least {HEADER_BYTES}")
        magic, index, artifact_id = _HEADER.unpack(data[:HEADER_BYTES])
        check(magic == PART_MAGIC, f"found magic {magic.hex(' ')}, expected {PART_MAGIC.hex(' ')}")
        check(index == self.index, f"its header says part {index}, expected part {self.index}")
        check(
            artifact_id == self.artifact_id,
            f"belongs to artifact {artifact_id.hex()}, expected {self.artifact_id.hex()}",
        )
        expected = PAGE + payload_bytes
        check(file_bytes == expected, f"the file is {file_bytes} bytes long, expected exactly {expected}")


class Piece(NamedTuple):
    """A run of logical bytes inside one file: `bytes` bytes at `offset` of the payload segment of file `file`."""

    file: int
    offset: int
    bytes: int


def pieces(files: Sequence[FileRecord], begin: int, end: int) -> Iterator[Piece]:
    """Where the logical bytes [begin, end) lie, in order. The range must lie inside the payload."""
    start = 0
    for index, record in enumerate(files):
        stop = start + record.payload_bytes
        low, high = max(begin, start), min(end, stop)
        if low < high:
            yield Piece(index, low - start, high - low)
        if stop >= end:
            return
        start = stop


def part_name(entry_name: str, index: int) -> str:
    """Name the writer gives to continuation file `index` (>= 1)."""
    return f"{entry_name}.part-{index:04d}"


def plan_files(
    entry_name: str, payload_bytes: int, limit: int | None, dump: Callable[[tuple[FileRecord, ...]], bytes]
) -> tuple[bytes, tuple[FileRecord, ...]]:
    """The JSON text, padded with spaces to a whole page with its header, and the file table (spec/container.md 11).

    `dump` gives the compact text for a file table. `limit` bounds each file, framing included. Raises ArtifactError of
    kind `file` when the limit leaves no room for payload.
    """
    files: tuple[FileRecord, ...] = (FileRecord(None, payload_bytes),)
    text = dump(files)
    start = _page_up(HEADER_BYTES + len(text))
    if limit is not None and start + payload_bytes > limit:
        while True:
            files = _cut(entry_name, payload_bytes, limit, start)
            text = dump(files)
            needed = _page_up(HEADER_BYTES + len(text))
            if needed <= start:
                break
            start = needed
    return text.ljust(start - HEADER_BYTES, b" "), files


def _cut(entry_name: str, payload_bytes: int, limit: int, start: int) -> tuple[FileRecord, ...]:
    entry_room = (limit - start) // PAGE * PAGE
    part_room = (limit - PAGE) // PAGE * PAGE
    if entry_room <= 0 or part_room <= 0:
        raise ArtifactError(
            f"{entry_name}: max_file_bytes = {limit} leaves no room for payload: expected at least {start + PAGE} "
            f"(the directory takes {start} bytes, the payload goes in steps of {PAGE})",
            kind="file",
        )
    files = [FileRecord(None, min(entry_room, payload_bytes))]
    rest = payload_bytes - files[0].payload_bytes
    while rest:
        size = min(part_room, rest)
        files.append(FileRecord(part_name(entry_name, len(files)), size))
        rest -= size
    return tuple(files)
