"""Presets: recipes by name, which give every tensor a format by its kind, or keep what its source has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ninfer_torch.convert.encoded_sources import BLOCK_FP8
from ninfer_torch.convert.matching import MatchedSource
from ninfer_torch.convert.methods import default_method
from ninfer_torch.convert.recipes import CHECKPOINT, Recipe, RecipeModel, Selection
from ninfer_torch.convert.source import SourceTensor
from ninfer_torch.errors import ConversionError
from ninfer_torch.formats import FORMATS, BlockFloatFormat, GgufFormat, RowFloatFormat, get_format
from ninfer_torch.models.generic import Kind

__all__ = [
    "PRESETS",
    "WIDER_FORMATS",
    "Preset",
    "WiderFormat",
    "direct_format",
    "format_preset",
    "get_preset",
    "is_plain",
    "select",
]


@dataclass(frozen=True)
class Preset:
    """`formats` gives a format per kind of tensor, the direct one for a kind that is not listed; None keeps each tensor's
    own block type (`source_kind` must match then). With `keeps_encodings`, matrices that come encoded stay so, whatever
    the kind of source.
    """

    name: str
    summary: str
    formats: Mapping[Kind, str] | None
    source_kind: str | None = None
    keeps_encodings: bool = False

    def configure(self, model: RecipeModel, recipe: Recipe, sources: Mapping[str, MatchedSource]) -> None:
        """The preset as a recipe: one assignment per parameter, by its kind and its encoding in the main source.

        Raises ConversionError for a source of another kind and for an encoding that has no target.
        """
        main = sources[CHECKPOINT]
        if self.source_kind not in (None, main.kind):
            raise ConversionError(
                f"preset {self.name} needs a {self.source_kind} source, found a {main.kind} source ({main.name})"
            )
        for parameter in model.parameters.values():
            if parameter.kind == "direct" and is_plain(main.tensors[parameter.name].encoding):
                continue  # it has its direct format already
            chosen = select(self, parameter.kind, main.tensors[parameter.name])
            recipe.assign(
                parameter.name,
                chosen.format,
                method=chosen.method,
                activation_policy=_policy(chosen, main.tensors[parameter.name]),
                note=chosen.note,
                fallback=chosen.fallback,
            )


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
    Preset("gguf", "every matrix keeps its own GGUF block type, byte for byte", None, "gguf", keeps_encodings=True),
    Preset(
        "fp8",
        "linear weights, embedding and head fp8_e4m3fn_row_bf16",
        MappingProxyType(dict.fromkeys(("linear", "embedding", "head"), "fp8_e4m3fn_row_bf16")),
    ),
    Preset(
        "keep",
        "matrices that come encoded (nvfp4, fp8, GGUF blocks) keep their words, nothing else is quantized",
        MappingProxyType({}),
        keeps_encodings=True,
    ),
    Preset("direct", "nothing quantized: every tensor in its direct format, a base for recipes", MappingProxyType({})),
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

_NEAREST_ROWS: Mapping[str, WiderFormat] = MappingProxyType(
    {BLOCK_FP8: WiderFormat("fp8_e4m3fn_row_bf16", "the same codes under one scale per row")}
)
"""Encodings of checkpoints that only decode, and what preset `keep` stores instead."""

MIXED = "mixed "
"""What the encoding of a bank of matrices in several encodings begins with."""

_MIXED_BANK = WiderFormat("q8_g32_fp16", "matrices of several encodings have no words in common")

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

_TERNARY_TARGETS: Mapping[str, str] = MappingProxyType({"pq2_0": "t2_g128_fp16", "ptq1_0": "t2_g128_fp16"})


def is_plain(encoding: str) -> bool:
    """Whether an encoding means plain numbers."""
    return encoding in _PLAIN_FORMATS


def direct_format(encoding: str) -> str:
    """The direct format that holds an encoding's values; decoded blocks are float32."""
    return _PLAIN_FORMATS.get(encoding, "fp32")


def get_preset(name: str) -> Preset:
    """The record of a preset. Raises ConversionError, listing the known names, for any other."""
    try:
        return PRESETS[name]
    except (KeyError, TypeError):
        raise ConversionError(f"unknown preset {name!r}; known: {', '.join(PRESETS)}") from None


def format_preset(format: str) -> Preset:
    """The preset that a format's name stands for: linear weights, embedding and head in that format. Raises FormatError
    for an unknown one.
    """
    name = get_format(format).name
    return Preset(
        name, f"linear weights, embedding and head {name}", dict.fromkeys(("linear", "embedding", "head"), name)
    )


def select(preset: Preset, kind: Kind, source: SourceTensor) -> Selection:
    """What `source`, a tensor of `kind`, becomes under `preset`. Raises ConversionError for an encoding outside every
    table.
    """
    if kind == "direct":
        reason = "not a matrix that a layer multiplies or looks up"
        note = "" if is_plain(source.encoding) else f"decoded from {source.encoding}: {reason}"
        return Selection(direct_format(source.encoding), note=note)
    if direct_format(source.encoding) == "int32":
        raise ConversionError(
            f"tensor {source.name!r} holds {source.encoding} words; a {kind} weight needs floating values"
        )
    if preset.keeps_encodings or preset.formats is None:
        return _kept(source)
    target = preset.formats.get(kind, direct_format(source.encoding))
    as_it_is = target == source.encoding and source.encoded_rows
    return Selection(target, "import_encoded" if as_it_is else default_method(target).name)


def _kept(source: SourceTensor) -> Selection:
    if is_plain(source.encoding):
        return Selection(direct_format(source.encoding))
    if source.encoded_rows:
        return Selection(_TERNARY_TARGETS.get(source.encoding, source.encoding), "import_encoded")
    wider = WIDER_FORMATS.get(source.encoding) or _NEAREST_ROWS.get(source.encoding)
    if source.encoding.startswith(MIXED):
        wider = _MIXED_BANK
    if wider is None:
        raise ConversionError(
            f"tensor {source.name!r}: no registered format is known to be wider than {source.encoding}"
        )
    note = f"{source.encoding} is not in the registry; stored as {wider.format} ({wider.reason})"
    return Selection(wider.format, default_method(wider.format).name, note=note, fallback=True)


def _policy(chosen: Selection, source: SourceTensor) -> str:
    """Imported words permit the activations they were made for; nvfp4 needs a divisor for 4-bit ones."""
    if chosen.method != "import_encoded":
        return "A16Only"
    record = FORMATS[chosen.format]
    if isinstance(record, BlockFloatFormat):
        return "A16Only" if source.activation_divisor is None else "AllowA4"
    return "AllowA8" if isinstance(record, GgufFormat | RowFloatFormat) else "A16Only"
