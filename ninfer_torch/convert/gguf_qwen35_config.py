"""The Transformers config of a Qwen3.5 GGUF file, and that of its vision tower. Source: spec/parameters.md 2 and 11."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ninfer_torch.convert.gguf_file import GgufArray, GgufFile
from ninfer_torch.convert.gguf_qwen35 import FULL, LINEAR
from ninfer_torch.convert.gguf_rules import Architecture
from ninfer_torch.errors import ConversionError

__all__ = ["BUILT_HERE", "media_tokens", "qwen35_config", "vision_members"]

BUILT_HERE = ("qwen35", "qwen35moe")
"""Architectures that not every supported version of Transformers reads from a GGUF file."""

_MEMBERS: Mapping[str, str] = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_FFN_MEMBERS: Mapping[str, Mapping[str, str]] = {
    "qwen35": {"intermediate_size": "feed_forward_length"},
    "qwen35moe": {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    },
}
_TOKEN_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}

_VISION_MEMBERS: Mapping[str, str] = {
    "depth": "vision.block_count",
    "hidden_size": "vision.embedding_length",
    "intermediate_size": "vision.feed_forward_length",
    "num_heads": "vision.attention.head_count",
    "patch_size": "vision.patch_size",
    "spatial_merge_size": "vision.spatial_merge_size",
    "out_hidden_size": "vision.projection_dim",
}
_FRAMES = 2
"""Frames of a patch: the file has one kernel for each."""

_MEDIA_TOKENS: Mapping[str, str] = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def qwen35_config(file: GgufFile, table: Architecture) -> Any:
    """The complete text config of a `qwen35` or `qwen35moe` file whose keys have been checked.

    Raises ConversionError, naming the keys, for sizes that contradict each other or the file's tensors.
    """
    import torch
    import transformers

    def stated(suffix: str, default: Any = None) -> Any:
        return file.metadata.get(f"{table.name}.{suffix}", default)

    members = {name: stated(suffix) for name, suffix in {**_MEMBERS, **_FFN_MEMBERS[table.name]}.items()}
    shape = file.tensors["token_embd.weight"].shape
    if len(shape) != 2 or shape[1] != members["hidden_size"]:
        raise ConversionError(
            f"{file.name}: tensor 'token_embd.weight' has shape {list(shape)}, expected {members['hidden_size']} columns "
            f"({table.name}.embedding_length)"
        )
    layers, interval = stated("block_count") - stated("nextn_predict_layers", 0), stated("full_attention_interval")
    width, heads = stated("ssm.inner_size"), members["linear_num_value_heads"]
    if width % heads:
        raise ConversionError(f"{file.name}: ssm.inner_size {width} is no multiple of ssm.time_step_rank {heads}")
    members |= {
        "vocab_size": shape[0],
        "num_hidden_layers": layers,
        "layer_types": [LINEAR if (index + 1) % interval else FULL for index in range(layers)],
        "linear_value_head_dim": width // heads,
        "rope_parameters": _rotary(file, table, members["head_dim"]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **{role: file.metadata.get(f"tokenizer.ggml.{token}_token_id") for role, token in _TOKEN_IDS.items()},
    }
    config = getattr(transformers, table.model_class).config_class(**members)
    config.architectures = [table.model_class]
    config.dtype = torch.bfloat16
    if stated("nextn_predict_layers", 0):
        config.mtp_num_hidden_layers = stated("nextn_predict_layers")
    return config


def _rotary(file: GgufFile, table: Architecture, width: int) -> dict[str, Any]:
    prefix = f"{table.name}."
    turned = file.metadata[f"{prefix}rope.dimension_count"]
    values = file.metadata.get(f"{prefix}attention.value_length", width)
    sections = file.numbers(f"{prefix}rope.dimension_sections")
    if not isinstance(turned, int) or turned % 2 or not 0 < turned <= width or values != width:
        raise ConversionError(
            f"{file.name}: heads of width {width} with values of width {values} of which {turned!r} columns turn; expected "
            "equal widths and an even number of columns in a head"
        )
    if len(sections) < 3 or sum(sections[:3]) != turned // 2 or any(sections[3:]):
        raise ConversionError(
            f"{file.name}: {prefix}rope.dimension_sections is {list(sections)}, expected three counts of sum {turned // 2}"
        )
    return {
        "rope_type": "default",
        "rope_theta": file.metadata[f"{prefix}rope.freq_base"],
        "partial_rotary_factor": turned / width,
        "mrope_section": [int(section) for section in sections[:3]],
        "mrope_interleaved": True,
    }


def vision_members(file: GgufFile, prefix: str) -> dict[str, Any]:
    """Members of the vision config that a `mmproj` file states."""
    members = {name: file.metadata[f"{prefix}.{suffix}"] for name, suffix in _VISION_MEMBERS.items()}
    positions = file.tensors["v.position_embd.weight"].shape[0]
    return {**members, "temporal_patch_size": _FRAMES, "num_position_embeddings": positions}


def media_tokens(file: GgufFile) -> dict[str, int]:
    """The ids of image and video tokens, as far as the vocabulary has them."""
    key = "tokenizer.ggml.tokens"
    if not isinstance(file.metadata.get(key), GgufArray):
        return {}
    numbers = {token: number for number, token in enumerate(file.strings(key))}
    return {name: numbers[token] for name, token in _MEDIA_TOKENS.items() if token in numbers}
