"""Exact rational rounding and word comparison: oracles that share nothing with the code under test."""

from __future__ import annotations

import math
from fractions import Fraction

import torch


def nearest(value: Fraction, fraction_bits: int, smallest_exponent: int) -> Fraction:
    """Round to nearest, ties to even, to a binary float with unlimited range upwards."""
    if value == 0:
        return value
    exponent = math.frexp(float(abs(value)))[1] - 1
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, smallest_exponent) - fraction_bits)
    return round(value / step) * step  # round() of a Fraction takes ties to even


def to_binary32(value: Fraction) -> Fraction:
    return nearest(value, 23, -126)


def to_binary16(value: Fraction) -> Fraction:
    return nearest(value, 10, -14)


def words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def assert_same_words(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(words(a), words(b))
