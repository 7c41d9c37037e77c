"""Adapters on frozen quantized weights, through PEFT and Trainer: they train, save, load, and merge when told how."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import ninfer_torch
import official_models
from ninfer_torch.errors import ConversionError, UnsupportedOperation
from ninfer_torch.tensors import NinferTensor, StackedRows
from tiny_families import FAMILIES, prompt, tiny_family

peft = pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
TARGETS = {
    "llama": ["q_proj", "down_proj"],
    "llama tied": ["q_proj", "down_proj"],
    "qwen3.5": ["q_proj", "in_proj_qkv"],
}
TARGETS["qwen3.5 moe"] = [*TARGETS["qwen3.5"], "shared_expert.up_proj"]


def quantized(family: str = "llama", recipe: str = "q4") -> Any:
    model = tiny_family(family)
    ninfer_torch.quantize_(model, recipe)
    return model


def words(model: torch.nn.Module) -> dict[str, list[torch.Tensor]]:
    """Copies of every quantized parameter's planes, under the base model's name."""
    found = {name: p for name, p in model.named_parameters() if isinstance(p, NinferTensor)}
    plain = {name.removeprefix("base_model.model.").replace(".base_layer", ""): p for name, p in found.items()}
    return {name: [plane.clone() for plane in p.planes.values()] for name, p in plain.items()}


def same_words(first: dict[str, list[torch.Tensor]], second: dict[str, list[torch.Tensor]]) -> bool:
    return first.keys() == second.keys() and all(all(map(torch.equal, first[name], second[name])) for name in first)


def lora(family: str = "llama", **options: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=TARGETS[family], task_type="CAUSAL_LM", **options)


def random_lora(family: str = "llama", seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return peft.get_peft_model(quantized(family), lora(family, init_lora_weights=False)).eval()


def train(model: Any, steps: int = 12) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(steps):
        loss = model(prompt(2), labels=prompt(2)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(prompt()).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_trains_saves_and_loads(family: str, tmp_path: Path) -> None:
    base = quantized(family)
    before = words(base)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, lora(family))
    losses = train(model)
    assert losses[-1] < 0.9 * losses[0] and same_words(words(model), before)
    model.eval().save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    again = peft.PeftModel.from_pretrained(quantized(family), tmp_path).eval()
    assert torch.equal(logits(again), logits(model))


def test_an_adapter_finds_its_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The adapter's folder names the base model's path, which is a .ninfer file."""
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))
    ninfer_torch.save(quantized(), tmp_path / "base.ninfer")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base.ninfer")
    torch.manual_seed(1)
    model = peft.get_peft_model(base, lora(init_lora_weights=False)).eval()
    model.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert isinstance(again.get_base_model().lm_head.weight, NinferTensor)
    assert torch.equal(logits(again), logits(model))


def test_gradients_are_those_of_the_dense_model() -> None:
    model = random_lora()
    dense = copy.deepcopy(model)
    for module in dense.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            if isinstance(p, NinferTensor):
                setattr(module, name, torch.nn.Parameter(p.dequantize(), requires_grad=False))
    for each in (model, dense):
        each(prompt(2), labels=prompt(2)).loss.backward()
    expected = {name: p.grad for name, p in dense.named_parameters() if p.requires_grad}
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert expected and found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-5)


def test_several_adapters(tmp_path: Path) -> None:
    model = random_lora()
    torch.manual_seed(7)
    model.add_adapter("second", lora(init_lora_weights=False))
    outputs = {}
    for name in ("default", "second"):
        model.set_adapter(name)
        outputs[name] = logits(model)
    with model.disable_adapter():
        outputs["none"] = logits(model)
    assert torch.equal(outputs["none"], logits(quantized()))
    assert not torch.allclose(outputs["default"], outputs["second"])
    assert not torch.allclose(outputs["default"], outputs["none"])
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(quantized(), tmp_path, adapter_name="default").eval()
    again.load_adapter(tmp_path / "second", adapter_name="second")
    for name in ("second", "default"):
        again.set_adapter(name)
        assert torch.equal(logits(again), outputs[name])
    base = again.unload()
    assert torch.equal(logits(base), outputs["none"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merge_is_refused_by_name_and_before_anything_happens(family: str) -> None:
    model = random_lora(family)
    before, output = words(model), logits(model)
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(UnsupportedOperation, match=r"layers\.\d\.\S+_proj\w*\.weight.*ninfer_torch\.merging"):
            merge()
    assert same_words(words(model), before) and torch.equal(logits(model), output)


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_merge_by_a_named_method(family: str, safe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))
    model = random_lora(family)
    untouched = copy.deepcopy(model)
    tuned = {
        name.removeprefix("base_model.model."): m for name, m in model.named_modules() if hasattr(m, "get_delta_weight")
    }
    expected = {
        f"{name}.weight": ninfer_torch.quantize(
            layer.get_base_layer().weight.dequantize() + layer.get_delta_weight("default"), "q4_g64_fp16"
        )
        for name, layer in tuned.items()
    }
    others = {name: planes for name, planes in words(model).items() if name not in expected}
    with ninfer_torch.merging("grouped_absmax"):
        merged = model.merge_and_unload(safe_merge=safe)
    assert expected and all(torch.equal(merged.get_parameter(name), weight) for name, weight in expected.items())
    assert all(isinstance(merged.get_parameter(name), torch.nn.Parameter) for name in expected)
    assert others and same_words({name: words(merged)[name] for name in others}, others)
    reference = logits(untouched)
    bare = logits(untouched.unload())
    assert (logits(merged) - reference).norm() < 0.6 * (bare - reference).norm()
    ninfer_torch.save(merged, tmp_path / "m.ninfer")


def test_merging_may_search_and_change_the_format() -> None:
    reference = logits(random_lora())
    errors = {}
    for title, method, options in (
        ("absmax", "grouped_absmax", {}),
        ("search", "grouped_search", {"negative_scales": True}),
        ("eight bits", "grouped_absmax", {"format": "q8_g32_fp16"}),
        ("rows", "fp8_row_maxabs", {"format": "fp8_e4m3fn_row_bf16"}),
    ):
        model = random_lora()
        with ninfer_torch.merging(method, **options):
            merged = model.merge_and_unload()
        errors[title] = float((logits(merged) - reference).norm())
        assert merged.model.layers[0].self_attn.q_proj.weight.format == options.get("format", "q4_g64_fp16")
    assert errors["eight bits"] < errors["search"] < errors["absmax"]


def test_adapters_on_composed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An official artifact's q_proj is rows of two objects: it trains an adapter, and has no one format to merge into."""
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))
    configs, recipe = official_models.RECIPES["groupwise"]
    path = official_models.write_model(tmp_path / "m.ninfer", configs, recipe).path
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    before = words(base)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, lora("qwen3.5"))
    assert any(isinstance(p, StackedRows) for name, p in model.named_parameters() if "q_proj.base_layer" in name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    ids, losses = prompt(2) % 32, []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and same_words(words(model), before)
    with (
        ninfer_torch.merging("grouped_absmax"),
        pytest.raises(UnsupportedOperation, match=r"in_proj_qkv\.weight, a StackedRows"),
    ):
        model.merge_and_unload()
    assert same_words(words(model), before)


def test_merging_wants_a_method_that_fits() -> None:
    with pytest.raises(ConversionError, match="unknown method"), ninfer_torch.merging("best"):
        pass
    model = random_lora()
    with ninfer_torch.merging("fp8_row_maxabs"), pytest.raises(UnsupportedOperation, match=r"q_proj\.weight.*format="):
        model.merge_and_unload()
    with ninfer_torch.merging("grouped_absmax", format="bf16"), pytest.raises(UnsupportedOperation, match="bf16"):
        model.merge_and_unload()


def test_variants_that_rewrite_the_weight_are_refused() -> None:
    """DoRA scales the base weight itself, and an adapter of a bank is added to it in every pass: both need it dense."""
    torch.manual_seed(1)
    with pytest.raises(UnsupportedOperation, match="dequantize"):
        model = peft.get_peft_model(quantized(), lora(use_dora=True))
        model(prompt())
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.down_proj"], task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedOperation, match="dequantize"):
        model = peft.get_peft_model(quantized("qwen3.5 moe"), config)
        model(prompt())


def test_outside_of_peft_an_update_is_refused_too() -> None:
    weight = ninfer_torch.quantize(torch.randn(8, 64), "q4_g64_fp16")
    with pytest.raises(UnsupportedOperation, match=r"merging\(method\)"):
        weight += torch.ones(8, 64)
    with pytest.raises(UnsupportedOperation, match="new nn.Parameter"):
        weight.data = torch.ones(8, 64)


def test_words_are_replaced_and_not_written_to() -> None:
    """A parameter's planes may be the artifact's mapping, or another parameter's too."""
    first = torch.nn.Parameter(ninfer_torch.quantize(torch.randn(8, 64), "q4_g64_fp16"), requires_grad=False)
    second = torch.nn.Parameter(first.detach(), requires_grad=False)
    before = second.dequantize()
    with ninfer_torch.merging("grouped_absmax"):
        first.data += torch.ones(8, 64)
    assert torch.equal(second.dequantize(), before)
    assert (first.dequantize() - before - 1).abs().max() < 0.5


def test_a_model_made_dense_merges_exactly() -> None:
    base = quantized().dequantize()
    torch.manual_seed(1)
    model = peft.get_peft_model(base, lora(init_lora_weights=False)).eval()
    output = logits(model)
    torch.testing.assert_close(logits(model.merge_and_unload()), output, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    gradients = []
    for checkpointing in (False, True):
        model = random_lora().train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        model(prompt(2), labels=prompt(2)).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    assert gradients[0] and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients, strict=True))


def test_prepare_for_training_as_with_other_quantizers() -> None:
    base = quantized()
    before = words(base)
    model = peft.get_peft_model(peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False), lora())
    losses = train(model)
    assert losses[-1] < losses[0] and same_words(words(model), before)


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = prompt()[0].roll(index)
        return {"input_ids": ids, "labels": ids}


def test_trainer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = quantized()
    before = words(base)
    model = peft.get_peft_model(base, lora())
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=0.02,
        logging_steps=1,
        save_steps=3,
        gradient_checkpointing=True,
        report_to=[],
        use_cpu=True,
        seed=0,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] and same_words(words(model), before)
    checkpoint = tmp_path / "checkpoint-3"
    assert {path.name for path in checkpoint.iterdir()} >= {
        "adapter_model.safetensors",
        "optimizer.pt",
        "trainer_state.json",
    }
    torch.manual_seed(0)
    resumed = Trainer(model=peft.get_peft_model(quantized(), lora()), args=arguments, train_dataset=Texts())
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert torch.allclose(logits(resumed.model.eval()), logits(model.eval()), atol=1e-5)


def test_a_bare_quantized_model_is_refused_by_trainer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="adapter"):
        Trainer(model=quantized(), args=TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True))


FRESH = """
import sys, torch
import ninfer_torch
state = torch.load(sys.argv[1], weights_only=True)
print(len(state), sum(isinstance(t, ninfer_torch.NinferTensor) for t in state.values()))
"""


def test_a_checkpoint_of_a_model_with_adapters_opens_in_a_fresh_process(tmp_path: Path) -> None:
    model = random_lora()
    torch.save(model.state_dict(), tmp_path / "all.pt")
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FRESH, str(tmp_path / "all.pt")]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split() == [str(len(model.state_dict())), str(len(words(model)))]
    result = model.load_state_dict(torch.load(tmp_path / "all.pt", weights_only=True))
    assert not result.missing_keys
