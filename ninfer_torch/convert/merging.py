"""Adding a dense update to a quantized weight, which rounds it: only where a method to round with has been named.

Adapter libraries merge with `weight.data += delta`. Inside `merging(method)` that decodes the weight to float32, adds,
and encodes the sum anew; anywhere else it raises.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from ninfer_torch.convert.methods import Method, get_method, quantize
from ninfer_torch.errors import ConversionError, UnsupportedOperation
from ninfer_torch.formats import get_format
from ninfer_torch.tensors import NinferTensor, PackedTensor
from ninfer_torch.tensors.base import FUNCTIONS, refusal

__all__ = ["MERGE_HELP", "assign", "check_mergeable", "merging"]

MERGE_HELP = (
    "merge inside `with ninfer_torch.merging(method):`, which names the method that rounds the sum "
    '("grouped_absmax", "grouped_search", "fp8_row_maxabs" or a function), or call model.dequantize() first, or keep the '
    "adapter beside the weight"
)

_Requantize = Callable[[torch.Tensor, PackedTensor], NinferTensor]


class _Merge(NamedTuple):
    """What `merging` was asked for."""

    method: str | Method | Callable[..., Any]
    format: str | None
    requantize: _Requantize


_ACTIVE: ContextVar[_Merge | None] = ContextVar("ninfer_torch.merging", default=None)


@contextlib.contextmanager
def merging(
    method: str | Method | Callable[..., Any], *, format: str | None = None, **parameters: Any
) -> Iterator[None]:
    """A region in which `weight.data += delta` of a quantized weight encodes the sum by `method`.

        with ninfer_torch.merging("grouped_search", negative_scales=True):
            model = peft_model.merge_and_unload()

    The weight keeps its format, or becomes one of `format`, which must be given where no method writes its own (GGUF
    blocks). `parameters` are the method's. The old words stay what they are for everybody else who holds them. Raises
    ConversionError for an unknown method or format pair before anything is merged, and where the method refuses a sum.
    """
    if isinstance(method, str):
        get_method(method)
    if format is not None:
        format = get_format(format).name

    def requantize(dense: torch.Tensor, weight: PackedTensor) -> NinferTensor:
        rows = dense.reshape(-1, dense.shape[-1])
        packed = quantize(rows, format or weight.format, method, **parameters)
        if not isinstance(packed, NinferTensor):
            raise ConversionError(f"merging into {format} would make the weight dense; call model.dequantize() instead")
        return packed.with_shape(dense.shape).placed(weight.device, weight.compute_dtype).with_policy(weight.policy)

    token = _ACTIVE.set(_Merge(method, format, requantize))
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def check_mergeable(name: str, weight: torch.Tensor) -> None:
    """Raise UnsupportedOperation, naming `name`, where an update cannot be added to this weight here and now."""
    if not isinstance(weight, NinferTensor):
        return
    active = _ACTIVE.get()
    if active is None:
        raise UnsupportedOperation(
            f"an update cannot be merged into {name}, which is quantized ({', '.join(weight.formats)}) and frozen: {MERGE_HELP}"
        )
    if not isinstance(weight, PackedTensor):
        raise UnsupportedOperation(
            f"an update cannot be merged into {name}, a {type(weight).__name__} of {', '.join(weight.formats)}: a sum has one "
            "format. Call model.dequantize() first, or keep the adapter beside the weight"
        )
    method = get_method(active.method) if isinstance(active.method, str) else active.method
    try:
        if isinstance(method, Method):
            method.check(active.format or weight.format, {})
    except ConversionError as error:
        raise UnsupportedOperation(
            f"an update cannot be merged into {name}: {error}. merging(method, format=...) gives the sum another format"
        ) from error


def _add(weight: Any, other: Any, *, alpha: float = 1) -> torch.Tensor:
    active = _ACTIVE.get()
    if not isinstance(weight, NinferTensor) or isinstance(other, NinferTensor):
        raise refusal("add_ of a quantized weight", (weight, other))
    if active is None or not isinstance(weight, PackedTensor):
        raise refusal("add_", (weight,), MERGE_HELP)
    dense = weight.dequantize().add_(other.to(weight.device, torch.float32), alpha=alpha)
    return assign(weight, active.requantize(dense, weight))


def _isfinite(weight: Any) -> torch.Tensor:
    if _ACTIVE.get() is None:
        raise refusal("isfinite", (weight,), "call it on dequantize()")
    return torch.isfinite(weight.dequantize())


def assign(target: NinferTensor, source: Any) -> NinferTensor:
    """Give `target` the words of `source`, another quantized weight of its shape: what `target.data = source` means.

    Planes are replaced, not written to: whoever else holds the old ones keeps them. Raises UnsupportedOperation for a dense
    source, another shape or another device.
    """
    if not isinstance(source, NinferTensor):
        raise refusal(
            f".data = {type(source).__name__}",
            (target,),
            "put a new nn.Parameter into the module, or quantize the values first",
        )
    if source.shape != target.shape or source.device != target.device or source.compute_dtype != target.compute_dtype:
        raise UnsupportedOperation(
            f".data of a quantized weight keeps shape, device and dtype; found {source!r} for {target!r}"
        )
    marks = {name: value for name, value in vars(target).items() if name == "_is_param" or name.startswith("_is_hf")}
    target.__dict__.clear()
    target.__class__ = type(source)
    target.__dict__.update({**vars(source), **marks})
    if "_is_param" not in marks:
        target.__dict__.pop("_is_param", None)
    return target


FUNCTIONS[torch.Tensor.add_] = _add
FUNCTIONS[torch.Tensor.__iadd__] = _add
FUNCTIONS[torch.isfinite] = _isfinite
FUNCTIONS[torch.Tensor.data.__set__] = assign  # type: ignore[attr-defined]
