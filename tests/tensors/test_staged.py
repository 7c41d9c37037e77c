"""Planes onto a card through two buffers: exact bytes, an order that never overwrites what is in flight, bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ninfer_torch.cli import generate
from ninfer_torch.errors import LayoutError
from ninfer_torch.tensors import staged
from ninfer_torch.tensors.staged import CHUNK, THRESHOLD, move, reporting, staged_copy
from quantized import QUANTIZED, random_weight


@dataclass
class LateDevice:
    """A device that reads a buffer only when it is waited for: whoever refills a buffer too early corrupts the copy."""

    log: list[tuple[str, int]] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    most_pending: int = 0
    started: int = 0
    fails_at: int = -1

    def buffer(self, count: int) -> torch.Tensor:
        self.buffers.append(torch.full((count,), 0xA5, dtype=torch.uint8))
        return self.buffers[-1]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> int:
        if self.started == self.fails_at:
            raise RuntimeError("the device is lost")
        event, self.started = self.started, self.started + 1
        self.log.append(("copy", event))
        self.pending[event] = (target, source)
        self.most_pending = max(self.most_pending, len(self.pending))
        return event

    def wait(self, event: Any) -> None:
        self.log.append(("wait", event))
        target, source = self.pending.pop(event)
        target.copy_(source)


def words(count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)).view(
        dtype
    )


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128, 129, 192, 1000, 1024])
def test_bytes_arrive_exactly(count: int) -> None:
    source, device, arrived = words(count), LateDevice(), []
    target = torch.zeros_like(source)
    staged_copy(target, source, device, chunk=64, report=arrived.append)
    assert torch.equal(target, source) and not device.pending
    assert sum(arrived) == count and len(arrived) == device.started == -(-count // 64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.float8_e4m3fn])
def test_any_dtype_shape_and_offset(dtype: torch.dtype) -> None:
    source = words(8 * 130, dtype)[8:-4].reshape(4, -1)  # a view into a larger storage, rows that no chunk divides
    target = torch.zeros(source.shape, dtype=torch.float32).to(dtype)
    staged_copy(target, source, LateDevice(), chunk=100)
    assert target.view(torch.uint8).tolist() == source.view(torch.uint8).tolist()


def test_two_buffers_and_one_copy_in_flight_while_the_next_is_filled() -> None:
    device = LateDevice()
    staged_copy(torch.zeros(320, dtype=torch.uint8), words(320), device, chunk=64)
    assert [buffer.numel() for buffer in device.buffers] == [64, 64] and device.most_pending == 2
    starts_and_waits = [("copy", 0), ("copy", 1), ("wait", 0), ("copy", 2), ("wait", 1), ("copy", 3), ("wait", 2)]
    assert device.log == [*starts_and_waits, ("copy", 4), ("wait", 3), ("wait", 4)]


def test_a_plane_of_one_piece_takes_one_buffer() -> None:
    device = LateDevice()
    staged_copy(torch.zeros(64, dtype=torch.uint8), words(64), device, chunk=64)
    assert len(device.buffers) == 1


def test_nothing_stays_in_flight_after_an_error() -> None:
    device = LateDevice(fails_at=3)
    with pytest.raises(RuntimeError, match="the device is lost"):
        staged_copy(torch.zeros(1000, dtype=torch.uint8), words(1000), device, chunk=64)
    assert device.started == 3 and not device.pending


def test_refusals() -> None:
    with pytest.raises(LayoutError, match="found 64 bytes .* into 65 bytes"):
        staged_copy(torch.zeros(65, dtype=torch.uint8), words(64), LateDevice())
    with pytest.raises(LayoutError, match="contiguous"):
        staged_copy(torch.zeros(32, dtype=torch.uint8), words(64)[::2], LateDevice())
    with pytest.raises(LayoutError, match="pieces of 0 bytes"):
        staged_copy(torch.zeros(64, dtype=torch.uint8), words(64), LateDevice(), chunk=0)


def test_host_memory_is_bounded() -> None:
    """Issue 3: below 256 MiB above the mapping, with a plane below the threshold on its way as well."""
    assert 2 * CHUNK + THRESHOLD < 256 << 20


def test_on_the_host_a_move_is_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "staged_copy", lambda *_, **__: pytest.fail("staged on the host"))
    plane, arrived = words(THRESHOLD), []
    with reporting(arrived.append):
        assert move(plane, None) is plane and move(plane, "cpu") is plane
        copied = move(plane, "cpu", copy=True)
        assert move(plane, "meta").device.type == "meta"
    assert torch.equal(copied, plane) and copied.data_ptr() != plane.data_ptr() and not arrived


def test_large_planes_of_a_weight_are_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the host in the card's place, a weight moves plane by plane through the buffers and keeps its words."""
    devices: list[LateDevice] = []

    def transfers(device: torch.device) -> LateDevice:
        devices.append(LateDevice())
        return devices[-1]

    def to_the_stand_in(plane: torch.Tensor, device: Any, **options: Any) -> torch.Tensor:
        return move(plane, device, **options, transfers=transfers)

    monkeypatch.setattr(staged, "_stages", lambda plane, device: True)
    monkeypatch.setattr(staged, "THRESHOLD", 4096)
    monkeypatch.setattr("ninfer_torch.tensors.operators.move", to_the_stand_in)
    weight, arrived = random_weight("q4_g64_fp16", 128, 512), []
    with reporting(arrived.append):
        moved = weight.to("cpu", copy=True)
    sizes = [plane.nbytes for plane in weight.planes.values()]
    assert torch.equal(moved, weight) and sum(arrived) == sum(sizes)
    assert len(devices) == sum(size >= 4096 for size in sizes) and 0 < len(devices) < len(sizes)


@pytest.mark.cuda
def test_a_card_receives_the_words_within_two_buffers() -> None:
    for format in QUANTIZED:
        weight, arrived = random_weight(format, 2048, 8192), []
        with reporting(arrived.append):
            moved = weight.to("cuda")
        assert sum(arrived) == sum(plane.nbytes for plane in weight.planes.values())
        assert torch.equal(moved.to("cpu"), weight)
    plane = words(3 * CHUNK + 12345)
    assert torch.equal(move(plane, "cuda").cpu(), plane)


@pytest.mark.cuda
def test_the_bar_of_the_command_ends_full(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[int, int]] = []

    @contextmanager
    def bar(label: str) -> Iterator[Any]:
        yield lambda done, total: shown.append((done, total))

    monkeypatch.setattr(generate, "byte_bar", bar)
    layer = torch.nn.Linear(8192, 2048, bias=False)
    layer.weight = torch.nn.Parameter(random_weight("q4_g64_fp16", 2048, 8192), requires_grad=False)
    assert generate.place(layer, "cuda").weight.device.type == "cuda"
    assert shown and shown[-1][0] == shown[-1][1]
