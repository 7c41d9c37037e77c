"""Closed registry of numeric formats: what a stored word means.

One frozen record declares a format; sizes, planes, decoders and legality checks are derived from it. Where the words lie in
an object's bytes is a matter of `layouts`. Source of the numbers: spec/layouts.md 1, 3.1, 5, 6, 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch

from ninfer_torch.errors import FormatError

__all__ = [
    "FORMATS",
    "BlockFloatFormat",
    "DirectFormat",
    "Format",
    "GgufFormat",
    "GroupedFormat",
    "RowFloatFormat",
    "get_format",
]


@dataclass(frozen=True)
class Format:
    """A numeric format. `name` is its canonical, case-sensitive identifier in an artifact."""

    name: str
    family: ClassVar[str]

    @property
    def quantized(self) -> bool:
        """Whether tensors of this format are `NinferTensor`s (True) or plain torch tensors (False)."""
        return True


@dataclass(frozen=True)
class DirectFormat(Format):
    """One machine word per element, held as a plain torch tensor of `dtype`."""

    dtype: torch.dtype
    family: ClassVar[str] = "direct"

    @property
    def quantized(self) -> bool:
        return False


@dataclass(frozen=True)
class GroupedFormat(Format):
    """Signed integer codes of `bits` bits; `group` consecutive columns of a row share one binary16 scale.

    A code q is stored as the word `(q + bias) mod 2**bits`. Codes outside [code_min, code_max] are illegal.
    `absmax_codes` is the largest code magnitude of the `grouped_absmax` method (0: the method does not apply).
    `free_zero_scale` lets any scale that is finite, -0 included, stand above any codes (q2 only); elsewhere a zero scale is +0 and
    demands zero codes.
    """

    bits: int
    group: int
    code_min: int
    code_max: int
    bias: int = 0
    free_zero_scale: bool = False
    absmax_codes: int = 0
    family: ClassVar[str] = "grouped"

    @property
    def base_bits(self) -> int:
        """Bits per code in the base plane: 2, 4 or 8."""
        return {2: 2, 8: 8}.get(self.bits, 4)

    @property
    def base_bytes(self) -> int:
        """Bytes per group in the base plane."""
        return self.group * self.base_bits // 8

    @property
    def high_bits(self) -> int:
        """Bits per code in the high plane: 1 for q5, 2 for q6, else 0."""
        return self.bits - self.base_bits

    @property
    def high_bytes(self) -> int:
        """Bytes per group in the high plane."""
        return self.group * self.high_bits // 8


@dataclass(frozen=True)
class BlockFloatFormat(Format):
    """E2M1 codes, one E4M3FN scale per `group` columns, and float32 divisors, one per run of equal row counts."""

    group: int
    family: ClassVar[str] = "block_float"


@dataclass(frozen=True)
class RowFloatFormat(Format):
    """E4M3FN codes with one scale per row, of `scale_dtype`."""

    scale_dtype: torch.dtype
    family: ClassVar[str] = "row_float"


@dataclass(frozen=True)
class GgufFormat(Format):
    """A ggml block type, its blocks kept byte for byte: `block_values` columns in `block_bytes` bytes."""

    ggml_type: int
    block_values: int
    block_bytes: int
    family: ClassVar[str] = "gguf"


_RECORDS: tuple[Format, ...] = (
    DirectFormat("bf16", torch.bfloat16),
    DirectFormat("fp32", torch.float32),
    DirectFormat("int32", torch.int32),
    GroupedFormat("q2_g64_fp16", bits=2, group=64, code_min=-1, code_max=2, bias=1, free_zero_scale=True),
    GroupedFormat("q4_g64_fp16", bits=4, group=64, code_min=-8, code_max=7, absmax_codes=7),
    GroupedFormat("q5_g64_fp16", bits=5, group=64, code_min=-16, code_max=15, absmax_codes=15),
    GroupedFormat("q6_g64_fp16", bits=6, group=64, code_min=-32, code_max=31, absmax_codes=31),
    GroupedFormat("q8_g32_fp16", bits=8, group=32, code_min=-127, code_max=127, absmax_codes=127),
    GroupedFormat("t2_g128_fp16", bits=2, group=128, code_min=-1, code_max=1, absmax_codes=1),
    BlockFloatFormat("nvfp4", group=16),
    RowFloatFormat("fp8_e4m3fn_row_bf16", torch.bfloat16),
    RowFloatFormat("fp8_e4m3fn_row_fp16", torch.float16),
    GgufFormat("gguf_q4_0", 2, 32, 18),
    GgufFormat("gguf_q5_0", 6, 32, 22),
    GgufFormat("gguf_q8_0", 8, 32, 34),
    GgufFormat("gguf_q2_k", 10, 256, 84),
    GgufFormat("gguf_q3_k", 11, 256, 110),
    GgufFormat("gguf_q4_k", 12, 256, 144),
    GgufFormat("gguf_q5_k", 13, 256, 176),
    GgufFormat("gguf_q6_k", 14, 256, 210),
    GgufFormat("gguf_iq2_xxs", 16, 256, 66),
    GgufFormat("gguf_iq2_xs", 17, 256, 74),
    GgufFormat("gguf_iq3_xxs", 18, 256, 98),
    GgufFormat("gguf_iq1_s", 19, 256, 50),
    GgufFormat("gguf_iq4_nl", 20, 32, 18),
    GgufFormat("gguf_iq3_s", 21, 256, 110),
    GgufFormat("gguf_iq2_s", 22, 256, 82),
    GgufFormat("gguf_iq4_xs", 23, 256, 136),
    GgufFormat("gguf_iq1_m", 29, 256, 56),
    GgufFormat("gguf_q2_0", 42, 64, 18),
)

FORMATS: Mapping[str, Format] = MappingProxyType({record.name: record for record in _RECORDS})
"""Every registered numeric format by canonical name: three direct, twenty-seven quantized."""


def get_format(name: str | Format) -> Format:
    """The record of a canonical format name; a record is returned as it is.

    Raises FormatError, listing the known names, for any other name (names are case-sensitive and have no aliases).
    """
    if isinstance(name, Format):
        return name
    try:
        return FORMATS[name]
    except (KeyError, TypeError):
        raise FormatError(f"unknown numeric format {name!r}; known: {', '.join(FORMATS)}") from None
