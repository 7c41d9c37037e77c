"""The quantizer: puts an artifact's tensors where Transformers would put a checkpoint's."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers.base import HfQuantizer

from ninfer_torch.artifact.reader import Artifact, open_artifact
from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.models.architectures import architecture_of
from ninfer_torch.models.base import module_prefixes
from ninfer_torch.tensors import NinferTensor
from ninfer_transformers.binding import BoundParameter, bind_parameters, untie_separate_weights
from ninfer_transformers.experts import use_packed_experts
from ninfer_transformers.stub import STUB_DTYPE, artifact_beside

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["BindParameter", "NinferQuantizer"]

_MARKS = ("transformers_weights", "quantization_config")
"""Members by which an overlay marks a config and its parts; the second stays where the model is the quantized one."""

_IGNORED = "_keys_to_ignore_on_load_unexpected"
"""The model attribute that lists names in a checkpoint which are no mistake."""


def _renamings(model: PreTrainedModel, artifact: Artifact) -> list[Any]:
    """From the names in a stub, those of the checkpoint's class, to the model's own; what the model has no part for is
    marked as expected and ignored.
    """
    architecture = architecture_of(artifact)
    written, own = architecture.checkpoint_prefixes(artifact), module_prefixes(model, architecture.anchors)
    absent = [rf"^{re.escape(prefix)}" for anchor, prefix in written.items() if anchor not in own]
    if written:
        names = set(model.state_dict())
        top = [parameter.name for parameter in architecture.parameters(artifact) if not parameter.anchor]
        absent += [rf"^{re.escape(name)}$" for name in top if name not in names]
    if absent:
        setattr(model, _IGNORED, {*(getattr(model, _IGNORED, None) or ()), *absent})
    return [
        WeightRenaming(rf"^{re.escape(prefix)}(.+)", rf"{own[anchor]}\1")
        for anchor, prefix in written.items()
        if anchor in own and own[anchor] != prefix
    ]


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
        [[empty]] = input_dict.values()
        dtype = empty.dtype
        if (
            dtype == STUB_DTYPE
        ):  # not cast, or cast to what the model has; releases before 5.18 do not cast renamed entries
            dtype = model.get_parameter_or_buffer(name).dtype
        if isinstance(tensor, NinferTensor):
            return {name: [torch.nn.Parameter(tensor.placed(empty.device, dtype), requires_grad=False)]}
        return {name: [tensor.to(device=empty.device, dtype=tensor.dtype if name in self.kept else dtype)]}


class NinferQuantizer(HfQuantizer):
    """Loads a model from the artifact beside a stub checkpoint; weights stay as they lie in the file.

    `artifact_path` is the artifact the model was loaded from. Weights are frozen, so that only adapters train.
    """

    requires_calibration = False
    artifact_path: Path | None = None

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._bound: dict[str, BoundParameter] = {}
        self._renamings: list[Any] = []
        self._ignored: Any = None
        if not self.pre_quantized:
            raise UnsupportedOperation(
                "a NinferConfig does not quantize a dense checkpoint on the fly; convert it with "
                "`ninfer-torch convert`, then load the .ninfer file"
            )

    def update_device_map(self, device_map: dict[str, Any] | None) -> dict[str, Any] | None:
        """Weights on "disk" are weights on the CPU: the mapping is the disk."""
        if isinstance(device_map, dict):
            return {name: "cpu" if device == "disk" else device for name, device in device_map.items()}
        return device_map

    def adjust_max_memory(self, max_memory: dict[str, int | str]) -> dict[str, int | str]:
        """No limit for the CPU: mapped weights take no memory of their own, so nothing has to go to a disk."""
        return {**max_memory, "cpu": sys.maxsize}

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Bytes per element as stored, for device maps."""
        bound = self._bound.get(param_name)
        return bound.packed_bytes / param.numel() if bound is not None and bound.packed_bytes else param.element_size()

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        """Bind every parameter while the model is on the meta device; what is wrong with the records is said here."""
        if getattr(model.config, "distributed_config", None) is not None:
            raise UnsupportedOperation(
                "tensors of a .ninfer artifact are not sharded over processes; load with device_map instead"
            )
        self.artifact_path = artifact_beside(Path(kwargs["checkpoint_files"][0]))
        with open_artifact(self.artifact_path) as artifact:
            untie_separate_weights(model, artifact)
            self._bound = bind_parameters(model, artifact)
            self._ignored = getattr(model, _IGNORED, None)
            self._renamings = _renamings(model, artifact)
        packed = {name for name, bound in self._bound.items() if bound.assembly.quantized}
        use_packed_experts(model, packed)
        return model

    @torch.inference_mode(False)
    def update_weight_conversions(
        self, weight_conversions: list[Any], model: PreTrainedModel | None = None
    ) -> list[Any]:
        """One converter per last component of a name; names are the model's own, so that no other conversion applies.

        The tensors are made here, outside the context that builds models on the meta device, and before the loader
        starts, which would turn a typed error into a line of its report.
        """
        if self.artifact_path is None or not self._bound:
            return weight_conversions  # asked after the load, for an adapter's sake
        with open_artifact(self.artifact_path) as artifact:
            tensors = {name: bound.read(artifact) for name, bound in self._bound.items()}
        operation = BindParameter(tensors, frozenset(name for name, b in self._bound.items() if b.keeps_dtype))
        leaves = {name.rpartition(".")[2] for name in self._bound}
        return self._renamings + [WeightConverter(f"{leaf}$", leaf, [operation]) for leaf in sorted(leaves)]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        """Leave no trace of the stub: the model is its own, not a checkpoint with conversions to undo."""
        self._bound, self._renamings = {}, []
        setattr(model, _IGNORED, self._ignored)
        model._weight_conversions = []  # type: ignore[assignment]
        parts = [getattr(model.config, name, None) for name in model.config.sub_configs]
        for config, marks in [(model.config, _MARKS[:1]), *((part, _MARKS) for part in parts)]:
            for mark in marks:
                if hasattr(config, mark):
                    delattr(config, mark)
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[None, dict[str, str]]:
        """Called by save_pretrained, which writes safetensors: only adapters can be saved so."""
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}
        raise UnsupportedOperation(
            "save_pretrained writes safetensors, which have no place for quantized tensors; write an artifact with "
            "ninfer_torch.save(model, 'model.ninfer')"
        )

    def is_serializable(self) -> bool:
        """True: save_pretrained then asks `get_state_dict_and_metadata`, which tells adapters from weights."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters on top of the frozen weights train."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: weights go through operators that torch.compile knows."""
        return True
