"""Views, gathers and joins of packed weights: each commutes with decoding, and what cannot stay packed is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_torch.errors import ConversionError, LayoutError, UnsupportedOperation
from ninfer_torch.kernels.packing import unpack_codes
from ninfer_torch.layouts import encoded_bytes
from ninfer_torch.tensors import NinferTensor, decode, encode, wrap_planes
from quantized import FAMILIES, QUANTIZED, check_a16, exact_product, random_weight

N, K = 384, 512

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda w: w[5:77],
    "all rows": lambda w: w[:],
    "no rows": lambda w: w[9:9],
    "negative": lambda w: w[-100:-1],
    "narrow": lambda w: w.narrow(0, 130, 200),
    "view of a view": lambda w: w[100:300][30:171],
    "chunk": lambda w: w.chunk(3)[2],
    "split": lambda w: w.split([1, 200, 183])[1],
    "gather": lambda w: w[torch.tensor([300, 2, 2, 129])],
    "negative gather": lambda w: w[torch.tensor([-1, 0])],
    "mask": lambda w: w[torch.arange(N) % 7 == 3],
    "index_select": lambda w: w.index_select(0, torch.arange(200, 10, -3)),
    "gather of a view": lambda w: w[130:300][torch.tensor([0, 169, 5])],
    "view of a gather": lambda w: w[torch.arange(200, 0, -1)][50:190],
    "joined": lambda w: torch.cat([w[3:7], w, w[200:301]]),
    "stacked": lambda w: torch.stack([w[0:5], w[300:305]]),
    "bank": lambda w: w.view(3, 128, K),
    "matrix of a bank": lambda w: w.view(3, 128, K)[1],
    "last of a bank": lambda w: w.view(3, 128, K)[-1],
    "matrices": lambda w: w.view(3, 128, K)[1:],
    "unbound": lambda w: w.view(3, 128, K).unbind()[2],
    "rows of a matrix": lambda w: w.view(3, 128, K)[2][17:40],
    "bank gather": lambda w: w.view(3, 128, K).index_select(0, torch.tensor([2, 0, 2])),
    "flattened": lambda w: w.view(2, 192, K).reshape(-1, K),
    "columns": lambda w: w[:, 256:],
    "columns of rows": lambda w: w[17:200][:, :256],
}


@pytest.mark.parametrize("format", QUANTIZED)
def test_views_commute_with_decoding(format: str) -> None:
    divisors = 3 if format == "nvfp4" else 1
    weight = random_weight(format, N, K, divisors=divisors)
    dense = weight.dequantize()
    for name, view in VIEWS.items():
        found = view(weight)
        assert isinstance(found, NinferTensor) and found.format == format, name
        assert torch.equal(found.dequantize(), view(dense)), name
        with torch.inference_mode():
            assert torch.equal(view(weight).dequantize(), view(dense)), name


@pytest.mark.parametrize("format", FAMILIES)
def test_views_multiply(format: str) -> None:
    weight, x = random_weight(format, N, K, divisors=3 if format == "nvfp4" else 1), torch.randn(3, K)
    for view in (weight[130:301], weight.view(3, 128, K)[1], weight[torch.tensor([7, 300])]):
        check_a16(F.linear(x, view), exact_product(x, view), K)
        ids = torch.tensor([1, 0])
        assert torch.equal(F.embedding(ids, view), view.dequantize()[ids])


@pytest.mark.parametrize("format", FAMILIES)
def test_a_row_view_copies_nothing(format: str) -> None:
    weight = random_weight(format, N, K)
    view = weight[128:256]
    for mine, parent in zip(view.planes.values(), weight.planes.values(), strict=True):
        assert mine.untyped_storage().data_ptr() == parent.untyped_storage().data_ptr()


@pytest.mark.parametrize("format", FAMILIES)
def test_overlapping_views_of_one_weight_compile(format: str) -> None:
    torch._dynamo.reset()
    weight, x = random_weight(format, N, K), torch.randn(3, K)

    def products(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.linear(x, weight[0:256]), F.linear(x, weight[0:300])

    compiled = torch.compile(products, fullgraph=True)
    for found, expected in zip(compiled(x, weight), products(x, weight), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("format", "begin", "end"),
    [
        ("q4_g64_fp16", 32, 96),
        ("q4_g64_fp16", 64, 100),
        ("t2_g128_fp16", 64, 192),
        ("nvfp4", 16, 80),
        ("gguf_q4_k", 128, 384),
        ("gguf_q8_0", 16, 48),
    ],
)
def test_cuts_inside_a_group_are_refused(format: str, begin: int, end: int) -> None:
    with pytest.raises(LayoutError, match="whole groups"):
        random_weight(format, 128, 512)[:, begin:end]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["q2_g64_fp16", "q6_g64_fp16", "q8_g32_fp16", "t2_g128_fp16"]), st.integers(1, 400), st.data())
def test_columns_of_whole_groups(format: str, columns: int, data: st.DataObject) -> None:
    weight = random_weight(format, 3, columns)
    group = {"q8_g32_fp16": 32, "t2_g128_fp16": 128}.get(format, 64)
    begin = data.draw(st.integers(0, (columns - 1) // group)) * group
    ends = [*range(begin + group, columns, group), columns]
    end = data.draw(st.sampled_from(ends))
    cut = weight[:, begin:end]
    assert torch.equal(cut.dequantize(), weight.dequantize()[:, begin:end])
    assert len(encode(cut)) == encoded_bytes(format, (3, end - begin))


@pytest.mark.parametrize(("begin", "end"), [(0, 64), (64, 192), (448, 512)])
def test_columns_of_swizzled_scales_are_found_in_their_tiles(begin: int, end: int) -> None:
    """Scales of nvfp4 lie four columns by 128 rows to a tile; a share of the columns takes whole tiles."""
    weight = random_weight("nvfp4", 256, 512, divisors=2)
    cut, x = weight[:, begin:end], torch.randn(3, end - begin)
    assert torch.equal(cut.dequantize(), weight.dequantize()[:, begin:end])
    check_a16(F.linear(x, cut), exact_product(x, cut), end - begin)


REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "step": lambda w: w[::2],
    "element": lambda w: w[0, 0],
    "row": lambda w: w[0],
    "flat": lambda w: w.view(-1),
    "regrouped rows": lambda w: w.view(N * 2, K // 2),
    "columns of a bank": lambda w: w.view(3, 128, K)[:, 3:5],
    "column gather": lambda w: w[:, torch.tensor([1, 2])],
    "cat of columns": lambda w: torch.cat([w, w], dim=1),
    "cat with a dense": lambda w: torch.cat([w, torch.zeros(1, K)]),
    "sum": lambda w: w.sum(),
    "add": lambda w: w + 1,
    "in place": lambda w: w.mul_(2),
    "zeros_like": lambda w: torch.zeros_like(w),
    "compare": lambda w: w == 0,
    "norm": lambda w: w.norm(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_stay_packed_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedOperation):
        REFUSED[name](random_weight("q4_g64_fp16", N, K))


@pytest.mark.parametrize("format", QUANTIZED)
def test_encode_and_decode_are_inverse(format: str) -> None:
    divisors = 3 if format == "nvfp4" else 1
    weight = random_weight(format, N, K, divisors=divisors)
    payload = encode(weight, format)
    assert len(payload) == encoded_bytes(format, (N, K), divisors)
    again = decode(payload, format, (N, K), divisors)
    assert torch.equal(again, weight) and encode(again) == payload


@pytest.mark.parametrize("format", QUANTIZED)
def test_a_view_encodes_as_an_object_of_its_own(format: str) -> None:
    weight = random_weight(format, N, K, divisors=3 if format == "nvfp4" else 1)
    view = weight[128:384]
    payload = encode(view)
    divisors = 2 if format == "nvfp4" else 1
    assert len(payload) == encoded_bytes(format, (256, K), divisors)
    assert torch.equal(decode(payload, format, (256, K), divisors).dequantize(), view.dequantize())


def test_nvfp4_rows_that_are_not_tiles_have_no_object() -> None:
    weight = random_weight("nvfp4", N, K, divisors=3)
    with pytest.raises(LayoutError, match="N % 128"):
        encode(weight[0:100])
    with pytest.raises(LayoutError, match="divisors"):
        encode(weight[64:192])
    equal = random_weight("nvfp4", N, K, divisors=1)
    assert torch.equal(decode(encode(equal[64:192]), "nvfp4", (128, K)), equal[64:192])


def test_types_never_change_on_the_way() -> None:
    values = torch.randn(4, 64)
    assert encode(values) == values.numpy().tobytes()
    for tensor, format in [
        (values, "bf16"),
        (values.bfloat16(), "fp32"),
        (values, "q4_g64_fp16"),
        (values.long(), None),
    ]:
        with pytest.raises(ConversionError, match="cast_direct"):
            encode(tensor, format)
    with pytest.raises(ConversionError, match="q5_g64_fp16"):
        encode(random_weight("q4_g64_fp16", 4, 64), "q5_g64_fp16")


def test_equality_is_of_words_not_values() -> None:
    weight = random_weight("q4_g64_fp16", 8, 64)
    codes, scales, _ = unpack_codes("q4_g64_fp16", list(weight.planes.values()), weight.geometry)
    flipped = decode(encode(weight), "q4_g64_fp16", (8, 64))
    assert torch.equal(flipped, weight) and not torch.equal(weight, weight.dequantize())
    flipped.scales.view(torch.int16)[0, 0] ^= 1
    assert not torch.equal(flipped, weight)
    assert not torch.equal(weight, weight[0:4])
    assert codes.shape[0] == scales.shape[0] == 8


def test_planes_must_fit_the_layout() -> None:
    weight = random_weight("q4_g64_fp16", 8, 64)
    planes = list(weight.planes.values())
    with pytest.raises(LayoutError, match="plane codes"):
        wrap_planes("q4_g64_fp16", (9, 64), planes)
    with pytest.raises(LayoutError, match="planes"):
        wrap_planes("q4_g64_fp16", (8, 64), planes[:1])
    with pytest.raises(LayoutError, match="positive"):
        wrap_planes("q4_g64_fp16", (0, 64), planes)
    with pytest.raises(LayoutError, match="bytes"):
        decode(b"123", "q4_g64_fp16", (8, 64))
