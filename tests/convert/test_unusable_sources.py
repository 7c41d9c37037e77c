"""Whatever the kind of source: what cannot be used is refused before a file exists, and the tensor is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from ninfer_torch.convert import convert
from ninfer_torch.errors import ConversionError, NinferError

UP = "model.layers.1.mlp.up_proj.weight"


def folder(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A Llama's folder with its tensors changed."""
    tiny_models.save_folder(path / "m", tiny_models.tiny_llama())
    tensors = load_file(path / "m" / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "m" / "model.safetensors", {"format": "pt"})
    return path / "m"


def dropped(path: Path) -> Path:
    return folder(path, lambda tensors: tensors.__delitem__(UP))


def misshapen(path: Path) -> Path:
    return folder(path, lambda tensors: tensors.update({UP: torch.zeros(160, 63)}))


def of_unknown_words(path: Path) -> Path:
    return folder(path, lambda tensors: tensors.update({UP: torch.zeros(160, 64, dtype=torch.int8)}))


def without_scale(path: Path) -> Path:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP] = torch.zeros(160, 64, dtype=torch.float8_e4m3fn)

    return folder(path, change)


def of_half_a_shard(path: Path) -> Path:
    """The index places the tensor in a shard that does not hold it."""
    root = folder(path, lambda tensors: tensors.__delitem__(UP))
    tensors = load_file(root / "model.safetensors")
    (root / "model.safetensors").rename(root / "one.safetensors")
    index = {"weight_map": {**dict.fromkeys(tensors, "one.safetensors"), UP: "one.safetensors"}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def gguf_file(path: Path, without: str = "", broken: str = "") -> Path:
    """A Llama of one layer as GGUF, without a tensor, or with one of a type that nothing decodes."""
    writer = gguf.GGUFWriter(path / "m.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes: dict[str, tuple[int, ...]] = {f"blk.0.attn_{part}": (32, 32) for part in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64), "token_embd": (40, 32)}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "output_norm": (32,)}
    for name, shape in shapes.items():
        if name == broken:
            data = np.zeros((shape[0], 40 * (shape[1] // 32)), np.uint8)
            writer.add_tensor(f"{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_1)
        elif name != without:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path / "m.gguf"


def artifact_without(path: Path) -> Path:
    def change(entries: dict[str, Any]) -> None:
        entries.pop(UP)

    return tiny_models.written_artifact(path / "m.ninfer", tiny_models.tiny_llama(), change=change)


def module_on_meta(path: Path) -> Any:
    model = tiny_models.tiny_llama()
    model.model.layers[1].mlp.up_proj.to("meta")
    return model


def module_of_integers(path: Path) -> Any:
    model = tiny_models.tiny_llama()
    weight = torch.zeros(160, 64, dtype=torch.int32)
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model


SOURCES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "safetensors without a tensor": (dropped, UP),
    "safetensors of another shape": (misshapen, UP),
    "safetensors of unknown words": (of_unknown_words, UP),
    "FP8 without its scale": (without_scale, UP),
    "a shard without its tensor": (of_half_a_shard, UP),
    "GGUF without a tensor": (lambda path: gguf_file(path, without="blk.0.ffn_up"), "blk.0.ffn_up.weight"),
    "GGUF of an undecodable type": (lambda path: gguf_file(path, broken="blk.0.ffn_up"), "blk.0.ffn_up.weight"),
    "an artifact without a parameter": (artifact_without, UP),
    "a module without values": (module_on_meta, UP),
    "a module of integers": (module_of_integers, UP),
}


@pytest.mark.parametrize("preset", ["q4", "keep"])
@pytest.mark.parametrize(("make", "name"), SOURCES.values(), ids=SOURCES)
def test_nothing_is_written_and_the_tensor_is_named(
    tmp_path: Path, make: Callable[[Path], Any], name: str, preset: str
) -> None:
    source = make(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(NinferError) as raised:
        convert(source, tmp_path / "out.ninfer", preset)
    assert isinstance(raised.value, ConversionError) and name in str(raised.value)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
