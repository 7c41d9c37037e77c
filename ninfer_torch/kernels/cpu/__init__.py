"""The operators on the CPU: native kernels where they are built, else the reference, with one warning.

The environment variable NINFER_TORCH_CPU forces an instruction set (`scalar`, `avx2`, `avx512`, `avx512_bf16`, `neon`, `dotprod`) or the `reference`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import cache, wraps
from typing import Any

from ninfer_torch.kernels import fallback

try:
    from ninfer_torch.kernels.cpu import native
except ImportError as _error:
    _missing = str(_error)
    native = None  # type: ignore[assignment]
else:
    _missing = ""

__all__ = ["IMPLEMENTATIONS"]

_OPERATORS = ("dequantize", "linear", "linear_backward", "embedding", "expert_linear", "expert_linear_backward")


@cache
def _warn_once() -> None:
    warnings.warn(
        f"ninfer_torch runs on its reference implementation, a hundred times slower than its CPU kernels: {_missing}",
        RuntimeWarning,
        stacklevel=3,
    )


def _with_warning(operator: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(operator)
    def warned(*args: Any) -> Any:
        _warn_once()
        return operator(*args)

    return warned


def _implementations() -> Mapping[str, Callable[..., Any]]:
    reference = {name: getattr(fallback, name) for name in _OPERATORS}
    if os.environ.get("NINFER_TORCH_CPU") == "reference":
        return reference
    if native is None:
        return {name: _with_warning(operator) for name, operator in reference.items()}
    return {name: getattr(native, name) for name in _OPERATORS}


IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = _implementations()
"""What the CPU computes each operator with, by the operator's name."""
