"""torch.compile of whole models with quantized weights: one graph, any batch and length, the numbers of eager mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import CompileConfig

import ninfer_torch
from ninfer_torch.tensors import NinferTensor
from tiny_families import FAMILIES, prompt, tiny_family

ATTENTION_FAMILIES = ("llama", "llama tied")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def packed_model(family: str, recipe: str = "q4") -> Any:
    model = tiny_family(family)
    ninfer_torch.quantize_(model, recipe)
    assert any(isinstance(parameter, NinferTensor) for parameter in model.parameters())
    return model


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in ATTENTION_FAMILIES else [pytest.mark.slow]) for f in FAMILIES]
)
def test_a_model_is_one_graph_for_every_batch_and_length(family: str) -> None:
    model, counter = packed_model(family), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for batch, length in [(2, 9), (3, 7)]:
            compiled(prompt(batch, length), use_cache=False)
        warm = counter.frame_count
        with torch._dynamo.config.patch(error_on_recompile=True):
            for batch, length in [(2, 9), (4, 11), (5, 6), (7, 30)]:
                ids = prompt(batch, length)
                found = compiled(ids, use_cache=False).logits
                check_close(found, model(ids, use_cache=False).logits)
    assert counter.frame_count == warm >= 1


@pytest.mark.slow
def test_generated_code_gives_the_numbers_of_eager_mode() -> None:
    model = packed_model("llama")
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for batch, length in [(2, 9), (3, 7)]:
            ids = prompt(batch, length)
            check_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_a_static_cache_decodes_in_compiled_code(family: str) -> None:
    model, counter = packed_model(family), CompileCounterWithBackend("aot_eager")
    calls = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: Any) -> Any:
        run = counter(graph, inputs)

        def counted(*args: Any) -> Any:
            calls.append(1)
            return run(*args)

        return counted

    config = CompileConfig(backend=backend, fullgraph=True)
    config._compile_all_devices = True  # without it Transformers decodes eagerly on a CPU
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ids = prompt()
    found = model.generate(ids, cache_implementation="static", compile_config=config, **options)
    assert counter.frame_count >= 1
    assert len(calls) >= options["max_new_tokens"] - 1  # the first token comes from the prefill
    assert torch.equal(found, model.generate(ids, **options))
