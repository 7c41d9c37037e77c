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
    without = [row for row in rows if row[0] != "nvfp4"]
    assert "nvfp4: kernels only for nothing" in script.problems(without)
