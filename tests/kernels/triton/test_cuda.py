"""On a card: the operators at real shapes, compiled, captured, and without growth. Skipped where there is none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.tensors import NinferTensor
from quantized import FAMILIES, QUANTIZED, check_a16, random_weight

pytestmark = pytest.mark.cuda

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def on_card(format: str, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> NinferTensor:
    return random_weight(format, n, k).to("cuda", dtype)


def check(y: torch.Tensor, x: torch.Tensor, weight: NinferTensor) -> None:
    dense = weight.dequantize()
    y64 = x.double() @ dense.double().t()
    if x.dtype == torch.float32 or x.numel() // x.shape[-1] < 16:
        check_a16(y, y64, x.shape[-1])
    else:
        rounded = F.linear(x, dense.to(x.dtype))
        assert (y.double() - y64).norm() <= 1.1 * (rounded.double() - y64).norm()


@pytest.mark.parametrize("format", QUANTIZED)
def test_values_are_those_of_the_reference(format: str) -> None:
    weight = random_weight(format, 256, 1024)
    moved = weight.to("cuda")
    for dtype in FLOATS:
        assert torch.equal(moved.dequantize(dtype).cpu(), weight.dequantize(dtype))
    ids = torch.tensor([[3, 255], [0, 3]])
    assert torch.equal(F.embedding(ids.cuda(), moved).cpu(), F.embedding(ids, weight))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("format", QUANTIZED)
def test_linear_at_real_shapes(format: str, dtype: torch.dtype) -> None:
    weight = on_card(format, 2048, 4096, dtype)
    for rows in (0, 1, 2, 5, 16, 33, 300):
        x = torch.randn(rows, 4096, device="cuda", dtype=dtype)
        check(F.linear(x, weight), x, weight)


@pytest.mark.parametrize("format", QUANTIZED)
def test_a_wide_layer_and_a_head(format: str) -> None:
    for n, k in ((17408, 5120), (5120, 17408), (248320, 1024)):
        weight = on_card(format, n, k)
        x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
        check(F.linear(x, weight), x, weight)


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("format", QUANTIZED)
def test_compiled_and_replayed_products_equal_eager_ones(format: str, rows: int) -> None:
    torch._dynamo.reset()
    weight = on_card(format, 1024, 2048)
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
    eager = F.linear(x, weight)
    assert torch.equal(torch.compile(F.linear, fullgraph=True)(x, weight), eager)
    assert torch.equal(torch.compile(F.linear, fullgraph=True, mode="reduce-overhead")(x, weight), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = F.linear(x, weight)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(captured, F.linear(x, weight)) and not torch.equal(captured, eager)


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("format", QUANTIZED)
def test_memory_does_not_grow(format: str, rows: int) -> None:
    weight = on_card(format, 1024, 2048)
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
    F.linear(x, weight)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(1000):
        F.linear(x, weight)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("format", QUANTIZED)
def test_results_are_the_same_every_time(format: str) -> None:
    """No float atomics: a split of K is added up in a fixed order, whatever else runs on the card."""
    weight = on_card(format, 1024, 8192)
    for rows in (1, 4, 64):
        x = torch.randn(rows, 8192, device="cuda", dtype=torch.bfloat16)
        first, streams = F.linear(x, weight), [torch.cuda.Stream() for _ in range(4)]
        found = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found += [F.linear(x, weight) for _ in range(4)]
        torch.cuda.synchronize()
        assert all(torch.equal(y, first) for y in found)


def test_more_rows_than_a_grid_axis() -> None:
    weight = on_card("q4_g64_fp16", 64, 128)
    x = torch.randn(2 * 65536 + 3, 128, device="cuda", dtype=torch.bfloat16)
    check(F.linear(x, weight), x, weight)


@pytest.mark.parametrize("format", FAMILIES)
def test_gradients_equal_those_of_the_dense_weight(format: str) -> None:
    weight = on_card(format, 256, 512, torch.float32)
    x = torch.randn(5, 512, device="cuda", requires_grad=True)
    F.linear(x, weight).backward(grad := torch.randn(5, 256, device="cuda"))
    assert x.grad is not None
    check_a16(x.grad, grad.double() @ weight.dequantize().double(), 256)


@pytest.mark.parametrize("tokens", [4, 200])
@pytest.mark.parametrize("format", FAMILIES)
def test_experts(format: str, tokens: int) -> None:
    bank = on_card(format, 4 * 256, 512, torch.float32)
    offsets = torch.tensor([1, 1, tokens // 2, tokens], dtype=torch.int32, device="cuda")
    x = torch.randn(tokens, 512, device="cuda")
    y = torch.ops.ninfer.expert_linear(x, *bank.call[:3], offsets, "A16Only")
    dense, begin = bank.dequantize().reshape(4, 256, 512).double(), 0
    for expert, end in enumerate(offsets.tolist()):
        check_a16(y[begin:end], x[begin:end].double() @ dense[expert].t(), 512)
        begin = end


def test_activations_elsewhere_are_refused() -> None:
    weight = on_card("q4_g64_fp16", 128, 256, torch.float32)
    with pytest.raises(UnsupportedOperation, match="expected one device"):
        F.linear(torch.randn(2, 256), weight)
