"""A checkpoint means to the converter what it means to Transformers: renamed tensors, and experts stored one by one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
)

from exact import assert_same_words
from ninfer_torch.artifact import open_artifact
from ninfer_torch.convert import convert, plan
from ninfer_torch.convert.encoded import import_encoded
from ninfer_torch.convert.hf_source import HuggingFaceSource
from ninfer_torch.errors import ConversionError
from ninfer_torch.tensors import NinferTensor

FP8 = torch.float8_e4m3fn
Tensors = dict[str, torch.Tensor]

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 40,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GATED_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 24,
    "layer_types": ["linear_attention", "full_attention"],
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "Qwen3MoeForCausalLM": Qwen3MoeConfig(**SIZES, **EXPERTS),
    "MixtralForCausalLM": MixtralConfig(**SIZES, num_local_experts=4),
    "DeepseekV3ForCausalLM": DeepseekV3Config(**{**SIZES, **LATENT}),
    "Qwen3_5MoeForCausalLM": Qwen3_5MoeTextConfig(**SIZES, **EXPERTS, **GATED_DELTA),
}
ONE_BY_ONE = {
    "Qwen3MoeForCausalLM": "model.layers.1.mlp.experts.2.up_proj.weight",
    "MixtralForCausalLM": "model.layers.1.block_sparse_moe.experts.2.w3.weight",
    "DeepseekV3ForCausalLM": "model.layers.1.mlp.experts.2.up_proj.weight",
    "Qwen3_5MoeForCausalLM": "model.layers.1.mlp.experts.2.up_proj.weight",
}
"""A tensor by its name in the checkpoint, to show that the experts are stored one by one."""


def tiny(name: str) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[name]
    return getattr(transformers, name)._from_config(config, attn_implementation="eager").bfloat16().eval()


def rewritten(folder: Path, change: Callable[[Tensors], None]) -> Path:
    """The folder with its tensors changed by `change`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: tiny(name) for name in CONFIGS}


@pytest.fixture(params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_a_checkpoint_gives_the_tensors_of_its_class(tmp_path: Path, models: dict[str, Any], name: str) -> None:
    """Transformers writes experts one by one; the source has the model's own state dict again, in any range of rows."""
    models[name].save_pretrained(tmp_path)
    assert ONE_BY_ONE[name] in load_file(tmp_path / "model.safetensors")
    source, state = HuggingFaceSource(tmp_path), models[name].state_dict()
    assert set(source.tensors) == set(state)
    for key, expected in state.items():
        tensor = source.tensors[key]
        assert tensor.name == key and tensor.shape == tuple(expected.shape), key
        assert torch.equal(tensor.values(0, tensor.rows), expected), key
        if "experts" in key and expected.dim() == 3:
            assert torch.equal(tensor.values(1, 3), expected[1:3]) and tensor.values(2, 2).shape == expected[:0].shape
            each = 2 if "gate_up" in key else 1
            members = [
                torch.cat([m.values(0, m.rows) for m in tensor.members[e * each : (e + 1) * each]]) for e in range(4)
            ]
            assert torch.equal(torch.stack(members), expected)


@pytest.mark.parametrize("sharded", [False, True])
def test_it_converts_to_the_model_that_transformers_loads(tmp_path: Path, sharded: bool) -> None:
    model = tiny("Qwen3MoeForCausalLM")
    model.save_pretrained(tmp_path / "m", **({"max_shard_size": "40KB"} if sharded else {}))
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 1 or sharded
    convert(tmp_path / "m", tmp_path / "m.ninfer", "direct")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m.ninfer", dtype=torch.bfloat16)
    for key, expected in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], expected), key


def test_fused_experts_are_read_too(tmp_path: Path) -> None:
    """A checkpoint with whole banks is the same source."""
    model = tiny("Qwen3MoeForCausalLM")
    model.config.save_pretrained(tmp_path)
    members = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**members, "architectures": ["Qwen3MoeForCausalLM"]}))
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    source = HuggingFaceSource(tmp_path)
    assert set(source.tensors) == set(model.state_dict())
    bank = source.tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert bank.shape == (4, 48, 64) and bank.members == ()


VISION: dict[str, Any] = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
VISION |= {"patch_size": 4, "num_position_embeddings": 16}


@pytest.mark.parametrize("whole", [False, True])
def test_experts_outside_the_class_become_banks_too(tmp_path: Path, whole: bool) -> None:
    """The draft layer of a Qwen3.5 checkpoint, which the class does not have, with a vision tower or without."""
    prefix = "model.language_model.layers.1." if whole else "model.layers.1."
    if whole:
        text = CONFIGS["Qwen3_5MoeForCausalLM"].to_dict()
        config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=VISION)
        model = transformers.Qwen3_5MoeForConditionalGeneration(config)
    else:
        model = tiny("Qwen3_5MoeForCausalLM")
    model.save_pretrained(tmp_path)

    def with_draft(tensors: Tensors) -> None:
        layer = {key: value for key, value in tensors.items() if key.startswith(prefix)}
        tensors |= {key.replace(prefix, "mtp.layers.0."): value.clone() for key, value in layer.items()}

    source = HuggingFaceSource(rewritten(tmp_path, with_draft))
    assert set(model.state_dict()) == {key for key in source.tensors if not key.startswith("mtp.")}
    for part in ("gate_up_proj", "down_proj"):
        draft = source.tensors[f"mtp.layers.0.mlp.experts.{part}"]
        own = source.tensors[f"{prefix}mlp.experts.{part}"]
        assert torch.equal(draft.values(0, 4), own.values(0, 4))


# Refusals


def drop(*keys: str) -> Callable[[Tensors], None]:
    return lambda tensors: [tensors.pop(key) for key in keys] and None


MOE = "model.layers.1.mlp.experts"
REFUSED: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "a missing expert": (drop(f"{MOE}.2.up_proj.weight"), rf"lacks '{MOE}\.2\.up_proj\.weight'; .* 4 experts"),
    "the last expert": (drop(f"{MOE}.3.down_proj.weight"), rf"lacks '{MOE}\.3\.down_proj\.weight'"),
    "all of one part": (drop(*(f"{MOE}.{e}.up_proj.weight" for e in range(4))), r"lacks .*experts\.0\.up_proj\.weight"),
    "one expert more": (
        lambda tensors: tensors.update({f"{MOE}.4.down_proj.weight": torch.ones(64, 24)}),
        rf"has '{MOE}\.4\.down_proj\.weight' beyond",
    ),
    "another shape": (
        lambda tensors: tensors.update({f"{MOE}.1.down_proj.weight": torch.ones(64, 16)}),
        rf"'{MOE}\.1\.down_proj\.weight' has shape \[64, 16\].*\[64, 24\]",
    ),
    "both forms": (
        lambda tensors: tensors.update({f"{MOE}.down_proj": torch.ones(4, 64, 24)}),
        rf"'{MOE}\.down_proj' is stored both as one tensor and expert by expert",
    ),
    "all experts of a layer": (
        lambda tensors: [tensors.pop(key) for key in list(tensors) if key.startswith(MOE)] and None,
        rf"lacks 2 of the .*{MOE}\.gate_up_proj",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_incomplete_experts_are_named_before_anything_is_written(
    tmp_path: Path, change: Callable[[Tensors], None], message: str
) -> None:
    tiny("Qwen3MoeForCausalLM").save_pretrained(tmp_path / "m")
    rewritten(tmp_path / "m", change)
    with pytest.raises(ConversionError, match=message):
        convert(tmp_path / "m", tmp_path / "out.ninfer")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_conversions_that_are_not_done_here_are_refused(tmp_path: Path) -> None:
    """Nomic's BERT stores query, key and value as one matrix; the way out is the live model."""
    if not hasattr(transformers, "NomicBertConfig"):
        pytest.skip(f"Transformers {transformers.__version__} has no NomicBert")
    sizes = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    model = transformers.NomicBertModel(transformers.NomicBertConfig(**sizes, num_attention_heads=4))
    model.save_pretrained(tmp_path / "m")
    with pytest.raises(
        ConversionError, match=r"Transformers makes '.*q_proj.*' of tensor '.*Wqkv.*convert the live model"
    ):
        plan(tmp_path / "m")
    assert plan(model).outline.weights == sum(value.numel() for value in model.state_dict().values())


def test_banks_stored_the_other_way_round_are_turned(tmp_path: Path) -> None:
    """Qwen3-VL's checkpoints hold [E, K, N], its class [E, N, K]."""
    text = {
        **SIZES,
        **EXPERTS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": []}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    transformers.Qwen3VLMoeForConditionalGeneration(config).save_pretrained(tmp_path)

    def turn(tensors: Tensors) -> None:
        turned = {key: value.transpose(1, 2).contiguous() for key, value in tensors.items() if ".experts." in key}
        tensors |= {key.removesuffix(".weight"): value for key, value in turned.items()}

    rewritten(tmp_path, turn)
    state = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    source = HuggingFaceSource(tmp_path)
    assert set(source.tensors) == set(state)
    for key, expected in state.items():
        assert torch.equal(source.tensors[key].values(0, source.tensors[key].rows), expected), key
    assert sum(".experts." in key for key in state) == 4


# Encoded experts


def encoded_checkpoint(folder: Path, encode: Callable[[str, torch.Tensor, int], Tensors]) -> Path:
    """The Qwen3-MoE checkpoint with every expert matrix replaced by what `encode(prefix, weight, number)` stores."""
    config = Qwen3MoeConfig(**{**SIZES, "hidden_size": 128}, **{**EXPERTS, "moe_intermediate_size": 128})
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)

    def replace(tensors: Tensors) -> None:
        names = sorted(key for key in tensors if ".experts." in key)
        for number, key in enumerate(names):
            tensors |= encode(key.removesuffix(".weight"), tensors.pop(key), number)

    return rewritten(folder, replace)


def nvfp4(prefix: str, weight: torch.Tensor, number: int) -> Tensors:
    """compressed-tensors' spelling, with a divisor of its own for every matrix."""
    generator = torch.Generator().manual_seed(number)
    codes = torch.randint(0, 256, (weight.shape[0], weight.shape[1] // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 0x60, (weight.shape[0], weight.shape[1] // 16), dtype=torch.uint8, generator=generator)
    return {
        f"{prefix}.weight_packed": codes,
        f"{prefix}.weight_scale": scales.view(FP8),
        f"{prefix}.weight_global_scale": torch.tensor([800.0 + number]),
        f"{prefix}.input_global_scale": torch.tensor([100.0 - number]),
    }


def row_fp8(prefix: str, weight: torch.Tensor, number: int) -> Tensors:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    return {f"{prefix}.weight": (weight / scale.float()).to(FP8), f"{prefix}.weight_scale": scale}


def block_fp8(prefix: str, weight: torch.Tensor, number: int) -> Tensors:
    scale = weight.abs().max().reshape(1, 1) / 448
    return {f"{prefix}.weight": (weight / scale).to(FP8), f"{prefix}.weight_scale_inv": scale}


@pytest.mark.parametrize(("encode", "format"), [(nvfp4, "nvfp4"), (row_fp8, "fp8_e4m3fn_row_bf16")])
def test_words_of_encoded_experts_move_whole(
    tmp_path: Path, encode: Callable[[str, torch.Tensor, int], Tensors], format: str
) -> None:
    """A bank of NVFP4 experts has a divisor per matrix; loaded, each expert is the matrix that was stored."""
    folder = encoded_checkpoint(tmp_path / "m", encode)
    source = HuggingFaceSource(folder)
    report = convert(folder, tmp_path / "m.ninfer", "keep")
    banks = [entry for entry in report.tensors if "experts" in entry.parameters[0]]
    assert [(entry.format, entry.method) for entry in banks] == [(format, "import_encoded")] * 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m.ninfer", dtype=torch.float32)
    artifact = open_artifact(tmp_path / "m.ninfer")
    for layer in range(2):
        for part, pieces in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            path = f"model.layers.{layer}.mlp.experts"
            bank = model.get_parameter(f"{path}.{part}")
            assert isinstance(bank, NinferTensor) and bank.shape[0] == 4
            matrices = {matrix.name: matrix for matrix in source.tensors[f"{path}.{part}"].members}
            for expert in range(4):
                stored = [matrices[f"{path}.{expert}.{piece}.weight"] for piece in pieces]
                words = [import_encoded(matrix.encoded(0, matrix.rows), format).dequantize() for matrix in stored]
                assert_same_words(bank[expert].dequantize(), torch.cat(words))
            if format == "nvfp4":
                tensors = load_file(folder / "model.safetensors")
                inputs = [float(tensors[f"{path}.{e}.{p}.input_global_scale"]) for e in range(4) for p in pieces]
                uses = [use for use in artifact.uses if use.parameter == f"text/{path}.{part}"]
                assert [use.activation_policy for use in uses] == ["AllowA4"]
                divisor = artifact.auxiliary(uses[0].parameter, uses[0].input, "activation_input_divisor", ())
                assert float(divisor) == min(inputs)


def test_experts_in_fp8_blocks_decode(tmp_path: Path) -> None:
    """What has no words here is quantized anew, from the decoded values."""
    folder = encoded_checkpoint(tmp_path / "m", block_fp8)
    tensors, path = load_file(folder / "model.safetensors"), "model.layers.0.mlp.experts"
    found = HuggingFaceSource(folder).tensors[f"{path}.down_proj"]
    assert found.encoding == "fp8_e4m3fn_block" and not found.encoded_rows
    for expert in range(4):
        stored = tensors[f"{path}.{expert}.down_proj.weight"].float()
        assert torch.equal(
            found.values(expert, expert + 1)[0], stored * tensors[f"{path}.{expert}.down_proj.weight_scale_inv"]
        )


def test_experts_of_several_encodings_decode_and_say_so(tmp_path: Path) -> None:
    folder = encoded_checkpoint(
        tmp_path / "m", lambda prefix, weight, number: (row_fp8 if number % 2 else nvfp4)(prefix, weight, number)
    )
    bank = HuggingFaceSource(folder).tensors["model.layers.0.mlp.experts.gate_up_proj"]
    assert bank.encoding.startswith("mixed ") and not bank.encoded_rows
    first = bank.members[0]
    assert torch.equal(bank.values(0, 1)[0, :128], first.values(0, 128).to(torch.float32))
    report = convert(folder, tmp_path / "m.ninfer", "q4")
    notes = {entry.note for entry in report.tensors if "gate_up_proj" in entry.parameters[0]}
    assert len(notes) == 1 and "requantized from mixed" in notes.pop()


# The Hub's cache


def cached_snapshot(root: Path, model: Any) -> Path:
    """The folder of a repository as the Hub's cache lays it out: blobs, and links to them under a revision."""
    from huggingface_hub.file_download import repo_folder_name

    repository = root / repo_folder_name(repo_id="someone/tiny-moe", repo_type="model")
    snapshot = repository / "snapshots" / ("0123456789" * 4)
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(snapshot.name)
    model.save_pretrained(root / "plain", max_shard_size="40KB")
    for number, path in enumerate(sorted((root / "plain").iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        blob.write_bytes(path.read_bytes())
        os.symlink(os.path.relpath(blob, snapshot), snapshot / path.name)
    return repository


def test_a_snapshot_of_the_hub_is_a_source(tmp_path: Path) -> None:
    """Links into blobs, by the snapshot's path or by the repository's folder; its name is the repository's."""
    model = tiny("Qwen3MoeForCausalLM")
    repository = cached_snapshot(tmp_path, model)
    (snapshot,) = (repository / "snapshots").iterdir()
    for path in (snapshot, repository):
        source = HuggingFaceSource(path)
        assert source.name == "tiny-moe" and set(source.tensors) == set(model.state_dict())
        assert source.resources()["generation_config.json"] == (snapshot / "generation_config.json").read_bytes()
    report = convert(repository, tmp_path / "m.ninfer", "q8")
    assert report.name == "tiny-moe" and str(tmp_path) not in (tmp_path / "m.ninfer.conversion.json").read_text()
    (repository / "refs" / "main").write_text("f" * 40)
    with pytest.raises(ConversionError, match=r"no snapshot of its main revision f+; found 0123456789"):
        HuggingFaceSource(repository)
