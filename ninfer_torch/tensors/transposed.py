"""The transpose of a quantized weight: a view that exists to be multiplied.

`x @ w.T`, and what autograd and functorch make of a linear, arrive as a transpose and a matmul; both meet again here and pass the same
door as `F.linear`.
"""

from __future__ import annotations

from typing import Any

import torch

from ninfer_torch.tensors.base import OPERATORS, NinferTensor, refusal
from ninfer_torch.tensors.functions import check_dtype

aten = torch.ops.aten


class TransposedTensor(torch.Tensor):
    """`weight` with its last two axes exchanged: shape [K, N], or [E, K, N] of a bank."""

    weight: NinferTensor

    @staticmethod
    def __new__(cls, weight: NinferTensor) -> TransposedTensor:  # noqa: PYI034
        shape = (*weight.shape[:-2], weight.shape[-1], weight.shape[-2])
        tensor: TransposedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=weight.dtype, device=weight.device
        )
        tensor.weight = weight
        return tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["weight"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: None, size: Any, stride: Any) -> TransposedTensor:
        return cls(inner["weight"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return NinferTensor.__torch_dispatch__(func, types, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"TransposedTensor({self.weight!r})"


def _swaps_last_axes(weight: torch.Tensor, first: int, second: int) -> bool:
    rank = weight.dim()
    return {first % rank, second % rank} == {rank - 2, rank - 1}


def _transpose(func: Any, weight: Any, first: int = 0, second: int = 1) -> torch.Tensor:
    if not _swaps_last_axes(weight, first, second):
        raise refusal(f"transpose({first}, {second})", (weight,))
    return weight.weight.detach() if isinstance(weight, TransposedTensor) else TransposedTensor(weight)


def _permute(func: Any, weight: Any, dims: list[int]) -> torch.Tensor:
    rank = weight.dim()
    order = [dim % rank for dim in dims]
    if order == list(range(rank)):
        return weight.detach()
    if order != [*range(rank - 2), rank - 1, rank - 2]:
        raise refusal(f"permute({dims})", (weight,))
    return _transpose(func, weight, -2, -1)


def product(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight (+ bias)` for x [M, *] and a weight that is a quantized matrix or the transpose of one."""
    if isinstance(weight, TransposedTensor):
        check_dtype("matmul", x, weight.weight.compute_dtype)
        return weight.weight.product(x, bias)
    if not isinstance(weight, NinferTensor):
        raise refusal("a matmul with the quantized weight on the left", (x, weight), "write it as F.linear(x, w)")
    check_dtype("matmul", x, weight.compute_dtype)
    out = weight.product_transposed(x)
    return out if bias is None else out + bias


def _mm(func: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
    return product(x, weight)


def _addmm(
    func: Any, bias: torch.Tensor, x: torch.Tensor, weight: Any, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if beta != 1 or alpha != 1 or bias.dim() != 1:
        out = product(x, weight)
        return bias * beta + out * alpha
    return product(x, weight, bias)


def _bmm(func: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
    bank, turned = (weight.weight, True) if isinstance(weight, TransposedTensor) else (weight, False)
    matrices = [bank[e] for e in range(bank.shape[0])]
    return torch.stack([product(x[e], m.t() if turned else m) for e, m in enumerate(matrices)])


def _grouped_mm(
    func: Any, x: torch.Tensor, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    bank = weight.weight if isinstance(weight, TransposedTensor) else weight
    if not isinstance(bank, NinferTensor) or offs is None or bias is not None or out_dtype not in (None, x.dtype):
        raise refusal("_grouped_mm other than grouped_mm(x, bank.transpose(-2, -1), offs)", (bank,))
    check_dtype("_grouped_mm", x, bank.compute_dtype)
    return bank.expert_product_transposed(x, offs) if bank is weight else bank.expert_product(x, offs)


OPERATORS.update(
    {
        aten.t.default: _transpose,
        aten.transpose.int: _transpose,
        aten.permute.default: _permute,
        aten.mm.default: _mm,
        aten.addmm.default: _addmm,
        aten.bmm.default: _bmm,
        aten._grouped_mm.default: _grouped_mm,
    }
)
