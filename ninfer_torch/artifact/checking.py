"""Checks of single JSON values: type, members, ids, integers and shapes, with the spot named in every message.

What the directories of all container versions have in common (spec/container.md 1, 4). No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, TypeVar

from ninfer_torch.errors import ArtifactError

__all__ = [
    "MAX_RANK",
    "U64_MAX",
    "Place",
    "is_identifier",
    "json_array",
    "json_identifier",
    "json_integer",
    "json_mapping",
    "json_members",
    "json_object",
    "json_shape",
    "shown",
]

U64_MAX = 2**64 - 1
MAX_RANK = 16

T = TypeVar("T")


class Place(NamedTuple):
    """A spot in a directory, for messages: the file, and the record within it."""

    file: str
    record: str

    def at(self, suffix: str) -> Place:
        return Place(self.file, self.record + suffix)

    def fail(self, reason: str, kind: str = "schema") -> NoReturn:
        raise ArtifactError(f"{self.file}: {self.record}: {reason}", kind=kind)


def shown(value: Any) -> str:
    """`value` for a message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def json_object(value: Any, place: Place) -> dict[str, Any]:
    """`value`, which must be an object."""
    if not isinstance(value, dict):
        place.fail(f"found {shown(value)}, expected an object")
    return value


def json_array(value: Any, place: Place, empty: bool = True) -> list[Any]:
    """`value`, which must be an array, and not an empty one unless `empty`."""
    if not isinstance(value, list) or not (value or empty):
        place.fail(f"found {shown(value)}, expected {'an' if empty else 'a non-empty'} array")
    return value


def json_members(value: Any, place: Place, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """`value`, which must be an object with all members of `required`, and none beyond `optional`."""
    record = json_object(value, place)
    for name in required:
        if name not in record:
            place.fail(f"member {name!r} is missing")
    for name in record:
        if name not in required and name not in optional:
            place.fail(f"unknown member {name!r}, expected {', '.join(required + optional)}")
    return record


def is_identifier(value: Any) -> bool:
    """Whether `value` is an ID: a non-empty string without U+0000 that UTF-8 can hold (spec/container.md 1)."""
    if not isinstance(value, str) or not value or "\0" in value:
        return False
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def json_identifier(value: Any, place: Place) -> str:
    """`value`, which must be an ID."""
    if not is_identifier(value):
        place.fail(f"found {shown(value)}, expected a non-empty string without U+0000 and lone surrogates")
    return value


def json_integer(value: Any, place: Place, least: int) -> int:
    """`value`, which must be an integer of [least, 2^64-1]."""
    if type(value) is not int or not least <= value <= U64_MAX:
        place.fail(f"found {shown(value)}, expected an integer from {least} to 2^64-1")
    return value


def json_mapping(value: Any, place: Place, read: Callable[[Any, Place], T]) -> Mapping[str, T]:
    """An object whose member names are IDs, every value passed through `read`."""
    result = {}
    for name, item in json_object(value, place).items():
        json_identifier(name, place)
        result[name] = read(item, place.at(f"[{name!r}]"))
    return MappingProxyType(result)


def json_shape(value: Any, place: Place) -> tuple[int, ...]:
    """`value`, which must be a Shape (spec/container.md 1)."""
    extents = json_array(value, place)
    if len(extents) > MAX_RANK:
        place.fail(f"found rank {len(extents)}, expected at most {MAX_RANK}")
    elements = 1
    for axis, extent in enumerate(extents):
        elements *= json_integer(extent, place.at(f"[{axis}]"), 1)
    if elements > U64_MAX:
        place.fail(f"found {shown(extents)}, expected at most 2^64-1 elements")
    return tuple(extents)
