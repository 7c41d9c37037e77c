"""Between an object's bytes and a tensor: `wrap_planes`, `decode` and `encode`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ninfer_torch.errors import ConversionError, LayoutError, UnsupportedOperation
from ninfer_torch.formats import FORMATS, BlockFloatFormat, DirectFormat, Format, get_format
from ninfer_torch.kernels.packing import join_planes, pack_codes, unpack_codes
from ninfer_torch.layouts import Geometry, Plane, planes_of, split_planes
from ninfer_torch.tensors.composed import ComposedTensor
from ninfer_torch.tensors.packed import PackedTensor, make_tensor

__all__ = ["decode", "encode", "wrap_planes"]

_DIRECT_OF = {record.dtype: name for name, record in FORMATS.items() if isinstance(record, DirectFormat)}


def wrap_planes(
    format: str | Format,
    shape: Sequence[int],
    planes: Sequence[torch.Tensor],
    *,
    divisors: int = 1,
    dtype: torch.dtype = torch.float32,
    policy: str = "A16Only",
) -> torch.Tensor:
    """The tensor of one complete object over its planes, which are neither read nor copied.

    A direct format gives its one plane as a plain tensor; a quantized one a `NinferTensor` of compute dtype `dtype`.
    Raises LayoutError when a plane's shape or dtype is not the layout's.
    """
    record, specs = get_format(format), planes_of(format, shape, divisors)
    if len(planes) != len(specs):
        raise LayoutError(
            f"format {record.name} has planes {[spec.name for spec in specs]}, found {len(planes)} tensors"
        )
    for spec, plane in zip(specs, planes, strict=True):
        if tuple(plane.shape) != spec.shape or plane.dtype != spec.dtype:
            raise LayoutError(
                f"plane {spec.name} of a {record.name} object of shape {list(shape)}: expected {spec.dtype} {list(spec.shape)}, "
                f"found {plane.dtype} {list(plane.shape)}"
            )
    if not record.quantized:
        return planes[0]
    return make_tensor(record.name, planes, Geometry.whole(shape, divisors), tuple(shape), dtype, policy)


def decode(
    data: bytes | bytearray | memoryview | torch.Tensor, format: str | Format, shape: Sequence[int], divisors: int = 1
) -> torch.Tensor:
    """The tensor an object's payload holds: plain for a direct format, else a `NinferTensor` over a copy of `data`.

    Raises LayoutError when the number of bytes is not the encoded size. Words are not checked (`kernels.checks`).
    """
    payload = data if isinstance(data, torch.Tensor) else torch.frombuffer(bytearray(data), dtype=torch.uint8)
    specs = planes_of(format, shape, divisors)
    planes = [plane.clone() for plane in split_planes(payload, specs)]
    return wrap_planes(format, shape, planes, divisors=divisors)


def encode(tensor: torch.Tensor, format: str | Format | None = None) -> bytes:
    """The payload of an object that holds `tensor`: its words as they are.

    A plain tensor must be of a direct format's dtype. A row view is repacked as an object of its own. Giving `format`
    asserts it: another one raises ConversionError, since values never change type on the way (`cast_direct` and
    `quantize` do that by name); so does a plain tensor of any other dtype. Raises LayoutError for a view that its
    layout cannot hold (nvfp4 rows that are not whole tiles), and UnsupportedOperation for a composed weight, which is
    several objects.
    """
    if isinstance(tensor, ComposedTensor):
        raise UnsupportedOperation(f"encode: a {type(tensor).__name__} is not one object; {tensor.way_to_store}")
    found = tensor.format if isinstance(tensor, PackedTensor) else _DIRECT_OF.get(tensor.dtype)
    wanted = None if format is None else get_format(format).name
    if found is None or wanted not in (None, found):
        raise ConversionError(
            f"a tensor of {found or tensor.dtype} is not encoded as {wanted or 'any direct format'} implicitly; "
            "use cast_direct for bf16, fp32 or int32, quantize for a quantized format"
        )
    if not isinstance(tensor, PackedTensor):
        plain = tensor.detach().cpu().contiguous()
        return join_planes([plain], planes_of(found, tuple(plain.shape)))
    planes, specs = _own_planes(tensor)
    return join_planes([plane.cpu() for plane in planes], specs)


def _own_planes(tensor: PackedTensor) -> tuple[Sequence[torch.Tensor], tuple[Plane, ...]]:
    """Planes of the tensor as one complete object, and where the layout puts them."""
    planes, format, geometry, _, _ = tensor.call
    if isinstance(get_format(format), BlockFloatFormat):  # its planes may be a parent's, or a gather's
        packed = pack_codes(format, *unpack_codes(format, planes, geometry))
        return packed, planes_of(format, geometry[:2], packed[-1].numel())
    return planes, planes_of(format, geometry[:2])
