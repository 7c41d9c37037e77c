"""Reading artifacts: `open_artifact` and what it returns. Source: spec/container.md 2 to 10, and 13."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn, final

import torch
from torch import Tensor

from ninfer_torch.artifact.bindings import bound_tensor, dequantized_binding
from ninfer_torch.artifact.schema import Binding, Component, FileRecord, Object, ResourceObject, TensorObject, Use
from ninfer_torch.artifact.storage import CHUNK_BYTES, FileSet
from ninfer_torch.errors import ArtifactError, FormatError, LayoutError, UnsupportedOperation
from ninfer_torch.formats import get_format
from ninfer_torch.kernels.checks import check_payload
from ninfer_torch.layouts import RESOURCE_ENCODING, Plane, get_layout
from ninfer_torch.tensors import NinferTensor, wrap_planes

__all__ = ["Artifact", "open_artifact"]


def open_artifact(path: str | os.PathLike[str]) -> Artifact:
    """Open a `.ninfer` file by its entry file; only header and directory are read.

    Files of container versions 1 and 2 open as the version 3 artifact they amount to, with their old object names as
    ids; see `Artifact.unbound` for those whose parameters are not known.

    Raises ArtifactError for anything spec/container.md 10 makes fatal on opening. Part files are opened when an object
    in them is read. They are looked up beside `path` as given, and may be symbolic links only where `path` is one.
    """
    return Artifact(path)


@final
class Artifact:
    """An open artifact. A context manager, but usable without `with`; tensors outlive it.

    Its records never change: `components`, `objects` (id -> record, ascending offset), `bindings` (logical name ->
    binding), `uses`, `files`, `metadata`, `provenance`. Reading
    methods may be called from several threads.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._files = FileSet(Path(path))
        directory = self._files.directory
        self._objects = MappingProxyType({record.id: record for record in directory.objects})
        self._places = {record.id: f"objects[{index}] {record.id!r}" for index, record in enumerate(directory.objects)}
        self._uses = {(use.parameter, use.input): use for use in directory.uses}
        self._policies: dict[str, list[str | None]] = {}
        for use in directory.uses:
            self._policies.setdefault(use.parameter, []).append(use.activation_policy)

    @property
    def path(self) -> Path:
        """The entry file, as it was given."""
        return self._files.path

    @property
    def version(self) -> int:
        """The container version of the file: 3, or 1 or 2 of an older file."""
        return self._files.header.version

    @property
    def unbound(self) -> str | None:
        """Why a file of container version 1 or 2 has objects only and no bindings; None where it has bindings."""
        return self._files.unbound

    @property
    def artifact_id(self) -> str:
        """The id shared by all files of the set, as 32 hexadecimal digits; zeros in versions 1 and 2, which have none."""
        return self._files.header.artifact_id.hex()

    @property
    def components(self) -> Mapping[str, Component]:
        """Component id -> component."""
        return self._files.directory.components

    @property
    def objects(self) -> Mapping[str, Object]:
        """Object id -> record, by ascending offset."""
        return self._objects

    @property
    def bindings(self) -> Mapping[str, Binding]:
        """Logical parameter name -> binding."""
        return self._files.directory.bindings

    @property
    def uses(self) -> tuple[Use, ...]:
        """Every use record, in file order."""
        return self._files.directory.uses

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """The file table; the entry is first."""
        return self._files.directory.files

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Open record; `name` is the public model name."""
        return self._files.directory.metadata

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Open record of where the weights came from."""
        return self._files.directory.provenance

    def tensor(self, object_id: str) -> Tensor:
        """A tensor object: a NinferTensor, or a plain tensor for a direct format; its planes are the file's bytes,
        mapped.

        Nothing is read before it is used, and writing to a plane changes private memory, never the file. Only an object
        that crosses files is copied, and a plane whose words a hand-cut set put at an unaligned address. The file must
        not shrink while tensors use it. Raises ArtifactError of kind `reference`, `encoding` or `file`.
        """
        record, planes = self._tensor_planes(object_id)
        spans = self._files.spans(record.offset, record.end)
        if len(spans) > 1:
            return self._wrap(record, [self._read_plane(record, plane) for plane in planes])
        mapping, start = spans[0].file.mapping(), spans[0].offset
        views = []
        for plane in planes:
            offset = start + plane.offset
            if offset % plane.dtype.itemsize:
                views.append(self._read_plane(record, plane))
            else:
                words = torch.frombuffer(mapping, dtype=plane.dtype, count=math.prod(plane.shape), offset=offset)
                views.append(words.view(plane.shape))
        return self._wrap(record, views)

    def read_tensor(self, object_id: str) -> Tensor:
        """Like `tensor`, but read into fresh memory: no mapping is made or touched. For small tensors."""
        record, planes = self._tensor_planes(object_id)
        return self._wrap(record, [self._read_plane(record, plane) for plane in planes])

    def read_elements(self, object_id: str, begin: int, end: int) -> Tensor:
        """Elements [begin, end) of a tensor object of a direct format, flat, read into fresh memory like `read_tensor`.

        Raises UnsupportedOperation for a quantized object and ArtifactError of kind `range` for elements it lacks.
        """
        record, planes = self._tensor_planes(object_id)
        if len(planes) != 1 or get_format(record.format).quantized:
            raise UnsupportedOperation(
                f"{self.path}: {self._places[object_id]} of format {record.format} has no elements to read one by one; "
                "slice rows of tensor(object_id), or dequantize() it"
            )
        if not 0 <= begin <= end <= record.elements:
            self._fail(f"{self._places[object_id]} has elements [0, {record.elements}), not [{begin}, {end})", "range")
        dtype = planes[0].dtype
        words = self._read_bytes(record.offset + begin * dtype.itemsize, (end - begin) * dtype.itemsize)
        return words.view(dtype)

    def _wrap(self, record: TensorObject, planes: Sequence[Tensor]) -> Tensor:
        return wrap_planes(record.format, record.shape, planes, divisors=record.divisors)

    def _read_plane(self, record: TensorObject, plane: Plane) -> Tensor:
        return self._read_bytes(record.offset + plane.offset, plane.nbytes).view(plane.dtype).view(plane.shape)

    def _read_bytes(self, offset: int, count: int) -> Tensor:
        data = torch.empty(count, dtype=torch.uint8)
        self._files.read_into(offset, data.numpy().data)
        return data

    def parameter(self, name: str, shape: Sequence[int] | None = None, input: str | None = None) -> Tensor:
        """A logical parameter, packed as it is stored.

        Whole rows of one K give [rows, K]; direct formats may come flat, or take `shape`. One range of one object is a
        view, several direct ranges are joined by a copy, rows of several quantized objects are a stack of views. A quantized result carries the activation policy of the use
        (`name`, `input`), without `input` that of the only use, and A16Only when there is no such policy.

        Raises ArtifactError for an unknown name or use (kind `reference`) or an impossible shape (kind `range`), and
        UnsupportedOperation where no packed tensor exists: a range inside quantized rows, or rows of several lengths.
        """
        tensor = bound_tensor(self, self._named(name), self._binding(name), shape)
        policy = self._policy(name, input)
        return tensor.with_policy(policy) if isinstance(tensor, NinferTensor) and tensor.policy != policy else tensor

    def dequantize_parameter(
        self, name: str, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """The values of a logical parameter as one dense tensor, whatever its parts; shapes as for `parameter`."""
        return dequantized_binding(self, self._named(name), self._binding(name), shape, dtype)

    def auxiliary(self, parameter: str, input: str, role: str, shape: Sequence[int] | None = None) -> Tensor:
        """The auxiliary tensor of a use in `role`. Raises ArtifactError of kind `reference` when there is none."""
        auxiliaries = self.use(parameter, input).auxiliaries
        if role not in auxiliaries:
            self._fail(
                f"use ({parameter!r}, {input!r}) has no auxiliary {role!r}, it has {', '.join(auxiliaries) or 'none'}",
                "reference",
            )
        where = self._named(parameter, f"auxiliary {role!r} of ")
        return bound_tensor(self, where, auxiliaries[role], shape)

    def use(self, parameter: str, input: str) -> Use:
        """The use of `parameter` with `input`. Raises ArtifactError of kind `reference` when there is none."""
        use = self._uses.get((parameter, input))
        if use is None:
            inputs = ", ".join(repr(use.input) for use in self.uses if use.parameter == parameter)
            self._fail(
                f"no use of parameter {parameter!r} with input {input!r}; its inputs are {inputs or 'none'}",
                "reference",
            )
        return use

    def _policy(self, name: str, input: str | None) -> str:
        if input is not None:
            return self.use(name, input).activation_policy or "A16Only"
        policies = self._policies.get(name, [])
        return (policies[0] if len(policies) == 1 else None) or "A16Only"

    def _binding(self, name: str) -> Binding:
        if name not in self.bindings:
            note = f": {self.unbound}" if self.unbound else ""
            self._fail(f"no parameter {name!r} among {len(self.bindings)} bindings{note}", "reference")
        return self.bindings[name]

    def _named(self, name: str, prefix: str = "") -> str:
        return f"{self.path}: {prefix}parameter {name!r}"

    def resource(self, object_id: str) -> bytes:
        """The bytes of a resource object."""
        record = self._record(object_id)
        if not isinstance(record, ResourceObject):
            self._fail(f"{self._places[object_id]} is a tensor, expected a resource", "reference")
        return self.read_object(object_id)

    def read_object(self, object_id: str, check: bool = False) -> bytes:
        """Every stored byte of one object.

        Format, layout, size and alignment are always checked (kind `encoding`); `check=True` also refuses words outside
        the format's language and nonzero bytes in gaps between planes (kind `value`).
        """
        self.check_object(object_id)
        record = self._record(object_id)
        if not (check and isinstance(record, TensorObject)):
            return b"".join(map(bytes, self.object_chunks(object_id)))
        payload = self._read_bytes(record.offset, record.bytes)
        try:
            check_payload(record.format, record.shape, payload, divisors=record.divisors, where=self._places[object_id])
        except FormatError as error:
            raise ArtifactError(f"{self.path}: {error}", kind="value") from error
        return payload.numpy().tobytes()

    def check_object(self, object_id: str) -> None:
        """Check format, layout, size and alignment of a tensor, or the encoding of a resource, reading no byte of it.

        Raises ArtifactError of kind `encoding`.
        """
        record = self._record(object_id)
        if isinstance(record, TensorObject):
            self._tensor_planes(object_id)
        elif record.encoding != RESOURCE_ENCODING:
            self._fail(
                f"{self._places[object_id]}: encoding {record.encoding!r}, expected {RESOURCE_ENCODING!r}", "encoding"
            )

    def object_chunks(self, object_id: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[memoryview]:
        """The stored bytes of one object, uninterpreted, in a reused buffer: use each chunk before taking the next."""
        record = self._record(object_id)
        return self._files.chunks(record.offset, record.end, chunk_bytes)

    def _record(self, object_id: str) -> Object:
        if object_id not in self._objects:
            self._fail(f"no object {object_id!r} among {len(self._objects)} objects", "reference")
        return self._objects[object_id]

    def _tensor_planes(self, object_id: str) -> tuple[TensorObject, tuple[Plane, ...]]:
        record = self._record(object_id)
        place = self._places[object_id]
        if not isinstance(record, TensorObject):
            self._fail(f"{place} is a resource, expected a tensor", "reference")
        try:
            layout = get_layout(record.layout)
            planes = layout.planes(record.format, record.shape, record.divisors)
        except (FormatError, LayoutError) as error:
            raise ArtifactError(f"{self.path}: {place}: {error}", kind="encoding") from error
        if record.bytes != planes[-1].end:
            self._fail(
                f"{place}: bytes is {record.bytes}, expected {planes[-1].end} for {record.format} {list(record.shape)} "
                f"in {layout.name}",
                "encoding",
            )
        if record.offset % layout.alignment:
            self._fail(f"{place}: offset is {record.offset}, expected a multiple of {layout.alignment}", "encoding")
        return record, planes

    def _fail(self, reason: str, kind: str) -> NoReturn:
        raise ArtifactError(f"{self.path}: {reason}", kind=kind)

    def close(self) -> None:
        """Close the files. Tensors already made stay valid; reading more raises ArtifactError of kind `file`."""
        self._files.close()

    def __enter__(self) -> Artifact:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Artifact({str(self.path)!r}, {len(self.objects)} objects, {len(self.bindings)} parameters)"
