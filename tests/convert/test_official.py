"""NInfer's own artifacts out of checkpoints: names, parents, order, words, uses; the official recipes as the specification lists them."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import gguf_qwen35_files as files
import official_names
from golden import golden
from ninfer_torch.artifact import TensorObject, open_artifact
from ninfer_torch.convert.logical_parts import LogicalSource
from ninfer_torch.convert.official import official_model
from ninfer_torch.convert.official_recipes import OFFICIAL_RECIPES, get_official
from ninfer_torch.convert.pipeline import convert, plan
from ninfer_torch.convert.recipes import Recipe, RecipeModel
from ninfer_torch.errors import ConversionError
from ninfer_torch.kernels.precision import activation_precision
from ninfer_torch.models.architectures import ARCHITECTURES
from ninfer_torch.models.qwen3_5 import Qwen3_5
from ninfer_torch.tensors import NinferTensor
from tiny_families import prompt, tiny_family

FP8 = torch.float8_e4m3fn
CONVERTED = [
    ("qwen3_5_dense", "groupwise", {"recipe": "qwen3_8_27b"}),
    ("qwen3_5_vision_mtp", "groupwise", {"recipe": "qwen3_8_27b"}),
    ("qwen3_5_moe", "groupwise", {"recipe": "qwen3_6_35b_a3b"}),
    ("qwen3_5_dense", "bf16", {"preset": "direct", "official": True}),
]


@pytest.mark.parametrize(("name", "recipe", "arguments"), CONVERTED, ids=[f"{n}-{r}" for n, r, _ in CONVERTED])
def test_a_golden_checkpoint_becomes_the_golden_artifact(
    tmp_path: Path, name: str, recipe: str, arguments: dict[str, Any]
) -> None:
    """Every object, binding, use, component and resource; the golden chat template is not among the checkpoint's files."""
    convert(golden("ninfer", "models", name, "checkpoint"), tmp_path / "m.ninfer", **arguments)
    found = open_artifact(tmp_path / "m.ninfer")
    expected = open_artifact(golden("ninfer", "models", name, f"{recipe}.ninfer"))
    assert list(found.bindings.items()) == list(expected.bindings.items())
    assert list(found.uses) == list(expected.uses)
    assert list(found.components) == list(expected.components)
    for component, record in expected.components.items():
        own = found.components[component]
        roles = {role: name for role, name in record.resources.items() if role != "chat_template.jinja"}
        assert (own.config, own.target, own.resources) == (record.config, record.target, roles)
    template = "resource/text/chat_template.jinja"
    assert [name for name in expected.objects if name != template] == list(found.objects)
    for object_id, record in found.objects.items():
        other = expected.objects[object_id]
        if isinstance(record, TensorObject):
            assert isinstance(other, TensorObject)
            assert (record.shape, record.format, record.layout) == (other.shape, other.format, other.layout)
        assert found.read_object(object_id) == expected.read_object(object_id), object_id


RECIPE_OF = {"qwen3.5": "qwen3_8_27b", "qwen3.5 moe": "qwen3_6_35b_a3b"}


@pytest.mark.parametrize("family", RECIPE_OF)
def test_a_checkpoint_becomes_an_artifact_that_computes_as_its_weights(tmp_path: Path, family: str) -> None:
    """Logits are those of a plain model with the decoded weights, placed by the names of Transformers."""
    tiny_family(family).save_pretrained(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "m.ninfer", recipe=RECIPE_OF[family])
    artifact = open_artifact(tmp_path / "m.ninfer")
    config = artifact.components["text"].config
    expected = official_names.parameters({"text": config})
    assert artifact.bindings.keys() == expected.keys()
    assert {(use.parameter, use.input) for use in artifact.uses} == {
        (name, input) for name, (_, inputs) in expected.items() for input in inputs
    }
    for name, (shape, _) in expected.items():
        assert artifact.dequantize_parameter(name).numel() == np.prod(shape), name
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m.ninfer", dtype=torch.float32)
    twin = tiny_family(family)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            stored = model.get_parameter(name)
            parameter.copy_(stored.dequantize() if isinstance(stored, NinferTensor) else stored)
        assert sum(isinstance(parameter, NinferTensor) for parameter in model.parameters()) > 10
        ids = prompt(2, 11)
        found, plain = model(ids).logits, twin(ids).logits
    assert (found - plain).abs().max() < 1e-4 * plain.std()


# The rules, on models of the published depth


TEXT = {
    "architectures": [],
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
FFN = {
    "Qwen3_5ForCausalLM": {"intermediate_size": 256},
    "Qwen3_5MoeForCausalLM": {
        "num_experts": 3,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    },
}
VISION = {key: files.VISION[key] for key in files.VISION if key != "out_hidden_size"}
ROTARY = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [6, 5, 5]}
DEPTHS = {"Qwen3_5ForCausalLM": 64, "Qwen3_5MoeForCausalLM": 40}


def published(name: str, divisors: dict[str, float] | None = None) -> tuple[RecipeModel, Recipe]:
    """A model as deep as the published ones, and a recipe that knows a quantized source."""
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(DEPTHS[name])]
    configs = {"text": {**TEXT, **FFN[name], "layer_types": kinds}, "vision": VISION, "mtp": {}}
    architecture = ARCHITECTURES[name]
    assert isinstance(architecture, Qwen3_5)
    model = official_model(LogicalSource(architecture, configs, {}, ()))
    recipe = Recipe(
        model,
        dict.fromkeys(model.parameters, "bf16"),
        ("checkpoint", "quantized"),
        lambda source, name: (divisors or {}).get(name, 2.0),
    )
    return model, recipe


def described(recipe: Recipe, model: RecipeModel) -> dict[str, tuple[str, str, str, str]]:
    found = {}
    for name, parameter in model.parameters.items():
        (selection,) = recipe.selections(name)
        policies = {recipe.uses[name, input].activation_policy for input in parameter.inputs} or {"A16Only"}
        assert len(policies) == 1 and isinstance(selection.method, str)
        found[name] = (selection.format, selection.method, selection.source, policies.pop())
    return found


def words(letters: str) -> str:
    return {"Q4": "q4_g64_fp16", "Q5": "q5_g64_fp16", "Q6": "q6_g64_fp16", "Q8": "q8_g32_fp16"}.get(letters, letters)


F8 = "fp8_e4m3fn_row_bf16"
GROUPWISE = {"text/layers/3/attention/query": "Q4", "text/layers/0/gdn/key": "Q4", "text/layers/0/mlp/up": "Q4"}
GROUPWISE |= {"text/layers/3/attention/gate": "Q5", "text/layers/3/attention/value": "Q5", "text/layers/0/gdn/z": "Q5"}
GROUPWISE |= {
    "text/layers/63/attention/output": "Q5",
    "text/layers/62/gdn/output": "Q5",
    "text/layers/63/mlp/down": "Q5",
}
OPTIONAL = {"vision/patch_embedding": "Q6", "vision/merger/fc1": "Q8", "vision/layers/1/attention/key": "Q4"}
OPTIONAL |= {"vision/layers/0/mlp/fc1": "Q4", "vision/layers/0/mlp/fc2": "Q5", "vision/layers/0/attention/output": "Q5"}
OPTIONAL |= {"mtp/input_projection": "Q8", "mtp/layers/0/attention/query": "Q8"}
DIRECT = ("text/layers/0/gdn/a_projection", "text/layers/0/gdn/convolution", "text/final_norm", "mtp/final_norm")
NVFP4 = ("nvfp4", "import_encoded", "quantized", "AllowA4")
ROWS = (F8, "import_encoded", "quantized", "AllowA8")
PLAIN = ("bf16", "cast_direct", "checkpoint", "A16Only")
MAXABS = (F8, "fp8_row_maxabs", "checkpoint", "A16Only")
QUANTIZED_MAXABS = (F8, "fp8_row_maxabs", "quantized", "A16Only")


def absmax(formats: dict[str, str], method: str = "grouped_absmax") -> dict[str, tuple[str, str, str, str]]:
    return {name: (words(format), method, "checkpoint", "A16Only") for name, format in formats.items()}


def ends(embedding: str, head: str) -> dict[str, str]:
    return {"text/token_embedding": embedding, "text/output_head": head}


def listed(name: str) -> dict[str, tuple[str, ...]]:
    """What the table of spec/conversion.md 8.1 says of some parameters of each kind."""
    if name == "qwen3_6_27b":
        return absmax(ends("Q6", "Q6") | GROUPWISE | OPTIONAL)
    if name == "qwen3_8_27b":
        return absmax(ends("Q8", "Q8") | GROUPWISE | OPTIONAL)
    if name == "qwen3_8_27b_q6":
        return absmax(ends("Q8", "Q8") | GROUPWISE | OPTIONAL | {"text/layers/0/mlp/up": "Q6"})
    if name == "qwen3_8_27b_imatrix":
        late = {key: "Q4" for key in GROUPWISE if "/6" in key}
        early = {"text/layers/35/attention/output": "Q5", "text/layers/35/mlp/down": "Q5"}
        text = absmax(ends("Q4", "Q6") | GROUPWISE | late | early, "grouped_search")
        return text | absmax(OPTIONAL)
    if name == "qwen3_6_35b_a3b":
        bank = "text/layers/{}/moe/experts/2/{}"
        experts = {bank.format(34, "gate"): "Q4", bank.format(0, "up"): "Q4", bank.format(33, "down"): "Q5"}
        experts |= {bank.format(layer, "down"): "Q6" for layer in (34, 38, 39)}
        rest = {"text/layers/0/moe/shared/up": "Q8", "text/layers/3/attention/query": "Q8", "text/layers/0/gdn/z": "Q8"}
        return absmax(ends("Q8", "Q6") | experts | rest | OPTIONAL | {"mtp/layers/0/moe/experts/1/down": "Q8"})
    if name == "qwen3_6_35b_a3b_nvfp4":
        imported = {"text/layers/0/moe/experts/2/down": NVFP4, "text/layers/39/moe/shared/gate": NVFP4}
        return absmax(ends("Q8", "Q6") | {"text/layers/0/gdn/z": "Q8"} | OPTIONAL) | imported
    if name == "qwen3_6_27b_nvfp4":
        plain = ("text/layers/3/attention/query", "text/layers/23/attention/value", "text/layers/7/attention/output")
        imported = ("text/layers/27/attention/query", "text/layers/11/attention/output", "text/layers/0/mlp/up")
        output = {"text/layers/4/gdn/output": PLAIN, "text/layers/5/gdn/output": NVFP4}
        return (
            absmax(ends("Q8", "Q8") | OPTIONAL) | dict.fromkeys(plain, PLAIN) | dict.fromkeys(imported, NVFP4) | output
        )
    heads = {
        "qwen3_8_27b_nvfp4": ROWS,
        "qwen3_8_27b_nvfp4_nvidia": QUANTIZED_MAXABS,
        "qwen3_8_27b_nvfp4_orcarouter": MAXABS,
    }
    last = NVFP4 if name.endswith("nvidia") else ROWS
    embedding = QUANTIZED_MAXABS if name == "qwen3_8_27b_nvfp4" else MAXABS
    text = {"text/token_embedding": embedding, "text/output_head": heads[name], "text/layers/55/mlp/down": NVFP4}
    text |= {"text/layers/56/mlp/down": last, "text/layers/0/gdn/z": ROWS, "text/layers/63/attention/gate": ROWS}
    if name == "qwen3_8_27b_nvfp4":
        text |= {"text/final_norm": ("bf16", "cast_direct", "quantized", "A16Only"), "vision/merger/norm_weight": PLAIN}
    return text | absmax(OPTIONAL)


BY_RULES = [name for name, record in OFFICIAL_RECIPES.items() if record.blocks is None]


@pytest.mark.parametrize("name", BY_RULES)
def test_recipes_choose_what_the_specification_lists(name: str) -> None:
    model, recipe = published(OFFICIAL_RECIPES[name].architecture)
    sources: Any = dict.fromkeys(("checkpoint", "quantized"))
    OFFICIAL_RECIPES[name].configure(model, recipe, sources, Path("matrix") if name.endswith("imatrix") else None)
    found = described(recipe, model)
    expected = listed(name)
    assert {key: found[key] for key in expected} == expected
    assert {found[key][0] for key in DIRECT} == {"bf16"}
    for name_, parameter in model.parameters.items():
        if not parameter.inputs and name_ != "text/token_embedding":
            assert found[name_][:2] == ("bf16", "cast_direct")


def groups(recipe: Recipe, pattern: str) -> list[tuple[str, ...]]:
    parents = (tuple(piece.parameter for piece in parent.pieces) for parent in recipe.parents())
    return [
        tuple(name.split("/", 3)[3] for name in parent) for parent in parents if fnmatch.fnmatchcase(parent[0], pattern)
    ]


def test_what_packs_together() -> None:
    model, recipe = published("Qwen3_5ForCausalLM")
    OFFICIAL_RECIPES["qwen3_8_27b"].configure(model, recipe, {})
    assert groups(recipe, "text/layers/0/*")[:3] == [
        ("gdn/query", "gdn/key"),
        ("gdn/value", "gdn/z"),
        ("mlp/gate", "mlp/up"),
    ]
    assert ("gdn/a_projection",) in groups(recipe, "text/layers/0/*")
    assert groups(recipe, "text/layers/3/*")[:2] == [
        ("attention/query", "attention/key"),
        ("attention/gate", "attention/value"),
    ]
    model, recipe = published("Qwen3_5MoeForCausalLM")
    OFFICIAL_RECIPES["qwen3_6_35b_a3b"].configure(model, recipe, {})
    experts = [f"moe/experts/{e}/" for e in range(3)]
    assert groups(recipe, "text/layers/0/*")[:6] == [
        ("gdn/query", "gdn/key", "gdn/value", "gdn/z"),
        ("gdn/a_projection", "gdn/b_projection"),
        ("moe/router", "moe/shared_score"),
        tuple(prefix + part for prefix in experts for part in ("gate", "up")),
        tuple(prefix + "down" for prefix in experts),
        ("moe/shared/gate", "moe/shared/up"),
    ]


def test_imported_nvfp4_packs_only_under_one_divisor() -> None:
    """Banks are grouped whatever their divisors are."""
    apart = {"text/layers/0/mlp/up": 3.0, "text/layers/0/gdn/z": 5.0}
    model, recipe = published("Qwen3_5ForCausalLM", apart)
    OFFICIAL_RECIPES["qwen3_6_27b_nvfp4"].configure(model, recipe, dict.fromkeys(("checkpoint", "quantized")))  # type: ignore[arg-type]
    first, second = groups(recipe, "text/layers/0/*"), groups(recipe, "text/layers/1/*")
    assert second[0] == ("gdn/query", "gdn/key", "gdn/value", "gdn/z") and ("mlp/gate", "mlp/up") in second
    assert first[0] == ("gdn/query", "gdn/key") and ("mlp/gate",) in first and ("gdn/z",) in first
    model, recipe = published("Qwen3_5MoeForCausalLM", {"text/layers/0/moe/experts/1/up": 7.0})
    OFFICIAL_RECIPES["qwen3_6_35b_a3b_nvfp4"].configure(model, recipe, dict.fromkeys(("checkpoint", "quantized")))  # type: ignore[arg-type]
    assert len(groups(recipe, "text/layers/0/moe/experts/0/gate")[0]) == 6


# Encoded sources


def nvfp4(prefix: str, shape: torch.Size, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    codes = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 0x60, (shape[0], shape[1] // 16), dtype=torch.uint8, generator=generator)
    return {
        f"{prefix}.weight_packed": codes,
        f"{prefix}.weight_scale": scales.view(FP8),
        f"{prefix}.weight_global_scale": torch.tensor([800.0 + number]),
        f"{prefix}.input_global_scale": torch.tensor([100.0 - number]),
    }


def test_banks_of_imported_experts(tmp_path: Path) -> None:
    """Experts' words move whole, a divisor for each; every use carries the smallest activation divisor of its parent."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in TEXT.items() if key != "architectures"}
    config = transformers.Qwen3_5MoeTextConfig(
        **sizes, **FFN["Qwen3_5MoeForCausalLM"], num_hidden_layers=2, num_experts_per_tok=2, rope_parameters=ROTARY,
        layer_types=["linear_attention", "full_attention"], tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Qwen3_5MoeForCausalLM(config).save_pretrained(tmp_path / "m")
    transformers.Qwen3_5MoeForCausalLM(config).save_pretrained(tmp_path / "q")
    stored = load_file(tmp_path / "q" / "model.safetensors")
    numbers = {}
    for number, key in enumerate(sorted(key for key in stored if "expert" in key and "gate.weight" not in key)):
        prefix = key.removesuffix(".weight")
        if key.endswith("_proj.weight"):
            numbers[prefix] = number
            stored |= nvfp4(prefix, stored.pop(key).shape, number)
    save_file(stored, tmp_path / "q" / "model.safetensors", {"format": "pt"})
    convert(
        tmp_path / "m", tmp_path / "m.ninfer", recipe="qwen3_6_35b_a3b_nvfp4", sources={"quantized": tmp_path / "q"}
    )
    artifact = open_artifact(tmp_path / "m.ninfer")
    prefix = "text/layers/1/moe/experts"
    (object_id,) = {o for e in range(3) for p in ("gate", "up") for o in artifact.bindings[f"{prefix}/{e}/{p}"].objects}
    bank = artifact.tensor(object_id)
    assert isinstance(bank, NinferTensor) and bank.format == "nvfp4" and bank.shape == (6 * 128, 256)
    divisors = [800.0 + numbers[f"model.layers.1.mlp.experts.{e}.{p}_proj"] for e in range(3) for p in ("gate", "up")]
    assert bank.planes["divisors"].tolist() == divisors
    inputs = [1600.0 - divisor - 700.0 for divisor in divisors]
    for expert in range(3):
        name = f"{prefix}/{expert}/up"
        use = artifact.use(name, "text/layers/1/ffn_input")
        assert use.activation_policy == "AllowA4"
        assert artifact.auxiliary(name, use.input, "activation_input_divisor", ()).item() == min(inputs)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m.ninfer", dtype=torch.float32)
    packed = model.model.layers[1].mlp.experts.gate_up_proj
    assert torch.equal(packed.dequantize(), bank.dequantize().view(3, 256, 256))


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_blocks_of_a_gguf_file_keep_their_bytes(tmp_path: Path, name: str) -> None:
    """Every matrix is the file's own block type; the draft layer is a component; logits are those of the decoded values."""
    path = files.write(tmp_path / "m.gguf", name, files.TYPES.Q8_0)
    recipe = {"qwen35": "qwen3_8_27b_gguf", "qwen35moe": "qwen3_6_35b_a3b_gguf"}[name]
    convert(path, tmp_path / "m.ninfer", recipe=recipe)
    artifact = open_artifact(tmp_path / "m.ninfer")
    assert list(artifact.components) == ["text", "mtp"]
    expected = official_names.parameters({key: record.config for key, record in artifact.components.items()})
    expected = {
        key: found for key, found in expected.items() if key != "mtp" and not (name == "qwen35moe" and key == "")
    }
    assert artifact.bindings.keys() == expected.keys()
    formats = {
        artifact.objects[binding.objects[0]].format  # type: ignore[union-attr]
        for key, binding in artifact.bindings.items()
        if (expected[key][1] or key == "text/token_embedding")
        and not key.endswith(("a_projection", "b_projection", "router", "shared_score"))
    }
    assert formats == {"gguf_q8_0"}
    generic = plan(path, "gguf")
    by_values = {}
    with activation_precision("a16"):
        convert(path, tmp_path / "generic.ninfer", "gguf")
        for kind in ("m", "generic"):
            model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"{kind}.ninfer", dtype=torch.float32)
            with torch.no_grad():
                by_values[kind] = model(torch.arange(1, 20)[None] % files.VOCABULARY).logits
    assert generic.outline.architecture == files.CLASSES[name]
    assert (by_values["m"] - by_values["generic"]).abs().max() < 1e-3 * by_values["generic"].std()


# Refusals


def test_what_a_recipe_cannot_do_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    tiny_family("qwen3.5").save_pretrained(tmp_path / "m")
    tiny_family("llama").save_pretrained(tmp_path / "l")
    out = tmp_path / "out.ninfer"
    for source, arguments, message in (
        (
            "m",
            {"recipe": "qwen3_6_35b_a3b"},
            "qwen3_6_35b_a3b is for Qwen3_5MoeForCausalLM, the source holds Qwen3_5For",
        ),
        ("m", {"recipe": "qwen3_6_27b_nvfp4"}, "needs --source quantized=PATH"),
        ("m", {"recipe": "qwen3_8_27b_imatrix"}, "needs --source imatrix=PATH"),
        ("m", {"recipe": "qwen3_8_27b_gguf"}, "needs a gguf source"),
        ("m", {"recipe": "qwen3_8_flash_next_gguf"}, "Qwen3.8-Flash-Next"),
        ("m", {"recipe": "qwen3_9"}, "no such recipe file"),
        ("l", {"recipe": "qwen3_8_27b"}, "LlamaForCausalLM has no logical parameters here"),
        ("l", {"preset": "q4", "official": True}, "LlamaForCausalLM has no logical parameters here"),
    ):
        with pytest.raises(ConversionError, match=message):
            convert(tmp_path / source, out, **arguments)  # type: ignore[arg-type]
        assert not list(tmp_path.glob("*out*"))
    assert get_official("q4") is None


def test_a_searching_recipe_reads_its_matrix(tmp_path: Path) -> None:
    """`imatrix` is named like a source; only the matrix's channels make a difference."""
    tiny_family("qwen3.5").save_pretrained(tmp_path / "m")
    importance = torch.ones(64)
    importance[:8] = 100.0
    save_file({"text/layers/0/mlp/gate": importance}, tmp_path / "i.safetensors", {"source": "t"})
    planned = plan(tmp_path / "m", recipe="qwen3_8_27b_imatrix", sources={"imatrix": tmp_path / "i.safetensors"})
    tasks = {task.names[0]: task for task in planned.tasks}
    assert torch.equal(tasks["text/layers/0/mlp/gate"].arguments["importance"], importance)
    assert "importance" not in tasks["text/layers/1/mlp/gate"].arguments
    entry = next(e for e in planned.outline.tensors if e.parameters[0] == "text/layers/0/mlp/gate")
    assert json.loads(json.dumps(entry.to_dict()))["method_parameters"] == {
        "negative_scales": True, "imatrix": "i.safetensors",
    }  # fmt: skip
