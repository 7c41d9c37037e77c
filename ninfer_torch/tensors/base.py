"""`NinferTensor`: a matrix of packed words that PyTorch takes for a floating-point tensor.

The tensor is a wrapper: its inner tensors are the planes of a storage layout, as they lie in the file, and its own dtype is the one a
layer computes in. What it can do stands in two tables: FUNCTIONS, caught before autograd takes a call apart (`tensors.functions`), and
OPERATORS, aten operators (`tensors.operators`). Anything else raises; nothing becomes dense unless asked by name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ninfer_torch.errors import LayoutError, UnsupportedOperation
from ninfer_torch.formats import get_format
from ninfer_torch.kernels.ops import POLICIES
from ninfer_torch.layouts import Geometry, layout_of, plane_names

__all__ = ["FAMILIES", "FUNCTIONS", "OPERATORS", "NinferTensor", "make_tensor", "refusal"]

FAMILIES: dict[str, type[NinferTensor]] = {}
"""Tensor class by format family; each family file adds its own."""

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
OPERATORS: dict[Any, Callable[..., Any]] = {}


class NinferTensor(torch.Tensor):
    """A quantized matrix [N, K], or a bank of them with leading axes [..., N, K], held as packed planes.

    Attributes:
        format: canonical name of the numeric format.
        geometry: where the matrix lies in its parent object (`layouts.Geometry`); leading axes are counted as rows.
        policy: how coarsely the use this tensor was bound for may quantize activations, one of `kernels.ops.POLICIES`.

    Every plane is an attribute under its own name too (`codes`, `scales`, ...). `quantize`, `decode`, an artifact or
    `wrap_planes` make one; `NinferTensor(tensor)` of an existing one shares its planes.
    """

    format: str
    geometry: Geometry
    policy: str
    call: tuple[
        list[torch.Tensor], str, Geometry, str, torch.dtype
    ]  # what an operator needs, read as one plain attribute

    @staticmethod
    def __new__(cls, data: NinferTensor, requires_grad: bool = False, **_: Any) -> NinferTensor:  # noqa: PYI034
        """A tensor over the planes of `data`. Hosts rebuild parameters as `type(p)(value, requires_grad=...)`."""
        if not isinstance(data, NinferTensor):
            raise UnsupportedOperation(
                f"{cls.__name__}(...) takes a NinferTensor, found {type(data).__name__}; quantize(w, format) makes one of values"
            )
        return data.detach().requires_grad_(requires_grad)  # type: ignore[return-value]

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        _, format, (_, _, *place), policy, dtype = self.call
        return list(plane_names(format)), (format, *place, policy, dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: tuple[Any, ...], outer_size: Any, outer_stride: Any
    ) -> NinferTensor:
        format, row_begin, parent_rows, divisors, policy, dtype = context
        geometry = Geometry(math.prod(outer_size[:-1]), outer_size[-1], row_begin, parent_rows, divisors)
        return make_tensor(format, [inner[name] for name in plane_names(format)], geometry, outer_size, dtype, policy)

    def _stable_hash_for_caching(self) -> str:
        """What compiled code depends on, for torch's on-disk compile cache."""
        planes = [(plane.dtype, tuple(plane.shape), plane.stride(), str(plane.device)) for plane in self.call[0]]
        described = repr((type(self).__name__, *self.__tensor_flatten__(), tuple(self.shape), planes))
        return hashlib.sha256(described.encode()).hexdigest()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = FUNCTIONS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handler = OPERATORS.get(func)
        if handler is not None:
            return handler(func, *args, **(kwargs or {}))
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            return func.decompose(*args, **(kwargs or {}))  # inference mode delivers composites whole
        raise refusal(str(func), args)

    @property
    def planes(self) -> dict[str, torch.Tensor]:
        """The inner tensors by plane name, in layout order."""
        return dict(zip(plane_names(self.format), self.call[0], strict=True))

    @property
    def storage_layout(self) -> str:
        """Canonical name of the storage layout."""
        return layout_of(self.format).name

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Packed bytes of the planes. A row view counts planes that it shares with its parent whole."""
        return sum(plane.nbytes for plane in self.call[0])

    @property
    def bits_per_weight(self) -> float:
        """Packed bits per logical element."""
        return 8 * self.element_size()

    def element_size(self) -> float:  # type: ignore[override]
        """Packed bytes per logical element, so that `numel() * element_size()` is what the tensor occupies."""
        return self.nbytes / max(self.numel(), 1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The plain dense weight: exact in float32, rounded once to a narrower `dtype`."""
        planes, format, geometry, _, _ = self.call
        return torch.ops.ninfer.dequantize(planes, format, geometry, dtype).reshape(self.shape)

    def with_policy(self, policy: str) -> NinferTensor:
        """The same words under another activation policy; planes are shared."""
        planes, format, geometry, _, dtype = self.call
        return make_tensor(format, planes, geometry, self.shape, dtype, policy)

    def cut_columns(self, begin: int, end: int) -> list[torch.Tensor]:
        """Planes of columns [begin, end), repacked as a layout of their own; LayoutError unless the cut falls on whole groups."""
        raise NotImplementedError(f"{type(self).__name__}.cut_columns")

    def check_cut(self, begin: int, end: int, step: int) -> None:
        """Raise LayoutError unless columns [begin, end) are whole groups of `step`; the matrix's own end is always whole."""
        columns = self.geometry.columns
        if begin % step or (end % step and end != columns):
            raise LayoutError(
                f"columns [{begin}, {end}) of a {self.format} weight of K = {columns} are not whole groups of {step}; "
                "call dequantize() and slice the values"
            )

    def data_ptr(self) -> int:
        """Address of the first plane: hosts tell tied weights apart by it."""
        return self.call[0][0].data_ptr()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        rows, begin, parent_rows = self.geometry.rows, self.geometry.row_begin, self.geometry.parent_rows
        view = "" if rows == parent_rows else f", rows {begin}..{begin + rows} of {parent_rows}"
        return (
            f"{type(self).__name__}(format={self.format}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"bits_per_weight={self.bits_per_weight:.4g}{view})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NinferTensor:
        if id(self) not in memo:
            memo[id(self)] = _marked(self.clone(), self)  # type: ignore[arg-type]
        return memo[id(self)]

    def __copy__(self) -> NinferTensor:
        return _marked(self.detach(), self)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        planes, format, geometry, policy, dtype = self.call
        planes = [_own_storage(plane) for plane in planes]
        return rebuild, (format, planes, tuple(geometry), tuple(self.shape), dtype, policy, hasattr(self, "_is_param"))

    def requires_grad_(self, requires_grad: bool = True) -> NinferTensor:
        if requires_grad:
            raise UnsupportedOperation(
                "a quantized weight is frozen and cannot require gradients: use nn.Parameter(w, requires_grad=False), and train "
                "an adapter beside it"
            )
        return self

    def share_memory_(self) -> NoReturn:
        raise refusal("share_memory_", (self,), "forked processes share planes that are mapped from a file as they are")

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise refusal("numpy", (self,), "call dequantize().numpy() for values, planes[name].numpy() for words")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refusal("__dlpack__", (self,), "export the planes one by one, or dequantize() first")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refusal("__array__", (self,), "call dequantize().numpy() for values")


def refusal(
    operation: str, args: Any, way_out: str = "call dequantize() on it for a dense copy"
) -> UnsupportedOperation:
    """The error for an operation that packed weights do not define."""
    formats = sorted({value.format for value in args if isinstance(value, NinferTensor)})
    return UnsupportedOperation(f"{operation} is not defined for a quantized weight {formats}; {way_out}")


def make_tensor(
    format: str,
    planes: Sequence[torch.Tensor],
    geometry: Geometry,
    shape: Sequence[int],
    dtype: torch.dtype,
    policy: str,
) -> NinferTensor:
    """Wrap planes that fit `format` and `geometry` as a tensor of logical `shape` and compute dtype `dtype`.

    The planes are neither read nor copied. Raises UnsupportedOperation for a `dtype` that is not floating or an unknown policy.
    """
    if not dtype.is_floating_point:
        raise UnsupportedOperation(
            f"a quantized weight computes in a floating dtype, found {dtype}; its codes stay packed"
        )
    if policy not in POLICIES:
        raise UnsupportedOperation(f"unknown activation policy {policy!r}; known: {', '.join(POLICIES)}")
    cls = FAMILIES[get_format(format).family]
    with torch.inference_mode(False):  # a wrapper made in inference mode could not be the view of an ordinary one
        tensor: NinferTensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=planes[0].device)
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
    if is_parameter:
        tensor._is_param = True
    return tensor


torch.serialization.add_safe_globals([rebuild])


def _marked(copy: NinferTensor, original: NinferTensor) -> NinferTensor:
    """Carry over torch's mark of a Parameter that wraps a custom tensor."""
    if hasattr(original, "_is_param"):
        copy._is_param = True
    return copy


def _own_storage(plane: torch.Tensor) -> torch.Tensor:
    """The plane where it fills its storage, else a copy: pickling a view would write the storage whole."""
    return plane if plane.untyped_storage().nbytes() == plane.nbytes else plane.clone()
