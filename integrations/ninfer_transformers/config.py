"""The quantization config: how a dense checkpoint is quantized while it loads, and the mark of a quantized one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from ninfer_torch.convert.live import RecipeLike, recipe_title
from ninfer_transformers.stub import QUANT_METHOD

__all__ = ["SAVE_FORMATS", "NinferConfig", "checked_save_format"]

SAVE_FORMATS = ("artifact", "safetensors")


def checked_save_format(save_format: str) -> str:
    if save_format not in SAVE_FORMATS:
        raise ValueError(f"save_format is {save_format!r}, expected one of {', '.join(SAVE_FORMATS)}")
    return save_format


class NinferConfig(QuantizationConfigMixin):
    """`from_pretrained(dense, quantization_config=NinferConfig(recipe="q4"))` quantizes each weight as it is read.

    Args:
        recipe: a preset ("q4"), a format ("q6_g64_fp16"), the path of a Python recipe, or `configure(model, recipe,
            sources)`. None where the checkpoint is quantized already; what is stored then is all there is to know, and
            the name is only kept as a note.
        modules_to_not_convert: modules that stay dense, as runs of components of their paths, with shell wildcards:
            "lm_head", "layers.0", "self_attn.*_proj".
        save_format: what `save_pretrained` writes: "artifact", a `.ninfer` file in the folder, or "safetensors", the
            planes as plain tensors. `save_pretrained(folder, save_format=...)` says so for one save.
    """

    def __init__(
        self,
        recipe: RecipeLike | None = None,
        modules_to_not_convert: Sequence[str] | None = None,
        save_format: str = "artifact",
        quant_method: str = QUANT_METHOD,
    ) -> None:
        if quant_method != QUANT_METHOD:
            raise ValueError(f"quant_method is {quant_method!r}, expected {QUANT_METHOD!r}")
        if isinstance(modules_to_not_convert, str):
            raise TypeError(f"modules_to_not_convert is a list of names, found {modules_to_not_convert!r}")
        self.quant_method = quant_method  # type: ignore[assignment]  # a plain string, as for every method from outside
        self.recipe = recipe
        self.modules_to_not_convert = list(modules_to_not_convert or ())
        self.save_format = checked_save_format(save_format)

    def to_dict(self) -> dict[str, Any]:
        """JSON values; members that say nothing are left out. A recipe is stored by its name."""
        members: dict[str, Any] = {"quant_method": self.quant_method}
        if self.recipe is not None:
            members["recipe"] = recipe_title(self.recipe)
        if self.modules_to_not_convert:
            members["modules_to_not_convert"] = list(self.modules_to_not_convert)
        if self.save_format != SAVE_FORMATS[0]:
            members["save_format"] = self.save_format
        return members
