"""Published version 2 files at full size, without their payload: what their objects mean as version 3 parameters."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from artifact import published_legacy as old
from artifact import tiny_legacy
from golden import golden
from ninfer_torch.artifact import Artifact, Directory, Part, TensorObject, open_artifact
from ninfer_torch.artifact import legacy as legacy_reader
from ninfer_torch.artifact.legacy_models import PublishedModel
from ninfer_torch.artifact.schema import dump_directory, parse_directory
from ninfer_torch.artifact.upgrade import upgrade
from ninfer_torch.errors import ArtifactError
from ninfer_torch.tensors import NinferTensor


@dataclass(frozen=True)
class Published:
    """One row of the table in spec/container.md 13.3."""

    model_id: str
    weights_id: str
    objects: Callable[[], list[dict[str, Any]]]
    count: int
    parameters: int
    components: tuple[str, ...]


DENSE = ("text", "vision", "mtp")
FILES = {
    "3.6-27b": Published("qwen3.6-27b", "groupwise-int", old.dense, 1124, 1422, DENSE),
    "3.6-27b-nvfp4": Published("qwen3.6-27b", "nvfp4", old.dense_nvfp4, 1307, 1422, DENSE),
    "3.8-27b": Published("qwen3.8-27b", "groupwise-int", old.dense, 1124, 1422, DENSE),
    "3.8-27b-dflash2": Published(
        "qwen3.8-27b", "nvfp4", lambda: old.dense(dflash2=True), 1190, 1513, (*DENSE, "dflash2")
    ),
    "3.6-35b": Published("qwen3.6-35b-a3b", "groupwise-int", old.mixture, 940, 32713, (*DENSE, "dflash")),
}


@pytest.fixture(scope="module", params=FILES)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Published, Artifact]:
    file = FILES[request.param]
    path = tmp_path_factory.mktemp("published") / "model.ninfer"
    tiny_legacy.write_sparse(path, {"model_id": file.model_id, "weights_id": file.weights_id}, file.objects())
    begin = time.perf_counter()
    artifact = open_artifact(path)
    assert time.perf_counter() - begin < 10
    return file, artifact


def test_every_object_becomes_its_parameters(published: tuple[Published, Artifact]) -> None:
    file, artifact = published
    assert artifact.unbound is None and artifact.version == 2
    assert len(artifact.objects) == file.count
    assert len(artifact.bindings) == file.parameters
    assert tuple(artifact.components) == file.components
    assert artifact.metadata == {"name": file.model_id}
    proposal = artifact.components["text"].proposal
    assert proposal is not None and (proposal.domain, proposal.rows) == ("indexed", 131072)
    assert all(artifact.components[name].target == "text" for name in file.components[1:])
    assert list(artifact.components["text"].resources) == old.RESOURCES[:4]
    assert list(artifact.components["vision"].resources) == old.RESOURCES[4:]
    for object_id in artifact.objects:
        artifact.check_object(object_id)


def test_the_parameters_of_an_object_cover_it_exactly(published: tuple[Published, Artifact]) -> None:
    _, artifact = published
    ranges: dict[str, set[tuple[int, int]]] = {}
    for name, binding in artifact.bindings.items():
        for object_id in binding.objects:
            record = artifact.objects[object_id]
            assert isinstance(record, TensorObject)
            parts = binding.parts or (Part(object_id, 0, record.elements),)
            assert len(parts) == 1, name
            ranges.setdefault(object_id, set()).add((parts[0].begin, parts[0].end))
    auxiliaries = {
        object_id for use in artifact.uses for item in use.auxiliaries.values() for object_id in item.objects
    }
    for object_id, record in artifact.objects.items():
        if not isinstance(record, TensorObject) or object_id in auxiliaries:
            continue
        ends = [0]
        for begin, end in sorted(ranges[object_id]):
            assert begin == ends[-1], object_id
            ends.append(end)
        assert ends[-1] == record.elements


def test_the_directory_is_a_legal_version_3_directory(published: tuple[Published, Artifact]) -> None:
    _, artifact = published
    directory = Directory(
        artifact.components,
        tuple(artifact.objects.values()),
        artifact.bindings,
        artifact.uses,
        artifact.files,
        artifact.metadata,
        artifact.provenance,
    )
    assert parse_directory(dump_directory(directory), "model.ninfer") == directory


def test_every_projection_has_its_uses(published: tuple[Published, Artifact]) -> None:
    file, artifact = published
    drafters = [name for name in ("mtp", "dflash", "dflash2") if name in file.components]
    head = [use.input for use in artifact.uses if use.parameter == "text/output_head"]
    assert head == ["text/final_hidden", *(f"{name}/final_hidden" for name in drafters)]
    assert [use.input for use in artifact.uses if use.parameter == "proposal/head"] == head[1:]
    used = {use.parameter for use in artifact.uses}
    for name, binding in artifact.bindings.items():
        record = artifact.objects[binding.objects[0]]
        assert isinstance(record, TensorObject)
        if record.format not in ("bf16", "fp32", "int32"):
            assert (name in used) == (name != "text/token_embedding")
    assert used.isdisjoint(name for name in artifact.bindings if name.endswith(("norm", "_bias", "a_log", "_ids")))


def test_layers_of_the_35b_by_hand(tmp_path: Path) -> None:
    file = FILES["3.6-35b"]
    identity = {"model_id": file.model_id, "weights_id": file.weights_id}
    artifact = open_artifact(tiny_legacy.write_sparse(tmp_path / "a.ninfer", identity, file.objects()))

    def where(name: str) -> tuple[str, int, int]:
        (part,) = artifact.bindings[name].parts
        return part.object, part.begin // 2048, part.end // 2048

    p = "text/layers/39/"
    assert where(p + "moe/experts/255/up") == (p + "moe/routed_gate_up", 261632, 262144)
    assert where(p + "moe/experts/1/gate") == (p + "moe/routed_gate_up", 1024, 1536)
    assert where(p + "moe/shared_score") == (p + "moe/router_shared_gate", 256, 257)
    assert where(p + "attention/value") == (p + "attention/query_key_gate_value", 8704, 9216)
    assert where("mtp/layers/0/attention/gate") == ("mtp/layer/attention/query_key_gate_value", 4608, 8704)
    assert where("text/layers/0/gdn/z") == ("text/layers/0/gdn/query_key_value_z", 8192, 12288)
    assert where("dflash/layers/5/attention/context_key") == ("dflash/layers/5/attention/query_key_value", 4096, 5120)
    assert (
        artifact.bindings["dflash/layers/5/attention/key"] == artifact.bindings["dflash/layers/5/attention/context_key"]
    )
    assert artifact.bindings[p + "moe/experts/3/down"].parts == (
        Part(p + "moe/routed_down", 3 * 2048 * 512, 4 * 2048 * 512),
    )
    assert artifact.bindings[p + "moe/shared/down"].object == p + "moe/shared_down"
    assert artifact.bindings["vision/merger/norm_bias"].object == "vision/merger/norm/bias"
    uses = {(use.parameter, use.input) for use in artifact.uses}
    assert uses >= {
        (p + "moe/experts/7/down", p + "moe/experts/7/product"),
        (p + "moe/shared/down", p + "moe/shared/product"),
        ("mtp/layers/0/moe/router", "mtp/layers/0/ffn_input"),
        ("dflash/layers/2/attention/key", "dflash/layers/2/query_projection_input"),
        ("dflash/layers/2/attention/context_key", "dflash/context_input"),
        ("dflash/layers/2/mlp/down", "dflash/layers/2/mlp_product"),
        ("vision/layers/3/mlp/fc2", "vision/layers/3/mlp_activation"),
    }
    experts = artifact.parameter(p + "moe/experts/9/gate")
    assert isinstance(experts, NinferTensor) and experts.shape == (512, 2048)
    assert artifact.components["dflash"].config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"]
    assert artifact.components["text"].config["layer_types"].count("full_attention") == 10


def test_layers_of_the_27b_by_the_ranges_of_the_specification(tmp_path: Path) -> None:
    """spec/container.md 6 gives these element ranges."""
    identity = {"model_id": "qwen3.6-27b", "weights_id": "groupwise-int"}
    split = open_artifact(tiny_legacy.write_sparse(tmp_path / "a.ninfer", identity, old.dense())).bindings
    p = "text/layers/3/attention/"
    assert split[p + "query"].parts == (Part(p + "query_key", 0, 31457280),)
    assert split[p + "key"].parts == (Part(p + "query_key", 31457280, 36700160),)
    assert split[p + "gate"].parts == (Part(p + "gate_value", 0, 31457280),)
    assert split[p + "value"].parts == (Part(p + "gate_value", 31457280, 36700160),)
    identity["weights_id"] = "nvfp4"
    path = tiny_legacy.write_sparse(tmp_path / "b.ninfer", identity, old.dense_nvfp4())
    fused = open_artifact(path).bindings
    ends = [0, 31457280, 36700160, 68157440, 73400320]
    for index, name in enumerate(("query", "key", "gate", "value")):
        assert fused[p + name].parts == (Part(p + "query_key_gate_value", ends[index], ends[index + 1]),)


def test_policies_and_divisors_of_nvfp4(tmp_path: Path) -> None:
    identity = {"model_id": "qwen3.6-27b", "weights_id": "nvfp4"}
    artifact = open_artifact(tiny_legacy.write_sparse(tmp_path / "a.ninfer", identity, old.dense_nvfp4()))
    policies = Counter(use.activation_policy for use in artifact.uses)
    assert policies["AllowA8"] == 9
    # Five parameters in each attention or gdn block, gate and up, and every down but nine.
    assert policies["AllowA4"] == 16 * 5 + 48 * 5 + 64 * 2 + 55
    for use in artifact.uses:
        assert bool(use.auxiliaries) == (use.activation_policy == "AllowA4")
    up = artifact.use("text/layers/20/mlp/up", "text/layers/20/ffn_input")
    name = "text/layers/20/mlp/gate_up_projection/input_scale_divisor"
    assert up.auxiliaries["activation_input_divisor"].object == name
    assert artifact.auxiliary(up.parameter, up.input, "activation_input_divisor").shape == ()
    weight = artifact.parameter("text/layers/20/mlp/up")
    assert isinstance(weight, NinferTensor) and weight.policy == "AllowA4" and weight.shape == (17408, 5120)


def test_nvfp4_without_a_divisor_stays_with_16_bit_activations(tmp_path: Path) -> None:
    rows = [row for row in old.dense_nvfp4() if not row["name"].endswith("20/mlp/down_projection/input_scale_divisor")]
    identity = {"model_id": "qwen3.6-27b", "weights_id": "nvfp4"}
    artifact = open_artifact(tiny_legacy.write_sparse(tmp_path / "a.ninfer", identity, rows))
    assert artifact.use("text/layers/20/mlp/down", "text/layers/20/mlp/product").activation_policy == "A16Only"
    assert artifact.use("text/layers/21/mlp/down", "text/layers/21/mlp/product").activation_policy == "AllowA4"


def test_a_file_without_the_text_model_has_objects_only(tmp_path: Path) -> None:
    rows = [row for row in old.dense() if row["name"].startswith(("vision/", "mtp/"))]
    identity = {"model_id": "qwen3.6-27b", "weights_id": "groupwise-int"}
    artifact = open_artifact(tiny_legacy.write_sparse(tmp_path / "a.ninfer", identity, rows))
    assert artifact.bindings == {} and "no object of the text model" in str(artifact.unbound)


def without(name: str) -> Callable[[list[dict[str, Any]]], None]:
    return lambda rows: rows.remove(next(row for row in rows if row["name"] == name))


def renamed(name: str, new: str) -> Callable[[list[dict[str, Any]]], None]:
    return lambda rows: next(row for row in rows if row["name"] == name).update(name=new)


def reshaped(name: str, shape: tuple[int, ...], format: str) -> Callable[[list[dict[str, Any]]], None]:
    def edit(rows: list[dict[str, Any]]) -> None:
        index = next(index for index, row in enumerate(rows) if row["name"] == name)
        rows[index] = old.tensor(name, shape, format)

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without("text/final_norm"), "1 of 1422 parameters have no object, the first is 'text/final_norm'"),
        (without("mtp/layer/mlp/gate_up"), "2 of 1422 parameters have no object, the first is 'mtp/layers/0/mlp/gate'"),
        (without("text/draft_head"), "1 of 1422 parameters have no object, the first is 'proposal/head'"),
        (renamed("text/final_norm", "scalar"), "'scalar' means parameter 'scalar', which the model does not have"),
        (renamed("text/layers/0/gdn/norm", "text/layers/64/gdn/norm"), "'text/layers/64/gdn/norm'"),
        (renamed("text/layers/0/gdn/norm", "dflash/layers/0/input_norm"), "belongs to component 'dflash'"),
        (renamed("text/layers/0/gdn/norm", "text/layers/0/gdn/a_b_projection"), "128 rows, expected 96"),
        (
            renamed("text/layers/0/gdn/a_log", "text/layers/0/gdn/x/input_scale_divisor"),
            "expected one fp32 element and one of the sites",
        ),
        (
            reshaped("text/layers/3/attention/query_key", (7167, 5120), old.Q4),
            "has 7167 rows, expected 7168 (attention/query 6144 + attention/key 1024)",
        ),
        (
            reshaped("vision/layers/0/norm1/weight", (1151,), old.BF16),
            "'vision/layers/0/norm1/weight' has 1151 rows, expected 1152",
        ),
    ],
)
def test_objects_that_are_not_the_models_are_named_and_stay_objects(
    tmp_path: Path, edit: Callable[[list[dict[str, Any]]], None], message: str
) -> None:
    rows = old.dense()
    edit(rows)
    identity = {"model_id": "qwen3.6-27b", "weights_id": "groupwise-int"}
    artifact = open_artifact(tiny_legacy.write_sparse(tmp_path / "a.ninfer", identity, old.place(rows)))
    assert artifact.bindings == {} and artifact.uses == () and len(artifact.objects) == len(rows)
    assert artifact.unbound is not None and message in artifact.unbound
    with pytest.raises(ArtifactError) as caught:
        artifact.parameter("text/token_embedding")
    assert message in str(caught.value) and caught.value.kind == "reference"


# Packing groups of a directory, without layer prefixes -> the old name of the object.
GROUPS = {
    ("attention/query", "attention/key"): "attention/query_key",
    ("attention/gate", "attention/value"): "attention/gate_value",
    ("attention/query", "attention/key", "attention/gate", "attention/value"): "attention/query_key_gate_value",
    ("attention/query", "attention/key", "attention/value"): "attention/qkv",
    ("attention/query_bias", "attention/key_bias", "attention/value_bias"): "attention/qkv_bias",
    ("gdn/query", "gdn/key"): "gdn/query_key",
    ("gdn/value", "gdn/z"): "gdn/value_z",
    ("gdn/query", "gdn/key", "gdn/value", "gdn/z"): "gdn/query_key_value_z",
    ("gdn/a_projection", "gdn/b_projection"): "gdn/a_b_projection",
    ("mlp/gate", "mlp/up"): "mlp/gate_up",
    ("moe/router", "moe/shared_score"): "moe/router_shared_gate",
    ("moe/shared/gate", "moe/shared/up"): "moe/shared_gate_up",
    ("moe/shared/down",): "moe/shared_down",
    ("norm1_weight",): "norm1/weight",
    ("norm1_bias",): "norm1/bias",
    ("norm2_weight",): "norm2/weight",
    ("norm2_bias",): "norm2/bias",
    ("vision/merger/norm_weight",): "vision/merger/norm/weight",
    ("vision/merger/norm_bias",): "vision/merger/norm/bias",
}
OLD_FORMATS = {
    "bf16": "BF16",
    "fp32": "FP32",
    "q4_g64_fp16": "Q4G64_F16S",
    "q5_g64_fp16": "Q5G64_F16S",
    "q6_g64_fp16": "Q6G64_F16S",
    "q8_g32_fp16": "W8G32_F16S",
}


def old_name(parameters: list[str]) -> str:
    """The version 2 name of the object that holds `parameters`, in row order."""
    head, *rest = parameters[0].split("/layers/")
    prefix, suffixes = "", tuple(parameters)
    if rest:
        prefix = f"{head}/layers/{rest[0].partition('/')[0]}/"
        suffixes = tuple(name.removeprefix(prefix) for name in parameters)
    if "experts" in suffixes[0]:
        suffix = "moe/routed_down" if suffixes[0].endswith("down") else "moe/routed_gate_up"
    else:
        suffix = GROUPS[suffixes] if suffixes in GROUPS or len(suffixes) > 1 else suffixes[0]
    return ("mtp/layer/" if head == "mtp" and rest else prefix) + suffix


def write_as_version_2(source: Artifact, path: Path) -> None:
    """The same objects in a version 2 file, named by hand-made tables."""
    held: dict[str, list[tuple[int, str]]] = {}
    for name, binding in source.bindings.items():
        begin = binding.parts[0].begin if binding.parts else 0
        held.setdefault(binding.objects[0], []).append((begin, name))
    records: list[dict[str, Any]] = []
    payloads = []
    for object_id, record in source.objects.items():
        if isinstance(record, TensorObject):
            name = old_name([name for _, name in sorted(held[object_id])])
            layout = {"contiguous_le_v1": "contiguous-le-v1", "row_split_k128_v1": "row-split-k128-v1"}[record.layout]
            kind = {
                "kind": "tensor",
                "shape": list(record.shape),
                "format": OLD_FORMATS[record.format],
                "layout": layout,
            }
        else:
            name = f"frontend/{object_id.rpartition('/')[2]}"
            kind = {"kind": "resource", "encoding": "raw-bytes-v1"}
        records.append({"name": name, **kind, "offset": 0, "bytes": record.bytes})
        payloads.append(source.read_object(object_id))
    tiny_legacy.place(records)
    data = bytearray(records[-1]["offset"] + records[-1]["bytes"])
    for described, content in zip(records, payloads, strict=True):
        data[described["offset"] : described["offset"] + described["bytes"]] = content
    value = {"identity": {"model_id": "golden", "weights_id": "groupwise"}, "objects": records}
    tiny_legacy.write(path, 2, value, data=bytes(data))


@pytest.mark.parametrize("name", ["qwen3_5_dense", "qwen3_5_moe", "qwen3_5_vision_mtp"])
def test_a_model_means_the_same_in_version_2(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NInfer's version 3 artifacts, put back into version 2, come out with the same parameters and uses."""
    source = open_artifact(golden("ninfer", "models", name, "groupwise.ninfer"))
    configs = {component: record.config for component, record in source.components.items()}
    model = PublishedModel(configs, proposal_rows=1)
    monkeypatch.setattr(legacy_reader, "PUBLISHED", {("golden", "groupwise"): model})
    write_as_version_2(source, tmp_path / "old.ninfer")
    artifact = open_artifact(tmp_path / "old.ninfer")
    assert artifact.unbound is None
    assert artifact.bindings.keys() == source.bindings.keys()
    for parameter in source.bindings:
        assert artifact.dequantize_parameter(parameter).equal(source.dequantize_parameter(parameter))
    expected = {(use.parameter, use.input): use.activation_policy for use in source.uses}
    assert {(use.parameter, use.input): use.activation_policy for use in artifact.uses} == expected
    for component, record in source.components.items():
        found = artifact.components[component]
        assert (found.config, found.target, found.proposal) == (record.config, record.target, record.proposal)
        assert found.resources.keys() == record.resources.keys()
        for role, object_id in record.resources.items():
            assert artifact.resource(found.resources[role]) == source.resource(object_id)


def test_version_2_and_its_upgrade_load_as_version_3_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_artifact(golden("ninfer", "models", "qwen3_5_dense", "groupwise.ninfer"))
    configs = {component: record.config for component, record in source.components.items()}
    monkeypatch.setattr(legacy_reader, "PUBLISHED", {("golden", "groupwise"): PublishedModel(configs, proposal_rows=1)})
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))
    write_as_version_2(source, tmp_path / "old.ninfer")
    upgrade(tmp_path / "old.ninfer", tmp_path / "new.ninfer")
    ids = torch.arange(3, 14).unsqueeze(0)
    logits = []
    for path in (source.path, tmp_path / "old.ninfer", tmp_path / "new.ninfer"):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        assert isinstance(model.lm_head.weight, NinferTensor)
        with torch.inference_mode():
            logits.append(model(ids).logits)
        assert AutoTokenizer.from_pretrained(path)("a b")["input_ids"]
    assert torch.equal(logits[1], logits[0]) and torch.equal(logits[2], logits[0])


def test_sizes_of_the_published_objects_are_those_of_the_layouts() -> None:
    """spec/layouts.md 3.6 lists these two."""
    assert old.tensor("a", (7168, 5120), old.Q4)["bytes"] == 19496960
    assert old.tensor("a", (7168, 5120), old.Q5)["bytes"] == 24084480
