"""Dense models become quantized ones, in place or while they load, and dense again.

Transformers keeps a list of what a quantizer must do in its tests/quantization. Item by item, and its counterpart here:

| There | Here |
|---|---|
| config: to_dict, from_dict, repr, round trip through config.json | test_quantize: test_config_round_trip, test_config_refuses |
| conversion on the fly, number and class of converted layers | test_quantize: test_on_the_fly_equals_in_place |
| modules_to_not_convert, skipped heads | test_quantize: test_modules_stay_dense |
| memory footprint, original and quantized dtype, no double cast | test_quantize: test_footprint_and_dtype; test_loading |
| placement: device_map auto, dict, cpu and disk offload, to() | test_placement; test_quantize: test_device_maps, test_disk |
| generation quality: greedy text, batches, pipeline | test_generation; end_to_end/test_smollm2 |
| saving: serialization, sharded, local and Hub round trip | test_folders; test_saving |
| loading a quantized checkpoint with another config | test_quantize: test_a_quantized_folder_keeps_its_own_config |
| dequantize | test_quantize: test_dequantize_leaves_no_trace |
| training: adapters, Trainer, gradient checkpointing | test_adapters |
| torch.compile | test_compile; test_export |
| tokenizer and chat template beside the weights | test_generation; test_paths |
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.quantizers.auto import AutoQuantizationConfig

import ninfer_torch
from ninfer_torch.convert import convert
from ninfer_torch.errors import ConversionError, UnsupportedOperation
from ninfer_torch.tensors import NinferTensor
from ninfer_transformers.config import NinferConfig
from tiny_families import FAMILIES, prompt, tiny_family

HEAD_AND_LAYERS = {
    "llama": 2 * 7 + 2,
    "llama tied": 2 * 7 + 1,
    "qwen3.5": 5 + 4 + 2 * 3 + 2,
    "qwen3.5 moe": 5 + 4 + 2 * 5 + 2,
}
"""Quantized tensors: the layers' projections, then embedding and head; of experts two banks and the shared expert's three."""


@pytest.fixture(autouse=True)
def overlay_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def dense_folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    tiny_family(family).save_pretrained(folder)
    return folder


def loaded(folder: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()


def packed(model: torch.nn.Module) -> dict[str, NinferTensor]:
    return {name: p for name, p in model.named_parameters() if isinstance(p, NinferTensor)}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt(2)).logits


@pytest.mark.parametrize("recipe", ["q4", "fp8_e4m3fn_row_bf16"])
def test_on_the_fly_equals_in_place(family: str, dense_folder: Path, recipe: str) -> None:
    plain = loaded(dense_folder)
    values = {name: p.detach().clone() for name, p in plain.named_parameters()}
    in_place = loaded(dense_folder)
    assert ninfer_torch.quantize_(in_place, recipe) is None
    on_the_fly = loaded(dense_folder, quantization_config=NinferConfig(recipe=recipe))
    weights = packed(in_place)
    assert len(weights) == HEAD_AND_LAYERS[family] and weights.keys() == packed(on_the_fly).keys()
    for name, weight in weights.items():
        rows = values[name].reshape(-1, values[name].shape[-1])
        assert torch.equal(weight, packed(on_the_fly)[name])
        assert torch.equal(weight.view(rows.shape), ninfer_torch.quantize(rows, weight.format)), name
    for name, parameter in on_the_fly.named_parameters():
        assert name in weights or torch.equal(parameter, values[name])
    for model in (in_place, on_the_fly):
        tied = family == "llama tied"
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
        assert model.is_quantized and model.quantization_method == "ninfer" and model.hf_quantizer.is_trainable
    torch.testing.assert_close(logits(in_place), logits(on_the_fly), rtol=0, atol=0)


@pytest.mark.parametrize("preset", ["q4", "q6", "fp8"])
def test_a_preset_means_the_same_in_a_conversion(family: str, dense_folder: Path, preset: str, tmp_path: Path) -> None:
    convert(dense_folder, tmp_path / "m.ninfer", preset)
    converted = loaded(tmp_path / "m.ninfer")
    on_the_fly = loaded(dense_folder, quantization_config=NinferConfig(recipe=preset))
    assert packed(converted).keys() == packed(on_the_fly).keys()
    for name, parameter in converted.named_parameters():
        assert torch.equal(parameter, on_the_fly.get_parameter(name)), name


@pytest.mark.parametrize("entries", [["lm_head"], ["layers.0", "k_proj"], ["*.1.mlp"]])
def test_modules_stay_dense(family: str, dense_folder: Path, entries: list[str]) -> None:
    config = NinferConfig(recipe="q8", modules_to_not_convert=entries)
    in_place = loaded(dense_folder)
    ninfer_torch.quantize_(in_place, "q8", modules_to_not_convert=entries)
    everything = loaded(dense_folder, quantization_config=NinferConfig(recipe="q8"))

    def skipped(name: str) -> bool:
        if entries == ["lm_head"]:
            return "lm_head" in name or (family == "llama tied" and "embed_tokens" in name)
        if entries == ["*.1.mlp"]:
            return ".layers.1.mlp." in name
        return ".layers.0." in name or ".k_proj." in name

    expected = {name for name in packed(everything) if not skipped(name)}
    assert expected and len(expected) < len(packed(everything))
    assert packed(in_place).keys() == packed(loaded(dense_folder, quantization_config=config)).keys() == expected


def test_dequantize_leaves_no_trace(family: str, dense_folder: Path, tmp_path: Path) -> None:
    plain = loaded(dense_folder)
    ninfer_torch.save(loaded(dense_folder, quantization_config=NinferConfig(recipe="q6")), tmp_path / "m.ninfer")
    sources = {
        "on the fly": loaded(dense_folder, quantization_config=NinferConfig(recipe="q6")),
        "artifact": loaded(tmp_path / "m.ninfer"),
    }
    for title, model in sources.items():
        expected, before = {name: p.dequantize() for name, p in packed(model).items()}, logits(model)
        assert model.dequantize() is model
        assert all(type(p) is torch.nn.Parameter and p.requires_grad for p in model.parameters())
        assert all(torch.equal(model.get_parameter(name), values) for name, values in expected.items())
        assert set(vars(model)) <= set(vars(plain)), title
        assert (model.lm_head.weight is model.get_input_embeddings().weight) == (family == "llama tied")
        torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
        folder = tmp_path / title
        model.save_pretrained(folder)
        written = json.loads((folder / "config.json").read_text())
        assert written == {
            **json.loads((dense_folder / "config.json").read_text()),
            "architectures": written["architectures"],
        }
        again = loaded(folder)
        assert not getattr(again, "is_quantized", False)
        torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=0)


def test_dequantize_to_another_dtype(tmp_path: Path) -> None:
    model = tiny_family("qwen3.5")
    model.model.layers[0].linear_attn.A_log.data = model.model.layers[0].linear_attn.A_log.data.double()
    ninfer_torch.quantize_(model, "q8")
    model.dequantize(dtype=torch.bfloat16)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert dtypes.pop("model.layers.0.linear_attn.A_log") == torch.float64  # not of the model's dtype: left alone
    assert set(dtypes.values()) == {torch.bfloat16}


def test_footprint_and_dtype(dense_folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        plain = loaded(dense_folder, dtype=dtype)
        model = loaded(dense_folder, dtype=dtype, quantization_config=NinferConfig(recipe="q4"))
        assert model.dtype == dtype and model.num_parameters() == plain.num_parameters()
        packed_bytes = sum(weight.nbytes for weight in packed(model).values())
        direct = sum(p.nbytes for name, p in model.named_parameters() if name not in packed(model))
        assert model.get_memory_footprint(return_buffers=False) == pytest.approx(packed_bytes + direct)
        assert packed_bytes + direct < plain.get_memory_footprint(return_buffers=False) * (
            0.4 if dtype == torch.float32 else 0.8
        )


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_device_maps(dense_folder: Path, device_map: Any) -> None:
    reference = loaded(dense_folder, quantization_config=NinferConfig(recipe="q4"))
    model = loaded(dense_folder, quantization_config=NinferConfig(recipe="q4"), device_map=device_map)
    assert packed(model).keys() == packed(reference).keys()
    assert torch.equal(logits(model), logits(reference))


def test_disk_is_refused_for_weights_without_a_file(dense_folder: Path) -> None:
    with pytest.raises(UnsupportedOperation, match="convert the checkpoint"):
        loaded(
            dense_folder, quantization_config=NinferConfig(recipe="q4"), device_map={"model": "cpu", "lm_head": "disk"}
        )


def mixed(model: Any, recipe: Any, sources: Any) -> None:
    """Rows of one weight in two formats, a policy, and a method with parameters."""
    recipe.assign("*.q_proj.weight", "q6_g64_fp16", method="grouped_absmax", activation_policy="AllowA8")
    recipe.assign("*.o_proj.weight", "q8_g32_fp16", method="grouped_absmax")
    recipe.assign("*.o_proj.weight", "q4_g64_fp16", rows=(0, 24))
    recipe.assign("*.v_proj.weight", "q4_g64_fp16", method="grouped_search", parameters={"negative_scales": True})


def test_a_recipe_is_code() -> None:
    model = tiny_family("llama")
    dense = {name: p.detach().clone() for name, p in model.named_parameters()}
    ninfer_torch.quantize_(model, mixed)
    attention, name = model.model.layers[1].self_attn, "model.layers.1.self_attn.{}_proj.weight".format
    assert attention.q_proj.weight.policy == "AllowA8" and not isinstance(attention.k_proj.weight, NinferTensor)
    assert torch.equal(attention.q_proj.weight, ninfer_torch.quantize(dense[name("q")], "q6_g64_fp16"))
    searched = ninfer_torch.quantize(dense[name("v")], "q4_g64_fp16", "grouped_search", negative_scales=True)
    assert torch.equal(attention.v_proj.weight, searched)
    halves = [
        ninfer_torch.quantize(dense[name("o")][:24], "q4_g64_fp16"),
        ninfer_torch.quantize(dense[name("o")][24:], "q8_g32_fp16"),
    ]
    assert attention.o_proj.weight.formats == ("q4_g64_fp16", "q8_g32_fp16")
    assert torch.equal(attention.o_proj.weight.dequantize(), torch.cat([half.dequantize() for half in halves]))


def test_a_recipe_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def configure(model, recipe, sources):\n"
        "    recipe.assign('*.down_proj.weight', 'q5_g64_fp16', method='grouped_absmax')\n"
    )
    model = tiny_family("llama")
    ninfer_torch.quantize_(model, tmp_path / "mine.py")
    assert [weight.format for weight in packed(model).values()] == ["q5_g64_fp16"] * 2
    assert model.config.quantization_config.recipe == "mine.py"


def test_any_module_is_quantized_in_place() -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8), torch.nn.LayerNorm(8)
    )
    layers.append(torch.nn.Embedding(4, 8))
    x = torch.randn(3, 64)
    expected = layers[:4](x)
    ninfer_torch.quantize_(layers, "q8")
    assert packed(layers).keys() == {"0.weight", "2.weight"}
    assert (layers[:4](x) - expected).norm() < 0.02 * expected.norm()
    before = layers[0].weight
    ninfer_torch.quantize_(layers, "q4")  # what is quantized already stays as it is
    assert layers[0].weight is before


def test_nothing_changes_where_the_recipe_is_wrong() -> None:
    model = tiny_family("llama")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("q3", {}, "no preset"),
        ("q4", {"modules_to_not_convert": ["lm_haed"]}, "lm_haed"),
        ("nvfp4", {}, "cannot quantize to nvfp4"),
        ("gguf", {}, "needs a gguf source"),
        (lambda m, r, s: r.assign("*.norm.weight", "q8_g32_fp16", method="grouped_absmax"), {}, "nn.Linear"),
        (lambda m, r, s: r.assign("*.q_proj.weight", "q8_g32_fp16", method="import_encoded"), {}, "import_encoded"),
        (7, {}, "found a int"),
    ]
    for recipe, options, message in cases:
        with pytest.raises((ConversionError, UnsupportedOperation), match=message):
            ninfer_torch.quantize_(model, recipe, **options)
    with pytest.raises(ConversionError, match="meta device"):
        ninfer_torch.quantize_(tiny_family("llama").to("meta"), "q4")
    assert not packed(model) and not hasattr(model, "is_quantized")


def test_tied_weights_are_not_torn_apart() -> None:
    def untie(model: Any, recipe: Any, sources: Any) -> None:
        recipe.assign("*.embed_tokens.weight", "q8_g32_fp16", method="grouped_absmax")
        recipe.assign("lm_head.weight" if "lm_head.weight" in model.parameters else "*lm_head.weight", "q4_g64_fp16")

    def share(model: Any, recipe: Any, sources: Any) -> None:
        recipe.share("text/model.layers.1.mlp.up_proj.weight", "text/model.layers.0.mlp.up_proj.weight")

    with pytest.raises((ConversionError, UnsupportedOperation), match="tied weights"):
        ninfer_torch.quantize_(tiny_family("llama tied"), untie)
    with pytest.raises(UnsupportedOperation, match="share"):
        ninfer_torch.quantize_(tiny_family("llama"), share)


def test_a_head_that_the_checkpoint_lacks_stays_dense(tmp_path: Path) -> None:
    """A classifier over a language model: its new head is initialised, as without quantization, and trains."""
    tiny_family("llama").save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=3, quantization_config=NinferConfig(recipe="q4")
    )
    assert type(model.score.weight) is torch.nn.Parameter and model.score.weight.requires_grad
    assert len(packed(model)) == HEAD_AND_LAYERS["llama"] - 1
    model(prompt(), labels=torch.tensor([1])).loss.backward()
    assert model.score.weight.grad.any()


def test_a_checkpoint_of_other_shapes_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_family("llama")
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 80, bias=False)
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="CONVERSION"):
        loaded(tmp_path, quantization_config=NinferConfig(recipe="q4"))
    assert (
        "'model.layers.0.mlp.up_proj.weight' is [80, 64] in the checkpoint, the model expects [96, 64]" in caplog.text
    )


def test_a_value_that_no_code_can_hold_names_its_weight() -> None:
    model = tiny_family("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = torch.nan
    with pytest.raises(ConversionError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        ninfer_torch.quantize_(model, "q4")


def test_a_dense_checkpoint_needs_a_recipe(dense_folder: Path) -> None:
    with pytest.raises(UnsupportedOperation, match="names no recipe"):
        loaded(dense_folder, quantization_config=NinferConfig())


def test_config_round_trip(dense_folder: Path, tmp_path: Path) -> None:
    config = NinferConfig(recipe="q4", modules_to_not_convert=["lm_head"], save_format="safetensors")
    members = config.to_dict()
    assert ninfer_torch.NinferConfig is NinferConfig
    assert members == {
        "quant_method": "ninfer",
        "recipe": "q4",
        "modules_to_not_convert": ["lm_head"],
        "save_format": "safetensors",
    }
    again = AutoQuantizationConfig.from_dict(json.loads(config.to_json_string()))
    assert type(again) is NinferConfig and again.to_dict() == members and '"recipe": "q4"' in repr(again)
    assert NinferConfig(recipe=mixed).to_dict() == {"quant_method": "ninfer", "recipe": "mixed"}
    model = loaded(dense_folder, quantization_config=config)
    model.config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == members


@pytest.mark.parametrize(
    "members", [{"quant_method": "other"}, {"save_format": "pickle"}, {"modules_to_not_convert": "lm_head"}]
)
def test_config_refuses(members: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match="expected|list of names"):
        NinferConfig(**members)


def test_a_quantized_folder_keeps_its_own_config(dense_folder: Path, tmp_path: Path) -> None:
    loaded(dense_folder, quantization_config=NinferConfig(recipe="q4")).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="already has a `quantization_config`"):
        model = loaded(tmp_path, quantization_config=NinferConfig(recipe="q8"))
    assert model.config.quantization_config.recipe == "q4"
    assert "q4_g64_fp16" in {weight.format for weight in packed(model).values()}


def test_a_dense_weight_is_gone_before_the_next_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place: when a weight is encoded, at most that one of those to be quantized and done is alive."""
    from ninfer_torch.convert.live import LiveWeight

    model = tiny_family("llama")
    alive = {name: weakref.ref(p) for name, p in model.named_parameters()}
    done: list[str] = []
    original = LiveWeight.quantized

    def watched(self: LiveWeight, weight: torch.Tensor) -> NinferTensor:
        gc.collect()
        assert [name for name in done if alive[name]() is not None] == []
        done.extend(self.names)
        return original(self, weight)

    monkeypatch.setattr(LiveWeight, "quantized", watched)
    ninfer_torch.quantize_(model, "q4")
    assert len(done) == HEAD_AND_LAYERS["llama"]


PEAK = """
import sys, threading, time
import torch, psutil
import ninfer_torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging
from ninfer_transformers.config import NinferConfig
logging.disable_progress_bar()
folder, mode = sys.argv[1:]
torch.set_num_threads(1)
tiny = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1))
ninfer_torch.quantize_(tiny, "q4")  # imports and first use
process, stop, peak = psutil.Process(), threading.Event(), 0

def anonymous():
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) * 1024

def watch():
    global peak
    while not stop.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.002)

before = anonymous()
thread = threading.Thread(target=watch); thread.start()
options = {"quantization_config": NinferConfig(recipe="q4")} if mode == "fly" else {}
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)  # cast, so that nothing stays mapped
stop.set(); thread.join()
print(peak - before, int(model.get_memory_footprint()), max(p.numel() * 2 for p in model.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident size from /proc")
def test_loading_on_the_fly_peaks_at_the_quantized_model_and_its_largest_layer(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")

    def measured(mode: str) -> tuple[int, int, int]:
        command = [sys.executable, "-c", PEAK, str(tmp_path / "dense"), mode]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stderr[-2000:]
        return tuple(map(int, ended.stdout.split()))  # type: ignore[return-value]

    dense_peak, dense_size, _ = measured("dense")
    peak, size, largest = measured("fly")
    scratch = 48 << 20  # the tensor as it is read, in float32, a chunk while it is encoded, what the allocator keeps
    assert dense_size <= dense_peak and size < dense_size / 3
    assert peak < size + largest + scratch < dense_peak * 2 / 3, (peak, size, largest, dense_peak)
