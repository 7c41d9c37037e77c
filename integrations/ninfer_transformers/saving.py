"""A live model becomes an artifact: quantized words as they are, everything else in a direct format."""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ninfer_torch.artifact.reader import open_artifact
from ninfer_torch.artifact.writer import ArtifactWriter
from ninfer_torch.convert.hf_source import RESOURCE_FILES
from ninfer_torch.convert.methods import cast_direct
from ninfer_torch.errors import ConversionError, UnsupportedOperation
from ninfer_torch.layouts import encoded_bytes
from ninfer_torch.models.generic import COMPONENT, ModelPlan, logical_name, plan_model, use_input
from ninfer_torch.tensors import NinferTensor, PackedTensor, encode
from ninfer_torch.tensors.composed import ComposedTensor
from ninfer_torch.versions import __version__

__all__ = ["save"]


def save(
    model: Any,
    path: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    artifact_id: str | bytes | None = None,
    max_file_bytes: int | None = None,
) -> Path:
    """Write a Transformers model as a generic artifact; returns its path.

    Quantized weights keep their words. Dense ones are stored as bf16 where they are bfloat16, else as fp32 or int32.
    `tokenizer` (or a processor) gives the small files; without it they are those of the artifact the model was loaded
    from. `generation_config.json` is always the live model's. `artifact_id` and `max_file_bytes` are the writer's.
    Raises UnsupportedOperation for a model with adapters or replaced layers and for weights on the meta device, and
    ConversionError for an existing `path`.
    """
    path = Path(path)
    if path.exists():
        raise ConversionError(f"{path}: already exists; an artifact is never overwritten")
    plan = _plan_of(model)
    weights = _live_weights(model, plan)
    multiplied = {name for planned in plan.tensors for name in planned.multiplied}
    resources = _resources(model, tokenizer)
    with ArtifactWriter(path, artifact_id=artifact_id, max_file_bytes=max_file_bytes) as writer:
        writer.provenance = {"converter": "ninfer_torch", "version": __version__, "recipe": "save", "sources": {}}
        object_ids = {role: f"resource/{COMPONENT}/{role}" for role in resources}
        writer.component(COMPONENT, plan.config, resources=object_ids)
        for role, data in resources.items():
            writer.resource(object_ids[role], data)
        for index, tied in enumerate(_tied_groups(weights)):
            _add(writer, f"weight/{index:06d}", weights[tied[0]], tied, multiplied)
        writer.finish()
    return path


def _live_weights(model: Any, plan: ModelPlan) -> dict[str, torch.Tensor]:
    """The model's state dict, checked to be that of its class, with values."""
    weights = model.state_dict(keep_vars=True)
    foreign = weights.keys() ^ {name for planned in plan.tensors for name in planned.names}
    if foreign:
        raise UnsupportedOperation(
            f"this {type(model).__name__} has adapters or replaced layers: its state dict differs from its class's in "
            f"{_listed(foreign)}. Save adapters with save_pretrained, and the model without them with ninfer_torch.save"
        )
    on_meta = [name for name, weight in weights.items() if weight.device.type == "meta"]
    if on_meta:
        raise UnsupportedOperation(f"weights without values (device meta) cannot be saved: {_listed(on_meta)}")
    return weights


def _plan_of(model: Any) -> ModelPlan:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UnsupportedOperation(
            f"ninfer_torch.save writes a Transformers model, found a {type(model).__name__}; "
            "of a PEFT model pass the base model"
        )
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    return plan_model(config)


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:8]) + (f" and {len(ordered) - 8} more" if len(ordered) > 8 else "")


def _tied_groups(weights: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """State-dict names by the object they name, in state-dict order."""
    groups: dict[int, list[str]] = {}
    for name, weight in weights.items():
        groups.setdefault(id(weight), []).append(name)
    return list(groups.values())


def _add(writer: ArtifactWriter, object_id: str, weight: torch.Tensor, names: list[str], multiplied: set[str]) -> None:
    if isinstance(weight, ComposedTensor):
        raise UnsupportedOperation(
            f"save writes one object per parameter; {names[0]} is a {type(weight).__name__}, so {weight.way_to_store}"
        )
    shape = tuple(weight.shape)
    whole = not (isinstance(weight, PackedTensor) and len(shape) > 2)  # an object of a quantized format is a matrix
    if isinstance(weight, PackedTensor):
        matrix = shape if whole else (math.prod(shape[:-1]), shape[-1])
        writer.tensor(object_id, weight.format, matrix, weight, divisors=_divisors(weight))
    else:
        format = _direct_format(weight)
        writer.tensor(object_id, format, tuple(weight.shape), lambda: [encode(cast_direct(weight.detach(), format))])
    policy = weight.policy if isinstance(weight, NinferTensor) else "A16Only"
    for name in names:
        if whole:
            writer.bind(logical_name(name), object_id)
        else:
            writer.bind(logical_name(name), parts=[(object_id, 0, weight.numel())])
        if name in multiplied:
            writer.use(logical_name(name), use_input(name), activation_policy=policy)


def _direct_format(weight: torch.Tensor) -> str:
    if weight.dtype == torch.bfloat16:
        return "bf16"
    return "fp32" if weight.is_floating_point() else "int32"


def _divisors(weight: PackedTensor) -> int:
    """How many divisors the weight has as an object of its own: each takes 4 bytes beyond those of one divisor."""
    if weight.geometry.divisors == 1:
        return 1
    return 1 + (len(encode(weight)) - encoded_bytes(weight.format, weight.shape)) // 4


def _resources(model: Any, tokenizer: Any) -> dict[str, bytes]:
    """Small files by role, in the order of RESOURCE_FILES."""
    with tempfile.TemporaryDirectory() as folder:
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(folder)
        written = {name: Path(folder, name).read_bytes() for name in RESOURCE_FILES if Path(folder, name).is_file()}
    found = (_loaded_resources(model) if tokenizer is None else {}) | written
    return {name: found[name] for name in RESOURCE_FILES if found.get(name)}


def _loaded_resources(model: Any) -> dict[str, bytes]:
    """The small files of the artifact a model was loaded from; none for a model from elsewhere."""
    source = getattr(getattr(model, "hf_quantizer", None), "artifact_path", None)
    if source is None:
        return {}
    with open_artifact(source) as artifact:
        roles = artifact.components[COMPONENT].resources
        return {role: artifact.resource(object_id) for role, object_id in roles.items()}
