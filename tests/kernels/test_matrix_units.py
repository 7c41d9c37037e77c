"""Many bfloat16 rows in a processor's matrix units: criterion A16T, and what never goes that way."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ninfer_torch.kernels.precision import activation_precision
from ninfer_torch.layouts import slice_rows
from quantized import QUANTIZED, random_weight

native = pytest.importorskip("ninfer_torch.kernels.cpu.native", reason="the native kernels are not built")

pytestmark = pytest.mark.skipif(not native._native.matrix_units(), reason="this processor has no matrix units (AMX)")


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each product from now on went to the matrix units."""
    found: list[bool] = []
    decide = native._in_tiles
    monkeypatch.setattr(native, "_in_tiles", lambda *args: found.append(decide(*args)) or found[-1])
    return found


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


@pytest.mark.parametrize("columns", [1, 31, 33, 200, 300])
def test_columns_and_rows_that_fill_no_tile(columns: int, uses: list[bool]) -> None:
    for weight_rows in (1, 15, 17, 33, 70):
        weight = random_weight("q8_g32_fp16", weight_rows, columns)
        planes, format, geometry, *_ = weight.call
        for rows in (16, 17, 31, 32, 48, 65):
            x, bias = torch.randn(rows, columns).bfloat16(), torch.randn(weight_rows).bfloat16()
            check_a16t(native.linear(x, planes, format, geometry, bias, "A16Only"), x, weight.dequantize(), bias)
    assert all(uses)


def test_strides(uses: list[bool]) -> None:
    weight = random_weight("q4_g64_fp16", 120, 200)
    planes, format, geometry, *_ = weight.call
    x = torch.randn(200, 3, 11).bfloat16().permute(2, 1, 0)
    y = native.linear(x, planes, format, geometry, None, "A16Only")
    assert y.shape == (11, 3, 120) and uses == [True]
    check_a16t(y.reshape(33, 120), x.reshape(33, 200), weight.dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_bias_of_any_dtype(dtype: torch.dtype, uses: list[bool]) -> None:
    weight, x, bias = random_weight("gguf_q6_k", 40, 256), torch.randn(20, 256).bfloat16(), torch.randn(40).to(dtype)
    planes, format, geometry, *_ = weight.call
    y = native.linear(x, planes, format, geometry, bias, "A16Only")
    exact = x.double() @ weight.dequantize().bfloat16().double().T + bias.double()
    assert uses == [True] and (y.double() - exact).norm() <= 1.1 * (exact.bfloat16().double() - exact).norm()


def test_values_that_are_no_numbers_stay_in_their_rows() -> None:
    weight = random_weight("q4_g64_fp16", 40, 128)
    planes, format, geometry, *_ = weight.call
    x = torch.randn(20, 128).bfloat16()
    x[3, 5], x[7, 9] = float("nan"), float("inf")
    y = native.linear(x, planes, format, geometry, None, "A16Only")
    assert y[3].isnan().all() and not y[7].isfinite().any()
    assert y[[row for row in range(20) if row not in (3, 7)]].isfinite().all()


def test_threads_do_not_change_a_word() -> None:
    before = torch.get_num_threads()
    try:
        for columns in (200, 3000):
            planes, format, geometry, *_ = random_weight("q5_g64_fp16", 500, columns).call
            for rows in (16, 100):
                x, found = torch.randn(rows, columns).bfloat16(), []
                for threads in (1, 2, 7):
                    torch.set_num_threads(threads)
                    found.append(native.linear(x, planes, format, geometry, None, "A16Only"))
                assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows, dtype", [(15, torch.bfloat16), (16, torch.float32), (16, torch.float16)])
def test_everything_else_stays_in_vector_kernels(rows: int, dtype: torch.dtype, uses: list[bool]) -> None:
    planes, format, geometry, *_ = random_weight("q4_g64_fp16", 120, 200).call
    native.linear(torch.randn(rows, 200).to(dtype), planes, format, geometry, None, "A16Only")
    slower, fastest = native.instruction_sets()[-2], native.used()
    native.use(slower)  # a forced instruction set is what computes
    try:
        native.linear(torch.randn(16, 200).bfloat16(), planes, format, geometry, None, "A16Only")
    finally:
        native.use(fastest)
    assert uses == [False, False]


@pytest.mark.parametrize("format", ["q8_g32_fp16", "fp8_e4m3fn_row_bf16"])
def test_int8_activations_are_faster_for_longer(format: str, uses: list[bool]) -> None:
    planes, _, geometry, *_ = random_weight(format, 120, 200).call
    least = native._LEAST_INT8_ROWS
    for rows in (16, least - 1, least):
        for policy, precision in [("AllowA8", "auto"), ("AllowA8", "a16"), ("A16Only", "auto")]:
            with activation_precision(precision):
                native.linear(torch.randn(rows, 200).bfloat16(), planes, format, geometry, None, policy)
    int8 = format.startswith("q8")
    assert uses == [not int8, True, True, not int8, True, True, True, True, True]
