"""Planes onto a card through two page-locked host buffers: one is filled from the mapping while the other is in flight.

A copy straight out of a file mapping is unpinned: the driver stages it while the host waits, page fault by page fault. Here the
host reads ahead of the card, and all that it needs besides the mapping is `2 * CHUNK` bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from ninfer_torch.errors import LayoutError

__all__ = ["CHUNK", "THRESHOLD", "CudaTransfers", "Transfers", "move", "reporting", "staged_copy"]

CHUNK = 32 << 20
"""Bytes of one buffer. Every move uses buffers of this size, so that PyTorch's cache of pinned memory holds two, no more."""

THRESHOLD = 4 << 20
"""Bytes from which a plane is staged; smaller ones are not worth two buffers."""

Report = Callable[[int], None]

_REPORT: ContextVar[Report | None] = ContextVar("report", default=None)


class Transfers(Protocol):
    """What staging asks of a device. An event is whatever `copy` returns and `wait` takes."""

    def buffer(self, count: int) -> torch.Tensor:
        """A host buffer, uint8 [count], that the device can read without the host."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Start the copy of a piece of a buffer into the device; the event tells when the piece may be overwritten."""
        ...

    def wait(self, event: Any) -> None:
        """Block the host until the copy of the event is complete."""
        ...


class CudaTransfers:
    """Copies on a stream of their own, behind what the current stream holds when they begin."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))  # the target's memory may still be read there

    def buffer(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.cuda.Event:
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()


def staged_copy(
    target: torch.Tensor, source: torch.Tensor, transfers: Transfers, chunk: int = CHUNK, report: Report | None = None
) -> None:
    """Copy the bytes of `source` on the host into `target`, both contiguous and of one size; complete on return.

    At most two buffers of `chunk` bytes exist. `report` is called with the bytes of each piece once that piece is on the device.

    Raises LayoutError where the two differ in bytes, where one is not contiguous, or where `chunk` is not positive.
    """
    if target.nbytes != source.nbytes or not (target.is_contiguous() and source.is_contiguous()):
        raise LayoutError(
            f"staged copy: found {source.nbytes} bytes of strides {list(source.stride())} into {target.nbytes} bytes of "
            f"strides {list(target.stride())}, expected two contiguous tensors of one size"
        )
    if chunk < 1:
        raise LayoutError(f"staged copy: found pieces of {chunk} bytes, expected at least 1")
    if source.nbytes == 0:
        return
    from_bytes, to_bytes = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (source, target))
    buffers: list[torch.Tensor] = []
    in_flight: list[tuple[Any, int] | None] = [None, None]

    def land(slot: int) -> None:
        flight = in_flight[slot]
        if flight is not None:
            in_flight[slot] = None
            transfers.wait(flight[0])
            if report is not None:
                report(flight[1])

    slot = 0
    try:
        for begin in range(0, source.nbytes, chunk):
            count = min(chunk, source.nbytes - begin)
            if len(buffers) <= slot:
                buffers.append(transfers.buffer(chunk))
            land(slot)
            piece = buffers[slot][:count]
            piece.copy_(from_bytes[begin : begin + count])
            in_flight[slot] = (transfers.copy(to_bytes[begin : begin + count], piece), count)
            slot ^= 1
        land(slot)
        land(slot ^ 1)
    finally:  # after an error or Ctrl-C: no buffer may be freed while the device reads it
        for flight in in_flight:
            if flight is not None:
                transfers.wait(flight[0])


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Inside, moves of planes from the host to a card call `report` with the bytes that have arrived."""
    token = _REPORT.set(report)
    try:
        yield
    finally:
        _REPORT.reset(token)


def _stages(plane: torch.Tensor, device: torch.device | None) -> bool:
    return (
        device is not None
        and device.type == "cuda"
        and type(plane) is torch.Tensor  # not the stand-in of a tracer
        and plane.device.type == "cpu"
    )


def move(
    plane: torch.Tensor,
    device: torch.device | str | int | None,
    *,
    non_blocking: bool = False,
    copy: bool = False,
    transfers: Callable[[torch.device], Transfers] = CudaTransfers,
) -> torch.Tensor:
    """`plane.to(device, ...)`, staged where a large unpinned plane goes from the host to a card."""
    place = None if device is None else torch.device(device)
    if place is None or not _stages(plane, place):
        return plane.to(device=device, non_blocking=non_blocking, copy=copy)
    report = _REPORT.get()
    if plane.nbytes < THRESHOLD or not plane.is_contiguous() or plane.is_pinned():
        moved = plane.to(device=place, non_blocking=non_blocking, copy=copy)
        if report is not None:
            report(plane.nbytes)
        return moved
    target = torch.empty(plane.shape, dtype=plane.dtype, device=place)
    staged_copy(target, plane, transfers(target.device), report=report)
    return target
