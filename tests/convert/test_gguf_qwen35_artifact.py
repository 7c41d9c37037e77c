"""Qwen3.5 GGUF files through an artifact, and as logical parameters: blocks move whole, and models compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from gguf_qwen35_files import (
    CLASSES,
    EXPERTS,
    FFN_KEYS,
    HEAD_WIDTH,
    HEADS,
    HIDDEN,
    KEY_HEADS,
    KEY_WIDTH,
    KEYS,
    LAYERS,
    TAPS,
    TYPES,
    VALUE_HEADS,
    VALUE_WIDTH,
    VOCABULARY,
    WHOLE,
    add_keys,
    checkpoint,
    finish,
    stored,
    tile,
    whole,
    write,
    write_vision,
)
from ninfer_torch import activation_precision
from ninfer_torch.artifact import open_artifact
from ninfer_torch.cli import main
from ninfer_torch.convert import convert
from ninfer_torch.convert.gguf_source import GgufSource
from ninfer_torch.convert.logical_parts import logical_tensors
from ninfer_torch.tensors import NinferTensor


@pytest.fixture(params=["qwen35", "qwen35moe"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


# Through an artifact


@pytest.mark.parametrize("preset", ["gguf", "q8"])
def test_a_converted_file_computes_with_its_decoded_values(tmp_path: Path, name: str, preset: str) -> None:
    """Blocks move whole: the columns of the gated delta net's output stay tiled behind a stated order of inputs."""
    source = GgufSource(write(tmp_path / "m.gguf", name, TYPES.Q8_0))

    def exact_activations(model: Any, recipe: Any, sources: Any) -> None:
        recipe.assign("*", activation_policy="A16Only")

    report = convert(source, tmp_path / "m.ninfer", preset, recipe=exact_activations)
    outputs = [
        entry for entry in report.tensors if "gdn/output" in entry.parameters[0] or "out_proj" in entry.parameters[0]
    ]
    artifact = open_artifact(tmp_path / "m.ninfer")
    orders = [use.auxiliaries["input_columns"] for use in artifact.uses if "input_columns" in use.auxiliaries]
    if preset == "gguf":
        assert {entry.format for entry in outputs} == {"gguf_q8_0"}
        assert len(orders) == 3 and len({order.object for order in orders}) == 1
    else:
        assert orders == []
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m.ninfer", **options)
    twin = (
        getattr(transformers, CLASSES[name])._from_config(source.config(), attn_implementation="eager").float().eval()
    )
    twin.load_state_dict({key: torch.from_numpy(whole(source, key)) for key in twin.state_dict()})
    if preset == "gguf":
        for key, value in model.named_parameters():
            if isinstance(value, NinferTensor):
                assert torch.allclose(value.dequantize(), twin.get_parameter(key), atol=1e-6), key
            else:
                assert torch.equal(value, twin.get_parameter(key)) or "norm" in key or value.dim() < 2, key
    ids = torch.arange(1, 25)[None] % VOCABULARY
    with torch.no_grad():
        found, expected = model(input_ids=ids).logits, twin(input_ids=ids).logits
    assert (found - expected).norm() < (1e-3 if preset == "gguf" else 0.1) * expected.norm()


@pytest.mark.parametrize("kind", [TYPES.Q4_0, TYPES.Q5_0, TYPES.IQ4_NL], ids=lambda kind: kind.name)
def test_tiled_columns_of_other_block_types(tmp_path: Path, kind: TYPES) -> None:
    """The plain weight is the file's with its columns put back, whatever the blocks."""
    if kind == TYPES.IQ4_NL:
        rows = np.random.default_rng(3).integers(0, 200, (HIDDEN, VALUE_HEADS * VALUE_WIDTH // 32, 18), dtype=np.uint8)
        rows[..., :2] = np.array([0.01], np.float16).view(np.uint8)
        blocks = rows.reshape(HIDDEN, -1)
    else:
        values = checkpoint("qwen35")["model.language_model.layers.0.linear_attn.out_proj.weight"]
        blocks = gguf.quantize(np.ascontiguousarray(tile(values, 1)), kind)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen35")
    add_keys(writer, "qwen35", {"block_count": LAYERS, **KEYS, **FFN_KEYS["qwen35"]})
    for parameter, part in checkpoint("qwen35").items():
        for key, tensor in stored(parameter, part) if not parameter.startswith("mtp.") else ():
            if key.endswith("ssm_out.weight"):
                writer.add_tensor(key, blocks, raw_dtype=kind)
            else:
                writer.add_tensor(key, np.ascontiguousarray(tensor))
    finish(writer)
    convert(tmp_path / "m.gguf", tmp_path / "m.ninfer", "gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m.ninfer", dtype=torch.float32)
    in_file = gguf.dequantize(blocks, kind)
    each = VALUE_HEADS // KEY_HEADS
    heads = np.split(in_file, VALUE_HEADS, 1)
    plain = np.concatenate([heads[number * KEY_HEADS + key] for key in range(KEY_HEADS) for number in range(each)], 1)
    weight = model.model.layers[2].linear_attn.out_proj.weight
    assert isinstance(weight, NinferTensor)
    assert np.allclose(weight.dequantize().numpy(), plain, atol=1e-6)


def test_a_file_and_its_vision_tower_become_one_artifact(tmp_path: Path, name: str) -> None:
    """By the command line too: the tower is the source named vision."""
    path, tower = write(tmp_path / "m.gguf", name, TYPES.Q8_0), write_vision(tmp_path / "v.gguf", name, TYPES.Q8_0)
    report = convert(path, tmp_path / "a.ninfer", "gguf", sources={"vision": tower}, artifact_id="ab" * 16)
    assert report.architecture in (CLASSES[name], WHOLE[name])
    arguments = ["convert", str(path), str(tmp_path / "b.ninfer"), "--preset", "gguf", "--source", f"vision={tower}"]
    assert main([*arguments, "--artifact-id", "ab" * 16, "--quiet"]) == 0
    assert (tmp_path / "a.ninfer").read_bytes() == (tmp_path / "b.ninfer").read_bytes()
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "a.ninfer", **options)
    source = GgufSource(path, vision=tower)
    twin = getattr(transformers, WHOLE[name])._from_config(source.config(), attn_implementation="eager").float().eval()
    twin.load_state_dict({key: torch.from_numpy(whole(source, key)) for key in twin.state_dict()})
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1))
    grid = torch.tensor([[1, 4, 4]])
    ids = torch.arange(1, 25)[None] % VOCABULARY
    with torch.no_grad(), activation_precision("a16"):
        towers = [one.model.visual(pixels, grid_thw=grid) for one in (model, twin)]
        found, expected = (one if isinstance(one, tuple) else (one.pooler_output,) for one in towers)
        assert (found[0] - expected[0]).norm() < 1e-3 * expected[0].norm()
        logits = [one(input_ids=ids).logits for one in (model, twin)]
    assert (logits[0] - logits[1]).norm() < 1e-2 * logits[1].norm()


# Logical parameters


def test_the_files_rows_become_logical_parameters(tmp_path: Path, name: str) -> None:
    """Query and gate rows by head, value heads in the model's order, each expert by itself; blocks are the checkpoint's."""
    path, tower = write(tmp_path / "m.gguf", name, TYPES.Q8_0), write_vision(tmp_path / "v.gguf", name)
    found = logical_tensors(GgufSource(path, vision=tower))
    assert set(found.configs) == {"text", "vision", "mtp"} and found.unused == ()
    state = checkpoint(name)
    layer = f"model.language_model.layers.{LAYERS - 1}."
    for prefix, own in ((f"text/layers/{LAYERS - 1}/", layer), ("mtp/layers/0/", "mtp.layers.0.")):
        heads = state[f"{own}self_attn.q_proj.weight"].reshape(HEADS, 2, HEAD_WIDTH, HIDDEN)
        for part, number in (("query", 0), ("gate", 1)):
            tensor = found.tensors[f"{prefix}attention/{part}"]
            expected = gguf.quantize(np.ascontiguousarray(heads[:, number].reshape(-1, HIDDEN)), TYPES.Q8_0)
            assert np.array_equal(tensor.blocks(0, tensor.rows).numpy(), expected)
            assert np.array_equal(tensor.blocks(33, 65).numpy(), expected[33:65])
    qkv = state["model.language_model.layers.0.linear_attn.in_proj_qkv.weight"]
    width = KEY_HEADS * KEY_WIDTH
    for part, rows in (("query", qkv[:width]), ("key", qkv[width : 2 * width]), ("value", qkv[2 * width :])):
        tensor = found.tensors[f"text/layers/0/gdn/{part}"]
        assert np.array_equal(tensor.blocks(0, tensor.rows).numpy(), gguf.quantize(rows, TYPES.Q8_0)), part
    output = found.tensors["text/layers/0/gdn/output"]
    assert output.fold is not None and output.fold.role == "input_columns" and output.read_blocks is not None
    assert found.tensors["text/layers/0/gdn/convolution"].shape == (TAPS, qkv.shape[0])
    for expert in range(EXPERTS if name == "qwen35moe" else 0):
        bank = state[f"{layer}mlp.experts.gate_up_proj"][expert]
        for part, rows in (("gate", bank[:32]), ("up", bank[32:])):
            tensor = found.tensors[f"text/layers/{LAYERS - 1}/moe/experts/{expert}/{part}"]
            assert np.array_equal(tensor.blocks(0, 32).numpy(), gguf.quantize(rows, TYPES.Q8_0))


def test_experts_of_two_block_types_keep_both(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen35moe", TYPES.Q8_0, kinds={"ffn_up_exps.weight": TYPES.Q5_0})
    tensors = logical_tensors(GgufSource(path)).tensors
    for expert in range(EXPERTS):
        bank = checkpoint("qwen35moe")["model.language_model.layers.2.mlp.experts.gate_up_proj"][expert]
        for part, kind, rows in (("gate", TYPES.Q8_0, bank[:32]), ("up", TYPES.Q5_0, bank[32:])):
            tensor = tensors[f"text/layers/2/moe/experts/{expert}/{part}"]
            assert tensor.encoding == f"gguf_{kind.name.lower()}" and tensor.shape == (32, HIDDEN)
            assert np.array_equal(tensor.blocks(0, 32).numpy(), gguf.quantize(rows, kind))
