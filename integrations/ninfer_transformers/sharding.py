"""Tensor parallelism: PyTorch's engine and Transformers' plan decide who holds what; here a weight is only cut.

A plan gives modules styles. Rows are cut anywhere; columns on whole groups, tiles or blocks. A shard keeps the words of its
rows and columns, and a parameter becomes a DTensor over it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ninfer_torch.errors import LayoutError, NinferError, UnsupportedOperation
from ninfer_torch.tensors import NinferTensor

__all__ = ["ShardPlan", "local_shard"]

_ROWS = ("colwise", "colwise_gather_output", "colwise_rep", "embedding_rowwise")
_COLUMNS = ("rowwise", "rowwise_rep")
_WHOLE = ("replicated_with_grad_allreduce", "sequence_parallel")
"""Styles by the axis of the weight [N, K] that they cut, or none."""


class ShardPlan:
    """What tensor parallelism asks of a model's weights: the style of each module's weight, and the number of ranks."""

    def __init__(self, model: Any, config: Any) -> None:
        from torch import distributed

        self.styles: dict[str, str] = dict(model.tp_plan or {}) | dict(
            config.tp_plan if isinstance(config.tp_plan, dict) else {}
        )
        self.ranks: int = config.tp_size or (distributed.get_world_size() if distributed.is_initialized() else 1)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise a NinferError, naming the parameter, for a weight that cannot be cut as the plan says."""
        for name, tensor in tensors.items():
            style = self._style(name)
            if style is None or style in _WHOLE:
                continue
            packed = isinstance(tensor, NinferTensor)
            if style not in (*_ROWS, *_COLUMNS) or (packed and tensor.dim() != 2):
                raise UnsupportedOperation(
                    f"parameter {name!r} {list(tensor.shape)} is {'quantized' if packed else 'dense'}, and tensor parallelism would "
                    f"cut it by style {style!r}; known are {', '.join((*_ROWS, *_COLUMNS))}. Load this model with "
                    "device_map, or leave the module out of tp_plan"
                )
            if isinstance(tensor, NinferTensor):
                self._check_cut(name, tensor, 0 if style in _ROWS else 1)

    def _check_cut(self, name: str, tensor: NinferTensor, axis: int) -> None:
        extent = tensor.shape[axis]
        what = f"parameter {name!r} {list(tensor.shape)} ({', '.join(tensor.formats)})"
        way_out = "use another number of ranks, or leave the module out of tp_plan"
        if extent % self.ranks:
            axis_name = "rows" if axis == 0 else "columns"
            raise LayoutError(
                f"{what} has {extent} {axis_name}, which {self.ranks} ranks do not share evenly; {way_out}"
            )
        try:
            tensor.narrow(axis, 0, extent // self.ranks)
        except NinferError as error:
            raise LayoutError(f"{what} cannot be cut over {self.ranks} ranks: {error}; {way_out}") from error

    def _style(self, name: str) -> str | None:
        """The style of a parameter: of its own name, or of the module whose weight it is."""
        pattern = re.sub(r"\.\d+(?=\.)", ".*", name)
        return self.styles.get(pattern) or self.styles.get(pattern.rpartition(".")[0])


def local_shard(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part of a whole tensor that this rank's `parameter` holds: all of it where that is no DTensor."""
    if not isinstance(parameter, DTensor):
        return tensor
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    for axis, (length, begin) in enumerate(zip(shape, offset, strict=True)):
        if length != tensor.shape[axis]:
            tensor = tensor.narrow(axis, begin, length)
    return tensor
