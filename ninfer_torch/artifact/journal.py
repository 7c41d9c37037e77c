"""The journal of an unfinished artifact: which bytes are on disk, and of which conversion they are. No torch here.

It lies beside the artifact as `.<name>.resume.json`, and the unfinished files under temporary names that follow from the
artifact's name. Both go when the artifact is published.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ninfer_torch.errors import ArtifactError, NinferError

__all__ = ["Journal", "journal_path"]

_STEP_BYTES = 64 << 20
"""Payload bytes between two entries: what an interrupt costs at most, a large object apart."""


def journal_path(artifact: Path) -> Path:
    """Where the journal of an artifact lies while it is unfinished."""
    return artifact.with_name(f".{artifact.name}.resume.json")


class Journal:
    """The state of one unfinished artifact.

    `fingerprint` stands for everything that decides its bytes but the artifact id. `artifact_id` is that of the
    unfinished files; `position` counts the payload bytes that are complete, 0 for a new artifact.
    """

    def __init__(self, artifact: Path, fingerprint: str, artifact_id: str | None = None) -> None:
        """Read the journal of `artifact` where there is one; `artifact_id` is a wanted one, 32 hexadecimal digits.

        Raises ArtifactError of kind `file` for an unreadable journal, one of another conversion, and while another
        process has it.
        """
        self.path = journal_path(artifact)
        self.fingerprint = fingerprint
        self.token = hashlib.sha256(artifact.name.encode()).hexdigest()[:32]
        self.position = 0
        self.artifact_id = artifact_id or uuid.uuid4().hex
        self._lock_path = self.path.with_suffix(".lock")
        self._lock = os.open(self._lock_path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise ArtifactError(f"{artifact.name}: another process is writing it", kind="file") from error
        try:
            self._take_over(artifact.name, artifact_id)
        except BaseException:
            self.close()
            raise

    def _take_over(self, name: str, artifact_id: str | None) -> None:
        state = self._read()
        if state is None:
            return
        wanted = {"fingerprint": self.fingerprint, "artifact_id": artifact_id or state["artifact_id"]}
        for member, value in wanted.items():
            if state[member] != value:
                raise ArtifactError(
                    f"{name}: what is unfinished beside it has another {member}: the source, the recipe or the "
                    f"file limit changed; remove {self.path.name} and .ninfer-{self.token}-*.tmp, or choose another name",
                    kind="file",
                )
        self.artifact_id, self.position = state["artifact_id"], state["position"]

    def _read(self) -> dict[str, Any] | None:
        try:
            state = json.loads(self.path.read_text(encoding="utf-8"))
            if not (isinstance(state["position"], int) and state["position"] > 0):
                raise ValueError(f"position {state['position']!r}")
            return {member: state[member] for member in ("fingerprint", "artifact_id", "position")}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"{self.path}: no readable journal ({error!r}); remove it to start anew", kind="file"
            ) from error

    def reached(self, position: int, sync: Callable[[], None]) -> None:
        """Note that payload bytes [0, `position`) are written; `sync` puts them on disk first. Not every call writes."""
        if position - self.position >= _STEP_BYTES:
            sync()
            self._write(position)

    def _write(self, position: int) -> None:
        state = {"fingerprint": self.fingerprint, "artifact_id": self.artifact_id, "position": position}
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        with open(temporary, "w", encoding="utf-8") as stream:
            json.dump(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, self.path)
        self.position = position

    def outlives(self, error: BaseException) -> bool:
        """Whether unfinished work is worth keeping after `error`; where it is not, the journal goes.

        An interrupt or a full disk passes. What the library refuses about a value will be refused again.
        """
        refused = isinstance(error, NinferError) and getattr(error, "kind", None) != "file"
        if refused or not self.position:
            self.remove()
            return False
        return True

    def remove(self) -> None:
        """The artifact is published, or its unfinished work gone: nothing is left to continue."""
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another process have the unfinished work."""
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)
