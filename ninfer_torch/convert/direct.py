"""cast_direct: numbers of one type as the words of a direct format (spec/conversion.md 2)."""

from __future__ import annotations

import torch

from ninfer_torch.errors import ConversionError
from ninfer_torch.formats import FORMATS, DirectFormat, Format, get_format

__all__ = ["DIRECT_TARGETS", "cast_direct"]

DIRECT_TARGETS = tuple(name for name, record in FORMATS.items() if isinstance(record, DirectFormat))

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
        raise ConversionError(f"cast_direct writes {', '.join(DIRECT_TARGETS)}, not {record.name}")
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


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    """Index of the first true element in C order."""
    return tuple(mask.nonzero()[0].tolist())
