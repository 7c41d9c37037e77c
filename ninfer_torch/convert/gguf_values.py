"""Numbers out of the words of a GGUF file: plain words, registered blocks, ternary blocks and what `gguf` decodes."""

from __future__ import annotations

import numpy as np
import torch

from ninfer_torch.convert.encoded import ternary_codes
from ninfer_torch.convert.gguf_file import Bytes, GgmlType, GgufFile, GgufTensor
from ninfer_torch.errors import ConversionError
from ninfer_torch.kernels.packing import unpack_lanes
from ninfer_torch.kernels.reference_gguf import BLOCK_DECODERS

__all__ = ["BLOCK_ENCODINGS", "copied", "decode_rows", "read_values"]

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

_TERNARY_SCALES = {"pq2_0": (0, 2), "ptq1_0": (26, 28)}
"""Where in a block its binary16 scale lies (spec/layouts.md 8.2)."""

BLOCK_ENCODINGS = frozenset([*BLOCK_DECODERS, *_TERNARY_SCALES])
"""Encodings whose blocks `import_encoded` moves whole."""


def copied(rows: Bytes) -> torch.Tensor:
    """Bytes of the mapped file as a tensor of their own: the mapping is read-only and may be unaligned."""
    owned = torch.empty(rows.shape, dtype=torch.uint8)
    owned.numpy()[...] = rows
    return owned


def decode_rows(kind: GgmlType, rows: Bytes, name: str = "", first_row: int = 0) -> torch.Tensor:
    """The values of rows of bytes of one ggml type: uint8 [n, row bytes] -> [n, values].

    Plain words keep their dtype; blocks become exact float32, registered types by the reference decoders and other
    types by the `gguf` package. `name` and `first_row` say in messages which rows of which tensor these are. Raises
    ConversionError for a type that none of them decodes, and for a code that is not ternary in a ternary block.
    """
    if kind.encoding in _WORD_DTYPES:
        return copied(rows).view(_WORD_DTYPES[kind.encoding])
    if kind.encoding in BLOCK_ENCODINGS:
        blocks = copied(rows).unflatten(-1, (-1, kind.block_bytes))
        if kind.encoding in _TERNARY_SCALES:
            return _decode_ternary(kind.encoding, blocks, name, first_row)
        return BLOCK_DECODERS[kind.encoding](blocks).flatten(-2)
    if not kind.encoding:
        raise ConversionError(f"ggml type {kind.number} ({kind.name}) cannot be decoded: {kind.advice}")
    if not len(rows):
        return torch.empty(0, rows.shape[1] // kind.block_bytes * kind.block_values)
    import gguf

    values = gguf.dequantize(np.array(rows), gguf.GGMLQuantizationType(kind.number))
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


def _decode_ternary(encoding: str, blocks: torch.Tensor, name: str, first_row: int) -> torch.Tensor:
    begin, end = _TERNARY_SCALES[encoding]
    scales = blocks[..., begin:end].contiguous().view(torch.float16).to(torch.float32)
    if encoding == "ptq1_0":
        codes = ternary_codes(blocks)
    else:
        words = unpack_lanes(blocks[..., end:], 2)
        _refuse_code_3(words, name, first_row)
        codes = words.to(torch.int8) - 1
    return (codes.to(torch.float32) * scales).flatten(-2)


def _refuse_code_3(words: torch.Tensor, name: str, first_row: int) -> None:
    found = (words == 3).nonzero()
    if len(found):
        row, block, lane = found[0].tolist()
        column = block * words.shape[-1] + lane
        raise ConversionError(f"tensor {name!r}, row {first_row + row}, column {column}: code 3, which is not ternary")


def read_values(file: GgufFile, tensor: GgufTensor, begin: int, end: int) -> torch.Tensor:
    """Values [end - begin, ...] of a range of a tensor's leading axis, as stored in the file."""
    rows = file.rows(tensor)
    if len(tensor.shape) > 1:
        return decode_rows(tensor.type, rows[begin:end], tensor.name, begin).reshape(end - begin, *tensor.shape[1:])
    block = tensor.type.block_values
    first = begin // block
    values = decode_rows(tensor.type, rows[first : -(-end // block)], tensor.name, first).flatten()
    return values[begin - first * block : end - first * block]
