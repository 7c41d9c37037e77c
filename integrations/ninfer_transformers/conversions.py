"""What stands between a checkpoint's tensors and a model's parameters while Transformers loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.base import HfQuantizer

from ninfer_torch.convert.live import LiveWeight
from ninfer_torch.errors import ArtifactError, ConversionError
from ninfer_torch.tensors import NinferTensor
from ninfer_transformers.planes import PLAIN, Description, part_names, rebuild_weight, stored_names
from ninfer_transformers.sharding import local_shard
from ninfer_transformers.stub import STUB_DTYPE

__all__ = ["BindParameter", "QuantizeOnLoad", "RebuildPlanes", "plane_converters"]


_LOADER_CASTS = hasattr(HfQuantizer, "get_new_dtype")
"""Whether the loader itself casts every dense tensor; releases before 5.18 leave out those that are renamed."""


class BindParameter(ConversionOps):
    """Replaces a stub's empty tensor, which is on the right device already, by the artifact's tensor.

    `tensors` are by name; those in `kept` keep their dtype whatever the model's.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], kept: frozenset[str] = frozenset()) -> None:
        self.tensors = tensors
        self.kept = kept

    def __deepcopy__(self, memo: dict[int, Any]) -> BindParameter:
        return self  # Transformers copies a converter per parameter; they all take from one table

    @torch.inference_mode(False)
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, list[torch.Tensor]]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            return {}  # a tied name: Transformers ties it after the load
        parameter = model.get_parameter_or_buffer(name)
        dtype: torch.dtype | None = None
        if isinstance(parameter, DTensor):  # the loader has cut the stub's tensor, which is empty, into nothing
            tensor, device = local_shard(tensor, parameter), torch.device(parameter.device_mesh.device_type)
        else:
            [[empty]] = input_dict.values()
            device, dtype = empty.device, empty.dtype
        if dtype in (None, STUB_DTYPE):
            dtype = parameter.dtype  # not cast, or cast to what the model has; before 5.18 renamed entries are not cast
        if isinstance(tensor, NinferTensor):
            return {name: [torch.nn.Parameter(tensor.placed(device, dtype), requires_grad=False)]}
        return {name: [tensor.to(device=device, dtype=tensor.dtype if name in self.kept else dtype)]}


class RebuildPlanes(ConversionOps):
    """Makes a quantized weight of its planes, which the loader has collected and put on their device; passes on all else.

    `descriptions` are those in the checkpoint's metadata, by the parameter's name there.
    """

    def __init__(self, descriptions: Mapping[str, Description]) -> None:
        self.descriptions = descriptions

    def __deepcopy__(self, memo: dict[int, Any]) -> RebuildPlanes:
        return self

    @torch.inference_mode(False)
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, list[torch.Tensor]]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        leaf = name.rpartition(".")[2]
        found = {name + _stored(key).removeprefix(leaf): tensors[0] for key, tensors in input_dict.items()}
        parameter = model.get_parameter_or_buffer(name)
        prefix = getattr(model, "base_model_prefix", "")
        # it may have been saved with or without a head around the base model
        spellings = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
        known = self.descriptions
        description = next((known[spelling] for spelling in spellings if spelling in known), None)
        if description is not None:
            weight = rebuild_weight(name, description, found, parameter.dtype)
            plain = description["kind"] == PLAIN
            return {name: [weight if plain else torch.nn.Parameter(weight, requires_grad=False)]}
        if list(found) != [name]:
            raise ArtifactError(f"{name}: the checkpoint holds planes {list(found)} without a description", "reference")
        dense = found[name]
        return {name: [dense.to(parameter.dtype) if dense.is_floating_point() and not _LOADER_CASTS else dense]}


_BEGIN, _END = r"(?<![^.])", "$"


def _pattern(stored: str) -> str:
    """The pattern of a whole last component: `bias` is not the end of `dt_bias`."""
    return f"{_BEGIN}{stored}{_END}"


def _stored(pattern: str) -> str:
    return pattern.removeprefix(_BEGIN).removesuffix(_END)


def plane_converters(descriptions: Mapping[str, Description], names: list[str]) -> list[Any]:
    """One converter per last component of a parameter's name, which gathers its planes."""
    sources: dict[str, dict[str, None]] = {}
    for name in names:
        leaf = name.rpartition(".")[2]
        sources.setdefault(leaf, {_pattern(leaf): None})
    for name, description in descriptions.items():
        leaf = name.rpartition(".")[2]
        for stored in stored_names(leaf, part_names(description)):
            sources.setdefault(leaf, {_pattern(leaf): None})[_pattern(stored)] = None
    operation = RebuildPlanes(descriptions)
    return [WeightConverter(list(found), leaf, [operation]) for leaf, found in sorted(sources.items())]


class QuantizeOnLoad(ConversionOps):
    """Quantizes a dense tensor that has just been read, on the device where it lies; it is gone when this returns."""

    def __init__(self, planned: Mapping[str, LiveWeight]) -> None:
        self.planned = planned

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizeOnLoad:
        return self

    @torch.inference_mode(False)
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        converted: dict[str, Any] = {}
        for name in list(input_dict):
            value = input_dict.pop(name)
            dense = value[0] if isinstance(value, list) else value
            planned = self.planned.get(name)
            if planned is None:
                converted[name] = value
                continue
            if tuple(dense.shape) != planned.shape:
                raise ConversionError(
                    f"{name!r} is {list(dense.shape)} in the checkpoint, the model expects {list(planned.shape)}"
                )
            converted[name] = torch.nn.Parameter(planned.quantized(dense), requires_grad=False)
        return converted
