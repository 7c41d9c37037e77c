"""Directories of container versions 1 and 2, read as the version 3 directory they amount to.

Objects keep their names as ids and get the version 3 names of format, layout and encoding; their bytes are the same in
all versions. Components, bindings and uses are derived for the published models; any other file has objects only.
Source: spec/container.md 13. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ninfer_torch.artifact.checking import (
    Place,
    is_identifier,
    json_identifier,
    json_members,
    shown,
)
from ninfer_torch.artifact.jsontext import parse_json
from ninfer_torch.artifact.legacy_bindings import Meaning, Mismatch, derive_meaning, resource_roles
from ninfer_torch.artifact.legacy_models import PUBLISHED, V1_WEIGHTS_ID
from ninfer_torch.artifact.legacy_names import ENCODINGS, FORMATS, LAYOUTS
from ninfer_torch.artifact.records import Component, Directory, FileRecord, Object, ResourceObject
from ninfer_torch.artifact.schema import read_descriptor, read_objects

__all__ = ["LegacyDirectory", "parse_legacy_directory"]


@dataclass(frozen=True)
class LegacyDirectory:
    """A directory in version 3 terms. `unbound` says why it has no bindings, None where it has them."""

    directory: Directory
    unbound: str | None


@dataclass(frozen=True)
class _Identity:
    """What an old file calls itself; version 1 has no `weights_id`."""

    version: int
    model_id: str
    weights_id: str | None

    @property
    def published(self) -> tuple[str, str]:
        return self.model_id, V1_WEIGHTS_ID if self.weights_id is None else self.weights_id

    def __str__(self) -> str:
        weights = "" if self.weights_id is None else f", weights_id {self.weights_id!r}"
        return f"model_id {self.model_id!r}{weights}"

    def record(self) -> dict[str, Any]:
        members = {"version": self.version, "model_id": self.model_id, "weights_id": self.weights_id}
        return {name: value for name, value in members.items() if value is not None}


def parse_legacy_directory(data: bytes, version: int, payload_bytes: int, where: str) -> LegacyDirectory:
    """The directory in `data`, the JSON text of a version 1 or 2 file with `payload_bytes` bytes after its payload start.

    Bytes after the last object are allowed and ignored. `where` names the file in messages. Raises ArtifactError for
    what spec/container.md 13.1 refuses. Format, layout, encoding, size and alignment of an object are checked when it
    is used, as in version 3, except that a version 3 name here is refused at once.
    """
    member = "model_id" if version == 1 else "identity"
    root = json_members(parse_json(data, where), Place(where, "directory"), (member, "objects"))
    identity = _identity(root[member], version, Place(where, member))
    objects = read_objects(root["objects"], Place(where, "objects"), max(payload_bytes, 0), _descriptor)
    meaning, unbound = _meaning(identity, objects)
    name = {"name": identity.model_id} if is_identifier(identity.model_id) else {}
    directory = Directory(
        components=meaning.components,
        objects=objects,
        bindings=meaning.bindings,
        uses=meaning.uses,
        files=(FileRecord(None, objects[-1].end),),
        metadata=name,
        provenance={"upgraded_from": identity.record()},
    )
    return LegacyDirectory(directory, unbound)


def _identity(value: Any, version: int, place: Place) -> _Identity:
    if version == 1:
        if not isinstance(value, str) or not value:
            place.fail(f"found {shown(value)}, expected a non-empty string")
        return _Identity(version, value, None)
    record = json_members(value, place, ("model_id", "weights_id"))
    model_id, weights_id = (json_identifier(record[name], place.at(f".{name}")) for name in ("model_id", "weights_id"))
    return _Identity(version, model_id, weights_id)


def _descriptor(value: Any, place: Place) -> Object:
    record = read_descriptor(value, place, id_member="name", optional=())
    place = place.at(f" {record.id!r}")
    if isinstance(record, ResourceObject):
        return replace(record, encoding=_translated(record.encoding, ENCODINGS, place.at(".encoding")))
    return replace(
        record,
        format=_translated(record.format, FORMATS, place.at(".format")),
        layout=_translated(record.layout, LAYOUTS, place.at(".layout")),
    )


def _translated(name: str, table: Mapping[str, str], place: Place) -> str:
    """The version 3 name of `name`. One that no version knows stays as it is, to be refused if the object is used."""
    if name in table.values():
        place.fail(f"found {name!r}, a name of container version 3; expected one of {', '.join(table)}", "encoding")
    return table.get(name, name)


def _meaning(identity: _Identity, objects: Sequence[Object]) -> tuple[Meaning, str | None]:
    model = PUBLISHED.get(identity.published)
    if model is None:
        published = ", ".join("/".join(pair) for pair in PUBLISHED)
        reason = f"{identity} is none of the published models ({published})"
    else:
        try:
            return derive_meaning(model, objects), None
        except Mismatch as error:
            reason = f"{identity} is a published model, but {error}"
    note = (
        f"a container of version {identity.version} names objects and no parameters, and {reason}; "
        "use tensor(object_id) and resource(object_id)"
    )
    text = Component({}, resources=resource_roles(objects, "text"))
    return Meaning(MappingProxyType({"text": text}), MappingProxyType({}), ()), note
