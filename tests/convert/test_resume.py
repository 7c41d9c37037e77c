"""Interrupted conversions: nothing is left, or with `resume` enough to end with the same bytes; and their memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ninfer_torch.artifact import journal as journals
from ninfer_torch.artifact import open_artifact
from ninfer_torch.artifact.journal import Journal, journal_path
from ninfer_torch.cli import main
from ninfer_torch.convert import pipeline
from ninfer_torch.convert.pipeline import convert
from ninfer_torch.errors import ArtifactError, ConversionError
from tiny_models import save_folder, tiny_llama

ARTIFACT_ID = "ab" * 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tmp_path_factory.mktemp("resume") / "model", tiny_llama())


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    path = folder.parent / "whole" / "a.ninfer"
    path.parent.mkdir()
    convert(folder, path, "q6", artifact_id=ARTIFACT_ID)
    return path


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Every object is a step of the journal; `stop(n)` makes the n-th object fail, and `written` counts objects."""
    monkeypatch.setattr(journals, "_STEP_BYTES", 1)

    class Stopping:
        def __init__(self) -> None:
            self.written: list[str] = []
            self.after: int | None = None
            self.error: BaseException = KeyboardInterrupt()

    state, encoded = Stopping(), pipeline._encoded_rows

    def rows(task: Any) -> Iterator[Any]:
        if state.after is not None and len(state.written) >= state.after:
            raise state.error
        state.written.append(task.object_id)
        yield from encoded(task)

    monkeypatch.setattr(pipeline, "_encoded_rows", rows)
    yield state


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("after", [1, 2, 11, 20])
@pytest.mark.parametrize("limit", [None, 40960])
def test_a_resumed_conversion_has_the_same_bytes(
    folder: Path, tmp_path: Path, stopping: Any, after: int, limit: int | None
) -> None:
    reference, output = tmp_path / "once" / "a.ninfer", tmp_path / "twice" / "a.ninfer"
    for path in (reference, output):
        path.parent.mkdir()
    convert(folder, reference, "q6", artifact_id=ARTIFACT_ID, max_file_bytes=limit)
    count = len(stopping.written)
    stopping.written.clear()
    stopping.after = after
    with pytest.raises(KeyboardInterrupt):
        convert(folder, output, "q6", artifact_id=ARTIFACT_ID, max_file_bytes=limit, resume=True)
    assert "a.ninfer" not in names(output.parent) and journal_path(output).exists()
    stopping.after = None
    progress: list[tuple[int, int]] = []
    convert(
        folder,
        output,
        "q6",
        artifact_id=ARTIFACT_ID,
        max_file_bytes=limit,
        resume=True,
        progress=lambda done, total: progress.append((done, total)),
    )
    assert stopping.written[after:] == stopping.written[-(count - after) :] and len(stopping.written) == count
    assert progress[0][0] > 1 and progress[-1][0] == progress[-1][1]
    assert names(output.parent) == names(reference.parent)
    for path in reference.parent.iterdir():
        if path.suffix != ".json":
            assert path.read_bytes() == (output.parent / path.name).read_bytes()


def test_many_interrupts_and_a_random_id(folder: Path, tmp_path: Path, stopping: Any) -> None:
    output, found = tmp_path / "a.ninfer", set()
    for stop in range(1, 22):
        stopping.after = stop
        try:
            convert(folder, output, "q6", resume=True)
        except KeyboardInterrupt:
            found.add(json.loads(journal_path(output).read_text())["artifact_id"])
    assert len(found) == 1 and len(stopping.written) == len(set(stopping.written)) == 21
    with open_artifact(output) as artifact:
        assert {artifact.artifact_id} == found
        for object_id in artifact.objects:
            artifact.read_object(object_id, check=True)


def test_without_resume_nothing_is_left(folder: Path, tmp_path: Path, stopping: Any) -> None:
    stopping.after = 12
    with pytest.raises(KeyboardInterrupt):
        convert(folder, tmp_path / "a.ninfer", "q6")
    assert not names(tmp_path)


def test_what_was_written_beyond_the_journal_is_written_again(
    folder: Path, tmp_path: Path, whole: Path, stopping: Any
) -> None:
    """A crash may leave more bytes than the journal knows of, and files of which it knows nothing."""
    output = tmp_path / "a.ninfer"
    stopping.after = 9
    with pytest.raises(KeyboardInterrupt):
        convert(folder, output, "q6", artifact_id=ARTIFACT_ID, resume=True)
    (unfinished,) = tmp_path.glob(".ninfer-*.tmp")
    with open(unfinished, "ab") as stream:
        stream.write(b"\xff" * 5000)
    stopping.after = None
    convert(folder, output, "q6", artifact_id=ARTIFACT_ID, resume=True)
    assert output.read_bytes() == whole.read_bytes()
    other = tmp_path / "b.ninfer"
    with closing(Journal(other, "x")) as journal:
        token = journal.token
    (tmp_path / f".ninfer-{token}-0.tmp").write_bytes(b"left by a crash")
    convert(folder, other, "q6", artifact_id=ARTIFACT_ID, resume=True)
    assert other.read_bytes() == whole.read_bytes()


def test_another_conversion_is_not_continued(folder: Path, tmp_path: Path, stopping: Any) -> None:
    source, output = tmp_path / "source", tmp_path / "a.ninfer"
    save_folder(source, tiny_llama())
    stopping.after = 9
    with pytest.raises(KeyboardInterrupt):
        convert(source, output, "q6", resume=True, artifact_id=ARTIFACT_ID)
    before = names(tmp_path)
    for changes in ({"preset": "q5"}, {"artifact_id": "cd" * 16}, {"max_file_bytes": 40960}, {"name": "other"}):
        with pytest.raises(ArtifactError, match="unfinished beside it has another (fingerprint|artifact_id)"):
            convert(source, output, **{"preset": "q6", "resume": True, "artifact_id": ARTIFACT_ID, **changes})
    state = load_file(source / "model.safetensors")
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="another fingerprint"):
        convert(source, output, "q6", resume=True, artifact_id=ARTIFACT_ID)
    assert names(tmp_path) == before


def test_broken_state_is_named(folder: Path, tmp_path: Path, stopping: Any) -> None:
    output = tmp_path / "a.ninfer"
    stopping.after = 9
    with pytest.raises(KeyboardInterrupt):
        convert(folder, output, "q6", resume=True)
    (unfinished,) = tmp_path.glob(".ninfer-*.tmp")
    kept = unfinished.read_bytes()
    for broken, message in ((kept[:20000], "bytes long, expected at least"), (b"x" * len(kept), "begins otherwise")):
        unfinished.write_bytes(broken)
        with pytest.raises(ArtifactError, match=message):
            convert(folder, output, "q6", resume=True)
    journal_path(output).write_text("{")
    with pytest.raises(ArtifactError, match="no readable journal"):
        convert(folder, output, "q6", resume=True)


def test_refused_values_leave_nothing_to_resume(folder: Path, tmp_path: Path, stopping: Any) -> None:
    stopping.after, stopping.error = 9, ConversionError("row 3: inf")
    with pytest.raises(ConversionError, match="row 3: inf"):
        convert(folder, tmp_path / "a.ninfer", "q6", resume=True)
    assert not names(tmp_path)
    stopping.written.clear()
    stopping.error = ArtifactError("no space left", kind="file")
    with pytest.raises(ArtifactError):
        convert(folder, tmp_path / "a.ninfer", "q6", resume=True)
    assert journal_path(tmp_path / "a.ninfer").exists()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    first = Journal(tmp_path / "a", "x")
    with pytest.raises(ArtifactError, match="a: another process is writing it"):
        Journal(tmp_path / "a", "x")
    first.close()
    Journal(tmp_path / "a", "x").close()
    assert not names(tmp_path)


def test_the_command_says_how_to_go_on(
    folder: Path, whole: Path, tmp_path: Path, stopping: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["convert", str(folder), str(tmp_path / "a.ninfer"), "--preset", "q6", "--artifact-id", ARTIFACT_ID]
    stopping.after = 9
    assert main([*command, "--resume", "--quiet"]) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert main([*command, "--quiet"]) == 130
    assert "nothing half-written is left" in capsys.readouterr().err
    stopping.after = None
    assert main([*command, "--resume", "--quiet"]) == 0
    assert (tmp_path / "a.ninfer").read_bytes() == whole.read_bytes()
    assert names(tmp_path) == {"a.ninfer", "a.ninfer.conversion.json"}


# --- whole processes -------------------------------------------------------------------------------------------------

LARGEST = (24000, 1024)
"""Shape of the embedding of the synthetic checkpoint: 93.75 MiB in float32; its layers add as much as it again."""

MEASURE = textwrap.dedent("""
    import re, sys
    from pathlib import Path
    from ninfer_torch.convert.pipeline import convert, plan

    def resident(field):
        return 1024 * int(re.search(field + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

    source, output, preset = sys.argv[1:]
    plan(source, preset)  # Transformers and the model class are loaded: the idle process
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    idle = resident("VmRSS")
    convert(source, output, preset, artifact_id="00" * 16)
    print(resident("VmHWM") - idle)
""")


def synthetic_checkpoint(folder: Path) -> Path:
    """A Llama checkpoint of about 300 MB in float32 words: 4 layers of 6.3 million weights and two large tables."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=LARGEST[0],
        hidden_size=LARGEST[1],
        intermediate_size=2048,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=8,
        architectures=["LlamaForCausalLM"],
        tie_word_embeddings=False,
        dtype="float32",
    )
    folder.mkdir()
    config.save_pretrained(folder)
    from ninfer_torch.models.generic import plan_model

    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for planned in plan_model(config).tensors:
        tensors[planned.names[0]] = torch.empty(planned.shape).normal_(0, 0.02, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_checkpoint(tmp_path_factory.mktemp("large") / "model")


@pytest.fixture(scope="module")
def large_whole(large: Path) -> Path:
    path = large.parent / "once.ninfer"
    convert(large, path, "direct", artifact_id=ARTIFACT_ID)
    return path


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["q4", "direct"])
def test_memory_stays_within_its_bound(large: Path, tmp_path: Path, preset: str) -> None:
    """Peak over the idle process: at most 2 x the largest parent in float32, and 200 MiB."""
    command = [sys.executable, "-c", MEASURE, str(large), str(tmp_path / "a.ninfer"), preset]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    added_bytes = int(finished.stdout.split()[-1])
    assert (large / "model.safetensors").stat().st_size > 280e6
    assert 4 << 20 < added_bytes < 2 * 4 * LARGEST[0] * LARGEST[1] + 200 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("kill", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_process_is_continued_by_another(
    large: Path, large_whole: Path, tmp_path: Path, kill: signal.Signals
) -> None:
    output = tmp_path / "a.ninfer"
    arguments = [str(large), str(output), "--preset", "direct", "--artifact-id", ARTIFACT_ID, "--resume", "--quiet"]
    command = [sys.executable, "-m", "ninfer_torch.cli", "convert", *arguments]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        for _ in range(3000):
            if journal_path(output).exists() or process.poll() is not None:
                break
            time.sleep(0.01)
        process.send_signal(kill)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (130, -signal.SIGKILL) and not output.exists() and journal_path(output).exists()
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    assert output.read_bytes() == large_whole.read_bytes()
    assert not list(tmp_path.glob(".*"))
