"""Reading: what is mapped and what is read, how long it lives, where parts are, and what a parameter is made of."""

from __future__ import annotations

import gc
import itertools
import os
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from artifact import tiny_files as tiny
from ninfer_torch.artifact import Artifact, open_artifact
from ninfer_torch.artifact.framing import Piece, pieces
from ninfer_torch.artifact.records import FileRecord
from ninfer_torch.errors import ArtifactError, UnsupportedOperation
from ninfer_torch.tensors import NinferTensor

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PAYLOAD_BYTES = len(tiny.payload())


def q8(artifact: Artifact) -> NinferTensor:
    tensor = artifact.tensor("w.q8")
    assert isinstance(tensor, NinferTensor)
    return tensor


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy().view(np.uint16)


def mapped_files() -> str:
    return Path("/proc/self/maps").read_text()


def open_files() -> list[str]:
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(descriptor))
        except FileNotFoundError:  # the one that listed the folder
            pass
    return found


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_base(artifact: Artifact) -> None:
    assert np.array_equal(q8(artifact).dequantize().numpy(), tiny.Q8_VALUES)
    assert np.array_equal(bits(artifact.tensor("w.bf")), tiny.BF_WORDS)
    assert artifact.tensor("w.s").shape == () and artifact.tensor("w.s").item() == tiny.SCALAR
    assert artifact.resource("r.note") == tiny.NOTE
    for object_id, record in artifact.objects.items():
        assert artifact.read_object(object_id, check=True) == tiny.payload()[record.offset : record.end]


def test_base_artifact_reads(tmp_path: Path) -> None:
    check_base(open_artifact(tiny.write(tmp_path / "a.ninfer")))


@LINUX
def test_planes_lie_over_one_private_mapping(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "a.ninfer")
    before = path.read_bytes()
    artifact = open_artifact(str(path))
    assert str(path) not in mapped_files()  # opening maps nothing
    artifact.read_tensor("w.q8"), artifact.read_object("w.q8"), artifact.resource("r.note")
    assert str(path) not in mapped_files()  # neither do reads
    tensor, word = q8(artifact), artifact.tensor("w.bf")
    lines = [line for line in mapped_files().splitlines() if line.endswith(str(path))]
    assert len(lines) == 1 and lines[0].split()[1] == "rw-p"
    begin, end = (int(bound, 16) for bound in lines[0].split()[0].split("-"))
    start = before.index(tiny.NOTE, 4096)
    planes = [*tensor.planes.values(), word]
    assert [plane.data_ptr() - begin for plane in planes] == [start + 256, start + 768, start + 1024]
    assert all(begin <= plane.data_ptr() < end for plane in planes)
    assert all(plane.untyped_storage().nbytes() == plane.nbytes for plane in planes)  # a storage for each plane
    tensor.planes["codes"].zero_()
    assert path.read_bytes() == before


def test_tensors_outlive_the_artifact(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "a.ninfer")
    with open_artifact(path) as artifact:
        tensor, word = q8(artifact), artifact.tensor("w.bf")
        view = artifact.parameter("text/rows")
    with pytest.raises(ArtifactError, match="closed") as caught:
        artifact.tensor("w.q8")
    assert caught.value.kind == "file"
    artifact.close()
    del artifact
    path.unlink()
    gc.collect()
    assert np.array_equal(tensor.dequantize().numpy(), tiny.Q8_VALUES)
    assert np.array_equal(view.dequantize().numpy(), tiny.Q8_VALUES[1:3])
    assert np.array_equal(bits(word), tiny.BF_WORDS)


@LINUX
def test_files_and_mappings_are_released(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "a.ninfer")
    artifact = open_artifact(path)
    assert str(path) in open_files()
    tensor = artifact.tensor("w.q8")
    del artifact
    gc.collect()
    assert str(path) in mapped_files()
    del tensor
    gc.collect()
    assert str(path) not in mapped_files()
    assert str(path) not in open_files()


@LINUX
def test_artifact_larger_than_memory_opens_and_reads(tmp_path: Path) -> None:
    rows, columns = 1 << 21, 1 << 15
    big, size = 256, rows * columns  # codes of the q8 object; its scales follow
    q8_bytes = size + rows * (columns // 32) * 2
    tail = (big + q8_bytes + 255) // 256 * 256
    value = tiny.directory()
    value["objects"] = [
        tiny.OBJECTS[0],
        tiny.OBJECTS[1] | {"shape": [rows, columns], "offset": big, "bytes": q8_bytes},
        tiny.OBJECTS[2] | {"offset": tail},
        tiny.OBJECTS[3] | {"offset": tail + 256},
    ]
    value["bindings"] = {"text/q8": {"object": "w.q8"}}
    value["files"] = [{"path": None, "payload_bytes": tail + 260}]
    path = tmp_path / "big.ninfer"
    path.write_bytes(tiny.entry_bytes(tiny.json_text(value), tiny.NOTE))
    start = path.stat().st_size - len(tiny.NOTE)
    try:
        os.truncate(path, start + tail + 260)
    except OSError as error:
        pytest.skip(f"this file system has no sparse files of {tail} bytes: {error}")
    with open(path, "r+b") as file:
        file.seek(start + tail)
        file.write(tiny.BF_WORDS.tobytes().ljust(256, b"\0") + tiny.SCALAR.tobytes())
        last = start + big + (rows - 1) * columns
        file.seek(last)
        file.write(bytes([7]) * 32)
        file.seek(start + big + q8_bytes - columns // 32 * 2)
        file.write(struct.pack("<e", 0.5))
    assert path.stat().st_size > 64 << 30
    before = resident_bytes()
    artifact = open_artifact(path)
    assert np.array_equal(bits(artifact.tensor("w.bf")), tiny.BF_WORDS)
    assert artifact.tensor("w.s").item() == tiny.SCALAR
    tensor = q8(artifact)
    row = tensor[rows - 1 :].dequantize()
    assert row[0, :32].tolist() == [3.5] * 32 and not row[0, 32:].any()
    assert resident_bytes() - before < 64 << 20


@LINUX
def test_opening_reads_header_and_directory_only(tmp_path: Path) -> None:
    value = tiny.directory()
    value["files"][0]["payload_bytes"] = 1 << 24
    path = tiny.write(tmp_path / "a.ninfer", value, data=tiny.payload().ljust(1 << 24, b"\1"))
    counter = Path("/proc/self/io")

    def bytes_read() -> int:
        return int(counter.read_text().split()[1])

    overhead = -bytes_read() + bytes_read()
    before = bytes_read()
    artifact = open_artifact(path)
    assert bytes_read() - before - overhead < 8192
    assert len(artifact.objects) == 4


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, PAYLOAD_BYTES - 1), max_size=5, unique=True))
def test_any_cut_reads_the_same(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    borders = [0, *sorted(cuts), PAYLOAD_BYTES]
    sizes = [end - begin for begin, end in itertools.pairwise(borders)]
    check_base(open_artifact(tiny.write_set(tmp_path_factory.mktemp("set") / "a.ninfer", sizes)))


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6), data=st.data())
def test_pieces_tile_a_range(sizes: list[int], data: st.DataObject) -> None:
    files = [FileRecord(None, size) for size in sizes]
    begin = data.draw(st.integers(0, sum(sizes)))
    end = data.draw(st.integers(begin, sum(sizes)))
    marks = [(index, offset) for index, size in enumerate(sizes) for offset in range(size)]
    found = [(piece.file, piece.offset + step) for piece in pieces(files, begin, end) for step in range(piece.bytes)]
    assert found == marks[begin:end]


def test_pieces_of_the_specification_example() -> None:
    files = [FileRecord(None, 8192), FileRecord("b", 8192), FileRecord("c", 3616)]
    assert list(pieces(files, 8000, 9000)) == [Piece(0, 8000, 192), Piece(1, 0, 808)]


def test_only_objects_that_cross_files_are_copied(tmp_path: Path) -> None:
    artifact = open_artifact(tiny.write_set(tmp_path / "a.ninfer", [512, 772]))
    crossing, inside = q8(artifact), artifact.tensor("w.bf")
    again, inside_again = q8(artifact), artifact.tensor("w.bf")
    assert crossing.planes["codes"].data_ptr() != again.planes["codes"].data_ptr()
    assert inside.data_ptr() == inside_again.data_ptr()


def test_words_at_odd_addresses_are_copied_to_even_ones(tmp_path: Path) -> None:
    artifact = open_artifact(tiny.write_set(tmp_path / "a.ninfer", [3, PAYLOAD_BYTES - 3]))
    assert artifact.tensor("w.bf").data_ptr() % 2 == 0 and artifact.tensor("w.s").data_ptr() % 4 == 0
    check_base(artifact)


def test_missing_parts_leave_the_rest_readable(tmp_path: Path) -> None:
    path = tiny.write_set(tmp_path / "a.ninfer", [1024, 256, 4])
    (tmp_path / "a.ninfer.p1").unlink()
    artifact = open_artifact(path)
    assert np.array_equal(q8(artifact).dequantize().numpy(), tiny.Q8_VALUES)
    assert artifact.tensor("w.s").item() == tiny.SCALAR
    for ask in (artifact.tensor, artifact.read_tensor, artifact.read_object):
        with pytest.raises(ArtifactError, match="a.ninfer.p1: cannot be opened") as caught:
            ask("w.bf")
        assert caught.value.kind == "file"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (tiny.part_bytes(2, bytes(1028)), "header says part 2, expected part 1"),
        (tiny.part_bytes(1, bytes(1028), artifact_id=bytes(16)), "belongs to artifact 0000"),
        (tiny.part_bytes(1, bytes(1028), magic=b"NINFER\0\3"), "found magic 4e 49 4e 46"),
        (tiny.part_bytes(1, bytes(1028), magic=b"NINPRT\0\2"), "expected 4e 49 4e 50 52 54 00 03"),
        (tiny.part_bytes(1, bytes(1027)), "5123 bytes long, expected exactly 5124"),
        (tiny.part_bytes(1, bytes(1029)), "5125 bytes long, expected exactly 5124"),
        (tiny.part_bytes(1, b"")[:31], "31 bytes long, expected at least 32"),
        (b"", "0 bytes long, expected at least 32"),
    ],
)
def test_wrong_parts_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    artifact = open_artifact(tiny.write_set(tmp_path / "a.ninfer", [256, 1028]))
    (tmp_path / "a.ninfer.p1").write_bytes(content)
    with pytest.raises(ArtifactError, match=message) as caught:
        artifact.tensor("w.q8")
    assert caught.value.kind == "file" and "a.ninfer.p1" in str(caught.value)


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    path = tiny.write_set(tmp_path / "a.ninfer", [256, 1028])
    (tmp_path / "a.ninfer.p1").unlink()
    os.mkfifo(tmp_path / "a.ninfer.p1")
    with pytest.raises(ArtifactError, match="regular file"):
        open_artifact(path).tensor("w.q8")


def test_linked_parts_need_a_linked_entry(tmp_path: Path) -> None:
    store, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir()
    snapshot.mkdir()
    path = tiny.write_set(snapshot / "a.ninfer", [256, 1028])
    part = snapshot / "a.ninfer.p1"
    part.rename(store / "p")
    part.symlink_to(store / "p")
    with pytest.raises(ArtifactError, match="symbolic link") as caught:
        open_artifact(path).tensor("w.q8")
    assert caught.value.kind == "file"
    path.rename(store / "e")
    path.symlink_to("../blobs/e")  # as a Hub snapshot keeps its files
    check_base(open_artifact(path))
    folder = tmp_path / "link"
    folder.symlink_to(snapshot)
    check_base(open_artifact(folder / "a.ninfer"))


def test_parameters(tmp_path: Path) -> None:
    artifact = open_artifact(tiny.write(tmp_path / "a.ninfer"))
    whole, rows = artifact.parameter("text/q8"), artifact.parameter("text/rows")
    assert isinstance(whole, NinferTensor) and isinstance(rows, NinferTensor)
    assert whole.policy == "AllowA8" and rows.policy == "A16Only"
    assert whole.shape == (4, 128) and rows.shape == (2, 128)
    assert np.array_equal(rows.dequantize().numpy(), tiny.Q8_VALUES[1:3])
    assert rows.planes["codes"].data_ptr() == whole.planes["codes"][1:].data_ptr()
    joined = tiny.BF_WORDS.reshape(-1)[[5, 0, 1]]
    assert np.array_equal(bits(artifact.parameter("text/last")), joined)
    assert artifact.parameter("text/last", shape=(3, 1)).shape == (3, 1)
    assert artifact.auxiliary("text/q8", "text/x", "activation_input_divisor").item() == 2.5


def parts(*ranges: tuple[str, int, int]) -> dict[str, Any]:
    return {"parts": [{"object": name, "range": [begin, end]} for name, begin, end in ranges]}


def with_bindings(path: Path, **bindings: dict[str, Any]) -> Artifact:
    value = tiny.directory()
    value["bindings"] |= bindings
    return open_artifact(tiny.write(path, value))


def test_neighbouring_parts_are_one_view(tmp_path: Path) -> None:
    artifact = with_bindings(
        tmp_path / "a.ninfer",
        thrice=parts(("w.q8", 0, 100), ("w.q8", 100, 128), ("w.q8", 128, 512)),
        words=parts(("w.bf", 0, 2), ("w.bf", 2, 3)),
    )
    assert np.array_equal(artifact.parameter("thrice").dequantize().numpy(), tiny.Q8_VALUES)
    row = artifact.parameter("words")
    assert row.shape == (1, 3) and row.data_ptr() == artifact.tensor("w.bf").data_ptr()


def test_rows_in_another_order_are_a_stack_of_views(tmp_path: Path) -> None:
    artifact = with_bindings(tmp_path / "a.ninfer", odd=parts(("w.q8", 256, 512), ("w.q8", 0, 128)))
    found = artifact.parameter("odd")
    assert isinstance(found, NinferTensor) and found.shape == (3, 128)
    assert np.array_equal(found.dequantize().numpy(), tiny.Q8_VALUES[[2, 3, 0]])
    assert torch.equal(artifact.dequantize_parameter("odd"), found.dequantize())


@pytest.mark.parametrize(
    "binding",
    [
        parts(("w.q8", 0, 128), ("w.bf", 0, 6)),
        parts(("w.q8", 1, 129)),
        parts(("w.bf", 0, 6), ("w.s", 0, 1)),
    ],
)
def test_what_no_packed_tensor_holds_names_the_way_out(tmp_path: Path, binding: dict[str, Any]) -> None:
    artifact = with_bindings(tmp_path / "a.ninfer", odd=binding)
    with pytest.raises(UnsupportedOperation, match="dequantize_parameter"):
        artifact.parameter("odd")
    sources = {
        "w.q8": tiny.Q8_VALUES.reshape(-1),
        "w.bf": (tiny.BF_WORDS.astype(np.uint32) << 16).view(np.float32).reshape(-1),
        "w.s": tiny.SCALAR.reshape(-1),
    }
    expected = np.concatenate([sources[part["object"]][slice(*part["range"])] for part in binding["parts"]])
    found = artifact.dequantize_parameter("odd").reshape(-1).numpy()
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    ("name", "shape"), [("text/q8", (2, 256)), ("text/rows", (3, 128)), ("text/last", (4,)), ("text/bf", (6,))]
)
def test_impossible_shapes_are_refused(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    artifact = open_artifact(tiny.write(tmp_path / "a.ninfer"))
    for ask in (artifact.parameter, artifact.dequantize_parameter):
        with pytest.raises(ArtifactError, match=f"parameter '{name}' has .* elements") as caught:
            ask(name, shape=shape)
        assert caught.value.kind == "range"


def test_unknown_names_are_typed_errors(tmp_path: Path) -> None:
    artifact = open_artifact(tiny.write(tmp_path / "a.ninfer"))
    asks = [
        lambda: artifact.tensor("absent"),
        lambda: artifact.tensor("r.note"),
        lambda: artifact.read_object("absent"),
        lambda: artifact.resource("w.q8"),
        lambda: artifact.parameter("absent"),
        lambda: artifact.use("text/q8", "absent"),
        lambda: artifact.auxiliary("text/q8", "text/x", "absent"),
    ]
    for ask in asks:
        with pytest.raises(ArtifactError, match="a.ninfer") as caught:
            ask()
        assert caught.value.kind == "reference"


def test_threads_share_one_artifact(tmp_path: Path) -> None:
    artifact = open_artifact(tiny.write_set(tmp_path / "a.ninfer", [300, 300, 684]))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check_base, [artifact] * 80))


def test_reading_leaves_no_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    artifact = open_artifact(tiny.write(tmp_path / "a.ninfer"))
    check_base(artifact)
    del artifact
    gc.collect()
    assert not recwarn.list
