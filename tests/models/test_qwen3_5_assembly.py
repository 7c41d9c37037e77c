"""Parameters out of artifacts: exact values whatever objects, formats, orders and folds they come from, and clear errors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import official_models
import official_names
import official_state
import official_words
from golden import golden, load_json, load_tensors
from ninfer_torch.artifact import open_artifact
from ninfer_torch.artifact.reader import Artifact
from ninfer_torch.errors import ArtifactError, FormatError, LayoutError, NinferError, UnsupportedOperation
from ninfer_torch.models.architectures import architecture_of
from ninfer_torch.models.assembly import build_parameter, plan_parameter
from ninfer_torch.models.base import ModelParameter, split_value
from ninfer_torch.tensors import NinferTensor
from ninfer_torch.tensors.patch import PatchKernel
from ninfer_torch.tensors.stacked import StackedRows
from ninfer_torch.tensors.transformed import TransformedInput

GOLDEN = [
    ("qwen3_5_dense", "bf16"),
    ("qwen3_5_dense", "groupwise"),
    ("qwen3_5_dense", "mixed"),
    ("qwen3_5_moe", "groupwise"),
    ("qwen3_5_moe", "mixed"),
    ("qwen3_5_moe_nvfp4", "nvfp4"),
    ("qwen3_5_rotated", "rotated"),
    ("qwen3_5_gguf_columns", "gguf_columns"),
    ("qwen3_5_vision_mtp", "groupwise"),
    ("qwen3_5_vision_mtp", "mixed"),
]
_ROWS = 4 * 32 * 128  # of a query, in elements


def built(artifact: Artifact) -> Iterator[tuple[ModelParameter, torch.Tensor]]:
    for parameter in architecture_of(artifact).parameters(artifact):
        assert parameter.shape is not None
        yield parameter, build_parameter(artifact, plan_parameter(artifact, parameter, parameter.shape))


def build(artifact: Artifact, name: str) -> Any:
    return next(tensor for parameter, tensor in built(artifact) if parameter.name == name)


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if isinstance(tensor, NinferTensor) else tensor.float()


def is_packed(artifact: Artifact, parameter: ModelParameter) -> bool:
    objects = {o for source in parameter.sources for o in artifact.bindings[source.name].objects}
    return not {artifact.objects[o].format for o in objects} <= {"bf16", "fp32"}  # type: ignore[union-attr]


@pytest.mark.parametrize("model, recipe", GOLDEN, ids=map("/".join, GOLDEN))
def test_golden_bindings_equal_their_hashes_and_stay_packed(model: str, recipe: str) -> None:
    """Values of every binding, plain ones behind a fold, by the SHA-256 in the index."""
    index = load_json(golden("ninfer", "models", model, "index.json"))["recipes"][recipe]
    hashes = {**index["binding_sha256_float32"], **index.get("effective_sha256_float32", {})}
    artifact = open_artifact(golden("ninfer", "models", model, f"{recipe}.ninfer"))
    for parameter, tensor in built(artifact):
        assert isinstance(tensor, NinferTensor) == is_packed(artifact, parameter), parameter.name
        for source, value in zip(parameter.sources, split_value(parameter, values_of(tensor)), strict=True):
            digest = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
            assert digest == hashes.pop(source.name), source.name
    assert not hashes


@pytest.mark.parametrize("model, recipe", [("qwen3_5_rotated", "rotated"), ("qwen3_5_gguf_columns", "gguf_columns")])
def test_golden_plain_rows_behind_a_fold(model: str, recipe: str) -> None:
    expected = load_tensors(golden("ninfer", "models", model, "expected.safetensors"))
    artifact = open_artifact(golden("ninfer", "models", model, f"{recipe}.ninfer"))
    prefix, seen = f"{recipe}/effective_rows/", 0
    for parameter, tensor in built(artifact):
        for source, value in zip(parameter.sources, split_value(parameter, values_of(tensor)), strict=True):
            if prefix + source.name in expected:
                assert torch.equal(value[:2], expected[prefix + source.name])
                seen += 1
    assert seen == sum(name.startswith(prefix) for name in expected)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], official_models.Written]:
    folder, made = tmp_path_factory.mktemp("models"), {}

    def write(name: str) -> official_models.Written:
        if name not in made:
            configs, recipe = official_models.RECIPES[name]
            made[name] = official_models.write_model(folder / f"{len(made)}.ninfer", configs, recipe)
        return made[name]

    return write


@pytest.mark.parametrize("name", official_models.RECIPES)
def test_tiny_models_have_the_values_of_the_oracle(name: str, written: Any) -> None:
    model = written(name)
    artifact = open_artifact(model.path)
    state = official_state.checkpoint_state(model, conditional="vision" in model.configs)
    if "mtp" in model.configs:
        state |= {f"mtp {name}": value for name, value in official_state.mtp_state(model).items()}
    prefixes = {**architecture_of(artifact).checkpoint_prefixes(artifact), "mtp": "mtp "}
    for parameter, tensor in built(artifact):
        expected = torch.from_numpy(np.ascontiguousarray(state.pop(prefixes[parameter.anchor] + parameter.name)))
        assert isinstance(tensor, NinferTensor) == is_packed(artifact, parameter), parameter.name
        assert tuple(tensor.shape) == parameter.shape
        assert torch.equal(values_of(tensor), expected), parameter.name
    assert not state


def test_fused_parents_give_views_and_mixed_ones_stacks(written: Any) -> None:
    one, groupwise = (open_artifact(written(name).path) for name in ("one parent", "groupwise"))
    name = "layers.0.linear_attn.in_proj_qkv.weight"
    assert type(build(one, name)).__name__ == "RowFloatTensor"  # three parameters, one run of rows: a view
    stacked = build(groupwise, name)
    assert isinstance(stacked, StackedRows)
    assert [block.formats for block in stacked.blocks] == [("q4_g64_fp16",), ("q5_g64_fp16",)]  # query and key together
    query = build(one, "layers.1.self_attn.q_proj.weight")
    assert isinstance(query, StackedRows) and query.formats == ("fp8_e4m3fn_row_bf16",)
    assert query.policy == "AllowA8"


@pytest.mark.parametrize(
    "name, kind", [("moe", "GroupedTensor"), ("moe two banks", "StackedRows"), ("moe nvfp4", "BlockFloatTensor")]
)
def test_banks_of_experts_are_one_tensor(written: Any, name: str, kind: str) -> None:
    artifact = open_artifact(written(name).path)
    bank = build(artifact, "layers.0.mlp.experts.gate_up_proj")
    assert type(bank).__name__ == kind and tuple(bank.shape) == (3, 256, 128)
    assert isinstance(build(artifact, "layers.0.mlp.experts.down_proj"), NinferTensor)
    if name == "moe nvfp4":
        assert bank.policy == "AllowA4" and bank.geometry.divisors == 6


def test_one_fold_is_one_transform(written: Any) -> None:
    weight = build(open_artifact(written("rotated").path), "layers.1.self_attn.q_proj.weight")
    assert isinstance(weight, TransformedInput) and isinstance(weight.weight, StackedRows)


def test_a_patch_embedding_is_a_kernel(written: Any) -> None:
    weight = build(open_artifact(written("vision and mtp").path), "patch_embed.proj.weight")
    assert isinstance(weight, PatchKernel) and tuple(weight.shape) == (64, 3, 2, 4, 4)


def test_a_parent_in_the_order_of_the_fused_parameter_is_one_view(tmp_path: Path) -> None:
    """Query and gate bound by parts to the alternating heads of one object: `q_proj` is that object."""
    path, state = interleaved(tmp_path)
    tensor = build(open_artifact(path), "layers.1.self_attn.q_proj.weight")
    assert type(tensor).__name__ == "GroupedTensor"
    assert torch.equal(tensor.dequantize(), torch.from_numpy(state))


def interleaved(tmp_path: Path) -> tuple[Path, np.ndarray]:
    configs = official_models.DENSE
    directory = official_models.new_directory(configs)
    data, values = official_words.draw("q4_g64_fp16", (256, 128), np.random.default_rng(0))
    known = official_names.parameters(configs)
    for name, (shape, inputs) in known.items():
        directory.uses += [{"parameter": name, "input": i, "activation_policy": "A16Only"} for i in inputs]
        if name not in ("text/layers/1/attention/query", "text/layers/1/attention/gate"):
            directory.add(name, "fp32" if name.endswith(("a_log", "dt_bias")) else "bf16", shape)
            directory.bindings[name] = {"object": name}
    directory.add("query and gate", "q4_g64_fp16", (256, 128), data)
    for number, name in enumerate(("query", "gate")):
        begins = [(2 * head + number) * 32 * 128 for head in range(4)]
        parts = [{"object": "query and gate", "range": [begin, begin + 32 * 128]} for begin in begins]
        directory.bindings[f"text/layers/1/attention/{name}"] = {"parts": parts}
    return directory.write(tmp_path / "m.ninfer"), values


QUERY, HEAD = "text/layers/1/attention/query", "text/output_head"


def rewritten(tmp_path: Path, recipe: str, change: Callable[[official_models.Directory], None]) -> Path:
    """An artifact whose directory is that of a recipe, changed."""
    directory, _, _ = official_models.draft_model(*official_models.RECIPES[recipe])
    change(directory)
    return directory.write(tmp_path / "m.ninfer")


def use_of(directory: official_models.Directory, parameter: str) -> dict[str, Any]:
    return next(use for use in directory.uses if use["parameter"] == parameter)


def without_binding(directory: official_models.Directory) -> None:
    del directory.bindings["text/layers/0/gdn/norm"]


def without_use(directory: official_models.Directory) -> None:
    directory.uses.remove(use_of(directory, QUERY))


def with_role(directory: official_models.Directory) -> None:
    directory.add("extra", "fp32", ())
    use_of(directory, QUERY)["auxiliaries"] = {"zero_points": {"object": "extra"}}


def with_both(directory: official_models.Directory) -> None:
    directory.add("columns", "int32", (128,))
    use_of(directory, QUERY)["auxiliaries"] = {
        role: {"object": "columns"} for role in ("hadamard_signs", "input_columns")
    }


def with_short_columns(directory: official_models.Directory) -> None:
    directory.add("columns", "int32", (64,))
    use_of(directory, QUERY)["auxiliaries"] = {"input_columns": {"object": "columns"}}


def with_wrong_columns(directory: official_models.Directory) -> None:
    directory.add("columns", "int32", (128,))  # zeros, no permutation
    use_of(directory, QUERY)["auxiliaries"] = {"input_columns": {"object": "columns"}}


def with_quantized_norm(directory: official_models.Directory) -> None:
    directory.add("norm", "q4_g64_fp16", (1, 128))
    directory.bindings["text/final_norm"] = {"parts": [{"object": "norm", "range": [0, 128]}]}


def with_few_rows(directory: official_models.Directory) -> None:
    (part,) = directory.bindings[QUERY]["parts"]
    directory.bindings[QUERY] = {"parts": [{**part, "range": [0, _ROWS - 128]}]}


def with_wrong_shape(directory: official_models.Directory) -> None:
    directory.add("head", "q6_g64_fp16", (128, 96))
    directory.bindings[HEAD] = {"object": "head"}


def with_split_rows(directory: official_models.Directory) -> None:
    (part,) = directory.bindings[QUERY]["parts"]
    directory.bindings[QUERY] = {"parts": [{**part, "range": [64, _ROWS + 64]}]}


def without_signs(directory: official_models.Directory) -> None:
    del use_of(directory, HEAD)["auxiliaries"]


ERRORS = {
    "missing parameter": (
        "groupwise",
        without_binding,
        ArtifactError,
        r"no parameter 'text/layers/0/gdn/norm', which .*norm.weight' needs",
    ),
    "missing use": ("groupwise", without_use, ArtifactError, f"no use of parameter '{QUERY}' .*inputs are none"),
    "unknown auxiliary": ("groupwise", with_role, UnsupportedOperation, "zero_points; known are activation_input_div"),
    "two transforms": ("groupwise", with_both, UnsupportedOperation, "hadamard_signs and input_columns; no order"),
    "short auxiliary": ("groupwise", with_short_columns, LayoutError, "input_columns has 64 elements .*column, 128"),
    "wrong auxiliary": ("groupwise", with_wrong_columns, FormatError, "each of 0..127 once"),
    "quantized norm": (
        "groupwise",
        with_quantized_norm,
        UnsupportedOperation,
        "'text/final_norm' .* q4_g64_fp16; it is",
    ),
    "few rows": ("groupwise", with_few_rows, LayoutError, rf"'{QUERY}' .* \[{_ROWS - 128}\], expected \[{_ROWS}\]"),
    "wrong shape": ("groupwise", with_wrong_shape, LayoutError, r"'head' of shape \[128, 96\], expected \[96, 128\]"),
    "split rows": (
        "groupwise",
        with_split_rows,
        UnsupportedOperation,
        "not whole rows of K = 128.*dequantize_parameter",
    ),
    "t2 without signs": ("rotated", without_signs, ArtifactError, "'text/token_embedding' is stored as t2.* has none"),
}


@pytest.mark.parametrize("recipe, change, error, message", ERRORS.values(), ids=ERRORS)
def test_what_is_wrong_is_named(
    recipe: str, change: Any, error: type[NinferError], message: str, tmp_path: Path
) -> None:
    artifact = open_artifact(rewritten(tmp_path, recipe, change))
    with pytest.raises(error, match=message):
        list(built(artifact))


def test_another_shape_than_the_models_is_refused(written: Any) -> None:
    artifact = open_artifact(written("groupwise").path)
    parameter = architecture_of(artifact).parameters(artifact)[0]
    with pytest.raises(LayoutError, match=r"\[97, 128\] in the model, and by the artifact's config \[96, 128\]"):
        plan_parameter(artifact, parameter, (97, 128))
