"""The report of versions: complete, true to what is installed, and cheap."""

from __future__ import annotations

import importlib.metadata
import io
import platform
import subprocess
import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

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
            units = " and AMX" if native.uses_matrix_units() else ""
            assert f"), {name}{units} (this processor runs scalar" in reported()["cpu kernels"]
    finally:
        native.use(before)
    monkeypatch.setenv("NINFER_TORCH_CPU", "reference")
    assert reported()["cpu kernels"].endswith("set aside by NINFER_TORCH_CPU=reference")


def test_the_default_is_standard_output(capsys):
    show_versions()
    assert capsys.readouterr().out.startswith("ninfer_torch")


@pytest.mark.parametrize(
    "host, version, warned",
    [
        ("torch", "2.10.1", True),
        ("torch", "2.11.0", False),
        ("torch", "2.13.5+cpu", False),
        ("torch", "2.14.0", True),
        ("torch", "3.0.0a0+git1", True),
        ("transformers", "5.9.0", True),
        ("transformers", "5.17.0", False),
        ("transformers", "5.24.0.dev0", False),
        ("transformers", "5.100.0", True),
    ],
)
def test_an_untested_host_is_named_once(host: str, version: str, warned: bool) -> None:
    versions.warn_if_untested.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        versions.warn_if_untested(host, version)
        versions.warn_if_untested(host, version)
    assert len(found) == warned
    for warning in found:
        oldest, newest = versions.TESTED[host]
        assert f"tested with {host} {oldest} to {newest}; this is {version}" in str(warning.message)


def test_hosts_are_looked_at_where_they_are_imported() -> None:
    code = """
import warnings, torch
torch.__version__ = "2.99.0"
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    import ninfer_torch
    import transformers
    transformers.__version__ = "5.999.0"
    import transformers.modeling_utils, transformers.quantizers.auto
print([str(w.message).split(";")[1].split(".")[0] for w in found if "was tested with" in str(w.message)])
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert out.strip() == "[' this is 2', ' this is 5']"


def test_the_requirements_begin_where_the_tests_do() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    for host, (oldest, _) in versions.TESTED.items():
        assert f'"{host}>={oldest}"' in text
