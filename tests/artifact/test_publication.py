"""Publication: an artifact appears whole or not at all, and never over another file, whatever fails in between."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ninfer_torch.artifact import ArtifactWriter, open_artifact
from ninfer_torch.errors import ArtifactError

PAGE = 4096


def refuse_links(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, "no hard links here")


def three_files(path: Path) -> ArtifactWriter:
    writer = ArtifactWriter(path, max_file_bytes=2 * PAGE)
    writer.component("text", {})
    writer.resource("big", bytes(range(256)) * 48)
    return writer


def payload_of(*chunks: bytes, then: BaseException | None = None) -> Callable[[], Iterator[bytes]]:
    def produce() -> Iterator[bytes]:
        yield from chunks
        if then is not None:
            raise then

    return produce


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("payload", "error", "message"),
    [
        (payload_of(bytes(11)), ArtifactError, "has 11 bytes, expected 12"),
        (payload_of(), ArtifactError, "has 0 bytes, expected 12"),
        (payload_of(bytes(12), b"x"), ArtifactError, "has at least 13 bytes, expected 12"),
        (payload_of(bytes(4000)), ArtifactError, "has at least 4000 bytes, expected 12"),
        (payload_of(bytes(4), then=KeyboardInterrupt()), KeyboardInterrupt, "^$"),
        (payload_of(bytes(4), then=RuntimeError("source broke")), RuntimeError, "source broke"),
        (payload_of(bytes(12), then=OSError("source broke")), OSError, "source broke"),
    ],
)
def test_a_payload_that_fails_leaves_nothing(
    tmp_path: Path, payload: Callable[[], Iterator[bytes]], error: type[BaseException], message: str, last: bool
) -> None:
    with pytest.raises(error, match=message), ArtifactWriter(tmp_path / "a.ninfer", max_file_bytes=2 * PAGE) as writer:
        writer.component("text", {})
        writer.resource("big", bytes(3 * PAGE))
        writer.tensor("w", "bf16", [2, 3], payload)
        if not last:
            writer.resource("after", b"x")
    assert not list(tmp_path.iterdir())


def test_an_exception_in_the_block_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"), ArtifactWriter(tmp_path / "a.ninfer") as writer:
        writer.component("text", {})
        writer.resource("r", b"x")
        raise RuntimeError("mine")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("taken", ["a.ninfer", "a.ninfer.part-0002"])
@pytest.mark.parametrize("link", [False, True])
def test_existing_files_are_never_replaced(tmp_path: Path, taken: str, link: bool) -> None:
    victim = tmp_path / taken
    victim.symlink_to(tmp_path / "nowhere") if link else victim.write_bytes(b"precious")
    with (
        pytest.raises(ArtifactError, match=f"{taken}: already exists") as caught,
        ArtifactWriter(tmp_path / "a.ninfer", max_file_bytes=2 * PAGE) as writer,
    ):
        writer.component("text", {})
        writer.resource("big", bytes(3 * PAGE))
    assert caught.value.kind == "file"
    assert os.listdir(tmp_path) == [taken]
    assert victim.is_symlink() if link else victim.read_bytes() == b"precious"


@pytest.mark.parametrize("hard_links", [True, False])
@pytest.mark.parametrize("taken", ["a.ninfer", "a.ninfer.part-0001"])
def test_a_name_taken_while_writing_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str, hard_links: bool
) -> None:
    if not hard_links:
        monkeypatch.setattr(os, "link", refuse_links)

    def produce() -> Iterator[bytes]:
        (tmp_path / taken).write_bytes(b"precious")
        yield bytes(3 * PAGE)

    writer = ArtifactWriter(tmp_path / "a.ninfer", max_file_bytes=2 * PAGE)
    writer.component("text", {})
    writer.tensor("w", "int32", [3 * PAGE // 4], produce)
    with pytest.raises(ArtifactError, match=f"{taken}: already exists"):
        writer.finish()
    assert os.listdir(tmp_path) == [taken] and (tmp_path / taken).read_bytes() == b"precious"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_an_interrupt_while_publishing_leaves_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, after: bool
) -> None:
    real, calls = os.link, []

    def link(source: Path, target: Path) -> None:
        calls.append(target.name)
        interrupt = len(calls) == step + 1
        if interrupt and not after:
            raise KeyboardInterrupt
        real(source, target)
        if interrupt:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(KeyboardInterrupt):
        three_files(tmp_path / "a.ninfer").finish()
    assert calls == ["a.ninfer.part-0002", "a.ninfer.part-0001", "a.ninfer"][: step + 1]  # the entry comes last
    if step == 2 and after:
        assert open_artifact(tmp_path / "a.ninfer").read_object("big", check=True) == bytes(range(256)) * 48
        assert len(list(tmp_path.iterdir())) == 3
    else:
        assert not list(tmp_path.iterdir())


def test_file_systems_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse_links)
    three_files(tmp_path / "a.ninfer").finish()
    assert sorted(os.listdir(tmp_path)) == ["a.ninfer", "a.ninfer.part-0001", "a.ninfer.part-0002"]
    assert open_artifact(tmp_path / "a.ninfer").read_object("big") == bytes(range(256)) * 48


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_failed_rename_without_hard_links_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    real, calls = os.replace, []

    def replace(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == step + 1:
            raise OSError(errno.EIO, "broken disk")
        real(source, target)

    monkeypatch.setattr(os, "link", refuse_links)
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(ArtifactError, match="broken disk") as caught:
        three_files(tmp_path / "a.ninfer").finish()
    assert caught.value.kind == "file" and not list(tmp_path.iterdir())


def test_an_unwritable_place_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="No such file") as caught:
        three_files(tmp_path / "absent" / "a.ninfer").finish()
    assert caught.value.kind == "file"


def test_a_full_disk_is_a_typed_error(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    old_action = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * PAGE, limits[1]))
        with pytest.raises(ArtifactError, match="too large") as caught, ArtifactWriter(tmp_path / "a.ninfer") as writer:
            writer.component("text", {})
            writer.resource("big", bytes(3 * PAGE))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old_action)
    assert caught.value.kind == "file" and not list(tmp_path.iterdir())


def test_new_files_follow_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        three_files(tmp_path / "a.ninfer").finish()
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a.ninfer").stat().st_mode) == 0o640
