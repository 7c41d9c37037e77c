"""Host time of one small linear layer: what a quantized weight adds to a call, eager and compiled.

    python benchmarks/overhead.py [--json FILE|-]

The layer is 64 x 64, so that arithmetic hardly counts, and every contestant runs in inference mode on one thread. To time the host alone,
`ninfer::linear` is given a kernel that returns its result unfilled, while the benchmark runs. Contestants take turns;
figures are medians, in microseconds. torchao is measured where it is installed.

`operator` is the raw torch.ops call, `module` an nn.Linear with the quantized weight; `above_operator` their difference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ninfer_torch

CALLS, ROUNDS, SIZE = 1000, 21, 64


@contextmanager
def unfilled_linear() -> Iterator[None]:
    """`ninfer::linear` on the CPU as an allocation."""

    def kernel(x: torch.Tensor, planes: Any, format: str, geometry: Any, bias: Any, policy: str) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], geometry[0]))

    library = torch.library.Library("ninfer", "IMPL")
    library.impl("linear", kernel, "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def contestants() -> dict[str, Callable[[], Any]]:
    x = torch.randn(1, SIZE)
    dense, quantized = nn.Linear(SIZE, SIZE, bias=False), nn.Linear(SIZE, SIZE, bias=False)
    weight = ninfer_torch.quantize(torch.randn(SIZE, SIZE), "q4_g64_fp16")
    quantized.weight = nn.Parameter(weight, requires_grad=False)
    planes, format, geometry, policy, _ = weight.call
    operator = torch.ops.ninfer.linear
    calls: dict[str, Callable[[], Any]] = {
        "nn.Linear": lambda: dense(x),
        "operator": lambda: operator(x, planes, format, geometry, None, policy),
        "module": lambda: quantized(x),
    }
    compiled = {"nn.Linear compiled": torch.compile(dense), "module compiled": torch.compile(quantized)}
    for name, layer in compiled.items():
        calls[name] = lambda layer=layer: layer(x)
    return calls | _torchao(x)


def _torchao(x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError:
        return {}
    layer = nn.Linear(SIZE, SIZE, bias=False)
    quantize_(layer, Int8WeightOnlyConfig())
    return {"torchao int8": lambda: layer(x)}


def measure() -> dict[str, float]:
    """Median microseconds per call of each contestant."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}
    with unfilled_linear(), torch.inference_mode():
        calls = contestants()
        for call in calls.values():
            timeit.timeit(call, number=CALLS)
        for _ in range(ROUNDS):
            for name, call in calls.items():
                seconds.setdefault(name, []).append(timeit.timeit(call, number=CALLS))
    return {name: statistics.median(times) / CALLS * 1e6 for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the record as JSON to FILE, or - for standard output")
    arguments = parser.parse_args()
    figures = measure()
    record = {"microseconds": figures, "above_operator": figures["module"] - figures["operator"]}
    if arguments.json == "-":
        print(json.dumps(record, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:<20}{value:8.2f} us")
    print(f"{'above the operator':<20}{record['above_operator']:8.2f} us")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
