"""The quantizer: puts packed weights where Transformers would put a checkpoint's dense ones.

They come from the artifact beside a stub, from planes in safetensors, or from a dense checkpoint that a recipe quantizes
tensor by tensor as it is read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.quantizers.base import HfQuantizer

from ninfer_torch.artifact.reader import Artifact, open_artifact
from ninfer_torch.convert.live import LiveWeight, plan_weights
from ninfer_torch.errors import ArtifactError, UnsupportedOperation
from ninfer_torch.models.architectures import architecture_of
from ninfer_torch.models.base import module_prefixes
from ninfer_torch.tensors import NinferTensor
from ninfer_transformers.adoption import make_dense
from ninfer_transformers.binding import BoundParameter, bind_parameters, untie_separate_weights
from ninfer_transformers.config import NinferConfig
from ninfer_transformers.conversions import BindParameter, QuantizeOnLoad, plane_converters
from ninfer_transformers.experts import use_packed_experts
from ninfer_transformers.planes import PLAIN, Description, flatten_state_dict, read_descriptions
from ninfer_transformers.sharding import ShardPlan
from ninfer_transformers.stub import QUANT_METHOD, artifact_beside

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["NinferQuantizer", "register"]

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


def _refuse_shards(distributed: Any, what: str) -> None:
    if distributed is not None:
        raise UnsupportedOperation(
            f"{what} is not sharded over processes; save it as a .ninfer file and load that with a tp_plan, or use device_map"
        )


def _check_rebuilt(model: PreTrainedModel, described: Mapping[str, Description]) -> None:
    """Raise ArtifactError where planes have been taken for a weight: loaders allow quantized weights any shape."""
    left = [
        name
        for name, parameter in model.named_parameters()
        if name in described and described[name]["kind"] != PLAIN and not isinstance(parameter, NinferTensor)
    ]
    if left:
        raise ArtifactError(
            f"the planes of {', '.join(left[:8])} were not put together; the checkpoint is damaged", "reference"
        )


class NinferQuantizer(HfQuantizer):
    """Loads a model with quantized weights, which are frozen, so that only adapters train.

    `artifact_path` is the artifact the model was loaded from, None for one from elsewhere.
    """

    requires_calibration = False
    artifact_path: Path | None = None

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._bound: dict[str, BoundParameter] = {}
        self._described: Mapping[str, Description] | None = None
        self._shards: ShardPlan | None = None
        self._names: list[str] = []
        self._planned: dict[str, LiveWeight] = {}
        self._renamings: list[Any] = []
        self._ignored: Any = None
        if not self.pre_quantized and quantization_config.recipe is None:
            raise UnsupportedOperation(
                "the checkpoint is dense and the NinferConfig names no recipe; pass NinferConfig(recipe='q4') to quantize it "
                "while it loads, or convert it with `ninfer-torch convert` and load the .ninfer file"
            )

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """A weight that is quantized while it loads has no file that could stand for it on a disk."""
        device_map = kwargs.get("device_map")
        if not self.pre_quantized and isinstance(device_map, dict) and "disk" in device_map.values():
            raise UnsupportedOperation(
                "weights that are quantized while they load cannot be put on 'disk'; convert the checkpoint with "
                "`ninfer-torch convert` and load the .ninfer file, which is mapped"
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
        planned = self._planned.get(param_name)
        if planned is not None:
            return planned.packed_bytes / param.numel()
        bound = self._bound.get(param_name)
        return bound.packed_bytes / param.numel() if bound is not None and bound.packed_bytes else param.element_size()

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        """Bind every parameter while the model is on the meta device; what is wrong with the records is said here."""
        distributed = getattr(model.config, "distributed_config", None)
        if not self.pre_quantized:
            _refuse_shards(distributed, "a model that is quantized while it loads")
            return self._plan_recipe(model)
        files = kwargs["checkpoint_files"]
        self._described = read_descriptions(files)
        self._shards = None if distributed is None else ShardPlan(model, distributed)
        if self._described is not None:
            _refuse_shards(distributed, "a folder of planes")
            self._names = list(model.state_dict())
            use_packed_experts(model, self._described.keys() & {name for name, _ in model.named_parameters()})
            return model
        self.artifact_path = artifact_beside(Path(files[0]))
        with open_artifact(self.artifact_path) as artifact:
            untie_separate_weights(model, artifact)
            self._bound = bind_parameters(model, artifact)
            self._ignored = getattr(model, _IGNORED, None)
            self._renamings = _renamings(model, artifact)
        packed = {name for name, bound in self._bound.items() if bound.assembly.quantized}
        use_packed_experts(model, packed)
        return model

    def _plan_recipe(self, model: PreTrainedModel) -> PreTrainedModel:
        """Decide for every parameter while the model is on the meta device; a recipe's mistakes are said here."""
        config: Any = self.quantization_config
        weights = plan_weights(
            model,
            config.recipe,
            modules_to_not_convert=config.modules_to_not_convert,
            tied=model.all_tied_weights_keys,
        )
        self._planned = {name: weight for weight in weights for name in weight.names}
        use_packed_experts(model, self._planned)
        return model

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether the recipe quantizes a parameter of a dense checkpoint."""
        return param_name in self._planned

    def get_quantize_ops(self) -> QuantizeOnLoad:
        """The operation that runs on a dense parameter once it is read and, of experts, joined."""
        return QuantizeOnLoad(self._planned)

    @torch.inference_mode(False)
    def update_weight_conversions(
        self, weight_conversions: list[Any], model: PreTrainedModel | None = None
    ) -> list[Any]:
        """One converter per last component of a name; names are the model's own, so that no other conversion applies.

        The tensors are made here, outside the context that builds models on the meta device, and before the loader
        starts, which would turn a typed error into a line of its report.
        """
        if self._described is not None:
            return plane_converters(self._described, self._names)
        if self.artifact_path is None or not self._bound:
            return weight_conversions  # a dense checkpoint's own; or asked after the load, for an adapter's sake
        with open_artifact(self.artifact_path) as artifact:
            tensors = {name: bound.read(artifact) for name, bound in self._bound.items()}
        if self._shards is not None:
            self._shards.check(tensors)
        operation = BindParameter(tensors, frozenset(name for name, b in self._bound.items() if b.keeps_dtype))
        leaves = {name.rpartition(".")[2] for name in self._bound}
        return self._renamings + [WeightConverter(f"{leaf}$", leaf, [operation]) for leaf in sorted(leaves)]

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        """Leave no trace of the stub: the model is its own, not a checkpoint with conversions to undo."""
        if self._described is not None:
            _check_rebuilt(model, self._described)
        if self._bound:
            setattr(model, _IGNORED, self._ignored)
        self._bound, self._described, self._planned, self._renamings, self._shards = {}, None, {}, [], None
        model._weight_conversions = []  # type: ignore[assignment]
        parts = [getattr(model.config, name, None) for name in model.config.sub_configs]
        for config, marks in [(model.config, _MARKS[:1]), *((part, _MARKS) for part in parts)]:
            for mark in marks:
                if hasattr(config, mark):
                    delattr(config, mark)
        return model

    def get_state_dict_and_metadata(
        self, model: PreTrainedModel
    ) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """What `save_pretrained` writes into safetensors: planes and their description, or adapters alone."""
        if getattr(model, "_hf_peft_config_loaded", False):
            return None, {}
        return flatten_state_dict(model.state_dict(keep_vars=True), model.dtype)

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Plain parameters, and no trace of ever having been quantized. Each weight is replaced by itself."""
        make_dense(model, dtype)
        return model

    def is_serializable(self) -> bool:
        """True: packed weights are saved as they are."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: adapters on top of the frozen weights train."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: weights go through operators that torch.compile knows."""
        return True


def register(registry: Any) -> None:
    """Through the official extension points of `transformers.quantizers.auto`; a second call changes nothing."""
    if QUANT_METHOD not in registry.AUTO_QUANTIZER_MAPPING:
        registry.register_quantization_config(QUANT_METHOD)(NinferConfig)
        registry.register_quantizer(QUANT_METHOD)(NinferQuantizer)


_registry = sys.modules.get("transformers.quantizers.auto")
if hasattr(_registry, "register_quantizer"):  # imported above, before there was a class to register
    register(_registry)
