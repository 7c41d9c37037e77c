"""`PatchKernel`: the kernel of a convolution that cuts its input into patches.

A patch embedding is a convolution whose stride is its kernel: every patch, flattened, is multiplied by a matrix. Transformers keeps it as
`nn.Conv3d` with a weight [N, channels, time, height, width]; an artifact holds the matrix [N, K], in any format (spec/parameters.md 6).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from ninfer_torch.errors import LayoutError
from ninfer_torch.tensors.base import FUNCTIONS, NinferTensor, mark_parameter, refusal
from ninfer_torch.tensors.composed import ComposedTensor, new_composed
from ninfer_torch.tensors.functions import check_dtype

__all__ = ["PatchKernel", "patch_kernel"]


class PatchKernel(ComposedTensor):
    """A matrix [N, K] in the shape [N, channels, *kernel] that a convolution expects of its weight.

    `F.conv2d` and `F.conv3d` with stride = kernel are one product with the matrix; every other convolution raises.
    """

    weight: NinferTensor

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["weight"], (self.compute_dtype,)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Any], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> PatchKernel:
        return _make(inner["weight"], outer_size, context[0])

    @property
    def way_to_store(self) -> str:
        return "encode its .weight, the matrix [N, K], and bind the parameter to that (spec/parameters.md 6)"

    @property
    def structure(self) -> Hashable:
        return tuple(self.shape), self.weight.structure

    def equal_words(self, other: NinferTensor) -> bool:
        return isinstance(other, PatchKernel) and other.shape == self.shape and self.weight.equal_words(other.weight)

    def over(self, inner: Mapping[str, Any], dtype: torch.dtype) -> PatchKernel:
        return _make(inner["weight"], self.shape, dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.weight.dequantize(dtype).reshape(self.shape)

    def convolve(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The patches of x [B, channels, *extent], each extent a multiple of the kernel's, times the matrix: [B, N, *patches]."""
        count, channels, *kernel = self.shape
        batch, found, *extent = x.shape
        if found != channels or any(size % side for size, side in zip(extent, kernel, strict=True)):
            raise LayoutError(f"an input {list(x.shape)} is not cut into patches of {channels} channels and {kernel}")
        patches = [size // side for size, side in zip(extent, kernel, strict=True)]
        cut = x.reshape(batch, channels, *(n for pair in zip(patches, kernel, strict=True) for n in pair))
        rank = len(kernel)
        outer, inner = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
        flat = cut.permute(0, *outer, 1, *inner).reshape(batch, *patches, self.weight.shape[-1])
        return self.weight.product(flat, bias).movedim(-1, 1).reshape(batch, count, *patches)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refusal("anything but a convolution by patches", (self,), "use its .weight, the matrix [N, K]")

    take_rows = gather_rows = take_columns = with_shape = _refuse
    product = product_transposed = look_up = expert_product = expert_product_transposed = _refuse

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return rebuild_kernel, (self.weight, tuple(self.shape), self.compute_dtype, hasattr(self, "_is_param"))


def patch_kernel(weight: NinferTensor, shape: Sequence[int]) -> PatchKernel:
    """A matrix [N, K] as the weight [N, channels, *kernel] of a convolution. Raises LayoutError unless K fits `shape`."""
    if weight.dim() != 2 or len(shape) < 3 or tuple(weight.shape) != (shape[0], math.prod(shape[1:])):
        raise LayoutError(f"a weight {list(weight.shape)} is no convolution kernel of shape {list(shape)}")
    return _make(weight, shape, weight.compute_dtype)


def _make(weight: NinferTensor, shape: Sequence[int], dtype: torch.dtype) -> PatchKernel:
    return new_composed(PatchKernel, {"weight": weight}, weight.policy, shape, dtype)


def rebuild_kernel(
    weight: NinferTensor, shape: tuple[int, ...], dtype: torch.dtype, is_parameter: bool
) -> NinferTensor:
    """The inverse of pickling, and on torch's list of functions that `weights_only=True` may call."""
    return mark_parameter(_make(weight, shape, dtype), is_parameter)


torch.serialization.add_safe_globals([rebuild_kernel])


def _each_axis(value: int | Sequence[int], rank: int) -> list[int]:
    return [value] * rank if isinstance(value, int) else list(value)


def _convolution(rank: int, name: str) -> Callable[..., torch.Tensor]:
    def convolve(
        input: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        if not isinstance(weight, PatchKernel) or isinstance(input, NinferTensor):
            raise refusal(f"{name} with a quantized weight that is no patch kernel", (input, weight, bias))
        plain = padding == "valid" or (not isinstance(padding, str) and not any(_each_axis(padding, rank)))
        by_patches = plain and _each_axis(stride, rank) == list(weight.shape[2:]) and groups == 1
        if (
            not by_patches
            or weight.dim() != rank + 2
            or input.dim() != rank + 2
            or set(_each_axis(dilation, rank)) != {1}
        ):
            raise refusal(
                f"{name} other than by patches (stride = kernel, no padding, dilation or groups, batched)", (weight,)
            )
        check_dtype(name, input, weight.compute_dtype)
        return weight.convolve(input, bias)

    return convolve


FUNCTIONS[torch.nn.functional.conv2d] = _convolution(2, "conv2d")
FUNCTIONS[torch.nn.functional.conv3d] = _convolution(3, "conv3d")
