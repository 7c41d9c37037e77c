"""Answer a prompt with a `.ninfer` model through Transformers, its weights quantized in memory."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ninfer_torch.cli.progress import byte_bar
from ninfer_torch.tensors import NinferTensor
from ninfer_torch.tensors.staged import reporting

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, help="a .ninfer file, or a folder that holds one")
    parser.add_argument("prompt", help="what to say to the model")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=_DTYPES, default="auto", help="compute dtype (default: the model's own)")
    parser.add_argument("--device", default="cpu", help="torch device (default: %(default)s)")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")


@dataclass(frozen=True)
class Answer:
    """A generated text with its cost: new tokens and seconds."""

    text: str
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def answer(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int, *, raw: bool = False) -> Answer:
    """Greedy generation, printed as it comes. The chat template is applied where there is one, unless `raw`."""
    from transformers import TextStreamer

    if raw or not tokenizer.chat_template:
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    inputs = inputs.to(model.device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    begin = time.perf_counter()
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)
    seconds = time.perf_counter() - begin
    new = tokens[0, inputs["input_ids"].shape[1] :]
    return Answer(tokenizer.decode(new, skip_special_tokens=True), new.numel(), seconds)


def place(model: Any, device: str) -> Any:
    """The model on `device`; a bar shows the quantized bytes that have arrived on a card."""
    if torch.device(device).type != "cuda":
        return model.to(device)
    weights = [weight for weight in model.parameters() if isinstance(weight, NinferTensor)]
    total, done = sum(plane.nbytes for weight in weights for plane in weight.planes.values()), 0
    with byte_bar(f"to {device}") as show:

        def report(count: int) -> None:
            nonlocal done
            done += count
            show(done, total)

        with reporting(report):
            return model.to(device)


def run(arguments: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import ninfer_torch  # noqa: F401  # teaches Transformers the file

    if not arguments.model.exists():
        raise FileNotFoundError(f"{arguments.model}: no such file or folder")
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    dtype = arguments.dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    model = place(AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype), arguments.device)
    found = answer(model, tokenizer, arguments.prompt, arguments.max_new_tokens, raw=arguments.raw)
    print(f"[{found.tokens} tokens, {found.tokens_per_second:.2f} tokens/s]")
