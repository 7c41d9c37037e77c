"""How numbers become words: the methods of spec/conversion.md 1, one record each.

A method turns rows of numbers (or rows of already encoded blocks) into the planes of the same rows. It never looks
beyond the rows it is given, so that any cut of a tensor into chunks of rows gives the same words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ninfer_torch.errors import ConversionError
from ninfer_torch.formats import FORMATS, DirectFormat, Format, GgufFormat, GroupedFormat, get_format
from ninfer_torch.kernels.packing import pack_codes
from ninfer_torch.tensors import wrap_planes

__all__ = ["METHODS", "Method", "cast_direct", "get_method", "grouped_absmax", "import_encoded", "quantize"]

_CHUNK_VALUES = 1 << 17
"""Values quantized at a time: the float32 temporaries of one chunk stay in a core's cache."""

_SMALLEST_BINARY16 = 2.0**-24
_EXACT_INTEGERS = 2**53


def cast_direct(values: torch.Tensor, format: str | Format) -> torch.Tensor:
    """Numbers of one type as a direct format's: the only way from one type to another (spec/conversion.md 2).

    Floating targets round to nearest, ties to even, in one rounding, whatever the source type; values of the target's
    own type pass unchanged, NaN payloads included. `int32` truncates fractions towards zero. The shape is kept.

    Raises ConversionError for a target that is not direct, for values outside the 32-bit range (NaN is), for complex
    numbers, and for integers that a floating target could not be reached from in one rounding (beyond 2**53).
    """
    record = get_format(format)
    if not isinstance(record, DirectFormat):
        raise ConversionError(f"cast_direct writes {', '.join(METHODS['cast_direct'].targets)}, not {record.name}")
    if values.dtype == record.dtype:
        return values
    if values.is_complex() or values.dtype == torch.uint64:
        raise ConversionError(
            f"cast_direct takes floats, booleans and integers of at most 64 signed bits, found {values.dtype}"
        )
    if record.dtype == torch.int32:
        return _cast_int32(values)
    if not values.is_floating_point():
        values = _exact_float64(values)
    if record.dtype == torch.bfloat16 and values.dtype == torch.float64:
        values = _round_to_odd_float32(values)
    return values.to(record.dtype)


def _cast_int32(values: torch.Tensor) -> torch.Tensor:
    whole = values.to(torch.float64).trunc() if values.is_floating_point() else values.to(torch.int64)
    legal = (whole >= -(2**31)) & (whole < 2**31)
    if not bool(legal.all()):
        index = _first(~legal)
        raise ConversionError(
            f"int32 cannot hold {values[index].item()} at {list(index)}: values must lie in [-2**31, 2**31)"
        )
    return whole.to(torch.int32)


def _exact_float64(integers: torch.Tensor) -> torch.Tensor:
    wide = integers.to(torch.int64)
    legal = (wide >= -_EXACT_INTEGERS) & (wide <= _EXACT_INTEGERS)
    if not bool(legal.all()):
        index = _first(~legal)
        raise ConversionError(
            f"integer {wide[index].item()} at {list(index)} lies beyond 2**53 and has no single rounding to a float"
        )
    return wide.to(torch.float64)


def _round_to_odd_float32(values: torch.Tensor) -> torch.Tensor:
    """float64 -> float32, rounded towards zero with the last bit set when inexact.

    A further rounding to bfloat16 then equals one rounding from float64, which going through the nearest float32 does
    not.
    """
    nearest = values.to(torch.float32)
    words = nearest.view(torch.int32)
    back = nearest.to(torch.float64)
    overshot = back.abs() > values.abs()
    inexact = (back != values) & ~values.isnan()
    return ((words - overshot.to(torch.int32)) | inexact.to(torch.int32)).view(torch.float32)


def grouped_absmax(
    values: torch.Tensor, format: str | Format, *, first_row: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix, each group scaled by its largest magnitude (spec/conversion.md 3).

    `values` [N, K] of any floating dtype and stride; bfloat16 and float16 give the words of their float32 values,
    float64 is first rounded to float32. Returns codes int8 [N, K] and scales float16 [N, ceil(K / G)], on the device of
    `values`. `first_row` only numbers the rows in error messages.

    Raises ConversionError for a format the method does not write, another rank, an integer source, a value that is not
    finite (in float32), and a scale beyond binary16; the message names row, and column or group.
    """
    record = get_format(format)
    if not isinstance(record, GroupedFormat) or record.name not in METHODS["grouped_absmax"].targets:
        raise ConversionError(_refusal("grouped_absmax", record))
    return _grouped_absmax(values, record, first_row)


def _grouped_absmax(values: torch.Tensor, record: GroupedFormat, first_row: int) -> tuple[torch.Tensor, torch.Tensor]:
    if values.dim() != 2 or not values.is_floating_point():
        raise ConversionError(
            f"grouped_absmax takes a floating matrix [N, K], found {values.dtype} {list(values.shape)}"
        )
    values = values.detach()
    rows, columns = values.shape
    codes = torch.empty((rows, columns), dtype=torch.int8, device=values.device)
    scales = torch.empty((rows, -(-columns // record.group)), dtype=torch.float16, device=values.device)
    step = max(1, _CHUNK_VALUES // max(1, columns))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        _absmax_chunk(values[begin:end], record, codes[begin:end], scales[begin:end], first_row + begin)
    return codes, scales


def _absmax_chunk(
    values: torch.Tensor, record: GroupedFormat, codes: torch.Tensor, scales: torch.Tensor, first_row: int
) -> None:
    rows, columns = values.shape
    groups = scales.shape[1]
    x = values.to(torch.float32)
    padding = groups * record.group - columns
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
    x = x.reshape(rows, groups, record.group)
    largest = x.abs().amax(dim=2)
    if not bool(largest.isfinite().all()):
        row, column = _first(~values.to(torch.float32).isfinite())
        raise ConversionError(
            f"row {first_row + row}, column {column}: {values[row, column].item()} is not a finite float32, "
            f"and {record.name} needs finite values"
        )
    scale = (largest.to(torch.float64) / record.absmax_codes).to(torch.float32).to(torch.float16)
    if not bool(scale.isfinite().all()):
        row, group = _first(~scale.isfinite())
        raise ConversionError(
            f"row {first_row + row}, group {group}: largest magnitude {largest[row, group].item()} "
            f"/ {record.absmax_codes} overflows the binary16 scale of {record.name}"
        )
    scale.masked_fill_((scale == 0) & (largest > 0), _SMALLEST_BINARY16)
    # Zero groups have scale +0; a reciprocal of 1 keeps their codes 0 where 1 / 0 would make them NaN.
    reciprocal = scale.to(torch.float64).masked_fill_(scale == 0, 1.0).reciprocal_().to(torch.float32)
    quotient = (x * reciprocal.unsqueeze(2)).round_().clamp_(record.code_min, record.code_max)
    codes.copy_(quotient.view(rows, groups * record.group)[:, :columns])
    scales.copy_(scale)


def import_encoded(blocks: torch.Tensor, format: str | Format) -> torch.Tensor:
    """Rows of ggml blocks as a tensor of the same `gguf_*` format, byte for byte (spec/conversion.md 6.3).

    `blocks` uint8 [N, row bytes], as the rows lie in a GGUF file; K follows from the row bytes. Raises ConversionError
    for another format, dtype or rank, and for row bytes that are no whole number of blocks.
    """
    record = get_format(format)
    if not isinstance(record, GgufFormat):
        raise ConversionError(_refusal("import_encoded", record))
    (plane,) = _import_blocks(blocks, record, 0)
    return wrap_planes(record.name, _block_shape(blocks, record), (plane,))


def _block_shape(blocks: torch.Tensor, record: GgufFormat) -> tuple[int, int]:
    return blocks.shape[0], blocks.shape[1] // record.block_bytes * record.block_values


def _import_blocks(blocks: torch.Tensor, record: Format, first_row: int) -> tuple[torch.Tensor, ...]:
    if not isinstance(record, GgufFormat):
        raise ConversionError(_refusal("import_encoded", record))
    if blocks.dtype != torch.uint8 or blocks.dim() != 2 or blocks.shape[1] % record.block_bytes or not blocks.shape[1]:
        raise ConversionError(
            f"{record.name} takes rows of whole {record.block_bytes}-byte blocks as uint8 [N, row bytes], "
            f"found {blocks.dtype} {list(blocks.shape)} from row {first_row}"
        )
    return (blocks,)


@dataclass(frozen=True)
class Method:
    """One way to make words. `encode(rows, format, first_row)` gives the planes of the rows it is handed.

    `takes` says what `rows` are: `values` (numbers) or `encoded` (block rows as uint8).
    """

    name: str
    takes: str
    targets: tuple[str, ...]
    encode: Callable[[torch.Tensor, Format, int], tuple[torch.Tensor, ...]]


def _encode_direct(rows: torch.Tensor, record: Format, first_row: int) -> tuple[torch.Tensor, ...]:
    return (cast_direct(rows, record),)


def _encode_absmax(rows: torch.Tensor, record: Format, first_row: int) -> tuple[torch.Tensor, ...]:
    codes, scales = grouped_absmax(rows, record, first_row=first_row)
    return tuple(pack_codes(record.name, codes, scales))


_RECORDS = (
    Method("cast_direct", "values", ("bf16", "fp32", "int32"), _encode_direct),
    Method("grouped_absmax", "values", ("q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16"), _encode_absmax),
    Method(
        "import_encoded", "encoded", tuple(n for n, f in FORMATS.items() if isinstance(f, GgufFormat)), _import_blocks
    ),
)

METHODS: Mapping[str, Method] = MappingProxyType({record.name: record for record in _RECORDS})
"""Every method by name. A further method is one record more."""

_ENCODED_ONLY = "its words only come from a source already encoded in it, by import_encoded"
_NO_FP8 = "its method fp8_row_maxabs is not available in this version"

_NO_FLOAT_METHOD: Mapping[str, str] = MappingProxyType(
    {
        **{name: _ENCODED_ONLY for name, record in FORMATS.items() if isinstance(record, GgufFormat)},
        "nvfp4": _ENCODED_ONLY,
        "q2_g64_fp16": f"{_ENCODED_ONLY}; the largest magnitude is no scale for its codes -1, 0, 1, 2",
        "t2_g128_fp16": f"{_ENCODED_ONLY}; rounding weights that were not trained for three levels is not canonical",
        "fp8_e4m3fn_row_bf16": _NO_FP8,
        "fp8_e4m3fn_row_fp16": _NO_FP8,
    }
)
"""Why no method of this version makes a format's words from numbers."""


def _refusal(method: str, record: Format) -> str:
    reason = (
        f": {_NO_FLOAT_METHOD[record.name]}"
        if METHODS[method].takes == "values" and record.name in _NO_FLOAT_METHOD
        else ""
    )
    return f"{method} does not write {record.name}{reason}; it writes {', '.join(METHODS[method].targets)}"


def get_method(name: str) -> Method:
    """The record of a method. Raises ConversionError, listing the known names, for any other."""
    try:
        return METHODS[name]
    except (KeyError, TypeError):
        raise ConversionError(f"unknown method {name!r}; known: {', '.join(METHODS)}") from None


def quantize(w: torch.Tensor, format: str | Format, method: str = "grouped_absmax") -> torch.Tensor:
    """A floating matrix [N, K] as a tensor of `format`, on the same device.

    For a quantized format the result is a `NinferTensor` with the compute dtype of `w` (float32 for a float64 source);
    `method` says how its words are made. A direct format gives a plain tensor through `cast_direct`, its only method,
    whatever the rank.

    Raises FormatError for an unknown format, and ConversionError for a pair that has no words: `nvfp4`, `gguf_*` and q2
    are only imported, fp8 rows have no method in this version, and a method lists what it writes; further where the
    method refuses the values.
    """
    record = get_format(format)
    if not record.quantized:
        return cast_direct(w, record)
    if record.name in _NO_FLOAT_METHOD:
        raise ConversionError(f"cannot quantize to {record.name}: {_NO_FLOAT_METHOD[record.name]}")
    chosen = get_method(method)
    if chosen.takes != "values" or record.name not in chosen.targets:
        raise ConversionError(_refusal(chosen.name, record))
    planes = chosen.encode(w.detach(), record, 0)
    dtype = torch.float32 if w.dtype == torch.float64 else w.dtype
    return wrap_planes(record.name, tuple(w.shape), planes, dtype=dtype)


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    """Index of the first true element in C order."""
    return tuple(mask.nonzero()[0].tolist())
