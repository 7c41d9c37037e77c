"""Access to the golden data beside the project, where it exists."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

GOLDEN = Path(os.environ.get("NINFER_TORCH_GOLDEN", Path(__file__).parents[2] / "shared" / "golden"))
REQUIRE_DATA = os.environ.get("NINFER_TORCH_REQUIRE_DATA") == "1"


def golden(*parts: str) -> Path:
    """The path of a golden file or folder; skips the test where it is absent, or fails it when the data are required."""
    path = GOLDEN.joinpath(*parts)
    if not path.exists():
        message = f"golden data not found: {'/'.join(parts)} (set NINFER_TORCH_GOLDEN to the folder that holds it)"
        if REQUIRE_DATA:
            pytest.fail(message)
        pytest.skip(message)
    return path


def load_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path)
