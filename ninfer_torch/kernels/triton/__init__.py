"""Triton kernels for CUDA and ROCm: every quantized format on one interface of tile decoders (`tiles`).

Importing this package imports no Triton; the first call on a device does. Without Triton the reference computes there.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ninfer_torch.kernels import fallback

__all__ = ["cuda_operator"]


@functools.cache
def _operators() -> Mapping[str, Callable[..., torch.Tensor]]:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        warnings.warn(
            f"Triton cannot be imported ({error}): quantized weights on this device are decoded by the slow reference; "
            "install ninfer-torch[triton]",
            RuntimeWarning,
            stacklevel=4,
        )
        return vars(fallback)
    from ninfer_torch.kernels.triton.operators import OPERATORS

    return OPERATORS


def cuda_operator(name: str) -> Callable[..., torch.Tensor]:
    """The implementation of `torch.ops.ninfer.<name>` for the CUDA dispatch key."""

    def run(*arguments: Any) -> torch.Tensor:
        return _operators()[name](*arguments)

    return run
