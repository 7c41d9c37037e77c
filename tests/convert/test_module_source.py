"""A live model as a source: what is converted is what it holds now, plain or packed; what cannot be is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import tiny_models
from ninfer_torch.artifact import open_artifact
from ninfer_torch.convert import ModuleSource, convert, open_source
from ninfer_torch.convert.source import Source
from ninfer_torch.errors import ConversionError


def weights(path: Path) -> dict[str, bytes]:
    """Stored bytes by parameter."""
    artifact = open_artifact(path)
    return {name: artifact.read_object(str(binding.object)) for name, binding in artifact.bindings.items()}


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_models.tiny_llama()


@pytest.mark.parametrize("preset", ["q4", "fp8", "direct"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_model_converts_as_its_folder_does(tmp_path: Path, preset: str, dtype: torch.dtype) -> None:
    model = tiny_models.tiny_llama(dtype=dtype)
    folder = tiny_models.save_folder(tmp_path / "tiny", model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    convert(folder, tmp_path / "a.ninfer", preset)
    convert(model, tmp_path / "b.ninfer", preset)
    assert weights(tmp_path / "b.ninfer") == weights(tmp_path / "a.ninfer")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    first, second = (open_artifact(tmp_path / f"{name}.ninfer").components["text"].config for name in "ab")
    assert dict(first) == dict(second)


def test_files_and_provenance(model: LlamaForCausalLM) -> None:
    model.generation_config.max_new_tokens = 7
    source = ModuleSource(model, tokenizer=tiny_models.tiny_tokenizer(), name="mine")
    assert isinstance(source, Source) and source.name == "mine"
    resources = source.resources()
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= set(resources)
    assert json.loads(resources["generation_config.json"])["max_new_tokens"] == 7
    assert source.provenance() == {"kind": "module", "name": "mine", "class": "LlamaForCausalLM"}
    assert set(ModuleSource(model).resources()) == {"generation_config.json"}


def test_a_path_in_the_config_stays_private(model: LlamaForCausalLM) -> None:
    model.config.name_or_path = "/somebody/private/checkpoint"
    source = ModuleSource(model)
    assert source.name == "checkpoint" and "somebody" not in json.dumps(source.provenance())


@pytest.mark.parametrize("preset", ["q4", "q8", "fp8"])
def test_packed_words_move_whole(tmp_path: Path, model: LlamaForCausalLM, preset: str) -> None:
    convert(model, tmp_path / "a.ninfer", preset)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a.ninfer")
    source = ModuleSource(loaded)
    packed = [tensor for tensor in source.tensors.values() if tensor.encoded_rows]
    assert len(packed) == 2 * 7 + 2
    for tensor in packed:
        values = loaded.get_parameter(tensor.name).dequantize()
        assert torch.equal(tensor.values(0, tensor.rows), values) and torch.equal(tensor.values(5, 9), values[5:9])
    convert(source, tmp_path / "b.ninfer", "keep")
    stored, again = weights(tmp_path / "a.ninfer"), weights(tmp_path / "b.ninfer")
    assert {name: again[name] for name in again if "norm" not in name} == {
        name: stored[name] for name in stored if "norm" not in name
    }
    config = dict(open_artifact(tmp_path / "b.ninfer").components["text"].config)
    assert "quantization_config" not in config and config["architectures"] == ["LlamaForCausalLM"]


def test_tied_weights_are_one_object(tmp_path: Path) -> None:
    convert(tiny_models.tiny_llama(tied=True), tmp_path / "a.ninfer", "q4")
    bindings = open_artifact(tmp_path / "a.ninfer").bindings
    assert bindings["text/lm_head.weight"] == bindings["text/model.embed_tokens.weight"]


@pytest.mark.parametrize("preset", ["q4", "fp8", "direct"])
def test_views_convert_as_their_contiguous_copies(tmp_path: Path, preset: str) -> None:
    """Transposed, strided and expanded weights; the rows that are read are views too."""
    plain, viewed = tiny_models.tiny_llama(seed=4), tiny_models.tiny_llama(seed=4)
    with torch.no_grad():
        for index, layer in enumerate(viewed.model.layers):
            mlp, attention = layer.mlp, layer.self_attn
            mlp.up_proj.weight = torch.nn.Parameter(mlp.up_proj.weight.T.contiguous().T)
            wide = torch.full((64, 320), torch.nan, dtype=torch.bfloat16)
            wide[:, ::2] = mlp.down_proj.weight
            mlp.down_proj.weight = torch.nn.Parameter(wide[:, ::2])
            attention.q_proj.weight = torch.nn.Parameter(attention.q_proj.weight[:1].expand(64, 64))
            first = plain.model.layers[index].self_attn.q_proj.weight
            first.copy_(first[:1].clone().expand(64, 64))
    assert not any(layer.mlp.up_proj.weight.is_contiguous() for layer in viewed.model.layers)
    convert(plain, tmp_path / "a.ninfer", preset)
    convert(viewed, tmp_path / "b.ninfer", preset)
    assert weights(tmp_path / "a.ninfer") == weights(tmp_path / "b.ninfer")


def test_a_compiled_model_is_the_model_inside(tmp_path: Path, model: LlamaForCausalLM) -> None:
    convert(model, tmp_path / "a.ninfer", "q4")
    convert(torch.compile(model), tmp_path / "b.ninfer", "q4")
    assert weights(tmp_path / "a.ninfer") == weights(tmp_path / "b.ninfer")


class Wrapped(torch.nn.Module):
    """Somebody's own class around the layers of a Llama."""

    def __init__(self, inner: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = inner.model
        self.lm_head = inner.lm_head


def test_any_module_with_the_names_of_a_class_and_its_config(tmp_path: Path, model: LlamaForCausalLM) -> None:
    config = model.config
    config.architectures = ["LlamaForCausalLM"]
    convert(model, tmp_path / "a.ninfer", "q4")
    convert(ModuleSource(Wrapped(model), config=config), tmp_path / "b.ninfer", "q4")
    assert weights(tmp_path / "a.ninfer") == weights(tmp_path / "b.ninfer")


# Refusals


def test_a_module_without_a_config_is_refused(model: LlamaForCausalLM) -> None:
    with pytest.raises(ConversionError, match=r"a Wrapped has no Transformers config; expected .*config=\.\.\."):
        open_source(Wrapped(model))


def test_a_module_that_lacks_parameters_names_them(tmp_path: Path, model: LlamaForCausalLM) -> None:
    del model.model.layers[1].mlp.up_proj
    with pytest.raises(ConversionError, match=r"lacks 1 of the .*model\.layers\.1\.mlp\.up_proj\.weight"):
        convert(model, tmp_path / "a.ninfer", "q4")


def test_tensors_without_values_are_named(model: LlamaForCausalLM) -> None:
    model.model.layers[0].mlp.down_proj.to("meta")
    with pytest.raises(ConversionError, match=r"'model\.layers\.0\.mlp\.down_proj\.weight' is on the meta device"):
        ModuleSource(model)


class Foreign(torch.Tensor):
    """A tensor class of somebody else."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(160, 64, dtype=torch.uint8), r"torch\.uint8"),
        (torch.zeros(160, 64, dtype=torch.int8), r"torch\.int8"),
        (torch.zeros(160, 64).to(torch.float8_e4m3fn), r"torch\.float8_e4m3fn"),
        (torch.zeros(160, 64, dtype=torch.complex64), r"torch\.complex64"),
        (torch.zeros(160, 64).to_sparse(), r"layout torch\.sparse_coo"),
        (torch.zeros(160, 64).as_subclass(Foreign), r"Foreign, expected a plain tensor"),
    ],
)
def test_words_that_are_no_numbers_are_named(model: LlamaForCausalLM, value: torch.Tensor, message: str) -> None:
    layer: Any = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(value, requires_grad=False)
    with pytest.raises(ConversionError, match=rf"'model\.layers\.1\.mlp\.up_proj\.weight' is .*{message}"):
        ModuleSource(model)


def test_a_live_model_is_not_resumed(tmp_path: Path, model: LlamaForCausalLM) -> None:
    with pytest.raises(ConversionError, match="a live model cannot be converted with resume"):
        convert(model, tmp_path / "a.ninfer", "q4", resume=True)
    assert not list(tmp_path.iterdir())


def test_integers_where_a_layer_multiplies_are_named(tmp_path: Path, model: LlamaForCausalLM) -> None:
    layer: Any = model.model.layers[1].mlp.up_proj
    layer.weight = torch.nn.Parameter(torch.zeros(160, 64, dtype=torch.int32), requires_grad=False)
    with pytest.raises(ConversionError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' holds int32 words"):
        convert(model, tmp_path / "a.ninfer", "q4")
    assert not list(tmp_path.iterdir())
