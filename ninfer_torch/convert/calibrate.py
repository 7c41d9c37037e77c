"""An importance matrix from a text: the mean squared activation of every input channel of every linear weight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ninfer_torch.convert.logical_parts import multiplied_parts, spelled
from ninfer_torch.errors import ConversionError
from ninfer_torch.models.generic import logical_name, state_dict_name

__all__ = ["calibrate"]

TokenProgress = Callable[[int, int], None]
"""(tokens done, tokens in all)."""


class _ChannelSquares:
    """Sums of squares float64 [K] of K input channels, and how many activation rows went into them."""

    def __init__(self, channels: int) -> None:
        self.sums = torch.zeros(channels, dtype=torch.float64)
        self.rows = 0

    def add(self, activations: torch.Tensor) -> None:
        rows = activations.detach().flatten(0, -2)
        self.sums += rows.to(torch.float64).square().sum(0).cpu()
        self.rows += rows.shape[0]

    def mean(self) -> torch.Tensor:
        return (self.sums / self.rows).to(torch.float32)


def calibrate(
    model: Any, windows: Iterable[torch.Tensor], progress: TokenProgress | None = None
) -> dict[str, torch.Tensor]:
    """The importance float32 [K] of every linear weight of a Transformers model, by logical name: the state dict's, and
    for a registered architecture NInfer's own beside it, so that either kind of artifact finds it.

    `windows` are token ids [1, n], run one after the other without a cache. A linear layer that no token reaches (an
    expert that is never chosen) has no entry. Raises ConversionError where no layer is reached, and for activations that
    are not finite, naming the weight.
    """
    windows = list(windows)
    total = sum(window.numel() for window in windows)
    done = 0
    with torch.inference_mode(), _watched(model) as squares:
        for window in windows:
            model(window.to(model.device), use_cache=False)
            done += window.numel()
            if progress is not None:
                progress(done, total)
    vectors = {name: found.mean() for name, found in squares.items() if found.rows}
    if not vectors:
        raise ConversionError(f"no linear layer of {type(model).__name__} saw a token: the text is empty")
    for name, vector in vectors.items():
        if not bool(vector.isfinite().all()):
            raise ConversionError(f"the activations of {name!r} are not finite")
    return vectors | _under_own_names(model, vectors)


def _under_own_names(model: Any, vectors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same vectors by NInfer's names: every part of a fused matrix has its inputs."""
    config = copy.copy(model.config)
    config.architectures = [type(model).__name__]
    parts = multiplied_parts(config)
    return {
        own: vector.clone() for name, vector in vectors.items() for own in parts.get(spelled(state_dict_name(name)), ())
    }


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, _ChannelSquares]]:
    """Hooks on every linear layer; the table fills while they are there."""
    squares: dict[str, _ChannelSquares] = {}
    handles = []
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.Linear):
            found = squares[logical_name(f"{name}.weight")] = _ChannelSquares(module.in_features)
            handles.append(module.register_forward_pre_hook(_recorder(found)))
    try:
        yield squares
    finally:
        for handle in handles:
            handle.remove()


def _recorder(squares: _ChannelSquares) -> Callable[[Any, tuple[Any, ...]], None]:
    def record(module: Any, arguments: tuple[Any, ...]) -> None:
        squares.add(arguments[0])

    return record
