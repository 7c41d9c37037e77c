"""Calibration: what the hooks add up is the mean squared input of every linear layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ninfer_torch.artifact import open_artifact
from ninfer_torch.convert.calibrate import calibrate
from ninfer_torch.convert.importance import read_importance, write_importance
from ninfer_torch.convert.language import load_model
from ninfer_torch.convert.methods import quantize
from ninfer_torch.convert.pipeline import convert, plan
from ninfer_torch.convert.recipes import Recipe
from ninfer_torch.errors import ConversionError
from tiny_families import tiny_family
from tiny_models import save_folder, tiny_llama

DOWN = "model.layers.1.mlp.down_proj.weight"


def some_windows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 256, (1, count), generator=generator) for count in (12, 5, 2)]


def test_importance_is_the_mean_square_of_the_inputs() -> None:
    model = tiny_llama(dtype=torch.float32)
    windows = some_windows()
    seen: list[tuple[int, int]] = []
    vectors = calibrate(model, windows, lambda done, total: seen.append((done, total)))
    assert seen == [(12, 19), (17, 19), (19, 19)]
    linear = {f"text/{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(vectors) == linear
    with torch.inference_mode():
        final = torch.cat([model.model(window).last_hidden_state[0] for window in windows])
        layer = model.model.layers[0]
        first = torch.cat([layer.input_layernorm(model.model.embed_tokens(window))[0] for window in windows])
    for name, rows in (("text/lm_head.weight", final), ("text/model.layers.0.self_attn.k_proj.weight", first)):
        expected = rows.double().square().mean(0).float()
        torch.testing.assert_close(vectors[name], expected, rtol=1e-5, atol=0)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_hooks_leave_after_an_interrupt() -> None:
    model = tiny_llama(dtype=torch.float32)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, some_windows(), interrupt)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_unusable_activations() -> None:
    model = tiny_llama(dtype=torch.float32)
    with pytest.raises(ConversionError, match="saw a token"):
        calibrate(model, [])
    with torch.no_grad():
        model.model.norm.weight.fill_(float("inf"))
    with pytest.raises(ConversionError, match="'text/lm_head.weight' are not finite"):
        calibrate(model, some_windows())


def test_a_quantized_model_calibrates_too(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", tiny_llama(tied=True))
    convert(folder, tmp_path / "q8.ninfer", "q8")
    expected = calibrate(load_model(folder, None), some_windows())
    found = calibrate(load_model(tmp_path / "q8.ninfer", None), some_windows())
    assert set(found) == set(expected)
    for name, vector in found.items():
        torch.testing.assert_close(vector, expected[name], rtol=0.2, atol=0.05)


def test_a_conversion_weighs_its_errors_by_the_file(tmp_path: Path) -> None:
    """The words are those of the method given the vector by hand; grouped parameters take the mean of theirs."""
    model = tiny_llama()
    folder = save_folder(tmp_path / "model", model)
    vectors = calibrate(model.float(), some_windows())
    gate, up = (f"text/model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up"))
    vectors[up] = vectors[up].flip(0)
    file = tmp_path / "private" / "importance.safetensors"
    file.parent.mkdir()
    write_importance(file, vectors, "text.txt")
    assert read_importance(file).source == "text.txt"

    def configure(model: object, recipe: Recipe, sources: object) -> None:
        recipe.assign("*_proj.weight", "q4_g64_fp16", method="grouped_search", parameters={"imatrix": str(file)})
        recipe.group([gate, up])

    report = convert(folder, tmp_path / "a.ninfer", recipe=configure)
    state = {f"text/{name}": value.bfloat16() for name, value in model.state_dict().items()}
    with open_artifact(tmp_path / "a.ninfer") as artifact:
        down = f"text/{DOWN}"
        assert torch.equal(
            artifact.parameter(down), quantize(state[down], "q4_g64_fp16", "grouped_search", importance=vectors[down])
        )
        mean = ((vectors[gate].double() + vectors[up].double()) / 2).float()
        for name in (gate, up):
            expected = quantize(state[name], "q4_g64_fp16", "grouped_search", importance=mean)
            assert torch.equal(artifact.parameter(name).dequantize(), expected.dequantize())
    assert str(tmp_path) not in report.to_json() and "importance.safetensors" in report.to_json()


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5 moe"])
def test_an_official_recipe_finds_what_was_calibrated(tmp_path: Path, family: str) -> None:
    """NInfer's names stand beside the state dict's: each part of a fused matrix has the inputs of the whole."""
    model = tiny_family(family)
    model.save_pretrained(tmp_path / "m")
    vectors = calibrate(model, some_windows())
    fused = vectors["text/model.layers.1.self_attn.q_proj.weight"]
    for part in ("query", "gate"):
        assert torch.equal(vectors[f"text/layers/1/attention/{part}"], fused)
    assert torch.equal(
        vectors["text/layers/0/gdn/value"], vectors["text/model.layers.0.linear_attn.in_proj_qkv.weight"]
    )
    write_importance(tmp_path / "i.safetensors", vectors, "text")
    recipe = "qwen3_8_27b_imatrix" if family == "qwen3.5" else None
    setting = f"text/layers/*/attention/output=q5_g64_fp16:grouped_search:imatrix={tmp_path / 'i.safetensors'}"
    planned = plan(
        tmp_path / "m",
        recipe=recipe,
        sources={"imatrix": tmp_path / "i.safetensors"} if recipe else None,
        preset=None if recipe else "q5",
        settings=[] if recipe else [setting],
        official=True,
    )
    (task,) = [task for task in planned.tasks if task.names == ("text/layers/1/attention/output",)]
    assert torch.equal(task.arguments["importance"], vectors["text/layers/1/attention/output"])


def test_a_matrix_of_another_model_is_refused(tmp_path: Path) -> None:
    """Equal weights without a word would look like a success."""
    folder = save_folder(tmp_path / "m", tiny_llama())
    write_importance(tmp_path / "i.safetensors", {"text/layers/0/mlp/up": torch.ones(64)}, "text")
    setting = f"*_proj.weight=q4_g64_fp16:grouped_search:imatrix={tmp_path / 'i.safetensors'}"
    with pytest.raises(
        ConversionError, match=r"i\.safetensors: none of its 1 entries .*text/layers/0/mlp/up.* names a parameter"
    ):
        convert(folder, tmp_path / "m.ninfer", settings=[setting])
    assert not (tmp_path / "m.ninfer").exists()


def test_importance_of_another_width_is_refused(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "model", tiny_llama())
    write_importance(tmp_path / "i.safetensors", {f"text/{DOWN}": torch.ones(3)}, "x")
    setting = f"*down_proj.weight=q4_g64_fp16:grouped_search:imatrix={tmp_path / 'i.safetensors'}"
    with pytest.raises(ConversionError, match=f"{DOWN}.*3 entries, its weight 160 columns"):
        convert(folder, tmp_path / "a.ninfer", settings=[setting])
    assert not (tmp_path / "a.ninfer").exists()
