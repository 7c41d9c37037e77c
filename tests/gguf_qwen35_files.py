"""Tiny Qwen3.5 GGUF files, written by the `gguf` package out of random Transformers models.

What llama.cpp's converter makes of a checkpoint is written out here head by head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from ninfer_torch.convert.gguf_source import GgufSource

TYPES = gguf.GGMLQuantizationType
Array = np.ndarray[Any, Any]

LAYERS, HIDDEN, FEED, VOCABULARY, EXPERTS = 4, 64, 96, 48, 3
KEY_HEADS, VALUE_HEADS, KEY_WIDTH, VALUE_WIDTH, TAPS = 2, 6, 16, 32, 4
HEADS, SHARED_HEADS, HEAD_WIDTH = 4, 2, 32
EPSILON = float(np.float32(1e-6))

TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": SHARED_HEADS,
    "head_dim": HEAD_WIDTH,
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": KEY_WIDTH,
    "linear_value_head_dim": VALUE_WIDTH,
    "linear_conv_kernel_dim": TAPS,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPSILON,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 50000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FFN: dict[str, dict[str, Any]] = {
    "qwen35": {"intermediate_size": FEED},
    "qwen35moe": {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
}
CLASSES = {"qwen35": "Qwen3_5ForCausalLM", "qwen35moe": "Qwen3_5MoeForCausalLM"}
WHOLE = {"qwen35": "Qwen3_5ForConditionalGeneration", "qwen35moe": "Qwen3_5MoeForConditionalGeneration"}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": HIDDEN,
}
DRAFT = {
    "fc": (HIDDEN, 2 * HIDDEN),
    "pre_fc_norm_embedding": (HIDDEN,),
    "pre_fc_norm_hidden": (HIDDEN,),
    "norm": (HIDDEN,),
}


@cache
def original(name: str) -> Any:
    """The tiny model around text and vision: random everywhere, so that nothing may be left at what it starts with."""
    torch.manual_seed(4)
    whole = getattr(transformers, WHOLE[name])
    config = whole.config_class(text_config={**TEXT, **FFN[name]}, vision_config=VISION, tie_word_embeddings=False)
    model = whole(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            scale = 0.05 if "norm" in key else 0.2
            parameter.copy_((parameter + scale * torch.randn_like(parameter)).bfloat16())
    return model


@cache
def checkpoint(name: str) -> dict[str, Array]:
    """The checkpoint's tensors as float32, a draft layer too."""
    state = {key: value.numpy() for key, value in original(name).state_dict().items()}
    last = f"model.language_model.layers.{LAYERS - 1}."
    draft = {f"mtp.layers.0.{key.removeprefix(last)}": value for key, value in state.items() if key.startswith(last)}
    random = np.random.default_rng(9)
    state |= {key: value + random.integers(-1, 2, value.shape).astype(np.float32) / 64 for key, value in draft.items()}
    for key, shape in DRAFT.items():
        state[f"mtp.{key}.weight"] = (random.integers(-8, 9, shape) / 64).astype(np.float32)
    return state


# The oracle: what llama.cpp's converter makes of a checkpoint, head by head.


def tile(values: Array, axis: int = 0) -> Array:
    """Value heads of one key head lie together in the checkpoint, those of one number in the file."""
    each = VALUE_HEADS // KEY_HEADS
    heads = np.split(values, VALUE_HEADS, axis)
    return np.concatenate([heads[key * each + number] for number in range(each) for key in range(KEY_HEADS)], axis)


def tile_values(values: Array) -> Array:
    """Query and key rows stay, the value rows after them are tiled."""
    first = 2 * KEY_HEADS * KEY_WIDTH
    return np.concatenate([values[:first], tile(values[first:])])


def one_plus(values: Array) -> Array:
    return values + np.float32(1)


def same(values: Array) -> Array:
    return values


LAYER: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "input_layernorm.weight": ("attn_norm.weight", one_plus),
    "post_attention_layernorm.weight": ("post_attention_norm.weight", one_plus),
    "self_attn.q_proj.weight": ("attn_q.weight", same),
    "self_attn.k_proj.weight": ("attn_k.weight", same),
    "self_attn.v_proj.weight": ("attn_v.weight", same),
    "self_attn.o_proj.weight": ("attn_output.weight", same),
    "self_attn.q_norm.weight": ("attn_q_norm.weight", one_plus),
    "self_attn.k_norm.weight": ("attn_k_norm.weight", one_plus),
    "linear_attn.in_proj_qkv.weight": ("attn_qkv.weight", tile_values),
    "linear_attn.in_proj_z.weight": ("attn_gate.weight", tile),
    "linear_attn.in_proj_a.weight": ("ssm_alpha.weight", tile),
    "linear_attn.in_proj_b.weight": ("ssm_beta.weight", tile),
    "linear_attn.A_log": ("ssm_a", lambda values: tile(-np.exp(values))),
    "linear_attn.dt_bias": ("ssm_dt.bias", tile),
    "linear_attn.conv1d.weight": ("ssm_conv1d.weight", lambda values: tile_values(values[:, 0])),
    "linear_attn.norm.weight": ("ssm_norm.weight", same),
    "linear_attn.out_proj.weight": ("ssm_out.weight", lambda values: tile(values, 1)),
    "mlp.gate_proj.weight": ("ffn_gate.weight", same),
    "mlp.up_proj.weight": ("ffn_up.weight", same),
    "mlp.down_proj.weight": ("ffn_down.weight", same),
    "mlp.gate.weight": ("ffn_gate_inp.weight", same),
    "mlp.shared_expert_gate.weight": ("ffn_gate_inp_shexp.weight", lambda values: values[0]),
    "mlp.shared_expert.gate_proj.weight": ("ffn_gate_shexp.weight", same),
    "mlp.shared_expert.up_proj.weight": ("ffn_up_shexp.weight", same),
    "mlp.shared_expert.down_proj.weight": ("ffn_down_shexp.weight", same),
    "mlp.experts.down_proj": ("ffn_down_exps.weight", same),
}
TOP: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "model.language_model.embed_tokens.weight": ("token_embd.weight", same),
    "model.language_model.norm.weight": ("output_norm.weight", one_plus),
    "lm_head.weight": ("output.weight", same),
    "mtp.fc.weight": (f"blk.{LAYERS}.nextn.eh_proj.weight", same),
    "mtp.pre_fc_norm_embedding.weight": (f"blk.{LAYERS}.nextn.enorm.weight", one_plus),
    "mtp.pre_fc_norm_hidden.weight": (f"blk.{LAYERS}.nextn.hnorm.weight", one_plus),
    "mtp.norm.weight": (f"blk.{LAYERS}.nextn.shared_head_norm.weight", one_plus),
}


def stored(parameter: str, values: Array) -> Iterator[tuple[str, Array]]:
    """The tensors of the text file that hold one parameter."""
    if parameter in TOP:
        name, change = TOP[parameter]
        yield name, change(values)
        return
    found = re.fullmatch(r"(?:model\.language_model|(mtp))\.layers\.(\d+)\.(.*)", parameter)
    if found is None:
        return
    draft, number, part = found.groups()
    block = f"blk.{LAYERS if draft else number}."
    if part == "mlp.experts.gate_up_proj":
        half = values.shape[1] // 2
        yield f"{block}ffn_gate_exps.weight", values[:, :half]
        yield f"{block}ffn_up_exps.weight", values[:, half:]
    else:
        name, change = LAYER[part]
        yield block + name, change(values)


KEYS: dict[str, Any] = {
    "context_length": 128,
    "embedding_length": HIDDEN,
    "attention.head_count": HEADS,
    "attention.head_count_kv": SHARED_HEADS,
    "attention.key_length": HEAD_WIDTH,
    "attention.value_length": HEAD_WIDTH,
    "attention.layer_norm_rms_epsilon": EPSILON,
    "rope.freq_base": 50000.0,
    "rope.dimension_count": HEAD_WIDTH // 2,
    "rope.dimension_sections": [4, 2, 2, 0],
    "ssm.conv_kernel": TAPS,
    "ssm.state_size": KEY_WIDTH,
    "ssm.group_count": KEY_HEADS,
    "ssm.time_step_rank": VALUE_HEADS,
    "ssm.inner_size": VALUE_HEADS * VALUE_WIDTH,
    "full_attention_interval": 4,
}
FFN_KEYS: dict[str, dict[str, Any]] = {
    "qwen35": {"feed_forward_length": FEED},
    "qwen35moe": {
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 64,
    },
}


def add_keys(writer: gguf.GGUFWriter, prefix: str, keys: Mapping[str, Any]) -> None:
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    for key, value in keys.items():
        if isinstance(value, list):
            writer.add_array(f"{prefix}.{key}", value)
        else:
            writer.add_key_value(f"{prefix}.{key}", value, gguf.GGUFValueType[kinds[type(value)]])


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def is_matrix(name: str, values: Array) -> bool:
    """Whether quantizers give a tensor a block type."""
    return values.ndim > 1 and not re.search("gate_inp|conv1d|ssm_alpha|ssm_beta", name) and values.shape[-1] % 32 == 0


def write(
    path: Path,
    name: str = "qwen35",
    kind: TYPES = TYPES.F32,
    *,
    draft: bool = True,
    change: Callable[[dict[str, Array]], None] | None = None,
    keys: Mapping[str, Any] | None = None,
    kinds: Mapping[str, TYPES] | None = None,
) -> Path:
    """The text model's file; matrices are of type `kind`, or as `kinds` says of names that end so."""
    writer = gguf.GGUFWriter(path, name)
    writer.add_name("tiny")
    blocks = {"block_count": LAYERS + draft, **({"nextn_predict_layers": 1} if draft else {})}
    add_keys(writer, name, {**blocks, **KEYS, **FFN_KEYS[name], **(keys or {})})
    tensors = {
        key: values
        for parameter, whole in checkpoint(name).items()
        if draft or not parameter.startswith("mtp.")
        for key, values in stored(parameter, whole)
    }
    if change is not None:
        change(tensors)
    for key, values in tensors.items():
        own = next((own for end, own in (kinds or {}).items() if key.endswith(end)), kind)
        own = own if is_matrix(key, values) else TYPES.F32
        writer.add_tensor(key, gguf.quantize(np.ascontiguousarray(values), own), raw_dtype=own)
    finish(writer)
    return path


VISION_KEYS: dict[str, Any] = {
    "has_vision_encoder": True,
    "projector_type": "qwen3vl_merger",
    "use_gelu": True,
    "vision.image_size": 16,
    "vision.patch_size": 4,
    "vision.embedding_length": 32,
    "vision.feed_forward_length": 48,
    "vision.projection_dim": HIDDEN,
    "vision.block_count": 2,
    "vision.attention.head_count": 2,
    "vision.attention.layer_norm_epsilon": EPSILON,
    "vision.spatial_merge_size": 2,
    "vision.image_mean": [0.5, 0.5, 0.5],
    "vision.image_std": [0.5, 0.5, 0.5],
    "vision.is_deepstack_layers": [False, False],
}
VISION_NAMES = (
    ("patch_embed.proj.bias", "v.patch_embd.bias"),
    ("pos_embed.", "v.position_embd."),
    ("merger.norm.", "v.post_ln."),
    ("merger.linear_fc1.", "mm.0."),
    ("merger.linear_fc2.", "mm.2."),
    (".norm1.", ".ln1."),
    (".norm2.", ".ln2."),
    (".attn.qkv.", ".attn_qkv."),
    (".attn.proj.", ".attn_out."),
    (".mlp.linear_fc1.", ".ffn_up."),
    (".mlp.linear_fc2.", ".ffn_down."),
    ("blocks.", "v.blk."),
)


def write_vision(
    path: Path, name: str = "qwen35", kind: TYPES = TYPES.F16, without: str = "", keys: Mapping[str, Any] | None = None
) -> Path:
    """The vision tower's file: one kernel per frame, everything else under another name."""
    writer = gguf.GGUFWriter(path, "clip")
    add_keys(writer, "clip", {**VISION_KEYS, **(keys or {})})
    tensors: dict[str, Array] = {}
    for key, values in checkpoint(name).items():
        if not key.startswith("model.visual."):
            continue
        own = key.removeprefix("model.visual.")
        if own == "patch_embed.proj.weight":
            tensors |= {"v.patch_embd.weight": values[:, :, 0], "v.patch_embd.weight.1": values[:, :, 1]}
            continue
        for theirs, here in VISION_NAMES:
            own = own.replace(theirs, here)
        tensors[own] = values
    for key, values in tensors.items():
        if key != without:
            own_kind = kind if values.ndim == 2 and values.shape[-1] % 32 == 0 and "embd" not in key else TYPES.F32
            writer.add_tensor(key, gguf.quantize(np.ascontiguousarray(values), own_kind), raw_dtype=own_kind)
    finish(writer)
    return path


def whole(source: GgufSource, name: str) -> Array:
    tensor = source.tensors[name]
    return tensor.values(0, tensor.rows).float().numpy()


def as_checkpoint(name: str) -> str:
    """The checkpoint's name of a tensor of a file without vision."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
