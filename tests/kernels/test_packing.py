"""Packing: planes byte for byte as other tools and the specification have them, and an exact way back."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import word_oracle
from golden import golden, load_tensors
from golden_objects import read_objects
from ninfer_torch.errors import FormatError, LayoutError
from ninfer_torch.kernels.packing import join_planes, pack_codes, unpack_codes
from ninfer_torch.kernels.reference import decode
from ninfer_torch.layouts import Geometry, encoded_bytes, gather_rows, planes_of, slice_rows, split_planes

GROUPED = list(word_oracle.GROUPED)
ROW_FLOAT = ["fp8_e4m3fn_row_bf16", "fp8_e4m3fn_row_fp16"]

# spec/layouts.md 3.6: first codes of a group, their base bytes and high bytes
FIRST_LANES = [
    ("q4_g64_fp16", [-8, 7, -1, 1], "78 1f", ""),
    ("q5_g64_fp16", [-16, -1, 0, 1, 15, -8, 7, 2], "f0 10 8f 27", "23"),
    ("q6_g64_fp16", [-32, -1, 31, 16], "f0 0f", "5e"),
    ("t2_g128_fp16", [-1, 0, 1, -1, 1, 1, 0, -1], "d3 c5", ""),
    ("q2_g64_fp16", [-1, 0, 1, 2, 2, -1, 0, 1], "e4 93", ""),
    ("q8_g32_fp16", [-127, 127, -1, 0, 1], "81 7f ff 00 01", ""),
]

# least and greatest code that has a word, and the word of each
END_POINTS = {
    "q2_g64_fp16": (-1, 0b00, 2, 0b11),
    "q4_g64_fp16": (-8, 0x8, 7, 0x7),
    "q5_g64_fp16": (-16, 0x10, 15, 0xF),
    "q6_g64_fp16": (-32, 0x20, 31, 0x1F),
    "q8_g32_fp16": (-128, 0x80, 127, 0x7F),
    "t2_g128_fp16": (-2, 0b10, 1, 0b01),
}


def payload_of(name: str, shape: tuple[int, ...], planes: tuple[torch.Tensor, ...], divisors: int = 1) -> bytes:
    return join_planes(planes, planes_of(name, shape, divisors))


def bytes_of(words: torch.Tensor | None) -> bytes | None:
    return None if words is None else words.reshape(-1).view(torch.uint8).numpy().tobytes()


def grouped_scales(rows: int, groups: int, words: int = 0x3C00) -> torch.Tensor:
    return torch.full((rows, groups), words, dtype=torch.int16).view(torch.float16)


@pytest.mark.parametrize(("name", "codes", "base", "high"), FIRST_LANES)
def test_first_lanes_of_a_group(name: str, codes: list[int], base: str, high: str) -> None:
    group = word_oracle.GROUPED[name][1]
    row = torch.zeros(1, 128, dtype=torch.int8)
    row[0, : len(codes)] = torch.tensor(codes)
    planes = pack_codes(name, row, grouped_scales(1, 128 // group))
    assert bytes(planes[0][0, 0].tolist()).startswith(bytes.fromhex(base))
    if high:
        assert bytes(planes[1][0, 0].tolist()).startswith(bytes.fromhex(high))


@pytest.mark.parametrize("name", GROUPED)
def test_each_lane_goes_to_its_own_bits(name: str) -> None:
    """Each column in turn holds the end points; the scalar decoder finds them there, and code 0 elsewhere."""
    group = word_oracle.GROUPED[name][1]
    low, low_word, high, high_word = END_POINTS[name]
    shape = (2 * group, 128)
    codes = torch.zeros(shape, dtype=torch.int8)
    for lane in range(group):
        codes[lane, lane] = low
        codes[group + lane, 128 - group + lane] = high
    data = payload_of(name, shape, pack_codes(name, codes, grouped_scales(shape[0], 128 // group)))
    words = [
        [word_oracle.grouped_word(name, data, shape, row, column) for column in range(128)] for row in range(shape[0])
    ]
    assert {words[lane][lane] for lane in range(group)} == {low_word}
    assert {words[group + lane][128 - group + lane] for lane in range(group)} == {high_word}
    found = [[word_oracle.grouped_code(name, word) for word in row] for row in words]
    assert found == codes.tolist()


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("columns", [1, 31, 64, 129, 130, 192, 200, 257])
def test_padding_is_code_zero_and_its_groups_have_scale_zero(name: str, columns: int) -> None:
    group, base_bytes = word_oracle.GROUPED[name][1:3]
    logical, physical = -(-columns // group), -(-columns // 128) * 128 // group
    planes = pack_codes(name, torch.ones(3, columns, dtype=torch.int8), grouped_scales(3, logical))
    data = payload_of(name, (3, columns), planes)
    for row in range(3):
        for column in range(physical * group):
            word = word_oracle.grouped_word(name, data, (3, columns), row, column)
            assert word_oracle.grouped_code(name, word) == (1 if column < columns else 0)
        scales = [word_oracle.grouped_scale(name, data, (3, columns), row, index) for index in range(physical)]
        assert scales == [1.0] * logical + [0.0] * (physical - logical)
    if physical > logical:
        padding_byte = b"\x55" if name == "q2_g64_fp16" else b"\x00"
        assert bytes(planes[0][0, -1].tolist()) == padding_byte * base_bytes


@pytest.mark.parametrize("name", [*GROUPED, *ROW_FLOAT, "nvfp4"])
def test_golden_words_pack_to_the_golden_payload_and_back(name: str) -> None:
    objects = read_objects(golden("ninfer", "formats", f"{name}.ninfer"))
    words = load_tensors(golden("ninfer", "formats", f"{name}.safetensors"))
    with_codes = [key for key in objects if f"{key}.codes" in words]
    assert with_codes
    for key in with_codes:
        stored = objects[key]
        codes = words[f"{key}.codes"]
        scale_dtype = {"nvfp4": torch.uint8, "fp8_e4m3fn_row_bf16": torch.bfloat16}.get(name, torch.float16)
        scales = words[f"{key}.scales"].view(scale_dtype)
        divisors = words[f"{key}.divisors"].view(torch.float32) if name == "nvfp4" else None
        planes = pack_codes(name, codes, scales, divisors)
        assert payload_of(name, stored.shape, planes, stored.divisors) == stored.payload, key
        if name in GROUPED:
            columns = stored.shape[1]
            logical = -(-columns // word_oracle.GROUPED[name][1])
            planes = pack_codes(name, codes.flatten(1)[:, :columns], scales[:, :logical])
            assert payload_of(name, stored.shape, planes) == stored.payload, key
        stored_planes = split_planes(stored.tensor, planes_of(name, stored.shape, stored.divisors))
        found = unpack_codes(name, stored_planes, Geometry.whole(stored.shape, stored.divisors))
        assert [bytes_of(words) for words in found] == [bytes_of(words) for words in (codes, scales, divisors)], key


def random_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


@pytest.mark.parametrize("name", word_oracle.SCALED)
@settings(deadline=None, max_examples=10)
@given(rows=st.integers(1, 9), columns=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_any_planes_come_back_from_their_words(name: str, rows: int, columns: int, seed: int) -> None:
    """Illegal words included: unpacking and packing move words, they do not judge them."""
    shape, divisors = ((128 * rows, 64), rows) if name == "nvfp4" else ((rows, columns), 1)
    specs = planes_of(name, shape, divisors)
    planes = split_planes(random_bytes(encoded_bytes(name, shape, divisors), seed), specs)
    again = pack_codes(name, *unpack_codes(name, planes, Geometry.whole(shape, divisors)))
    assert join_planes(again, specs) == join_planes(planes, specs)


@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_an_nvfp4_view_unpacks_to_an_object_of_its_own(data: st.DataObject) -> None:
    shape, divisors = (768, 64), data.draw(st.sampled_from([1, 2, 3, 6]), "divisors")
    payload = random_bytes(encoded_bytes("nvfp4", shape, divisors), data.draw(st.integers(0, 99), "seed"))
    planes, whole = split_planes(payload, planes_of("nvfp4", shape, divisors)), Geometry.whole(shape, divisors)
    first = data.draw(st.integers(0, 5), "first tile")
    last = data.draw(st.integers(first + 1, 6), "last tile")
    view, geometry = slice_rows("nvfp4", planes, whole, first * 128, last * 128)
    codes, scales, words = unpack_codes("nvfp4", view, geometry)
    assert words is not None and (last - first) % words.numel() == 0
    packed = pack_codes("nvfp4", codes, scales, words)
    values = decode("nvfp4", packed, Geometry.whole((geometry.rows, 64), words.numel()))
    expected = decode("nvfp4", planes, whole)[first * 128 : last * 128]
    assert torch.equal(values.nan_to_num(nan=7e7), expected.nan_to_num(nan=7e7))


def test_the_divisors_of_a_view_are_as_few_as_can_be() -> None:
    planes = pack_codes(
        "nvfp4",
        torch.zeros(768, 64, dtype=torch.uint8),
        torch.zeros(768, 4, dtype=torch.uint8),
        torch.tensor([1.0, 2.0, 3.0]),
    )
    whole = Geometry.whole((768, 64), 3)
    views = {
        (0, 256): [1.0],
        (0, 512): [1.0, 2.0],
        (128, 384): [1.0, 2.0],
        (384, 640): [2.0, 3.0],
        (252, 260): [1.0, 2.0],
        (250, 260): [1.0, 1.0, 1.0, 2.0, 2.0],
        (300, 300): [],
    }
    for (begin, end), expected in views.items():
        _, _, divisors = unpack_codes("nvfp4", *slice_rows("nvfp4", planes, whole, begin, end))
        assert divisors is not None and divisors.tolist() == expected
    gathered = gather_rows("nvfp4", planes, whole, torch.arange(767, -1, -1))
    _, _, divisors = unpack_codes("nvfp4", *gathered)
    assert divisors is not None and divisors.tolist() == [3.0, 2.0, 1.0]


def test_an_nvfp4_view_that_cannot_be_an_object_is_refused() -> None:
    planes = pack_codes(
        "nvfp4",
        torch.zeros(256, 64, dtype=torch.uint8),
        torch.zeros(256, 4, dtype=torch.uint8),
        torch.tensor([1.0, 2.0]),
    )
    view = slice_rows("nvfp4", planes, Geometry.whole((256, 64), 2), 64, 192)
    with pytest.raises(LayoutError, match="divisors = 2"):
        pack_codes("nvfp4", *unpack_codes("nvfp4", *view))


DIRECT = {"bf16": torch.bfloat16, "fp32": torch.float32, "int32": torch.int32}

SPECIAL_WORDS = {
    "bf16": [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7F81, 0xFFC5, 0x7FFF],
    "fp32": [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000, 0x7F800001, 0xFFC12345, 0x7FBFFFFF],
    "int32": [0x80000000, 0x7FFFFFFF, 0xFFFFFFFF, 0x00000000, 0x00000001],
}


@pytest.mark.parametrize("name", SPECIAL_WORDS)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_direct_words_are_kept_bit_for_bit(name: str, data: st.DataObject) -> None:
    size = DIRECT[name].itemsize
    drawn = data.draw(st.lists(st.integers(0, 256**size - 1), max_size=20), "words")
    words = np.array(SPECIAL_WORDS[name] + drawn, dtype=f"<u{size}")
    specs = planes_of(name, words.shape)
    payload = torch.frombuffer(bytearray(words.tobytes()), dtype=torch.uint8)
    planes = split_planes(payload, specs)
    assert planes[0].dtype == DIRECT[name]
    assert join_planes(planes, specs) == words.tobytes()
    moved = (planes[0].clone().flip(0).contiguous().flip(0),)
    assert join_planes(moved, specs) == words.tobytes()


@pytest.mark.parametrize("name", SPECIAL_WORDS)
def test_a_scalar_is_one_word(name: str) -> None:
    specs = planes_of(name, ())
    data = bytes(range(1, 1 + DIRECT[name].itemsize))
    (scalar,) = split_planes(torch.frombuffer(bytearray(data), dtype=torch.uint8), specs)
    assert scalar.shape == ()
    assert join_planes((scalar,), specs) == data


def test_gaps_between_planes_are_zero() -> None:
    shape = (3, 200)
    specs = planes_of("q5_g64_fp16", shape)
    planes = split_planes(torch.full((encoded_bytes("q5_g64_fp16", shape),), 0xAA, dtype=torch.uint8), specs)
    data = join_planes(planes, specs)
    for before, after in pairwise(specs):
        assert after.offset > before.end
        assert data[before.end : after.offset] == bytes(after.offset - before.end)
        assert data[before.offset : before.end] == b"\xaa" * before.nbytes


def test_planes_of_another_shape_or_type_do_not_join() -> None:
    specs = planes_of("q4_g64_fp16", (2, 130))
    codes, scales = pack_codes("q4_g64_fp16", torch.zeros(2, 130, dtype=torch.int8), grouped_scales(2, 3))
    for planes in [(codes[:1], scales), (codes, scales.float()), (codes,), (scales, codes)]:
        with pytest.raises(LayoutError, match="expected"):
            join_planes(planes, specs)


@pytest.mark.parametrize("name", GROUPED)
def test_codes_without_a_word_are_refused(name: str) -> None:
    low, _, high, _ = END_POINTS[name]
    group = word_oracle.GROUPED[name][1]
    for code in (low - 1, high + 1):
        if -128 <= code <= 127:
            codes = torch.zeros(3, 130, dtype=torch.int8)
            codes[2, 129] = code
            with pytest.raises(FormatError, match=f"code {code} at row 2, column 129"):
                pack_codes(name, codes, grouped_scales(3, -(-130 // group)))


def test_e2m1_words_have_four_bits() -> None:
    codes = torch.zeros(128, 64, dtype=torch.uint8)
    codes[5, 7] = 16
    with pytest.raises(FormatError, match="0x10 at row 5, column 7"):
        pack_codes("nvfp4", codes, torch.zeros(128, 4, dtype=torch.uint8), torch.ones(1))


@pytest.mark.parametrize(
    ("name", "codes", "scales", "divisors"),
    [
        ("q4_g64_fp16", torch.zeros(2, 64), torch.ones(2, 1, dtype=torch.float16), None),
        ("q4_g64_fp16", torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 1, dtype=torch.float16), None),
        ("q4_g64_fp16", torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 1), None),
        ("q4_g64_fp16", torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 1, dtype=torch.float16), torch.ones(1)),
        ("fp8_e4m3fn_row_bf16", torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, dtype=torch.float16), None),
        ("fp8_e4m3fn_row_fp16", torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, dtype=torch.bfloat16), None),
        ("fp8_e4m3fn_row_fp16", torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, dtype=torch.float16), None),
        ("nvfp4", torch.zeros(128, 64, dtype=torch.uint8), torch.zeros(128, 4, dtype=torch.uint8), None),
        (
            "nvfp4",
            torch.zeros(128, 64, dtype=torch.uint8),
            torch.zeros(128, 4, dtype=torch.uint8),
            torch.ones(1).double(),
        ),
        ("bf16", torch.zeros(2, 64), torch.ones(2, 1), None),
        ("gguf_q4_0", torch.zeros(2, 64, dtype=torch.int8), torch.ones(2, 2, dtype=torch.float16), None),
    ],
)
def test_nothing_is_cast_on_the_way_in(
    name: str, codes: torch.Tensor, scales: torch.Tensor, divisors: torch.Tensor | None
) -> None:
    with pytest.raises(FormatError):
        pack_codes(name, codes, scales, divisors)


@pytest.mark.parametrize(
    ("name", "codes", "scales"),
    [
        ("q4_g64_fp16", (2, 130), (2, 4)),
        ("q4_g64_fp16", (2, 130), (3, 3)),
        ("q4_g64_fp16", (130,), (3,)),
        ("q4_g64_fp16", (2, 2, 32), (2, 2)),
        ("q4_g64_fp16", (2, 3, 64), (2, 3)),
        ("q4_g64_fp16", (2, 4, 64), (2, 3)),
        ("fp8_e4m3fn_row_fp16", (2, 130), (3,)),
        ("fp8_e4m3fn_row_bf16", (2, 130), (2, 1)),
        ("nvfp4", (128, 64), (4, 128)),
        ("nvfp4", (128, 48), (128, 3)),
    ],
)
def test_extents_that_do_not_belong_together_are_refused(
    name: str, codes: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    code_dtype = torch.int8 if name in GROUPED else torch.uint8
    scale_dtype = {"nvfp4": torch.uint8, "fp8_e4m3fn_row_bf16": torch.bfloat16}.get(name, torch.float16)
    divisors = torch.ones(1) if name == "nvfp4" else None
    with pytest.raises(LayoutError):
        pack_codes(name, torch.zeros(codes, dtype=code_dtype), torch.zeros(scales, dtype=scale_dtype), divisors)
