"""Where words lie: sizes, bounds, zero-copy planes, and row views that commute with decoding (spec/layouts.md)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_torch.errors import LayoutError
from ninfer_torch.formats import FORMATS
from ninfer_torch.kernels.reference import decode
from ninfer_torch.layouts import (
    LAYOUTS,
    RESOURCE_ENCODING,
    Geometry,
    encoded_bytes,
    gather_rows,
    get_layout,
    layout_of,
    planes_of,
    slice_rows,
    split_planes,
    swizzle_scales,
    unswizzle_scales,
)

QUANTIZED = [name for name, record in FORMATS.items() if record.quantized]

FORMATS_OF = {
    "contiguous_le_v1": {"bf16", "fp32", "int32"},
    "row_split_k128_v1": {"q2_g64_fp16", "q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16", "t2_g128_fp16"},
    "block_scale_k16_m128x4_v1": {"nvfp4"},
    "row_scale_v1": {"fp8_e4m3fn_row_bf16"},
    "row_interleaved_v1": {"fp8_e4m3fn_row_fp16"},
    "gguf_blocks_v1": {name for name in FORMATS if name.startswith("gguf_")},
}

# spec/layouts.md 3.6: format, shape, base, high and scale bytes, high and scale offset, bytes
ROW_SPLIT_SIZES = [
    ("q2_g64_fp16", (2, 130), 128, 0, 16, 256, 256, 272),
    ("q4_g64_fp16", (2, 130), 256, 0, 16, 256, 256, 272),
    ("q5_g64_fp16", (2, 130), 256, 64, 16, 256, 512, 528),
    ("q6_g64_fp16", (2, 130), 256, 128, 16, 256, 512, 528),
    ("q8_g32_fp16", (2, 130), 512, 0, 32, 512, 512, 544),
    ("t2_g128_fp16", (2, 130), 128, 0, 8, 256, 256, 264),
    ("q5_g64_fp16", (3, 200), 384, 96, 24, 512, 768, 792),
    ("t2_g128_fp16", (3, 200), 192, 0, 12, 256, 256, 268),
    ("q4_g64_fp16", (7168, 5120), 18350080, 0, 1146880, 18350080, 18350080, 19496960),
    ("q5_g64_fp16", (7168, 5120), 18350080, 4587520, 1146880, 18350080, 22937600, 24084480),
]

# spec/layouts.md 5.5: shape, divisors, code bytes, scale offset, scale bytes, divisor offset, bytes
BLOCK_SCALE_SIZES = [
    ((128, 64), 1, 4096, 4096, 512, 4608, 4612),
    ((256, 64), 2, 8192, 8192, 1024, 9216, 9224),
    ((14336, 5120), 1, 36700160, 36700160, 4587520, 41287680, 41287684),
]

OTHER_SIZES = [
    ("bf16", (), 2),
    ("bf16", (2, 3), 12),
    ("fp32", (1,) * 16, 4),
    ("int32", (2, 3, 5), 120),
    ("fp8_e4m3fn_row_bf16", (14336, 5120), 73428992),
    ("fp8_e4m3fn_row_bf16", (3, 5), 262),
    ("fp8_e4m3fn_row_fp16", (1, 160), 162),
    ("fp8_e4m3fn_row_fp16", (3, 5), 21),
    ("gguf_q2_0", (3, 128), 3 * 2 * 18),
    ("gguf_iq1_m", (2, 512), 2 * 2 * 56),
]

# spec/layouts.md 5.3, K = 128: row, group, offset of the scale word
SWIZZLE = [(0, 0, 0), (0, 3, 3), (1, 0, 16), (32, 0, 4), (33, 5, 533), (127, 7, 1023), (128, 0, 1024), (200, 6, 1674)]


def random_payload(name: str, shape: tuple[int, ...], divisors: int = 1, seed: int = 0) -> torch.Tensor:
    """Any bytes of the right number; every word decodes, legal or not."""
    size = encoded_bytes(name, shape, divisors)
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def assert_same_values(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, except that any NaN equals any NaN."""
    assert found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan())
    keep = ~expected.isnan()
    assert torch.equal(found[keep].view(torch.int32), expected[keep].view(torch.int32))


def example_shape(name: str) -> tuple[tuple[int, int], int]:
    """A shape with partial groups or several tiles, and divisors."""
    if name == "nvfp4":
        return (384, 128), 3
    return (11, 512 if name.startswith("gguf_") else 201), 1


def test_the_registry_pairs_each_format_with_one_layout() -> None:
    assert {name: set(layout.formats) for name, layout in LAYOUTS.items()} == FORMATS_OF
    assert all(layout.alignment == 256 for layout in LAYOUTS.values())
    assert RESOURCE_ENCODING == "raw_bytes_v1"
    for name in FORMATS:
        assert name in FORMATS_OF[layout_of(name).name]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_layout_refuses_every_format_but_its_own(layout: str, name: str) -> None:
    shape = (128, 256)
    if name in FORMATS_OF[layout]:
        assert get_layout(layout).planes(name, shape) == planes_of(name, shape)
    else:
        with pytest.raises(LayoutError, match=f"{layout} does not hold format {name}"):
            get_layout(layout).planes(name, shape)


@pytest.mark.parametrize("name", ["row-split-k128-v1", "raw_bytes_v1", "CONTIGUOUS_LE_V1", "", None])
def test_other_layout_names_are_refused_with_the_known_ones(name: object) -> None:
    with pytest.raises(LayoutError) as caught:
        get_layout(name)  # type: ignore[arg-type]
    assert all(known in str(caught.value) for known in LAYOUTS)


@pytest.mark.parametrize(
    ("name", "shape", "base", "high", "scale", "high_offset", "scale_offset", "size"), ROW_SPLIT_SIZES
)
def test_row_split_sizes(
    name: str, shape: tuple[int, int], base: int, high: int, scale: int, high_offset: int, scale_offset: int, size: int
) -> None:
    planes = {plane.name: plane for plane in planes_of(name, shape)}
    assert (planes["codes"].offset, planes["codes"].nbytes) == (0, base)
    assert (planes["scales"].offset, planes["scales"].nbytes) == (scale_offset, scale)
    assert ("high" in planes) == (high > 0)
    if high:
        assert (planes["high"].offset, planes["high"].nbytes) == (high_offset, high)
    assert encoded_bytes(name, shape) == size


@pytest.mark.parametrize(
    ("shape", "divisors", "code", "scale_offset", "scale", "divisor_offset", "size"), BLOCK_SCALE_SIZES
)
def test_block_scale_sizes(
    shape: tuple[int, int], divisors: int, code: int, scale_offset: int, scale: int, divisor_offset: int, size: int
) -> None:
    codes, scales, words = planes_of("nvfp4", shape, divisors)
    assert (codes.offset, codes.nbytes) == (0, code)
    assert (scales.offset, scales.nbytes) == (scale_offset, scale)
    assert (words.offset, words.nbytes) == (divisor_offset, 4 * divisors)
    assert encoded_bytes("nvfp4", shape, divisors) == size


@pytest.mark.parametrize(("name", "shape", "size"), OTHER_SIZES)
def test_other_sizes(name: str, shape: tuple[int, ...], size: int) -> None:
    assert encoded_bytes(name, shape) == size


def test_row_scales_follow_the_codes_at_the_next_256_bytes() -> None:
    codes, scales = planes_of("fp8_e4m3fn_row_bf16", (3, 5))
    assert (codes.offset, codes.nbytes, scales.offset, scales.nbytes) == (0, 15, 256, 6)


@pytest.mark.parametrize(
    ("name", "shape", "divisors"),
    [
        ("nvfp4", (64, 64), 1),
        ("nvfp4", (128, 32), 1),
        ("nvfp4", (128, 64), 2),
        ("nvfp4", (384, 64), 2),
        ("nvfp4", (128, 64), 0),
        ("q4_g64_fp16", (2, 64), 2),
        ("q4_g64_fp16", (64,), 1),
        ("q4_g64_fp16", (1, 2, 64), 1),
        ("q4_g64_fp16", (0, 64), 1),
        ("gguf_q4_0", (2, 33), 1),
        ("gguf_q6_k", (2, 128), 1),
        ("gguf_q2_0", (2, 32), 1),
        ("bf16", (1,) * 17, 1),
        ("bf16", (2, 0), 1),
        ("fp8_e4m3fn_row_fp16", (), 1),
    ],
)
def test_illegal_shapes_and_divisors_are_refused(name: str, shape: tuple[int, ...], divisors: int) -> None:
    with pytest.raises(LayoutError):
        planes_of(name, shape, divisors)


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=20)
@given(rows=st.integers(1, 600), columns=st.integers(1, 700))
def test_planes_are_ordered_aligned_and_end_with_the_object(name: str, rows: int, columns: int) -> None:
    unit = 64 if name == "nvfp4" else getattr(FORMATS[name], "block_values", 1)
    shape = (rows * 128 if name == "nvfp4" else rows, columns * unit)
    end = 0
    for plane in planes_of(name, shape):
        assert end <= plane.offset < end + 256
        assert plane.offset % 256 == 0 or plane.name == "divisors"
        assert plane.offset % plane.dtype.itemsize == 0
        assert plane.end == plane.offset + np.prod(plane.shape, dtype=int) * plane.dtype.itemsize
        end = plane.end
    assert encoded_bytes(name, shape) == end


@pytest.mark.parametrize("name", FORMATS)
def test_planes_are_views_of_the_payload(name: str) -> None:
    shape, divisors = example_shape(name)
    specs = planes_of(name, shape, divisors)
    payload = random_payload(name, shape, divisors)
    for plane, spec in zip(split_planes(payload, specs), specs, strict=True):
        assert plane.untyped_storage().data_ptr() == payload.untyped_storage().data_ptr()
        assert plane.data_ptr() == payload.data_ptr() + spec.offset
        assert (tuple(plane.shape), plane.dtype) == (spec.shape, spec.dtype)
        expected = payload[spec.offset : spec.end]
        assert torch.equal(plane.contiguous().view(-1).view(torch.uint8), expected)


@pytest.mark.parametrize(
    "payload",
    [torch.zeros(271, dtype=torch.uint8), torch.zeros(273, dtype=torch.uint8), torch.zeros(272, dtype=torch.int8)],
)
def test_a_payload_of_another_size_or_type_is_refused(payload: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match="expected 272 bytes"):
        split_planes(payload, planes_of("q4_g64_fp16", (2, 130)))


@pytest.mark.parametrize(("row", "group", "offset"), SWIZZLE)
def test_swizzle_offsets(row: int, group: int, offset: int) -> None:
    marked = torch.zeros(256, 8, dtype=torch.uint8)
    marked[row, group] = 1
    assert swizzle_scales(marked).flatten().nonzero().flatten().tolist() == [offset]


@settings(deadline=None, max_examples=20)
@given(row_tiles=st.integers(1, 4), column_tiles=st.integers(1, 5), seed=st.integers(0, 2**32 - 1))
def test_swizzle_moves_each_word_where_the_formula_says(row_tiles: int, column_tiles: int, seed: int) -> None:
    rows, groups = row_tiles * 128, column_tiles * 4
    natural = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (rows, groups), dtype=np.uint8))
    row, group = np.meshgrid(np.arange(rows), np.arange(groups), indexing="ij")
    place = (row // 128 * column_tiles + group // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4
    expected = np.empty(rows * groups, np.uint8)
    expected[place] = natural.numpy()
    swizzled = swizzle_scales(natural)
    assert swizzled.shape == (row_tiles, column_tiles, 32, 4, 4)
    assert np.array_equal(swizzled.numpy().ravel(), expected)
    assert torch.equal(unswizzle_scales(swizzled), natural)


@pytest.mark.parametrize("name", QUANTIZED)
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_a_slice_decodes_to_the_slice_of_the_decoded_rows(name: str, data: st.DataObject) -> None:
    shape, divisors = example_shape(name)
    payload = random_payload(name, shape, divisors, data.draw(st.integers(0, 99), "seed"))
    planes, whole = split_planes(payload, planes_of(name, shape, divisors)), Geometry.whole(shape, divisors)
    values = decode(name, planes, whole)
    begin = data.draw(st.integers(0, shape[0]), "begin")
    end = data.draw(st.integers(begin, shape[0]), "end")
    view, geometry = slice_rows(name, planes, whole, begin, end)
    assert (geometry.rows, geometry.row_begin, geometry.parent_rows) == (end - begin, begin, shape[0])
    assert all(plane.untyped_storage().data_ptr() == payload.untyped_storage().data_ptr() for plane in view)
    assert_same_values(decode(name, view, geometry), values[begin:end])
    inner_begin = data.draw(st.integers(0, end - begin), "inner begin")
    inner, inner_geometry = slice_rows(name, view, geometry, inner_begin, end - begin)
    assert_same_values(decode(name, inner, inner_geometry), values[begin + inner_begin : end])


@pytest.mark.parametrize("name", QUANTIZED)
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_a_gather_decodes_to_the_gathered_decoded_rows(name: str, data: st.DataObject) -> None:
    shape, divisors = example_shape(name)
    payload = random_payload(name, shape, divisors, data.draw(st.integers(0, 99), "seed"))
    planes, whole = split_planes(payload, planes_of(name, shape, divisors)), Geometry.whole(shape, divisors)
    values = decode(name, planes, whole)
    index = torch.tensor(data.draw(st.lists(st.integers(0, shape[0] - 1), max_size=140), "index"), dtype=torch.int64)
    gathered, geometry = gather_rows(name, planes, whole, index)
    assert_same_values(decode(name, gathered, geometry), values[index])


@pytest.mark.parametrize("name", QUANTIZED)
def test_slices_and_gathers_compose(name: str) -> None:
    shape, divisors = example_shape(name)
    payload = random_payload(name, shape, divisors)
    planes, whole = split_planes(payload, planes_of(name, shape, divisors)), Geometry.whole(shape, divisors)
    values = decode(name, planes, whole)
    begin, end = shape[0] // 3 - 1, shape[0] - 2
    index = torch.tensor([end - begin - 1, 0, 2, 2])
    view, geometry = slice_rows(name, planes, whole, begin, end)
    gathered, gathered_geometry = gather_rows(name, view, geometry, index)
    assert_same_values(decode(name, gathered, gathered_geometry), values[begin:end][index])
    again, again_geometry = gather_rows(name, gathered, gathered_geometry, torch.tensor([3, 1]))
    assert_same_values(decode(name, again, again_geometry), values[begin:end][index][[3, 1]])
    part, part_geometry = slice_rows(name, gathered, gathered_geometry, 1, 3)
    assert_same_values(decode(name, part, part_geometry), values[begin:end][index][1:3])


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name != "nvfp4"])
def test_consecutive_row_views_tile_the_planes(name: str) -> None:
    shape, _ = example_shape(name)
    planes = split_planes(random_payload(name, shape), planes_of(name, shape))
    borders = [0, 1, 4, 10, shape[0]]
    views = [slice_rows(name, planes, Geometry.whole(shape), *pair)[0] for pair in pairwise(borders)]
    for plane, *parts in zip(planes, *views, strict=True):
        joined = torch.cat(parts)
        assert torch.equal(joined.flatten().view(torch.uint8), plane.flatten().view(torch.uint8))


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 2), (0, 12), (12, 12)])
def test_rows_outside_the_matrix_are_refused(begin: int, end: int) -> None:
    shape = (11, 201)
    planes = split_planes(random_payload("q4_g64_fp16", shape), planes_of("q4_g64_fp16", shape))
    with pytest.raises(LayoutError, match="11 rows"):
        slice_rows("q4_g64_fp16", planes, Geometry.whole(shape), begin, end)
