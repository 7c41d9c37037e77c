"""Both orders of import, the switch that leaves Transformers alone, and a process without this library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ninfer_torch import _transformers_hook
from ninfer_transformers.attach import LAYERS, REGISTRY, TUNERS
from ninfer_transformers.overlay import hub_dir
from ninfer_transformers.patch import PATCHES
from tiny_models import save_folder, tiny_llama, written_artifact

ROOT = Path(__file__).parents[2]

TRANSFORMERS_FIRST = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM, pipeline
AutoTokenizer, GenerationConfig, LlamaForCausalLM, pipeline, AutoConfig
import ninfer_torch
path = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(path)
assert isinstance(model.lm_head.weight, ninfer_torch.NinferTensor)
assert isinstance(LlamaForCausalLM.from_pretrained(path).lm_head.weight, ninfer_torch.NinferTensor)
assert AutoConfig.from_pretrained(path).model_type == "llama"
assert GenerationConfig.from_pretrained(path).max_new_tokens == 7
tokenizer = AutoTokenizer.from_pretrained(path)
assert tokenizer.decode(tokenizer("Hi")["input_ids"]) == "Hi"
assert pipeline("text-generation", model=path)("Hi", max_new_tokens=2)
print("done")
"""

NINFER_FIRST = """
import sys
import ninfer_torch
assert not {name.partition(".")[0] for name in sys.modules} & {"transformers", "ninfer_transformers"}
import transformers
path = sys.argv[1]
tokenizer = transformers.AutoTokenizer.from_pretrained(path)
assert tokenizer.decode(tokenizer("Hi")["input_ids"]) == "Hi"
model = transformers.LlamaForCausalLM.from_pretrained(path)
assert isinstance(model.lm_head.weight, ninfer_torch.NinferTensor)
assert transformers.pipeline("text-generation", model=path)("Hi", max_new_tokens=2)
spec = sys.modules["transformers.modeling_utils"].__spec__
assert "ninfer" not in type(spec.loader).__module__
import inspect
assert "class PreTrainedModel" in inspect.getsource(sys.modules["transformers.modeling_utils"])
print("done")
"""

QUANTIZER_FIRST = """
from ninfer_transformers.quantizer import NinferQuantizer
from ninfer_transformers.config import NinferConfig
from transformers.quantizers import auto
assert auto.AUTO_QUANTIZER_MAPPING["ninfer"] is NinferQuantizer
assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["ninfer"] is NinferConfig
print("done")
"""

UNPATCHED = """
import sys
import ninfer_torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, pipeline
path = sys.argv[1]
for loader in (AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig):
    try:
        loader.from_pretrained(path)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        assert not isinstance(error, ninfer_torch.NinferError), error
    else:
        raise AssertionError(f"{loader} took a path that stock Transformers does not know")
assert "ninfer" not in PreTrainedModel.from_pretrained.__func__.__code__.co_filename
folder = ninfer_torch.hub_dir(path)
model = AutoModelForCausalLM.from_pretrained(folder)
assert isinstance(model.lm_head.weight, ninfer_torch.NinferTensor) and model.name_or_path == folder
assert AutoTokenizer.from_pretrained(folder)("Hi")["input_ids"]
assert GenerationConfig.from_pretrained(folder).max_new_tokens == 7
assert pipeline("text-generation", model=folder)("Hi", max_new_tokens=2)
print("done")
"""

WITHOUT_THE_LIBRARY = """
import sys
from transformers import AutoModelForCausalLM, LlamaForCausalLM
for loader in (AutoModelForCausalLM, LlamaForCausalLM):
    try:
        loader.from_pretrained(sys.argv[1])
    except Exception as error:
        print(type(error).__name__, error)
    else:
        raise AssertionError("the stub was taken for a checkpoint: a random model")
assert not {name.partition(".")[0] for name in sys.modules} & {"ninfer_torch", "ninfer_transformers"}
print("done")
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hook")
    source = save_folder(folder / "source", tiny_llama())
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    resources = {name: (source / name).read_bytes() for name in names}
    return written_artifact(folder / "m.ninfer", tiny_llama(), resources=resources)


def run(script: str, argument: object, cache: Path, **environment: str) -> str:
    """The output of a script in a process of its own, which must end well."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
    variables = {
        **os.environ,
        "PYTHONPATH": paths,
        "NINFER_TORCH_CACHE": str(cache),
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    ended = subprocess.run(
        [sys.executable, "-c", script, str(argument)],
        env=variables,
        cwd=cache,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


@pytest.mark.parametrize("script", [TRANSFORMERS_FIRST, NINFER_FIRST], ids=["transformers first", "ninfer_torch first"])
def test_either_order_of_import(artifact: Path, tmp_path: Path, script: str) -> None:
    assert run(script, artifact, tmp_path).endswith("done\n")


@pytest.mark.parametrize("first", ["", "import ninfer_torch\n", "import transformers.quantizers\n"])
def test_the_quantizer_may_be_imported_by_itself(tmp_path: Path, first: str) -> None:
    assert run(first + QUANTIZER_FIRST, "", tmp_path).endswith("done\n")


def test_no_patch_leaves_transformers_alone_and_hub_dir_works(artifact: Path, tmp_path: Path) -> None:
    assert run(UNPATCHED, artifact, tmp_path, NINFER_TORCH_NO_PATCH="1").endswith("done\n")


def test_without_the_library_an_overlay_fails_loudly(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path))
    output = run(WITHOUT_THE_LIBRARY, hub_dir(artifact), tmp_path)
    assert output.count("RuntimeError") == 2 and output.endswith("done\n")


def test_every_watched_module_has_a_purpose() -> None:
    assert _transformers_hook.WATCHED == {*PATCHES, REGISTRY, LAYERS, TUNERS}
