"""Rewriting a file of container version 1 or 2 as version 3. Source: spec/container.md 9, 13.3."""

from __future__ import annotations

import os
from collections.abc import Callable

from ninfer_torch.artifact.framing import VERSION
from ninfer_torch.artifact.reader import open_artifact
from ninfer_torch.artifact.writer import rewrite
from ninfer_torch.errors import ArtifactError

__all__ = ["upgrade"]


def upgrade(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    *,
    artifact_id: str | bytes | None = None,
    max_file_bytes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> str | None:
    """Write the version 1 or 2 file `old` as the version 3 artifact `new`, whole or not at all.

    Every object keeps its id, its offset and its bytes; the records are those that `open_artifact(old)` shows, and
    `provenance.upgraded_from` says what the file was. `artifact_id`, `max_file_bytes` and `progress` are the writer's.
    Returns why the new artifact has no bindings, or None where it has them (`Artifact.unbound`).

    Raises ArtifactError of kind `framing` for a file that is not of an older version, of kind `encoding` for an
    object this library cannot read, and of kind `file` when `new` exists.
    """
    with open_artifact(old) as artifact:
        if artifact.version == VERSION:
            raise ArtifactError(
                f"{artifact.path}: is container version {VERSION} already, expected an older one to upgrade", "framing"
            )
        for object_id in artifact.objects:
            artifact.check_object(object_id)
        rewrite(
            artifact,
            new,
            artifact_id=artifact_id,
            max_file_bytes=max_file_bytes,
            progress=progress,
            keep_offsets=True,
        )
        return artifact.unbound
