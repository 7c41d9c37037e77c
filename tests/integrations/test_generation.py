"""Pipelines, chat templates, streaming, padded batches and assisted generation, on artifacts as on any checkpoint."""

from __future__ import annotations

from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

import ninfer_torch
from ninfer_torch.tensors import NinferTensor
from tiny_families import FAMILIES, tiny_family
from tiny_models import tiny_tokenizer

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 257}
TEXTS = ["Hi", "The sea is wide", "A longer line of text, to be padded"]


@pytest.fixture(autouse=True)
def overlay_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=FAMILIES)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_family(request.param)
    model.generation_config.update(**GREEDY)
    ninfer_torch.quantize_(model, "q8")
    path = tmp_path_factory.mktemp("artifacts") / "m.ninfer"
    ninfer_torch.save(model, path, tokenizer=tiny_tokenizer())
    return path


def loaded(path: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval(), tokenizer


def dense_twin(path: Path) -> Any:
    model, _ = loaded(path)
    assert any(isinstance(p, NinferTensor) for p in model.parameters())
    return model.dequantize()


def greedy_loop(model: Any, ids: torch.Tensor, steps: int) -> torch.Tensor:
    """The tokens of greatest logits, one whole pass for each: no cache, nothing of generate()."""
    with torch.no_grad():
        for _ in range(steps):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def test_generate_equals_a_plain_loop_on_dense_weights(artifact: Path) -> None:
    model, tokenizer = loaded(artifact)
    ids = tokenizer(TEXTS[1], return_tensors="pt")["input_ids"]
    assert torch.equal(model.generate(ids, **GREEDY), greedy_loop(dense_twin(artifact), ids, 12))


def test_pipeline_by_path_and_by_model(artifact: Path) -> None:
    model, tokenizer = loaded(artifact)
    ids = tokenizer(TEXTS[1], return_tensors="pt")["input_ids"]
    expected = tokenizer.decode(greedy_loop(dense_twin(artifact), ids, 12)[0, ids.shape[1] :], skip_special_tokens=True)
    options = {**GREEDY, "return_full_text": False}
    for generator in (
        pipeline("text-generation", model=str(artifact)),
        pipeline("text-generation", model=artifact),
        pipeline("text-generation", model=model, tokenizer=tokenizer),
    ):
        assert generator(TEXTS[1], **options)[0]["generated_text"] == expected
    assert any(isinstance(p, NinferTensor) for p in generator.model.parameters())


def test_a_chat_goes_through_the_template(artifact: Path) -> None:
    model, tokenizer = loaded(artifact)
    messages = [{"role": "user", "content": "Hello"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<user>Hello<assistant>"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    expected = tokenizer.decode(
        greedy_loop(model, ids["input_ids"], 12)[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
    )
    answer = pipeline("text-generation", model=str(artifact))(messages, **GREEDY)[0]["generated_text"]
    assert answer[0] == messages[0] and answer[1] == {"role": "assistant", "content": expected}


def test_streaming_gives_the_same_text_piece_by_piece(artifact: Path) -> None:
    model, tokenizer = loaded(artifact)
    batch = tokenizer(TEXTS[1], return_tensors="pt")
    whole = tokenizer.decode(model.generate(batch["input_ids"], **GREEDY)[0, batch["input_ids"].shape[1] :])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=model.generate, kwargs={"input_ids": batch["input_ids"], "streamer": streamer, **GREEDY})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == whole and len(pieces) >= 2


def test_left_padded_batches_equal_single_prompts(artifact: Path) -> None:
    model, tokenizer = loaded(artifact)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert not batch["attention_mask"][0, 0] and batch["attention_mask"][0, -1]
    together = model.generate(**batch, **GREEDY)[:, batch["input_ids"].shape[1] :]
    for text, row in zip(TEXTS, together, strict=True):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert torch.equal(model.generate(ids, **GREEDY)[0, ids.shape[1] :], row), text


def test_sampling_and_beams(artifact: Path) -> None:
    model, tokenizer = loaded(artifact)
    twin = dense_twin(artifact)
    ids = tokenizer(TEXTS[1], return_tensors="pt")["input_ids"]
    options = {**GREEDY, "num_beams": 3, "max_new_tokens": 6}
    assert torch.equal(model.generate(ids, **options), twin.generate(ids, **options))
    sampled = []
    for each in (model, twin):
        torch.manual_seed(3)
        sampled.append(each.generate(ids, **{**GREEDY, "do_sample": True, "temperature": 0.9}))
    assert torch.equal(*sampled)


def test_assisted_generation_with_a_second_artifact(tmp_path: Path) -> None:
    """A draft changes the speed and not the text, whether its guesses are good (another rounding) or bad (another model)."""
    paths = {}
    for name, recipe, seed in (("target", "q8", 0), ("good", "q4", 0), ("bad", "q4", 1)):
        model = tiny_family("llama", seed=seed)
        ninfer_torch.quantize_(model, recipe)
        paths[name] = tmp_path / f"{name}.ninfer"
        ninfer_torch.save(model, paths[name], tokenizer=tiny_tokenizer())
    target, tokenizer = loaded(paths["target"])
    ids = tokenizer(TEXTS[1], return_tensors="pt")["input_ids"]
    alone = target.generate(ids, **GREEDY)
    calls = {}
    for name in ("good", "bad"):
        assistant, _ = loaded(paths[name])
        count = 0

        def counted(*_: Any) -> None:
            nonlocal count
            count += 1

        hook = target.register_forward_hook(counted)
        assert torch.equal(target.generate(ids, assistant_model=assistant, **GREEDY), alone)
        hook.remove()
        calls[name] = count
    assert calls["good"] < calls["bad"] <= 12  # tokens of a good draft are taken several at a time
    answer = pipeline("text-generation", model=str(paths["target"]), assistant_model=str(paths["good"]))(
        TEXTS[1], **GREEDY
    )
    assert answer[0]["generated_text"] == tokenizer.decode(alone[0], skip_special_tokens=True)
