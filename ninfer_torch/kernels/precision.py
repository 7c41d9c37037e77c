"""Whether products may quantize their activations to the bound that their weight's policy sets.

A policy (`A16Only`, `AllowA8`, `AllowA4`) permits; this switch decides. `"auto"`, the default, takes bfloat16 and float16 activations down
to what the policy permits, where a kernel is faster that way, and leaves float32 ones alone: who asks for float32 gets it. `"policy"`
does the same to float32 activations; `"a16"` computes every product on the activations it is given, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from ninfer_torch.errors import UnsupportedOperation

__all__ = ["ACTIVATION_PRECISIONS", "activation_precision", "may_quantize", "set_activation_precision"]

ACTIVATION_PRECISIONS = ("auto", "policy", "a16")

_default = "auto"
_inside: ContextVar[str | None] = ContextVar("ninfer_activation_precision", default=None)


def _checked(precision: str) -> str:
    if precision not in ACTIVATION_PRECISIONS:
        raise UnsupportedOperation(
            f"unknown activation precision {precision!r}; known: {', '.join(ACTIVATION_PRECISIONS)}"
        )
    return precision


def set_activation_precision(precision: str) -> None:
    """Set the process's default, one of ACTIVATION_PRECISIONS. Raises UnsupportedOperation for another name."""
    global _default
    _default = _checked(precision)


@contextmanager
def activation_precision(precision: str) -> Iterator[None]:
    """Products inside the `with` block, in this thread or task, run at `precision`, one of ACTIVATION_PRECISIONS.

    Compiled models are entered from inside the block: the choice is made when a product runs, not when it is traced.
    """
    token = _inside.set(_checked(precision))
    try:
        yield
    finally:
        _inside.reset(token)


def may_quantize(policy: str, activations: torch.dtype) -> bool:
    """Whether a product under `policy` may run its `activations` as int8 here and now."""
    precision = _inside.get() or _default
    return policy != "A16Only" and (precision == "policy" or (precision == "auto" and activations != torch.float32))
