"""Component configs of the Qwen3.5 family beside the configs of Transformers. Source: spec/parameters.md 2.

An artifact stores exactly the members of the tables below; what they leave out is implied by the architecture.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ninfer_torch.errors import ArtifactError, ConversionError

__all__ = ["Family", "check_components", "checkpoint_config", "component_configs"]

FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True)
class Family:
    """The names that tell the dense and the mixture-of-experts models apart, and the members their layers need."""

    text_class: str
    conditional_class: str
    mtp_class: str
    model_type: str
    text_type: str
    vision_type: str
    ffn_members: tuple[str, ...]


@dataclass(frozen=True)
class _Member:
    """A config member, what its values must be, and when it is there: `always`, or with a kind of layer."""

    name: str
    rule: str
    legal: Callable[[Any], bool]
    needed: str = "always"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 32


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_layers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and set(value) <= {FULL, LINEAR}


def _is_rope(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and value.keys() == {"rope_theta", "partial_rotary_factor", "mrope_section"}
        and _is_real(value["rope_theta"])
        and _is_real(value["partial_rotary_factor"])
        and value["partial_rotary_factor"] <= 1
        and isinstance(value["mrope_section"], list | tuple)
        and len(value["mrope_section"]) == 3
        and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value["mrope_section"])
    )


def _count(name: str, needed: str = "always") -> _Member:
    return _Member(name, "a positive integer of 32 bits", _is_count, needed)


_TEXT_MEMBERS = (
    _count("hidden_size"),
    _count("vocab_size"),
    _count("num_hidden_layers"),
    _count("max_position_embeddings"),
    _Member("tie_word_embeddings", "true or false", lambda value: isinstance(value, bool)),
    _Member("rms_norm_eps", "a positive number", _is_real),
    _Member("layer_types", f"a list of {FULL!r} and {LINEAR!r}", _is_layers),
    _count("num_attention_heads", FULL),
    _count("num_key_value_heads", FULL),
    _count("head_dim", FULL),
    _Member(
        "rope_parameters", "exactly rope_theta, partial_rotary_factor <= 1, mrope_section of three", _is_rope, FULL
    ),
    _count("linear_num_key_heads", LINEAR),
    _count("linear_key_head_dim", LINEAR),
    _count("linear_num_value_heads", LINEAR),
    _count("linear_value_head_dim", LINEAR),
    _count("linear_conv_kernel_dim", LINEAR),
)
_VISION_MEMBERS = tuple(
    map(
        _count,
        (
            "depth",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "patch_size",
            "temporal_patch_size",
            "spatial_merge_size",
            "num_position_embeddings",
        ),
    )
)
_MEDIA_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def check_components(family: Family, components: Mapping[str, Mapping[str, Any]], where: str) -> None:
    """Check the configs of `text`, `vision` and `mtp` (those that `components` has) against spec/parameters.md 2.

    Raises ArtifactError naming `where`, the component and the member: kind `schema` for a missing, unknown or ill-typed
    member, `value` for sizes that do not fit together.
    """
    text = components["text"]
    present = {FULL, LINEAR} if not _is_layers(text.get("layer_types")) else set(text["layer_types"])
    if "mtp" in components:
        present.add(FULL)
    members = [member for member in _TEXT_MEMBERS if member.needed in ("always", *present)]
    known = {member.name for member in _TEXT_MEMBERS}
    members += [_count(name) for name in family.ffn_members]
    _check_members(text, members, known, f"{where}: component 'text'")
    _check_names(text, f"{where}: component 'text'", architectures=[family.text_class], model_type=family.text_type)
    _check_sizes(text, present, f"{where}: component 'text'")
    if "vision" in components:
        place = f"{where}: component 'vision'"
        _check_members(components["vision"], _VISION_MEMBERS, set(), place, own=("model_type",))
        _check_names(components["vision"], place, model_type=family.vision_type)
        _check_vision_sizes(components["vision"], place)
    if "mtp" in components:
        place = f"{where}: component 'mtp'"
        _check_members(components["mtp"], (), set(), place, own=("architectures",))
        _check_names(components["mtp"], place, architectures=[family.mtp_class])


def _check_members(
    config: Mapping[str, Any],
    members: Any,
    optional: set[str],
    place: str,
    own: tuple[str, ...] = ("architectures", "model_type"),
) -> None:
    names = {member.name for member in members}
    missing = sorted((names | set(own)) - config.keys())
    unknown = sorted(config.keys() - names - optional - set(own))
    if missing or unknown:
        raise ArtifactError(
            f"{place}: config lacks {', '.join(missing) or 'nothing'} and has unknown members "
            f"{', '.join(unknown) or 'none'}",
            "schema",
        )
    for member in members:
        if not member.legal(config[member.name]):
            raise ArtifactError(
                f"{place}: config member {member.name!r} is {config[member.name]!r}, expected {member.rule}", "schema"
            )


def _check_names(config: Mapping[str, Any], place: str, **expected: Any) -> None:
    for name, value in expected.items():
        found = config[name]
        if (list(found) if isinstance(found, tuple) else found) != value:
            raise ArtifactError(f"{place}: config member {name!r} is {found!r}, expected {value!r}", "schema")


def _require(condition: bool, place: str, rule: str) -> None:
    if not condition:
        raise ArtifactError(f"{place}: expected {rule}", "value")


def _check_sizes(text: Mapping[str, Any], present: set[str], place: str) -> None:
    layers, found = text["num_hidden_layers"], len(text["layer_types"])
    _require(layers == found, place, f"num_hidden_layers = {layers} entries in layer_types, found {found}")
    if FULL in present:
        heads, shared = text["num_attention_heads"], text["num_key_value_heads"]
        _require(heads % shared == 0, place, f"num_attention_heads ({heads}) % num_key_value_heads ({shared}) = 0")
        _check_rotary(text, place)
    if LINEAR in present:
        values, keys = text["linear_num_value_heads"], text["linear_num_key_heads"]
        _require(values % keys == 0, place, f"linear_num_value_heads ({values}) % linear_num_key_heads ({keys}) = 0")
    if "num_experts" in text:
        chosen, experts = text["num_experts_per_tok"], text["num_experts"]
        _require(chosen <= experts, place, f"num_experts_per_tok ({chosen}) <= num_experts ({experts})")


def _check_rotary(text: Mapping[str, Any], place: str) -> None:
    rope = text["rope_parameters"]
    width, sections = int(text["head_dim"] * rope["partial_rotary_factor"]), list(rope["mrope_section"])
    _require(width > 0 and width % 2 == 0, place, f"an even rotary width, found {width}")
    _require(sum(sections) == width // 2, place, f"mrope_section of sum {width // 2}, found {sections}")
    axes = [
        1 if pair % 3 == 1 and pair < 3 * sections[1] else 2 if pair % 3 == 2 and pair < 3 * sections[2] else 0
        for pair in range(width // 2)
    ]
    counts = [axes.count(axis) for axis in range(3)]
    _require(counts == sections, place, f"an interleavable mrope_section, found {sections} for axes {counts}")


def _check_vision_sizes(vision: Mapping[str, Any], place: str) -> None:
    width, heads, positions = vision["hidden_size"], vision["num_heads"], vision["num_position_embeddings"]
    _require(width % heads == 0, place, f"hidden_size ({width}) % num_heads ({heads}) = 0")
    _require(width // heads % 4 == 0, place, f"a head width that 4 divides, found {width // heads}")
    _require(math.isqrt(positions) ** 2 == positions, place, f"a square num_position_embeddings, found {positions}")


def checkpoint_config(
    family: Family, components: Mapping[str, Mapping[str, Any]], added_tokens: Mapping[str, int]
) -> dict[str, Any]:
    """The config.json of an equivalent Transformers checkpoint; of the conditional-generation class with a vision tower.

    `added_tokens` (text -> id, out of the tokenizer) gives the ids of image and video tokens, which no component stores.
    """
    text = {key: value for key, value in components["text"].items() if key != "architectures"}
    if "rope_parameters" in text:
        text["rope_parameters"] = {"rope_type": "default", "mrope_interleaved": True, **text["rope_parameters"]}
    if "mtp" in components:  # what Transformers' MtpModel asks the text config for
        text |= {"mtp_num_hidden_layers": 1, "num_mtp_layers": 1, "mtp_layer_types": [FULL]}
    text["dtype"] = "bfloat16"
    if "vision" not in components:
        return {"architectures": [family.text_class], **text}
    vision = {**components["vision"], "out_hidden_size": text["hidden_size"], "dtype": "bfloat16"}
    tokens = {name: added_tokens[token] for name, token in _MEDIA_TOKENS.items() if token in added_tokens}
    return {
        "architectures": [family.conditional_class],
        "model_type": family.model_type,
        "dtype": "bfloat16",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
        "vision_config": vision,
        **tokens,
    }


def component_configs(family: Family, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The component configs of a Transformers config: the inverse of `checkpoint_config`.

    `config` is `config.to_dict()` or the content of a config.json. Raises ConversionError for a model that the
    architecture does not describe, ArtifactError for sizes that do not fit together.
    """
    source = config.get("text_config") or config
    components: dict[str, dict[str, Any]] = {"text": _text_component(family, source, config)}
    if config.get("vision_config"):
        components["vision"] = _vision_component(family, config["vision_config"], source["hidden_size"])
    depth = source.get("num_mtp_layers") or source.get("mtp_num_hidden_layers") or 0
    if depth:
        _implied({"mtp layers": depth}, {"mtp layers": 1})
        components["mtp"] = {"architectures": [family.mtp_class]}
    check_components(family, components, "config")
    return components


def _text_component(family: Family, source: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    _implied(source, {"hidden_act": "silu", "attention_bias": False, "attn_output_gate": True})
    layers = source.get("layer_types") or _alternating_layers(source)
    rope = source.get("rope_parameters") or {}
    _implied(rope, {"rope_type": "default", "mrope_interleaved": True})
    present = {*layers, FULL} if source.get("mtp_num_hidden_layers") or source.get("num_mtp_layers") else {*layers}
    derived: dict[str, Any] = {
        "tie_word_embeddings": bool(outer.get("tie_word_embeddings", source.get("tie_word_embeddings", False))),
        "rms_norm_eps": struct.unpack("f", struct.pack("f", source["rms_norm_eps"]))[0],
        "layer_types": list(layers),
        "rope_parameters": {
            "rope_theta": float(rope.get("rope_theta", source.get("rope_theta", 10000.0))),
            "partial_rotary_factor": rope.get("partial_rotary_factor", source.get("partial_rotary_factor", 0.25)),
            "mrope_section": list(rope.get("mrope_section", (11, 11, 10))),
        },
    }
    names = [member.name for member in _TEXT_MEMBERS if member.needed in ("always", *present)]
    members = {name: derived[name] if name in derived else _given(source, name) for name in names}
    ffn = {name: _given(source, name) for name in family.ffn_members}
    return {"architectures": [family.text_class], "model_type": family.text_type, **members, **ffn}


def _vision_component(family: Family, source: Mapping[str, Any], text_width: int) -> dict[str, Any]:
    _implied(
        source,
        {
            "in_channels": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "deepstack_visual_indexes": [],
            "out_hidden_size": text_width,
        },
    )
    return {
        "model_type": family.vision_type,
        **{member.name: _given(source, member.name) for member in _VISION_MEMBERS},
    }


def _alternating_layers(source: Mapping[str, Any]) -> list[str]:
    interval = source.get("full_attention_interval") or 4
    return [LINEAR if (index + 1) % interval else FULL for index in range(source["num_hidden_layers"])]


def _given(source: Mapping[str, Any], name: str) -> Any:
    if source.get(name) is None:
        raise ConversionError(f"config member {name!r} is missing from the {source.get('model_type')!r} config")
    return source[name]


def _implied(source: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Refuse a config whose members contradict what the architecture implies; absent members agree."""
    for name, value in expected.items():
        if name in source and source[name] is not None and source[name] != value:
            raise ConversionError(f"config member {name!r} is {source[name]!r}; NInfer's Qwen3.5 has {value!r}")
