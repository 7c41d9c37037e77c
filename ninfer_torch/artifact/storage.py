"""The open files of an artifact: exact reads, one private mapping per file, parts opened when first needed.

Source of the rules: spec/container.md 2, 3 and 13.1. No torch here.
"""

from __future__ import annotations

import mmap
import os
import platform
import stat
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from ninfer_torch.artifact.framing import HEADER_BYTES, PAGE, VERSION, EntryHeader, PartHeader, pieces
from ninfer_torch.artifact.legacy import parse_legacy_directory
from ninfer_torch.artifact.schema import Directory, parse_directory
from ninfer_torch.errors import ArtifactError

__all__ = ["CHUNK_BYTES", "FileSet", "OpenFile", "Span"]

CHUNK_BYTES = 1 << 23
"""Bytes of one chunk of a streaming read."""

_READ_LIMIT = 1 << 30  # some systems refuse to read more than 2^31-1 bytes at once

# Python 3.10 does not export the flag; without it Linux would reserve swap for a writable private mapping and refuse
# files larger than memory.
_COMMON_LINUX = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if _COMMON_LINUX else 0)


class OpenFile:
    """One regular file, open for reading. Closed by `close` or when it is no longer referenced."""

    def __init__(self, path: Path, *, follow_links: bool = True) -> None:
        """Open `path`. Raises ArtifactError of kind `file` when it cannot be opened or is not a regular file."""
        self.path = path
        # O_NONBLOCK keeps a named pipe from hanging the open; regular files ignore it.
        flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
        try:
            self._fd = os.open(path, flags)
        except (OSError, ValueError) as error:
            if not follow_links and path.is_symlink():
                self._fail(
                    "is a symbolic link, expected a file beside the entry (links are followed only from a linked entry)"
                )
            self._fail(f"cannot be opened: {getattr(error, 'strerror', None) or error}", error)
        self.close = weakref.finalize(self, os.close, self._fd)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            self._fail("expected a regular file")
        self.size = status.st_size
        self._mapping: mmap.mmap | None = None
        self._lock = threading.Lock()

    def _fail(self, reason: str, cause: Exception | None = None) -> NoReturn:
        raise ArtifactError(f"{self.path}: {reason}", kind="file") from cause

    def read(self, offset: int, count: int) -> bytes:
        """At most `count` bytes at `offset`; fewer only at the end of the file."""
        try:
            return os.pread(self._fd, min(count, _READ_LIMIT), offset)
        except OSError as error:
            self._fail(f"read of {count} bytes at {offset} failed: {error.strerror}", error)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset`. Raises ArtifactError of kind `file` when the file ends early."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._fd, [target[done : done + _READ_LIMIT]], offset + done)
            except OSError as error:
                self._fail(f"read of {len(target)} bytes at {offset} failed: {error.strerror}", error)
            if count == 0:
                self._fail(f"ends after {done} of {len(target)} bytes at {offset}")
            done += count

    def mapping(self) -> mmap.mmap:
        """The whole file as private copy-on-write memory, mapped once.

        It lives as long as anything refers to it. It is never closed by hand: tensors over it would dangle.
        """
        with self._lock:
            if self._mapping is None:
                flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
                try:
                    self._mapping = mmap.mmap(self._fd, self.size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                except (OSError, ValueError) as error:
                    self._fail(f"cannot map {self.size} bytes: {error}", error)
            return self._mapping


class Span(NamedTuple):
    """A run of bytes inside one file, `offset` counted from the file's start."""

    file: OpenFile
    offset: int
    bytes: int


class FileSet:
    """An artifact's files. The entry's header and directory are read and checked at once, parts when first touched.

    `directory` is what the file says in version 3 terms; `unbound` says why a file of an older version has no bindings.
    Parts are looked up by bare name beside the entry path as it was given. Symbolic links are followed for them only
    when the entry itself is one (a Hub snapshot links every file into a store); otherwise a linked part is refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        entry = OpenFile(path)
        self._open: dict[int, OpenFile] = {0: entry}
        self._closed = False
        try:
            self.header = EntryHeader.parse(entry.read(0, HEADER_BYTES), entry.size, str(path))
            self.directory, self.unbound = self._read_directory(entry)
        except BaseException:
            self.close()
            raise
        self._linked = path.is_symlink()

    def _read_directory(self, entry: OpenFile) -> tuple[Directory, str | None]:
        header, where = self.header, str(self.path)
        text = entry.read(header.header_bytes, header.json_bytes)
        if header.version != VERSION:
            legacy = parse_legacy_directory(text, header.version, entry.size - header.payload_start, where)
            return legacy.directory, legacy.unbound
        directory = parse_directory(text, where, self.path.name)
        expected = header.payload_start + directory.files[0].payload_bytes
        if entry.size != expected:
            raise ArtifactError(
                f"{self.path}: the file is {entry.size} bytes long, expected exactly {expected} "
                f"(payload start {header.payload_start} + files[0].payload_bytes)",
                kind="framing",
            )
        return directory, None

    def file(self, index: int) -> OpenFile:
        """File `index`, opened and checked at first use. Raises ArtifactError of kind `file`."""
        with self._lock:
            if self._closed:
                raise ArtifactError(f"{self.path}: the artifact is closed", kind="file")
            if index not in self._open:
                self._open[index] = self._open_part(index)
            return self._open[index]

    def _open_part(self, index: int) -> OpenFile:
        record = self.directory.files[index]
        part = OpenFile(self.path.parent / str(record.path), follow_links=self._linked)
        header = PartHeader(index, self.header.artifact_id)
        header.check(part.read(0, HEADER_BYTES), part.size, record.payload_bytes, str(part.path))
        return part

    def spans(self, begin: int, end: int) -> list[Span]:
        """The file bytes that hold logical bytes [begin, end), in order."""
        return [
            Span(self.file(piece.file), self._payload_start(piece.file) + piece.offset, piece.bytes)
            for piece in pieces(self.directory.files, begin, end)
        ]

    def _payload_start(self, index: int) -> int:
        return self.header.payload_start if index == 0 else PAGE

    def read_into(self, begin: int, target: memoryview) -> None:
        """Fill `target` with the logical bytes from `begin`."""
        done = 0
        for span in self.spans(begin, begin + len(target)):
            span.file.read_into(span.offset, target[done : done + span.bytes])
            done += span.bytes

    def chunks(self, begin: int, end: int, size: int = CHUNK_BYTES) -> Iterator[memoryview]:
        """Logical bytes [begin, end) in order, at most `size` at a time, in one reused buffer."""
        buffer = memoryview(bytearray(min(size, end - begin)))
        for start in range(begin, end, size):
            chunk = buffer[: min(size, end - start)]
            self.read_into(start, chunk)
            yield chunk

    def close(self) -> None:
        """Close the files. Mappings stay as long as tensors use them."""
        with self._lock:
            self._closed = True
            for file in self._open.values():
                file.close()
            self._open.clear()
