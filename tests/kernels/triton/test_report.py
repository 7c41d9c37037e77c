"""The report of compiled kernels belongs to the kernels: benchmarks/kernel_report.py writes it anew after a change."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "kernel_report.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_report", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_report"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_report_is_not_stale() -> None:
    result = subprocess.run([sys.executable, str(SCRIPT), "--check"], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_broken_rules_are_found(script: ModuleType) -> None:
    rows = script.read_rows(script.REPORT.read_text(encoding="utf-8"))
    assert rows and not list(script.problems(rows))
    decode = next(row for row in rows if row[3].startswith("linear small_m 1x"))
    values = next(row for row in rows if row[3].startswith("rows"))

    def found(row: list[str], column: int, cell: str) -> str:
        broken = [*row[:column], cell, *row[column + 1 :]]
        return "\n".join(script.problems([broken if other is row else other for other in rows]))

    assert "spills 16 bytes" in found(decode, 5, "16")
    assert "shared memory" in found(decode, 6, str(1 << 20))
    assert "lane-instructions per weight" in found(decode, 7, "99.00")
    assert "where exactness is promised" in found(values, 9, "fma.rn.f32")


def test_one_kernel_fewer_is_found(script: ModuleType) -> None:
    """A report needs every kernel of every format for every target: a doctored one lacks a single line."""
    rows = script.read_rows(script.REPORT.read_text(encoding="utf-8"))

    def without(*start: str) -> list[str]:
        kept = [row for row in rows if not (row[:3] == [*start[:3]] and row[3].startswith(start[3]))]
        assert len(kept) == len(rows) - 1
        return list(script.problems(kept))

    for format, target, dtype, kernel in (
        ("q4_g64_fp16", "sm_90", "bf16", "linear small_m"),
        ("q4_g64_fp16", "sm_90", "fp32", "linear tiled"),
        ("gguf_q4_k", "gfx942", "bf16", "linear tiled"),
        ("fp8_e4m3fn_row_bf16", "sm_120", "bf16", "linear small_m"),
        ("nvfp4", "sm_90", "bf16", "expert_linear small_m"),
        ("nvfp4", "sm_90", "bf16", "backward backward"),
        ("nvfp4", "sm_90", "bf16", "rows rows"),
    ):
        assert without(format, target, dtype, kernel) == [f"{format} {target} {dtype}: no kernel {kernel}"]
    other_target = [row for row in rows if row[:2] != ["t2_g128_fp16", "sm_80"]]
    assert len(list(script.problems(other_target))) == 2 * 3
    other_format = [row for row in rows if row[0] != "nvfp4"]
    assert len(list(script.problems(other_format))) == len(rows) - len(other_format) == 5 + 2 * 2 + 4 * 3 * 2
