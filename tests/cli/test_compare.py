"""`ninfer-torch compare` and `ninfer-torch calibrate` from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ninfer_torch.cli import main
from ninfer_torch.convert.importance import read_importance
from ninfer_torch.convert.pipeline import convert
from tiny_models import save_folder, tiny_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("compare") / "model", tiny_llama())


@pytest.fixture(scope="module")
def artifact(folder: Path) -> Path:
    path = folder.parent / "q5.ninfer"
    convert(folder, path, "q5")
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Some days are ordinary, and ordinary days are easy to forget.")
    return path


def test_compare_prints_a_table_or_json(
    folder: Path, artifact: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", str(folder), str(artifact), "--text", str(text), "--context", "32"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["text"]["positions"] == 61 and found["text"]["divergence"] > 0
    assert [layer["name"] for layer in found["text"]["layers"]] == ["model.layers.0", "model.layers.1"]
    assert main(command) == 0
    table = capsys.readouterr().out
    for weight in found["weights"]:
        (line,) = (line for line in table.splitlines() if line.startswith(f"{weight['names'][0]} "))
        assert f"{weight['relative_error']:.6g}" in line and weight["formats_b"][0] in line
    assert f"{found['text']['divergence']:.6g} nats" in table and "perplexity" in table
    assert main([*command, "--tokens", "20", "--quiet"]) == 0
    assert "over 20 positions" in capsys.readouterr().out


def test_compare_writes_pictures(folder: Path, artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, pictures = tmp_path / "page.html", tmp_path / "pictures"
    assert main(["compare", str(artifact), str(folder), "--html", str(page), "--png", str(pictures), "--quiet"]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in pictures.iterdir()) == ["error_by_layer.png", "size_by_format.png"]


def test_calibrate_writes_what_convert_reads(
    folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "importance.safetensors"
    assert main(["calibrate", str(folder), str(text), "-o", str(output), "--context", "16"]) == 0
    assert "15 weights, 61 tokens" in capsys.readouterr().err
    importance = read_importance(output)
    assert importance.source == "text.txt" and len(importance) == 15
    setting = f"*down_proj.weight=q4_g64_fp16:grouped_search:imatrix={output}"
    assert main(["convert", str(folder), str(tmp_path / "a.ninfer"), "--set", setting, "--json"]) == 0
    report = capsys.readouterr().out
    assert "imatrix=importance.safetensors" in report and str(tmp_path) not in report


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "nowhere", "{artifact}"], "nowhere: no such file or folder"),
        (["compare", "{folder}", "{artifact}", "--text", "absent.txt"], "absent.txt"),
        (["compare", "{folder}", "{artifact}", "--context", "1"], "expected at least 2 tokens"),
        (["calibrate", "{folder}", "{folder}/config.json", "-o", "{artifact}"], "exists; choose another name"),
        (["calibrate", "{folder}", "absent.txt", "-o", "x"], "absent.txt"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    folder: Path,
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([argument.format(folder=folder, artifact=artifact) for argument in arguments]) == 1
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not list(tmp_path.iterdir())
