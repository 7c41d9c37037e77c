"""What the tests of the native CPU kernels share: small matrices of every format, and criterion A8."""

from __future__ import annotations

import numpy as np
import torch

from ninfer_torch.formats import FORMATS, get_format
from ninfer_torch.layouts import encoded_bytes, planes_of, split_planes


def shapes(format: str) -> list[tuple[int, int]]:
    """Small matrices whose rows and columns do not fill the kernels' blocks, as far as the format has such."""
    record = get_format(format)
    if record.family == "block_float":
        return [(128, 64), (256, 192)]
    if record.family == "gguf":
        return [(37, 3 * record.block_values)]
    if record.family == "row_float":
        return [(50, 1), (33, 33), (18, 95)]
    return [(50, 1), (35, 65), (19, 200), (20, 129)]


def bits(values: torch.Tensor) -> torch.Tensor:
    """The words of floating values, one for every NaN."""
    words = values.nan_to_num(nan=12345.0, posinf=float("inf"), neginf=float("-inf")).contiguous()
    return words.view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def any_words(format: str, shape: tuple[int, int], seed: int) -> list[torch.Tensor]:
    """Planes of arbitrary bytes, legal or not."""
    payload = np.random.default_rng(seed).integers(0, 256, encoded_bytes(format, shape), dtype=np.uint8)
    return list(split_planes(torch.from_numpy(payload), planes_of(format, shape)))


def a8_product(x: torch.Tensor, weight: torch.Tensor, format: str) -> torch.Tensor:
    """x quantized in float32 as criterion A8 says, times the exact weight in float64."""
    block = 256 if getattr(FORMATS[format], "block_values", 32) == 256 else 32
    columns = x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, -columns % block)).unflatten(1, (-1, block))
    scales = padded.abs().amax(-1, keepdim=True).div(127)
    if block == 32:
        scales = torch.where((scales >= 2.0**-14) & (scales <= 65504), scales.half().float(), scales)
    codes = torch.where(scales > 0, padded / scales, 0).round().clamp(-127, 127)
    return (codes.double() * scales.double()).flatten(1)[:, :columns] @ weight.double().T


def check_a8(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, format: str, bias: torch.Tensor | None = None
) -> None:
    """Criterion A8: no further from the exact product than quantized activations multiplied in float64, and A16's own error."""
    offset = 0 if bias is None else bias.double()
    y64, quantized = x.double() @ weight.double().T + offset, a8_product(x, weight, format) + offset
    bound = (quantized - y64).norm() + (quantized.to(y.dtype).double() - quantized).norm()
    bound = bound * 1.0001 + 2e-6 * (x.shape[1] / 1024 + 1) ** 0.5 * y64.norm()
    assert torch.isfinite(y).all() and (y.double() - y64).norm() <= bound
