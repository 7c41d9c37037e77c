"""The one door: the `torch.ops.ninfer` operators, their shapes, gradients and autocast rules.

Schemas, fake implementations and autograd formulas stand here side by side; what computes is in `kernels.fallback` and, per
device, in the folders beside it. Operators are registered through `torch.library.Library`, which costs a third less per call than
the `custom_op` decorator. A weight is frozen: gradients flow to activations and biases only.

Arguments common to all: `planes` are a matrix's planes in layout order, `format` its canonical format name, and `geometry` the
five integers of `layouts.Geometry`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.kernels import cpu, fallback
from ninfer_torch.kernels.triton import cuda_operator

__all__ = ["POLICIES"]

POLICIES = ("A16Only", "AllowA8", "AllowA4")
"""Upper bounds on how coarsely a use may quantize its activations (spec/container.md 7); 16 bits always conform."""

_SCHEMAS = {
    "dequantize": "(Tensor[] planes, str format, SymInt[] geometry, ScalarType out_dtype) -> Tensor",
    "linear": "(Tensor x, Tensor[] planes, str format, SymInt[] geometry, Tensor? bias, str policy) -> Tensor",
    "linear_backward": "(Tensor grad, Tensor[] planes, str format, SymInt[] geometry) -> Tensor",
    "embedding": "(Tensor ids, Tensor[] planes, str format, SymInt[] geometry, ScalarType out_dtype) -> Tensor",
    "expert_linear": "(Tensor x, Tensor[] planes, str format, SymInt[] geometry, Tensor offsets, str policy) -> Tensor",
    "expert_linear_backward": "(Tensor grad, Tensor[] planes, str format, SymInt[] geometry, Tensor offsets) -> Tensor",
}

_library = torch.library.Library("ninfer", "DEF")
for _name, _schema in _SCHEMAS.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, getattr(fallback, _name), "CompositeExplicitAutograd")
    _library.impl(_name, cpu.IMPLEMENTATIONS[_name], "CPU")
    _library.impl(_name, cuda_operator(_name), "CUDA")

Planes = Sequence[torch.Tensor]


def _check_width(name: str, x: torch.Tensor, width: int, what: str) -> None:
    if x.dim() == 0 or x.shape[-1] != width:
        raise UnsupportedOperation(f"ninfer::{name}: input of shape {list(x.shape)} does not end in {what} = {width}")


@torch.library.register_fake("ninfer::dequantize", lib=_library)
def _(planes: Planes, format: str, geometry: Sequence[int], out_dtype: torch.dtype) -> torch.Tensor:
    return planes[0].new_empty((geometry[0], geometry[1]), dtype=out_dtype)


@torch.library.register_fake("ninfer::linear", lib=_library)
def _(x: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], bias: Any, policy: str) -> torch.Tensor:
    _check_width("linear", x, geometry[1], "K")
    return x.new_empty((*x.shape[:-1], geometry[0]))


@torch.library.register_fake("ninfer::linear_backward", lib=_library)
def _(grad: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int]) -> torch.Tensor:
    _check_width("linear_backward", grad, geometry[0], "N")
    return grad.new_empty((*grad.shape[:-1], geometry[1]))


@torch.library.register_fake("ninfer::embedding", lib=_library)
def _(ids: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], out_dtype: torch.dtype) -> torch.Tensor:
    return planes[0].new_empty((*ids.shape, geometry[1]), dtype=out_dtype)


@torch.library.register_fake("ninfer::expert_linear", lib=_library)
def _(
    x: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], offsets: torch.Tensor, policy: str
) -> torch.Tensor:
    _check_width("expert_linear", x, geometry[1], "K")
    return x.new_empty((x.shape[0], geometry[0] // offsets.shape[0]))


@torch.library.register_fake("ninfer::expert_linear_backward", lib=_library)
def _(grad: torch.Tensor, planes: Planes, format: str, geometry: Sequence[int], offsets: torch.Tensor) -> torch.Tensor:
    _check_width("expert_linear_backward", grad, geometry[0] // offsets.shape[0], "N")
    return grad.new_empty((grad.shape[0], geometry[1]))


def _save_weight(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keep the packed weight for the backward pass; `inputs` follow the schema, planes second."""
    _, planes, ctx.format, ctx.geometry, *rest = inputs
    ctx.plane_count = len(planes)
    kept = [extra for extra in rest[:1] if isinstance(extra, torch.Tensor)]
    ctx.save_for_backward(*planes, *kept)


def _planes(ctx: Any) -> list[torch.Tensor]:
    return list(ctx.saved_tensors[: ctx.plane_count])


def _gradients(ctx: Any, grad: torch.Tensor | None, *others: torch.Tensor | None) -> tuple[Any, ...]:
    """One gradient per argument: `grad` for the activations, none for planes, format and geometry, then `others`."""
    return grad, [None] * ctx.plane_count, None, None, *others


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    needs_x, needs_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
    grad_x = torch.ops.ninfer.linear_backward(grad, _planes(ctx), ctx.format, ctx.geometry) if needs_x else None
    grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None
    return _gradients(ctx, grad_x, grad_bias, None)


def _linear_backward_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return _gradients(ctx, torch.ops.ninfer.linear(grad, _planes(ctx), ctx.format, ctx.geometry, None, "A16Only"))


def _expert_linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    offsets = ctx.saved_tensors[-1]
    grad_x = torch.ops.ninfer.expert_linear_backward(grad, _planes(ctx), ctx.format, ctx.geometry, offsets)
    return _gradients(ctx, grad_x, None, None)


def _expert_linear_backward_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    offsets = ctx.saved_tensors[-1]
    out = torch.ops.ninfer.expert_linear(grad, _planes(ctx), ctx.format, ctx.geometry, offsets, "A16Only")
    return _gradients(ctx, out, None)


for _name, _formula in (
    ("linear", _linear_backward),
    ("linear_backward", _linear_backward_backward),
    ("expert_linear", _expert_linear_backward),
    ("expert_linear_backward", _expert_linear_backward_backward),
):
    torch.library.register_autograd(f"ninfer::{_name}", _formula, setup_context=_save_weight, lib=_library)


_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


def _autocast(device: str, key: str) -> None:
    """Under autocast a product runs in the autocast dtype, as `F.linear` does: activations and bias are cast, planes never."""
    exclude = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(value: torch.Tensor | None) -> torch.Tensor | None:
        return value.to(torch.get_autocast_dtype(device)) if value is not None and value.dtype in _CASTABLE else value

    def linear(x: Any, planes: Planes, format: str, geometry: Sequence[int], bias: Any, policy: str) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(exclude):
            return torch.ops.ninfer.linear(cast(x), planes, format, geometry, cast(bias), policy)

    def expert_linear(
        x: Any, planes: Planes, format: str, geometry: Sequence[int], offsets: torch.Tensor, policy: str
    ) -> torch.Tensor:
        with torch._C._ExcludeDispatchKeyGuard(exclude):
            return torch.ops.ninfer.expert_linear(cast(x), planes, format, geometry, offsets, policy)

    _library.impl("linear", linear, key)
    _library.impl("expert_linear", expert_linear, key)


for _device, _key in _AUTOCAST_KEYS.items():
    _autocast(_device, _key)
