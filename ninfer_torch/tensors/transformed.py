"""`TransformedInput`: a weight that is stored for transformed inputs.

A rotated or column-permuted matrix multiplies the transformed activations. Every transform is orthogonal and linear,
so the plain weight is its inverse applied to the stored rows; what a layer sees is that plain weight. Source:
spec/container.md 7.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ninfer_torch.errors import FormatError, LayoutError, UnsupportedOperation
from ninfer_torch.kernels.rotation import ROTATION_BLOCK, hadamard
from ninfer_torch.tensors.base import NinferTensor, count_rows, mark_parameter, refusal
from ninfer_torch.tensors.composed import ComposedTensor, new_composed
from ninfer_torch.tensors.direct import as_block
from ninfer_torch.tensors.functions import autocast_dtype, without_autocast
from ninfer_torch.tensors.packed import own_storage

__all__ = ["TRANSFORMS", "InputTransform", "TransformedInput", "transform_input"]

_CHUNK = 1 << 22
"""Elements of a plain weight made at a time."""


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rotate(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    return hadamard(x.to(_wide(x.dtype)) * signs)


def _rotate_back(rows: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    return hadamard(rows) * signs


def _check_signs(signs: torch.Tensor, columns: int) -> None:
    if not signs.is_floating_point() or columns % ROTATION_BLOCK:
        raise LayoutError(
            f"hadamard_signs: expected floating signs and K a multiple of {ROTATION_BLOCK}, "
            f"found {signs.dtype} and K = {columns}"
        )
    wrong = (signs.abs() != 1).nonzero()
    if wrong.numel():
        at = int(wrong[0])
        raise FormatError(f"hadamard_signs: expected +1 or -1, found {signs[at].item()} at {at}")


def _gather(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return x.index_select(-1, columns)


def _scatter(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return rows.index_select(-1, torch.argsort(columns))  # compiled, an index_copy may overwrite the rows it reads


def _check_permutation(columns: torch.Tensor, width: int) -> None:
    if columns.dtype not in (torch.int32, torch.int64):
        raise LayoutError(f"input_columns: expected int32 or int64, found {columns.dtype}")
    if not torch.equal(columns.long().sort().values, torch.arange(width, device=columns.device)):
        raise FormatError(f"input_columns: expected each of 0..{width - 1} once, found another list of columns")


@dataclass(frozen=True)
class InputTransform:
    """What a role of a use does to the inputs of its weight.

    `activations(x, values)` maps inputs [..., K] to what the stored weight multiplies, in x's dtype or wider;
    `rows(w, values)` is the inverse and maps stored rows to plain ones. `check(values, K)` raises for values that are
    no such transform.
    """

    activations: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    check: Callable[[torch.Tensor, int], None]


TRANSFORMS: Mapping[str, InputTransform] = MappingProxyType(
    {
        "hadamard_signs": InputTransform(_rotate, _rotate_back, _check_signs),
        "input_columns": InputTransform(_gather, _scatter, _check_permutation),
    }
)
"""Transforms by the role of the auxiliary tensor that holds their values."""


class TransformedInput(ComposedTensor):
    """A weight [..., N, K] whose stored form `weight` multiplies transformed inputs.

    Attributes:
        weight: the stored weight, a NinferTensor of the same shape.
        vector: the auxiliary tensor [K]: signs or column numbers.
        role: the transform's name in TRANSFORMS.

    Products are computed on activations of float32 where the transform rounds, so that nothing is rounded to 16 bits
    in between. Columns mix, so the last axis is never cut.
    """

    weight: NinferTensor
    vector: torch.Tensor
    role: str

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return list(self.members), (self.role, self.compute_dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Any], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> TransformedInput:
        role, dtype = context
        return _make(inner["weight"], role, inner["vector"], outer_size, dtype)

    @property
    def composition(self) -> str:
        return self.role

    @property
    def way_to_store(self) -> str:
        return (
            "encode its .weight and its .vector as objects of their own, and bind the vector as "
            f"{self.role} of the weight's use (spec/container.md 7)"
        )

    @property
    def structure(self) -> Hashable:
        return self.role, self.weight.structure

    def equal_words(self, other: NinferTensor) -> bool:
        if not isinstance(other, TransformedInput) or other.role != self.role:
            return False
        return torch.equal(self.vector, other.vector) and self.weight.equal_words(other.weight)

    def over(self, inner: Mapping[str, Any], dtype: torch.dtype) -> TransformedInput:
        return _make(inner["weight"], self.role, inner["vector"], self.shape, dtype)

    def _behind(self, weight: NinferTensor, shape: Sequence[int]) -> TransformedInput:
        """Other rows behind the same transform."""
        return _make(weight, self.role, self.vector, shape, self.compute_dtype)

    def take_rows(self, begin: int, end: int, shape: Sequence[int]) -> TransformedInput:
        return self._behind(self.weight.take_rows(begin, end, shape), shape)

    def gather_rows(self, index: torch.Tensor, shape: Sequence[int]) -> TransformedInput:
        return self._behind(self.weight.gather_rows(index, shape), shape)

    def take_columns(self, begin: int, end: int, shape: Sequence[int]) -> TransformedInput:
        raise refusal(f"columns [{begin}, {end}) behind {self.role}", (self,), "call dequantize() and slice the values")

    def with_shape(self, shape: Sequence[int]) -> TransformedInput:
        return self._behind(self.weight.with_shape(shape), shape)

    def _inputs(self, x: torch.Tensor) -> torch.Tensor:
        return TRANSFORMS[self.role].activations(x, self.vector)

    def _plain(self, rows: torch.Tensor) -> torch.Tensor:
        return TRANSFORMS[self.role].rows(rows, self.vector)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The plain dense weight. A rotation is summed in float32: its rows are within 1e-6 of exact, relative to their norm."""
        rows, columns = count_rows(self.shape), self.shape[-1]
        out = torch.empty((rows, columns), dtype=dtype, device=self.device)
        step = max(1, _CHUNK // columns)
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            stored = self.weight.take_rows(begin, end, (end - begin, columns))
            out[begin:end] = self._plain(stored.dequantize(_wide(dtype)))
        return out.reshape(self.shape)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = x.to(autocast_dtype(x))
        with without_autocast(x):
            inputs = self._inputs(x)
            out = self.weight.product(inputs, None if bias is None else bias.to(inputs.dtype))
        return out.to(x.dtype)

    def product_transposed(self, x: torch.Tensor) -> torch.Tensor:
        return self._plain(self.weight.product_transposed(x.to(_wide(x.dtype)))).to(x.dtype)

    def look_up(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._plain(self.weight.look_up(ids, _wide(dtype))).to(dtype)

    def expert_product(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        x = x.to(autocast_dtype(x))
        with without_autocast(x):
            out = self.weight.expert_product(self._inputs(x), offsets)
        return out.to(x.dtype)

    def expert_product_transposed(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self._plain(self.weight.expert_product_transposed(x.to(_wide(x.dtype)), offsets)).to(x.dtype)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        is_parameter = hasattr(self, "_is_param")
        return rebuild_transformed, (self.weight, self.role, own_storage(self.vector), self.compute_dtype, is_parameter)


def transform_input(weight: torch.Tensor, role: str, vector: torch.Tensor) -> TransformedInput:
    """The plain weight [..., N, K] that `weight` stands for when stored for inputs transformed by `role` with `vector` [K].

    `hadamard_signs`: floating signs s of +-1, K a multiple of 1024; the plain rows are s * (H w) per 1024 columns.
    `input_columns`: a permutation p as int32 or int64; stored column c is plain column p[c]. `weight` may be a
    quantized tensor or a frozen bf16 or fp32 one. The values of `vector` are checked unless it is on meta. Raises
    LayoutError for a wrong shape or dtype, FormatError for wrong values, and UnsupportedOperation for an unknown role
    or a second transform, since no order of two is defined.
    """
    if role not in TRANSFORMS:
        raise UnsupportedOperation(f"unknown input transform {role!r}; known: {', '.join(TRANSFORMS)}")
    if isinstance(weight, TransformedInput):
        raise UnsupportedOperation(
            f"{role} over a weight behind {weight.role}: spec/container.md 7 gives no order of two transforms"
        )
    if weight.dim() < 2 or tuple(vector.shape) != tuple(weight.shape[-1:]):
        raise LayoutError(
            f"{role} of a weight {list(weight.shape)}: expected one value per column, found shape {list(vector.shape)}"
        )
    if vector.device != weight.device:
        raise UnsupportedOperation(f"{role} on {vector.device} of a weight on {weight.device}; move one of them")
    if vector.device.type != "meta":
        TRANSFORMS[role].check(vector, vector.numel())
    dtype = weight.compute_dtype if isinstance(weight, NinferTensor) else weight.dtype
    return _make(as_block(weight, dtype), role, vector.detach(), weight.shape, dtype)


def _make(
    weight: NinferTensor, role: str, vector: torch.Tensor, shape: Sequence[int], dtype: torch.dtype
) -> TransformedInput:
    inner = {"weight": weight, "vector": vector}
    tensor: TransformedInput = new_composed(TransformedInput, inner, weight.policy, shape, dtype)
    tensor.role = role
    return tensor


def rebuild_transformed(
    weight: NinferTensor, role: str, vector: torch.Tensor, dtype: torch.dtype, is_parameter: bool
) -> NinferTensor:
    """The inverse of pickling, and on torch's list of functions that `weights_only=True` may call."""
    return mark_parameter(_make(weight, role, vector, weight.shape, dtype), is_parameter)


torch.serialization.add_safe_globals([rebuild_transformed])
