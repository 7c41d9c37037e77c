"""Launches measured on one card, stored by `ninfer-torch tune`, in the place of those that the launch table gives.

A stored table belongs to a card by name and to the kernel sources by hash: after a change of either, none is found and the table
of `kernels.triton.launch` decides alone. `NINFER_TORCH_TUNED=0` has the same effect. A launch is only ever replaced by one that
the launch table itself uses for the same dtype and precision, so tuning changes speed and never the criterion that results meet.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ninfer_torch.errors import NinferError
from ninfer_torch.kernels.triton import launch as launches
from ninfer_torch.kernels.triton.launch import RULES, Launch

__all__ = ["Card", "Choice", "Range", "TuningError", "candidates", "choose", "read", "table_path", "tune", "write"]

VERSION = 1
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MARGIN = 0.97
"""A launch replaces the default one where it takes less than this share of its time: less is noise."""


class TuningError(NinferError, ValueError):
    """A stored launch table that is broken or belongs to another card or other kernels."""


@dataclass(frozen=True)
class Card:
    """What a stored table belongs to: the device's name, compute capability times ten, and the hash of the kernel sources."""

    name: str
    architecture: int
    kernels: str


@dataclass(frozen=True)
class Range:
    """Activation rows up to `max_rows`, measured at `rows` of them. Results for at most `few` rows meet the stricter criterion."""

    max_rows: int
    rows: int
    few: int

    @property
    def exact(self) -> bool:
        return self.max_rows <= self.few


END = max(rule.max_rows for rule in RULES)


def _ranges(few: int, *points: int | tuple[int, int]) -> tuple[Range, ...]:
    pairs = (point if isinstance(point, tuple) else (point, point) for point in points)
    return tuple(Range(max_rows, rows, few) for max_rows, rows in pairs)


RANGES: Mapping[str, tuple[Range, ...]] = {
    "linear": _ranges(15, 1, 2, (15, 8), 16, 32, 64, (512, 256), (END, 2048)),
    "expert_linear": _ranges(3, 1, (3, 2), (24, 16), 64, (END, 256)),
}
"""By operation; the others have one launch per criterion. Rows of experts are the average of one. The boundary between criteria is that of the launch table."""


def ranges(operation: str) -> tuple[Range, ...]:
    """The ranges of rows that are tuned, rising; empty for an operation without a choice."""
    return RANGES.get(operation, ())


@functools.cache
def candidates(operation: str, family: str, dtype: torch.dtype, within: Range, architecture: int) -> tuple[Launch, ...]:
    """The launches that may stand for one another in a range, the launch table's own first.

    They are those that the table reaches on the architecture for rows under the same criterion. An architecture that no rule names
    has the most shared memory: what is meant for smaller ones fits there too.
    """
    named = {named for rule in RULES for named in rule.architectures}
    architectures = (architecture,) if architecture in named else (architecture, *sorted(named - {0}))
    edges = {1, *(rule.max_rows for rule in RULES), *(rule.max_rows + 1 for rule in RULES if rule.max_rows < END)}
    points = [within.rows, *(rows for rows in sorted(edges) if (rows <= within.few) == within.exact)]
    found = (launches.choose(operation, family, dtype, rows, one) for one in architectures for rows in points)
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Choice:
    """The fastest launch of a range, with its time and the default launch's, in microseconds."""

    operation: str
    family: str
    dtype: str
    max_rows: int
    launch: Launch
    microseconds: float
    default_microseconds: float


Timer = Callable[[str, str, torch.dtype, int, Launch], float]
"""Seconds of (operation, family, dtype, rows, launch); infinite where the launch does not fit the card."""


def tune(card: Card, timer: Timer, families: Iterable[str], dtypes: Sequence[str] = tuple(DTYPES)) -> Iterator[Choice]:
    """Measure every candidate of every family and range: one choice each. Ranges with a single candidate need none.

    Raises TuningError where not even the default launch runs.
    """
    for family in families:
        for dtype in dtypes:
            for operation, within in ((operation, one) for operation, some in RANGES.items() for one in some):
                tried = candidates(operation, family, DTYPES[dtype], within, card.architecture)
                if len(tried) < 2:
                    continue
                seconds = {one: timer(operation, family, DTYPES[dtype], within.rows, one) for one in tried}
                default, best = tried[0], min(tried, key=seconds.__getitem__)
                if not math.isfinite(seconds[default]):
                    raise TuningError(
                        f"{card.name}: the default launch {default} of {operation} {family} {dtype} does not fit"
                    )
                chosen = best if seconds[best] < MARGIN * seconds[default] else default
                yield Choice(
                    operation, family, dtype, within.max_rows, chosen, 1e6 * seconds[chosen], 1e6 * seconds[default]
                )


def table_path(card: Card) -> Path:
    """The file of a card's table: folder `launches` in `NINFER_TORCH_CACHE`, by default `~/.cache/ninfer_torch`."""
    cache = Path(os.environ.get("NINFER_TORCH_CACHE") or Path.home() / ".cache" / "ninfer_torch")
    name = re.sub(r"[^A-Za-z0-9]+", "-", card.name).strip("-").lower()
    return cache / "launches" / f"{name}-{card.kernels}.json"


def write(card: Card, choices: Iterable[Choice]) -> Path:
    """Store a card's table, replacing an older one in one step; returns the file."""
    path = table_path(card)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"version": VERSION, "card": asdict(card), "choices": [asdict(choice) for choice in choices]}
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)
    return path


Table = Mapping[tuple[str, str, torch.dtype, int], Launch]
"""By operation, family, dtype and a range's `max_rows`."""


def read(card: Card) -> Table:
    """A card's stored table; empty where there is none.

    Raises TuningError, naming the file, where it is broken, of another card or kernels, or holds a launch that is no candidate.
    """
    path = table_path(card)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise _broken(path, f"cannot be read: {error}") from error
    try:
        content = json.loads(text)
        version, owner = content["version"], content["card"]
        entries = [_choice(entry) for entry in content["choices"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(path, f"is no launch table: {type(error).__name__}: {error}") from error
    if version != VERSION or owner != asdict(card):
        raise _broken(path, f"is version {version} for {owner}, expected version {VERSION} for {asdict(card)}")
    for (operation, family, dtype, max_rows), launch in entries:
        within = next((one for one in ranges(operation) if one.max_rows == max_rows), None)
        if within is None or launch not in candidates(operation, family, dtype, within, card.architecture):
            raise _broken(path, f"has {launch} for {operation} {family} {dtype} up to {max_rows} rows: no candidate")
    return dict(entries)


def _choice(entry: Mapping[str, Any]) -> tuple[tuple[str, str, torch.dtype, int], Launch]:
    key = (entry["operation"], entry["family"], DTYPES[entry["dtype"]], entry["max_rows"])
    return key, Launch(**entry["launch"])


def _broken(path: Path, found: str) -> TuningError:
    return TuningError(f"{path} {found}; delete it or run `ninfer-torch tune` again (NINFER_TORCH_TUNED=0 ignores it)")


_stored = functools.cache(read)


@functools.cache
def choose(
    operation: str, family: str, dtype: torch.dtype, rows: int, architecture: int, card: Card | None = None
) -> Launch:
    """`launch.choose`, but for what is stored for `card`. The file is read at the first call for that card, never again."""
    if card is not None:
        within = next((one for one in ranges(operation) if rows <= one.max_rows), None)
        tuned = None if within is None else _stored(card).get((operation, family, dtype, within.max_rows))
        if tuned is not None:
            return tuned
    return launches.choose(operation, family, dtype, rows, architecture)


def enabled() -> bool:
    """Whether stored tables count: not under `NINFER_TORCH_TUNED=0`."""
    return os.environ.get("NINFER_TORCH_TUNED") != "0"
