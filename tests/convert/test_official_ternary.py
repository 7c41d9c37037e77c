"""NInfer's rotated ternary artifact, put back into the GGUF file it would come from, becomes the same artifact again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from golden import golden
from ninfer_torch.artifact import Artifact, TensorObject, open_artifact
from ninfer_torch.convert.pipeline import convert
from ninfer_torch.tensors import NinferTensor

PQ2_0 = 142
KEY_HEADS, VALUE_HEADS, WIDTH = 2, 16, 128
Array = np.ndarray[Any, Any]

MATRICES = {
    "token_embd": "text/token_embedding",
    "output": "text/output_head",
    "blk.0.attn_gate": "text/layers/0/gdn/z",
    "blk.0.ssm_out": "text/layers/0/gdn/output",
    "blk.1.attn_k": "text/layers/1/attention/key",
    "blk.1.attn_v": "text/layers/1/attention/value",
    "blk.1.attn_output": "text/layers/1/attention/output",
    **{f"blk.{i}.ffn_{part}": f"text/layers/{i}/mlp/{part}" for i in (0, 1) for part in ("gate", "up", "down")},
}
NORMS = {
    "output_norm.weight": "text/final_norm",
    "blk.1.attn_q_norm.weight": "text/layers/1/attention/query_norm",
    "blk.1.attn_k_norm.weight": "text/layers/1/attention/key_norm",
    **{f"blk.{i}.attn_norm.weight": f"text/layers/{i}/input_norm" for i in (0, 1)},
    **{f"blk.{i}.post_attention_norm.weight": f"text/layers/{i}/post_attention_norm" for i in (0, 1)},
}


def tiled(rows: Array) -> Array:
    """llama.cpp's order of value heads: those of one number together."""
    each = VALUE_HEADS // KEY_HEADS
    heads = np.split(rows, VALUE_HEADS)
    return np.concatenate([heads[key * each + number] for number in range(each) for key in range(KEY_HEADS)])


def blocks(artifact: Artifact, name: str) -> Array:
    """The words of a t2 parameter as PQ2_0 blocks: the scale, then 32 bytes of codes counted from -1, not from 0."""
    weight = artifact.parameter(name)
    assert isinstance(weight, NinferTensor) and weight.format == "t2_g128_fp16"
    codes, scales = weight.planes["codes"].numpy(), weight.planes["scales"].numpy()
    fields = [codes >> shift & 3 for shift in (0, 2, 4, 6)]
    codes = np.add.reduce([(field + 1 & 3) << 2 * lane for lane, field in enumerate(fields)]).astype(np.uint8)
    words = np.ascontiguousarray(scales).view(np.uint8).reshape(len(codes), -1, 2)
    return np.concatenate([words, codes], axis=2).reshape(len(codes), -1)


def write(path: Path, artifact: Artifact) -> Path:
    def values(name: str) -> Array:
        return artifact.dequantize_parameter(name).numpy()

    writer = gguf.GGUFWriter(path, "qwen35")
    config = artifact.components["text"].config
    counts = {"block_count": 2, "context_length": 512, "embedding_length": 1024, "feed_forward_length": 2048}
    counts |= {"attention.head_count": 8, "attention.head_count_kv": 2, "attention.key_length": 128}
    counts |= {"attention.value_length": 128, "rope.dimension_count": 32, "full_attention_interval": 2}
    counts |= {"ssm.conv_kernel": 4, "ssm.state_size": WIDTH, "ssm.group_count": KEY_HEADS}
    counts |= {"ssm.time_step_rank": VALUE_HEADS, "ssm.inner_size": VALUE_HEADS * WIDTH}
    for key, value in counts.items():
        writer.add_uint32(f"qwen35.{key}", value)
    writer.add_float32("qwen35.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32("qwen35.rope.freq_base", config["rope_parameters"]["rope_theta"])
    writer.add_array("qwen35.rope.dimension_sections", [6, 5, 5, 0])
    matrices = {f"{name}.weight": blocks(artifact, parameter) for name, parameter in MATRICES.items()}
    matrices["blk.0.attn_gate.weight"] = tiled(matrices["blk.0.attn_gate.weight"])
    query, key, value = (blocks(artifact, f"text/layers/0/gdn/{part}") for part in ("query", "key", "value"))
    matrices["blk.0.attn_qkv.weight"] = np.concatenate([query, key, tiled(value)])
    heads = [np.split(blocks(artifact, f"text/layers/1/attention/{part}"), 8) for part in ("query", "gate")]
    matrices["blk.1.attn_q.weight"] = np.concatenate([rows for pair in zip(*heads, strict=True) for rows in pair])
    signs = {
        int(found.numel()): found.float().numpy()
        for use in artifact.uses
        if "hadamard_signs" in use.auxiliaries
        for found in [artifact.auxiliary(use.parameter, use.input, "hadamard_signs")]
    }
    for key, number in (("version", 1), ("block_size", 1024)):
        writer.add_uint32(f"prism.hadamard.{key}", number)
    for key, text in (
        ("transform", "normalized-sylvester-walsh-hadamard"),
        ("axis", "input-last-dimension"),
        ("sign_mode", "explicit"),
    ):
        writer.add_string(f"prism.hadamard.{key}", text)
    writer.add_bool("prism.hadamard.gdn_v_grouped", True)
    widths = sorted(signs)
    writer.add_array("prism.hadamard.sign_widths", widths)
    writer.add_array("prism.hadamard.sign_values", np.concatenate([signs[width] for width in widths]).tolist())
    writer.add_array("prism.hadamard.weight_names", [name for name in matrices if name != "token_embd.weight"])
    writer.add_array("prism.hadamard.inverse_weight_names", ["token_embd.weight"])
    for name, words in matrices.items():
        writer.add_tensor(name, words, raw_dtype=PQ2_0)  # type: ignore[arg-type]
    gdn = "text/layers/0/gdn/"
    first = 2 * KEY_HEADS * WIDTH
    taps = values(gdn + "convolution").T
    tensors = {name: values(parameter) + np.float32(1) for name, parameter in NORMS.items()}
    tensors |= {
        "blk.0.ssm_alpha.weight": tiled(values(gdn + "a_projection")),
        "blk.0.ssm_beta.weight": tiled(values(gdn + "b_projection")),
        "blk.0.ssm_a": tiled(-np.exp(values(gdn + "a_log").astype(np.float64))).astype(np.float32),
        "blk.0.ssm_dt.bias": tiled(values(gdn + "dt_bias")),
        "blk.0.ssm_conv1d.weight": np.concatenate([taps[:first], tiled(taps[first:])]),
        "blk.0.ssm_norm.weight": values(gdn + "norm"),
    }
    for name, plain in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(plain, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_ternary_file_becomes_the_golden_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ternary object by its bytes, every use and its signs, the folded table of tokens among them."""
    monkeypatch.setitem(gguf.GGML_QUANT_SIZES, PQ2_0, (128, 34))
    expected = open_artifact(golden("ninfer", "models", "qwen3_5_rotated", "rotated.ninfer"))
    convert(write(tmp_path / "m.gguf", expected), tmp_path / "m.ninfer", recipe="bonsai2_27b_ternary")
    found = open_artifact(tmp_path / "m.ninfer")
    assert found.bindings.keys() == expected.bindings.keys()
    for name, binding in expected.bindings.items():
        own = found.bindings[name]
        pairs = zip(own.objects, binding.objects, strict=True)
        for record, other in ((found.objects[a], expected.objects[b]) for a, b in pairs):
            assert isinstance(record, TensorObject) and isinstance(other, TensorObject)
            assert record.format == other.format, name
            if not name.endswith(("_projection", "a_log")):  # the golden file packs a and b; log(exp(x)) may round
                assert record.shape == other.shape, name
                assert found.read_object(record.id) == expected.read_object(other.id), name
        assert np.allclose(found.dequantize_parameter(name), expected.dequantize_parameter(name), rtol=1e-6), name
    assert {(use.parameter, use.input) for use in found.uses} == {(use.parameter, use.input) for use in expected.uses}
    for use in expected.uses:
        own_use = found.use(use.parameter, use.input)
        assert own_use.auxiliaries.keys() == use.auxiliaries.keys()
        for role in use.auxiliaries:
            pair = (artifact.auxiliary(use.parameter, use.input, role) for artifact in (found, expected))
            assert np.array_equal(*(vector.float().numpy() for vector in pair))
