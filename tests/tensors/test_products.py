"""Products with quantized weights: every format, dtype and shape of activations, within criterion A16."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ninfer_torch.errors import UnsupportedOperation
from ninfer_torch.kernels import fallback
from ninfer_torch.tensors import NinferTensor
from quantized import FAMILIES, QUANTIZED, check_a16, exact_product, random_weight

N, K = 256, 512


def layer(weight: NinferTensor, bias: bool = True) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias, dtype=weight.dtype)
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", QUANTIZED)
def test_linear_meets_the_criterion(format: str, dtype: torch.dtype) -> None:
    module = layer(random_weight(format, N, K, dtype=dtype))
    for shape in [(0, K), (1, K), (K,), (5, K), (2, 3, K)]:
        x = torch.randn(shape).to(dtype)
        y = module(x)
        assert y.shape == (*shape[:-1], N) and y.dtype == dtype
        check_a16(y, exact_product(x, module.weight, module.bias), K)


@pytest.mark.parametrize("format", ["q2_g64_fp16", "q4_g64_fp16", "q6_g64_fp16", "q8_g32_fp16", "t2_g128_fp16"])
@pytest.mark.parametrize("columns", [1, 33, 65, 129, 200])
def test_linear_with_partial_groups(format: str, columns: int) -> None:
    weight, x = random_weight(format, 3, columns), torch.randn(4, columns)
    check_a16(F.linear(x, weight), exact_product(x, weight), columns)


@pytest.mark.parametrize("format", QUANTIZED)
def test_strided_activations_equal_contiguous_ones(format: str) -> None:
    weight = random_weight(format, 128, 256)
    wide = torch.full((4, 512), float("nan"))
    wide[:, ::2] = torch.randn(4, 256)
    turned = torch.randn(256, 6).T
    for x in (wide[:, ::2], turned, torch.randn(1, 256).expand(5, 256)):
        assert torch.equal(F.linear(x, weight), F.linear(x.contiguous(), weight))


@pytest.mark.parametrize("format", QUANTIZED)
def test_gradients_reach_activations_and_bias(format: str) -> None:
    module = layer(random_weight(format, N, K))
    x = torch.randn(3, K, requires_grad=True)
    upstream = torch.randn(3, N)
    module(x).backward(upstream)
    assert x.grad is not None and module.bias.grad is not None and module.weight.grad is None
    check_a16(x.grad, upstream.double() @ module.weight.dequantize().double(), N)
    torch.testing.assert_close(module.bias.grad, upstream.sum(0))


def test_gradients_of_gradients() -> None:
    weight = random_weight("q4_g64_fp16", 5, 64, dtype=torch.float64)
    x = torch.randn(2, 64, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: F.linear(x, weight), x)
    assert torch.autograd.gradgradcheck(lambda x: F.linear(x, weight) ** 2, x)


@pytest.mark.parametrize("format", QUANTIZED)
def test_modes_give_the_same_words(format: str) -> None:
    module, x = layer(random_weight(format, N, K)), torch.randn(3, K)
    expected = module(x)
    with torch.no_grad():
        assert torch.equal(module(x), expected)
    with torch.inference_mode():
        assert torch.equal(module(x), expected)


class _Seen(TorchDispatchMode):
    """The operators that pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_products_pass_the_one_door_without_gradients_too() -> None:
    """Without gradients autograd is passed by, and nothing else: modes see the operator, autocast casts."""
    module, x = layer(random_weight("q4_g64_fp16", 64, 128)), torch.randn(3, 128)
    expected = module(x)
    with torch.no_grad():
        with _Seen() as seen:
            found = module(x)
        assert "ninfer.linear.default" in seen.names and torch.equal(found, expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert module(x).dtype == torch.bfloat16
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert module(mode.from_tensor(x)).shape == expected.shape
        per_row = torch.func.vmap(lambda row: row * 2)(x)
        assert torch.equal(module(per_row), module(x * 2))
        x.requires_grad_()
        assert not module(x).requires_grad


@pytest.mark.parametrize("gradients", [True, False])
def test_forward_mode_is_refused_rather_than_wrong(gradients: bool) -> None:
    module, x = layer(random_weight("q4_g64_fp16", 64, 128)), torch.randn(3, 128)
    with torch.set_grad_enabled(gradients), torch.autograd.forward_ad.dual_level():
        assert module(x).shape == (3, 64)
        with pytest.raises(UnsupportedOperation, match=r"forward-mode.*dequantize\(\)"):
            module(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


@pytest.mark.parametrize("format", QUANTIZED)
def test_autocast_runs_in_the_autocast_dtype(format: str) -> None:
    module, x = layer(random_weight(format, N, K)), torch.randn(3, K, requires_grad=True)
    narrow = layer(module.weight.to(torch.bfloat16))
    with torch.no_grad():
        narrow.bias.copy_(module.bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    assert torch.equal(y, narrow(x.bfloat16()))
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


@pytest.mark.parametrize("format", QUANTIZED)
def test_compiled_equals_eager_with_any_batch(format: str) -> None:
    torch._dynamo.reset()
    module = layer(random_weight(format, N, K))
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for rows in (3, 7, 1, 0):
        x = torch.randn(rows, K, requires_grad=True)
        y = compiled(x)
        assert torch.equal(y, module(x))
    y = compiled(torch.randn(2, 4, K))
    assert y.shape == (2, 4, N)


@pytest.mark.parametrize("format", FAMILIES)
def test_compiled_gradients_and_autocast(format: str) -> None:
    torch._dynamo.reset()
    module = layer(random_weight(format, N, K))
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    x = torch.randn(3, K, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x).sum(), x)
    (found,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(found, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(x), module(x))


def test_compiled_batches_do_not_recompile() -> None:
    torch._dynamo.reset()
    module = layer(random_weight("q4_g64_fp16", N, K))
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    with torch.no_grad():
        compiled(torch.randn(5, K))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows in (2, 9, 33):
                assert compiled(torch.randn(rows, K)).shape == (rows, N)


@pytest.mark.parametrize("format", QUANTIZED)
def test_embedding_rows_are_exact(format: str) -> None:
    table = nn.Embedding(N, K, padding_idx=0)
    weight = random_weight(format, N, K, dtype=torch.bfloat16)
    table.weight = nn.Parameter(weight, requires_grad=False)
    ids = torch.tensor([[0, 5, 255], [5, 5, 17]])
    expected = weight.dequantize(torch.bfloat16)[ids]
    assert torch.equal(table(ids), expected)
    assert torch.equal(table(ids.int()), expected)
    assert table(torch.empty(0, dtype=torch.long)).shape == (0, K)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(table, fullgraph=True)(ids), expected)
    with torch.inference_mode():
        assert torch.equal(table(ids), expected)


@pytest.mark.parametrize("ids", [[-1], [N], [0, 1 << 40]])
def test_embedding_refuses_ids_outside_the_table(ids: list[int]) -> None:
    with pytest.raises(IndexError, match="ids must lie in"):
        F.embedding(torch.tensor(ids), random_weight("q4_g64_fp16", N, K))


def test_embedding_refuses_to_rewrite_the_table() -> None:
    with pytest.raises(UnsupportedOperation, match="max_norm"):
        F.embedding(torch.tensor([1]), random_weight("q4_g64_fp16", 4, 64), max_norm=1.0)


@pytest.mark.parametrize("format", FAMILIES)
def test_transposed_products(format: str) -> None:
    weight = random_weight(format, N, K)
    x, back = torch.randn(3, K), torch.randn(3, N)
    check_a16(x @ weight.T, exact_product(x, weight), K)
    check_a16(torch.addmm(torch.ones(N), x, weight.t()), exact_product(x, weight, torch.ones(N)), K)
    batch = torch.randn(2, 3, K)
    check_a16(batch @ weight.mT, exact_product(batch, weight), K)
    check_a16(back @ weight, back.double() @ weight.dequantize().double(), N)
    assert torch.equal(weight.t().t(), weight)


@pytest.mark.parametrize("format", FAMILIES)
def test_expert_linear_is_a_linear_per_expert(format: str) -> None:
    experts, rows = 3, 128
    bank = random_weight(format, experts * rows, 256).view(experts, rows, 256)
    x = torch.randn(7, 256, requires_grad=True)
    offsets = torch.tensor([4, 4, 6], dtype=torch.int32)
    planes, name, geometry, policy, _ = bank.call
    y = torch.ops.ninfer.expert_linear(x, planes, name, geometry, offsets, policy)
    expected = torch.cat([F.linear(x[:4], bank[0]), F.linear(x[4:6], bank[2]), torch.zeros(1, rows)])
    assert torch.equal(y, expected)
    (grad,) = torch.autograd.grad(y.sum(), x)
    check_a16(grad[:4], torch.ones(4, rows).double() @ bank[0].dequantize().double(), rows)
    assert not grad[6].any()


def test_threads_share_a_weight() -> None:
    weight, x = random_weight("gguf_q6_k", N, K), torch.randn(4, K)
    expected, found = F.linear(x, weight), []
    threads = [threading.Thread(target=lambda: found.append(F.linear(x, weight))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and all(torch.equal(y, expected) for y in found)


def test_mistakes_are_named() -> None:
    weight = random_weight("q4_g64_fp16", 4, 64)
    with pytest.raises(UnsupportedOperation, match="K = 64"):
        F.linear(torch.randn(2, 63), weight)
    with pytest.raises(UnsupportedOperation, match="bfloat16.*float32"):
        F.linear(torch.randn(2, 64).bfloat16(), weight)
    with pytest.raises(UnsupportedOperation, match="dequantize"):
        weight + 1
    with pytest.raises(UnsupportedOperation, match="F.linear"):
        weight @ torch.randn(64, 2)
    with pytest.raises(UnsupportedOperation, match="int64"):
        F.linear(torch.ones(2, 64, dtype=torch.int64), weight)


def test_chunks_do_not_change_words(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random_weight("gguf_q4_k", 300, 512), torch.randn(5, 512)
    whole, rows = F.linear(x, weight), weight.dequantize()
    monkeypatch.setattr(fallback, "CHUNK", 1000)
    torch.testing.assert_close(F.linear(x, weight), whole, rtol=1e-5, atol=1e-4)
    assert torch.equal(weight.dequantize(), rows)
