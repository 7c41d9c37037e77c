"""Language models and texts for measuring: any source or artifact as a Transformers model, a text as windows of tokens."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from ninfer_torch.convert.matching import match_source
from ninfer_torch.convert.source import Source
from ninfer_torch.errors import ConversionError
from ninfer_torch.models.generic import logical_name, plan_model

__all__ = ["load_model", "load_tokenizer", "token_windows"]


def load_model(path: str | os.PathLike[str], source: Source | None, dtype: torch.dtype = torch.float32) -> Any:
    """A Transformers model in evaluation mode. `source` is given where `path` is a file to convert from, whose values
    are then decoded into an ordinary dense model; all else is loaded by Transformers itself.
    """
    import transformers

    if source is None or Path(path).is_dir():
        return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    config = source.config()
    plan = plan_model(config)
    tensors = match_source(plan, source).tensors
    state = {}
    for planned in plan.tensors:
        name = planned.names[0]
        tensor = tensors[logical_name(name)]
        state[name] = tensor.values(0, tensor.rows).to(dtype)
    model_class = getattr(transformers, plan.architecture)
    return model_class.from_pretrained(None, config=config, state_dict=state, dtype=dtype).eval()


def load_tokenizer(path: str | os.PathLike[str], source: Source | None) -> Any:
    """The tokenizer that travels with a model. Raises ConversionError where there is none."""
    from transformers import AutoTokenizer

    try:
        if source is None or Path(path).is_dir():
            return AutoTokenizer.from_pretrained(path)
        with tempfile.TemporaryDirectory() as folder:
            for name, data in source.resources().items():
                (Path(folder) / name).write_bytes(data)
            source.config().save_pretrained(folder)
            return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConversionError(f"{Path(path).name}: no tokenizer that Transformers can read: {error}") from error


def token_windows(tokenizer: Any, text: str, context: int, limit: int | None = None) -> list[torch.Tensor]:
    """The token ids of a text, at most `limit`, cut into windows int64 [1, n] of `context` tokens, n >= 2.

    Raises ConversionError for a text of fewer than two tokens.
    """
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, :limit]
    windows = [window for window in ids.split(context, dim=1) if window.shape[1] > 1]
    if not windows:
        raise ConversionError(f"the text has {ids.shape[1]} tokens, expected at least 2")
    return windows
