"""Value checks: what each format's language admits, and that one wrong word is refused by its place and name."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import word_oracle
from golden import golden, load_json
from golden_objects import read_objects
from ninfer_torch.errors import FormatError, LayoutError
from ninfer_torch.formats import FORMATS
from ninfer_torch.kernels import checks
from ninfer_torch.kernels.checks import check_payload, check_words
from ninfer_torch.kernels.packing import join_planes, pack_codes, unpack_codes
from ninfer_torch.kernels.reference import decode
from ninfer_torch.layouts import Geometry, encoded_bytes, gather_rows, planes_of, slice_rows, split_planes

GROUPED = list(word_oracle.GROUPED)
STRICT = [name for name in GROUPED if name != "q2_g64_fp16"]
ROW_FLOAT = {"fp8_e4m3fn_row_bf16": torch.bfloat16, "fp8_e4m3fn_row_fp16": torch.float16}

# least and greatest legal code
LEGAL_CODES = {
    "q2_g64_fp16": (-1, 2),
    "q4_g64_fp16": (-8, 7),
    "q5_g64_fp16": (-16, 15),
    "q6_g64_fp16": (-32, 31),
    "q8_g32_fp16": (-127, 127),
    "t2_g128_fp16": (-1, 1),
}


def half_words(words: np.ndarray | list[int], dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.from_numpy(np.asarray(words, dtype=np.uint16).view(np.int16).copy()).view(dtype)


def legal(name: str, planes: tuple[torch.Tensor, ...], shape: tuple[int, int], divisors: int = 1) -> bool:
    """Whether the checks accept the planes."""
    try:
        check_words(name, planes, Geometry.whole(shape, divisors), "w")
    except FormatError:
        return False
    return True


@pytest.mark.parametrize("name", FORMATS)
def test_golden_objects_are_legal(name: str) -> None:
    objects = read_objects(golden("ninfer", "formats", f"{name}.ninfer"))
    assert objects
    for key, stored in objects.items():
        check_payload(name, stored.shape, stored.tensor, stored.divisors, key)


def illegal_cases() -> list[str]:
    path = golden("ninfer", "malformed", "index.json")
    return [case["name"] for case in load_json(path)["cases"] if case["expected"] == "illegal_values"]


def test_golden_illegal_values_are_refused_by_name_and_still_decode() -> None:
    cases = illegal_cases()
    assert len(cases) == 19
    for case in cases:
        refused = []
        for key, stored in read_objects(golden("ninfer", "malformed", f"{case}.ninfer")).items():
            try:
                check_payload(stored.format, stored.shape, stored.tensor, stored.divisors, key)
            except FormatError as error:
                refused.append(key)
                assert str(error).startswith(f"{key}: "), case
            planes = split_planes(stored.tensor, planes_of(stored.format, stored.shape, stored.divisors))
            if FORMATS[stored.format].quantized:
                values = decode(stored.format, planes, Geometry.whole(stored.shape, stored.divisors))
                assert tuple(values.shape) == stored.shape
        assert len(refused) == 1, case


# Which words are legal, one at a time and all of them.


@pytest.mark.parametrize("name", GROUPED)
def test_every_scale_word_over_zero_codes(name: str) -> None:
    """Of the 65536 binary16 words the finite ones are legal, but for -0 outside q2."""
    words = np.arange(65536)
    accepted = ~np.isnan(words.astype(np.uint16).view(np.float16)) & ~np.isinf(words.astype(np.uint16).view(np.float16))
    accepted[0x8000] = name == "q2_g64_fp16"
    groups = 128 // word_oracle.GROUPED[name][1]
    codes, scales = torch.zeros(65536, 128, dtype=torch.int8), half_words(words)[:, None].repeat(1, groups)
    planes = pack_codes(name, codes, scales)
    keep = torch.from_numpy(np.flatnonzero(accepted))
    check_words(name, *gather_rows(name, planes, Geometry.whole((65536, 128)), keep), "w")
    for word in [0x7C00, 0x7C01, 0x7FFF, 0xFC00, 0xFE00, 0xFFFF, *np.flatnonzero(~accepted)[::97]]:
        with pytest.raises(FormatError, match=f"w: row {word}, group 0: {name} scale word 0x{word:04x}"):
            check_words(name, *slice_rows(name, planes, Geometry.whole((65536, 128)), word, word + 1), "w")


@pytest.mark.parametrize("name", GROUPED)
def test_every_code_word(name: str) -> None:
    bits, group = word_oracle.GROUPED[name][:2]
    illegal = {"q8_g32_fp16": {0x80}, "t2_g128_fp16": {0b10}}.get(name, set())
    for word in range(1 << bits):
        codes = torch.zeros(1, 128, dtype=torch.int8)
        codes[0, 77] = word_oracle.grouped_code(name, word)
        planes = pack_codes(name, codes, half_words([0x3C00] * (128 // group))[None])
        assert legal(name, planes, (1, 128)) == (word not in illegal)
        zero_scale = pack_codes(name, codes, half_words([0] * (128 // group))[None])
        free = name == "q2_g64_fp16" or word_oracle.grouped_code(name, word) == 0
        assert legal(name, zero_scale, (1, 128)) == free


@pytest.mark.parametrize("name", ROW_FLOAT)
def test_every_fp8_code_and_row_scale(name: str) -> None:
    for word in range(256):
        codes = torch.tensor([[word]], dtype=torch.uint8)
        for scale, accepted in [(1.0, word not in (0x7F, 0xFF)), (0.0, word in (0x00, 0x80))]:
            planes = pack_codes(name, codes, torch.tensor([scale], dtype=ROW_FLOAT[name]))
            assert legal(name, planes, (1, 1)) == accepted
    scales = half_words(np.arange(65536), ROW_FLOAT[name])
    planes = pack_codes(name, torch.full((65536, 1), 0x80, dtype=torch.uint8), scales)
    infinity = 0x7F80 if ROW_FLOAT[name] == torch.bfloat16 else 0x7C00
    whole = Geometry.whole((65536, 1))
    check_words(name, *slice_rows(name, planes, whole, 0, infinity), "w")
    for word in [infinity, infinity + 1, 0x7FFF, 0x8000, 0x8001, 0xBC00, 0xFFFF]:
        with pytest.raises(FormatError, match=f"w: row {word}, group 0: {name} scale word 0x{word:04x}"):
            check_words(name, *slice_rows(name, planes, whole, word, word + 1), "w")


def test_every_nvfp4_scale_word() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 4)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 4)
    planes = pack_codes("nvfp4", codes, scales, torch.ones(1))
    whole = Geometry.whole((256, 64))
    for word in range(256):
        view = slice_rows("nvfp4", planes, whole, word, word + 1)
        if word <= 0x7E:
            check_words("nvfp4", *view, "w")
        else:
            with pytest.raises(FormatError, match=f"w: row {word}, group 0: nvfp4 scale word 0x{word:02x}"):
                check_words("nvfp4", *view, "w")


@pytest.mark.parametrize(
    ("word", "accepted"),
    [
        (0x00000001, True),
        (0x3F800000, True),
        (0x7F7FFFFF, True),
        (0x00000000, False),
        (0x80000000, False),
        (0xBF800000, False),
        (0x7F800000, False),
        (0xFF800000, False),
        (0x7FC00000, False),
        (0x7F800001, False),
        (0xFFFFFFFF, False),
    ],
)
def test_divisor_words(word: int, accepted: bool) -> None:
    divisors = torch.from_numpy(np.array([0x3F800000, word, 0x3F800000], dtype=np.uint32).view(np.float32))
    planes = pack_codes(
        "nvfp4", torch.zeros(384, 64, dtype=torch.uint8), torch.zeros(384, 4, dtype=torch.uint8), divisors
    )
    whole = Geometry.whole((384, 64), 3)
    if accepted:
        check_words("nvfp4", planes, whole, "w")
        return
    with pytest.raises(FormatError, match=rf"w: divisor 1 \(rows 128..255\): nvfp4 divisor word 0x{word:08x}"):
        check_words("nvfp4", planes, whole, "w")
    check_words("nvfp4", *slice_rows("nvfp4", planes, whole, 0, 128), "w")
    check_words("nvfp4", *slice_rows("nvfp4", planes, whole, 256, 384), "w")
    with pytest.raises(FormatError, match="w: divisor 1"):
        check_words("nvfp4", *slice_rows("nvfp4", planes, whole, 255, 256), "w")


# Padding and gaps.


@pytest.mark.parametrize("name", GROUPED)
def test_padding_holds_code_zero_and_scale_zero(name: str) -> None:
    group = word_oracle.GROUPED[name][1]
    shape, logical, groups = (3, 130), -(-130 // group), 256 // group
    codes, scales = torch.zeros(3, groups, group, dtype=torch.int8), half_words(np.zeros((3, groups)))
    codes.view(3, 256)[:, :130] = 1
    scales[:, :logical] = -0.5
    assert legal(name, pack_codes(name, codes, scales), shape)
    for column in (130, 191, 255):
        wrong = codes.clone()
        wrong.view(3, 256)[1, column] = 1
        with pytest.raises(FormatError, match=f"row 1, group {column // group}, column {column}: .*padding column"):
            check_words(name, pack_codes(name, wrong, scales), Geometry.whole(shape), "w")
    for word in (0x3C00, 0x8000, 0x7C00) if logical < groups else ():
        wrong = scales.clone()
        wrong[2, -1] = half_words([word])[0]
        with pytest.raises(FormatError, match=f"row 2, group {groups - 1}: .*word 0x{word:04x} on a group of padding"):
            check_words(name, pack_codes(name, codes, wrong), Geometry.whole(shape), "w")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("q2_g64_fp16", (2, 130)),
        ("q5_g64_fp16", (3, 200)),
        ("t2_g128_fp16", (3, 200)),
        ("fp8_e4m3fn_row_bf16", (3, 5)),
    ],
)
def test_every_byte_of_a_gap_is_zero(name: str, shape: tuple[int, int]) -> None:
    code = 0x55 if name == "q2_g64_fp16" else 0
    specs = planes_of(name, shape)
    payload = torch.zeros(encoded_bytes(name, shape), dtype=torch.uint8)
    payload[: specs[0].end] = code
    check_payload(name, shape, payload, 1, "w")
    gaps = [offset for before, after in pairwise(specs) for offset in range(before.end, after.offset)]
    assert gaps
    for offset in gaps:
        payload[offset] = 0x40
        with pytest.raises(FormatError, match=f"w: byte 0x40 at offset {offset}, in the gap between planes"):
            check_payload(name, shape, payload, 1, "w")
        payload[offset] = 0


def test_a_payload_of_another_size_is_a_matter_of_layout() -> None:
    with pytest.raises(LayoutError, match="expected 272 bytes"):
        check_payload("q4_g64_fp16", (2, 130), torch.zeros(271, dtype=torch.uint8), 1, "w")
    with pytest.raises(LayoutError, match="no divisors"):
        check_payload("q4_g64_fp16", (2, 130), torch.zeros(272, dtype=torch.uint8), 2, "w")


@pytest.mark.parametrize(
    "name", [name for name in FORMATS if name.startswith("gguf_") or name in ("bf16", "fp32", "int32")]
)
def test_any_bytes_are_legal_blocks_and_direct_words(name: str) -> None:
    size = encoded_bytes(name, (3, 256))
    payload = torch.from_numpy(np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8))
    check_payload(name, (3, 256), payload, 1, "w")
    check_payload(name, (3, 256), torch.full((size,), 0xFF, dtype=torch.uint8), 1, "w")


# One wrong word among right ones.


def right_object(name: str, seed: int) -> tuple[tuple[int, int], int, tuple[torch.Tensor, ...]]:
    """Shape, divisors and planes of an object of random legal words, no scale zero."""
    draw = np.random.default_rng(seed)
    if name in GROUPED:
        shape = (7, int(draw.integers(1, 300)))
        group, (low, high) = word_oracle.GROUPED[name][1], LEGAL_CODES[name]
        codes = torch.from_numpy(draw.integers(low, high + 1, shape).astype(np.int8))
        words = draw.integers(0x0001, 0x7C00, (7, -(-shape[1] // group))) | draw.integers(0, 2, (7, 1)) << 15
        return shape, 1, pack_codes(name, codes, half_words(words))
    if name in ROW_FLOAT:
        shape, dtype = (7, int(draw.integers(1, 300))), ROW_FLOAT[name]
        codes = torch.from_numpy(
            draw.integers(0, 0x7F, shape, dtype=np.uint8) | draw.integers(0, 2, shape, dtype=np.uint8) << 7
        )
        scales = half_words(draw.integers(1, 0x7C00, 7), dtype)
        return shape, 1, pack_codes(name, codes, scales)
    codes = torch.from_numpy(draw.integers(0, 16, (256, 128), dtype=np.uint8))
    scales = torch.from_numpy(draw.integers(0, 0x7F, (256, 8), dtype=np.uint8))
    return (256, 128), 2, pack_codes("nvfp4", codes, scales, torch.from_numpy(draw.random(2, dtype=np.float32) + 1))


def corrupt(
    name: str, data: st.DataObject, shape: tuple[int, int], planes: tuple[torch.Tensor, ...]
) -> tuple[int, int, int]:
    """Put one illegal word into the planes, in place; returns its row, group and word."""
    row = data.draw(st.integers(0, shape[0] - 1), "row")
    if name in GROUPED:
        group = data.draw(st.integers(0, -(-shape[1] // word_oracle.GROUPED[name][1]) - 1), "group")
        word = data.draw(st.sampled_from([0x7C00, 0xFC00, 0x7E01, 0xFFFF]), "word")
        planes[-1][row, group] = half_words([word])[0]
        return row, group, word
    if name == "nvfp4":
        group, word = data.draw(st.integers(0, 7), "group"), data.draw(st.integers(0x7F, 0xFF), "word")
        planes[1].view(-1)[word_oracle.swizzled(row, group, shape[1])] = word
        return row, group, word
    column, word = data.draw(st.integers(0, shape[1] - 1), "column"), data.draw(st.sampled_from([0x7F, 0xFF]), "word")
    planes[0][row, column] = word
    return row, 0, word


@pytest.mark.parametrize("name", word_oracle.SCALED)
@pytest.mark.parametrize("chunk", [1, checks.CHUNK_CODES])
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_one_wrong_word_is_found(name: str, chunk: int, data: st.DataObject) -> None:
    """In the object, in its payload, in a view of it, and whatever the size of the chunks; not in a view beside it."""
    shape, divisors, planes = right_object(name, data.draw(st.integers(0, 2**32 - 1), "seed"))
    whole = Geometry.whole(shape, divisors)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "CHUNK_CODES", chunk)
        check_words(name, planes, whole, "w")
        row, group, word = corrupt(name, data, shape, planes)
        message = f"^layer.7: row {row}, group {group}[:,].* word 0x0*{word:x} "
        with pytest.raises(FormatError, match=message):
            check_words(name, planes, whole, "layer.7")
        payload = bytearray(join_planes(planes, planes_of(name, shape, divisors)))
        with pytest.raises(FormatError, match=message):
            check_payload(name, shape, torch.frombuffer(payload, dtype=torch.uint8), divisors, "layer.7")
        with pytest.raises(FormatError, match=message):
            check_words(name, *slice_rows(name, planes, whole, row, shape[0]), "layer.7")
        check_words(name, *slice_rows(name, planes, whole, 0, row), "layer.7")
        check_words(name, *slice_rows(name, planes, whole, row + 1, shape[0]), "layer.7")


@pytest.mark.parametrize("name", [*STRICT, *ROW_FLOAT])
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_a_code_under_a_zero_scale_is_found(name: str, data: st.DataObject) -> None:
    shape, _, planes = right_object(name, data.draw(st.integers(0, 2**32 - 1), "seed"))
    row, column = data.draw(st.integers(0, shape[0] - 1), "row"), data.draw(st.integers(0, shape[1] - 1), "column")
    group = word_oracle.GROUPED[name][1] if name in GROUPED else shape[1]
    codes, scales, _ = unpack_codes(name, planes, Geometry.whole(shape))
    codes, scales = codes.clone(), scales.clone()
    index = (row, column // group) if name in GROUPED else (row,)
    codes[index] = 0
    codes.view(shape[0], -1)[row, column] = 1
    scales[index] = 0
    with pytest.raises(
        FormatError, match=rf"w: row {row}, group {column // group}, column {column}: .* word 0x01 under a zero"
    ):
        check_words(name, pack_codes(name, codes, scales), Geometry.whole(shape), "w")


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest storage that any operator under it returns, views of what there was before left out."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("name", ["q2_g64_fp16", "q6_g64_fp16", "q8_g32_fp16", "fp8_e4m3fn_row_bf16", "nvfp4"])
def test_the_temporaries_of_a_check_do_not_grow_with_the_object(name: str) -> None:
    shape = (8192, 1024)
    payload = torch.zeros(encoded_bytes(name, shape), dtype=torch.uint8)
    planes = split_planes(payload, planes_of(name, shape))
    if name == "nvfp4":
        planes[2].fill_(1)
    if name == "q2_g64_fp16":
        planes[0].fill_(0x55)
    with LargestTensor([payload]) as watch:
        check_payload(name, shape, payload, 1, "w")
    assert 0 < watch.largest <= 4 * checks.CHUNK_CODES
