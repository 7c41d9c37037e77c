"""torch.export of a linear layer with a quantized weight, and one graph over layers of every format and of composed weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ninfer_torch.tensors import NinferTensor, interleave_rows, transform_input
from quantized import QUANTIZED, random_weight

K = 1024


def stack() -> NinferTensor:
    """A query and its gate, head by head, as official Qwen3.5 artifacts store them."""
    return interleave_rows([(random_weight("q4_g64_fp16", 64, K), 16), (random_weight("gguf_q5_k", 64, K), 16)])


def rotated(weight: NinferTensor) -> NinferTensor:
    signs = torch.where(torch.rand(K, generator=torch.Generator().manual_seed(3)) < 0.5, -1.0, 1.0)
    return transform_input(weight, "hadamard_signs", signs)


WEIGHTS: dict[str, Callable[[], NinferTensor]] = {
    **{format: lambda format=format: random_weight(format, 128, K) for format in QUANTIZED},
    "a row view": lambda: random_weight("nvfp4", 512, K, divisors=2)[130:258],
    "a stack": stack,
    "behind a transform": lambda: rotated(random_weight("t2_g128_fp16", 128, K)),
    "a stack behind a transform": lambda: rotated(stack()),
}


def packed_linear(name: str) -> nn.Linear:
    layer = nn.Linear(K, 128, bias=False)
    layer.weight = nn.Parameter(WEIGHTS[name](), requires_grad=False)
    return layer


@pytest.mark.parametrize("name", WEIGHTS)
def test_an_exported_linear_gives_the_same_numbers(name: str) -> None:
    layer, x = packed_linear(name), torch.randn(3, K)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    for batch in (3, 5):
        x = torch.randn(batch, K)
        torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-5)


class Sum(nn.Module):
    """Layers side by side, all weights in one graph."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(packed_linear(name) for name in names)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self.layers]


def test_layers_of_every_kind_are_one_graph() -> None:
    torch._dynamo.reset()
    layers = Sum(list(WEIGHTS))
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for batch in (3, 6):
            x = torch.randn(batch, K)
            for name, found, expected in zip(WEIGHTS, compiled(x), layers(x), strict=True):
                assert torch.equal(found, expected), name
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled(torch.randn(11, K))
