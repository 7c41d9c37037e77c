"""Each architecture's GGUF file gives back the Hugging Face model it was made of: values, config, logits."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
from ninfer_torch.convert.matching import match_source
from ninfer_torch.errors import ConversionError
from ninfer_torch.models.generic import plan_model
from ninfer_torch.tensors import NinferTensor

TYPES = gguf.GGMLQuantizationType
LAYERS, HIDDEN, HEADS, KEY_HEADS, FEED, VOCABULARY, EXPERTS = 2, 64, 4, 2, 96, 40, 4

Array = np.ndarray[Any, Any]
Stored = dict[str, Array]


@dataclass(frozen=True)
class Case:
    """An architecture as llama.cpp's converter writes it.

    `names` maps a parameter, without layer prefix and `.weight` or `.bias`, to its GGUF name; what is not a plain renaming
    is in `split`, which turns one parameter into several tensors.
    """

    name: str
    model_class: str
    config: Mapping[str, Any]
    keys: Mapping[str, Any]
    names: Mapping[str, str]
    split: Callable[[str, Array], Stored] | None = None
    further: Mapping[str, Array] = field(default_factory=dict)


TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ATTENTION = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
MLP = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": FEED,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2.0**-17,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
KEYS = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": FEED,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KEY_HEADS,
    "attention.layer_norm_rms_epsilon": 2.0**-17,
    "rope.freq_base": 50000.0,
}


def split_experts(parameter: str, values: Array) -> Stored:
    """Gate and up of each expert lie in one matrix of the model, gate first, and in two tensors of the file."""
    if parameter.endswith("experts.gate_up_proj"):
        half = values.shape[1] // 2
        return {"ffn_gate_exps.weight": values[:, :half], "ffn_up_exps.weight": values[:, half:]}
    return {"ffn_down_exps.weight": values}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 50000.0,
    "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
    "original_max_position_embeddings": 32,
    "factor": 4.0,
    "attention_factor": 1.1875,
    "partial_rotary_factor": 0.75,
}

CASES = (
    Case("qwen2", "Qwen2ForCausalLM", SIZES, KEYS, ATTENTION | MLP),
    Case(
        "qwen3",
        "Qwen3ForCausalLM",
        SIZES | {"head_dim": 32},
        KEYS | {"attention.key_length": 32, "attention.value_length": 32},
        ATTENTION | HEAD_NORMS | MLP,
    ),
    Case(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        SIZES
        | {
            "head_dim": 16,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        KEYS
        | {
            "attention.key_length": 16,
            "attention.value_length": 16,
            "expert_count": EXPERTS,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
        },
        ATTENTION | HEAD_NORMS | {"mlp.gate": "ffn_gate_inp"},
        split_experts,
    ),
    Case(
        "phi3",
        "Phi3ForCausalLM",
        SIZES | {"sliding_window": 24, "original_max_position_embeddings": 128},
        KEYS
        | {
            "rope.dimension_count": 16,
            "attention.sliding_window": 24,
            "rope.scaling.original_context_length": 128,
        },
        {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "self_attn.qkv_proj": "attn_qkv",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        },
    ),
)
PHI3 = CASES[-1]
PHI3_LONG = Case(
    "phi3",
    "Phi3ForCausalLM",
    {key: value for key, value in SIZES.items() if key != "rope_theta"}
    | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    KEYS
    | {
        "rope.dimension_count": 12,
        "attention.sliding_window": 0,
        "rope.scaling.original_context_length": 32,
        "rope.scaling.attn_factor": 1.1875,
    },
    PHI3.names,
    further={
        "rope_factors_short.weight": np.array(LONGROPE["short_factor"], np.float32),
        "rope_factors_long.weight": np.array(LONGROPE["long_factor"], np.float32),
    },
)
ALL = {case.name: case for case in CASES} | {"phi3 with longrope": PHI3_LONG}


def original(case: Case) -> Any:
    """The tiny model: random everywhere, norms and biases too, so that nothing may be left at what it starts with."""
    torch.manual_seed(3)
    config_class = getattr(transformers, case.model_class).config_class
    model = getattr(transformers, case.model_class)(config_class(**case.config)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter + 0.25 * torch.randn_like(parameter)).bfloat16())
    return model


def stored(case: Case, parameter: str, values: Array) -> Stored:
    """The tensors of the file that hold one parameter."""
    stem, _, suffix = parameter.rpartition(".")
    if stem in TOP:
        return {f"{TOP[stem]}.{suffix}": values}
    layer, name = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", parameter).groups()  # type: ignore[union-attr]
    if "experts." in name and case.split is not None:
        return {f"blk.{layer}.{key}": part for key, part in case.split(parameter, values).items()}
    stem, _, suffix = name.rpartition(".")
    return {f"blk.{layer}.{case.names[stem]}.{suffix}": values}


def write(
    path: Path,
    case: Case,
    model: Any,
    kind: TYPES = TYPES.F32,
    keys: Mapping[str, Any] | None = None,
    without: str = "",
    other_kinds: Mapping[str, TYPES] | None = None,
) -> Path:
    """The file; matrices in blocks of `kind`, but those whose names end as `other_kinds` says."""
    writer = gguf.GGUFWriter(path, case.name)
    writer.add_name("tiny")
    kinds = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
    for key, value in {**case.keys, **(keys or {})}.items():
        writer.add_key_value(f"{case.name}.{key}", value, kinds[type(value)])
    tensors = dict(case.further)
    for name, values in model.state_dict().items():
        tensors |= stored(case, name, values.numpy())
    for name, values in tensors.items():
        if name != without:
            own = [other for end, other in (other_kinds or {}).items() if name.endswith(end)]
            blocked = own[0] if own else kind if values.ndim > 1 and "gate_inp" not in name else TYPES.F32
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values), blocked), raw_dtype=blocked)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(params=ALL)
def case(request: pytest.FixtureRequest) -> Case:
    return ALL[request.param]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def loaded(source: GgufSource) -> Any:
    """The model that the source's config describes, filled with the source's values."""
    config = source.config()
    model = getattr(transformers, config.architectures[0])(config).float().eval()
    model.load_state_dict({name: tensor.values(0, tensor.rows).float() for name, tensor in source.tensors.items()})
    return model


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(1, 40).unsqueeze(0)
    with torch.no_grad():
        return model(ids).logits


def test_values_equal_the_original(case: Case, path: Path) -> None:
    model = original(case)
    source = GgufSource(write(path, case, model))
    expected = model.state_dict()
    assert set(source.tensors) == set(expected)
    for name, values in expected.items():
        tensor = source.tensors[name]
        assert (tensor.shape, tensor.encoding) == (tuple(values.shape), "fp32"), name
        assert torch.equal(tensor.values(0, tensor.rows), values), name
        assert torch.equal(tensor.values(1, tensor.rows - 1), values[1:-1]), name
    assert [unused.name for unused in source.unused] == list(case.further)
    matched = match_source(plan_model(source.config()), source)
    assert len(matched.tensors) == len(expected) and len(matched.unused) == len(case.further)


def test_the_config_computes_what_the_original_computes(case: Case, path: Path) -> None:
    model = original(case)
    source = GgufSource(write(path, case, model))
    config = source.config()
    for name, value in case.config.items():
        if name not in ("initializer_range", "rope_parameters", "rope_theta"):
            assert getattr(config, name) == value, name
    assert torch.equal(logits(loaded(source)), logits(model))


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_transformers_reads_the_same_values(name: str, path: Path) -> None:
    case = ALL[name]
    model = original(case)
    source = GgufSource(write(path, case, model))
    # Its own reading of the config leaves out the width of experts.
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=model.config, dtype=torch.float32
    )
    for key, values in theirs.state_dict().items():
        tensor = source.tensors[key]
        assert torch.equal(tensor.values(0, tensor.rows), values), key


def test_blocks_come_whole(case: Case, path: Path) -> None:
    """Rows are quantized one by one, so that rearranging rows and quantizing them commute."""
    model = original(case)
    source = GgufSource(write(path, case, model, TYPES.Q8_0))
    for name, values in model.state_dict().items():
        tensor = source.tensors[name]
        if values.dim() < 2 or name.endswith("mlp.gate.weight"):
            assert (tensor.encoding, tensor.read_blocks) == ("fp32", None)
            continue
        blocks = gguf.quantize(values.flatten(0, -2).numpy(), TYPES.Q8_0)
        per_index = len(blocks) // tensor.rows
        assert tensor.encoding == "gguf_q8_0"
        assert np.array_equal(tensor.blocks(0, tensor.rows).numpy(), blocks), name
        assert np.array_equal(tensor.blocks(1, 3).numpy(), blocks[per_index : 3 * per_index]), name
        decoded = gguf.dequantize(blocks, TYPES.Q8_0).reshape(values.shape)
        assert np.array_equal(tensor.values(0, tensor.rows).numpy(), decoded), name


def test_every_matrix_is_written_as_it_is(case: Case, path: Path) -> None:
    source = GgufSource(write(path, case, original(case), TYPES.Q8_0))
    banks = [name for name, tensor in source.tensors.items() if len(tensor.shape) == 3]
    settings = [f"text/{name}=gguf_q8_0:import_encoded" for name in banks]
    report = convert(source, path.with_suffix(".ninfer"), "gguf", settings=settings, no_fallback=True)
    artifact = open_artifact(path.with_suffix(".ninfer"))
    assert len(report.tensors) == len(source.tensors)
    for entry in report.tensors:
        (name,) = (name.removeprefix("text/") for name in entry.parameters)
        tensor = source.tensors[name]
        assert entry.format == ("gguf_q8_0" if tensor.read_blocks else "fp32")
        words = tensor.blocks if tensor.read_blocks else tensor.values
        assert artifact.read_object(entry.object) == words(0, tensor.rows).numpy().tobytes(), name


def test_a_converted_file_computes_with_its_decoded_values(case: Case, path: Path) -> None:
    source = GgufSource(write(path, case, original(case), TYPES.Q8_0))

    def exact_activations(model: Any, recipe: Any, sources: Any) -> None:
        recipe.assign("*", activation_policy="A16Only")

    convert(source, path.with_suffix(".ninfer"), "gguf", recipe=exact_activations)
    packed = transformers.AutoModelForCausalLM.from_pretrained(path.with_suffix(".ninfer"), dtype=torch.float32)
    expected, found = logits(loaded(source)), logits(packed)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_preset_gguf_keeps_the_blocks_of_expert_banks(path: Path) -> None:
    """Loaded, a bank is quantized, and its experts are the file's."""
    case = ALL["qwen3moe"]
    source = GgufSource(write(path, case, original(case), TYPES.Q8_0))
    report = convert(source, path.with_suffix(".ninfer"), "gguf")
    banks = [entry for entry in report.tensors if "experts" in entry.parameters[0]]
    assert [(entry.format, entry.method) for entry in banks] == [("gguf_q8_0", "import_encoded")] * (2 * LAYERS)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.with_suffix(".ninfer"), dtype=torch.float32)
    for entry in banks:
        name = entry.parameters[0].removeprefix("text/")
        bank = model.get_parameter(name)
        assert isinstance(bank, NinferTensor) and bank.shape == source.tensors[name].shape
        assert torch.equal(
            torch.stack([bank[e].dequantize() for e in range(EXPERTS)]), source.tensors[name].values(0, EXPERTS)
        )


# Refusals


def test_a_missing_bias_is_named(path: Path) -> None:
    case = ALL["qwen2"]
    with pytest.raises(ConversionError, match=r"missing: 'blk\.1\.attn_k\.bias'"):
        GgufSource(write(path, case, original(case), without="blk.1.attn_k.bias"))


@pytest.mark.parametrize("tensor", ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_inp"])
def test_missing_experts_are_named(path: Path, tensor: str) -> None:
    case = ALL["qwen3moe"]
    with pytest.raises(ConversionError, match=rf"missing: 'blk\.0\.{tensor}\.weight'"):
        GgufSource(write(path, case, original(case), without=f"blk.0.{tensor}.weight"))


def test_expert_banks_of_unequal_shapes_are_named(path: Path) -> None:
    case = ALL["qwen3moe"]
    model = original(case)
    bank = model.model.layers[0].mlp.experts

    def uneven(parameter: str, values: Array) -> Stored:
        parts = split_experts(parameter, values)
        return {name: part[:, :-8] if name == "ffn_up_exps.weight" else part for name, part in parts.items()}

    bent = Case(**{**vars(case), "split": uneven})
    with pytest.raises(ConversionError, match=r"ffn_gate_exps.*\[4, 32, 64\].*ffn_up_exps.*\[4, 24, 64\].*one shape"):
        GgufSource(write(path, bent, model))
    assert bank.gate_up_proj.shape == (EXPERTS, 64, HIDDEN)


def test_expert_banks_of_two_types_decode(path: Path) -> None:
    """Gate in one block type and up in another have no common blocks, but values."""
    case = ALL["qwen3moe"]
    model = original(case)
    source = GgufSource(write(path, case, model, TYPES.Q8_0, other_kinds={"0.ffn_up_exps.weight": TYPES.F16}))
    found = source.tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert (found.encoding, found.read_blocks) == ("mixed gguf_q8_0+fp16", None)
    values = model.state_dict()[found.name].numpy()
    expected = gguf.dequantize(gguf.quantize(values, TYPES.Q8_0), TYPES.Q8_0)
    expected[:, 32:] = values[:, 32:].astype(np.float16)
    assert np.array_equal(found.values(0, EXPERTS).numpy(), expected)
    report = convert(source, path.with_suffix(".ninfer"), "gguf")
    assert [entry.format for entry in report.fallbacks] == ["q8_g32_fp16"]
    assert "have no words in common" in report.fallbacks[0].note
    with pytest.raises(ConversionError, match=r"1 tensors cannot keep.*gate_up_proj \(mixed gguf_q8_0\+fp16\)"):
        convert(source, path.with_name("b.ninfer"), "gguf", no_fallback=True)


def test_substituted_tensors_are_listed_with_their_share_of_the_weights(path: Path) -> None:
    """2688 columns are no whole super-blocks of 256, and quantizers then turn to other types without a word."""
    case = ALL["qwen3"]
    sizes = {"config": {**case.config, "intermediate_size": 2688}, "keys": {**case.keys, "feed_forward_length": 2688}}
    wide = Case(**{**vars(case), **sizes})
    model = original(wide)
    write(path, wide, model, TYPES.Q8_0, other_kinds={"ffn_down.weight": TYPES.Q4_1})
    report = convert(path, path.with_suffix(".ninfer"), "gguf")
    lost = [f"text/model.layers.{layer}.mlp.down_proj.weight" for layer in range(LAYERS)]
    assert [entry.parameters[0] for entry in report.fallbacks] == lost
    share = 2688 * HIDDEN * LAYERS / sum(values.numel() for values in model.state_dict().values())
    assert f"2 tensors ({100 * share:.1f}% of the weights) could not keep their block type" in report.summary()
    assert all(name in report.summary() for name in lost)
    with pytest.raises(ConversionError, match=r"2 tensors cannot keep.*0\.mlp\.down_proj.*1\.mlp\.down_proj"):
        convert(path, path.with_name("b.ninfer"), "gguf", no_fallback=True)
    assert not path.with_name("b.ninfer").exists()
    # Our own groups pad such rows: a preset gives every matrix the format that it names.
    report = convert(path, path.with_name("c.ninfer"), "q4")
    assert {entry.format for entry in report.tensors if "mlp" in entry.parameters[0]} == {"q4_g64_fp16"}
    assert not report.fallbacks


@pytest.mark.parametrize(
    ("without", "message"),
    [
        (
            "rope_factors_long.weight",
            "expected 'rope_factors_short.weight' and 'rope_factors_long.weight' of 6 numbers",
        ),
        ("rope_factors_short.weight", "attention factor 1.1875; expected"),
    ],
)
def test_half_of_longrope_is_refused(path: Path, without: str, message: str) -> None:
    with pytest.raises(ConversionError, match=re.escape(message)):
        GgufSource(write(path, PHI3_LONG, original(PHI3_LONG), without=without)).config()


@pytest.mark.parametrize("turned", [15, 18])
def test_a_rotation_wider_than_a_head_is_refused(path: Path, turned: int) -> None:
    source = GgufSource(write(path, PHI3, original(PHI3), keys={"rope.dimension_count": turned}))
    with pytest.raises(ConversionError, match=rf"rope\.dimension_count is {turned}.*16 columns"):
        source.config()


def test_no_sliding_window_is_no_sliding_window(path: Path) -> None:
    assert GgufSource(write(path, PHI3_LONG, original(PHI3_LONG))).config().sliding_window is None


@pytest.mark.parametrize("name", ["qwen2moe", "qwen3next", "gemma2"])
def test_other_architectures_are_refused_by_name(path: Path, name: str) -> None:
    case = Case(**{**vars(ALL["qwen2"]), "name": name})
    with pytest.raises(
        ConversionError, match=rf"'{name}' is not known.*qwen2, qwen3, qwen3moe, qwen35, qwen35moe, phi3"
    ):
        GgufSource(write(path, case, original(case)))
