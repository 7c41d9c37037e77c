"""A GGUF file as a source of weights: tensors under Transformers' names and in its row order, blocks untouched."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ninfer_torch.convert.gguf_draft import draft_rules
from ninfer_torch.convert.gguf_file import GgufFile
from ninfer_torch.convert.gguf_keys import check_keys
from ninfer_torch.convert.gguf_metadata import read_config, read_resources
from ninfer_torch.convert.gguf_parameters import LayerNumbers, listed, read_parameters, refuse_undecodable
from ninfer_torch.convert.gguf_qwen35 import FULL, LINEAR
from ninfer_torch.convert.gguf_rotation import read_rotation
from ninfer_torch.convert.gguf_rules import Architecture
from ninfer_torch.convert.gguf_tables import get_architecture
from ninfer_torch.convert.gguf_values import read_values
from ninfer_torch.convert.gguf_vision import VisionFile
from ninfer_torch.convert.source import SourceTensor, UnusedTensor
from ninfer_torch.errors import ConversionError

__all__ = ["GgufSource"]


class GgufSource:
    """A language model in one GGUF file, with the vision tower of a second one (`mmproj`) where `vision` names it.

    `tensors` are keyed by the state-dict names of the model class that `config().architectures` names; a layer for
    multi-token prediction by the names of a checkpoint, `mtp.*`. Opening reads only the header, and the norms of such a
    layer. Raises ConversionError for a file that is broken, of an unknown architecture, or holds a tensor, a metadata key
    or a tensor type whose meaning is not known here: nothing is left out silently. Matrices stored for rotated inputs, as
    the metadata says of them, have a `fold`.
    """

    kind = "gguf"

    def __init__(self, path: str | os.PathLike[str], vision: str | os.PathLike[str] | None = None) -> None:
        self.file = GgufFile(path)
        self.name = self.file.name
        self._rotation = read_rotation(self.file)
        _refuse_split(self.file)
        self.architecture: Architecture = get_architecture(self.file.metadata.get("general.architecture"), self.name)
        check_keys(self.file, self.architecture)
        self.vision = None if vision is None else VisionFile(vision, self.architecture)
        self.unused: tuple[UnusedTensor, ...] = _unused(self.file, self.architecture)
        tensors = self._match()
        if self.vision is not None:
            self.vision.check_width(self.file.tensors["token_embd.weight"].shape[-1])
            inside = {_within_a_whole(name): tensor for name, tensor in tensors.items()}
            tensors = {**inside, **self.vision.tensors}
        self.tensors: Mapping[str, SourceTensor] = tensors

    def _match(self) -> dict[str, SourceTensor]:
        drafts, table = self._count("nextn_predict_layers", 0), self.architecture
        layers = self._count("block_count") - drafts
        if layers + drafts > len(self.file.tensors):
            found = len(self.file.tensors)
            raise ConversionError(
                f"{self.name}: {self._key('block_count')} is {layers + drafts}, but there are {found} tensors"
            )
        if drafts > 1 or layers < 1:
            raise ConversionError(
                f"{self.name}: {drafts} of {layers + drafts} layers are for multi-token prediction, expected at most one"
            )
        left = set(self.file.tensors).difference(unused.name for unused in self.unused)
        model = f"a {table.name} model of {layers} layers"
        tensors = read_parameters(self.file, table, self._layers(layers), left, model, rotation=self._rotation)
        if drafts:
            rules = draft_rules(self.file, table, layers)
            what = f"{model} and a draft layer"
            tensors |= read_parameters(self.file, table, {"": [layers]}, left, what, rules, self._rotation)
        if left:
            raise ConversionError(f"{self.name}: tensors that {model} does not have: {listed(sorted(left))}")
        refuse_undecodable(self.file, {unused.name for unused in self.unused})
        return tensors

    def _layers(self, count: int) -> LayerNumbers:
        interval = self._count("full_attention_interval", 1)
        kinds = {FULL: range(interval - 1, count, interval)}
        return {"": range(count), **kinds, LINEAR: [index for index in range(count) if index not in kinds[FULL]]}

    def _count(self, suffix: str, default: int | None = None) -> int:
        value = self.file.metadata.get(self._key(suffix), default)
        if not isinstance(value, int):
            raise ConversionError(f"{self.name}: metadata {self._key(suffix)!r} is {value!r}, expected a whole number")
        return value

    def _key(self, suffix: str) -> str:
        return f"{self.architecture.name}.{suffix}"

    @cached_property
    def _config(self) -> Any:
        found = [self.file.tensors[unused.name] for unused in self.unused]
        factors = {tensor.name: read_values(self.file, tensor, 0, tensor.shape[0]) for tensor in found}
        config = read_config(self.file, self.architecture, factors)
        return config if self.vision is None else self.vision.around(config, self.file)

    def config(self) -> Any:
        """A fresh copy of the Transformers config; class, tying, rotary scaling and dtype bfloat16 are filled in.

        Raises ConversionError for settings of the file that no config can state.
        """
        return copy.deepcopy(self._config)

    def resources(self) -> dict[str, bytes]:
        """Tokenizer files by Transformers' GGUF reading, and generation_config.json with the file's special tokens."""
        return read_resources(self.file)

    def provenance(self) -> dict[str, Any]:
        """File name, bytes, architecture and, where the file states it, the model's name; the same of a vision tower."""
        facts: dict[str, Any] = {
            "kind": self.kind,
            "path": self.name,
            "bytes": self.file.size,
            "architecture": self.architecture.name,
        }
        model_name = self.file.metadata.get("general.name")
        facts |= {"name": model_name} if isinstance(model_name, str) else {}
        return facts | ({"vision": self.vision.provenance()} if self.vision is not None else {})


def _within_a_whole(name: str) -> str:
    """The name in the class around text model and vision tower."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def _refuse_split(file: GgufFile) -> None:
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ConversionError(
            f"{file.name}: one of {parts} parts of a split model, expected one file; join the parts with "
            "llama-gguf-split --merge"
        )


def _unused(file: GgufFile, table: Architecture) -> tuple[UnusedTensor, ...]:
    found = [name for name in table.rope_factors if name in file.tensors]
    return tuple(UnusedTensor(name, "its rotary factors follow from rope_parameters in the config") for name in found)
