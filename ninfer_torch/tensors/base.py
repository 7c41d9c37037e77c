"""`NinferTensor`: words that PyTorch takes for a floating-point tensor.

The tensor is a wrapper: its inner tensors are planes of a storage layout as they lie in the file, or other
NinferTensors, and its own dtype is the one a layer computes in. Below it stand `PackedTensor`, one matrix in one
format (`tensors.packed`), and weights that are composed of others: `StackedRows` and `TransformedInput`. What PyTorch
may do with one stands in two tables: FUNCTIONS, caught before autograd takes a call apart (`tensors.functions`), and
OPERATORS, aten operators (`tensors.operators`). Anything else raises; nothing becomes dense unless asked by name.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import torch

from ninfer_torch.errors import NinferError, UnsupportedOperation
from ninfer_torch.tensors.staged import move
from ninfer_torch.versions import __version__

__all__ = ["FUNCTIONS", "OPERATORS", "NinferTensor", "mark_parameter", "new_wrapper", "refusal"]

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
OPERATORS: dict[Any, Callable[..., Any]] = {}


class NinferTensor(torch.Tensor):
    """A quantized matrix [N, K], or a bank of them with leading axes [..., N, K].

    Attributes:
        compute_dtype: the tensor's dtype as a plain attribute, for the hot path.
        policy: how coarsely the use this tensor was bound for may quantize activations, one of `kernels.ops.POLICIES`.

    `quantize`, `decode`, an artifact, `wrap_planes`, `stack_rows` or `transform_input` make one;
    `NinferTensor(tensor)` of an existing one shares its planes. In the methods below, rows are counted over all
    leading axes.
    """

    compute_dtype: torch.dtype
    policy: str

    @staticmethod
    def __new__(cls, data: NinferTensor, requires_grad: bool = False, **_: Any) -> NinferTensor:  # noqa: PYI034
        """A tensor over the planes of `data`. Hosts rebuild parameters as `type(p)(value, requires_grad=...)`."""
        if not isinstance(data, NinferTensor):
            raise UnsupportedOperation(
                f"{cls.__name__}(...) takes a NinferTensor, found {type(data).__name__}; quantize(w, format) makes one of values"
            )
        return data.detach().requires_grad_(requires_grad)  # type: ignore[return-value]

    def _stable_hash_for_caching(self) -> str:
        """What compiled code depends on, for torch's on-disk compile cache: it is looked up before the handlers here
        run.
        """
        planes = [
            (plane.dtype, tuple(plane.shape), plane.stride(), str(plane.device)) for plane in self.planes.values()
        ]
        described = repr((__version__, type(self).__name__, self.structure, self.compute_dtype, self.policy, planes))
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

    # What the words are.

    @property
    def planes(self) -> dict[str, torch.Tensor]:
        """Every stored tensor by name, in a fixed order; `a.b` is plane b of the inner tensor a."""
        raise NotImplementedError(f"{type(self).__name__}.planes")

    @property
    def formats(self) -> tuple[str, ...]:
        """Canonical names of the numeric formats found inside, each once, in order of appearance."""
        raise NotImplementedError(f"{type(self).__name__}.formats")

    @property
    def structure(self) -> Hashable:
        """All that is fixed about the tensor but its words, device, dtype and policy: what `copy_` wants equal on
        both sides.
        """
        raise NotImplementedError(f"{type(self).__name__}.structure")

    def equal_words(self, other: NinferTensor) -> bool:
        """Whether `other` holds the same rows in the same formats and words."""
        raise NotImplementedError(f"{type(self).__name__}.equal_words")

    # Other tensors over the same words.

    def map_planes(
        self,
        apply: Callable[[torch.Tensor], torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        policy: str | None = None,
    ) -> NinferTensor:
        """The same structure over `apply` of every plane, with another compute dtype or policy where one is given."""
        raise NotImplementedError(f"{type(self).__name__}.map_planes")

    def take_rows(self, begin: int, end: int, shape: Sequence[int]) -> NinferTensor:
        """Rows [begin, end) as a tensor of `shape`, without a copy."""
        raise NotImplementedError(f"{type(self).__name__}.take_rows")

    def gather_rows(self, index: torch.Tensor, shape: Sequence[int]) -> NinferTensor:
        """Rows `index` (int64 [n], inside the matrix) as a tensor of `shape`, still packed, as new planes."""
        raise NotImplementedError(f"{type(self).__name__}.gather_rows")

    def take_columns(self, begin: int, end: int, shape: Sequence[int]) -> NinferTensor:
        """Columns [begin, end), repacked; LayoutError unless the cut falls on whole groups."""
        raise NotImplementedError(f"{type(self).__name__}.take_columns")

    def with_shape(self, shape: Sequence[int]) -> NinferTensor:
        """The same rows under other leading axes."""
        raise NotImplementedError(f"{type(self).__name__}.with_shape")

    def with_policy(self, policy: str) -> NinferTensor:
        """The same words under another activation policy; planes are shared."""
        return self.map_planes(lambda plane: plane, policy=policy)

    def placed(self, device: Any, dtype: torch.dtype) -> NinferTensor:
        """The same words on `device`, computing in `dtype`; planes that are there already are shared, unread."""
        return self.map_planes(lambda plane: move(plane, device), dtype=dtype)

    # Values and products. Activations of any floating dtype: the door has checked it against the compute dtype.

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The plain dense weight: exact in float32, rounded once to a narrower `dtype`."""
        raise NotImplementedError(f"{type(self).__name__}.dequantize")

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`x @ W.T (+ bias)` for x [..., K]: [..., N] in x's dtype."""
        raise NotImplementedError(f"{type(self).__name__}.product")

    def product_transposed(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ W` for x [..., N]: [..., K] in x's dtype."""
        raise NotImplementedError(f"{type(self).__name__}.product_transposed")

    def look_up(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows `ids` in `dtype`, [*ids.shape, K]; IndexError for an id outside the matrix."""
        raise NotImplementedError(f"{type(self).__name__}.look_up")

    def expert_product(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """`x[t] @ W[e].T` of a bank [E, N, K] for tokens x [T, K] sorted by expert: [T, N] in x's dtype.

        `offsets` int32 [E] are the cumulative ends of the experts' token ranges; tokens after the last are zero.
        Where no kernel knows the bank's structure it is multiplied expert by expert, which reads the offsets on the
        host.
        """
        return self._each_expert(x, offsets, self.shape[-2], lambda matrix, tokens: matrix.product(tokens))

    def expert_product_transposed(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """`x[t] @ W[e]`: the gradient of `expert_product` in its activations, [T, K]."""
        return self._each_expert(x, offsets, self.shape[-1], lambda matrix, tokens: matrix.product_transposed(tokens))

    def _each_expert(
        self,
        x: torch.Tensor,
        offsets: torch.Tensor,
        width: int,
        product: Callable[[NinferTensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        rows, begin, products = self.shape[-2], 0, []
        for expert, end in enumerate(offsets.tolist()):
            if end > begin:
                matrix = self.take_rows(expert * rows, (expert + 1) * rows, self.shape[-2:])
                products.append(product(matrix, x[begin:end]))
            begin = max(begin, end)
        return torch.cat([*products, x.new_zeros((x.shape[0] - begin, width))])

    # What hosts ask of any tensor.

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Packed bytes of the planes. A row view counts planes that it shares with its parent whole."""
        return sum(plane.nbytes for plane in self.planes.values())

    @property
    def bits_per_weight(self) -> float:
        """Packed bits per logical element."""
        return 8 * self.element_size()

    def element_size(self) -> float:  # type: ignore[override]
        """Packed bytes per logical element, so that `numel() * element_size()` is what the tensor occupies."""
        return self.nbytes / max(self.numel(), 1)

    def data_ptr(self) -> int:
        """Address of the first plane: hosts tell tied weights apart by it."""
        return next(iter(self.planes.values())).data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> NinferTensor:
        if id(self) not in memo:
            memo[id(self)] = mark_parameter(self.clone(), hasattr(self, "_is_param"))  # type: ignore[arg-type]
        return memo[id(self)]

    def __copy__(self) -> NinferTensor:
        return mark_parameter(self.detach(), hasattr(self, "_is_param"))  # type: ignore[arg-type]

    def requires_grad_(self, requires_grad: bool = True) -> NinferTensor:
        if requires_grad:
            raise UnsupportedOperation(
                "a quantized weight is frozen and cannot require gradients: use nn.Parameter(w, requires_grad=False), and train "
                "an adapter beside it"
            )
        return self

    def share_memory_(self) -> NoReturn:
        raise refusal("share_memory_", (self,), "forked processes share planes that are mapped from a file as they are")

    def storage(self) -> NoReturn:
        # Not an UnsupportedOperation: safetensors takes a NotImplementedError for "no storage" and writes what lies behind data_ptr.
        raise NinferError(
            f"a quantized weight {list(self.formats)} has no storage of its own to share or to write as dense safetensors; "
            "ninfer_torch.save(model, path) writes an artifact, torch.save keeps the words, dequantize() gives values"
        )

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise refusal(
            "numpy",
            (self,),
            "call dequantize().numpy() for values, planes[name].numpy() for words; instead of accelerate's offload to a disk, "
            "load the .ninfer file with a device_map: what that puts on 'disk' stays in the mapped file",
        )

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refusal("__dlpack__", (self,), "export the planes one by one, or dequantize() first")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise refusal("__array__", (self,), "call dequantize().numpy() for values")


def refusal(
    operation: str, args: Any, way_out: str = "call dequantize() on it for a dense copy"
) -> UnsupportedOperation:
    """The error for an operation that packed weights do not define."""
    formats = sorted({name for value in args if isinstance(value, NinferTensor) for name in value.formats})
    return UnsupportedOperation(f"{operation} is not defined for a quantized weight {formats}; {way_out}")


def new_wrapper(cls: type[Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
    """An empty wrapper tensor of class `cls`. Raises UnsupportedOperation for a compute dtype that is not floating."""
    if not dtype.is_floating_point:
        raise UnsupportedOperation(
            f"a quantized weight computes in a floating dtype, found {dtype}; its codes stay packed"
        )
    with torch.inference_mode(False):  # a wrapper made in inference mode could not be the view of an ordinary one
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
    tensor.compute_dtype = dtype
    return tensor


def mark_parameter(tensor: NinferTensor, is_parameter: bool) -> NinferTensor:
    """Set torch's mark of a Parameter that wraps a custom tensor."""
    if is_parameter:
        tensor._is_param = True
    return tensor


def count_rows(shape: Sequence[int]) -> int:
    """Rows of a tensor [..., N, K], over all leading axes."""
    return math.prod(shape[:-1])
