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

    def __init__(self, targets: Sequence[Path], token: str | None = None) -> None:
        """`token` makes the temporary names: a chosen one lets a later process find the files of this one.

        Raises ArtifactError of kind `file` when a target exists, a dangling link included.
        """
        self._targets = list(targets)
        for target in self._targets:
            if os.path.lexists(target):
                raise ArtifactError(
                    f"{target}: already exists, expected a new name (nothing is overwritten)", kind="file"
                )
        self._continues = token is not None
        token = token or uuid.uuid4().hex
        self._temporaries = [
            target.with_name(f".ninfer-{token}-{index}.tmp") for index, target in enumerate(self._targets)
        ]
        self._claimed: list[Path] = []
        self._finished = False
        self._open: int | None = None

    @contextlib.contextmanager
    def create(self, index: int, kept: int = 0) -> Iterator[Callable[[bytes | memoryview], None]]:
        """Make file `index` and give the function that appends to it; the file is on disk when the block ends.

        With `kept`, the file is there already and is continued after its first `kept` bytes. Raises ArtifactError of
        kind `file` where it is shorter.
        """
        temporary = self._temporaries[index]
        with _file_errors(temporary):
            if self._continues and not kept:
                temporary.unlink(missing_ok=True)  # what an earlier process left beyond its journal
            stream = open(temporary, "r+b" if kept else "xb", buffering=0)  # noqa: SIM115

        def write(data: bytes | memoryview) -> None:
            rest = memoryview(data)
            with _file_errors(temporary):
                while rest:
                    rest = rest[stream.write(rest) :]

        with stream:
            if kept:
                _keep(stream.fileno(), kept, temporary)
            self._open = stream.fileno()
            try:
                yield write
                self.sync()
            finally:
                self._open = None

    def sync(self) -> None:
        """Have everything written to the file at hand on disk."""
        if self._open is not None:
            with _file_errors(self._targets[0]):
                os.fsync(self._open)

    def head(self, index: int, count: int) -> bytes:
        """The first bytes of the temporary file `index`, at most `count`; none where it does not exist."""
        try:
            with open(self._temporaries[index], "rb") as stream:
                return stream.read(count)
        except FileNotFoundError:
            return b""

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

    def discard(self, keep_temporaries: bool = False) -> None:
        """Remove what must not stay: the temporary names, and unless the entry is published, the parts that are.

        With `keep_temporaries`, unfinished work stays under its temporary names.
        """
        if self._finished:
            return
        if not self._entry_published():
            for temporary, target in zip(self._temporaries, self._targets, strict=True):
                if target in self._claimed or _same_file(temporary, target):
                    target.unlink(missing_ok=True)
        for temporary in () if keep_temporaries else self._temporaries:
            temporary.unlink(missing_ok=True)

    def _entry_published(self) -> bool:
        # Asked of the file system, so that an interrupt between a link and a note of it changes nothing.
        if self._targets[0] in self._claimed:
            return not self._temporaries[0].exists()
        return _same_file(self._temporaries[0], self._targets[0])


def _keep(descriptor: int, count: int, path: Path) -> None:
    """Cut an open file to its first `count` bytes and go to its end."""
    found = os.fstat(descriptor).st_size
    if found < count:
        raise ArtifactError(f"{path}: {found} bytes long, expected at least {count} to continue from", kind="file")
    os.ftruncate(descriptor, count)
    os.lseek(descriptor, 0, os.SEEK_END)


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
