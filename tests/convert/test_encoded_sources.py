"""Quantized checkpoints as sources: every scheme's words and values, mixed at will, or refused by name."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from exact import assert_same_words
from golden import golden, load_json, load_tensors
from ninfer_torch.artifact import open_artifact
from ninfer_torch.convert.encoded import import_encoded
from ninfer_torch.convert.hf_source import HuggingFaceSource
from ninfer_torch.convert.pipeline import convert
from ninfer_torch.convert.source import SourceTensor
from ninfer_torch.errors import ConversionError
from ninfer_torch.tensors import encode

FP8 = torch.float8_e4m3fn
ROW_FP8 = "fp8_e4m3fn_row_bf16"
Tensors = dict[str, torch.Tensor]


def random_bytes(*shape: int, seed: int = 0, top: int = 256) -> torch.Tensor:
    return torch.randint(0, top, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def finite_fp8(*shape: int, seed: int = 0) -> torch.Tensor:
    """E4M3FN words of every sign and exponent below the largest."""
    return (random_bytes(*shape, seed=seed) & 0xF7).view(FP8)


def compressed_nvfp4(name: str, rows: int, columns: int, seed: int = 0, divisor: float = 900.0) -> Tensors:
    return {
        f"{name}.weight_packed": random_bytes(rows, columns // 2, seed=seed),
        f"{name}.weight_scale": random_bytes(rows, columns // 16, seed=seed + 1, top=0x7F).view(FP8),
        f"{name}.weight_global_scale": torch.tensor([divisor]),
        f"{name}.input_global_scale": torch.tensor([divisor / 2]),
    }


def modelopt_nvfp4(name: str, rows: int, columns: int, seed: int = 0, multiplier: float = 0.0001234) -> Tensors:
    stored = compressed_nvfp4(name, rows, columns, seed)
    return {
        f"{name}.weight": stored[f"{name}.weight_packed"],
        f"{name}.weight_scale": stored[f"{name}.weight_scale"],
        f"{name}.weight_scale_2": torch.tensor(multiplier),
        f"{name}.input_scale": torch.tensor(0.5),
    }


def row_fp8(name: str, rows: int, columns: int, scales: torch.Tensor) -> Tensors:
    return {f"{name}.weight": finite_fp8(rows, columns), f"{name}.weight_scale": scales}


def source_of(folder: Path, tensors: Tensors, config: dict | None = None) -> HuggingFaceSource:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return HuggingFaceSource(folder)


def all_values(tensor: SourceTensor) -> torch.Tensor:
    return tensor.values(0, tensor.rows)


def check_row_ranges(tensor: SourceTensor) -> None:
    """Any range of rows is that part of the whole, as words and as values."""
    whole = all_values(tensor)
    for begin, end in ((0, 0), (0, 1), (5, 17), (tensor.rows - 1, tensor.rows)):
        assert torch.equal(tensor.values(begin, end), whole[begin:end])
        if tensor.encoded_rows:
            found, words = tensor.encoded(begin, end), tensor.encoded(0, tensor.rows).words
            assert all(torch.equal(part, word[begin:end]) for part, word in zip(found.words, words, strict=True))
            assert found.first_row == begin


# --- golden checkpoint -----------------------------------------------------------------------------------------------


@pytest.fixture
def golden_source(tmp_path: Path) -> HuggingFaceSource:
    shutil.copy(golden("ninfer", "import", "source.safetensors"), tmp_path / "model.safetensors")
    return HuggingFaceSource(tmp_path)


def test_golden_checkpoint_gives_the_golden_objects(golden_source: HuggingFaceSource) -> None:
    index = load_json(golden("ninfer", "import", "index.json"))
    artifact = open_artifact(golden("ninfer", "import", "import.ninfer"))
    seen = set()
    for record in index["objects"]:
        names = [name.removeprefix("test/") + ".weight" for name in record["parameters"]]
        if names[0] not in golden_source.tensors:
            continue  # the GGUF blocks
        tensors = [golden_source.tensors[name] for name in names]
        rows = [tensor.encoded(0, tensor.rows) for tensor in tensors]
        assert encode(import_encoded(rows, record["format"])) == artifact.read_object(record["object"])
        seen.update(names)
    assert seen == set(golden_source.tensors) and len(seen) == 10
    assert golden_source.unused == ()


def test_golden_values_and_activation_divisors(golden_source: HuggingFaceSource) -> None:
    expected = load_tensors(golden("ninfer", "import", "import.safetensors"))
    for name, tensor in golden_source.tensors.items():
        parameter = "test/" + name.removesuffix(".weight")
        stored = import_encoded(tensor.encoded(0, tensor.rows), tensor.encoding).dequantize()
        assert_same_words(stored, expected[parameter])
        if tensor.encoding == "nvfp4":
            assert_same_words(all_values(tensor), expected[parameter])
            divisor = expected[f"{parameter}@{parameter}_in:activation_input_divisor"].item()
            group = {"ct.b": ("ct.b1", "ct.b2"), "ct.c": ("ct.c1", "ct.c2")}.get(parameter[5:9], (parameter[5:],))
            assert min(golden_source.tensors[f"{part}.weight"].activation_divisor for part in group) == divisor


# --- schemes ---------------------------------------------------------------------------------------------------------


def test_nvfp4_global_scales_in_both_senses(tmp_path: Path) -> None:
    """compressed-tensors divides by its global scale, ModelOpt multiplies (case J1)."""
    tensors = {**compressed_nvfp4("a", 128, 64), **modelopt_nvfp4("b", 128, 64)}
    source = source_of(tmp_path / "m", tensors)
    assert set(source.tensors) == {"a.weight", "b.weight"} and source.unused == ()
    a, b = source.tensors["a.weight"], source.tensors["b.weight"]
    assert a.encoding == b.encoding == "nvfp4" and a.shape == b.shape == (128, 64)
    assert (a.divisor, a.activation_divisor) == (900.0, 450.0)
    assert (b.divisor, b.activation_divisor) == (8103.72802734375, 2.0)
    for tensor in (a, b):
        check_row_ranges(tensor)
        imported = import_encoded(tensor.encoded(0, 128), "nvfp4")
        assert_same_words(all_values(tensor), imported.dequantize())
    same = compressed_nvfp4("c", 128, 64, divisor=8103.72802734375)
    c = source_of(tmp_path / "n", same).tensors["c.weight"]
    assert encode(import_encoded(c.encoded(0, 128), "nvfp4")) == encode(import_encoded(b.encoded(0, 128), "nvfp4"))
    del same["c.input_global_scale"]
    assert source_of(tmp_path / "o", same).tensors["c.weight"].activation_divisor is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(37, 1), (37,), (1,), ()])
def test_row_fp8_scales_multiply(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    scales = (0.01 + torch.rand(shape, generator=torch.Generator().manual_seed(3))).to(dtype)
    tensor = source_of(tmp_path, row_fp8("a", 37, 40, scales)).tensors["a.weight"]
    assert tensor.encoding == ROW_FP8 and tensor.divisor is None
    per_row = scales.reshape(-1, 1).float().expand(37, 1)
    assert_same_words(all_values(tensor), finite_fp8(37, 40).float() * per_row)
    codes, stored = tensor.encoded(0, 37).words
    assert torch.equal(codes, finite_fp8(37, 40).view(torch.uint8))
    assert_same_words(stored, per_row.flatten().to(torch.bfloat16))
    check_row_ranges(tensor)
    assert import_encoded(tensor.encoded(0, 37), ROW_FP8).shape == (37, 40)


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("block", [(128, 128), (64, 32)])
def test_block_fp8_is_decoded(tmp_path: Path, block: tuple[int, int], name: str) -> None:
    rows, columns = 200, 300
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=torch.Generator().manual_seed(4))
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    tensors = {"a.weight": finite_fp8(rows, columns), f"a.{name}": scales}
    tensor = source_of(tmp_path, tensors, config).tensors["a.weight"]
    assert tensor.encoding == "fp8_e4m3fn_block" and not tensor.encoded_rows
    found = all_values(tensor)
    for row, column in ((0, 0), (63, 31), (64, 32), (127, 128), (128, 127), (199, 299)):
        expected = tensors["a.weight"][row, column].float() * scales[row // block[0], column // block[1]]
        assert found[row, column] == expected
    check_row_ranges(tensor)
    with pytest.raises(ConversionError, match="stored as fp8_e4m3fn_block"):
        tensor.encoded(0, 1)


def test_one_checkpoint_mixes_schemes(tmp_path: Path) -> None:
    """FP8 by channel in both spellings, NVFP4, FP8 by block and plain tensors side by side (case T6)."""
    tensors = {
        **row_fp8("attn.q", 48, 64, torch.rand(48, 1).bfloat16()),
        "attn.q.input_scale": torch.tensor(0.25),
        **row_fp8("attn.k", 48, 64, torch.rand(48)),
        **compressed_nvfp4("mlp.up", 128, 64),
        **modelopt_nvfp4("mlp.down", 128, 64, seed=9),
        "big.weight": finite_fp8(256, 256),
        "big.weight_scale_inv": torch.rand(2, 2),
        "norm.weight": torch.rand(64).bfloat16(),
        "attn.k_scale": torch.tensor(1.5),
    }
    source = source_of(tmp_path, tensors)
    assert {name: tensor.encoding for name, tensor in source.tensors.items()} == {
        "attn.q.weight": ROW_FP8,
        "attn.k.weight": ROW_FP8,
        "mlp.up.weight": "nvfp4",
        "mlp.down.weight": "nvfp4",
        "big.weight": "fp8_e4m3fn_block",
        "norm.weight": "bf16",
        "attn.k_scale": "fp32",
    }
    assert [unused.name for unused in source.unused] == ["attn.q.input_scale"]
    for name in ("attn.q", "attn.k"):
        weight = import_encoded(source.tensors[f"{name}.weight"].encoded(0, 48), ROW_FP8)
        assert torch.equal(weight.planes["codes"], tensors[f"{name}.weight"].view(torch.uint8))
        assert_same_words(weight.planes["scales"], tensors[f"{name}.weight_scale"].flatten().bfloat16())
    for name, part in (("mlp.up", "weight_packed"), ("mlp.down", "weight")):
        weight = import_encoded(source.tensors[f"{name}.weight"].encoded(0, 128), "nvfp4")
        assert torch.equal(weight.planes["codes"], tensors[f"{name}.{part}"])
    assert torch.equal(all_values(source.tensors["norm.weight"]), tensors["norm.weight"])


# --- refusals --------------------------------------------------------------------------------------------------------


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


CT, MO, F8 = compressed_nvfp4("a", 128, 64), modelopt_nvfp4("a", 128, 64), row_fp8("a", 37, 64, torch.rand(37))
REFUSED = {
    "no block scales": (without(CT, "a.weight_scale"), "'a.weight' is NVFP4, but a.weight_scale is missing"),
    "packed integers": ({**CT, "a.weight_packed": torch.zeros(128, 8, dtype=torch.int32)}, "packed I32 words"),
    "no global scale": (without(CT, "a.weight_global_scale"), "'a.weight_packed' holds packed U8 words of a scheme"),
    "block scale type": ({**CT, "a.weight_scale": torch.rand(128, 4)}, "'a.weight_scale' holds F32 words, expected F8"),
    "block scale shape": ({**CT, "a.weight_scale": finite_fp8(128, 5)}, r"'a.weight_scale' has shape \[128, 5\]"),
    "zero divisor": ({**CT, "a.weight_global_scale": torch.zeros(1)}, "'a.weight_global_scale': divisor 0.0 is no"),
    "nan divisor": ({**CT, "a.weight_global_scale": torch.tensor([float("nan")])}, "divisor nan is no finite"),
    "infinite activation": ({**CT, "a.input_global_scale": torch.tensor([float("inf")])}, "'a.input_global_scale'"),
    "many divisors": ({**CT, "a.weight_global_scale": torch.ones(2)}, r"F32 \[2\], expected one F32 global scale"),
    "zero multiplier": ({**MO, "a.weight_scale_2": torch.tensor(0.0)}, "'a.weight_scale_2': multiplier 0.0 is no"),
    "negative multiplier": ({**MO, "a.weight_scale_2": torch.tensor(-1.0)}, "multiplier -1.0 is no"),
    "bytes alone": (without(MO, "a.weight_scale_2"), "'a.weight' is NVFP4, but a.weight_scale_2 is missing"),
    "pre-scaled inputs": ({**MO, "a.pre_quant_scale": torch.ones(64)}, "'a.weight' comes with scales of the inputs"),
    "reordered columns": ({**F8, "a.weight_g_idx": torch.zeros(64)}, "'a.weight' comes with a reordering"),
    "zero point": ({**F8, "a.weight_zero_point": torch.ones(37, 1)}, "'a.weight_zero_point' is not zero everywhere"),
    "no fp8 scale": (without(F8, "a.weight_scale"), "'a.weight' is FP8, but a.weight_scale is missing"),
    "fp8 scale shape": (
        {**F8, "a.weight_scale": torch.rand(36)},
        r"shape \[36\], expected 1 or 37 scales, or \[1, 1\]",
    ),
    "fp8 scale type": ({**F8, "a.weight_scale": torch.rand(37).half()}, "'a.weight_scale' holds F16 words"),
    "block scale count": (
        {"a.weight": finite_fp8(200, 64), "a.weight_scale_inv": torch.rand(3, 1)},
        r"'a.weight_scale_inv' has shape \[3, 1\], expected \[2, 1\] scales of 128 x 128 blocks",
    ),
    "rank 3": ({"a.weight": finite_fp8(2, 3, 4), "a.weight_scale": torch.rand(1)}, r"\[2, 3, 4\], expected an encoded"),
    "twice": ({**CT, "a.weight": torch.rand(128, 64)}, "'a.weight' is stored both packed and unpacked"),
    "orphan scales": ({"a.weight_scale": finite_fp8(128, 4)}, "'a.weight_scale' holds F8_E4M3 words"),
}


@pytest.mark.parametrize("tensors, message", REFUSED.values(), ids=REFUSED)
def test_refused_when_opened(tmp_path: Path, tensors: Tensors, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        source_of(tmp_path, tensors)


def test_zero_points_of_zero_are_harmless(tmp_path: Path) -> None:
    tensors = {**F8, "a.weight_zero_point": torch.zeros(37, 1).to(FP8)}
    assert source_of(tmp_path, tensors).tensors["a.weight"].encoding == ROW_FP8


def test_illegal_words_are_refused_when_imported(tmp_path: Path) -> None:
    tensors = compressed_nvfp4("layers.3.up", 128, 64)
    tensors["layers.3.up.weight_scale"].view(torch.uint8)[77, 2] = 0xFF
    source = source_of(tmp_path, tensors)
    with pytest.raises(
        ConversionError, match="tensor 'layers.3.up.weight_packed', row 77, group 2: 0xff is no block scale"
    ):
        import_encoded(source.tensors["layers.3.up.weight"].encoded(0, 128), "nvfp4")


@pytest.mark.parametrize(
    "quantization, message",
    [
        ({"quant_method": "compressed-tensors"}, None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None),
        ({"quant_method": "awq"}, r"quantized \(awq\)"),
        ({"bits": 4}, r"quantized \(unnamed\)"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ],
)
def test_the_config_loses_the_source_quantization(tmp_path: Path, quantization: dict, message: str | None) -> None:
    members = {**LlamaConfig(hidden_size=64).to_dict(), "quantization_config": quantization}
    source = source_of(tmp_path, {"norm.weight": torch.ones(4)}, members)
    if message is not None:
        with pytest.raises(ConversionError, match=message):
            source.config()
    else:
        config = source.config()
        assert config.hidden_size == 64 and "quantization_config" not in config.to_dict()


@pytest.mark.parametrize("block", [[128], [0, 128], "128x128", [1.5, 2]])
def test_an_odd_block_size_is_refused(tmp_path: Path, block: object) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}}
    with pytest.raises(ConversionError, match="weight_block_size is"):
        source_of(tmp_path, {"norm.weight": torch.ones(4)}, config)


# --- a checkpoint by the compressed-tensors package ------------------------------------------------------------------


def compressed_checkpoint(folder: Path) -> LlamaForCausalLM:
    """A Llama with FP8 attention by channel and an NVFP4 MLP, written by the package; returns the model as it was."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=4, vocab_size=96, tie_word_embeddings=False))
    original = copy.deepcopy(model)
    fp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": False}
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
    groups = {
        "fp8": {"targets": ["re:.*self_attn.*"], "weights": fp8},
        "nvfp4": {"targets": ["re:.*mlp.*"], "weights": fp4, "input_activations": {**fp4, "dynamic": "local"}},
    }
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        weight = module.weight.data
        if hasattr(module, "weight_global_scale"):
            module.weight_global_scale.data.fill_(448 * 6 / weight.abs().max())
            module.input_global_scale.data.fill_(123.5)
            largest = weight.unflatten(1, (-1, 16)).abs().amax(2)
            module.weight_scale.data.copy_((largest / 6 * module.weight_global_scale).to(FP8))
        else:
            module.weight_scale.data.copy_(weight.abs().amax(1, keepdim=True) / 448)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return original


def test_a_checkpoint_of_the_compressed_tensors_package(tmp_path: Path) -> None:
    model = compressed_checkpoint(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    source = HuggingFaceSource(tmp_path)
    assert source.config().hidden_size == 128 and set(source.tensors) == set(model.state_dict())
    encodings = [tensor.encoding for tensor in source.tensors.values()]
    assert (encodings.count("nvfp4"), encodings.count(ROW_FP8)) == (3, 4)
    for name, original in model.state_dict().items():
        tensor = source.tensors[name]
        if tensor.encoding not in ("nvfp4", ROW_FP8):
            continue
        weight = import_encoded(tensor.encoded(0, tensor.rows), tensor.encoding)
        prefix = name.removesuffix(".weight")
        if tensor.encoding == "nvfp4":
            assert tensor.activation_divisor == 123.5
            assert torch.equal(weight.planes["codes"], stored[f"{prefix}.weight_packed"])
            assert weight.planes["divisors"].item() == stored[f"{prefix}.weight_global_scale"].item()
        else:
            assert torch.equal(weight.planes["codes"], stored[name].view(torch.uint8))
            assert_same_words(weight.planes["scales"], stored[f"{prefix}.weight_scale"].flatten().bfloat16())
        # A global scale upside down or swapped nibbles would be off by orders of magnitude.
        error = (weight.dequantize() - original).norm() / original.norm()
        assert error < (0.15 if tensor.encoding == "nvfp4" else 0.04)


def test_preset_keep_permits_the_activations_that_the_words_were_made_for(tmp_path: Path) -> None:
    """NVFP4 matrices may take 4-bit activations, divided by the package's own global scale; FP8 rows 8-bit ones."""
    folder = tmp_path / "model"
    compressed_checkpoint(folder)
    report = convert(folder, tmp_path / "out.ninfer", "keep")
    formats = {entry.parameters[0]: entry.format for entry in report.tensors}
    assert [formats.get(f"text/model.layers.0.mlp.{part}_proj.weight") for part in ("gate", "up", "down")] == [
        "nvfp4"
    ] * 3
    artifact = open_artifact(tmp_path / "out.ninfer")
    policies = {use.parameter: use.activation_policy for use in artifact.uses}
    for parameter, policy in policies.items():
        assert policy == {"nvfp4": "AllowA4", ROW_FP8: "AllowA8"}.get(formats[parameter], "A16Only"), parameter
    divided = [use for use in artifact.uses if use.activation_policy == "AllowA4"]
    assert len(divided) == 3
    for use in divided:
        assert float(artifact.auxiliary(use.parameter, use.input, "activation_input_divisor", ())) == 123.5


def llama_of(folder: Path, encode: Callable[[str, torch.Tensor], Tensors]) -> LlamaForCausalLM:
    """A Llama's folder with the matrices of its MLP as `encode(prefix, weight)` stores them."""
    torch.manual_seed(1)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=4, vocab_size=96, tie_word_embeddings=False))
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".mlp." in name]:
        tensors |= encode(name.removesuffix(".weight"), tensors.pop(name))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model


def test_modelopt_scales_are_inverted_on_their_way_into_the_artifact(tmp_path: Path) -> None:
    """ModelOpt's scales multiply; the artifact's divisors are their reciprocals in float32."""

    def encode(prefix: str, weight: torch.Tensor) -> Tensors:
        stored = modelopt_nvfp4(prefix, *weight.shape, multiplier=0.0001234)
        return {**stored, f"{prefix}.input_scale": torch.tensor(0.0003)}

    llama_of(tmp_path / "m", encode)
    convert(tmp_path / "m", tmp_path / "m.ninfer", "keep")
    artifact, stored = open_artifact(tmp_path / "m.ninfer"), load_file(tmp_path / "m" / "model.safetensors")
    expected = float(torch.tensor(1.0, dtype=torch.float64).div(torch.tensor(0.0003).double()).float())
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.0.mlp.{part}"
        weight = artifact.parameter(f"text/{name}.weight")
        assert weight.planes["divisors"].item() == 8103.72802734375
        assert torch.equal(weight.planes["codes"], stored[f"{name}.weight"])
        (use,) = [use for use in artifact.uses if use.parameter == f"text/{name}.weight"]
        assert float(artifact.auxiliary(use.parameter, use.input, "activation_input_divisor", ())) == expected


@pytest.mark.parametrize("preset", ["q4", "q6", "fp8", "keep"])
def test_fp8_in_blocks_is_quantized_as_its_decoded_values(tmp_path: Path, preset: str) -> None:
    """The same objects as from a checkpoint that holds those values; preset keep says what it stores instead."""

    def encode(prefix: str, weight: torch.Tensor) -> Tensors:
        blocks = [row.split(128, 1) for row in weight.split(128)]
        scales = torch.stack([torch.stack([block.abs().max() / 448 for block in row]) for row in blocks])
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return {f"{prefix}.weight": (weight / wide).to(FP8), f"{prefix}.weight_scale_inv": scales}

    def decode(prefix: str, weight: torch.Tensor) -> Tensors:
        found = encode(prefix, weight)
        wide = found[f"{prefix}.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return {f"{prefix}.weight": found[f"{prefix}.weight"].float() * wide}

    llama_of(tmp_path / "a", encode)
    llama_of(tmp_path / "b", decode)
    report = convert(tmp_path / "a", tmp_path / "a.ninfer", preset)
    convert(tmp_path / "b", tmp_path / "b.ninfer", {"keep": "fp8"}.get(preset, preset))
    first, second = (open_artifact(tmp_path / f"{side}.ninfer") for side in "ab")
    for part in ("gate_proj", "up_proj", "down_proj"):
        name = f"text/model.layers.0.mlp.{part}.weight"
        assert first.read_object(first.bindings[name].object) == second.read_object(second.bindings[name].object)
    notes = {entry.note for entry in report.tensors if ".mlp." in entry.parameters[0]}
    assert len(notes) == 1 and "fp8_e4m3fn_block" in notes.pop()
    assert len(report.fallbacks) == (3 if preset == "keep" else 0)


def test_a_conversion_keeps_the_words_of_each_scheme(tmp_path: Path) -> None:
    """Through a recipe and a file: NVFP4 stays NVFP4 and FP8 stays FP8, word for word."""
    folder = tmp_path / "model"
    compressed_checkpoint(folder)
    settings = ["text/*mlp*=nvfp4:import_encoded", f"text/*self_attn*={ROW_FP8}:import_encoded"]
    convert(folder, tmp_path / "out.ninfer", settings=settings)
    stored, artifact = load_file(folder / "model.safetensors"), open_artifact(tmp_path / "out.ninfer")
    prefix = "model.layers.0"
    for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        weight = artifact.parameter(f"text/{prefix}.{name}.weight")
        assert weight.format == "nvfp4"
        assert torch.equal(weight.planes["codes"], stored[f"{prefix}.{name}.weight_packed"])
        assert weight.planes["divisors"].item() == stored[f"{prefix}.{name}.weight_global_scale"].item()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = artifact.parameter(f"text/{prefix}.self_attn.{name}.weight")
        assert weight.format == ROW_FP8
        assert torch.equal(weight.planes["codes"], stored[f"{prefix}.self_attn.{name}.weight"].view(torch.uint8))
