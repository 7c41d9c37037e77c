"""What the programs that read container versions 1 and 2 knew about the models and the files did not say: configs.

Source: spec/container.md 13.3, in the members of spec/parameters.md 2. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["PUBLISHED", "V1_WEIGHTS_ID", "PublishedModel"]

V1_WEIGHTS_ID = "groupwise-int"
"""Version 1 names no weights; all of its published files hold these."""

Config = Mapping[str, Any]


@dataclass(frozen=True)
class PublishedModel:
    """Configs by component, in the order of a directory; `proposal_rows` is the extent of the indexed proposal head."""

    configs: Mapping[str, Config]
    proposal_rows: int


_EPSILON = 9.999999974752427e-07  # 1e-6 as a float32
_THETA = 10000000.0
_POSITIONS = 262144


def _text(architecture: str, model_type: str, layers: int, hidden: int, **members: Any) -> Config:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "vocab_size": 248320,
        "num_hidden_layers": layers,
        "max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": False,
        "rms_norm_eps": _EPSILON,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        "head_dim": 256,
        "rope_parameters": {"rope_theta": _THETA, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        **members,
    }


def _vision(model_type: str) -> Config:
    return {
        "model_type": model_type,
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
    }


def _draft(architecture: str, layer_types: list[str], dflash_config: Config, **members: Any) -> Config:
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": len(layer_types),
        "max_position_embeddings": _POSITIONS,
        "rms_norm_eps": _EPSILON,
        "rope_parameters": {"rope_theta": _THETA},
        "layer_types": layer_types,
        "dflash_config": dflash_config,
        **members,
    }


_QWEN_27B = PublishedModel(
    {
        "text": _text(
            "Qwen3_5ForCausalLM",
            "qwen3_5_text",
            layers=64,
            hidden=5120,
            num_attention_heads=24,
            num_key_value_heads=4,
            linear_num_value_heads=48,
            intermediate_size=17408,
        ),
        "vision": _vision("qwen3_5_vision"),
        "mtp": {"architectures": ["Qwen3_5MTP"]},
        "dflash2": _draft(
            "DFlash2DraftModel",
            ["sliding_attention"] * 5,
            {
                "target_layer_ids": [5, 19, 33, 47, 61],
                "mask_token_id": 248070,
                "conv_kernel_size": 2,
                "conv_group_size": 16,
                "selector_rank": 256,
                "selector_top_k": 16,
            },
            intermediate_size=17408,
            sliding_window=2048,
        ),
    },
    proposal_rows=131072,
)

_QWEN_35B_A3B = PublishedModel(
    {
        "text": _text(
            "Qwen3_5MoeForCausalLM",
            "qwen3_5_moe_text",
            layers=40,
            hidden=2048,
            num_attention_heads=16,
            num_key_value_heads=2,
            linear_num_value_heads=32,
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        ),
        "vision": _vision("qwen3_5_moe_vision"),
        "mtp": {"architectures": ["Qwen3_5MoeMTP"]},
        "dflash": _draft(
            "DFlashDraftModel",
            ["sliding_attention"] * 5 + ["full_attention"],
            {"target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37], "mask_token_id": 248077},
            intermediate_size=6144,
            sliding_window=4096,
        ),
    },
    proposal_rows=131072,
)

PUBLISHED: Mapping[tuple[str, str], PublishedModel] = {
    ("qwen3.6-27b", "groupwise-int"): _QWEN_27B,
    ("qwen3.6-27b", "nvfp4"): _QWEN_27B,
    ("qwen3.8-27b", "groupwise-int"): _QWEN_27B,
    ("qwen3.8-27b", "nvfp4"): _QWEN_27B,
    ("qwen3.6-35b-a3b", "groupwise-int"): _QWEN_35B_A3B,
}
"""(model_id, weights_id) -> model. A component is declared only where the file has objects of it."""
