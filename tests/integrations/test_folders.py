"""save_pretrained, push_to_hub and checkpoints of quantized models: whatever is written loads back to equal words."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, LlamaModel

import ninfer_torch
import official_models
from ninfer_torch.errors import ArtifactError, NinferError, UnsupportedOperation
from ninfer_torch.tensors import NinferTensor, interleave_rows, transform_input
from ninfer_torch.tensors.patch import patch_kernel
from ninfer_transformers.planes import flatten_state_dict, read_descriptions, rebuild_weight
from quantized import random_weight
from tiny_families import FAMILIES, prompt, tiny_family
from tiny_models import tiny_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def overlay_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))


def quantized(family: str, recipe: Any = "q4", save_format: str = "artifact") -> Any:
    model = tiny_family(family)
    ninfer_torch.quantize_(model, recipe)
    model.hf_quantizer.quantization_config.save_format = save_format
    return model


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()


def assert_same(found: Any, model: Any) -> None:
    """Equal words, classes, ties and logits."""
    ours, theirs = dict(model.named_parameters()), dict(found.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        assert isinstance(theirs[name], NinferTensor) == isinstance(parameter, NinferTensor), name
        assert torch.equal(theirs[name], parameter), name
    with torch.no_grad():
        assert torch.equal(found(prompt() % 32).logits, model(prompt() % 32).logits)


@pytest.mark.parametrize("save_format", ["artifact", "safetensors"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_loads_back(tmp_path: Path, family: str, save_format: str) -> None:
    model = quantized(family, save_format=save_format)
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(tmp_path / "folder")
    names = {path.name for path in (tmp_path / "folder").iterdir()}
    weights = {"artifact": {"model.ninfer", "ninfer-stub.safetensors"}, "safetensors": {"model.safetensors"}}
    assert names == {"config.json", "generation_config.json"} | weights[save_format]
    again = loaded(tmp_path / "folder")
    assert_same(again, model)
    assert again.is_quantized and again.config.quantization_config.recipe == "q4"
    assert again.generation_config.max_new_tokens == 5
    again.save_pretrained(tmp_path / "twice")  # a loaded model saves as the one that it was saved from
    assert_same(loaded(tmp_path / "twice"), model)


def test_one_save_in_another_format(tmp_path: Path) -> None:
    model = quantized("llama")
    config = model.hf_quantizer.quantization_config
    for save_format, file in [("safetensors", "model.safetensors"), ("artifact", "model.ninfer")]:
        model.save_pretrained(tmp_path / save_format, save_format=save_format)
        assert config.save_format == "artifact" and (tmp_path / save_format / file).is_file()
        assert_same(loaded(tmp_path / save_format), model)
    with pytest.raises(ValueError, match="save_format is 'gguf', expected one of artifact, safetensors"):
        model.save_pretrained(tmp_path / "gguf", save_format="gguf")
    assert not (tmp_path / "gguf").exists() and config.save_format == "artifact"


@pytest.mark.parametrize("save_format", ["artifact", "safetensors"])
def test_shards(tmp_path: Path, save_format: str) -> None:
    model = quantized("llama", "q8", save_format)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    weights = [path for path in tmp_path.iterdir() if path.name.startswith("model")]
    assert sum(path.suffix != ".json" for path in weights) > 2
    assert all(path.stat().st_size <= 45_000 for path in weights)
    assert_same(loaded(tmp_path), model)
    model.save_pretrained(tmp_path)  # whole again: nothing of the shards is left
    assert sum(path.name.startswith("model") for path in tmp_path.iterdir()) <= 2
    assert_same(loaded(tmp_path), model)


def test_a_model_is_saved_over_the_file_that_it_is_mapped_from(tmp_path: Path) -> None:
    quantized("llama").save_pretrained(tmp_path)
    model = loaded(tmp_path)
    twin = copy.deepcopy(model)
    model.save_pretrained(tmp_path)
    assert_same(model, twin)
    assert_same(loaded(tmp_path), twin)


def test_a_mixed_recipe_and_other_dtypes(tmp_path: Path) -> None:
    def configure(model: Any, recipe: Any, sources: Any) -> None:
        recipe.assign("*.q_proj.weight", "fp8_e4m3fn_row_bf16", method="fp8_row_maxabs", activation_policy="AllowA8")
        recipe.assign("*.o_proj.weight", "q6_g64_fp16", method="grouped_absmax")
        recipe.assign("*.o_proj.weight", "q4_g64_fp16", rows=(0, 24))

    model = quantized("llama", configure, "safetensors")
    model.save_pretrained(tmp_path)
    assert_same(loaded(tmp_path), model)
    narrow = loaded(tmp_path, dtype=torch.bfloat16)
    attention = narrow.model.layers[0].self_attn
    assert (
        attention.q_proj.weight.policy == "AllowA8" and narrow.dtype == attention.o_proj.weight.dtype == torch.bfloat16
    )
    assert torch.equal(attention.o_proj.weight, model.model.layers[0].self_attn.o_proj.weight.to(torch.bfloat16))


def test_a_base_model_takes_a_folder_with_a_head(tmp_path: Path) -> None:
    model = quantized("llama", save_format="safetensors")
    model.save_pretrained(tmp_path)
    base = LlamaModel.from_pretrained(tmp_path)
    assert torch.equal(base.layers[1].mlp.up_proj.weight, model.model.layers[1].mlp.up_proj.weight)


@pytest.mark.parametrize("format", sorted(f for f, r in ninfer_torch.FORMATS.items() if r.quantized))
def test_planes_of_every_format(tmp_path: Path, format: str) -> None:
    whole = random_weight(format, 384, 256)
    weights = {"a.weight": whole, "b.weight": whole[16:48], "c.bank": whole.view(3, 128, 256), "norm": torch.ones(3)}
    plain, metadata = flatten_state_dict(weights)
    save_file(plain, tmp_path / "w.safetensors", metadata)
    read, descriptions = load_file(tmp_path / "w.safetensors"), read_descriptions([tmp_path / "w.safetensors"])
    assert descriptions is not None and descriptions.keys() == {"a.weight", "b.weight", "c.bank"}
    assert torch.equal(read["norm"], torch.ones(3))
    for name, description in descriptions.items():
        again = rebuild_weight(name, description, read, torch.float32)
        assert torch.equal(again, weights[name]) and torch.equal(again.dequantize(), weights[name].dequantize())
        assert read[name].dim() == 1  # no shape that a dense weight could have


def test_float32_parameters_of_a_bfloat16_model_stay_float32(tmp_path: Path) -> None:
    model = tiny_family("qwen3.5", dtype=torch.bfloat16)
    attention = model.model.layers[0].linear_attn
    attention.A_log.data = torch.randn(attention.A_log.shape)
    ninfer_torch.quantize_(model, "q8")
    model.hf_quantizer.quantization_config.save_format = "safetensors"
    model.save_pretrained(tmp_path)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    again = loaded(tmp_path)
    assert {name: p.dtype for name, p in again.named_parameters()} == dtypes and torch.float32 in dtypes.values()
    assert torch.equal(again.model.layers[0].linear_attn.A_log, attention.A_log)


@pytest.mark.parametrize("name", sorted(official_models.RECIPES))
def test_official_artifacts_in_safetensors(tmp_path: Path, name: str) -> None:
    """Stacked, transformed and patch weights, banks and views, as an official artifact gives them."""
    configs, recipe = official_models.RECIPES[name]
    path = official_models.write_model(tmp_path / "m.ninfer", configs, recipe).path
    auto = AutoModelForImageTextToText if "vision" in configs else AutoModelForCausalLM
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    model = auto.from_pretrained(path, **options).eval()
    model.hf_quantizer.quantization_config.save_format = "safetensors"
    model.save_pretrained(tmp_path / "folder")
    again = auto.from_pretrained(tmp_path / "folder", **options).eval()
    assert {type(p) for p in again.parameters()} == {type(p) for p in model.parameters()}
    assert_same(again, model)
    model.dequantize()
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    with torch.no_grad():
        expected, found = (each(prompt() % 32).logits for each in (model, again))
    assert (found - expected).norm() < 0.02 * expected.norm()  # uses that permit eight-bit activations take them


def test_planes_of_composed_weights(tmp_path: Path) -> None:
    first, second = random_weight("q4_g64_fp16", 8, 1024), random_weight("nvfp4", 128, 1024)
    signs = torch.where(torch.arange(1024) % 3 == 0, -1.0, 1.0)
    weights = {
        "stacked.weight": interleave_rows([(first, 2), (second, 32)]),
        "rotated.weight": transform_input(second, "hadamard_signs", signs),
        "patch.weight": patch_kernel(first, (8, 4, 16, 16)),
        "dense rows.weight": interleave_rows([(first, 2), (torch.randn(8, 1024), 2)]),
    }
    plain, metadata = flatten_state_dict(weights)
    save_file(plain, tmp_path / "w.safetensors", metadata)
    read, descriptions = load_file(tmp_path / "w.safetensors"), read_descriptions([tmp_path / "w.safetensors"])
    for name, weight in weights.items():
        again = rebuild_weight(name, descriptions[name], read, torch.float32)
        assert type(again) is type(weight) and torch.equal(again.dequantize(), weight.dequantize())
    del read["stacked.weight_block1_scales"]
    with pytest.raises(ArtifactError, match="stacked.weight_block1_scales"):
        rebuild_weight("stacked.weight", descriptions["stacked.weight"], read, torch.float32)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [8, 2048]},
        {"geometry": [8, 1024, 12, 16, 1]},
        {"geometry": [9, 1024, 0, 9, 1]},
        {"planes": [["uint8", [4, 1024]], ["float16", [8, 16]]]},
        {"format": "q5_g64_fp16"},
        {"format": "q3"},
        {"policy": "Anything"},
    ],
)
def test_a_description_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    plain, metadata = flatten_state_dict({"w": random_weight("q4_g64_fp16", 8, 1024)})
    description = json.loads(metadata["ninfer_planes"])["weights"]["w"]
    assert torch.equal(rebuild_weight("w", description, plain, torch.float32), random_weight("q4_g64_fp16", 8, 1024))
    with pytest.raises(NinferError):
        rebuild_weight("w", {**description, **change}, plain, torch.float32)


def test_a_newer_description_is_refused(tmp_path: Path) -> None:
    text = json.dumps({"version": 9, "weights": {}})
    save_file({"a": torch.ones(1)}, tmp_path / "w.safetensors", {"ninfer_planes": text})
    with pytest.raises(ArtifactError, match="version 9"):
        read_descriptions([tmp_path / "w.safetensors"])


def test_what_an_artifact_cannot_keep_is_refused(tmp_path: Path) -> None:
    model = quantized("llama")
    with pytest.raises(UnsupportedOperation, match="variant"):
        model.save_pretrained(tmp_path / "a", variant="fp16")
    with pytest.raises(UnsupportedOperation, match="other ones are given"):
        model.save_pretrained(tmp_path / "b", state_dict={})
    changed = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(UnsupportedOperation, match="other ones are given"):
        model.save_pretrained(tmp_path / "c", state_dict=changed)
    model.save_pretrained(tmp_path / "d", state_dict=model.state_dict())
    assert_same(loaded(tmp_path / "d"), model)
    model.save_pretrained(tmp_path / "e", is_main_process=False)
    assert not (tmp_path / "e").exists()


class Uploads:
    """The Hub's client as far as an upload needs it; what it is given lies in `repositories`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create_repo(self, api: Any, repo_id: str, **options: Any) -> Any:
        from huggingface_hub import RepoUrl

        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_commit(self, api: Any, repo_id: str, operations: Any, **options: Any) -> str:
        target = self.folder / repo_id
        target.mkdir(parents=True, exist_ok=True)
        for operation in operations:
            data = operation.path_or_fileobj
            (target / operation.path_in_repo).write_bytes(Path(data).read_bytes())
        return "committed"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import huggingface_hub
    import transformers.utils.hub as transformers_hub

    class Card:
        def save(self, path: Any) -> None:
            Path(path).write_text("# card\n")

    uploads = Uploads(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", lambda api, *a, **k: uploads.create_repo(api, *a, **k))
    monkeypatch.setattr(
        huggingface_hub.HfApi, "create_commit", lambda api, *a, **k: uploads.create_commit(api, *a, **k)
    )
    monkeypatch.setattr(transformers_hub, "create_and_tag_model_card", lambda *a, **k: Card())
    return tmp_path / "hub"


@pytest.mark.parametrize("save_format", ["artifact", "safetensors"])
def test_push_to_hub(hub: Path, save_format: str) -> None:
    model = quantized("llama tied", save_format=save_format)
    model.push_to_hub("me/tiny")
    names = {path.name for path in (hub / "me/tiny").iterdir()}
    assert ("model.ninfer" if save_format == "artifact" else "model.safetensors") in names and "README.md" in names
    assert_same(loaded(hub / "me/tiny"), model)


def test_save_and_push_in_one(hub: Path, tmp_path: Path) -> None:
    model = quantized("llama")
    model.save_pretrained(tmp_path / "mine", push_to_hub=True, repo_id="me/other", commit_message="first")
    for folder in (tmp_path / "mine", hub / "me/other"):
        assert_same(loaded(folder), model)
    assert (hub / "me/other/README.md").is_file()


def test_the_tokenizer_lies_beside_the_weights(tmp_path: Path) -> None:
    ninfer_torch.save(quantized("llama"), tmp_path / "m.ninfer", tokenizer=tiny_tokenizer())
    loaded(tmp_path / "m.ninfer").save_pretrained(tmp_path / "folder")
    assert AutoTokenizer.from_pretrained(tmp_path / "folder").chat_template == tiny_tokenizer().chat_template


WITHOUT_THE_LIBRARY = """
import sys
from importlib.abc import MetaPathFinder
class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ninfer_torch", "ninfer_transformers"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(folder)
    except Exception as error:
        print(type(error).__name__)
    else:
        raise AssertionError(f"{folder}: weights that nobody has read")
"""


def run(script: str, *arguments: object, **environment: str) -> str:
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "integrations")]), **environment}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


def test_without_the_library_no_folder_becomes_a_random_model(tmp_path: Path) -> None:
    """Also where a plane has as many bytes as the weight has elements (q8, fp8)."""
    folders = []
    for recipe in ("q4", "q8", "fp8"):
        for save_format in ("artifact", "safetensors"):
            folders.append(tmp_path / f"{recipe} {save_format}")
            quantized("llama", recipe, save_format).save_pretrained(folders[-1])
    assert run(WITHOUT_THE_LIBRARY, *folders).split() == ["RuntimeError"] * len(folders)


UNPATCHED = """
import sys, torch
import ninfer_torch
from transformers import AutoModelForCausalLM
source, folder = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source)
assert isinstance(model.lm_head.weight, ninfer_torch.NinferTensor)
model.save_pretrained(folder)
again = AutoModelForCausalLM.from_pretrained(folder)
assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
"""


def test_without_patches_safetensors_are_written(tmp_path: Path) -> None:
    model = quantized("llama")
    model.save_pretrained(tmp_path / "source")
    run(UNPATCHED, tmp_path / "source", tmp_path / "folder", NINFER_TORCH_NO_PATCH="1")
    assert {path.suffix for path in (tmp_path / "folder").iterdir()} == {".json", ".safetensors"}
    assert_same(loaded(tmp_path / "folder"), model)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_state_dicts(family: str, assign: bool) -> None:
    model, other = quantized(family), quantized(family)
    for weight in other.parameters():
        values = torch.randn(weight.shape, generator=torch.Generator().manual_seed(3))
        if isinstance(weight, NinferTensor):
            rows = ninfer_torch.quantize(values.reshape(-1, values.shape[-1]), weight.format)
            weight.data = rows.view(weight.shape)
        elif weight.dim() == 2:
            weight.data = values
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)
    result = model.load_state_dict(other.state_dict(), assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    if family == "llama tied":
        model.tie_weights()
    assert_same(model, other)


CHECKPOINTS = """
import sys, torch
import ninfer_torch
state = torch.load(sys.argv[1], weights_only=True)
expected = torch.load(sys.argv[2], weights_only=True)
assert state.keys() == expected.keys()
packed = [name for name, value in state.items() if isinstance(value, ninfer_torch.NinferTensor)]
for name in packed:
    assert torch.equal(state[name].dequantize(), expected[name]), name
optimizer = torch.load(sys.argv[3], weights_only=True)
assert optimizer["state"] and all(torch.is_tensor(s["exp_avg"]) for s in optimizer["state"].values())
print(len(packed))
"""


def test_checkpoints_in_a_fresh_process(tmp_path: Path) -> None:
    model = quantized("qwen3.5 moe")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    values = {n: v.dequantize() if isinstance(v, NinferTensor) else v for n, v in model.state_dict().items()}
    torch.save(values, tmp_path / "values.pt")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    model(prompt(), labels=prompt()).loss.backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    found = run(CHECKPOINTS, tmp_path / "model.pt", tmp_path / "values.pt", tmp_path / "optimizer.pt")
    assert int(found) == sum(isinstance(p, NinferTensor) for p in model.parameters())
