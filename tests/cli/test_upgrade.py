"""`ninfer-torch upgrade`: an old file becomes a version 3 file whole or not at all, and every refusal is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from artifact import tiny_files, tiny_legacy
from ninfer_torch.cli import main

ARTIFACT_ID = "000102030405060708090a0b0c0d0e0f"


@pytest.mark.parametrize("version", [1, 2])
def test_the_objects_stay_byte_for_byte(version: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tiny_legacy.write(tmp_path / "old.ninfer", version), tmp_path / "new.ninfer"
    before = old.read_bytes()
    assert main(["upgrade", str(old), str(new), "--artifact-id", ARTIFACT_ID]) == 0
    directory, payload, artifact_id = tiny_files.parse(new)
    assert artifact_id == tiny_files.ARTIFACT_ID and old.read_bytes() == before
    for record, described in zip(directory["objects"], tiny_legacy.OBJECTS, strict=True):
        span = slice(record["offset"], record["offset"] + record["bytes"])
        assert record["id"] == described["name"] and payload[span] == tiny_legacy.payload()[span]
    assert directory["provenance"]["upgraded_from"]["version"] == version
    messages = capsys.readouterr().err
    assert f"{new} has objects but no parameters" in messages and "'tiny'" in messages
    again = tmp_path / "again.ninfer"
    assert main(["upgrade", str(old), str(again), "--artifact-id", ARTIFACT_ID]) == 0
    assert again.read_bytes() == new.read_bytes()


def test_inspect_shows_an_old_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tiny_legacy.write(tmp_path / "old.ninfer", 2)
    assert main(["inspect", str(old), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["container_version"] == 2 and "none of the published models" in described["unbound"]
    assert set(described["formats"]) == {"q8_g32_fp16", "bf16"}
    assert main(["inspect", str(old)]) == 0
    text = capsys.readouterr().out
    assert "container version 2" in text and "none of the published models" in text


def test_a_large_file_is_split(tmp_path: Path) -> None:
    old, new = tiny_legacy.write(tmp_path / "old.ninfer", 2), tmp_path / "new.ninfer"
    assert main(["upgrade", str(old), str(new), "--max-file-bytes", "8192"]) == 0
    assert tiny_files.parse(new)[1] == payload_with_zero_gaps()
    assert main(["upgrade", str(old), str(tmp_path / "other.ninfer"), "--max-file-bytes", "4096"]) == 1


def payload_with_zero_gaps() -> bytes:
    data = bytearray(len(tiny_legacy.payload()))
    for record in tiny_legacy.OBJECTS:
        span = slice(record["offset"], record["offset"] + record["bytes"])
        data[span] = tiny_legacy.payload()[span]
    return bytes(data)


def test_refusals_are_one_line_and_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tiny_legacy.write(tmp_path / "old.ninfer", 2), tmp_path / "new.ninfer"

    def refusal(*arguments: object) -> str:
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        assert main(["upgrade", *map(str, arguments)]) == 1
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and message.startswith("ninfer-torch: ")
        return message

    assert "cannot be opened" in refusal(tmp_path / "absent.ninfer", new)
    assert "already exists" in refusal(old, old)
    assert "version 3 already" in refusal(tiny_files.write(tmp_path / "three.ninfer"), new)
    assert "32 hexadecimal digits" in refusal(old, new, "--artifact-id", "12")
    newer = tmp_path / "newer.ninfer"
    newer.write_bytes(tiny_files.entry_bytes(b"{}", b"", magic=b"NINFER\0\x09"))
    message = refusal(newer, new)
    for part in ("version 9", "version 1, 2 or 3", "pip install --upgrade", "ninfer-torch upgrade OLD NEW"):
        assert part in message
