"""The command: convert, inspect, generate and demo, with errors in one line and nothing left half-done."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import official_models
from ninfer_torch.cli import main
from tiny_models import save_folder, tiny_llama

ARTIFACT_ID = "000102030405060708090a0b0c0d0e0f"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("cli") / "tiny", tiny_llama(tied=True))


@pytest.fixture(scope="module")
def artifact(source: Path) -> Path:
    path = source.parent / "tiny.ninfer"
    assert main(["convert", str(source), str(path), "--preset", "q8", "--quiet"]) == 0
    return path


def test_convert_reports_every_tensor(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, report = tmp_path / "a.ninfer", tmp_path / "report.json"
    command = ["convert", str(source), str(output), "--preset", "q5", "--artifact-id", ARTIFACT_ID, "--name", "tiny"]
    assert main([*command, "--report", str(report)]) == 0
    text, written = capsys.readouterr().out, json.loads(report.read_text())
    assert written["artifact_id"] == ARTIFACT_ID and written["name"] == "tiny"
    for entry in written["tensors"]:
        assert all(name in text for name in entry["parameters"])
    assert f"{written['totals']['bits_per_weight']:.3f} bits per weight" in text
    again = tmp_path / "b.ninfer"
    assert (
        main(["convert", str(source), str(again), "--preset", "q5", "--artifact-id", ARTIFACT_ID, "--name", "tiny"])
        == 0
    )
    assert again.read_bytes() == output.read_bytes()


def test_inspect_reads_the_directory(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(artifact), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["components"] == {"text": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}}
    assert set(described["formats"]) == {"q8_g32_fp16", "bf16"}
    assert sum(row["bytes"] for row in described["formats"].values()) == described["tensor_bytes"]
    assert sum(row["share"] for row in described["formats"].values()) == pytest.approx(1)
    tied = next(row for row in described["objects"] if len(row["parameters"]) == 2)
    assert set(tied["parameters"]) == {"text/lm_head.weight", "text/model.embed_tokens.weight"}
    assert main(["inspect", str(artifact), "--objects"]) == 0
    text = capsys.readouterr().out
    assert all(row["id"] in text for row in described["objects"]) and described["artifact_id"] in text


def test_inspect_shows_what_shares_a_parent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs, recipe = official_models.RECIPES["rotated"]
    written = official_models.write_model(tmp_path / "rotated.ninfer", configs, recipe)
    assert main(["inspect", str(written.path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["objects"]
    for row in rows:
        ends = [0, *(piece["end"] for piece in row["pieces"])]
        if not row["id"].startswith("auxiliary/"):
            assert [piece["begin"] for piece in row["pieces"]] == ends[:-1] and ends[-1] == math.prod(row["shape"])
    shared = next(row for row in rows if len(row["pieces"]) > 1 and not row["id"].startswith("auxiliary/"))
    assert [piece["name"] for piece in shared["pieces"]] == shared["parameters"]
    assert all(set(piece["uses"].values()) <= {recipe.policy} and piece["uses"] for piece in shared["pieces"])
    signs = next(row for row in rows if row["id"] == "auxiliary/000000")
    assert all(piece["name"].endswith(": hadamard_signs") for piece in signs["pieces"])
    assert main(["inspect", str(written.path), "--objects"]) == 0
    text = capsys.readouterr().out
    assert all(f"] {name}  (" in text for name in shared["parameters"])


def test_generate_answers(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(artifact), "hello", "--max-new-tokens", "5", "--dtype", "float32"]) == 0
    assert re.search(r"\[\d+ tokens, [\d.]+ tokens/s\]", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "nowhere", "out.ninfer"], "nowhere"),
        (["convert", "{source}", "{artifact}"], "exists"),
        (["convert", "{source}", "out.ninfer", "--preset", "gguf"], "gguf source"),
        (["convert", "{source}", "out.ninfer", "--artifact-id", "12"], "artifact_id"),
        (["convert", "{source}", "out.ninfer", "--report", "{artifact}"], "exists"),
        (["inspect", "{source}/config.json"], "config.json"),
        (["inspect", "nothing.ninfer"], "nothing.ninfer"),
        (["generate", "nothing.ninfer", "hello"], "nothing.ninfer"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    message: str,
    source: Path,
    artifact: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    before = artifact.read_bytes()
    assert main([argument.format(source=source, artifact=artifact) for argument in arguments]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("ninfer-torch: ") and message in error
    assert not list(tmp_path.iterdir()) and artifact.read_bytes() == before


def test_ctrl_c_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ninfer_torch.convert import pipeline

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "_encoded_rows", interrupt)
    assert main(["convert", str(source), str(tmp_path / "a.ninfer")]) == 130
    assert not list(tmp_path.iterdir())


def test_the_module_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "ninfer_torch.cli", "--help"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ, COLUMNS="200"))
    for name in ("convert", "inspect", "generate", "demo", "versions"):
        assert name in finished.stdout


def test_the_demo_prints_its_figures(smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--max-new-tokens", "6"]) == 0
    text = capsys.readouterr().out
    for label in (".ninfer file", "model in memory", "load", "tokens/s", "KL to the source", "top-1 agreement"):
        assert label in text
    assert "Paris" in text or "capital" in text
