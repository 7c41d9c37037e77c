"""An artifact as a source: words of a kept format move whole, all else by its decoded values, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import tiny_models
from golden import golden, load_tensors
from ninfer_torch.artifact import ArtifactWriter, open_artifact
from ninfer_torch.convert import convert, open_source
from ninfer_torch.convert.artifact_source import ArtifactSource
from ninfer_torch.convert.methods import quantize
from ninfer_torch.convert.source import Source
from ninfer_torch.errors import ConversionError, NinferError
from ninfer_torch.models.generic import plan_model
from ninfer_torch.tensors import encode
from quantized import FAMILIES, QUANTIZED, random_weight

ARTIFACT_ID = "00112233445566778899aabbccddeeff"

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    dtype=torch.float32,
    architectures=["LlamaForCausalLM"],
)
"""Every matrix has whole tiles and blocks of every format."""


def shapes() -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in LlamaForCausalLM(CONFIG).state_dict().items()}


def packed_artifact(path: Path, format: str) -> dict[str, torch.Tensor]:
    """An artifact of random words, all matrices of one format, and the tensors in it."""
    tensors: dict[str, torch.Tensor] = {}
    with ArtifactWriter(path, artifact_id=ARTIFACT_ID) as writer:
        writer.component("text", json.loads(CONFIG.to_json_string(use_diff=False)))
        for index, (name, shape) in enumerate(shapes().items()):
            if len(shape) == 2:
                tensors[name] = random_weight(format, *shape, seed=index)
            else:
                tensors[name] = torch.rand(shape).bfloat16()
            stored = format if len(shape) == 2 else "bf16"
            writer.tensor(f"w/{index}", stored, shape, tensors[name])
            writer.bind(f"text/{name}", f"w/{index}")
            if len(shape) == 2 and "embed" not in name:
                writer.use(f"text/{name}", f"text/{name.removesuffix('.weight')}/input", activation_policy="A16Only")
    return tensors


def weights(path: Path) -> dict[str, bytes]:
    """Stored bytes by parameter."""
    artifact = open_artifact(path)
    found = {}
    for name, binding in artifact.bindings.items():
        if binding.object is not None:
            found[name] = artifact.read_object(binding.object)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.save_folder(tmp_path / "tiny", tiny_models.tiny_llama())


@pytest.mark.parametrize("format", QUANTIZED)
def test_words_and_values_are_those_of_the_artifact(tmp_path: Path, format: str) -> None:
    tensors = packed_artifact(tmp_path / "a.ninfer", format)
    source = ArtifactSource(tmp_path / "a.ninfer")
    assert isinstance(source, Source) and set(source.tensors) == set(tensors) and not source.unused
    for name, stored in tensors.items():
        tensor = source.tensors[name]
        assert tensor.shape == tuple(stored.shape)
        if stored.dim() == 1:
            assert tensor.encoding == "bf16" and torch.equal(tensor.values(0, tensor.rows), stored)
            assert torch.equal(tensor.values(3, 70), stored[3:70])
            continue
        assert tensor.encoding == format and tensor.encoded_rows
        assert (tensor.read_blocks is not None) == format.startswith("gguf_")
        values = stored.dequantize()
        assert torch.equal(tensor.values(0, tensor.rows), values), name
        assert torch.equal(tensor.values(37, 101), values[37:101]), name


@pytest.mark.parametrize("format", QUANTIZED)
def test_preset_keep_copies_every_object(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed_artifact(tmp_path / "a.ninfer", format)
    monkeypatch.setattr("ninfer_torch.convert.pipeline._CHUNK_VALUES", 1 << 14)
    convert(tmp_path / "a.ninfer", tmp_path / "b.ninfer", "keep")
    assert weights(tmp_path / "b.ninfer") == weights(tmp_path / "a.ninfer")


def test_a_preset_moves_words_that_already_have_its_format(tmp_path: Path, folder: Path) -> None:
    convert(folder, tmp_path / "a.ninfer", "q4")
    report = convert(tmp_path / "a.ninfer", tmp_path / "b.ninfer", "q4")
    assert weights(tmp_path / "b.ninfer") == weights(tmp_path / "a.ninfer")
    assert {entry.method for entry in report.tensors} == {"import_encoded", "cast_direct"}


@pytest.mark.parametrize("format", FAMILIES)
def test_other_formats_are_quantized_from_the_decoded_values(tmp_path: Path, format: str) -> None:
    tensors = packed_artifact(tmp_path / "a.ninfer", format)
    report = convert(tmp_path / "a.ninfer", tmp_path / "b.ninfer", "q6")
    found = weights(tmp_path / "b.ninfer")
    for name, stored in tensors.items():
        if "proj" in name:
            assert found[f"text/{name}"] == encode(quantize(stored.dequantize(), "q6_g64_fp16")), name
    assert {entry.note for entry in report.tensors if entry.format == "q6_g64_fp16"} == {f"requantized from {format}"}


@pytest.mark.parametrize("preset", ["q4", "q8", "fp8", "direct"])
def test_an_unquantized_artifact_converts_as_its_folder_does(tmp_path: Path, folder: Path, preset: str) -> None:
    convert(folder, tmp_path / "plain.ninfer", "direct")
    convert(folder, tmp_path / "a.ninfer", preset)
    convert(tmp_path / "plain.ninfer", tmp_path / "b.ninfer", preset)
    assert weights(tmp_path / "b.ninfer") == weights(tmp_path / "a.ninfer")
    first, second = open_source(folder), open_source(tmp_path / "plain.ninfer")
    assert second.resources() == first.resources()
    assert plan_model(second.config()) == plan_model(first.config())


def test_grouped_and_split_parameters_come_back(tmp_path: Path, folder: Path) -> None:
    """Members of one object, and a parameter in two objects of different formats."""
    layer = "text/model.layers.0"
    members = [f"{layer}.mlp.up_proj.weight", f"{layer}.mlp.gate_proj.weight"]

    def arrange(model: Any, recipe: Any, sources: Any) -> None:
        recipe.group(members)
        recipe.assign(f"{layer}.self_attn.q_proj.weight", "q6_g64_fp16", rows=(16, 64))

    convert(folder, tmp_path / "a.ninfer", "q4", recipe=arrange)
    artifact = open_artifact(tmp_path / "a.ninfer")
    source = ArtifactSource(tmp_path / "a.ninfer")
    for name, tensor in source.tensors.items():
        expected = artifact.dequantize_parameter(f"text/{name}", shape=tensor.shape)
        assert torch.equal(tensor.values(0, tensor.rows).float(), expected), name
        middle = tensor.rows // 3, tensor.rows - 1
        assert torch.equal(tensor.values(*middle).float(), expected[slice(*middle)]), name
    split = source.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert split.encoding == "composed q4_g64_fp16+q6_g64_fp16" and not split.encoded_rows
    assert source.tensors["model.layers.0.mlp.up_proj.weight"].encoding == "q4_g64_fp16"
    with pytest.raises(ConversionError, match=r"'model\.layers\.0\.self_attn\.q_proj\.weight': no registered format"):
        convert(source, tmp_path / "b.ninfer", "keep")
    convert(source, tmp_path / "c.ninfer", "q8")
    expected = artifact.dequantize_parameter(f"{layer}.self_attn.q_proj.weight")
    assert weights(tmp_path / "c.ninfer")[f"{layer}.self_attn.q_proj.weight"] == encode(
        quantize(expected, "q8_g32_fp16")
    )


def test_an_artifact_in_many_files_is_one_source(tmp_path: Path, folder: Path) -> None:
    convert(folder, tmp_path / "a.ninfer", "q4")
    convert(folder, tmp_path / "parts.ninfer", "q4", max_file_bytes=20_000)
    assert len(open_artifact(tmp_path / "parts.ninfer").files) > 3
    convert(tmp_path / "parts.ninfer", tmp_path / "b.ninfer", "keep")
    assert weights(tmp_path / "b.ninfer") == weights(tmp_path / "a.ninfer")


def test_a_divisor_of_activations_travels_with_nvfp4_words(tmp_path: Path) -> None:
    packed_artifact(tmp_path / "a.ninfer", "nvfp4")
    name = "model.layers.0.mlp.up_proj.weight"

    def divided(model: Any, recipe: Any, sources: Any) -> None:
        recipe.use(
            f"text/{name}", f"text/{name.removesuffix('.weight')}/input", "AllowA4", {"activation_input_divisor": 96.5}
        )

    convert(tmp_path / "a.ninfer", tmp_path / "b.ninfer", "keep", recipe=divided)
    source = ArtifactSource(tmp_path / "b.ninfer")
    assert {key: t.activation_divisor for key, t in source.tensors.items() if t.activation_divisor} == {name: 96.5}
    convert(source, tmp_path / "c.ninfer", "keep")
    use = open_artifact(tmp_path / "c.ninfer").use(f"text/{name}", f"text/{name.removesuffix('.weight')}/input")
    assert use.activation_policy == "AllowA4" and set(use.auxiliaries) == {"activation_input_divisor"}


# Tied names


def test_a_tied_model_has_its_table_once(tmp_path: Path) -> None:
    folder = tiny_models.save_folder(tmp_path / "tied", tiny_models.tiny_llama(tied=True))
    convert(folder, tmp_path / "a.ninfer", "q4")
    source = ArtifactSource(tmp_path / "a.ninfer")
    assert source.config().tie_word_embeddings and len([n for n in source.tensors if "embed" in n or "head" in n]) == 1
    convert(source, tmp_path / "b.ninfer", "keep")
    assert weights(tmp_path / "b.ninfer") == weights(tmp_path / "a.ninfer")


def test_names_that_are_stored_apart_are_untied(tmp_path: Path) -> None:
    folder = tiny_models.save_folder(tmp_path / "tied", tiny_models.tiny_llama(tied=True))
    convert(folder, tmp_path / "a.ninfer", "q4", settings=["text/lm_head.weight=q6_g64_fp16:grouped_absmax"])
    source = ArtifactSource(tmp_path / "a.ninfer")
    assert not source.config().tie_word_embeddings
    assert {source.tensors[f"{name}.weight"].encoding for name in ("lm_head", "model.embed_tokens")} == {
        "q6_g64_fp16",
        "q8_g32_fp16",
    }
    convert(source, tmp_path / "b.ninfer", "keep")
    assert weights(tmp_path / "b.ninfer") == weights(tmp_path / "a.ninfer")


# Refusals


def copied(path: Path, target: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """The artifact with other payloads; an object for which `change` gives None is left out with its parameters."""
    artifact = open_artifact(path)
    with ArtifactWriter(target) as writer:
        writer.component("text", dict(artifact.components["text"].config))
        for name, binding in artifact.bindings.items():
            record = artifact.objects[binding.object]
            data = change(name, artifact.read_object(record.id))
            if data is not None:
                writer.tensor(record.id, record.format, record.shape, data)
                writer.bind(name, record.id)
    return target


def test_a_missing_parameter_is_named_before_anything_is_written(tmp_path: Path) -> None:
    packed_artifact(tmp_path / "a.ninfer", "q5_g64_fp16")
    lost = "text/model.layers.0.mlp.up_proj.weight"
    copied(tmp_path / "a.ninfer", tmp_path / "b.ninfer", lambda name, data: None if name == lost else data)
    with pytest.raises(ConversionError, match=r"lacks 1 of the 12 .*model\.layers\.0\.mlp\.up_proj\.weight"):
        convert(tmp_path / "b.ninfer", tmp_path / "c.ninfer", "keep")
    assert not list(tmp_path.glob("c.ninfer*"))


def test_illegal_words_are_refused_with_tensor_and_row(tmp_path: Path) -> None:
    """A scale of infinity in row 200 of a matrix of 256 columns: 4 scales a row, behind the codes of all rows."""
    packed_artifact(tmp_path / "a.ninfer", "q4_g64_fp16")
    broken = "text/model.layers.0.mlp.up_proj.weight"

    def spoil(name: str, data: bytes) -> bytes:
        if name != broken:
            return data
        at = 256 * 128 + 200 * 8 + 2
        return data[:at] + b"\x00\x7c" + data[at + 2 :]

    copied(tmp_path / "a.ninfer", tmp_path / "b.ninfer", spoil)
    with pytest.raises(ConversionError, match=rf"{broken}.*row 200, group 1.*0x7c00"):
        convert(tmp_path / "b.ninfer", tmp_path / "c.ninfer", "keep")
    assert not list(tmp_path.glob("c.ninfer*"))


def test_parameters_without_a_place_are_listed(tmp_path: Path) -> None:
    model = tiny_models.tiny_llama()
    path = tiny_models.written_artifact(
        tmp_path / "a.ninfer", model, change=lambda entries: entries.update(further=("bf16", torch.ones(5)))
    )
    source = ArtifactSource(path)
    assert [(unused.name, "LlamaForCausalLM" in unused.reason) for unused in source.unused] == [("text/further", True)]
    report = convert(source, tmp_path / "b.ninfer", "keep")
    assert [unused.name for unused in report.unused] == ["text/further"]


def test_a_parameter_of_another_shape_is_named(tmp_path: Path) -> None:
    def bend(entries: dict[str, tuple[str, torch.Tensor]]) -> None:
        format, values = entries["model.layers.1.mlp.up_proj.weight"]
        entries["model.layers.1.mlp.up_proj.weight"] = (format, values[:-8])

    path = tiny_models.written_artifact(tmp_path / "a.ninfer", tiny_models.tiny_llama(), change=bend)
    with pytest.raises(
        ConversionError, match=r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' cannot be a source: .*\[152, 64\]"
    ):
        ArtifactSource(path)


@pytest.mark.parametrize("change", [{"model_type": "no-such-model"}, {"architectures": ["NoSuchModel"]}])
def test_a_model_that_transformers_lacks_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    config = json.loads(tiny_models.tiny_llama().config.to_json_string(use_diff=False)) | change
    path = tiny_models.written_artifact(tmp_path / "a.ninfer", tiny_models.tiny_llama(), config=config)
    with pytest.raises(ConversionError, match="no-such-model|NoSuchModel"):
        ArtifactSource(path)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(NinferError, match=r"multi\.ninfer"):
        open_source(golden("ninfer", "multi", "multi.ninfer"))


def test_other_paths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"0")
    with pytest.raises(ConversionError, match=r"a \.gguf or a \.ninfer file; found a file of another kind"):
        open_source(tmp_path / "a.bin")
    with pytest.raises(ConversionError, match="found nothing"):
        open_source(tmp_path / "b.ninfer")


# Official artifacts


@pytest.mark.parametrize("model", ["qwen3_5_dense"])
def test_an_official_bf16_artifact_holds_its_checkpoint(model: str) -> None:
    source = ArtifactSource(golden("ninfer", "models", model, "bf16.ninfer"))
    checkpoint = load_file(golden("ninfer", "models", model, "checkpoint", "model.safetensors"))
    assert set(source.tensors) == set(checkpoint)
    for name, values in checkpoint.items():
        tensor = source.tensors[name]
        assert torch.equal(tensor.values(0, tensor.rows).float(), values.float()), name
        assert torch.equal(tensor.values(1, 3).float(), values[1:3].float()), name


@pytest.mark.parametrize("name", ["rotated", "gguf_columns"])
def test_weights_behind_a_transform_are_the_plain_ones(name: str) -> None:
    """The first two rows of what the model multiplies, not of what is stored."""
    folder = golden("ninfer", "models", f"qwen3_5_{name}")
    source = ArtifactSource(folder / f"{name}.ninfer")
    prefix = f"{name}/effective_rows/"
    tensors = load_tensors(folder / "expected.safetensors")
    expected = {key.removeprefix(prefix): rows for key, rows in tensors.items() if key.startswith(prefix)}
    whole = {tensor.origin: tensor for tensor in source.tensors.values()}
    found = {origin: rows for origin, rows in expected.items() if origin in whole}
    assert found
    for origin, rows in found.items():
        tensor = whole[origin]
        if tensor.encoded_rows:  # one format behind one transform: its words, and what their inputs go through
            assert tensor.fold is not None and tensor.fold.role in ("hadamard_signs", "input_columns")
            assert tensor.fold.vector.shape == (tensor.shape[-1],)
        else:
            assert tensor.encoding.startswith("composed")
        assert torch.allclose(tensor.values(0, 2), rows, rtol=1e-6, atol=0), origin


def test_words_stored_for_permuted_inputs_move_with_the_permutation(tmp_path: Path) -> None:
    """The blocks are the artifact's, and what the new model multiplies is what the old one does."""
    from transformers import AutoModelForCausalLM

    stored = golden("ninfer", "models", "qwen3_5_gguf_columns") / "gguf_columns.ninfer"
    kept = [name for name, tensor in ArtifactSource(stored).tensors.items() if tensor.fold is not None]
    assert len(kept) == 2 and all("out_proj" in name for name in kept)

    def keep(model: Any, recipe: Any, sources: Any) -> None:
        for name in kept:
            found = sources["checkpoint"].tensors[f"text/{name}"]
            recipe.assign(f"text/{name}", found.encoding, method="import_encoded", activation_policy="AllowA8")

    convert(stored, tmp_path / "b.ninfer", "q8", recipe=keep)
    artifact = open_artifact(tmp_path / "b.ninfer")
    assert sum("input_columns" in use.auxiliaries for use in artifact.uses) == 2
    models = [AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32) for p in (stored, tmp_path / "b.ninfer")]
    for name in kept:
        first, second = (model.get_parameter(name) for model in models)
        assert torch.equal(first, second) and torch.equal(first.dequantize(), second.dequantize()), name


def test_an_nvfp4_bank_of_many_divisors_keeps_its_words(tmp_path: Path) -> None:
    stored = golden("ninfer", "models", "qwen3_5_moe_nvfp4") / "nvfp4.ninfer"
    source = ArtifactSource(stored)
    banks = [
        tensor
        for name, tensor in source.tensors.items()
        if name.endswith(("gate_up_proj", "down_proj")) and tensor.members
    ]
    assert len(banks) == 4 and {bank.encoding for bank in banks} == {"nvfp4"}
    for bank in banks:
        each = len(bank.members) // bank.rows
        values = torch.cat([matrix.values(0, matrix.rows) for matrix in bank.members]).view(bank.shape)
        assert torch.equal(bank.values(0, bank.rows), values) and each == (2 if "gate_up" in bank.name else 1)
        assert len({matrix.divisor for matrix in bank.members}) > 1


def test_parts_that_the_class_leaves_aside_are_listed() -> None:
    source = ArtifactSource(golden("ninfer", "models", "qwen3_5_vision_mtp", "groupwise.ninfer"))
    aside = {unused.name.split("/")[0] for unused in source.unused}
    assert aside == {"mtp"} and all("Qwen3_5ForConditionalGeneration" in unused.reason for unused in source.unused)
