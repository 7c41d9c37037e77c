"""cast_direct: one rounding, whatever the source type."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exact import assert_same_words, nearest
from ninfer_torch.convert.methods import cast_direct
from ninfer_torch.errors import ConversionError


def bfloat16_words(values: np.ndarray) -> np.ndarray:
    """Round binary64 to bfloat16 words by comparing with the two neighbours, exactly. Finite values only."""
    result = []
    for value in values.tolist():
        exact, sign = Fraction(abs(value)), 0x8000 if math.copysign(1, value) < 0 else 0
        rounded = nearest(exact, 7, -126)
        if rounded >= Fraction(2) ** 128:
            result.append(sign | 0x7F80)
            continue
        result.append(sign | int(np.float32(float(rounded)).view(np.uint32)) >> 16)
    return np.array(result, dtype=np.uint16)


FINITE64 = st.floats(allow_nan=False, allow_infinity=False)
NEAR_TIES = st.builds(
    lambda word, nudge: float(np.uint32(word << 16 | 0x8000).view(np.float32)) * (1 + nudge * 2.0**-45),
    st.integers(0x0080, 0x7F7E),
    st.integers(-3, 3),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(FINITE64 | NEAR_TIES, min_size=1, max_size=20))
def test_bf16_from_float64_rounds_once(values: list[float]) -> None:
    source = torch.tensor(values, dtype=torch.float64)
    assert cast_direct(source, "bf16").view(torch.uint16).numpy().tolist() == bfloat16_words(source.numpy()).tolist()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_bf16_from_float32_rounds_to_even(values: list[float]) -> None:
    source = torch.tensor(values, dtype=torch.float32)
    found = cast_direct(source, "bf16").view(torch.uint16).numpy().tolist()
    assert found == bfloat16_words(source.double().numpy()).tolist()


def test_own_words_pass_unchanged() -> None:
    bf16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    assert_same_words(cast_direct(bf16, "bf16"), bf16)
    fp32 = torch.tensor([0x7FA00001, -0x00400001, -(2**31), 1, -1, 0x7F800000], dtype=torch.int32).view(torch.float32)
    assert_same_words(cast_direct(fp32, "fp32"), fp32)
    int32 = torch.tensor([-(2**31), 2**31 - 1, 0], dtype=torch.int32)
    assert_same_words(cast_direct(int32, "int32"), int32)


def test_fp32_from_narrow_floats_is_exact() -> None:
    bf16 = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    widened = cast_direct(bf16, "fp32").view(torch.int32)
    assert torch.equal(widened, torch.arange(65536, dtype=torch.int64).mul(65536).to(torch.int32))
    fp16 = np.arange(65536, dtype=np.uint16).view(np.float16)
    finite = np.isfinite(fp16)
    found = cast_direct(torch.from_numpy(fp16[finite]), "fp32")
    assert np.array_equal(found.numpy(), fp16[finite].astype(np.float32))


def test_special_values_cross_types() -> None:
    source = torch.tensor([math.inf, -math.inf, -0.0, 1e300, -1e-300], dtype=torch.float64)
    assert cast_direct(source, "bf16").view(torch.uint16).tolist() == [0x7F80, 0xFF80, 0x8000, 0x7F80, 0x8000]
    assert cast_direct(torch.tensor([math.nan], dtype=torch.float64), "bf16").isnan().item()


def test_int32_truncates_and_bounds() -> None:
    source = torch.tensor([2.9, -2.9, 2147483647.5, -2147483648.9], dtype=torch.float64)
    assert cast_direct(source, "int32").tolist() == [2, -2, 2147483647, -2147483648]
    assert cast_direct(torch.tensor([True, False]), "int32").tolist() == [1, 0]
    for bad in (2.0**31, -(2.0**31) - 1, math.nan, math.inf):
        with pytest.raises(ConversionError, match=r"int32 cannot hold .* at \[1\]"):
            cast_direct(torch.tensor([0.0, bad], dtype=torch.float64), "int32")
    with pytest.raises(ConversionError, match="int32 cannot hold 2147483648"):
        cast_direct(torch.tensor(2**31), "int32")


def test_integers_become_floats_in_one_rounding() -> None:
    source = torch.tensor([2**24 + 1, 257, 2**40 + 2**32 + 1])
    assert cast_direct(source, "fp32").tolist() == [2.0**24, 257.0, float(2**40 + 2**32)]
    assert cast_direct(source, "bf16").tolist() == [2.0**24, 256.0, float(2**40 + 2**33)]
    with pytest.raises(ConversionError, match="no single rounding"):
        cast_direct(torch.tensor([2**53 + 1]), "bf16")


def test_cast_direct_refuses_quantized_targets() -> None:
    with pytest.raises(ConversionError, match="cast_direct writes bf16, fp32, int32, not q4_g64_fp16"):
        cast_direct(torch.ones(2, 64), "q4_g64_fp16")
    with pytest.raises(ConversionError, match="complex64"):
        cast_direct(torch.ones(2, dtype=torch.complex64), "fp32")
