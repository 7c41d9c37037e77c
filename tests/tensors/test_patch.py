"""Convolutions by patches: `F.conv2d` and `F.conv3d` with stride = kernel equal the dense convolution on the same values."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer_torch.errors import LayoutError, UnsupportedOperation
from ninfer_torch.tensors import NinferTensor
from ninfer_torch.tensors.patch import PatchKernel, patch_kernel
from ninfer_torch.tensors.stacked import stack_rows
from quantized import random_weight

KERNELS = [(3, 2, 4, 4), (1, 1, 8, 8), (3, 8, 8), (2, 4, 16)]
"""Channels and sides: of three axes, then of two."""


def convolution(rank: int):
    return {2: F.conv2d, 3: F.conv3d}[rank]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the order of float32 sums."""
    assert found.shape == expected.shape and (found - expected).norm() <= 1e-5 * expected.norm()


def kernel(format: str, rows: int, shape: tuple[int, ...], seed: int = 0) -> PatchKernel:
    return patch_kernel(random_weight(format, rows, torch.Size(shape).numel(), seed=seed), (rows, *shape))


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(KERNELS),
    st.sampled_from(("q4_g64_fp16", "q6_g64_fp16", "fp8_e4m3fn_row_bf16", "gguf_q8_0")),
    st.integers(1, 3),
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
    st.booleans(),
)
def test_equals_the_dense_convolution(
    shape: tuple[int, ...], format: str, batch: int, counts: list[int], has_bias: bool
) -> None:
    weight, (channels, *sides) = kernel(format, 5, shape), shape
    x = torch.randn(batch, channels, *(n * side for n, side in zip(counts, sides, strict=False)))
    bias = torch.randn(5) if has_bias else None
    conv = convolution(len(sides))
    found, expected = (conv(x, w, bias, stride=tuple(sides)) for w in (weight, weight.dequantize()))
    assert_near(found, expected)


def test_gradients_reach_activations_and_bias() -> None:
    weight = kernel("q8_g32_fp16", 4, (3, 2, 4, 4))
    x, bias = torch.randn(2, 3, 2, 8, 8, requires_grad=True), torch.randn(4, requires_grad=True)
    gradients = []
    for w in (weight, weight.dequantize()):
        out = F.conv3d(x, w, bias, stride=(2, 4, 4)).square().sum()
        gradients.append(torch.autograd.grad(out, (x, bias)))
    for found, expected in zip(*gradients, strict=True):
        assert_near(found, expected)


def test_works_as_the_weight_of_a_layer_compiled_copied_and_saved(tmp_path: Path) -> None:
    layer = torch.nn.Conv3d(3, 4, (2, 4, 4), stride=(2, 4, 4))
    x = torch.randn(1, 3, 2, 8, 8)
    layer.weight = torch.nn.Parameter(kernel("q5_g64_fp16", 4, (3, 2, 4, 4)), requires_grad=False)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(x), expected)
        assert torch.equal(copy.deepcopy(layer)(x), expected)
        torch.save(layer.state_dict(), tmp_path / "layer.pt")
        again = torch.nn.Conv3d(3, 4, (2, 4, 4), stride=(2, 4, 4)).requires_grad_(False)
        again.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True), assign=True)
        assert isinstance(again.weight, PatchKernel) and torch.equal(again(x), expected)


def test_keeps_words_under_casts_and_knows_its_size() -> None:
    weight = kernel("q4_g64_fp16", 4, (3, 2, 4, 4))
    half = weight.to(torch.bfloat16)
    assert half.dtype == torch.bfloat16 and torch.equal(half.weight.codes, weight.weight.codes)
    assert weight.nbytes == weight.weight.nbytes and weight.policy == "A16Only"
    assert weight.with_policy("AllowA8").weight.policy == "AllowA8"
    assert torch.equal(weight, weight.clone()) and not torch.equal(
        weight, kernel("q4_g64_fp16", 4, (3, 2, 4, 4), seed=1)
    )


def test_any_matrix_serves() -> None:
    parts = [random_weight("q4_g64_fp16", 2, 96), random_weight("q8_g32_fp16", 3, 96)]
    weight = patch_kernel(stack_rows([(part, None) for part in parts]), (5, 3, 2, 4, 4))
    x = torch.randn(2, 3, 2, 4, 4)
    found, expected = (F.conv3d(x, w, stride=(2, 4, 4)) for w in (weight, weight.dequantize()))
    assert_near(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 1},
        {"stride": 4, "padding": 1},
        {"stride": 4, "padding": "same"},
        {"stride": 4, "dilation": 2},
        {"stride": 4, "groups": 3},
    ],
)
def test_other_convolutions_are_refused(options: dict) -> None:
    weight = kernel("q4_g64_fp16", 3, (6, 4, 4))
    with pytest.raises(UnsupportedOperation, match="conv2d other than by patches.*dequantize"):
        F.conv2d(torch.randn(1, 6, 8, 8), weight, **options)


def test_what_does_not_fit_is_refused() -> None:
    weight = kernel("q4_g64_fp16", 3, (6, 4, 4))
    with pytest.raises(LayoutError, match=r"\[1, 6, 8, 9\] is not cut into patches of 6 channels and \[4, 4\]"):
        F.conv2d(torch.randn(1, 6, 8, 9), weight, stride=4)
    with pytest.raises(UnsupportedOperation, match="no patch kernel"):
        F.conv2d(torch.randn(1, 6, 8, 8), random_weight("q4_g64_fp16", 3, 96), stride=4)
    with pytest.raises(LayoutError, match=r"\[3, 96\] is no convolution kernel of shape \[3, 6, 4, 5\]"):
        patch_kernel(random_weight("q4_g64_fp16", 3, 96), (3, 6, 4, 5))
    with pytest.raises(UnsupportedOperation, match="float16 and the weight computes in torch.float32"):
        F.conv2d(torch.randn(1, 6, 8, 8).half(), weight, stride=4)
    for refused in (lambda: weight[:1], lambda: F.linear(torch.randn(2, 4), weight)):
        with pytest.raises(UnsupportedOperation, match="use its .weight"):
            refused()
    assert isinstance(weight, NinferTensor)
