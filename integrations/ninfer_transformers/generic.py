"""Artifacts whose parameters carry the names of a Transformers state dict, and the refusal of all others."""

from __future__ import annotations

from ninfer_torch.artifact.reader import Artifact
from ninfer_torch.errors import NinferError
from ninfer_torch.models.generic import COMPONENT, logical_name, state_dict_name

__all__ = ["parameter_names", "require_generic"]

_PREFIX = logical_name("")


def parameter_names(artifact: Artifact) -> list[str]:
    """State-dict names of the parameters that a generic artifact binds, in binding order."""
    return [state_dict_name(name) for name in artifact.bindings if name.startswith(_PREFIX)]


def require_generic(artifact: Artifact) -> None:
    """Check that an artifact holds one Transformers model under the names of its state dict.

    Raises NinferError, naming the architecture, for an artifact with names of its own (`text/layers/0/...`), as
    NInfer's converter writes them, and for one without a Transformers config.
    """
    component = artifact.components.get(COMPONENT)
    if component is None:
        raise NinferError(
            f"{artifact.path} has components {', '.join(artifact.components)}, expected {COMPONENT!r}: "
            "it holds no language model"
        )
    architectures = component.config.get("architectures")
    architecture = ", ".join(architectures) if architectures else "an unnamed architecture"
    names = parameter_names(artifact)
    if "model_type" not in component.config or not names or any("/" in name for name in names):
        raise NinferError(
            f"{artifact.path} holds {architecture} under NInfer's own parameter names; so far only generic artifacts "
            "are known, those that `ninfer-torch convert` or ninfer_torch.save write, with a Transformers config and "
            "the names of a state dict"
        )
