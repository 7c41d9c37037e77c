"""A Hugging Face folder of safetensors as a conversion source.

Nothing is loaded: a row range is read when it is asked for. Names are those of the Transformers class in config.json,
where that differs from the files' (`checkpoint_names`); an encoded matrix (`encoded_sources`) goes by its parameter's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ninfer_torch.convert.checkpoint_names import translate_names
from ninfer_torch.convert.encoded_sources import find_encoded
from ninfer_torch.convert.safetensors_files import INDEX, StoredTensor, find_shards, open_shards
from ninfer_torch.convert.source import SourceTensor, UnusedTensor
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


_CONFIG = "config.json"
_READ_SCHEMES = ("compressed-tensors", "modelopt", "fp8")
"""What the `quant_method` of a readable quantized checkpoint begins with."""

_SCALED_BLOCK = (128, 128)


_CACHE_PREFIX, _SNAPSHOTS = "models--", "snapshots"
"""How the Hub's cache calls the folder of a repository, and the folder of its revisions inside."""


class HuggingFaceSource:
    """The folder of a model: config.json and `model.safetensors`, or shards with an index; or a repository's folder in the
    Hub's cache, whose main revision is then read.

    Experts that are stored one by one are banks under Transformers' name, [E, N, K]. Matrices in NVFP4 or FP8 (compressed-tensors, ModelOpt, Hugging Face `fp8`) are offered encoded, or decoded where no
    format holds their words; `unused` names the stored tensors that no artifact needs. Raises ConversionError, naming
    file and tensor, for a missing shard, a tensor in two shards, an indexed tensor that its shard lacks, a broken file,
    and words of a number type or scheme that is not known.
    """

    kind = "huggingface"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise ConversionError(f"{self._folder}: not a folder")
        self._folder = _snapshot_of(self._folder)
        self._shards, indexed = find_shards(self._folder)
        found = open_shards(self._folder, self._shards)
        for name, shard in (indexed or {}).items():
            if name not in found or found[name].file != shard:
                raise ConversionError(f"{self._folder / shard}: lacks tensor {name!r}, which {INDEX} places there")
        listed = {name: stored for name, stored in found.items() if indexed is None or name in indexed}
        self._quantization = self._read_quantization()
        encoded = find_encoded(listed, self._scaled_block())
        aside = {unused.name for unused in encoded.unused}
        plain = {
            name: _describe(stored) for name, stored in listed.items() if name not in encoded.use and name not in aside
        }
        self._stored: Mapping[str, SourceTensor] = {**plain, **encoded.tensors}
        self.unused: Sequence[UnusedTensor] = (
            *(UnusedTensor(name, f"not listed in {INDEX}") for name in found if name not in listed),
            *encoded.unused,
        )

    @property
    def name(self) -> str:
        """The folder's own name; of a snapshot in the Hub's cache the repository's, without its owner."""
        folder = self._folder.resolve()
        if folder.parent.name == _SNAPSHOTS and folder.parent.parent.name.startswith(_CACHE_PREFIX):
            return folder.parent.parent.name.rpartition("--")[2]
        return folder.name

    @cached_property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """Every tensor by its parameter's name in the class that config.json states; by the file's name without a class.

        Raises ConversionError for a config that Transformers cannot read, and as `translate_names`.
        """
        if not self._states_class():
            return MappingProxyType(dict(self._stored))
        return MappingProxyType(translate_names(self._stored, self.config(), self.name))

    def config(self) -> Any:
        """The config as Transformers' AutoConfig reads it, without the source's quantization.

        Raises ConversionError where config.json is missing or unknown to Transformers, and for a checkpoint quantized by
        a method whose words are not read here.
        """
        from transformers import AutoConfig

        if not (self._folder / _CONFIG).is_file():
            raise ConversionError(f"{self._folder}: no {_CONFIG} beside the weights")
        try:
            config = AutoConfig.from_pretrained(str(self._folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConversionError(f"{self._folder / _CONFIG}: Transformers cannot read this config: {error}") from error
        self._refuse_unknown_quantization()
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        return config

    def _config_members(self) -> dict[str, Any]:
        """What config.json holds, nothing where it is missing."""
        path = self._folder / _CONFIG
        if not path.is_file():
            return {}
        try:
            members = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConversionError(f"{path}: expected a JSON object ({error})") from error
        if not isinstance(members, dict):
            raise ConversionError(f"{path}: expected a JSON object, found {type(members).__name__}")
        return members

    def _states_class(self) -> bool:
        members = self._config_members()
        return bool(members.get("architectures")) and "model_type" in members

    def _read_quantization(self) -> Mapping[str, Any]:
        """The `quantization_config` of config.json, empty where there is none."""
        path = self._folder / _CONFIG
        stated = self._config_members().get("quantization_config")
        if stated is not None and not isinstance(stated, dict):
            raise ConversionError(f"{path}: quantization_config is {stated!r}, expected an object")
        return stated or {}

    def _refuse_unknown_quantization(self) -> None:
        stated = self._quantization
        method = str(stated.get("quant_method", "unnamed"))
        if stated and not method.startswith(_READ_SCHEMES):
            raise ConversionError(
                f"{self._folder}: the checkpoint is quantized ({method}); expected plain bf16, fp16 or fp32 weights, or "
                f"NVFP4 or FP8 by {', '.join(_READ_SCHEMES)}"
            )
        if stated.get("transform_config"):
            raise ConversionError(
                f"{self._folder}: the weights are stored behind the transforms of transform_config, which are not imported"
            )

    def _scaled_block(self) -> tuple[int, int]:
        """[rows, columns] under one scale of FP8 in blocks."""
        block = self._quantization.get("weight_block_size") or _SCALED_BLOCK
        if len(block) != 2 or not all(isinstance(extent, int) and extent > 0 for extent in block):
            raise ConversionError(
                f"{self._folder / _CONFIG}: weight_block_size is {block!r}, expected two positive extents"
            )
        return block[0], block[1]

    def resources(self) -> dict[str, bytes]:
        paths = (self._folder / name for name in RESOURCE_FILES)
        contents = {path.name: path.read_bytes() for path in paths if path.is_file()}
        return {name: data for name, data in contents.items() if data}

    def provenance(self) -> dict[str, Any]:
        files = [{"name": name, "bytes": (self._folder / name).stat().st_size} for name in self._shards]
        return {"kind": self.kind, "name": self.name, "files": files}


def _snapshot_of(folder: Path) -> Path:
    """The main revision in a repository's folder of the Hub's cache; any other folder is itself."""
    snapshots, main = folder / _SNAPSHOTS, folder / "refs" / "main"
    if not folder.resolve().name.startswith(_CACHE_PREFIX) or not snapshots.is_dir():
        return folder
    revisions = sorted(path.name for path in snapshots.iterdir() if path.is_dir())
    revision = main.read_text(encoding="utf-8").strip() if main.is_file() else ""
    if revision not in revisions:
        raise ConversionError(
            f"{folder}: no snapshot of its main revision {revision or '(not stated)'}; found {', '.join(revisions) or 'none'}; "
            "pass the path of one snapshot"
        )
    return snapshots / revision


def _describe(stored: StoredTensor) -> SourceTensor:
    if stored.dtype not in _ENCODINGS:
        raise ConversionError(
            f"{stored.file}: tensor {stored.name!r} holds {stored.dtype} words; expected one of {', '.join(_ENCODINGS)}"
        )
    return SourceTensor(stored.name, stored.shape, _ENCODINGS[stored.dtype], stored.rows)
