"""Importance vectors: read under logical names, refused where they mean nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ninfer_torch.convert.importance import (
    mean_importance,
    read_importance,
    read_llama_imatrix,
    untile_heads,
    write_importance,
)
from ninfer_torch.convert.methods import grouped_absmax, grouped_search
from ninfer_torch.errors import ConversionError


def write_imatrix(path: Path, entries: Mapping[str, tuple[np.ndarray, object]], extra: tuple[str, ...] = ()) -> Path:
    """An imatrix as llama.cpp lays it out, by the gguf package: per weight sums [n, K] and counts [n, 1]."""
    writer = gguf.GGUFWriter(str(path), arch="")
    writer.kv_data[0].clear()  # an imatrix has no architecture
    writer.add_string("general.type", "imatrix")
    writer.add_array("imatrix.datasets", ["text.txt"])
    writer.add_uint32("imatrix.chunk_count", 3)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, (sums, counts) in entries.items():
        if sums is not None:
            writer.add_tensor(f"{name}.in_sum2", np.atleast_2d(np.asarray(sums, dtype=np.float32)))
        if counts is not None:
            writer.add_tensor(f"{name}.counts", np.asarray(counts, dtype=np.float32).reshape(-1, 1))
    for name in extra:
        writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- llama.cpp's files -----------------------------------------------------------------------------------------------


def test_sums_are_divided_by_their_counts(tmp_path: Path) -> None:
    sums = {"blk.0.attn_q.weight": [1.0, 6.0, 9.5], "blk.0.ffn_down.weight": [4.0, 0.0]}
    path = write_imatrix(
        tmp_path / "m.gguf",
        {"blk.0.attn_q.weight": (sums["blk.0.attn_q.weight"], 3), "blk.0.ffn_down.weight": ([4.0, 0.0], 0)},
    )
    stored = read_llama_imatrix(path)
    assert stored.source == "m.gguf" and set(stored) == set(sums)
    assert torch.equal(stored["blk.0.attn_q.weight"], torch.tensor([1.0, 6.0, 9.5]) / 3)
    assert torch.equal(stored["blk.0.ffn_down.weight"], torch.tensor([4.0, 0.0]))  # a count of 0 divides by 1


def test_gguf_names_become_every_logical_name_they_answer_for(tmp_path: Path) -> None:
    weights = ["attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate", "ffn_gate", "ffn_up", "ffn_down"]
    entries = {f"blk.11.{weight}.weight": (np.full(4, index + 1.0), 1) for index, weight in enumerate(weights)}
    found = read_importance(write_imatrix(tmp_path / "m.gguf", entries))
    assert found.unused == ()
    roles = {  # spec/conversion.md 7
        "attention/query": "attn_q",
        "attention/gate": "attn_q",
        "attention/key": "attn_k",
        "attention/value": "attn_v",
        "attention/output": "attn_output",
        "gdn/query": "attn_qkv",
        "gdn/key": "attn_qkv",
        "gdn/value": "attn_qkv",
        "gdn/z": "attn_gate",
        "mlp/gate": "ffn_gate",
        "mlp/up": "ffn_up",
        "mlp/down": "ffn_down",
    }
    for role, weight in roles.items():
        assert found[f"text/layers/11/{role}"].tolist() == [weights.index(weight) + 1.0] * 4
    assert {name for name in found if name.startswith("text/layers/")} == {f"text/layers/11/{role}" for role in roles}
    for parameter, weight in {"self_attn.q_proj": "attn_q", "mlp.down_proj": "ffn_down"}.items():
        assert found[f"text/model.layers.11.{parameter}.weight"].tolist() == [weights.index(weight) + 1.0] * 4


def test_output_channels_of_value_heads_are_untiled(tmp_path: Path) -> None:
    """Two key heads with three value heads each, two channels per head (spec/parameters.md 11)."""
    key_heads, value_heads, width = 2, 6, 2
    per = value_heads // key_heads
    grouped = torch.arange(value_heads * width, dtype=torch.float32)
    tiled = torch.empty_like(grouped)
    for column in range(value_heads * width):  # column c of the file is column input_columns[c] of the model
        head, lane = divmod(column, width)
        tiled[column] = grouped[((head % key_heads) * per + head // key_heads) * width + lane]
    assert not torch.equal(tiled, grouped) and torch.equal(untile_heads(tiled, key_heads, value_heads), grouped)
    path = write_imatrix(tmp_path / "m.gguf", {"blk.0.ssm_out.weight": (tiled.numpy(), 1)})
    config = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}
    assert torch.equal(read_importance(path, config)["text/layers/0/gdn/output"], grouped)
    with pytest.raises(ConversionError, match="blk.0.ssm_out.weight.* linear_num_value_heads"):
        read_importance(path)
    with pytest.raises(ConversionError, match="12 channels cannot be cut into 5 value heads"):
        untile_heads(tiled, 1, 5)


def test_names_that_nothing_answers_for_are_listed(tmp_path: Path) -> None:
    entries = {"blk.0.attn_q.weight": ([1.0], 1), "blk.0.mystery.weight": ([1.0], 1)}
    assert read_importance(write_imatrix(tmp_path / "m.gguf", entries)).unused == ("blk.0.mystery.weight",)
    del entries["blk.0.attn_q.weight"]
    with pytest.raises(ConversionError, match="none of its weights is known, such as 'blk.0.mystery.weight'"):
        read_importance(write_imatrix(tmp_path / "n.gguf", entries))


def test_counts_per_expert_are_refused(tmp_path: Path) -> None:
    """Fused experts have one count each (case T5)."""
    entries = {"blk.0.ffn_gate_exps.weight": (np.ones((4, 8)), [1, 2, 0, 5])}
    with pytest.raises(ConversionError, match="'blk.0.ffn_gate_exps.weight' has 4 counts, one per expert"):
        read_importance(write_imatrix(tmp_path / "m.gguf", entries))


@pytest.mark.parametrize(
    "entries, extra, message",
    [
        ({"blk.0.attn_q.weight": ([1.0], None)}, (), "tensor 'blk.0.attn_q.weight.counts' is missing"),
        ({"blk.0.attn_q.weight": ([1.0], 1)}, ("odd",), "tensor 'odd' is not part of an imatrix"),
        ({"a": (None, 1)}, (), "no tensor's name ends in '.in_sum2' .general.type 'imatrix'."),
        ({"blk.0.attn_q.weight": ([1.0, -2.0], 1)}, (), "'blk.0.attn_q.weight' is -2.0 in column 1"),
        ({"blk.0.attn_q.weight": ([math.inf, 1.0], 1)}, (), "'blk.0.attn_q.weight' is inf in column 0"),
        ({"blk.0.attn_q.weight": ([1.0, math.nan], 1)}, (), "'blk.0.attn_q.weight' is nan in column 1"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, entries: dict, extra: tuple[str, ...], message: str) -> None:
    path = write_imatrix(tmp_path / "m.gguf", entries, extra)
    with pytest.raises(ConversionError, match=f"m.gguf: .*{message}"):
        read_importance(path)


def test_sums_of_plain_activations_are_left_aside(tmp_path: Path) -> None:
    path = write_imatrix(
        tmp_path / "m.gguf", {"blk.0.attn_q.weight": ([1.0], 1)}, extra=("blk.0.attn_q.weight.in_sum",)
    )
    assert read_importance(path)["text/layers/0/attention/query"].tolist() == [1.0]


# --- safetensors -----------------------------------------------------------------------------------------------------


def test_safetensors_round_trip(tmp_path: Path) -> None:
    vectors = {"text/layers/0/mlp/up": torch.rand(64), "text/model.layers.0.mlp.up_proj.weight": torch.rand(8).double()}
    path = tmp_path / "importance.safetensors"
    write_importance(path, vectors, "somewhere/corpus.txt")
    found = read_importance(path)
    assert found.source == "corpus.txt" and set(found) == set(vectors)
    for name, vector in vectors.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], vector.float())
    with safe_open(path, "pt") as stream:
        assert stream.metadata() == {"source": "corpus.txt"}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("bad", [-1e-9, math.inf, -math.inf, math.nan])
def test_illegal_entries_are_refused_in_both_directions(tmp_path: Path, bad: float) -> None:
    vector = torch.tensor([1.0, bad])
    path = tmp_path / "importance.safetensors"
    with pytest.raises(ConversionError, match="importance of 'a' is .* in column 1, expected finite and at least 0"):
        write_importance(path, {"a": vector}, "x")
    assert not list(tmp_path.iterdir())
    save_file({"a": vector}, path)
    with pytest.raises(ConversionError, match="importance.safetensors: importance of 'a' is .* in column 1"):
        read_importance(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.dat"
    path.write_bytes(b"\x01\x00\x00\x00\x05\x00\x00\x00blk.0" + bytes(64))
    with pytest.raises(ConversionError, match="old.dat: neither .* llama-imatrix --in-file"):
        read_importance(path)
    save_file({"a": torch.ones(2, 2)}, path)
    with pytest.raises(
        ConversionError, match=r"importance of 'a' is torch.float32 \[2, 2\], expected a floating vector"
    ):
        read_importance(path)
    with pytest.raises(ConversionError, match="missing.gguf: cannot be opened"):
        read_importance(tmp_path / "missing.gguf")


# --- one parent ------------------------------------------------------------------------------------------------------


def test_vectors_of_one_parent_are_averaged() -> None:
    table = {"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([2.0, 0.0])}
    assert mean_importance(table, ["a", "b", "c"], 2).tolist() == [1.5, 1.5]
    assert mean_importance(table, ["b"], 2).tolist() == [2.0, 0.0]
    assert mean_importance(table, ["c"], 2) is None
    with pytest.raises(ConversionError, match="importance of 'a' has 2 entries, its weight 4096 columns"):
        mean_importance(table, ["a", "b"], 4096)


def test_zeros_from_a_file_leave_the_absmax_words(tmp_path: Path) -> None:
    """Channels that were never active weigh nothing; a group of them is not searched (case T1)."""
    sums = np.concatenate([np.zeros(64), np.random.default_rng(0).random(64)])
    path = write_imatrix(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (sums, 7)})
    importance = read_importance(path)["text/layers/0/attention/query"]
    weight = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    codes, scales = grouped_search(weight, "q4_g64_fp16", importance=importance)
    plain_codes, plain_scales = grouped_absmax(weight, "q4_g64_fp16")
    assert torch.equal(codes[:, :64], plain_codes[:, :64]) and torch.equal(scales[:, 0], plain_scales[:, 0])
    assert torch.isfinite(scales).all() and not torch.equal(scales[:, 1], plain_scales[:, 1])
