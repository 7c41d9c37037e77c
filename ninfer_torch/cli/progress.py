"""Progress bars: bytes done, rate and time left, on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

__all__ = ["byte_bar"]


@contextmanager
def byte_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar fed with (bytes done, bytes in all); hidden where standard error is no terminal."""
    with tqdm(desc=label, unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show
