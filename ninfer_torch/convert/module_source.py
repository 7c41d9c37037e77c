"""A live model as a source: the tensors of its state dict, plain or packed, as they are now."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ninfer_torch.convert.hf_source import RESOURCE_FILES
from ninfer_torch.convert.packed_tensors import DIRECT_ENCODINGS, packed_source
from ninfer_torch.convert.source import SourceTensor, UnusedTensor
from ninfer_torch.errors import ConversionError
from ninfer_torch.tensors import NinferTensor

__all__ = ["ModuleSource"]

_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_PRIVATE_MEMBERS = ("quantization_config",)


class ModuleSource:
    """A model in memory, read when rows are asked for; it is neither copied nor changed.

    `module` is a Transformers model, or any module whose state dict names the parameters of the class in
    `config.architectures`; `config` is then given, a Transformers config. `tokenizer` is whatever has `save_pretrained`.
    Weights may lie on any device, may be views, and may be `NinferTensor`s, whose words are offered as they are. Raises
    ConversionError, naming the tensor, for one without values (on the meta device), of a foreign tensor class, or of a
    number type that no format holds.
    """

    kind = "module"

    def __init__(self, module: torch.nn.Module, *, config: Any = None, tokenizer: Any = None, name: str = "") -> None:
        module = getattr(module, "_orig_mod", module)  # the module inside one that torch.compile made
        self._config = _complete_config(module, config)
        self._module = module
        self._tokenizer = tokenizer
        self.name = name or Path(getattr(self._config, "name_or_path", "") or type(module).__name__).name
        tensors: dict[str, SourceTensor] = {}
        seen: set[int] = set()
        for key, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:  # one tensor under several names is tied, and is read once
                seen.add(id(tensor))
                tensors[key] = _describe(key, tensor)
        self.tensors: Mapping[str, SourceTensor] = tensors
        self.unused: Sequence[UnusedTensor] = ()

    def config(self) -> Any:
        """A copy of the config, with the module's class as its architecture and without its quantization."""
        return copy.deepcopy(self._config)

    def resources(self) -> dict[str, bytes]:
        """What `save_pretrained` writes of the tokenizer and of the model's generation config."""
        found = [self._tokenizer, getattr(self._module, "generation_config", None)]
        with tempfile.TemporaryDirectory(prefix="ninfer-torch-") as folder:
            for part in found:
                if part is not None:
                    part.save_pretrained(folder)
            paths = (Path(folder, name) for name in RESOURCE_FILES)
            return {path.name: path.read_bytes() for path in paths if path.is_file()}

    def provenance(self) -> dict[str, Any]:
        """Name and class of the model."""
        return {"kind": self.kind, "name": self.name, "class": type(self._module).__name__}


def _complete_config(module: torch.nn.Module, config: Any) -> Any:
    found: Any = config if config is not None else getattr(module, "config", None)
    if not hasattr(found, "to_json_string"):
        raise ConversionError(
            f"a {type(module).__name__} has no Transformers config; expected a PreTrainedModel, or "
            "ModuleSource(module, config=...) with the config of the class whose state dict it has"
        )
    found = copy.deepcopy(found)
    if config is None or not found.architectures:
        found.architectures = [type(module).__name__]
    for member in _PRIVATE_MEMBERS:
        if hasattr(found, member):
            delattr(found, member)
    return found


def _describe(name: str, tensor: torch.Tensor) -> SourceTensor:
    if tensor.device.type == "meta":
        raise ConversionError(
            f"tensor {name!r} is on the meta device and has no values; load the model without offloading"
        )
    if isinstance(tensor, NinferTensor):
        return packed_source(name, lambda: tensor)
    if type(tensor) not in _PLAIN_CLASSES:
        raise ConversionError(
            f"tensor {name!r} is a {type(tensor).__module__}.{type(tensor).__name__}, expected a plain tensor or a "
            "NinferTensor; dequantize or gather the model first"
        )
    if tensor.dtype not in DIRECT_ENCODINGS or tensor.layout != torch.strided:
        expected = ", ".join(DIRECT_ENCODINGS.values())
        raise ConversionError(
            f"tensor {name!r} is {tensor.dtype} in layout {tensor.layout}, expected strided numbers of {expected}"
        )
    return SourceTensor(name, tuple(tensor.shape), DIRECT_ENCODINGS[tensor.dtype], partial(_rows, tensor))


def _rows(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    rows = tensor.detach()
    return (rows[begin:end] if rows.dim() else rows).cpu()
