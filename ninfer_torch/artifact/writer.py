"""Writing artifacts: objects are declared in order and streamed to disk when the writer finishes.

Source of the rules: spec/container.md 11.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar, final

from torch import Tensor

from ninfer_torch.artifact.framing import PAGE, EntryHeader, PartHeader, plan_files
from ninfer_torch.artifact.journal import Journal
from ninfer_torch.artifact.reader import Artifact
from ninfer_torch.artifact.schema import (
    Binding,
    Component,
    Directory,
    FileRecord,
    Object,
    Part,
    Proposal,
    ResourceObject,
    TensorObject,
    Use,
    dump_directory,
    parse_directory,
)
from ninfer_torch.artifact.staging import StagedFiles
from ninfer_torch.errors import ArtifactError
from ninfer_torch.layouts import RESOURCE_ENCODING, align_up, encoded_bytes, layout_of
from ninfer_torch.tensors import PackedTensor, encode

__all__ = ["ArtifactWriter", "rewrite"]

ByteSource = Callable[[], Iterable[Any]]
BindingLike = str | Binding | Sequence[tuple[str, int, int]]
T = TypeVar("T")

TENSOR_ALIGNMENT = 256
"""Alignment of every registered layout, and so of a tensor of an unregistered one that is copied as it is."""


@final
class ArtifactWriter:
    """Collects the records of an artifact and writes them at once.

    Objects lie in the order of the calls. Nothing touches the disk before `finish`, which a `with` block calls when it
    ends without an exception; then every payload is pulled once, in order, so that memory stays at one chunk. An
    artifact appears whole or not at all, and never replaces a file. `metadata` and `provenance` are dicts to fill in.

        with ArtifactWriter("model.ninfer") as writer:
            writer.component("text", config)
            writer.tensor("weight/000000", "q8_g32_fp16", (N, K), payload)
            writer.bind("text/token_embedding", "weight/000000")
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        artifact_id: str | bytes | None = None,
        max_file_bytes: int | None = None,
    ) -> None:
        """`artifact_id`: 16 bytes or 32 hexadecimal digits, random by default. `max_file_bytes` bounds every file,
        framing included.

        Raises ArtifactError for another id, and of kind `file` when `path` exists.
        """
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.provenance: dict[str, Any] = {}
        self._artifact_id = _id_bytes(artifact_id)
        self._limit = max_file_bytes
        self._components: dict[str, Component] = {}
        self._objects: dict[str, Object] = {}
        self._sources: list[ByteSource] = []
        self._bindings: dict[str, Binding] = {}
        self._uses: list[Use] = []
        self._end = 0
        self._finished = False
        StagedFiles([self.path])

    @property
    def planned_bytes(self) -> int:
        """Bytes of the payload declared so far, gaps included: what `progress` adds up to."""
        return self._end

    def component(
        self,
        id: str,
        config: Mapping[str, Any],
        target: str | None = None,
        resources: Mapping[str, str] | None = None,
        proposal: Proposal | Mapping[str, Any] | None = None,
    ) -> None:
        """Declare a component; `resources` maps roles to ids of resource objects."""
        if proposal is not None and not isinstance(proposal, Proposal):
            if not {"domain"} <= proposal.keys() <= {"domain", "rows"}:
                self._fail(
                    f"component {id!r}: proposal has members {list(proposal)}, expected domain and rows", "schema"
                )
            proposal = Proposal(**proposal)
        self._enter(self._components, "component", id, Component(config, target, dict(resources or {}), proposal))

    def resource(self, object_id: str, data: bytes | bytearray | memoryview) -> None:
        """Append a resource object holding `data` (at least one byte)."""
        content = bytes(memoryview(data))
        self._append(ResourceObject(object_id, RESOURCE_ENCODING, self._end, len(content)), lambda: (content,))

    def tensor(
        self,
        object_id: str,
        format: str,
        shape: Sequence[int],
        payload: Any,
        divisors: int = 1,
    ) -> None:
        """Append a tensor object of `format` and `shape`.

        `payload` is its encoded bytes (any C-contiguous buffer), a Tensor of that shape whose words are of that format
        (never a conversion; see `tensors.encode`), or a function without arguments that returns an iterable of buffers,
        called once while the artifact is written; a buffer may be reused once the next is asked for. Raises FormatError
        or LayoutError for what the layout refuses, ArtifactError of kind `encoding` for another number of bytes.
        """
        shape = tuple(shape)
        size = encoded_bytes(format, shape, divisors)
        layout = layout_of(format)
        record = TensorObject(
            object_id, shape, format, layout.name, align_up(self._end, layout.alignment), size, divisors
        )
        self._append(record, self._source(record, payload))

    def _source(self, record: TensorObject, payload: Any) -> ByteSource:
        if isinstance(payload, Tensor):
            shape = payload.geometry[:2] if isinstance(payload, PackedTensor) else tuple(payload.shape)
            if shape != record.shape:
                self._fail(
                    f"tensor {record.id!r} has shape {list(shape)}, declared as {list(record.shape)}", "encoding"
                )
            return lambda: (encode(payload, record.format),)
        if callable(payload):
            return payload
        data = memoryview(payload)
        if data.nbytes != record.bytes:
            self._fail(f"payload of tensor {record.id!r} has {data.nbytes} bytes, expected {record.bytes}", "encoding")
        return lambda: (data,)

    def _append(self, record: Object, source: ByteSource) -> None:
        self._enter(self._objects, "object", record.id, record)
        self._sources.append(source)
        self._end = record.end

    def bind(
        self, name: str, object_id: str | None = None, *, parts: Iterable[tuple[str, int, int]] | None = None
    ) -> None:
        """Bind a logical parameter to a whole object or to parts (object id, begin, end), counted in elements."""
        if (object_id is None) == (parts is None):
            self._fail(f"binding {name!r} needs either an object id or parts", "schema")
        self._enter(self._bindings, "binding", name, _binding(list(parts or ()) if object_id is None else object_id))

    def use(
        self,
        parameter: str,
        input: str,
        activation_policy: str | None = None,
        auxiliaries: Mapping[str, BindingLike] | None = None,
    ) -> None:
        """Declare a use; `auxiliaries` maps roles to an object id or to parts."""
        self._check_unfinished()
        entries = {role: _binding(value) for role, value in (auxiliaries or {}).items()}
        self._uses.append(Use(parameter, input, activation_policy, entries))

    def _enter(self, table: dict[str, T], what: str, name: str, record: T) -> None:
        self._check_unfinished()
        if name in table:
            self._fail(f"{what} {name!r} is declared twice", "schema")
        table[name] = record

    def _check_unfinished(self) -> None:
        if self._finished:
            self._fail("the writer has finished", "file")

    def _fail(self, reason: str, kind: str) -> NoReturn:
        raise ArtifactError(f"{self.path}: {reason}", kind=kind)

    def finish(self, progress: Callable[[int], None] | None = None, journal: Journal | None = None) -> None:
        """Write and publish the artifact; `progress` is called with the number of payload bytes just written.

        The directory passes the reader's own checks first. Raises ArtifactError naming the record or file at fault.
        After any exception, an interrupt included, no file of this artifact remains, unless its entry was in place.
        With a `journal`, what is written so far stays for a later process with the same records and journal, which goes
        on after the last object that is complete.
        """
        self._check_unfinished()
        if not self._objects:
            self._fail("no object was declared, expected at least one", "schema")
        text, files = plan_files(self.path.name, self._end, self._limit, self._dump)
        parse_directory(text, str(self.path), self.path.name)
        targets = [self.path, *(self.path.with_name(str(record.path)) for record in files[1:])]
        staged = StagedFiles(targets, journal.token if journal is not None else None)
        start = journal.position if journal is not None else 0
        try:
            with closing(self._payload(start, staged, journal)) as payload:
                stream = _ByteStream(payload, progress)
                if start and progress is not None:
                    progress(start)
                self._write_files(staged, files, text, stream, start)
                stream.close()
            staged.publish()
        except BaseException as error:
            staged.discard(keep_temporaries=journal is not None and journal.outlives(error))
            raise
        self._finished = True
        if journal is not None:
            journal.remove()

    def _dump(self, files: tuple[FileRecord, ...]) -> bytes:
        return dump_directory(
            Directory(
                self._components,
                tuple(self._objects.values()),
                self._bindings,
                tuple(self._uses),
                files,
                self.metadata,
                self.provenance,
            )
        )

    def _write_files(
        self, staged: StagedFiles, files: tuple[FileRecord, ...], text: bytes, stream: _ByteStream, start: int
    ) -> None:
        """Write the files, of which payload bytes [0, `start`) are in place."""
        position = 0
        for index, record in enumerate(files):
            if index == 0:
                head = EntryHeader(len(text), self._artifact_id).pack() + text
            else:
                head = PartHeader(index, self._artifact_id).pack().ljust(PAGE, b"\0")
            present = min(max(start - position, 0), record.payload_bytes)
            if present and staged.head(index, len(head)) != head:
                self._fail(
                    f"the unfinished file {index} begins otherwise than expected; it cannot be continued", "file"
                )
            with staged.create(index, len(head) + present if present else 0) as write:
                if not present:
                    write(head)
                stream.copy(record.payload_bytes - present, write)
            written, expected = staged.size(index), len(head) + record.payload_bytes
            if written != expected:
                self._fail(f"file {index} is {written} bytes long, expected {expected}", "file")
            position += record.payload_bytes

    def _payload(self, start: int, staged: StagedFiles, journal: Journal | None) -> Generator[memoryview, None, None]:
        """The logical payload from `start` in order: every object exactly once and exactly its bytes, gaps zero.

        A consumer asks for a chunk once it has written the one before: then an object that ended there is complete.
        """
        position = 0
        for record, source in zip(self._objects.values(), self._sources, strict=True):
            if record.end <= start:
                position = record.end
                continue
            if record.offset > position:
                yield memoryview(bytes(record.offset - position))
            done = 0
            for chunk in source():
                view = memoryview(chunk)
                done += view.nbytes
                if done > record.bytes:
                    break
                if view.nbytes:
                    yield view.cast("B")
            if done != record.bytes:
                count = f"at least {done}" if done > record.bytes else str(done)
                self._fail(f"payload of object {record.id!r} has {count} bytes, expected {record.bytes}", "encoding")
            position = record.end
            if journal is not None:
                journal.reached(position, staged.sync)

    def __enter__(self) -> ArtifactWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and not self._finished:
            self.finish()


class _ByteStream:
    """A stream of chunks, cut where files end."""

    def __init__(self, chunks: Iterator[memoryview], progress: Callable[[int], None] | None) -> None:
        self._chunks = chunks
        self._progress = progress
        self._rest = memoryview(b"")

    def close(self) -> None:
        """Let the source notice bytes after its end."""
        for _ in self._chunks:
            raise ArtifactError("the payload goes on after its last object", kind="encoding")

    def copy(self, count: int, write: Callable[[memoryview], None]) -> None:
        """Pass the next `count` bytes to `write`."""
        while count:
            if not self._rest:
                self._rest = next(self._chunks)
            head, self._rest = self._rest[:count], self._rest[count:]
            write(head)
            count -= len(head)
            if self._progress is not None:
                self._progress(len(head))


def _id_bytes(artifact_id: str | bytes | None) -> bytes:
    if artifact_id is None:
        return uuid.uuid4().bytes
    try:
        data = bytes.fromhex(artifact_id) if isinstance(artifact_id, str) else bytes(artifact_id)
    except ValueError:
        data = b""
    if len(data) != 16:
        raise ArtifactError(
            f"artifact_id: found {artifact_id!r}, expected 16 bytes or 32 hexadecimal digits", kind="framing"
        )
    return data


def _binding(value: BindingLike) -> Binding:
    if isinstance(value, Binding):
        return value
    if isinstance(value, str):
        return Binding(value)
    return Binding(None, tuple(Part(*part) for part in value))


def rewrite(
    artifact: Artifact,
    path: str | os.PathLike[str],
    *,
    artifact_id: str | bytes | None = None,
    max_file_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
    keep_offsets: bool = False,
) -> None:
    """Copy an artifact: same objects in the same order with the same bytes, same records, files cut anew.

    Objects are laid out as a writer lays them out, so unusual gaps close, unless `keep_offsets`. Their bytes are not
    interpreted: an object of a format unknown here is copied too.
    """
    writer = ArtifactWriter(path, artifact_id=artifact_id, max_file_bytes=max_file_bytes)
    writer.metadata.update(artifact.metadata)
    writer.provenance.update(artifact.provenance)
    writer._components.update(artifact.components)
    writer._bindings.update(artifact.bindings)
    writer._uses.extend(artifact.uses)
    for record in artifact.objects.values():
        alignment = TENSOR_ALIGNMENT if isinstance(record, TensorObject) else 1
        offset = record.offset if keep_offsets else align_up(writer.planned_bytes, alignment)
        writer._append(replace(record, offset=offset), partial(artifact.object_chunks, record.id))
    writer.finish(progress)
