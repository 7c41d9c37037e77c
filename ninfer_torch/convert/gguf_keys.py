"""The metadata of a GGUF file against its architecture's table: everything needed is there, and nothing is ignored."""

from __future__ import annotations

import math

from ninfer_torch.convert.gguf_file import GgufArray, GgufFile
from ninfer_torch.convert.gguf_parameters import listed
from ninfer_torch.convert.gguf_rules import COUNTS, RATES, Architecture
from ninfer_torch.errors import ConversionError

__all__ = ["check_keys"]


def check_keys(file: GgufFile, table: Architecture) -> None:
    """Raise ConversionError unless a file has the metadata that its table requires, and no other than it understands."""
    prefix = f"{table.name}."
    found = {key.removeprefix(prefix) for key in file.metadata if key.startswith(prefix)}
    missing = [prefix + key for key in table.required if key not in found]
    if missing:
        raise ConversionError(f"{file.name}: metadata that a {table.name} model needs is missing: {listed(missing)}")
    unknown = sorted(prefix + key for key in found.difference(table.required, table.understood))
    if unknown:
        raise ConversionError(
            f"{file.name}: metadata whose effect on a {table.name} model is unknown to this version: {listed(unknown)}"
        )
    arrays = {key for key in sorted(found) if isinstance(file.metadata[prefix + key], GgufArray)}
    if surplus := [prefix + key for key in sorted(arrays.difference(table.arrays))]:
        raise ConversionError(f"{file.name}: metadata {listed(surplus)} is stated per layer, expected one value")
    for key in sorted(found):
        value = file.metadata[prefix + key]
        least = 0 if key in table.zero_counts else 1
        if key in COUNTS and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ConversionError(
                f"{file.name}: metadata {prefix + key!r} is {value!r}, expected a count of at least {least}"
            )
        if key in RATES and not (isinstance(value, float) and 0 < value < math.inf):
            raise ConversionError(f"{file.name}: metadata {prefix + key!r} is {value!r}, expected a positive number")
