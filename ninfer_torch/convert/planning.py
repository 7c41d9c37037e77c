"""A conversion before anything is written: every object, binding and use, checked as far as one row can tell."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ninfer_torch.convert.importance import Importance, mean_importance, read_importance
from ninfer_torch.convert.matching import MatchedSource
from ninfer_torch.convert.methods import Method, custom_method, get_method
from ninfer_torch.convert.presets import get_preset, is_plain
from ninfer_torch.convert.recipes import CHECKPOINT, Parent, Piece, Recipe, RecipeModel, Selection
from ninfer_torch.convert.report import Outline, ResourceEntry, TensorEntry
from ninfer_torch.convert.settings import Configure, Setting, public_arguments
from ninfer_torch.convert.source import InputFold, Source, SourceTensor
from ninfer_torch.convert.views import PlannedComponent, generic_view, official_view, planned_components
from ninfer_torch.errors import ConversionError, LayoutError
from ninfer_torch.formats import BlockFloatFormat, DirectFormat, Format, get_format
from ninfer_torch.layouts import TILE_ROWS, Plane, encoded_bytes, planes_of
from ninfer_torch.versions import __version__

__all__ = ["ConversionPlan", "PlannedUse", "Task", "TaskPiece", "plan_conversion"]

BindingParts = str | tuple[tuple[str, int, int], ...]
"""What `ArtifactWriter.bind` takes: an object id, or (object id, begin, end) in elements."""

Planes = tuple[torch.Tensor, ...]

_FOLDED_LIKE = {"text/token_embedding": "text/output_head"}
"""A table without a use, which is stored for the transformed inputs of another parameter (spec/container.md 7)."""


@dataclass(frozen=True)
class TaskPiece:
    """Rows [begin, end) of the leading axis of one source tensor, and the parameter that they belong to."""

    parameter: str
    tensor: SourceTensor
    begin: int
    end: int

    @property
    def rows(self) -> int:
        """Rows of the object that these are: leading axes of a matrix are flattened."""
        return (self.end - self.begin) * self.rows_per_index

    @property
    def rows_per_index(self) -> int:
        """Rows of the object per index of the tensor's leading axis."""
        return math.prod(self.tensor.shape[1:-1])

    @property
    def elements(self) -> int:
        """Number of values."""
        return (self.end - self.begin) * self.tensor.row_values


@dataclass(frozen=True)
class Task:
    """One object to write: where its rows come from and what they become. `names` are the parameters bound to it."""

    object_id: str
    pieces: tuple[TaskPiece, ...]
    selection: Selection
    method: Method
    arguments: Mapping[str, Any]
    names: tuple[str, ...]

    @cached_property
    def record(self) -> Format:
        """The format record."""
        return get_format(self.selection.format)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the object (spec/conversion.md 8): a direct tensor keeps its own, all else is flattened to rows."""
        shape = self.pieces[0].tensor.shape
        if len(self.pieces) == 1 and (isinstance(self.record, DirectFormat) or len(shape) == 2):
            piece = self.pieces[0]
            return (piece.end - piece.begin, *shape[1:]) if shape else ()
        if len(shape) == 1:
            return (sum(piece.elements for piece in self.pieces),)
        return sum(piece.rows for piece in self.pieces), shape[-1]

    @cached_property
    def divisors(self) -> int:
        """Number of divisors: one where all sources agree, else one per source (spec/conversion.md 6.1)."""
        if not isinstance(self.record, BlockFloatFormat):
            return 1
        one = self.method.takes == "encoded" and len({piece.tensor.divisor for piece in self.pieces}) == 1
        return 1 if one else len(self.pieces)

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of the object."""
        return planes_of(self.record, self.shape, self.divisors)

    @property
    def bytes(self) -> int:
        """Encoded bytes of the object."""
        return encoded_bytes(self.record, self.shape, self.divisors)

    @property
    def whole_rows(self) -> int:
        """The number of rows that chunks are a multiple of: a tile's rows where planes interleave them."""
        return TILE_ROWS if isinstance(self.record, BlockFloatFormat) else 1

    def encode(self, piece: TaskPiece, begin: int, end: int, first_row: int) -> Planes:
        """The planes of leading rows [begin, end) of a piece. Raises ConversionError naming parameter and format."""
        try:
            if self.method.takes == "encoded":
                return self.method.encode(piece.tensor.encoded(begin, end), self.record, first_row)
            values = piece.tensor.values(begin, end)
            if len(self.shape) == 2 and values.dim() > 2:
                values = values.flatten(0, -2)
            return self.method.encode(values, self.record, first_row, **self.arguments)
        except (ConversionError, LayoutError) as error:
            raise ConversionError(f"{piece.tensor.name!r} as {self.record.name}: {error}") from error


@dataclass(frozen=True)
class PlannedUse:
    """One use to write; `divisor` is its activation divisor, `fold` what its inputs go through."""

    parameter: str
    input: str
    activation_policy: str
    divisor: float | None = None
    fold: InputFold | None = None


@dataclass(frozen=True)
class ConversionPlan:
    """Everything that a conversion writes but its bytes."""

    outline: Outline
    components: Mapping[str, PlannedComponent]
    tasks: tuple[Task, ...]
    bindings: Mapping[str, BindingParts]
    uses: tuple[PlannedUse, ...]
    resources: Mapping[str, bytes]

    @property
    def weight_bytes(self) -> int:
        """Encoded bytes of all objects."""
        return sum(task.bytes for task in self.tasks)


def plan_conversion(
    source: Source,
    preset: str | None = "q4",
    *,
    recipe: Configure | None = None,
    recipe_name: str = "",
    settings: Sequence[Setting] = (),
    sources: Mapping[str, Source] | None = None,
    name: str | None = None,
    no_fallback: bool = False,
    official: bool = False,
) -> ConversionPlan:
    """What a conversion will write, decided by a preset, then a recipe, then settings; later ones win.

    With `official`, parameters have NInfer's own names and pack as it packs them; else a state dict's. `sources` are further ones that a recipe may name. Reads headers, and one row of every tensor. Raises ConversionError
    for whatever is wrong with names, shapes, encodings, recipes or methods, naming what is at fault.
    """
    if CHECKPOINT in (sources or {}):
        raise ConversionError(f"{CHECKPOINT!r} is the name of the main source; name the other one differently")
    get_preset(preset) if preset is not None else None
    view = (official_view if official else generic_view)(source, sources or {})
    model, matched = view.model, view.matched
    edited = Recipe(model, view.formats, matched, partial(_divisor, matched))
    for configure in (get_preset(preset).configure if preset is not None else None, recipe):
        if configure is not None:
            configure(model, edited, MappingProxyType(matched))
    for setting in settings:
        setting.apply(edited)
    owners = edited.owners()
    tasks = _tasks(edited, owners, matched)
    if no_fallback:
        _refuse_fallbacks(tasks)
    bindings = _bindings(model, owners, tasks)
    uses = _uses(edited, owners, tasks)
    resources = source.resources()
    components = planned_components(view, resources)
    title = " + ".join(filter(None, (preset and get_preset(preset).name, recipe_name or (recipe and "recipe"))))
    outline = Outline(
        name=name or source.name,
        preset=title,
        architecture=model.architecture,
        provenance=_provenance(title, source, sources or {}, settings),
        tensors=tuple(_entry(task, model) for task in tasks),
        resources=tuple(
            ResourceEntry(role, object_id, len(resources[role]))
            for component in components.values()
            for role, object_id in component.resources.items()
        ),
        unused=tuple(unused for found in matched.values() for unused in found.unused),
        uses=len(uses),
        settings=tuple(map(str, settings)),
    )
    return ConversionPlan(outline, components, tasks, bindings, uses, resources)


def _divisor(matched: Mapping[str, MatchedSource], source: str, name: str) -> float | None:
    tensor = matched[source].tensors.get(name)
    return None if tensor is None else tensor.divisor


def _provenance(
    recipe: str, source: Source, others: Mapping[str, Source], settings: Sequence[Setting]
) -> dict[str, Any]:
    return {
        "converter": "ninfer_torch",
        "version": __version__,
        "recipe": recipe,
        "sources": {source.kind: source.provenance(), **{key: other.provenance() for key, other in others.items()}},
        **({"override": [str(setting) for setting in settings]} if settings else {}),
    }


def _tasks(recipe: Recipe, owners: Mapping[str, str], matched: Mapping[str, MatchedSource]) -> tuple[Task, ...]:
    aliases: dict[str, list[str]] = {}
    for name, owner in owners.items():
        aliases.setdefault(owner, []).append(name)
    tables: dict[str, Importance] = {}
    tasks = []
    for index, parent in enumerate(recipe.parents()):
        names = [name for piece in parent.pieces for name in aliases[piece.parameter]]
        method = _method(parent)
        pieces = tuple(itertools.chain.from_iterable(_pieces(piece, matched, method) for piece in parent.pieces))
        arguments = _arguments(method, parent, names, recipe.model, tables)
        task = Task(f"weight/{index:06d}", pieces, parent.selection, method, arguments, tuple(names))
        _check_encodable(task)
        tasks.append(task)
    for path, table in tables.items():
        if recipe.model.parameters.keys().isdisjoint(table):
            known = ", ".join(list(table)[:3])
            raise ConversionError(
                f"{Path(path).name}: none of its {len(table)} entries ({known}, ...) names a parameter of this "
                f"{recipe.model.architecture}; expected names such as {next(iter(recipe.model.parameters))!r}"
            )
    return tuple(tasks)


def _pieces(piece: Piece, matched: Mapping[str, MatchedSource], method: Method) -> list[TaskPiece]:
    """The piece; of a bank whose matrices have divisors of their own each matrix by itself."""
    source = matched[piece.source]
    if piece.parameter not in source.tensors:
        raise ConversionError(f"source {piece.source!r} ({source.name}) has no tensor for {piece.parameter!r}")
    tensor = source.tensors[piece.parameter]
    if method.takes == "encoded" and len({matrix.divisor for matrix in tensor.members}) > 1:
        each = len(tensor.members) // tensor.rows
        matrices = tensor.members[piece.begin * each : piece.end * each]
        return [TaskPiece(piece.parameter, matrix, 0, matrix.rows) for matrix in matrices]
    return [TaskPiece(piece.parameter, tensor, piece.begin, piece.end)]


def _method(parent: Parent) -> Method:
    method = parent.selection.method
    return get_method(method) if isinstance(method, str) else custom_method(method)


def _arguments(
    method: Method, parent: Parent, names: Sequence[str], model: RecipeModel, tables: dict[str, Importance]
) -> Mapping[str, Any]:
    """The arguments of a method: an imatrix file becomes the importance of this parent's input channels.

    Several parameters of one parent average the vectors found; none found means equal weights (spec/conversion.md 7).
    """
    arguments = dict(parent.selection.parameters)
    path = arguments.pop("imatrix", None) if "importance" in (method.parameters or ()) else None
    first = parent.pieces[0].parameter
    try:
        method.check(parent.selection.format, arguments)
        if path is not None:
            if path not in tables:
                tables[path] = read_importance(path, model.config)
            importance = mean_importance(tables[path], names, model.parameters[first].shape[-1])
            arguments |= {} if importance is None else {"importance": importance}
    except ConversionError as error:
        raise ConversionError(f"{first!r}: {error}") from error
    return MappingProxyType(arguments)


def _check_encodable(task: Task) -> None:
    """Find before writing what a format, a layout or the source's decoder refuses, as far as the first rows tell."""
    piece = task.pieces[0]
    counts = [piece.rows for piece in task.pieces]
    if task.divisors > 1 and len(set(counts)) > 1:
        raise ConversionError(
            f"{', '.join(task.names)} as {task.record.name}: sources with different divisors have {counts} rows; one "
            "parent needs equal row counts then"
        )
    try:
        planes = task.planes
    except LayoutError as error:
        raise ConversionError(f"{piece.tensor.name!r} as {task.record.name}: {error}") from error
    for _, pieces in itertools.groupby(task.pieces, lambda piece: piece.parameter):
        piece = next(pieces)  # the first stands for all matrices of a bank, of which there may be thousands
        end = min(piece.begin + task.whole_rows, piece.end)
        found = task.encode(piece, piece.begin, end, piece.begin)
        if [plane.shape[1:] for plane in found] != [torch.Size(plane.shape[1:]) for plane in planes]:
            raise ConversionError(
                f"{piece.tensor.name!r} as {task.record.name}: the rows of {piece.tensor.encoding} give planes of "
                f"{[list(plane.shape[1:]) for plane in found]}, expected {[list(plane.shape[1:]) for plane in planes]}"
            )


def _refuse_fallbacks(tasks: Sequence[Task]) -> None:
    lost = [
        f"{piece.tensor.name} ({piece.tensor.encoding})"
        for task in tasks
        if task.selection.fallback
        for piece in task.pieces
    ]
    if lost:
        raise ConversionError(
            f"{len(lost)} tensors cannot keep their block type and fallbacks are off: {', '.join(lost)}"
        )


def _bindings(model: RecipeModel, owners: Mapping[str, str], tasks: Sequence[Task]) -> dict[str, BindingParts]:
    parts: dict[str, list[tuple[str, int, int]]] = {}
    whole: dict[str, str] = {}
    for task in tasks:
        position = 0
        for parameter, pieces in itertools.groupby(task.pieces, lambda piece: piece.parameter):
            end = position + sum(piece.elements for piece in pieces)
            parts.setdefault(parameter, []).append((task.object_id, position, end))
            position = end
        first = task.pieces[0].parameter
        if len(task.pieces) == 1 and task.shape == model.parameters[first].shape:
            whole[first] = task.object_id
    return {name: whole.get(owner) or tuple(parts[owner]) for name, owner in owners.items()}


def _uses(recipe: Recipe, owners: Mapping[str, str], tasks: Sequence[Task]) -> tuple[PlannedUse, ...]:
    stated: dict[str, list[float | None]] = {}
    folds = _folds(recipe, owners, tasks)
    for task in tasks:
        for piece in task.pieces:
            stated[piece.parameter] = [other.tensor.activation_divisor for other in task.pieces]
    uses = []
    for (parameter, input), setting in recipe.uses.items():
        divisor: float | None = setting.auxiliaries.get("activation_input_divisor")
        if divisor is None and setting.activation_policy == "AllowA4":
            known = [value for value in stated[owners[parameter]] if value is not None]
            if not known:
                raise ConversionError(
                    f"use of {parameter!r} with {input!r} allows 4-bit activations, which need an "
                    "activation_input_divisor; neither the recipe nor the source states one"
                )
            divisor = min(known)
        uses.append(PlannedUse(parameter, input, setting.activation_policy, divisor, folds.get(owners[parameter])))
    return tuple(uses)


def _folds(recipe: Recipe, owners: Mapping[str, str], tasks: Sequence[Task]) -> dict[str, InputFold]:
    """What the inputs of parameters that keep their source's words go through; a use must be there to say so."""
    folds: dict[str, InputFold | None] = {}
    for task in tasks:
        for piece in task.pieces:
            fold = piece.tensor.fold if task.method.takes == "encoded" else None
            if folds.setdefault(piece.parameter, fold) is not fold:
                raise ConversionError(
                    f"{piece.parameter!r}: some of its rows keep words that are stored for transformed inputs, some do not"
                )
    used = {parameter for parameter, _ in recipe.uses}
    for name, owner in owners.items():
        found = folds[owner]
        if found is not None and not used & {name, _FOLDED_LIKE.get(name)}:
            raise ConversionError(
                f"{name!r} has no use that could state {found.role}; take its values instead of its words"
            )
    return {name: fold for name, fold in folds.items() if fold is not None}


def _entry(task: Task, model: RecipeModel) -> TensorEntry:
    origins = [piece.tensor.origin or piece.tensor.name for piece in task.pieces]
    return TensorEntry(
        parameters=task.names,
        object=task.object_id,
        shape=task.shape,
        source=", ".join(dict.fromkeys(origins)),
        encoding=", ".join(dict.fromkeys(piece.tensor.encoding for piece in task.pieces)),
        format=task.record.name,
        method=task.method.name,
        bytes=task.bytes,
        note="; ".join(filter(None, (task.selection.note or _note(task), _apart(task, model)))),
        fallback=task.selection.fallback,
        method_parameters=public_arguments(task.selection.parameters),
        reason="" if task.record.quantized else model.parameters[task.names[0]].reason,
    )


def _apart(task: Task, model: RecipeModel) -> str:
    """Tied parameters with different selections cost an object each, which a reader should know."""
    twins = [twin for name in task.names for twin in model.parameters[name].tied if twin not in task.names]
    return f"stored apart from its tied twin {', '.join(dict.fromkeys(twins))}" if twins else ""


def _note(task: Task) -> str:
    encodings = {piece.tensor.encoding for piece in task.pieces}
    decoded = sorted(encoding for encoding in encodings if not is_plain(encoding))
    if decoded and task.method.takes == "values":
        return f"{'requantized' if task.record.quantized else 'decoded'} from {', '.join(decoded)}"
    if "fp64" in encodings and isinstance(task.record, DirectFormat):
        return "rounded from fp64"
    return ""
