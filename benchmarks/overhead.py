"""Host time of one small linear layer: what a quantized weight adds to a call, eager and compiled.

    python benchmarks/overhead.py [--json FILE|-]

The layer is 64 x 64, so that arithmetic hardly counts, and every contestant runs in inference mode on one thread. To time the host alone,
`ninfer::linear` is given a kernel that returns its result unfilled, while the benchmark runs. Contestants take turns;
figures are medians, in microseconds. torchao is measured where it is installed.

`operator` is the raw torch.ops call on the weight's planes, `module` an nn.Linear with the quantized weight; `above_operator` is their
difference. Compiled, both are one graph, of one layer or of a step of DEPTH layers after one another; `above_compiled_step` is the
difference of the two steps per layer.
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

CALLS, ROUNDS, SIZE, DEPTH = 1000, 21, 64, 16


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


def quantized_layer() -> nn.Linear:
    layer = nn.Linear(SIZE, SIZE, bias=False)
    weight = ninfer_torch.quantize(torch.randn(SIZE, SIZE), "q4_g64_fp16")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


class RawLinear(nn.Module):
    """A layer that holds plain planes and calls the operator itself: what no tensor subclass can be faster than."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        planes, self.format, self.geometry, self.policy, _ = layer.weight.call
        self.planes = nn.ParameterList(nn.Parameter(plane, requires_grad=False) for plane in planes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        planes = [plane.data for plane in self.planes]
        return torch.ops.ninfer.linear(x, planes, self.format, self.geometry, None, self.policy)


def contestants() -> dict[str, Callable[[], Any]]:
    x = torch.randn(1, SIZE)
    layers = [quantized_layer() for _ in range(DEPTH)]
    dense, quantized = nn.Linear(SIZE, SIZE, bias=False), layers[0]
    planes, format, geometry, policy, _ = quantized.weight.call
    operator = torch.ops.ninfer.linear
    calls: dict[str, Callable[[], Any]] = {
        "nn.Linear": lambda: dense(x),
        "operator": lambda: operator(x, planes, format, geometry, None, policy),
        "module": lambda: quantized(x),
    }
    modules = {
        "nn.Linear compiled": dense,
        "operator compiled": RawLinear(quantized),
        "module compiled": quantized,
        "step of nn.Linear": nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in layers)),
        "step of operators": nn.Sequential(*(RawLinear(layer) for layer in layers)),
        "step of modules": nn.Sequential(*layers),
    }
    for name, module in modules.items():
        compiled = torch.compile(module, fullgraph=True)
        calls[name] = lambda compiled=compiled: compiled(x)
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
    above_step = (figures["step of modules"] - figures["step of operators"]) / DEPTH
    record = {
        "microseconds": figures,
        "above_operator": figures["module"] - figures["operator"],
        "above_compiled_step": above_step,
    }
    if arguments.json == "-":
        print(json.dumps(record, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:<20}{value:8.2f} us")
    for key in ("above_operator", "above_compiled_step"):
        print(f"{key.replace('_', ' '):<20}{record[key]:8.2f} us")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
