"""Many bfloat16 rows through tiles of decoded weights: criterion A16T, and what never goes that way.

Processors without matrix units run these tests too: the tiles are then multiplied by PyTorch's ordinary product.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from ninfer_torch.kernels.precision import activation_precision
from ninfer_torch.layouts import slice_rows
from quantized import QUANTIZED, random_weight

native = pytest.importorskip("ninfer_torch.kernels.cpu.native", reason="the native kernels are not built")
dense_tiles = native.dense_tiles


@pytest.fixture(autouse=True)
def matrix_units(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiles of few rows, so that small matrices have several and a shorter last one."""
    before = native.used()
    native.use(None)
    monkeypatch.setattr(native, "_MATRIX_UNITS", True)
    monkeypatch.setattr(dense_tiles, "_TILE", 50 * 256)
    torch.manual_seed(0)
    yield
    monkeypatch.undo()
    native.use(before)


def check_a16t(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """At most 1.1 times the error of a dense product in x's dtype with the rounded weight."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    dense = F.linear(x, weight.to(x.dtype), bias)
    assert y.dtype == x.dtype and y.shape == dense.shape
    assert (y.double() - exact).norm() <= 1.1 * (dense.double() - exact).norm()


@pytest.mark.parametrize("format", QUANTIZED)
def test_many_rows_meet_the_criterion_of_matrix_units(format: str) -> None:
    weight = random_weight(format, 384, 256, divisors=3 if format == "nvfp4" else 1)
    planes, _, geometry, *_ = weight.call
    values = weight.dequantize()
    for rows in (16, 33):
        x, bias = torch.randn(rows, 256).bfloat16(), torch.randn(384).bfloat16()
        check_a16t(native.linear(x, planes, format, geometry, None, "A16Only"), x, values)
        check_a16t(native.linear(x, planes, format, geometry, bias, "A16Only"), x, values, bias)
        part, place = slice_rows(format, planes, geometry, 127, 201)
        check_a16t(native.linear(x, part, format, place, bias[127:201], "A16Only"), x, values[127:201], bias[127:201])


def test_shapes_and_strides() -> None:
    weight = random_weight("q4_g64_fp16", 120, 200)
    planes, format, geometry, *_ = weight.call
    x = torch.randn(200, 3, 11).bfloat16().permute(2, 1, 0)
    y = native.linear(x, planes, format, geometry, None, "A16Only")
    assert y.shape == (11, 3, 120)
    check_a16t(y.reshape(33, 120), x.reshape(33, 200), weight.dequantize())


def test_a_tile_never_holds_less_than_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_tiles, "_TILE", 1)
    weight = random_weight("gguf_q6_k", 5, 256)
    planes, format, geometry, *_ = weight.call
    x = torch.randn(16, 256).bfloat16()
    check_a16t(native.linear(x, planes, format, geometry, None, "A16Only"), x, weight.dequantize())


@pytest.mark.parametrize(
    "rows, dtype, bias_dtype",
    [
        (15, torch.bfloat16, None),
        (16, torch.float32, None),
        (16, torch.float16, None),
        (16, torch.bfloat16, torch.float32),
    ],
)
def test_everything_else_stays_in_registers(
    rows: int, dtype: torch.dtype, bias_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    planes, format, geometry, *_ = random_weight("q4_g64_fp16", 120, 200).call
    x, bias = torch.randn(rows, 200).to(dtype), None if bias_dtype is None else torch.randn(120, dtype=bias_dtype)
    expected = native.linear(x, planes, format, geometry, bias, "A16Only")

    def unwanted(*_: object) -> torch.Tensor:
        raise AssertionError("decoded into tiles")

    monkeypatch.setattr(dense_tiles, "multiply", unwanted)
    assert torch.equal(native.linear(x, planes, format, geometry, bias, "A16Only"), expected)
    x = torch.randn(16, 200).bfloat16()
    with pytest.raises(AssertionError, match="tiles"):
        native.linear(x, planes, format, geometry, None, "A16Only")
    slower = native.instruction_sets()[0]
    if slower != native.used():  # a forced instruction set is what computes
        fastest = native.used()
        native.use(slower)
        native.linear(x, planes, format, geometry, None, "A16Only")
        native.use(fastest)


@pytest.mark.parametrize("format", ["q8_g32_fp16", "fp8_e4m3fn_row_bf16"])
def test_int8_activations_are_faster_for_longer(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planes, _, geometry, *_ = random_weight(format, 120, 200).call
    tiles = []
    multiply = dense_tiles.multiply
    monkeypatch.setattr(dense_tiles, "multiply", lambda *args: tiles.append(1) or multiply(*args))
    used = []
    for rows in (16, 159, 160):
        for policy, precision in [("AllowA8", "auto"), ("AllowA8", "a16"), ("A16Only", "auto")]:
            with activation_precision(precision):
                native.linear(torch.randn(rows, 200).bfloat16(), planes, format, geometry, None, policy)
            used.append(len(tiles))
            tiles.clear()
    int8 = format.startswith("q8")
    assert used == [not int8, 1, 1, not int8, 1, 1, 1, 1, 1]
