"""A golden GGUF that uses all eighteen block types, from the file to logits that other programs computed."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import ninfer_torch
from golden import golden, load_tensors
from ninfer_torch.convert.pipeline import convert
from ninfer_torch.formats import FORMATS
from ninfer_torch.tensors import NinferTensor


def test_logits_equal_those_of_the_dequantized_weights(tmp_path: Path) -> None:
    source = golden("gguf", "tiny_llama_all_types.gguf")
    expected = load_tensors(golden("gguf", "tiny_llama_all_types.safetensors"))
    report = convert(source, tmp_path / "tiny.ninfer", "gguf", no_fallback=True)
    gguf_formats = {name for name in FORMATS if name.startswith("gguf_")}
    assert gguf_formats <= set(report.format_counts())
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "tiny.ninfer", dtype=torch.float32, attn_implementation="eager"
    )
    stored = {weight.format for weight in model.parameters() if isinstance(weight, NinferTensor)}
    assert stored == gguf_formats
    with torch.inference_mode(), ninfer_torch.activation_precision("a16"):
        logits = model(expected["input_ids"]).logits
    spread = expected["logits_float32"].std()
    assert (logits - expected["logits_float32"]).abs().max() < 1e-4 * spread
    assert torch.equal(logits.argmax(-1), expected["logits_llama_cpp"].argmax(-1))
