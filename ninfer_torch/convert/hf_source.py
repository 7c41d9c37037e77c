"""A Hugging Face folder of safetensors as a conversion source.

Shards are mapped, never loaded: a row range is read when it is asked for. Names are the files' own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ninfer_torch.convert.source import RowReader, SourceTensor, UnusedTensor
from ninfer_torch.errors import ConversionError

__all__ = ["RESOURCE_FILES", "HuggingFaceSource"]

RESOURCE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
"""Small files that travel with a model, in the order in which an artifact stores them."""

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_ENCODINGS: Mapping[str, str] = MappingProxyType(
    {
        "BF16": "bf16",
        "F16": "fp16",
        "F32": "fp32",
        "F64": "fp64",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "BOOL": "bool",
    }
)
"""safetensors dtype -> encoding. Eight-bit and smaller words are somebody's quantization, not numbers."""


class HuggingFaceSource:
    """The folder of an unquantized model: config.json and `model.safetensors`, or shards with an index.

    Raises ConversionError, naming file and tensor, for a missing shard, a tensor in two shards, an indexed tensor that
    its shard lacks, a broken file, and a number type that is no plain float or integer.
    """

    kind = "huggingface"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise ConversionError(f"{self._folder}: not a folder")
        self._shards, indexed = _find_shards(self._folder)
        found = _open_shards(self._folder, self._shards)
        self.tensors: Mapping[str, SourceTensor] = MappingProxyType(
            {
                name: _describe(shard, handle, name)
                for name, (shard, handle) in found.items()
                if indexed is None or name in indexed
            }
        )
        self.unused: Sequence[UnusedTensor] = tuple(
            UnusedTensor(name, f"not listed in {_INDEX}") for name in found if name not in self.tensors
        )
        for name, shard in (indexed or {}).items():
            if name not in found or found[name][0] != shard:
                raise ConversionError(f"{self._folder / shard}: lacks tensor {name!r}, which {_INDEX} places there")

    @property
    def name(self) -> str:
        return self._folder.resolve().name

    def config(self) -> Any:
        """The config as Transformers' AutoConfig reads it.

        Raises ConversionError where config.json is missing or unknown to Transformers, and for a quantized checkpoint,
        whose words would have to be decoded first.
        """
        from transformers import AutoConfig

        if not (self._folder / "config.json").is_file():
            raise ConversionError(f"{self._folder}: no config.json beside the weights")
        try:
            config = AutoConfig.from_pretrained(str(self._folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConversionError(
                f"{self._folder / 'config.json'}: Transformers cannot read this config: {error}"
            ) from error
        quantization = getattr(config, "quantization_config", None)
        if quantization is not None:
            method = (
                quantization.get("quant_method")
                if isinstance(quantization, dict)
                else getattr(quantization, "quant_method", None)
            )
            raise ConversionError(
                f"{self._folder}: the checkpoint is quantized ({method}); expected plain bf16, fp16 or fp32 weights"
            )
        return config

    def resources(self) -> dict[str, bytes]:
        paths = (self._folder / name for name in RESOURCE_FILES)
        contents = {path.name: path.read_bytes() for path in paths if path.is_file()}
        return {name: data for name, data in contents.items() if data}

    def provenance(self) -> dict[str, Any]:
        files = [{"name": name, "bytes": (self._folder / name).stat().st_size} for name in self._shards]
        return {"kind": self.kind, "name": self.name, "files": files}


def _find_shards(folder: Path) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """The weight files of a folder, and the index's map from tensor to file where there is an index."""
    if (folder / _SINGLE).is_file():
        return (_SINGLE,), None
    index = folder / _INDEX
    if not index.is_file():
        others = sorted(
            path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".gguf", ".safetensors"}
        )
        raise ConversionError(
            f"{folder}: expected {_SINGLE} or {_INDEX}, found {', '.join(others) or 'no weight files'}"
        )
    try:
        indexed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = tuple(sorted(set(indexed.values())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(
            f"{index}: expected a JSON object with a weight_map of tensor names to file names ({error!r})"
        ) from error
    for shard in shards:
        if not isinstance(shard, str) or os.path.basename(shard) != shard:
            raise ConversionError(f"{index}: {shard!r} is not a bare file name")
        if not (folder / shard).is_file():
            count = sum(file == shard for file in indexed.values())
            raise ConversionError(f"{folder / shard}: missing shard; {_INDEX} places {count} tensors there")
    return shards, indexed


def _open_shards(folder: Path, shards: Sequence[str]) -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    for shard in shards:
        try:
            handle = safe_open(str(folder / shard), framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ConversionError(f"{folder / shard}: not a readable safetensors file: {error}") from error
        for name in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
            if name in found:
                raise ConversionError(f"{folder / shard}: tensor {name!r} lies in {found[name][0]} too")
            found[name] = (shard, handle)
    return found


def _describe(shard: str, handle: Any, name: str) -> SourceTensor:
    part = handle.get_slice(name)
    dtype = part.get_dtype()
    if dtype not in _ENCODINGS:
        raise ConversionError(f"{shard}: tensor {name!r} holds {dtype} words; expected one of {', '.join(_ENCODINGS)}")
    return SourceTensor(name, tuple(part.get_shape()), _ENCODINGS[dtype], _reader(handle, name))


def _reader(handle: Any, name: str) -> RowReader:
    def read(begin: int, end: int) -> torch.Tensor:
        part = handle.get_slice(name)
        return part[begin:end] if part.get_shape() else handle.get_tensor(name)

    return read
