"""A real model the whole way: GGUF, artifact, from_pretrained, text. SmolLM2-135M-Instruct, whose GGUF is Q4_1."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ninfer_torch
from ninfer_torch.artifact import open_artifact
from ninfer_torch.cli.demo import TEXT, source_logits
from ninfer_torch.convert.pipeline import convert
from ninfer_torch.convert.quality import compare_logits
from ninfer_torch.tensors import NinferTensor

Converted = Callable[[str], Path]


@pytest.fixture(scope="module")
def converted(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    folder = tmp_path_factory.mktemp("smollm2")

    @cache
    def artifact(preset: str) -> Path:
        path = folder / f"{preset}.ninfer"
        convert(smollm2_gguf, path, preset)
        return path

    return artifact


def dense_copy(model: Any) -> Any:
    """The same model with plain weights."""
    dense = copy.deepcopy(model)
    for module in dense.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, NinferTensor):
                setattr(module, name, torch.nn.Parameter(parameter.dequantize(), requires_grad=False))
    dense.tie_weights()
    return dense


def test_greedy_text_equals_that_of_the_dequantized_weights(converted: Converted) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted("q8"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(converted("q8"))
    quantized = [name for name, value in model.named_parameters() if isinstance(value, NinferTensor)]
    assert len(quantized) == 211  # 30 layers of 7 linears, and the embedding that is the head
    assert model.lm_head.weight is model.model.embed_tokens.weight
    messages = [{"role": "user", "content": "Describe the sea in three sentences."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        found = model.generate(**prompt, max_new_tokens=64, do_sample=False)
        expected = dense_copy(model).generate(**prompt, max_new_tokens=64, do_sample=False)
    assert torch.equal(found, expected)
    assert found.shape[1] > prompt["input_ids"].shape[1] + 16


def test_more_bits_come_closer_to_the_source(converted: Converted, smollm2_gguf: Path) -> None:
    ids = AutoTokenizer.from_pretrained(converted("q8"))(TEXT, return_tensors="pt")["input_ids"]
    expected = source_logits(smollm2_gguf, ids)
    agreements = []
    for preset in ("q4", "q5", "q6", "q8"):
        model = AutoModelForCausalLM.from_pretrained(converted(preset), dtype=torch.float32)
        with torch.inference_mode():
            agreements.append(compare_logits(expected, model(ids).logits))
    divergences = [agreement.divergence for agreement in agreements]
    assert divergences == sorted(divergences, reverse=True) and divergences[-1] > 0
    assert divergences[0] > 4 * divergences[-1]
    assert agreements[-1].top1 > 0.9 and agreements[-1].positions == ids.numel()


@pytest.mark.slow
def test_a_draft_of_six_bits_assists_eight(converted: Converted) -> None:
    """Assisted generation gives the target's own text, in fewer of its passes."""
    target, draft = (
        AutoModelForCausalLM.from_pretrained(converted(name), dtype=torch.float32) for name in ("q8", "q6")
    )
    tokenizer = AutoTokenizer.from_pretrained(converted("q8"))
    ids = tokenizer("The three largest oceans are the", return_tensors="pt")["input_ids"]
    options = {"max_new_tokens": 24, "do_sample": False}
    alone = target.generate(ids, **options)
    passes = []
    hook = target.register_forward_hook(lambda *_: passes.append(1))
    assisted = target.generate(ids, assistant_model=draft, **options)
    hook.remove()
    assert torch.equal(assisted, alone)
    assert len(passes) < 0.7 * (alone.shape[1] - ids.shape[1])


def test_an_adapter_merges_into_real_weights(converted: Converted) -> None:
    """Merged into the weights' own four bits, a LoRA is nearer to the adapted model than to none; into eight, on it."""
    peft = pytest.importorskip("peft")
    ids = torch.tensor([[504, 3575, 282, 4649, 314, 7042, 30, 198]])
    targets = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(0, 30, 2)]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    errors = {}
    for title, options in (("own format", {}), ("eight bits", {"format": "q8_g32_fp16"})):
        base = AutoModelForCausalLM.from_pretrained(converted("q4"), dtype=torch.float32)
        torch.manual_seed(0)
        with torch.no_grad():
            errors["not merged"] = base(ids).logits
            model = peft.get_peft_model(base, config).eval()
            expected = model(ids).logits
            with ninfer_torch.merging("grouped_absmax", **options):
                errors[title] = model.merge_and_unload()(ids).logits
    distance = {title: float((logits - expected).norm() / expected.norm()) for title, logits in errors.items()}
    print(distance)
    assert distance["own format"] < 0.7 * distance["not merged"]
    assert distance["eight bits"] < 0.1 * distance["not merged"]


def test_block_types_outside_the_registry_are_reported(
    converted: Converted, smollm2_gguf: Path, tmp_path: Path
) -> None:
    report = convert(smollm2_gguf, tmp_path / "gguf.ninfer", "gguf")
    widened = {entry.parameters[0] for entry in report.fallbacks}
    assert widened and all(entry.encoding == "q4_1" for entry in report.fallbacks)
    assert all(name in report.summary() for name in widened)
    with pytest.raises(ninfer_torch.ConversionError, match="q4_1"):
        convert(smollm2_gguf, tmp_path / "strict.ninfer", "gguf", no_fallback=True)
    assert not (tmp_path / "strict.ninfer").exists()


def test_the_artifact_passes_its_value_checks(converted: Converted) -> None:
    with open_artifact(converted("q4")) as artifact:
        sizes = [len(artifact.read_object(name, check=True)) for name in artifact.objects]
        assert sum(sizes) == sum(record.bytes for record in artifact.objects.values())


def test_loading_costs_the_file_and_touches_no_page(converted: Converted) -> None:
    benchmark = Path(__file__).parents[2] / "benchmarks" / "load_memory.py"
    command = [sys.executable, str(benchmark), "--model", str(converted("q8")), "--json", "-"]
    records = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    ours = next(record for record in records if record["contestant"] == "ninfer")
    assert ours["file_bytes"] == converted("q8").stat().st_size
    assert ours["added_bytes"] < ours["file_bytes"] + 200 * 2**20
    assert ours["mapped_resident_bytes"] == 0
    assert {record["contestant"] for record in records} == {"ninfer", "safetensors"}
