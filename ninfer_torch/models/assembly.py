"""A Transformers parameter out of an artifact: planned on records alone, then built without a copy of quantized words.

Rows of one object that lie side by side in the parameter are one view of it. What comes from several objects, or in
another order, is a `StackedRows`; what its uses fold with a rotation or a permutation of inputs, a `TransformedInput`.
Only parameters whose objects are all direct become plain tensors. Source: spec/container.md 6 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import torch

from ninfer_torch.artifact.reader import Artifact
from ninfer_torch.artifact.schema import ACTIVATION_POLICIES, Binding, Part, TensorObject, Use
from ninfer_torch.errors import ArtifactError, LayoutError, UnsupportedOperation
from ninfer_torch.formats import get_format
from ninfer_torch.layouts import encoded_bytes
from ninfer_torch.models.base import LogicalParameter, ModelParameter, join_values
from ninfer_torch.tensors import NinferTensor
from ninfer_torch.tensors.patch import patch_kernel
from ninfer_torch.tensors.stacked import stack_rows
from ninfer_torch.tensors.transformed import TRANSFORMS, transform_input

__all__ = ["Assembly", "Fold", "Segment", "build_parameter", "plan_parameter"]

_ROLES = ("activation_input_divisor", *TRANSFORMS)
"""Auxiliaries that are understood; a divisor matters to 4-bit activations only (spec/container.md 7)."""

_FOLDED_TABLE = "t2_g128_fp16"
"""The format whose embeddings are stored folded with the signs of the output head."""


@dataclass(frozen=True)
class Fold:
    """What a use does to its inputs before the stored matrix: the transform `role` by the vector bound to it, or none."""

    role: str = ""
    vector: Binding | None = None


@dataclass(frozen=True)
class Segment:
    """Rows [begin, end) of one object, folded or not."""

    object_id: str
    fold: Fold
    begin: int
    end: int


@dataclass(frozen=True)
class Assembly:
    """How one parameter of `shape` is made: of `segments` of rows in order, or where these are None of the direct
    `ranges` of its sources.

    `packed_bytes` is its share of the quantized objects it reads, 0 for a direct parameter.
    """

    parameter: ModelParameter
    shape: tuple[int, ...]
    columns: int
    policy: str
    ranges: tuple[tuple[Part, ...], ...]
    segments: tuple[Segment, ...] | None
    packed_bytes: float

    @property
    def quantized(self) -> bool:
        """Whether the parameter stays packed."""
        return self.segments is not None


def plan_parameter(artifact: Artifact, parameter: ModelParameter, shape: tuple[int, ...]) -> Assembly:
    """Resolve bindings and uses of one parameter of `shape`, reading no payload.

    Raises ArtifactError for a missing parameter or use, LayoutError for a wrong shape, and UnsupportedOperation for a
    quantized parameter that must be direct, for ranges inside quantized rows and for auxiliaries it cannot apply.
    """
    if parameter.shape not in (None, shape):
        raise LayoutError(
            f"{artifact.path}: parameter {parameter.name!r} has shape {list(shape)} in the model, and by the artifact's "
            f"config {list(parameter.shape or ())}; load it with that config"
        )
    sources = [source if source.shape is not None else replace(source, shape=shape) for source in parameter.sources]
    ranges = tuple(_ranges(artifact, parameter, source) for source in sources)
    uses = [_use(artifact, source) for source in sources]
    records = [_tensor(artifact, part.object) for parts in ranges for part in parts]
    folds = [_fold(artifact, source, use, parts) for source, use, parts in zip(sources, uses, ranges, strict=True)]
    quantized = [record for record in records if get_format(record.format).quantized]
    if quantized and not all(source.packable in (True, None) for source in sources):
        raise UnsupportedOperation(
            f"{artifact.path}: parameter {sources[0].name!r} is bound to object {quantized[0].id!r} of format "
            f"{quantized[0].format}; it is no projection and must be stored as bf16 or fp32"
        )
    columns = _columns(sources[0].shape or (1,))
    packed = bool(quantized) or any(fold.role for fold in folds)
    segments = tuple(_segments(artifact, parameter, sources, ranges, folds, columns)) if packed else None
    packed_bytes = sum(_share(artifact, part) for parts in ranges for part in parts)
    return Assembly(parameter, shape, columns, _narrowest(uses), ranges, segments, packed_bytes)


def _columns(shape: tuple[int, ...]) -> int:
    """K of a matrix, of a bank of matrices, or of a kernel [N, channels, *extents], each of whose N filters is a row."""
    return math.prod(shape[1:]) if len(shape) > 3 else shape[-1]


def _tensor(artifact: Artifact, object_id: str) -> TensorObject:
    record = artifact.objects[object_id]
    if not isinstance(record, TensorObject):
        raise ArtifactError(f"{artifact.path}: object {object_id!r} is a resource, expected a tensor", "reference")
    return record


def _ranges(artifact: Artifact, parameter: ModelParameter, source: LogicalParameter) -> tuple[Part, ...]:
    """The binding's element ranges, checked against the source's shape."""
    binding, shape = artifact.bindings.get(source.name), source.shape or ()
    if binding is None:
        raise ArtifactError(
            f"{artifact.path}: no parameter {source.name!r}, which {parameter.name!r} needs; the artifact is incomplete",
            "reference",
        )
    if binding.object is not None:
        record = _tensor(artifact, binding.object)
        parts: tuple[Part, ...] = (Part(record.id, 0, record.elements),)
        found, expected, what = record.shape, shape, f"object {record.id!r} of shape"
    else:
        parts = binding.parts
        found, expected = (sum(part.end - part.begin for part in parts),), (math.prod(shape),)
        what = f"parts of objects {[part.object for part in parts][:8]} with elements"
    if tuple(found) != expected:
        raise LayoutError(
            f"{artifact.path}: parameter {source.name!r} is bound to {what} {list(found)}, expected {list(expected)}"
        )
    return parts


def _use(artifact: Artifact, source: LogicalParameter) -> Use | None:
    return artifact.use(source.name, source.inputs[0]) if source.inputs else None


def _narrowest(uses: Sequence[Use | None]) -> str:
    """The policy of several products of one activation: what all of them permit."""
    policies = [use.activation_policy or ACTIVATION_POLICIES[0] for use in uses if use is not None]
    return min(policies, key=ACTIVATION_POLICIES.index, default=ACTIVATION_POLICIES[0])


def _fold(artifact: Artifact, source: LogicalParameter, use: Use | None, parts: Sequence[Part]) -> Fold:
    if (
        use is None
        and source.folded_like
        and any(_tensor(artifact, part.object).format == _FOLDED_TABLE for part in parts)
    ):
        use = artifact.use(*source.folded_like)
        if "hadamard_signs" not in use.auxiliaries:
            raise ArtifactError(
                f"{artifact.path}: {source.name!r} is stored as {_FOLDED_TABLE}, folded with the hadamard_signs of use "
                f"{(use.parameter, use.input)}, which has none",
                "reference",
            )
    if use is None:
        return Fold()
    where = f"{artifact.path}: use {(use.parameter, use.input)}"
    unknown = sorted(use.auxiliaries.keys() - set(_ROLES))
    if unknown:
        raise UnsupportedOperation(f"{where} has auxiliary roles {', '.join(unknown)}; known are {', '.join(_ROLES)}")
    roles = [role for role in TRANSFORMS if role in use.auxiliaries]
    if len(roles) > 1:
        raise UnsupportedOperation(f"{where} has {' and '.join(roles)}; no order of two transforms is defined")
    if not roles:
        return Fold()
    fold = Fold(roles[0], use.auxiliaries[roles[0]])
    _check_vector(artifact, use.auxiliaries[fold.role], (source.shape or (1,))[-1], f"{where}: {fold.role}")
    return fold


def _check_vector(artifact: Artifact, binding: Binding, length: int, where: str) -> None:
    records = [_tensor(artifact, object_id) for object_id in binding.objects]
    found = sum(part.end - part.begin for part in binding.parts) if binding.object is None else records[0].elements
    if any(get_format(record.format).quantized for record in records) or found != length:
        formats = ", ".join(sorted({record.format for record in records}))
        raise LayoutError(
            f"{where} has {found} elements of {formats}, expected one per column, {length}, in a direct format"
        )


def _segments(
    artifact: Artifact,
    parameter: ModelParameter,
    sources: Sequence[LogicalParameter],
    ranges: Sequence[Sequence[Part]],
    folds: Sequence[Fold],
    columns: int,
) -> Iterator[Segment]:
    """The parameter's rows in order, neighbours in one object and under one fold merged."""
    if parameter.transposed:
        raise UnsupportedOperation(f"{artifact.path}: {sources[0].name!r} is transposed and cannot stay quantized")
    runs = [list(_row_runs(artifact, s, parts, columns)) for s, parts in zip(sources, ranges, strict=True)]
    counts = [sum(end - begin for _, begin, end in rows) // parameter.slices for rows in runs]
    last: tuple[str, Fold, int, int] | None = None
    for index in range(parameter.slices):
        for rows, count, fold in zip(runs, counts, folds, strict=True):
            for object_id, begin, end in _cut(rows, index * count, (index + 1) * count):
                if last is not None and last[3] == begin and last[0] == object_id and last[1] == fold:
                    last = (object_id, fold, last[2], end)
                    continue
                if last is not None:
                    yield Segment(*last)
                last = (object_id, fold, begin, end)
    if last is not None:
        yield Segment(*last)


def _row_runs(
    artifact: Artifact, source: LogicalParameter, parts: Sequence[Part], columns: int
) -> Iterator[tuple[str, int, int]]:
    """Whole rows of objects, in the source's order."""
    for part in parts:
        record = _tensor(artifact, part.object)
        width = record.shape[-1] if get_format(record.format).quantized else columns
        if width != columns or part.begin % columns or part.end % columns:
            raise UnsupportedOperation(
                f"{artifact.path}: parameter {source.name!r} takes elements [{part.begin}, {part.end}) of "
                f"{record.id!r} ({record.format} {list(record.shape)}), which are not whole rows of K = {columns}; "
                "only whole rows stay packed, dequantize_parameter gives the values"
            )
        yield record.id, part.begin // columns, part.end // columns


def _cut(rows: Sequence[tuple[str, int, int]], begin: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Rows [begin, end) of a sequence of runs."""
    at = 0
    for object_id, first, last in rows:
        low, high = max(begin, at), min(end, at + last - first)
        if low < high:
            yield object_id, first + low - at, first + high - at
        at += last - first


def _share(artifact: Artifact, part: Part) -> float:
    record = _tensor(artifact, part.object)
    if not get_format(record.format).quantized:
        return 0
    return _encoded_bytes(record.format, record.shape, record.divisors) * (part.end - part.begin) / record.elements


_encoded_bytes = cache(encoded_bytes)
"""Remembered, since thousands of experts share an object."""


def build_parameter(artifact: Artifact, assembly: Assembly) -> torch.Tensor:
    """The parameter: quantized words stay where they are mapped, direct ones are read into memory of their own."""
    if assembly.segments is None:
        values = [torch.cat([_elements(artifact, part) for part in parts]) for parts in assembly.ranges]
        dtype = reduce(torch.promote_types, (value.dtype for value in values))
        parameter = replace(assembly.parameter, shape=assembly.shape)
        return join_values(parameter, [value.to(dtype) for value in values]).contiguous()
    kernel = len(assembly.shape) > 3
    weight = _stacked(artifact, assembly, None if kernel else assembly.shape).with_policy(assembly.policy)
    return patch_kernel(weight, assembly.shape) if kernel else weight


def _elements(artifact: Artifact, part: Part) -> torch.Tensor:
    return artifact.read_elements(part.object, part.begin, part.end)


def _stacked(artifact: Artifact, assembly: Assembly, shape: tuple[int, ...] | None) -> NinferTensor:
    """The segments under one another. Rows of one object are one block, and a fold that all share is one transform."""
    segments = assembly.segments or ()
    folds = list(dict.fromkeys(segment.fold for segment in segments))
    objects = dict.fromkeys(segment.object_id for segment in segments)
    matrices = {object_id: _matrix(artifact, object_id, assembly.columns) for object_id in objects}
    if len(folds) == 1:
        rows = [(matrices[segment.object_id], (segment.begin, segment.end)) for segment in segments]
        return _folded(stack_rows(rows, shape), folds[0], artifact)
    stacked: dict[tuple[str, Fold], torch.Tensor] = {}
    for segment in segments:
        key = (segment.object_id, segment.fold)
        if key not in stacked:
            stacked[key] = _folded(matrices[segment.object_id], segment.fold, artifact)
    return stack_rows([(stacked[s.object_id, s.fold], (s.begin, s.end)) for s in segments], shape)


def _folded(tensor: Any, fold: Fold, artifact: Artifact) -> Any:
    if fold.vector is None:
        return tensor
    return transform_input(tensor, fold.role, _vector(artifact, fold.vector))


def _matrix(artifact: Artifact, object_id: str, columns: int) -> torch.Tensor:
    """An object as rows of `columns` elements; direct ones are read, so that no page of the mapping is touched."""
    if get_format(_tensor(artifact, object_id).format).quantized:
        return artifact.tensor(object_id)
    return artifact.read_tensor(object_id).reshape(-1, columns)


def _vector(artifact: Artifact, binding: Binding) -> torch.Tensor:
    if binding.object is not None:
        return artifact.read_tensor(binding.object).reshape(-1)
    return torch.cat([_elements(artifact, part) for part in binding.parts])
