"""The contract of an architecture: a table of parameters, and a translation of configs.

A row of a table says which logical parameters of an artifact make up one Transformers parameter, and how. Everything else
is read off the rows, both ways: what an artifact must hold, what a model's state dict takes from it, and what a
checkpoint's tensors become when they are converted. An architecture is added by writing its tables; the registry is
`models.architectures`. Nothing here imports Transformers: models are asked for the names of their modules and tensors.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ninfer_torch.artifact.reader import Artifact
from ninfer_torch.errors import LayoutError

__all__ = [
    "Architecture",
    "LogicalParameter",
    "ModelParameter",
    "Placement",
    "Row",
    "Source",
    "expand",
    "join_values",
    "module_prefixes",
    "split_value",
]


@dataclass(frozen=True)
class LogicalParameter:
    """One name of an artifact's bindings.

    `shape` is None where only the model knows it. `inputs` are the inputs that multiply it, first the one of the model
    that loads it; a parameter without inputs is read as it is. `packable` says whether it may be stored quantized (None:
    the layer that holds it decides), `format` how a direct one is stored. `folded_like` is the (parameter, input) whose
    signs a t2 table is folded with, though it has no use of its own (spec/container.md 7).
    """

    name: str
    shape: tuple[int, ...] | None = None
    inputs: tuple[str, ...] = ()
    packable: bool | None = False
    format: str = "bf16"
    folded_like: tuple[str, str] | None = None


@dataclass(frozen=True)
class ModelParameter:
    """One Transformers parameter and the logical parameters it is made of.

    `name` counts from the module that `anchor` names (`Architecture.anchors`; an empty anchor is the model). The rows of
    `sources` follow one another; with `slices` = n every source is cut into n equal runs of rows, and the runs
    alternate. `transposed` is the one other arrangement: [T, C] becomes [C, 1, T]. The result is viewed as `shape`.
    """

    anchor: str
    name: str
    shape: tuple[int, ...] | None
    sources: tuple[LogicalParameter, ...]
    slices: int = 1
    transposed: bool = False


@dataclass(frozen=True)
class Placement:
    """Where the parameters of an artifact go in one model.

    `placed` maps state-dict names to parameters; `unplaced` are logical names for which neither this model nor a part
    of the artifact that it leaves aside has a place.
    """

    placed: Mapping[str, ModelParameter]
    unplaced: tuple[str, ...]


class Architecture(ABC):
    """What an artifact of one kind holds, and how Transformers calls it."""

    name: str
    """The model class that `text.config.architectures` names."""

    anchors: Mapping[str, str] = {}
    """Anchor -> name of the Transformers class whose modules it stands for."""

    @abstractmethod
    def checkpoint_config(self, artifact: Artifact) -> dict[str, Any]:
        """The config.json of an equivalent checkpoint. Raises ArtifactError for configs outside the architecture."""

    @abstractmethod
    def parameters(self, artifact: Artifact) -> tuple[ModelParameter, ...]:
        """Every Transformers parameter of the components that the artifact declares."""

    @abstractmethod
    def checkpoint_names(self, artifact: Artifact) -> list[str]:
        """State-dict names of the checkpoint class, by which a stub lists the parameters."""

    @abstractmethod
    def place(self, model: Any, artifact: Artifact) -> Placement:
        """The places of the artifact's parameters in a Transformers model, which may be only a part of what it holds."""

    def checkpoint_prefixes(self, artifact: Artifact) -> Mapping[str, str]:
        """Anchor -> prefix of its parameters in `checkpoint_names`; what stands under no other prefix has the model's."""
        return {}


def module_prefixes(model: torch.nn.Module, anchors: Mapping[str, str]) -> dict[str, str]:
    """Anchor -> prefix of the names below its module, for each anchor that `model` is or contains; the empty anchor too."""
    classes = {class_name: anchor for anchor, class_name in anchors.items()}
    found = {"": ""}
    for path, module in model.named_modules():
        anchor = classes.get(type(module).__name__)
        if anchor is not None and anchor not in found:
            found[anchor] = f"{path}." if path else ""
    return found


@dataclass(frozen=True)
class Source:
    """A logical parameter in a table: name and input below the row's prefix, shape in symbols ("Q H")."""

    name: str
    shape: str
    input: str | None = None
    format: str = "bf16"


@dataclass(frozen=True)
class Row:
    """A line of a table: a Transformers name below its prefix, and what it is made of.

    `shape` (in symbols) is given where it is not the sources' rows under one another. `slices` is the symbol of
    `ModelParameter.slices`; with `each` = "E" the sources are repeated for {e} = 0 .. E-1.
    """

    target: str
    sources: tuple[Source, ...]
    shape: str | None = None
    slices: str | None = None
    each: str | None = None
    transposed: bool = False


def expand(
    rows: Sequence[Row], sizes: Mapping[str, int], *, anchor: str, logical: str, target: str
) -> Iterator[ModelParameter]:
    """The parameters of a table under the prefixes `logical` (of names and inputs) and `target`, symbols filled in."""
    for row in rows:
        indices = range(sizes[row.each]) if row.each else (0,)
        sources = tuple(
            LogicalParameter(
                logical + source.name.format(e=index),
                _numbers(source.shape, sizes),
                (logical + source.input.format(e=index),) if source.input else (),
                packable=source.input is not None,
                format=source.format,
            )
            for index in indices
            for source in row.sources
        )
        shape = _numbers(row.shape, sizes) if row.shape else _stacked_shape([s.shape or () for s in sources])
        slices = sizes[row.slices] if row.slices else 1
        yield ModelParameter(anchor, target + row.target, shape, sources, slices, row.transposed)


def with_inputs(parameter: ModelParameter, *inputs: str) -> ModelParameter:
    """The parameter of one source, multiplied by `inputs` too."""
    (source,) = parameter.sources
    return replace(parameter, sources=(replace(source, inputs=(*source.inputs, *inputs)),))


def _numbers(symbols: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[symbol] for symbol in symbols.split())


def _stacked_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def join_values(parameter: ModelParameter, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The dense value of a Transformers parameter out of the values of its sources, all of one dtype.

    A source may come flat. Raises LayoutError where their elements do not fill the parameter's shape.
    """
    found = sum(value.numel() for value in values)
    shape = tuple(values[0].shape) if parameter.shape is None else parameter.shape
    if found != math.prod(shape):
        raise LayoutError(f"parameter {parameter.name!r} of shape {list(shape)} is made of {found} elements")
    if len(values) == 1 and not parameter.transposed:
        return values[0].reshape(shape)
    if parameter.transposed:
        channels, _, taps = shape
        return values[0].reshape(taps, channels).T.reshape(shape)
    return torch.cat([value.reshape(parameter.slices, -1) for value in values], 1).reshape(shape)


def split_value(parameter: ModelParameter, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The values of the logical parameters inside a dense Transformers parameter: the inverse of `join_values`.

    Raises LayoutError for a value of another shape.
    """
    if parameter.shape is not None and tuple(value.shape) != parameter.shape:
        raise LayoutError(
            f"parameter {parameter.name!r} has shape {list(value.shape)}, expected {list(parameter.shape)}"
        )
    shapes = [source.shape or tuple(value.shape) for source in parameter.sources]
    if parameter.transposed:
        return (value.flatten(1).T.reshape(shapes[0]),)
    widths = [math.prod(shape) // parameter.slices for shape in shapes]
    parts = value.reshape(parameter.slices, -1).split(widths, 1)
    return tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
