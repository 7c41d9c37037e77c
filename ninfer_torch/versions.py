"""The version of this library, and of everything it runs on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import warnings
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TextIO

import torch

__all__ = ["TESTED", "__version__", "show_versions", "versions", "warn_if_untested"]

__version__ = "0.1.0"

TESTED = {"torch": ("2.11", "2.13"), "transformers": ("5.17", "5.24")}
"""The first and the last minor release of each host that this version was tested with (`.ci/versions`)."""

_DISTRIBUTIONS = ("transformers", "accelerate", "safetensors", "triton", "gguf", "numpy")


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])


@cache
def warn_if_untested(host: str, version: str) -> None:
    """Warn, once a process, that `version` of torch or transformers lies outside of what was tested."""
    oldest, newest = TESTED[host]
    if not _minor(oldest) <= _minor(version) <= _minor(newest):
        warnings.warn(
            f"ninfer_torch {__version__} was tested with {host} {oldest} to {newest}; this is {version}. Where something fails, try one of "
            f"those, and report it with ninfer_torch.show_versions()",
            RuntimeWarning,
            stacklevel=2,
        )


def _torch_build() -> str:
    if torch.version.cuda is not None:
        build = f"CUDA {torch.version.cuda}"
    elif torch.version.hip is not None:
        build = f"ROCm {torch.version.hip}"
    else:
        return f"{torch.__version__} (CPU build)"
    devices = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return f"{torch.__version__} ({build}; devices: {devices or 'none'})"


def _cpu_kernels() -> str:
    folder = Path(__file__).parent / "kernels" / "cpu"
    for suffix in EXTENSION_SUFFIXES:
        if (folder / f"_native{suffix}").is_file():
            return f"native (_native{suffix}), {_instruction_set()}"
    return "reference (no native kernels in this installation)"


def _instruction_set() -> str:
    """What the native kernels compute with, and what this processor could run."""
    if os.environ.get("NINFER_TORCH_CPU") == "reference":
        return "set aside by NINFER_TORCH_CPU=reference"
    native = sys.modules.get("ninfer_torch.kernels.cpu.native")
    if native is None:
        return "not loaded"
    units = " and AMX" if native.uses_matrix_units() else ""
    return f"{native.used()}{units} (this processor runs {', '.join(native.instruction_sets())})"


def versions() -> dict[str, str]:
    """What this process runs on, one line of text per component, in the order of a report.

    Versions of other libraries are read from their installed metadata: none of them is imported for the report.
    """
    return {
        "ninfer_torch": f"{__version__} ({Path(__file__).parent})",
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "torch": _torch_build(),
        **{distribution: _installed(distribution) for distribution in _DISTRIBUTIONS},
        "threads": f"{torch.get_num_threads()} (of {os.cpu_count()} processors)",
        "cpu kernels": _cpu_kernels(),
    }


def show_versions(file: TextIO | None = None) -> None:
    """Print the versions a bug report needs, one component per line, to `file` (default: standard output)."""
    report = versions()
    width = max(map(len, report))
    for component, version in report.items():
        print(f"{component:<{width}}  {version}", file=file)
