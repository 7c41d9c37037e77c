"""Conversion: floating or foreign weights become the words of an artifact."""

from ninfer_torch.convert.methods import METHODS, cast_direct, grouped_absmax, import_encoded, quantize
from ninfer_torch.convert.pipeline import convert, open_source
from ninfer_torch.convert.presets import PRESETS
from ninfer_torch.convert.report import Report
from ninfer_torch.convert.source import Source, SourceTensor, UnusedTensor

__all__ = [
    "METHODS",
    "PRESETS",
    "Report",
    "Source",
    "SourceTensor",
    "UnusedTensor",
    "cast_direct",
    "convert",
    "grouped_absmax",
    "import_encoded",
    "open_source",
    "quantize",
]
