"""Presets: which format and method each tensor of a model gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ninfer_torch.convert.methods import METHODS
from ninfer_torch.convert.source import SourceTensor
from ninfer_torch.errors import ConversionError
from ninfer_torch.models.generic import Kind

__all__ = ["PRESETS", "WIDER_FORMATS", "Preset", "Selection", "WiderFormat", "get_preset", "select"]


@dataclass(frozen=True)
class Preset:
    """`formats` gives a format per kind of tensor; None keeps each tensor's own block type (`source_kind` must match
    then).
    """

    name: str
    summary: str
    formats: Mapping[Kind, str] | None
    source_kind: str | None = None


@dataclass(frozen=True)
class Selection:
    """What one tensor becomes. `fallback` marks a block type that could not be kept; `note` tells readers what was
    done.
    """

    format: str
    method: str
    note: str = ""
    fallback: bool = False


@dataclass(frozen=True)
class WiderFormat:
    """The nearest registered format that is wider than a ggml block type outside the registry."""

    format: str
    reason: str


def _grouped(name: str, linear: str) -> Preset:
    return Preset(
        name,
        f"linear weights {linear}, embedding and head q8_g32_fp16",
        MappingProxyType({"linear": linear, "embedding": "q8_g32_fp16", "head": "q8_g32_fp16"}),
    )


_RECORDS = (
    _grouped("q4", "q4_g64_fp16"),
    _grouped("q5", "q5_g64_fp16"),
    _grouped("q6", "q6_g64_fp16"),
    _grouped("q8", "q8_g32_fp16"),
    Preset("gguf", "every matrix keeps its own GGUF block type, byte for byte", None, source_kind="gguf"),
)

PRESETS: Mapping[str, Preset] = MappingProxyType({record.name: record for record in _RECORDS})

_OFFSET = "codes counted from a block minimum: one bit more covers the same span counted from zero"
_E2M1 = "E2M1 needs the integers -12..12, which are 5 bits; one bit more because blocks of 16 or 32 then share a scale"
_TERNARY = "three levels, all of them multiples of the largest: 4 bits are the narrowest format with a method"

WIDER_FORMATS: Mapping[str, WiderFormat] = MappingProxyType(
    {
        "q4_1": WiderFormat("q5_g64_fp16", f"4-bit {_OFFSET}"),
        "q5_1": WiderFormat("q6_g64_fp16", f"5-bit {_OFFSET}"),
        "mxfp4": WiderFormat("q6_g64_fp16", _E2M1),
        "ggml_nvfp4": WiderFormat("q6_g64_fp16", _E2M1),
        "tq1_0": WiderFormat("q4_g64_fp16", _TERNARY),
        "tq2_0": WiderFormat("q4_g64_fp16", _TERNARY),
    }
)
"""Block types that decode but are outside the registry, by encoding: what preset `gguf` stores instead, by
grouped_absmax of the decoded values.
"""

_PLAIN_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "bf16": "bf16",
        "fp16": "fp32",
        "fp32": "fp32",
        "fp64": "fp32",
        "int64": "int32",
        "int32": "int32",
        "int16": "int32",
        "int8": "int32",
        "bool": "int32",
    }
)
"""Direct format of a tensor that stays plain. All but fp64 are exact: fp16 has no direct format and fits fp32."""


def get_preset(name: str) -> Preset:
    """The record of a preset. Raises ConversionError, listing the known names, for any other."""
    try:
        return PRESETS[name]
    except (KeyError, TypeError):
        raise ConversionError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}") from None


def select(preset: Preset, kind: Kind, source: SourceTensor) -> Selection:
    """What `source`, a tensor of `kind`, becomes under `preset`. Raises ConversionError for an encoding outside every
    table.
    """
    if kind == "direct":
        return _plain(source)
    if _PLAIN_FORMATS.get(source.encoding) == "int32":
        raise ConversionError(
            f"tensor {source.name!r} holds {source.encoding} words; a {kind} weight needs floating values"
        )
    if preset.formats is None:
        return _kept(source)
    requantized = source.encoding not in _PLAIN_FORMATS
    return Selection(
        preset.formats[kind], "grouped_absmax", f"requantized from {source.encoding}" if requantized else ""
    )


def _plain(source: SourceTensor) -> Selection:
    if source.encoding not in _PLAIN_FORMATS:
        return Selection(
            "fp32", "cast_direct", f"decoded from {source.encoding}: not a matrix that a layer multiplies or looks up"
        )
    note = "rounded from fp64" if source.encoding == "fp64" else ""
    return Selection(_PLAIN_FORMATS[source.encoding], "cast_direct", note)


def _kept(source: SourceTensor) -> Selection:
    if source.encoding in _PLAIN_FORMATS:
        return _plain(source)
    if source.encoding in METHODS["import_encoded"].targets:
        return Selection(source.encoding, "import_encoded")
    if source.encoding not in WIDER_FORMATS:
        raise ConversionError(
            f"tensor {source.name!r}: no registered format is known to be wider than {source.encoding}"
        )
    wider = WIDER_FORMATS[source.encoding]
    note = f"{source.encoding} is not in the registry; stored as {wider.format} ({wider.reason})"
    return Selection(wider.format, "grouped_absmax", note, fallback=True)
