"""Names, shapes and inputs of official artifacts, written out again from spec/parameters.md 3 to 8; no library in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shape = tuple[int, ...]
Parameters = dict[str, tuple[Shape, tuple[str, ...]]]
"""Logical name -> shape and inputs."""


def parameters(configs: Mapping[str, Mapping[str, Any]], proposal_rows: int = 0) -> Parameters:
    text = configs["text"]
    drafts = [f"{name}/final_hidden" for name in ("mtp", "dflash", "dflash2") if name in configs]
    hidden, vocabulary = text["hidden_size"], text["vocab_size"]
    found: Parameters = {
        "text/token_embedding": ((vocabulary, hidden), ()),
        "text/output_head": ((vocabulary, hidden), ("text/final_hidden", *drafts)),
        "text/final_norm": ((hidden,), ()),
    }
    for index, kind in enumerate(text["layer_types"]):
        found |= _layer(text, kind, f"text/layers/{index}/")
    if "mtp" in configs:
        found["mtp/input_projection"] = ((hidden, 2 * hidden), ("mtp/stem_input",))
        found |= {f"mtp/{name}_norm": ((hidden,), ()) for name in ("embedding", "hidden", "final")}
        found |= _layer(text, "full_attention", "mtp/layers/0/")
    if "vision" in configs:
        found |= _vision(configs["vision"], hidden)
    for name in ("dflash", "dflash2"):
        if name in configs:
            found |= _draft(configs[name], text, name)
    if proposal_rows:
        found["proposal/head"] = ((proposal_rows, hidden), tuple(drafts))
        found["proposal/token_ids"] = ((proposal_rows,), ())
    return found


def _layer(text: Mapping[str, Any], kind: str, p: str) -> Parameters:
    hidden = text["hidden_size"]
    mixer, ffn = (p + "mixer_input",), (p + "ffn_input",)
    found: Parameters = {p + "input_norm": ((hidden,), ()), p + "post_attention_norm": ((hidden,), ())}
    if kind == "full_attention":
        width = text["head_dim"]
        queries, keys = text["num_attention_heads"] * width, text["num_key_value_heads"] * width
        for name, rows in (("query", queries), ("gate", queries), ("key", keys), ("value", keys)):
            found[f"{p}attention/{name}"] = ((rows, hidden), mixer)
        found[p + "attention/query_norm"] = found[p + "attention/key_norm"] = ((width,), ())
        found[p + "attention/output"] = ((hidden, queries), (p + "attention/gated_output",))
    else:
        heads, width = text["linear_num_value_heads"], text["linear_value_head_dim"]
        keys, values = text["linear_num_key_heads"] * text["linear_key_head_dim"], heads * width
        for name, rows in (("query", keys), ("key", keys), ("value", values), ("z", values)):
            found[f"{p}gdn/{name}"] = ((rows, hidden), mixer)
        found[p + "gdn/a_projection"] = found[p + "gdn/b_projection"] = ((heads, hidden), mixer)
        found[p + "gdn/a_log"] = found[p + "gdn/dt_bias"] = ((heads,), ())
        found[p + "gdn/convolution"] = ((text["linear_conv_kernel_dim"], 2 * keys + values), ())
        found[p + "gdn/norm"] = ((width,), ())
        found[p + "gdn/output"] = ((hidden, values), (p + "gdn/gated_output",))
    if "num_experts" not in text:
        inner = text["intermediate_size"]
        found[p + "mlp/gate"] = found[p + "mlp/up"] = ((inner, hidden), ffn)
        found[p + "mlp/down"] = ((hidden, inner), (p + "mlp/product",))
        return found
    inner, shared = text["moe_intermediate_size"], text["shared_expert_intermediate_size"]
    found[p + "moe/router"] = ((text["num_experts"], hidden), ffn)
    found[p + "moe/shared_score"] = ((1, hidden), ffn)
    for expert in range(text["num_experts"]):
        q = f"{p}moe/experts/{expert}/"
        found[q + "gate"] = found[q + "up"] = ((inner, hidden), ffn)
        found[q + "down"] = ((hidden, inner), (q + "product",))
    found[p + "moe/shared/gate"] = found[p + "moe/shared/up"] = ((shared, hidden), ffn)
    found[p + "moe/shared/down"] = ((hidden, shared), (p + "moe/shared/product",))
    return found


def _vision(config: Mapping[str, Any], text_hidden: int) -> Parameters:
    width, inner = config["hidden_size"], config["intermediate_size"]
    pixels = 3 * config["temporal_patch_size"] * config["patch_size"] ** 2
    merged = width * config["spatial_merge_size"] ** 2
    found: Parameters = {
        "vision/patch_embedding": ((width, pixels), ("vision/patch_input",)),
        "vision/patch_embedding_bias": ((width,), ()),
        "vision/position_embedding": ((config["num_position_embeddings"], width), ()),
        "vision/merger/norm_weight": ((width,), ()),
        "vision/merger/norm_bias": ((width,), ()),
        "vision/merger/fc1": ((merged, merged), ("vision/merger/input",)),
        "vision/merger/fc1_bias": ((merged,), ()),
        "vision/merger/fc2": ((text_hidden, merged), ("vision/merger/activation",)),
        "vision/merger/fc2_bias": ((text_hidden,), ()),
    }
    for block in range(config["depth"]):
        p = f"vision/layers/{block}/"
        for name in ("norm1_weight", "norm1_bias", "norm2_weight", "norm2_bias"):
            found[p + name] = ((width,), ())
        for name in ("query", "key", "value"):
            found[f"{p}attention/{name}"] = ((width, width), (p + "attention_input",))
            found[f"{p}attention/{name}_bias"] = ((width,), ())
        found[p + "attention/output"] = ((width, width), (p + "attention_output",))
        found[p + "attention/output_bias"] = ((width,), ())
        found[p + "mlp/fc1"], found[p + "mlp/fc1_bias"] = ((inner, width), (p + "mlp_input",)), ((inner,), ())
        found[p + "mlp/fc2"], found[p + "mlp/fc2_bias"] = ((width, inner), (p + "mlp_activation",)), ((width,), ())
    return found


def _draft(config: Mapping[str, Any], text: Mapping[str, Any], b: str) -> Parameters:
    hidden, width, inner = text["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    own = config["dflash_config"]
    taps = len(own["target_layer_ids"])
    found: Parameters = {
        f"{b}/feature_projection": ((hidden, taps * hidden), (f"{b}/target_features",)),
        f"{b}/context_norm": ((hidden,), ()),
        f"{b}/final_norm": ((hidden,), ()),
    }
    for index in range(config["num_hidden_layers"]):
        p = f"{b}/layers/{index}/"
        found[p + "input_norm"] = found[p + "post_attention_norm"] = ((hidden,), ())
        for name, rows in (("query", queries), ("key", keys), ("value", keys)):
            found[f"{p}attention/{name}"] = ((rows, hidden), (p + "query_projection_input",))
        for name in ("context_key", "context_value"):
            found[f"{p}attention/{name}"] = ((keys, hidden), (f"{b}/context_input",))
        found[p + "attention/query_norm"] = found[p + "attention/key_norm"] = ((width,), ())
        found[p + "attention/output"] = ((hidden, queries), (p + "attention_output",))
        found[p + "mlp/gate"] = found[p + "mlp/up"] = ((inner, hidden), (p + "mlp_input",))
        found[p + "mlp/down"] = ((hidden, inner), (p + "mlp_product",))
        if b == "dflash2":
            kernel, groups = own["conv_kernel_size"], hidden // own["conv_group_size"]
            for name in ("attention_conv", "mlp_conv"):
                found[f"{p}{name}/base_kernel"] = ((2, kernel, hidden), ())
                found[f"{p}{name}/kernel_projection"] = ((2 * kernel * groups, hidden), (f"{p}{name}_input",))
    if b == "dflash2":
        rank = own["selector_rank"]
        found[f"{b}/candidate_selector/hidden_projection"] = ((rank, hidden), (f"{b}/final_hidden",))
        for name in ("predecessor_codebook", "successor_codebook"):
            found[f"{b}/candidate_selector/{name}"] = ((text["vocab_size"], rank), ())
    return found
