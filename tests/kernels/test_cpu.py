"""Native CPU kernels against the reference and exact products: every format, on every instruction set this processor runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cpu_cases import any_words, bits, check_a8, shapes
from golden import golden, load_tensors
from golden_objects import read_objects
from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.formats import get_format
from ninfer_torch.kernels import fallback
from ninfer_torch.kernels.precision import activation_precision, set_activation_precision
from ninfer_torch.layouts import Geometry, planes_of, slice_rows, split_planes
from quantized import QUANTIZED, check_a16, exact_product, random_weight

native = pytest.importorskip("ninfer_torch.kernels.cpu.native", reason="the native kernels are not built")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (0, 1, 2, 5, 8, 17, 33)
FLOATS_ONLY = ("fp8_e4m3fn_row_bf16", "fp8_e4m3fn_row_fp16")


@pytest.fixture(params=native.instruction_sets(), autouse=True)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before, units = native.INSTRUCTION_SETS[native._isa], native._MATRIX_UNITS
    native._MATRIX_UNITS = (
        False  # many bfloat16 rows run on the vector kernels too; test_matrix_units.py has the other way
    )
    torch.manual_seed(0)
    set_activation_precision("policy")  # so that a policy alone decides, for float32 too
    yield native.use(request.param)
    set_activation_precision("auto")
    native._MATRIX_UNITS = units
    native.use(before)


# Exact decode


@pytest.mark.parametrize("format", QUANTIZED)
def test_golden_objects_decode_bit_for_bit(format: str) -> None:
    expected = load_tensors(golden("ninfer", "formats", f"{format}.safetensors"))
    for key, stored in read_objects(golden("ninfer", "formats", f"{format}.ninfer")).items():
        planes = split_planes(stored.tensor, planes_of(format, stored.shape, stored.divisors))
        geometry = Geometry.whole(stored.shape, stored.divisors)
        values = native.dequantize(planes, format, geometry, torch.float32)
        assert torch.equal(values.view(torch.int32), expected[key].view(torch.int32)), key
        ids = torch.arange(stored.shape[0]).flip(0)
        rows = native.embedding(ids, planes, format, geometry, torch.float32)
        assert torch.equal(rows.view(torch.int32), expected[key].flip(0).view(torch.int32)), key


@pytest.mark.parametrize("format", QUANTIZED)
def test_any_bytes_decode_as_the_reference_says(format: str) -> None:
    one_row = [] if format == "nvfp4" else [(1, getattr(get_format(format), "block_values", 1))]
    for seed, shape in enumerate(shapes(format) + one_row):
        planes, geometry = any_words(format, shape, seed), Geometry.whole(shape)
        ids = torch.randint(0, shape[0], (2, 3), dtype=torch.int32)
        for dtype in DTYPES:
            expected = fallback.dequantize(planes, format, geometry, dtype)
            assert torch.equal(bits(native.dequantize(planes, format, geometry, dtype)), bits(expected))
            rows = native.embedding(ids, planes, format, geometry, dtype)
            assert rows.shape == (2, 3, shape[1]) and torch.equal(bits(rows), bits(expected[ids.long()]))


def test_every_scale_and_code_of_sixteen_bits_is_exact() -> None:
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    codes = torch.arange(32, dtype=torch.uint8).mul(8).repeat(1 << 16, 4)
    planes = [codes.view(1 << 16, 4, 32), words.repeat_interleave(4).view(1 << 16, 4)]
    geometry = Geometry.whole((1 << 16, 128))
    expected = fallback.dequantize(planes, "q8_g32_fp16", geometry, torch.float32)
    assert torch.equal(bits(native.dequantize(planes, "q8_g32_fp16", geometry, torch.float32)), bits(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_values_are_rounded_once(dtype: torch.dtype) -> None:
    weight = random_weight("nvfp4", 128, 256, seed=3)
    planes, format, geometry, *_ = weight.call
    rounded = native.dequantize(planes, format, geometry, torch.float32).to(dtype)
    assert torch.equal(native.dequantize(planes, format, geometry, dtype), rounded)


@pytest.mark.parametrize("format", QUANTIZED)
def test_row_views_take_their_part_of_the_parent(format: str) -> None:
    weight = random_weight(format, 384, 256, divisors=3 if format == "nvfp4" else 1)
    planes, _, geometry, *_ = weight.call
    whole = native.dequantize(planes, format, geometry, torch.float32)
    x = torch.randn(3, 256)
    products = native.linear(x, planes, format, geometry, None, "A16Only")
    for begin, end in [(0, 1), (127, 129), (100, 300), (383, 384)]:
        part, place = slice_rows(format, planes, geometry, begin, end)
        assert torch.equal(native.dequantize(part, format, place, torch.float32), whole[begin:end])
        assert torch.equal(native.linear(x, part, format, place, None, "A16Only"), products[:, begin:end])
        ids = torch.tensor([0, end - begin - 1])
        assert torch.equal(native.embedding(ids, part, format, place, torch.float32), whole[begin:end][ids])


@pytest.mark.parametrize("format", QUANTIZED)
def test_gathered_and_joined_rows(format: str) -> None:
    weight = random_weight(format, 256, 256, divisors=2 if format == "nvfp4" else 1)
    index = torch.tensor([255, 0, 130, 130, 7])
    gathered, joined = weight.index_select(0, index), torch.cat([weight[100:140], weight[:3]])
    dense = weight.dequantize()
    assert torch.equal(gathered.dequantize(), dense[index])
    assert torch.equal(joined.dequantize(), torch.cat([dense[100:140], dense[:3]]))
    x = torch.randn(2, 256)
    for view in (gathered, joined):
        check_a16(torch.nn.functional.linear(x, view), exact_product(x, view), 256)


# Products


@pytest.mark.parametrize("format", QUANTIZED)
def test_products_on_floating_activations(format: str) -> None:
    for seed, shape in enumerate(shapes(format)):
        weight = random_weight(format, *shape, seed=seed)
        planes, _, geometry, *_ = weight.call
        for rows in ROWS:
            x, bias = torch.randn(rows, shape[1]), torch.randn(shape[0])
            for dtype in DTYPES:
                narrow = x.to(dtype)
                y = native.linear(narrow, planes, format, geometry, bias.to(dtype), "A16Only")
                assert y.dtype == dtype and y.shape == (rows, shape[0])
                check_a16(y, exact_product(narrow, weight, bias.to(dtype)), shape[1])


@pytest.mark.parametrize("format", QUANTIZED)
def test_products_on_int8_activations(format: str) -> None:
    for seed, shape in enumerate(shapes(format)):
        weight = random_weight(format, *shape, seed=seed)
        planes, _, geometry, *_ = weight.call
        for rows in ROWS:
            x, bias = torch.randn(rows, shape[1]), torch.randn(shape[0])
            for dtype in DTYPES:
                narrow = x.to(dtype)
                y = native.linear(narrow, planes, format, geometry, bias.to(dtype), "AllowA8")
                check_a8(y, narrow, weight.dequantize(), format, bias.to(dtype))


@pytest.mark.parametrize("format", QUANTIZED)
def test_a_policy_decides_and_the_switch_overrides(format: str) -> None:
    weight = random_weight(format, 128, 512)
    planes, _, geometry, *_ = weight.call
    x = torch.randn(3, 512)

    def product(policy: str) -> torch.Tensor:
        return native.linear(x, planes, format, geometry, None, policy)

    exact = product("A16Only")
    assert torch.equal(product("AllowA8"), product("AllowA4"))
    assert torch.equal(product("AllowA8"), exact) == (format in FLOATS_ONLY)
    with activation_precision("a16"):
        assert torch.equal(product("AllowA4"), exact)
        with activation_precision("policy"):
            assert torch.equal(product("AllowA8"), exact) == (format in FLOATS_ONLY)
    with activation_precision("auto"):  # float32 activations are left alone
        assert torch.equal(product("AllowA8"), exact)
    set_activation_precision("a16")
    try:
        assert torch.equal(product("AllowA8"), exact)
    finally:
        set_activation_precision("policy")
    with pytest.raises(UnsupportedOperation, match="auto, policy, a16"):
        set_activation_precision("a8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_auto_quantizes_what_is_16_bits_wide(dtype: torch.dtype) -> None:
    planes, format, geometry, *_ = random_weight("q4_g64_fp16", 128, 512).call
    x = torch.randn(3, 512).to(dtype)
    exact, coarse = (native.linear(x, planes, format, geometry, None, policy) for policy in ("A16Only", "AllowA8"))
    with activation_precision("auto"):
        assert torch.equal(native.linear(x, planes, format, geometry, None, "AllowA8"), coarse)
    assert not torch.equal(coarse, exact)


@pytest.mark.parametrize("format", [name for name in QUANTIZED if name not in FLOATS_ONLY])
def test_int8_activations_of_any_magnitude(format: str) -> None:
    weight = random_weight(format, 128, 256)
    planes, _, geometry, *_ = weight.call
    for magnitude in (3000.0, 1e6, 1e7, 1e30, 1e-7, 1e-20, 1e-34):
        x = torch.randn(3, 256).mul(magnitude)
        x[0] = magnitude  # equal values: the sum of a block overflows binary16 first
        y = native.linear(x, planes, format, geometry, None, "AllowA8")
        check_a8(y, x, weight.dequantize(), format)


@pytest.mark.parametrize("format", [name for name in QUANTIZED if name not in FLOATS_ONLY])
def test_rows_of_unlike_magnitudes_keep_their_own_scales(format: str) -> None:
    weight = random_weight(format, 128, 256)
    planes, _, geometry, *_ = weight.call
    x = torch.randn(12, 256) * torch.logspace(-7, 7, 12).unsqueeze(1)
    x[5] = 0
    y = native.linear(x, planes, format, geometry, None, "AllowA8")
    for row in range(12):
        check_a8(y[row : row + 1], x[row : row + 1], weight.dequantize(), format)
    assert not y[5].any()


@pytest.mark.parametrize("format", QUANTIZED)
def test_what_is_not_a_number_stays_in_its_row(format: str) -> None:
    planes, _, geometry, *_ = random_weight(format, 128, 256).call
    for policy in ("A16Only", "AllowA8"):
        for value in (float("nan"), float("inf"), float("-inf")):
            x = torch.randn(3, 256)
            x[1, 100] = value
            for rows in (x, x[1:2]):
                y = native.linear(rows, planes, format, geometry, None, policy)
                assert torch.equal(y.isfinite().all(1), rows.isfinite().all(1))


@pytest.mark.parametrize("format", FLOATS_ONLY)
def test_illegal_words_show_in_products(format: str) -> None:
    weight = random_weight(format, 3, 70)
    planes, _, geometry, *_ = weight.call
    planes[0][1, 69] = 0xFF
    for rows in (1, 3):
        y = native.linear(torch.randn(rows, 70), planes, format, geometry, None, "A16Only")
        assert y[:, 1].isnan().all() and torch.isfinite(y[:, [0, 2]]).all()


@pytest.mark.parametrize("policy", ["A16Only", "AllowA8"])
@pytest.mark.parametrize("columns", [64, 128, 192])
def test_illegal_scales_show_in_products(columns: int, policy: str) -> None:
    planes, _, geometry, *_ = random_weight("nvfp4", 128, columns).call
    for row, scale in ((1, 0x7F), (40, 0xFF)):  # the last scale of the row, in its tile
        planes[1].view(-1)[(columns // 64 - 1) * 512 + row % 32 * 16 + row // 32 * 4 + 3] = scale
    for rows in (1, 3):
        y = native.linear(torch.randn(rows, columns).bfloat16(), planes, "nvfp4", geometry, None, policy)
        assert y.isnan().sum(0).nonzero().flatten().tolist() == [1, 40] and y[:, [1, 40]].isnan().all()


@pytest.mark.parametrize("policy", ["A16Only", "AllowA8"])
@pytest.mark.parametrize("format", QUANTIZED)
def test_strides_do_not_matter(format: str, policy: str) -> None:
    planes, _, geometry, *_ = random_weight(format, 128, 256).call
    wide = torch.full((2, 3, 512), float("nan"))
    wide[..., ::2] = torch.randn(2, 3, 256)
    for x in (wide[..., ::2], torch.randn(256, 6).T, torch.randn(1, 256).expand(5, 256), torch.randn(300)[7:263]):
        y = native.linear(x, planes, format, geometry, None, policy)
        assert y.shape == (*x.shape[:-1], 128)
        assert torch.equal(y, native.linear(x.contiguous(), planes, format, geometry, None, policy))


@pytest.mark.parametrize("policy", ["A16Only", "AllowA8"])
@pytest.mark.parametrize("format", QUANTIZED)
def test_threads_do_not_change_a_word(format: str, policy: str) -> None:
    rows, columns = 640, 512
    planes, _, geometry, *_ = random_weight(format, rows, columns).call
    xs = [torch.randn(m, columns) for m in (1, 5, 33)]
    before, found = torch.get_num_threads(), {}
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            found[threads] = [
                native.dequantize(planes, format, geometry, torch.float32),
                native.embedding(torch.arange(rows), planes, format, geometry, torch.bfloat16),
                *(native.linear(x, planes, format, geometry, None, policy) for x in xs),
            ]
    finally:
        torch.set_num_threads(before)
    for threads in (2, 7):
        assert all(torch.equal(one, many) for one, many in zip(found[1], found[threads], strict=True))


@pytest.mark.parametrize("policy", ["A16Only", "AllowA8"])
@pytest.mark.parametrize("format", QUANTIZED)
def test_an_expert_is_a_linear_of_its_rows(format: str, policy: str) -> None:
    experts, rows, columns = 4, 128, 256
    weight = random_weight(format, experts * rows, columns, divisors=4 if format == "nvfp4" else 1)
    planes, _, bank, *_ = weight.call
    x, ends = torch.randn(15, columns), [1, 1, 6, 14]
    y = native.expert_linear(x, planes, format, bank, torch.tensor(ends, dtype=torch.int32), policy)
    for expert, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        part = slice_rows(format, planes, bank, expert * rows, (expert + 1) * rows)
        assert torch.equal(y[begin:end], native.linear(x[begin:end], part[0], format, part[1], None, policy))
    assert not y[14:].any()


@pytest.mark.parametrize("ends", [[2, 1], [0, 9], [-1, 3]])
def test_offsets_that_do_not_ascend_are_refused(ends: list[int]) -> None:
    planes, format, bank, *_ = random_weight("q4_g64_fp16", 8, 64).call
    with pytest.raises(UnsupportedOperation, match="ascend"):
        native.expert_linear(torch.randn(5, 64), planes, format, bank, torch.tensor(ends, dtype=torch.int32), "A16Only")


@pytest.mark.parametrize("format", QUANTIZED)
def test_gradients_of_activations(format: str) -> None:
    rows, columns = 256, 256
    weight = random_weight(format, rows, columns)
    planes, _, geometry, *_ = weight.call
    dense = weight.dequantize().double()
    for dtype in DTYPES:
        upstream = torch.randn(2, 5, rows).to(dtype)
        grad = native.linear_backward(upstream, planes, format, geometry)
        assert grad.dtype == dtype and grad.shape == (2, 5, columns)
        check_a16(grad, upstream.double() @ dense, rows)
    upstream, ends = torch.randn(6, 128), torch.tensor([2, 5], dtype=torch.int32)
    grad = native.expert_linear_backward(upstream, planes, format, geometry, ends)
    check_a16(grad[:2], upstream[:2].double() @ dense[:128], 128)
    check_a16(grad[2:5], upstream[2:5].double() @ dense[128:], 128)
    assert not grad[5:].any()


def test_float64_and_odd_biases_go_to_the_reference() -> None:
    weight = random_weight("q5_g64_fp16", 5, 64)
    planes, format, geometry, *_ = weight.call
    x = torch.randn(2, 64, dtype=torch.float64)
    y = native.linear(x, planes, format, geometry, None, "AllowA8")
    torch.testing.assert_close(y, x @ weight.dequantize().double().T, rtol=1e-12, atol=1e-12)
    narrow = native.linear(x.float(), planes, format, geometry, torch.ones(5, dtype=torch.float64), "A16Only")
    check_a16(narrow, exact_product(x.float(), weight, torch.ones(5)), 64)


def test_instruction_sets_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedOperation, match="sse9.*scalar"):
        native.use("sse9")
    assert native.instruction_sets()[0] == "scalar"
