"""What the compiler makes of every Triton kernel, written to kernel_report.md: no GPU is needed, and no time is claimed.

python benchmarks/kernel_report.py             compile the matrix and write the report
python benchmarks/kernel_report.py --check     fail where the report is stale or breaks a rule; compiles nothing
python benchmarks/kernel_report.py --formats q4_g64_fp16,nvfp4 --targets sm_90     print a part of it
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ninfer_torch.formats import FORMATS
from ninfer_torch.kernels.triton.offline import (
    DTYPES,
    TARGETS,
    Facts,
    Variant,
    compile_variant,
    facts_of,
    source_hash,
    variants,
)

REPORT = Path(__file__).with_suffix(".md")

BUDGETS = {
    "q2_g64_fp16": 5.6,
    "q4_g64_fp16": 5.1,
    "q5_g64_fp16": 7.4,
    "q6_g64_fp16": 7.1,
    "q8_g32_fp16": 5.5,
    "t2_g128_fp16": 5.6,
    "nvfp4": 7.9,
    "fp8_e4m3fn_row_bf16": 9.1,
    "fp8_e4m3fn_row_fp16": 9.5,
    "gguf_q4_0": 5.6,
    "gguf_q5_0": 8.2,
    "gguf_q8_0": 6.4,
    "gguf_q2_k": 8.7,
    "gguf_q3_k": 11.1,
    "gguf_q4_k": 8.7,
    "gguf_q5_k": 10.7,
    "gguf_q6_k": 10.0,
    "gguf_iq2_xxs": 10.3,
    "gguf_iq2_xs": 10.7,
    "gguf_iq3_xxs": 11.1,
    "gguf_iq1_s": 9.1,
    "gguf_iq4_nl": 7.4,
    "gguf_iq3_s": 11.9,
    "gguf_iq2_s": 10.6,
    "gguf_iq4_xs": 8.1,
    "gguf_iq1_m": 16.5,
    "gguf_q2_0": 5.1,
}
"""Lane-instructions per weight of the decode kernel (one activation row, bfloat16, sm_90), with 4 % to spare."""

SHARED_LIMITS = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99, "gfx942": 64}
"""KiB of shared memory that one program may use."""

EXACT_MARKS = ("fma.rn.f32", "div.full", ".ftz", "tf32")
"""What the PTX of kernels that promise exact values must not hold."""


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    variant: Variant
    facts: Facts
    marks: tuple[str, ...]

    def __str__(self) -> str:
        facts, variant = self.facts, self.variant
        per_weight = "-" if facts.instructions_per_weight is None else f"{facts.instructions_per_weight:.2f}"
        cells = (
            variant.format, variant.target, variant.dtype, variant, facts.registers, facts.stack, facts.shared,
            per_weight, ",".join(map(str, facts.load_bits)) or "-", " ".join(self.marks) or "-",
        )  # fmt: skip
        return "| " + " | ".join(str(cell) for cell in cells) + " |"


HEAD = (
    "| format | target | dtype | kernel (M x N x U) | registers | stack | shared | per weight | load bits | marks |\n"
    "|---|---|---|---|---:|---:|---:|---:|---|---|"
)


KINDS = (
    ("rows", "rows"),
    ("linear", "small_m"),
    ("linear", "tiled"),
    ("expert_linear", "small_m"),
    ("backward", "backward"),
)
"""Operation and kernel of what is compiled for sm_90 in bfloat16; the launch for the most activation rows stands for each."""

ELSEWHERE = KINDS[1:3]
"""Decode and prefill: what is compiled in the other dtypes and for the other targets."""


def _required(target: str, dtypes: Sequence[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Dtype, and operation and kernel, of what every format has for a target."""
    for dtype in dtypes:
        for kind in KINDS if (target, dtype) == ("sm_90", "bf16") else ELSEWHERE:
            yield dtype, kind


def matrix(formats: list[str], target: str, dtypes: list[str]) -> Iterator[Variant]:
    """The kernels of one target, format by format."""
    for format in formats:
        for dtype, kinds in itertools.groupby(_required(target, dtypes), key=lambda required: required[0]):
            last = {(variant.operation, variant.launch.kernel): variant for variant in variants(format, dtype, target)}
            for _, kind in kinds:
                yield last[kind]


def inspect(variant: Variant) -> Row:
    compiled = compile_variant(variant)
    text = compiled.asm.get("ptx", "")
    exact = variant.operation == "rows" or variant.dtype == "fp32"
    marks = EXACT_MARKS if variant.operation == "rows" else ("tf32",)
    return Row(variant, facts_of(variant, compiled), tuple(mark for mark in marks if exact and mark in text))


def problems(rows: list[list[str]]) -> Iterator[str]:
    """Rules broken by the cells of a whole report's rows."""
    yield from broken(rows)
    yield from missing(rows)


def broken(rows: list[list[str]]) -> Iterator[str]:
    """Rules broken by the cells of any rows."""
    for format, target, dtype, kernel, _, stack, shared, per_weight, _, marks in rows:
        where = f"{format} {target} {dtype} {kernel}"
        decode = "small_m" in kernel
        if decode and stack not in ("0", "None"):
            yield f"{where}: a decode kernel spills {stack} bytes"
        if int(shared) > SHARED_LIMITS[target] * 1024:
            yield f"{where}: {shared} bytes of shared memory, expected at most {SHARED_LIMITS[target]} KiB"
        if marks != "-":
            yield f"{where}: {marks} where exactness is promised"
        if decode and (target, dtype) == ("sm_90", "bf16") and kernel.startswith("linear small_m 1x"):
            budget = BUDGETS[format]
            if per_weight == "-" or float(per_weight) > budget:
                yield f"{where}: {per_weight} lane-instructions per weight, expected at most {budget}"


def missing(
    rows: list[list[str]], targets: Iterable[str] = tuple(TARGETS), dtypes: Sequence[str] = tuple(DTYPES)
) -> Iterator[str]:
    """What a report of the targets and dtypes lacks: a kernel of one format, for one target, in one dtype each."""
    found = {(format, target, dtype, *kernel.split()[:2]) for format, target, dtype, kernel, *_ in rows}
    for format, target in itertools.product(_quantized(), targets):
        for dtype, (operation, kernel) in _required(target, dtypes):
            if (format, target, dtype, operation, kernel) not in found:
                yield f"{format} {target} {dtype}: no kernel {operation} {kernel}"


def _quantized() -> list[str]:
    return [name for name, record in FORMATS.items() if record.quantized]


def read_rows(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in text.splitlines()
        if line.startswith("| ") and line.split("|")[1].strip() in FORMATS
    ]


def check() -> int:
    if not REPORT.exists():
        print(f"{REPORT.name} is missing: run benchmarks/kernel_report.py")
        return 1
    text = REPORT.read_text(encoding="utf-8")
    found = list(problems(read_rows(text)))
    if f"`{source_hash()}`" not in text:
        found.insert(0, f"{REPORT.name} is stale: it lacks the hash of the kernel sources, {source_hash()}")
    print("\n".join(found) or f"{REPORT.name}: {len(read_rows(text))} kernels, no problem")
    return 1 if found else 0


def write(rows: list[Row], compiled_for: str, digest: str) -> None:
    import triton

    introduction = (
        "# Triton kernels as compiled\n\n"
        "Compiler facts, not measurements: no kernel here was timed. Written by `python benchmarks/kernel_report.py`.\n\n"
        f"Hash of the kernel sources: `{digest}`. Triton {triton.__version__}. Compiled for {compiled_for}.\n\n"
        "*Stack* counts spilled bytes (registers on gfx942), *shared* bytes. *Per weight* is the main loop's "
        "lane-instructions of every kind divided by the weights it handles; *load bits* are the widths of its global loads. "
        "*Marks* are PTX constructs forbidden where values are exact.\n"
    )
    REPORT.write_text(f"{introduction}\n{HEAD}\n" + "\n".join(map(str, rows)) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="judge the written report and its hash")
    parser.add_argument(
        "--formats", default=",".join(_quantized()), help="comma-separated; a part is printed, not written"
    )
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated, of " + ", ".join(TARGETS))
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="comma-separated, of " + ", ".join(DTYPES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    options = parser.parse_args()
    if options.check:
        return check()
    formats, targets, dtypes = (chosen.split(",") for chosen in (options.formats, options.targets, options.dtypes))
    whole = formats == _quantized()
    rows: list[Row] = []
    start, digest = time.monotonic(), source_hash()  # of what is compiled, not of what is edited meanwhile
    print(HEAD)
    with ProcessPoolExecutor(options.jobs) as processes:
        for row in processes.map(inspect, (v for target in targets for v in matrix(formats, target, dtypes))):
            rows.append(row)
            print(row, flush=True)
    if whole:
        write(rows, f"{', '.join(targets)}; {', '.join(dtypes)}", digest)
    print(f"{len(rows)} kernels in {time.monotonic() - start:.0f} s", file=sys.stderr)
    written = read_rows("\n".join(map(str, rows)))
    found = [*broken(written), *(missing(written, targets, dtypes) if whole else ())]
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
