"""Any mixture of experts whose banks lie [E, N, K]: quantized by a preset, loaded packed, computed by expert."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

import ninfer_torch
from ninfer_torch.convert import convert
from ninfer_torch.tensors import NinferTensor

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "Qwen3MoeForCausalLM": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "MixtralForCausalLM": MixtralConfig(**SIZES, num_local_experts=3),
    "Qwen2MoeForCausalLM": Qwen2MoeConfig(
        **SIZES, **EXPERTS, shared_expert_intermediate_size=24, decoder_sparse_step=1
    ),
    "DeepseekV3ForCausalLM": DeepseekV3Config(**{**SIZES, **LATENT}),
}
IDS = torch.tensor([[3, 7, 11, 2, 30, 30, 5, 1, 19, 8, 22, 39]])


def tiny(config: PreTrainedConfig, name: str) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, name)._from_config(config, attn_implementation="eager").eval()


def loaded(path: Path, **options: Any) -> Any:
    options = {"dtype": torch.float32, "attn_implementation": "eager", **options}
    return AutoModelForCausalLM.from_pretrained(path, **options)


def dense_twin(dense: Any, packed: Any) -> Any:
    """A plain model with the packed one's values."""
    twin = copy.deepcopy(dense)
    values = packed.state_dict(keep_vars=True).items()
    twin.load_state_dict({key: v.dequantize() if isinstance(v, NinferTensor) else v.detach() for key, v in values})
    return twin


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.std())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_preset_quantizes_the_banks_and_nothing_is_made_dense(tmp_path: Path, name: str) -> None:
    dense = tiny(CONFIGS[name], name)
    dense.save_pretrained(tmp_path / "m")
    report = convert(tmp_path / "m", tmp_path / "m.ninfer", "q4")
    formats = {parameter: entry.format for entry in report.tensors for parameter in entry.parameters}
    model = loaded(tmp_path / "m.ninfer")
    banks = {key for key, value in dense.state_dict().items() if value.dim() == 3}
    assert banks and {formats[f"text/{key}"] for key in banks} == {"q4_g64_fp16"}
    for key, value in model.named_parameters():
        routes = key.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        assert isinstance(value, NinferTensor) == (value.dim() > 1 and not routes), key
        assert value.shape == dense.state_dict()[key].shape, key
    packed_bytes = sum(value.numel() * value.element_size() for value in model.parameters())
    assert abs(packed_bytes - report.tensor_bytes) <= 0.02 * report.tensor_bytes
    assert set(model.get_experts_implementation().values()) == {"ninfer"}
    expected = logits(dense_twin(dense, model))
    assert close(logits(model), expected)
    model.set_experts_implementation("eager")
    assert close(logits(model), expected)
    assert (expected - logits(dense)).norm() < 0.8 * logits(dense).norm()


@pytest.mark.parametrize("preset", ["q6", "q8", "fp8"])
def test_other_presets_quantize_banks_too(tmp_path: Path, preset: str) -> None:
    dense = tiny(CONFIGS["Qwen3MoeForCausalLM"], "Qwen3MoeForCausalLM")
    convert(dense, tmp_path / "m.ninfer", preset)
    model = loaded(tmp_path / "m.ninfer")
    assert close(logits(model), logits(dense_twin(dense, model)))
    assert all(isinstance(value, NinferTensor) for value in model.parameters() if value.dim() == 3)


def test_experts_without_a_gate(tmp_path: Path) -> None:
    """Nemotron-H multiplies up, squares the positive part, and multiplies down."""
    config = NemotronHConfig(
        **{**SIZES, "layers_block_type": ["attention", "moe"]},
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=24,
        n_group=1,
        topk_group=1,
    )
    dense = tiny(config, "NemotronHForCausalLM")
    convert(dense, tmp_path / "m.ninfer", "q8")
    model = loaded(tmp_path / "m.ninfer")
    banks = {key.rpartition(".")[2] for key, value in model.named_parameters() if value.dim() == 3}
    assert {"up_proj", "down_proj"} <= banks
    assert all(isinstance(v, NinferTensor) for k, v in model.named_parameters() if ".experts." in k and v.dim() == 3)
    assert close(logits(model), logits(dense_twin(dense, model)))


def test_banks_that_stay_direct_are_reported(tmp_path: Path) -> None:
    """GPT-OSS stores the transposed banks: 63 % of these weights, which a report must not hide."""
    dense = tiny(GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2), "GptOssForCausalLM")
    report = convert(dense, tmp_path / "m.ninfer", "q4")
    banks = [entry for entry in report.tensors if entry.parameters[0].endswith(("gate_up_proj", "down_proj"))]
    share = sum(entry.weights for entry in banks) / report.weights
    line = f"4 tensors ({share:.1%} of the weights) stay direct: a bank of experts stored [E, K, N]"
    assert line in report.summary() and "[E, K, N]" in report.table() and '"reason"' in report.to_json()
    assert {entry.format for entry in banks} == {"fp32"}
    model = loaded(tmp_path / "m.ninfer")
    assert close(logits(model), logits(dense_twin(dense, model)))


def test_a_model_with_banks_is_saved_and_loaded_again(tmp_path: Path) -> None:
    dense = tiny(CONFIGS["MixtralForCausalLM"], "MixtralForCausalLM")
    convert(dense, tmp_path / "a.ninfer", "q5")
    model = loaded(tmp_path / "a.ninfer")
    ninfer_torch.save(model, tmp_path / "b.ninfer")
    again = loaded(tmp_path / "b.ninfer")
    for key, value in model.named_parameters():
        assert torch.equal(again.get_parameter(key), value), key
    assert torch.equal(logits(again), logits(model))
    assert set(again.get_experts_implementation().values()) == {"ninfer"}


def test_generation_and_gradients_pass_the_banks(tmp_path: Path) -> None:
    """Prefill and decoding agree, tokens of one expert only and a batch of none too; activations have gradients."""
    dense = tiny(CONFIGS["Qwen3MoeForCausalLM"], "Qwen3MoeForCausalLM")
    convert(dense, tmp_path / "m.ninfer", "q4")
    model = loaded(tmp_path / "m.ninfer")
    twin = dense_twin(dense, model)
    settings = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(IDS, **settings), twin.generate(IDS, **settings))
    experts, plain = model.model.layers[0].mlp.experts, twin.model.layers[0].mlp.experts
    for tokens, chosen in ((5, 2), (1, 1), (3, 0), (0, 1)):
        x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1))
        index = torch.full((tokens, 2), chosen)
        weights = torch.rand(tokens, 2, generator=torch.Generator().manual_seed(2))
        given = x.clone().requires_grad_()
        other = x.clone().requires_grad_()
        found, expected = experts(given, index, weights), plain(other, index, weights)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
        found.square().sum().backward()
        expected.square().sum().backward()
        assert torch.allclose(given.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_banks_compile_without_a_graph_break(tmp_path: Path) -> None:
    dense = tiny(CONFIGS["Qwen3MoeForCausalLM"], "Qwen3MoeForCausalLM")
    convert(dense, tmp_path / "m.ninfer", "q4")
    model = loaded(tmp_path / "m.ninfer")
    expected = logits(model)
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(1))
    index, weights = torch.tensor([[0, 3]] * 7), torch.full((7, 2), 0.5)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.allclose(compiled(x, index, weights), experts(x, index, weights), atol=1e-5)
    assert torch.equal(logits(model), expected)
