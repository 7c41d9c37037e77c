"""Quantizing a module in place: recipes decide, weight by weight, what replaces a dense parameter.

The same presets, recipes and methods as those of a conversion. A plan names weights and holds none, so that a dense
weight is gone before the next one is encoded: the peak is the quantized module and its largest layer.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

import torch

from ninfer_torch.convert.importance import Importance, mean_importance, read_importance
from ninfer_torch.convert.matching import MatchedSource
from ninfer_torch.convert.methods import Method, custom_method, get_method
from ninfer_torch.convert.packed_tensors import DIRECT_ENCODINGS
from ninfer_torch.convert.presets import PRESETS, Preset, direct_format, format_preset
from ninfer_torch.convert.recipes import CHECKPOINT, Recipe, RecipeModel, Selection, method_name
from ninfer_torch.convert.settings import Configure, load_recipe
from ninfer_torch.convert.source import SourceTensor, UnusedTensor
from ninfer_torch.convert.views import recipe_model
from ninfer_torch.errors import ConversionError, FormatError, LayoutError, UnsupportedOperation
from ninfer_torch.formats import get_format
from ninfer_torch.layouts import Geometry, encoded_bytes, planes_of
from ninfer_torch.models.generic import ModelPlan, PlannedTensor, expert_banks, logical_name, plan_module
from ninfer_torch.tensors import NinferTensor, stack_rows
from ninfer_torch.tensors.packed import make_tensor

__all__ = ["LiveWeight", "RecipeLike", "plan_weights", "quantize_module", "recipe_title"]

_CHUNK_VALUES = 1 << 19
"""Values encoded at a time: what a method needs beside a weight stays at a few megabytes."""

RecipeLike = str | os.PathLike[str] | Preset | Configure
"""A preset's name, a format's name, the path of a Python recipe, a preset, or `configure(model, recipe, sources)`."""


@dataclass(frozen=True)
class LiveWeight:
    """One weight to quantize, under all its state-dict names: `pieces` are selections of row ranges, in order.

    `importance` is by piece, for the methods that take it; `policy` is what its uses permit.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    pieces: tuple[Selection, ...]
    policy: str
    importance: tuple[torch.Tensor | None, ...] = ()

    @property
    def packed_bytes(self) -> int:
        """Bytes of the quantized weight."""
        return sum(
            encoded_bytes(piece.format, ((end - begin) * self._inner, self.shape[-1]))
            for piece, begin, end in self._spans
        )

    def quantized(self, weight: torch.Tensor) -> NinferTensor:
        """`weight`, of this shape and any floating dtype, on any device, in its formats; it computes in that dtype.

        Raises ConversionError, naming the weight, where a method refuses its values.
        """
        rows = weight.detach().reshape(-1, self.shape[-1])
        made = []
        for (piece, begin, end), importance in zip(self._spans, self.importance, strict=True):
            part = rows[begin * self._inner : end * self._inner]
            try:
                made.append(_encoded(part, piece, importance))
            except (ConversionError, LayoutError) as error:
                raise ConversionError(f"{self.names[0]!r} as {piece.format}: {error}") from error
        whole = made[0] if len(made) == 1 else stack_rows([(part, None) for part in made])
        return cast(NinferTensor, whole).with_shape(self.shape).with_policy(self.policy)

    @property
    def _inner(self) -> int:
        """Matrix rows per index of the leading axis."""
        return self.shape[1] if len(self.shape) == 3 else 1

    @property
    def _spans(self) -> list[tuple[Selection, int, int]]:
        return [(piece, *(piece.rows or (0, self.shape[0]))) for piece in self.pieces]


@dataclass(frozen=True)
class _LiveSource:
    """A module as the source that a recipe is shown; rows are read from the module when they are asked for."""

    module: torch.nn.Module
    tensors: Mapping[str, SourceTensor]
    kind: str = "module"
    unused: Sequence[UnusedTensor] = field(default=())

    @property
    def name(self) -> str:
        return type(self.module).__name__

    def config(self) -> Any:
        return getattr(self.module, "config", None)

    def resources(self) -> dict[str, bytes]:
        return {}

    def provenance(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "class": self.name}


def recipe_title(recipe: RecipeLike) -> str:
    """How a config or a report calls a recipe."""
    if isinstance(recipe, Preset):
        return recipe.name
    return os.path.basename(recipe) if isinstance(recipe, str | os.PathLike) else method_name(recipe)


def quantize_module(
    module: torch.nn.Module, recipe: RecipeLike = "q4", *, modules_to_not_convert: Iterable[str] = ()
) -> tuple[str, ...]:
    """Replace dense parameters of `module` by quantized ones, one after the other; returns the names of all of them.

    See `ninfer_torch.quantize_`.
    """
    weights = plan_weights(module, recipe, modules_to_not_convert=modules_to_not_convert)
    for weight in weights:
        dense = module.get_parameter(weight.names[0])
        if dense.device.type == "meta":
            raise ConversionError(f"{weight.names[0]!r} is on the meta device and has no values to quantize")
        del dense
    for weight in weights:
        packed = weight.quantized(module.get_parameter(weight.names[0]))
        parameter = torch.nn.Parameter(packed, requires_grad=False)
        for name in weight.names:
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, parameter)
    return tuple(name for weight in weights for name in weight.names)


def plan_weights(
    module: torch.nn.Module,
    recipe: RecipeLike,
    *,
    modules_to_not_convert: Iterable[str] = (),
    tied: Mapping[str, str] = MappingProxyType({}),
) -> tuple[LiveWeight, ...]:
    """What a recipe makes of a module, which may be on the meta device; direct parameters and those that are quantized
    already are left out. `tied` gives, for names that are yet to be tied to another, that other.

    Raises ConversionError for an unknown recipe, a name in `modules_to_not_convert` that no module has, a parameter
    that no layer can hold quantized, and what the recipe itself refuses; UnsupportedOperation where the recipe joins
    parameters that are not tied.
    """
    plan = _joined(plan_module(module), tied)
    excluded = _excluded(module, plan, tuple(modules_to_not_convert))
    model = recipe_model(plan)
    tensors = {name: _described(module, planned) for planned in plan.tensors for name in planned.names}
    source = _LiveSource(module, MappingProxyType(tensors))
    matched = {CHECKPOINT: MatchedSource(source, {logical_name(name): tensor for name, tensor in tensors.items()})}
    edited = Recipe(model, {logical_name(name): direct_format(t.encoding) for name, t in tensors.items()})
    _configure(recipe)(model, edited, MappingProxyType(matched))
    owners = edited.owners()
    banks = expert_banks(module)
    weights = []
    for planned in plan.tensors:
        for names in _groups(planned, owners):
            weight = _planned(module, edited, names, planned)
            if weight is not None and excluded.isdisjoint(planned.names):
                _check_layer(module, banks, weight)
                weights.append(_with_importance(weight, model))
    return tuple(weights)


def _joined(plan: ModelPlan, tied: Mapping[str, str]) -> ModelPlan:
    """The plan with tensors that are to be tied as one, of the kind of the first."""
    by_name = {name: planned for planned in plan.tensors for name in planned.names}
    joined: dict[str, list[PlannedTensor]] = {}
    for planned in plan.tensors:
        owner = by_name.get(tied.get(planned.names[0], ""), planned)
        joined.setdefault(owner.names[0], []).insert(0 if owner is planned else 1, planned)
    tensors = []
    for first, *others in joined.values():
        names = tuple(name for planned in (first, *others) for name in planned.names)
        multiplied = tuple(name for planned in (first, *others) for name in planned.multiplied)
        tensors.append(replace(first, names=names, multiplied=multiplied))
    return replace(plan, tensors=tuple(tensors))


def _configure(recipe: RecipeLike) -> Configure:
    if isinstance(recipe, Preset):
        return recipe.configure
    if not isinstance(recipe, str | os.PathLike):
        if callable(recipe):
            return recipe
        raise ConversionError(f"a recipe is a name, a path or a function, found a {type(recipe).__name__}")
    if isinstance(recipe, str) and recipe in PRESETS:
        return PRESETS[recipe].configure
    if os.fspath(recipe).endswith(".py"):
        return load_recipe(recipe)
    try:
        return format_preset(os.fspath(recipe)).configure
    except FormatError as error:
        raise ConversionError(
            f"recipe {os.fspath(recipe)!r} is no preset ({', '.join(PRESETS)}), no path of a .py file, and no format: {error}"
        ) from error


def _described(module: torch.nn.Module, planned: PlannedTensor) -> SourceTensor:
    name = planned.names[0]
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    tensor = getattr(owner, leaf)
    packed = isinstance(tensor, NinferTensor)
    plain = tensor.dtype in DIRECT_ENCODINGS and type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if planned.kind != "direct" and not packed and not (plain and tensor.is_floating_point()):
        raise ConversionError(
            f"{name!r} is a {type(tensor).__name__} of {tensor.dtype}; a {planned.kind} weight needs plain floating values, "
            "so dequantize the module first, or name it in modules_to_not_convert"
        )

    def rows(begin: int, end: int) -> torch.Tensor:
        values = getattr(owner, leaf).detach()
        if isinstance(values, NinferTensor):
            return values[begin:end].dequantize().cpu()
        return (values[begin:end] if values.dim() else values).cpu()

    return SourceTensor(name, planned.shape, DIRECT_ENCODINGS.get(tensor.dtype, str(tensor.dtype)), rows)


def _excluded(module: torch.nn.Module, plan: ModelPlan, patterns: tuple[str, ...]) -> set[str]:
    """State-dict names under the modules that are to stay dense: a pattern is a run of components of a module's path."""
    found: set[str] = set()
    names = [name for planned in plan.tensors for name in planned.names]
    for pattern in patterns:
        matches = {name for name in names if _matches(name, pattern)}
        if not matches:
            layers = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in names} - {""})
            raise ConversionError(
                f"modules_to_not_convert: no module of {type(module).__name__} is called {pattern!r}; its modules with "
                f"parameters are called {', '.join(layers[:12])}"
            )
        found |= matches
    return found


def _matches(name: str, pattern: str) -> bool:
    path, wanted = name.split("."), pattern.split(".")
    return any(
        all(map(fnmatch.fnmatchcase, path[begin : begin + len(wanted)], wanted))
        for begin in range(len(path) - len(wanted) + 1)
    )


def _groups(planned: PlannedTensor, owners: Mapping[str, str]) -> list[tuple[str, ...]]:
    """The names of one tensor that its recipe leaves one. Raises UnsupportedOperation for any other sharing."""
    by_owner: dict[str, list[str]] = {}
    own = {logical_name(name) for name in planned.names}
    for name in planned.names:
        owner = owners[logical_name(name)]
        if owner not in own:
            raise UnsupportedOperation(
                f"the recipe lets {name!r} share the object of {owner!r}, which is another tensor of the module; convert the "
                "module to an artifact, or tie the parameters first"
            )
        by_owner.setdefault(owner, []).append(name)
    if len(by_owner) > 1:
        raise UnsupportedOperation(
            f"the recipe gives the tied weights {', '.join(planned.names)} different formats, and a module has one tensor for "
            "them; convert the model to an artifact, where each may have its own"
        )
    return [tuple(names) for names in by_owner.values()]


def _planned(
    module: torch.nn.Module, recipe: Recipe, names: tuple[str, ...], planned: PlannedTensor
) -> LiveWeight | None:
    pieces = recipe.selections(logical_name(names[0]))
    path, _, leaf = names[0].rpartition(".")
    packed = isinstance(getattr(module.get_submodule(path), leaf), NinferTensor)
    if packed or not any(get_format(piece.format).quantized for piece in pieces):
        return None
    logical = [logical_name(name) for name in names]
    policies = [setting.activation_policy for (name, _), setting in recipe.uses.items() if name in logical]
    return LiveWeight(names, planned.shape, pieces, policies[0] if policies else "A16Only", (None,) * len(pieces))


def _check_layer(module: torch.nn.Module, banks: set[str], weight: LiveWeight) -> None:
    for name in weight.names:
        path, _, leaf = name.rpartition(".")
        layer = module.get_submodule(path)
        fits = isinstance(layer, torch.nn.Linear | torch.nn.Embedding) and leaf == "weight" and len(weight.shape) == 2
        if not fits and name not in banks:
            raise ConversionError(
                f"{name!r} {list(weight.shape)} of a {type(layer).__name__} cannot be {weight.pieces[0].format}: only the "
                "weights of nn.Linear and nn.Embedding, and banks of experts stored [E, N, K], are quantized"
            )


def _with_importance(weight: LiveWeight, model: RecipeModel) -> LiveWeight:
    """Check methods and arguments, and read the importance files that they name, before anything is replaced."""
    vectors = []
    tables: dict[str, Importance] = {}
    for piece in weight.pieces:
        arguments = dict(piece.parameters)
        method = _method(piece)
        path = arguments.pop("imatrix", None) if "importance" in (method.parameters or ()) else None
        try:
            method.check(piece.format, arguments)
            if method.takes != "values":
                raise ConversionError(f"method {method.name} takes encoded rows, and a module has numbers")
            if path is not None and path not in tables:
                tables[path] = read_importance(path, model.config)
            names = [logical_name(name) for name in weight.names]
            vectors.append(None if path is None else mean_importance(tables[path], names, weight.shape[-1]))
        except ConversionError as error:
            raise ConversionError(f"{weight.names[0]!r}: {error}") from error
    return replace(weight, importance=tuple(vectors))


def _method(piece: Selection) -> Method:
    return get_method(piece.method) if isinstance(piece.method, str) else custom_method(piece.method)


def _encoded(rows: torch.Tensor, piece: Selection, importance: torch.Tensor | None) -> torch.Tensor:
    """Rows [N, K] in the format of a selection, encoded in chunks that fit beside the weight."""
    record, method = get_format(piece.format), _method(piece)
    arguments = {name: value for name, value in piece.parameters.items() if name != "imatrix"}
    if importance is not None:
        arguments["importance"] = importance.to(rows.device)
    count, columns = rows.shape
    specs = planes_of(record, (count, columns))
    if not record.quantized or any(spec.rows_per_index != 1 for spec in specs):
        planes = method.encode(rows, record, 0, **arguments)
        if not record.quantized:
            return planes[0]
    else:
        planes = tuple(torch.empty(spec.shape, dtype=spec.dtype, device=rows.device) for spec in specs)
        step = max(1, _CHUNK_VALUES // max(columns, 1))
        for begin, end in itertools.pairwise([*range(0, count, step), count]):
            for whole, part in zip(planes, method.encode(rows[begin:end], record, begin, **arguments), strict=True):
                whole[begin:end] = part
    divisors = planes[-1].numel() if any(spec.rows_per_index not in (0, 1) for spec in specs) else 1
    geometry = Geometry.whole((count, columns), divisors)
    return make_tensor(record.name, planes, geometry, (count, columns), rows.dtype, "A16Only")
