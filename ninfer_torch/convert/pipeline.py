"""A source becomes an artifact: plan everything, then stream row by row.

All that can be wrong with names, shapes and types is found while planning, before a file exists. Writing then reads
rows in chunks, encodes them and hands the bytes on. A layout stores its planes one after the other, while a chunk of
rows yields a piece of each: the first plane, the codes, is streamed, and the smaller ones (scales, high bits: at most
0.28 bytes per weight) wait in memory for one object at a time. Encoding every row twice would save that memory and
double the work.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import cast

import torch

from ninfer_torch.artifact.journal import Journal
from ninfer_torch.artifact.writer import ArtifactWriter
from ninfer_torch.convert.hf_source import HuggingFaceSource
from ninfer_torch.convert.matching import row_chunks
from ninfer_torch.convert.official_recipes import IMATRIX, get_official
from ninfer_torch.convert.planning import ConversionPlan, Task, TaskPiece, plan_conversion
from ninfer_torch.convert.report import Report, report_path
from ninfer_torch.convert.resume import fingerprint
from ninfer_torch.convert.settings import Configure, Setting, load_recipe, parse_setting
from ninfer_torch.convert.source import Source
from ninfer_torch.errors import ConversionError
from ninfer_torch.formats import BlockFloatFormat

__all__ = ["Progress", "convert", "open_source", "plan"]

Progress = Callable[[int, int], None]
"""(bytes written so far, bytes of the whole payload)."""

_CHUNK_VALUES = 1 << 21
"""Values read and encoded at a time: 8 MiB as float32."""

_DEFAULT_PRESET = "q4"

_VISION = "vision"
"""Name of the source that holds the vision tower of a GGUF file's model."""

_FOLD_FORMATS = {"input_columns": "int32", "hadamard_signs": "bf16"}
"""Format of an auxiliary vector, by its role (spec/container.md 7)."""

SourceLike = Source | torch.nn.Module | str | os.PathLike[str]
RecipeLike = Configure | str | os.PathLike[str]


def open_source(path: str | os.PathLike[str] | torch.nn.Module) -> Source:
    """The source at a path: a folder of safetensors with its config.json, a `.gguf` or a `.ninfer` file; or a live model.

    Raises ConversionError for anything else, and whatever the source refuses.
    """
    if isinstance(path, torch.nn.Module):
        from ninfer_torch.convert.module_source import ModuleSource

        return ModuleSource(path)
    path = Path(path)
    if path.is_dir():
        return HuggingFaceSource(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        from ninfer_torch.convert.gguf_source import GgufSource

        return GgufSource(path)
    if path.is_file() and path.suffix.lower() == ".ninfer":
        from ninfer_torch.convert.artifact_source import ArtifactSource

        return ArtifactSource(path)
    found = "a file of another kind" if path.exists() else "nothing"
    raise ConversionError(
        f"{path}: expected a folder with config.json and safetensors, a .gguf or a .ninfer file; found {found}"
    )


def plan(
    source: SourceLike,
    preset: str | None = None,
    *,
    recipe: RecipeLike | None = None,
    settings: Sequence[str | Setting] = (),
    sources: Mapping[str, SourceLike] | None = None,
    name: str | None = None,
    no_fallback: bool = False,
    official: bool | None = None,
) -> ConversionPlan:
    """What `convert` with the same arguments will write; nothing is written. `plan(...).outline` is for people.

    Raises ConversionError as `convert` does before it creates a file.
    """
    given = dict(sources or {})
    named = get_official(recipe) if isinstance(recipe, str) and not Path(recipe).exists() else None
    configure: Configure | None
    if named is not None:
        imatrix = given.pop(IMATRIX, None)
        configure = partial(named.configure, imatrix=None if imatrix is None else Path(cast(str, imatrix)))
    else:
        configure = recipe if recipe is None or callable(recipe) else load_recipe(recipe)
    main, others = _opened_sources(source, given)
    return plan_conversion(
        main,
        preset if preset is not None or recipe is not None else _DEFAULT_PRESET,
        recipe=configure,
        recipe_name="" if recipe is None or callable(recipe) else Path(recipe).name,
        settings=[parse_setting(setting) if isinstance(setting, str) else setting for setting in settings],
        sources=others,
        name=name,
        no_fallback=no_fallback,
        official=named is not None if official is None else official,
    )


def _opened_sources(source: SourceLike, sources: Mapping[str, SourceLike]) -> tuple[Source, dict[str, Source]]:
    """The main source and the further ones; a GGUF file named `vision` beside a main one is that model's vision tower."""
    others = dict(sources)
    if all(
        isinstance(path, str | os.PathLike) and Path(path).suffix.lower() == ".gguf"
        for path in (source, others.get(_VISION))
    ):
        from ninfer_torch.convert.gguf_source import GgufSource

        main: Source = GgufSource(source, others.pop(_VISION))  # type: ignore[arg-type]
    else:
        main = _opened(source)
    return main, {key: _opened(other) for key, other in others.items()}


def _opened(source: SourceLike) -> Source:
    return open_source(source) if isinstance(source, str | os.PathLike | torch.nn.Module) else source


def convert(
    source: SourceLike,
    output: str | os.PathLike[str],
    preset: str | None = None,
    *,
    recipe: RecipeLike | None = None,
    settings: Sequence[str | Setting] = (),
    sources: Mapping[str, SourceLike] | None = None,
    name: str | None = None,
    no_fallback: bool = False,
    official: bool | None = None,
    artifact_id: str | bytes | None = None,
    max_file_bytes: int | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write a model as a `.ninfer` artifact, with a report beside it, and return the report.

    `source` is a path or a live model (see `open_source`), or a Source. What tensors become is decided by `preset`, a name of PRESETS
    (q4 where there is no recipe, else nothing is quantized at first), then `recipe`, a Python file with
    `configure(model, recipe, sources)` or such a function, then `settings` (`SELECTOR=FORMAT[:METHOD[:NAME=VALUE,...]]`);
    later ones win. A recipe may also be the name of an official one (OFFICIAL_RECIPES). `official` writes NInfer's own
    parameter names, parents and components, which its engine runs, instead of a state dict's names (default: with an
    official recipe); the model must be of a registered architecture. `sources` are further sources that a recipe names; of a GGUF file's model `vision` is its `mmproj` file.
    `name` is the public model name in the artifact's
    metadata (default: the source's name). With `no_fallback`, block types that preset `gguf` cannot keep are an error
    that lists them. Memory stays bounded by one chunk of rows and the smaller planes of one tensor, whatever the model's
    size. The same sources, recipe and `artifact_id` give the same bytes.

    With `resume`, an interrupted conversion leaves its unfinished files beside `output` under hidden names, and the same
    call goes on where it stopped, with the same bytes in the end; without a given `artifact_id` the first one stays.
    Changes of source, recipe or limit in between are an ArtifactError.

    Raises ConversionError before any file is created for missing or misshapen tensors, encodings without a target and
    recipes that do not fit, and ArtifactError when `output` exists; while writing, ConversionError for values that a
    method refuses. Nothing is left behind on failure.
    """
    begin = time.monotonic()
    ArtifactWriter(output, artifact_id=artifact_id, max_file_bytes=max_file_bytes)  # refuses what cannot be, early
    planned = plan(
        source,
        preset,
        recipe=recipe,
        settings=settings,
        sources=sources,
        name=name,
        no_fallback=no_fallback,
        official=official,
    )
    identity = artifact_id.hex() if isinstance(artifact_id, bytes) else (artifact_id or "").lower()
    with ExitStack() as stack:
        journal = None
        if resume:
            _refuse_live_models(planned)
            given = (source, recipe, *(sources or {}).values())
            paths = [path for path in given if isinstance(path, str | os.PathLike)]
            state = fingerprint(planned, paths, max_file_bytes)
            journal = stack.enter_context(closing(Journal(Path(output), state, identity or None)))
            identity = journal.artifact_id
        identity = identity or uuid.uuid4().hex
        writer = ArtifactWriter(output, artifact_id=identity, max_file_bytes=max_file_bytes)
        _declare(writer, planned)
        writer.finish(None if progress is None else _running_total(progress, writer.planned_bytes), journal)
    outline = planned.outline
    report = Report(
        **{key: getattr(outline, key) for key in outline.__dataclass_fields__},
        artifact=writer.path.name,
        artifact_id=identity,
        payload_bytes=writer.planned_bytes,
        seconds=round(time.monotonic() - begin, 3),
    )
    report.write(report_path(writer.path))
    return report


def _refuse_live_models(planned: ConversionPlan) -> None:
    """A model in memory may have changed since an unfinished conversion, and nothing would tell."""
    if any(facts["kind"] == "module" for facts in planned.outline.provenance["sources"].values()):
        raise ConversionError("a live model cannot be converted with resume; save it to a folder and convert that")


def _declare(writer: ArtifactWriter, planned: ConversionPlan) -> None:
    """Everything the artifact will hold, in the stock order: resources, weights, auxiliaries."""
    outline = planned.outline
    writer.metadata = {"name": outline.name}
    writer.provenance = dict(outline.provenance)
    for name, component in planned.components.items():
        writer.component(name, component.config, target=component.target, resources=component.resources)
    for entry in outline.resources:
        writer.resource(entry.object, planned.resources[entry.name])
    for task in planned.tasks:
        writer.tensor(task.object_id, task.record.name, task.shape, _payload_of(task), divisors=task.divisors)
    for name, bound in planned.bindings.items():
        if isinstance(bound, str):
            writer.bind(name, bound)
        else:
            writer.bind(name, parts=bound)
    written = 0
    vectors: dict[tuple[str, bytes], str] = {}  # equal ones are stored once, divisors one by one
    for use in planned.uses:
        auxiliaries = {}
        if use.divisor is not None:
            auxiliaries["activation_input_divisor"] = object_id = f"auxiliary/{written:06d}"
            writer.tensor(object_id, "fp32", (), torch.tensor(use.divisor, dtype=torch.float32))
            written += 1
        if use.fold is not None:
            words = use.fold.role, use.fold.vector.view(torch.uint8).numpy().tobytes()
            if words not in vectors:
                vectors[words] = f"auxiliary/{written:06d}"
                writer.tensor(
                    vectors[words], _FOLD_FORMATS[use.fold.role], tuple(use.fold.vector.shape), use.fold.vector
                )
                written += 1
            auxiliaries[use.fold.role] = vectors[words]
        writer.use(use.parameter, use.input, use.activation_policy, auxiliaries)


def _payload_of(task: Task) -> Callable[[], Iterator[memoryview | bytes]]:
    return lambda: _payload(task)


def _running_total(progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def advance(written: int) -> None:
        nonlocal done
        done += written
        progress(done, total)

    return advance


def _payload(task: Task) -> Iterator[memoryview | bytes]:
    """The bytes of one object in file order."""
    first, *others = task.planes
    kept = [torch.empty(plane.shape, dtype=plane.dtype) for plane in others]
    for begin, end, planes in _encoded_rows(task):
        yield _bytes(planes[0])
        for plane, whole, part in zip(others, kept, planes[1:], strict=True):
            whole[begin // plane.rows_per_index : -(-end // plane.rows_per_index)].copy_(part)
    position = first.end
    for plane, whole in zip(others, kept, strict=True):
        yield bytes(plane.offset - position)
        yield _bytes(whole)
        position = plane.end


def _encoded_rows(task: Task) -> Iterator[tuple[int, int, tuple[torch.Tensor, ...]]]:
    """(begin, end, planes) of every chunk of rows of the object."""
    position = 0
    for piece in task.pieces:
        for begin, end in _chunks(task, piece):
            count = (end - begin) * piece.rows_per_index
            yield position, position + count, task.encode(piece, begin, end, position)
            position += count


def _chunks(task: Task, piece: TaskPiece) -> Iterator[tuple[int, int]]:
    """Cuts of the piece's leading axis; a function's nvfp4 rows have one divisor, so they are encoded at once."""
    at_once = isinstance(task.record, BlockFloatFormat) and task.method.takes == "values"
    values = piece.elements if at_once else _CHUNK_VALUES
    return row_chunks(piece.tensor, piece.begin, piece.end, values, task.whole_rows)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
