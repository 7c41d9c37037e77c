"""Which tensor of a source holds which parameter of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ninfer_torch.convert.source import Source, SourceTensor, UnusedTensor
from ninfer_torch.errors import ConversionError
from ninfer_torch.models.generic import ModelPlan, logical_name

__all__ = ["MatchedSource", "match_source", "row_chunks"]

CHUNK_VALUES = 1 << 21
"""Values read and encoded at a time: 8 MiB as float32."""

_LISTED_NAMES = 20


@dataclass(frozen=True)
class MatchedSource:
    """A source whose `tensors` answer to logical names. `unused` are those that no parameter takes."""

    source: Source
    tensors: Mapping[str, SourceTensor]
    unused: tuple[UnusedTensor, ...] = ()

    @property
    def kind(self) -> str:
        """Kind of the source: `huggingface`, `gguf`, ..."""
        return self.source.kind

    @property
    def name(self) -> str:
        """Name of the source without its path."""
        return self.source.name


def row_chunks(source: SourceTensor, begin: int, end: int, values: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Cuts of rows [begin, end) of at most `values` values each, or one row (`multiple` rows) where that has more."""
    step = max(1, values // max(1, source.row_values) // multiple) * multiple
    for first in range(begin, end, step):
        yield first, min(first + step, end)


def match_source(plan: ModelPlan, source: Source, *, complete: bool = True) -> MatchedSource:
    """The tensors of a source under the logical names of a model; tied names that it holds once get the same tensor.

    With `complete`, every parameter must be there. Raises ConversionError for missing tensors, another shape than the
    model's, and tied names that hold different values.
    """
    found = _match_names(plan, source, complete)
    tensors: dict[str, SourceTensor] = {}
    for planned, names in zip(plan.tensors, found, strict=True):
        if not names:
            continue
        tensor = _agreed([source.tensors[name] for name in names])
        if tensor.shape != planned.shape:
            raise ConversionError(
                f"tensor {names[0]!r} has shape {list(tensor.shape)}, {plan.architecture} expects "
                f"{list(planned.shape)} for {planned.names[0]!r}"
            )
        tensors |= {logical_name(name): tensor for name in planned.names}
    consumed = {name for names in found for name in names}
    left = (
        UnusedTensor(name, f"{plan.architecture} has no such parameter")
        for name in source.tensors
        if name not in consumed
    )
    return MatchedSource(source, tensors, (*source.unused, *left))


def _match_names(plan: ModelPlan, source: Source, complete: bool) -> list[list[str]]:
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
    if missing and complete:
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
            torch.equal(first.values(begin, end), twin.values(begin, end))
            for begin, end in row_chunks(first, 0, first.rows, CHUNK_VALUES)
        ):
            raise ConversionError(
                f"the config ties {first.name!r} and {twin.name!r}, but the source holds different values for them"
            )
    return first


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED_NAMES
    return ", ".join(names[:_LISTED_NAMES]) + (f" and {more} more" if more > 0 else "")
