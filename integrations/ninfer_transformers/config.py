"""The quantization config that marks a checkpoint folder as the clothing of a `.ninfer` artifact."""

from __future__ import annotations

from transformers.utils.quantization_config import QuantizationConfigMixin

from ninfer_transformers.stub import QUANT_METHOD

__all__ = ["NinferConfig"]


class NinferConfig(QuantizationConfigMixin):
    """`quantization_config = {"quant_method": "ninfer"}`: everything else is in the artifact."""

    def __init__(self, quant_method: str = QUANT_METHOD) -> None:
        if quant_method != QUANT_METHOD:
            raise ValueError(f"quant_method is {quant_method!r}, expected {QUANT_METHOD!r}")
        self.quant_method = quant_method  # type: ignore[assignment]  # a plain string, as for every method from outside
