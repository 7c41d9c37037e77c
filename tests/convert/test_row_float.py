"""fp8_row_maxabs: rows become exactly the words the specification says."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exact import assert_same_words, nearest, to_binary16, to_binary32
from golden import golden, load_json, load_tensors
from ninfer_torch.convert import row_float
from ninfer_torch.convert.methods import fp8_row_maxabs, quantize
from ninfer_torch.errors import ConversionError
from ninfer_torch.kernels.checks import check_payload
from ninfer_torch.tensors import encode

FORMATS = {"bf16": "fp8_e4m3fn_row_bf16", "fp16": "fp8_e4m3fn_row_fp16"}
SCALE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def golden_cases() -> dict[str, dict[str, torch.Tensor]]:
    cases: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_tensors(golden("ninfer", "encoders", "fp8_row_maxabs.safetensors")).items():
        case, _, part = key.partition("/")
        cases.setdefault(case, {})[part] = tensor
    return cases


@pytest.mark.parametrize("target", FORMATS)
def test_golden_words_and_refusals(target: str) -> None:
    """A case with words gives them, from float32 and from bfloat16 alike; a case without is refused."""
    records = load_json(golden("ninfer", "encoders", "index.json"))["errors"]
    refusals = {record["case"].rpartition(" ")[2] for record in records if f"fp8_row_maxabs {target}" in record["case"]}
    written = 0
    for case, data in golden_cases().items():
        sources = (data["input"], data["input_bf16_words"].view(torch.bfloat16))
        if f"{target}/codes" not in data:
            assert case in refusals
            for source in sources:
                with pytest.raises(ConversionError, match="row 0"):
                    fp8_row_maxabs(source, FORMATS[target])
            continue
        assert case not in refusals
        for source in sources:
            codes, scales = fp8_row_maxabs(source, FORMATS[target])
            assert scales.dtype == SCALE_DTYPES[target]
            assert torch.equal(codes, data[f"{target}/codes"]), case
            assert torch.equal(scales.view(torch.uint16), data[f"{target}/scales"]), case
        written += 1
    assert written >= 10 and refusals


@pytest.mark.parametrize("target, word", [("bf16", 0x3B12), ("fp16", 0x1892)])
def test_example_of_the_specification(target: str, word: int) -> None:
    codes, scales = fp8_row_maxabs(torch.tensor([[1.0, -0.5, 0.003, -0.0]]), FORMATS[target])
    assert scales.view(torch.uint16).tolist() == [word] and codes.tolist() == [[0x7E, 0xF6, 0x3B, 0x80]]


def scalar_codes(row: np.ndarray, target: str) -> tuple[list[int], Fraction]:
    """spec/conversion.md 5 in exact rational arithmetic, for a row whose scale and reciprocal stay in range."""
    values = [nearest(Fraction(float(value)), 7, -126) for value in row]
    largest = max(abs(value) for value in values)
    raw = to_binary32(largest / 448)
    scale = nearest(raw, 7, -126) if target == "bf16" else to_binary16(raw)
    if largest and not scale:
        scale = Fraction(2) ** (-133 if target == "bf16" else -24)
    if not largest:
        return [0] * len(values), Fraction(0)
    reciprocal = to_binary32(1 / scale)
    codes = []
    for value, source in zip(values, row, strict=True):
        product = max(min(to_binary32(value * reciprocal), Fraction(448)), Fraction(-448))
        magnitude = nearest(abs(product), 3, -6)
        word = next(word for word in range(0x7F) if e4m3(word) == magnitude)
        codes.append(word | (0x80 if math.copysign(1, source) < 0 else 0))
    return codes, scale


def e4m3(word: int) -> Fraction:
    exponent, mantissa = word >> 3, word & 7
    return Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7) if exponent else Fraction(mantissa, 512)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(("bf16", "fp16")), st.integers(0, 2**31), st.integers(1, 40), st.integers(-20, 12))
def test_words_equal_rational_arithmetic(target: str, seed: int, columns: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randn(1, columns, generator=generator) * 2.0**exponent
    row = row * (torch.rand(1, columns, generator=generator) > 0.2)
    row = row * 2.0 ** torch.randint(-8, 1, (1, columns), generator=generator)
    codes, scales = fp8_row_maxabs(row, FORMATS[target])
    expected_codes, expected_scale = scalar_codes(row[0].numpy(), target)
    assert Fraction(scales.item()) == expected_scale
    assert codes[0].tolist() == expected_codes


@pytest.mark.parametrize("name", FORMATS.values())
def test_rows_chunks_types_and_strides_do_not_matter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(13, 70, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 2, 13).unsqueeze(1)
    weight[4] = 0
    codes, scales = fp8_row_maxabs(weight, name)
    for chunk in (1, 150, 1 << 20):
        monkeypatch.setattr(row_float, "_CHUNK_VALUES", chunk)
        again = fp8_row_maxabs(weight, name)
        assert torch.equal(again[0], codes)
        assert_same_words(again[1], scales)
    for source in (weight.bfloat16(), weight.T.contiguous().T, torch.nn.Parameter(weight), weight.bfloat16().double()):
        again = fp8_row_maxabs(source, name)
        assert torch.equal(again[0], codes)
        assert_same_words(again[1], scales)


@pytest.mark.parametrize("name", FORMATS.values())
def test_rows_of_zeros_beside_ordinary_rows(name: str) -> None:
    weight = torch.tensor([[1.0, -2.0, -0.0], [-0.0, 0.0, -0.0], [3.0, 0.5, 0.0]])
    codes, scales = fp8_row_maxabs(weight, name)
    assert codes[1].tolist() == [0, 0, 0] and scales.view(torch.int16)[1].item() == 0
    assert codes[0, 2].item() == 0x80
    packed = quantize(weight, name)
    assert torch.isfinite(packed.dequantize()).all() and (packed.dequantize()[1] == 0).all()


@pytest.mark.parametrize("name", FORMATS.values())
def test_quantized_words_are_legal_and_close(name: str) -> None:
    weight = torch.randn(9, 131, generator=torch.Generator().manual_seed(2))
    packed = quantize(weight, name)
    check_payload(name, (9, 131), torch.frombuffer(bytearray(encode(packed)), dtype=torch.uint8))
    largest = weight.abs().amax(1, keepdim=True)
    assert ((packed.dequantize() - weight).abs() <= weight.abs() / 12 + largest / 448 / 100).all()


def test_errors_say_where() -> None:
    weight = torch.ones(5, 8)
    weight[3, 6] = math.inf
    with pytest.raises(ConversionError, match="row 13, column 6: inf is not a finite bfloat16"):
        fp8_row_maxabs(weight, FORMATS["bf16"], first_row=10)
    weight[3, 6] = 3.4e38  # finite in float32, infinite once rounded
    with pytest.raises(ConversionError, match="row 3, column 6: 3.39.*e.38 is not a finite bfloat16"):
        fp8_row_maxabs(weight, FORMATS["fp16"])
    weight[3, 6] = 448 * 65520.0
    with pytest.raises(ConversionError, match="row 3: .* overflows the scale of fp8_e4m3fn_row_fp16"):
        fp8_row_maxabs(weight, FORMATS["fp16"])
    weight[3] = 1e-37
    with pytest.raises(ConversionError, match="row 3: the reciprocal of its scale .* leaves binary32"):
        fp8_row_maxabs(weight, FORMATS["bf16"])
    with pytest.raises(ConversionError, match="floating matrix"):
        fp8_row_maxabs(torch.ones(8), FORMATS["bf16"])
    with pytest.raises(ConversionError, match="at least one value"):
        fp8_row_maxabs(torch.ones(3, 0), FORMATS["bf16"])
