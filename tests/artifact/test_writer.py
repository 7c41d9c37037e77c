"""Writing: exact layout, exact cuts, every kind of payload, checked records, constant memory, faithful copies."""

from __future__ import annotations

import json
import math
import os
import re
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact import tiny_files as tiny
from ninfer_torch.artifact import ArtifactWriter, open_artifact, rewrite
from ninfer_torch.errors import ArtifactError, ConversionError, FormatError, LayoutError, NinferError
from ninfer_torch.layouts import encoded_bytes

PAGE = 4096


def up(value: int, step: int) -> int:
    return math.ceil(value / step) * step


def fill(writer: ArtifactWriter, bf16: Any = None) -> ArtifactWriter:
    """Declare the base artifact."""
    writer.component("text", {"hidden_size": 128, "eps": 1e-6}, resources={"note": "r.note"})
    writer.resource("r.note", tiny.NOTE)
    writer.tensor("w.q8", "q8_g32_fp16", (4, 128), tiny.payload()[256:800])
    writer.tensor("w.bf", "bf16", [2, 3], tiny.BF_WORDS if bf16 is None else bf16)
    writer.tensor("w.s", "fp32", [], tiny.SCALAR)
    writer.bind("text/q8", "w.q8")
    writer.bind("text/rows", parts=[("w.q8", 128, 384)])
    writer.bind("text/bf", "w.bf")
    writer.bind("text/last", parts=[("w.bf", 5, 6), ("w.bf", 0, 2)])
    writer.use("text/q8", "text/x", "AllowA8", {"activation_input_divisor": "w.s"})
    writer.metadata["name"] = "tiny"
    writer.provenance["source"] = "made by hand"
    return writer


def test_the_base_artifact_is_the_one_the_other_writer_makes(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a.ninfer", artifact_id=tiny.ARTIFACT_ID) as writer:
        assert fill(writer).planned_bytes == 1284
        assert not list(tmp_path.iterdir())
    text = tiny.json_text(tiny.DIRECTORY)
    padded = text.ljust(up(32 + len(text), PAGE) - 32)
    assert (tmp_path / "a.ninfer").read_bytes() == tiny.entry_bytes(padded, tiny.payload())
    assert [path.name for path in tmp_path.iterdir()] == ["a.ninfer"]


def test_worked_example_of_the_specification(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a.ninfer") as writer:
        writer.component("text", {})
        writer.resource("r.note", b"abcde")
        writer.tensor("w.a", "bf16", [2, 3], bytes(range(12)))
        writer.bind("text/a", "w.a")
        writer.bind("text/row1", parts=[("w.a", 3, 6)])
    blob = (tmp_path / "a.ninfer").read_bytes()
    assert blob[:16] == bytes.fromhex("4e494e464552 0003 e00f000000000000")
    assert len(blob) == 4364
    assert blob[4096:4101] == b"abcde" and not any(blob[4101:4352]) and blob[4352:] == bytes(range(12))


SHAPES = {
    "bf16": st.lists(st.integers(1, 5), max_size=3),
    "int32": st.lists(st.integers(1, 5), max_size=3),
    "q4_g64_fp16": st.tuples(st.integers(1, 4), st.integers(1, 200)),
    "q6_g64_fp16": st.tuples(st.integers(1, 4), st.integers(1, 200)),
    "fp8_e4m3fn_row_bf16": st.tuples(st.integers(1, 9), st.integers(1, 40)),
    "fp8_e4m3fn_row_fp16": st.tuples(st.integers(1, 9), st.integers(1, 40)),
    "gguf_q4_0": st.tuples(st.integers(1, 4), st.integers(1, 3).map(lambda blocks: 32 * blocks)),
}
OBJECTS = st.lists(
    st.one_of(
        st.integers(1, 700).map(lambda size: ("resource", size)),
        st.sampled_from(sorted(SHAPES)).flatmap(lambda name: SHAPES[name].map(lambda shape: (name, tuple(shape)))),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(objects=OBJECTS, limit=st.none() | st.integers(3 * PAGE, 10 * PAGE), seed=st.integers(0, 2**32 - 1))
def test_any_objects_come_back_in_order_and_in_place(
    tmp_path_factory: pytest.TempPathFactory, objects: list[tuple[str, Any]], limit: int | None, seed: int
) -> None:
    path = tmp_path_factory.mktemp("out") / "m.ninfer"
    dice = np.random.default_rng(seed)
    contents: list[bytes] = []
    with ArtifactWriter(path, artifact_id="0f" * 16, max_file_bytes=limit) as writer:
        writer.component("text", {})
        for index, (format, shape) in enumerate(objects):
            size = shape if format == "resource" else encoded_bytes(format, shape)
            contents.append(dice.bytes(size))
            if format == "resource":
                writer.resource(f"o{index}", contents[-1])
            else:
                writer.tensor(f"o{index}", format, shape, contents[-1])
    value, payload, artifact_id = tiny.parse(path)
    assert artifact_id == b"\x0f" * 16
    end, expected = 0, b""
    for record, content, (format, _) in zip(value["objects"], contents, objects, strict=True):
        offset = end if format == "resource" else up(end, 256)
        assert record["offset"] == offset and record["bytes"] == len(content)
        expected = expected.ljust(offset, b"\0") + content
        end = offset + len(content)
    assert payload == expected
    check_cut(path, value, len(payload), limit)
    opened = open_artifact(path)
    assert [opened.read_object(f"o{index}") for index in range(len(objects))] == contents


def check_cut(path: Path, value: dict[str, Any], payload: int, limit: int | None) -> None:
    """The file table against spec/container.md 11, from the finished file."""
    blob = path.read_bytes()
    json_bytes = int.from_bytes(blob[8:16], "little")
    start = 32 + json_bytes
    text = blob[32:start]
    assert start % PAGE == 0 and text.rstrip(b" ") == tiny.json_text(value)
    sizes = [record["payload_bytes"] for record in value["files"]]
    if limit is None or start + payload <= limit:
        assert sizes == [payload] and start == up(32 + len(text.rstrip(b" ")), PAGE)
        return
    entry_cap, part_cap = (limit - start) // PAGE * PAGE, (limit - PAGE) // PAGE * PAGE
    assert sizes[0] == entry_cap and all(size == part_cap for size in sizes[1:-1]) and 0 < sizes[-1] <= part_cap
    names = [f"m.ninfer.part-{index:04d}" for index in range(1, len(sizes))]
    assert [record["path"] for record in value["files"]] == [None, *names]
    assert sorted(os.listdir(path.parent)) == ["m.ninfer", *names]


def test_a_file_table_that_outgrows_its_page_is_planned_again(tmp_path: Path) -> None:
    # Padding brings the single-file text to just under a page, so that the names of the parts spill over.
    with ArtifactWriter(tmp_path / "m.ninfer", max_file_bytes=4 * PAGE) as writer:
        writer.component("text", {"pad": "x" * 3700})
        writer.tensor("w", "int32", [20 * PAGE // 4], bytes(20 * PAGE))
    value, payload, _ = tiny.parse(tmp_path / "m.ninfer")
    single = value | {"files": [{"path": None, "payload_bytes": 20 * PAGE}]}
    assert len(tiny.json_text(single)) <= PAGE - 32 < len(tiny.json_text(value))
    assert len(payload) == 20 * PAGE and value["files"][0]["payload_bytes"] == 2 * PAGE
    check_cut(tmp_path / "m.ninfer", value, len(payload), 4 * PAGE)


@pytest.mark.parametrize("limit", [1, PAGE, 2 * PAGE - 1])
def test_limits_without_room_are_refused(tmp_path: Path, limit: int) -> None:
    writer = fill(ArtifactWriter(tmp_path / "a.ninfer", max_file_bytes=limit))
    writer.resource("big", bytes(2 * PAGE))
    with pytest.raises(ArtifactError, match=f"max_file_bytes = {limit}") as caught:
        writer.finish()
    assert caught.value.kind == "file" and not list(tmp_path.iterdir())


def test_every_kind_of_payload_is_the_same_bytes(tmp_path: Path) -> None:
    source = open_artifact(tiny.write(tmp_path / "source.ninfer"))
    data = tiny.payload()[256:800]
    reused = bytearray(17)

    def chunks() -> Iterator[memoryview]:
        for start in range(0, len(data), 17):
            piece = data[start : start + 17]
            reused[: len(piece)] = piece
            yield memoryview(reused)[: len(piece)]

    payloads = [
        data,
        memoryview(data),
        np.frombuffer(data, dtype=np.uint16).reshape(2, -1),
        source.tensor("w.q8"),
        chunks,
        lambda: [b"", data[:1], np.frombuffer(data[1:], dtype=np.uint8)],
    ]
    with ArtifactWriter(tmp_path / "a.ninfer") as writer:
        writer.component("text", {})
        for index, payload in enumerate(payloads):
            writer.tensor(f"w{index}", "q8_g32_fp16", (4, 128), payload)
        writer.tensor("rows", "q8_g32_fp16", (2, 128), source.parameter("text/rows"))
        writer.tensor("plain", "bf16", (2, 3), source.tensor("w.bf"))
    written = open_artifact(tmp_path / "a.ninfer")
    for index in range(len(payloads)):
        assert written.read_object(f"w{index}") == data
    rows = written.tensor("rows")
    assert np.array_equal(rows.dequantize().numpy(), tiny.Q8_VALUES[1:3])
    assert written.read_object("plain") == tiny.BF_WORDS.tobytes()


def test_a_tensor_is_never_converted(tmp_path: Path) -> None:
    writer = fill(ArtifactWriter(tmp_path / "a.ninfer"), bf16=torch.zeros(2, 3))
    with pytest.raises(ConversionError, match="cast_direct"):
        writer.finish()
    assert not list(tmp_path.iterdir())


def test_declarations_are_checked_at_once(tmp_path: Path) -> None:
    writer = fill(ArtifactWriter(tmp_path / "a.ninfer"))
    refusals: list[tuple[Callable[[], Any], type[NinferError], str]] = [
        (lambda: writer.tensor("x", "q3", (1, 1), b""), FormatError, "unknown numeric format"),
        (lambda: writer.tensor("x", "q8_g32_fp16", (4,), b""), LayoutError, "matrices"),
        (lambda: writer.tensor("x", "bf16", (4,), bytes(7)), ArtifactError, "has 7 bytes, expected 8"),
        (lambda: writer.tensor("x", "bf16", (4,), torch.zeros(5)), ArtifactError, "declared as"),
        (lambda: writer.tensor("w.q8", "bf16", (4,), bytes(8)), ArtifactError, "declared twice"),
        (lambda: writer.bind("text/q8", "w.q8"), ArtifactError, "declared twice"),
        (lambda: writer.bind("x"), ArtifactError, "either an object id or parts"),
        (lambda: writer.component("text", {}), ArtifactError, "declared twice"),
        (lambda: writer.component("x", {}, proposal={"rows": 1}), ArtifactError, "expected domain and rows"),
        (lambda: ArtifactWriter(tmp_path / "b", artifact_id="00"), ArtifactError, "16 bytes"),
        (lambda: ArtifactWriter(tmp_path / "b", artifact_id="zz" * 16), ArtifactError, "16 bytes"),
    ]
    for call, kind, message in refusals:
        with pytest.raises(kind, match=message):
            call()
    writer.finish()
    assert tiny.parse(tmp_path / "a.ninfer")[1] == tiny.payload()
    for again in (writer.finish, lambda: writer.resource("late", b"x"), lambda: writer.use("text/bf", "x")):
        with pytest.raises(ArtifactError, match="finished"):
            again()


@pytest.mark.parametrize(
    ("spoil", "kind", "place"),
    [
        (lambda w: w.bind("x", "absent"), "reference", "bindings['x'].object"),
        (lambda w: w.bind("x", parts=[("w.bf", 0, 7)]), "range", "bindings['x'].parts[0].range"),
        (lambda w: w.bind("x", parts=[]), "schema", "bindings['x'].parts"),
        (lambda w: w.use("absent", "i"), "reference", "uses[1].parameter"),
        (lambda w: w.use("text/q8", "text/x"), "schema", "uses[1]"),
        (lambda w: w.use("text/q8", "i", "A8"), "schema", "uses[1].activation_policy"),
        (lambda w: w.component("mtp", {}, target="vision"), "reference", "components['mtp'].target"),
        (lambda w: w.component("mtp", {"x": math.nan}), "json", "components.mtp.config.x"),
        (lambda w: w.component("mtp", {}, proposal={"domain": "full"}), "schema", "components['mtp']"),
        (lambda w: w.resource("r.empty", b""), "schema", "objects[4] 'r.empty'.bytes"),
        (lambda w: w.resource("", b"x"), "schema", "objects[4].id"),
        (lambda w: w.metadata.update(name=""), "schema", "metadata.name"),
        (lambda w: w.provenance.update(when=object()), "json", "provenance.when"),
    ],
)
def test_what_a_reader_would_refuse_is_not_written(
    tmp_path: Path, spoil: Callable[[ArtifactWriter], Any], kind: str, place: str
) -> None:
    writer = fill(ArtifactWriter(tmp_path / "a.ninfer"))
    spoil(writer)
    with pytest.raises(ArtifactError, match=re.escape(place)) as caught:
        writer.finish()
    assert caught.value.kind == kind and not list(tmp_path.iterdir())


def test_an_artifact_needs_an_object(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="at least one"):
        ArtifactWriter(tmp_path / "a.ninfer").finish()


def test_streaming_takes_constant_memory_and_reports_progress(tmp_path: Path) -> None:
    count, size = 6, 1 << 23
    buffer = memoryview(bytearray(1 << 20))

    def produce() -> Iterator[memoryview]:
        for index in range(size // len(buffer)):
            buffer[:4] = index.to_bytes(4, "little")
            yield buffer

    done: list[int] = []
    writer = ArtifactWriter(tmp_path / "a.ninfer", max_file_bytes=20 << 20)
    writer.component("text", {})
    for index in range(count):
        writer.tensor(f"w{index}", "int32", [size // 4], produce)
    tracemalloc.start()
    writer.finish(done.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(done) == writer.planned_bytes == count * size and peak < 1 << 20
    last = open_artifact(tmp_path / "a.ninfer").tensor(f"w{count - 1}")
    assert last[:: 1 << 18].tolist() == list(range(8))


def test_rewriting_keeps_what_it_cannot_interpret(tmp_path: Path) -> None:
    value = tiny.directory()
    value["objects"][1] |= {"format": "t5_g128_fp16", "layout": "ternary_row_k128_v1"}
    value["objects"][0]["encoding"] = "packed_bytes_v9"
    value["uses"] += [
        {
            "parameter": "text/bf",
            "input": "a",
            "auxiliaries": {"unknown_role": {"parts": [{"object": "w.s", "range": [0, 1]}]}},
        },
        {"parameter": "text/bf", "input": "b", "auxiliaries": {}},
        {"parameter": "text/bf", "input": "c"},
    ]
    value["components"]["mtp"] = {"config": {"nested": [None, {"é": "数"}]}, "target": "text"}
    text = tiny.json_text(value).replace(b'"eps":1e-06', b'"eps":1e-6,"one":1.50,"big":' + b"7" * 40)
    rewrite(open_artifact(tiny.write(tmp_path / "a.ninfer", text=text)), tmp_path / "b.ninfer")
    written = (tmp_path / "b.ninfer").read_bytes()
    assert written[32 : 32 + len(text)] == text
    assert tiny.parse(tmp_path / "b.ninfer")[1] == tiny.payload()


def test_rewriting_closes_unusual_gaps(tmp_path: Path) -> None:
    value = tiny.directory()
    shifts = [7, 1024, 2048, 4096]
    data = bytearray(b"\xee" * 8000)
    for record, shift in zip(value["objects"], shifts, strict=True):
        old = record["offset"]
        record["offset"] = old + shift
        data[old + shift : old + shift + record["bytes"]] = tiny.payload()[old : old + record["bytes"]]
    value["files"][0]["payload_bytes"] = len(data)
    source = open_artifact(tiny.write(tmp_path / "a.ninfer", value, data=bytes(data)))
    rewrite(source, tmp_path / "b.ninfer")
    written, payload, _ = tiny.parse(tmp_path / "b.ninfer")
    assert written == tiny.DIRECTORY and payload == tiny.payload()


def test_rewriting_an_artifact_with_a_missing_part_leaves_nothing(tmp_path: Path) -> None:
    path = tiny.write_set(tmp_path / "a.ninfer", [512, 772])
    (tmp_path / "a.ninfer.p1").unlink()
    with pytest.raises(ArtifactError, match="a.ninfer.p1"):
        rewrite(open_artifact(path), tmp_path / "b.ninfer")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ninfer"]


def test_random_ids_differ(tmp_path: Path) -> None:
    ids = set()
    for index in range(3):
        fill(ArtifactWriter(tmp_path / f"{index}.ninfer")).finish()
        ids.add(open_artifact(tmp_path / f"{index}.ninfer").artifact_id)
    assert len(ids) == 3


def test_the_directory_is_plain_json(tmp_path: Path) -> None:
    fill(ArtifactWriter(tmp_path / "a.ninfer")).finish()
    blob = (tmp_path / "a.ninfer").read_bytes()
    assert json.loads(blob[32 : 32 + int.from_bytes(blob[8:16], "little")]) == tiny.DIRECTORY
