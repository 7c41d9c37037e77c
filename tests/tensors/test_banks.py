"""Banks of experts [E, N, K]: views of one parent, and stacks of the rows of several."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from ninfer_torch.tensors import NinferTensor, interleave_rows, stack_rows
from quantized import FAMILIES, check_a16, exact_product, random_weight

K = 256
E, N = 4, 32


def bank(format: str) -> tuple[NinferTensor, torch.Tensor]:
    """`gate_up_proj` [E, 2 * IE, K] of a bank of gates and one of ups, IE = 32."""
    gates, ups = random_weight(format, E * N, K), random_weight("q6_g64_fp16", E * N, K, seed=1)
    weight = interleave_rows([(gates.view(E, N, K), N), (ups.view(E, N, K), N)], (E, 2 * N, K))
    return weight, torch.cat([gates.dequantize().view(E, N, K), ups.dequantize().view(E, N, K)], 1)


def by_expert(x: torch.Tensor, matrices: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Each token times the matrix [N, K] of its expert, in float64; tokens after the last end are zero."""
    out = torch.zeros(x.shape[0], matrices.shape[1], dtype=torch.float64)
    for expert, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        out[begin:end] = x[begin:end].double() @ matrices[expert].double().T
    return out


ENDS = [3, 3, 5, 9]


@pytest.mark.parametrize("format", FAMILIES)
def test_banks_multiply_by_expert(format: str) -> None:
    weight, expected = bank(format)
    assert torch.equal(weight.dequantize(), expected) and torch.equal(weight[2].dequantize(), expected[2])
    assert torch.equal(weight[torch.tensor(3)].dequantize(), expected[3])
    x, offsets = torch.randn(10, K, requires_grad=True), torch.tensor(ENDS, dtype=torch.int32)
    y = weight.expert_product(x, offsets)
    check_a16(y, by_expert(x, expected, ENDS), K)
    upstream = torch.randn(10, 2 * N)
    (grad,) = torch.autograd.grad(y, x, upstream)
    wanted = by_expert(upstream, expected.transpose(1, 2), ENDS)
    check_a16(grad, wanted, 2 * N)
    check_a16(weight.expert_product_transposed(upstream, offsets), wanted, 2 * N)
    for expert in range(E):
        check_a16(F.linear(x, weight[expert]), exact_product(x, weight[expert]), K)


@pytest.mark.parametrize("format", ["q4_g64_fp16", "nvfp4"])
def test_banks_through_grouped_mm(format: str) -> None:
    for weight, expected in (bank(format), (b := bank(format)) and (b[0].blocks[0].view(E, N, K), b[1][:, :N])):
        weight = weight.to(torch.bfloat16)
        x, offsets = torch.randn(9, K, requires_grad=True, dtype=torch.bfloat16), torch.tensor(ENDS, dtype=torch.int32)
        y = torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets)
        check_a16(y, by_expert(x, expected, ENDS), K)
        upstream = torch.randn_like(y)
        (grad,) = torch.autograd.grad(y, x, upstream)
        dense_grad = by_expert(upstream, expected.transpose(1, 2), ENDS)
        assert (grad.double() - dense_grad).norm() <= 2.0**-7 * dense_grad.norm()  # one rounding per block


def test_banks_compile() -> None:
    torch._dynamo.reset()
    weight, expected = bank("gguf_q4_k")

    def use(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch._grouped_mm(x, weight.transpose(-2, -1), offs=offsets), F.linear(x, weight[1])

    x, offsets = torch.randn(9, K), torch.tensor(ENDS, dtype=torch.int32)
    grouped, one = torch.compile(use, fullgraph=True)(x, weight, offsets)
    check_a16(grouped, by_expert(x, expected, ENDS), K)
    check_a16(one, x.double() @ expected[1].double().T, K)


def test_banks_of_separate_objects() -> None:
    """Experts in objects of different formats: no kernel takes them together."""
    matrices = [random_weight(name, N if name != "nvfp4" else 128, K)[:N] for name in FAMILIES[:E]]
    plain = torch.randn(N, K)
    weight = stack_rows([(matrix, None) for matrix in (*matrices, plain)], (E + 1, N, K))
    expected = torch.stack([*(matrix.dequantize() for matrix in matrices), plain])
    x, ends = torch.randn(8, K, requires_grad=True), [2, 2, 5, 6, 7]
    y = weight.expert_product(x, torch.tensor(ends, dtype=torch.int32))
    check_a16(y, by_expert(x, expected, ends), K)
    (grad,) = torch.autograd.grad(y.sum(), x)
    check_a16(grad, by_expert(torch.ones(8, N), expected.transpose(1, 2), ends), N)


def test_banks_of_nvfp4_with_a_divisor_per_matrix() -> None:
    """One parent holds gate and up of each expert, 2 * E divisors (spec/layouts.md 5)."""
    rows = 128
    parent = random_weight("nvfp4", E * 2 * rows, K, divisors=2 * E)
    assert parent.divisors.unique().numel() == 2 * E
    expected = parent.dequantize().view(E, 2 * rows, K)
    weight = parent.view(E, 2 * rows, K)
    x, offsets = torch.randn(9, K), torch.tensor(ENDS, dtype=torch.int32)
    assert torch.equal(weight.dequantize(), expected)
    for expert in range(E):
        matrix = weight[expert]
        assert torch.equal(matrix.dequantize(), expected[expert])
        assert torch.equal(matrix[rows:].dequantize(), expected[expert, rows:])
        check_a16(F.linear(x, matrix), x.double() @ expected[expert].double().T, K)
    check_a16(weight.expert_product(x, offsets), by_expert(x, expected, ENDS), K)
    check_a16(torch._grouped_mm(x, weight.mT, offs=offsets), by_expert(x, expected, ENDS), K)
    gathered = weight[torch.tensor([3, 0])]
    assert torch.equal(gathered.dequantize(), expected[[3, 0]])
    check_a16(gathered.expert_product(x, offsets[1:3]), by_expert(x, expected[[3, 0]], ENDS[1:3]), K)
