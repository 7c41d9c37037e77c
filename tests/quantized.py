"""Random legal weights of every quantized format, and the numerical criteria of products, for tests of everything above the decoders."""

from __future__ import annotations

import math

import numpy as np
import torch

from ninfer_torch.formats import FORMATS, GgufFormat
from ninfer_torch.layouts import planes_of
from ninfer_torch.tensors import NinferTensor, wrap_planes

QUANTIZED = tuple(name for name, record in FORMATS.items() if record.quantized)

FAMILIES = ("q5_g64_fp16", "nvfp4", "fp8_e4m3fn_row_bf16", "fp8_e4m3fn_row_fp16", "gguf_q4_k")
"""One format of every kind of storage, where trying all twenty-seven would only take longer."""

_HALF_FIELDS = {
    # byte offsets of the binary16 words of a ggml block (spec/layouts.md 8); iq1_m spreads its one over four nibbles
    "gguf_q2_k": (80, 82),
    "gguf_q3_k": (108,),
    "gguf_q4_k": (0, 2),
    "gguf_q5_k": (0, 2),
    "gguf_q6_k": (208,),
    "gguf_iq1_m": (),
}


def _blocks(record: GgufFormat, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random blocks with finite, moderate scales."""
    blocks = rng.integers(0, 256, (count, record.block_bytes), dtype=np.uint8)
    for offset in _HALF_FIELDS.get(record.name, (0,)):
        scales = rng.uniform(0.5, 1.5, count) * rng.choice([-1, 1], count) * 2.0**-8
        blocks[:, offset : offset + 2] = scales.astype("<f2").view(np.uint8).reshape(count, 2)
    if record.name == "gguf_iq1_m":
        word = rng.uniform(0.5, 1.5, count).astype("<f2").view(np.uint16)
        for nibble in range(4):
            at = 49 + 2 * nibble
            blocks[:, at] = (blocks[:, at] & 0x0F) | ((word >> 4 * nibble & 0xF) << 4)
    return blocks


def _legal(
    format: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, rng: np.random.Generator
) -> torch.Tensor:
    record = FORMATS[format]
    if isinstance(record, GgufFormat):
        rows, row_bytes = shape
        return torch.from_numpy(_blocks(record, rows * row_bytes // record.block_bytes, rng).reshape(shape))
    if dtype != torch.uint8:  # scales and divisors
        values = rng.uniform(0.5, 1.5, shape)
        if record.family == "grouped":
            values *= rng.choice([-1, 1], shape)
        return torch.from_numpy(values).to(dtype)
    words = rng.integers(0, 256, shape, dtype=np.uint8)
    if format == "nvfp4" and name == "scales":
        words = rng.integers(0x28, 0x48, shape, dtype=np.uint8)
    if record.family == "row_float":
        words &= 0xF7  # keeps exponents below the NaN words
    if name == "records":
        scales = rng.uniform(0.5, 1.5, shape[0]).astype("<f2")
        words[:, -2:] = scales.view(np.uint8).reshape(-1, 2)
    if format == "q8_g32_fp16":
        words[words == 0x80] = 0
    if format == "t2_g128_fp16":
        words &= 0x55  # no lane is the illegal word 2
    return torch.from_numpy(words)


def random_weight(
    format: str, rows: int, columns: int, *, divisors: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32
) -> NinferTensor:
    """A random matrix [rows, columns] of moderate, finite values."""
    rng = np.random.default_rng(seed)
    specs = planes_of(format, (rows, columns), divisors)
    planes = [_legal(format, spec.name, spec.shape, spec.dtype, rng) for spec in specs]
    weight = wrap_planes(format, (rows, columns), planes, divisors=divisors, dtype=dtype)
    if not isinstance(weight, NinferTensor):
        raise TypeError(f"{format} is not quantized")
    return weight


def exact_product(x: torch.Tensor, weight: NinferTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x @ W.T (+ bias) in float64 on the exactly decoded weight."""
    product = x.double() @ weight.dequantize().double().transpose(-1, -2)
    return product if bias is None else product + bias.double()


def check_a16(y: torch.Tensor, y64: torch.Tensor, columns: int) -> None:
    """Criterion A16: no further from the exact product than rounding to y's dtype, plus float32 accumulation."""
    if not y64.numel():
        return
    rounding = (y64.to(y.dtype).double() - y64).norm()
    bound = rounding + 2e-6 * math.sqrt(columns / 1024 + 1) * y64.norm()
    error = (y.double() - y64).norm()
    if not error <= bound:
        raise AssertionError(f"A16: error {error:.3e} exceeds {bound:.3e} for {y.dtype}, K = {columns}")
