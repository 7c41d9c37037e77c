"""`F.linear` with quantized weights on the GPU, by format and number of activation rows, beside cuBLAS and installed peers.

    python benchmarks/gpu_linear.py [--quick] [--formats q4_g64_fp16,...] [--n 4096] [--k 14336] [--json -]

Printed per line: microseconds, share of the measured copy bandwidth that reading the planes makes up (what decode is bound by),
and speed relative to a dense bfloat16 linear of the same shape. The weights are random bytes: time does not depend on them. Every
contestant runs from a CUDA graph, in turn, on weights that rotate through more memory than the cache holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F

from ninfer_torch.formats import FORMATS
from ninfer_torch.layouts import planes_of, split_planes
from ninfer_torch.tensors import NinferTensor, wrap_planes

ROWS = (1, 4, 16, 64, 512, 2048, 4096)
QUICK_ROWS = (1, 16, 512)
QUICK_FORMATS = ("q4_g64_fp16", "q6_g64_fp16", "nvfp4", "fp8_e4m3fn_row_bf16", "gguf_q4_k", "gguf_iq2_xxs")
ROUNDS = 15
CACHE_BYTES = 256 << 20
"""More than the last-level cache of any card."""

Run = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Line:
    """One measurement; `bandwidth` and `speed` are ratios, to the card's copy bandwidth and to the dense linear."""

    contestant: str
    rows: int
    microseconds: float
    bandwidth: float
    speed: float


def copy_bandwidth() -> float:
    """Bytes per second read and written by a large device copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds = time_of([lambda: target.copy_(source)])[0]
    return 2 * source.numel() / seconds


def graph_of(runs: list[Run]) -> torch.cuda.CUDAGraph:
    """All runs, one after another, as one graph."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for run in runs:  # compiles, and fills every cache that a capture must not fill
            run()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph


def time_of(*contestants: list[Run]) -> list[float]:
    """Median seconds of one run of each contestant; the contestants alternate."""
    graphs = [graph_of(runs) for runs in contestants]
    samples: list[list[float]] = [[] for _ in contestants]
    for _ in range(ROUNDS):
        for graph, runs, times in zip(graphs, contestants, samples, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3 / len(runs))
    return [statistics.median(times) for times in samples]


def random_words(format: str, n: int, k: int) -> NinferTensor:
    """A weight of random words on the device, its scales of moderate size where they are numbers of their own."""
    specs = planes_of(format, (n, k))
    payload = torch.randint(0, 256, (specs[-1].end,), dtype=torch.uint8, device="cuda")
    planes = [
        plane if plane.dtype == torch.uint8 else torch.rand(plane.shape, device="cuda").to(plane.dtype)
        for plane in split_planes(payload, specs)
    ]
    weight = wrap_planes(format, (n, k), planes, dtype=torch.bfloat16)
    if not isinstance(weight, NinferTensor):
        raise TypeError(f"{format} is not quantized")
    return weight


def copies_of(nbytes: int) -> int:
    """Weights to rotate through, so that none is still in the cache when its turn comes again."""
    return max(2, -(-CACHE_BYTES // nbytes))


@dataclass(frozen=True)
class Peer:
    """Another library's four-bit linear over one weight of `nbytes`."""

    name: str
    nbytes: int
    product: Callable[[torch.Tensor], torch.Tensor]


def _bitsandbytes(dense: torch.Tensor) -> Peer:
    import bitsandbytes

    packed, state = bitsandbytes.functional.quantize_4bit(dense, quant_type="nf4")
    return Peer("bitsandbytes nf4", packed.nbytes, lambda x: bitsandbytes.matmul_4bit(x, packed.t(), quant_state=state))


def _torchao(dense: torch.Tensor) -> Peer:
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    layer = torch.nn.Linear(dense.shape[1], dense.shape[0], bias=False, dtype=dense.dtype, device=dense.device)
    quantize_(layer, Int4WeightOnlyConfig(group_size=64))
    return Peer("torchao int4", dense.numel() // 2 + dense.numel() // 64 * 4, layer)


def _gemlite(dense: torch.Tensor) -> Peer:
    from gemlite.core import DType, GemLiteLinearTriton

    (n, k), group = dense.shape, 64
    layer = GemLiteLinearTriton(
        4, group_size=group, in_features=k, out_features=n, input_dtype=DType.BF16, output_dtype=DType.BF16
    )
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=dense.device)
    scales = torch.rand(n * k // group, 1, dtype=dense.dtype, device=dense.device)
    layer.pack(codes, scales, torch.full_like(scales, 8), None)
    return Peer("gemlite int4", n * k // 2 + n * k // group * 4, layer)


PEERS = {"bitsandbytes": _bitsandbytes, "torchao": _torchao, "gemlite": _gemlite}


def installed_peers(n: int, k: int) -> Iterator[Peer]:
    """The peers that are installed and work with what is installed beside them; one that fails is named on standard error."""
    dense = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
    for library, make in PEERS.items():
        if importlib.util.find_spec(library) is None:
            continue
        try:
            peer = make(dense)
            peer.product(torch.randn(1, k, dtype=torch.bfloat16, device="cuda"))
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            print(f"{library}: not measured: {error}", file=sys.stderr)
        else:
            yield peer


def measure(formats: tuple[str, ...], rows: tuple[int, ...], n: int, k: int) -> Iterator[Line]:
    bandwidth = copy_bandwidth()
    dense = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(copies_of(2 * n * k))]
    others = list(installed_peers(n, k))
    for m in rows:
        x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
        reference = [lambda w=w, x=x: F.linear(x, w) for w in dense]
        for peer in others:  # one weight: a peer may find part of it in the cache
            base, seconds = time_of(reference, [lambda peer=peer, x=x: peer.product(x)] * len(dense))
            yield Line(peer.name, m, seconds * 1e6, peer.nbytes / seconds / bandwidth, base / seconds)
        for format in formats:
            one = random_words(format, n, k)
            weights = [one, *[one.clone() for _ in range(copies_of(one.nbytes) - 1)]]
            base, seconds = time_of(reference, [lambda w=w, x=x: F.linear(x, w) for w in weights])
            yield Line(format, m, seconds * 1e6, one.nbytes / seconds / bandwidth, base / seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="six formats and three numbers of rows")
    parser.add_argument("--formats", help="comma-separated; default: all quantized formats")
    parser.add_argument("--n", type=int, default=4096, help="out features")
    parser.add_argument("--k", type=int, default=14336, help="in features")
    parser.add_argument("--json", metavar="FILE", help="also write the lines as JSON; - for standard output")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(
            "no CUDA device: nothing measured. What the compiler says is in benchmarks/kernel_report.md",
            file=sys.stderr,
        )
        return 2
    everything = QUICK_FORMATS if options.quick else tuple(name for name, record in FORMATS.items() if record.quantized)
    formats = tuple(options.formats.split(",")) if options.formats else everything
    card = torch.cuda.get_device_name()
    log = sys.stderr if options.json == "-" else sys.stdout
    print(f"{card}, N = {options.n}, K = {options.k}, bfloat16 activations", file=log)
    print(f"{'contestant':<22} {'M':>5} {'us':>9} {'of copy bandwidth':>18} {'x dense bf16':>13}", file=log)
    lines = []
    for line in measure(formats, QUICK_ROWS if options.quick else ROWS, options.n, options.k):
        lines.append(line)
        share, speed = f"{line.bandwidth:.0%}", f"{line.speed:.2f}"
        print(
            f"{line.contestant:<22} {line.rows:>5} {line.microseconds:>9.1f} {share:>18} {speed:>13}",
            file=log,
            flush=True,
        )
    if options.json:
        text = json.dumps(
            {"card": card, "n": options.n, "k": options.k, "lines": [asdict(line) for line in lines]}, indent=1
        )
        if options.json == "-":
            print(text)
        else:
            with open(options.json, "w", encoding="utf-8") as file:
                file.write(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
