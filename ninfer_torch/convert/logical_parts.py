"""The tensors of a Qwen3.5 source as NInfer's logical parameters: rows of a checkpoint's tensors, values or words as they are.

A Transformers parameter may hold several logical ones, rows of them in turns (`models.base.ModelParameter`). Each becomes a
source tensor of its own that reads its rows out of the other; nothing is read until it is asked for. The same works for a
safetensors folder, a live model, an artifact and a GGUF file, whose sources all speak a checkpoint's names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ninfer_torch.convert.source import RowReader, Source, SourceTensor, UnusedTensor, WordReader
from ninfer_torch.errors import ConversionError
from ninfer_torch.models.architectures import ARCHITECTURES
from ninfer_torch.models.base import ModelParameter
from ninfer_torch.models.qwen3_5 import Qwen3_5

__all__ = ["LogicalSource", "logical_tensors", "multiplied_parts", "spelled", "split_source"]

_DRAFT_STEM: Mapping[str, str] = {
    "layers.0.eh_proj.weight": "mtp.fc.weight",
    "layers.0.enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "layers.0.hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
    "layers.0.post_norm.weight": "mtp.norm.weight",
}
_DRAFT_BLOCK = "layers.0.mtp_block."
"""The draft layer by Transformers' names and a checkpoint's (spec/parameters.md 5)."""

_EMBEDDING, _HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class LogicalSource:
    """A source's tensors by logical name, in binding order, with the component configs of an artifact."""

    architecture: Qwen3_5
    configs: Mapping[str, dict[str, Any]]
    tensors: Mapping[str, SourceTensor]
    unused: tuple[UnusedTensor, ...]


def logical_tensors(source: Source) -> LogicalSource:
    """The logical parameters of a source of a registered architecture: text, and vision and mtp where it has them.

    A tied model's output head is the embedding. Raises ConversionError for another architecture, for tensors that are
    missing, naming them, and for shapes other than the config's.
    """
    config = source.config()
    architecture = _architecture(config)
    configs = architecture.component_configs(config.to_dict())
    stored = {spelled(name): tensor for name, tensor in source.tensors.items()}
    if "mtp" in configs and not any(name.startswith("mtp.") for name in stored):
        del configs["mtp"]  # a class in memory leaves the draft layer of its checkpoint aside
    if configs["text"]["tie_word_embeddings"] and _HEAD not in stored and _EMBEDDING in stored:
        stored[_HEAD] = stored[_EMBEDDING]
    parameters = architecture.parameters_of(configs, configs)
    missing = [name for name in map(_stored_name, parameters) if name not in stored]
    if missing:
        raise ConversionError(
            f"{source.name} lacks {len(missing)} tensors of {architecture.name}: {', '.join(missing[:12])}"
        )
    tensors: dict[str, SourceTensor] = {}
    for parameter in parameters:
        tensors |= split_source(parameter, stored[_stored_name(parameter)])
    taken = {_stored_name(parameter) for parameter in parameters}
    reason = f"{architecture.name} has no such parameter"
    left = (UnusedTensor(tensor.name, reason) for name, tensor in stored.items() if name not in taken)
    return LogicalSource(architecture, configs, tensors, (*source.unused, *left))


def multiplied_parts(config: Any) -> dict[str, tuple[str, ...]]:
    """Checkpoint name of every matrix of a registered architecture -> its logical parameters; empty for another one."""
    try:
        architecture = _architecture(config)
    except ConversionError:
        return {}
    configs = architecture.component_configs(config.to_dict())
    return {
        _stored_name(parameter): tuple(source.name for source in parameter.sources)
        for parameter in architecture.parameters_of(configs, configs)
        if all(source.inputs for source in parameter.sources)
    }


def _architecture(config: Any) -> Qwen3_5:
    names = list(getattr(config, "architectures", None) or ["an unnamed class"])
    for architecture in ARCHITECTURES.values():
        if isinstance(architecture, Qwen3_5):
            family = architecture.family
            if names[0] in (family.text_class, family.conditional_class):
                return architecture
    raise ConversionError(f"{names[0]} has no logical parameters here; known are {', '.join(ARCHITECTURES)}")


def spelled(name: str) -> str:
    """A checkpoint's name as the class around text and vision spells it."""
    if name.startswith(("model.language_model.", "model.visual.")) or not name.startswith("model."):
        return name
    return f"model.language_model.{name.removeprefix('model.')}"


_PREFIXES = {"text": "model.language_model.", "vision": "model.visual.", "": ""}


def _stored_name(parameter: ModelParameter) -> str:
    """The checkpoint's name of a Transformers parameter."""
    if parameter.anchor != "mtp":
        return _PREFIXES[parameter.anchor] + parameter.name
    return _DRAFT_STEM.get(parameter.name) or parameter.name.replace(_DRAFT_BLOCK, "mtp.layers.0.")


def split_source(parameter: ModelParameter, tensor: SourceTensor) -> dict[str, SourceTensor]:
    """The logical parameters in a tensor that holds a Transformers parameter, by name: the lazy `base.split_value`.

    Rows keep their words, and what their inputs go through. Raises ConversionError for a tensor of another shape.
    """
    if parameter.shape is not None and tensor.shape != parameter.shape:
        raise ConversionError(
            f"tensor {tensor.origin or tensor.name!r} has shape {list(tensor.shape)}, expected {list(parameter.shape)} for "
            f"{', '.join(source.name for source in parameter.sources[:3])}"
        )
    sources = parameter.sources
    if parameter.transposed:
        return {sources[0].name: _transposed(sources[0].name, sources[0].shape or (), tensor)}
    if len(sources) == 1:
        return {sources[0].name: _reshaped(sources[0].name, sources[0].shape or tensor.shape, tensor)}
    if len(tensor.members) == len(sources):
        named = zip(sources, tensor.members, strict=True)
        return {
            source.name: replace(matrix, name=source.name, origin=matrix.origin or matrix.name)
            for source, matrix in named
        }
    heights = [(source.shape or (1,))[0] // parameter.slices for source in sources]
    starts = [0, *itertools.accumulate(heights)]
    return {
        source.name: _Rows(tensor, start, height, starts[-1], parameter.slices).tensor(source.name)
        for source, start, height in zip(sources, starts[:-1], heights, strict=True)
    }


def _transposed(name: str, shape: tuple[int, ...], tensor: SourceTensor) -> SourceTensor:
    """[C, 1, T] as [T, C]."""

    def values(begin: int, end: int) -> torch.Tensor:
        return tensor.values(0, tensor.rows).flatten(1).T[begin:end]

    return SourceTensor(name, shape, tensor.encoding, values, origin=tensor.origin or tensor.name)


def _reshaped(name: str, shape: tuple[int, ...], tensor: SourceTensor) -> SourceTensor:
    if shape == tensor.shape:
        return replace(tensor, name=name, origin=tensor.origin or tensor.name)
    if shape[0] != tensor.rows or tensor.encoded_rows:
        raise ConversionError(
            f"tensor {tensor.origin or tensor.name!r} {list(tensor.shape)} of {tensor.encoding} cannot be {name!r} {list(shape)}"
        )

    def values(begin: int, end: int) -> torch.Tensor:
        return tensor.values(begin, end).reshape(end - begin, *shape[1:])

    return SourceTensor(name, shape, tensor.encoding, values, origin=tensor.origin or tensor.name)


@dataclass(frozen=True)
class _Rows:
    """The rows of one logical parameter in a tensor, leading axes flattened: of every `period` rows `height` from `start`,
    `slices` times.
    """

    whole: SourceTensor
    start: int
    height: int
    period: int
    slices: int

    def tensor(self, name: str) -> SourceTensor:
        """The parameter as a source tensor."""
        whole = self.whole
        tail = whole.shape[-1:] if len(whole.shape) > 1 else ()
        return SourceTensor(
            name,
            (self.height * self.slices, *tail),
            whole.encoding,
            partial(self._gather, lambda begin, end: whole.values(begin, end).reshape(-1, *tail)),
            None if whole.read_blocks is None else partial(self._gather, whole.blocks),
            whole.origin or whole.name,
            None if whole.read_words is None else self._words,
            whole.divisor,
            whole.activation_divisor,
            fold=whole.fold,
        )

    def _gather(self, read: RowReader, begin: int, end: int) -> torch.Tensor:
        (rows,) = self._gather_words(lambda low, high: (read(low, high),), begin, end)
        return rows

    def _words(self, begin: int, end: int) -> tuple[torch.Tensor, ...]:
        return self._gather_words(lambda low, high: self.whole.encoded(low, high).words, begin, end)

    def _gather_words(self, read: WordReader, begin: int, end: int) -> tuple[torch.Tensor, ...]:
        parts = [self._read(read, first, last) for first, last in self._runs(begin, end)]
        return tuple(map(torch.cat, zip(*parts, strict=True))) if parts else read(0, 0)

    def _runs(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Ranges of the tensor's rows that make up rows [begin, end) of the parameter."""
        while begin < end:
            turn, inside = divmod(begin, self.height)
            count = min(end - begin, self.height - inside)
            first = turn * self.period + self.start + inside
            yield first, first + count
            begin += count

    def _read(self, read: WordReader, first: int, last: int) -> tuple[torch.Tensor, ...]:
        """Rows [first, last) of the tensor with its leading axes flattened; `read` takes indices of the first axis."""
        each = math.prod(self.whole.shape[1:-1])
        low = first // each
        return tuple(words[first - low * each : last - low * each] for words in read(low, -(-last // each)))
