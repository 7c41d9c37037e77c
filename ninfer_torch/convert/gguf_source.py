"""A GGUF file as a source of weights: tensors under Transformers' names and in its row order, blocks untouched."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from ninfer_torch.convert.gguf_file import Bytes, GgmlType, GgufArray, GgufFile, GgufTensor
from ninfer_torch.convert.gguf_metadata import read_config, read_resources
from ninfer_torch.convert.gguf_tables import (
    COUNTS,
    RATES,
    Architecture,
    TensorRule,
    get_architecture,
    interleaved_rows,
)
from ninfer_torch.convert.source import SourceTensor, UnusedTensor
from ninfer_torch.errors import ConversionError
from ninfer_torch.kernels.reference_gguf import BLOCK_DECODERS

__all__ = ["GgufSource", "decode_rows", "read_values"]

_WORD_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
}


def _copied(rows: Bytes) -> torch.Tensor:
    """Bytes of the mapped file as a tensor of their own: the mapping is read-only and may be unaligned."""
    owned = torch.empty(rows.shape, dtype=torch.uint8)
    owned.numpy()[...] = rows
    return owned


def decode_rows(kind: GgmlType, rows: Bytes) -> torch.Tensor:
    """The values of rows of bytes of one ggml type: uint8 [n, row bytes] -> [n, values].

    Plain words keep their dtype; blocks become exact float32, registered types by the reference decoders and other
    types by the `gguf` package. Raises ConversionError for a type that neither decodes.
    """
    if kind.encoding in _WORD_DTYPES:
        return _copied(rows).view(_WORD_DTYPES[kind.encoding])
    if kind.encoding in BLOCK_DECODERS:
        blocks = _copied(rows).unflatten(-1, (-1, kind.block_bytes))
        return BLOCK_DECODERS[kind.encoding](blocks).flatten(-2)
    if not kind.encoding:
        raise ConversionError(f"ggml type {kind.number} ({kind.name}) cannot be decoded: {kind.advice}")
    if not len(rows):
        return torch.empty(0, rows.shape[1] // kind.block_bytes * kind.block_values)
    import gguf

    values = gguf.dequantize(np.array(rows), gguf.GGMLQuantizationType(kind.number))
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


def read_values(file: GgufFile, tensor: GgufTensor, begin: int, end: int) -> torch.Tensor:
    """Values [end - begin, ...] of a range of a tensor's leading axis, as stored in the file."""
    rows = file.rows(tensor)
    if len(tensor.shape) > 1:
        return decode_rows(tensor.type, rows[begin:end]).reshape(end - begin, *tensor.shape[1:])
    block = tensor.type.block_values
    first = begin // block
    values = decode_rows(tensor.type, rows[first : -(-end // block)]).flatten()
    return values[begin - first * block : end - first * block]


class _Rows:
    """The reader of one parameter's rows: gathers them from the file and takes off what the converter added."""

    def __init__(self, file: GgufFile, tensor: GgufTensor, heads: int, shift: float) -> None:
        self.file = file
        self.tensor = tensor
        self.heads = heads
        self.shift = shift

    def blocks(self, begin: int, end: int) -> torch.Tensor:
        return _copied(self._gather(begin, end))

    def values(self, begin: int, end: int) -> torch.Tensor:
        if self.heads:
            return decode_rows(self.tensor.type, self._gather(begin, end))
        values = read_values(self.file, self.tensor, begin, end)
        return values.to(torch.float32) - self.shift if self.shift else values

    def _gather(self, begin: int, end: int) -> Bytes:
        rows = self.file.rows(self.tensor)
        if not self.heads:
            return rows[begin:end]
        return rows[interleaved_rows(begin, end, self.tensor.shape[0], self.heads).numpy()]


class GgufSource:
    """A language model in one GGUF file.

    `tensors` are keyed by the state-dict names of the model class that `config().architectures` names. Opening reads
    only the header. Raises ConversionError for a file that is broken, of an unknown architecture, or holds a tensor,
    a metadata key or a tensor type whose meaning is not known here: nothing is left out silently.
    """

    kind = "gguf"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = GgufFile(path)
        self.name = self.file.name
        _refuse_rotated_basis(self.file)
        _refuse_split(self.file)
        self.architecture: Architecture = get_architecture(self.file.metadata.get("general.architecture"), self.name)
        _check_keys(self.file, self.architecture)
        self.unused: tuple[UnusedTensor, ...] = _unused(self.file, self.architecture)
        self.tensors: Mapping[str, SourceTensor] = self._match()

    def _match(self) -> dict[str, SourceTensor]:
        layers = self._count("block_count")
        if layers > len(self.file.tensors):
            found = len(self.file.tensors)
            raise ConversionError(f"{self.name}: {self._key('block_count')} is {layers}, but there are {found} tensors")
        tensors: dict[str, SourceTensor] = {}
        left = set(self.file.tensors).difference(unused.name for unused in self.unused)
        missing: list[str] = []
        for rule in self.architecture.rules:
            for layer in range(layers if rule.per_layer else 1):
                origin, parameter = rule.gguf.format(i=layer), rule.parameter.format(i=layer)
                if origin in left:
                    left.remove(origin)
                    tensors[parameter] = self._tensor(rule, self.file.tensors[origin], parameter)
                elif not rule.optional:
                    missing.append(origin)
        model = f"a {self.architecture.name} model of {layers} layers"
        if missing:
            raise ConversionError(f"{self.name}: tensors of {model} are missing: {_listed(missing)}")
        if left:
            raise ConversionError(f"{self.name}: tensors that {model} does not have: {_listed(sorted(left))}")
        _refuse_undecodable(self.file, [tensor.origin for tensor in tensors.values()])
        return tensors

    def _tensor(self, rule: TensorRule, tensor: GgufTensor, parameter: str) -> SourceTensor:
        heads = self._heads(rule, tensor) if rule.rotary_heads else 0
        rows = _Rows(self.file, tensor, heads, rule.shift)
        packed = tensor.type.encoding in BLOCK_DECODERS and len(tensor.shape) == 2 and not rule.shift
        decoded = rule.shift or (tensor.type.encoding in BLOCK_DECODERS and not packed)
        encoding = "fp32" if decoded else tensor.type.encoding
        blocks = rows.blocks if packed else None
        return SourceTensor(parameter, tensor.shape, encoding, rows.values, blocks, tensor.name)

    def _heads(self, rule: TensorRule, tensor: GgufTensor) -> int:
        stated = self._key(rule.rotary_heads) in self.file.metadata
        heads = self._count(rule.rotary_heads if stated else "attention.head_count")
        if len(tensor.shape) != 2 or tensor.shape[0] % (2 * heads):
            raise ConversionError(
                f"{self.name}: tensor {tensor.name!r} has shape {list(tensor.shape)}, expected a matrix of "
                f"{heads} heads of an even number of rows each"
            )
        return heads

    def _count(self, suffix: str) -> int:
        value = self.file.metadata[self._key(suffix)]
        if not isinstance(value, int):
            raise ConversionError(f"{self.name}: metadata {self._key(suffix)!r} is {value!r}, expected a whole number")
        return value

    def _key(self, suffix: str) -> str:
        return f"{self.architecture.name}.{suffix}"

    @cached_property
    def _config(self) -> Any:
        factors = self.file.tensors.get(self.architecture.rope_factors)
        read = partial(read_values, self.file, factors, 0, factors.shape[0]) if factors else None
        return read_config(self.file, self.architecture, read)

    def config(self) -> Any:
        """A fresh copy of the Transformers config; class, tying, rotary scaling and dtype bfloat16 are filled in.

        Raises ConversionError for settings of the file that no config can state.
        """
        return copy.deepcopy(self._config)

    def resources(self) -> dict[str, bytes]:
        """Tokenizer files by Transformers' GGUF reading, and generation_config.json with the file's special tokens."""
        return read_resources(self.file)

    def provenance(self) -> dict[str, Any]:
        """File name, bytes, architecture and, where the file states it, the model's name."""
        facts: dict[str, Any] = {
            "kind": self.kind,
            "path": self.name,
            "bytes": self.file.size,
            "architecture": self.architecture.name,
        }
        model_name = self.file.metadata.get("general.name")
        return facts | ({"name": model_name} if isinstance(model_name, str) else {})


def _refuse_rotated_basis(file: GgufFile) -> None:
    """Weights stored in a rotated basis look like any others; only the metadata tells them apart."""
    keys = [key for key in file.metadata if "hadamard" in key.lower()]
    if keys:
        raise ConversionError(
            f"{file.name}: the weights are stored behind a Hadamard transform, which this version does not import "
            f"(metadata {_listed(keys)})"
        )


def _refuse_split(file: GgufFile) -> None:
    parts = file.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise ConversionError(
            f"{file.name}: one of {parts} parts of a split model, expected one file; join the parts with "
            "llama-gguf-split --merge"
        )


def _check_keys(file: GgufFile, table: Architecture) -> None:
    prefix = f"{table.name}."
    found = {key.removeprefix(prefix) for key in file.metadata if key.startswith(prefix)}
    missing = [prefix + key for key in table.required if key not in found]
    if missing:
        raise ConversionError(f"{file.name}: metadata that a {table.name} model needs is missing: {_listed(missing)}")
    unknown = sorted(prefix + key for key in found.difference(table.required, table.understood))
    if unknown:
        raise ConversionError(
            f"{file.name}: metadata whose effect on a {table.name} model is unknown to this version: {_listed(unknown)}"
        )
    arrays = [prefix + key for key in sorted(found) if isinstance(file.metadata[prefix + key], GgufArray)]
    if arrays:
        raise ConversionError(f"{file.name}: metadata {_listed(arrays)} is stated per layer, expected one value")
    for key in sorted(found):
        value = file.metadata[prefix + key]
        if key in COUNTS and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConversionError(
                f"{file.name}: metadata {prefix + key!r} is {value!r}, expected a count of at least 1"
            )
        if key in RATES and not (isinstance(value, float) and 0 < value < math.inf):
            raise ConversionError(f"{file.name}: metadata {prefix + key!r} is {value!r}, expected a positive number")


def _unused(file: GgufFile, table: Architecture) -> tuple[UnusedTensor, ...]:
    if table.rope_factors not in file.tensors:
        return ()
    return (UnusedTensor(table.rope_factors, "its rotary factors follow from rope_parameters in the config"),)


def _refuse_undecodable(file: GgufFile, names: list[str]) -> None:
    refused = [(name, file.tensors[name].type) for name in names if not file.tensors[name].type.encoding]
    if refused:
        lines = [f"\n  {name!r}: type {kind.number} ({kind.name}), {kind.advice}" for name, kind in refused]
        raise ConversionError(f"{file.name}: tensors of ggml types that cannot be decoded here:{''.join(lines)}")


def _listed(names: list[str], limit: int = 12) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
