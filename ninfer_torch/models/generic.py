"""The logical parameters of any Transformers model, learned from its class.

The model is built on the meta device, where it costs no memory, and asked which tensors it has, which of them its
layers multiply or look up through torch's own functionals, which are banks of experts, and which are one tensor under
several names. Component `text` holds everything: `text/<state-dict name>`.
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
    "direct_reasons",
    "expert_banks",
    "logical_name",
    "plan_model",
    "plan_module",
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
    `linear` (a bank of experts [E, N, K] too), `head` (the output embedding) and `embedding` (the input embedding, tied
    head or not) may be stored quantized; `direct` tensors are read as they are by somebody's forward, and `reason` says
    why of all but vectors. `multiplied` are the names under which it is a linear weight: each has one use.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    kind: Kind
    multiplied: tuple[str, ...] = ()
    reason: str = ""


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
    return ModelPlan(
        architecture, _stored_config(config), getattr(model, "base_model_prefix", ""), _plan_tensors(model)
    )


def plan_module(model: Any) -> ModelPlan:
    """The plan of a module that is there already, on any device: a Transformers model, or any other module, whose
    config is empty then.
    """
    config = getattr(model, "config", None)
    stored = _stored_config(config) if hasattr(config, "to_json_string") else {}
    return ModelPlan(type(model).__name__, stored, getattr(model, "base_model_prefix", ""), _plan_tensors(model))


def _plan_tensors(model: Any) -> tuple[PlannedTensor, ...]:
    reasons = direct_reasons(model)
    multiplied = (_linear_weights(model) | expert_banks(model)) - reasons.keys()
    head = _weight_of(lambda: model.get_output_embeddings(), torch.nn.Linear)
    embedding = _weight_of(lambda: model.get_input_embeddings(), torch.nn.Embedding)
    entries: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)  # the very objects: identity tells what is tied
    names_of: dict[int, list[str]] = {}
    for name, tensor in entries.items():
        names_of.setdefault(id(tensor), []).append(name)
    tensors = []
    for names in names_of.values():
        tensor = entries[names[0]]
        kind = _kind(tensor, embedding, head, any(name in multiplied for name in names))
        uses = tuple(name for name in names if name in multiplied)
        stated = next(
            (reasons[name] for name in names if name in reasons), _UNKNOWN_USE.get(tensor.dim(), _OF_HIGH_RANK)
        )
        reason = stated if kind == "direct" and tensor.dim() > 1 else ""
        tensors.append(PlannedTensor(tuple(names), tuple(tensor.shape), kind, uses, reason))
    return tuple(tensors)


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


_UNKNOWN_USE = {2: "a matrix of a layer other than nn.Linear and the input embedding"}
_OF_HIGH_RANK = "of rank 3 or more, and no bank of experts"
"""Why matrices and kernels are direct of which nothing else is known: somebody's forward reads them as they are."""

_UP_BANKS = {True: "gate_up_proj", False: "up_proj"}
"""Name of the first bank of experts with and without a gate, as Transformers' experts interface calls it."""

_DOWN_BANK = "down_proj"


def expert_banks(model: Any) -> set[str]:
    """Names of the banks [E, N, K] of all experts that multiply through Transformers' experts interface, row by row."""
    return {
        f"{path}.{bank}" if path else bank
        for path, module in model.named_modules(remove_duplicate=False)
        if _is_experts(module) and not _foreign_experts(module)
        for bank in (_UP_BANKS[getattr(module, "has_gate", True)], _DOWN_BANK)
    }


def direct_reasons(model: Any) -> dict[str, str]:
    """Why weights that look like quantizable ones stay direct, by name: banks of other experts, and routers.

    A router is a linear layer beside experts, alone or the only one of its module, that gives one number per expert; a
    shared expert's gate gives one number.
    """
    reasons: dict[str, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        banks = [child for child in module.children() if _is_experts(child)]
        for child_path, child in module.named_children() if banks else ():
            inside = [(name, layer) for name, layer in child.named_modules() if isinstance(layer, torch.nn.Linear)]
            widths = {1, *(experts.num_experts for experts in banks)}
            if len(inside) == 1 and inside[0][1].out_features in widths:
                name = ".".join(filter(None, (path, child_path, inside[0][0], "weight")))
                reasons[name] = "the router of experts, which decides and is small"
        if _is_experts(module) and (what := _foreign_experts(module)):
            banked = [name for name, bank in module.named_parameters(recurse=False) if bank.dim() == 3]
            reasons |= {f"{path}.{name}" if path else name: what for name in banked}
    return reasons


def _is_experts(module: torch.nn.Module) -> bool:
    """Whether a module has the marks that Transformers' experts interface leaves, and its banks."""
    marked = isinstance(getattr(module, "num_experts", None), int) and hasattr(module, "is_transposed")
    return marked and isinstance(getattr(module, _DOWN_BANK, None), torch.nn.Parameter)


def _foreign_experts(module: Any) -> str:
    """What of an experts module no packed product can follow; empty for one that can be packed."""
    if module.is_transposed:
        return "a bank of experts stored [E, K, N], whose rows are not those of the product"
    if getattr(module, "has_bias", False):
        return "a bank of experts with biases"
    banks = [getattr(module, name, None) for name in (_UP_BANKS[getattr(module, "has_gate", True)], _DOWN_BANK)]
    if any(bank is None or bank.dim() != 3 or bank.shape[0] != module.num_experts for bank in banks):
        return "a bank of experts of a form that is not known"
    return ""


def _weight_of(getter: Callable[[], Any], layer: type[torch.nn.Module]) -> torch.Tensor | None:
    """The weight of an input or output embedding; None where the model has none of that layer type."""
    try:
        module = getter()
    except (NotImplementedError, AttributeError):
        return None
    return module.weight if isinstance(module, layer) else None  # type: ignore[return-value]


def _kind(tensor: torch.Tensor, embedding: torch.Tensor | None, head: torch.Tensor | None, multiplied: bool) -> Kind:
    if tensor.dim() == 3 and multiplied:
        return "linear"
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
