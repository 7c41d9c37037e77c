"""Where the artifact is that a path or a Hub id stands for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ninfer_torch.errors import ArtifactError
from ninfer_transformers.stub import STUB_NAME

__all__ = ["fetch_artifact", "find_artifact", "is_artifact", "stands_for_artifact"]

_SUFFIX = ".ninfer"
_MAGIC = b"NINFER\0"
_STOCK_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")


def is_artifact(path: Path) -> bool:
    """Whether a file calls itself an artifact, by its name or by its first bytes (spec/container.md 3)."""
    if not path.is_file():
        return False
    if path.suffix == _SUFFIX:
        return True
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def find_artifact(path: Path) -> Path | None:
    """The artifact at `path`: the file itself, or the only one in the folder. Raises ArtifactError for a folder with
    several.
    """
    if not path.is_dir():
        return path if is_artifact(path) else None
    name = _only_entry((entry.name for entry in os.scandir(path)), str(path))
    return None if name is None else path / name


def stands_for_artifact(path: Path) -> Path | None:
    """The artifact that Transformers would not find at `path` by itself, or None.

    A folder with weights of its own, an overlay among them, is left to Transformers.
    """
    if path.is_dir() and any(
        entry.name == STUB_NAME or entry.name.endswith(_STOCK_WEIGHTS) for entry in os.scandir(path)
    ):
        return None
    return find_artifact(path)


def fetch_artifact(repo_id: str, hub: Mapping[str, Any]) -> Path | None:
    """The artifact of a Hub repository, downloaded into the Hub's cache if it is not there; None for a repository
    without one.

    `hub` are the keywords of `from_pretrained` that speak of the Hub. Offline, only the cache is searched. What the Hub
    client raises passes through; several artifacts in one repository raise ArtifactError.
    """
    import huggingface_hub

    place = {name: hub[name] for name in ("revision", "cache_dir", "token") if hub.get(name) is not None}
    subfolder = hub.get("subfolder") or ""
    if hub.get("local_files_only") or huggingface_hub.constants.HF_HUB_OFFLINE:
        return stands_for_artifact(
            Path(huggingface_hub.snapshot_download(repo_id, local_files_only=True, **place)) / subfolder
        )
    names = huggingface_hub.HfApi(token=hub.get("token")).list_repo_files(repo_id, revision=hub.get("revision"))
    inside = [name.removeprefix(f"{subfolder}/") for name in names if not subfolder or name.startswith(f"{subfolder}/")]
    entry = _only_entry((name for name in inside if "/" not in name), repo_id)
    if entry is None:
        return None

    def download(name: str) -> Path:
        return Path(huggingface_hub.hf_hub_download(repo_id, name, subfolder=subfolder or None, **place))

    artifact = download(entry)
    for part in _part_names(artifact):
        download(part)
    return artifact


def _part_names(artifact: Path) -> list[str]:
    from ninfer_torch.artifact.reader import open_artifact

    with open_artifact(artifact) as opened:
        return [record.path for record in opened.files if record.path is not None]


def _only_entry(names: Iterable[str], where: str) -> str | None:
    entries = sorted(name for name in names if name.endswith(_SUFFIX))
    if len(entries) > 1:
        raise ArtifactError(
            f"{where} holds {len(entries)} artifacts ({', '.join(entries)}); pass the path of one of them", "file"
        )
    return entries[0] if entries else None
