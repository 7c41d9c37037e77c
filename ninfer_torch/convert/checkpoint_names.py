"""From the names of a checkpoint to those of its Transformers class: renamed tensors, and experts that become banks.

Transformers keeps a list of what it renames and fuses when it loads a checkpoint; it is read here, so that a checkpoint
means the same to the converter as to `from_pretrained`. Nothing is loaded: a bank reads its experts when rows are asked
for, and remembers them as its `members`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ninfer_torch.convert.source import SourceTensor
from ninfer_torch.errors import ConversionError
from ninfer_torch.models.generic import build_on_meta

__all__ = ["bank_of", "translate_names"]

_PLAIN = ("bf16", "fp16", "fp32", "fp64")
_MERGED = (("MergeModulelist",), ("MergeModulelist", "Concatenate"))
"""What may be done to the tensors of a list of modules: one stack of them, or several side by side in its rows."""

_LISTED = 4


def translate_names(tensors: Mapping[str, SourceTensor], config: Any, where: str) -> dict[str, SourceTensor]:
    """The tensors of a checkpoint under the names of the class in `config.architectures`, a Transformers config.

    Names that Transformers would not change, or that no parameter of the class answers to, stay; only experts stored one
    by one become banks wherever they are, [E, N, K], and banks stored [E, K, N] are turned where the class has them so.
    Raises ConversionError, naming the tensor, for a missing expert, experts of unlike shapes, two tensors of one name, and
    for a conversion of Transformers beyond those.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    model = build_on_meta(str(config.architectures[0]), config)
    known = _Known(model)
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if not hasattr(transform, "operations")]
    converters = [transform for transform in transforms if hasattr(transform, "operations")]
    converters += [_unscoped(converter) for converter in converters if _is_merge(converter)]
    found: dict[str, SourceTensor] = {}
    banks: dict[str, _Bank] = {}
    origins: dict[str, str] = {}
    for name, tensor in tensors.items():
        renamed = name
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        target, converter, pattern = _converted(renamed, converters)
        if converter is not None and _is_merge(converter):
            banks.setdefault(target, _Bank(target, converter.source_patterns)).add(pattern, renamed, tensor)
            continue
        if converter is not None and _turns_banks(converter) and len(tensor.shape) == 3 and known.has(target):
            expected = known.shape(target)
            found[target] = tensor if tensor.shape == expected else _turned(tensor, target)
            continue
        if converter is not None and known.has(target):
            steps = ", ".join(type(step).__name__ for step in converter.operations)
            raise ConversionError(
                f"{where}: Transformers makes {target!r} of tensor {name!r} by {steps}, which is not done here; load the "
                "model with Transformers and convert the live model"
            )
        final = renamed if known.has(renamed) else name
        if final in found:
            raise ConversionError(f"{where}: tensors {origins[final]!r} and {name!r} both hold {final!r}")
        origins[final] = name
        found[final] = tensor if final == name else _renamed(tensor, final)
    for target, bank in banks.items():
        if target in found:
            raise ConversionError(f"{where}: {target!r} is stored both as one tensor and expert by expert")
        shape = known.shape(target)
        found[target] = bank.tensor(shape[0] if shape else None, where)
    return found


class _Known:
    """The parameters of a model class, with or without the prefix of its base model."""

    def __init__(self, model: Any) -> None:
        self._prefix = f"{model.base_model_prefix}."
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}

    def _spellings(self, name: str) -> tuple[str, ...]:
        return name, self._prefix + name, name.removeprefix(self._prefix)

    def has(self, name: str) -> bool:
        return any(spelling in self._shapes for spelling in self._spellings(name))

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a parameter, None for a name that is none."""
        return next((self._shapes[s] for s in self._spellings(name) if s in self._shapes), None)


def _converted(name: str, converters: Iterable[Any]) -> tuple[str, Any, str]:
    """(new name, converter, its pattern) of the first converter that takes the name; (name, None, "") of none."""
    for converter in converters:
        target, pattern = converter.rename_source_key(name)
        if pattern is not None:
            return target, converter, pattern
    return name, None, ""


def _unscoped(converter: Any) -> Any:
    """The same converter for names outside the part of the model that it is meant for: a draft layer has experts too."""
    anywhere = copy.copy(converter)
    anywhere.scope_prefix = None
    return anywhere


def _is_merge(converter: Any) -> bool:
    """Whether a converter stacks a list of matrices, and joins rows where it has several lists."""
    steps = converter.operations
    axes = [getattr(step, "dim", None) for step in steps]
    names = tuple(type(step).__name__ for step in steps)
    indexed = all("*" in pattern for pattern in converter.source_patterns)
    return indexed and len(converter.target_patterns) == 1 and names in _MERGED and axes == [0, 1][: len(axes)]


def _turns_banks(converter: Any) -> bool:
    """Whether a converter exchanges rows and columns of banks that are stored the other way round."""
    steps = converter.operations
    return [type(step).__name__ for step in steps] == ["Transpose"] and {steps[0].dim0, steps[0].dim1} == {1, 2}


def _turned(tensor: SourceTensor, name: str) -> SourceTensor:
    """A bank [E, K, N] as [E, N, K]; its words cannot be turned."""
    experts, columns, rows = tensor.shape

    def values(begin: int, end: int) -> torch.Tensor:
        return tensor.values(begin, end).transpose(1, 2).contiguous()

    return SourceTensor(name, (experts, rows, columns), tensor.encoding, values, origin=tensor.origin or tensor.name)


def _renamed(tensor: SourceTensor, name: str) -> SourceTensor:
    return replace(tensor, name=name, origin=tensor.origin or tensor.name)


@dataclass
class _Bank:
    """The tensors of one bank as they are found: by pattern, which says what part of an expert they are, and index."""

    target: str
    patterns: Sequence[str]
    parts: dict[str, dict[int, SourceTensor]] = field(default_factory=dict)

    def add(self, pattern: str, name: str, tensor: SourceTensor) -> None:
        index = re.search(pattern.replace(".", r"\.").replace(r"\\.", r"\.").replace("*", r"(\d+)"), name)
        if index is None:
            raise ConversionError(f"tensor {tensor.name!r} has no number where Transformers' {pattern!r} expects one")
        self.parts.setdefault(pattern, {})[int(index.group(1))] = tensor

    def tensor(self, experts: int | None, where: str) -> SourceTensor:
        """The bank of `experts` matrices, or as many as there are. Raises ConversionError for one that is missing."""
        count = experts if experts is not None else 1 + max(max(part) for part in self.parts.values())
        missing = [self._name(pattern, index) for pattern in self.patterns for index in self._lacking(pattern, count)]
        surplus = [part[index].name for part in self.parts.values() for index in part if index >= count]
        if missing or surplus:
            what = f"lacks {_listed(missing)}" if missing else f"has {_listed(surplus)} beyond its number of experts"
            raise ConversionError(f"{where}: the checkpoint {what}; {self.target!r} is made of {count} experts")
        return bank_of(self.target, [[self.parts[p][e] for p in self.patterns] for e in range(count)])

    def _lacking(self, pattern: str, count: int) -> list[int]:
        return [index for index in range(count) if index not in self.parts.get(pattern, {})]

    def _name(self, pattern: str, index: int) -> str:
        """The name under which a missing tensor would be stored."""
        present = self.parts.get(pattern)
        if not present:
            return pattern.replace("\\", "").replace("*", str(index))
        number, tensor = next(iter(present.items()))
        head, mark, tail = tensor.name.rpartition(f".{number}.")
        return f"{head}.{index}.{tail}" if mark else tensor.name


def bank_of(name: str, experts: Sequence[Sequence[SourceTensor]]) -> SourceTensor:
    """A bank [E, N, K] of matrices [n, K], those of one expert under one another.

    It offers words where all of its matrices have words of one encoding. NVFP4 matrices with different divisors come with
    none for the bank; `members` have their own. Raises ConversionError for matrices that do not fit together.
    """
    members = tuple(matrix for expert in experts for matrix in expert)
    first = [matrix.shape for matrix in experts[0]]
    for expert in experts:
        for matrix, shape in zip(expert, first, strict=True):
            if matrix.shape != shape or len(shape) != 2 or shape[1] != first[0][1]:
                raise ConversionError(
                    f"tensor {matrix.origin or matrix.name!r} has shape {list(matrix.shape)} in the bank {name!r}, whose "
                    f"first expert has {[list(found) for found in first]}; expected matrices of one width"
                )
    encodings = list(dict.fromkeys(matrix.encoding for matrix in members))
    alike = len(encodings) == 1
    parts = len(first)

    def values(begin: int, end: int) -> torch.Tensor:
        found = [matrix.values(0, matrix.rows) for matrix in members[begin * parts : end * parts]]
        if not found:
            return torch.empty(0, *shape[1:])
        return torch.cat(found if alike else [value.to(torch.float32) for value in found]).unflatten(0, (-1, shape[1]))

    def words(begin: int, end: int) -> tuple[torch.Tensor, ...]:
        found = [matrix.encoded(0, matrix.rows).words for matrix in members[begin * parts : end * parts]]
        return tuple(torch.cat(kind) for kind in zip(*found, strict=True))

    shape = (len(experts), sum(extent for extent, _ in first), first[0][1])
    divisors = {matrix.divisor for matrix in members}
    stated = [matrix.activation_divisor for matrix in members if matrix.activation_divisor is not None]
    mixed = "fp32" if set(encodings) <= {*_PLAIN} else f"mixed {'+'.join(encodings)}"
    return SourceTensor(
        name,
        shape,
        encodings[0] if alike else mixed,
        values,
        origin=f"{members[0].name} ... {members[-1].name}",
        read_words=words if alike and all(matrix.read_words is not None for matrix in members) else None,
        divisor=divisors.pop() if len(divisors) == 1 else None,
        activation_divisor=min(stated, default=None),
        members=members,
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_LISTED])
    return shown if len(names) <= _LISTED else f"{shown} and {len(names) - _LISTED} more"
