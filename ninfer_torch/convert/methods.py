"""The table of methods: how numbers, or words of another file, become the planes of a format (spec/conversion.md 1).

A method turns rows into the planes of the same rows. It never looks beyond the rows it is given, so that any cut of a
tensor into chunks of rows gives the same words. The arithmetic of each method is a module of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ninfer_torch.convert.absmax import GROUPED_TARGETS, grouped_absmax
from ninfer_torch.convert.direct import DIRECT_TARGETS, cast_direct
from ninfer_torch.convert.encoded import IMPORTED_TARGETS, import_encoded, import_rows
from ninfer_torch.convert.row_float import ROW_FLOAT_TARGETS, fp8_row_maxabs
from ninfer_torch.convert.search import grouped_search
from ninfer_torch.convert.source import EncodedRows
from ninfer_torch.errors import ConversionError, LayoutError
from ninfer_torch.formats import FORMATS, Format, GgufFormat, get_format
from ninfer_torch.kernels.checks import check_words
from ninfer_torch.kernels.packing import pack_codes
from ninfer_torch.layouts import Geometry, planes_of
from ninfer_torch.tensors import wrap_planes

__all__ = [
    "METHODS",
    "Method",
    "cast_direct",
    "custom_method",
    "default_method",
    "fp8_row_maxabs",
    "get_method",
    "grouped_absmax",
    "grouped_search",
    "import_encoded",
    "quantize",
]

Planes = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Method:
    """One way to make words.

    `encode(rows, record, first_row, **parameters)` gives the planes of the rows it is handed; `first_row` only numbers
    them in messages. `takes` says what `rows` are: `values` (a tensor of numbers) or `encoded` (`EncodedRows`, or the
    blocks of a `gguf_*` format as a uint8 tensor). `parameters` names what `encode` takes besides, None meaning
    anything.
    """

    name: str
    takes: str
    targets: tuple[str, ...]
    encode: Callable[..., Planes]
    parameters: tuple[str, ...] | None = ()

    def check(self, format: str | Format, parameters: Mapping[str, Any]) -> None:
        """Raise ConversionError for a format that this method does not write or a parameter that it does not take."""
        record = get_format(format)
        if record.name not in self.targets:
            raise ConversionError(_refusal(self, record))
        unknown = [] if self.parameters is None else [name for name in parameters if name not in self.parameters]
        if unknown:
            known = ", ".join(self.parameters or ()) or "none"
            raise ConversionError(f"method {self.name} has no parameter {unknown[0]!r}; its parameters: {known}")


def _encode_direct(rows: torch.Tensor, record: Format, first_row: int) -> Planes:
    return (cast_direct(rows, record),)


def _encode_absmax(rows: torch.Tensor, record: Format, first_row: int) -> Planes:
    return pack_codes(record, *grouped_absmax(rows, record, first_row=first_row))


def _encode_search(
    rows: torch.Tensor,
    record: Format,
    first_row: int,
    *,
    importance: torch.Tensor | None = None,
    negative_scales: bool = False,
) -> Planes:
    found = grouped_search(rows, record, importance=importance, negative_scales=negative_scales, first_row=first_row)
    return pack_codes(record, *found)


def _encode_row_maxabs(rows: torch.Tensor, record: Format, first_row: int) -> Planes:
    return pack_codes(record, *fp8_row_maxabs(rows, record, first_row=first_row))


def _encode_imported(rows: torch.Tensor | EncodedRows, record: Format, first_row: int) -> Planes:
    if isinstance(rows, torch.Tensor):
        rows = EncodedRows(record.name, (rows,), first_row=first_row)
    return import_rows(rows, record)


_RECORDS = (
    Method("cast_direct", "values", DIRECT_TARGETS, _encode_direct),
    Method("grouped_absmax", "values", GROUPED_TARGETS, _encode_absmax),
    Method("grouped_search", "values", GROUPED_TARGETS, _encode_search, ("importance", "negative_scales")),
    Method("fp8_row_maxabs", "values", ROW_FLOAT_TARGETS, _encode_row_maxabs),
    Method("import_encoded", "encoded", IMPORTED_TARGETS, _encode_imported),
)

METHODS: Mapping[str, Method] = MappingProxyType({record.name: record for record in _RECORDS})
"""Every built-in method by name. A further method is one record more."""

_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(DIRECT_TARGETS, "cast_direct"),
        **dict.fromkeys(GROUPED_TARGETS, "grouped_absmax"),
        **dict.fromkeys(ROW_FLOAT_TARGETS, "fp8_row_maxabs"),
    }
)
"""The method that makes a format's words from numbers where none is named."""

_ENCODED_ONLY = "its words only come from a source already encoded in it, by import_encoded"

_NO_FLOAT_METHOD: Mapping[str, str] = MappingProxyType(
    {
        **{name: _ENCODED_ONLY for name, record in FORMATS.items() if isinstance(record, GgufFormat)},
        "nvfp4": _ENCODED_ONLY,
        "q2_g64_fp16": f"{_ENCODED_ONLY}; the largest magnitude is no scale for its codes -1, 0, 1, 2",
        "t2_g128_fp16": f"{_ENCODED_ONLY}; rounding weights that were not trained for three levels is not canonical",
    }
)
"""Why no built-in method makes a format's words from numbers."""


def _refusal(method: Method, record: Format) -> str:
    reason = (
        f": {_NO_FLOAT_METHOD[record.name]}" if method.takes == "values" and record.name in _NO_FLOAT_METHOD else ""
    )
    return f"{method.name} does not write {record.name}{reason}; it writes {', '.join(method.targets)}"


def get_method(name: str) -> Method:
    """The record of a built-in method. Raises ConversionError, listing the known names, for any other."""
    try:
        return METHODS[name]
    except (KeyError, TypeError):
        raise ConversionError(f"unknown method {name!r}; known: {', '.join(METHODS)}") from None


def default_method(format: str | Format) -> Method:
    """The method that makes a format's words from numbers. Raises ConversionError for a format that is only imported."""
    record = get_format(format)
    if record.name in _NO_FLOAT_METHOD:
        raise ConversionError(f"cannot quantize to {record.name}: {_NO_FLOAT_METHOD[record.name]}")
    return METHODS[_DEFAULTS[record.name]]


def custom_method(function: Callable[..., Any], name: str = "") -> Method:
    """A method of the caller's own, for any format.

    `function(rows, format_name, **parameters)` gets rows as numbers [n, ...] and returns what
    `kernels.packing.pack_codes` takes for the format: codes and scales, and divisors for nvfp4; for a direct or
    `gguf_*` format its one plane. The words are checked: an illegal one raises FormatError with its place, and a
    result of another extent ConversionError. As with every method, a row's words may depend on that row alone.
    """
    title = name or getattr(function, "__name__", type(function).__name__)

    def encode(rows: torch.Tensor, record: Format, first_row: int, **parameters: Any) -> Planes:
        result = function(rows, record.name, **parameters)
        parts = tuple(result) if isinstance(result, Sequence) else (result,)
        codes_and_scales = record.quantized and not isinstance(record, GgufFormat)
        planes = pack_codes(record, *parts) if codes_and_scales else parts
        _check_planes(title, record, tuple(rows.shape), planes, first_row)
        return planes

    return Method(title, "values", tuple(FORMATS), encode, None)


def _check_planes(title: str, record: Format, shape: tuple[int, ...], planes: Planes, first_row: int) -> None:
    divisors = planes[-1].numel() if record.name == "nvfp4" else 1
    expected = [(spec.dtype, spec.shape) for spec in planes_of(record, shape, divisors)]
    found = [(plane.dtype, tuple(plane.shape)) for plane in planes]
    if found != expected:
        raise ConversionError(
            f"method {title} made planes {found} for {record.name} {list(shape)}, expected {expected}"
        )
    if record.quantized:
        check_words(record, planes, Geometry.whole(shape, divisors), f"method {title}, from row {first_row}")


def quantize(
    w: torch.Tensor, format: str | Format, method: str | Method | Callable[..., Any] | None = None, **parameters: Any
) -> torch.Tensor:
    """A floating matrix [N, K] as a tensor of `format`, on the same device.

    For a quantized format the result is a `NinferTensor` with the compute dtype of `w` (float32 for a float64 source); a
    direct format gives a plain tensor, whatever the rank. `method` says how the words are made: a name of `METHODS`, a
    record, or a function as `custom_method` takes it; by default `grouped_absmax` for grouped formats, `fp8_row_maxabs`
    for fp8 rows and `cast_direct` for direct formats. `parameters` are those of the method: `importance` [K] and
    `negative_scales` for `grouped_search`.

    Raises FormatError for an unknown format, ConversionError for a pair that has no words (`nvfp4`, `gguf_*`, q2 and t2
    are only imported), for a parameter that the method does not take, and where it refuses the values.
    """
    record = get_format(format)
    chosen = _chosen(method, record)
    chosen.check(record, parameters)
    if chosen.takes != "values":
        raise ConversionError(f"{chosen.name} takes encoded rows, and quantize has numbers: call {chosen.name} itself")
    if record.quantized and w.dim() != 2:
        raise ConversionError(f"{chosen.name} takes a floating matrix [N, K], found {w.dtype} {list(w.shape)}")
    try:
        planes = chosen.encode(w.detach(), record, 0, **parameters)
    except LayoutError as error:
        raise ConversionError(f"{chosen.name} cannot write {record.name} {list(w.shape)}: {error}") from error
    divisors = planes[-1].numel() if record.name == "nvfp4" else 1
    dtype = w.dtype if w.is_floating_point() and w.dtype != torch.float64 else torch.float32
    return wrap_planes(record.name, tuple(w.shape), planes, divisors=divisors, dtype=dtype)


def _chosen(method: str | Method | Callable[..., Any] | None, record: Format) -> Method:
    if isinstance(method, Method):
        return method
    if callable(method):
        return custom_method(method)
    usual = default_method(record)
    return usual if method is None else get_method(method)
