"""A Transformers model takes up quantized weights that were not loaded, and gives them up again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.tensors import NinferTensor
from ninfer_transformers.experts import leave_packed_experts, use_packed_experts
from ninfer_transformers.stub import QUANT_METHOD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ninfer_transformers.config import NinferConfig

__all__ = ["adopt", "check_adoptable", "make_dense"]

_MARKS = ("hf_quantizer", "quantization_method", "is_quantized", "_weight_conversions")
"""Attributes by which Transformers knows a quantized model; a dense one that nobody loaded has none of them."""


def check_adoptable(model: PreTrainedModel) -> None:
    """Raise UnsupportedOperation for a model that another library has quantized."""
    from ninfer_transformers.quantizer import NinferQuantizer

    found = getattr(model, "hf_quantizer", None)
    if found is not None and not isinstance(found, NinferQuantizer):
        raise UnsupportedOperation(f"the model is quantized by {type(found).__name__} already; load it dense first")


def adopt(model: PreTrainedModel, config: NinferConfig, packed: Iterable[str]) -> None:
    """Mark a model whose weights `packed` have been quantized in place as if it had been loaded so: it saves, trains
    adapters and dequantizes through Transformers.
    """
    from transformers import PreTrainedModel

    from ninfer_transformers.quantizer import NinferQuantizer

    use_packed_experts(model, packed)
    model._weight_conversions = []  # type: ignore[assignment]
    if getattr(model, "hf_quantizer", None) is None:
        model.hf_quantizer = NinferQuantizer(config, pre_quantized=True)  # type: ignore[assignment]
        model.is_quantized = True  # type: ignore[assignment]
        model.quantization_method = QUANT_METHOD  # type: ignore[assignment]
        model.config.quantization_config = config
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                module.config._is_quantized = True  # as Transformers marks a loaded one


def _plain(weight: NinferTensor, dtype: torch.dtype | None) -> torch.nn.Parameter:
    return torch.nn.Parameter(weight.dequantize(dtype or weight.compute_dtype))


def make_dense(model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Replace quantized parameters by plain ones of their values, one after the other, and remove every mark.

    `dtype`, by default each weight's own compute dtype, is also given to dense parameters of the model's dtype; others
    (float32 among bfloat16) keep theirs.
    """
    before = model.dtype
    places = [id(p) for module in model.modules() for p in module._parameters.values() if isinstance(p, NinferTensor)]
    tied = {key for key, count in Counter(places).items() if count > 1}
    dense: dict[
        int, tuple[Any, torch.nn.Parameter]
    ] = {}  # tied weights alone: a packed one is freed when it is replaced
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, NinferTensor):
                made = dense[id(parameter)][1] if id(parameter) in dense else _plain(parameter, dtype)
                if id(parameter) in tied:
                    dense[id(parameter)] = (parameter, made)
                module._parameters[name] = made
            elif parameter is not None and dtype is not None and parameter.dtype == before != dtype:
                parameter.data = parameter.data.to(dtype)
    leave_packed_experts(model)
    for mark in _MARKS:
        if mark in vars(model):
            delattr(model, mark)
    for module in model.modules():
        config = getattr(module, "config", None)
        for mark in ("quantization_config", "_is_quantized"):
            if config is not None and mark in vars(config):
                delattr(config, mark)
    if dtype is not None:
        model.config.dtype = dtype
