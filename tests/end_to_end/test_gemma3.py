"""Gemma 3 270M from its own GGUF, whose block types all have a place in the registry: kept byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer

import ninfer_torch
from ninfer_torch.artifact import open_artifact
from ninfer_torch.convert.pipeline import convert
from ninfer_torch.convert.report import Report
from ninfer_torch.tensors import NinferTensor


@pytest.fixture(scope="module")
def converted(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    path = tmp_path_factory.mktemp("gemma3") / "gemma3.ninfer"
    return path, convert(gemma3_gguf, path, "gguf", no_fallback=True)


def test_blocks_are_kept_byte_for_byte(gemma3_gguf: Path, converted: tuple[Path, Report]) -> None:
    path, report = converted
    stored = {tensor.name: tensor for tensor in GGUFReader(gemma3_gguf).tensors}
    moved = [entry for entry in report.tensors if entry.format.startswith("gguf_")]
    assert len(moved) == 127 and not report.fallbacks and not report.unused
    with open_artifact(path) as artifact:
        for entry in moved:
            assert artifact.read_object(entry.object) == stored[entry.source].data.tobytes(), entry.source


def test_greedy_text_equals_that_of_transformers_own_load(gemma3_gguf: Path, converted: tuple[Path, Report]) -> None:
    path, _ = converted
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert isinstance(model.lm_head.weight, NinferTensor) and model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.policy == "AllowA8"
    prompt = tokenizer("The three primary colours are", return_tensors="pt")
    source = AutoModelForCausalLM.from_pretrained(gemma3_gguf.parent, gguf_file=gemma3_gguf.name, dtype=torch.float32)
    with torch.inference_mode(), ninfer_torch.activation_precision("a16"):
        found = model.generate(**prompt, max_new_tokens=16, do_sample=False)
        expected = source.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert torch.equal(found, expected) and found.shape[1] > prompt["input_ids"].shape[1]
