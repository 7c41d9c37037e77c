"""NInfer's official recipes by name, as rules over logical parameters. Source: spec/conversion.md 8.1.

A rule gives the projections that its patterns match a format; later rules win. What no rule names stays in its direct
format: norms, biases, routers and the projections of the delta net's gates.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ninfer_torch.convert.matching import MatchedSource
from ninfer_torch.convert.presets import get_preset
from ninfer_torch.convert.recipes import CHECKPOINT, Recipe, RecipeModel
from ninfer_torch.errors import ConversionError

__all__ = ["IMATRIX", "OFFICIAL_RECIPES", "OfficialRecipe", "Rule", "get_official"]

Q4, Q5, Q6, Q8 = "q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16"
FP8, NVFP4 = "fp8_e4m3fn_row_bf16", "nvfp4"
ABSMAX, SEARCH, IMPORT, MAXABS = "grouped_absmax", "grouped_search", "import_encoded", "fp8_row_maxabs"
QUANTIZED = "quantized"
"""The name of the source that holds encoded matrices."""

IMATRIX = "imatrix"
"""Named like a source on the command line: the importance file of a searching recipe."""

DENSE, MIXTURE = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"


@dataclass(frozen=True)
class Rule:
    """What the projections matching `patterns`, in one of `layers` where these are given, become; without a `source`
    they keep theirs.
    """

    patterns: tuple[str, ...]
    format: str
    method: str = ABSMAX
    source: str | None = None
    policy: str = "A16Only"
    layers: tuple[int, ...] | range | None = None

    def matches(self, model: RecipeModel) -> list[str]:
        """The parameters the rule is for; none where the model has no such part."""
        return [
            name
            for name, parameter in model.parameters.items()
            if parameter.kind != "direct"
            and any(fnmatch.fnmatchcase(name, pattern) for pattern in self.patterns)
            and (self.layers is None or parameter.layer in self.layers)
        ]


@dataclass(frozen=True)
class OfficialRecipe:
    """One recipe: the architecture it is for, what it needs beside the checkpoint, and its rules.

    `text` is the source of everything in the text, and `blocks` the preset that keeps a GGUF's blocks, before the rules; `separate` and `groups` change the packing (each
    group lists names below a layer); `search` holds for every grouped rule of the text.
    """

    name: str
    architecture: str
    rules: tuple[Rule, ...]
    needs: tuple[str, ...] = ()
    text: str = CHECKPOINT
    blocks: str | None = None
    separate: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    banks: bool = False
    search: bool = False

    def configure(
        self,
        model: RecipeModel,
        recipe: Recipe,
        sources: Mapping[str, MatchedSource],
        imatrix: Path | None = None,
    ) -> None:
        """Edit a recipe of an official model. Raises ConversionError for another architecture or a missing source."""
        if model.architecture != self.architecture:
            raise ConversionError(
                f"recipe {self.name} is for {self.architecture}, the source holds {model.architecture}"
            )
        given = {*sources, *([IMATRIX] if imatrix is not None else [])}
        if missing := [name for name in self.needs if name not in given]:
            raise ConversionError(f"recipe {self.name} needs --source {missing[0]}=PATH beside the main source")
        recipe.assign("text/*", source=self.text)
        if self.blocks is not None:
            get_preset(self.blocks).configure(model, recipe, sources)
        for rule in self.rules:
            if chosen := rule.matches(model):
                method, parameters = self._method(rule, chosen, imatrix)
                recipe.assign(
                    chosen,
                    rule.format,
                    method=method,
                    source=rule.source,
                    parameters=parameters,
                    activation_policy=rule.policy,
                )
        for pattern in self.separate:
            if chosen := fnmatch.filter(model.parameters, pattern):
                recipe.separate(chosen)
        self._group(model, recipe)

    def _method(self, rule: Rule, chosen: list[str], imatrix: Path | None) -> tuple[str, dict[str, Any]]:
        if not (self.search and rule.method == ABSMAX and chosen[0].startswith("text/")):
            return rule.method, {}
        return SEARCH, {"negative_scales": True} | ({"imatrix": str(imatrix)} if imatrix is not None else {})

    def _group(self, model: RecipeModel, recipe: Recipe) -> None:
        """Explicit parents: the groups of every layer, and the banks of experts, whose matrices keep their divisors."""
        wanted = [
            tuple(f"text/layers/{layer}/{name}" for name in group)
            for layer in range(model.layers)
            for group in self.groups
        ]
        if self.banks:
            wanted += [group for group in model.packing if "/moe/experts/" in group[0] or "/moe/shared/" in group[0]]
        for group in wanted:
            if all(name in model.parameters for name in group):
                recipe.group(group)


_PAIRS = (
    "text/layers/*/attention/query",
    "text/layers/*/attention/key",
    "text/layers/*/gdn/query",
    "text/layers/*/gdn/key",
)
_GATE_UP = ("text/layers/*/mlp/gate", "text/layers/*/mlp/up")
_DOWN = ("text/layers/*/attention/output", "text/layers/*/gdn/output", "text/layers/*/mlp/down")
_MLP = ("text/layers/*/mlp/*",)
_LAYERS = ("text/layers/*",)
_EXPERTS = ("text/layers/*/moe/experts/*", "text/layers/*/moe/shared/*")
_GATES = ("*/gdn/a_projection", "*/gdn/b_projection")

_VISION_PARTS = (
    Rule(("vision/*",), Q5),
    Rule(("vision/patch_embedding",), Q6),
    Rule(("vision/merger/fc*",), Q8),
    Rule(("vision/layers/*/attention/query", "vision/layers/*/attention/key", "vision/layers/*/attention/value"), Q4),
    Rule(("vision/layers/*/mlp/fc1",), Q4),
)
_OPTIONAL_PARTS = (*_VISION_PARTS, Rule(("mtp/*",), Q8))


def _ends(embedding: str, head: str) -> tuple[Rule, ...]:
    return Rule(("text/token_embedding",), embedding), Rule(("text/output_head",), head)


def _groupwise(name: str, embedding: str, head: str, *more: Rule, **options: Any) -> OfficialRecipe:
    """The dense groupwise recipes; the two gates of the delta net keep parents of their own."""
    text = (Rule(_LAYERS, Q5), Rule((*_PAIRS, *_GATE_UP), Q4), *more)
    return OfficialRecipe(name, DENSE, (*_ends(embedding, head), *text, *_OPTIONAL_PARTS), separate=_GATES, **options)


def _imported(patterns: tuple[str, ...], format: str, layers: range | None = None) -> Rule:
    policy = "AllowA4" if format == NVFP4 else "AllowA8"
    return Rule(patterns, format, IMPORT, QUANTIZED, policy, layers)


def _mixed(name: str, head: Rule, layers: range | None, text: str = CHECKPOINT) -> OfficialRecipe:
    """NVFP4 feed-forward layers among FP8 rows, from one quantized checkpoint."""
    rules = (
        Rule(("text/token_embedding",), FP8, MAXABS),
        _imported(_LAYERS, FP8),
        _imported(_MLP, NVFP4, layers),
        head,
        *_OPTIONAL_PARTS,
    )
    return OfficialRecipe(name, DENSE, rules, needs=(QUANTIZED,), text=text, separate=_GATES)


_FIRST_56 = range(56)
_OWN_HEAD = Rule(("text/output_head",), FP8, MAXABS)

_RECORDS = (
    _groupwise("qwen3_6_27b", Q6, Q6),
    _groupwise("qwen3_8_27b", Q8, Q8),
    _groupwise("qwen3_8_27b_q6", Q8, Q8, Rule(_GATE_UP, Q6)),
    _groupwise(
        "qwen3_8_27b_imatrix", Q4, Q6, Rule(_DOWN, Q4, layers=range(36, 1 << 16)), needs=(IMATRIX,), search=True
    ),
    OfficialRecipe(
        "qwen3_6_35b_a3b",
        MIXTURE,
        (
            *_ends(Q8, Q6),
            Rule(_LAYERS, Q8),
            Rule(("text/layers/*/moe/experts/*/gate", "text/layers/*/moe/experts/*/up"), Q4),
            Rule(("text/layers/*/moe/experts/*/down",), Q5),
            Rule(("text/layers/*/moe/experts/*/down",), Q6, layers=(34, 38, 39)),
            *_OPTIONAL_PARTS,
        ),
    ),
    OfficialRecipe(
        "qwen3_6_35b_a3b_nvfp4",
        MIXTURE,
        (*_ends(Q8, Q6), Rule(_LAYERS, Q8), _imported(_EXPERTS, NVFP4), *_OPTIONAL_PARTS),
        needs=(QUANTIZED,),
        banks=True,
    ),
    OfficialRecipe(
        "qwen3_6_27b_nvfp4",
        DENSE,
        (
            *_ends(Q8, Q8),
            _imported(_LAYERS, NVFP4),
            Rule(
                tuple(f"text/layers/*/attention/{name}" for name in ("query", "key", "gate", "value")),
                "bf16",
                "cast_direct",
                CHECKPOINT,
                layers=range(24),
            ),
            Rule(("text/layers/*/attention/output",), "bf16", "cast_direct", CHECKPOINT, layers=(3, 7)),
            Rule(("text/layers/*/gdn/output",), "bf16", "cast_direct", CHECKPOINT, layers=(4,)),
            *_OPTIONAL_PARTS,
        ),
        needs=(QUANTIZED,),
        separate=_GATES,
    ),
    _mixed("qwen3_8_27b_nvfp4", _imported(("text/output_head",), FP8), _FIRST_56, text=QUANTIZED),
    _mixed("qwen3_8_27b_nvfp4_nvidia", Rule(("text/output_head",), FP8, MAXABS, QUANTIZED), None),
    _mixed("qwen3_8_27b_nvfp4_orcarouter", _OWN_HEAD, _FIRST_56),
    OfficialRecipe(
        "bonsai2_27b_ternary",
        DENSE,
        _VISION_PARTS,
        blocks="gguf",
        separate=_GATES,
        groups=(
            ("attention/query", "attention/key"),
            ("attention/gate", "attention/value"),
            ("gdn/query", "gdn/key"),
            ("gdn/value", "gdn/z"),
            ("mlp/gate", "mlp/up"),
        ),
    ),
    OfficialRecipe("qwen3_8_27b_gguf", DENSE, _VISION_PARTS, blocks="gguf", separate=_GATES),
    OfficialRecipe("qwen3_6_35b_a3b_gguf", MIXTURE, (), blocks="gguf"),
)

OFFICIAL_RECIPES: Mapping[str, OfficialRecipe] = MappingProxyType({record.name: record for record in _RECORDS})

_WITHOUT_TABLES = ("qwen3_8_flash_next_gguf", "qwen3_8_flash_next_gsq_q2")


def get_official(name: str) -> OfficialRecipe | None:
    """The official recipe of a name, None for any other. Raises ConversionError for one whose model has no tables here."""
    if name in _WITHOUT_TABLES:
        raise ConversionError(
            f"recipe {name} is for Qwen3.8-Flash-Next, whose parameters have no table here; known are "
            f"{', '.join(OFFICIAL_RECIPES)}"
        )
    return OFFICIAL_RECIPES.get(name)
