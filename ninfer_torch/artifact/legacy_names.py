"""Names of container versions 1 and 2 in version 3 terms, as tables.

Source: spec/container.md 13.2 and 13.3 for the old names, spec/parameters.md 3 to 8 for the new ones and their inputs.
Rows of a block are given by the symbols of spec/parameters.md 1, resolved from a component's config. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "BLOCKS",
    "DIVISOR_SITES",
    "DIVISOR_SUFFIX",
    "DRAFT_ALIASES",
    "ENCODINGS",
    "EXPERT",
    "FORMATS",
    "GLOBALS",
    "LAYER_PARTS",
    "LAYOUTS",
    "POLICIES",
    "RENAMED",
    "RESOURCE_PREFIX",
    "VISION_RESOURCES",
]

FORMATS: Mapping[str, str] = {
    "BF16": "bf16",
    "FP32": "fp32",
    "I32": "int32",
    "Q4G64_F16S": "q4_g64_fp16",
    "Q5G64_F16S": "q5_g64_fp16",
    "Q6G64_F16S": "q6_g64_fp16",
    "W8G32_F16S": "q8_g32_fp16",
    "NVFP4": "nvfp4",
    "FP8_E4M3FN_ROW_BF16S": "fp8_e4m3fn_row_bf16",
    "T2G128_F16S": "t2_g128_fp16",  # forks only; no published file has it
}

LAYOUTS: Mapping[str, str] = {
    "contiguous-le-v1": "contiguous_le_v1",
    "row-split-k128-v1": "row_split_k128_v1",
    "blockscale-k16-m128x4-v1": "block_scale_k16_m128x4_v1",
    "row-scale-v1": "row_scale_v1",
}

ENCODINGS: Mapping[str, str] = {"raw-bytes-v1": "raw_bytes_v1"}

POLICIES: Mapping[str, str] = {"nvfp4": "AllowA4", "fp8_e4m3fn_row_bf16": "AllowA8"}
"""Activation policy of a use by the parameter's format; A16Only for every other."""

RESOURCE_PREFIX = "frontend/"
VISION_RESOURCES = ("preprocessor_config.json", "video_preprocessor_config.json")
"""Files under `frontend/` that belong to component `vision`; the others are the text model's."""

RENAMED: Mapping[str, str] = {
    "text/draft_head": "proposal/head",
    "text/draft_head_token_ids": "proposal/token_ids",
    "vision/merger/norm/weight": "vision/merger/norm_weight",
    "vision/merger/norm/bias": "vision/merger/norm_bias",
}
"""Old names outside layers that differ from the logical name."""

# An old object of a layer -> the parameters in its consecutive row blocks, with their rows.
_DECODER_BLOCKS = {
    "attention/query_key": (("attention/query", "Q"), ("attention/key", "KV")),
    "attention/gate_value": (("attention/gate", "Q"), ("attention/value", "KV")),
    "attention/query_key_gate_value": (
        ("attention/query", "Q"),
        ("attention/key", "KV"),
        ("attention/gate", "Q"),
        ("attention/value", "KV"),
    ),
    "gdn/query_key": (("gdn/query", "KG"), ("gdn/key", "KG")),
    "gdn/value_z": (("gdn/value", "VG"), ("gdn/z", "VG")),
    "gdn/query_key_value_z": (("gdn/query", "KG"), ("gdn/key", "KG"), ("gdn/value", "VG"), ("gdn/z", "VG")),
    "gdn/a_b_projection": (("gdn/a_projection", "nv"), ("gdn/b_projection", "nv")),
    "mlp/gate_up": (("mlp/gate", "I"), ("mlp/up", "I")),
    "moe/router_shared_gate": (("moe/router", "E"), ("moe/shared_score", "1")),
    "moe/routed_gate_up": (("moe/experts/{e}/gate", "IE"), ("moe/experts/{e}/up", "IE")),
    "moe/routed_down": (("moe/experts/{e}/down", "H"),),
    "moe/shared_gate_up": (("moe/shared/gate", "IS"), ("moe/shared/up", "IS")),
    "moe/shared_down": (("moe/shared/down", "H"),),
}
_DRAFT_BLOCKS = {
    "attention/query_key_value": (("attention/query", "Q"), ("attention/key", "KV"), ("attention/value", "KV")),
    "mlp/gate_up": (("mlp/gate", "I"), ("mlp/up", "I")),
}
_VISION_BLOCKS = {
    "attention/qkv": (("attention/query", "H"), ("attention/key", "H"), ("attention/value", "H")),
    "attention/qkv_bias": (("attention/query_bias", "H"), ("attention/key_bias", "H"), ("attention/value_bias", "H")),
    "norm1/weight": (("norm1_weight", "H"),),
    "norm1/bias": (("norm1_bias", "H"),),
    "norm2/weight": (("norm2_weight", "H"),),
    "norm2/bias": (("norm2_bias", "H"),),
}

BLOCKS: Mapping[str, Mapping[str, tuple[tuple[str, str], ...]]] = {
    "text": _DECODER_BLOCKS,
    "mtp": _DECODER_BLOCKS,
    "vision": _VISION_BLOCKS,
    "dflash": _DRAFT_BLOCKS,
    "dflash2": _DRAFT_BLOCKS,
}
"""Component -> old suffix within a layer -> (logical suffix, rows) in order; `{e}` repeats the blocks for every expert.

A suffix that is not listed is the logical suffix itself.
"""

EXPERT = "{e}"

DRAFT_ALIASES: Mapping[str, str] = {
    "attention/key": "attention/context_key",
    "attention/value": "attention/context_value",
}
"""Second names of a draft layer's rows: one trained matrix in two roles."""

DIVISOR_SUFFIX = "/input_scale_divisor"
DIVISOR_SITES: Mapping[str, tuple[str, ...]] = {
    "attention/input_projection": ("attention/query", "attention/key", "attention/gate", "attention/value"),
    "attention/output_projection": ("attention/output",),
    "gdn/input_projection": ("gdn/query", "gdn/key", "gdn/value", "gdn/z"),
    "gdn/output_projection": ("gdn/output",),
    "mlp/gate_up_projection": ("mlp/gate", "mlp/up"),
    "mlp/down_projection": ("mlp/down",),
}
"""Site of an activation divisor within a layer -> the parameters that take it as auxiliary."""

Inputs = Mapping[str, tuple[str, ...]]

_DRAFT_GLOBALS: Inputs = {
    "{C}/feature_projection": ("{C}/target_features",),
    "{C}/context_norm": (),
    "{C}/final_norm": (),
}
_DRAFT_LAYER: Inputs = {
    "input_norm": (),
    "post_attention_norm": (),
    "attention/query": ("{P}query_projection_input",),
    "attention/key": ("{P}query_projection_input",),
    "attention/value": ("{P}query_projection_input",),
    "attention/context_key": ("{C}/context_input",),
    "attention/context_value": ("{C}/context_input",),
    "attention/query_norm": (),
    "attention/key_norm": (),
    "attention/output": ("{P}attention_output",),
    "mlp/gate": ("{P}mlp_input",),
    "mlp/up": ("{P}mlp_input",),
    "mlp/down": ("{P}mlp_product",),
}

GLOBALS: Mapping[str, Inputs] = {
    "text": {
        "text/token_embedding": (),
        "text/output_head": ("text/final_hidden", "{D}/final_hidden"),
        "text/final_norm": (),
    },
    "proposal": {"proposal/head": ("{D}/final_hidden",), "proposal/token_ids": ()},
    "mtp": {
        "mtp/input_projection": ("mtp/stem_input",),
        "mtp/embedding_norm": (),
        "mtp/hidden_norm": (),
        "mtp/final_norm": (),
    },
    "vision": {
        "vision/patch_embedding": ("vision/patch_input",),
        "vision/patch_embedding_bias": (),
        "vision/position_embedding": (),
        "vision/merger/norm_weight": (),
        "vision/merger/norm_bias": (),
        "vision/merger/fc1": ("vision/merger/input",),
        "vision/merger/fc1_bias": (),
        "vision/merger/fc2": ("vision/merger/activation",),
        "vision/merger/fc2_bias": (),
    },
    "dflash": _DRAFT_GLOBALS,
    "dflash2": {
        **_DRAFT_GLOBALS,
        "{C}/candidate_selector/hidden_projection": ("{C}/final_hidden",),
        "{C}/candidate_selector/predecessor_codebook": (),
        "{C}/candidate_selector/successor_codebook": (),
    },
}
"""Component -> its parameters outside layers -> the inputs of their uses.

`{C}` stands for the component, `{D}` for every component that drafts, one input each.
"""

LAYER_PARTS: Mapping[str, Inputs] = {
    "norms": {"input_norm": (), "post_attention_norm": ()},
    "full_attention": {
        "attention/query": ("{P}mixer_input",),
        "attention/gate": ("{P}mixer_input",),
        "attention/key": ("{P}mixer_input",),
        "attention/value": ("{P}mixer_input",),
        "attention/query_norm": (),
        "attention/key_norm": (),
        "attention/output": ("{P}attention/gated_output",),
    },
    "linear_attention": {
        "gdn/query": ("{P}mixer_input",),
        "gdn/key": ("{P}mixer_input",),
        "gdn/value": ("{P}mixer_input",),
        "gdn/z": ("{P}mixer_input",),
        "gdn/a_projection": ("{P}mixer_input",),
        "gdn/b_projection": ("{P}mixer_input",),
        "gdn/a_log": (),
        "gdn/dt_bias": (),
        "gdn/convolution": (),
        "gdn/norm": (),
        "gdn/output": ("{P}gdn/gated_output",),
    },
    "mlp": {"mlp/gate": ("{P}ffn_input",), "mlp/up": ("{P}ffn_input",), "mlp/down": ("{P}mlp/product",)},
    "moe": {
        "moe/router": ("{P}ffn_input",),
        "moe/shared_score": ("{P}ffn_input",),
        "moe/experts/{e}/gate": ("{P}ffn_input",),
        "moe/experts/{e}/up": ("{P}ffn_input",),
        "moe/experts/{e}/down": ("{P}moe/experts/{e}/product",),
        "moe/shared/gate": ("{P}ffn_input",),
        "moe/shared/up": ("{P}ffn_input",),
        "moe/shared/down": ("{P}moe/shared/product",),
    },
    "vision": {
        "norm1_weight": (),
        "norm1_bias": (),
        "norm2_weight": (),
        "norm2_bias": (),
        "attention/query": ("{P}attention_input",),
        "attention/query_bias": (),
        "attention/key": ("{P}attention_input",),
        "attention/key_bias": (),
        "attention/value": ("{P}attention_input",),
        "attention/value_bias": (),
        "attention/output": ("{P}attention_output",),
        "attention/output_bias": (),
        "mlp/fc1": ("{P}mlp_input",),
        "mlp/fc1_bias": (),
        "mlp/fc2": ("{P}mlp_activation",),
        "mlp/fc2_bias": (),
    },
    "dflash": _DRAFT_LAYER,
    "dflash2": {
        **_DRAFT_LAYER,
        "attention_conv/base_kernel": (),
        "attention_conv/kernel_projection": ("{P}attention_conv_input",),
        "mlp_conv/base_kernel": (),
        "mlp_conv/kernel_projection": ("{P}mlp_conv_input",),
    },
}
"""Part of a layer -> its parameters -> the inputs of their uses. `{P}` stands for the layer's prefix with its slash, `{C}`
for the component, `{e}` for every expert.
"""
