"""What a table of a GGUF architecture is made of: rules for tensors, and the orders of rows that converters use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ninfer_torch.errors import ConversionError

__all__ = [
    "COUNTS",
    "RATES",
    "Architecture",
    "TensorRule",
    "expert_bank",
    "interleaved_rows",
    "layer",
    "layer_bias",
    "tiled_heads",
]


@dataclass(frozen=True)
class TensorRule:
    """One GGUF tensor and the parameter it holds; `{i}` stands for the layer number in both names.

    `rotary_heads` is the metadata key (without the architecture's prefix) that counts the heads whose rows the
    converter has interleaved for its rotary embedding, empty for rows in their own order; see `interleaved_rows`.
    `tiled` says what the converter has put into its order of value heads (`tiled_heads`): all `rows`, the rows of the
    `values` after those of query and key, or the `columns`. `shift` is what the converter added to every value;
    `log_decay` is for -exp(w) in place of w. `joined` is a second tensor that the parameter holds too: at each index of
    the leading axis (an expert), its rows follow those of the first; `fused` is one tensor that may stand for both.
    `axis` is where the parameter has an axis of one that the file leaves out. `layers` is the kind of layer that has the
    tensor, empty for all.
    """

    gguf: str
    parameter: str
    rotary_heads: str = ""
    shift: float = 0.0
    optional: bool = False
    joined: str = ""
    fused: str = ""
    tiled: str = ""
    log_decay: bool = False
    axis: int | None = None
    layers: str = ""

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
    0 means that there is none, `arrays` keys with an array of numbers. `draft` are the tensors of the layer for multi-token
    prediction, which follows the model's own.
    """

    name: str
    model_class: str
    rules: tuple[TensorRule, ...]
    required: tuple[str, ...]
    understood: tuple[str, ...]
    rope_factors: tuple[str, ...] = ()
    zero_counts: tuple[str, ...] = ()
    arrays: tuple[str, ...] = ()
    draft: tuple[TensorRule, ...] = ()


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


def tiled_heads(begin: int, end: int, rows: int, key_heads: int, value_heads: int, first: int = 0) -> torch.Tensor:
    """Where the rows [begin, end) of all value heads lie in a GGUF: int64 [end - begin]; those before `first` stay.

    A model keeps the value heads of each key head together; the file has the first of every key head, then the second of
    every key head, and so on. Source: spec/parameters.md 11.
    Raises ConversionError when the rows cannot be cut so.
    """
    if key_heads < 1 or value_heads % key_heads or (rows - first) % value_heads or rows <= first:
        raise ConversionError(
            f"{rows - first} rows cannot be cut into {value_heads} value heads of {key_heads} key heads"
        )
    width, each = (rows - first) // value_heads, value_heads // key_heads
    row = torch.arange(begin, end)
    head, lane = (row - first) // width, (row - first) % width
    return torch.where(row < first, row, first + ((head % each) * key_heads + head // each) * width + lane)


def layer(gguf: str, parameter: str, rotary_heads: str = "", shift: float = 0.0, **more: Any) -> TensorRule:
    """The weight of a module of every layer; `more` are fields of the rule."""
    names = f"blk.{{i}}.{gguf}.weight", f"model.layers.{{i}}.{parameter}.weight"
    return TensorRule(*names, rotary_heads, shift, **more)


def layer_bias(gguf: str, parameter: str) -> TensorRule:
    """The bias of a module of every layer."""
    return TensorRule(f"blk.{{i}}.{gguf}.bias", f"model.layers.{{i}}.{parameter}.bias")


def expert_bank(parameter: str, gguf: str, joined: str = "", fused: str = "") -> TensorRule:
    """Experts are one tensor [E, N, K] in the file and in the model, or two that the model joins."""
    first, further, both = (f"blk.{{i}}.{name}.weight" if name else "" for name in (gguf, joined, fused))
    return TensorRule(first, f"model.layers.{{i}}.mlp.experts.{parameter}", joined=further, fused=both)


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
        "expert_shared_feed_forward_length",
        "full_attention_interval",
        "nextn_predict_layers",
        "ssm.conv_kernel",
        "ssm.group_count",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.time_step_rank",
    }
)
"""Metadata keys, without the architecture's prefix, whose values are whole numbers of at least 1."""

RATES = frozenset(
    {"attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.attn_factor"}
)
"""Metadata keys, without the architecture's prefix, whose values are positive finite numbers."""
