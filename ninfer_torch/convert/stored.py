"""The weights in a file or folder, whatever its kind, as rows of numbers under logical names."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ninfer_torch.artifact.reader import Artifact, open_artifact
from ninfer_torch.artifact.schema import Binding, Part, TensorObject
from ninfer_torch.convert.gguf_file import GGML_TYPES
from ninfer_torch.convert.matching import match_source
from ninfer_torch.convert.pipeline import open_source
from ninfer_torch.convert.source import Source, SourceTensor
from ninfer_torch.errors import ConversionError
from ninfer_torch.formats import FORMATS
from ninfer_torch.layouts import encoded_bytes
from ninfer_torch.models.generic import plan_model
from ninfer_torch.tensors import NinferTensor

__all__ = ["StoredModel", "StoredWeight", "open_stored"]

_PLAIN_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1}
_BLOCKS = {kind.encoding: kind for kind in GGML_TYPES.values() if kind.encoding}


@dataclass(frozen=True)
class StoredWeight:
    """One parameter as a matrix: `read(begin, end)` gives rows [begin, end) as float32 [rows, columns].

    A vector or scalar is one row. `formats` are the formats it is stored in, `bytes` what it takes, None where that is not
    known of a weight that several objects make up; two names with one `identity` are the same weight.
    """

    identity: Hashable
    rows: int
    columns: int
    formats: tuple[str, ...]
    bytes: float | None
    read: Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class StoredModel:
    """All weights of a model by logical name. `source` is None for an artifact; `formats` are bytes by format where
    they are not the sums over `weights`.
    """

    path: Path
    name: str
    weights: Mapping[str, StoredWeight]
    source: Source | None = None
    formats: Mapping[str, float] | None = None

    def bytes_by_format(self) -> dict[str, float]:
        """Bytes of all weights per format, largest first; a weight of many names counts once."""
        if self.formats is not None:
            return dict(self.formats)
        distinct = {weight.identity: weight for weight in self.weights.values()}
        table: dict[str, float] = {}
        for weight in distinct.values():
            for format in weight.formats:
                table[format] = table.get(format, 0.0) + (weight.bytes or 0.0) / len(weight.formats)
        return dict(sorted(table.items(), key=lambda item: -item[1]))


def open_stored(path: str | os.PathLike[str], *, translated: bool = False) -> StoredModel:
    """The weights at a path: a `.ninfer` file, or whatever `open_source` takes. Only headers are read.

    An artifact's weights go by the names it binds, with `translated` by those of its Transformers class, as a checkpoint's
    do. Raises ConversionError for anything else, and what the file's reader raises.
    """
    path = Path(path)
    if not path.exists():
        raise ConversionError(f"{path}: no such file or folder")
    if path.is_file() and path.suffix.lower() != ".gguf" and not translated:
        artifact = open_artifact(path)
        weights = {name: _bound_weight(artifact, name, binding) for name, binding in artifact.bindings.items()}
        return StoredModel(path, path.name, weights)
    source = open_source(path)
    matched = match_source(plan_model(source.config()), source)
    weights = {name: _source_weight(tensor) for name, tensor in matched.tensors.items()}
    if translated:
        return StoredModel(path, source.name, weights, formats=open_stored(path).bytes_by_format())
    return StoredModel(path, source.name, weights, source)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (1, math.prod(shape))


def _source_weight(tensor: SourceTensor) -> StoredWeight:
    rows, columns = _matrix(tensor.shape)
    per_index = math.prod(tensor.shape[1:-1])

    def read(begin: int, end: int) -> torch.Tensor:
        if len(tensor.shape) < 2:
            return tensor.values(0, tensor.rows).to(torch.float32).reshape(1, columns)[begin:end]
        first, last = begin // per_index, -(-end // per_index)
        values = tensor.values(first, last).reshape(-1, columns)
        return values[begin - first * per_index : end - first * per_index].to(torch.float32)

    return StoredWeight(tensor.name, rows, columns, (tensor.encoding,), _source_bytes(tensor, rows, columns), read)


def _source_bytes(tensor: SourceTensor, rows: int, columns: int) -> float | None:
    if tensor.encoding in _PLAIN_BYTES:
        return _PLAIN_BYTES[tensor.encoding] * rows * columns
    if tensor.encoding in _BLOCKS:
        block = _BLOCKS[tensor.encoding]
        return rows * columns // block.block_values * block.block_bytes
    return encoded_bytes(tensor.encoding, (rows, columns)) if tensor.encoding in FORMATS else None


def _bound_weight(artifact: Artifact, name: str, binding: Binding) -> StoredWeight:
    parts = binding.parts
    if binding.object is not None:
        record = _record(artifact, name, binding.object)
        parts = (Part(binding.object, 0, math.prod(record.shape)),)
    records = [_record(artifact, name, part.object) for part in parts]
    widths = {record.shape[-1] if len(record.shape) > 1 else 0 for record in records}
    total = sum(part.end - part.begin for part in parts)
    columns = widths.pop() if len(widths) == 1 else 0
    if not columns or any(part.begin % columns or part.end % columns for part in parts):
        columns = total
    size = sum(
        record.bytes * (part.end - part.begin) / math.prod(record.shape)
        for record, part in zip(records, parts, strict=True)
    )

    def read(begin: int, end: int) -> torch.Tensor:
        pieces, position = [], 0
        for part in parts:
            low = max(begin * columns, position) - position
            high = min(end * columns, position + part.end - part.begin) - position
            if low < high:
                pieces.append(_elements(artifact, part.object, part.begin + low, part.begin + high))
            position += part.end - part.begin
        return torch.cat(pieces).view(end - begin, columns)

    formats = tuple(dict.fromkeys(record.format for record in records))
    return StoredWeight(parts, total // columns, columns, formats, size, read)


def _record(artifact: Artifact, name: str, object_id: str) -> TensorObject:
    record = artifact.objects[object_id]
    if not isinstance(record, TensorObject):
        raise ConversionError(f"{artifact.path.name}: parameter {name!r} is bound to the resource {object_id!r}")
    return record


def _elements(artifact: Artifact, object_id: str, begin: int, end: int) -> torch.Tensor:
    """Elements [begin, end) of an object in C order, float32; of a quantized one whole rows are decoded."""
    tensor = artifact.tensor(object_id)
    if not isinstance(tensor, NinferTensor):
        return tensor.reshape(-1)[begin:end].to(torch.float32)
    columns = tensor.shape[-1]
    first, last = begin // columns, -(-end // columns)
    values = tensor[first:last].dequantize().reshape(-1)
    return values[begin - first * columns : end - first * columns]
