"""Recipes: code that says what every logical parameter becomes.

A recipe edits selections. At first each parameter is one selection, all its rows in its direct format by `cast_direct`
from the main source; operations narrow, change, join and alias them. Nothing is read or written here: `parents()` is
the list of objects a conversion then makes. Source of the operations: spec/conversion.md 8.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ninfer_torch.errors import ConversionError, LayoutError
from ninfer_torch.formats import get_format
from ninfer_torch.layouts import get_layout, layout_of
from ninfer_torch.models.generic import Kind

__all__ = [
    "CHECKPOINT",
    "POLICIES",
    "Parameter",
    "Parent",
    "Piece",
    "Recipe",
    "RecipeModel",
    "Selection",
    "UseSetting",
    "method_name",
]

CHECKPOINT = "checkpoint"
"""Name of the main source."""

POLICIES = ("A16Only", "AllowA8", "AllowA4")
"""What the activations of a use may be rounded to (spec/container.md 7)."""

_LISTED = 12

UserMethod = Callable[..., Any]


def method_name(method: str | UserMethod) -> str:
    """How a report calls a method: its name, or the name of the function."""
    return method if isinstance(method, str) else getattr(method, "__qualname__", type(method).__name__)


@dataclass(frozen=True)
class Parameter:
    """One logical parameter of a model: `name`, its shape, what its layers do with it (`kind`), the inputs that it
    multiplies, and the other names of the same tensor where the model ties it. `reason` says why a direct one that looks
    quantizable is not.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    inputs: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    reason: str = ""

    @property
    def layer(self) -> int | None:
        """The number of the layer the parameter belongs to: the first number in its name."""
        return next((int(word) for word in self.name.replace("/", ".").split(".") if word.isdecimal()), None)


@dataclass(frozen=True)
class RecipeModel:
    """The model a recipe is asked about. `packing` lists the groups that lie in one parent unless a recipe objects."""

    architecture: str
    config: Mapping[str, Any]
    parameters: Mapping[str, Parameter]
    packing: tuple[tuple[str, ...], ...] = ()

    @property
    def layers(self) -> int:
        """Number of layers: one more than the largest layer number, 0 without any."""
        return max((p.layer + 1 for p in self.parameters.values() if p.layer is not None), default=0)

    def match(self, selectors: str | Iterable[str]) -> tuple[str, ...]:
        """The parameters of a selector, in the model's order: an exact name, a case-sensitive shell pattern, or a list of
        both. In a pattern `*` also matches `/`, and `.` and `/` mean the same.

        Raises ConversionError for a selector that matches nothing, naming it and what comes near.
        """
        if isinstance(selectors, str) and selectors in self.parameters:
            return (selectors,)
        wanted = [selectors] if isinstance(selectors, str) else list(selectors)
        chosen: set[str] = set()
        for selector in wanted:
            found = [selector] if selector in self.parameters else self._matching(selector)
            if not found:
                raise ConversionError(f"selector {selector!r} matches no parameter; {self._near(selector)}")
            chosen.update(found)
        return tuple(name for name in self.parameters if name in chosen)

    def _matching(self, pattern: str) -> list[str]:
        pattern = pattern.replace(".", "/")
        return [name for name in self.parameters if fnmatch.fnmatchcase(name.replace(".", "/"), pattern)]

    def _near(self, selector: str) -> str:
        near = difflib.get_close_matches(selector, self.parameters, n=3, cutoff=0.6)
        if near:
            return f"similar names: {', '.join(near)}"
        names = list(self.parameters)
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return f"{self.architecture} has {', '.join(names[:_LISTED])}{more}"


@dataclass(frozen=True)
class Selection:
    """What rows [`rows`) of the leading axis of one parameter become; `rows` is None for the whole parameter.

    `method` is a registered name or a function, `source` the name of the source that is read. `note` and `fallback` are
    for the report: a fallback is a block type that could not be kept.
    """

    format: str
    method: str | UserMethod = "cast_direct"
    source: str = CHECKPOINT
    parameters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    rows: tuple[int, int] | None = None
    note: str = ""
    fallback: bool = False

    @property
    def recipe_key(self) -> tuple[Any, ...]:
        """Everything but the rows: what members of one parent must agree in, the source apart."""
        return self.format, self.method, json.dumps(dict(self.parameters), sort_keys=True)


@dataclass
class UseSetting:
    """Permission and auxiliaries of one (parameter, input); the auxiliaries are numbers by role."""

    activation_policy: str = "A16Only"
    auxiliaries: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """Rows [begin, end) of the leading axis of one parameter, in the parent at hand."""

    parameter: str
    begin: int
    end: int
    source: str


@dataclass(frozen=True)
class Parent:
    """One object to write: its pieces in row order, and the selection they share."""

    pieces: tuple[Piece, ...]
    selection: Selection


class Recipe:
    """The selections of a model, edited by the operations of spec/conversion.md 8; later calls win.

    `formats` gives the direct format of every parameter, `sources` the names of what may be read, `divisors` the nvfp4
    divisor of a (source, parameter) where it is known.
    """

    def __init__(
        self,
        model: RecipeModel,
        formats: Mapping[str, str],
        sources: Iterable[str] = (CHECKPOINT,),
        divisors: Callable[[str, str], float | None] = lambda source, name: None,
    ) -> None:
        self.model = model
        self._divisor = divisors
        self.uses: dict[tuple[str, str], UseSetting] = {
            (name, input): UseSetting() for name, parameter in model.parameters.items() for input in parameter.inputs
        }
        self._sources = tuple(sources)
        self._selections = {name: [Selection(formats[name])] for name in model.parameters}
        self._groups: list[tuple[str, ...]] = []
        self._separate: set[str] = set()
        self._shared: dict[str, str] = {}

    def selections(self, name: str) -> tuple[Selection, ...]:
        """The selections of a parameter in row order."""
        return tuple(self._selections[self._known(name)])

    def assign(
        self,
        selectors: str | Iterable[str],
        format: str | None = None,
        layout: str | None = None,
        method: str | UserMethod | None = None,
        source: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        activation_policy: str | None = None,
        rows: tuple[int, int] | None = None,
        *,
        note: str | None = None,
        fallback: bool | None = None,
    ) -> None:
        """Change what the selected parameters become; only the given arguments change.

        `format` a registered format; its method stays. `layout` "auto" or the format's own layout. `method` a name of
        METHODS or a function; `parameters` its JSON-serialisable arguments. `source` the name of a source that has the
        parameters. `activation_policy` applies to every input of the parameters. `rows` = (begin, end) of the leading
        axis splits the selections there. A parameter whose selection changes shares nothing any longer.

        Raises ConversionError for a selector without a match, an unknown source or policy, rows outside a parameter, and
        arguments that are no JSON; FormatError and LayoutError for unknown or unfitting names.
        """
        changes = _given(format=format, method=method, source=source, parameters=parameters)
        changes |= {"note": note or "", "fallback": bool(fallback)} if changes or note is not None else {}
        if format is not None:
            changes["format"] = get_format(format).name
        if source is not None and source not in self._sources:
            raise ConversionError(f"unknown source {source!r}; the sources are {', '.join(self._sources)}")
        if parameters is not None:
            changes["parameters"] = _checked_arguments(parameters)
        if activation_policy is not None and activation_policy not in POLICIES:
            raise ConversionError(f"unknown activation policy {activation_policy!r}; known: {', '.join(POLICIES)}")
        for name in self.model.match(selectors):
            if rows is not None:
                self._split(name, rows)
            self._change(name, rows, changes, layout)
            if activation_policy is not None:
                for input in self.model.parameters[name].inputs:
                    self.uses[name, input].activation_policy = activation_policy

    def _split(self, name: str, rows: tuple[int, int]) -> None:
        shape = self.model.parameters[name].shape
        extent = shape[0] if shape else 1
        begin, end = rows
        if not 0 <= begin < end <= extent:
            raise ConversionError(f"rows [{begin}, {end}) are no range of {name!r}, which has {extent} rows")
        pieces = []
        for selection in self._selections[name]:
            low, high = selection.rows or (0, extent)
            cuts = sorted({low, high, *(cut for cut in rows if low < cut < high)})
            pieces += [replace(selection, rows=span) for span in itertools.pairwise(cuts)]
        self._selections[name] = pieces

    def _change(self, name: str, rows: tuple[int, int] | None, changes: Mapping[str, Any], layout: str | None) -> None:
        changed = []
        for selection in self._selections[name]:
            inside = rows is None or (selection.rows and rows[0] <= selection.rows[0] and selection.rows[1] <= rows[1])
            selection = replace(selection, **changes) if inside else selection
            if inside and layout not in (None, "auto") and get_layout(layout).name != layout_of(selection.format).name:
                raise LayoutError(
                    f"{name!r}: format {selection.format} lies in layout {layout_of(selection.format).name}, "
                    f"not {layout}"
                )
            changed.append(selection)
        if changed != self._selections[name]:
            self._shared.pop(name, None)
        self._selections[name] = _merged(changed)

    def use(
        self,
        parameter: str,
        input: str,
        activation_policy: str | None = None,
        auxiliaries: Mapping[str, float] | None = None,
    ) -> None:
        """Set the permission or auxiliaries of one use; a new `input` makes a new use.

        `auxiliaries`: `activation_input_divisor` as a positive number, the only role a recipe can fill. Raises
        ConversionError for anything else.
        """
        setting = self.uses.get((self._known(parameter), input), UseSetting())
        if activation_policy is not None and activation_policy not in POLICIES:
            raise ConversionError(f"unknown activation policy {activation_policy!r}; known: {', '.join(POLICIES)}")
        for role, value in (auxiliaries or {}).items():
            positive = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
            if role != "activation_input_divisor" or not positive:
                raise ConversionError(
                    f"use of {parameter!r} with {input!r}: auxiliary {role!r} = {value!r}, expected "
                    "activation_input_divisor as a positive finite number"
                )
        setting.activation_policy = activation_policy or setting.activation_policy
        setting.auxiliaries |= auxiliaries or {}
        self.uses[parameter, input] = setting

    def group(self, names: Sequence[str]) -> None:
        """Put whole parameters into one parent, rows in the given order.

        Checked when the recipe is complete: the members must then be unsplit, not shared, equal in format, method and
        parameters, and of one row length. Raises ConversionError for an unknown, repeated or already grouped name.
        """
        members = tuple(self._known(name) for name in names)
        taken = [name for name in members if any(name in group for group in self._groups)]
        if len(members) < 2 or len(set(members)) < len(members) or taken:
            found = f"{taken[0]!r} is in a group already" if taken else f"found {list(members)}"
            raise ConversionError(f"a group takes at least two different parameters of no other group; {found}")
        self._groups.append(members)

    def separate(self, names: str | Iterable[str]) -> None:
        """Keep the selected parameters out of the model's automatic packing, and tied ones in an object of their own."""
        self._separate.update(self.model.match(names))

    def share(self, parameter: str, target: str) -> None:
        """Bind `parameter` to whatever `target` is stored as; uses stay separate.

        Raises ConversionError for unknown names, unequal shapes and cycles.
        """
        shape, wanted = (self.model.parameters[self._known(name)].shape for name in (parameter, target))
        if shape != wanted:
            raise ConversionError(
                f"{parameter!r} of shape {list(shape)} cannot share {target!r} of shape {list(wanted)}"
            )
        if self._owner(target) == parameter:
            raise ConversionError(f"{parameter!r} sharing {target!r} would close a cycle")
        self._shared[parameter] = target

    def _owner(self, name: str) -> str:
        while name in self._shared:
            name = self._shared[name]
        return name

    def _known(self, name: str) -> str:
        if name not in self.model.parameters:
            raise ConversionError(f"no parameter {name!r}; {self.model._near(name)}")
        return name

    def owners(self) -> dict[str, str]:
        """The parameter each one's binding belongs to: itself, unless it is shared, or tied and equal in selection."""
        table: dict[str, str] = {}
        for name, parameter in self.model.parameters.items():
            owner = self._owner(name)
            if owner == name and name not in self._separate:
                twins = (twin for twin in parameter.tied if twin in table and table[twin] == twin)
                owner = next((t for t in twins if self._selections[t] == self._selections[name]), name)
            table[name] = owner
        return {name: table[owner] if owner != name else name for name, owner in table.items()}

    def parents(self) -> tuple[Parent, ...]:
        """The objects in the order of spec/conversion.md 8: groups, packed groups, then what remains.

        Raises ConversionError for a group whose members cannot lie in one parent.
        """
        owners = self.owners()
        free = [name for name, owner in owners.items() if owner == name]
        parents = []
        for group in self._groups:
            self._check_group(group, free)
            parents.append(self._joined(group))
        used = {name for group in self._groups for name in group}
        for group in self.model.packing:
            if used.isdisjoint(group) and self._packs(group, free):
                parents.append(self._joined(group))
                used.update(group)
        parents += [parent for name in free if name not in used for parent in self._alone(name)]
        return tuple(parents)

    def _packs(self, group: Sequence[str], free: Sequence[str]) -> bool:
        if not self._separate.isdisjoint(group) or not set(group) <= set(free):
            return False
        selections = [self._selections[name] for name in group]
        built_in = all(len(found) == 1 and isinstance(found[0].method, str) for found in selections)
        if not built_in or len({found[0].recipe_key for found in selections}) > 1:
            return False
        known = {self._divisor(found[0].source, name) for name, found in zip(group, selections, strict=True)}
        return selections[0][0].format != "nvfp4" or (len(known) == 1 and None not in known)

    def _check_group(self, group: Sequence[str], free: Sequence[str]) -> None:
        where = f"group {', '.join(group)}"
        for name in group:
            if name not in free:
                raise ConversionError(f"{where}: {name!r} shares another parameter's object")
            if len(self._selections[name]) > 1:
                raise ConversionError(f"{where}: {name!r} is split into {len(self._selections[name])} row ranges")
        keys = {self._selections[name][0].recipe_key for name in group}
        if len(keys) > 1:
            found = "; ".join(f"{name}: {_described(self._selections[name][0])}" for name in group)
            raise ConversionError(f"{where}: expected one format, method and set of parameters, found {found}")
        shapes = [self.model.parameters[name].shape for name in group]
        if len({(len(shape) == 1, shape[-1] if len(shape) > 1 else 0) for shape in shapes}) > 1 or () in shapes:
            raise ConversionError(f"{where}: expected rows of one length, found shapes {[list(s) for s in shapes]}")

    def _joined(self, group: Sequence[str]) -> Parent:
        pieces = tuple(self._alone(name)[0].pieces[0] for name in group)
        return Parent(pieces, replace(self._selections[group[0]][0], rows=None))

    def _alone(self, name: str) -> list[Parent]:
        shape = self.model.parameters[name].shape
        extent = shape[0] if shape else 1
        return [
            Parent((Piece(name, *(selection.rows or (0, extent)), selection.source),), selection)
            for selection in self._selections[name]
        ]


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _checked_arguments(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        return MappingProxyType(json.loads(json.dumps(dict(parameters), allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ConversionError(f"method parameters must be JSON values with names: {error}") from error


def _merged(selections: Sequence[Selection]) -> list[Selection]:
    """Neighbouring ranges that have become equal are one again."""
    merged: list[Selection] = []
    for selection in selections:
        if merged and selection.rows and replace(merged[-1], rows=None) == replace(selection, rows=None):
            merged[-1] = replace(merged[-1], rows=(merged[-1].rows[0], selection.rows[1]))  # type: ignore[index]
        else:
            merged.append(selection)
    if len(merged) == 1:
        merged[0] = replace(merged[0], rows=None)
    return merged


def _described(selection: Selection) -> str:
    arguments = f" {dict(selection.parameters)}" if selection.parameters else ""
    return f"{selection.format} by {method_name(selection.method)}{arguments}"
