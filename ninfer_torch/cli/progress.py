"""Progress bars: how much is done, rate and time left, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

__all__ = ["byte_bar", "count_bar"]


@contextmanager
def byte_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar fed with (bytes done, bytes in all); hidden where standard error is no terminal."""
    with _bar(desc=label, unit="B", unit_divisor=1024) as show:
        yield show


@contextmanager
def count_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """The same for things counted in thousands, named by `label`."""
    with _bar(desc=label, unit="") as show:
        yield show


@contextmanager
def _bar(**appearance: Any) -> Iterator[Callable[[int, int], None]]:
    with tqdm(unit_scale=True, disable=None, **appearance) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
