"""Which row of which block each row of a stacked weight is: plain integers, hashable, no tensors."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

__all__ = ["Placement", "Run", "Span", "settle"]


class Run(NamedTuple):
    """Rows [begin, begin + length) of one block, as consecutive rows of the result."""

    block: int
    begin: int
    length: int


class Span(NamedTuple):
    """Rows [begin, end) of one block: all that some runs touch."""

    block: int
    begin: int
    end: int


def _merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same rows in the fewest runs."""
    merged: list[Run] = []
    for run in runs:
        if not run.length:
            continue
        if merged and merged[-1].block == run.block and merged[-1].begin + merged[-1].length == run.begin:
            merged[-1] = Run(run.block, merged[-1].begin, merged[-1].length + run.length)
        else:
            merged.append(run)
    return tuple(merged)


@dataclass(frozen=True)
class Placement:
    """Runs in output order over blocks of `heights` rows, numbered by first appearance; no row of a block comes twice."""

    runs: tuple[Run, ...]
    heights: tuple[int, ...]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First output row of each run, and the number of output rows at the end."""
        return (0, *accumulate(run.length for run in self.runs))

    @property
    def rows(self) -> int:
        return self.starts[-1]

    @cached_property
    def rounds(self) -> int | None:
        """How many equal rounds the runs make, each taking the next rows of every block until all are used up; else None.

        One round is a concatenation; the heads of a query and its gate make as many rounds as there are heads.
        """
        period = len(self.heights)
        rounds, odd = divmod(len(self.runs), period)
        if odd:
            return None
        for place, run in enumerate(self.runs):
            turn, block = divmod(place, period)
            height, uneven = divmod(self.heights[block], rounds)
            if uneven or run != (block, turn * height, height):
                return None
        return rounds

    def cut(self, begin: int, end: int) -> tuple[Run, ...]:
        """The runs of output rows [begin, end)."""
        found = []
        for place in range(max(bisect_right(self.starts, begin) - 1, 0), len(self.runs)):
            start, run = self.starts[place], self.runs[place]
            if start >= end:
                break
            first, last = max(begin - start, 0), min(end - start, run.length)
            found.append(Run(run.block, run.begin + first, last - first))
        return _merged(found)

    def locate(self, row: int) -> tuple[int, int]:
        """Block and row in it of one output row."""
        place = bisect_right(self.starts, row) - 1
        run = self.runs[place]
        return run.block, run.begin + row - self.starts[place]

    def assemble(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Join what each block gives along axis `dim` (0 or -1) in output order, by one copy."""
        if len(parts) == len(self.runs) == 1:
            return parts[0]
        if self.rounds is None:
            return torch.cat([parts[run.block].narrow(dim, run.begin, run.length) for run in self.runs], dim)
        if self.rounds == 1:
            return torch.cat(list(parts), dim)
        turns = [part.unflatten(dim, (self.rounds, part.shape[dim] // self.rounds)) for part in parts]
        inner = dim if dim < 0 else dim + 1
        return torch.cat(turns, inner).flatten(inner - 1, inner)

    def distribute(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `assemble` along the last axis: each block's share of `values`, zero for rows not placed."""
        if len(self.heights) == len(self.runs) == 1:
            return [values]
        if self.rounds is not None:
            turns = values.unflatten(-1, (self.rounds, self.rows // self.rounds))
            heights = [height // self.rounds for height in self.heights]
            return [turn.flatten(-2) for turn in turns.split(heights, -1)]
        return [self._share(values, block) for block in range(len(self.heights))]

    def _share(self, values: torch.Tensor, block: int) -> torch.Tensor:
        placed = sorted(
            (run.begin, run.length, start)
            for run, start in zip(self.runs, self.starts[:-1], strict=True)
            if run.block == block
        )
        pieces, row = [], 0
        for begin, count, start in placed:
            pieces += [_zeros(values, begin - row), values.narrow(-1, start, count)]
            row = begin + count
        pieces.append(_zeros(values, self.heights[block] - row))
        return torch.cat([piece for piece in pieces if piece is not None], -1)


def _zeros(values: torch.Tensor, count: int) -> torch.Tensor | None:
    return values.new_zeros((*values.shape[:-1], count)) if count else None


def settle(runs: Iterable[Run]) -> tuple[list[Span], Placement]:
    """The part of each block that `runs` need, by first appearance, and the placement over these parts.

    A run of rows that an earlier run has placed already gets a part of its own.
    """
    merged = _merged(runs)
    taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
    parts = [_first_free(taken, run) for run in merged]
    numbers = {part: number for number, part in enumerate(dict.fromkeys(parts))}
    spans = [Span(part[0], taken[part][0][0], taken[part][-1][1]) for part in numbers]
    settled = tuple(
        Run(numbers[part], run.begin - spans[numbers[part]].begin, run.length)
        for part, run in zip(parts, merged, strict=True)
    )
    return spans, Placement(settled, tuple(span.end - span.begin for span in spans))


def _first_free(taken: dict[tuple[int, int], list[tuple[int, int]]], run: Run) -> tuple[int, int]:
    """Block and copy of it where the run's rows are free; they are taken there."""
    copy = 0
    while not _take(taken.setdefault((run.block, copy), []), run.begin, run.begin + run.length):
        copy += 1
    return run.block, copy


def _take(ranges: list[tuple[int, int]], begin: int, end: int) -> bool:
    """Add [begin, end) to sorted, disjoint ranges; False when it overlaps one."""
    place = bisect_right(ranges, (begin, begin))
    if (place and ranges[place - 1][1] > begin) or (place < len(ranges) and ranges[place][0] < end):
        return False
    ranges.insert(place, (begin, end))
    return True
