"""What Transformers calls the parameters of an official artifact: spec/parameters.md 4 to 6 and 12, in numpy alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from official_models import Written


def checkpoint_state(written: Written, *, conditional: bool = False) -> dict[str, np.ndarray]:
    """The state dict of the causal (or conditional-generation) class, in plain float32 values."""
    w, text = written.plain, written.configs["text"]
    base = "model.language_model." if conditional else "model."
    state = {
        base + "embed_tokens.weight": w["text/token_embedding"],
        base + "norm.weight": w["text/final_norm"],
        "lm_head.weight": w["text/output_head"],
    }
    for index, kind in enumerate(text["layer_types"]):
        state |= _layer_state(w, text, kind, f"text/layers/{index}/", f"{base}layers.{index}.")
    if conditional:
        state |= _vision_state(w, written.configs["vision"])
    return state


def mtp_state(written: Written) -> dict[str, np.ndarray]:
    """The own parameters of an MtpModel."""
    w = written.plain
    names = {
        "eh_proj": "input_projection",
        "enorm": "embedding_norm",
        "hnorm": "hidden_norm",
        "post_norm": "final_norm",
    }
    stem = {f"layers.0.{theirs}.weight": w[f"mtp/{ours}"] for theirs, ours in names.items()}
    return stem | _layer_state(w, written.configs["text"], "full_attention", "mtp/layers/0/", "layers.0.mtp_block.")


def _layer_state(
    w: Mapping[str, np.ndarray], text: Mapping[str, Any], kind: str, p: str, t: str
) -> dict[str, np.ndarray]:
    state = {
        t + "input_layernorm.weight": w[p + "input_norm"],
        t + "post_attention_layernorm.weight": w[p + "post_attention_norm"],
    }
    if kind == "full_attention":
        width, rows = text["head_dim"], []
        for head in range(text["num_attention_heads"]):
            for part in ("query", "gate"):
                rows.append(w[f"{p}attention/{part}"][head * width : (head + 1) * width])
        state[t + "self_attn.q_proj.weight"] = np.concatenate(rows)
        for theirs, ours in (("k_proj", "key"), ("v_proj", "value"), ("o_proj", "output")):
            state[f"{t}self_attn.{theirs}.weight"] = w[f"{p}attention/{ours}"]
        state[t + "self_attn.q_norm.weight"] = w[p + "attention/query_norm"]
        state[t + "self_attn.k_norm.weight"] = w[p + "attention/key_norm"]
    else:
        fused = [w[f"{p}gdn/{part}"] for part in ("query", "key", "value")]
        state[t + "linear_attn.in_proj_qkv.weight"] = np.concatenate(fused)
        for theirs, ours in (("in_proj_z", "z"), ("in_proj_a", "a_projection"), ("in_proj_b", "b_projection")):
            state[f"{t}linear_attn.{theirs}.weight"] = w[f"{p}gdn/{ours}"]
        state[t + "linear_attn.A_log"], state[t + "linear_attn.dt_bias"] = w[p + "gdn/a_log"], w[p + "gdn/dt_bias"]
        state[t + "linear_attn.conv1d.weight"] = np.moveaxis(w[p + "gdn/convolution"], 0, 1)[:, None, :]
        state[t + "linear_attn.norm.weight"] = w[p + "gdn/norm"]
        state[t + "linear_attn.out_proj.weight"] = w[p + "gdn/output"]
    if "num_experts" not in text:
        return state | {f"{t}mlp.{part}_proj.weight": w[f"{p}mlp/{part}"] for part in ("gate", "up", "down")}
    state[t + "mlp.gate.weight"] = w[p + "moe/router"]
    state[t + "mlp.shared_expert_gate.weight"] = w[p + "moe/shared_score"]
    experts = [f"{p}moe/experts/{e}/" for e in range(text["num_experts"])]
    state[t + "mlp.experts.gate_up_proj"] = np.stack([np.concatenate([w[e + "gate"], w[e + "up"]]) for e in experts])
    state[t + "mlp.experts.down_proj"] = np.stack([w[e + "down"] for e in experts])
    return state | {
        f"{t}mlp.shared_expert.{part}_proj.weight": w[f"{p}moe/shared/{part}"] for part in ("gate", "up", "down")
    }


def _vision_state(w: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    v, side = "model.visual.", config["patch_size"]
    kernel = (config["hidden_size"], 3, config["temporal_patch_size"], side, side)
    state = {
        v + "patch_embed.proj.weight": w["vision/patch_embedding"].reshape(kernel),
        v + "patch_embed.proj.bias": w["vision/patch_embedding_bias"],
        v + "pos_embed.weight": w["vision/position_embedding"],
    }
    for kind in ("weight", "bias"):
        suffix = "" if kind == "weight" else "_bias"
        state[f"{v}merger.norm.{kind}"] = w[f"vision/merger/norm_{kind}"]
        for layer in ("fc1", "fc2"):
            state[f"{v}merger.linear_{layer}.{kind}"] = w[f"vision/merger/{layer}{suffix}"]
        for block in range(config["depth"]):
            p, t = f"vision/layers/{block}/", f"{v}blocks.{block}."
            fused = [w[f"{p}attention/{part}{suffix}"] for part in ("query", "key", "value")]
            state[f"{t}attn.qkv.{kind}"] = np.concatenate(fused)
            state[f"{t}attn.proj.{kind}"] = w[f"{p}attention/output{suffix}"]
            for layer in ("fc1", "fc2"):
                state[f"{t}mlp.linear_{layer}.{kind}"] = w[f"{p}mlp/{layer}{suffix}"]
            for norm in ("norm1", "norm2"):
                state[f"{t}{norm}.{kind}"] = w[f"{p}{norm}_{kind}"]
    return state
