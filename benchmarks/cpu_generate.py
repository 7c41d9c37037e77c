"""Tokens per second of whole models on the CPU, beside llama.cpp on the same weights.

    pip install llama-cpp-python    # without it there is nothing beside
    python benchmarks/cpu_generate.py [--models smollm2,gemma3] [--threads N] [--prompt N] [--tokens N] [--rounds N] [--json FILE|-]
                                      [--profile]

SmolLM2-135M-Instruct is a Q4_1 GGUF, whose blocks become `q5_g64_fp16` here; Gemma 3 270M keeps the Q4_K_M blocks of its GGUF, byte for byte.
Both sides may quantize activations to int8, take the most likely token, and start from the same prompt. *prefill* is one pass over the
prompt, *decode* one token after another with a static cache: eager, or with the step compiled by Inductor. Contestants take turns; figures are
medians over rounds. `--profile` prints where the time of an eager and of a compiled decoding step goes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, StaticCache

import ninfer_torch
from ninfer_torch.cli.fetch import gemma3_gguf, smollm2_gguf
from ninfer_torch.convert.pipeline import convert
from ninfer_torch.tensors import NinferTensor

MODELS: dict[str, Callable[[], Path]] = {"smollm2": smollm2_gguf, "gemma3": gemma3_gguf}
AIMS = {"decode, compiled": 0.5, "prefill": 1.0}


class Ours:
    """A model loaded from an artifact, with a static cache and a compiled twin of its decoding step."""

    def __init__(self, artifact: Path, context: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.bfloat16).eval()
        for module in self.model.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, NinferTensor):
                module.weight = torch.nn.Parameter(weight.with_policy("AllowA8"), requires_grad=False)
        self.cache = StaticCache(config=self.model.config, max_cache_len=context)
        self.compiled = torch.compile(self.model.forward, fullgraph=True)

    def prefill(self, prompt: list[int]) -> torch.Tensor:
        self.cache.reset()
        return self.step(self.model.forward, torch.tensor([prompt]), torch.arange(len(prompt)))

    def step(self, forward: Callable[..., Any], ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        options = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        return forward(input_ids=ids, position_ids=places[None], **options).logits[:, -1].argmax(-1, keepdim=True)

    def decode(self, prompt: list[int], tokens: int, forward: Callable[..., Any]) -> tuple[float, list[int]]:
        """Seconds per token after the prompt, and the tokens."""
        found = [self.prefill(prompt)]
        for place in range(2):  # the first steps fill memory pools, and compile
            found.append(self.step(forward, found[-1], torch.tensor([len(prompt) + place])))
        begin = time.perf_counter()
        for place in range(2, 2 + tokens):
            found.append(self.step(forward, found[-1], torch.tensor([len(prompt) + place])))
        return (time.perf_counter() - begin) / tokens, [int(token) for token in found]


class LlamaCpp:
    """The same GGUF in llama.cpp, through the C interface that llama-cpp-python binds."""

    def __init__(self, gguf: Path, context: int, threads: int) -> None:
        self.lib = lib = importlib.import_module("llama_cpp")
        quiet = lib.llama_log_callback(lambda *_: None)
        self._quiet = quiet  # called from C
        lib.llama_log_set(quiet, None)
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(str(gguf).encode(), lib.llama_model_default_params())
        options = lib.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = context
        options.n_threads = options.n_threads_batch = threads
        self.context = lib.llama_init_from_model(self.model, options)
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def step(self, ids: list[int]) -> int:
        lib = self.lib
        tokens = (lib.llama_token * len(ids))(*ids)
        if lib.llama_decode(self.context, lib.llama_batch_get_one(tokens, len(ids))):
            raise RuntimeError("llama.cpp could not decode")
        logits = lib.llama_get_logits_ith(self.context, -1)
        return int(
            torch.frombuffer(
                (lib.ctypes.c_float * self.vocabulary).from_address(lib.ctypes.addressof(logits.contents)),
                dtype=torch.float32,
            ).argmax()
        )

    def prefill(self, prompt: list[int]) -> int:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        return self.step(prompt)

    def decode(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        found = [self.prefill(prompt)]
        for _ in range(2):
            found.append(self.step(found[-1:]))
        begin = time.perf_counter()
        for _ in range(tokens):
            found.append(self.step(found[-1:]))
        return (time.perf_counter() - begin) / tokens, found


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(name: str, gguf: Path, arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    artifact = folder / f"{name}.ninfer"
    convert(gguf, artifact, "gguf")
    context = arguments.prompt + arguments.tokens + 16
    ours = Ours(artifact, context)
    try:
        peer = LlamaCpp(gguf, context, arguments.threads)
    except ImportError:
        peer = None
    prompt = torch.randint(1000, 20000, (arguments.prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    times: dict[str, list[float]] = {}
    agreement: list[float] = []
    for round in range(-1, arguments.rounds):  # the first warms up
        found = {"prefill": timed(lambda: ours.prefill(prompt)) / len(prompt)}
        found["decode, eager"], _ = ours.decode(prompt, arguments.tokens, ours.model.forward)
        found["decode, compiled"], compiled = ours.decode(prompt, arguments.tokens, ours.compiled)
        if peer is not None:
            found["llama.cpp prefill"] = timed(lambda: peer.prefill(prompt)) / len(prompt)
            found["llama.cpp decode"], theirs = peer.decode(prompt, arguments.tokens)
            agreement.append(sum(a == b for a, b in zip(compiled, theirs, strict=True)) / len(theirs))
        if round >= 0:
            for key, seconds in found.items():
                times.setdefault(key, []).append(seconds)
    if arguments.profile:
        for label, forward in (("eager", ours.model.forward), ("compiled", ours.compiled)):
            print_profile(f"{name}, {label} decode", lambda f=forward: ours.decode(prompt, arguments.tokens, f))
    speeds = {key: 1 / statistics.median(values) for key, values in times.items()}
    records = []
    for key in ("prefill", "decode, eager", "decode, compiled"):
        theirs = speeds.get("llama.cpp prefill" if key == "prefill" else "llama.cpp decode")
        records.append(
            {
                "model": name,
                "what": key,
                "threads": arguments.threads,
                "prompt": arguments.prompt,
                "tokens": arguments.tokens,
                "tokens_per_second": speeds[key],
                "llama_cpp_tokens_per_second": theirs,
                "ratio": None if theirs is None else speeds[key] / theirs,
                "aim": AIMS.get(key),
                "same_tokens": statistics.mean(agreement) if agreement else None,
            }
        )
    return records


def print_profile(title: str, call: Callable[[], Any]) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        call()
    print(
        f"{title}\n{recorded.key_averages().table(sort_by='self_cpu_time_total', row_limit=12, max_name_column_width=48)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: tuple(text.split(",")), default=tuple(MODELS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=48, help="tokens decoded after it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="print where the time of a decoding step goes")
    parser.add_argument("--json", metavar="FILE", help="write the records as JSON to FILE, or - for standard output")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for name in arguments.models:
            records += measure(name, MODELS[name](), arguments, Path(folder))
    if arguments.json == "-":
        print(json.dumps(records, indent=1))
        return
    ninfer_torch.show_versions()
    for record in records:
        beside = (
            ""
            if record["ratio"] is None
            else f"{record['ratio']:6.2f}x llama.cpp ({record['llama_cpp_tokens_per_second']:.1f})"
        )
        print(f"{record['model']:<10}{record['what']:<18}{record['tokens_per_second']:8.1f} tokens/s {beside}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
