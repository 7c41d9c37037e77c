"""An encoder: all-MiniLM-L6-v2, quantized in place, keeps the order of sentence similarities, and saves."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import ninfer_torch
from ninfer_torch.tensors import NinferTensor

SENTENCES = (
    "A man is playing the guitar on stage.",
    "Someone performs a song with a guitar.",
    "The band tuned their instruments before the concert.",
    "A chef is slicing onions in the kitchen.",
    "The cook prepares vegetables for dinner.",
    "Two dogs run across a snowy field.",
    "A puppy chases its tail in the garden.",
    "The cat sleeps on the warm windowsill.",
    "Stock prices fell sharply on Monday morning.",
    "Investors worry about rising interest rates.",
    "The central bank kept its policy unchanged.",
    "Scientists discovered a new species of frog.",
    "The telescope captured light from a distant galaxy.",
    "A rover landed on the surface of Mars.",
    "She forgot her umbrella and got wet in the rain.",
    "Heavy rain caused flooding in the valley.",
    "The train to Berlin leaves at half past nine.",
    "Our flight was delayed by three hours.",
    "He solved the equation with the quadratic formula.",
    "Students learn calculus in their first year.",
)
PAIRS = list(itertools.combinations(range(len(SENTENCES)), 2))


def similarities(model: Any, tokenizer: Any) -> torch.Tensor:
    """Cosine of mean-pooled embeddings, for each of PAIRS."""
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.inference_mode():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    pooled = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    first, second = torch.tensor(PAIRS).T
    return (pooled[first] * pooled[second]).sum(-1)


def spearman(a: torch.Tensor, b: torch.Tensor) -> float:
    ranks = torch.stack([values.argsort().argsort().double() for values in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def test_six_bits_keep_the_order_of_similarities(
    minilm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder)
    model = AutoModel.from_pretrained(minilm_folder, dtype=torch.float32).eval()
    dense, size = similarities(model, tokenizer), model.get_memory_footprint()
    ninfer_torch.quantize_(model, "q6")
    packed = [name for name, p in model.named_parameters() if isinstance(p, NinferTensor)]
    assert len(packed) == 6 * 6 + 2  # six layers of six linears, the word embeddings and the pooler
    assert model.get_memory_footprint() < 0.32 * size
    found = similarities(model, tokenizer)
    correlation = spearman(found, dense)
    print(f"Spearman correlation of {len(PAIRS)} similarities at q6: {correlation:.4f}")
    assert correlation >= 0.98

    ninfer_torch.save(model, tmp_path / "minilm.ninfer", tokenizer=tokenizer)
    model.save_pretrained(tmp_path / "folder")
    for path in (tmp_path / "minilm.ninfer", tmp_path / "folder"):
        again = AutoModel.from_pretrained(path).eval()
        assert all(torch.equal(again.get_parameter(name), model.get_parameter(name)) for name in packed)
        assert torch.equal(similarities(again, tokenizer), found)
    read = AutoTokenizer.from_pretrained(tmp_path / "minilm.ninfer")
    assert read(SENTENCES[0])["input_ids"] == tokenizer(SENTENCES[0])["input_ids"]
