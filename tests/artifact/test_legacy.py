"""Containers of versions 1 and 2: read like version 3, refused by the same kinds of error, upgraded byte for byte."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact import tiny_files, tiny_legacy
from golden import golden, load_json, load_tensors
from ninfer_torch.artifact import ResourceObject, TensorObject, open_artifact, upgrade
from ninfer_torch.errors import ArtifactError, NinferError
from ninfer_torch.models.architectures import architecture_of
from ninfer_torch.tensors import NinferTensor

GOLDEN_FILES = {"v1_mixed": 1, "v2_mixed": 2, "v2_small": 2, "v2_nvfp4_fp8": 2}
NEW_NAMES = {
    "BF16": "bf16",
    "FP32": "fp32",
    "I32": "int32",
    "Q4G64_F16S": "q4_g64_fp16",
    "Q5G64_F16S": "q5_g64_fp16",
    "Q6G64_F16S": "q6_g64_fp16",
    "W8G32_F16S": "q8_g32_fp16",
    "NVFP4": "nvfp4",
    "FP8_E4M3FN_ROW_BF16S": "fp8_e4m3fn_row_bf16",
    "contiguous-le-v1": "contiguous_le_v1",
    "row-split-k128-v1": "row_split_k128_v1",
    "blockscale-k16-m128x4-v1": "block_scale_k16_m128x4_v1",
    "row-scale-v1": "row_scale_v1",
}


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def version(request: pytest.FixtureRequest) -> int:
    return request.param


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def refused(path: Path, kind: str, *parts: str) -> None:
    with pytest.raises(ArtifactError) as caught:
        open_artifact(path)
    assert caught.value.kind == kind, str(caught.value)
    for part in (path.name, *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_golden_files_read_and_decode_exactly(name: str) -> None:
    folder = golden("ninfer", "legacy")
    expected = load_tensors(folder / f"{name}.safetensors")
    with open_artifact(folder / f"{name}.ninfer") as artifact:
        assert artifact.version == GOLDEN_FILES[name] and artifact.artifact_id == "0" * 32
        listed = load_json(folder / "index.json")[name]
        assert list(artifact.objects) == [entry["name"] for entry in listed]
        for entry in listed:
            record = artifact.objects[entry["name"]]
            assert record.bytes == entry["bytes"]
            artifact.read_object(record.id, check=True)
            if isinstance(record, ResourceObject):
                assert record.encoding == "raw_bytes_v1"
                assert artifact.resource(record.id) == bytes(expected[f"resource:{record.id}"].tolist())
                continue
            assert record.shape == tuple(entry["shape"]) and record.divisors == 1
            assert (record.format, record.layout) == (NEW_NAMES[entry["format"]], NEW_NAMES[entry["layout"]])
            for tensor in (artifact.tensor(record.id), artifact.read_tensor(record.id)):
                values = tensor.dequantize() if isinstance(tensor, NinferTensor) else tensor
                wanted = expected[f"tensor:{record.id}"]
                assert torch.equal(words(values.to(wanted.dtype)), words(wanted))


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_golden_files_are_no_whole_models_and_say_so(name: str) -> None:
    artifact = open_artifact(golden("ninfer", "legacy", f"{name}.ninfer"))
    assert artifact.bindings == {} and artifact.uses == ()
    reason = "none of the published models" if name == "v2_small" else "is a published model, but object 'text/layers/"
    assert reason in str(artifact.unbound)
    with pytest.raises(ArtifactError, match=reason) as caught:
        artifact.parameter("text/token_embedding")
    assert caught.value.kind == "reference"
    identity = artifact.provenance["upgraded_from"]
    assert identity["version"] == GOLDEN_FILES[name] and artifact.metadata == {"name": identity["model_id"]}
    assert ("weights_id" in identity) == (artifact.version == 2)


@pytest.mark.parametrize("name", GOLDEN_FILES)
def test_golden_files_upgrade_byte_for_byte(name: str, tmp_path: Path) -> None:
    source = golden("ninfer", "legacy", f"{name}.ninfer")
    upgrade(source, tmp_path / "new.ninfer")
    assert_same_objects(source, tmp_path / "new.ninfer")


def assert_same_objects(source: Path, target: Path) -> None:
    """`target` is version 3 and holds what `source` holds, seen with the library and by hand."""
    blob = source.read_bytes()
    size = int.from_bytes(blob[8:16], "little")
    old = json.loads(blob[16 : 16 + size])
    start = -(-(16 + size) // 4096) * 4096
    new, payload, _ = tiny_files.parse(target)
    identity = old.get("identity", {"model_id": old.get("model_id")})
    assert new["provenance"] == {"upgraded_from": {"version": blob[7], **identity}}
    assert new["components"] and new["bindings"] == {} and new["uses"] == []
    for before, after in zip(old["objects"], new["objects"], strict=True):
        assert (after["id"], after["offset"], after["bytes"]) == (before["name"], before["offset"], before["bytes"])
        assert after.get("format") == NEW_NAMES.get(before.get("format"))
        begin = start + before["offset"]
        content = blob[begin : begin + before["bytes"]]
        assert payload[after["offset"] : after["offset"] + after["bytes"]] == content
    with open_artifact(source) as first, open_artifact(target) as second:
        assert second.version == 3 and second.unbound is None
        assert first.objects == second.objects and first.components == second.components
        assert (first.metadata, first.provenance) == (second.metadata, second.provenance)
        for object_id in first.objects:
            assert first.read_object(object_id) == second.read_object(object_id)


def test_the_base_file_opens(tmp_path: Path, version: int) -> None:
    artifact = open_artifact(tiny_legacy.write(tmp_path / "a.ninfer", version))
    assert artifact.version == version
    tensor = artifact.tensor("w/q8")
    assert isinstance(tensor, NinferTensor)
    np.testing.assert_array_equal(tensor.dequantize().numpy(), tiny_files.Q8_VALUES)
    np.testing.assert_array_equal(words(artifact.tensor("w/bf")).numpy().view(np.uint16), tiny_files.BF_WORDS)
    assert artifact.resource("frontend/tokenizer.json") == tiny_files.NOTE
    assert artifact.components["text"].resources == {
        "tokenizer.json": "frontend/tokenizer.json",
        "chat_template.jinja": "frontend/chat_template.jinja",
    }


def test_objects_alone_are_no_model(tmp_path: Path, version: int) -> None:
    artifact = open_artifact(tiny_legacy.write(tmp_path / "a.ninfer", version))
    with pytest.raises(NinferError, match="cannot be loaded as a model: a container of version .* 'tiny'"):
        architecture_of(artifact)


def test_bytes_after_the_payload_are_ignored(tmp_path: Path, version: int) -> None:
    path = tiny_legacy.write(tmp_path / "a.ninfer", version, data=tiny_legacy.payload() + b"trailing" * 1000)
    with open_artifact(path) as artifact:
        assert artifact.files[0].payload_bytes == len(tiny_legacy.payload())
    upgrade(path, tmp_path / "new.ninfer")
    assert_same_objects(path, tmp_path / "new.ninfer")
    assert tiny_files.parse(tmp_path / "new.ninfer")[1][-1:] == b"\n"


RESOURCE, Q8, BF, LAST = range(4)
Edit = Callable[[dict[str, Any]], object]
REFUSED: dict[str, tuple[Edit, str, str]] = {
    "no objects": (lambda d: d.update(objects=[]), "schema", "objects: found [], expected a non-empty array"),
    "objects missing": (lambda d: d.pop("objects"), "schema", "member 'objects' is missing"),
    "a member of version 3": (lambda d: d.update(bindings={}), "schema", "unknown member 'bindings'"),
    "files": (lambda d: d.update(files=[]), "schema", "unknown member 'files'"),
    "id": (lambda d: d["objects"][Q8].update(id="x"), "schema", "unknown member 'id'"),
    "no name": (lambda d: d["objects"][Q8].pop("name"), "schema", "member 'name' is missing"),
    "empty name": (lambda d: d["objects"][Q8].update(name=""), "schema", "objects[1].name: found ''"),
    "name with NUL": (lambda d: d["objects"][Q8].update(name="a\0b"), "schema", "objects[1].name"),
    "twice the name": (lambda d: d["objects"][BF].update(name="w/q8"), "schema", "unique ids"),
    "divisors": (lambda d: d["objects"][Q8].update(divisors=1), "schema", "unknown member 'divisors'"),
    "shape of a resource": (lambda d: d["objects"][RESOURCE].update(shape=[5]), "schema", "unknown member 'shape'"),
    "kind": (lambda d: d["objects"][BF].update(kind="view"), "schema", "expected 'tensor' or 'resource'"),
    "no layout": (lambda d: d["objects"][BF].pop("layout"), "schema", "member 'layout' is missing"),
    "bytes zero": (lambda d: d["objects"][RESOURCE].update(bytes=0), "schema", "expected an integer from 1"),
    "bytes true": (lambda d: d["objects"][RESOURCE].update(bytes=True), "schema", "expected an integer from 1"),
    "offset negative": (lambda d: d["objects"][BF].update(offset=-256), "schema", "expected an integer from 0"),
    "offset real": (lambda d: d["objects"][BF].update(offset=1280.0), "schema", "expected an integer from 0"),
    "offset too large": (lambda d: d["objects"][BF].update(offset=2**64 - 1), "range", "exceeds 2^64-1"),
    "zero extent": (lambda d: d["objects"][BF].update(shape=[2, 0]), "schema", "shape[1]: found 0"),
    "rank 17": (lambda d: d["objects"][BF].update(shape=[1] * 17), "schema", "rank 17"),
    "overlap": (lambda d: d["objects"][BF].update(offset=768), "range", "begins at byte 768, expected at least 1056"),
    "order": (lambda d: d["objects"].reverse(), "range", "expected at least 1293"),
    "beyond the file": (lambda d: d["objects"][LAST].update(bytes=2), "range", "expected at most the payload's 1293"),
    "format of version 3": (lambda d: d["objects"][BF].update(format="bf16"), "encoding", "a name of container"),
    "layout of version 3": (
        lambda d: d["objects"][BF].update(layout="contiguous_le_v1"),
        "encoding",
        "expected one of contiguous-le-v1",
    ),
    "encoding of version 3": (
        lambda d: d["objects"][RESOURCE].update(encoding="raw_bytes_v1"),
        "encoding",
        "expected one of raw-bytes-v1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_illegal_directories_are_refused(tmp_path: Path, version: int, case: str) -> None:
    edit, kind, message = REFUSED[case]
    value = tiny_legacy.root(version)
    edit(value)
    refused(tiny_legacy.write(tmp_path / "a.ninfer", version, value), kind, message)


@pytest.mark.parametrize(
    ("version", "members", "message"),
    [
        (1, {"identity": tiny_legacy.IDENTITY}, "member 'model_id' is missing"),
        (1, {"model_id": "m", "identity": tiny_legacy.IDENTITY}, "unknown member 'identity'"),
        (1, {"model_id": ""}, "model_id: found '', expected a non-empty string"),
        (1, {"model_id": 7}, "model_id: found 7, expected a non-empty string"),
        (2, {"model_id": "m"}, "member 'identity' is missing"),
        (2, {"identity": "m"}, "identity: found 'm', expected an object"),
        (2, {"identity": {"model_id": "m"}}, "identity: member 'weights_id' is missing"),
        (2, {"identity": {**tiny_legacy.IDENTITY, "target": "t"}}, "identity: unknown member 'target'"),
        (2, {"identity": {"model_id": "", "weights_id": "w"}}, "identity.model_id: found ''"),
        (2, {"identity": {"model_id": "m", "weights_id": None}}, "identity.weights_id: found None"),
    ],
)
def test_illegal_identities_are_refused(tmp_path: Path, version: int, members: dict[str, Any], message: str) -> None:
    value = {**members, "objects": tiny_legacy.OBJECTS}
    refused(tiny_legacy.write(tmp_path / "a.ninfer", version, value), "schema", message)


def test_a_version_1_model_id_need_not_be_an_id(tmp_path: Path) -> None:
    value = {"model_id": "a\0b", "objects": tiny_legacy.OBJECTS}
    path = tiny_legacy.write(tmp_path / "a.ninfer", 1, value)
    assert open_artifact(path).metadata == {}
    upgrade(path, tmp_path / "new.ninfer")
    assert_same_objects(path, tmp_path / "new.ninfer")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xef\xbb\xbf{}", "byte-order mark"),
        (b'{"objects":[],"objects":[]}', "'objects' appears more than once"),
        (b"{}\0", "not one JSON value"),
        (b"\xff{}", "not UTF-8"),
        (b"[" * 20_000, "levels deep"),
        (b'{"model_id":1e999}', "overflows binary64"),
    ],
)
def test_illegal_json_is_refused(tmp_path: Path, version: int, text: bytes, message: str) -> None:
    refused(tiny_legacy.write(tmp_path / "a.ninfer", version, text=text), "json", message)


def test_illegal_headers_are_refused(tmp_path: Path, version: int) -> None:
    path = tiny_legacy.write(tmp_path / "a.ninfer", version)
    whole = path.read_bytes()
    path.write_bytes(whole[:15])
    refused(path, "framing", "15 bytes long, expected at least 16")
    for size in (0, len(whole) - 15, 2**64 - 1):
        path.write_bytes(whole[:8] + size.to_bytes(8, "little") + whole[16:])
        refused(path, "framing", f"json_bytes is {size}, expected 1 to {len(whole) - 16}")


def test_a_file_cut_anywhere_is_refused_at_open(tmp_path: Path, version: int) -> None:
    path = tiny_legacy.write(tmp_path / "a.ninfer", version)
    whole = path.read_bytes()
    for length in range(0, len(whole), len(whole) // 16):
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactError) as caught:
            open_artifact(path)
        assert caught.value.kind in ("framing", "range")
    path.write_bytes(whole[:-1])
    refused(path, "range", "expected at most the payload's 1292 bytes")


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (Q8, {"format": "T5G128_F16S"}, "T5G128_F16S"),
        (Q8, {"layout": "row-split-k256-v1"}, "row-split-k256-v1"),
        (Q8, {"layout": "contiguous-le-v1"}, "contiguous_le_v1"),
        (Q8, {"bytes": 543}, "bytes is 543, expected 544"),
        (Q8, {"offset": 520}, "offset is 520, expected a multiple of 256"),
        (LAST, {"encoding": "zip-v1"}, "zip-v1"),
    ],
)
def test_an_object_that_cannot_be_read_harms_no_other(
    tmp_path: Path, version: int, place: int, change: dict[str, Any], message: str
) -> None:
    value = tiny_legacy.root(version)
    value["objects"][place].update(change)
    path = tiny_legacy.write(tmp_path / "a.ninfer", version, value)
    artifact = open_artifact(path)
    broken = list(artifact.objects)[place]
    for object_id in artifact.objects:
        if object_id != broken:
            artifact.read_object(object_id, check=True)
    asks: list[Callable[[], object]] = [
        lambda: artifact.read_object(broken),
        lambda: upgrade(path, tmp_path / "new.ninfer"),
    ]
    if isinstance(artifact.objects[broken], TensorObject):
        asks.append(lambda: artifact.tensor(broken))
    for ask in asks:
        with pytest.raises(ArtifactError, match=message) as caught:
            ask()
        assert caught.value.kind == "encoding" and broken in str(caught.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ninfer"]


def test_upgrading_is_all_or_nothing(tmp_path: Path, version: int) -> None:
    path = tiny_legacy.write(tmp_path / "a.ninfer", version)

    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        upgrade(path, tmp_path / "new.ninfer", progress=interrupt)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ninfer"]
    (tmp_path / "new.ninfer").write_bytes(b"mine")
    with pytest.raises(ArtifactError, match="already exists"):
        upgrade(path, tmp_path / "new.ninfer")
    with pytest.raises(ArtifactError, match="already exists"):
        upgrade(path, path)
    assert (tmp_path / "new.ninfer").read_bytes() == b"mine"


def test_version_3_is_not_upgraded_again(tmp_path: Path) -> None:
    path = tiny_files.write(tmp_path / "a.ninfer")
    with pytest.raises(ArtifactError, match="is container version 3 already") as caught:
        upgrade(path, tmp_path / "new.ninfer")
    assert caught.value.kind == "framing" and not (tmp_path / "new.ninfer").exists()


def test_upgrading_into_parts(tmp_path: Path, version: int) -> None:
    path = tiny_legacy.write(tmp_path / "a.ninfer", version, data=tiny_legacy.payload())
    value = tiny_legacy.root(version)
    value["objects"].append(
        {"name": "r", "kind": "resource", "encoding": "raw-bytes-v1", "offset": 1293, "bytes": 20_000}
    )
    tiny_legacy.write(path, version, value, data=tiny_legacy.payload() + bytes(range(250)) * 80)
    upgrade(path, tmp_path / "new.ninfer", max_file_bytes=12_288, artifact_id="ab" * 16)
    assert_same_objects(path, tmp_path / "new.ninfer")
    assert open_artifact(tmp_path / "new.ninfer").artifact_id == "ab" * 16
    assert len(open_artifact(tmp_path / "new.ninfer").files) > 1


OBJECT = st.tuples(st.booleans(), st.integers(1, 700), st.integers(0, 300))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 2), st.lists(OBJECT, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_any_objects_in_any_places(version: int, layout: list[tuple[bool, int, int]], random: Any) -> None:
    """Whatever the sizes and gaps, every object is the bytes that were put there, before and after an upgrade."""
    records: list[dict[str, Any]] = []
    data = bytearray()
    for index, (is_tensor, count, gap) in enumerate(layout):
        record: dict[str, Any] = {"name": f"object {index}", "offset": len(data) + gap, "bytes": count}
        if is_tensor:
            record["offset"] = -(-record["offset"] // 256) * 256
            record.update(kind="tensor", shape=[count], format="BF16", layout="contiguous-le-v1", bytes=2 * count)
        else:
            record.update(kind="resource", encoding="raw-bytes-v1")
        data += random.randbytes(record["offset"] + record["bytes"] - len(data))
        records.append(record)
    with tempfile.TemporaryDirectory() as folder:
        path, new = Path(folder) / "a.ninfer", Path(folder) / "new.ninfer"
        tiny_legacy.write(path, version, {**tiny_legacy.root(version), "objects": records}, data=bytes(data))
        upgrade(path, new)
        assert_same_objects(path, new)
        with open_artifact(path) as artifact:
            for record in records:
                content = bytes(data[record["offset"] : record["offset"] + record["bytes"]])
                assert artifact.read_object(record["name"]) == content
