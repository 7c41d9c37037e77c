"""`PackedTensor`: one matrix in one numeric format, held as the planes of its storage layout."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ninfer_torch.errors import LayoutError, UnsupportedOperation
from ninfer_torch.formats import get_format
from ninfer_torch.kernels.ops import POLICIES
from ninfer_torch.layouts import Geometry, gather_rows, join_rows, layout_of, plane_names, slice_rows
from ninfer_torch.tensors.base import NinferTensor, count_rows, mark_parameter, new_wrapper

__all__ = ["FAMILIES", "PackedTensor", "make_tensor", "own_storage"]

FAMILIES: dict[str, type[PackedTensor]] = {}
"""Tensor class by format family; each family file adds its own."""


_BelowAutograd = torch._C._AutoDispatchBelowAutograd


def _nothing_to_record() -> bool:
    """Whether an eager call may pass autograd by, which costs 6 microseconds even where gradients are switched off."""
    return not (torch.is_grad_enabled() or torch.is_inference_mode_enabled() or torch.compiler.is_compiling())


class PackedTensor(NinferTensor):
    """A matrix, or a bank of them, of one format.

    Attributes:
        format: canonical name of the numeric format.
        geometry: where the matrix lies in its parent object (`layouts.Geometry`); leading axes are counted as rows.
        call: what an operator needs, read as one plain attribute: planes, format, geometry, policy and compute dtype.

    Every plane is an attribute under its own name too (`codes`, `scales`, ...).
    """

    format: str
    geometry: Geometry
    call: tuple[list[torch.Tensor], str, Geometry, str, torch.dtype]

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        _, format, (_, _, *place), policy, dtype = self.call
        return list(plane_names(format)), (format, *place, policy, dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> PackedTensor:
        format, row_begin, parent_rows, divisors, policy, dtype = context
        geometry = Geometry(count_rows(outer_size), outer_size[-1], row_begin, parent_rows, divisors)
        return make_tensor(format, [inner[name] for name in plane_names(format)], geometry, outer_size, dtype, policy)

    @property
    def planes(self) -> dict[str, torch.Tensor]:
        """The inner tensors by plane name, in layout order."""
        return dict(zip(plane_names(self.format), self.call[0], strict=True))

    @property
    def formats(self) -> tuple[str, ...]:
        return (self.format,)

    @property
    def storage_layout(self) -> str:
        """Canonical name of the storage layout."""
        return layout_of(self.format).name

    @property
    def structure(self) -> Hashable:
        return self.format, self.geometry, tuple(self.shape)

    def equal_words(self, other: NinferTensor) -> bool:
        if not isinstance(other, PackedTensor) or other.format != self.format or other.shape != self.shape:
            return False
        mine, theirs = (join_rows(self.format, [(weight.call[0], weight.geometry)])[0] for weight in (self, other))
        return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(mine, theirs, strict=True))

    def map_planes(
        self,
        apply: Callable[[torch.Tensor], torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        policy: str | None = None,
    ) -> PackedTensor:
        planes, format, geometry, old_policy, old_dtype = self.call
        mapped = [apply(plane) for plane in planes]
        return make_tensor(format, mapped, geometry, self.shape, dtype or old_dtype, policy or old_policy)

    def over(self, planes: Sequence[torch.Tensor], geometry: Geometry, shape: Sequence[int]) -> PackedTensor:
        """A tensor of the same format, policy and compute dtype over other planes."""
        _, format, _, policy, dtype = self.call
        return make_tensor(format, planes, geometry, shape, dtype, policy)

    def take_rows(self, begin: int, end: int, shape: Sequence[int]) -> PackedTensor:
        planes, format, geometry, _, _ = self.call
        return self.over(*slice_rows(format, planes, geometry, begin, end), shape)

    def gather_rows(self, index: torch.Tensor, shape: Sequence[int]) -> PackedTensor:
        planes, format, geometry, _, _ = self.call
        return self.over(*gather_rows(format, planes, geometry, index), shape)

    def take_columns(self, begin: int, end: int, shape: Sequence[int]) -> PackedTensor:
        return self.over(self.cut_columns(begin, end), self.geometry._replace(columns=end - begin), shape)

    def with_shape(self, shape: Sequence[int]) -> PackedTensor:
        planes, _, geometry, _, _ = self.call
        return self.over(planes, geometry, shape)

    def cut_columns(self, begin: int, end: int) -> list[torch.Tensor]:
        """Planes of columns [begin, end), repacked as a layout of their own; LayoutError unless the cut falls on
        whole groups.
        """
        raise NotImplementedError(f"{type(self).__name__}.cut_columns")

    def check_cut(self, begin: int, end: int, step: int) -> None:
        """Raise LayoutError unless columns [begin, end) are whole groups of `step`; the matrix's own end is always
        whole.
        """
        columns = self.geometry.columns
        if begin % step or (end % step and end != columns):
            raise LayoutError(
                f"columns [{begin}, {end}) of a {self.format} weight of K = {columns} are not whole groups of {step}; "
                "call dequantize() and slice the values"
            )

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        planes, format, geometry, _, _ = self.call
        return torch.ops.ninfer.dequantize(planes, format, geometry, dtype).reshape(self.shape)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        planes, format, geometry, policy, _ = self.call
        if _nothing_to_record():
            with _BelowAutograd():
                return torch.ops.ninfer.linear(x, planes, format, geometry, bias, policy)
        return torch.ops.ninfer.linear(x, planes, format, geometry, bias, policy)

    def product_transposed(self, x: torch.Tensor) -> torch.Tensor:
        planes, format, geometry, _, _ = self.call
        return torch.ops.ninfer.linear_backward(x, planes, format, geometry)

    def look_up(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        planes, format, geometry, _, _ = self.call
        return torch.ops.ninfer.embedding(ids, planes, format, geometry, dtype)

    def expert_product(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        planes, format, geometry, policy, _ = self.call
        return torch.ops.ninfer.expert_linear(x, planes, format, geometry, offsets, policy)

    def expert_product_transposed(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        planes, format, geometry, _, _ = self.call
        return torch.ops.ninfer.expert_linear_backward(x, planes, format, geometry, offsets)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        rows, begin, parent_rows = self.geometry.rows, self.geometry.row_begin, self.geometry.parent_rows
        view = "" if rows == parent_rows else f", rows {begin}..{begin + rows} of {parent_rows}"
        return (
            f"{type(self).__name__}(format={self.format}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"bits_per_weight={self.bits_per_weight:.4g}{view})"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        planes, format, geometry, policy, dtype = self.call
        planes = [own_storage(plane) for plane in planes]
        return rebuild, (format, planes, tuple(geometry), tuple(self.shape), dtype, policy, hasattr(self, "_is_param"))


def make_tensor(
    format: str,
    planes: Sequence[torch.Tensor],
    geometry: Geometry,
    shape: Sequence[int],
    dtype: torch.dtype,
    policy: str,
) -> PackedTensor:
    """Wrap planes that fit `format` and `geometry` as a tensor of logical `shape` and compute dtype `dtype`.

    The planes are neither read nor copied. Raises UnsupportedOperation for a `dtype` that is not floating or an
    unknown policy.
    """
    if policy not in POLICIES:
        raise UnsupportedOperation(f"unknown activation policy {policy!r}; known: {', '.join(POLICIES)}")
    tensor: PackedTensor = new_wrapper(FAMILIES[get_format(format).family], shape, dtype, planes[0].device)
    for name, plane in zip(plane_names(format), planes, strict=True):
        setattr(tensor, name, plane)
    tensor.format, tensor.geometry, tensor.policy = format, geometry, policy
    tensor.call = (list(planes), format, geometry, policy, dtype)
    return tensor


def rebuild(
    format: str,
    planes: Sequence[torch.Tensor],
    geometry: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    policy: str,
    is_parameter: bool,
) -> NinferTensor:
    """The inverse of pickling, and on torch's list of functions that `weights_only=True` may call."""
    tensor = make_tensor(get_format(format).name, planes, Geometry(*geometry), shape, dtype, policy)
    return mark_parameter(tensor, is_parameter)


torch.serialization.add_safe_globals([rebuild])


def own_storage(plane: torch.Tensor) -> torch.Tensor:
    """The plane where it fills its storage, else a copy: pickling a view would write the storage whole."""
    return plane if plane.untyped_storage().nbytes() == plane.nbytes else plane.clone()
