"""from_pretrained on an artifact: the same numbers as a plain model with the same weights, packed and frozen."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

import ninfer_torch
from ninfer_torch.artifact import ArtifactWriter, open_artifact
from ninfer_torch.convert.methods import quantize
from ninfer_torch.convert.pipeline import convert
from ninfer_torch.errors import ArtifactError, FormatError, LayoutError, NinferError, UnsupportedOperation
from ninfer_torch.tensors import NinferTensor
from tiny_models import dense_twin, prompt_ids, save_folder, tiny_llama, written_artifact

PACKED = ("q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16")


@pytest.fixture(autouse=True)
def overlay_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return written_artifact(tmp_path / "m.ninfer", tiny_llama())


def words_of(path: Path) -> dict[str, list[torch.Tensor]]:
    """Planes of every quantized object by state-dict name, straight from the file."""
    with open_artifact(path) as opened:
        tensors = {name.removeprefix("text/"): opened.tensor(b.object) for name, b in opened.bindings.items()}
        return {name: list(t.planes.values()) for name, t in tensors.items() if isinstance(t, NinferTensor)}


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_those_of_the_dequantized_weights(tmp_path: Path, format: str, tied: bool) -> None:
    path = written_artifact(tmp_path / "m.ninfer", tiny_llama(tied=tied), format)
    model, twin = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), dense_twin(path)
    ids = prompt_ids(batch=2)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, twin(ids).logits, rtol=1e-5, atol=1e-5)
    kwargs = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **kwargs), twin.generate(ids, **kwargs))


@pytest.mark.parametrize("preset", ["q4", "q8"])
def test_converted_folder_loads(tmp_path: Path, preset: str) -> None:
    source = save_folder(tmp_path / "source", tiny_llama(tied=True))
    convert(source, tmp_path / "m.ninfer", preset)
    model, twin = LlamaForCausalLM.from_pretrained(tmp_path / "m.ninfer"), dense_twin(tmp_path / "m.ninfer")
    assert model.dtype == torch.bfloat16 and model.generation_config.max_new_tokens == 7
    with torch.no_grad():
        logits = model(prompt_ids()).logits.float()
        expected = twin(prompt_ids()).logits
    assert (logits - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("dtype", ["auto", torch.float32, torch.float16])
def test_dtype_never_touches_words(artifact: Path, dtype: str | torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact, dtype=dtype)
    expected_dtype = torch.bfloat16 if dtype == "auto" else dtype
    stored = words_of(artifact)
    assert len(stored) == 2 * 7 + 2
    for name, parameter in model.named_parameters():
        assert parameter.dtype == expected_dtype
        assert isinstance(parameter, NinferTensor) == (name in stored)
        if name in stored:
            assert all(map(torch.equal, parameter.planes.values(), stored[name]))


def test_a_config_without_dtype_computes_in_bfloat16(tmp_path: Path) -> None:
    model = tiny_llama()
    members = {key: value for key, value in model.config.to_dict().items() if key != "dtype"}
    path = written_artifact(tmp_path / "m.ninfer", model, config=members)
    assert AutoModelForCausalLM.from_pretrained(path).dtype == torch.bfloat16


def test_tied_weight_is_one_tensor_with_the_policy_of_the_head(tmp_path: Path) -> None:
    path = written_artifact(tmp_path / "m.ninfer", tiny_llama(tied=True), policy="AllowA8")
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.model.embed_tokens.weight is model.lm_head.weight
    assert model.lm_head.weight.policy == "AllowA8"
    assert model.model.layers[0].mlp.up_proj.weight.policy == "AllowA8"


def test_a_tied_head_may_be_left_out(tmp_path: Path) -> None:
    path = written_artifact(
        tmp_path / "m.ninfer", tiny_llama(tied=True), change=lambda entries: entries.pop("lm_head.weight")
    )
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.model.embed_tokens.weight is model.lm_head.weight


def test_separate_weights_stay_separate_though_the_config_ties_them(tmp_path: Path) -> None:
    def other_head(entries: dict) -> None:
        entries["lm_head.weight"] = ("q4_g64_fp16", entries["lm_head.weight"][1].clone())

    path = written_artifact(tmp_path / "m.ninfer", tiny_llama(tied=True), change=other_head)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.lm_head.weight.format == "q4_g64_fp16"
    assert model.model.embed_tokens.weight.format == "q8_g32_fp16"
    model.tie_weights()
    assert model.lm_head.weight.format == "q4_g64_fp16"


def test_one_object_may_fill_two_untied_parameters(tmp_path: Path) -> None:
    def shared_head(entries: dict) -> None:
        entries["lm_head.weight"] = entries["model.embed_tokens.weight"]

    path = written_artifact(tmp_path / "m.ninfer", tiny_llama(), change=shared_head)
    model = AutoModelForCausalLM.from_pretrained(path)
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert head is not embedding and head.data_ptr() == embedding.data_ptr()


def test_parameters_may_be_rows_of_one_object(tmp_path: Path) -> None:
    """Query and key of the first layer fused in one q5 object, its norms in one bf16 object."""
    model = tiny_llama(dtype=torch.float32)
    layer = model.model.layers[0]
    query, key = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
    fused = quantize(torch.cat([query, key]).detach(), "q5_g64_fp16")
    norms = torch.rand(2 * 64).to(torch.bfloat16)
    parts = {
        "model.layers.0.self_attn.q_proj.weight": ("fused", 0, query.numel()),
        "model.layers.0.self_attn.k_proj.weight": ("fused", query.numel(), query.numel() + key.numel()),
        "model.layers.0.input_layernorm.weight": ("norms", 0, 64),
        "model.layers.0.post_attention_layernorm.weight": ("norms", 64, 128),
    }
    path = tmp_path / "m.ninfer"
    with ArtifactWriter(path) as writer:
        writer.component("text", json.loads(model.config.to_json_string(use_diff=False)))
        writer.tensor("fused", "q5_g64_fp16", tuple(fused.shape), fused)
        writer.tensor("norms", "bf16", (128,), norms)
        for name, value in model.state_dict().items():
            if name in parts:
                writer.bind(f"text/{name}", parts=[parts[name]])
            else:
                writer.tensor(name, "fp32", tuple(value.shape), value)
                writer.bind(f"text/{name}", name)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    dense = fused.dequantize()
    with torch.no_grad():
        query.copy_(dense[:64])
        key.copy_(dense[64:])
        layer.input_layernorm.weight.copy_(norms[:64])
        layer.post_attention_layernorm.weight.copy_(norms[64:])
        torch.testing.assert_close(loaded(prompt_ids()).logits, model(prompt_ids()).logits, rtol=1e-5, atol=1e-5)
    attention = loaded.model.layers[0].self_attn
    packed = [attention.q_proj.weight, attention.k_proj.weight]
    assert all(isinstance(weight, NinferTensor) for weight in packed)
    ninfer_torch.save(loaded, tmp_path / "split.ninfer")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "split.ninfer").model.layers[0].self_attn
    assert torch.equal(again.q_proj.weight, packed[0]) and torch.equal(again.k_proj.weight, packed[1])


def test_the_model_is_marked_quantized_and_keeps_no_trace_of_the_stub(artifact: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(str(artifact), output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.is_quantized and model.quantization_method == "ninfer"
    assert model.config.quantization_config.quant_method == "ninfer"
    assert model.config.to_dict()["quantization_config"] == {"quant_method": "ninfer"}
    assert not hasattr(model.config, "transformers_weights")
    assert model.name_or_path == model.config.name_or_path == str(artifact)
    assert model._weight_conversions == []
    assert model.hf_quantizer.artifact_path == artifact


def test_memory_footprint_counts_packed_bytes(artifact: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32)
    packed = sum(plane.nbytes for planes in words_of(artifact).values() for plane in planes)
    plain = sum(4 * p.numel() for p in model.parameters() if not isinstance(p, NinferTensor))
    assert model.get_memory_footprint(return_buffers=False) == packed + plain


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "disk"}, {"model": "cpu", "lm_head": "disk"}])
def test_device_maps_of_one_cpu(artifact: Path, device_map: object) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact, device_map=device_map, dtype=torch.float32)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    with torch.no_grad():
        torch.testing.assert_close(model(prompt_ids()).logits, dense_twin(artifact)(prompt_ids()).logits)


def test_a_small_memory_limit_puts_nothing_on_a_disk(artifact: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact, device_map="auto", max_memory={"cpu": 1000})
    assert all(
        isinstance(module.weight, NinferTensor) for module in model.modules() if isinstance(module, torch.nn.Linear)
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps")
def test_no_page_of_the_file_is_resident_after_the_load(tmp_path: Path) -> None:
    path = written_artifact(tmp_path / "unread.ninfer", tiny_llama())
    model = AutoModelForCausalLM.from_pretrained(path)
    resident, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            resident.append(int(line.split()[1]))
    assert resident == [0]
    assert isinstance(model.lm_head.weight, NinferTensor)


def test_model_survives_deepcopy_and_a_closed_artifact(artifact: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32)
    os.remove(artifact)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(model(prompt_ids()).logits, twin(prompt_ids()).logits)


def test_a_base_model_leaves_the_head(artifact: Path) -> None:
    model = AutoModel.from_pretrained(artifact, dtype=torch.float32)
    with torch.no_grad():
        hidden = model(prompt_ids()).last_hidden_state
        torch.testing.assert_close(hidden, dense_twin(artifact).model(prompt_ids()).last_hidden_state)


def test_inference_mode_around_the_load(artifact: Path) -> None:
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(artifact)
        logits = model(prompt_ids()).logits
    assert logits.isfinite().all()


def lora(peft: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def step(model: torch.nn.Module) -> None:
    """One step of training; every trainable parameter gets a finite gradient that is not zero."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    model(prompt_ids(), labels=prompt_ids()).loss.backward()
    assert trainable and all(p.grad.isfinite().all() and p.grad.any() for p in trainable)
    torch.optim.SGD(trainable, lr=0.1).step()


def assert_same_words(model: torch.nn.Module, words: dict[str, list[torch.Tensor]]) -> None:
    found = {name: p for name, p in model.named_parameters() if isinstance(p, NinferTensor)}
    names = {name.replace(".base_layer", "").removeprefix("base_model.model."): name for name in found}
    assert names.keys() == words.keys()
    assert all(all(map(torch.equal, found[names[name]].planes.values(), words[name])) for name in words)


def test_peft_model_trains_and_words_stay(artifact: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32)
    model = peft.get_peft_model(base, lora(peft))
    step(model)
    assert_same_words(model, words_of(artifact))
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32), tmp_path / "adapter"
    )
    with torch.no_grad():
        torch.testing.assert_close(again(prompt_ids()).logits, model.eval()(prompt_ids()).logits)


def test_adapters_of_transformers_train_and_load_from_their_folder(artifact: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    model = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32)
    model.add_adapter(lora(peft))
    step(model)
    assert_same_words(model, words_of(artifact))
    model.save_pretrained(tmp_path / "adapter")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(again(prompt_ids()).logits, model(prompt_ids()).logits)


def test_quantized_weights_are_frozen(artifact: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(artifact)
    assert not any(p.requires_grad for p in model.parameters() if isinstance(p, NinferTensor))
    assert model.hf_quantizer.is_trainable and not model.hf_quantizer.is_qat_trainable


def changed(name: str, value: object) -> object:
    def change(entries: dict) -> None:
        if value is None:
            del entries[name]
        else:
            entries[name] = value

    return change


def test_a_missing_parameter_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path = written_artifact(tmp_path / "m.ninfer", tiny_llama(), change=changed(name, None))
    with pytest.raises(ArtifactError, match=rf"without a tensor: {name}; .* without a place: none"):
        AutoModelForCausalLM.from_pretrained(path)


def test_an_extra_parameter_is_named(tmp_path: Path) -> None:
    extra = ("bf16", torch.ones(3, dtype=torch.bfloat16))
    path = written_artifact(tmp_path / "m.ninfer", tiny_llama(), change=changed("model.extra", extra))
    with pytest.raises(ArtifactError, match="without a tensor: none; .* without a place: model.extra"):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("format", ["bf16", "q4_g64_fp16"])
def test_a_wrong_shape_names_object_and_both_shapes(tmp_path: Path, format: str) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    wrong = (format, torch.ones(32, 128, dtype=torch.bfloat16))
    path = written_artifact(tmp_path / "m.ninfer", tiny_llama(), change=changed(name, wrong))
    with pytest.raises(LayoutError, match=rf"'weight/{name}' of shape \[32, 128\], expected \[32, 64\]"):
        AutoModelForCausalLM.from_pretrained(path)


def test_a_model_with_another_head_lists_what_is_missing(artifact: Path) -> None:
    with pytest.raises(ArtifactError, match=r"written for LlamaForCausalLM.*score\.weight.*lm_head\.weight"):
        AutoModelForSequenceClassification.from_pretrained(artifact)


def test_a_quantized_norm_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    path = written_artifact(tmp_path / "m.ninfer", model, config=config.to_dict())
    with pytest.raises(UnsupportedOperation, match=r"c_attn\.weight.*Conv1D.*bf16 or fp32"):
        AutoModelForCausalLM.from_pretrained(path)


def test_truncated_and_foreign_files_are_refused(artifact: Path, tmp_path: Path) -> None:
    whole = artifact.read_bytes()
    for kept in (0, 20, 3000, len(whole) // 2, len(whole) - 1):
        cut = tmp_path / f"cut{kept}.ninfer"
        cut.write_bytes(whole[:kept])
        with pytest.raises(ArtifactError):
            AutoModelForCausalLM.from_pretrained(cut)


@pytest.mark.parametrize("name", ["FooForCausalLM", "Qwen4ExpForCausalLM"])
def test_unknown_architectures_under_names_of_their_own_are_refused(tmp_path: Path, name: str) -> None:
    config = {"architectures": [name], "model_type": "foo_text", "hidden_size": 64}
    path = written_artifact(
        tmp_path / "m.ninfer", tiny_llama(), config=config, rename=lambda name: name.replace(".", "/")
    )
    named = {"Qwen4ExpForCausalLM": "Qwen3.8-Flash-Next"}.get(name, name)
    with pytest.raises(NinferError, match=f"{named}.* known are Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM.*generic"):
        AutoModelForCausalLM.from_pretrained(path)


def test_an_unknown_format_is_refused_before_the_load(artifact: Path, tmp_path: Path) -> None:
    data = artifact.read_bytes()
    foreign = tmp_path / "foreign.ninfer"
    foreign.write_bytes(data.replace(b"q8_g32_fp16", b"q8_g32_fp99"))
    with pytest.raises((FormatError, ArtifactError), match="q8_g32_fp99"):
        AutoModelForCausalLM.from_pretrained(foreign)
