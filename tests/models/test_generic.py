"""The generic plan: what a model class needs, learned without its weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    WhisperConfig,
)

from ninfer_torch.errors import ConversionError
from ninfer_torch.models.generic import (
    ModelPlan,
    direct_reasons,
    expert_banks,
    logical_name,
    plan_model,
    state_dict_name,
    use_input,
)

DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama-tied": LlamaConfig(**DECODER, tie_word_embeddings=True, architectures=["LlamaForCausalLM"]),
    "llama": LlamaConfig(**DECODER, tie_word_embeddings=False, architectures=["LlamaForCausalLM"]),
    "llama-base": LlamaConfig(**DECODER, architectures=["LlamaModel"]),
    "qwen2-bias": Qwen2Config(**DECODER, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"]),
    "gemma3": Gemma3TextConfig(**DECODER, architectures=["Gemma3ForCausalLM"]),
    "mixtral": MixtralConfig(**DECODER, num_local_experts=3, architectures=["MixtralForCausalLM"]),
    "gpt-oss": GptOssConfig(**DECODER, num_local_experts=3, architectures=["GptOssForCausalLM"]),
    "granite-moe": GraniteMoeConfig(**DECODER, num_local_experts=3, architectures=["GraniteMoeForCausalLM"]),
    "qwen2-moe": Qwen2MoeConfig(
        **DECODER,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        decoder_sparse_step=1,
        architectures=["Qwen2MoeForCausalLM"],
    ),
    "gpt2": GPT2Config(
        n_embd=32, n_layer=1, n_head=4, n_positions=16, vocab_size=40, architectures=["GPT2LMHeadModel"]
    ),
    "bert": BertConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=40,
        architectures=["BertForMaskedLM"],
    ),
    "whisper": WhisperConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=60,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        architectures=["WhisperForConditionalGeneration"],
    ),
}


def real_model(name: str) -> Any:
    config = CONFIGS[name]
    torch.manual_seed(0)
    return getattr(transformers, config.architectures[0])(config)


def kinds(plan: ModelPlan) -> dict[str, str]:
    return {name: tensor.kind for tensor in plan.tensors for name in tensor.names}


@pytest.mark.parametrize("name", CONFIGS)
def test_plan_covers_the_state_dict_once(name: str) -> None:
    """Names, shapes and ties of the plan are those of a model with weights."""
    plan = plan_model(CONFIGS[name])
    state = real_model(name).state_dict()
    assert sorted(n for tensor in plan.tensors for n in tensor.names) == sorted(state)
    assert {n: tensor.shape for tensor in plan.tensors for n in tensor.names} == {
        n: tuple(t.shape) for n, t in state.items()
    }
    for tensor in plan.tensors:
        assert len({state[n].data_ptr() for n in tensor.names}) == 1
    assert len({state[tensor.names[0]].data_ptr() for tensor in plan.tensors}) == len(plan.tensors)


@pytest.mark.parametrize("name", CONFIGS)
def test_quantizable_weights_are_those_torch_layers_use(name: str) -> None:
    """A quantizable name is the weight of a Linear, of the input embedding or of experts, judged on a real model by what
    its forward calls.
    """
    model = real_model(name)
    modules = dict(model.named_modules(remove_duplicate=False))
    for tensor in plan_model(CONFIGS[name]).tensors:
        for n in tensor.names:
            module = modules[n.rpartition(".")[0]]
            linear = (
                isinstance(module, torch.nn.Linear)
                and n.endswith(".weight")
                and not n.endswith("shared_expert_gate.weight")
            )
            linear |= name in ("mixtral", "granite-moe", "qwen2-moe") and ".experts." in n
            assert (n in tensor.multiplied) == linear
            if tensor.kind == "direct":
                assert not linear or tensor.reason
            else:
                assert linear or module is model.get_input_embeddings()
                assert tensor.reason == ""
        if tensor.kind == "head":
            assert modules[tensor.names[0].rpartition(".")[0]] is model.get_output_embeddings()


def test_kinds_of_a_llama() -> None:
    plan = plan_model(CONFIGS["llama"])
    assert plan.architecture == "LlamaForCausalLM" and plan.base_model_prefix == "model"
    found = kinds(plan)
    assert found["model.embed_tokens.weight"] == "embedding" and found["lm_head.weight"] == "head"
    assert found["model.layers.1.self_attn.o_proj.weight"] == "linear" and found["model.norm.weight"] == "direct"
    assert list(found.values()).count("linear") == 14


def test_tied_head_is_the_embedding_under_another_name() -> None:
    plan = plan_model(CONFIGS["llama-tied"])
    (tied,) = (tensor for tensor in plan.tensors if len(tensor.names) > 1)
    assert set(tied.names) == {"model.embed_tokens.weight", "lm_head.weight"}
    assert tied.kind == "embedding" and tied.multiplied == ("lm_head.weight",)


def test_other_tables_stay_direct() -> None:
    gpt2 = kinds(plan_model(CONFIGS["gpt2"]))
    assert gpt2["transformer.wte.weight"] == "embedding" and gpt2["transformer.wpe.weight"] == "direct"
    assert gpt2["transformer.h.0.mlp.c_fc.weight"] == "direct"  # Conv1D: [K, N], not a Linear
    mixtral = kinds(plan_model(CONFIGS["mixtral"]))
    assert mixtral["model.layers.0.mlp.gate.weight"] == "direct"
    bert = kinds(plan_model(CONFIGS["bert"]))
    assert bert["bert.embeddings.position_embeddings.weight"] == "direct"
    whisper = kinds(plan_model(CONFIGS["whisper"]))
    assert whisper["model.encoder.conv1.weight"] == "direct"


def test_banks_of_experts_are_linear_and_routers_are_not() -> None:
    for name in ("mixtral", "granite-moe", "qwen2-moe"):
        tensors = {tensor.names[0]: tensor for tensor in plan_model(CONFIGS[name]).tensors}
        banks = [key for key in tensors if ".experts." in key]
        assert len(banks) == 4
        for key in banks:
            assert tensors[key].kind == "linear" and len(tensors[key].shape) == 3 and tensors[key].multiplied == (key,)
            assert use_input(key) == f"text/{key}/input"
    gate = tensors["model.layers.1.mlp.shared_expert_gate.weight"]  # an nn.Linear of one row
    assert gate.kind == "direct" and gate.shape == (1, 32) and gate.multiplied == () and "router" in gate.reason
    assert tensors["model.layers.1.mlp.shared_expert.down_proj.weight"].kind == "linear"


def test_a_router_is_a_linear_layer_beside_experts_with_a_row_for_each() -> None:
    """By itself or inside a module of its own; another layer of as many rows is none."""

    class Experts(torch.nn.Module):
        num_experts, is_transposed = 8, False

        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.empty(8, 16, 4))
            self.down_proj = torch.nn.Parameter(torch.empty(8, 4, 8))

    block = torch.nn.Module()
    block.experts = Experts()
    block.router = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    block.gate, block.other = torch.nn.Linear(4, 8), torch.nn.Linear(4, 6)
    block.shared = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    model = torch.nn.ModuleDict({"block": block, "outside": torch.nn.Linear(4, 8)})
    assert set(direct_reasons(model)) == {"block.router.0.weight", "block.gate.weight"}
    assert expert_banks(model) == {"block.experts.gate_up_proj", "block.experts.down_proj"}
    block.experts.down_proj = torch.nn.Parameter(torch.empty(4, 8))
    assert expert_banks(model) == set() and "not known" in direct_reasons(model)["block.experts.gate_up_proj"]


def test_banks_that_no_packed_product_follows_say_why_they_stay_direct() -> None:
    tensors = {tensor.names[0]: tensor for tensor in plan_model(CONFIGS["gpt-oss"]).tensors}
    banks = {key: tensor for key, tensor in tensors.items() if key.endswith(("gate_up_proj", "down_proj"))}
    assert len(banks) == 4 and {tensor.kind for tensor in banks.values()} == {"direct"}
    assert all("[E, K, N]" in tensor.reason for tensor in banks.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_matrix_that_stays_direct_says_why(name: str) -> None:
    """A report can then account for all weights that a preset leaves alone, a GPT-2's [K, N] layers among them."""
    for tensor in plan_model(CONFIGS[name]).tensors:
        assert bool(tensor.reason) == (tensor.kind == "direct" and len(tensor.shape) > 1), tensor.names


def test_config_is_complete_json_without_private_members() -> None:
    config = LlamaConfig(**DECODER, architectures=["LlamaForCausalLM"], dtype=torch.bfloat16)
    config._name_or_path = "/home/someone/model"
    stored = plan_model(config).config
    assert "someone" not in json.dumps(stored, allow_nan=False)
    assert (
        stored["architectures"] == ["LlamaForCausalLM"]
        and stored["model_type"] == "llama"
        and stored["dtype"] == "bfloat16"
    )
    again = LlamaConfig.from_dict(stored)
    assert {**again.to_dict(), "_name_or_path": ""} == {**config.to_dict(), "_name_or_path": ""}


def test_planning_leaves_the_config_alone() -> None:
    config = LlamaConfig(**DECODER, architectures=["LlamaForCausalLM"])
    before = config.to_dict()
    plan_model(config)
    assert config.to_dict() == before


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ConversionError, match="LlamaConfig names no architecture"):
        plan_model(LlamaConfig(**DECODER))
    for name in ("NoSuchModelForCausalLM", "LlamaConfig", "logging"):
        with pytest.raises(ConversionError, match=f"no model class '{name}'"):
            plan_model(LlamaConfig(**DECODER, architectures=[name]))
    broken = LlamaConfig(**DECODER, architectures=["LlamaForCausalLM"])
    broken.hidden_act = "no-such-activation"
    with pytest.raises(ConversionError, match="cannot build LlamaForCausalLM"):
        plan_model(broken)


def test_names_go_both_ways() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    assert logical_name(name) == "text/model.layers.0.mlp.up_proj.weight"
    assert state_dict_name(logical_name(name)) == name
    assert use_input(name) == "text/model.layers.0.mlp.up_proj/input"
    with pytest.raises(ConversionError, match="vision/x"):
        state_dict_name("vision/x")
