"""What is known of each GGUF architecture, as data: tensor names, row orders, stored shifts and metadata keys.

llama.cpp's converter renames tensors, reorders the rows of some and adds constants to others; a table row says how to
get back to what Transformers' model class holds. A file is read only if its architecture's table explains every one of
its tensors and of the architecture's metadata keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ninfer_torch.convert.gguf_qwen35 import QWEN35, QWEN35MOE, VISION
from ninfer_torch.convert.gguf_rules import Architecture, TensorRule, expert_bank, layer, layer_bias
from ninfer_torch.errors import ConversionError

__all__ = ["ARCHITECTURES", "get_architecture"]

_QUERY_HEADS, _KEY_HEADS = "attention.head_count", "attention.head_count_kv"

_DIMENSIONS = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
_ROPE_SCALING = (
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
)

_ENDS = (
    TensorRule("token_embd.weight", "model.embed_tokens.weight"),
    TensorRule("output_norm.weight", "model.norm.weight"),
    TensorRule("output.weight", "lm_head.weight", optional=True),
)
_NORMS = (layer("attn_norm", "input_layernorm"), layer("ffn_norm", "post_attention_layernorm"))
_ATTENTION = (
    layer("attn_q", "self_attn.q_proj"),
    layer("attn_k", "self_attn.k_proj"),
    layer("attn_v", "self_attn.v_proj"),
    layer("attn_output", "self_attn.o_proj"),
)
_HEAD_NORMS = (layer("attn_q_norm", "self_attn.q_norm"), layer("attn_k_norm", "self_attn.k_norm"))
_MLP = (
    layer("ffn_gate", "mlp.gate_proj"),
    layer("ffn_up", "mlp.up_proj"),
    layer("ffn_down", "mlp.down_proj"),
)

_LLAMA = Architecture(
    name="llama",
    model_class="LlamaForCausalLM",
    rules=(
        *_ENDS,
        *_NORMS,
        layer("attn_q", "self_attn.q_proj", rotary_heads=_QUERY_HEADS),
        layer("attn_k", "self_attn.k_proj", rotary_heads=_KEY_HEADS),
        layer("attn_v", "self_attn.v_proj"),
        layer("attn_output", "self_attn.o_proj"),
        *_MLP,
    ),
    required=_DIMENSIONS,
    understood=(
        *_ROPE_SCALING,
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "expert_count",
        "expert_used_count",
        "rope.dimension_count",
        "rope.freq_base",
        "vocab_size",
    ),
    rope_factors=("rope_freqs.weight",),
)

_ONE_PLUS = 1.0
"""Gemma's norms multiply by 1 + w; the file holds 1 + w, the parameter w."""

_GEMMA3 = Architecture(
    name="gemma3",
    model_class="Gemma3ForCausalLM",
    rules=(
        TensorRule("token_embd.weight", "model.embed_tokens.weight"),
        layer("attn_norm", "input_layernorm", shift=_ONE_PLUS),
        *_ATTENTION,
        layer("attn_q_norm", "self_attn.q_norm", shift=_ONE_PLUS),
        layer("attn_k_norm", "self_attn.k_norm", shift=_ONE_PLUS),
        layer("post_attention_norm", "post_attention_layernorm", shift=_ONE_PLUS),
        layer("ffn_norm", "pre_feedforward_layernorm", shift=_ONE_PLUS),
        *_MLP,
        layer("post_ffw_norm", "post_feedforward_layernorm", shift=_ONE_PLUS),
        TensorRule("output_norm.weight", "model.norm.weight", shift=_ONE_PLUS),
        TensorRule("output.weight", "lm_head.weight", optional=True),
    ),
    required=(
        *_DIMENSIONS,
        "attention.head_count_kv",
        "attention.key_length",
        "attention.sliding_window",
        "rope.freq_base",
    ),
    understood=(
        *_ROPE_SCALING,
        "attention.value_length",
        "rope.dimension_count",
        "rope.freq_base_swa",
        "vocab_size",
    ),
)

_QWEN = (
    *_ROPE_SCALING,
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "vocab_size",
)

_QWEN2 = Architecture(
    name="qwen2",
    model_class="Qwen2ForCausalLM",
    rules=(
        *_ENDS,
        *_NORMS,
        *_ATTENTION,
        layer_bias("attn_q", "self_attn.q_proj"),
        layer_bias("attn_k", "self_attn.k_proj"),
        layer_bias("attn_v", "self_attn.v_proj"),
        *_MLP,
    ),
    required=(*_DIMENSIONS, "attention.head_count_kv", "rope.freq_base"),
    understood=_QWEN,
)

_QWEN3 = Architecture(
    name="qwen3",
    model_class="Qwen3ForCausalLM",
    rules=(*_ENDS, *_NORMS, *_ATTENTION, *_HEAD_NORMS, *_MLP),
    required=(*_DIMENSIONS, "attention.head_count_kv", "attention.key_length", "rope.freq_base"),
    understood=_QWEN,
)

_QWEN3MOE = Architecture(
    name="qwen3moe",
    model_class="Qwen3MoeForCausalLM",
    rules=(
        *_ENDS,
        *_NORMS,
        *_ATTENTION,
        *_HEAD_NORMS,
        layer("ffn_gate_inp", "mlp.gate"),
        expert_bank("gate_up_proj", "ffn_gate_exps", joined="ffn_up_exps", fused="ffn_gate_up_exps"),
        expert_bank("down_proj", "ffn_down_exps"),
    ),
    required=(
        *_DIMENSIONS,
        "attention.head_count_kv",
        "attention.key_length",
        "rope.freq_base",
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
    ),
    understood=_QWEN,
)

_PHI3 = Architecture(
    name="phi3",
    model_class="Phi3ForCausalLM",
    rules=(
        *_ENDS,
        *_NORMS,
        layer("attn_qkv", "self_attn.qkv_proj"),
        layer("attn_output", "self_attn.o_proj"),
        layer("ffn_up", "mlp.gate_up_proj"),
        layer("ffn_down", "mlp.down_proj"),
    ),
    required=(*_DIMENSIONS, "attention.head_count_kv", "rope.dimension_count", "rope.freq_base"),
    understood=(
        "attention.sliding_window",
        "rope.scaling.attn_factor",
        "rope.scaling.original_context_length",
        "vocab_size",
    ),
    rope_factors=("rope_factors_short.weight", "rope_factors_long.weight"),
    zero_counts=("attention.sliding_window",),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {table.name: table for table in (_LLAMA, _GEMMA3, _QWEN2, _QWEN3, _QWEN3MOE, QWEN35, QWEN35MOE, _PHI3)}
)
"""Every GGUF architecture that can be read, by the name in `general.architecture`."""


def get_architecture(name: object, where: str) -> Architecture:
    """The table of a GGUF architecture. Raises ConversionError, naming `where` and listing the known, for others."""
    table = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if name == VISION.name:
        raise ConversionError(
            f"{where}: a file of architecture {name!r} holds a vision tower without its text model; give the text model's "
            "file, and this one as its vision"
        )
    if table is None:
        raise ConversionError(
            f"{where}: GGUF architecture {name!r} is not known to this version; known: {', '.join(ARCHITECTURES)}. "
            "Convert from the model's safetensors folder instead"
        )
    return table
