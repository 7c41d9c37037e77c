"""Seconds of a launch on a CUDA card, for `tuning`: real kernels on planes of arbitrary bytes, which time does not depend on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.kernels.triton.launch import Launch
from ninfer_torch.kernels.tuning import Card
from ninfer_torch.layouts import Geometry, encoded_bytes, planes_of, split_planes

__all__ = ["CudaTimer", "card_of", "families"]

EXPERTS = 8


def card_of(device: torch.device) -> Card:
    """The card of a CUDA device, with the kernels installed here.

    Raises UnsupportedOperation where there is no CUDA device or no Triton.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        raise UnsupportedOperation(
            f"tuning on {device}: found no CUDA card there, expected one; run it where the card is"
        )
    try:
        from ninfer_torch.kernels.triton.operators import card_of
    except ImportError as error:
        raise UnsupportedOperation(f"tuning needs Triton: {error}; install ninfer-torch[triton]") from error
    return card_of(device)


def families() -> dict[str, str]:
    """Families of decoders by name, each with the format that is measured for it: the first one."""
    from ninfer_torch.kernels.triton.operators import TILES

    first: dict[str, str] = {}
    for format, decoder in TILES.items():
        first.setdefault(decoder.family, format)
    return first


class CudaTimer:
    """A `tuning.Timer`: the median of repeated runs of one product by [n, k] weights, with a cold cache before each run."""

    def __init__(self, device: torch.device, n: int = 4096, k: int = 4096) -> None:
        self.device, self.n, self.k = device, n, k
        self.formats = families()
        self._planes = functools.cache(self._make_planes)

    def __call__(self, operation: str, family: str, dtype: torch.dtype, rows: int, launch: Launch) -> float:
        import triton.testing
        from triton.runtime.errors import OutOfResources

        try:
            return 1e-3 * float(
                triton.testing.do_bench(self.product(operation, family, dtype, rows, launch), return_mode="median")
            )
        except OutOfResources:
            return math.inf

    def product(
        self, operation: str, family: str, dtype: torch.dtype, rows: int, launch: Launch
    ) -> Callable[[], torch.Tensor]:
        """What is timed. Experts: a bank of EXPERTS matrices, `rows` activation rows for each."""
        from ninfer_torch.kernels.triton import operators

        experts = EXPERTS if operation == "expert_linear" else 1
        shape, format = (self.n * experts, self.k), self.formats[family]
        matrix = operators.Matrix.of("tune", self._planes(format, shape), format, Geometry.whole(shape))
        x = torch.randn(rows * experts, self.k, device=self.device, dtype=dtype)
        out = x.new_empty((rows * experts, self.n))
        if experts == 1:
            return lambda: operators._product(out, x, matrix, None, launch)
        offsets = torch.arange(1, experts + 1, device=self.device, dtype=torch.int32) * rows
        return lambda: operators._product(out, x, matrix, None, launch, offsets)

    def _make_planes(self, format: str, shape: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        payload = torch.randint(0, 256, (encoded_bytes(format, shape, 1),), dtype=torch.uint8, device=self.device)
        return tuple(split_planes(payload, planes_of(format, shape, 1)))
