"""Conversion: floating or foreign weights become the words of an artifact."""

from ninfer_torch.convert.importance import Importance, read_importance, write_importance
from ninfer_torch.convert.methods import (
    METHODS,
    cast_direct,
    fp8_row_maxabs,
    grouped_absmax,
    grouped_search,
    import_encoded,
    quantize,
)
from ninfer_torch.convert.module_source import ModuleSource
from ninfer_torch.convert.pipeline import convert, open_source, plan
from ninfer_torch.convert.presets import PRESETS
from ninfer_torch.convert.recipes import Recipe, RecipeModel
from ninfer_torch.convert.report import Report
from ninfer_torch.convert.source import EncodedRows, Source, SourceTensor, UnusedTensor

__all__ = [
    "METHODS",
    "PRESETS",
    "EncodedRows",
    "Importance",
    "ModuleSource",
    "Recipe",
    "RecipeModel",
    "Report",
    "Source",
    "SourceTensor",
    "UnusedTensor",
    "cast_direct",
    "convert",
    "fp8_row_maxabs",
    "grouped_absmax",
    "grouped_search",
    "import_encoded",
    "open_source",
    "plan",
    "quantize",
    "read_importance",
    "write_importance",
]
