"""A GGUF file gives back what the Hugging Face original held: names, row orders, norms, config and tokenizer."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from golden import golden, load_tensors
from ninfer_torch.artifact import open_artifact
from ninfer_torch.convert import convert
from ninfer_torch.convert.gguf_source import GgufSource
from ninfer_torch.convert.gguf_tables import ARCHITECTURES
from ninfer_torch.convert.source import Source
from ninfer_torch.errors import ConversionError
from ninfer_torch.formats import FORMATS, GgufFormat

LAYERS, HIDDEN, HEADS, KEY_HEADS, HEAD_WIDTH, FEED, VOCABULARY = 2, 64, 4, 2, 16, 96, 40
TYPES = gguf.GGMLQuantizationType

Array = np.ndarray[Any, Any]
Edit = Callable[[gguf.GGUFWriter], None]


def interleaved(weight: Array, heads: int) -> Array:
    """llama.cpp's rule for query and key rows, written out row by row: each head's halves are dealt out alternately."""
    rows = weight.reshape(heads, -1, *weight.shape[1:])
    half = rows.shape[1] // 2
    dealt = [[head[index // 2 + (index % 2) * half] for index in range(2 * half)] for head in rows]
    return np.array(dealt).reshape(weight.shape)


def originals(names: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Random weights in steps of 1/256, so that 1 + w is exact in float32."""
    generator = np.random.default_rng(7)
    return {name: (generator.integers(-512, 512, shape) / 256).astype(np.float32) for name, shape in names.items()}


LLAMA_SHAPES: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj": (HEADS * HEAD_WIDTH, HIDDEN),
    "self_attn.k_proj": (KEY_HEADS * HEAD_WIDTH, HIDDEN),
    "self_attn.v_proj": (KEY_HEADS * HEAD_WIDTH, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_WIDTH),
    "mlp.gate_proj": (FEED, HIDDEN),
    "mlp.up_proj": (FEED, HIDDEN),
    "mlp.down_proj": (HIDDEN, FEED),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
GEMMA_SHAPES = LLAMA_SHAPES | {
    "pre_feedforward_layernorm": (HIDDEN,),
    "post_feedforward_layernorm": (HIDDEN,),
    "self_attn.q_norm": (HEAD_WIDTH,),
    "self_attn.k_norm": (HEAD_WIDTH,),
}
LLAMA_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = LLAMA_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


class Model:
    """A tiny model as its GGUF converter sees it: Hugging Face weights, and how to write them."""

    def __init__(
        self, architecture: str, layers: int = LAYERS, tied: bool = True, keys: Mapping[str, Any] | None = None
    ):
        self.architecture = architecture
        self.layers = layers
        llama = architecture == "llama"
        self.shapes = LLAMA_SHAPES if llama else GEMMA_SHAPES
        self.names = LLAMA_NAMES if llama else GEMMA_NAMES
        parameters = {
            f"model.layers.{layer}.{name}.weight": shape
            for layer in range(layers)
            for name, shape in self.shapes.items()
        }
        parameters |= {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
        if not tied:
            parameters["lm_head.weight"] = (VOCABULARY, HIDDEN)
        self.weights = originals(parameters)
        self.keys: dict[str, Any] = {
            "context_length": 128,
            "embedding_length": HIDDEN,
            "block_count": layers,
            "feed_forward_length": FEED,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KEY_HEADS,
            "attention.key_length": HEAD_WIDTH,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 50000.0,
        } | ({} if llama else {"attention.sliding_window": 32})
        self.keys |= keys or {}

    def stored(self, parameter: str) -> tuple[str, Array]:
        """Name and values in the file, by llama.cpp's rules."""
        values = self.weights[parameter]
        top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        stem = parameter.removesuffix(".weight")
        if stem in top:
            name = top[stem]
        else:
            _, _, layer, role = stem.split(".", 3)
            name = f"blk.{layer}.{self.names[role]}"
        if self.architecture == "gemma3" and stem.endswith("norm"):
            values = values + np.float32(1)
        if self.architecture == "llama" and stem.endswith("q_proj"):
            values = interleaved(values, HEADS)
        if self.architecture == "llama" and stem.endswith("k_proj"):
            values = interleaved(values, KEY_HEADS)
        return f"{name}.weight", values

    def write(self, path: Path, matrices: TYPES = TYPES.F32, edit: Edit | None = None, without: str = "") -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        writer.add_name("tiny")
        for key, value in self.keys.items():
            kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
            writer.add_key_value(f"{self.architecture}.{key}", value, kinds[type(value)])
        for parameter in self.weights:
            name, values = self.stored(parameter)
            if name != without:
                kind = matrices if values.ndim == 2 else TYPES.F32
                writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        if edit is not None:
            edit(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@pytest.fixture(params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def test_float_tensors_equal_the_original(model: Model, path: Path) -> None:
    source = GgufSource(model.write(path))
    assert isinstance(source, Source)
    assert set(source.tensors) == set(model.weights)
    assert list(source.unused) == []
    for name, weight in model.weights.items():
        tensor = source.tensors[name]
        assert (tensor.name, tensor.shape, tensor.encoding) == (name, weight.shape, "fp32")
        assert torch.equal(tensor.values(0, tensor.rows), torch.from_numpy(weight)), name


@pytest.mark.parametrize(("kind", "encoding"), [(TYPES.F16, "fp16"), (TYPES.BF16, "bf16")])
def test_sixteen_bit_words_keep_their_dtype(model: Model, path: Path, kind: TYPES, encoding: str) -> None:
    source = GgufSource(model.write(path, kind))
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[encoding]
    for name, weight in model.weights.items():
        tensor = source.tensors[name]
        values = tensor.values(0, tensor.rows)
        expected = torch.from_numpy(weight).to(dtype if weight.ndim == 2 else torch.float32)
        assert tensor.encoding == (encoding if weight.ndim == 2 else "fp32")
        assert values.dtype == expected.dtype and torch.equal(values, expected), name


@pytest.mark.parametrize("kind", [TYPES.Q4_0, TYPES.Q5_0, TYPES.Q8_0])
def test_registered_blocks_come_whole_and_in_the_original_row_order(model: Model, path: Path, kind: TYPES) -> None:
    source = GgufSource(model.write(path, kind))
    for name, weight in model.weights.items():
        if weight.ndim < 2:
            continue
        tensor = source.tensors[name]
        blocks = gguf.quantize(weight, kind)  # row by row, so reordering rows and quantizing commute
        assert tensor.encoding == f"gguf_{kind.name.lower()}"
        assert np.array_equal(tensor.blocks(0, tensor.rows).numpy(), blocks), name
        assert np.array_equal(tensor.values(0, tensor.rows).numpy(), gguf.dequantize(blocks, kind)), name


REGISTERED = {name: record for name, record in FORMATS.items() if isinstance(record, GgufFormat)}


def random_rows(record: GgufFormat, rows: int, columns: int, seed: int) -> Array:
    """Legal rows of blocks of any type: random bytes, every 16-bit word of them a finite binary16."""
    shape = (rows, columns // record.block_values * record.block_bytes)
    data = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    data[:, 1::2] &= 0xBF  # bit 14 clear: an exponent below the largest at either parity of the address
    data[:, 0::2] &= 0xBF
    return data


@pytest.mark.parametrize("name", REGISTERED)
def test_every_registered_type_is_converted_byte_for_byte(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A llama whose matrices are of one block type: the artifact holds the file's rows, in the model's order."""
    record = REGISTERED[name]
    model = Model("llama", layers=1, tied=False)
    wide = {key: (shape[0], 256) if len(shape) == 2 else (256,) for key, shape in LLAMA_SHAPES.items()}
    shapes = wide | {"self_attn.o_proj": (256, 256), "mlp.down_proj": (256, 256)}
    shapes |= {"mlp.gate_proj": (256, 256), "mlp.up_proj": (256, 256), "self_attn.q_proj": (256, 256)}
    keys = model.keys | {"embedding_length": 256, "feed_forward_length": 256, "attention.key_length": 64}
    shapes["self_attn.k_proj"] = shapes["self_attn.v_proj"] = (128, 256)
    path, parts = tmp_path / "m.gguf", {}
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
        writer.add_key_value(f"llama.{key}", value, kinds[type(value)])
    number = gguf.GGMLQuantizationType(record.ggml_type) if record.ggml_type != 42 else 42
    monkeypatch.setitem(gguf.GGML_QUANT_SIZES, number, (record.block_values, record.block_bytes))
    for seed, (role, shape) in enumerate(shapes.items()):
        if len(shape) == 1:
            writer.add_tensor(f"blk.0.{LLAMA_NAMES[role]}.weight", np.ones(shape, np.float32))
            continue
        rows = random_rows(record, *shape, seed)
        heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KEY_HEADS}.get(role)
        parts[f"model.layers.0.{role}.weight"] = rows
        stored = interleaved(rows, heads) if heads else rows
        writer.add_tensor(f"blk.0.{LLAMA_NAMES[role]}.weight", stored, raw_dtype=number)
    for key, stem in (("token_embd", "model.embed_tokens"), ("output", "lm_head")):
        parts[f"{stem}.weight"] = rows = random_rows(record, VOCABULARY, 256, len(key))
        writer.add_tensor(f"{key}.weight", rows, raw_dtype=number)
    writer.add_tensor("output_norm.weight", np.ones(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    report = convert(path, tmp_path / "m.ninfer", "gguf", no_fallback=True)
    artifact = open_artifact(tmp_path / "m.ninfer")
    stored_parts = {
        entry.parameters[0].removeprefix("text/"): entry
        for entry in report.tensors
        if "norm" not in entry.parameters[0]
    }
    assert stored_parts.keys() == parts.keys() and {entry.format for entry in stored_parts.values()} == {name}
    for parameter, rows in parts.items():
        assert artifact.read_object(stored_parts[parameter].object) == rows.tobytes(), parameter


@pytest.mark.parametrize("kind", [TYPES.Q4_1, TYPES.Q5_1, TYPES.MXFP4])
def test_other_known_types_decode_but_have_no_blocks(model: Model, path: Path, kind: TYPES) -> None:
    source = GgufSource(model.write(path, kind))
    weight = model.weights["model.layers.1.self_attn.q_proj.weight"]
    tensor = source.tensors["model.layers.1.self_attn.q_proj.weight"]
    assert tensor.encoding == kind.name.lower()
    expected = gguf.dequantize(gguf.quantize(weight, kind), kind)
    assert np.array_equal(tensor.values(0, tensor.rows).numpy(), expected)
    with pytest.raises(ConversionError, match=kind.name.lower()):
        tensor.blocks(0, 1)


@pytest.mark.parametrize("kind", [TYPES.BF16, TYPES.Q8_0, TYPES.Q4_1])
def test_ranges_of_rows_are_parts_of_the_whole(model: Model, path: Path, kind: TYPES) -> None:
    source = GgufSource(model.write(path, kind))
    for tensor in source.tensors.values():
        whole = tensor.values(0, tensor.rows)
        for begin, end in ((0, 1), (3, 11), (5, 5), (tensor.rows - 7, tensor.rows)):
            assert torch.equal(tensor.values(begin, end), whole[begin:end])
            if tensor.read_blocks is not None:
                assert torch.equal(tensor.blocks(begin, end), tensor.blocks(0, tensor.rows)[begin:end])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_the_config_builds_the_model_that_the_tensors_fill(path: Path, architecture: str, tied: bool) -> None:
    source = GgufSource(Model(architecture, tied=tied).write(path))
    config = source.config()
    assert config.architectures == [ARCHITECTURES[architecture].model_class]
    assert config.tie_word_embeddings is tied
    assert config.dtype == torch.bfloat16
    assert (config.num_hidden_layers, config.vocab_size, config.head_dim) == (LAYERS, VOCABULARY, HEAD_WIDTH)
    assert (config.num_attention_heads, config.num_key_value_heads) == (HEADS, KEY_HEADS)
    with torch.device("meta"):
        built = getattr(transformers, config.architectures[0])(config)
    expected = {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}
    assert {name: tensor.shape for name, tensor in source.tensors.items()} == expected
    assert str(path.parent) not in json.dumps([config.to_dict(), source.provenance()])
    assert config.to_dict()["_name_or_path"] == ""


def test_changing_a_config_does_not_change_the_source(path: Path) -> None:
    source = GgufSource(Model("llama").write(path))
    source.config().rope_parameters["rope_theta"] = 1.0
    assert source.config().rope_parameters == {"rope_type": "default", "rope_theta": 50000.0}


def test_golden_llama_gives_the_golden_logits() -> None:
    source = GgufSource(golden("gguf", "tiny_llama_all_types.gguf"))
    expected = load_tensors(golden("gguf", "tiny_llama_all_types.safetensors"))
    config = source.config()
    config.dtype = torch.float32
    built = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    built.load_state_dict({name: tensor.values(0, tensor.rows).float() for name, tensor in source.tensors.items()})
    with torch.no_grad():
        logits = built(expected["input_ids"]).logits
    assert torch.allclose(logits, expected["logits_float32"], rtol=0, atol=1e-4)
    assert source.resources() == {}


# Rotary settings


def llama3_config(factor: float) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        head_dim=HEAD_WIDTH,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 50000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )


def llama3_divisors(factor: float) -> Array:
    """What Transformers' own llama3 rule divides each frequency by."""
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](llama3_config(factor), "cpu")
    plain = 1 / 50000.0 ** (np.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
    return (plain / frequencies.double().numpy()).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_become_the_llama3_config(path: Path, factor: float) -> None:
    factors = llama3_divisors(factor)
    assert factors.min() == pytest.approx(1) and factors.max() == pytest.approx(factor)
    source = GgufSource(Model("llama").write(path, edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors)))
    assert [(unused.name, "config" in unused.reason) for unused in source.unused] == [("rope_freqs.weight", True)]
    found, expected = source.config().rope_parameters, llama3_config(factor).to_dict()["rope_parameters"]
    assert found["factor"] == pytest.approx(expected["factor"], rel=1e-6)
    assert found | {"factor": factor} == expected


def test_other_rotary_factors_are_refused(path: Path) -> None:
    factors = llama3_divisors(8.0)
    factors[2] *= 1.5
    source = GgufSource(Model("llama").write(path, edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors)))
    with pytest.raises(ConversionError, match=r"rope_freqs\.weight"):
        source.config()


def test_linear_scaling_reaches_the_config(path: Path) -> None:
    scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    llama = GgufSource(Model("llama", keys=scaling).write(path)).config()
    assert llama.rope_parameters == {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0}
    gemma = GgufSource(Model("gemma3", keys=scaling).write(path)).config()
    assert gemma.rope_parameters["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0}
    assert gemma.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_no_scaling_is_no_scaling(path: Path) -> None:
    none = {"rope.scaling.type": "none", "rope.scaling.factor": 8.0}
    assert GgufSource(Model("llama", keys=none).write(path)).config().rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_other_scaling_is_refused(path: Path, kind: str) -> None:
    scaling = {"rope.scaling.type": kind, "rope.scaling.factor": 4.0}
    with pytest.raises(ConversionError, match=kind):
        GgufSource(Model("llama", keys=scaling).write(path)).config()


def test_partial_rotation_is_refused(path: Path) -> None:
    with pytest.raises(ConversionError, match="unequal width"):
        GgufSource(Model("llama", keys={"rope.dimension_count": HEAD_WIDTH // 2}).write(path)).config()


def test_gemma3_scales_attention_by_head_width_but_for_the_27b_model(path: Path) -> None:
    assert GgufSource(Model("gemma3").write(path)).config().query_pre_attn_scalar == HEAD_WIDTH
    keys = {"attention.head_count": 2, "attention.key_length": 32}
    config = GgufSource(Model("gemma3", layers=62, keys=keys).write(path)).config()
    assert (config.head_dim, config.query_pre_attn_scalar) == (32, HIDDEN // 2)


# Refusals


def test_an_unknown_architecture_lists_the_known(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConversionError, match=r"'mamba' is not known.*llama, gemma3"):
        GgufSource(path)


@pytest.mark.parametrize("key", ["llama.hadamard.block_size", "general.hadamard.signs", "hadamard.seed"])
def test_a_hadamard_transform_is_never_ignored(path: Path, key: str) -> None:
    with pytest.raises(ConversionError, match=rf"Hadamard.*{key}"):
        GgufSource(Model("llama").write(path, edit=lambda writer: writer.add_uint32(key, 128)))


def test_unknown_keys_of_the_architecture_are_refused(path: Path) -> None:
    with pytest.raises(ConversionError, match=r"llama\.attention\.softcap"):
        GgufSource(Model("llama", keys={"attention.softcap": 30.0}).write(path))


def test_values_per_layer_are_refused(path: Path) -> None:
    model = Model("llama")
    del model.keys["attention.head_count_kv"]
    with pytest.raises(ConversionError, match=r"llama\.attention\.head_count_kv.*per layer"):
        GgufSource(model.write(path, edit=lambda writer: writer.add_array("llama.attention.head_count_kv", [2, 2])))


@pytest.mark.parametrize("key", ["block_count", "attention.layer_norm_rms_epsilon"])
def test_missing_keys_are_named(model: Model, path: Path, key: str) -> None:
    del model.keys[key]
    with pytest.raises(ConversionError, match=rf"missing: '{model.architecture}\.{key}'"):
        GgufSource(model.write(path))


def test_missing_and_unknown_tensors_are_named(model: Model, path: Path) -> None:
    with pytest.raises(ConversionError, match=r"missing: 'blk\.1\.attn_q\.weight'"):
        GgufSource(model.write(path, without="blk.1.attn_q.weight"))
    extra = np.zeros(4, np.float32)
    with pytest.raises(ConversionError, match=r"does not have: 'blk\.0\.attn_q\.bias'"):
        GgufSource(model.write(path, edit=lambda writer: writer.add_tensor("blk.0.attn_q.bias", extra)))


def test_more_layers_than_tensors_are_refused_before_they_are_looked_for(path: Path) -> None:
    with pytest.raises(ConversionError, match="block_count is 4294967295"):
        GgufSource(Model("llama", keys={"block_count": 2**32 - 1}).write(path))


def test_heads_that_do_not_divide_the_rows_are_refused(path: Path) -> None:
    with pytest.raises(ConversionError, match=r"'blk\.0\.attn_q\.weight'.*3 heads of an even number"):
        GgufSource(Model("llama", keys={"attention.head_count": 3}).write(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.head_count", 0),
        ("attention.head_count_kv", 2.0),
        ("block_count", "2"),
        ("rope.freq_base", float("nan")),
        ("rope.freq_base", 0.0),
        ("attention.layer_norm_rms_epsilon", 1),
    ],
)
def test_values_that_are_no_counts_or_rates_are_refused(model: Model, path: Path, key: str, value: Any) -> None:
    model.keys[key] = value
    with pytest.raises(
        ConversionError, match=rf"'{model.architecture}\.{key}' is .*expected a (count|positive number)"
    ):
        GgufSource(model.write(path))


def test_one_part_of_a_split_model_is_refused(path: Path) -> None:
    with pytest.raises(ConversionError, match="one of 3 parts"):
        GgufSource(Model("llama").write(path, edit=lambda writer: writer.add_uint16("split.count", 3)))


@pytest.mark.parametrize(
    ("number", "name", "advice"),
    [
        (41, "q1_0", "quantize the"),
        (999, "unknown", "quantize the"),
    ],
)
def test_types_that_nothing_decodes_are_listed_with_what_to_do(path: Path, number: int, name: str, advice: str) -> None:
    model = Model("llama")
    content = model.write(path).read_bytes()
    for tensor in ("blk.0.ffn_up.weight", "blk.1.ffn_up.weight"):
        place = content.index(tensor.encode()) + len(tensor) + 4 + 2 * 8
        assert content[place : place + 4] == bytes(4)
        content = content[:place] + number.to_bytes(4, "little") + content[place + 4 :]
    if number != 999:  # rows of whole blocks: 64 columns are none of 128
        content = content.replace(
            HIDDEN.to_bytes(8, "little") + FEED.to_bytes(8, "little") + number.to_bytes(4, "little"),
            (128).to_bytes(8, "little") + (FEED // 2).to_bytes(8, "little") + number.to_bytes(4, "little"),
        )
    path.write_bytes(content)
    with pytest.raises(
        ConversionError, match=rf"(?s)'blk\.0\.ffn_up\.weight': type {number} \({name}\).*{advice}"
    ) as caught:
        GgufSource(path)
    assert "'blk.1.ffn_up.weight'" in str(caught.value)


# Small files


def test_generation_ends_at_every_end_token_of_the_file(path: Path) -> None:
    def token_ids(writer: gguf.GGUFWriter) -> None:
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(7)
        writer.add_pad_token_id(0)

    resources = GgufSource(Model("llama").write(path, edit=token_ids)).resources()
    assert set(resources) == {"generation_config.json"}
    settings = json.loads(resources["generation_config.json"])
    assert {key: settings[key] for key in settings if key.endswith("_id")} == {
        "bos_token_id": 1,
        "eos_token_id": [2, 7],
        "pad_token_id": 0,
    }


def test_a_vocabulary_that_transformers_refuses_is_a_conversion_error(path: Path) -> None:
    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("no such tokenizer")
        writer.add_token_list(["a", "b"])

    source = GgufSource(Model("llama").write(path, edit=vocabulary))
    with pytest.raises(ConversionError, match=r"tiny\.gguf: Transformers cannot read the tokenizer"):
        source.resources()


def test_an_unknown_way_of_splitting_text_is_warned_of(path: Path) -> None:
    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("unheard-of")
        writer.add_token_list([chr(code) for code in range(ord("a"), ord("z") + 1)] + ["ab", "abc"])
        writer.add_token_merges(["a b", "ab c"])
        writer.add_bos_token_id(24)
        writer.add_eos_token_id(25)
        writer.add_unk_token_id(23)

    source = GgufSource(Model("llama").write(path, edit=vocabulary))
    with pytest.warns(UserWarning, match=r"tiny\.gguf.*'unheard-of'"):
        resources = source.resources()
    vocabulary_read = json.loads(resources["tokenizer.json"])["model"]["vocab"]
    assert (vocabulary_read["a"], vocabulary_read["ab"]) == (0, 26)
    settings = json.loads(resources["tokenizer_config.json"])
    assert (settings["bos_token"], settings["eos_token"], settings["unk_token"]) == ("y", "z", "x")
    assert str(path.parent) not in resources["tokenizer_config.json"].decode()


# Real models


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("smollm2")
    source = GgufSource(smollm2_gguf)
    for name, content in source.resources().items():
        (folder / name).write_bytes(content)
    source.config().save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder), transformers.GenerationConfig.from_pretrained(folder)


@pytest.mark.slow
def test_smollm2_tensors_equal_those_of_transformers(smollm2_gguf: Path) -> None:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32
    )
    expected = dict(loaded.named_parameters())
    source = GgufSource(smollm2_gguf)
    assert set(source.tensors) == set(expected)
    for name, parameter in expected.items():
        tensor = source.tensors[name]
        assert torch.equal(tensor.values(0, tensor.rows), parameter.detach()), name


def test_smollm2_stops_at_the_end_of_a_turn(smollm2_tokenizer: Any) -> None:
    tokenizer, generation = smollm2_tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (generation.eos_token_id, tokenizer.eos_token_id) == (end, end)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("line", "pieces"),
    [
        ("Hello world", ["Hello", "Ġworld"]),
        (
            "a  12",
            ["a", "ĠĠ", "1", "2"],
        ),  # llama.cpp and the original cut out digits first; the two spaces stay together
        ("<|im_start|>user\nHi<|im_end|>", ["<|im_start|>", "user", "Ċ", "Hi", "<|im_end|>"]),
    ],
)
def test_smollm2_splits_text_as_its_vocabulary_was_learned(
    smollm2_tokenizer: Any, line: str, pieces: list[str]
) -> None:
    tokenizer, _ = smollm2_tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer(line).input_ids) == pieces
    assert tokenizer.decode(tokenizer(line).input_ids) == line


def stored_tensors(path: Path, first: str) -> dict[str, tuple[tuple[int, ...], TYPES, Array]]:
    """(row-major shape, type, bytes) of every tensor, read from the tensor table alone, which begins with `first`."""
    data = np.memmap(path, np.uint8, "r")
    head = data[: 64 << 20].tobytes()
    place = head.index(struct.pack("<Q", len(first)) + first.encode())
    entries = []
    for _ in range(struct.unpack_from("<Q", head, 8)[0]):
        (length,) = struct.unpack_from("<Q", head, place)
        name = head[place + 8 : place + 8 + length].decode()
        (rank,) = struct.unpack_from("<I", head, place + 8 + length)
        dims = struct.unpack_from(f"<{rank}Q", head, place + 12 + length)
        kind, offset = struct.unpack_from("<IQ", head, place + 12 + length + 8 * rank)
        entries.append((name, dims[::-1], TYPES(kind), offset))
        place += 24 + length + 8 * rank
    start = -(-place // 32) * 32
    tensors = {}
    for name, shape, kind, offset in entries:
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        words = data[start + offset :][: int(np.prod(shape)) // block * nbytes]
        tensors[name] = (shape, kind, words.reshape(shape[0], -1))
    return tensors


def test_gemma3_values_equal_the_gguf_package_with_the_norm_shift_taken_off(gemma3_gguf: Path) -> None:
    source = GgufSource(gemma3_gguf)
    stored = stored_tensors(gemma3_gguf, "output_norm.weight")
    assert {tensor.origin for tensor in source.tensors.values()} == set(stored)
    shifted = {
        "blk.4.attn_norm": "model.layers.4.input_layernorm",
        "blk.4.post_attention_norm": "model.layers.4.post_attention_layernorm",
        "blk.4.ffn_norm": "model.layers.4.pre_feedforward_layernorm",
        "blk.4.post_ffw_norm": "model.layers.4.post_feedforward_layernorm",
        "blk.4.attn_q_norm": "model.layers.4.self_attn.q_norm",
        "blk.4.attn_k_norm": "model.layers.4.self_attn.k_norm",
        "output_norm": "model.norm",
    }
    for name, parameter in shifted.items():
        tensor = source.tensors[f"{parameter}.weight"]
        expected = stored[f"{name}.weight"][2].view(np.float32).ravel() - np.float32(1)
        assert np.array_equal(tensor.values(0, tensor.rows).numpy(), expected), parameter
    plain = {
        "blk.4.attn_q": ("model.layers.4.self_attn.q_proj", "gguf_q5_0"),
        "blk.4.attn_k": ("model.layers.4.self_attn.k_proj", "gguf_q5_0"),
        "blk.4.attn_output": ("model.layers.4.self_attn.o_proj", "gguf_q4_k"),
        "token_embd": ("model.embed_tokens", "gguf_q8_0"),
    }
    for name, (parameter, encoding) in plain.items():
        tensor = source.tensors[f"{parameter}.weight"]
        shape, kind, blocks = stored[f"{name}.weight"]
        assert (tensor.encoding, tensor.shape) == (encoding, shape)
        assert np.array_equal(tensor.blocks(100, 200).numpy(), blocks[100:200])
        expected = gguf.dequantize(np.array(blocks[100:200]), kind)
        assert np.array_equal(tensor.values(100, 200).numpy(), expected)
