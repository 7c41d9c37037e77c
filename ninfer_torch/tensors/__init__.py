"""Quantized weights as `torch.Tensor` subclasses."""

from ninfer_torch.tensors import block_float, functions, gguf, grouped, operators, row_float, transposed
from ninfer_torch.tensors.base import NinferTensor
from ninfer_torch.tensors.codec import decode, encode, wrap_planes

__all__ = [
    "NinferTensor",
    "block_float",
    "decode",
    "encode",
    "functions",
    "gguf",
    "grouped",
    "operators",
    "row_float",
    "transposed",
    "wrap_planes",
]
