"""aten operators on quantized weights: views and gathers of rows, copies, moves and comparison. One table, one row each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from ninfer_torch.errors import LayoutError, UnsupportedOperation
from ninfer_torch.layouts import join_rows
from ninfer_torch.tensors import functions
from ninfer_torch.tensors.base import OPERATORS, NinferTensor, refusal
from ninfer_torch.tensors.packed import PackedTensor
from ninfer_torch.tensors.staged import move
from ninfer_torch.tensors.transposed import TransposedTensor

aten = torch.ops.aten


def _each_plane(
    weight: Any, apply: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype | None = None
) -> torch.Tensor:
    if isinstance(weight, TransposedTensor):
        return TransposedTensor(weight.weight.map_planes(apply, dtype=dtype))
    return weight.map_planes(apply, dtype=dtype)


def _view(func: Any, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
    """Tell functionalization that `out` aliases the first argument."""
    return return_and_correct_aliasing(func, args, {}, out)


def _detach(func: Any, weight: Any) -> torch.Tensor:
    return _view(func, (weight,), _each_plane(weight, lambda plane: plane.detach()))


def _clone(func: Any, weight: Any, *, memory_format: Any = None) -> torch.Tensor:
    return _each_plane(weight, lambda plane: plane.clone(memory_format=torch.contiguous_format))


def _to_copy(
    func: Any,
    weight: NinferTensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,
    **_: Any,
) -> torch.Tensor:
    only_cast = dtype not in (
        None,
        weight.dtype,
    )  # words are the same in every compute dtype: share what stays in place
    return _each_plane(weight, lambda plane: move(plane, device, non_blocking=non_blocking, copy=not only_cast), dtype)


def _copy(func: Any, target: Any, source: Any, non_blocking: bool = False) -> torch.Tensor:
    if not (isinstance(target, NinferTensor) and isinstance(source, NinferTensor)):
        raise refusal(
            "copy_ between quantized and dense tensors", (target, source), "quantize(w, format) or dequantize() first"
        )
    if target.structure != source.structure:
        raise UnsupportedOperation(f"copy_ needs one format and geometry, found {source!r} into {target!r}")
    for mine, theirs in zip(target.planes.values(), source.planes.values(), strict=True):
        mine.copy_(theirs, non_blocking)
    return target


def _empty_like(func: Any, weight: NinferTensor, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return _each_plane(weight, lambda plane: torch.empty_like(plane, device=device), dtype)


def _slice(func: Any, weight: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> torch.Tensor:
    if isinstance(weight, TransposedTensor):
        raise refusal("slicing a transposed weight", (weight.weight,), "slice before the transpose")
    dim, extent = dim % weight.dim(), weight.shape[dim]
    begin, end, step = slice(start, end).indices(extent)[0:2] + (step,)
    count = max(end - begin, 0)
    if step != 1:
        raise refusal(f"a slice of step {step}", (weight,), "index_select the rows")
    shape = (*weight.shape[:dim], count, *weight.shape[dim + 1 :])
    if count == extent:
        out = _each_plane(weight, lambda plane: plane.detach())
    elif dim == weight.dim() - 1:
        out = _columns(weight, begin, begin + count, shape)
    elif dim == 0:
        inner = math.prod(weight.shape[1:-1])
        out = weight.take_rows(begin * inner, (begin + count) * inner, shape)
    else:
        raise refusal(f"a slice along axis {dim} of {weight.dim()}", (weight,), "select a matrix of the bank first")
    return _view(func, (weight, dim, start, end, step), out)


def _columns(weight: NinferTensor, begin: int, end: int, shape: Sequence[int]) -> NinferTensor:
    if begin >= end:
        raise LayoutError(f"columns [{begin}, {end}) of a {', '.join(weight.formats)} weight are empty")
    return weight.take_columns(begin, end, shape)


def _split(func: Any, weight: NinferTensor, sizes: int | list[int], dim: int = 0) -> list[torch.Tensor]:
    extent = weight.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, extent - begin) for begin in range(0, extent, sizes)]
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    return [aten.slice.Tensor(weight, dim, begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]


def _select(func: Any, weight: NinferTensor, dim: int, index: int) -> torch.Tensor:
    if dim % weight.dim() != 0 or weight.dim() < 3:
        raise refusal(
            f"select({dim}, {index}) of rank {weight.dim()}", (weight,), "use w[i:i+1], or F.embedding for rows"
        )
    if not -weight.shape[0] <= index < weight.shape[0]:
        raise IndexError(f"index {index} is out of range for a bank of {weight.shape[0]}")
    index, inner = index % weight.shape[0], math.prod(weight.shape[1:-1])
    out = weight.take_rows(index * inner, (index + 1) * inner, weight.shape[1:])
    return _view(func, (weight, dim, index), out)


def _unbind(func: Any, weight: NinferTensor, dim: int = 0) -> list[torch.Tensor]:
    return [aten.select.int(weight, dim, index) for index in range(weight.shape[dim])]


def _reshape(func: Any, weight: NinferTensor, size: Sequence[int]) -> torch.Tensor:
    known = math.prod(extent for extent in size if extent != -1)
    shape = tuple(weight.numel() // known if extent == -1 else extent for extent in size)
    if len(shape) < 2 or shape[-1] != weight.shape[-1] or math.prod(shape) != weight.numel():
        raise refusal(
            f"view({list(size)}) of {list(weight.shape)}", (weight,), "only leading axes may be viewed; rows stay whole"
        )
    return _view(func, (weight, size), weight.with_shape(shape))


def _index_select(func: Any, weight: NinferTensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    if dim % weight.dim() != 0:
        raise refusal(f"index_select along axis {dim}", (weight,), "only rows may be gathered")
    inner = math.prod(weight.shape[1:-1])
    if index.numel() and not bool(((index >= 0) & (index < weight.shape[0])).all()):
        raise IndexError(f"index_select: indices must lie in [0, {weight.shape[0]})")
    rows = (index.reshape(-1, 1) * inner + torch.arange(inner, device=index.device)).reshape(-1)
    return weight.gather_rows(rows, (index.numel(), *weight.shape[1:]))


def _index(func: Any, weight: NinferTensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    if len(indices) != 1 or indices[0] is None or indices[0].dim() != 1:
        raise refusal("indexing other than by one vector of rows", (weight,))
    index = indices[0]
    if index.dtype == torch.bool:
        index = index.nonzero().squeeze(1)
    return _index_select(func, weight, 0, torch.where(index < 0, index + weight.shape[0], index))


def _cat(func: Any, weights: Sequence[Any], dim: int = 0) -> torch.Tensor:
    first = weights[0]
    alike = isinstance(first, PackedTensor) and all(
        isinstance(w, PackedTensor) and w.format == first.format and w.shape[1:] == first.shape[1:] for w in weights
    )
    if not alike or dim % first.dim() != 0:
        raise refusal("cat other than of the rows of one format and width", weights, "stack_rows joins any formats")
    parts = [(w.call[0], w.geometry) for w in weights]
    shape = (sum(w.shape[0] for w in weights), *first.shape[1:])
    return first.over(*join_rows(first.format, parts), shape)


def _stack(func: Any, weights: Sequence[Any], dim: int = 0) -> torch.Tensor:
    if dim != 0:
        raise refusal(f"stack along axis {dim}", weights, "stack along axis 0")
    joined = _cat(func, weights)
    return aten.view.default(joined, [len(weights), *weights[0].shape])


def _equal(func: Any, first: Any, second: Any) -> bool:
    """Same format, same words. A quantized and a dense tensor are never equal."""
    return isinstance(first, NinferTensor) and isinstance(second, NinferTensor) and first.equal_words(second)


def _is_pinned(func: Any, weight: NinferTensor, device: Any = None) -> bool:
    return all(plane.is_pinned() for plane in weight.planes.values())


def _pin_memory(func: Any, weight: NinferTensor, device: Any = None) -> torch.Tensor:
    return _each_plane(weight, lambda plane: plane.pin_memory())


def _linear(func: Any, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    return functions.linear(x, weight, bias)


def _embedding(func: Any, weight: NinferTensor, ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return functions.embedding(ids, weight)


OPERATORS.update(
    {
        aten.detach.default: _detach,
        aten.alias.default: _detach,
        aten.clone.default: _clone,
        aten._to_copy.default: _to_copy,
        aten.copy_.default: _copy,
        aten.empty_like.default: _empty_like,
        aten.slice.Tensor: _slice,
        aten.split.Tensor: _split,
        aten.split_with_sizes.default: _split,
        aten.select.int: _select,
        aten.unbind.int: _unbind,
        aten.view.default: _reshape,
        aten._unsafe_view.default: _reshape,
        aten.index_select.default: _index_select,
        aten.index.Tensor: _index,
        aten.cat.default: _cat,
        aten.stack.default: _stack,
        aten.equal.default: _equal,
        aten.is_pinned.default: _is_pinned,
        aten._pin_memory.default: _pin_memory,
        aten.linear.default: _linear,
        aten.embedding.default: _embedding,
    }
)
