"""Official artifacts through the stock classes of Transformers: the numbers of plain models, packed, and nothing else touched."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.modeling_layers import MtpModel

import official_models
import official_state
import official_words
from golden import golden, load_tensors
from ninfer_torch.artifact import open_artifact
from ninfer_torch.errors import ArtifactError, LayoutError
from ninfer_torch.kernels.precision import activation_precision
from ninfer_torch.tensors import NinferTensor
from ninfer_transformers.overlay import hub_dir

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
EXACT = {"dtype": torch.float32, "attn_implementation": "eager"}


@pytest.fixture(autouse=True)
def overlay_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def exact_activations() -> Iterator[None]:
    """Stored logits are of float32 activations; uses that permit eight bits would round them."""
    with activation_precision("a16"):
        yield


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(name: str, **options: Any) -> official_models.Written:
        configs, recipe = official_models.RECIPES[name]
        return official_models.write_model(tmp_path / f"{name}.ninfer", configs, recipe, **options)

    return write


def model_class(configs: Any) -> Any:
    return AutoModelForImageTextToText if "vision" in configs else AutoModelForCausalLM


def plain_model(written: official_models.Written, config: Any) -> Any:
    """An ordinary model of the same config with the oracle's values."""
    conditional = "vision" in written.configs
    config = copy.deepcopy(config)
    del config.quantization_config
    config._attn_implementation = "eager"
    model = getattr(transformers, config.architectures[0])(config).eval()
    state = official_state.checkpoint_state(written, conditional=conditional)
    model.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in state.items()})
    return model


def spread(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in standard deviations of the expected values."""
    return float((found - expected).abs().max() / expected.std())


def token_ids(vocabulary: int, batch: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


def assert_packed(model: torch.nn.Module, path: Path) -> None:
    """Every parameter has values, every quantized format of the model's components is there, and no more elements are
    dense than the artifact stores directly.
    """
    components = ("text/", "vision/") if hasattr(model.config, "vision_config") else ("text/",)
    parameters = dict(model.named_parameters())
    assert not any(parameter.is_meta for parameter in parameters.values())
    with open_artifact(path) as artifact:
        bound = {o for name, b in artifact.bindings.items() if name.startswith(components) for o in b.objects}
        records = [artifact.objects[object_id] for object_id in bound]
    quantized = {record.format for record in records} - {"bf16", "fp32"}  # type: ignore[union-attr]
    direct = sum(record.elements for record in records if record.format in ("bf16", "fp32"))  # type: ignore[union-attr]
    packed = [parameter for parameter in parameters.values() if isinstance(parameter, NinferTensor)]
    assert {format for weight in packed for format in weight.formats} - {"bf16"} == quantized
    assert sum(p.numel() for p in parameters.values() if not isinstance(p, NinferTensor)) <= direct


@pytest.mark.parametrize("name, recipe", GOLDEN, ids=map("/".join, GOLDEN))
def test_golden_models_in_one_pass_and_token_by_token(name: str, recipe: str) -> None:
    path = golden("ninfer", "models", name, f"{recipe}.ninfer")
    expected = load_tensors(golden("ninfer", "models", name, "expected.safetensors"))
    run = "checkpoint_float32" if recipe == "bf16" else recipe
    classes = [AutoModelForCausalLM] + ([AutoModelForImageTextToText] if "vision" in name else [])
    for auto in classes:
        model, info = auto.from_pretrained(path, output_loading_info=True, **EXACT)
        assert not any(info.values())
        assert_packed(model, path)
        ids, logits = expected["input_ids"], expected[f"{run}/logits"]
        with torch.no_grad():
            whole = model(ids, output_hidden_states=True)
            assert spread(whole.logits, logits) < 1e-5
            for found, hidden in zip(whole.hidden_states, expected[f"{run}/hidden_states"], strict=True):
                assert spread(found, hidden) < 1e-5
            begun = model(ids[:, :20], use_cache=True)
            steps, cache = [begun.logits], begun.past_key_values
            for place in range(20, ids.shape[1]):
                step = model(ids[:, place : place + 1], past_key_values=cache, use_cache=True)
                steps.append(step.logits)
                cache = step.past_key_values
            assert spread(torch.cat(steps, 1), logits) < 1e-5
    if "vision" in name:
        with torch.no_grad():
            seen = model.model.get_image_features(expected["pixel_values"], expected["image_grid_thw"]).pooler_output
        assert spread(torch.cat(list(seen)), expected[f"{run}/vision_features"]) < 1e-5


@pytest.mark.parametrize("name", official_models.RECIPES)
def test_tiny_models_compute_what_plain_ones_do(name: str, written: Any) -> None:
    made = written(name)
    model = model_class(made.configs).from_pretrained(made.path, **EXACT)
    plain = plain_model(made, model.config)
    for key, expected in plain.state_dict().items():
        parameter = model.state_dict()[key]
        value = parameter.dequantize() if isinstance(parameter, NinferTensor) else parameter
        assert torch.equal(value, expected), key
    ids = token_ids(made.configs["text"]["vocab_size"])
    with torch.no_grad():
        assert spread(model(ids).logits, plain(ids).logits) < 2e-5
        generated = [m.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None) for m in (model, plain)]
    assert torch.equal(*generated)
    if "vision" in made.configs:
        pixels = torch.randn(32, 96, generator=torch.Generator().manual_seed(2))
        grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
        with torch.no_grad():
            seen = [torch.cat(list(m.model.get_image_features(pixels, grid).pooler_output)) for m in (model, plain)]
        assert spread(*seen) < 2e-5


def test_in_bfloat16_state_and_decay_stay_float32(written: Any) -> None:
    made = written("groupwise")
    model = AutoModelForCausalLM.from_pretrained(made.path)
    assert model.dtype == torch.bfloat16
    kept = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {f"model.layers.0.linear_attn.{leaf}" for leaf in ("A_log", "dt_bias")}
    ids = token_ids(96)
    with torch.no_grad():
        found, expected = model(ids).logits.float(), plain_model(made, model.config)(ids).logits
    assert (found - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("name", ["moe", "moe two banks", "moe nvfp4"])
def test_every_implementation_of_experts_stays_packed(name: str, written: Any) -> None:
    made, ids = written(name), token_ids(96)
    logits = {}
    for implementation in (None, "eager", "grouped_mm", "batched_mm"):
        options = {} if implementation is None else {"experts_implementation": implementation}
        model = AutoModelForCausalLM.from_pretrained(made.path, **EXACT, **options)
        chosen = model.config._experts_implementation
        assert chosen == {None: "ninfer", "grouped_mm": "ninfer"}.get(implementation, implementation)
        if implementation == "batched_mm":
            continue  # gathers a matrix per token, which a packed bank does not give
        with torch.no_grad():
            logits[implementation] = model(ids).logits
    assert spread(logits["eager"], logits[None]) < 2e-5 and torch.equal(logits["grouped_mm"], logits[None])


def test_experts_have_gradients_for_activations(written: Any) -> None:
    made = written("moe")
    model = AutoModelForCausalLM.from_pretrained(made.path, **EXACT)
    plain = plain_model(made, model.config)
    x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(3))
    gradients = []
    for m in (model, plain):
        inputs = x.clone().requires_grad_()
        m(inputs_embeds=inputs).logits.square().mean().backward()
        gradients.append(inputs.grad)
    assert spread(*gradients) < 1e-4  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["groupwise", "moe two banks", "rotated", "vision and mtp"])
def test_models_survive_deepcopy_and_state_dicts(name: str, written: Any, tmp_path: Path) -> None:
    made, ids = written(name), token_ids(32)
    model = model_class(made.configs).from_pretrained(made.path, **EXACT)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again = torch.load(tmp_path / "state.pt", weights_only=True)
    assert all(torch.equal(again[key], value) for key, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", ["groupwise", "columns", "moe two banks"])
def test_models_compile_without_a_break(name: str, written: Any) -> None:
    model, ids = AutoModelForCausalLM.from_pretrained(written(name).path, **EXACT), token_ids(96)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(ids, use_cache=False).logits
        assert spread(compiled, model(ids, use_cache=False).logits) < 1e-5


def test_a_tied_head_is_the_embedding_with_the_policy_of_the_head(written: Any) -> None:
    configs, _ = official_models.RECIPES["vision and mtp"]
    made = written("vision and mtp", tied=True)
    model = AutoModelForCausalLM.from_pretrained(made.path, **EXACT)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert configs["text"]["tie_word_embeddings"] and model.config.tie_word_embeddings


def test_a_tied_rotated_head_is_one_tensor_for_both(tmp_path: Path) -> None:
    configs, recipe = official_models.RECIPES["rotated"]
    configs = {"text": {**configs["text"], "tie_word_embeddings": True}}
    made = official_models.write_model(tmp_path / "m.ninfer", configs, recipe, tied=True)
    model = AutoModelForCausalLM.from_pretrained(made.path, **EXACT)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = torch.from_numpy(made.plain["text/output_head"])
    assert torch.equal(model.lm_head.weight.dequantize(), expected)
    assert torch.equal(model.model.embed_tokens(torch.arange(32)), expected)


def test_a_head_of_its_own_unties_the_model(written: Any) -> None:
    made = written("vision and mtp")  # its config ties what it stores apart
    model = AutoModelForImageTextToText.from_pretrained(made.path, **EXACT)
    assert not model.config.tie_word_embeddings and not model.config.text_config.tie_word_embeddings
    model.tie_weights()
    assert model.lm_head.weight.format == "q6_g64_fp16"
    assert model.model.language_model.embed_tokens.weight.format == "q8_g32_fp16"


@pytest.mark.parametrize(
    "auto, part, names",
    [
        (AutoModel, "Model", {"": "model."}),
        (transformers.Qwen3_5TextModel, "TextModel", {"": "model.language_model."}),
        (transformers.Qwen3_5VisionModel, "VisionModel", {"": "model.visual."}),
        (transformers.Qwen3_5ForCausalLM, "ForCausalLM", {"model.": "model.language_model.", "lm_head.": "lm_head."}),
    ],
)
def test_a_class_takes_the_components_it_has(auto: Any, part: str, names: dict[str, str], written: Any) -> None:
    made = written("vision and mtp")
    model, info = auto.from_pretrained(made.path, output_loading_info=True, **EXACT)
    assert type(model).__name__ == f"Qwen3_5{part}" and not any(info.values())
    assert model.config.quantization_config.quant_method == "ninfer"
    assert "transformers_weights" not in json.dumps(model.config.to_dict())
    state = official_state.checkpoint_state(made, conditional=True)
    for key, value in model.state_dict().items():
        own, full = next(item for item in names.items() if key.startswith(item[0]))
        plain = value.dequantize() if isinstance(value, NinferTensor) else value
        expected = state[full + key.removeprefix(own)]
        assert torch.equal(plain, torch.from_numpy(np.ascontiguousarray(expected))), key


@pytest.mark.parametrize("name", ["vision and mtp", "moe vision and mtp"])
def test_multi_token_prediction_loads_into_its_class(name: str, written: Any) -> None:
    made = written(name)
    main = AutoModelForCausalLM.from_pretrained(made.path, **EXACT)
    model = MtpModel.from_pretrained(main)
    expected = official_state.mtp_state(made)
    own = {key: value for key, value in model.state_dict().items() if key.startswith("layers.")}
    assert own.keys() == expected.keys()
    for key, value in own.items():
        assert isinstance(value, NinferTensor) == key.endswith(("_proj.weight", "proj")) and not value.is_meta, key
        plain = value.dequantize() if isinstance(value, NinferTensor) else value
        assert torch.equal(plain, torch.from_numpy(np.ascontiguousarray(expected[key]))), key
    assert model.embed_tokens is main.get_input_embeddings() and model.shared_head is main.lm_head
    twin = MtpModel(main, 1).eval()
    state = {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in expected.items()}
    twin.load_state_dict(state, strict=False)
    places, hidden = torch.arange(7)[None], torch.randn(1, 7, 128)
    with torch.no_grad():
        embedded = main.get_input_embeddings()(token_ids(96, 1, 7))
        rotary = model.rotary_emb(embedded, places.expand(3, 1, 7))
        found, plain = (m.layers[0](embedded, hidden, rotary, None, places, None) for m in (model, twin))
    assert spread(found, plain) < 2e-5


def test_multi_token_prediction_that_is_not_there_is_named(written: Any) -> None:
    main = AutoModelForCausalLM.from_pretrained(written("groupwise").path)
    main.config.num_mtp_layers, main.config.mtp_layer_types = 1, ["full_attention"]
    with pytest.raises(ArtifactError, match="no component 'mtp', only text"):
        MtpModel.from_pretrained(main)


DRAFT = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 1,
    "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 5},
}


def test_other_components_are_read_through_the_artifact_and_never_by_a_load(tmp_path: Path) -> None:
    configs, recipe = official_models.RECIPES["groupwise"]
    directory, stored, _ = official_models.draft_model({**configs, "dflash": DRAFT}, recipe)
    data, table = official_words.draw("gguf_q8_0", (40, 64), np.random.default_rng(0))
    directory.components["ngram"] = {"config": {"architectures": ["Qwen4ExpNgramTable"]}}
    directory.bindings["ngram/table"] = {"object": directory.add("ngram", "gguf_q8_0", (40, 64), data)}
    path = directory.write(tmp_path / "m.ninfer")
    with open_artifact(path) as artifact:
        for name in ("dflash/feature_projection", "dflash/layers/0/attention/context_key", "dflash/layers/0/mlp/down"):
            assert torch.equal(artifact.parameter(name).dequantize(), torch.from_numpy(stored[name]))
        ids = torch.tensor([[3, 39], [0, 7]])
        rows = torch.nn.functional.embedding(ids, artifact.parameter("ngram/table"))
        assert torch.equal(rows, torch.from_numpy(table)[ids])
    own = {o for n, b in directory.bindings.items() if n.startswith("text/") for o in _object_ids(b)}
    for record in directory.objects:
        if record["id"] not in own:
            record["format"] = "not_of_this_world"
    foreign = directory.write(tmp_path / "foreign.ninfer")
    model, info = AutoModelForCausalLM.from_pretrained(foreign, output_loading_info=True)
    assert not any(info.values()) and not any(p.is_meta for p in model.parameters())


def _object_ids(binding: dict[str, Any]) -> list[str]:
    return [binding["object"]] if "object" in binding else [part["object"] for part in binding["parts"]]


def test_small_files_come_from_the_artifact() -> None:
    folder = golden("ninfer", "models", "qwen3_5_vision_mtp", "checkpoint")
    path = golden("ninfer", "models", "qwen3_5_vision_mtp", "mixed.ninfer")
    ours, theirs = AutoTokenizer.from_pretrained(path), AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs) and ours.get_vocab() == theirs.get_vocab()
    assert ours.eos_token_id == theirs.eos_token_id and ours.chat_template
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        assert json.loads((Path(hub_dir(path)) / name).read_text()) == json.loads((folder / name).read_text())
    assert GenerationConfig.from_pretrained(path).eos_token_id == 249
    stored, checkpoint = (AutoConfig.from_pretrained(place).text_config.to_dict() for place in (path, folder))
    left_out = {"eos_token_id", "rms_norm_eps", "attn_output_gate", "mamba_ssm_dtype", "dtype"}
    """What the generation config says, a float32, what is implied, and how the checkpoint is stored."""
    assert all(stored[key] == value for key, value in checkpoint.items() if key not in left_out)


def test_a_stranger_among_the_parameters_is_named(tmp_path: Path) -> None:
    directory, _, _ = official_models.draft_model(*official_models.RECIPES["groupwise"])
    directory.bindings["text/layers/0/gdn/extra"] = directory.bindings["text/final_norm"]
    directory.bindings["other/part"] = directory.bindings["text/final_norm"]
    with pytest.raises(ArtifactError, match="without a place: text/layers/0/gdn/extra$"):
        AutoModelForCausalLM.from_pretrained(directory.write(tmp_path / "m.ninfer"))


def test_a_missing_parameter_is_named_with_its_place(tmp_path: Path) -> None:
    directory, _, _ = official_models.draft_model(*official_models.RECIPES["groupwise"])
    del directory.bindings["text/layers/0/gdn/key"]
    directory.uses = [use for use in directory.uses if use["parameter"] != "text/layers/0/gdn/key"]
    pattern = r"without a tensor: model\.layers\.0\.linear_attn\.in_proj_qkv\.weight \(text/layers/0/gdn/query, "
    with pytest.raises(ArtifactError, match=pattern):
        AutoModelForCausalLM.from_pretrained(directory.write(tmp_path / "m.ninfer"))


def test_a_config_of_another_size_is_refused(written: Any) -> None:
    path = written("groupwise").path
    with pytest.raises(LayoutError, match=r"'embed_tokens.weight' has shape \[97, 128\] in the model"):
        AutoModelForCausalLM.from_pretrained(path, vocab_size=97)


def test_processors_come_from_the_artifact() -> None:
    """Images need Pillow, which the tests' plots bring; videos, and the processor of all kinds, need torchvision."""
    path = golden("ninfer", "models", "qwen3_5_vision_mtp", "groupwise.ninfer")
    try:
        images = transformers.AutoImageProcessor.from_pretrained(path)
    except ImportError as error:  # releases before 5.18 ask for torchvision here too
        if importlib.util.find_spec("torchvision") is not None:
            raise
        pytest.skip(str(error).strip().splitlines()[0])
    assert (images.patch_size, images.temporal_patch_size, images.merge_size) == (4, 2, 2)
    if importlib.util.find_spec("torchvision") is None:
        with pytest.raises((ImportError, ValueError), match="[Tt]orchvision"):
            transformers.AutoProcessor.from_pretrained(path)
        return
    processor = transformers.AutoProcessor.from_pretrained(path)
    assert processor.image_processor.patch_size == 4 and processor.tokenizer("a")["input_ids"]
    assert transformers.AutoVideoProcessor.from_pretrained(path).patch_size == 4
