"""A source becomes an artifact: plan everything, then stream row by row.

All that can be wrong with names, shapes and types is found while planning, before a file exists. Writing then reads
rows in chunks, encodes them and hands the bytes on. A layout stores its planes one after the other, while a chunk of
rows yields a piece of each: the first plane, the codes, is streamed, and the smaller ones (scales, high bits: at most
0.28 bytes per weight) wait in memory for one object at a time. Encoding every row twice would save that memory and
double the work.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from ninfer_torch.artifact.writer import ArtifactWriter
from ninfer_torch.convert.hf_source import HuggingFaceSource
from ninfer_torch.convert.methods import get_method
from ninfer_torch.convert.presets import Preset, Selection, get_preset, select
from ninfer_torch.convert.report import Report, ResourceEntry, TensorEntry
from ninfer_torch.convert.source import Source, SourceTensor, UnusedTensor
from ninfer_torch.errors import ConversionError, LayoutError
from ninfer_torch.formats import get_format
from ninfer_torch.layouts import encoded_bytes, planes_of
from ninfer_torch.models.generic import COMPONENT, ModelPlan, PlannedTensor, logical_name, plan_model, use_input
from ninfer_torch.versions import __version__

__all__ = ["Progress", "convert", "open_source"]

Progress = Callable[[int, int], None]
"""(bytes written so far, bytes of the whole payload)."""

_CHUNK_VALUES = 1 << 21
"""Values read and encoded at a time: 8 MiB as float32."""

_POLICIES: Mapping[str, str] = MappingProxyType({"gguf": "AllowA8"})
"""Activation policy of a linear weight's use by format family; A16Only where a family is not listed."""

_LISTED_NAMES = 20


@dataclass(frozen=True)
class _Task:
    """One object to write: a tensor of the model, where its rows come from and what they become."""

    planned: PlannedTensor
    source: SourceTensor
    selection: Selection
    object_id: str

    @property
    def bytes(self) -> int:
        return encoded_bytes(self.selection.format, self.planned.shape)


def open_source(path: str | os.PathLike[str]) -> Source:
    """The source at a path: a folder of safetensors with its config.json, or a `.gguf` file.

    Raises ConversionError for anything else, and whatever the source refuses.
    """
    path = Path(path)
    if path.is_dir():
        return HuggingFaceSource(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        from ninfer_torch.convert.gguf_source import GgufSource

        return GgufSource(path)
    found = "a file of another kind" if path.exists() else "nothing"
    raise ConversionError(f"{path}: expected a folder with config.json and safetensors, or a .gguf file; found {found}")


def convert(
    source: Source | str | os.PathLike[str],
    output: str | os.PathLike[str],
    preset: str = "q4",
    *,
    name: str | None = None,
    no_fallback: bool = False,
    artifact_id: str | bytes | None = None,
    max_file_bytes: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write a model as a `.ninfer` artifact and report what became of every tensor.

    `source` is a path (see `open_source`) or a Source; `preset` a name of PRESETS. `name` is the public model name in
    the artifact's metadata (default: the source's name). With `no_fallback`, block types that preset `gguf` cannot keep
    are an error that lists them. Memory stays bounded by one chunk of rows and the smaller planes of one tensor,
    whatever the model's size. The same source, preset and `artifact_id` give the same bytes.

    Raises ConversionError before any file is created for missing or misshapen tensors and encodings without a target,
    and ArtifactError when `output` exists; while writing, ConversionError for values that a method refuses. Nothing is
    left behind on failure.
    """
    chosen = get_preset(preset)
    identity = uuid.uuid4().hex if artifact_id is None else artifact_id
    writer = ArtifactWriter(output, artifact_id=identity, max_file_bytes=max_file_bytes)
    opened = open_source(source) if isinstance(source, str | os.PathLike) else source
    plan = plan_model(opened.config())
    tasks, unused = _plan_tasks(plan, opened, chosen, no_fallback)
    resources = {role: (f"resource/{COMPONENT}/{role}", data) for role, data in opened.resources().items()}
    writer.metadata = {"name": name or opened.name}
    writer.provenance = {
        "converter": "ninfer_torch",
        "version": __version__,
        "recipe": preset,
        "sources": {opened.kind: opened.provenance()},
    }
    writer.component(COMPONENT, plan.config, resources={role: object_id for role, (object_id, _) in resources.items()})
    for object_id, data in resources.values():
        writer.resource(object_id, data)
    for task in tasks:
        _add(writer, task)
    writer.finish(None if progress is None else _running_total(progress, writer.planned_bytes))
    return Report(
        artifact=writer.path.name,
        artifact_id=identity.lower() if isinstance(identity, str) else identity.hex(),
        name=writer.metadata["name"],
        preset=preset,
        architecture=plan.architecture,
        provenance=writer.provenance,
        tensors=tuple(_entry(task) for task in tasks),
        resources=tuple(ResourceEntry(role, object_id, len(data)) for role, (object_id, data) in resources.items()),
        unused=unused,
    )


def _running_total(progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def advance(written: int) -> None:
        nonlocal done
        done += written
        progress(done, total)

    return advance


def _plan_tasks(
    plan: ModelPlan, source: Source, preset: Preset, no_fallback: bool
) -> tuple[tuple[_Task, ...], tuple[UnusedTensor, ...]]:
    if preset.source_kind not in (None, source.kind):
        raise ConversionError(
            f"preset {preset.name} needs a {preset.source_kind} source, found a {source.kind} source ({source.name})"
        )
    found = _match_names(plan, source)
    tasks = []
    for index, (planned, names) in enumerate(zip(plan.tensors, found, strict=True)):
        tensor = _agreed([source.tensors[name] for name in names])
        if tensor.shape != planned.shape:
            raise ConversionError(
                f"tensor {names[0]!r} has shape {list(tensor.shape)}, {plan.architecture} expects "
                f"{list(planned.shape)} for {planned.names[0]!r}"
            )
        task = _Task(planned, tensor, select(preset, planned.kind, tensor), f"weight/{index:06d}")
        _check_encodable(task)
        tasks.append(task)
    if no_fallback:
        _refuse_fallbacks(tasks)
    consumed = {name for names in found for name in names}
    left = (
        UnusedTensor(name, f"{plan.architecture} has no such parameter")
        for name in source.tensors
        if name not in consumed
    )
    return tuple(tasks), (*source.unused, *left)


def _match_names(plan: ModelPlan, source: Source) -> list[list[str]]:
    """The source's names of every planned tensor, under the one spelling that finds them all.

    A checkpoint may have been saved from a model with or without the head around its base model, whose names then carry
    the base model's prefix or not.
    """
    prefix = f"{plan.base_model_prefix}."
    spellings: tuple[Callable[[str], str], ...] = (
        lambda name: name,
        lambda name: name.removeprefix(prefix),
        lambda name: prefix + name,
    )
    candidates = [
        [[spell(name) for name in planned.names if spell(name) in source.tensors] for planned in plan.tensors]
        for spell in spellings
    ]
    best = max(candidates, key=lambda found: sum(map(bool, found)))
    missing = [planned.names[0] for planned, names in zip(plan.tensors, best, strict=True) if not names]
    if missing:
        total = len(plan.tensors)
        raise ConversionError(
            f"{source.name} lacks {len(missing)} of the {total} tensors of {plan.architecture} "
            f"(with or without the prefix {prefix!r}): {_listed(missing)}"
        )
    return best


def _agreed(twins: Sequence[SourceTensor]) -> SourceTensor:
    """The first of several source tensors that the model ties; raises ConversionError unless all hold the same."""
    first = twins[0]
    for twin in twins[1:]:
        if twin.shape != first.shape or not all(
            torch.equal(first.values(begin, end), twin.values(begin, end)) for begin, end in _chunks(first)
        ):
            raise ConversionError(
                f"the config ties {first.name!r} and {twin.name!r}, but the source holds different values for them"
            )
    return first


def _check_encodable(task: _Task) -> None:
    """Find before writing what a format, a layout or the source's decoder refuses, as far as one row tells."""
    method, record = get_method(task.selection.method), get_format(task.selection.format)
    where = f"{task.planned.names[0]!r} as {record.name}"
    try:
        planes = planes_of(record, task.planned.shape)
    except LayoutError as error:
        raise ConversionError(f"{where}: {error}") from error
    if method.takes == "encoded":
        found, expected = task.source.blocks(0, 1).shape[1], planes[0].shape[1]
        if found != expected:
            raise ConversionError(f"{where}: a source row holds {found} bytes, expected {expected}")
    else:
        task.source.values(0, 1)


def _refuse_fallbacks(tasks: Sequence[_Task]) -> None:
    lost = [f"{task.planned.names[0]} ({task.source.encoding})" for task in tasks if task.selection.fallback]
    if lost:
        raise ConversionError(
            f"{len(lost)} tensors cannot keep their block type and fallbacks are off: {', '.join(lost)}"
        )


def _add(writer: ArtifactWriter, task: _Task) -> None:
    format_name = task.selection.format
    writer.tensor(task.object_id, format_name, task.planned.shape, lambda: _payload(task))
    for name in task.planned.names:
        writer.bind(logical_name(name), task.object_id)
    policy = _POLICIES.get(get_format(format_name).family, "A16Only")
    for name in task.planned.multiplied:
        writer.use(logical_name(name), use_input(name), activation_policy=policy)


def _payload(task: _Task) -> Iterator[memoryview | bytes]:
    """The bytes of one object in file order."""
    first, *others = planes_of(task.selection.format, task.planned.shape)
    kept = [torch.empty(plane.shape, dtype=plane.dtype) for plane in others]
    for begin, end, planes in _encoded_rows(task):
        yield _bytes(planes[0])
        for whole, part in zip(kept, planes[1:], strict=True):
            whole[begin:end].copy_(part)
    position = first.end
    for plane, whole in zip(others, kept, strict=True):
        yield bytes(plane.offset - position)
        yield _bytes(whole)
        position = plane.end


def _encoded_rows(task: _Task) -> Iterator[tuple[int, int, tuple[torch.Tensor, ...]]]:
    method, record = get_method(task.selection.method), get_format(task.selection.format)
    read = task.source.blocks if method.takes == "encoded" else task.source.values
    for begin, end in _chunks(task.source):
        try:
            planes = method.encode(read(begin, end), record, begin)
        except ConversionError as error:
            raise ConversionError(f"{task.planned.names[0]!r} as {record.name}: {error}") from error
        yield begin, end, planes


def _chunks(source: SourceTensor) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_VALUES // max(1, source.row_values))
    for begin in range(0, source.rows, step):
        yield begin, min(begin + step, source.rows)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _entry(task: _Task) -> TensorEntry:
    return TensorEntry(
        parameters=tuple(logical_name(name) for name in task.planned.names),
        object=task.object_id,
        shape=task.planned.shape,
        source=task.source.origin or task.source.name,
        encoding=task.source.encoding,
        format=task.selection.format,
        method=task.selection.method,
        bytes=task.bytes,
        note=task.selection.note,
        fallback=task.selection.fallback,
    )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED_NAMES
    return ", ".join(names[:_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")
