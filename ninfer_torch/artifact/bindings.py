"""From a binding to a tensor: whole objects, row views, and joins of direct parts. Source: spec/container.md 6."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from ninfer_torch.artifact.records import Binding, Object, Part, TensorObject
from ninfer_torch.errors import ArtifactError, UnsupportedOperation
from ninfer_torch.tensors import NinferTensor
from ninfer_torch.tensors.stacked import stack_rows

__all__ = ["TensorStore", "bound_tensor", "dequantized_binding"]


class TensorStore(Protocol):
    """What a binding is resolved against."""

    @property
    def objects(self) -> Mapping[str, Object]: ...

    def tensor(self, object_id: str) -> Tensor: ...


@dataclass(frozen=True)
class _Run:
    """Elements [begin, end) of one object; `rows` are the whole rows they make, or None."""

    record: TensorObject
    begin: int
    end: int

    @property
    def columns(self) -> int:
        return self.record.shape[-1] if self.record.shape else 1

    @property
    def rows(self) -> tuple[int, int] | None:
        if len(self.record.shape) < 2 or self.begin % self.columns or self.end % self.columns:
            return None
        return self.begin // self.columns, self.end // self.columns

    @property
    def whole(self) -> bool:
        return self.begin == 0 and self.end == self.record.elements

    def __str__(self) -> str:
        record = self.record
        return f"elements [{self.begin}, {self.end}) of {record.id!r} ({record.format} {list(record.shape)})"


def _runs(store: TensorStore, binding: Binding) -> list[_Run]:
    """The binding's ranges in order, neighbours in one object merged."""
    if binding.object is not None:
        record = _record(store, binding.object)
        return [_Run(record, 0, record.elements)]
    merged: list[Part] = []
    for part in binding.parts:
        if merged and merged[-1].object == part.object and merged[-1].end == part.begin:
            merged[-1] = Part(part.object, merged[-1].begin, part.end)
        else:
            merged.append(part)
    return [_Run(_record(store, part.object), part.begin, part.end) for part in merged]


def _record(store: TensorStore, object_id: str) -> TensorObject:
    record = store.objects[object_id]
    if not isinstance(record, TensorObject):
        raise ArtifactError(f"object {object_id!r} is a resource, expected a tensor", kind="reference")
    return record


def bound_tensor(store: TensorStore, name: str, binding: Binding, shape: Sequence[int] | None) -> Tensor:
    """The tensor a binding means, quantized where it is stored quantized.

    A whole object has its own shape; whole rows of one K give [rows, K]; other ranges of direct objects come flat.
    `shape` reshapes and must hold as many elements (of a whole object: must be its shape). One range of one object is a
    view; several ranges of direct objects of one dtype are joined by a copy; whole rows of several objects, some of them
    quantized, are stacked without one. Raises UnsupportedOperation for anything else, and ArtifactError of kind `range`
    for another shape. `name` opens the messages.
    """
    runs = _runs(store, binding)
    tensors = [store.tensor(run.record.id) for run in runs]
    if any(isinstance(tensor, NinferTensor) for tensor in tensors):
        result = _quantized_rows(name, runs, tensors)
    else:
        result = _joined(
            name, runs, [tensor.reshape(-1)[run.begin : run.end] for run, tensor in zip(runs, tensors, strict=True)]
        )
    return _shaped(name, binding, runs, result, shape)


def _quantized_rows(name: str, runs: list[_Run], tensors: list[Tensor]) -> Tensor:
    found = "; ".join(map(str, runs))
    rows = [run.rows for run in runs]
    joinable = len({run.columns for run in runs}) == 1 and not any(run.record.format == "int32" for run in runs)
    if not joinable or not all(rows):
        raise UnsupportedOperation(
            f"{name} is no row of whole rows of one length, and some of it is quantized: {found}. Only such rows stay "
            f"packed; dequantize_parameter gives its values, tensor(object_id).dequantize() those of one object"
        )
    if len(runs) > 1:
        return stack_rows(list(zip(tensors, rows, strict=True)))
    begin, end = cast(tuple[int, int], rows[0])
    return tensors[0] if runs[0].whole else tensors[0][begin:end]


def _joined(name: str, runs: list[_Run], flat: list[Tensor]) -> Tensor:
    """Flat ranges in order; [rows, K] when all are whole rows of one K."""
    if len({tensor.dtype for tensor in flat}) > 1:
        raise UnsupportedOperation(
            f"{name} joins ranges of several formats: {'; '.join(map(str, runs))}. "
            "dequantize_parameter gives its values in one dtype"
        )
    result = flat[0] if len(flat) == 1 else torch.cat(flat)
    if all(run.rows for run in runs) and len({run.columns for run in runs}) == 1:
        return result.view(-1, runs[0].columns)
    return result


def _shaped(name: str, binding: Binding, runs: list[_Run], tensor: Tensor, shape: Sequence[int] | None) -> Tensor:
    stored = runs[0].record.shape if binding.object is not None else tuple(tensor.shape)
    wanted = stored if shape is None else tuple(shape)
    elements = math.prod(stored)
    if any(extent < 0 for extent in wanted) or (
        wanted != stored if binding.object is not None else math.prod(wanted) != elements
    ):
        raise ArtifactError(
            f"{name} has {elements} elements, stored as {list(stored)}; asked for shape {list(wanted)}", kind="range"
        )
    return tensor if tuple(tensor.shape) == wanted else tensor.view(wanted)


def dequantized_binding(
    store: TensorStore, name: str, binding: Binding, shape: Sequence[int] | None, dtype: torch.dtype
) -> Tensor:
    """The values of any binding as one dense tensor of `dtype`; shapes as in `bound_tensor`. Only the rows it touches
    are decoded.

    Raises UnsupportedOperation for integer objects, which have no values to dequantize.
    """
    runs = _runs(store, binding)
    return _shaped(name, binding, runs, _joined(name, runs, [_values(store, name, run, dtype) for run in runs]), shape)


def _values(store: TensorStore, name: str, run: _Run, dtype: torch.dtype) -> Tensor:
    tensor = store.tensor(run.record.id)
    if isinstance(tensor, NinferTensor):
        first, last = run.begin // run.columns, -(-run.end // run.columns)
        begin = first * run.columns
        rows = cast(NinferTensor, tensor[first:last])
        return rows.dequantize(dtype).reshape(-1)[run.begin - begin : run.end - begin]
    if not tensor.is_floating_point():
        raise UnsupportedOperation(f"{name} reads {run}, which holds integers; read it with parameter()")
    return tensor.reshape(-1)[run.begin : run.end].to(dtype)
