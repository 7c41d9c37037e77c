"""Tiny random models of the families that every host feature is tried on: Llama, and Qwen3.5 dense and with experts."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

FAMILIES = ("llama", "llama tied", "qwen3.5", "qwen3.5 moe")

_SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "tie_word_embeddings": False,
}
_HYBRID: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}


def tiny_family(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A random model of one of FAMILIES, in evaluation mode, with eager attention."""
    torch.manual_seed(seed)
    if family == "llama tied":
        model_class, config = LlamaForCausalLM, LlamaConfig(**{**_SIZES, "tie_word_embeddings": True})
    elif family == "llama":
        model_class, config = LlamaForCausalLM, LlamaConfig(**_SIZES)
    elif family == "qwen3.5":
        model_class, config = Qwen3_5ForCausalLM, Qwen3_5TextConfig(**_SIZES, **_HYBRID)
    else:
        model_class, config = Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**_SIZES, **_HYBRID, **_EXPERTS)
    config.dtype = dtype
    return model_class._from_config(config, attn_implementation="eager").to(dtype).eval()


def prompt(batch: int = 1, length: int = 9) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(5))
