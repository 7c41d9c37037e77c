"""grouped_absmax: numbers become exactly the words the specification says."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exact import assert_same_words, to_binary16, to_binary32
from golden import golden, load_json, load_tensors
from ninfer_torch.convert import absmax
from ninfer_torch.convert.methods import grouped_absmax, quantize
from ninfer_torch.errors import ConversionError
from ninfer_torch.formats import get_format
from ninfer_torch.tensors import NinferTensor, encode

ABSMAX = ("q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16")

# (group size, largest code magnitude, smallest code), typed in from spec/conversion.md 3 and spec/layouts.md 3.
NUMBERS = {
    "q4_g64_fp16": (64, 7, -8),
    "q5_g64_fp16": (64, 15, -16),
    "q6_g64_fp16": (64, 31, -32),
    "q8_g32_fp16": (32, 127, -127),
}


def scalar_absmax(row: np.ndarray, name: str) -> tuple[list[int], list[Fraction]]:
    """spec/conversion.md 3, one value at a time in exact rational arithmetic. Overflow of a scale is not modelled."""
    group, largest_code, smallest_code = NUMBERS[name]
    codes: list[int] = []
    scales: list[Fraction] = []
    for begin in range(0, len(row), group):
        values = [Fraction(float(value)) for value in row[begin : begin + group]]
        largest = max(abs(value) for value in values)
        scale = to_binary16(to_binary32(largest / largest_code))
        if largest and not scale:
            scale = Fraction(1, 2**24)
        scales.append(scale)
        reciprocal = to_binary32(1 / scale) if scale else Fraction(0)
        for value in values:
            code = round(to_binary32(value * reciprocal))
            codes.append(min(max(code, smallest_code), largest_code if name == "q8_g32_fp16" else -smallest_code - 1))
    return codes, scales


# --- golden encoders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ABSMAX)
def test_absmax_reproduces_every_golden_case(name: str) -> None:
    cases = load_json(golden("ninfer", "encoders", "index.json"))["grouped_absmax"][name]
    data = load_tensors(golden("ninfer", "encoders", "grouped_absmax.safetensors"))
    assert len(cases) >= 15
    for case, facts in cases.items():
        weight = data[f"{name}/{case}/input"]
        if facts["source_dtype"] != "float32":
            dtype = getattr(torch, facts["source_dtype"])
            stored = data[f"{name}/{case}/input_words"].view(dtype)
            assert torch.equal(stored.float(), weight)
            weight = stored
        codes, scales = grouped_absmax(weight, name)
        assert torch.equal(codes, data[f"{name}/{case}/codes"]), case
        assert torch.equal(scales.view(torch.uint16), data[f"{name}/{case}/scales"]), case
        quantized = quantize(weight, name)
        assert isinstance(quantized, NinferTensor) and quantized.format == name and quantized.dtype == weight.dtype
        assert encode(quantized) == data[f"{name}/{case}/payload"].numpy().tobytes(), case


def test_absmax_by_construction_covers_ternary_words_that_are_not_offered() -> None:
    data = load_tensors(golden("ninfer", "encoders", "grouped_absmax_t2_extra.safetensors"))
    cases = {key.split("/")[1] for key in data}
    assert cases
    for case in cases:
        codes, scales = absmax._grouped_absmax(data[f"t2_g128_fp16/{case}/input"], get_format("t2_g128_fp16"), 0)
        assert torch.equal(codes, data[f"t2_g128_fp16/{case}/codes"])
        assert torch.equal(scales.view(torch.uint16), data[f"t2_g128_fp16/{case}/scales"])


def golden_error_input(case: str) -> tuple[str, torch.Tensor]:
    """The input that one `errors` record of the golden index describes in words."""
    _, name, *what = case.split(" ")
    kind = " ".join(what)
    if kind in ("nan", "inf", "neg_inf"):
        weight = torch.ones(2, 64)
        weight[1, 5] = float(kind.replace("neg_", "-"))
        return name, weight
    if "65520*qmax" in kind:
        limit = 65520.0 * NUMBERS[name][1]
        below = torch.tensor(limit).nextafter(torch.tensor(0.0)).item()
        return name, torch.full((1, 64), below if "just below" in kind else limit)
    if kind == "refused":
        return name, torch.ones(2, 64)
    shapes = {
        "grouped_absmax rank 1": (64,),
        "grouped_absmax rank 3": (2, 2, 64),
        "grouped_absmax integer source": (2, 64),
    }
    dtype = torch.int32 if "integer" in case else torch.float32
    return "q4_g64_fp16", torch.ones(shapes[case], dtype=dtype)


def test_absmax_refuses_what_the_golden_index_says() -> None:
    records = load_json(golden("ninfer", "encoders", "index.json"))["errors"]
    records = [record for record in records if record["case"].startswith("grouped_absmax")]
    assert len(records) == 24
    for record in records:
        name, weight = golden_error_input(record["case"])
        if record["raises"] is None:
            _, scales = grouped_absmax(weight, name)
            assert bool(scales.isfinite().all()), record
        else:
            with pytest.raises(ConversionError):
                grouped_absmax(weight, name)


# --- absmax: laws ----------------------------------------------------------------------------------------------------


def random_matrix(seed: int, rows: int, columns: int, exponent: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.exp2(
        torch.randint(-6, 7, (rows, 1), generator=generator).float() + exponent
    )
    return weight * (torch.rand(rows, columns, generator=generator) > 0.2)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(ABSMAX), st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 140), st.integers(-40, 8))
def test_absmax_equals_rational_arithmetic(name: str, seed: int, rows: int, columns: int, exponent: int) -> None:
    weight = random_matrix(seed, rows, columns, exponent)
    codes, scales = grouped_absmax(weight, name)
    for row in range(rows):
        expected_codes, expected_scales = scalar_absmax(weight[row].numpy(), name)
        assert codes[row].tolist() == expected_codes
        assert [Fraction(scale) for scale in scales[row].tolist()] == expected_scales


@pytest.mark.parametrize("name", ABSMAX)
def test_absmax_examples_of_the_specification(name: str) -> None:
    row = torch.zeros(1, 64)
    row[0, :4] = torch.tensor([0.9, -0.3, 0.05, -1.0])
    if name == "q4_g64_fp16":
        codes, scales = grouped_absmax(row, name)
        assert codes[0, :5].tolist() == [6, -2, 0, -7, 0] and scales.view(torch.uint16).tolist() == [[0x3092]]
    codes, scales = grouped_absmax(torch.tensor([[1e-9, -2e-9]]), name)
    assert codes.tolist() == [[0, 0]] and scales.view(torch.uint16).tolist() == [[0x0001]]
    codes, scales = grouped_absmax(torch.zeros(1, 3), name)
    assert codes.tolist() == [[0, 0, 0]] and scales.view(torch.uint16).tolist() == [[0]]


def test_absmax_multiplies_by_the_reciprocal() -> None:
    """0x20cc with x = 3.5 scales: the product rounds below the tie, a quotient would be the tie and go to 4."""
    scale = torch.tensor([0x20CC], dtype=torch.int16).view(torch.float16).float().item()
    row = torch.zeros(1, 64)
    row[0, 0], row[0, 1] = 7 * scale, 3.5 * scale
    codes, scales = grouped_absmax(row, "q4_g64_fp16")
    assert scales.item() == scale and codes[0, :2].tolist() == [7, 3]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(ABSMAX), st.integers(0, 2**31), st.integers(2, 9), st.integers(1, 200), st.integers(1, 8))
def test_rows_do_not_depend_on_their_company(name: str, seed: int, rows: int, columns: int, cut: int) -> None:
    weight = random_matrix(seed, rows, columns, 0)
    codes, scales = grouped_absmax(weight, name)
    cut = min(cut, rows)
    parts = [grouped_absmax(part, name) for part in (weight[:cut], weight[cut:]) if len(part)]
    assert torch.equal(torch.cat([part[0] for part in parts]), codes)
    assert_same_words(torch.cat([part[1] for part in parts]), scales)


@pytest.mark.parametrize("name", ABSMAX)
def test_words_do_not_depend_on_chunks_or_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_matrix(5, 67, 333, 0)
    codes, scales = grouped_absmax(weight, name)
    threads = torch.get_num_threads()
    try:
        for chunk, count in ((1, 1), (1000, 2), (1 << 22, 4)):
            monkeypatch.setattr(absmax, "_CHUNK_VALUES", chunk)
            torch.set_num_threads(count)
            again = grouped_absmax(weight, name)
            assert torch.equal(again[0], codes)
            assert_same_words(again[1], scales)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ABSMAX)
def test_source_types_and_strides_do_not_matter(name: str) -> None:
    wide = random_matrix(9, 6, 100, 0)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        source = wide.to(dtype)
        expected = grouped_absmax(source.float(), name)
        found = grouped_absmax(source, name)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    transposed = random_matrix(10, 100, 6, 0).T
    strided = random_matrix(11, 12, 200, 0)[::2, ::2]
    for view in (transposed, strided):
        assert not view.is_contiguous()
        expected = grouped_absmax(view.contiguous(), name)
        found = grouped_absmax(view, name)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    parameter = torch.nn.Parameter(wide)
    assert torch.equal(grouped_absmax(parameter, name)[0], grouped_absmax(wide, name)[0])


def test_float64_is_rounded_to_float32_first() -> None:
    value = 1.0 + 2.0**-24 + 2.0**-40  # above the float32 tie: rounds up
    row = torch.zeros(1, 64, dtype=torch.float64)
    row[0, 0], row[0, 1] = 7.0, value
    assert torch.equal(grouped_absmax(row, "q4_g64_fp16")[0], grouped_absmax(row.float(), "q4_g64_fp16")[0])
    row[0, 1] = 1e39
    with pytest.raises(ConversionError, match=r"row 0, column 1: 1e\+39 is not a finite float32"):
        grouped_absmax(row, "q4_g64_fp16")


def test_errors_say_where() -> None:
    weight = torch.ones(5, 130)
    weight[3, 129] = math.nan
    with pytest.raises(ConversionError, match="row 3, column 129: nan"):
        grouped_absmax(weight, "q5_g64_fp16")
    weight[3, 129] = 65520 * 15
    with pytest.raises(ConversionError, match="row 103, group 2: .* overflows the binary16 scale of q5_g64_fp16"):
        grouped_absmax(weight, "q5_g64_fp16", first_row=100)


@pytest.mark.parametrize("name", ABSMAX)
def test_quantize_then_decode_partly_filled_group(name: str) -> None:
    weight = random_matrix(3, 4, 130, 0)
    codes, scales = grouped_absmax(weight, name)
    group = NUMBERS[name][0]
    decoded = quantize(weight, name).dequantize()
    assert decoded.shape == weight.shape
    expected = scales.float().repeat_interleave(group, dim=1)[:, :130] * codes.float()
    assert_same_words(decoded, expected)
