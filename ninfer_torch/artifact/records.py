"""The records of a container directory, as immutable values. Source: spec/container.md 4 to 8. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = [
    "ACTIVATION_POLICIES",
    "Binding",
    "Component",
    "Directory",
    "FileRecord",
    "Object",
    "Part",
    "Proposal",
    "ResourceObject",
    "TensorObject",
    "Use",
]

ACTIVATION_POLICIES = ("A16Only", "AllowA8", "AllowA4")
"""Permissions of a use, from the narrowest; each allows what the ones before it allow (spec/container.md 7)."""

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class TensorObject:
    """One tensor: `bytes` encoded bytes at byte `offset` of the logical payload, meaning `shape` elements of `format`.

    `divisors` counts the separately quantized matrices stacked in an nvfp4 object.
    """

    id: str
    shape: tuple[int, ...]
    format: str
    layout: str
    offset: int
    bytes: int
    divisors: int = 1

    @property
    def elements(self) -> int:
        """Logical elements; 1 for a scalar."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def end(self) -> int:
        """Byte after the object in the logical payload."""
        return self.offset + self.bytes


@dataclass(frozen=True)
class ResourceObject:
    """One byte string, `bytes` long at byte `offset` of the logical payload."""

    id: str
    encoding: str
    offset: int
    bytes: int

    @property
    def end(self) -> int:
        """Byte after the object in the logical payload."""
        return self.offset + self.bytes


Object = TensorObject | ResourceObject


@dataclass(frozen=True)
class Part:
    """Logical elements [begin, end) of one tensor object, counted in C order."""

    object: str
    begin: int
    end: int


@dataclass(frozen=True)
class Binding:
    """Where a logical parameter lies: one whole `object`, or the concatenation of `parts` (then `object` is None)."""

    object: str | None = None
    parts: tuple[Part, ...] = ()

    @property
    def objects(self) -> tuple[str, ...]:
        """Ids of the objects it reads, in order of first use."""
        return (self.object,) if self.object is not None else tuple(dict.fromkeys(part.object for part in self.parts))


@dataclass(frozen=True)
class Use:
    """One multiplication of a parameter with a mathematical input: its activation permission and auxiliary tensors by
    role.

    `empty_auxiliaries` records that the file spells the member out although it is empty; only a byte-exact rewrite
    asks.
    """

    parameter: str
    input: str
    activation_policy: str | None = None
    auxiliaries: Mapping[str, Binding] = field(default_factory=lambda: _NONE)
    empty_auxiliaries: bool = False


@dataclass(frozen=True)
class Proposal:
    """A second output head for draft tokens: domain `full` without rows, or `indexed` with the number of its rows."""

    domain: str
    rows: int | None = None


@dataclass(frozen=True)
class Component:
    """One model component: its architecture config, the component it serves, its resources (role -> object id)."""

    config: Mapping[str, Any]
    target: str | None = None
    resources: Mapping[str, str] = field(default_factory=lambda: _NONE)
    proposal: Proposal | None = None


@dataclass(frozen=True)
class FileRecord:
    """One file of the set: its bare name (None for the entry) and the bytes of its payload segment."""

    path: str | None
    payload_bytes: int


@dataclass(frozen=True)
class Directory:
    """A whole JSON directory. `objects` ascend by offset; `components` and `bindings` keep the order of the file."""

    components: Mapping[str, Component]
    objects: tuple[Object, ...]
    bindings: Mapping[str, Binding]
    uses: tuple[Use, ...]
    files: tuple[FileRecord, ...]
    metadata: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    provenance: Mapping[str, Any] = field(default_factory=lambda: _NONE)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the logical payload, over all files."""
        return sum(record.payload_bytes for record in self.files)
