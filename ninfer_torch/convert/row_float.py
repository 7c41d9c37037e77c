"""fp8_row_maxabs: the largest magnitude of a row becomes 448, the largest E4M3FN number (spec/conversion.md 5)."""

from __future__ import annotations

import torch

from ninfer_torch.convert.absmax import require_matrix
from ninfer_torch.convert.direct import cast_direct
from ninfer_torch.errors import ConversionError
from ninfer_torch.formats import FORMATS, Format, RowFloatFormat, get_format

__all__ = ["ROW_FLOAT_TARGETS", "fp8_row_maxabs"]

ROW_FLOAT_TARGETS = tuple(name for name, record in FORMATS.items() if isinstance(record, RowFloatFormat))

_LARGEST_E4M3FN = 448.0
_SMALLEST_SCALE_WORD = 0x0001
_CHUNK_VALUES = 1 << 17


def fp8_row_maxabs(
    values: torch.Tensor, format: str | Format, *, first_row: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix, each row scaled by its largest magnitude (spec/conversion.md 5).

    `values` [N, K] of any floating dtype and stride, first rounded to bfloat16. Returns codes uint8 [N, K] (E4M3FN
    words) and scales [N] of the format's scale dtype, on the device of `values`. A negative zero keeps its sign, except
    in a row of zeros. `first_row` only numbers the rows in error messages.

    Raises ConversionError, naming the row, for a value that is not finite in bfloat16, a scale beyond the scale dtype,
    and a scale so small that its reciprocal leaves binary32; further for another format, rank or dtype.
    """
    record = get_format(format)
    if not isinstance(record, RowFloatFormat):
        raise ConversionError(f"fp8_row_maxabs does not write {record.name}; it writes {', '.join(ROW_FLOAT_TARGETS)}")
    values = require_matrix("fp8_row_maxabs", values)
    rows, columns = values.shape
    if not columns:
        raise ConversionError(f"fp8_row_maxabs takes rows of at least one value, found {[rows, columns]}")
    codes = torch.empty((rows, columns), dtype=torch.uint8, device=values.device)
    scales = torch.empty(rows, dtype=record.scale_dtype, device=values.device)
    step = max(1, _CHUNK_VALUES // columns)
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        x = _finite_float32(values[begin:end], record, first_row + begin)
        largest = x.abs().amax(dim=1)
        scales[begin:end] = _scales(largest, record, first_row + begin)
        codes[begin:end] = _codes(x, largest, scales[begin:end], record, first_row + begin)
    return codes, scales


def _finite_float32(values: torch.Tensor, record: RowFloatFormat, first_row: int) -> torch.Tensor:
    rounded = cast_direct(values, "bf16").to(torch.float32)
    finite = rounded.isfinite()
    if not bool(finite.all()):
        row, column = (~finite).nonzero()[0].tolist()
        raise ConversionError(
            f"row {first_row + row}, column {column}: {values[row, column].item()} is not a finite bfloat16, "
            f"and {record.name} needs finite values"
        )
    return rounded


def _scales(largest: torch.Tensor, record: RowFloatFormat, first_row: int) -> torch.Tensor:
    scales = (largest.to(torch.float64) / _LARGEST_E4M3FN).to(torch.float32).to(record.scale_dtype)
    if not bool(scales.isfinite().all()):
        row = int((~scales.isfinite()).nonzero()[0])
        raise ConversionError(
            f"row {first_row + row}: largest magnitude {largest[row].item()} / 448 overflows the scale of {record.name}"
        )
    scales.view(torch.int16).masked_fill_((scales == 0) & (largest > 0), _SMALLEST_SCALE_WORD)
    return scales


def _codes(
    x: torch.Tensor, largest: torch.Tensor, scales: torch.Tensor, record: RowFloatFormat, first_row: int
) -> torch.Tensor:
    zero = (largest == 0).unsqueeze(1)
    # Rows of zeros have scale +0; a reciprocal of 1 keeps their products 0 where 1 / 0 would make them NaN.
    reciprocals = scales.to(torch.float64).unsqueeze(1).masked_fill_(zero, 1.0).reciprocal_().to(torch.float32)
    products = x * reciprocals
    if not bool(products.isfinite().all()):
        row = int((~products.isfinite()).nonzero()[0, 0])
        raise ConversionError(
            f"row {first_row + row}: the reciprocal of its scale {scales[row].item():.3e} leaves binary32 "
            f"(largest magnitude {largest[row].item():.3e}); {record.name} has no words for it"
        )
    words = products.clamp_(-_LARGEST_E4M3FN, _LARGEST_E4M3FN).to(torch.float8_e4m3fn).view(torch.uint8)
    return words.masked_fill_(zero, 0)
