"""Whole conversions: what an artifact holds is what the source held, requantized by the book or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from ninfer_torch.artifact import open_artifact
from ninfer_torch.convert import pipeline
from ninfer_torch.convert.pipeline import convert, open_source
from ninfer_torch.convert.presets import PRESETS, WIDER_FORMATS
from ninfer_torch.convert.report import Report
from ninfer_torch.convert.source import SourceTensor, UnusedTensor
from ninfer_torch.errors import ArtifactError, ConversionError
from ninfer_torch.formats import FORMATS
from ninfer_torch.tensors import NinferTensor

# preset -> (linear format, group, largest code), spec/conversion.md 3
LINEAR = {
    "q4": ("q4_g64_fp16", 64, 7),
    "q5": ("q5_g64_fp16", 64, 15),
    "q6": ("q6_g64_fp16", 64, 31),
    "q8": ("q8_g32_fp16", 32, 127),
}
ARTIFACT_ID = "00112233445566778899aabbccddeeff"
RESOURCES = {"tokenizer.json": b'{"a": 1}', "chat_template.jinja": b"{{ messages }}", "special_tokens_map.json": b"{}"}


def requantized(weight: torch.Tensor, group: int, largest_code: int) -> np.ndarray:
    """Values after absmax quantization, in numpy from spec/conversion.md 3; for weights of ordinary size."""
    values = weight.float().numpy()
    rows, columns = values.shape
    padded = np.pad(values, ((0, 0), (0, -columns % group))).reshape(rows, -1, group)
    scales = (np.abs(padded).max(2).astype(np.float64) / largest_code).astype(np.float32).astype(np.float16)
    reciprocals = (1 / scales.astype(np.float64)).astype(np.float32)
    codes = np.rint(padded * reciprocals[:, :, None]) + 0.0  # -0.0 is no code
    return (codes * scales.astype(np.float32)[:, :, None]).reshape(rows, -1)[:, :columns]


def llama_config(**changes: Any) -> LlamaConfig:
    members = {
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "vocab_size": 70,
        "max_position_embeddings": 64,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    return LlamaConfig(**{**members, **changes})


def random_llama(config: LlamaConfig, model_class: type = LlamaForCausalLM) -> Any:
    torch.manual_seed(11)
    model = model_class(config).to(config.dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter)
    return model


def saved_llama(folder: Path, *, sharded: bool = False, **changes: Any) -> dict[str, torch.Tensor]:
    """Save a random Llama with a few resources; returns its state dict."""
    model = random_llama(llama_config(**changes))
    model.save_pretrained(folder, max_shard_size="60KB" if sharded else "1GB")
    assert (folder / "model.safetensors.index.json").exists() == sharded
    for name, data in RESOURCES.items():
        (folder / name).write_bytes(data)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def format_of(name: str, preset: str) -> str:
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        return "q8_g32_fp16"
    return LINEAR[preset][0] if name.endswith("_proj.weight") else "direct"


def assert_no_files_beside(folder: Path, *expected: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(expected)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    saved_llama(folder)
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "model.ninfer"


# --- the whole way from a saved model --------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("preset", LINEAR)
def test_every_parameter_is_requantized_by_the_book(tmp_path: Path, preset: str, sharded: bool, tied: bool) -> None:
    folder, path = tmp_path / "model", tmp_path / "model.ninfer"
    state = saved_llama(folder, sharded=sharded, tie_word_embeddings=tied)
    convert(folder, path, preset)
    with open_artifact(path) as artifact:
        assert {name.removeprefix("text/") for name in artifact.bindings} == set(state)
        for name, weight in state.items():
            stored = artifact.parameter(f"text/{name}")
            expected_format = format_of(name, preset)
            if expected_format == "direct":
                assert type(stored) is torch.Tensor
                assert stored.dtype == torch.bfloat16 and torch.equal(
                    stored.view(torch.int16), weight.view(torch.int16)
                )
                continue
            assert isinstance(stored, NinferTensor) and stored.format == expected_format
            _, group, largest_code = LINEAR["q8" if "q8" in expected_format else preset]
            expected = requantized(weight, group, largest_code)
            assert np.array_equal(stored.dequantize().numpy().view(np.int32), expected.view(np.int32))
        for object_id in artifact.objects:
            artifact.read_object(object_id, check=True)
        head, embedding = artifact.bindings["text/lm_head.weight"], artifact.bindings["text/model.embed_tokens.weight"]
        assert (head == embedding) == tied


def test_float_sources_keep_their_words(tmp_path: Path) -> None:
    for dtype, expected in (("float32", torch.float32), ("float16", torch.float32), ("bfloat16", torch.bfloat16)):
        state = saved_llama(tmp_path / dtype, dtype=dtype)
        convert(tmp_path / dtype, tmp_path / f"{dtype}.ninfer", "q8")
        with open_artifact(tmp_path / f"{dtype}.ninfer") as artifact:
            for name in ("model.norm.weight", "model.layers.1.self_attn.q_proj.bias"):
                stored = artifact.parameter(f"text/{name}")
                assert stored.dtype == expected and torch.equal(stored, state[name].to(expected))


def test_records_of_the_artifact(model_folder: Path, out: Path) -> None:
    report = convert(model_folder, out, "q5", artifact_id=ARTIFACT_ID)
    with open_artifact(out) as artifact:
        assert artifact.artifact_id == ARTIFACT_ID == report.artifact_id
        assert artifact.metadata == {"name": "model"}
        assert artifact.provenance["converter"] == "ninfer_torch" and artifact.provenance["recipe"] == "q5"
        assert str(model_folder.parent) not in json.dumps(
            [dict(artifact.provenance), dict(artifact.components["text"].config)]
        )
        component = artifact.components["text"]
        assert component.config["architectures"] == ["LlamaForCausalLM"] and component.config["hidden_size"] == 96
        stored = {role: artifact.resource(object_id) for role, object_id in component.resources.items()}
        assert {role: stored[role] for role in RESOURCES} == RESOURCES
        assert stored["generation_config.json"] == (model_folder / "generation_config.json").read_bytes()
        assert component.resources["tokenizer.json"] == "resource/text/tokenizer.json"
        uses = {use.parameter: (use.input, use.activation_policy) for use in artifact.uses}
        linear = [name for name in artifact.bindings if name.endswith(("_proj.weight", "lm_head.weight"))]
        assert uses == {name: (f"{name.removesuffix('.weight')}/input", "A16Only") for name in linear}
        assert list(artifact.objects)[len(component.resources)] == "weight/000000"


def test_same_id_gives_same_bytes(model_folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a second run nor another chunk size changes a byte."""
    digests = set()
    for run, chunk in enumerate((1 << 21, 1 << 21, 1, 5000)):
        monkeypatch.setattr(pipeline, "_CHUNK_VALUES", chunk)
        path = out.parent / str(run) / "model.ninfer"
        path.parent.mkdir()
        convert(model_folder, path, "q6", artifact_id=ARTIFACT_ID)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1
    first, second = out.with_name("a"), out.with_name("b")
    assert convert(model_folder, first, "q6").artifact_id != convert(model_folder, second, "q6").artifact_id


def test_parts_hold_the_same_objects(model_folder: Path, out: Path) -> None:
    convert(model_folder, out, "q4")
    parted = out.with_name("parted.ninfer")
    convert(model_folder, parted, "q4", max_file_bytes=65536)
    with open_artifact(out) as whole, open_artifact(parted) as cut:
        assert len(cut.files) > 2
        for object_id in whole.objects:
            assert whole.read_object(object_id) == cut.read_object(object_id)


def test_progress_counts_the_payload(model_folder: Path, out: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert(model_folder, out, "q4", progress=lambda done, total: seen.append((done, total)))
    with open_artifact(out) as artifact:
        payload = max(record.offset + record.bytes for record in artifact.objects.values())
    assert {total for _, total in seen} == {payload}
    done = [count for count, _ in seen]
    assert done == sorted(done) and done[-1] == payload and len(done) > 10


def test_report_adds_up(model_folder: Path, out: Path) -> None:
    report = convert(model_folder, out, "q4", name="tiny llama")
    assert report.name == "tiny llama"
    told = json.loads(report.to_json())
    with open_artifact(out) as artifact:
        records = {
            object_id: record for object_id, record in artifact.objects.items() if object_id.startswith("weight/")
        }
        assert {entry["object"]: (entry["bytes"], entry["format"]) for entry in told["tensors"]} == {
            object_id: (record.bytes, record.format) for object_id, record in records.items()
        }
        assert told["totals"]["bytes"] == sum(record.bytes for record in records.values())
        assert told["totals"]["weights"] == sum(int(np.prod(record.shape)) for record in records.values())
        assert {name for entry in told["tensors"] for name in entry["parameters"]} == set(artifact.bindings)
    assert told["totals"]["bits_per_weight"] == 8 * told["totals"]["bytes"] / told["totals"]["weights"]
    assert {resource["name"] for resource in told["resources"]} == {*RESOURCES, "generation_config.json"}
    table = report.table()
    for entry in report.tensors:
        (line,) = (line for line in table.splitlines() if line.startswith(f"{entry.parameters[0]} "))
        assert entry.format in line and entry.encoding in line


# --- what is wrong is said before a file exists ----------------------------------------------------------------------


def rewrite_weights(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_missing_tensors_are_all_named(model_folder: Path, out: Path) -> None:
    gone = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    rewrite_weights(model_folder, lambda tensors: [tensors.pop(name) for name in gone])
    with pytest.raises(
        ConversionError, match=f"lacks 2 of the 29 tensors of LlamaForCausalLM .*: {gone[0]}, {gone[1]}"
    ):
        convert(model_folder, out, "q4")
    assert_no_files_beside(out.parent)


def test_extra_tensors_are_listed(model_folder: Path, out: Path) -> None:
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite_weights(model_folder, lambda tensors: tensors.update({extra: torch.ones(4)}))
    report = convert(model_folder, out, "q4")
    assert [tensor.name for tensor in report.unused] == [extra]
    assert extra in report.summary() and json.loads(report.to_json())["unused"][0]["name"] == extra
    with open_artifact(out) as artifact:
        assert f"text/{extra}" not in artifact.bindings


def test_wrong_shape(model_folder: Path, out: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite_weights(model_folder, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    with pytest.raises(ConversionError, match=rf"'{name}' has shape \[200, 96\], LlamaForCausalLM expects \[96, 200\]"):
        convert(model_folder, out, "q4")
    assert_no_files_beside(out.parent)


def test_integer_matrix(model_folder: Path, out: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    rewrite_weights(model_folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int32)}))
    with pytest.raises(ConversionError, match=f"'{name}' holds int32 words"):
        convert(model_folder, out, "q4")
    assert_no_files_beside(out.parent)


def test_value_that_a_method_refuses_leaves_nothing(model_folder: Path, out: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][90, 7] = float("inf")

    rewrite_weights(model_folder, spoil)
    with pytest.raises(ConversionError, match=f"'{name}' as q4_g64_fp16: row 90, column 7: inf"):
        convert(model_folder, out, "q4")
    assert_no_files_beside(out.parent)


def test_existing_output_is_kept(model_folder: Path, out: Path) -> None:
    out.write_bytes(b"precious")
    with pytest.raises(ArtifactError, match="model.ninfer"):
        convert(model_folder, out, "q4")
    assert out.read_bytes() == b"precious"


def test_unknown_names(model_folder: Path, out: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="unknown preset 'q3'; known: q4, q5, q6, q8, gguf"):
        convert(model_folder, out, "q3")
    with pytest.raises(ConversionError, match="preset gguf needs a gguf source, found a huggingface source"):
        convert(model_folder, out, "gguf")
    with pytest.raises(ConversionError, match="found nothing"):
        convert(tmp_path / "absent", out, "q4")
    with pytest.raises(ConversionError, match="a file of another kind"):
        open_source(model_folder / "model.safetensors")
    assert_no_files_beside(out.parent)


# --- names -----------------------------------------------------------------------------------------------------------


def test_checkpoint_of_the_base_model_lacks_the_prefix(tmp_path: Path, out: Path) -> None:
    config = llama_config(tie_word_embeddings=True)
    model = random_llama(config, LlamaModel)
    model.save_pretrained(tmp_path / "base")
    config_path = tmp_path / "base" / "config.json"
    config_path.write_text(config_path.read_text().replace('"LlamaModel"', '"LlamaForCausalLM"'))
    report = convert(tmp_path / "base", out, "q4")
    assert not report.unused
    with open_artifact(out) as artifact:
        assert torch.equal(artifact.parameter("text/model.norm.weight"), model.norm.weight)


def test_base_model_from_a_checkpoint_with_a_head(tmp_path: Path, out: Path) -> None:
    state = saved_llama(tmp_path / "full")
    config_path = tmp_path / "full" / "config.json"
    config_path.write_text(config_path.read_text().replace('"LlamaForCausalLM"', '"LlamaModel"'))
    report = convert(tmp_path / "full", out, "q4")
    assert [tensor.name for tensor in report.unused] == ["lm_head.weight"]
    with open_artifact(out) as artifact:
        assert torch.equal(artifact.parameter("text/norm.weight"), state["model.norm.weight"])


def test_tied_names_with_different_values(tmp_path: Path, out: Path) -> None:
    state = saved_llama(tmp_path / "model", tie_word_embeddings=True)
    head = state["lm_head.weight"].clone()
    rewrite_weights(tmp_path / "model", lambda tensors: tensors.update({"lm_head.weight": head}))
    assert not convert(tmp_path / "model", out, "q4").unused
    head[69, 95] += 1
    rewrite_weights(tmp_path / "model", lambda tensors: tensors.update({"lm_head.weight": head}))
    with pytest.raises(ConversionError, match="the config ties .* but the source holds different values"):
        convert(tmp_path / "model", out.with_name("other"), "q4")


# --- preset gguf, from a source made up here -------------------------------------------------------------------------


class BlockSource:
    """A source of a given config whose tensors are made by `make`; it keeps count of the rows it is asked for."""

    kind = "gguf"
    name = "made-up.gguf"
    unused = (UnusedTensor("rope_freqs.weight", "rebuilt from the config"),)

    def __init__(self, config: LlamaConfig, encodings: Mapping[str, str]) -> None:
        self._config = config
        self.largest_read = 0
        self.blocks: dict[str, torch.Tensor] = {}
        self.numbers: dict[str, torch.Tensor] = {}
        self.tensors = {
            name: self._tensor(name, tuple(tensor.shape), encodings.get(name, "fp32"))
            for name, tensor in LlamaForCausalLM(config).state_dict().items()
            if not (config.tie_word_embeddings and name == "lm_head.weight")
        }

    def _tensor(self, name: str, shape: tuple[int, ...], encoding: str) -> SourceTensor:
        generator = torch.Generator().manual_seed(len(self.numbers))
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(encoding, torch.float32)
        self.numbers[name] = torch.randn(shape, generator=generator).to(dtype)
        if encoding not in FORMATS or not FORMATS[encoding].quantized or len(shape) != 2:
            return SourceTensor(name, shape, encoding, self._reader(self.numbers[name]))
        record: Any = FORMATS[encoding]
        row_bytes = shape[1] // record.block_values * record.block_bytes
        self.blocks[name] = torch.randint(0, 256, (shape[0], row_bytes), dtype=torch.uint8, generator=generator)
        readers = self._reader(self.numbers[name]), self._reader(self.blocks[name])
        return SourceTensor(name, shape, encoding, *readers, origin=f"blk.{name}")

    def _reader(self, rows: torch.Tensor) -> Any:
        def read(begin: int, end: int) -> torch.Tensor:
            self.largest_read = max(self.largest_read, rows[begin:end].numel())
            return rows[begin:end]

        return read

    def config(self) -> LlamaConfig:
        return self._config

    def resources(self) -> dict[str, bytes]:
        return {}

    def provenance(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name}


QUERY, KEY, VALUE, OUTPUT = (f"model.layers.0.self_attn.{which}_proj.weight" for which in "qkvo")
EMBEDDING, NORM = "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"


def block_source(**encodings: str) -> BlockSource:
    names = {"query": QUERY, "key": KEY, "value": VALUE, "output": OUTPUT, "embedding": EMBEDDING, "norm": NORM}
    config = llama_config(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        head_dim=64,
        tie_word_embeddings=True,
        attention_bias=False,
        architectures=["LlamaForCausalLM"],
    )
    return BlockSource(config, {names[key]: encoding for key, encoding in encodings.items()})


def entry_of(report: Report, name: str) -> Any:
    (entry,) = (entry for entry in report.tensors if f"text/{name}" in entry.parameters)
    return entry


def test_gguf_preset_keeps_blocks(out: Path) -> None:
    source = block_source(
        query="gguf_q4_k", key="gguf_iq2_xxs", value="gguf_q8_0", output="bf16", embedding="gguf_q6_k", norm="bf16"
    )
    report = convert(source, out, "gguf", no_fallback=True)
    assert not report.fallbacks and report.unused == BlockSource.unused
    with open_artifact(out) as artifact:
        for name, blocks in source.blocks.items():
            object_id = artifact.bindings[f"text/{name}"].object
            assert artifact.read_object(str(object_id)) == blocks.numpy().tobytes()
            assert artifact.parameter(f"text/{name}").format == source.tensors[name].encoding
            assert entry_of(report, name).source == f"blk.{name}"
        assert len(source.blocks) == 4
        policies = {use.parameter: use.activation_policy for use in artifact.uses}
        assert {policies[f"text/{name}"] for name in (QUERY, KEY, VALUE, "lm_head.weight")} == {"AllowA8"}
        assert policies[f"text/{OUTPUT}"] == "A16Only" and f"text/{EMBEDDING}" not in policies
        assert artifact.parameter(f"text/{OUTPUT}").dtype == torch.bfloat16
        assert torch.equal(artifact.parameter(f"text/{OUTPUT}"), source.numbers[OUTPUT])
        assert artifact.parameter("text/model.layers.0.mlp.up_proj.weight").dtype == torch.float32


def test_other_block_types_fall_back_and_say_so(out: Path) -> None:
    for index, (encoding, wider) in enumerate(WIDER_FORMATS.items()):
        source = block_source(query=encoding, key="gguf_q4_0")
        path = out.with_name(str(index))
        report = convert(source, path, "gguf")
        (entry,) = report.fallbacks
        assert entry.parameters == (f"text/{QUERY}",) and entry.encoding == encoding
        assert entry.format == wider.format and entry.method == "grouped_absmax"
        assert encoding in entry.note and wider.format in entry.note and entry.note in report.summary()
        _, group, largest_code = next(record for record in LINEAR.values() if record[0] == wider.format)
        with open_artifact(path) as artifact:
            found = artifact.parameter(f"text/{QUERY}").dequantize().numpy()
        assert np.array_equal(found, requantized(source.numbers[QUERY], group, largest_code))


def test_no_fallback_lists_every_tensor(out: Path) -> None:
    source = block_source(query="q4_1", key="gguf_q4_0", value="mxfp4")
    with pytest.raises(ConversionError, match=f"2 tensors cannot keep .*: {QUERY} \\(q4_1\\), {VALUE} \\(mxfp4\\)"):
        convert(source, out, "gguf", no_fallback=True)
    assert_no_files_beside(out.parent)


def test_unknown_block_type(out: Path) -> None:
    with pytest.raises(ConversionError, match="no registered format is known to be wider than q9_z"):
        convert(block_source(query="q9_z"), out, "gguf")
    assert_no_files_beside(out.parent)


def test_vectors_of_blocks_are_decoded(out: Path) -> None:
    source = block_source(norm="gguf_q8_0")
    entry = entry_of(convert(source, out, "gguf"), NORM)
    assert entry.format == "fp32" and "decoded from gguf_q8_0" in entry.note
    with open_artifact(out) as artifact:
        assert torch.equal(artifact.parameter(f"text/{NORM}"), source.numbers[NORM])


def test_quantizing_presets_decode_blocks_and_say_so(out: Path) -> None:
    source = block_source(query="gguf_q4_k", key="fp16")
    report = convert(source, out, "q6")
    assert entry_of(report, QUERY).note == "requantized from gguf_q4_k" and entry_of(report, KEY).note == ""
    with open_artifact(out) as artifact:
        found = artifact.parameter(f"text/{QUERY}").dequantize().numpy()
    assert np.array_equal(found, requantized(source.numbers[QUERY], 64, 31))


@pytest.mark.parametrize("preset", ["q4", "gguf"])
def test_rows_are_read_in_bounded_chunks(out: Path, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_CHUNK_VALUES", 1000)
    source = block_source(query="gguf_q4_k")
    convert(source, out, preset)
    assert 0 < source.largest_read <= 1000


def test_presets_have_summaries_and_registered_formats() -> None:
    for name, preset in PRESETS.items():
        assert preset.name == name and preset.summary
        assert (preset.formats is None) == (name == "gguf")
        for target in (preset.formats or {}).values():
            assert target in FORMATS
