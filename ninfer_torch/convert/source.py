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

__all__ = ["EncodedRows", "InputFold", "RowReader", "Source", "SourceTensor", "UnusedTensor", "WordReader"]

RowReader = Callable[[int, int], torch.Tensor]
"""(begin, end) -> the rows [begin, end) of the leading axis."""

WordReader = Callable[[int, int], tuple[torch.Tensor, ...]]
"""(begin, end) -> the words of the rows [begin, end): one tensor per kind of word, each with one entry per row."""


class UnusedTensor(NamedTuple):
    """A tensor of the source's files that no parameter takes, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class EncodedRows:
    """Complete rows of an encoded matrix, as the words of their source; row r of every tensor in `words` is row r.

    | Encoding                       | words                                                                        |
    |--------------------------------|------------------------------------------------------------------------------|
    | `gguf_*`, `pq2_0`, `ptq1_0`    | blocks uint8 [N, row bytes], as the rows lie in a GGUF file                  |
    | `nvfp4`                        | codes uint8 [N, K/2], low nibble first; scales uint8 E4M3FN [N, K/16], natural order |
    | `fp8_e4m3fn_row_bf16`          | codes uint8 E4M3FN [N, K]; scales bfloat16 [N], multipliers                  |
    | other registered formats       | the planes of its layout                                                     |

    `divisors` float32 [d] belongs to nvfp4: one per run of N / d rows. `name` and `first_row` say in messages which
    rows of which tensor these are. `columns` is K where it is known; planes with padding do not tell.
    """

    encoding: str
    words: tuple[torch.Tensor, ...]
    divisors: torch.Tensor | None = None
    name: str = ""
    first_row: int = 0
    columns: int | None = None

    @property
    def rows(self) -> int:
        """Rows N of the matrix, or of this part of it."""
        return self.words[0].shape[0]

    def place(self, row: int) -> str:
        """Where a row lies, for messages."""
        where = f"row {self.first_row + row}"
        return f"tensor {self.name!r}, {where}" if self.name else where


@dataclass(frozen=True, eq=False)
class InputFold:
    """What the inputs of a matrix must go through before its words multiply them (spec/container.md 7).

    `role` names the auxiliary of a use that says so, `vector` [K] is its value: int32 `input_columns` or bfloat16
    `hadamard_signs`.
    """

    role: str
    vector: torch.Tensor


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a source, read by ranges of its leading axis; nothing is held in memory.

    `encoding` says what the source's words are: a torch-like name for plain numbers (`bf16`, `fp16`, `fp32`, `fp64`,
    `int32`, ...), the registered format name of a GGUF block type (`gguf_q4_k`), the ggml name of another block type
    that can be decoded (`q4_1`), or an encoding of `EncodedRows`. `read_values` yields numbers; `read_blocks` is given
    exactly when the words are GGUF blocks that can be copied and yields block rows, byte for byte; `read_words` is given
    for the other encodings of `EncodedRows`. `divisor` and `activation_divisor` are those of an nvfp4 matrix, the latter
    where the source states one: exact float32 numbers by which values are divided, whatever the source's own sense is.
    `origin` is the tensor's name in its file, where that differs from `name`, the state-dict name. `members` are the
    matrices of a bank [E, N, K] in row order, where the source stores each by itself. `fold` is given
    where the words are not those of the values: they are stored for transformed inputs.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    read_values: RowReader
    read_blocks: RowReader | None = None
    origin: str = ""
    read_words: WordReader | None = None
    divisor: float | None = None
    activation_divisor: float | None = None
    members: tuple[SourceTensor, ...] = ()
    fold: InputFold | None = None

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
        """Rows [begin, end) as the source's encoded bytes, uint8 [end - begin, row bytes]; of a bank [E, N, K] the N
        rows of each matrix.

        Raises ConversionError where the tensor holds no registered block type, or for a range outside the tensor.
        """
        if self.read_blocks is None:
            raise ConversionError(
                f"tensor {self.name!r} is stored as {self.encoding}, which has no registered block rows to copy"
            )
        return self._read(self.read_blocks, begin, end)

    @property
    def encoded_rows(self) -> bool:
        """Whether `encoded` has words to give."""
        return self.read_blocks is not None or self.read_words is not None

    def encoded(self, begin: int, end: int) -> EncodedRows:
        """Rows [begin, end) as encoded words, for `import_encoded`.

        Raises ConversionError where the tensor holds plain numbers or an encoding that only decodes, or for a range
        outside the tensor.
        """
        if self.read_words is None:
            words: tuple[torch.Tensor, ...] = (self.blocks(begin, end),)
        else:
            self._check_range(begin, end)
            words = self.read_words(begin, end)
        divisors = None if self.divisor is None else torch.tensor([self.divisor], dtype=torch.float32)
        return EncodedRows(self.encoding, words, divisors, self.origin or self.name, begin, self.shape[-1])

    def _read(self, reader: RowReader, begin: int, end: int) -> torch.Tensor:
        self._check_range(begin, end)
        return reader(begin, end)

    def _check_range(self, begin: int, end: int) -> None:
        if not 0 <= begin <= end <= self.rows:
            raise ConversionError(f"tensor {self.name!r}: rows [{begin}, {end}) lie outside its {self.rows} rows")


@runtime_checkable
class Source(Protocol):
    """A model's weights, config and small files, as a converter wants them."""

    @property
    def kind(self) -> str:
        """Short name of the kind of source: `huggingface`, `gguf`, `ninfer`, `module`."""

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
