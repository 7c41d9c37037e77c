"""Whether stored words belong to their format's language: codes, scales, divisors, padding, gaps.

Decoding accepts any word; these checks are for a reader that asks. A family's language is a table of rules; each rule
marks the words that break it, and the first one found is named by object, row, group and word.
Source: spec/container.md 10, spec/layouts.md 3.4, 3.5, 5.3, 5.4, 6, 7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ninfer_torch.errors import FormatError
from ninfer_torch.formats import (
    BlockFloatFormat,
    DirectFormat,
    Format,
    GgufFormat,
    GroupedFormat,
    RowFloatFormat,
    get_format,
)
from ninfer_torch.kernels.packing import row_scales, unpack_codes
from ninfer_torch.layouts import Geometry, Plane, planes_of, slice_rows, split_planes

__all__ = ["check_payload", "check_words"]

CHUNK_CODES = 1 << 20
"""Codes checked at a time; the temporaries of a chunk are at most about 32 bytes per code."""


def check_words(format: str | Format, planes: Sequence[Tensor], geometry: Geometry, where: str) -> None:
    """Refuse words outside the format's language, padding included.

    `where` names the object in the message; rows are counted in the parent object. Raises FormatError. Every word of a
    direct or gguf_* format is legal. A row of a row_float format is one group.
    """
    record = get_format(format)
    _FAMILY_CHECKS[type(record)](record, planes, geometry, where)


def check_payload(
    format: str | Format, shape: Sequence[int], payload: Tensor, divisors: int = 1, where: str = "object"
) -> None:
    """`check_words` for a complete object's bytes (uint8 vector), and its gaps between planes, which must be zero.

    Raises FormatError for illegal bytes, LayoutError for a shape, size or `divisors` that the layout refuses.
    """
    record = get_format(format)
    specs = planes_of(record, shape, divisors)
    planes = split_planes(payload, specs)
    _check_gaps(payload, specs, where)
    if record.quantized:
        check_words(record, planes, Geometry.whole(shape, divisors), where)


def _check_gaps(payload: Tensor, specs: Sequence[Plane], where: str) -> None:
    for before, after in pairwise(specs):
        filled = payload[before.end : after.offset].nonzero()
        if len(filled):
            offset = before.end + int(filled[0])
            raise FormatError(
                f"{where}: byte 0x{int(payload[offset]):02x} at offset {offset}, in the gap between planes "
                f"{before.name} and {after.name}; expected zero"
            )


@dataclass(frozen=True)
class Words:
    """The words of a chunk of rows.

    Codes [rows, groups, G] as their family unpacks them, scales [rows, groups] as non-negative int32 words. A row of a
    row_float format is one group of K columns.
    """

    record: Any
    codes: Tensor
    scales: Tensor
    columns: int


@dataclass(frozen=True)
class Rule:
    """One sentence of a format's language, about its codes or its scales: `broken` marks the words that break it."""

    subject: str
    broken: Callable[[Words], Tensor]
    message: str


_EXPONENT = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}


def _scale_not_finite(words: Words) -> Tensor:
    exponent = _EXPONENT[getattr(words.record, "scale_dtype", torch.float16)]
    return (words.scales & exponent) == exponent


def _scale_on_padding(words: Words) -> Tensor:
    first_padding = -(-words.columns // words.record.group)
    groups = torch.arange(words.scales.shape[1], device=words.scales.device)
    return (words.scales != 0) & (groups >= first_padding)


def _code_on_padding(words: Words) -> Tensor:
    groups, group = words.codes.shape[1:]
    columns = torch.arange(groups * group, device=words.codes.device).view(groups, group)
    return (words.codes != 0) & (columns >= words.columns)


def _code_out_of_range(words: Words) -> Tensor:
    return (words.codes < words.record.code_min) | (words.codes > words.record.code_max)


_GROUPED_RULES = (
    Rule("scale", _scale_on_padding, "on a group of padding; expected 0x0000"),
    Rule("scale", _scale_not_finite, "is not finite"),
    Rule("code", _code_on_padding, "in a padding column; expected code 0"),
    Rule("code", _code_out_of_range, "is not a legal code"),
)
_STRICT_ZERO_RULES = (
    Rule("scale", lambda words: words.scales == 0x8000, "is negative zero; expected a zero scale to be 0x0000"),
    Rule("code", lambda words: (words.codes != 0) & (words.scales == 0).unsqueeze(-1), "under a zero scale"),
)
_ROW_FLOAT_RULES = (
    Rule("scale", _scale_not_finite, "is not finite"),
    Rule("scale", lambda words: words.scales >= 0x8000, "has its sign set; expected +0 or more"),
    Rule("code", lambda words: (words.codes & 0x7F) == 0x7F, "is NaN"),
    Rule(
        "code",
        lambda words: ((words.codes & 0x7F) != 0) & (words.scales == 0).unsqueeze(-1),
        "under a zero scale",
    ),
)
_BLOCK_FLOAT_RULES = (Rule("scale", lambda words: words.scales > 0x7E, "is not in 0x00..0x7e (finite, sign clear)"),)


def _rules(record: Format) -> tuple[Rule, ...]:
    if isinstance(record, GroupedFormat):
        return _GROUPED_RULES if record.free_zero_scale else _GROUPED_RULES + _STRICT_ZERO_RULES
    return _ROW_FLOAT_RULES if isinstance(record, RowFloatFormat) else _BLOCK_FLOAT_RULES


def _unpacked_words(record: Format, planes: Sequence[Tensor], geometry: Geometry) -> Words:
    if isinstance(record, BlockFloatFormat):
        # Every E2M1 word is legal, so the codes stay packed and no rule asks for them.
        return Words(record, planes[0], row_scales(planes[1], geometry).to(torch.int32), geometry.columns)
    codes, scales, _ = unpack_codes(record, planes, geometry)
    rows = geometry.rows
    scale_words = scales.view(torch.int16).to(torch.int32) & 0xFFFF
    codes = codes.unsqueeze(1) if isinstance(record, RowFloatFormat) else codes
    return Words(record, codes, scale_words.view(rows, -1), geometry.columns)


def _check_scaled(record: Format, planes: Sequence[Tensor], geometry: Geometry, where: str) -> None:
    step = max(1, CHUNK_CODES // geometry.columns)
    rules = _rules(record)
    for begin in range(0, geometry.rows, step):
        view, view_geometry = slice_rows(record, planes, geometry, begin, min(begin + step, geometry.rows))
        words = _unpacked_words(record, view, view_geometry)
        for rule in rules:
            broken = rule.broken(words)
            if broken.any():
                index = broken.nonzero()[0].tolist()
                raise FormatError(f"{where}: {_describe(rule, words, index, view_geometry.row_begin)}")


def _describe(rule: Rule, words: Words, index: list[int], row_begin: int) -> str:
    row, group, *lane = index
    record = words.record
    place = f"row {row_begin + row}, group {group}"
    if rule.subject == "scale":
        digits = 2 if isinstance(record, BlockFloatFormat) else 4
        return f"{place}: {record.name} scale word 0x{int(words.scales[row, group]):0{digits}x} {rule.message}"
    column = group * words.codes.shape[2] + lane[0]
    code = int(words.codes[row, group, lane[0]])
    if isinstance(record, GroupedFormat):
        code = (code + record.bias) & ((1 << record.bits) - 1)
    return f"{place}, column {column}: {record.name} code word 0x{code:02x} {rule.message}"


def _check_block_float(record: BlockFloatFormat, planes: Sequence[Tensor], geometry: Geometry, where: str) -> None:
    _check_scaled(record, planes, geometry, where)
    _check_divisors(record, planes[2], geometry, where)


def _check_divisors(record: BlockFloatFormat, divisors: Tensor, geometry: Geometry, where: str) -> None:
    """Refuse a divisor that is not finite and positive, among those of the matrix's rows."""
    run = geometry.parent_rows // geometry.divisors
    first, last = geometry.row_begin // run, -(-(geometry.row_begin + geometry.rows) // run)
    words = divisors[first:last].view(torch.int32)
    broken = ((words <= 0) | (words >= 0x7F800000)).nonzero()
    if len(broken):
        index = first + int(broken[0])
        word = int(words[index - first]) & 0xFFFFFFFF
        place = f"{where}: divisor {index} (rows {index * run}..{(index + 1) * run - 1})"
        raise FormatError(f"{place}: {record.name} divisor word 0x{word:08x} is not finite and positive")


def _accept_any(record: Format, planes: Sequence[Tensor], geometry: Geometry, where: str) -> None:
    """Every bit pattern is a word of a direct or gguf_* format."""


_FAMILY_CHECKS: Mapping[type[Format], Callable[[Any, Sequence[Tensor], Geometry, str], None]] = {
    DirectFormat: _accept_any,
    GroupedFormat: _check_scaled,
    BlockFloatFormat: _check_block_float,
    RowFloatFormat: _check_scaled,
    GgufFormat: _accept_any,
}
