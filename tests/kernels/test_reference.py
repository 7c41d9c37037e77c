"""Reference decode: other tools' values, a scalar decoder's, and the arithmetic of single words, all bit for bit."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import word_oracle
from golden import golden, load_tensors
from golden_objects import StoredObject, read_objects
from ninfer_torch.errors import FormatError
from ninfer_torch.formats import FORMATS
from ninfer_torch.kernels.packing import pack_codes
from ninfer_torch.kernels.reference import DECODERS, decode, e2m1_table, e4m3_table
from ninfer_torch.layouts import Geometry, encoded_bytes, layout_of, planes_of, slice_rows, split_planes

QUANTIZED = [name for name, record in FORMATS.items() if record.quantized]
CPU = torch.device("cpu")


def decode_object(stored: StoredObject) -> torch.Tensor:
    planes = split_planes(stored.tensor, planes_of(stored.format, stored.shape, stored.divisors))
    return decode(stored.format, planes, Geometry.whole(stored.shape, stored.divisors))


def bits(values: torch.Tensor | np.ndarray) -> np.ndarray:
    return np.asarray(values).view(np.uint32)


@pytest.mark.parametrize("name", QUANTIZED)
def test_golden_objects_decode_bit_for_bit(name: str) -> None:
    objects = read_objects(golden("ninfer", "formats", f"{name}.ninfer"))
    expected = load_tensors(golden("ninfer", "formats", f"{name}.safetensors"))
    assert objects
    for key, stored in objects.items():
        assert (stored.format, stored.layout) == (name, layout_of(name).name)
        values = decode_object(stored)
        assert values.dtype == torch.float32 and values.is_contiguous() and tuple(values.shape) == stored.shape
        assert np.array_equal(bits(values), bits(expected[key])), key


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32), ("int32", torch.int32)])
def test_golden_direct_words_are_the_plane(name: str, dtype: torch.dtype) -> None:
    objects = read_objects(golden("ninfer", "formats", f"{name}.ninfer"))
    expected = load_tensors(golden("ninfer", "formats", f"{name}.safetensors"))
    assert objects
    for key, stored in objects.items():
        (words,) = split_planes(stored.tensor, planes_of(name, stored.shape))
        assert tuple(words.shape) == stored.shape and words.dtype == dtype
        stored_words = expected[key if name == "int32" else f"{key}.words"]
        assert words.reshape(-1).view(torch.uint8).numpy().tobytes() == stored_words.numpy().tobytes(), key
        values = words if name == "int32" else words.to(torch.float32)
        assert np.array_equal(bits(values), bits(expected[key])), key


@pytest.mark.parametrize("name", word_oracle.SCALED)
@settings(deadline=None, max_examples=6)
@given(rows=st.integers(1, 5), columns=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_any_bytes_decode_as_the_formulas_say(name: str, rows: int, columns: int, seed: int) -> None:
    shape, divisors = ((128 * min(rows, 2), 64), min(rows, 2)) if name == "nvfp4" else ((rows, columns), 1)
    payload = np.random.default_rng(seed).integers(0, 256, encoded_bytes(name, shape, divisors), dtype=np.uint8)
    expected = word_oracle.decode(name, payload.tobytes(), shape, divisors)
    planes = split_planes(torch.from_numpy(payload), planes_of(name, shape, divisors))
    values = decode(name, planes, Geometry.whole(shape, divisors)).numpy()
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(values), ~numbers)
    assert np.array_equal(bits(values)[numbers], bits(expected)[numbers])


def test_direct_formats_have_no_decoder() -> None:
    assert set(DECODERS) == set(QUANTIZED)
    with pytest.raises(FormatError, match="bf16 is not quantized"):
        decode("bf16", [torch.zeros(2, 2, dtype=torch.bfloat16)], Geometry.whole((2, 2)))


def test_all_e2m1_words() -> None:
    expected = np.array([word_oracle.e2m1(word) for word in range(16)], dtype=np.float32)
    assert expected.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert np.array_equal(bits(e2m1_table(CPU)), bits(expected))
    assert math.copysign(1, e2m1_table(CPU)[8]) == -1


def test_all_e4m3fn_words() -> None:
    expected = np.array([word_oracle.e4m3(word) for word in range(256)], dtype=np.float32)
    assert np.flatnonzero(np.isnan(expected)).tolist() == [0x7F, 0xFF]
    assert (expected[0x38], expected[0x7E], expected[0x01], expected[0x87]) == (1, 448, 2**-9, -7 * 2**-9)
    table = e4m3_table(CPU)
    numbers = ~np.isnan(expected)
    assert np.array_equal(bits(table)[numbers], bits(expected)[numbers])
    assert np.array_equal(np.isnan(table.numpy()), ~numbers)
    torch_words = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert np.array_equal(bits(table)[numbers], bits(torch_words)[numbers])


def nvfp4_matrix(code: int, scale: int, divisor: float) -> torch.Tensor:
    """A [128, 64] matrix of one code under one scale and divisor, decoded."""
    planes = pack_codes(
        "nvfp4",
        torch.full((128, 64), code, dtype=torch.uint8),
        torch.full((128, 4), scale, dtype=torch.uint8),
        torch.tensor([divisor], dtype=torch.float32),
    )
    return decode("nvfp4", planes, Geometry.whole((128, 64)))


def test_the_divisor_divides() -> None:
    values = nvfp4_matrix(0x5, 0x38, 2688.0)
    assert torch.all(values == np.float32(3) / np.float32(2688))
    assert values[0, 0].item() == pytest.approx(0.001116, abs=5e-7)
    assert torch.all(nvfp4_matrix(0x8, 0x38, 2688.0).view(torch.int32) == -(2**31))


def nearest_float32(exact: Fraction) -> float:
    """The binary32 number nearest to a positive rational in the normal range, ties to even."""
    exponent = math.floor(math.log2(exact)) - 23
    if exact / Fraction(2) ** (exponent + 23) < 1:
        exponent -= 1
    return float(round(exact / Fraction(2) ** exponent) * Fraction(2) ** exponent)


@settings(deadline=None, max_examples=100)
@given(
    code=st.integers(1, 7),
    scale=st.integers(1, 0x7E),
    divisor=st.floats(2**-60, 2**60, width=32),
)
def test_a_value_is_one_rounding_of_the_exact_quotient(code: int, scale: int, divisor: float) -> None:
    exact = Fraction(word_oracle.e2m1(code)) * Fraction(word_oracle.e4m3(scale)) / Fraction(divisor)
    assert nvfp4_matrix(code, scale, divisor)[0, 0].item() == nearest_float32(exact)


@pytest.mark.parametrize("name", word_oracle.GROUPED)
@pytest.mark.parametrize("scale", [-1.0, -(2.0**-24), 2.0**-24, -65504.0])
def test_code_zero_has_the_sign_of_its_scale(name: str, scale: float) -> None:
    group = word_oracle.GROUPED[name][1]
    planes = pack_codes(
        name, torch.zeros(2, 130, dtype=torch.int8), torch.full((2, -(-130 // group)), scale, dtype=torch.float16)
    )
    values = decode(name, planes, Geometry.whole((2, 130)))
    assert torch.all(values == 0)
    assert torch.all(torch.signbit(values) == (scale < 0))


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp8_e4m3fn_row_bf16", torch.bfloat16), ("fp8_e4m3fn_row_fp16", torch.float16)]
)
def test_rows_of_zero_scale_keep_the_sign_of_their_zero_codes(name: str, dtype: torch.dtype) -> None:
    codes = torch.tensor([[0x00, 0x80, 0x00], [0x38, 0xB8, 0x80]], dtype=torch.uint8)
    scales = torch.tensor([0.0, 0.5], dtype=dtype)
    values = decode(name, pack_codes(name, codes, scales), Geometry.whole((2, 3)))
    assert values.tolist() == [[0.0, -0.0, 0.0], [0.5, -0.5, -0.0]]
    assert torch.signbit(values).tolist() == [[False, True, False], [False, True, True]]


def test_q2_decodes_every_word_under_every_kind_of_scale() -> None:
    scales = torch.tensor([0x0000, 0x8000, 0x3800, 0xB800], dtype=torch.int32).to(torch.int16).view(torch.float16)
    codes = torch.tensor([-1, 0, 1, 2] * 16, dtype=torch.int8).repeat(4, 1)
    values = decode("q2_g64_fp16", pack_codes("q2_g64_fp16", codes, scales[:, None]), Geometry.whole((4, 64)))
    expected = np.array(
        [[-0.0, 0.0, 0.0, 0.0], [0.0, -0.0, -0.0, -0.0], [-0.5, 0.0, 0.5, 1.0], [0.5, -0.0, -0.5, -1.0]]
    )
    assert np.array_equal(bits(values), bits(np.tile(expected, 16).astype(np.float32)))


def test_gguf_q2_0_block_of_the_specification() -> None:
    block = torch.frombuffer(bytearray(bytes.fromhex("0038") + b"\xe4" * 16), dtype=torch.uint8)
    values = decode("gguf_q2_0", [block.view(1, 18)], Geometry.whole((1, 64)))
    assert values.tolist() == [[-0.5, 0.0, 0.5, 1.0] * 16]


def test_bf16_scales_below_the_normal_range_are_not_flushed() -> None:
    scales = torch.tensor([1], dtype=torch.int16).view(torch.bfloat16)
    planes = pack_codes("fp8_e4m3fn_row_bf16", torch.tensor([[0x38, 0x40, 0x30]], dtype=torch.uint8), scales)
    values = decode("fp8_e4m3fn_row_bf16", planes, Geometry.whole((1, 3)))
    assert values.view(torch.int32).tolist() == [[0x10000, 0x20000, 0x8000]]


def test_an_nvfp4_view_takes_scales_and_divisors_by_place_in_the_parent() -> None:
    objects = read_objects(golden("ninfer", "formats", "nvfp4.ninfer"))
    stored = objects["stack3_wide"]
    assert stored.divisors == 3
    expected = load_tensors(golden("ninfer", "formats", "nvfp4.safetensors"))["stack3_wide"]
    planes = split_planes(stored.tensor, planes_of("nvfp4", stored.shape, 3))
    for begin, end in [(0, 1), (127, 129), (100, 300), (255, 257), (383, 384), (200, 200)]:
        view = slice_rows("nvfp4", planes, Geometry.whole(stored.shape, 3), begin, end)
        assert np.array_equal(bits(decode("nvfp4", *view)), bits(expected[begin:end]))


@pytest.mark.parametrize("name", word_oracle.SCALED)
def test_tables_made_in_inference_mode_serve_outside_of_it(name: str) -> None:
    e2m1_table.cache_clear()
    e4m3_table.cache_clear()
    shape = (128, 64)
    planes = split_planes(torch.zeros(encoded_bytes(name, shape), dtype=torch.uint8), planes_of(name, shape))
    with torch.inference_mode():
        decode(name, planes, Geometry.whole(shape))
    assert not e2m1_table(CPU).is_inference() and not e4m3_table(CPU).is_inference()
    weight = decode(name, planes, Geometry.whole(shape))
    activation = torch.ones(64, requires_grad=True)
    (weight @ activation).nan_to_num().sum().backward()
    assert activation.grad is not None


def test_odd_row_lengths_decode_from_any_address() -> None:
    for columns in (1, 2, 5, 160):
        for lead in (0, 1, 3):
            record = bytes(lead) + bytes([0x38] * columns) + struct.pack("<e", 2.5)
            data = torch.frombuffer(bytearray(record), dtype=torch.uint8)[lead:]
            values = decode("fp8_e4m3fn_row_fp16", [data.view(1, columns + 2)], Geometry.whole((1, columns)))
            assert torch.all(values == 2.5)
