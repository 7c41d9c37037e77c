"""Registration and the launch table: what needs neither a device nor the interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ninfer_torch.formats import FORMATS
from ninfer_torch.kernels import fallback, ops
from ninfer_torch.kernels import triton as package
from ninfer_torch.kernels.triton import cuda_operator
from quantized import random_weight

QUANTIZED = [name for name, record in FORMATS.items() if record.quantized]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("name", ops._SCHEMAS)
def test_every_operator_has_a_cuda_kernel(name: str) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ninfer::{name}", "CUDA")


def test_importing_the_package_imports_no_triton() -> None:
    code = "import sys, ninfer_torch, ninfer_torch.kernels.ops; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_triton_the_reference_computes_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # makes the import fail
    package._operators.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="decoded by the slow reference"):
            operators = package._operators()
        assert all(operators[name] is getattr(fallback, name) for name in ops._SCHEMAS)
        assert package._operators() is operators  # cached: no second warning
        weight = random_weight("q4_g64_fp16", 5, 130)
        x = torch.randn(2, 130)
        y = cuda_operator("linear")(x, *weight.call[:3], None, "A16Only")
        assert torch.equal(y, fallback.linear(x, *weight.call[:3], None, "A16Only"))
    finally:
        package._operators.cache_clear()


def test_every_format_has_a_tile_decoder() -> None:
    pytest.importorskip("triton")
    from ninfer_torch.kernels.triton.operators import OPERATORS, TILES

    assert set(OPERATORS) == set(ops._SCHEMAS)
    assert set(TILES) == set(QUANTIZED)
    for name, decoder in TILES.items():
        record = FORMATS[name]
        block = getattr(record, "block_values", getattr(record, "group", decoder.lanes))
        assert block % decoder.lanes == 0 or decoder.lanes % block == 0, name


@pytest.mark.parametrize("architecture", [0, 75, 80, 89, 90, 100, 120, 130])
@pytest.mark.parametrize("operation", ["linear", "expert_linear", "backward", "rows"])
def test_the_table_has_a_launch_for_everything(operation: str, architecture: int) -> None:
    pytest.importorskip("triton")
    from ninfer_torch.kernels.triton.launch import choose, reachable
    from ninfer_torch.kernels.triton.operators import TILES

    for family in {decoder.family for decoder in TILES.values()}:
        for dtype in FLOATS:
            chosen = {
                choose(operation, family, dtype, rows, architecture)
                for rows in (0, 1, 2, 3, 4, 15, 16, 17, 33, 65, 1 << 20)
            }
            assert chosen == set(reachable(operation, family, dtype, architecture))


def test_few_rows_never_round_weights() -> None:
    pytest.importorskip("triton")
    from ninfer_torch.kernels.triton.launch import choose

    for rows in range(1, 16):
        for dtype in FLOATS:
            launch = choose("linear", "grouped", dtype, rows, 90)
            assert launch.kernel == "small_m" or (launch.paired and dtype == torch.bfloat16)
            assert choose("backward", "grouped", dtype, rows, 90).wide


def test_splits_fill_the_card_and_no_more() -> None:
    pytest.importorskip("triton")
    from ninfer_torch.kernels.triton.launch import Launch, splits_of

    launch = Launch("small_m", 1, 32, 32, warps=4, max_splits=8)
    assert splits_of(launch, programs=128, steps=100, processors=132) == 3
    assert splits_of(launch, programs=4, steps=100, processors=132) == 8
    assert splits_of(launch, programs=4, steps=2, processors=132) == 2
    assert splits_of(launch, programs=5000, steps=100, processors=132) == 1


def test_kernels_start_on_the_device_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two cards, the current one need not be the one where the tensors lie: checked on what `torch.cuda` is asked."""
    pytest.importorskip("triton")
    from ninfer_torch.kernels.triton import operators

    entered: list[object] = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: object) -> None:
            entered.append("left")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Device)
    for index, expected in [(1, [torch.device("cuda", 1), "left"]), (0, [])]:
        with operators._on(torch.device("cuda", index)):
            pass
        assert entered == expected
        entered.clear()
