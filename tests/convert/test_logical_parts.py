"""A source's tensors as logical parameters: the rows that NInfer's own converter gave each, values and words."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3_5ForConditionalGeneration

from golden import golden, load_json
from ninfer_torch.artifact import open_artifact
from ninfer_torch.convert.artifact_source import ArtifactSource
from ninfer_torch.convert.hf_source import HuggingFaceSource
from ninfer_torch.convert.logical_parts import logical_tensors, split_source
from ninfer_torch.convert.methods import quantize
from ninfer_torch.convert.module_source import ModuleSource
from ninfer_torch.convert.source import SourceTensor
from ninfer_torch.errors import ConversionError
from ninfer_torch.formats import get_format
from ninfer_torch.models.base import LogicalParameter, ModelParameter


def all_values(tensor: SourceTensor) -> torch.Tensor:
    return tensor.values(0, tensor.rows)


def checkpoint(model: str) -> HuggingFaceSource:
    return HuggingFaceSource(golden("ninfer", "models", model, "checkpoint"))


def test_values_are_those_of_a_golden_artifact() -> None:
    """NInfer's unquantized artifact of the dense model, parameter by parameter, by the hash of its values."""
    expected = load_json(golden("ninfer", "models", "qwen3_5_dense", "index.json"))["recipes"]["bf16"]
    hashes = expected["binding_sha256_float32"]
    found = logical_tensors(checkpoint("qwen3_5_dense"))
    assert set(found.tensors) == set(hashes)
    for name, tensor in found.tensors.items():
        values = all_values(tensor).to(torch.bfloat16 if tensor.encoding != "fp32" else torch.float32).float()
        assert hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest() == hashes[name], name


@pytest.mark.parametrize("model", ["qwen3_5_dense", "qwen3_5_moe", "qwen3_5_vision_mtp"])
def test_quantized_by_rows_they_are_the_golden_objects(model: str) -> None:
    """The official groupwise recipe is absmax by groups of a row, so every parameter can be quantized by itself."""
    found = logical_tensors(checkpoint(model))
    artifact = open_artifact(golden("ninfer", "models", model, "groupwise.ninfer"))
    assert set(found.configs) == set(artifact.components)
    for component, config in found.configs.items():
        assert config == json.loads(json.dumps(artifact.components[component].config)), component
    assert set(found.tensors) == set(artifact.bindings)
    for name, tensor in found.tensors.items():
        binding = artifact.bindings[name]
        (format,) = {artifact.objects[object_id].format for object_id in binding.objects}  # type: ignore[union-attr]
        values = all_values(tensor)
        expected = artifact.dequantize_parameter(name, tensor.shape)
        if get_format(format).quantized:
            assert torch.equal(quantize(values, format).dequantize(), expected), name
        else:
            assert torch.equal(values.to(get_format(format).dtype).float(), expected), name  # type: ignore[union-attr]
        begin, end = tensor.rows // 3, tensor.rows
        assert torch.equal(tensor.values(begin, end), values[begin:end]), name


def test_a_live_model_is_the_same_source() -> None:
    folder = golden("ninfer", "models", "qwen3_5_vision_mtp", "checkpoint")
    model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.bfloat16)
    live, stored = logical_tensors(ModuleSource(model)), logical_tensors(HuggingFaceSource(folder))
    assert set(stored.tensors) - set(live.tensors) == {name for name in stored.tensors if name.startswith("mtp/")}
    for name, tensor in live.tensors.items():
        assert torch.equal(all_values(tensor).float(), all_values(stored.tensors[name]).float()), name
    assert "mtp" in stored.configs and "mtp" not in live.configs


def test_an_artifact_gives_its_own_words_back() -> None:
    """Through the class's fused parameters and out of them again, where these are of one format."""
    path = golden("ninfer", "models", "qwen3_5_moe", "groupwise.ninfer")
    artifact = open_artifact(path)
    seen = 0
    for name, tensor in logical_tensors(ArtifactSource(path)).tensors.items():
        values = all_values(tensor).float()
        assert torch.equal(values, artifact.dequantize_parameter(name, tensor.shape)), name
        if tensor.encoded_rows and tensor.read_words is not None:
            seen += 1
            words, middle = tensor.encoded(0, tensor.rows).words, tensor.rows // 2
            parts = [tensor.encoded(0, middle).words, tensor.encoded(middle, tensor.rows).words]
            assert all(torch.equal(torch.cat(halves), word) for *halves, word in zip(*parts, words, strict=True)), name
    assert seen > 20


def source_tensor(values: torch.Tensor, **more: Any) -> SourceTensor:
    return SourceTensor("whole", tuple(values.shape), "fp32", lambda begin, end: values[begin:end], **more)


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_rows_in_turns_are_told_apart(slices: int) -> None:
    """Every range of rows, against a parameter written out turn by turn."""
    first = torch.arange(8 * 3).view(8, 3).float()
    second = 100 + torch.arange(16 * 3).view(16, 3).float()
    turns = zip(first.split(8 // slices), second.split(16 // slices), strict=True)
    whole = torch.cat([rows for turn in turns for rows in turn])
    sources = (LogicalParameter("a", (8, 3)), LogicalParameter("b", (16, 3)))
    blocks = (whole * 10).to(torch.uint8)
    tensor = source_tensor(whole, read_blocks=lambda begin, end: blocks[begin:end])
    parts = split_source(ModelParameter("", "x", (24, 3), sources, slices), tensor)
    for name, expected in (("a", first), ("b", second)):
        for begin in range(len(expected) + 1):
            for end in range(begin, len(expected) + 1):
                assert torch.equal(parts[name].values(begin, end), expected[begin:end])
                assert torch.equal(parts[name].blocks(begin, end), (expected[begin:end] * 10).to(torch.uint8))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    parameter = ModelParameter("", "x", (4, 3), (LogicalParameter("text/a", (4, 3)),))
    with pytest.raises(ConversionError, match=r"'whole' has shape \[5, 3\], expected \[4, 3\] for text/a"):
        split_source(parameter, source_tensor(torch.ones(5, 3)))

    class Other:
        name = "other"

        def config(self) -> Any:
            return LlamaConfig(architectures=["LlamaForCausalLM"])

    with pytest.raises(ConversionError, match=r"LlamaForCausalLM has no logical parameters here; known are Qwen3_5"):
        logical_tensors(Other())  # type: ignore[arg-type]


def test_missing_tensors_are_named() -> None:
    class Less(HuggingFaceSource):
        @property
        def tensors(self) -> Any:  # type: ignore[override]
            found = dict(super().tensors)
            del found["model.layers.0.mlp.up_proj.weight"]
            return found

    folder = golden("ninfer", "models", "qwen3_5_dense", "checkpoint")
    with pytest.raises(
        ConversionError, match=r"lacks 1 tensors of Qwen3_5ForCausalLM: model\..*layers\.0\.mlp\.up_proj"
    ):
        logical_tensors(Less(folder))
