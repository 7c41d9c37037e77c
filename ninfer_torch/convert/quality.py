"""How far a quantized model's predictions are from those of its source."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Agreement", "compare_logits"]


@dataclass(frozen=True)
class Agreement:
    """Next-token agreement over `positions` positions.

    `divergence` is the mean Kullback-Leibler divergence KL(source || quantized) in nats; `top1` the share of positions where both
    rank the same token first.
    """

    positions: int
    divergence: float
    top1: float


def compare_logits(source: torch.Tensor, quantized: torch.Tensor) -> Agreement:
    """Compare logits [..., vocabulary] of two models on the same tokens, in float64."""
    expected = source.double().flatten(0, -2).log_softmax(-1)
    found = quantized.double().flatten(0, -2).log_softmax(-1)
    divergence = (expected.exp() * (expected - found)).sum(-1).mean()
    top1 = (expected.argmax(-1) == found.argmax(-1)).double().mean()
    return Agreement(expected.shape[0], divergence.item(), top1.item())
