"""The GGUF architectures `qwen35` and `qwen35moe`, and the vision tower that goes with them. Source: spec/parameters.md 11."""

from __future__ import annotations

from dataclasses import replace

from ninfer_torch.convert.gguf_rules import Architecture, TensorRule, expert_bank, layer

__all__ = ["FULL", "LINEAR", "QWEN35", "QWEN35MOE", "VISION"]

FULL, LINEAR = "full_attention", "linear_attention"
"""Kinds of layers: every `full_attention_interval`-th is of the first kind."""

_ONE_PLUS = 1.0
"""Zero-centred norms multiply by 1 + w; the file holds 1 + w, the parameter w. The gated delta net's is an ordinary one."""

_ENDS = (
    TensorRule("token_embd.weight", "model.embed_tokens.weight"),
    TensorRule("output_norm.weight", "model.norm.weight", shift=_ONE_PLUS),
    TensorRule("output.weight", "lm_head.weight", optional=True),
)
_NORMS = (
    layer("attn_norm", "input_layernorm", shift=_ONE_PLUS),
    layer("post_attention_norm", "post_attention_layernorm", shift=_ONE_PLUS),
)
_ATTENTION = (
    layer("attn_q", "self_attn.q_proj", layers=FULL),
    layer("attn_k", "self_attn.k_proj", layers=FULL),
    layer("attn_v", "self_attn.v_proj", layers=FULL),
    layer("attn_q_norm", "self_attn.q_norm", shift=_ONE_PLUS, layers=FULL),
    layer("attn_k_norm", "self_attn.k_norm", shift=_ONE_PLUS, layers=FULL),
    layer("attn_output", "self_attn.o_proj", layers=FULL),
)
_MIXER = "model.layers.{i}.linear_attn."
_DELTA_NET = (
    layer("attn_qkv", "linear_attn.in_proj_qkv", tiled="values", layers=LINEAR),
    layer("attn_gate", "linear_attn.in_proj_z", tiled="rows", layers=LINEAR),
    layer("ssm_alpha", "linear_attn.in_proj_a", tiled="rows", layers=LINEAR),
    layer("ssm_beta", "linear_attn.in_proj_b", tiled="rows", layers=LINEAR),
    TensorRule("blk.{i}.ssm_a", f"{_MIXER}A_log", tiled="rows", log_decay=True, layers=LINEAR),
    TensorRule("blk.{i}.ssm_dt.bias", f"{_MIXER}dt_bias", tiled="rows", layers=LINEAR),
    layer("ssm_conv1d", "linear_attn.conv1d", tiled="values", axis=1, layers=LINEAR),
    layer("ssm_norm", "linear_attn.norm", layers=LINEAR),
    layer("ssm_out", "linear_attn.out_proj", tiled="columns", layers=LINEAR),
)
_DENSE_FFN = (
    layer("ffn_gate", "mlp.gate_proj"),
    layer("ffn_up", "mlp.up_proj"),
    layer("ffn_down", "mlp.down_proj"),
)
_MOE_FFN = (
    layer("ffn_gate_inp", "mlp.gate"),
    layer("ffn_gate_inp_shexp", "mlp.shared_expert_gate", axis=0),
    expert_bank("gate_up_proj", "ffn_gate_exps", joined="ffn_up_exps", fused="ffn_gate_up_exps"),
    expert_bank("down_proj", "ffn_down_exps"),
    layer("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    layer("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    layer("ffn_down_shexp", "mlp.shared_expert.down_proj"),
)

_DRAFT_STEM = (
    TensorRule("blk.{i}.nextn.eh_proj.weight", "mtp.fc.weight"),
    TensorRule("blk.{i}.nextn.enorm.weight", "mtp.pre_fc_norm_embedding.weight", shift=_ONE_PLUS),
    TensorRule("blk.{i}.nextn.hnorm.weight", "mtp.pre_fc_norm_hidden.weight", shift=_ONE_PLUS),
    TensorRule("blk.{i}.nextn.shared_head_norm.weight", "mtp.norm.weight", shift=_ONE_PLUS),
)


def _draft(ffn: tuple[TensorRule, ...]) -> tuple[TensorRule, ...]:
    """The layer for multi-token prediction: a full-attention layer and what is in front of it."""
    inner = (
        replace(rule, parameter=rule.parameter.replace("model.layers.{i}.", "mtp.layers.0."), layers="")
        for rule in (*_NORMS, *_ATTENTION, *ffn)
    )
    return (*_DRAFT_STEM, *inner)


_REQUIRED = (
    "block_count",
    "context_length",
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.dimension_sections",
    "rope.freq_base",
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
    "full_attention_interval",
)
_UNDERSTOOD = ("attention.value_length", "nextn_predict_layers", "vocab_size")
_EXPERT_KEYS = (
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
)

QWEN35 = Architecture(
    name="qwen35",
    model_class="Qwen3_5ForCausalLM",
    rules=(*_ENDS, *_NORMS, *_ATTENTION, *_DELTA_NET, *_DENSE_FFN),
    required=(*_REQUIRED, "feed_forward_length"),
    understood=_UNDERSTOOD,
    zero_counts=("nextn_predict_layers",),
    arrays=("rope.dimension_sections",),
    draft=_draft(_DENSE_FFN),
)

QWEN35MOE = Architecture(
    name="qwen35moe",
    model_class="Qwen3_5MoeForCausalLM",
    rules=(*_ENDS, *_NORMS, *_ATTENTION, *_DELTA_NET, *_MOE_FFN),
    required=(*_REQUIRED, *_EXPERT_KEYS),
    understood=(*_UNDERSTOOD, "feed_forward_length"),
    zero_counts=("nextn_predict_layers", "feed_forward_length"),
    arrays=("rope.dimension_sections",),
    draft=_draft(_MOE_FFN),
)

_BLOCK_PARTS = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}
_VISION_PARTS = {
    "v.post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2",
    **{f"v.blk.{{i}}.{stored}": f"blocks.{{i}}.{own}" for stored, own in _BLOCK_PARTS.items()},
}

VISION = Architecture(
    name="clip",
    model_class="",
    rules=(
        TensorRule(
            "v.patch_embd.weight", "model.visual.patch_embed.proj.weight", joined="v.patch_embd.weight.1", axis=2
        ),
        TensorRule("v.patch_embd.bias", "model.visual.patch_embed.proj.bias"),
        TensorRule("v.position_embd.weight", "model.visual.pos_embed.weight"),
        *(
            TensorRule(f"{stored}.{kind}", f"model.visual.{own}.{kind}")
            for stored, own in _VISION_PARTS.items()
            for kind in ("weight", "bias")
        ),
    ),
    required=(
        "projector_type",
        "vision.attention.head_count",
        "vision.attention.layer_norm_epsilon",
        "vision.block_count",
        "vision.embedding_length",
        "vision.feed_forward_length",
        "vision.patch_size",
        "vision.projection_dim",
        "vision.spatial_merge_size",
    ),
    understood=(
        "has_vision_encoder",
        "use_gelu",
        "use_silu",
        "vision.image_mean",
        "vision.image_size",
        "vision.image_std",
        "vision.is_deepstack_layers",
    ),
    arrays=("vision.image_mean", "vision.image_std", "vision.is_deepstack_layers"),
)
"""The vision tower in a file of its own (`mmproj`). The patch embedding lies in it as one kernel per frame."""
