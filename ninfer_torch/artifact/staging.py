"""Files that appear all at once: written under temporary names, then published without overwriting anything.

Source of the rules: spec/container.md 11. No torch here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ninfer_torch.errors import ArtifactError

__all__ = ["StagedFiles"]

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@contextlib.contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise ArtifactError(
            f"{path}: already exists, expected a new name (nothing is overwritten)", kind="file"
        ) from error
    except OSError as error:
        raise ArtifactError(f"{path}: {error.strerror or error}", kind="file") from error


class StagedFiles:
    """A set of new files in one folder. `targets[0]` is the entry, published last.

    Until `publish` only temporary names exist; `discard` removes them, and the targets already published if the entry
    is not.
    """

    def __init__(self, targets: Sequence[Path]) -> None:
        """Raises ArtifactError of kind `file` when a target exists, a dangling link included."""
        self._targets = list(targets)
        for target in self._targets:
            if os.path.lexists(target):
                raise ArtifactError(
                    f"{target}: already exists, expected a new name (nothing is overwritten)", kind="file"
                )
        token = uuid.uuid4().hex
        self._temporaries = [
            target.with_name(f".ninfer-{token}-{index}.tmp") for index, target in enumerate(self._targets)
        ]
        self._claimed: list[Path] = []
        self._finished = False

    @contextlib.contextmanager
    def create(self, index: int) -> Iterator[Callable[[bytes | memoryview], None]]:
        """Make file `index` and give the function that appends to it; the file is on disk when the block ends."""
        temporary = self._temporaries[index]
        with _file_errors(temporary):
            stream = open(temporary, "xb", buffering=0)  # noqa: SIM115

        def write(data: bytes | memoryview) -> None:
            rest = memoryview(data)
            with _file_errors(temporary):
                while rest:
                    rest = rest[stream.write(rest) :]

        with stream:
            yield write
            with _file_errors(temporary):
                os.fsync(stream.fileno())

    def size(self, index: int) -> int:
        """Bytes of file `index` as written."""
        return self._temporaries[index].stat().st_size

    def publish(self) -> None:
        """Give every file its own name, the entry last.

        Raises ArtifactError of kind `file` when a name has been taken meanwhile.
        """
        for temporary, target in reversed(list(zip(self._temporaries, self._targets, strict=True))):
            with _file_errors(target):
                self._rename(temporary, target)
        self.discard()
        self._finished = True
        _sync_folder(self._targets[0].parent)

    def _rename(self, temporary: Path, target: Path) -> None:
        try:
            os.link(temporary, target)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            # Without hard links an empty file claims the name; replacing our own claim overwrites nobody.
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            self._claimed.append(target)
            os.replace(temporary, target)

    def discard(self) -> None:
        """Remove what must not stay: the temporary names, and unless the entry is published, the parts that are."""
        if self._finished:
            return
        if not self._entry_published():
            for temporary, target in zip(self._temporaries, self._targets, strict=True):
                if target in self._claimed or _same_file(temporary, target):
                    target.unlink(missing_ok=True)
        for temporary in self._temporaries:
            temporary.unlink(missing_ok=True)

    def _entry_published(self) -> bool:
        # Asked of the file system, so that an interrupt between a link and a note of it changes nothing.
        if self._targets[0] in self._claimed:
            return not self._temporaries[0].exists()
        return _same_file(self._temporaries[0], self._targets[0])


def _same_file(first: Path, second: Path) -> bool:
    try:
        return os.path.samefile(first, second)
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    # Some file systems cannot sync a folder; the files themselves are on disk already.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
