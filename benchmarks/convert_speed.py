"""Weights per second of every method that makes words from numbers, on one core.

    python benchmarks/convert_speed.py [--rows 256] [--columns 4096] [--profile]

The targets of one core: grouped_absmax 150 million weights per second, grouped_search 1.5 million. `--profile` prints
where the search spends its time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ninfer_torch.convert.absmax import GROUPED_TARGETS, grouped_absmax
from ninfer_torch.convert.row_float import ROW_FLOAT_TARGETS, fp8_row_maxabs
from ninfer_torch.convert.search import grouped_search


@dataclass(frozen=True)
class Case:
    """One method and format; `target` in million weights per second, 0 where there is none."""

    name: str
    run: Callable[[torch.Tensor], object]
    target: float = 0.0


def cases(columns: int) -> list[Case]:
    importance = torch.rand(columns, generator=torch.Generator().manual_seed(1))
    found = [Case(f"grouped_absmax {name}", partial(grouped_absmax, format=name), 150.0) for name in GROUPED_TARGETS]
    for name in GROUPED_TARGETS:
        weighted = partial(grouped_search, format=name, importance=importance, negative_scales=True)
        found.append(Case(f"grouped_search {name}", partial(grouped_search, format=name), 1.5))
        found.append(Case(f"grouped_search {name} importance, negative scales", weighted, 1.5))
    return found + [Case(f"fp8_row_maxabs {name}", partial(fp8_row_maxabs, format=name)) for name in ROW_FLOAT_TARGETS]


def rate(case: Case, weight: torch.Tensor, seconds: float = 1.0) -> float:
    """The best rate of several runs, in million weights per second."""
    best, started = float("inf"), time.perf_counter()
    while time.perf_counter() - started < seconds:
        begin = time.perf_counter()
        case.run(weight)
        best = min(best, time.perf_counter() - begin)
    return weight.numel() / best / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--profile", action="store_true", help="profile grouped_search by operator")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight = 0.02 * torch.randn(arguments.rows, arguments.columns, generator=generator)
    print(f"float32 weights {list(weight.shape)}, one thread, torch {torch.__version__}")
    print(f"{'method':<56} {'million/s':>10} {'target':>8} {'ratio':>7}")
    for case in cases(arguments.columns):
        found = rate(case, weight)
        goal = f"{case.target:8.1f} {found / case.target:6.1f}x" if case.target else ""
        print(f"{case.name:<56} {found:10.2f} {goal}", flush=True)
    if arguments.profile:
        with torch.profiler.profile() as profile:
            grouped_search(weight, "q4_g64_fp16", negative_scales=True)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=12))


if __name__ == "__main__":
    main()
