"""The registry of architectures, and which of them an artifact is of."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ninfer_torch.artifact.reader import Artifact
from ninfer_torch.errors import NinferError
from ninfer_torch.models.base import Architecture
from ninfer_torch.models.generic import COMPONENT, logical_name
from ninfer_torch.models.qwen3_5 import Qwen3_5
from ninfer_torch.models.qwen3_5_moe import Qwen3_5Moe
from ninfer_torch.models.state_dict import StateDictModel

__all__ = ["ARCHITECTURES", "GENERIC", "architecture_of"]

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {architecture.name: architecture for architecture in (Qwen3_5(), Qwen3_5Moe())}
)
"""Architectures with parameter names of their own, by the class name that `text.config.architectures` holds."""

GENERIC = StateDictModel()

_TENSORS_ONLY = {"Qwen4ExpForCausalLM": "Qwen3.8-Flash-Next (qwen4_exp)"}
"""Architectures whose artifacts open, but which no table brings to Transformers."""


def architecture_of(artifact: Artifact) -> Architecture:
    """The architecture an artifact is written for: a registered one, or generic where its names are a state dict's.

    Raises NinferError, naming the architecture and the known ones, for any other, and for an artifact without a language
    model or, in an older container, without known parameters.
    """
    if artifact.unbound is not None:
        raise NinferError(f"{artifact.path} cannot be loaded as a model: {artifact.unbound}")
    component = artifact.components.get(COMPONENT)
    if component is None:
        raise NinferError(
            f"{artifact.path} has components {', '.join(artifact.components)}, expected {COMPONENT!r}: "
            "it holds no language model"
        )
    if artifact.unbound:
        raise NinferError(f"{artifact.path} cannot be loaded into Transformers: {artifact.unbound}")
    listed = component.config.get("architectures") or ["an unnamed architecture"]
    name = ", ".join(listed)
    if "model_type" in component.config and _has_state_dict_names(artifact):
        return GENERIC
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    what = _TENSORS_ONLY.get(name, name)
    raise NinferError(
        f"{artifact.path} holds {what} under NInfer's own parameter names, which cannot be loaded into Transformers; "
        f"known are {', '.join(ARCHITECTURES)} and generic artifacts, those that `ninfer-torch convert` or "
        "ninfer_torch.save write, with a Transformers config and the names of a state dict. Its tensors open with "
        "open_artifact(path).parameter(name)"
    )


def _has_state_dict_names(artifact: Artifact) -> bool:
    prefix = logical_name("")
    names = [name.removeprefix(prefix) for name in artifact.bindings if name.startswith(prefix)]
    return bool(names) and not any("/" in name for name in names)
