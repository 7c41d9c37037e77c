"""How far a quantized model is from its source: in its weights, in its layers' outputs, in its predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

__all__ = ["Agreement", "ErrorSums", "PredictionSums", "compare_logits"]

_POSITIONS = 64
"""Positions compared at a time: a vocabulary of 150,000 then takes 77 MB per float64 table."""


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
    sums = PredictionSums()
    sums.add(source, quantized)
    return sums.agreement


@dataclass
class PredictionSums:
    """Agreement and perplexity, summed up window by window."""

    positions: int = 0
    divergence: float = 0.0
    same_first: int = 0
    predicted: int = 0
    surprise: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, source: torch.Tensor, quantized: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        """Add logits [..., vocabulary] of the two models at the same positions; with `tokens` [positions], each position
        but the last predicts the token after it.
        """
        for begin, expected, found in _slices(source, quantized):
            self.positions += len(expected)
            self.divergence += (expected.exp() * (expected - found)).sum().item()
            self.same_first += int((expected.argmax(-1) == found.argmax(-1)).sum())
            if tokens is not None:
                following = tokens[begin + 1 : begin + 1 + len(expected)].to(expected.device).unsqueeze(1)
                self.predicted += len(following)
                for side, table in enumerate((expected, found)):
                    self.surprise[side] -= table[: len(following)].gather(1, following).sum().item()

    @property
    def agreement(self) -> Agreement:
        """The means over all positions."""
        return Agreement(self.positions, self.divergence / self.positions, self.same_first / self.positions)

    @property
    def perplexities(self) -> tuple[float, float]:
        """Perplexity of the source and of the quantized model on the tokens predicted."""
        source, quantized = (math.exp(total / self.predicted) for total in self.surprise)
        return source, quantized


def _slices(source: torch.Tensor, quantized: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(first position, log probabilities of both) for a few positions at a time, float64."""
    first, second = source.flatten(0, -2), quantized.flatten(0, -2)
    for begin in range(0, len(first), _POSITIONS):
        span = slice(begin, begin + _POSITIONS)
        yield begin, first[span].double().log_softmax(-1), second[span].double().log_softmax(-1)


@dataclass
class ErrorSums:
    """Error of one array of numbers against another, summed up piece by piece in float64."""

    elements: int = 0
    source_squares: float = 0.0
    other_squares: float = 0.0
    products: float = 0.0
    error_squares: float = 0.0
    maximum: float = 0.0

    def add(self, source: torch.Tensor, other: torch.Tensor) -> None:
        """Add two pieces of equal shape."""
        expected, found = source.double().flatten(), other.double().flatten()
        error = found - expected
        self.elements += expected.numel()
        self.source_squares += expected.square().sum().item()
        self.other_squares += found.square().sum().item()
        self.products += (expected * found).sum().item()
        self.error_squares += error.square().sum().item()
        self.maximum = max(self.maximum, error.abs().max().item() if error.numel() else 0.0)

    @property
    def relative_error(self) -> float:
        """Norm of the error over the norm of the source; infinite for an error to zeros."""
        if self.source_squares == 0:
            return 0.0 if self.error_squares == 0 else math.inf
        return math.sqrt(self.error_squares / self.source_squares)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two; 1 for two zeros, 0 for one."""
        norms = math.sqrt(self.source_squares) * math.sqrt(self.other_squares)
        return self.products / norms if norms else float(self.source_squares == self.other_squares)
