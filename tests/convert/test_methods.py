"""Which method writes which format, and what `quantize` accepts."""

from __future__ import annotations

import pytest
import torch

from exact import assert_same_words
from ninfer_torch.convert.methods import (
    METHODS,
    cast_direct,
    fp8_row_maxabs,
    grouped_absmax,
    grouped_search,
    quantize,
)
from ninfer_torch.errors import ConversionError, FormatError
from ninfer_torch.formats import FORMATS
from ninfer_torch.tensors import encode

GROUPED = ("q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16")
ROW_FLOAT = ("fp8_e4m3fn_row_bf16", "fp8_e4m3fn_row_fp16")


def test_quantize_answers_for_every_format() -> None:
    """Every registered format either quantizes or says why not, and how its words come about."""
    weight = torch.linspace(-1, 1, 2 * 256).view(2, 256)
    for name, record in FORMATS.items():
        if name in GROUPED + ROW_FLOAT:
            assert quantize(weight, name).format == name
        elif not record.quantized:
            assert_same_words(quantize(weight, name), cast_direct(weight, name))
        else:
            for method in (None, "grouped_absmax", "grouped_search", "fp8_row_maxabs"):
                with pytest.raises(ConversionError, match=f"cannot quantize to {name}: .* by import_encoded"):
                    quantize(weight, name, method=method)


@pytest.mark.parametrize("name", GROUPED)
def test_quantize_by_search_packs_what_the_method_finds(name: str) -> None:
    weight = torch.randn(3, 130, generator=torch.Generator().manual_seed(1))
    importance = torch.rand(130, generator=torch.Generator().manual_seed(2))
    codes, scales = grouped_search(weight, name, importance=importance, negative_scales=True)
    quantized = quantize(weight, name, "grouped_search", importance=importance, negative_scales=True)
    group = FORMATS[name].group
    assert_same_words(quantized.dequantize(), scales.float().repeat_interleave(group, 1)[:, :130] * codes.float())
    assert not torch.equal(scales, grouped_absmax(weight, name)[1])


@pytest.mark.parametrize("name", (*GROUPED, *ROW_FLOAT, "bf16"))
def test_strided_views_are_quantized_as_their_copies(name: str) -> None:
    """Every second column, a transpose and an expanded row, each beside values that must not be read."""
    generator = torch.Generator().manual_seed(7)
    wide = torch.full((192, 192), torch.nan)
    wide[:, ::2] = torch.randn(192, 96, generator=generator)
    square = torch.randn(192, 70, generator=generator)
    methods = (None, "grouped_search") if name in GROUPED else (None,)
    for view in (wide[:, ::2], square.T, square[3:4].expand(40, 70)):
        assert not view.is_contiguous()
        for method in methods:
            found, expected = quantize(view, name, method), quantize(view.contiguous(), name, method)
            assert encode(found) == encode(expected)


def test_quantize_refuses_methods_that_do_not_fit() -> None:
    weight = torch.ones(2, 64)
    with pytest.raises(ConversionError, match="unknown method 'nearest'; known: cast_direct, grouped_absmax"):
        quantize(weight, "q4_g64_fp16", method="nearest")
    with pytest.raises(ConversionError, match="import_encoded takes encoded rows, and quantize has numbers"):
        quantize(weight, "q4_g64_fp16", method="import_encoded")
    for method in ("cast_direct", "fp8_row_maxabs"):
        with pytest.raises(ConversionError, match=f"{method} does not write q4_g64_fp16"):
            quantize(weight, "q4_g64_fp16", method=method)
    with pytest.raises(ConversionError, match="grouped_absmax does not write bf16"):
        quantize(weight, "bf16", method="grouped_absmax")
    with pytest.raises(FormatError, match="Q4_G64_FP16"):
        quantize(weight, "Q4_G64_FP16")
    for function in (grouped_absmax, grouped_search):
        for name in ("q2_g64_fp16", "t2_g128_fp16"):
            with pytest.raises(ConversionError, match=f"{function.__name__} does not write {name}"):
                function(weight, name)
    with pytest.raises(ConversionError, match="fp8_row_maxabs does not write q8_g32_fp16"):
        fp8_row_maxabs(weight, "q8_g32_fp16")


def test_parameters_that_a_method_does_not_take_are_errors() -> None:
    weight = torch.ones(2, 64)
    with pytest.raises(ConversionError, match="grouped_absmax has no parameter 'negative_scales'; .*: none"):
        quantize(weight, "q4_g64_fp16", negative_scales=True)
    with pytest.raises(ConversionError, match="grouped_search has no parameter 'imatrix'; .*: importance, negative"):
        quantize(weight, "q4_g64_fp16", "grouped_search", imatrix="x")
    with pytest.raises(ConversionError, match="fp8_row_maxabs has no parameter 'importance'"):
        quantize(weight, "fp8_e4m3fn_row_bf16", importance=torch.ones(64))


# --- methods of the caller's own -------------------------------------------------------------------------------------


def halves(rows: torch.Tensor, format: str, step: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    codes = (rows / step).round().to(torch.int8)
    return codes, torch.full((rows.shape[0], -(-rows.shape[1] // 64)), step, dtype=torch.float16)


def test_a_function_is_a_method_for_any_format() -> None:
    weight = torch.tensor([[0.5, -1.0, 1.5] + [0.0] * 61])
    assert torch.equal(quantize(weight, "q4_g64_fp16", halves).dequantize(), weight)
    assert torch.equal(quantize(weight, "q4_g64_fp16", halves, step=0.25).dequantize(), weight)
    assert torch.equal(
        quantize(weight, "q2_g64_fp16", lambda rows, _: halves(rows.clamp(-0.5, 1), _)).dequantize()[0, :3],
        torch.tensor([0.5, -0.5, 1.0]),
    )
    doubled = quantize(weight, "fp32", lambda rows, name: rows * 2)
    assert torch.equal(doubled, weight * 2)
    blocks = torch.arange(36, dtype=torch.uint8).view(1, 36)
    assert torch.equal(quantize(weight, "gguf_q4_0", lambda rows, name: blocks).planes["blocks"], blocks)


def test_what_a_function_returns_is_checked() -> None:
    weight = torch.zeros(1, 64)
    codes, scales = torch.ones(1, 64, dtype=torch.int8), torch.zeros(1, 1, dtype=torch.float16)
    with pytest.raises(FormatError, match="row 0, group 0, column 0: q4_g64_fp16 code word 0x01 under a zero scale"):
        quantize(weight, "q4_g64_fp16", lambda rows, name: (codes, scales))
    with pytest.raises(FormatError, match="no word for code 9"):
        quantize(weight, "q4_g64_fp16", lambda rows, name: (codes * 9, scales + 1))
    with pytest.raises(ConversionError, match=r"made planes .* for fp32 \[1, 64\]"):
        quantize(weight, "fp32", lambda rows, name: rows[:, :3])


def test_quantize_keeps_the_compute_dtype() -> None:
    weight = torch.ones(2, 64)
    for source, compute in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float64, torch.float32),
    ):
        assert quantize(weight.to(source), "q8_g32_fp16").dtype == compute
    assert not quantize(torch.nn.Parameter(weight), "q8_g32_fp16").requires_grad


def test_every_method_writes_registered_formats() -> None:
    for name, method in METHODS.items():
        assert method.name == name and method.targets and method.takes in ("values", "encoded")
        assert all(target in FORMATS for target in method.targets)
