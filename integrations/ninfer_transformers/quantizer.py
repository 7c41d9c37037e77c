"""The quantizer: puts an artifact's tensors where Transformers would put a checkpoint's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.base import HfQuantizer

from ninfer_torch.artifact.reader import open_artifact
from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.tensors.base import NinferTensor, make_tensor
from ninfer_transformers.binding import BoundParameter, bind_parameters, read_parameter, untie_separate_weights
from ninfer_transformers.generic import require_generic
from ninfer_transformers.stub import STUB_DTYPE, artifact_beside

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["BindParameter", "NinferQuantizer"]


class BindParameter(ConversionOps):
    """Replaces a stub's empty tensor, which is on the right device already, by the artifact's tensor."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

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
            return {name: [torch.nn.Parameter(_placed(tensor, empty.device, dtype), requires_grad=False)]}
        return {name: [tensor.to(device=empty.device, dtype=dtype)]}


def _placed(weight: NinferTensor, device: torch.device, dtype: torch.dtype) -> NinferTensor:
    """The weight on `device` with compute dtype `dtype`; planes that are there already stay as they are, unread."""
    planes = [plane.to(device) for plane in weight.planes.values()]
    return make_tensor(weight.format, planes, weight.geometry, weight.shape, dtype, weight.policy)


class NinferQuantizer(HfQuantizer):
    """Loads a model from the artifact beside a stub checkpoint; weights stay as they lie in the file.

    `artifact_path` is the artifact the model was loaded from. Weights are frozen, so that only adapters train.
    """

    requires_calibration = False
    artifact_path: Path | None = None

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._bound: dict[str, BoundParameter] = {}
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
            require_generic(artifact)
            untie_separate_weights(model, artifact)
            self._bound = bind_parameters(model, artifact)
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
            operation = BindParameter({name: read_parameter(artifact, bound) for name, bound in self._bound.items()})
        leaves = {name.rpartition(".")[2] for name in self._bound}
        return [WeightConverter(f"{leaf}$", leaf, [operation]) for leaf in sorted(leaves)]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        """Leave no trace of the stub: the model is its own, not a checkpoint with conversions to undo."""
        self._bound = {}
        model._weight_conversions = []  # type: ignore[assignment]
        if hasattr(model.config, "transformers_weights"):
            del model.config.transformers_weights
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
