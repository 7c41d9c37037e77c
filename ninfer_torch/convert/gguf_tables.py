"""What is known of each GGUF architecture, as data: tensor names, row orders, stored shifts and metadata keys.

llama.cpp's converter renames tensors, reorders the rows of some and adds constants to others; a table row says how to
get back to what Transformers' model class holds. A file is read only if its architecture's table explains every one of
its tensors and of the architecture's metadata keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ninfer_torch.errors import ConversionError

__all__ = ["ARCHITECTURES", "COUNTS", "RATES", "Architecture", "TensorRule", "get_architecture", "interleaved_rows"]


@dataclass(frozen=True)
class TensorRule:
    """One GGUF tensor and the parameter it holds; `{i}` stands for the layer number in both names.

    `rotary_heads` is the metadata key (without the architecture's prefix) that counts the heads whose rows the
    converter has interleaved for its rotary embedding, empty for rows in their own order; see `interleaved_rows`.
    `shift` is what the converter added to every value. `joined` is a second tensor that the parameter holds too: at
    each index of the leading axis (an expert), its rows follow those of the first.
    """

    gguf: str
    parameter: str
    rotary_heads: str = ""
    shift: float = 0.0
    optional: bool = False
    joined: str = ""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The GGUF tensors of the parameter, in the order of its rows."""
        return (self.gguf, self.joined) if self.joined else (self.gguf,)

    @property
    def per_layer(self) -> bool:
        return "{i}" in self.gguf


@dataclass(frozen=True)
class Architecture:
    """A GGUF architecture that can be read.

    `model_class` is the Transformers class whose state dict the parameters name. `required` and `understood` are
    metadata keys without the architecture's prefix; a file must have the former, and may have no others than both.
    `rope_factors` are tensors of per-frequency rotary factors, which the config takes up. `zero_counts` are counts whose
    0 means that there is none.
    """

    name: str
    model_class: str
    rules: tuple[TensorRule, ...]
    required: tuple[str, ...]
    understood: tuple[str, ...]
    rope_factors: tuple[str, ...] = ()
    zero_counts: tuple[str, ...] = ()


def interleaved_rows(begin: int, end: int, rows: int, heads: int) -> torch.Tensor:
    """Where the rows [begin, end) of a query or key projection lie in a llama GGUF: int64 [end - begin].

    The model rotates row t of a head's first half with row t of its second half; the file keeps each such pair
    adjacent. So parameter row (head h, half s, t) is file row (h, t, s). Source: the `permute` of llama.cpp's
    convert_hf_to_gguf.py.
    Raises ConversionError when the rows are not whole pairs of `heads` heads.
    """
    if heads < 1 or rows % (2 * heads):
        raise ConversionError(f"{rows} rows cannot be cut into {heads} heads of an even number of rows each")
    half = rows // heads // 2
    row = torch.arange(begin, end)
    head, within = row // (2 * half), row % (2 * half)
    return head * (2 * half) + within % half * 2 + within // half


def _layer(gguf: str, parameter: str, rotary_heads: str = "", shift: float = 0.0) -> TensorRule:
    return TensorRule(f"blk.{{i}}.{gguf}.weight", f"model.layers.{{i}}.{parameter}.weight", rotary_heads, shift)


def _layer_bias(gguf: str, parameter: str) -> TensorRule:
    return TensorRule(f"blk.{{i}}.{gguf}.bias", f"model.layers.{{i}}.{parameter}.bias")


def _expert_bank(parameter: str, gguf: str, joined: str = "") -> TensorRule:
    """Experts are one tensor [E, N, K] in the file and in the model."""
    further = f"blk.{{i}}.{joined}.weight" if joined else ""
    return TensorRule(f"blk.{{i}}.{gguf}.weight", f"model.layers.{{i}}.mlp.experts.{parameter}", joined=further)


COUNTS = frozenset(
    {
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "vocab_size",
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "attention.sliding_window",
        "rope.dimension_count",
        "rope.scaling.original_context_length",
    }
)
"""Metadata keys, without the architecture's prefix, whose values are whole numbers of at least 1."""

RATES = frozenset(
    {"attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.attn_factor"}
)
"""Metadata keys, without the architecture's prefix, whose values are positive finite numbers."""

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
_NORMS = (_layer("attn_norm", "input_layernorm"), _layer("ffn_norm", "post_attention_layernorm"))
_ATTENTION = (
    _layer("attn_q", "self_attn.q_proj"),
    _layer("attn_k", "self_attn.k_proj"),
    _layer("attn_v", "self_attn.v_proj"),
    _layer("attn_output", "self_attn.o_proj"),
)
_HEAD_NORMS = (_layer("attn_q_norm", "self_attn.q_norm"), _layer("attn_k_norm", "self_attn.k_norm"))
_MLP = (
    _layer("ffn_gate", "mlp.gate_proj"),
    _layer("ffn_up", "mlp.up_proj"),
    _layer("ffn_down", "mlp.down_proj"),
)

_LLAMA = Architecture(
    name="llama",
    model_class="LlamaForCausalLM",
    rules=(
        *_ENDS,
        *_NORMS,
        _layer("attn_q", "self_attn.q_proj", rotary_heads=_QUERY_HEADS),
        _layer("attn_k", "self_attn.k_proj", rotary_heads=_KEY_HEADS),
        _layer("attn_v", "self_attn.v_proj"),
        _layer("attn_output", "self_attn.o_proj"),
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
        _layer("attn_norm", "input_layernorm", shift=_ONE_PLUS),
        *_ATTENTION,
        _layer("attn_q_norm", "self_attn.q_norm", shift=_ONE_PLUS),
        _layer("attn_k_norm", "self_attn.k_norm", shift=_ONE_PLUS),
        _layer("post_attention_norm", "post_attention_layernorm", shift=_ONE_PLUS),
        _layer("ffn_norm", "pre_feedforward_layernorm", shift=_ONE_PLUS),
        *_MLP,
        _layer("post_ffw_norm", "post_feedforward_layernorm", shift=_ONE_PLUS),
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
        _layer_bias("attn_q", "self_attn.q_proj"),
        _layer_bias("attn_k", "self_attn.k_proj"),
        _layer_bias("attn_v", "self_attn.v_proj"),
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
        _layer("ffn_gate_inp", "mlp.gate"),
        _expert_bank("gate_up_proj", "ffn_gate_exps", joined="ffn_up_exps"),
        _expert_bank("down_proj", "ffn_down_exps"),
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
        _layer("attn_qkv", "self_attn.qkv_proj"),
        _layer("attn_output", "self_attn.o_proj"),
        _layer("ffn_up", "mlp.gate_up_proj"),
        _layer("ffn_down", "mlp.down_proj"),
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
    {table.name: table for table in (_LLAMA, _GEMMA3, _QWEN2, _QWEN3, _QWEN3MOE, _PHI3)}
)
"""Every GGUF architecture that can be read, by the name in `general.architecture`."""


def get_architecture(name: object, where: str) -> Architecture:
    """The table of a GGUF architecture. Raises ConversionError, naming `where` and listing the known, for others."""
    table = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if table is None:
        raise ConversionError(
            f"{where}: GGUF architecture {name!r} is not known to this version; known: {', '.join(ARCHITECTURES)}. "
            "Convert from the model's safetensors folder instead"
        )
    return table
