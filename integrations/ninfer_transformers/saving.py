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
from ninfer_torch.convert.packed_tensors import FOLD_DTYPES
from ninfer_torch.errors import ConversionError, UnsupportedOperation
from ninfer_torch.layouts import encoded_bytes
from ninfer_torch.models.generic import COMPONENT, ModelPlan, logical_name, plan_model, use_input
from ninfer_torch.tensors import NinferTensor, PackedTensor, encode
from ninfer_torch.tensors.composed import ComposedTensor
from ninfer_torch.tensors.direct import DirectTensor
from ninfer_torch.tensors.patch import PatchKernel
from ninfer_torch.tensors.stacked import StackedRows
from ninfer_torch.tensors.transformed import TransformedInput
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

    Quantized weights keep their words; one composed of rows of several, or behind a transform of its inputs, is bound to
    the objects it is made of. Dense ones are stored as bf16 where they are bfloat16, else as fp32 or int32.
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
        objects = _Objects(writer)
        for tied in _tied_groups(weights):
            _add(objects, weights[tied[0]], tied, multiplied)
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


class _Objects:
    """The objects of an artifact under construction, numbered in the order in which they are added."""

    def __init__(self, writer: ArtifactWriter) -> None:
        self.writer = writer
        self._weights = 0
        self._vectors: dict[tuple[str, bytes], str] = {}

    def add(self, weight: torch.Tensor) -> str:
        """Add one object, an encoded matrix or a direct tensor, and return its id."""
        object_id, self._weights = f"weight/{self._weights:06d}", self._weights + 1
        if isinstance(weight, DirectTensor):
            self.writer.tensor(object_id, weight.format, tuple(weight.words.shape), weight.words)
        elif isinstance(weight, PackedTensor):  # an object of a quantized format is a matrix
            matrix = (math.prod(weight.shape[:-1]), weight.shape[-1])
            self.writer.tensor(object_id, weight.format, matrix, weight, divisors=_divisors(weight))
        else:
            format = _direct_format(weight)
            self.writer.tensor(
                object_id, format, tuple(weight.shape), lambda: [encode(cast_direct(weight.detach(), format))]
            )
        return object_id

    def add_vector(self, role: str, vector: torch.Tensor) -> str:
        """Add the vector of an input transform; equal ones are stored once."""
        words = vector.cpu().to(FOLD_DTYPES[role])
        key = role, words.view(torch.uint8).numpy().tobytes()
        if key not in self._vectors:
            self._vectors[key] = f"auxiliary/{len(self._vectors):06d}"
            self.writer.tensor(self._vectors[key], _direct_format(words), tuple(words.shape), words)
        return self._vectors[key]


def _add(objects: _Objects, weight: torch.Tensor, names: list[str], multiplied: set[str]) -> None:
    """Write a weight, bind its names, and state how it is used; what it is composed of becomes objects of their own."""
    stored, auxiliaries = weight, {}
    if isinstance(stored, TransformedInput):
        auxiliaries = {stored.role: objects.add_vector(stored.role, stored.vector)}
        stored = stored.weight
    if isinstance(stored, PatchKernel):
        stored = stored.weight
    if isinstance(stored, StackedRows):
        parts = _stacked_parts(objects, stored, names[0])
    elif isinstance(stored, ComposedTensor):
        raise UnsupportedOperation(f"{names[0]} is a {type(stored).__name__} inside another: {stored.way_to_store}")
    else:
        parts = [(objects.add(stored), 0, stored.numel())]
    whole = stored is weight and not (isinstance(weight, NinferTensor) and (len(parts) > 1 or weight.dim() > 2))
    policy = weight.policy if isinstance(weight, NinferTensor) else "A16Only"
    for name in names:
        if whole:
            objects.writer.bind(logical_name(name), parts[0][0])
        else:
            objects.writer.bind(logical_name(name), parts=parts)
        if name in multiplied or auxiliaries:
            objects.writer.use(logical_name(name), use_input(name), policy, auxiliaries)


def _stacked_parts(objects: _Objects, stacked: StackedRows, name: str) -> list[tuple[str, int, int]]:
    """Each block as an object, and the runs of rows of the blocks as ranges of elements, in order."""
    foreign = [block for block in stacked.blocks if not isinstance(block, PackedTensor)]
    if foreign:
        raise UnsupportedOperation(
            f"{name} stacks rows some of which alone are a {type(foreign[0]).__name__}; one use cannot say so of a part of its "
            f"weight. {foreign[0].way_to_store if isinstance(foreign[0], ComposedTensor) else ''}".rstrip()
        )
    ids, columns = [objects.add(block) for block in stacked.blocks], stacked.shape[-1]
    return [(ids[run.block], run.begin * columns, (run.begin + run.length) * columns) for run in stacked.placement.runs]


def _direct_format(weight: torch.Tensor) -> str:
    if weight.dtype == torch.bfloat16:
        return "bf16"
    return "fp32" if weight.is_floating_point() else "int32"


def _divisors(weight: PackedTensor) -> int:
    """How many divisors the weight has as an object of its own: each takes 4 bytes beyond those of one divisor."""
    if weight.geometry.divisors == 1:
        return 1
    matrix = (math.prod(weight.shape[:-1]), weight.shape[-1])
    return 1 + (len(encode(weight)) - encoded_bytes(weight.format, matrix)) // 4


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
