"""A GGUF file as a source of weights: tensors under Transformers' names and in its row order, blocks untouched."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from ninfer_torch.convert.gguf_file import Bytes, GgufArray, GgufFile, GgufTensor
from ninfer_torch.convert.gguf_metadata import read_config, read_resources
from ninfer_torch.convert.gguf_tables import (
    COUNTS,
    RATES,
    Architecture,
    TensorRule,
    get_architecture,
    interleaved_rows,
)
from ninfer_torch.convert.gguf_values import BLOCK_ENCODINGS, copied, decode_rows, read_values
from ninfer_torch.convert.source import SourceTensor, UnusedTensor
from ninfer_torch.errors import ConversionError

__all__ = ["GgufSource"]


class _Rows:
    """The reader of one parameter's rows: gathers them from the file and takes off what the converter added."""

    def __init__(self, file: GgufFile, tensor: GgufTensor, heads: int, shift: float) -> None:
        self.file = file
        self.tensor = tensor
        self.heads = heads
        self.shift = shift

    def blocks(self, begin: int, end: int) -> torch.Tensor:
        kind, columns = self.tensor.type, self.tensor.shape[-1]
        return copied(self._gather(begin, end)).view(-1, columns // kind.block_values * kind.block_bytes)

    def values(self, begin: int, end: int) -> torch.Tensor:
        if self.heads:
            return decode_rows(self.tensor.type, self._gather(begin, end), self.tensor.name, begin)
        values = read_values(self.file, self.tensor, begin, end)
        return values.to(torch.float32) - self.shift if self.shift else values

    def _gather(self, begin: int, end: int) -> Bytes:
        rows = self.file.rows(self.tensor)
        if not self.heads:
            return rows[begin:end]
        return rows[interleaved_rows(begin, end, self.tensor.shape[0], self.heads).numpy()]


def _join_rows(parameter: str, first: SourceTensor, second: SourceTensor) -> SourceTensor:
    """Two tensors [E, N, K] as one [E, N + N', K]; blocks stay blocks where both are of one type."""
    alike = first.encoding == second.encoding
    packed = alike and first.read_blocks is not None and second.read_blocks is not None
    shape = (first.shape[0], first.shape[1] + second.shape[1], first.shape[2])

    def values(begin: int, end: int) -> torch.Tensor:
        parts = [tensor.values(begin, end) for tensor in (first, second)]
        return torch.cat(parts if alike else [part.to(torch.float32) for part in parts], dim=1)

    def blocks(begin: int, end: int) -> torch.Tensor:
        parts = [tensor.blocks(begin, end).unflatten(0, (end - begin, -1)) for tensor in (first, second)]
        return torch.cat(parts, dim=1).flatten(0, 1)

    return SourceTensor(
        parameter,
        shape,
        first.encoding if alike else "fp32",
        values,
        blocks if packed else None,
        f"{first.origin}, {second.origin}",
    )


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
                origins, parameter = [name.format(i=layer) for name in rule.tensors], rule.parameter.format(i=layer)
                lacking = [origin for origin in origins if origin not in left]
                if not lacking:
                    left.difference_update(origins)
                    tensors[parameter] = self._parameter(rule, origins, parameter)
                elif not rule.optional:
                    missing += lacking
        model = f"a {self.architecture.name} model of {layers} layers"
        if missing:
            raise ConversionError(f"{self.name}: tensors of {model} are missing: {_listed(missing)}")
        if left:
            raise ConversionError(f"{self.name}: tensors that {model} does not have: {_listed(sorted(left))}")
        _refuse_undecodable(self.file, {unused.name for unused in self.unused})
        return tensors

    def _parameter(self, rule: TensorRule, origins: list[str], parameter: str) -> SourceTensor:
        tensors = [self._tensor(rule, self.file.tensors[origin], parameter) for origin in origins]
        if len(tensors) == 1:
            return tensors[0]
        first, second = tensors
        if len(first.shape) != 3 or second.shape != first.shape:
            raise ConversionError(
                f"{self.name}: tensors {first.origin!r} {list(first.shape)} and {second.origin!r} {list(second.shape)} "
                f"make up {parameter!r}, expected two of one shape [experts, rows, columns]"
            )
        return _join_rows(parameter, first, second)

    def _tensor(self, rule: TensorRule, tensor: GgufTensor, parameter: str) -> SourceTensor:
        heads = self._heads(rule, tensor) if rule.rotary_heads else 0
        rows = _Rows(self.file, tensor, heads, rule.shift)
        packed = tensor.type.encoding in BLOCK_ENCODINGS and len(tensor.shape) > 1 and not rule.shift
        decoded = rule.shift or (tensor.type.encoding in BLOCK_ENCODINGS and not packed)
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
        found = [self.file.tensors[unused.name] for unused in self.unused]
        factors = {tensor.name: read_values(self.file, tensor, 0, tensor.shape[0]) for tensor in found}
        return read_config(self.file, self.architecture, factors)

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
        least = 0 if key in table.zero_counts else 1
        if key in COUNTS and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ConversionError(
                f"{file.name}: metadata {prefix + key!r} is {value!r}, expected a count of at least {least}"
            )
        if key in RATES and not (isinstance(value, float) and 0 < value < math.inf):
            raise ConversionError(f"{file.name}: metadata {prefix + key!r} is {value!r}, expected a positive number")


def _unused(file: GgufFile, table: Architecture) -> tuple[UnusedTensor, ...]:
    found = [name for name in table.rope_factors if name in file.tensors]
    return tuple(UnusedTensor(name, "its rotary factors follow from rope_parameters in the config") for name in found)


def _refuse_undecodable(file: GgufFile, aside: set[str]) -> None:
    others = {name: tensor.type for name, tensor in file.tensors.items() if name not in aside}
    refused = [(name, kind) for name, kind in others.items() if not kind.encoding]
    if refused:
        lines = [f"\n  {name!r}: type {kind.number} ({kind.name}), {kind.advice}" for name, kind in refused]
        raise ConversionError(f"{file.name}: tensors of ggml types that cannot be decoded here:{''.join(lines)}")


def _listed(names: list[str], limit: int = 12) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
