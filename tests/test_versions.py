"""The report of versions: complete, true to what is installed, and cheap."""

from __future__ import annotations

import importlib.metadata
import io
import platform
from importlib.machinery import EXTENSION_SUFFIXES

import pytest
import torch

from ninfer_torch import versions
from ninfer_torch.versions import __version__, show_versions


def reported() -> dict[str, str]:
    out = io.StringIO()
    show_versions(out)
    return {line[: line.index("  ")]: line[line.index("  ") :].strip() for line in out.getvalue().splitlines()}


def test_the_report_names_every_component_once():
    assert list(reported()) == [
        *("ninfer_torch", "python", "platform", "torch"),
        *("transformers", "accelerate", "safetensors", "triton", "gguf", "numpy"),
        *("threads", "cpu kernels"),
    ]


@pytest.mark.parametrize("module", ["transformers", "accelerate", "safetensors", "numpy"])
def test_reported_versions_are_those_of_the_modules(module):
    assert reported()[module] == pytest.importorskip(module).__version__


def test_own_lines():
    report = reported()
    assert report["ninfer_torch"].startswith(f"{__version__} (")
    assert report["python"].split()[0] == platform.python_version()
    assert report["torch"].startswith(torch.__version__)
    assert ("CPU build" in report["torch"]) == (torch.version.cuda is None and torch.version.hip is None)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert reported()["threads"].startswith("1 (")
    finally:
        torch.set_num_threads(threads)


def test_installed_metadata_has_the_same_version():
    try:
        installed = importlib.metadata.version("ninfer-torch")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("ninfer-torch is not installed: these are its bare sources")
    assert installed == __version__


def test_a_missing_library_is_reported_as_such(monkeypatch):
    monkeypatch.setattr(versions, "_DISTRIBUTIONS", ("ninfer-torch-has-no-such-requirement",))
    assert reported()["ninfer-torch-has-no-such-requirement"] == "not installed"


def test_native_kernels_are_reported_only_where_they_are(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "__file__", str(tmp_path / "versions.py"))
    assert reported()["cpu kernels"].startswith("reference")
    native = tmp_path / "kernels" / "cpu" / f"_native{EXTENSION_SUFFIXES[-1]}"
    native.parent.mkdir(parents=True)
    native.touch()
    assert reported()["cpu kernels"].startswith(f"native ({native.name}), ")


def test_the_instruction_set_in_use_is_named(monkeypatch):
    native = pytest.importorskip("ninfer_torch.kernels.cpu.native")
    before = native.used()
    try:
        for name in native.instruction_sets():
            native.use(name)
            assert f"), {name} (this processor runs scalar" in reported()["cpu kernels"]
    finally:
        native.use(before)
    monkeypatch.setenv("NINFER_TORCH_CPU", "reference")
    assert reported()["cpu kernels"].endswith("set aside by NINFER_TORCH_CPU=reference")


def test_the_default_is_standard_output(capsys):
    show_versions()
    assert capsys.readouterr().out.startswith("ninfer_torch")
