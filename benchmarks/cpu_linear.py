"""`F.linear` with quantized weights on the CPU, beside ggml's products and PyTorch's own linears.

    pip install llama-cpp-python    # or xllamacpp; without either there is no ggml among the peers
    python benchmarks/cpu_linear.py [--quick] [--formats q4_g64_fp16,...] [--m 1,8,128] [--threads 1,2] [--n 14336] [--k 4096]
                                    [--json FILE|-]

Contestants take turns; each round reads other weights than the round before, and a round reads more than the caches hold; figures
are medians. `bandwidth_share` is the rate at which the planes are read over the read bandwidth measured beside them; `ratio` is the
peer's time over ours, above 1 where we are faster. Our activations are bfloat16, so that a policy may quantize them; ggml's are float32.
A weight in a gguf format is the same bytes on both sides, and the two results are compared. A peer of ggml is a type in one of the layouts
into which llama.cpp repacks weights when it loads them (CPU: as in the file); the summary takes the fastest of them, and AMX by itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from ggml_peer import Ggml, find_ggml
from gguf import GGMLQuantizationType
from tqdm import tqdm

from ninfer_torch.formats import FORMATS, GgufFormat
from ninfer_torch.kernels.cpu import IMPLEMENTATIONS
from ninfer_torch.layouts import planes_of
from ninfer_torch.tensors import NinferTensor, wrap_planes

QUICK = ("q4_g64_fp16", "q8_g32_fp16", "nvfp4", "gguf_q4_k", "gguf_q6_k", "gguf_q8_0")
POLICIES = {"A8": "AllowA8", "A16": "A16Only"}
COPIES = 3
MOST_ROUNDS, ROUND_SECONDS = 15, 5.0
"""Rounds of turns: as many as fit into the seconds, at least 3."""

GGML_PEERS = {
    "q2_g64_fp16": ("Q2_K",),
    "t2_g128_fp16": ("Q2_K", "TQ2_0"),
    "q4_g64_fp16": ("Q4_0", "Q4_K"),
    "q5_g64_fp16": ("Q5_K",),
    "q6_g64_fp16": ("Q6_K",),
    "q8_g32_fp16": ("Q8_0",),
    "nvfp4": ("Q4_0", "Q4_K"),
    "fp8_e4m3fn_row_bf16": ("Q8_0",),
    "fp8_e4m3fn_row_fp16": ("Q8_0",),
}
"""The ggml types that stand beside a format; a gguf format stands beside itself."""

TARGETS = {
    **dict.fromkeys(("q4_g64_fp16",), 1.3),
    **dict.fromkeys(("q2_g64_fp16", "t2_g128_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16", "nvfp4"), 1.1),
    **dict.fromkeys(("fp8_e4m3fn_row_bf16", "fp8_e4m3fn_row_fp16"), 1.1),
    **dict.fromkeys(("gguf_q4_k", "gguf_q5_k", "gguf_q6_k", "gguf_q8_0", "gguf_q4_0", "gguf_q5_0"), 1.0),
}
OTHER_TARGET, A16_TARGET, PREFILL_TARGET = 0.9, 0.6, 0.9
"""Aims for the ratio of ggml's time to ours with one activation row in A8, in A16, and with 128 rows in A8."""

Calls = dict[str, list[Callable[[], Any]]]


def ggml_types(format: str) -> dict[str, int]:
    """The peers of `format` in ggml: name and type number."""
    record = FORMATS[format]
    if isinstance(record, GgufFormat):
        return {format.removeprefix("gguf_").upper(): record.ggml_type}
    return {name: int(GGMLQuantizationType[name]) for name in GGML_PEERS[format]}


def random_weight(format: str, rows: int, columns: int) -> NinferTensor:
    """A weight of random bytes, its scale planes zero: time does not depend on values."""
    planes = []
    for spec in planes_of(format, (rows, columns)):
        words = (
            torch.zeros if spec.dtype != torch.uint8 else lambda shape, dtype: torch.randint(0, 256, shape, dtype=dtype)
        )
        planes.append(words(spec.shape, dtype=spec.dtype))
    return wrapped(format, rows, columns, planes)


def wrapped(format: str, rows: int, columns: int, planes: list[torch.Tensor]) -> NinferTensor:
    weight = wrap_planes(format, (rows, columns), planes, dtype=torch.bfloat16)
    if not isinstance(weight, NinferTensor):
        raise TypeError(f"{format} is not quantized")
    return weight


def medians(calls: Calls, most_rounds: int = MOST_ROUNDS, seconds: float = ROUND_SECONDS) -> dict[str, float]:
    """Median milliseconds of each contestant; round r calls its copy r modulo the number of copies."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    started = time.perf_counter()
    for round in range(-1, most_rounds):
        if round >= 3 and time.perf_counter() - started > seconds:
            break
        for name, copies in calls.items():
            begin = time.perf_counter()
            copies[round % len(copies)]()
            if round >= 0:  # the first round warms up
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


def read_bandwidth() -> float:
    """Bytes per second at which this process sums 512 MiB of integers."""
    data = torch.ones(1 << 26, dtype=torch.int64)
    return data.nbytes / (medians({"read": [data.sum]})["read"] / 1e3)


def torch_peers(rows: int, columns: int, x: torch.Tensor) -> Calls:
    """PyTorch's dense linears and its own 4 and 8 bit products (groups of 64; a scale per row)."""
    wide = x.float()
    dense = [torch.randn(rows, columns) for _ in range(2)]
    half = [weight.bfloat16() for weight in dense]
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.int32)
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    packed = [pack(codes, 2) for _ in range(COPIES)]
    scales = torch.ones(columns // 64, rows, 2, dtype=torch.bfloat16)
    bytes_ = [torch.randint(-128, 128, (rows, columns), dtype=torch.int8) for _ in range(COPIES)]
    row_scales = torch.ones(rows, dtype=torch.bfloat16)
    int4pack, int8pack = torch.ops.aten._weight_int4pack_mm_for_cpu, torch.ops.aten._weight_int8pack_mm
    return {
        "torch float32": [lambda w=w: F.linear(wide, w) for w in dense],
        "torch bfloat16": [lambda w=w: F.linear(x, w) for w in half],
        "aten int4pack": [lambda w=w: int4pack(x, w, 64, scales) for w in packed],
        "aten int8pack": [lambda w=w: int8pack(x, w, row_scales) for w in bytes_],
    }


def ggml_peers(ggml: Ggml, format: str, rows: int, columns: int, x: torch.Tensor) -> tuple[Calls, np.ndarray | None]:
    """Products of ggml by type and layout, and for a gguf format the blocks that they multiply."""
    calls: Calls = {}
    same = None
    activations = x.float().numpy()
    for name, type in ggml_types(format).items():
        blocks = ggml.quantized(type, rows, columns)
        if isinstance(FORMATS[format], GgufFormat):
            same = blocks
        copies = [ggml.products(type, blocks, columns, activations) for _ in range(COPIES)]
        for layout in copies[0]:
            calls[f"ggml {name} {layout}"] = [products[layout] for products in copies]
    return calls, same


def check_equal(format: str, ours: torch.Tensor, peers: Calls) -> None:
    """Raise where ggml, from the same blocks, computed something else than we did."""
    expected = ours.float().numpy()
    for name, (product, *_) in peers.items():
        product()
        difference = np.linalg.norm(product.y - expected) / np.linalg.norm(expected)  # type: ignore[attr-defined]
        if not difference < 0.02:
            raise RuntimeError(f"{format}: the results of {name} and ours differ by {difference:.3f}")


def measure(
    ggml: Ggml | None, format: str, x: torch.Tensor, rows: int, common: Calls, bandwidth: float
) -> list[dict[str, Any]]:
    activations, columns = x.shape
    peers, blocks = ggml_peers(ggml, format, rows, columns, x) if ggml else ({}, None)
    if blocks is None:
        weights = [random_weight(format, rows, columns) for _ in range(COPIES)]
    else:
        same = torch.from_numpy(blocks)
        weights = [
            wrapped(format, rows, columns, [same.clone()]) for _ in range(COPIES)
        ]  # in pages of the same size as the rest
    calls: Calls = {}
    for name, policy in POLICIES.items():
        uses = [weight.with_policy(policy) for weight in weights]
        calls[name] = [lambda w=w: F.linear(x, w) for w in uses]
        if blocks is not None:
            check_equal(format, calls[name][0](), peers)
    found = medians({**calls, **peers, **common})
    return [
        {
            "format": format,
            "policy": policy,
            "M": activations,
            "N": rows,
            "K": columns,
            "threads": torch.get_num_threads(),
            "ours_ms": found[policy],
            "peer": peer,
            "peer_ms": found[peer],
            "ratio": found[peer] / found[policy],
            "bandwidth_share": weights[0].nbytes / (found[policy] / 1e3) / bandwidth,
        }
        for policy in calls
        for peer in (*peers, *common)
    ]


def summary(records: list[dict[str, Any]]) -> Iterable[str]:
    """One line per format, policy, M and threads: the ratio to the fastest layout of each ggml type, and to torch float32."""
    cases: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        cases.setdefault(tuple(record[key] for key in ("threads", "M", "format", "policy")), []).append(record)
    for (threads, m, format, policy), found in sorted(cases.items(), key=lambda case: case[0][:2]):
        fastest: dict[str, float] = {}
        for record in found:
            name = record["peer"]  # AMX is a layout for one row only
            kind = name if name.endswith(" AMX") else " ".join(name.split()[:2])
            fastest[kind] = min(fastest.get(kind, float("inf")), record["ratio"])
        ours = found[0]
        ratios = "".join(f"  {ratio:5.2f}x {kind}" for kind, ratio in fastest.items())
        aim = target(format, policy, m)
        yield (
            f"threads={threads} M={m:<4}{format:<20}{policy:<4}{ours['ours_ms']:8.2f} ms {ours['bandwidth_share']:5.0%} "
            f"{'' if aim is None else f'aim {aim:.1f}':<8}{ratios}"
        )


def target(format: str, policy: str, m: int) -> float | None:
    if m == 1:
        return TARGETS.get(format, OTHER_TARGET) if policy == "A8" else A16_TARGET
    return PREFILL_TARGET if m == 128 and policy == "A8" else None


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)} with one activation row, one thread")
    parser.add_argument("--formats", type=lambda text: tuple(text.split(",")), help="format names, separated by commas")
    parser.add_argument("--m", type=numbers, help="numbers of activation rows (1,8,128)")
    parser.add_argument("--threads", type=numbers, help="numbers of threads (1,2)")
    parser.add_argument("--n", type=int, default=14336)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--json", metavar="FILE", help="write the records as JSON to FILE, or - for standard output")
    arguments = parser.parse_args()
    every = tuple(name for name, record in FORMATS.items() if record.quantized)
    formats = arguments.formats or (QUICK if arguments.quick else every)
    threads = arguments.threads or ((1,) if arguments.quick else (1, 2))
    activations = arguments.m or ((1,) if arguments.quick else (1, 8, 128))
    ggml = find_ggml()
    print(
        f"linear of {IMPLEMENTATIONS['linear'].__module__}; {ggml.name if ggml else 'no ggml is installed'}",
        file=sys.stderr,
    )
    records: list[dict[str, Any]] = []
    with torch.inference_mode(), tqdm(total=len(threads) * len(activations) * len(formats)) as bar:
        for count in threads:
            torch.set_num_threads(count)
            if ggml:
                ggml.set_threads(count)
            bandwidth = read_bandwidth()
            for m in activations:
                x = torch.randn(m, arguments.k).bfloat16()
                common = torch_peers(arguments.n, arguments.k, x)
                for format in formats:
                    records += measure(ggml, format, x, arguments.n, common, bandwidth)
                    gc.collect()
                    bar.update()
    if arguments.json == "-":
        print(json.dumps(records, indent=1))
        return
    print("\n".join(summary(records)))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
