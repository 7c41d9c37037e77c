"""GGUF files whose matrices are stored for rotated inputs: words with their signs, values of the plain weight, no silence.

The rotation of the oracle is a written-out Hadamard matrix in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ninfer_torch.artifact import open_artifact
from ninfer_torch.convert import convert
from ninfer_torch.convert.gguf_source import GgufSource
from ninfer_torch.errors import ConversionError
from ninfer_torch.tensors import NinferTensor
from ninfer_torch.tensors.transformed import TransformedInput

PQ2_0, BLOCK_BYTES = 142, 34
HIDDEN, FEED, VOCABULARY, HEADS, ROWS = 1024, 2048, 24, 8, 64
Array = np.ndarray[Any, Any]

EMBEDDING = "token_embd.weight"
SHAPES = {
    EMBEDDING: (VOCABULARY, HIDDEN),
    "output.weight": (VOCABULARY, HIDDEN),
    "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
    "blk.0.attn_k.weight": (HIDDEN // 4, HIDDEN),
    "blk.0.attn_v.weight": (HIDDEN // 4, HIDDEN),
    "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate.weight": (FEED, HIDDEN),
    "blk.0.ffn_up.weight": (FEED, HIDDEN),
    "blk.0.ffn_down.weight": (HIDDEN, FEED),
}
PARAMETERS = {
    EMBEDDING: "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
}
"""Of the matrices whose rows keep their order."""


@cache
def stored() -> dict[str, tuple[Array, Array]]:
    """Codes -1, 0, 1 and binary16 scales of every matrix, as they lie in the file."""
    random = np.random.default_rng(5)
    return {
        name: (
            random.integers(-1, 2, shape),
            (0.02 + 0.01 * random.random((shape[0], shape[1] // 128))).astype(np.float16),
        )
        for name, shape in SHAPES.items()
    }


@cache
def signs() -> dict[int, Array]:
    random = np.random.default_rng(6)
    return {width: random.choice([-1, 1], width).astype(np.int32) for width in (HIDDEN, FEED)}


@cache
def matrix() -> Array:
    """The normalised Hadamard matrix of 1024 columns in natural order: entry (i, j) counts the bits of i and j."""
    square = np.array([[1.0]])
    while len(square) < 1024:
        square = np.block([[square, square], [square, -square]])
    return square / 32


def in_file(name: str) -> Array:
    codes, scales = stored()[name]
    return codes * np.repeat(scales.astype(np.float64), 128, axis=1)


def plain(name: str) -> Array:
    """The weight that multiplies ordinary inputs: each block of 1024 columns rotated back, then the signs."""
    blocks = np.split(in_file(name), SHAPES[name][1] // 1024, axis=1)
    return np.concatenate([block @ matrix() for block in blocks], axis=1) * signs()[SHAPES[name][1]]


def pq2_0(codes: Array, scales: Array) -> Array:
    """A scale, then four codes plus one per byte, the first in the lowest bits."""
    digits = (codes + 1).reshape(len(codes), -1, 32, 4)
    data = sum(digits[..., lane] << 2 * lane for lane in range(4)).astype(np.uint8)
    words = np.ascontiguousarray(scales).view(np.uint8).reshape(len(codes), -1, 2)
    return np.concatenate([words, data], axis=2).reshape(len(codes), -1)


def write(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ternary: bool = True,
    keys: Mapping[str, Any] | None = None,
    without: str = "",
) -> Path:
    monkeypatch.setitem(gguf.GGML_QUANT_SIZES, PQ2_0, (128, BLOCK_BYTES))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 4)
    writer.add_layer_norm_rms_eps(1e-5)
    rotation = {
        "version": 1,
        "block_size": 1024,
        "transform": "normalized-sylvester-walsh-hadamard",
        "axis": "input-last-dimension",
        "sign_mode": "explicit",
        "sign_widths": [HIDDEN, FEED],
        "sign_values": np.concatenate([signs()[HIDDEN], signs()[FEED]]).tolist(),
        "weight_names": [name for name in SHAPES if name != EMBEDDING],
        "inverse_weight_names": [EMBEDDING],
        "gdn_v_grouped": True,
        **(keys or {}),
    }
    for key, value in rotation.items():
        if key == without:
            continue
        if isinstance(value, list):
            writer.add_array(f"prism.hadamard.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"prism.hadamard.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"prism.hadamard.{key}", value)
        else:
            writer.add_string(f"prism.hadamard.{key}", value)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    for name, (codes, scales) in stored().items():
        if ternary:
            writer.add_tensor(name, pq2_0(codes, scales), raw_dtype=PQ2_0)
        else:
            writer.add_tensor(name, in_file(name).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def close(found: torch.Tensor, expected: Array) -> bool:
    """Within 1e-6 of the largest value, which is what sums in float32 keep."""
    return bool(np.abs(found.numpy().astype(np.float64) - expected).max() <= 1e-6 * np.abs(expected).max())


def test_values_are_those_of_the_plain_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = GgufSource(write(tmp_path / "m.gguf", monkeypatch))
    for name, parameter in PARAMETERS.items():
        tensor = source.tensors[parameter]
        assert tensor.encoding == "pq2_0" and tensor.fold is not None and tensor.fold.role == "hadamard_signs"
        assert tensor.fold.vector.dtype == torch.bfloat16
        assert tensor.fold.vector.tolist() == signs()[tensor.shape[1]].tolist()
        assert close(tensor.values(0, tensor.rows), plain(name)), name
        assert torch.equal(tensor.values(3, 9), tensor.values(0, tensor.rows)[3:9])
        blocks = pq2_0(*stored()[name])
        assert np.array_equal(tensor.blocks(0, tensor.rows).numpy(), blocks), name


def test_a_file_of_plain_words_in_a_rotated_basis_is_not_taken_for_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = GgufSource(write(tmp_path / "m.gguf", monkeypatch, ternary=False))
    for name, parameter in PARAMETERS.items():
        tensor = source.tensors[parameter]
        assert tensor.fold is None and tensor.encoding == "fp32" and not tensor.encoded_rows
        assert np.allclose(tensor.values(0, tensor.rows).numpy(), plain(name), atol=2e-4)


def test_words_move_to_t2_behind_their_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded, a layer multiplies by the plain weight, which is never made; the table of tokens takes another format."""
    path = write(tmp_path / "m.gguf", monkeypatch)
    convert(path, tmp_path / "m.ninfer", "gguf", settings=["text/*embed_tokens*=q8_g32_fp16:grouped_absmax"])
    artifact = open_artifact(tmp_path / "m.ninfer")
    vectors = {use.auxiliaries["hadamard_signs"].object for use in artifact.uses}
    assert len(artifact.uses) == 8 and len(vectors) == 2  # one vector for each width
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m.ninfer", dtype=torch.float32)
    for name, parameter in PARAMETERS.items():
        weight = model.get_parameter(parameter)
        if name == EMBEDDING:
            assert np.abs(weight.dequantize().numpy() - plain(name)).max() < 0.01 * np.abs(plain(name)).max()
            continue
        assert isinstance(weight, TransformedInput) and weight.weight.format == "t2_g128_fp16"
        assert close(weight.dequantize(), plain(name)), name
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(1))
        expected = x.numpy().astype(np.float64) @ plain(name).T
        assert np.abs(torch.nn.functional.linear(x, weight).numpy() - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_folded_table_without_a_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state dict's embedding has no use that could state its signs."""
    with pytest.raises(
        ConversionError, match=r"embed_tokens.* has no use that could state hadamard_signs; take its values"
    ):
        convert(write(tmp_path / "m.gguf", monkeypatch), tmp_path / "m.ninfer", "gguf")
    assert not (tmp_path / "m.ninfer").exists()


def test_other_presets_take_the_plain_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(write(tmp_path / "m.gguf", monkeypatch), tmp_path / "m.ninfer", "q8")
    artifact = open_artifact(tmp_path / "m.ninfer")
    assert not any(use.auxiliaries for use in artifact.uses)
    weight = artifact.parameter("text/model.layers.0.mlp.down_proj.weight")
    expected = plain("blk.0.ffn_down.weight")
    assert isinstance(weight, NinferTensor)
    assert np.abs(weight.dequantize().numpy() - expected).max() < 0.01 * np.abs(expected).max()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another version": ({"keys": {"version": 2}}, r"metadata 'prism\.hadamard\.version'\)"),
    "another block": ({"keys": {"block_size": 128}}, r"metadata 'prism\.hadamard\.block_size'\)"),
    "another transform": ({"keys": {"transform": "fwht"}}, r"'prism\.hadamard\.transform'.*normalized-sylvester"),
    "another axis": ({"keys": {"axis": "output"}}, r"'prism\.hadamard\.axis'"),
    "signs by a seed": ({"keys": {"sign_mode": "seeded"}}, r"'prism\.hadamard\.sign_mode'"),
    "no signs": ({"without": "sign_values"}, r"'prism\.hadamard\.sign_values'"),
    "an unknown member": ({"keys": {"scale": 2}}, r"metadata 'prism\.hadamard\.scale'\)"),
    "a sign of 0": ({"keys": {"sign_values": [0] * (HIDDEN + FEED)}}, "rotation signs for widths"),
    "too few signs": ({"keys": {"sign_values": [1] * HIDDEN}}, r"1024 rotation signs for widths \[1024, 2048\]"),
    "a width of no whole blocks": (
        {"keys": {"sign_widths": [512, 2560]}},
        r"for widths \[512, 2560\]; expected .* that 1024 divides",
    ),
    "a width without signs": (
        {"keys": {"sign_widths": [HIDDEN], "sign_values": [1] * HIDDEN}},
        r"no signs of a rotation for the columns of 'blk\.0\.ffn_down\.weight'",
    ),
    "a tensor that is missing": ({"keys": {"weight_names": ["blk.7.attn_q.weight"]}}, r"missing: 'blk\.7\.attn_q"),
    "a norm": ({"keys": {"weight_names": ["output_norm.weight"]}}, r"no signs .*'output_norm\.weight'"),
    "a flag that is none": ({"keys": {"gdn_v_grouped": "yes"}}, r"'prism\.hadamard\.gdn_v_grouped'"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_a_rotation_that_is_not_exactly_known_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "m.gguf", monkeypatch, **options)
    with pytest.raises(ConversionError, match=message):
        GgufSource(path)


# Qwen3.5: the gated delta net's output


def delta_net_file(path: Path, grouped: bool) -> tuple[Path, Array]:
    """A Qwen3.5 of one linear layer, 2 key heads and 4 value heads of 256, whose output matrix alone is rotated."""
    writer = gguf.GGUFWriter(path, "qwen35")
    counts = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32}
    counts |= {"attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 16}
    counts |= {"rope.dimension_count": 8, "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2}
    counts |= {"ssm.time_step_rank": 4, "ssm.inner_size": 1024, "full_attention_interval": 4}
    for key, value in counts.items():
        writer.add_uint32(f"qwen35.{key}", value)
    writer.add_float32("qwen35.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("qwen35.rope.freq_base", 1e4)
    writer.add_array("qwen35.rope.dimension_sections", [2, 1, 1, 0])
    for key, value in (("version", 1), ("block_size", 1024)):
        writer.add_uint32(f"prism.hadamard.{key}", value)
    texts = {
        "transform": "normalized-sylvester-walsh-hadamard",
        "axis": "input-last-dimension",
        "sign_mode": "explicit",
    }
    for key, text in texts.items():
        writer.add_string(f"prism.hadamard.{key}", text)
    writer.add_bool("prism.hadamard.gdn_v_grouped", grouped)
    lists: dict[str, list[Any]] = {"sign_widths": [1024], "sign_values": signs()[1024].tolist()}
    lists |= {"weight_names": ["blk.0.ssm_out.weight"], "inverse_weight_names": ["blk.0.ssm_out.weight"]}
    for key, values in lists.items():
        writer.add_array(f"prism.hadamard.{key}", values)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (8, 32),
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.post_attention_norm.weight": (32,),
        "blk.0.attn_qkv.weight": (64 + 1024, 32),
        "blk.0.attn_gate.weight": (1024, 32),
        "blk.0.ssm_alpha.weight": (4, 32),
        "blk.0.ssm_beta.weight": (4, 32),
        "blk.0.ssm_a": (4,),
        "blk.0.ssm_dt.bias": (4,),
        "blk.0.ssm_conv1d.weight": (64 + 1024, 4),
        "blk.0.ssm_norm.weight": (256,),
        "blk.0.ffn_gate.weight": (32, 32),
        "blk.0.ffn_up.weight": (32, 32),
        "blk.0.ffn_down.weight": (32, 32),
    }
    random = np.random.default_rng(8)
    for name, shape in shapes.items():
        writer.add_tensor(name, -random.random(shape).astype(np.float32))
    output = random.integers(-8, 9, (32, 1024)).astype(np.float32)
    writer.add_tensor("blk.0.ssm_out.weight", output)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, output


def test_rotated_outputs_have_columns_in_the_models_order(tmp_path: Path) -> None:
    """A rotation mixes columns, so such files keep value heads grouped there; their rows elsewhere stay tiled."""
    path, output = delta_net_file(tmp_path / "m.gguf", True)
    source = GgufSource(path)
    found = source.tensors["model.layers.0.linear_attn.out_proj.weight"]
    assert close(found.values(0, 32), output.astype(np.float64) @ matrix() * signs()[1024])
    gate = source.tensors["model.layers.0.linear_attn.in_proj_z.weight"].values(0, 1024)
    stored_gate = next(t.data for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_gate.weight")
    heads = np.split(stored_gate, 4)
    assert np.array_equal(gate.numpy(), np.concatenate([heads[0], heads[2], heads[1], heads[3]]))


def test_a_rotation_over_tiled_columns_is_refused(tmp_path: Path) -> None:
    path, _ = delta_net_file(tmp_path / "m.gguf", False)
    with pytest.raises(ConversionError, match=r"'blk\.0\.ssm_out\.weight' is stored for rotated inputs.*tiled columns"):
        GgufSource(path)
