"""The norms of a draft layer in a GGUF file: stored as 1 + w, or as w by some importers. Source: spec/parameters.md 13."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch

from ninfer_torch.convert.gguf_file import GgufFile
from ninfer_torch.convert.gguf_rules import Architecture, TensorRule
from ninfer_torch.convert.gguf_values import read_values
from ninfer_torch.errors import ConversionError

__all__ = ["draft_rules"]

_NEAR = 0.25
"""How far the mean of all norms may lie from 0, where they hold w, or from 1, where they hold 1 + w."""


def draft_rules(file: GgufFile, table: Architecture, layer: int) -> Sequence[TensorRule]:
    """The rules of the draft layer, block `layer` of the file, without the shift where the file has none.

    Zero-centred norms w have a mean near 0. Raises ConversionError where the mean of all of them lies near neither 0 nor 1;
    warns where it is near 0, since most files hold 1 + w.
    """
    norms = [rule.gguf.format(i=layer) for rule in table.draft if rule.shift]
    found = [file.tensors[name] for name in norms if name in file.tensors]
    if len(found) < len(norms):
        return table.draft  # the reader of the tensors names those that are missing
    means = [float(read_values(file, tensor, 0, tensor.shape[0]).to(torch.float64).mean()) for tensor in found]
    mean = sum(means) / len(means)
    if abs(mean - 1) <= _NEAR:
        return table.draft
    if abs(mean) <= _NEAR:
        warnings.warn(
            f"{file.name}: the norms of the draft layer have a mean of {mean:.3f}: they are taken as they are, though most "
            "files hold 1 + w",
            stacklevel=2,
        )
        return [replace(rule, shift=0.0) for rule in table.draft]
    shown = ", ".join(f"{name} {value:.3f}" for name, value in zip(norms, means, strict=True))
    raise ConversionError(
        f"{file.name}: the norms of the draft layer have a mean of {mean:.3f} ({shown}), expected about 1 where they hold "
        "1 + w, or about 0 where they hold w; convert the layer from the model's safetensors"
    )
