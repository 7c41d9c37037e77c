"""Qwen3.5 out of GGUF files: every parameter is the checkpoint's again, and blocks stay the file's."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
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
    HIDDEN,
    KEY_HEADS,
    KEYS,
    LAYERS,
    TEXT,
    TYPES,
    VALUE_HEADS,
    VALUE_WIDTH,
    VOCABULARY,
    WHOLE,
    Array,
    add_keys,
    as_checkpoint,
    checkpoint,
    finish,
    one_plus,
    original,
    stored,
    tile,
    whole,
    write,
    write_vision,
)
from ninfer_torch.convert.gguf_source import GgufSource
from ninfer_torch.convert.pipeline import open_source
from ninfer_torch.errors import ConversionError


@pytest.fixture(params=["qwen35", "qwen35moe"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


# Values


def expected_values(parameter: str, values: Array) -> Array:
    """What is left of a value after a norm's 1 + w in float32, and after exp and log."""
    if (
        re.search(r"norm(_embedding|_hidden)?\.weight$", parameter)
        and "linear_attn" not in parameter
        and "visual" not in parameter
    ):
        return one_plus(values) - np.float32(1)
    if parameter.endswith("A_log"):
        return np.log((np.exp(values)).astype(np.float64)).astype(np.float32)
    return values


def test_every_parameter_is_the_checkpoints_again(tmp_path: Path, name: str) -> None:
    source = GgufSource(write(tmp_path / "m.gguf", name))
    state = {key: values for key, values in checkpoint(name).items() if ".visual." not in key}
    assert {as_checkpoint(key) for key in source.tensors} == set(state)
    for key, tensor in source.tensors.items():
        expected = expected_values(as_checkpoint(key), state[as_checkpoint(key)])
        assert tensor.shape == expected.shape, key
        assert np.array_equal(whole(source, key), expected), key
        if tensor.rows > 2:
            assert np.array_equal(tensor.values(1, tensor.rows - 1).float().numpy(), expected[1:-1]), key


def test_the_loaded_model_computes_what_the_checkpoint_computes(tmp_path: Path, name: str) -> None:
    source = GgufSource(write(tmp_path / "m.gguf", name))
    config = source.config()
    assert config.architectures == [CLASSES[name]] and not config.tie_word_embeddings
    assert {key: getattr(config, key) for key in TEXT if key not in ("rope_parameters", "initializer_range")} == {
        key: value for key, value in TEXT.items() if key not in ("rope_parameters", "initializer_range")
    }
    assert config.rope_parameters == TEXT["rope_parameters"] and config.mtp_num_hidden_layers == 1
    model = getattr(transformers, CLASSES[name])._from_config(config, attn_implementation="eager").float().eval()
    state = {key: torch.from_numpy(whole(source, key)) for key in model.state_dict()}
    model.load_state_dict(state)
    ids = torch.arange(1, 25)[None] % VOCABULARY
    with torch.no_grad():
        expected = original(name)(input_ids=ids).logits
        found = model(input_ids=ids).logits
    assert (found - expected).abs().max() < 1e-4 * expected.std()


def test_transformers_reads_the_same_model(tmp_path: Path, name: str) -> None:
    """Where Transformers knows the architecture itself, its config and its values agree."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_config_mapping", reason="older Transformers")
    if name not in mapping.GGUF_CONFIG_ARCHS:
        pytest.skip("this Transformers does not read the architecture from a GGUF file")
    path = write(tmp_path / "m.gguf", name, draft=False, keys={"vocab_size": VOCABULARY})
    source = GgufSource(path)
    reader = gguf.GGUFReader(path)
    facts = {key: field.contents() for key, field in reader.fields.items()}
    facts["tokenizer.ggml.tokens"] = VOCABULARY
    theirs = mapping.get_gguf_config(facts, tuple(tensor.name for tensor in reader.tensors))
    ours = source.config().to_dict()
    rope = theirs.pop("rope_parameters")
    assert rope == {key: value for key, value in ours["rope_parameters"].items() if key != "rope_type"}
    differing = {key for key, value in theirs.items() if key in ours and ours[key] != value}
    assert not differing - {"full_attention_interval"}


@pytest.mark.parametrize("kind", [TYPES.F16, TYPES.BF16])
def test_sixteen_bit_words_keep_their_type(tmp_path: Path, kind: TYPES) -> None:
    source = GgufSource(write(tmp_path / "m.gguf", "qwen35", kind))
    found = source.tensors["model.layers.0.linear_attn.out_proj.weight"]
    assert found.encoding == {TYPES.F16: "fp16", TYPES.BF16: "bf16"}[kind] and found.fold is None
    values = checkpoint("qwen35")["model.language_model.layers.0.linear_attn.out_proj.weight"]
    expected = torch.from_numpy(values).to(torch.float16 if kind == TYPES.F16 else torch.bfloat16)
    assert torch.equal(found.values(0, found.rows), expected)


# Blocks


def test_blocks_stay_the_files(tmp_path: Path, name: str) -> None:
    """Row orders move whole rows of blocks; tiled columns stay tiled and say so."""
    source = GgufSource(write(tmp_path / "m.gguf", name, TYPES.Q8_0))
    packed = {key: tensor for key, tensor in source.tensors.items() if tensor.read_blocks is not None}
    state = checkpoint(name)
    assert {key for key, values in state.items() if values.ndim > 1 and ".visual." not in key} - {
        as_checkpoint(key) for key in packed
    } == {
        key
        for key in state
        if re.search(r"conv1d|in_proj_[ab]|mlp\.gate\.|shared_expert_gate|pos_embed", key) and ".visual." not in key
    }
    for key, tensor in packed.items():
        values = state[as_checkpoint(key)]
        quantized = gguf.quantize(values, TYPES.Q8_0)
        decoded = gguf.dequantize(quantized, TYPES.Q8_0)
        if "out_proj" not in key:
            assert tensor.fold is None
            assert np.array_equal(tensor.blocks(0, tensor.rows).numpy().reshape(quantized.shape), quantized), key
            assert np.array_equal(whole(source, key), decoded), key
            continue
        blocks = gguf.quantize(np.ascontiguousarray(tile(values, 1)), TYPES.Q8_0)
        assert np.array_equal(tensor.blocks(0, tensor.rows).numpy(), blocks)
        in_file = gguf.dequantize(blocks, TYPES.Q8_0)
        assert tensor.fold is not None and tensor.fold.role == "input_columns"
        columns = tensor.fold.vector
        assert columns.dtype == torch.int32
        plain = np.empty_like(in_file)
        plain[:, columns.numpy()] = in_file
        assert np.array_equal(whole(source, key), plain)
        assert np.allclose(plain, values, atol=0.05)
        assert columns[::VALUE_WIDTH].tolist() == [VALUE_WIDTH * head for head in (0, 3, 1, 4, 2, 5)]


def test_as_many_value_heads_as_key_heads_are_not_tiled(tmp_path: Path) -> None:
    """Three layers' worth of the same rows, read as if each key head had one value head of three times the width."""
    keys = {"ssm.time_step_rank": KEY_HEADS, "ssm.inner_size": VALUE_HEADS * VALUE_WIDTH}

    def untile(tensors: dict[str, Array]) -> None:
        for key in list(tensors):
            if key.endswith(("ssm_a", "ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight")):
                tensors[key] = tensors[key][:KEY_HEADS]
            if key.endswith("ssm_norm.weight"):
                tensors[key] = np.resize(tensors[key], 3 * VALUE_WIDTH)

    path = write(tmp_path / "m.gguf", "qwen35", TYPES.Q8_0, change=untile, keys=keys)
    source = GgufSource(path)
    found = source.tensors["model.layers.0.linear_attn.out_proj.weight"]
    assert found.fold is None and found.read_blocks is not None
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert np.array_equal(found.blocks(0, HIDDEN).numpy(), reader["blk.0.ssm_out.weight"].data)
    qkv = source.tensors["model.layers.1.linear_attn.in_proj_qkv.weight"]
    assert np.array_equal(qkv.blocks(0, qkv.rows).numpy(), reader["blk.1.attn_qkv.weight"].data)


def test_fused_gate_and_up_banks_are_the_same_bank(tmp_path: Path) -> None:
    """llama.cpp may write both as one tensor."""

    def fuse(tensors: dict[str, Array]) -> None:
        for layer in range(LAYERS + 1):
            parts = [tensors.pop(f"blk.{layer}.ffn_{part}_exps.weight") for part in ("gate", "up")]
            tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate(parts, 1)

    fused = GgufSource(write(tmp_path / "a.gguf", "qwen35moe", TYPES.Q8_0, change=fuse))
    split = GgufSource(write(tmp_path / "b.gguf", "qwen35moe", TYPES.Q8_0))
    for key in ("model.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts.gate_up_proj"):
        assert torch.equal(fused.tensors[key].blocks(0, EXPERTS), split.tensors[key].blocks(0, EXPERTS))


def test_banks_of_two_block_types_offer_their_matrices(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "qwen35moe", TYPES.Q8_0, kinds={"ffn_up_exps.weight": TYPES.Q5_0})
    bank = GgufSource(path).tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert (
        bank.read_blocks is None
        and [matrix.encoding for matrix in bank.members] == ["gguf_q8_0", "gguf_q5_0"] * EXPERTS
    )
    values = bank.values(0, EXPERTS)
    for number, matrix in enumerate(bank.members):
        half = slice(0, 32) if number % 2 == 0 else slice(32, 64)
        assert torch.equal(matrix.values(0, 32), values[number // 2, half])
        assert torch.equal(matrix.blocks(3, 9), matrix.blocks(0, 32)[3:9]) and matrix.shape == (32, HIDDEN)


# The draft layer


def draft_norm(tensors: dict[str, Array]) -> list[str]:
    return [key for key in tensors if key.startswith(f"blk.{LAYERS}.") and "norm" in key]


def moved(by: float) -> Callable[[dict[str, Array]], None]:
    return lambda tensors: tensors.update({key: tensors[key] + np.float32(by) for key in draft_norm(tensors)})


def test_unshifted_norms_of_a_draft_layer_are_taken_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"norms of the draft layer have a mean of -?0\.0\d+: they are taken as they are"
    ):
        source = GgufSource(write(tmp_path / "m.gguf", "qwen35", change=moved(-1)))
    for key, values in checkpoint("qwen35").items():
        if key.startswith("mtp.") and "norm" in key:
            assert np.allclose(whole(source, key), values, atol=1e-6), key
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GgufSource(write(tmp_path / "n.gguf", "qwen35"))


@pytest.mark.parametrize("by", [-0.5, -0.6, 0.5])
def test_norms_that_may_be_either_are_refused(tmp_path: Path, by: float) -> None:
    path = write(tmp_path / "m.gguf", "qwen35", change=moved(by))
    with pytest.raises(ConversionError, match=r"m\.gguf: the norms of the draft layer have a mean of .*nextn\.enorm"):
        GgufSource(path)


def test_a_file_without_a_draft_layer(tmp_path: Path, name: str) -> None:
    source = GgufSource(write(tmp_path / "m.gguf", name, draft=False))
    assert not any(key.startswith("mtp.") for key in source.tensors)
    assert not getattr(source.config(), "mtp_num_hidden_layers", 0)


# Vision


def test_text_and_vision_are_one_source(tmp_path: Path, name: str) -> None:
    path, tower = write(tmp_path / "m.gguf", name), write_vision(tmp_path / "v.gguf", name, TYPES.F32)
    source = GgufSource(path, vision=tower)
    state = checkpoint(name)
    assert set(source.tensors) == set(state)
    for key, values in state.items():
        tensor = source.tensors[key]
        assert tensor.shape == values.shape and np.array_equal(whole(source, key), expected_values(key, values)), key
    config = source.config()
    assert config.architectures == [WHOLE[name]] and config.vision_config.num_position_embeddings == 16
    model = getattr(transformers, WHOLE[name])(config).float().eval()
    model.load_state_dict({key: torch.from_numpy(whole(source, key)) for key in model.state_dict()})
    pixels = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1))
    grid = torch.tensor([[1, 4, 4]])
    with torch.no_grad():
        towers = [one.model.visual(pixels, grid_thw=grid) for one in (model, original(name))]
    found, expected = (tower[0] if isinstance(tower, tuple) else tower.pooler_output for tower in towers)
    assert torch.allclose(found, expected, atol=1e-5)
    assert source.provenance()["vision"]["path"] == "v.gguf" and str(tmp_path) not in str(source.provenance())


def test_vision_matrices_may_be_blocks(tmp_path: Path) -> None:
    tower = write_vision(tmp_path / "v.gguf", kind=TYPES.Q8_0)
    source = GgufSource(write(tmp_path / "m.gguf"), vision=tower)
    tensor = source.tensors["model.visual.blocks.1.attn.qkv.weight"]
    expected = gguf.quantize(checkpoint("qwen35")[tensor.name], TYPES.Q8_0)
    assert tensor.encoding == "gguf_q8_0" and np.array_equal(tensor.blocks(0, tensor.rows).numpy(), expected)


def test_the_vocabulary_names_the_tokens_of_images(tmp_path: Path) -> None:
    tokens = [f"token {number}" for number in range(VOCABULARY)]
    tokens[7], tokens[11], tokens[13] = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>"
    path = tmp_path / "m.gguf"
    original_writer = gguf.GGUFWriter(path, "qwen35")
    add_keys(original_writer, "qwen35", {"block_count": LAYERS, **KEYS, **FFN_KEYS["qwen35"]})
    original_writer.add_token_list(tokens)
    for parameter, values in checkpoint("qwen35").items():
        if not parameter.startswith("mtp."):
            for key, part in stored(parameter, values):
                original_writer.add_tensor(key, np.ascontiguousarray(part))
    finish(original_writer)
    config = GgufSource(path, vision=write_vision(tmp_path / "v.gguf")).config()
    assert (config.image_token_id, config.video_token_id, config.vision_start_token_id) == (7, 11, 13)


# Refusals


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a missing tensor": (
        {"change": lambda tensors: tensors.pop("blk.1.ssm_alpha.weight")},
        r"missing: 'blk\.1\.ssm_alpha\.weight'",
    ),
    "a missing draft tensor": (
        {"change": lambda tensors: tensors.pop(f"blk.{LAYERS}.nextn.enorm.weight")},
        rf"draft layer are missing: 'blk\.{LAYERS}\.nextn\.enorm\.weight'",
    ),
    "a tensor of the other kind of layer": (
        {"change": lambda tensors: tensors.update({"blk.0.attn_k.weight": np.ones((4, 64), np.float32)})},
        r"does not have: 'blk\.0\.attn_k\.weight'",
    ),
    "a positive decay": (
        {"change": lambda tensors: tensors.update({"blk.0.ssm_a": np.ones(VALUE_HEADS, np.float32)})},
        r"'blk\.0\.ssm_a' holds 1\.0, expected -exp\(A_log\)",
    ),
    "heads that do not divide": ({"keys": {"ssm.time_step_rank": 5}}, r"5 value heads .*2 key heads"),
    "rows that do not divide": (
        {"keys": {"ssm.time_step_rank": 8}},
        r"'blk\.0\.ssm_alpha\.weight'.*6 rows cannot be cut into 8",
    ),
    "sections that do not sum up": (
        {"keys": {"rope.dimension_sections": [4, 4, 4, 0]}},
        r"dimension_sections is \[4, 4, 4, 0\], expected three counts of sum 8",
    ),
    "an odd rotation": ({"keys": {"rope.dimension_count": 15}}, r"of which 15 columns turn"),
    "values of another width": ({"keys": {"attention.value_length": 16}}, r"width 32 with values of width 16"),
    "two draft layers": ({"keys": {"nextn_predict_layers": 2}}, r"2 of 5 layers are for multi-token prediction"),
    "an unknown key": ({"keys": {"ssm.dt_b_c_rms": 1}}, r"unknown to this version: 'qwen35\.ssm\.dt_b_c_rms'"),
    "one section": ({"keys": {"rope.dimension_sections": 8}}, r"expected an array of numbers"),
    "another width": (
        {"keys": {"embedding_length": 32}},
        r"'token_embd\.weight' has shape \[48, 64\], expected 32 columns",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "m.gguf", "qwen35", **options)
    with pytest.raises(ConversionError, match=message):
        source = GgufSource(path)
        source.config()
        for key in source.tensors:
            whole(source, key)


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    text, tower = write(tmp_path / "m.gguf"), write_vision(tmp_path / "v.gguf")
    with pytest.raises(ConversionError, match=r"v\.gguf: .*'clip' holds a vision tower without its text model"):
        open_source(tower)
    with pytest.raises(ConversionError, match=r"m\.gguf: a file of architecture 'qwen35' beside a qwen35 model"):
        GgufSource(text, vision=text)
    other = write_vision(tmp_path / "w.gguf", keys={"vision.projection_dim": 32})
    with pytest.raises(ConversionError, match=r"w\.gguf: the vision tower gives 32 channels, the text model has 64"):
        GgufSource(text, vision=other)
    other = write_vision(tmp_path / "p.gguf", keys={"projector_type": "mlp"})
    with pytest.raises(ConversionError, match=r"projector 'mlp'"):
        GgufSource(text, vision=other)
    deep = write_vision(tmp_path / "d.gguf", keys={"vision.is_deepstack_layers": [False, True]})
    with pytest.raises(ConversionError, match="deepstack"):
        GgufSource(text, vision=deep)
    less = write_vision(tmp_path / "l.gguf", without="v.blk.1.ln2.bias")
    with pytest.raises(ConversionError, match=r"a vision tower of 2 blocks are missing: 'v\.blk\.1\.ln2\.bias'"):
        GgufSource(text, vision=less)
