"""`F.linear` with quantized weights on the CPU, beside PyTorch's own dense linears.

    python benchmarks/cpu_linear.py [--quick] [--formats q4_g64_fp16,...] [--n 14336] [--k 4096] [--json FILE|-]

Contestants take turns, each round reads other weights than the round before (together more than the caches hold), figures are
medians. `bandwidth_share` is the rate at which the planes are read over the read bandwidth measured beside them; `ratio` is the peer's
time over ours, above 1 where we are faster. Activations are bfloat16, so that a policy may quantize them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ninfer_torch.formats import FORMATS
from ninfer_torch.kernels.cpu import IMPLEMENTATIONS
from ninfer_torch.layouts import planes_of
from ninfer_torch.tensors import NinferTensor, wrap_planes

QUICK = ("q4_g64_fp16", "q8_g32_fp16", "nvfp4", "gguf_q4_k", "gguf_q6_k", "gguf_q8_0")
ROUNDS, COPIES = 15, 3
Calls = dict[str, list[Callable[[], Any]]]


def weight_of(format: str, rows: int, columns: int, policy: str) -> NinferTensor:
    """A weight of random bytes, its scale planes zero: time does not depend on values."""
    planes = []
    for spec in planes_of(format, (rows, columns)):
        words = (
            torch.zeros if spec.dtype != torch.uint8 else lambda shape, dtype: torch.randint(0, 256, shape, dtype=dtype)
        )
        planes.append(words(spec.shape, dtype=spec.dtype))
    weight = wrap_planes(format, (rows, columns), planes, dtype=torch.bfloat16, policy=policy)
    if not isinstance(weight, NinferTensor):
        raise TypeError(f"{format} is not quantized")
    return weight


def medians(calls: Calls) -> dict[str, float]:
    """Median milliseconds of each contestant; round r calls its copy r modulo COPIES."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round in range(-1, ROUNDS):
        for name, copies in calls.items():
            begin = time.perf_counter()
            copies[round % len(copies)]()
            if round >= 0:  # the first round warms up
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def read_bandwidth() -> float:
    """Bytes per second at which this process sums 256 MiB of integers."""
    data = torch.ones(1 << 25, dtype=torch.int64)
    return data.nbytes / (medians({"read": [data.sum]})["read"] / 1e3)


def measure(formats: tuple[str, ...], rows: int, columns: int, activations: int) -> list[dict[str, Any]]:
    threads, bandwidth = torch.get_num_threads(), read_bandwidth()
    x = torch.randn(activations, columns)
    narrow, records = x.bfloat16(), []
    dense = [torch.randn(rows, columns) for _ in range(2)]
    half = [weight.bfloat16() for weight in dense]
    peers: Calls = {
        "torch float32": [lambda w=w: F.linear(x, w) for w in dense],
        "torch bfloat16": [lambda w=w: F.linear(narrow, w) for w in half],
    }
    for format in formats:
        for policy in ("AllowA8", "A16Only"):
            weights = [weight_of(format, rows, columns, policy) for _ in range(COPIES)]
            found = medians({"ours": [lambda w=w: F.linear(narrow, w) for w in weights], **peers})
            ours = found.pop("ours")
            common = {"format": format, "policy": policy, "M": activations, "N": rows, "K": columns, "threads": threads}
            share = weights[0].nbytes / (ours / 1e3) / bandwidth
            for peer, milliseconds in found.items():
                result = {"ours_ms": ours, "peer": peer, "peer_ms": milliseconds, "ratio": milliseconds / ours}
                records.append({**common, **result, "bandwidth_share": share})
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} with one activation row")
    parser.add_argument("--formats", type=lambda text: tuple(text.split(",")), help="format names, separated by commas")
    parser.add_argument("--n", type=int, default=14336)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--json", metavar="FILE", help="write the records as JSON to FILE, or - for standard output")
    arguments = parser.parse_args()
    every = tuple(name for name, record in FORMATS.items() if record.quantized)
    formats = arguments.formats or (QUICK if arguments.quick else every)
    records: list[dict[str, Any]] = []
    with torch.inference_mode():
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for activations in (1,) if arguments.quick else (1, 8, 128):
                records += measure(formats, arguments.n, arguments.k, activations)
    if arguments.json == "-":
        print(json.dumps(records, indent=1))
        return
    print(f"linear of module {IMPLEMENTATIONS['linear'].__module__}")
    for record in records:
        print(
            f"{record['format']:<20}{record['policy']:<9}M={record['M']:<4}threads={record['threads']} "
            f"{record['ours_ms']:8.2f} ms {record['bandwidth_share']:6.0%} of bandwidth  "
            f"{record['ratio']:6.2f}x {record['peer']}"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
