"""Ternary GGUF blocks (types 142 and 143) end as t2 objects of the same words, through a whole conversion."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from ninfer_torch.artifact import open_artifact
from ninfer_torch.convert import convert
from ninfer_torch.convert.gguf_source import GgufSource
from ninfer_torch.errors import ConversionError

TYPES = {"pq2_0": (142, 34), "ptq1_0": (143, 28)}
LAYERS, HIDDEN, FEED, VOCABULARY, HEADS = 1, 128, 256, 40, 4

Array = np.ndarray[Any, Any]
Matrix = tuple[Array, Array]
"""Codes -1, 0, 1 [N, K] and binary16 scales [N, K / 128]."""


def pq2_0_block(codes: list[int], scale: bytes) -> bytes:
    """Scale, then four codes plus one per byte, the first in the lowest bits."""
    digits = [code + 1 for code in codes]
    return scale + bytes(sum(digits[at + lane] << 2 * lane for lane in range(4)) for at in range(0, 128, 4))


def ptq1_0_block(codes: list[int], scale: bytes) -> bytes:
    """Base-3 digits of 80, 40 and 8 codes as fractions of 256, rounded up so that each digit comes back; then the scale."""
    data = b""
    for begin, width, count in ((0, 16, 5), (80, 8, 5), (120, 2, 4)):
        for byte in range(width):
            number = 0
            for digit in range(5):
                code = codes[begin + digit * width + byte] + 1 if digit < count else 0
                number = 3 * number + code
            data += bytes([-(-number * 256 // 243)])
    return data + scale


BLOCKS = {"pq2_0": pq2_0_block, "ptq1_0": ptq1_0_block}


def encoded(matrix: Matrix, kind: str) -> Array:
    codes, scales = matrix
    rows = [
        b"".join(
            BLOCKS[kind](row[128 * block : 128 * block + 128].tolist(), scale.tobytes())
            for block, scale in enumerate(row_scales)
        )
        for row, row_scales in zip(codes, scales, strict=True)
    ]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(codes), -1)


def ternary_matrix(rows: int, columns: int, seed: int) -> Matrix:
    generator = np.random.default_rng(seed)
    scales = (generator.standard_normal((rows, columns // 128)) + 3).astype(np.float16)
    return generator.integers(-1, 2, (rows, columns)), scales


@pytest.fixture(scope="module")
def matrices() -> dict[str, Matrix]:
    """The matrices of a llama by their names in the file; queries and keys as they lie there, pairs side by side."""
    shapes = {
        "token_embd": (VOCABULARY, HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN, HIDDEN),
        "blk.0.attn_v": (HIDDEN, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FEED, HIDDEN),
        "blk.0.ffn_up": (FEED, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FEED),
    }
    return {name: ternary_matrix(*shape, seed) for seed, (name, shape) in enumerate(shapes.items())}


PARAMETERS = {
    "token_embd": "text/model.embed_tokens.weight",
    "blk.0.attn_v": "text/model.layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output": "text/model.layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_gate": "text/model.layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up": "text/model.layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down": "text/model.layers.0.mlp.down_proj.weight",
}
"""Of the matrices whose rows keep their order."""


def write(path: Path, matrices: Mapping[str, Matrix], kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    number, size = TYPES[kind]
    monkeypatch.setitem(gguf.GGML_QUANT_SIZES, number, (128, size))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    for name, matrix in matrices.items():
        writer.add_tensor(f"{name}.weight", encoded(matrix, kind), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def values(matrix: Matrix) -> torch.Tensor:
    codes, scales = matrix
    return torch.from_numpy((codes * np.repeat(scales.astype(np.float64), 128, axis=1)).astype(np.float32))


@pytest.mark.parametrize("kind", TYPES)
def test_preset_gguf_stores_the_words_as_t2(
    tmp_path: Path, matrices: dict[str, Matrix], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "ternary.gguf", matrices, kind, monkeypatch)
    report = convert(path, tmp_path / "a.ninfer", "gguf", no_fallback=True)
    assert {entry.format for entry in report.tensors} == {"t2_g128_fp16", "fp32"}
    artifact = open_artifact(tmp_path / "a.ninfer")
    for name, parameter in PARAMETERS.items():
        weight = artifact.parameter(parameter)
        assert weight.format == "t2_g128_fp16"
        assert torch.equal(weight.dequantize(), values(matrices[name])), name
        assert torch.equal(weight.planes["scales"], torch.from_numpy(matrices[name][1])), name
    for entry in artifact.objects.values():
        if hasattr(entry, "format"):
            artifact.read_object(entry.id, check=True)


def test_both_encodings_of_a_model_give_one_artifact(
    tmp_path: Path, matrices: dict[str, Matrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    payloads = []
    for kind in TYPES:
        path = write(tmp_path / f"{kind}.gguf", matrices, kind, monkeypatch)
        convert(path, tmp_path / f"{kind}.ninfer", "gguf")
        artifact = open_artifact(tmp_path / f"{kind}.ninfer")
        payloads.append([artifact.read_object(name) for name in artifact.objects if name.startswith("weight/")])
    assert payloads[0] == payloads[1]


def test_queries_come_in_the_order_of_the_model(
    tmp_path: Path, matrices: dict[str, Matrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the file each head's row t is followed by row t of its second half; in the model halves stay together."""
    source = GgufSource(write(tmp_path / "ternary.gguf", matrices, "pq2_0", monkeypatch))
    dealt = values(matrices["blk.0.attn_q"]).reshape(HEADS, HIDDEN // HEADS, HIDDEN)
    expected = torch.cat([torch.cat([head[0::2], head[1::2]]) for head in dealt])
    tensor = source.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(tensor.values(0, HIDDEN), expected)
    assert torch.equal(tensor.values(5, 77), expected[5:77])


def test_other_presets_quantize_the_decoded_values(
    tmp_path: Path, matrices: dict[str, Matrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "ternary.gguf", matrices, "ptq1_0", monkeypatch)
    report = convert(path, tmp_path / "a.ninfer", "q4")
    noted = {entry.note for entry in report.tensors if entry.format == "q4_g64_fp16"}
    assert noted == {"requantized from ptq1_0"}


def test_code_3_stops_the_conversion_and_leaves_nothing(
    tmp_path: Path, matrices: dict[str, Matrix], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, scales = matrices["blk.0.ffn_up"]
    broken = codes.copy()
    broken[255, 7] = 2
    path = write(tmp_path / "ternary.gguf", matrices | {"blk.0.ffn_up": (broken, scales)}, "pq2_0", monkeypatch)
    with pytest.raises(ConversionError, match=r"blk\.0\.ffn_up\.weight.*row 255, group 0, lane 7: 0x03 is code 3"):
        convert(path, tmp_path / "a.ninfer", "gguf")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["ternary.gguf"]


@pytest.mark.parametrize("kind", TYPES)
def test_a_model_loaded_from_the_artifact_computes_with_the_ternary_values(
    tmp_path: Path, matrices: dict[str, Matrix], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "ternary.gguf", matrices, kind, monkeypatch)
    source = GgufSource(path)
    dense = transformers.LlamaForCausalLM(source.config()).float().eval()
    state = {name: tensor.values(0, tensor.rows) for name, tensor in source.tensors.items()}
    dense.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    convert(path, tmp_path / "a.ninfer", "gguf")
    packed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a.ninfer", dtype=torch.float32)
    ids = torch.arange(9).unsqueeze(0)
    with torch.no_grad():
        expected, found = dense(ids).logits, packed(ids).logits
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
