"""What a path may be, what the overlay behind it holds, and who else may use it."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    pipeline,
)

import ninfer_torch
from ninfer_torch.errors import ArtifactError, NinferError
from ninfer_transformers.overlay import hub_dir
from tiny_models import CHAT_TEMPLATE, dense_twin, prompt_ids, save_folder, tiny_llama, written_artifact


@pytest.fixture(autouse=True)
def overlay_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "overlays"


@pytest.fixture
def resources(tmp_path: Path) -> dict[str, bytes]:
    folder = save_folder(tmp_path / "source", tiny_llama())
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
    return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture
def artifact(tmp_path: Path, resources: dict[str, bytes]) -> Path:
    (tmp_path / "folder").mkdir()
    return written_artifact(tmp_path / "folder" / "m.ninfer", tiny_llama(), resources=resources)


def hub_cache(root: Path, artifact: Path, repo: str) -> Path:
    """The Hub client's cache with one snapshot: links into a folder of blobs."""
    repository = root / f"models--{repo.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c" * 40)
    for index, file in enumerate(sorted(artifact.parent.iterdir())):
        shutil.copy(file, repository / "blobs" / f"{index:064x}")
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", f"{index:064x}"))
    return snapshot


def assert_loads(path: Any, artifact: Path, **kwargs: Any) -> None:
    """Model, config, tokenizer and generation config through the stock entry points."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kwargs)
    with torch.no_grad():
        torch.testing.assert_close(model(prompt_ids()).logits, dense_twin(artifact)(prompt_ids()).logits)
    assert model.generation_config.max_new_tokens == 7
    config = AutoConfig.from_pretrained(path, **kwargs)
    assert isinstance(config, LlamaConfig) and config.intermediate_size == 160
    assert LlamaConfig.from_pretrained(path, **kwargs).intermediate_size == 160
    assert model.name_or_path == config.name_or_path == os.fspath(path)
    tokenizer = AutoTokenizer.from_pretrained(path, **kwargs)
    assert tokenizer("Hi")["input_ids"] == PreTrainedTokenizerFast.from_pretrained(path, **kwargs)("Hi")["input_ids"]
    assert tokenizer.decode(tokenizer("Hi")["input_ids"]) == "Hi" and tokenizer.name_or_path == os.fspath(path)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat == "<user>Hi<assistant>" and tokenizer.chat_template == CHAT_TEMPLATE
    assert GenerationConfig.from_pretrained(path, **kwargs).max_new_tokens == 7


def test_a_file_as_string_and_as_path(artifact: Path) -> None:
    assert_loads(artifact, artifact)
    assert_loads(str(artifact), artifact)


def test_a_relative_path(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(artifact.parent)
    assert_loads("m.ninfer", artifact)


def test_a_folder_and_a_subfolder(artifact: Path) -> None:
    assert_loads(artifact.parent, artifact)
    model = AutoModelForCausalLM.from_pretrained(artifact.parent.parent, subfolder="folder")
    assert model.is_quantized


def test_a_file_without_the_suffix_is_known_by_its_magic(artifact: Path) -> None:
    assert_loads(shutil.copy(artifact, artifact.parent / "weights"), artifact)


def test_keyword_arguments(artifact: Path) -> None:
    assert AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path=artifact).is_quantized
    assert GenerationConfig.from_pretrained(pretrained_model_name=str(artifact)).max_new_tokens == 7


def test_a_hub_snapshot_folder(artifact: Path, tmp_path: Path) -> None:
    assert_loads(hub_cache(tmp_path / "hub", artifact, "maker/model"), artifact)


def test_a_hub_id_in_the_cache(artifact: Path, tmp_path: Path) -> None:
    hub_cache(tmp_path / "hub", artifact, "maker/model")
    assert_loads("maker/model", artifact, cache_dir=str(tmp_path / "hub"), local_files_only=True)


def test_a_repository_with_config_and_stub_is_an_ordinary_one(artifact: Path, tmp_path: Path) -> None:
    repository = Path(shutil.copytree(hub_dir(artifact), tmp_path / "repository"))
    assert not (repository / "m.ninfer").is_symlink()
    snapshot = hub_cache(tmp_path / "hub", repository / "m.ninfer", "maker/model")
    assert_loads("maker/model", artifact, cache_dir=str(tmp_path / "hub"), local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(snapshot)
    assert model.hf_quantizer.artifact_path == snapshot / "m.ninfer"
    (snapshot / "m.ninfer").unlink()
    with pytest.raises(ArtifactError, match="download the whole repository"):
        AutoModelForCausalLM.from_pretrained("maker/model", cache_dir=str(tmp_path / "hub"), local_files_only=True)


def test_a_hub_id_without_an_artifact_keeps_the_original_error(tmp_path: Path) -> None:
    for path in ("maker/nothing", "nothing"):
        with pytest.raises(OSError, match="huggingface.co") as caught:
            AutoModelForCausalLM.from_pretrained(path, cache_dir=str(tmp_path), local_files_only=True)
        assert not isinstance(caught.value, NinferError)


def test_a_hub_repository_is_searched_and_fetched(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    from ninfer_transformers.locate import fetch_artifact

    written = written_artifact(tmp_path / "parted.ninfer", tiny_llama(), max_file_bytes=40000)
    parts = sorted(path.name for path in tmp_path.glob("parted.ninfer.part-*"))
    names = ["README.md", "sub/parted.ninfer", *(f"sub/{part}" for part in parts)]
    fetched = []

    def download(repo_id: str, name: str, *, subfolder: str | None, **place: Any) -> str:
        fetched.append((repo_id, subfolder, name, place))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, repo_id, revision: names)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert len(parts) > 1
    assert fetch_artifact("maker/model", {"subfolder": "sub", "revision": "v1", "token": None}) == written
    assert fetched == [("maker/model", "sub", name, {"revision": "v1"}) for name in ["parted.ninfer", *parts]]
    assert fetch_artifact("maker/model", {}) is None
    names.append("sub/second.ninfer")
    with pytest.raises(ArtifactError, match="2 artifacts"):
        fetch_artifact("maker/model", {"subfolder": "sub"})


def test_pipeline_generates_text(artifact: Path) -> None:
    generator = pipeline("text-generation", model=str(artifact), dtype=torch.float32)
    [result] = generator("Hello", max_new_tokens=6, do_sample=False, return_full_text=False)
    model = AutoModelForCausalLM.from_pretrained(artifact, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(artifact)
    ids = tokenizer("Hello", return_tensors="pt")
    tokens = model.generate(**ids, max_new_tokens=6, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert result["generated_text"] == tokenizer.decode(tokens, skip_special_tokens=True)
    assert isinstance(generator.model.lm_head.weight, ninfer_torch.NinferTensor)


def test_auto_processor_gives_the_tokenizer_of_a_text_model(artifact: Path) -> None:
    assert (
        AutoProcessor.from_pretrained(artifact)("Hi")["input_ids"]
        == AutoTokenizer.from_pretrained(artifact)("Hi")["input_ids"]
    )


def test_an_artifact_in_parts(tmp_path: Path) -> None:
    path = written_artifact(tmp_path / "m.ninfer", tiny_llama(), max_file_bytes=40000)
    assert len(list(tmp_path.glob("m.ninfer.part-*"))) > 1
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(prompt_ids()).logits, dense_twin(path)(prompt_ids()).logits)
    os.remove(next(iter(tmp_path.glob("m.ninfer.part-*2"))))
    with pytest.raises(ArtifactError, match="part-0002"):
        AutoModelForCausalLM.from_pretrained(path)


def test_a_folder_with_two_artifacts_is_ambiguous(artifact: Path) -> None:
    shutil.copy(artifact, artifact.with_name("other.ninfer"))
    for call in (
        AutoConfig.from_pretrained,
        AutoTokenizer.from_pretrained,
        AutoModelForCausalLM.from_pretrained,
        hub_dir,
    ):
        with pytest.raises(ArtifactError, match="2 artifacts .m.ninfer, other.ninfer."):
            call(artifact.parent)


def test_a_folder_with_its_own_weights_is_left_alone(artifact: Path) -> None:
    save_folder(artifact.parent, tiny_llama(seed=3))
    model = AutoModelForCausalLM.from_pretrained(artifact.parent)
    assert not getattr(model, "is_quantized", False)
    assert torch.equal(model.lm_head.weight, tiny_llama(seed=3).lm_head.weight)


def test_a_config_beside_the_artifact_does_not_hide_it(artifact: Path) -> None:
    (artifact.parent / "config.json").write_text(json.dumps({"model_type": "llama", "intermediate_size": 8}))
    assert_loads(artifact.parent, artifact)


def test_paths_of_other_things_keep_their_errors(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="neither a .ninfer artifact nor a folder that holds one"):
        hub_dir(tmp_path)
    with pytest.raises((OSError, ValueError)) as caught:
        AutoConfig.from_pretrained(tmp_path)
    assert not isinstance(caught.value, NinferError)


def test_the_overlay_holds_small_files_and_links_only(
    artifact: Path, overlay_cache: Path, resources: dict[str, bytes]
) -> None:
    folder = Path(ninfer_torch.hub_dir(artifact))
    assert folder.parent == overlay_cache
    files = {path.name: path for path in folder.iterdir()}
    assert files.keys() == {"config.json", "ninfer-stub.safetensors", "m.ninfer", *resources}
    assert os.readlink(files.pop("m.ninfer")) == str(artifact)
    assert not any(path.is_symlink() or path.stat().st_size > 65536 for path in files.values())
    assert all(files[name].read_bytes() == data for name, data in resources.items())
    assert [path.name for path in overlay_cache.iterdir()] == [folder.name]


def test_resources_that_are_no_data_files_of_a_model_stay_out(tmp_path: Path, overlay_cache: Path) -> None:
    hostile = (
        "../escaped.json",
        "/tmp/escaped.json",
        "modeling.py",
        "config.json",
        "adapter_config.json",
        "sub/x.json",
    )
    roles = dict.fromkeys(hostile, b"{}")
    path = written_artifact(tmp_path / "m.ninfer", tiny_llama(), resources=roles)
    folder = Path(hub_dir(path))
    assert {entry.name for entry in folder.iterdir()} == {"config.json", "ninfer-stub.safetensors", "m.ninfer"}
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert not (overlay_cache / "escaped.json").exists()


def test_the_overlay_follows_the_artifact(artifact: Path) -> None:
    first = hub_dir(artifact)
    assert hub_dir(artifact.parent) == hub_dir(str(artifact)) == first
    os.utime(artifact, ns=(1, 1))
    assert hub_dir(artifact) != first
    moved = artifact.rename(artifact.with_name("moved.ninfer"))
    assert hub_dir(moved) != first
    assert AutoModelForCausalLM.from_pretrained(hub_dir(moved)).is_quantized


def test_many_threads_make_one_overlay(artifact: Path, overlay_cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(hub_dir, [artifact] * 32))
    assert len(folders) == 1 and [str(path) for path in overlay_cache.iterdir()] == list(folders)


def test_a_broken_artifact_leaves_no_overlay(artifact: Path, overlay_cache: Path) -> None:
    hub_dir(artifact)
    before = sorted(overlay_cache.iterdir())
    artifact.write_bytes(artifact.read_bytes()[:5000])
    with pytest.raises(ArtifactError):
        hub_dir(artifact)
    assert sorted(overlay_cache.iterdir()) == before


def test_an_unwritable_cache_names_the_variable(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(NinferError, match="NINFER_TORCH_CACHE"):
        hub_dir(artifact)


def test_an_overlay_copied_without_its_artifact_says_so(artifact: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(hub_dir(artifact), copied, symlinks=True)
    assert AutoModelForCausalLM.from_pretrained(copied).is_quantized
    (copied / "m.ninfer").unlink()
    with pytest.raises(ArtifactError, match="'m.ninfer', which is not in its folder"):
        AutoModelForCausalLM.from_pretrained(copied)
    save_folder(copied, tiny_llama())
    members = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(members | {"quantization_config": {"quant_method": "ninfer"}}))
    with pytest.raises(ArtifactError, match="not the stub of a .ninfer artifact"):
        AutoModelForCausalLM.from_pretrained(copied)
