"""An existing `.ninfer` artifact as a source: its words under the state-dict names of its Transformers class."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, cast

import torch

from ninfer_torch.artifact.reader import Artifact, open_artifact
from ninfer_torch.artifact.schema import Part, TensorObject
from ninfer_torch.convert.packed_tensors import packed_source
from ninfer_torch.convert.source import SourceTensor, UnusedTensor
from ninfer_torch.errors import ConversionError, NinferError
from ninfer_torch.models.architectures import architecture_of
from ninfer_torch.models.assembly import Assembly, build_parameter, plan_parameter
from ninfer_torch.models.base import ModelParameter
from ninfer_torch.models.generic import COMPONENT, build_on_meta
from ninfer_torch.tensors import NinferTensor

__all__ = ["ArtifactSource"]

_DIVISOR = "activation_input_divisor"
_KEPT_WEIGHTS = 2
"""Weights kept at hand between reads: mapped ones cost nothing, but one that crosses files is a copy."""


class ArtifactSource:
    """The language model of an artifact, generic or of a registered architecture.

    A matrix of one format offers its words under the format's name, for `import_encoded`. What is made of several
    formats or lies behind a fixed transform of its inputs offers the values of the plain weight. Names that the config
    ties and the artifact stores apart are untied. Raises ConversionError, naming the parameter, where one cannot be read
    by its model, and NinferError for a file that holds no language model, is broken or of an unknown architecture.
    """

    kind = "ninfer"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.artifact: Artifact = open_artifact(path)
        architecture = architecture_of(self.artifact)
        members = architecture.checkpoint_config(self.artifact)
        self._config = _read_config(members, self.name)
        model = build_on_meta(str(members["architectures"][0]), self._config)
        placement = architecture.place(model, self.artifact)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        placed = {
            name: parameter
            for name, parameter in placement.placed.items()
            if all(source.name in self.artifact.bindings for source in parameter.sources)
        }
        ties: Mapping[str, str] = model.all_tied_weights_keys
        twins = {name: other for name, other in ties.items() if name in placed and other in placed}
        same = {name for name, other in twins.items() if self._bindings(placed[name]) == self._bindings(placed[other])}
        if len(same) < len(twins):
            self._config.get_text_config().tie_word_embeddings = False
            self._config.tie_word_embeddings = False
        self._load = lru_cache(maxsize=_KEPT_WEIGHTS)(partial(build_parameter, self.artifact))
        self.tensors: Mapping[str, SourceTensor] = {
            name: self._tensor(name, parameter, shapes[name]) for name, parameter in placed.items() if name not in same
        }
        reason = f"{type(model).__name__} has no such parameter"
        taken = {source.name for parameter in placed.values() for source in parameter.sources}
        self.unused: Sequence[UnusedTensor] = tuple(
            UnusedTensor(name, reason) for name in self.artifact.bindings if name not in taken
        )

    @property
    def name(self) -> str:
        return self.artifact.path.name

    def _bindings(self, parameter: ModelParameter) -> list[Any]:
        return [self.artifact.bindings[source.name] for source in parameter.sources]

    def _tensor(self, name: str, parameter: ModelParameter, shape: tuple[int, ...]) -> SourceTensor:
        origin = ", ".join(source.name for source in parameter.sources)
        try:
            assembly = plan_parameter(self.artifact, parameter, shape)
            if not assembly.quantized:
                return self._direct(name, assembly, origin)
            divisor = self._activation_divisor(parameter)
            return packed_source(name, lambda: cast(NinferTensor, self._load(assembly)), origin, divisor)
        except NinferError as error:
            raise ConversionError(f"{self.name}: tensor {name!r} cannot be a source: {error}") from error

    def _direct(self, name: str, assembly: Assembly, origin: str) -> SourceTensor:
        parts = [part for parts in assembly.ranges for part in parts]
        formats = {cast(TensorObject, self.artifact.objects[part.object]).format for part in parts}
        in_order = assembly.parameter.slices == 1 and not assembly.parameter.transposed and len(formats) == 1
        row_values = math.prod(assembly.shape[1:])

        def read(begin: int, end: int) -> torch.Tensor:
            if not in_order:
                whole = self._load(assembly)
                return whole[begin:end] if assembly.shape else whole
            pieces = _cut(parts, begin * row_values, end * row_values)
            words = [self.artifact.read_elements(part.object, part.begin, part.end) for part in pieces]
            return torch.cat(words).reshape((end - begin, *assembly.shape[1:]) if assembly.shape else ())

        encoding = formats.pop() if len(formats) == 1 else "fp32"
        return SourceTensor(name, assembly.shape, encoding, read, origin=origin)

    def _activation_divisor(self, parameter: ModelParameter) -> float | None:
        """The smallest that the uses of its sources state: one activation is divided once (spec/conversion.md 6.1)."""
        names = {source.name for source in parameter.sources}
        stated = [use for use in self.artifact.uses if use.parameter in names and _DIVISOR in use.auxiliaries]
        values = [self.artifact.auxiliary(use.parameter, use.input, _DIVISOR, ()) for use in stated]
        return min((float(value) for value in values), default=None)

    def config(self) -> Any:
        """A fresh copy of the Transformers config, `architectures` filled in."""
        return copy.deepcopy(self._config)

    def resources(self) -> dict[str, bytes]:
        """The files of the language model's component, by role."""
        roles = self.artifact.components[COMPONENT].resources
        return {role: self.artifact.resource(object_id) for role, object_id in roles.items()}

    def provenance(self) -> dict[str, Any]:
        """File name, artifact id, and what the artifact says of where its weights came from."""
        return {
            "kind": self.kind,
            "name": self.name,
            "artifact_id": self.artifact.artifact_id,
            "provenance": dict(self.artifact.provenance),
        }


def _cut(parts: Sequence[Part], begin: int, end: int) -> Iterator[Part]:
    """Elements [begin, end) of ranges that follow one another."""
    position = 0
    for part in parts:
        low = max(begin, position)
        high = min(end, position + part.end - part.begin)
        if low < high:
            yield Part(part.object, part.begin + low - position, part.begin + high - position)
        position += part.end - part.begin


def _read_config(members: Mapping[str, Any], name: str) -> Any:
    from transformers import CONFIG_MAPPING

    model_type = str(members.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ConversionError(f"{name}: Transformers has no config for model_type {model_type!r}")
    try:
        return CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(members)))
    except Exception as error:
        raise ConversionError(
            f"{name}: Transformers cannot read the config: {type(error).__name__}: {error}"
        ) from error
