"""Stored launches: what may stand for what, what a timer decides, and which files are believed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from ninfer_torch.cli import main
from ninfer_torch.errors import NinferError, UnsupportedOperation
from ninfer_torch.kernels import tuning
from ninfer_torch.kernels.measuring import card_of
from ninfer_torch.kernels.triton import launch as launches
from ninfer_torch.kernels.triton.launch import RULES, Launch
from ninfer_torch.kernels.tuning import DTYPES, RANGES, Card, TuningError, candidates, choose, read, table_path, tune

CARD = Card("NVIDIA Example 90 (80GB)", 90, "0123456789abcdef")
FAMILIES = ("grouped", "gguf_k", "gguf_plain")
ARCHITECTURES = (0, 75, 80, 86, 89, 90, 100, 120)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    tuning._stored.cache_clear()
    choose.cache_clear()


def fastest(wanted: Launch) -> tuning.Timer:
    """A card on which one launch takes half the time of any other."""
    return lambda operation, family, dtype, rows, launch: 1e-6 if launch == wanted else 2e-6


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("operation", RANGES)
def test_candidates_are_launches_of_the_table_under_one_criterion(operation: str, architecture: int) -> None:
    """The kernels for few rows meet A16 in a way those for many do not: permuted tiles of halves never serve few rows."""
    table = {rule.launch for rule in RULES if rule.operation == operation}
    for family in FAMILIES:
        for dtype in DTYPES.values():
            for within in RANGES[operation]:
                tried = candidates(operation, family, dtype, within, architecture)
                assert tried[0] == launches.choose(operation, family, dtype, within.rows, architecture)
                assert set(tried) <= table and len(set(tried)) == len(tried)
                if within.max_rows <= (15 if operation == "linear" else 3):
                    assert not any(launch.permuted for launch in tried)


def test_a_card_of_little_shared_memory_keeps_to_its_own_launches() -> None:
    within = RANGES["linear"][-1]
    small = {launch for rule in RULES if 75 in rule.architectures for launch in [rule.launch]}
    assert set(candidates("linear", "grouped", torch.bfloat16, within, 75)) <= small
    assert len(candidates("linear", "grouped", torch.bfloat16, within, 90)) > 4


def test_ranges_rise_and_cover_every_number_of_rows() -> None:
    for some in RANGES.values():
        edges = [within.max_rows for within in some]
        assert edges == sorted(set(edges)) and edges[-1] >= max(rule.max_rows for rule in RULES)
        low = [0, *edges[:-1]]
        assert all(below < within.rows <= within.max_rows for below, within in zip(low, some, strict=True))


def test_the_fastest_launch_is_stored_and_used() -> None:
    within = RANGES["linear"][-1]
    default, *others = candidates("linear", "grouped", torch.bfloat16, within, 90)
    stored = list(tune(CARD, fastest(others[0]), ["grouped"], ["bf16"]))
    assert {choice.family for choice in stored} == {"grouped"} and {choice.dtype for choice in stored} == {"bf16"}
    path = tuning.write(CARD, stored)
    assert path == table_path(CARD) and "example-90" in path.name and CARD.kernels in path.name
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert choose("linear", "grouped", torch.bfloat16, 4096, 90, CARD) == others[0] != default
    assert choose("linear", "grouped", torch.bfloat16, 4096, 90) == default
    assert choose("linear", "gguf_k", torch.bfloat16, 4096, 90, CARD) == launches.choose(
        "linear", "gguf_k", torch.bfloat16, 4096, 90
    )
    assert choose("linear", "grouped", torch.float16, 4096, 90, CARD) == default
    assert choose("rows", "grouped", torch.float32, 7, 90, CARD) == launches.choose(
        "rows", "grouped", torch.float32, 7, 90
    )
    another = replace(CARD, kernels="f" * 16)
    assert choose("linear", "grouped", torch.bfloat16, 4096, 90, another) == default


def test_each_range_has_its_own_choice() -> None:
    def timer(operation: str, family: str, dtype: torch.dtype, rows: int, launch: Launch) -> float:
        return 1.0 if rows == 64 and launch.block_m == 16 else 2.0

    tuning.write(CARD, tune(CARD, timer, ["grouped"], ["bf16"]))
    for rows in (16, 17, 33, 64, 65, 512, 513):
        default = launches.choose("linear", "grouped", torch.bfloat16, rows, 90)
        nearest = next(within.rows for within in RANGES["linear"] if rows <= within.max_rows)
        found = choose("linear", "grouped", torch.bfloat16, rows, 90, CARD)
        assert (
            found.block_m == 16
            if nearest == 64
            else found == launches.choose("linear", "grouped", torch.bfloat16, nearest, 90)
        ), (rows, found, default)


def test_noise_and_what_does_not_fit_change_nothing() -> None:
    def noisy(operation: str, family: str, dtype: torch.dtype, rows: int, launch: Launch) -> float:
        default = launches.choose(operation, family, dtype, rows, 90)
        return 1.0 if launch == default else math.inf if launch.warps == 8 else 0.98

    for choice in tune(CARD, noisy, ["grouped"]):
        within = next(one for one in RANGES[choice.operation] if one.max_rows == choice.max_rows)
        dtype = DTYPES[choice.dtype]
        assert choice.launch == launches.choose(choice.operation, "grouped", dtype, within.rows, 90)
        assert choice.microseconds == choice.default_microseconds == 1e6
    with pytest.raises(TuningError, match="does not fit"):
        list(tune(CARD, lambda *_: math.inf, ["grouped"]))


def test_the_table_is_read_once(cache: Path) -> None:
    path = tuning.write(CARD, tune(CARD, lambda *_: 1.0, ["grouped"], ["bf16"]))
    choose("linear", "grouped", torch.bfloat16, 1, 90, CARD)
    path.write_text("broken")
    choose("linear", "gguf_k", torch.bfloat16, 64, 90, CARD)  # another key, the same table


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "{}",
        lambda text: json.dumps({**json.loads(text), "version": 99}),
        lambda text: json.dumps({**json.loads(text), "choices": [{"operation": "linear"}]}),
        lambda text: json.dumps({**json.loads(text), "choices": 7}),
        lambda text: text.replace('"block_n": 64', '"block_n": 4096'),
        lambda text: text.replace('"warps"', '"wraps"'),
        lambda text: text.replace('"bf16"', '"fp4"'),
        lambda text: text.replace("Example 90", "Example 91"),
        lambda text: text.replace(CARD.kernels, "f" * 16),
    ],
)
def test_broken_and_foreign_files_are_refused_by_name(damage: object) -> None:
    path = tuning.write(CARD, tune(CARD, lambda *_: 1.0, ["grouped"], ["bf16"]))
    assert read(CARD)
    text = path.read_text()
    assert callable(damage)
    damaged = damage(text)
    assert damaged != text
    path.write_text(damaged)
    for _ in range(2):
        with pytest.raises(TuningError, match="ninfer-torch tune") as raised:
            choose("linear", "grouped", torch.bfloat16, 1, 90, CARD)
        assert str(path) in str(raised.value) and isinstance(raised.value, NinferError)


def test_a_launch_of_the_other_criterion_is_refused() -> None:
    many = candidates("linear", "grouped", torch.bfloat16, RANGES["linear"][-1], 90)[0]
    choices = list(tune(CARD, lambda *_: 1.0, ["grouped"], ["bf16"]))
    few = next(place for place, choice in enumerate(choices) if choice.max_rows == 15)
    choices[few] = replace(choices[few], launch=many)
    path = tuning.write(CARD, choices)
    with pytest.raises(TuningError, match="no candidate"):
        read(CARD)
    assert json.loads(path.read_text())["card"] == asdict(CARD)


def test_the_environment_disables_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = pytest.importorskip("ninfer_torch.kernels.triton.operators", reason="needs Triton")
    monkeypatch.setattr(operators, "card_of", lambda device: CARD)
    monkeypatch.setattr(operators, "_architecture", lambda device: 90)
    for value, card in (("0", None), ("1", CARD)):
        monkeypatch.setenv("NINFER_TORCH_TUNED", value)
        operators._place.cache_clear()
        assert operators._place(torch.device("cuda", 0)) == (90, card)
        assert operators._place(torch.device("cpu")) == (90, None)
    operators._place.cache_clear()


def test_without_a_card_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedOperation, match="no CUDA card"):
        card_of(torch.device("cpu"))
    assert main(["tune", "--device", "cpu"]) == 1
    assert "found no CUDA card" in capsys.readouterr().err


def test_the_command_stores_what_the_timer_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    from ninfer_torch.kernels import measuring

    monkeypatch.setattr(measuring, "card_of", lambda device: CARD)
    monkeypatch.setattr(measuring, "CudaTimer", lambda device: lambda *_: 1e-6)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    assert main(["tune", "--families", "gguf_k", "--dtypes", "bf16,fp32"]) == 0
    printed = capsys.readouterr().out
    assert str(table_path(CARD)) in printed and "1.0 us, default 1.0 us" in printed
    assert {key[1:3] for key in read(CARD)} == {("gguf_k", torch.bfloat16), ("gguf_k", torch.float32)}
    assert main(["tune", "--families", "nonsense"]) == 1
    assert "unknown family 'nonsense'" in capsys.readouterr().err


@pytest.mark.cuda
@pytest.mark.parametrize("operation", RANGES)
def test_every_candidate_runs_and_is_timed_on_a_card(operation: str) -> None:
    from ninfer_torch.kernels.measuring import CudaTimer, families

    card, timer = card_of(torch.device("cuda")), CudaTimer(torch.device("cuda"), 512, 1024)
    for family in families():
        for within in RANGES[operation]:
            for launch in candidates(operation, family, torch.bfloat16, within, card.architecture):
                assert 0 < timer(operation, family, torch.bfloat16, min(within.rows, 64), launch)
