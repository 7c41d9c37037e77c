"""ninfer_torch.save: a live model becomes an artifact whose words are the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

import ninfer_torch
import official_models
from ninfer_torch.errors import ConversionError, UnsupportedOperation
from ninfer_torch.tensors import NinferTensor
from tiny_models import CHAT_TEMPLATE, prompt_ids, save_folder, tiny_llama, tiny_tokenizer, written_artifact


@pytest.fixture(autouse=True)
def overlay_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))


def objects_of(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Format, shape and stored bytes of every parameter's object."""
    with ninfer_torch.open_artifact(path) as artifact:
        return {
            name: (record.format, record.shape, artifact.read_object(record.id, check=True))
            for name, record in ((name, artifact.objects[b.object]) for name, b in artifact.bindings.items())
        }


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("format", ["q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16"])
def test_words_survive_a_load_and_a_save(tmp_path: Path, format: str, tied: bool) -> None:
    path = written_artifact(tmp_path / "m.ninfer", tiny_llama(tied=tied), format, policy="AllowA8")
    model = AutoModelForCausalLM.from_pretrained(path)
    ninfer_torch.save(model, tmp_path / "again.ninfer")
    assert objects_of(tmp_path / "again.ninfer") == objects_of(path)
    with ninfer_torch.open_artifact(path) as first, ninfer_torch.open_artifact(tmp_path / "again.ninfer") as second:
        assert sorted(first.uses, key=repr) == sorted(second.uses, key=repr)
        assert len(set(second.objects)) == len(first.objects) + 1  # one resource more: generation_config.json
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again.ninfer")
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    with torch.no_grad():
        assert torch.equal(model(prompt_ids()).logits, again(prompt_ids()).logits)


def test_a_dense_model_is_stored_by_the_cast_rules(tmp_path: Path) -> None:
    model = tiny_llama(dtype=torch.bfloat16)
    model.model.norm.weight.data = torch.rand(64, dtype=torch.float16)
    model.lm_head.weight.data = torch.rand(272, 64)
    ninfer_torch.save(model, tmp_path / "m.ninfer")
    stored = objects_of(tmp_path / "m.ninfer")
    assert stored["text/model.norm.weight"][0] == stored["text/lm_head.weight"][0] == "fp32"
    assert {format for format, _, _ in stored.values()} == {"bf16", "fp32"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m.ninfer", dtype=torch.float32)
    assert all(torch.equal(p, model.get_parameter(name).float()) for name, p in again.named_parameters())


def test_a_weight_replaced_by_a_quantized_one_is_saved_packed(tmp_path: Path) -> None:
    model = tiny_llama(dtype=torch.float32)
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = torch.nn.Parameter(ninfer_torch.quantize(layer.weight, "q6_g64_fp16"), requires_grad=False)
    ninfer_torch.save(model, tmp_path / "m.ninfer", artifact_id="ab" * 16)
    with ninfer_torch.open_artifact(tmp_path / "m.ninfer") as artifact:
        assert artifact.artifact_id == "ab" * 16
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m.ninfer")
    loaded = again.model.layers[1].mlp.down_proj.weight
    assert isinstance(loaded, NinferTensor) and torch.equal(loaded, layer.weight)


def test_small_files_come_from_the_tokenizer_or_the_loaded_artifact(tmp_path: Path) -> None:
    model = tiny_llama()
    model.generation_config.max_new_tokens = 9
    ninfer_torch.save(model, tmp_path / "m.ninfer", tokenizer=tiny_tokenizer())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "m.ninfer")
    loaded.generation_config.max_new_tokens = 5
    ninfer_torch.save(loaded, tmp_path / "again.ninfer")
    for name, new_tokens in (("m.ninfer", 9), ("again.ninfer", 5)):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        assert tokenizer.decode(tokenizer("Hi")["input_ids"]) == "Hi" and tokenizer.chat_template == CHAT_TEMPLATE
        assert GenerationConfig.from_pretrained(tmp_path / name).max_new_tokens == new_tokens


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("name", official_models.RECIPES)
def test_composed_weights_keep_their_words(tmp_path: Path, name: str, folder: bool) -> None:
    """A model of NInfer's own artifact is saved under its state dict's names: rows of several objects, transforms, kernels."""
    configs, recipe = official_models.RECIPES[name]
    written = official_models.write_model(tmp_path / "official.ninfer", configs, recipe)
    auto = AutoModelForImageTextToText if "vision" in configs else AutoModelForCausalLM
    first = auto.from_pretrained(written.path, dtype=torch.float32)
    if folder:
        first.save_pretrained(tmp_path / "again")
        again = tmp_path / "again"
    else:
        again = ninfer_torch.save(first, tmp_path / "again.ninfer")
    second = auto.from_pretrained(again, dtype=torch.float32)
    found = dict(second.named_parameters())
    assert found.keys() == dict(first.named_parameters()).keys()
    for key, weight in first.named_parameters():
        if isinstance(weight, NinferTensor):
            other = found[key]
            assert isinstance(other, NinferTensor) and type(other) is type(weight), key
            assert set(other.formats) == set(weight.formats) and other.policy == weight.policy, key
            assert torch.equal(other.dequantize(), weight.dequantize()), key
        else:
            assert torch.equal(found[key], weight), key
    ids = prompt_ids() % configs["text"]["vocab_size"]
    with torch.no_grad():
        assert torch.equal(first(ids).logits, second(ids).logits)


def test_files_are_cut_at_the_limit(tmp_path: Path) -> None:
    ninfer_torch.save(tiny_llama(), tmp_path / "m.ninfer", max_file_bytes=40000)
    assert len(list(tmp_path.glob("m.ninfer.part-*"))) > 1
    assert all(path.stat().st_size <= 40000 for path in tmp_path.glob("m.ninfer*"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "m.ninfer").is_quantized


def test_nothing_is_overwritten_and_nothing_half_saved(tmp_path: Path) -> None:
    (tmp_path / "m.ninfer").write_text("mine")
    with pytest.raises(ConversionError, match="never overwritten"):
        ninfer_torch.save(tiny_llama(), tmp_path / "m.ninfer")
    assert (tmp_path / "m.ninfer").read_text() == "mine"
    with pytest.raises(UnsupportedOperation, match="device meta"):
        ninfer_torch.save(tiny_llama().to("meta"), tmp_path / "meta.ninfer")
    assert [path.name for path in tmp_path.iterdir()] == ["m.ninfer"]


def test_adapters_are_not_weights(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    path = written_artifact(tmp_path / "m.ninfer", tiny_llama())
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(path),
        peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )
    for with_adapters in (model, model.base_model.model):
        with pytest.raises(UnsupportedOperation, match="adapters|PEFT model"):
            ninfer_torch.save(with_adapters, tmp_path / "again.ninfer")


def test_a_saved_folder_and_a_saved_artifact_agree(tmp_path: Path) -> None:
    model = tiny_llama(dtype=torch.float32)
    folder = save_folder(tmp_path / "folder", model)
    ninfer_torch.save(model, tmp_path / "m.ninfer", tokenizer=tiny_tokenizer())
    plain, ours = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path / "m.ninfer"))
    with torch.no_grad():
        assert torch.equal(plain(prompt_ids()).logits, ours(prompt_ids()).logits)
