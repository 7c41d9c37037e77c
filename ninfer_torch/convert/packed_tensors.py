"""NinferTensors as source tensors: their words where an object of the same format can take them, else their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch

from ninfer_torch.convert.source import InputFold, RowReader, SourceTensor, WordReader
from ninfer_torch.formats import BlockFloatFormat, GgufFormat, get_format
from ninfer_torch.layouts import block_scale_rows
from ninfer_torch.tensors import NinferTensor, PackedTensor
from ninfer_torch.tensors.transformed import TransformedInput

__all__ = ["DIRECT_ENCODINGS", "FOLD_DTYPES", "packed_source"]

DIRECT_ENCODINGS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.bool: "bool",
}
"""Encoding of the numbers of a plain tensor. Eight-bit words are somebody's quantization, not numbers."""

FOLD_DTYPES: Mapping[str, torch.dtype] = {"input_columns": torch.int32, "hadamard_signs": torch.bfloat16}
"""A transform's vector as an artifact stores it, by its role."""

Load = Callable[[], NinferTensor]


def packed_source(name: str, load: Load, origin: str = "", activation_divisor: float | None = None) -> SourceTensor:
    """A weight [N, K], or a bank of them, as `load` gives it each time that rows are read; words and values as they are.

    A weight of one format offers its words under the format's name; so does one of one format behind a transform of its
    inputs, which its `fold` states. One that is composed of several formats only has values, those of the plain weight. An
    nvfp4 weight of more than one divisor has values, and as a bank its matrices as `members`.
    """
    whole = load()
    shape = tuple(whole.shape)
    weight, fold = whole, None
    if isinstance(whole, TransformedInput) and isinstance(whole.weight, PackedTensor):
        weight, fold = whole.weight, InputFold(whole.role, whole.vector.cpu().to(FOLD_DTYPES[whole.role]))

    def values(begin: int, end: int) -> torch.Tensor:
        return _rows(load(), begin, end).dequantize().detach().cpu()

    def words(begin: int, end: int) -> tuple[torch.Tensor, ...]:
        rows = _rows(load(), begin, end)
        stored = rows.weight if isinstance(rows, TransformedInput) else rows
        return tuple(word.cpu() for word in _words(cast(PackedTensor, stored)))

    def blocks(begin: int, end: int) -> torch.Tensor:
        return words(begin, end)[0]

    divisors = _divisors(weight)
    if not isinstance(weight, PackedTensor):
        return SourceTensor(name, shape, f"composed {'+'.join(weight.formats)}", values, origin=origin)
    if len(divisors) > 1:
        members = _matrices(name, load, origin, activation_divisor)
        if members and fold is None:
            return SourceTensor(
                name, shape, weight.format, values, None, origin, words, None, activation_divisor, members
            )
        return SourceTensor(name, shape, f"{weight.format} of {len(divisors)} divisors", values, origin=origin)
    is_blocks = isinstance(get_format(weight.format), GgufFormat)
    read_blocks: RowReader | None = blocks if is_blocks else None
    read_words: WordReader | None = None if is_blocks else words
    divisor = divisors[0] if divisors else None
    return SourceTensor(
        name, shape, weight.format, values, read_blocks, origin, read_words, divisor, activation_divisor, fold=fold
    )


def _matrices(name: str, load: Load, origin: str, activation_divisor: float | None) -> tuple[SourceTensor, ...]:
    """The matrices of an nvfp4 bank [E, N, K], each with its divisor; none where a divisor is not that of whole matrices
    of one expert.
    """
    weight = cast(PackedTensor, load())
    geometry = weight.geometry
    run = geometry.parent_rows // geometry.divisors
    if weight.dim() != 3 or weight.shape[1] % run or geometry.row_begin % run:
        return ()

    def matrix(index: int) -> Load:
        return lambda: load().take_rows(index * run, (index + 1) * run, (run, weight.shape[-1]))

    return tuple(
        packed_source(f"{name}[{index}]", matrix(index), origin, activation_divisor)
        for index in range(weight.shape[0] * weight.shape[1] // run)
    )


def _rows(weight: NinferTensor, begin: int, end: int) -> NinferTensor:
    return cast(NinferTensor, weight.detach()[begin:end])


def _words(weight: PackedTensor) -> tuple[torch.Tensor, ...]:
    """The words of `EncodedRows` for a weight of one format."""
    planes, format, geometry, _, _ = weight.call
    if isinstance(get_format(format), BlockFloatFormat):
        codes, scales, _ = block_scale_rows(planes, geometry)
        return codes, scales
    return tuple(planes)


def _divisors(weight: NinferTensor) -> list[float]:
    """The different divisors of an nvfp4 weight; empty for another format."""
    if not isinstance(weight, PackedTensor) or not isinstance(get_format(weight.format), BlockFloatFormat):
        return []
    planes, _, geometry, _, _ = weight.call
    run = geometry.parent_rows // geometry.divisors
    first, last = geometry.row_begin // run, -(-(geometry.row_begin + geometry.rows) // run)
    return planes[2][first:last].unique().tolist()
