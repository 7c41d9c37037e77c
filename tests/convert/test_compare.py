"""Comparisons: errors of weights against a plain computation, predictions against a loop, pictures that are pictures."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from golden import golden
from ninfer_torch.artifact import ArtifactWriter, open_artifact
from ninfer_torch.convert import compare as comparing
from ninfer_torch.convert.compare import Comparison, compare, compare_text
from ninfer_torch.convert.language import load_model, load_tokenizer, token_windows
from ninfer_torch.convert.methods import quantize
from ninfer_torch.convert.pictures import PICTURES, draw, write_html, write_pictures
from ninfer_torch.convert.pipeline import convert
from ninfer_torch.convert.quality import ErrorSums, PredictionSums, compare_logits
from ninfer_torch.convert.stored import open_stored
from ninfer_torch.errors import ConversionError
from tiny_models import dense_twin, save_folder, tiny_llama

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("compare") / "model", tiny_llama(tied=True))


@pytest.fixture(scope="module")
def q4(folder: Path) -> Path:
    path = folder.parent / "q4.ninfer"
    convert(folder, path, "q4")
    return path


# --- numbers ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 5))
def test_errors_do_not_depend_on_the_pieces(seed: int, count: int, pieces: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(count, 3, generator=generator) for _ in range(2))
    sums = ErrorSums()
    for part, other in zip(a.chunk(pieces), b.chunk(pieces), strict=True):
        sums.add(part, other)
    x, y = a.double().numpy().ravel(), b.double().numpy().ravel()
    assert sums.relative_error == pytest.approx(math.sqrt(((y - x) ** 2).sum() / (x**2).sum()))
    assert sums.cosine == pytest.approx((x @ y) / math.sqrt((x @ x) * (y @ y)))
    assert sums.maximum == abs(y - x).max() and sums.elements == 3 * count


def test_errors_of_zeros() -> None:
    zeros, ones = torch.zeros(4), torch.ones(4)
    for source, other, relative, cosine in (
        (zeros, zeros, 0.0, 1.0),
        (zeros, ones, math.inf, 0.0),
        (ones, zeros, 1.0, 0.0),
    ):
        sums = ErrorSums()
        sums.add(source, other)
        assert (sums.relative_error, sums.cosine) == (relative, cosine)


def test_predictions_are_summed_position_by_position() -> None:
    generator = torch.Generator().manual_seed(3)
    windows = [torch.randn(2, count, 11, generator=generator) for count in (150, 2, 64)]
    tokens = [torch.randint(0, 11, (pair.shape[1],), generator=generator) for pair in windows]
    sums = PredictionSums()
    for (a, b), ids in zip(windows, tokens, strict=True):
        sums.add(a, b, ids)
    divergences, firsts, surprises = [], [], ([], [])
    for (a, b), ids in zip(windows, tokens, strict=True):
        for position in range(len(a)):
            p, q = (table[position].double().softmax(0) for table in (a, b))
            divergences.append(sum(float(x * (x / y).log()) for x, y in zip(p, q, strict=True)))
            firsts.append(bool(p.argmax() == q.argmax()))
            if position + 1 < len(a):
                for surprise, table in zip(surprises, (p, q), strict=True):
                    surprise.append(-math.log(table[ids[position + 1]]))
    assert sums.agreement.divergence == pytest.approx(sum(divergences) / len(divergences))
    assert sums.agreement.top1 == sum(firsts) / len(firsts) and sums.agreement.positions == 216
    expected = [math.exp(sum(surprise) / len(surprise)) for surprise in surprises]
    assert list(sums.perplexities) == pytest.approx(expected)
    assert compare_logits(*windows[0]).divergence == pytest.approx(sum(divergences[:150]) / 150)


# --- weights ---------------------------------------------------------------------------------------------------------


def test_every_weight_against_a_plain_computation(folder: Path, q4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = load_file(folder / "model.safetensors")
    twin = dense_twin(q4).state_dict()
    results = []
    for chunk in (1 << 20, 500, 1):
        monkeypatch.setattr(comparing, "_CHUNK_VALUES", chunk)
        results.append(compare(folder, q4))
    comparison = results[0]
    for other in results[1:]:
        assert [w.relative_error for w in other.weights] == pytest.approx(
            [w.relative_error for w in comparison.weights]
        )
    assert {name for weight in comparison.weights for name in weight.names} == {f"text/{name}" for name in twin}
    for weight in comparison.weights:
        name = weight.names[0].removeprefix("text/")
        x, y = state[name].double(), twin[name].double()
        assert weight.relative_error == pytest.approx(float((y - x).norm() / x.norm()))
        assert weight.cosine == pytest.approx(float((x * y).sum() / (x.norm() * y.norm())))
        assert weight.maximum == float((y - x).abs().max())
        assert weight.formats_a == ("bf16",) and weight.bytes_a == 2 * x.numel()
    (tied,) = (weight for weight in comparison.weights if len(weight.names) == 2)
    assert set(tied.names) == {"text/lm_head.weight", "text/model.embed_tokens.weight"}
    with open_artifact(q4) as artifact:
        weights = [record for record in artifact.objects.values() if record.id.startswith("weight/")]
        assert comparison.b.bytes == sum(record.bytes for record in weights)
        sizes: dict[str, int] = {}
        for record in weights:
            sizes[record.format] = sizes.get(record.format, 0) + record.bytes
        assert comparison.b.formats == sizes
    (down,) = (w for w in comparison.weights if w.names == ("text/model.layers.1.mlp.down_proj.weight",))
    assert (down.layer, down.kind) == (1, "mlp.down_proj")


def test_a_model_equals_itself(folder: Path, q4: Path) -> None:
    for path in (folder, q4):
        comparison = compare(path, path)
        assert comparison.relative_error == 0 and all(weight.maximum == 0 for weight in comparison.weights)
        assert all(weight.cosine == pytest.approx(1) for weight in comparison.weights)


def test_parts_of_any_formats_are_read_as_rows(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    wide, other = torch.randn(6, 64, generator=generator), torch.randn(4, 64, generator=generator)
    quantized = quantize(wide, "q8_g32_fp16")
    with ArtifactWriter(tmp_path / "a") as writer:
        writer.component("text", {})
        writer.tensor("w", "q8_g32_fp16", (6, 64), quantized)
        writer.tensor("x", "fp32", (4, 64), other)
        writer.bind("mixed", parts=[("x", 64, 192), ("w", 0, 128), ("x", 0, 64)])
        writer.bind("flat", parts=[("x", 3, 67)])
    weights = open_stored(tmp_path / "a").weights
    dense = quantized.dequantize()
    expected = torch.cat([other[1:3], dense[:2], other[:1]])
    mixed = weights["mixed"]
    assert (mixed.rows, mixed.columns, mixed.formats) == (5, 64, ("fp32", "q8_g32_fp16"))
    for begin in range(5):
        for end in range(begin + 1, 6):
            assert torch.equal(mixed.read(begin, end), expected[begin:end])
    assert torch.equal(weights["flat"].read(0, 1), other.flatten()[3:67].view(1, 64))
    with open_artifact(tmp_path / "a") as artifact:
        assert mixed.bytes == pytest.approx(3 * 64 * 4 + artifact.objects["w"].bytes / 3)


def test_names_without_a_counterpart_are_listed(folder: Path, tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "part.ninfer") as writer:
        writer.component("text", {})
        writer.tensor("w", "fp32", (64,), torch.ones(64))
        writer.bind("text/model.norm.weight", "w")
        writer.bind("text/extra", "w")
    comparison = compare(folder, tmp_path / "part.ninfer")
    assert len(comparison.weights) == 1 and comparison.only_in_b == ("text/extra",)
    assert "text/lm_head.weight" in comparison.only_in_a and "only in B: text/extra" in comparison.summary()


def test_what_cannot_be_compared_is_refused(folder: Path, tmp_path: Path) -> None:
    for name, shape, message in (
        ("text/model.norm.weight", (32,), r"matrix \[1, 64\] in .* \[1, 32\]"),
        ("w", (2,), "in common"),
    ):
        path = tmp_path / str(len(message))
        with ArtifactWriter(path) as writer:
            writer.component("text", {})
            writer.tensor("w", "fp32", shape, torch.ones(shape))
            writer.bind(name, "w")
        with pytest.raises(ConversionError, match=message):
            compare(folder, path)
    with pytest.raises(ConversionError, match="no such file or folder"):
        compare(folder, tmp_path / "absent")


def test_infinite_errors_are_json(folder: Path, tmp_path: Path) -> None:
    zero = tmp_path / "zero"
    save_folder(zero, tiny_llama(tied=True))
    state = load_file(zero / "model.safetensors")
    state["model.norm.weight"].zero_()
    save_file(state, zero / "model.safetensors", metadata={"format": "pt"})
    rows = json.loads(compare(zero, folder).to_json())["weights"]
    assert [row["relative_error"] for row in rows if row["kind"] == "model.norm"] == ["Infinity"]


@pytest.mark.slow
def test_a_gguf_file_is_compared_too(smollm2_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "gguf.ninfer"
    report = convert(smollm2_gguf, path, "gguf")
    comparison = compare(smollm2_gguf, path)
    kept = {f"text/{name}" for entry in report.tensors if not entry.fallback for name in entry.parameters}
    kept = {name.removeprefix("text/") for name in kept}
    for weight in comparison.weights:
        assert (weight.relative_error == 0) == (weight.names[0] in kept)
    assert set(comparison.a.formats) == {"q4_1", "gguf_q8_0", "fp32"}


@pytest.mark.parametrize("name", ["bf16", "groupwise"])
def test_an_artifact_of_a_registered_architecture_meets_its_checkpoint(name: str) -> None:
    """They name weights differently, and the artifact stores some in pieces of several formats."""
    models = golden("ninfer", "models", "qwen3_5_dense")
    comparison = compare(models / "checkpoint", models / f"{name}.ninfer")
    assert len(comparison.weights) == 56 and not comparison.only_in_a and not comparison.only_in_b
    with open_artifact(models / f"{name}.ninfer") as artifact:
        stored = {record.format for record in artifact.objects.values() if hasattr(record, "format")}
    assert set(comparison.b.formats) == stored
    if name == "bf16":
        assert comparison.relative_error == 0
    else:
        errors = [weight.relative_error for weight in comparison.weights if weight.formats_b != ("bf16",)]
        assert 0 < max(errors) < 0.2 and comparison.to_json()


# --- texts -----------------------------------------------------------------------------------------------------------


def test_layer_outputs_and_predictions(folder: Path, q4: Path) -> None:
    text = "Some days are ordinary, and ordinary days are easy to forget." * 2
    windows = token_windows(load_tokenizer(folder, None), text, 50)
    assert [window.shape[1] for window in windows] == [50, 50, 22]
    a, b = load_model(folder, None), load_model(q4, None)
    seen: list[tuple[int, int]] = []
    found = compare_text(a, b, windows, lambda done, total: seen.append((done, total)))
    assert seen == [(50, 122), (100, 122), (122, 122)]
    twin = dense_twin(q4)
    errors = norms = 0.0
    with torch.inference_mode():
        for window in windows:  # hidden_states[1] is what the first of the two layers gives
            expected, quantized = (m(window, output_hidden_states=True).hidden_states[1] for m in (a, twin))
            errors += float((quantized - expected).double().square().sum())
            norms += float(expected.double().square().sum())
    assert found.layers[0].relative_error == pytest.approx(math.sqrt(errors / norms), rel=1e-4)
    assert [layer.name for layer in found.layers] == ["model.layers.0", "model.layers.1"]
    assert found.positions == 122 and found.divergence > 0 and found.perplexity_a > 1
    same = compare_text(a, a, windows)
    assert same.divergence == 0 and same.top1 == 1 and same.perplexity_a == same.perplexity_b
    assert all(layer.relative_error == 0 for layer in same.layers)


def test_models_that_differ_are_refused(folder: Path) -> None:
    small = tiny_llama()
    small.model.layers = small.model.layers[:1]
    with pytest.raises(ConversionError, match="A has 2 layers and 272 tokens, B 1 and 272"):
        compare_text(load_model(folder, None), small.float(), [torch.arange(5).unsqueeze(0)])


def test_a_text_needs_two_tokens(folder: Path) -> None:
    with pytest.raises(ConversionError, match="1 tokens, expected at least 2"):
        token_windows(load_tokenizer(folder, None), "a", 10)


@pytest.mark.slow
def test_a_gguf_model_is_loaded_densely(smollm2_gguf: Path) -> None:
    stored = open_stored(smollm2_gguf)
    model, tokenizer = load_model(stored.path, stored.source), load_tokenizer(stored.path, stored.source)
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"


# --- pictures --------------------------------------------------------------------------------------------------------


def with_text(comparison: Comparison, folder: Path) -> Comparison:
    model = load_model(folder, None)
    return dataclasses.replace(comparison, text=compare_text(model, model, [torch.arange(9).unsqueeze(0)]))


def test_pictures_and_page(folder: Path, q4: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    comparison = compare(folder, q4)
    assert set(draw(comparison)) == set(PICTURES) - {"output_by_layer"}
    full = with_text(comparison, folder)
    paths = write_pictures(full, tmp_path / "deep" / "pictures")
    assert {path.stem for path in paths} == set(PICTURES)
    for path in paths:
        data = path.read_bytes()
        assert data.startswith(PNG) and len(data) > 2000
    page = tmp_path / "page.html"
    write_html(full, page)
    text = page.read_text()
    assert text.count("data:image/png;base64,") == len(PICTURES)
    assert "http" not in text and "src=" in text and str(tmp_path) not in text
    for weight in full.weights:
        assert f"{weight.relative_error:.6g}" in text and weight.names[0] in text


def test_lines_of_a_picture_are_the_errors(folder: Path, q4: Path) -> None:
    pytest.importorskip("matplotlib")
    comparison = compare(folder, q4)
    (axes,) = PICTURES["error_by_layer"](comparison).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    for kind in ("mlp.down_proj", "self_attn.q_proj"):
        expected = [weight.relative_error for weight in comparison.weights if weight.kind == kind]
        assert lines[kind] == expected and len(expected) == 2
    (axes,) = PICTURES["size_by_format"](comparison).axes
    assert sum(patch.get_width() for patch in axes.patches) == pytest.approx(
        (comparison.a.bytes + comparison.b.bytes) / 1e6
    )


def test_without_matplotlib_the_error_says_what_to_install(
    folder: Path, q4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConversionError, match=r"pip install 'ninfer-torch\[plot\]'"):
        draw(compare(folder, q4))
