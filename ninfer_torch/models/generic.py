"""The logical parameters of any Transformers model, learned from its class.

The model is built on the meta device, where it costs no memory, and asked which tensors it has, which of them its
layers multiply or look up through torch's own functionals, and which are one tensor under several names. Component
`text` holds everything: `text/<state-dict name>`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ninfer_torch.errors import ConversionError

__all__ = [
    "COMPONENT",
    "Kind",
    "ModelPlan",
    "PlannedTensor",
    "build_on_meta",
    "logical_name",
    "plan_model",
    "state_dict_name",
    "use_input",
]

COMPONENT = "text"

Kind = Literal["linear", "embedding", "head", "direct"]

_PRIVATE_MEMBERS = ("_name_or_path", "_commit_hash", "quantization_config", "transformers_weights")
"""Members of a config that speak of where it was loaded from or how it was stored, not of the model."""


def logical_name(state_dict_name: str) -> str:
    """The name of a state-dict entry in an artifact's bindings."""
    return f"{COMPONENT}/{state_dict_name}"


def state_dict_name(logical_name: str) -> str:
    """The state-dict entry a binding belongs to. Raises ConversionError for a binding of another component."""
    prefix = f"{COMPONENT}/"
    if not logical_name.startswith(prefix):
        raise ConversionError(f"parameter {logical_name!r} does not belong to component {COMPONENT!r}")
    return logical_name.removeprefix(prefix)


def use_input(state_dict_name: str) -> str:
    """The name of the input that multiplies a linear weight: `text/<module>/input` for `<module>.weight`."""
    return f"{logical_name(state_dict_name).removesuffix('.weight')}/input"


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of a model, under all its names.

    `names` are state-dict names, more than one where weights are tied. `kind` says what the layers do with it:
    `linear`, `head` (the output embedding) and `embedding` (the input embedding, tied head or not) may be stored
    quantized; `direct` tensors are read as they are by somebody's forward. `multiplied` are the names under which it is
    a linear weight: each has one use.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    kind: Kind
    multiplied: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelPlan:
    """What a model needs: its class, its config as an artifact stores it, its tensors in state-dict order."""

    architecture: str
    config: dict[str, Any]
    base_model_prefix: str
    tensors: tuple[PlannedTensor, ...]


def plan_model(config: Any) -> ModelPlan:
    """The plan of the model class that `config.architectures` names.

    `config` is a Transformers config. Raises ConversionError where it names no class, or one that the installed
    Transformers lacks or cannot build.
    """
    architecture = _architecture(config)
    model = build_on_meta(architecture, config)
    multiplied = _linear_weights(model)
    head = _weight_of(model.get_output_embeddings, torch.nn.Linear)
    embedding = _weight_of(model.get_input_embeddings, torch.nn.Embedding)
    entries: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)  # the very objects: identity tells what is tied
    names_of: dict[int, list[str]] = {}
    for name, tensor in entries.items():
        names_of.setdefault(id(tensor), []).append(name)
    tensors = tuple(
        PlannedTensor(
            tuple(names),
            tuple(entries[names[0]].shape),
            _kind(entries[names[0]], embedding, head, any(name in multiplied for name in names)),
            tuple(name for name in names if name in multiplied),
        )
        for names in names_of.values()
    )
    return ModelPlan(architecture, _stored_config(config), getattr(model, "base_model_prefix", ""), tensors)


def _architecture(config: Any) -> str:
    names = getattr(config, "architectures", None)
    if not names:
        raise ConversionError(
            f"the {type(config).__name__} names no architecture: expected config.architectures = ['<model class>']"
        )
    return str(names[0])


def build_on_meta(architecture: str, config: Any) -> Any:
    """A model of the Transformers class `architecture` on the meta device. Raises ConversionError as `plan_model`."""
    import transformers

    model_class = getattr(transformers, architecture, None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise ConversionError(f"Transformers {transformers.__version__} has no model class {architecture!r}")
    try:
        with torch.device("meta"):
            return model_class(copy.deepcopy(config))
    except Exception as error:
        raise ConversionError(
            f"Transformers cannot build {architecture} from its config: {type(error).__name__}: {error}"
        ) from error


def _linear_weights(model: Any) -> set[str]:
    """Names of the weights whose layer is nn.Linear, or a subclass that multiplies as nn.Linear does."""
    return {
        f"{name}.weight"
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward
    }


def _weight_of(getter: Callable[[], Any], layer: type[torch.nn.Module]) -> torch.Tensor | None:
    """The weight of an input or output embedding; None where the model has none of that layer type."""
    try:
        module = getter()
    except (NotImplementedError, AttributeError):
        return None
    return module.weight if isinstance(module, layer) else None  # type: ignore[return-value]


def _kind(tensor: torch.Tensor, embedding: torch.Tensor | None, head: torch.Tensor | None, multiplied: bool) -> Kind:
    if tensor.dim() != 2:
        return "direct"
    if tensor is embedding:
        return "embedding"
    if not multiplied:
        return "direct"  # other tables (positions, token types) are often sliced or added by a forward, not looked up
    return "head" if tensor is head else "linear"


def _stored_config(config: Any) -> dict[str, Any]:
    """The complete config as JSON values: special floats spelled as Transformers spells them, no private path."""
    members = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in members.items() if name not in _PRIVATE_MEMBERS}
