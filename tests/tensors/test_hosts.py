"""What hosts do to a parameter: copy, pickle, save, load, move, cast, wrap again; and what they must not do."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from ninfer_torch.errors import NinferError, UnsupportedOperation
from ninfer_torch.tensors import NinferTensor
from quantized import FAMILIES, QUANTIZED, random_weight

N, K = 256, 512


def model(format: str) -> nn.Module:
    layer, table = nn.Linear(K, N), nn.Embedding(N, K)
    layer.weight = nn.Parameter(random_weight(format, N, K), requires_grad=False)
    table.weight = nn.Parameter(random_weight(format, N, K, seed=1), requires_grad=False)
    return nn.Sequential(table, layer)


def storages(weight: NinferTensor) -> set[int]:
    return {plane.untyped_storage().data_ptr() for plane in weight.planes.values()}


@pytest.mark.parametrize("format", QUANTIZED)
def test_copies(format: str) -> None:
    original = model(format)
    deep, shallow = copy.deepcopy(original), copy.copy(original[1].weight)
    assert isinstance(deep[1].weight, nn.Parameter) and torch.equal(deep[1].weight, original[1].weight)
    assert not storages(deep[1].weight) & storages(original[1].weight)
    assert isinstance(shallow, nn.Parameter) and storages(shallow) == storages(original[1].weight)
    tied = nn.ModuleList([original[1], nn.Linear(K, N)])
    tied[1].weight = tied[0].weight
    twin = copy.deepcopy(tied)
    assert twin[0].weight is twin[1].weight


@pytest.mark.parametrize("format", QUANTIZED)
def test_pickles(format: str) -> None:
    weight = random_weight(format, N, K)
    again = pickle.loads(pickle.dumps(weight))
    assert torch.equal(again, weight) and again.policy == weight.policy and again.dtype == weight.dtype
    view = pickle.loads(pickle.dumps(weight[128:256]))
    assert torch.equal(view, weight[128:256])


def test_a_pickled_view_leaves_its_parent_behind() -> None:
    weight = random_weight("q4_g64_fp16", 4096, K)
    buffer = io.BytesIO()
    torch.save(weight[:16], buffer)
    assert buffer.tell() < weight.nbytes / 8


@pytest.mark.parametrize("format", QUANTIZED)
def test_state_dicts_load_back(format: str) -> None:
    original = model(format)
    buffer = io.BytesIO()
    torch.save(original.state_dict(), buffer)
    for assign in (False, True):
        buffer.seek(0)
        state = torch.load(buffer, weights_only=True)
        target = model(format)
        for module in target:
            for plane in module.weight.planes.values():
                plane.zero_()
        target.load_state_dict(state, assign=assign)
        assert all(torch.equal(a.weight, b.weight) for a, b in zip(target, original, strict=True))
        ids = torch.tensor([3, 9])
        assert torch.equal(target(ids), original(ids))


def test_a_fresh_process_loads_every_format(tmp_path: Path) -> None:
    weights = {format: nn.Parameter(random_weight(format, N, K), requires_grad=False) for format in QUANTIZED}
    torch.save(weights, tmp_path / "weights.pt")
    torch.save({name: weight.dequantize() for name, weight in weights.items()}, tmp_path / "values.pt")
    script = (
        "import sys, torch, ninfer_torch\n"
        "weights = torch.load(sys.argv[1], weights_only=True)\n"
        "values = torch.load(sys.argv[2], weights_only=True)\n"
        "assert 'transformers' not in sys.modules\n"
        "print(sum(torch.equal(w.dequantize(), values[n]) and isinstance(w, torch.nn.Parameter) for n, w in weights.items()))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "weights.pt"), str(tmp_path / "values.pt")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str(len(QUANTIZED))


@pytest.mark.parametrize("format", QUANTIZED)
def test_casts_touch_only_the_compute_dtype(format: str) -> None:
    module = model(format)
    words = {name: plane.clone() for name, plane in module[1].weight.planes.items()}
    places = storages(module[1].weight)
    for cast in (module.half, module.bfloat16, module.double, module.float):
        cast()
        weight = module[1].weight
        assert weight.dtype == module[1].bias.dtype and isinstance(weight, nn.Parameter)
        assert storages(weight) == places
        for name, plane in weight.planes.items():
            assert plane.dtype == words[name].dtype
            assert torch.equal(plane.view(torch.uint8), words[name].view(torch.uint8))
    with pytest.raises(UnsupportedOperation, match="floating dtype"):
        module[1].weight.to(torch.int8)


@pytest.mark.parametrize("format", FAMILIES)
@pytest.mark.parametrize("swap", [False, True])
def test_modules_move_whole(format: str, swap: bool) -> None:
    module = model(format)
    torch.__future__.set_overwrite_module_params_on_conversion(swap)
    try:
        module.to("meta")
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    weight = module[1].weight
    assert isinstance(weight, NinferTensor) and weight.device.type == "meta"
    assert all(plane.device.type == "meta" for plane in weight.planes.values())
    assert weight.shape == (N, K)


@pytest.mark.parametrize("format", FAMILIES)
def test_parameters_are_rebuilt_as_hosts_do(format: str) -> None:
    weight = random_weight(format, N, K)
    parameter = nn.Parameter(weight, requires_grad=False)
    for again in (
        type(parameter)(parameter.data, requires_grad=False),
        type(parameter)(parameter.data),
        nn.Parameter(parameter, requires_grad=False),
        torch.empty_like(weight).copy_(weight),
        weight.detach(),
        weight.clone(),
        weight.contiguous(),
    ):
        assert torch.equal(again, weight) and again.shape == weight.shape and not again.requires_grad
    assert parameter.data_ptr() == weight.data_ptr() != 0
    assert not weight.is_pinned()


def test_safetensors_refuses_to_write_dense_bytes(tmp_path: Path) -> None:
    layer = model("q4_g64_fp16")
    for save in (
        lambda: save_file(dict(layer.state_dict()), tmp_path / "a.safetensors"),
        lambda: save_model(layer, str(tmp_path / "a.safetensors")),
    ):
        with pytest.raises(NinferError, match="ninfer_torch.save"):
            save()
    assert not list(tmp_path.iterdir())


def test_copy_refuses_other_formats_and_dense_values() -> None:
    weight = random_weight("q4_g64_fp16", N, K)
    for source in (torch.zeros(N, K), random_weight("q5_g64_fp16", N, K), random_weight("q4_g64_fp16", N, K)[0:128]):
        with pytest.raises((UnsupportedOperation, RuntimeError)):
            weight.copy_(source)
    with pytest.raises(UnsupportedOperation, match="dequantize"):
        torch.zeros(N, K).copy_(weight)


def test_what_would_hand_out_a_null_storage_is_refused() -> None:
    weight = random_weight("q4_g64_fp16", N, K)
    for call in (
        weight.share_memory_,
        weight.numpy,
        weight.__dlpack__,
        lambda: np.asarray(weight),
        lambda: torch.from_dlpack(weight),
        lambda: weight.requires_grad_(True),
        lambda: nn.Parameter(weight),
        lambda: NinferTensor(torch.zeros(2, 2)),  # type: ignore[arg-type]
        lambda: weight.with_policy("AllowA2"),
    ):
        with pytest.raises(UnsupportedOperation):
            call()


@pytest.mark.parametrize("format", QUANTIZED)
def test_sizes_and_text(format: str) -> None:
    weight = random_weight(format, N, K)
    packed = sum(plane.nbytes for plane in weight.planes.values())
    assert weight.nbytes == packed and weight.numel() == N * K
    assert weight.numel() * weight.element_size() == packed
    text = repr(weight)
    for part in (format, f"({N}, {K})", "device=cpu", f"bits_per_weight={8 * packed / (N * K):.4g}"):
        assert part in text
    assert "rows 5..9 of 256" in repr(weight[5:9])
    assert weight.storage_layout in ("row_split_k128_v1", "gguf_blocks_v1") or not format.startswith(("q", "gguf"))


@pytest.mark.parametrize("format", QUANTIZED)
def test_nobody_sees_the_dtype_of_the_words(format: str) -> None:
    """Hosts cast inputs to `weight.dtype` and count bytes by it."""
    module = model(format).bfloat16()
    pixels = torch.rand(2, K) / 100
    for parameter in module.parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(pixels.to(parameter.dtype), pixels.bfloat16())
    weight = module[1].weight
    assert torch.zeros(1, dtype=weight.dtype).new_ones(1).is_floating_point() and weight.is_floating_point()
    assert weight.dequantize().dtype == torch.float32
    assert weight.dequantize(torch.bfloat16).dtype == module(torch.arange(3)).dtype == torch.bfloat16


def test_policies_belong_to_the_use() -> None:
    weight = random_weight("gguf_q8_0", N, K)
    bound = weight.with_policy("AllowA8")
    assert (weight.policy, bound.policy) == ("A16Only", "AllowA8")
    assert storages(bound) == storages(weight)
    assert bound[0:3].policy == bound.to(torch.bfloat16).policy == copy.deepcopy(bound).policy == "AllowA8"
