"""Which parameter of an artifact fills which parameter of a model, checked on records before a byte of a weight is
read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ninfer_torch.artifact.reader import Artifact
from ninfer_torch.artifact.schema import TensorObject
from ninfer_torch.errors import ArtifactError, LayoutError, UnsupportedOperation
from ninfer_torch.formats import get_format
from ninfer_torch.layouts import encoded_bytes
from ninfer_torch.models.generic import COMPONENT, logical_name
from ninfer_transformers.generic import parameter_names

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["BoundParameter", "bind_parameters", "read_parameter", "untie_separate_weights"]

_LISTED = 8


@dataclass(frozen=True)
class BoundParameter:
    """One parameter of a model and its source.

    `stored` is the artifact's state-dict name, under which the activation policy is found too. `packed_bytes` is what
    the parameter's share of its objects takes, 0 for a direct format.
    """

    stored: str
    shape: tuple[int, ...]
    packed_bytes: float


def bind_parameters(model: PreTrainedModel, artifact: Artifact) -> dict[str, BoundParameter]:
    """Match every entry of the model's state dict with a parameter of the artifact.

    A tied name that the artifact leaves out, or binds to the same object, is left out here: Transformers ties it. A
    base model loads from the artifact of a model with a head, whose own parameters it then leaves. Raises
    ArtifactError, listing the names, where a parameter is missing or left over, LayoutError where a shape differs, and
    UnsupportedOperation for a quantized one that no linear or embedding layer holds.
    """
    stored_names = parameter_names(artifact)
    sources = _match(model, stored_names, artifact)
    entries = model.state_dict(keep_vars=True)
    bound = {}
    for name, stored in sources.items():
        shape = tuple(entries[name].shape)
        objects = _check_shape(artifact, name, stored, shape)
        _check_formats(model, artifact, name, stored, objects)
        bound[name] = BoundParameter(stored, shape, sum(map(_packed_share, objects)))
    return bound


def untie_separate_weights(model: PreTrainedModel, artifact: Artifact) -> None:
    """Follow the artifact where the config ties two weights that it stores apart: nothing of it is thrown away."""
    stored = set(parameter_names(artifact))
    for target, source in list(model.all_tied_weights_keys.items()):
        if {target, source} <= stored and not _same_binding(artifact, target, source):
            del model.all_tied_weights_keys[target]
            model.config.tie_word_embeddings = False


def read_parameter(artifact: Artifact, bound: BoundParameter) -> torch.Tensor:
    """The bound tensor: planes over the artifact's mapping, or a direct format's words in memory of their own."""
    name = logical_name(bound.stored)
    if bound.packed_bytes:
        return artifact.parameter(name, shape=bound.shape)
    binding = artifact.bindings[name]
    if binding.object is not None:
        return artifact.read_tensor(binding.object)
    return artifact.parameter(name, shape=bound.shape).clone()


def _match(model: PreTrainedModel, stored_names: list[str], artifact: Artifact) -> dict[str, str]:
    """State-dict name -> stored name, complete on both sides."""
    stored, prefix = set(stored_names), f"{model.base_model_prefix}."
    names = list(model.state_dict())
    is_base = not any(name in stored for name in names) and any(prefix + name in stored for name in names)
    sources = {name: prefix + name if is_base else name for name in names}
    skipped = _tied_names(model, sources, stored)
    missing = [name for name in names if sources[name] not in stored and name not in skipped]
    taken = set(sources.values())
    unused = [name for name in stored_names if name not in taken and not (is_base and not name.startswith(prefix))]
    if missing or unused:
        raise ArtifactError(
            f"{artifact.path}, written for {_architectures(artifact)}, does not fit {type(model).__name__}: "
            f"the model's parameters without a tensor: {_listed(missing)}; "
            f"the artifact's parameters without a place: {_listed(unused)}",
            "reference",
        )
    return {name: _with_use(artifact, model, name, source) for name, source in sources.items() if name not in skipped}


def _tied_names(model: PreTrainedModel, sources: Mapping[str, str], stored: set[str]) -> set[str]:
    """Names that Transformers fills by tying them to another one."""
    return {target for target, source in model.all_tied_weights_keys.items() if sources[source] in stored}


def _with_use(artifact: Artifact, model: PreTrainedModel, name: str, source: str) -> str:
    """The stored name that carries the weight's use: for a tied embedding that of the head."""
    ties = [target for target, tied_to in model.all_tied_weights_keys.items() if tied_to == name]
    used = {use.parameter for use in artifact.uses}
    candidates = [source, *(target for target in ties if logical_name(target) in artifact.bindings)]
    return next((candidate for candidate in candidates if logical_name(candidate) in used), source)


def _same_binding(artifact: Artifact, first: str, second: str) -> bool:
    return artifact.bindings[logical_name(first)] == artifact.bindings[logical_name(second)]


def _architectures(artifact: Artifact) -> str:
    return ", ".join(artifact.components[COMPONENT].config.get("architectures") or ["an unnamed model class"])


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(names[:_LISTED]) or "none") + more


@dataclass(frozen=True)
class _Share:
    """`elements` of one tensor object, as a part of a parameter."""

    record: TensorObject
    elements: int


def _shares(artifact: Artifact, stored: str) -> list[_Share]:
    binding = artifact.bindings[logical_name(stored)]
    if binding.object is not None:
        record = _tensor_record(artifact, binding.object)
        return [_Share(record, math.prod(record.shape))]
    return [_Share(_tensor_record(artifact, part.object), part.end - part.begin) for part in binding.parts]


def _tensor_record(artifact: Artifact, object_id: str) -> TensorObject:
    record = artifact.objects[object_id]
    if not isinstance(record, TensorObject):
        raise ArtifactError(
            f"{artifact.path}: object {object_id!r} is bound to a parameter, expected a tensor", "reference"
        )
    return record


def _check_shape(artifact: Artifact, name: str, stored: str, shape: tuple[int, ...]) -> list[_Share]:
    shares = _shares(artifact, stored)
    whole = artifact.bindings[logical_name(stored)].object
    found = tuple(shares[0].record.shape) if whole is not None else (sum(share.elements for share in shares),)
    expected = shape if whole is not None else (math.prod(shape),)
    if found != expected:
        what = (
            f"object {whole!r} of shape"
            if whole is not None
            else f"parts of objects {[share.record.id for share in shares]} with elements"
        )
        raise LayoutError(
            f"{artifact.path}: parameter {name!r} is bound to {what} {list(found)}, expected {list(expected)}"
        )
    return shares


def _check_formats(model: PreTrainedModel, artifact: Artifact, name: str, stored: str, shares: list[_Share]) -> None:
    quantized = [share.record for share in shares if get_format(share.record.format).quantized]
    module_name, _, leaf = name.rpartition(".")
    module = model.get_submodule(module_name)
    if quantized and not (isinstance(module, torch.nn.Linear | torch.nn.Embedding) and leaf == "weight"):
        raise UnsupportedOperation(
            f"{artifact.path}: parameter {name!r} of a {type(module).__name__} is bound to object "
            f"{quantized[0].id!r} of format {quantized[0].format}; only the weights of nn.Linear and nn.Embedding stay "
            "quantized. Convert this parameter to bf16 or fp32, or read its values with "
            f"open_artifact(path).dequantize_parameter({logical_name(stored)!r})"
        )


def _packed_share(share: _Share) -> float:
    record = share.record
    if not get_format(record.format).quantized:
        return 0
    return encoded_bytes(record.format, record.shape, record.divisors) * share.elements / math.prod(record.shape)
