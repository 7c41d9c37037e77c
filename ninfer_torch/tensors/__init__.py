"""Quantized weights as `torch.Tensor` subclasses."""

from ninfer_torch.tensors import block_float, direct, functions, gguf, grouped, operators, row_float, transposed
from ninfer_torch.tensors.base import NinferTensor
from ninfer_torch.tensors.codec import decode, encode, wrap_planes
from ninfer_torch.tensors.packed import PackedTensor
from ninfer_torch.tensors.stacked import StackedRows, interleave_rows, stack_rows
from ninfer_torch.tensors.transformed import TransformedInput, transform_input

__all__ = [
    "NinferTensor",
    "PackedTensor",
    "StackedRows",
    "TransformedInput",
    "block_float",
    "decode",
    "direct",
    "encode",
    "functions",
    "gguf",
    "grouped",
    "interleave_rows",
    "operators",
    "row_float",
    "stack_rows",
    "transform_input",
    "transposed",
    "wrap_planes",
]
