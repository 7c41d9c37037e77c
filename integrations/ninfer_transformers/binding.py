"""Which parameters of an artifact fill which parameter of a model, checked on records before a byte of a weight is
read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ninfer_torch.artifact.reader import Artifact
from ninfer_torch.errors import ArtifactError, UnsupportedOperation
from ninfer_torch.formats import get_format
from ninfer_torch.models.architectures import architecture_of
from ninfer_torch.models.assembly import Assembly, build_parameter, plan_parameter
from ninfer_torch.models.base import ModelParameter
from ninfer_torch.models.generic import expert_banks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["BoundParameter", "bind_parameters", "untie_separate_weights"]

_LISTED = 8


@dataclass(frozen=True)
class BoundParameter:
    """One parameter of a model and how the artifact makes it.

    `keeps_dtype` says that its stored dtype is part of the architecture, whatever the model computes in.
    """

    assembly: Assembly
    keeps_dtype: bool

    @property
    def packed_bytes(self) -> float:
        """What the parameter's share of its objects takes, 0 for a direct one."""
        return self.assembly.packed_bytes

    def read(self, artifact: Artifact) -> torch.Tensor:
        """The tensor: planes over the artifact's mapping, or a direct format's words in memory of their own."""
        return build_parameter(artifact, self.assembly)


def bind_parameters(
    model: PreTrainedModel, artifact: Artifact, shared: Iterable[str] = ()
) -> dict[str, BoundParameter]:
    """Match every entry of the model's state dict with parameters of the artifact.

    A tied name that the artifact leaves out, or binds to the same object, is left out here: Transformers ties it.
    `shared` names entries that are another model's. A model may be a part of what the artifact holds: a base model
    leaves the head, a text model the vision tower. Raises ArtifactError, listing the names, where a parameter is
    missing or left over, LayoutError where a shape differs, and UnsupportedOperation for a quantized one that no layer
    can hold.
    """
    placed = _match(model, artifact, set(shared))
    entries = model.state_dict(keep_vars=True)
    bound = {}
    for name, parameter in placed.items():
        assembly = plan_parameter(artifact, parameter, tuple(entries[name].shape))
        if assembly.quantized and any(source.packable is None for source in parameter.sources):
            _check_layer(model, artifact, name, assembly)
        bound[name] = BoundParameter(assembly, all(source.format == "fp32" for source in parameter.sources))
    return bound


def untie_separate_weights(model: PreTrainedModel, artifact: Artifact) -> None:
    """Follow the artifact where the config ties two weights that it stores apart: nothing of it is thrown away."""
    placed = architecture_of(artifact).place(model, artifact).placed
    for target, source in list(model.all_tied_weights_keys.items()):
        weights = [placed.get(target), placed.get(source)]
        if all(weight is not None and _is_bound(artifact, weight) for weight in weights) and not _same_tensor(
            artifact, *[weight for weight in weights if weight is not None]
        ):
            del model.all_tied_weights_keys[target]
            for config in (model.config, model.config.get_text_config()):
                config.tie_word_embeddings = False


def _match(model: PreTrainedModel, artifact: Artifact, shared: set[str]) -> dict[str, ModelParameter]:
    """State-dict name -> parameter, complete on both sides."""
    placement = architecture_of(artifact).place(model, artifact)
    names = [name for name in model.state_dict() if name not in shared]
    bound = {name: parameter for name, parameter in placement.placed.items() if _is_bound(artifact, parameter)}
    tied = {target for target, source in model.all_tied_weights_keys.items() if source in bound}
    skipped = tied & set(names)
    missing = [_with_logical(name, placement.placed) for name in names if name not in bound and name not in skipped]
    if missing or placement.unplaced:
        raise ArtifactError(
            f"{artifact.path}, written for {_architectures(artifact)}, does not fit {type(model).__name__}: "
            f"the model's parameters without a tensor: {_listed(missing)}; "
            f"the artifact's parameters without a place: {_listed(placement.unplaced)}",
            "reference",
        )
    return {name: _with_use(model, name, bound) for name in names if name in bound and name not in skipped}


def _is_bound(artifact: Artifact, parameter: ModelParameter) -> bool:
    return all(source.name in artifact.bindings for source in parameter.sources)


def _with_logical(name: str, placed: Mapping[str, ModelParameter]) -> str:
    """A missing name; where its logical names differ, with the first of them."""
    sources = [source.name for source in placed[name].sources] if name in placed else []
    return f"{name} ({', '.join(sources[:3])})" if any("/" in source.partition("/")[2] for source in sources) else name


def _with_use(model: PreTrainedModel, name: str, bound: Mapping[str, ModelParameter]) -> ModelParameter:
    """The parameter, with the use that carries its policy and transform: for a tied embedding that of the head."""
    parameter = bound[name]
    ties = [target for target, tied_to in model.all_tied_weights_keys.items() if tied_to == name and target in bound]
    if not ties or any(source.inputs for source in parameter.sources):
        return parameter
    head = bound[ties[0]]
    return replace(parameter, sources=head.sources) if any(source.inputs for source in head.sources) else parameter


def _same_tensor(artifact: Artifact, first: ModelParameter, second: ModelParameter) -> bool:
    """Whether two parameters of one source each are the same rows, stored for the same inputs."""
    bindings = [[artifact.bindings[source.name] for source in p.sources] for p in (first, second)]
    if bindings[0] != bindings[1]:
        return False
    shape = first.shape or second.shape
    if shape is None:
        return True  # shapes known to the model alone: parameters that are read as they are stored
    plans = [plan_parameter(artifact, parameter, shape) for parameter in (first, second)]
    return plans[0].segments == plans[1].segments


def _architectures(artifact: Artifact) -> str:
    return ", ".join(artifact.components["text"].config.get("architectures") or ["an unnamed model class"])


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(names[:_LISTED]) or "none") + more


def _cuts_patches(module: torch.nn.Module) -> bool:
    """Whether a convolution takes each value once, so that it is a product with a matrix (`PatchKernel`)."""
    if not isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
        return False
    whole = module.groups == 1 and set(module.dilation) == {1} and set(module.padding) == {0}
    return whole and tuple(module.stride) == tuple(module.kernel_size)


def _check_layer(model: PreTrainedModel, artifact: Artifact, name: str, assembly: Assembly) -> None:
    module_name, _, leaf = name.rpartition(".")
    module = model.get_submodule(module_name)
    if isinstance(module, torch.nn.Linear | torch.nn.Embedding) and leaf == "weight":
        return
    if len(assembly.shape) == 3 and name in expert_banks(model):
        return
    if leaf == "weight" and _cuts_patches(module):
        return
    object_id = next(
        part.object
        for parts in assembly.ranges
        for part in parts
        if get_format(artifact.objects[part.object].format).quantized  # type: ignore[union-attr]
    )
    raise UnsupportedOperation(
        f"{artifact.path}: parameter {name!r} of a {type(module).__name__} is bound to object {object_id!r} of format "
        f"{artifact.objects[object_id].format}; only the weights of nn.Linear and nn.Embedding, "  # type: ignore[union-attr]
        "of convolutions that cut an image into patches, and banks of experts stored [E, N, K], stay quantized. Convert this parameter to bf16 or fp32, or read its values with "
        f"open_artifact(path).dequantize_parameter({assembly.parameter.sources[0].name!r})"
    )
