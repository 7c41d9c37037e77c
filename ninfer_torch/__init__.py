"""NInfer's `.ninfer` weights as first-class PyTorch tensors.

    import ninfer_torch
    model = AutoModelForCausalLM.from_pretrained("model.ninfer")

Importing this package imports neither Transformers nor Triton; Transformers learns about `.ninfer` files the moment it is imported.
"""

from __future__ import annotations

import os
from typing import Any

from ninfer_torch import _transformers_hook
from ninfer_torch.artifact import Artifact, ArtifactWriter, open_artifact
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
from ninfer_torch.versions import __version__, show_versions

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
    "open_artifact",
    "quantize",
    "save",
    "set_activation_precision",
    "show_versions",
]


def hub_dir(path: str | os.PathLike[str]) -> str:
    """A folder that stock Transformers loads without path translation: small files and a link to the artifact at `path`."""
    from ninfer_transformers.overlay import hub_dir

    return hub_dir(path)


def save(model: Any, path: str | os.PathLike[str], **options: Any) -> Any:
    """Write a Transformers model, its quantized weights unchanged, to a new `.ninfer` file; see `ninfer_transformers.saving.save`."""
    from ninfer_transformers.saving import save

    return save(model, path, **options)


_transformers_hook.arm()
