"""A GGUF header is read as it stands or refused with a reason; nothing in it is believed before it is checked."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from golden import golden, load_json, load_tensors
from ninfer_torch.convert.gguf_file import GgufArray, GgufFile
from ninfer_torch.convert.gguf_values import read_values
from ninfer_torch.errors import ConversionError

F32, F16, Q4_0, TYPE_42 = 0, 1, 2, 42


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def string_entry(key: str, value: str) -> bytes:
    return text(key) + struct.pack("<I", 8) + text(value)


def u32_entry(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


@dataclass
class Entry:
    """One tensor of a header; dims fastest first, as GGUF writes them."""

    name: str
    dims: Sequence[int]
    kind: int = F32
    offset: int = 0
    rank: int | None = None

    def __bytes__(self) -> bytes:
        rank = len(self.dims) if self.rank is None else self.rank
        dims = struct.pack(f"<{len(self.dims)}Q", *self.dims)
        return text(self.name) + struct.pack("<I", rank) + dims + struct.pack("<IQ", self.kind, self.offset)


def gguf(
    entries: Sequence[Entry],
    keys: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensors, metadata = counts or (len(entries), len(keys))
    header = b"GGUF" + struct.pack("<IQQ", version, tensors, metadata) + b"".join(keys) + b"".join(map(bytes, entries))
    return header + b"\0" * (-len(header) % alignment) + data


ARCHITECTURE = string_entry("general.architecture", "llama")
ONE = Entry("a", [8])
WORDS = struct.pack("<8f", *range(8))


def opened(tmp_path: Path, content: bytes) -> GgufFile:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return GgufFile(path)


def test_a_well_formed_file(tmp_path: Path) -> None:
    file = opened(tmp_path, gguf([ONE, Entry("b", [2, 3, 4], offset=32)], [ARCHITECTURE], WORDS + b"\1" * 96))
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {"a": (8,), "b": (4, 3, 2)}
    assert file.metadata == {"general.architecture": "llama"}
    assert read_values(file, file.tensors["a"], 2, 5).tolist() == [2, 3, 4]
    assert read_values(file, file.tensors["b"], 1, 3).shape == (2, 3, 2)


@pytest.mark.parametrize("keys", [[], [ARCHITECTURE]])
def test_a_file_may_hold_no_tensor(tmp_path: Path, keys: list[bytes]) -> None:
    assert opened(tmp_path, gguf([], keys)).tensors == {}


HOSTILE = {
    "empty file": (b"", "too few"),
    "not a GGUF file": (b"GGML" + bytes(28), "begins with b'GGML'"),
    "version 1": (gguf([ONE], [], WORDS, version=1), "version 1; only version 3"),
    "version 2": (gguf([ONE], [], WORDS, version=2), "version 2; only version 3"),
    "big-endian version 3": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(8), "big-endian GGUF file of version 3"),
    "a million dimensions": (gguf([Entry("a", [8], rank=1_000_000)], [], WORDS), "'a' has 1000000 dimensions"),
    "five dimensions": (gguf([Entry("a", [1] * 5)], [], WORDS), "'a' has 5 dimensions, expected 1 to 4"),
    "no dimension": (gguf([Entry("a", [])], [], WORDS), "'a' has 0 dimensions"),
    "dimensions whose product is 2^64": (gguf([Entry("a", [2**32, 2**32])], [], WORDS), r"'a' of type f32 takes bytes"),
    "dimensions of 2^63": (gguf([Entry("a", [2**63] * 4)], [], WORDS), r"'a' of type f32 takes bytes"),
    "a dimension of 0": (gguf([Entry("a", [0])], [], WORDS), r"'a' has dimensions \[0\]"),
    "columns that are no whole blocks": (
        gguf([Entry("a", [48, 2], Q4_0)], [], bytes(64)),
        "48 columns, expected a mul",
    ),
    "a key of 2^63 bytes": (gguf([], [struct.pack("<Q", 2**63) + bytes(32)]), "metadata key 0 .* takes 9223372036854"),
    "a string of 2^63 bytes": (
        gguf([], [text("k") + struct.pack("<IQ", 8, 2**63) + bytes(32)]),
        "metadata value 'k' .* takes 9223372036854775808 bytes",
    ),
    "a tensor name of 2^63 bytes": (
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 0, 2**63) + bytes(64),
        "name of tensor 0 .* takes",
    ),
    "an array of 2^61 bytes": (
        gguf([], [text("k") + struct.pack("<IIQ", 9, 0, 2**61) + bytes(32)]),
        "2305843009213693952 elements of metadata value 'k'",
    ),
    "an array of 2^61 words": (
        gguf([], [text("k") + struct.pack("<IIQ", 9, 12, 2**61)]),
        "2305843009213693952 elements",
    ),
    "an array of 2^61 strings": (
        gguf([], [text("k") + struct.pack("<IIQ", 9, 8, 2**61)]),
        "2305843009213693952 strings",
    ),
    "an array of arrays": (gguf([], [text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(32)]), "array of value type 9"),
    "an unknown value type": (gguf([], [text("k") + struct.pack("<I", 13) + bytes(32)]), "'k' has value type 13"),
    "a bool that is neither": (gguf([], [text("k") + struct.pack("<IB", 7, 2)]), "'k' is a bool with byte 2"),
    "a key that is not UTF-8": (gguf([], [struct.pack("<Q", 2) + b"\xff\xfe" + bytes(16)]), "key 0 .* is not UTF-8"),
    "2^60 tensors": (gguf([], [], bytes(64), counts=(2**60, 0)), "promises 1152921504606846976 tensors"),
    "2^60 keys": (gguf([], [], bytes(64), counts=(0, 2**60)), "promises 1152921504606846976 metadata keys"),
    "the same key twice": (gguf([], [ARCHITECTURE, ARCHITECTURE]), "'general.architecture' occurs twice"),
    "the same tensor twice": (gguf([ONE, Entry("a", [8], offset=32)], [], WORDS * 2), "tensor 'a' occurs twice"),
    "alignment 0": (gguf([ONE], [u32_entry("general.alignment", 0)], WORDS), "general.alignment is 0"),
    "alignment 24": (
        gguf([ONE], [u32_entry("general.alignment", 24)], WORDS),
        "general.alignment is 24, expected a power",
    ),
    "alignment 2^31": (gguf([ONE], [u32_entry("general.alignment", 2**31)], WORDS), "file ends at byte"),
    "alignment as a string": (
        gguf([ONE], [string_entry("general.alignment", "32")], WORDS),
        "value type 8, expected 4",
    ),
    "alignment as a bool": (gguf([ONE], [text("general.alignment") + struct.pack("<IB", 7, 1)], WORDS), "value type 7"),
    "an offset off the grid": (gguf([Entry("a", [4], offset=8)], [], WORDS), "'a' begins at data offset 8"),
    "an offset past the end": (gguf([Entry("a", [8], offset=2**40)], [], WORDS), "but the file ends at byte"),
    "an offset of almost 2^64": (gguf([Entry("a", [8], offset=2**64 - 32)], [], WORDS), "but the file ends at byte"),
    "a tensor past the end": (gguf([Entry("a", [9])], [], WORDS), "but the file ends at byte"),
    "tensors in one place": (gguf([ONE, Entry("b", [8])], [], WORDS), "'a' of type f32 .* overlaps tensor 'b'"),
    "overlapping tensors": (gguf([Entry("a", [9]), Entry("b", [8], offset=32)], [], WORDS * 2), "overlaps tensor 'b'"),
    "an unknown type past the end": (gguf([Entry("a", [8], 999, offset=64)], [], WORDS), "but the file ends at byte"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_by_name_and_without_large_allocations(tmp_path: Path, case: str) -> None:
    content, message = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(ConversionError, match=message) as caught:
            opened(tmp_path, content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith("model.gguf: ")
    assert peak < 1 << 20


def test_a_missing_file_is_a_conversion_error(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"absent\.gguf: cannot be opened"):
        GgufFile(tmp_path / "absent.gguf")


@pytest.mark.parametrize("name", ["all_types_plain.gguf", "tiny_llama_all_types.gguf", "ternary_142_143.gguf"])
@pytest.mark.parametrize("sixteenth", range(16))
def test_a_file_cut_at_any_sixteenth_is_refused_at_open(tmp_path: Path, name: str, sixteenth: int) -> None:
    content = golden("gguf", name).read_bytes()
    with pytest.raises(ConversionError, match="file ends at byte|too few|has room for"):
        opened(tmp_path, content[: len(content) * sixteenth // 16])


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_headers_open_or_are_refused(tmp_path: Path, data: st.DataObject) -> None:
    whole = gguf(
        [ONE, Entry("b", [32, 2], Q4_0, 32)], [ARCHITECTURE, u32_entry("general.alignment", 32)], WORDS + bytes(64)
    )
    content = bytearray(whole)
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    try:
        file = opened(tmp_path, bytes(content))
    except ConversionError:
        return
    for tensor in file.tensors.values():
        assert 0 < tensor.offset and tensor.offset + tensor.nbytes <= len(content)


def test_every_golden_type_decodes_to_its_values() -> None:
    file = GgufFile(golden("gguf", "all_types_plain.gguf"))
    expected = load_tensors(golden("gguf", "all_types_plain.safetensors"))
    assert set(file.tensors) == set(expected)
    for name, values in expected.items():
        tensor = file.tensors[name]
        assert tensor.shape == tuple(values.shape)
        read = read_values(file, tensor, 0, tensor.shape[0])
        assert read.dtype == {"f16": torch.float16, "bf16": torch.bfloat16}.get(name, values.dtype)
        same = read.to(values.dtype).view(torch.int32) == values.view(torch.int32)
        assert same.all(), f"{name}: {int((~same).sum())} values differ"
        begin, end = tensor.shape[0] // 3, tensor.shape[0] - 1
        assert torch.equal(read_values(file, tensor, begin, end), read[begin:end])


def test_every_metadata_type_is_read() -> None:
    file = GgufFile(golden("gguf", "all_types_plain.gguf"))
    assert file.alignment == 64
    found = {key: value for key, value in file.metadata.items() if key.startswith("t.")}
    assert found == {
        "t.u8": 255,
        "t.i8": -128,
        "t.u16": 65535,
        "t.i16": -32768,
        "t.u32": 2**32 - 1,
        "t.i32": -(2**31),
        "t.u64": 2**64 - 1,
        "t.i64": -(2**63),
        "t.f32": struct.unpack("<f", bytes.fromhex("24a20100"))[0],
        "t.f64": 1e-310,
        "t.true": True,
        "t.false": False,
        "t.string": "naïve – 数据",
        "t.array_i32": GgufArray(5, 3),
        "t.array_str": GgufArray(8, 3),
        "t.array_f32": GgufArray(6, 2),
        "t.array_bool": GgufArray(7, 3),
    }


@pytest.mark.parametrize("name", ["all_types_plain.gguf", "tiny_llama_all_types.gguf", "ternary_142_143.gguf"])
def test_golden_tensor_tables_agree_with_the_index(name: str) -> None:
    file = GgufFile(golden("gguf", name))
    for record in load_json(golden("gguf", "index.json"))[name]["tensors"]:
        tensor = file.tensors[record["name"]]
        assert (list(tensor.shape), tensor.type.number) == (record["shape"], record["type"])
        assert (tensor.offset, tensor.nbytes) == (record["data_offset"], record["nbytes"])


def test_ternary_types_decode_to_the_golden_values() -> None:
    file = GgufFile(golden("gguf", "ternary_142_143.gguf"))
    expected = load_tensors(golden("gguf", "ternary_142_143.safetensors"))
    assert set(file.tensors) == set(expected)
    for name, values in expected.items():
        read = read_values(file, file.tensors[name], 0, file.tensors[name].shape[0])
        assert torch.equal(read.view(torch.int32), values.view(torch.int32)), name


def test_a_code_that_is_not_ternary_is_refused_with_its_place() -> None:
    file = GgufFile(golden("gguf", "ternary_142_code3.gguf"))
    tensor = file.tensors["bad.pq2_0"]
    assert read_values(file, tensor, 0, 1).shape == (1, 256)
    with pytest.raises(ConversionError, match="'bad.pq2_0', row 1, column 150: code 3"):
        read_values(file, tensor, 1, 2)


@pytest.mark.parametrize("name", ["type42_lookalike.gguf", "type42_lookalike_last.gguf"])
def test_the_older_block_under_type_42_is_refused_with_both_layouts_named(name: str) -> None:
    with pytest.raises(ConversionError, match=r"'w\.0' of type 42.*128 values in 34 bytes.*64 values in 18 bytes"):
        GgufFile(golden("gguf", name))


def older_block_file(names: Sequence[str], rows: int, alignment: int = 32) -> bytes:
    """Tensors that say type 42 and hold 128 values in 34 bytes, then one of plain words unless `names` are the last."""
    entries, data = [], b""
    for name in names:
        entries.append(Entry(name, [256, rows], F32 if name == "plain" else TYPE_42, len(data)))
        data += bytes(256 * rows * 4 if name == "plain" else 2 * rows * 34)
        data += bytes(-len(data) % alignment)
    keys = [ARCHITECTURE, u32_entry("general.alignment", alignment)]
    return gguf(entries, keys, data, alignment=alignment)


@pytest.mark.parametrize("alignment", [32, 64])
@pytest.mark.parametrize("rows", [64, 100])
@pytest.mark.parametrize("names", [["w", "plain"], ["plain", "w"], ["w"], ["w", "v"], ["plain", "w", "v"]])
def test_the_older_block_under_type_42_is_told_by_its_span(
    tmp_path: Path, names: list[str], rows: int, alignment: int
) -> None:
    """First, in between or last: 72 bytes for each 256 values do not fit where there are 68."""
    with pytest.raises(
        ConversionError, match=rf"'w' of type 42 has room for .* \({68 * rows} bytes\).*\({72 * rows} bytes\)"
    ):
        opened(tmp_path, older_block_file(names, rows, alignment))


def test_a_truncated_type_42_tensor_is_not_taken_for_the_older_block(tmp_path: Path) -> None:
    whole = gguf([Entry("w", [256, 64], TYPE_42)], [], bytes(64 * 4 * 18))
    opened(tmp_path, whole)
    with pytest.raises(ConversionError, match="download complete"):
        opened(tmp_path, whole[:-1])
