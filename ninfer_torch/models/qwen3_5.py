"""Qwen3.5: its parameters as tables, beside their Transformers names. Source: spec/parameters.md 3 to 6.

Symbols: H hidden size, V vocabulary, D head width, Q and KV widths of all query and key heads, Nq query heads; of the
gated delta net KG and VG widths of all key and value heads, C convolution channels, T taps, nv value heads, dv their
width; I width of the feed-forward layer. Of the vision tower h hidden size, i feed-forward width, px pixels of a patch,
M width of a merged patch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ninfer_torch.artifact.reader import Artifact
from ninfer_torch.models.base import (
    Architecture,
    ModelParameter,
    Placement,
    Row,
    Source,
    expand,
    module_prefixes,
    with_inputs,
)
from ninfer_torch.models.qwen3_5_config import (
    FULL,
    LINEAR,
    Family,
    check_components,
    checkpoint_config,
    component_configs,
)

__all__ = ["DENSE", "Qwen3_5"]

_NORMS = (
    Row("input_layernorm.weight", (Source("input_norm", "H"),)),
    Row("post_attention_layernorm.weight", (Source("post_attention_norm", "H"),)),
)

_ATTENTION = (
    Row(
        "self_attn.q_proj.weight",
        (
            Source("attention/query", "Q H", "mixer_input"),
            Source("attention/gate", "Q H", "mixer_input"),
        ),
        slices="Nq",  # head by head: D rows of the query, D rows of its gate
    ),
    Row("self_attn.k_proj.weight", (Source("attention/key", "KV H", "mixer_input"),)),
    Row("self_attn.v_proj.weight", (Source("attention/value", "KV H", "mixer_input"),)),
    Row("self_attn.q_norm.weight", (Source("attention/query_norm", "D"),)),
    Row("self_attn.k_norm.weight", (Source("attention/key_norm", "D"),)),
    Row("self_attn.o_proj.weight", (Source("attention/output", "H Q", "attention/gated_output"),)),
)

_DELTA_NET = (
    Row(
        "linear_attn.in_proj_qkv.weight",
        (
            Source("gdn/query", "KG H", "mixer_input"),
            Source("gdn/key", "KG H", "mixer_input"),
            Source("gdn/value", "VG H", "mixer_input"),
        ),
    ),
    Row("linear_attn.in_proj_z.weight", (Source("gdn/z", "VG H", "mixer_input"),)),
    Row("linear_attn.in_proj_a.weight", (Source("gdn/a_projection", "nv H", "mixer_input"),)),
    Row("linear_attn.in_proj_b.weight", (Source("gdn/b_projection", "nv H", "mixer_input"),)),
    Row("linear_attn.A_log", (Source("gdn/a_log", "nv", format="fp32"),)),
    Row("linear_attn.dt_bias", (Source("gdn/dt_bias", "nv", format="fp32"),)),
    Row("linear_attn.conv1d.weight", (Source("gdn/convolution", "T C"),), shape="C 1 T", transposed=True),
    Row("linear_attn.norm.weight", (Source("gdn/norm", "dv"),)),
    Row("linear_attn.out_proj.weight", (Source("gdn/output", "H VG", "gdn/gated_output"),)),
)

_DENSE_FFN = (
    Row("mlp.gate_proj.weight", (Source("mlp/gate", "I H", "ffn_input"),)),
    Row("mlp.up_proj.weight", (Source("mlp/up", "I H", "ffn_input"),)),
    Row("mlp.down_proj.weight", (Source("mlp/down", "H I", "mlp/product"),)),
)

_MTP_STEM = (
    Row("layers.0.eh_proj.weight", (Source("input_projection", "H 2H", "stem_input"),)),
    Row("layers.0.enorm.weight", (Source("embedding_norm", "H"),)),
    Row("layers.0.hnorm.weight", (Source("hidden_norm", "H"),)),
    Row("layers.0.post_norm.weight", (Source("final_norm", "H"),)),
)

_VISION_STEM = (
    Row(
        "patch_embed.proj.weight",
        (Source("patch_embedding", "h px", "patch_input"),),
        shape="h channels pt ps ps",
    ),
    Row("patch_embed.proj.bias", (Source("patch_embedding_bias", "h"),)),
    Row("pos_embed.weight", (Source("position_embedding", "positions h"),)),
)
_VISION_BLOCK = (
    Row("norm1.weight", (Source("norm1_weight", "h"),)),
    Row("norm1.bias", (Source("norm1_bias", "h"),)),
    Row("norm2.weight", (Source("norm2_weight", "h"),)),
    Row("norm2.bias", (Source("norm2_bias", "h"),)),
    Row(
        "attn.qkv.weight",
        (
            Source("attention/query", "h h", "attention_input"),
            Source("attention/key", "h h", "attention_input"),
            Source("attention/value", "h h", "attention_input"),
        ),
    ),
    Row(
        "attn.qkv.bias",
        (
            Source("attention/query_bias", "h"),
            Source("attention/key_bias", "h"),
            Source("attention/value_bias", "h"),
        ),
    ),
    Row("attn.proj.weight", (Source("attention/output", "h h", "attention_output"),)),
    Row("attn.proj.bias", (Source("attention/output_bias", "h"),)),
    Row("mlp.linear_fc1.weight", (Source("mlp/fc1", "i h", "mlp_input"),)),
    Row("mlp.linear_fc1.bias", (Source("mlp/fc1_bias", "i"),)),
    Row("mlp.linear_fc2.weight", (Source("mlp/fc2", "h i", "mlp_activation"),)),
    Row("mlp.linear_fc2.bias", (Source("mlp/fc2_bias", "h"),)),
)
_VISION_MERGER = (
    Row("merger.norm.weight", (Source("norm_weight", "h"),)),
    Row("merger.norm.bias", (Source("norm_bias", "h"),)),
    Row("merger.linear_fc1.weight", (Source("fc1", "M M", "input"),)),
    Row("merger.linear_fc1.bias", (Source("fc1_bias", "M"),)),
    Row("merger.linear_fc2.weight", (Source("fc2", "H M", "activation"),)),
    Row("merger.linear_fc2.bias", (Source("fc2_bias", "H"),)),
)

_EMBEDDING = Row("embed_tokens.weight", (Source("token_embedding", "V H"),))
_HEAD = Row("lm_head.weight", (Source("output_head", "V H", "final_hidden"),))
_FINAL_NORM = Row("norm.weight", (Source("final_norm", "H"),))

_DRAFTERS = ("mtp", "dflash", "dflash2")
"""Components that multiply the output head too, each with an input of its own."""

DENSE = Family(
    text_class="Qwen3_5ForCausalLM",
    conditional_class="Qwen3_5ForConditionalGeneration",
    mtp_class="Qwen3_5MTP",
    model_type="qwen3_5",
    text_type="qwen3_5_text",
    vision_type="qwen3_5_vision",
    ffn_members=("intermediate_size",),
)


class Qwen3_5(Architecture):
    """The dense models: text, vision tower and multi-token prediction. Draft models are read through the artifact."""

    family = DENSE
    ffn: tuple[Row, ...] = _DENSE_FFN
    anchors: Mapping[str, str] = {
        "text": "Qwen3_5TextModel",
        "vision": "Qwen3_5VisionModel",
        "mtp": "MtpModel",
    }

    @property
    def name(self) -> str:  # type: ignore[override]
        """The class name that `text.config.architectures` holds."""
        return self.family.text_class

    def checkpoint_config(self, artifact: Artifact) -> dict[str, Any]:
        """The config.json of an equivalent checkpoint; ids of image and video tokens are the tokenizer's."""
        return checkpoint_config(self.family, self._configs(artifact), _added_tokens(artifact))

    def component_configs(self, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The component configs of a Transformers config (spec/parameters.md 2). Raises ConversionError."""
        return component_configs(self.family, config)

    def parameters(self, artifact: Artifact) -> tuple[ModelParameter, ...]:
        """Every Transformers parameter of text, vision and mtp, as far as the artifact declares them."""
        return self.parameters_of(self._configs(artifact), artifact.components)

    def parameters_of(self, configs: Mapping[str, Mapping[str, Any]], declared: Any = ()) -> tuple[ModelParameter, ...]:
        """The same from component configs; `declared` are the ids of all components, whose draft models use the head."""
        sizes = self.sizes(configs)
        found = [*self._text(configs["text"], sizes, [name for name in _DRAFTERS if name in declared])]
        if "vision" in configs:
            found += self._vision(configs["vision"], sizes)
        if "mtp" in configs:
            found += expand(_MTP_STEM, sizes, anchor="mtp", logical="mtp/", target="")
            rows = _NORMS + _ATTENTION + self.ffn
            found += expand(rows, sizes, anchor="mtp", logical="mtp/layers/0/", target="layers.0.mtp_block.")
        return tuple(found)

    def checkpoint_names(self, artifact: Artifact) -> list[str]:
        """Names of the conditional-generation class with a vision tower, of the causal one without."""
        prefixes = self.checkpoint_prefixes(artifact)
        return [prefixes[p.anchor] + p.name for p in self.parameters(artifact) if p.anchor in prefixes]

    def checkpoint_prefixes(self, artifact: Artifact) -> Mapping[str, str]:
        """Prefixes of the class that `checkpoint_config` names; mtp is not part of it."""
        if "vision" in artifact.components:
            return {"text": "model.language_model.", "vision": "model.visual.", "": ""}
        return {"text": "model.", "": ""}

    def place(self, model: Any, artifact: Artifact) -> Placement:
        """Places by module class, so that any class around the text model, the vision tower or both is filled."""
        prefixes = module_prefixes(model, self.anchors)
        names = set(model.state_dict())
        known = self.parameters(artifact)
        placed = {prefixes[p.anchor] + p.name: p for p in known if p.anchor in prefixes}
        placed = {name: p for name, p in placed.items() if p.anchor or name in names}  # a model may lack the head
        logical = {source.name for parameter in known for source in parameter.sources}
        roots = tuple(f"{component}/" for component in ("text", "vision", "mtp") if component in artifact.components)
        return Placement(placed, tuple(n for n in artifact.bindings if n.startswith(roots) and n not in logical))

    def _configs(self, artifact: Artifact) -> dict[str, Mapping[str, Any]]:
        configs = {
            name: artifact.components[name].config for name in ("text", "vision", "mtp") if name in artifact.components
        }
        check_components(self.family, configs, str(artifact.path))
        return configs

    def sizes(self, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
        """The numbers behind the symbols of the tables."""
        text = configs["text"]
        sizes = {"H": text["hidden_size"], "2H": 2 * text["hidden_size"], "V": text["vocab_size"]}
        sizes |= {symbol: text[name] for symbol, name in {"I": "intermediate_size"}.items() if name in text}
        if "head_dim" in text:
            width, heads = text["head_dim"], text["num_attention_heads"]
            sizes |= {"D": width, "Nq": heads, "Q": heads * width, "KV": text["num_key_value_heads"] * width}
        if "linear_num_value_heads" in text:
            keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
            heads, width = text["linear_num_value_heads"], text["linear_value_head_dim"]
            sizes |= {"KG": keys, "VG": heads * width, "C": 2 * keys + heads * width}
            sizes |= {"nv": heads, "dv": width, "T": text["linear_conv_kernel_dim"], "1": 1}
        if "vision" in configs:
            sizes |= _vision_sizes(configs["vision"])
        return sizes

    def _text(
        self, config: Mapping[str, Any], sizes: Mapping[str, int], drafters: list[str]
    ) -> Iterator[ModelParameter]:
        (embedding,) = expand((_EMBEDDING,), sizes, anchor="text", logical="text/", target="")
        (table,) = embedding.sources
        folded = replace(table, packable=True, folded_like=("text/output_head", "text/final_hidden"))
        yield replace(embedding, sources=(folded,))
        (head,) = expand((_HEAD,), sizes, anchor="", logical="text/", target="")
        yield with_inputs(head, *(f"{drafter}/final_hidden" for drafter in drafters))
        yield from expand((_FINAL_NORM,), sizes, anchor="text", logical="text/", target="")
        for index, kind in enumerate(config["layer_types"]):
            rows = _NORMS + {FULL: _ATTENTION, LINEAR: _DELTA_NET}[kind] + self.ffn
            yield from expand(rows, sizes, anchor="text", logical=f"text/layers/{index}/", target=f"layers.{index}.")

    def _vision(self, config: Mapping[str, Any], sizes: Mapping[str, int]) -> Iterator[ModelParameter]:
        yield from expand(_VISION_STEM, sizes, anchor="vision", logical="vision/", target="")
        for index in range(config["depth"]):
            prefixes = {"logical": f"vision/layers/{index}/", "target": f"blocks.{index}."}
            yield from expand(_VISION_BLOCK, sizes, anchor="vision", **prefixes)
        yield from expand(_VISION_MERGER, sizes, anchor="vision", logical="vision/merger/", target="")


def _vision_sizes(config: Mapping[str, Any]) -> dict[str, int]:
    side, frames, width = config["patch_size"], config["temporal_patch_size"], config["hidden_size"]
    return {
        "h": width,
        "i": config["intermediate_size"],
        "positions": config["num_position_embeddings"],
        "channels": 3,
        "pt": frames,
        "ps": side,
        "px": 3 * frames * side * side,
        "M": config["spatial_merge_size"] ** 2 * width,
    }


def _added_tokens(artifact: Artifact) -> dict[str, int]:
    """Text -> id of the tokens that the tokenizer's files list by themselves."""
    resources, found = artifact.components["text"].resources, {}
    if "tokenizer.json" in resources:
        tokenizer = json.loads(artifact.resource(resources["tokenizer.json"]))
        found = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    if "tokenizer_config.json" in resources:
        members = json.loads(artifact.resource(resources["tokenizer_config.json"]))
        listed = members.get("added_tokens_decoder", {})
        found |= {token["content"]: int(index) for index, token in listed.items()}
    return found
