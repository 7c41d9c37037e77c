"""What a converter reads: named tensors whose rows are handed out on demand.

A source speaks the names of the target model's state dict. Where its files use other names, row orders or number types,
the source translates; everything right of it sees `SourceTensor`s only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from ninfer_torch.errors import ConversionError

__all__ = ["RowReader", "Source", "SourceTensor", "UnusedTensor"]

RowReader = Callable[[int, int], torch.Tensor]
"""(begin, end) -> the rows [begin, end) of the leading axis."""


class UnusedTensor(NamedTuple):
    """A tensor of the source's files that no parameter takes, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a source, read by ranges of its leading axis; nothing is held in memory.

    `encoding` says what the source's words are: a torch-like name for plain numbers (`bf16`, `fp16`, `fp32`, `fp64`,
    `int32`, ...), the registered format name of a GGUF block type (`gguf_q4_k`), or the ggml name of another block type
    that can be decoded (`q4_1`). `read_values` yields numbers; `read_blocks` is given exactly when `encoding` is a
    registered GGUF format and yields block rows, byte for byte. `origin` is the tensor's name in its file, where that
    differs from `name`, the state-dict name.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    read_values: RowReader
    read_blocks: RowReader | None = None
    origin: str = ""

    @property
    def rows(self) -> int:
        """Extent of the leading axis; a scalar counts as one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_values(self) -> int:
        """Values per row: the product of all axes but the first."""
        return math.prod(self.shape[1:])

    def values(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) as numbers: the source's own dtype for plain words, exact float32 for decoded blocks.

        Shape [end - begin, *shape[1:]]; a scalar gives its one value as shape []. Raises ConversionError for a range
        outside the tensor or a reader that breaks this promise.
        """
        result = self._read(self.read_values, begin, end)
        expected = (end - begin, *self.shape[1:]) if self.shape else ()
        if tuple(result.shape) != expected:
            raise ConversionError(
                f"tensor {self.name!r}, rows [{begin}, {end}): read {list(result.shape)}, expected {list(expected)}"
            )
        return result

    def blocks(self, begin: int, end: int) -> torch.Tensor:
        """Rows [begin, end) as the source's encoded bytes, uint8 [end - begin, row bytes].

        Raises ConversionError where the tensor holds no registered block type, or for a range outside the tensor.
        """
        if self.read_blocks is None:
            raise ConversionError(
                f"tensor {self.name!r} is stored as {self.encoding}, which has no registered block rows to copy"
            )
        return self._read(self.read_blocks, begin, end)

    def _read(self, reader: RowReader, begin: int, end: int) -> torch.Tensor:
        if not 0 <= begin <= end <= self.rows:
            raise ConversionError(f"tensor {self.name!r}: rows [{begin}, {end}) lie outside its {self.rows} rows")
        return reader(begin, end)


@runtime_checkable
class Source(Protocol):
    """A model's weights, config and small files, as a converter wants them."""

    @property
    def kind(self) -> str:
        """Short name of the kind of source: `huggingface`, `gguf`."""

    @property
    def name(self) -> str:
        """A name for people: the folder's or file's own name, without its path."""

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """Every tensor the source offers, by the state-dict name of the target model class."""

    @property
    def unused(self) -> Sequence[UnusedTensor]:
        """Tensors of the files that the source itself sets aside; together with `tensors` these are all there are."""

    def config(self) -> Any:
        """The Transformers config of the model, `architectures` filled in."""

    def resources(self) -> dict[str, bytes]:
        """Small files that belong to the model, by file name: tokenizer, chat template, generation config..."""

    def provenance(self) -> dict[str, Any]:
        """JSON-serialisable facts about where the weights come from, without any private path."""
