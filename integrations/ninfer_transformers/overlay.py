"""The overlay: a folder that clothes a `.ninfer` artifact as an ordinary checkpoint.

It holds config.json, a stub of the weights, the tokenizer and other small files out of the artifact, and links to the
artifact's own files; no weights and no code. Stock Transformers loads it wherever the quantizer is registered.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ninfer_torch.artifact.reader import Artifact, open_artifact
from ninfer_torch.convert.hf_source import RESOURCE_FILES
from ninfer_torch.errors import ArtifactError, NinferError
from ninfer_torch.models.architectures import architecture_of
from ninfer_transformers.locate import find_artifact
from ninfer_transformers.stub import QUANT_METHOD, STUB_NAME, write_stub

__all__ = ["clothe", "hub_dir", "overlay_of"]

_COMPONENTS_WITH_FILES = ("text", "vision")
"""Components whose resources are files that Transformers reads: tokenizer, chat template, image processors."""

_VERSION = 2
"""Part of the cache key: raise it when the content of an overlay changes."""


def hub_dir(path: str | os.PathLike[str]) -> str:
    """The folder that stock Transformers takes in place of an artifact.

    `path` is a `.ninfer` file, or a folder (a Hub snapshot, too) that holds exactly one. The folder is cached under
    `NINFER_TORCH_CACHE`, or ~/.cache/ninfer_torch, in `overlays/`, one per artifact path, size and modification time.
    Raises ArtifactError for a path without an artifact, a folder with several or a broken artifact, and NinferError for
    one whose architecture needs a table of names.
    """
    artifact = find_artifact(Path(path))
    if artifact is None:
        raise ArtifactError(f"{path} is neither a .ninfer artifact nor a folder that holds one", "file")
    return str(overlay_of(artifact))


def overlay_of(artifact: Path) -> Path:
    """The overlay of one artifact file, made if it is not cached yet."""
    source = Path(os.path.abspath(artifact))
    folder = _cache_root() / f"{source.stem}-{_key(source)}"
    if not folder.is_dir():
        _publish(source, folder)
    return folder


def _cache_root() -> Path:
    root = os.environ.get("NINFER_TORCH_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "ninfer_torch") / "overlays"


def _key(source: Path) -> str:
    status = source.stat()
    identity = f"{_VERSION}\0{source}\0{status.st_size}\0{status.st_mtime_ns}"
    return hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _publish(source: Path, folder: Path) -> None:
    """Make the overlay beside its place and rename it into it; of several processes the fastest wins."""
    with open_artifact(source) as artifact:
        architecture_of(artifact)  # what no table knows is said before a folder is made
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".draft-", dir=folder.parent) as drafts:
                draft = Path(drafts, folder.name)
                draft.mkdir()
                _fill(draft, artifact, source)
                draft.rename(folder)
        except OSError as error:
            if not folder.is_dir():
                raise NinferError(
                    f"no overlay can be written in {folder.parent} ({error}); "
                    "set NINFER_TORCH_CACHE to a folder that can be written"
                ) from error


def _fill(folder: Path, artifact: Artifact, source: Path) -> None:
    clothe(folder, artifact, source.name)
    for name in [source.name, *(record.path for record in artifact.files if record.path is not None)]:
        (folder / name).symlink_to(source.parent / name)


def clothe(folder: Path, artifact: Artifact, name: str, notes: Mapping[str, Any] | None = None) -> None:
    """Write what makes `folder` a checkpoint whose weights are the artifact called `name` in it: config, stub and small
    files. `notes` are further members of the quantization config.
    """
    architecture = architecture_of(artifact)
    _write_json(folder / "config.json", _marked_config(architecture.checkpoint_config(artifact), notes or {}))
    write_stub(folder / STUB_NAME, architecture.checkpoint_names(artifact), name)
    for component in _COMPONENTS_WITH_FILES:
        for role, object_id in (
            artifact.components[component].resources.items() if component in artifact.components else ()
        ):
            if role in RESOURCE_FILES:  # names of data files, none of them a path or code
                (folder / role).write_bytes(artifact.resource(object_id))


def _marked_config(config: Mapping[str, Any], notes: Mapping[str, Any]) -> dict[str, Any]:
    """The config, and each part of it that a class may take for its own, with the marks of a stub checkpoint."""
    marks = {"transformers_weights": STUB_NAME, "quantization_config": {**notes, "quant_method": QUANT_METHOD}}
    parts = {name: {**config[name], **marks} for name in ("text_config", "vision_config") if name in config}
    return {**config, **parts, **marks}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
