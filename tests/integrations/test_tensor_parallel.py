"""Tensor parallelism with two processes: every rank holds its words, and the logits are those of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import distributed

import ninfer_torch
from ninfer_torch.convert.pipeline import convert
from ninfer_torch.tensors import NinferTensor
from tiny_families import prompt, tiny_family

EXACT = {"dtype": torch.float32, "attn_implementation": "eager"}
FOLDER = Path(__file__).parents[1]


def rank_report(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What one process finds: local shapes of the quantized weights, whether their words are the slices, the logits."""
    from transformers.distributed import DistributedConfig

    rank = distributed.get_rank()
    config = DistributedConfig(tp_plan=options.pop("tp_plan", "auto"))
    path = folder / options.pop("file", "m.ninfer")
    if recipe := options.pop("recipe", None):
        options["quantization_config"] = ninfer_torch.NinferConfig(recipe=recipe)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(path, distributed_config=config, **EXACT, **options)
    except ninfer_torch.NinferError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    with torch.no_grad():
        logits = model(prompt(2, 9)).logits
    whole = transformers.AutoModelForCausalLM.from_pretrained(path, **EXACT)
    shapes = {}
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if isinstance(local, NinferTensor):
            shard = whole.get_parameter(name)
            for axis in (0, 1):
                if local.shape[axis] != shard.shape[axis]:
                    shard = shard.narrow(axis, rank * local.shape[axis], local.shape[axis])
            assert torch.equal(local.detach(), shard), name
            shapes[name] = list(local.shape)
    with torch.no_grad():
        expected = whole(prompt(2, 9)).logits
    return {"shapes": shapes, "error": "", "spread": float((logits - expected).abs().max() / expected.std())}


def run_ranks(folder: Path, **options: Any) -> list[dict[str, Any]]:
    """The reports of two processes that meet by gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER), "NINFER_TORCH_CACHE": str(folder / "cache")}
    command = [sys.executable, __file__, str(folder), json.dumps(options)]
    processes = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    reports = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, err[-4000:]
            reports.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return reports


def save(folder: Path, family: str, preset: str, official: bool = False, **sizes: int) -> None:
    model = tiny_family(family)
    if sizes:
        config = model.config
        config.update(sizes)
        torch.manual_seed(0)
        model = type(model)._from_config(config).float().eval()
    model.save_pretrained(folder / "dense")
    convert(folder / "dense", folder / "m.ninfer", preset, official=official)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["q8", "fp8"])
def test_two_ranks_give_the_logits_of_one(tmp_path: Path, preset: str) -> None:
    """Rows of q, k, v, gate and up; columns of o and down, on whole groups of 32 for q8."""
    save(tmp_path, "llama", preset, intermediate_size=128)
    for report in run_ranks(tmp_path):
        assert report["error"] == "" and report["spread"] < 1e-5
        layer = "model.layers.1."
        assert report["shapes"][f"{layer}self_attn.q_proj.weight"] == [32, 64]
        assert report["shapes"][f"{layer}self_attn.o_proj.weight"] == [64, 32]
        assert report["shapes"][f"{layer}mlp.up_proj.weight"] == [64, 64]
        assert report["shapes"][f"{layer}mlp.down_proj.weight"] == [64, 64]
        assert report["shapes"]["model.embed_tokens.weight"] == [136, 64]


@pytest.mark.slow
def test_columns_on_whole_groups_of_64(tmp_path: Path) -> None:
    save(tmp_path, "llama", "q4", hidden_size=128, head_dim=32, intermediate_size=256)
    for report in run_ranks(tmp_path):
        assert report["error"] == "" and report["spread"] < 1e-5
        assert report["shapes"]["model.layers.0.self_attn.o_proj.weight"] == [128, 64]
        assert report["shapes"]["model.layers.0.mlp.down_proj.weight"] == [128, 128]


@pytest.mark.slow
def test_a_tied_head_is_cut_as_its_embedding(tmp_path: Path) -> None:
    save(tmp_path, "llama tied", "q8", intermediate_size=128)
    for report in run_ranks(tmp_path):
        assert report["error"] == "" and report["spread"] < 1e-5
        assert report["shapes"]["model.embed_tokens.weight"] == [136, 64]


@pytest.mark.slow
def test_planes_and_recipes_are_not_cut_and_say_so(tmp_path: Path) -> None:
    model = tiny_family("llama")
    model.save_pretrained(tmp_path / "dense")
    ninfer_torch.quantize_(model, "q8")
    model.save_pretrained(tmp_path / "planes", save_format="safetensors")
    for options, what in [
        ({"file": "planes"}, "a folder of planes"),
        ({"file": "dense", "recipe": "q8"}, "a model that is quantized while it loads"),
    ]:
        for report in run_ranks(tmp_path, **options):
            assert report["error"].startswith(
                f"UnsupportedOperation: {what} is not sharded over processes; save it as a .ninfer"
            )


@pytest.mark.slow
def test_hybrid_layers_and_stacked_weights_are_cut_too(tmp_path: Path) -> None:
    """Qwen3.5 as NInfer stores it: a query interleaved with its gate is cut by whole heads of both."""
    save(tmp_path, "qwen3.5", "q8", official=True, intermediate_size=128)
    for report in run_ranks(tmp_path):
        assert report["error"] == "" and report["spread"] < 1e-5
        layers = "model.layers."
        assert report["shapes"][f"{layers}1.self_attn.q_proj.weight"] == [64, 64]
        assert report["shapes"][f"{layers}0.linear_attn.out_proj.weight"] == [32, 64]
        assert report["shapes"][f"{layers}0.mlp.down_proj.weight"] == [64, 64]


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "what"), [("q8", "quantized"), ("direct", "dense")])
def test_fused_expert_banks_are_refused_by_name(tmp_path: Path, preset: str, what: str) -> None:
    save(tmp_path, "qwen3.5 moe", preset, shared_expert_intermediate_size=64)
    expected = f"UnsupportedOperation: parameter 'model.layers.0.mlp.experts.gate_up_proj' [4, 80, 64] is {what}"
    for report in run_ranks(tmp_path):
        assert report["error"].startswith(expected) and "device_map" in report["error"]


@pytest.mark.slow
def test_columns_off_whole_groups_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, "llama", "q4", intermediate_size=128)
    expected = r"LayoutError: parameter 'model.layers.0.self_attn.o_proj.weight' [64, 64] (q4_g64_fp16) cannot be cut over 2 ranks: "
    for report in run_ranks(tmp_path):
        assert report["error"].startswith(expected) and "another number of ranks" in report["error"]


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    print(json.dumps(rank_report(Path(sys.argv[1]), json.loads(sys.argv[2]))))
    distributed.destroy_process_group()
