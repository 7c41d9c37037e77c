"""The stub checkpoint: a safetensors file that names a model's parameters and holds none of their values.

Transformers plans a load from the names in a checkpoint file. The stub gives it one zero-size bfloat16 tensor per
parameter; the quantizer puts the real tensor in its place. Without the quantizer every entry has the wrong shape, so
that such a folder fails to load instead of becoming a random model.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import torch

from ninfer_torch.errors import ArtifactError

__all__ = ["QUANT_METHOD", "STUB_DTYPE", "STUB_NAME", "artifact_beside", "write_stub"]

QUANT_METHOD = "ninfer"
STUB_NAME = "ninfer-stub.safetensors"
_ARTIFACT_KEY = "ninfer_artifact"
STUB_DTYPE = torch.bfloat16
_EMPTY = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0]}


def write_stub(path: Path, parameters: Iterable[str], artifact_name: str) -> None:
    """Write a stub that names `parameters` and the artifact's file name, which lies in the same folder."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", _ARTIFACT_KEY: artifact_name}}
    header.update(dict.fromkeys(parameters, _EMPTY))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def artifact_beside(stub: Path) -> Path:
    """The artifact a stub stands for, behind the link of an overlay. Raises ArtifactError for any other file, and where
    the artifact is missing.
    """
    try:
        with stub.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            name = json.loads(file.read(min(length, 1 << 30)))["__metadata__"][_ARTIFACT_KEY]
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ArtifactError(
            f"{stub} is not the stub of a .ninfer artifact ({type(error).__name__}: {error}); a folder whose "
            f"config.json says quant_method {QUANT_METHOD!r} needs transformers_weights = {STUB_NAME!r} and that file",
            "file",
        ) from error
    artifact = stub.parent / name
    if Path(name).name != name or not artifact.is_file():
        raise ArtifactError(
            f"{stub} stands for the artifact {name!r}, which is not in its folder; download the whole repository, or "
            "pass the path of the .ninfer file itself",
            "file",
        )
    target = os.readlink(artifact) if artifact.is_symlink() else ""
    return Path(target) if os.path.isabs(target) else artifact  # a relative link is the Hub cache's, into its blobs
