"""Weights in a rotated basis: which tensors of a GGUF file are stored for rotated inputs, and by which signs.

Such matrices look like any others; only the metadata `prism.hadamard.*` tells them apart, so every member of it is
checked, and any other metadata that speaks of a Hadamard transform is refused. Source: spec/parameters.md 11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ninfer_torch.convert.gguf_file import GgufArray, GgufFile
from ninfer_torch.convert.gguf_parameters import listed
from ninfer_torch.errors import ConversionError
from ninfer_torch.kernels.rotation import ROTATION_BLOCK

__all__ = ["Rotation", "read_rotation"]

_PREFIX = "prism.hadamard."
_EXPECTED: Mapping[str, int | str | bool] = {
    "version": 1,
    "block_size": ROTATION_BLOCK,
    "transform": "normalized-sylvester-walsh-hadamard",
    "axis": "input-last-dimension",
    "sign_mode": "explicit",
}
_GROUPED = "gdn_v_grouped"
_ARRAYS = ("sign_widths", "sign_values", "weight_names", "inverse_weight_names")


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of a file: `signs` bfloat16 [K] by width K, and the `names` of the tensors stored for it.

    `grouped_columns` says that the inputs of the gated delta net's output are in the model's order of value heads.
    """

    signs: Mapping[int, torch.Tensor]
    names: frozenset[str]
    grouped_columns: bool


def read_rotation(file: GgufFile) -> Rotation | None:
    """The rotation that a file's metadata states, None where it states none.

    Raises ConversionError, naming the keys, for metadata about a Hadamard transform that is not exactly this one, and for
    signs or names that do not fit the file's tensors.
    """
    keys = [key for key in file.metadata if "hadamard" in key.lower()]
    if not keys:
        return None
    known = {_PREFIX + name for name in (*_EXPECTED, *_ARRAYS, _GROUPED)}
    wrong = [key for key in keys if key not in known]
    wrong += [_PREFIX + n for n, value in _EXPECTED.items() if file.metadata.get(_PREFIX + n) != value]
    wrong += [_PREFIX + n for n in _ARRAYS if not isinstance(file.metadata.get(_PREFIX + n), GgufArray)]
    grouped = file.metadata.get(_PREFIX + _GROUPED, False)
    if wrong or not isinstance(grouped, bool):
        raise ConversionError(
            f"{file.name}: the weights are stored behind a Hadamard transform that this version does not import (metadata "
            f"{listed(wrong or [_PREFIX + _GROUPED])}); expected {_PREFIX}* with {dict(_EXPECTED)} and the arrays "
            f"{', '.join(_ARRAYS)}"
        )
    names = (*file.strings(f"{_PREFIX}weight_names"), *file.strings(f"{_PREFIX}inverse_weight_names"))
    absent = [name for name in names if name not in file.tensors]
    if absent:
        raise ConversionError(f"{file.name}: the rotation is that of tensors that are missing: {listed(absent)}")
    signs = _signs(file)
    widths = {name: file.tensors[name].shape[-1] for name in names}
    without = [name for name, width in widths.items() if width not in signs or len(file.tensors[name].shape) < 2]
    if without:
        raise ConversionError(
            f"{file.name}: no signs of a rotation for the columns of {listed(without)}; there are signs for widths "
            f"{', '.join(map(str, signs))}"
        )
    return Rotation(signs, frozenset(names), grouped)


def _signs(file: GgufFile) -> dict[int, torch.Tensor]:
    widths = [int(width) for width in file.numbers(f"{_PREFIX}sign_widths")]
    values = torch.tensor(file.numbers(f"{_PREFIX}sign_values"), dtype=torch.float32)
    legal = bool((values.abs() == 1).all()) and all(width > 0 and not width % ROTATION_BLOCK for width in widths)
    if not legal or sum(widths) != values.numel() or len(set(widths)) < len(widths):
        raise ConversionError(
            f"{file.name}: {values.numel()} rotation signs for widths {widths}; expected one +1 or -1 for each column of "
            f"different widths that {ROTATION_BLOCK} divides"
        )
    return dict(zip(widths, values.to(torch.bfloat16).split(widths), strict=True))
