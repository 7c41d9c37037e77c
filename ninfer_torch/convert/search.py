"""grouped_search: of 69 scales per group, the one with the smallest squared error (spec/conversion.md 4).

Groups lie in columns here: `x` is float32 [G, n], one column per group. Every step is then elementwise over long
contiguous runs, and the sum over a group is a fixed tree of additions of whole planes, so that no word depends on the
size of a chunk, on the number of threads or on the device.

Each candidate costs five float32 passes and two or three float64 passes over the values. That float32 is enough up to the
difference `x - scale * code` is no approximation: the product has at most 11 + 8 significant bits, and the difference
of two float32 numbers within a factor of two of each other, or of a number and a smaller multiple of its last place, is
exact. One of the two holds for every candidate, because a code is 0, or is the rounded quotient, or was clamped to a
product below x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ninfer_torch.convert.absmax import (
    SMALLEST_BINARY16,
    absmax_scales,
    grouped_record,
    require_matrix,
    split_groups,
)
from ninfer_torch.errors import ConversionError
from ninfer_torch.formats import Format, GroupedFormat

__all__ = ["check_importance", "grouped_search"]

_CHUNK_VALUES = 1 << 16
"""Values searched at a time per CPU thread: the working set of a chunk, 20 bytes per value, stays in a core's cache."""

_DEVICE_CHUNK_VALUES = 1 << 24
"""The same for a device whose kernels take longer to start than a cache's worth of values takes to search."""

_RATIOS = tuple(hundredths / 100 for hundredths in range(70, 120, 2))
_MULTIPLES = (0.25, 0.5, 2.0, 4.0)
_STEPS = (-2, -1, 1, 2)
_LARGEST_BINARY16_WORD = 0x7BFF


def grouped_search(
    values: Tensor,
    format: str | Format,
    *,
    importance: Tensor | None = None,
    negative_scales: bool = False,
    first_row: int = 0,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix, each group's scale searched among 69 candidates (spec/conversion.md 4).

    `values` [N, K] as `grouped_absmax` takes them. `importance` floating [K] weighs the squared errors of the columns;
    a group whose columns all weigh 0 keeps the words of `grouped_absmax`. `negative_scales` lets a scale be negative,
    so that the largest magnitude can take the code that only the negative side has. Returns codes int8 [N, K] and scales
    float16 [N, ceil(K / G)]; no group is worse than under `grouped_absmax`.

    Raises ConversionError as `grouped_absmax`, and for an importance of another length, a negative or a non-finite one.
    """
    record = grouped_record("grouped_search", format)
    values = require_matrix("grouped_search", values)
    rows, columns = values.shape
    weights = None
    if importance is not None:
        weights = _split_weights(check_importance(importance, columns).to(values.device), record)
    codes = torch.empty((rows, columns), dtype=torch.int8, device=values.device)
    scales = torch.empty((rows, -(-columns // record.group)), dtype=torch.float16, device=values.device)
    step = max(1, _chunk_values(values.device) // (max(1, scales.shape[1]) * record.group))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        x = split_groups(values[begin:end], record)
        start = absmax_scales(x, values[begin:end], record, first_row + begin)
        search = _Search.of(x, weights, record)
        found = search.best_scales(start.flatten(), negative_scales)
        scales[begin:end] = found.view(start.shape)
        codes[begin:end] = (
            search.codes(found).view(record.group, end - begin, -1).permute(1, 2, 0).flatten(1)[:, :columns]
        )
    return codes, scales


def check_importance(importance: Tensor, columns: int) -> Tensor:
    """The importance of K = `columns` input channels as float64 [K].

    Raises ConversionError for another shape or dtype, and for entries that are negative or not finite.
    """
    if importance.dim() != 1 or importance.shape[0] != columns or not importance.is_floating_point():
        raise ConversionError(
            f"importance is {importance.dtype} {list(importance.shape)}, expected one floating entry per column, "
            f"[{columns}]"
        )
    wide = importance.detach().to(torch.float64)
    broken = ~(wide.isfinite() & (wide >= 0))
    if bool(broken.any()):
        column = int(broken.nonzero()[0])
        raise ConversionError(f"importance of column {column} is {wide[column].item()}, expected finite and at least 0")
    return wide


def _split_weights(weights: Tensor, record: GroupedFormat) -> Tensor:
    """Column weights float64 [K] as [G, ceil(K / G)], 0 where the last group is padded."""
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[0] % record.group))
    return padded.view(-1, record.group).T


def _chunk_values(device: torch.device) -> int:
    return _CHUNK_VALUES * torch.get_num_threads() if device.type == "cpu" else _DEVICE_CHUNK_VALUES


class _Scratch(NamedTuple):
    """Space for one candidate's codes and residuals, and for their squares."""

    narrow: Tensor
    wide: Tensor


@dataclass(frozen=True)
class _Search:
    """One chunk of groups. `x` float32 [G, n], `weights` float64 [G, n] or None for equal weights."""

    x: Tensor
    weights: Tensor | None
    record: GroupedFormat
    scratch: _Scratch

    @classmethod
    def of(cls, groups: Tensor, weights: Tensor | None, record: GroupedFormat) -> _Search:
        """The search over groups [rows, groups per row, G]; `weights` [G, groups per row] repeat for each row."""
        rows = groups.shape[0]
        x = groups.permute(2, 0, 1).reshape(record.group, -1).contiguous()
        scratch = _Scratch(torch.empty_like(x), torch.empty_like(x, dtype=torch.float64))
        return cls(x, None if weights is None else weights.repeat(1, rows), record, scratch)

    def best_scales(self, start: Tensor, negative: bool) -> Tensor:
        """The best scale float16 [n] of each group, from the scales of section 3; those of zero groups stay."""
        zero = start == 0
        best = _Best.of(self, start.masked_fill(zero, 1.0).to(torch.float64))
        best.offer(self, self._fixed_candidates(best.scales), negative)
        fitted = self._least_squares(best.scales)
        best.offer(self, torch.stack([fitted, _stepped(fitted, -1), _stepped(fitted, 1)]), negative)
        return best.scales.to(torch.float16).masked_fill_(zero, 0.0)

    def codes(self, scales: Tensor) -> Tensor:
        """The codes [G, n] under `scales` [n]: float32 whole numbers, in scratch space."""
        reciprocals = scales.to(torch.float64).masked_fill(scales == 0, 1.0).reciprocal_().to(torch.float32)
        return self._rounded(reciprocals)

    def errors(self, scales: Tensor, reciprocals: Tensor) -> Tensor:
        """The weighted squared error float64 [n] of each group under float32 `scales` and their `reciprocals`."""
        residuals = self._rounded(reciprocals).mul_(scales)
        torch.sub(self.x, residuals, out=residuals)
        squares = self.scratch.wide.copy_(residuals)
        squares.mul_(squares)
        if self.weights is not None:
            squares.mul_(self.weights)
        return _sum_groups(squares)

    def _rounded(self, reciprocals: Tensor) -> Tensor:
        quotients = torch.mul(self.x, reciprocals, out=self.scratch.narrow)
        return quotients.round_().clamp_(self.record.code_min, self.record.code_max)

    def _fixed_candidates(self, start: Tensor) -> Tensor:
        """Rows 2 to 8 of the table, in order, float64 [65, n]; 0 where a candidate does not exist.

        Row 3 is left out for symmetric codes: its errors repeat those of row 2, so that none of them is strictly smaller.
        """
        largest = self.x.abs().to(torch.float64).amax(dim=0)
        ratios = torch.tensor(_RATIOS, dtype=torch.float64, device=start.device).unsqueeze(1)
        multiples = torch.tensor(_MULTIPLES, dtype=torch.float64, device=start.device).unsqueeze(1)
        fitted = self._least_squares(start)
        symmetric = self.record.code_min == -self.record.code_max
        signed = [] if symmetric else [_rounded(self._extremes() / self.record.code_min * ratios)]
        return torch.cat(
            [
                _rounded(largest / self.record.absmax_codes * ratios),
                *signed,
                _rounded(start * multiples),
                torch.stack([_stepped(start, step) for step in _STEPS]),
                fitted.unsqueeze(0),
                _rounded(fitted * multiples[1:3]),
                torch.stack([_stepped(fitted, step) for step in _STEPS]),
            ]
        )

    def _extremes(self) -> Tensor:
        """The signed value of largest magnitude of each group, the first one on ties, float64 [n]."""
        first = self.x.abs().argmax(dim=0, keepdim=True)
        return self.x.gather(0, first).squeeze(0).to(torch.float64)

    def _least_squares(self, scales: Tensor) -> Tensor:
        """The rounded scale float64 [n] that fits the codes under `scales` best; 0 where there is none."""
        codes = self.codes(scales).to(torch.float64)
        weighted = codes if self.weights is None else codes * self.weights
        numerator = _sum_groups((self.x if self.weights is None else self.x * self.weights) * codes)
        denominator = _sum_groups(weighted * codes)
        return _rounded(torch.where(denominator == 0, 0.0, numerator / denominator))


@dataclass
class _Best:
    """The best candidate of each group so far: `scales` and `errors`, both float64 [n]."""

    scales: Tensor
    errors: Tensor

    @classmethod
    def of(cls, search: _Search, start: Tensor) -> _Best:
        return cls(start, search.errors(start.to(torch.float32), start.reciprocal().to(torch.float32)))

    def offer(self, search: _Search, candidates: Tensor, negative: bool) -> None:
        """Try candidates [c, n] in order; one replaces the best only where its error is strictly smaller."""
        absent = candidates == 0 if negative else candidates <= 0
        # In place of a candidate that takes no part stands the best so far, whose error is not smaller than its own.
        candidates = torch.where(absent, self.scales, candidates)
        scales, reciprocals = candidates.to(torch.float32), candidates.reciprocal().to(torch.float32)
        for candidate, scale, reciprocal in zip(candidates, scales, reciprocals, strict=True):
            errors = search.errors(scale, reciprocal)
            better = errors < self.errors
            self.errors = torch.where(better, errors, self.errors)
            self.scales = torch.where(better, candidate, self.scales)


def _sum_groups(terms: Tensor) -> Tensor:
    """Sums over the first axis, a power of two, by halves: an order that nothing changes. Overwrites `terms`."""
    half = terms.shape[0] // 2
    while half:
        terms[:half].add_(terms[half : 2 * half])
        half //= 2
    return terms[0].clone()


def _rounded(raw: Tensor) -> Tensor:
    """Raw scales float64 as binary16 values, in float64: never 0 for another number, 0 for what overflows."""
    scales = raw.to(torch.float32).to(torch.float16).to(torch.float64)
    rescued = torch.where((scales == 0) & (raw != 0), raw.sign() * SMALLEST_BINARY16, scales)
    return torch.where(rescued.isfinite(), rescued, 0.0)


def _stepped(scales: Tensor, step: int) -> Tensor:
    """Binary16 values `step` words further from zero, same sign; 0 for a step from 0 or out of the finite words."""
    words = scales.abs().to(torch.float16).view(torch.int16)
    moved = words + step
    legal = (words > 0) & (moved >= 1) & (moved <= _LARGEST_BINARY16_WORD)
    magnitudes = torch.where(legal, moved, 0).view(torch.float16).to(torch.float64)
    return torch.copysign(magnitudes, scales)
