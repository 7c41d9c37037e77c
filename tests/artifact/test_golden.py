"""Artifacts written by NInfer: read word for word, and written again byte for byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from golden import GOLDEN, golden, load_json, load_tensors
from ninfer_torch.artifact import Artifact, TensorObject, open_artifact, rewrite
from ninfer_torch.errors import ArtifactError, UnsupportedOperation
from ninfer_torch.formats import FORMATS
from ninfer_torch.tensors import NinferTensor

MODELS = [
    "qwen3_5_dense/bf16",
    "qwen3_5_dense/groupwise",
    "qwen3_5_dense/mixed",
    "qwen3_5_gguf_columns/gguf_columns",
    "qwen3_5_moe/groupwise",
    "qwen3_5_moe/mixed",
    "qwen3_5_moe_nvfp4/nvfp4",
    "qwen3_5_rotated/rotated",
    "qwen3_5_vision_mtp/groupwise",
    "qwen3_5_vision_mtp/mixed",
]
WRITTEN = [
    *(f"formats/{name}" for name in FORMATS),
    "import/import",
    *(f"multi/{name}" for name in ("multi", "multi_parts", "multi_twoparts")),
    *(f"models/{name}" for name in MODELS),
]
SHARDED = ["multi", "multi_parts", "multi_twoparts", "multi_odd_segments"]

# A binding of multi.ninfer that no packed tensor can hold.
UNPACKABLE = {"test/mid_row"}


def artifact(name: str) -> Path:
    return golden("ninfer", f"{name}.ninfer")


def words(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, so that NaNs and signed zeros compare."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if isinstance(tensor, NinferTensor) else tensor


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_reads_and_decodes_exactly(name: str) -> None:
    path = artifact(f"formats/{name}")
    expected = load_tensors(path.with_suffix(".safetensors"))
    with open_artifact(path) as opened:
        for object_id, record in opened.objects.items():
            assert isinstance(record, TensorObject) and record.format == name
            tensor = opened.tensor(object_id)
            assert tuple(tensor.shape) == record.shape == tuple(expected[object_id].shape)
            if FORMATS[name].quantized:
                assert torch.equal(words(tensor.dequantize()), words(expected[object_id]))
            elif f"{object_id}.words" in expected:
                assert torch.equal(words(tensor), words(expected[f"{object_id}.words"]))
            else:
                assert torch.equal(tensor, expected[object_id])
            opened.read_object(object_id, check=True)


@pytest.mark.parametrize("name", SHARDED)
def test_bindings_auxiliaries_and_resources_of_multi(name: str) -> None:
    expected = load_tensors(golden("ninfer", "multi", "multi.safetensors"))
    opened = open_artifact(artifact(f"multi/{name}"))
    assert {key.partition(":")[2] for key in expected if key.startswith("binding:")} == set(opened.bindings)
    for key, value in expected.items():
        kind, _, rest = key.partition(":")
        if kind == "resource":
            assert opened.resource(rest) == bytes(value.tolist())
        elif kind == "auxiliary":
            use, _, role = rest.rpartition(":")
            parameter, _, input = use.partition("@")
            found = opened.auxiliary(parameter, input, role)
            assert torch.equal(found.to(value.dtype), value)
        else:
            check_binding(opened, rest, value)


def check_binding(opened: Artifact, name: str, value: torch.Tensor) -> None:
    if value.dtype == torch.int32:
        assert torch.equal(opened.parameter(name), value)
        with pytest.raises(UnsupportedOperation, match="holds integers"):
            opened.dequantize_parameter(name)
        return
    assert torch.equal(words(opened.dequantize_parameter(name).reshape(-1)), words(value.reshape(-1)))
    if name in UNPACKABLE:
        with pytest.raises(UnsupportedOperation, match="dequantize"):
            opened.parameter(name)
        return
    found = values(opened.parameter(name)).float()
    assert torch.equal(words(found.reshape(-1)), words(value.reshape(-1)))
    if value.dim() == 2:
        assert found.shape == value.shape


def test_policies_come_from_uses() -> None:
    opened = open_artifact(artifact("multi/multi"))

    def policy(name: str, input: str | None = None) -> str:
        tensor = opened.parameter(name, input=input)
        assert isinstance(tensor, NinferTensor)
        return tensor.policy

    assert policy("text/layers/3/attention/gate") == "AllowA8"
    assert policy("text/layers/3/attention/query") == "A16Only"
    assert policy("text/layers/0/moe/experts/0/up") == "AllowA4"
    assert policy("text/output_head") == "A16Only"  # two uses, none asked for
    assert policy("text/output_head", "mtp/final_hidden") == "AllowA8"
    assert policy("text/token_embedding", "test/no_policy") == "A16Only"
    with pytest.raises(ArtifactError, match="no use of parameter") as caught:
        opened.parameter("text/output_head", input="nowhere")
    assert caught.value.kind == "reference"


def test_directory_of_multi_equals_its_description() -> None:
    described = load_json(golden("ninfer", "multi", "multi.json"))
    opened = open_artifact(artifact("multi/multi"))
    assert opened.artifact_id == described["artifact_id"]
    assert opened.metadata == described["metadata"] and opened.provenance == described["provenance"]
    assert {name: dict(record.config) for name, record in opened.components.items()} == {
        name: record["config"] for name, record in described["components"].items()
    }
    assert opened.components["vision"].target == "text"
    proposal = opened.components["text"].proposal
    assert proposal is not None and (proposal.domain, proposal.rows) == ("indexed", 3)
    for object_id, digest in described["object_sha256"].items():
        assert hashlib.sha256(opened.read_object(object_id)).hexdigest() == digest


@pytest.mark.parametrize("name", SHARDED)
def test_both_ways_of_reading_agree(name: str) -> None:
    opened = open_artifact(artifact(f"multi/{name}"))
    for object_id, record in opened.objects.items():
        if isinstance(record, TensorObject):
            mapped, read = opened.tensor(object_id), opened.read_tensor(object_id)
            if isinstance(mapped, NinferTensor):
                assert isinstance(read, NinferTensor)
                assert all(
                    torch.equal(words(mapped.planes[plane]), words(read.planes[plane])) for plane in mapped.planes
                )
            else:
                assert torch.equal(words(mapped), words(read))


@pytest.mark.parametrize("name", MODELS)
def test_bound_parameters_of_models_have_the_recorded_hashes(name: str) -> None:
    folder, _, recipe = name.partition("/")
    recorded = load_json(golden("ninfer", "models", folder, "index.json"))["recipes"][recipe]["binding_sha256_float32"]
    opened = open_artifact(artifact(f"models/{name}"))
    assert set(recorded) == set(opened.bindings)
    for parameter, digest in recorded.items():
        dense = opened.dequantize_parameter(parameter)
        assert hashlib.sha256(dense.contiguous().numpy().tobytes()).hexdigest() == digest


@pytest.mark.parametrize("name", WRITTEN)
def test_rewriting_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    source = artifact(name)
    opened = open_artifact(source)
    # Where a set has parts, its entry is full: its size is a limit that cuts at the same places.
    limit = source.stat().st_size if len(opened.files) > 1 else None
    rewrite(opened, tmp_path / source.name, artifact_id=opened.artifact_id, max_file_bytes=limit)
    names = {source.name, *(str(record.path) for record in opened.files[1:])}
    assert {path.name for path in tmp_path.iterdir()} == names
    for part in names:
        assert (tmp_path / part).read_bytes() == (source.parent / part).read_bytes()


def test_rewriting_without_an_id_changes_only_the_id(tmp_path: Path) -> None:
    source = artifact("multi/multi")
    opened = open_artifact(source)
    rewrite(opened, tmp_path / source.name)
    written, original = (tmp_path / source.name).read_bytes(), source.read_bytes()
    assert written[:16] + original[16:32] + written[32:] == original
    assert written[16:32] != original[16:32]


def test_hand_cut_segments_are_read_and_rewritten_in_one_piece(tmp_path: Path) -> None:
    rewrite(open_artifact(artifact("multi/multi_odd_segments")), tmp_path / "joined.ninfer")
    joined, single = open_artifact(tmp_path / "joined.ninfer"), open_artifact(artifact("multi/multi"))
    assert joined.objects == single.objects and joined.uses == single.uses
    for object_id in single.objects:
        assert joined.read_object(object_id) == single.read_object(object_id)


def test_the_list_of_written_artifacts_is_complete() -> None:
    golden("ninfer")
    present = {
        str(path.relative_to(GOLDEN / "ninfer").with_suffix(""))
        for folder in ("formats", "import", "models", "multi")
        for path in (GOLDEN / "ninfer" / folder).rglob("*.ninfer")
    }
    assert present == {*WRITTEN, "multi/multi_odd_segments"}
