"""NInfer's `.ninfer` weights as first-class PyTorch tensors.

    import ninfer_torch
    model = AutoModelForCausalLM.from_pretrained("model.ninfer")

Importing this package imports neither Transformers nor Triton; Transformers learns about `.ninfer` files the moment it is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ninfer_torch import _transformers_hook
from ninfer_torch.artifact import Artifact, ArtifactWriter, open_artifact
from ninfer_torch.convert.merging import merging
from ninfer_torch.convert.methods import cast_direct, quantize
from ninfer_torch.errors import (
    ArtifactError,
    ConversionError,
    FormatError,
    LayoutError,
    NinferError,
    UnsupportedOperation,
)
from ninfer_torch.formats import FORMATS, get_format
from ninfer_torch.kernels.precision import activation_precision, set_activation_precision
from ninfer_torch.layouts import LAYOUTS, get_layout
from ninfer_torch.tensors import NinferTensor, decode, encode
from ninfer_torch.versions import __version__, show_versions, warn_if_untested

if TYPE_CHECKING:
    from ninfer_transformers.config import NinferConfig as NinferConfig

__all__ = [
    "FORMATS",
    "LAYOUTS",
    "Artifact",
    "ArtifactError",
    "ArtifactWriter",
    "ConversionError",
    "FormatError",
    "LayoutError",
    "NinferError",
    "NinferTensor",
    "UnsupportedOperation",
    "__version__",
    "activation_precision",
    "cast_direct",
    "decode",
    "encode",
    "get_format",
    "get_layout",
    "hub_dir",
    "merging",
    "open_artifact",
    "quantize",
    "quantize_",
    "save",
    "set_activation_precision",
    "show_versions",
]


def __getattr__(name: str) -> Any:
    """`NinferConfig`, which is a class of Transformers' and is imported with it when first asked for: not in __all__."""
    if name == "NinferConfig":
        from ninfer_transformers.config import NinferConfig

        return NinferConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def hub_dir(path: str | os.PathLike[str]) -> str:
    """A folder that stock Transformers loads without path translation: small files and a link to the artifact at `path`."""
    from ninfer_transformers.overlay import hub_dir

    return hub_dir(path)


def quantize_(module: Any, recipe: Any = "q4", *, modules_to_not_convert: Iterable[str] = ()) -> None:
    """Quantize a module in place, weight by weight: the peak is the quantized module and its largest layer.

    `recipe` is a preset's name ("q4"), a format's ("q6_g64_fp16": linear weights, embedding and head), the path of a Python
    recipe, or `configure(model, recipe, sources)`; parameters are named `text/<state-dict name>`. `modules_to_not_convert`
    are runs of components of modules' paths, wildcards allowed: "lm_head", "layers.0". Tied weights stay one tensor. What a
    recipe leaves direct keeps its dtype. A Transformers model is marked quantized, so that `save_pretrained`, `dequantize`
    and adapters work as if it had been loaded so.

    Raises ConversionError before anything is changed for what is wrong with the recipe, a method or a name, and, naming the
    weight, where a method refuses its values (the weights before it are quantized then).
    """
    from ninfer_torch.convert.live import quantize_module, recipe_title

    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(module, modeling.PreTrainedModel):
        quantize_module(module, recipe, modules_to_not_convert=modules_to_not_convert)
        return
    from ninfer_transformers.adoption import adopt, check_adoptable
    from ninfer_transformers.config import NinferConfig

    check_adoptable(module)
    kept = list(modules_to_not_convert)
    packed = quantize_module(module, recipe, modules_to_not_convert=kept)
    adopt(module, NinferConfig(recipe_title(recipe), kept), packed)


def save(model: Any, path: str | os.PathLike[str], **options: Any) -> Any:
    """Write a Transformers model, its quantized weights unchanged, to a new `.ninfer` file; see `ninfer_transformers.saving.save`."""
    from ninfer_transformers.saving import save

    return save(model, path, **options)


warn_if_untested("torch", torch.__version__)
_transformers_hook.arm()
