"""Multi-token prediction: Transformers' `MtpModel` out of the artifact its main model was loaded from.

`MtpModel.from_pretrained(main_model)` looks for the layer's weights in the main model's checkpoint, past its quantizer. For
a main model out of an artifact they are bound here instead, as its own were.
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ninfer_torch.artifact.reader import open_artifact
from ninfer_torch.errors import ArtifactError
from ninfer_torch.tensors import NinferTensor
from ninfer_transformers.binding import bind_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["attach_mtp", "load_mtp"]

_COMPONENT = "mtp"
_SHARED = ("embed_tokens.", "shared_head.", "rotary_emb.")
"""Modules of an MtpModel that are the main model's."""


def attach_mtp(module: ModuleType) -> None:
    """Make `MtpModel.from_pretrained` of Transformers' `modeling_layers` take artifacts; a second call changes nothing."""
    owner = getattr(module, "MtpModel", None)
    if owner is None:
        return  # releases before multi-token prediction
    original = vars(owner)["from_pretrained"].__func__
    if getattr(original, "_translates_artifacts", False):
        return

    @functools.wraps(original)
    def wrapper(cls: type, main_model: Any, *args: Any, **kwargs: Any) -> Any:
        path = getattr(getattr(main_model, "hf_quantizer", None), "artifact_path", None)
        return original(cls, main_model, *args, **kwargs) if path is None else load_mtp(cls, main_model, path)

    wrapper._translates_artifacts = True  # type: ignore[attr-defined]
    owner.from_pretrained = classmethod(wrapper)


def load_mtp(cls: Any, main_model: PreTrainedModel, path: Path) -> Any:
    """An MtpModel of class `cls` whose layer is component `mtp` of the artifact at `path`; embedding and head are the main model's.

    Its tensors go to the device of the main model's last layer and compute in the main model's dtype. Raises
    ArtifactError for an artifact without the component, and what `bind_parameters` raises.
    """
    with open_artifact(path) as artifact:
        if _COMPONENT not in artifact.components:
            raise ArtifactError(
                f"{artifact.path} has no component {_COMPONENT!r}, only {', '.join(artifact.components)}; it was "
                "converted without multi-token prediction",
                "reference",
            )
        with torch.device("meta"):
            model = cls(main_model, 1)
        shared = [name for name in model.state_dict() if name.startswith(_SHARED)]
        bound = bind_parameters(model, artifact, shared)
        tensors = {name: parameter.read(artifact) for name, parameter in bound.items()}
    device = next(main_model.get_decoder().layers[-1].parameters()).device
    for name, tensor in tensors.items():
        dtype = tensor.dtype if bound[name].keeps_dtype else main_model.dtype
        placed = tensor.placed(device, dtype) if isinstance(tensor, NinferTensor) else tensor.to(device, dtype)
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.nn.Parameter(placed, requires_grad=False))
    model.tie_with_main_model(main_model)
    model.config._experts_implementation = main_model.config.get_text_config()._experts_implementation
    return model.eval()
