"""torch.export of a linear layer with a quantized weight, and one graph over layers of several formats."""

from __future__ import annotations

import pytest
import torch

from ninfer_torch.convert.methods import quantize

FORMATS = ("q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16")


def packed_linear(format: str, seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    layer = torch.nn.Linear(128, 128, bias=False)
    layer.weight = torch.nn.Parameter(quantize(layer.weight.detach(), format), requires_grad=False)
    return layer


@pytest.mark.parametrize("format", FORMATS)
def test_an_exported_linear_gives_the_same_numbers(format: str) -> None:
    layer, x = packed_linear(format), torch.randn(3, 128)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=2)},))
    for batch in (3, 5):
        x = torch.randn(batch, 128)
        torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-5, atol=1e-5)


def test_layers_of_several_formats_are_one_graph() -> None:
    layers = torch.nn.Sequential(*[packed_linear(format, seed) for seed, format in enumerate(FORMATS)])
    compiled = torch.compile(layers, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for batch in (3, 6):
            x = torch.randn(batch, 128)
            torch.testing.assert_close(compiled(x), layers(x), rtol=1e-5, atol=1e-5)
