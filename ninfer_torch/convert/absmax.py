"""grouped_absmax: the largest magnitude of a group gets the largest code (spec/conversion.md 3)."""

from __future__ import annotations

import torch

from ninfer_torch.errors import ConversionError
from ninfer_torch.formats import FORMATS, Format, GroupedFormat, get_format

__all__ = ["GROUPED_TARGETS", "SMALLEST_BINARY16", "absmax_scales", "grouped_absmax", "grouped_record", "split_groups"]

GROUPED_TARGETS = tuple(
    name
    for name, record in FORMATS.items()
    if isinstance(record, GroupedFormat) and record.absmax_codes and name != "t2_g128_fp16"
)
"""What the grouped methods write. t2 has the numbers for it, but rounding to three levels is not canonical."""

SMALLEST_BINARY16 = 2.0**-24

_CHUNK_VALUES = 1 << 17
"""Values quantized at a time: the float32 temporaries of one chunk stay in a core's cache."""


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
    return _grouped_absmax(values, grouped_record("grouped_absmax", format), first_row)


def grouped_record(method: str, format: str | Format) -> GroupedFormat:
    """The record of a format that grouped methods write. Raises ConversionError for any other."""
    record = get_format(format)
    if not isinstance(record, GroupedFormat) or record.name not in GROUPED_TARGETS:
        raise ConversionError(f"{method} does not write {record.name}; it writes {', '.join(GROUPED_TARGETS)}")
    return record


def _grouped_absmax(values: torch.Tensor, record: GroupedFormat, first_row: int) -> tuple[torch.Tensor, torch.Tensor]:
    values = require_matrix("grouped_absmax", values)
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
    x = split_groups(values, record)
    scale = absmax_scales(x, values, record, first_row)
    # Zero groups have scale +0; a reciprocal of 1 keeps their codes 0 where 1 / 0 would make them NaN.
    reciprocal = scale.to(torch.float64).masked_fill_(scale == 0, 1.0).reciprocal_().to(torch.float32)
    quotient = (x * reciprocal.unsqueeze(2)).round_().clamp_(record.code_min, record.code_max)
    codes.copy_(quotient.flatten(1)[:, : values.shape[1]])
    scales.copy_(scale)


def require_matrix(method: str, values: torch.Tensor) -> torch.Tensor:
    """`values` detached, once it is a floating matrix. Raises ConversionError otherwise."""
    if values.dim() != 2 or not values.is_floating_point():
        raise ConversionError(f"{method} takes a floating matrix [N, K], found {values.dtype} {list(values.shape)}")
    return values.detach()


def split_groups(values: torch.Tensor, record: GroupedFormat) -> torch.Tensor:
    """Rows [N, K] as float32 groups [N, ceil(K / G), G], zeros after the last column."""
    x = values.to(torch.float32)
    padding = -values.shape[1] % record.group
    if padding:
        x = torch.nn.functional.pad(x, (0, padding))
    return x.unflatten(1, (-1, record.group))


def absmax_scales(x: torch.Tensor, values: torch.Tensor, record: GroupedFormat, first_row: int) -> torch.Tensor:
    """The scale float16 [N, groups] of each group of `x` [N, groups, G], which `split_groups` made of `values`.

    Raises ConversionError, naming row and column or group, for values that are not finite or demand a larger scale
    than binary16 has.
    """
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
    return scale.masked_fill_((scale == 0) & (largest > 0), SMALLEST_BINARY16)


def _first(mask: torch.Tensor) -> tuple[int, ...]:
    """Index of the first true element in C order."""
    return tuple(mask.nonzero()[0].tolist())
