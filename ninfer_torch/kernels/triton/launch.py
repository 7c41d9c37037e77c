"""Which kernel runs a product and in which shape: one table, read from the top.

The first rule that admits the operation, format family, dtype, number of activation rows and architecture decides. Shapes follow
from compile-time facts (registers, shared memory, instructions per weight; benchmarks/kernel_report.md), not from measurements.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

__all__ = ["OPERATIONS", "RULES", "Launch", "Rule", "choose", "reachable", "splits_of"]

_ANY = 1 << 62
_HALVES = (torch.bfloat16, torch.float16)
_FLOATS = (torch.float32, *_HALVES)


@dataclass(frozen=True)
class Launch:
    """One launch. Blocks count activation rows (M), weight rows (N) and units of a decoder (U).

    `max_splits` bounds the cuts of K where whole rows do not fill the card. The flags are those of `tiled.tiled_kernel`.
    """

    kernel: str
    block_m: int
    block_n: int
    block_u: int
    warps: int
    stages: int = 2
    max_splits: int = 1
    permuted: bool = False
    paired: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Rule:
    """The launch of `operation` for up to `max_rows` activation rows (per expert, on average) of the dtypes.

    `families` and `architectures` (compute capability times ten; 0 for what has none) empty mean any.
    """

    operation: str
    launch: Launch
    max_rows: int = _ANY
    dtypes: tuple[torch.dtype, ...] = _FLOATS
    families: tuple[str, ...] = ()
    architectures: tuple[int, ...] = ()


_KIB_64 = (0, 75)
_KIB_99 = (86, 89, 120, 121)
"""Architectures by the shared memory one program may use; ROCm cards have 64 KiB. The others have 163 KiB or more."""

RULES: tuple[Rule, ...] = (
    # Few rows: criterion A16. bfloat16 pairs of tensor-core products are exact enough, binary16 ones would underflow.
    Rule("linear", Launch("small_m", 1, 32, 32, warps=4, max_splits=8), max_rows=1),
    Rule(
        "linear", Launch("tiled", 16, 64, 16, warps=4, max_splits=8, paired=True), max_rows=15, dtypes=(torch.bfloat16,)
    ),
    Rule("linear", Launch("small_m", 2, 32, 32, warps=4, max_splits=8), max_rows=2),
    Rule(
        "linear",
        Launch("small_m", 4, 16, 32, warps=4, max_splits=8),
        max_rows=15,
        dtypes=(torch.float32,),
        families=("gguf_plain",),
    ),
    Rule(
        "linear",
        Launch("small_m", 2, 32, 32, warps=4, max_splits=8),
        max_rows=15,
        dtypes=(torch.float16,),
        families=("gguf_k", "gguf_i"),
        architectures=(100, 103),
    ),
    Rule("linear", Launch("small_m", 4, 32, 32, warps=4, max_splits=8), max_rows=15),
    # Many rows: criterion A16T; float32 is exact at any size.
    Rule("linear", Launch("tiled", 16, 32, 16, warps=4, max_splits=4, permuted=True), dtypes=(torch.float32,)),
    Rule("linear", Launch("tiled", 16, 64, 16, warps=4, stages=1, max_splits=8, permuted=True), architectures=_KIB_64),
    Rule(
        "linear", Launch("tiled", 32, 64, 16, warps=4, max_splits=8, permuted=True), max_rows=64, architectures=_KIB_99
    ),
    Rule("linear", Launch("tiled", 64, 64, 16, warps=4, permuted=True), families=("gguf_k",), architectures=_KIB_99),
    Rule("linear", Launch("tiled", 64, 128, 16, warps=8, permuted=True), architectures=_KIB_99),
    Rule("linear", Launch("tiled", 16, 64, 16, warps=4, stages=3, max_splits=8, permuted=True), max_rows=16),
    Rule("linear", Launch("tiled", 32, 64, 16, warps=4, stages=3, max_splits=8, permuted=True), max_rows=32),
    Rule("linear", Launch("tiled", 64, 64, 16, warps=4, max_splits=4, permuted=True), max_rows=64),
    Rule("linear", Launch("tiled", 128, 128, 16, warps=8, permuted=True)),
    # Experts: a row by itself until an expert has several.
    Rule("expert_linear", Launch("small_m", 1, 32, 32, warps=4), max_rows=3),
    Rule("expert_linear", Launch("tiled", 16, 32, 16, warps=4, permuted=True), dtypes=(torch.float32,)),
    Rule("expert_linear", Launch("tiled", 16, 64, 16, warps=4, stages=1, permuted=True), architectures=_KIB_64),
    Rule("expert_linear", Launch("tiled", 16, 64, 16, warps=4, permuted=True), max_rows=24),
    Rule("expert_linear", Launch("tiled", 32, 64, 16, warps=4, permuted=True), architectures=_KIB_99),
    Rule("expert_linear", Launch("tiled", 64, 64, 16, warps=4, permuted=True)),
    # Gradients: an accumulator per lane, so narrow blocks.
    Rule("backward", Launch("backward", 16, 16, 16, warps=4, stages=1, wide=True), max_rows=15),
    Rule("backward", Launch("backward", 16, 16, 16, warps=4, stages=1, wide=True), dtypes=(torch.float32,)),
    Rule("backward", Launch("backward", 32, 16, 16, warps=4, stages=1)),
    # Values: no activations.
    Rule("rows", Launch("rows", 1, 16, 32, warps=4)),
)


OPERATIONS = tuple(dict.fromkeys(rule.operation for rule in RULES))
"""What the table knows: `rows` are dequantize and embedding, `backward` both gradients."""


def _admits(rule: Rule, operation: str, family: str, dtype: torch.dtype, rows: int, architecture: int) -> bool:
    return (
        rule.operation == operation
        and rows <= rule.max_rows
        and dtype in rule.dtypes
        and (not rule.families or family in rule.families)
        and (not rule.architectures or architecture in rule.architectures)
    )


def reachable(operation: str, family: str, dtype: torch.dtype, architecture: int) -> tuple[Launch, ...]:
    """Every launch that some number of rows leads to, in the order of rising rows."""
    launches: list[Launch] = []
    covered = -1
    for rule in RULES:
        if _admits(rule, operation, family, dtype, covered + 1, architecture):
            launches.append(rule.launch)
            covered = rule.max_rows
    return tuple(dict.fromkeys(launches))


@functools.cache
def choose(operation: str, family: str, dtype: torch.dtype, rows: int, architecture: int) -> Launch:
    """The launch of the first rule that admits all five. `rows` counts activation rows, for experts the average of one."""
    return next(rule.launch for rule in RULES if _admits(rule, operation, family, dtype, rows, architecture))


def splits_of(launch: Launch, programs: int, steps: int, processors: int) -> int:
    """Cuts of K that bring `programs` to about two per multiprocessor; the same for the same shapes on the same card."""
    return max(1, min(launch.max_splits, steps, -(-2 * processors // programs)))
