"""Matrices that a checkpoint stores encoded: compressed-tensors and ModelOpt NVFP4, FP8 by rows, FP8 by blocks.

A scheme recognises the tensors that together are one matrix, by their names, number types and shapes, and never by a
config: so one checkpoint may mix them with each other and with plain tensors. Words that an importer can copy are
handed out as words; FP8 in blocks has no format here and is decoded. Source: spec/conversion.md 6.1 and 6.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ninfer_torch.convert.safetensors_files import StoredTensor
from ninfer_torch.convert.source import SourceTensor, UnusedTensor
from ninfer_torch.errors import ConversionError
from ninfer_torch.kernels.packing import unpack_lanes

__all__ = ["BLOCK_FP8", "ROW_FP8", "EncodedTensors", "find_encoded"]

ROW_FP8 = "fp8_e4m3fn_row_bf16"
BLOCK_FP8 = "fp8_e4m3fn_block"
"""The encoding of FP8 matrices with one scale per block, which only decode."""

_WEIGHT, _PACKED = ".weight", ".weight_packed"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_REFUSED = {
    "pre_quant_scale": "scales of the inputs (pre_quant_scale), which no artifact states",
    "weight_g_idx": "a reordering of the columns (weight_g_idx)",
}
"""Parts that change what a weight means, and that nothing here can express."""


@dataclass(frozen=True)
class EncodedTensors:
    """What a checkpoint holds encoded: `tensors` by parameter name, the stored names that they `use`, and the stored
    tensors beside them that no artifact needs.
    """

    tensors: Mapping[str, SourceTensor]
    use: frozenset[str]
    unused: tuple[UnusedTensor, ...]


@dataclass
class _Parts:
    """The stored tensors `<prefix>.<part>` of one matrix; `taken` are the parts that its scheme has used."""

    prefix: str
    stored: Mapping[str, StoredTensor]
    taken: set[str] = field(default_factory=set)

    def find(self, part: str) -> StoredTensor | None:
        """A part that may be absent."""
        found = self.stored.get(f"{self.prefix}.{part}")
        if found is not None:
            self.taken.add(found.name)
        return found

    def need(self, part: str, dtypes: tuple[str, ...], what: str) -> StoredTensor:
        """A part that must be there, with one of the number types."""
        found = self.find(part)
        if found is None:
            raise ConversionError(f"tensor {self.name!r} is {what}, but {self.prefix}.{part} is missing")
        if found.dtype not in dtypes:
            raise ConversionError(
                f"tensor {found.name!r} holds {found.dtype} words, expected {' or '.join(dtypes)} beside {what}"
            )
        return found

    @property
    def name(self) -> str:
        """The parameter's name."""
        return self.prefix + _WEIGHT

    def divisor(self, part: str, multiplies: bool) -> float | None:
        """A stored global scale as a divisor, or None where the part is absent.

        A scale that `multiplies` gives its reciprocal, computed in binary64 and rounded to binary32.
        """
        found = self.find(part)
        if found is None:
            return None
        if found.dtype != "F32" or found.elements != 1:
            raise ConversionError(
                f"tensor {found.name!r} is {found.dtype} {list(found.shape)}, expected one F32 global scale"
            )
        value = found.whole().to(torch.float64).reshape(())
        divisor = float((value.reciprocal() if multiplies else value).to(torch.float32))
        if not (math.isfinite(divisor) and divisor > 0):
            sense = "multiplier" if multiplies else "divisor"
            raise ConversionError(f"tensor {found.name!r}: {sense} {value.item()} is no finite, positive divisor")
        return divisor


def find_encoded(stored: Mapping[str, StoredTensor], block: tuple[int, int] = (128, 128)) -> EncodedTensors:
    """The encoded matrices among the tensors of a checkpoint, by parameter name `<prefix>.weight`.

    `block` is the [rows, columns] that share one scale of FP8 in blocks. Raises ConversionError, naming the tensor, for a
    matrix that is half there, for a scheme or number type that is not known, and for global scales that are illegal.
    """
    tensors: dict[str, SourceTensor] = {}
    use: set[str] = set()
    unused: list[UnusedTensor] = []
    for name, tensor in stored.items():
        scheme = _scheme(tensor)
        if scheme is None:
            continue
        parts = _Parts(name.removesuffix(_PACKED).removesuffix(_WEIGHT), stored, {name})
        _refuse_unknown_parts(parts)
        found = scheme(parts, tensor, block)
        if found.name in tensors or (name.endswith(_PACKED) and found.name in stored):
            raise ConversionError(f"tensor {found.name!r} is stored both packed and unpacked")
        tensors[found.name] = found
        use |= parts.taken
        unused += _activation_scales(parts)
    return EncodedTensors(tensors, frozenset(use), tuple(unused))


def _scheme(tensor: StoredTensor) -> Callable[[_Parts, StoredTensor, tuple[int, int]], SourceTensor] | None:
    if tensor.name.endswith(_PACKED):
        return _compressed_nvfp4
    return _SCHEMES.get(tensor.dtype) if tensor.name.endswith(_WEIGHT) else None


def _refuse_unknown_parts(parts: _Parts) -> None:
    for part, reason in _REFUSED.items():
        if parts.find(part) is not None:
            raise ConversionError(f"tensor {parts.name!r} comes with {reason}; it cannot be imported")
    zero_point = parts.find("weight_zero_point")
    if zero_point is not None and bool((zero_point.whole().to(torch.float32) != 0).any()):
        raise ConversionError(f"tensor {zero_point.name!r} is not zero everywhere; only symmetric words are imported")


def _activation_scales(parts: _Parts) -> list[UnusedTensor]:
    """The parts about activations that the scheme did not take up."""
    reason = "activations are scaled anew for each input"
    candidates = (f"{parts.prefix}.{part}" for part in ("input_scale", "input_zero_point", "input_global_scale"))
    return [UnusedTensor(name, reason) for name in candidates if name in parts.stored and name not in parts.taken]


# NVFP4


def _compressed_nvfp4(parts: _Parts, packed: StoredTensor, block: tuple[int, int]) -> SourceTensor:
    """compressed-tensors: global scales are divisors already."""
    if packed.dtype != "U8" or f"{parts.prefix}.weight_global_scale" not in parts.stored:
        raise ConversionError(
            f"tensor {packed.name!r} holds packed {packed.dtype} words of a scheme that is not known; expected NVFP4: U8 "
            "words beside weight_scale and weight_global_scale"
        )
    return _nvfp4(parts, packed, "weight_global_scale", "input_global_scale", multiplies=False)


def _modelopt_nvfp4(parts: _Parts, packed: StoredTensor, block: tuple[int, int]) -> SourceTensor:
    """ModelOpt: global scales are multipliers."""
    parts.need("weight_scale_2", ("F32",), "NVFP4")
    return _nvfp4(parts, packed, "weight_scale_2", "input_scale", multiplies=True)


def _nvfp4(parts: _Parts, packed: StoredTensor, scale: str, input_scale: str, multiplies: bool) -> SourceTensor:
    scales = parts.need("weight_scale", ("F8_E4M3",), "NVFP4")
    rows, columns = _matrix(packed)
    if scales.shape != (rows, columns // 8) or columns % 8:
        raise ConversionError(
            f"tensor {scales.name!r} has shape {list(scales.shape)}, expected one scale for 16 of the {rows} x "
            f"{2 * columns} values"
        )
    divisor = parts.divisor(scale, multiplies)

    def read_words(begin: int, end: int) -> tuple[Tensor, ...]:
        return packed.rows(begin, end), scales.rows(begin, end).view(torch.uint8)

    def read_values(begin: int, end: int) -> Tensor:
        magnitudes = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        codes = magnitudes[unpack_lanes(packed.rows(begin, end), 4).to(torch.int32)].unflatten(1, (-1, 16))
        return (codes * scales.rows(begin, end).to(torch.float32).unsqueeze(2)).flatten(1) / torch.tensor(divisor)

    return SourceTensor(
        parts.name,
        (rows, 2 * columns),
        "nvfp4",
        read_values,
        origin=packed.name,
        read_words=read_words,
        divisor=divisor,
        activation_divisor=parts.divisor(input_scale, multiplies),
    )


# FP8


def _fp8(parts: _Parts, weight: StoredTensor, block: tuple[int, int]) -> SourceTensor:
    rows, columns = _matrix(weight)
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    inverse = parts.find("weight_scale_inv")
    scales = inverse or parts.need("weight_scale", ("BF16", "F32"), "FP8")
    if scales.dtype not in ("BF16", "F32"):
        raise ConversionError(f"tensor {scales.name!r} holds {scales.dtype} words, expected BF16 or F32 scales")
    if inverse is None and (scales.elements == 1 or scales.shape in ((rows,), (rows, 1))):
        return _row_fp8(parts, weight, scales)
    if scales.shape == blocks:
        return _block_fp8(parts, weight, scales, block)
    raise ConversionError(
        f"tensor {scales.name!r} has shape {list(scales.shape)}, expected {'' if inverse else f'1 or {rows} scales, or '}"
        f"{list(blocks)} scales of {block[0]} x {block[1]} blocks for the matrix {[rows, columns]}"
    )


def _row_fp8(parts: _Parts, weight: StoredTensor, scales: StoredTensor) -> SourceTensor:
    def row_scales(begin: int, end: int) -> Tensor:
        if scales.elements == 1:
            return scales.whole().reshape(1).expand(end - begin)
        return scales.rows(begin, end).reshape(-1)

    def read_words(begin: int, end: int) -> tuple[Tensor, ...]:
        codes = weight.rows(begin, end).view(torch.uint8)
        return codes, row_scales(begin, end).to(torch.bfloat16).contiguous()

    def read_values(begin: int, end: int) -> Tensor:
        return weight.rows(begin, end).to(torch.float32) * row_scales(begin, end).to(torch.float32).unsqueeze(1)

    return SourceTensor(parts.name, weight.shape, ROW_FP8, read_values, origin=weight.name, read_words=read_words)


def _block_fp8(parts: _Parts, weight: StoredTensor, scales: StoredTensor, block: tuple[int, int]) -> SourceTensor:
    """Despite the name `weight_scale_inv` the scales multiply."""

    def read_values(begin: int, end: int) -> Tensor:
        first = begin // block[0]
        some = scales.rows(first, -(-end // block[0])).to(torch.float32)
        rows = torch.arange(begin, end) // block[0] - first
        columns = torch.arange(weight.shape[1]) // block[1]
        return weight.rows(begin, end).to(torch.float32) * some[rows][:, columns]

    return SourceTensor(parts.name, weight.shape, BLOCK_FP8, read_values, origin=weight.name)


def _matrix(tensor: StoredTensor) -> tuple[int, int]:
    if len(tensor.shape) != 2:
        raise ConversionError(f"tensor {tensor.name!r} has shape {list(tensor.shape)}, expected an encoded matrix")
    return tensor.shape[0], tensor.shape[1]


_SCHEMES: Mapping[str, Callable[[_Parts, StoredTensor, tuple[int, int]], SourceTensor]] = {
    "U8": _modelopt_nvfp4,
    "F8_E4M3": _fp8,
}
"""The scheme of an encoded `<prefix>.weight`, by its number type."""
