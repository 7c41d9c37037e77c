"""The JSON directory of a container: text to checked records and back.

Every rule of spec/container.md 10 that needs no payload byte is applied while reading; a writer passes its own text
through the same checks. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ninfer_torch.artifact.checking import (
    MAX_RANK,
    U64_MAX,
    Place,
    is_identifier,
    json_array,
    json_identifier,
    json_integer,
    json_mapping,
    json_members,
    json_object,
    json_shape,
    shown,
)
from ninfer_torch.artifact.jsontext import dump_json, parse_json
from ninfer_torch.artifact.records import (
    ACTIVATION_POLICIES,
    Binding,
    Component,
    Directory,
    FileRecord,
    Object,
    Part,
    Proposal,
    ResourceObject,
    TensorObject,
    Use,
)

__all__ = [
    "ACTIVATION_POLICIES",
    "MAX_RANK",
    "U64_MAX",
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
    "dump_directory",
    "is_identifier",
    "parse_directory",
    "read_descriptor",
    "read_objects",
]


def parse_directory(data: bytes, where: str, entry_name: str | None = None) -> Directory:
    """The directory in `data`, checked against spec/container.md 4 to 10.

    `where` names the file in messages. `entry_name` is the bare name the entry was opened under, which no part may
    carry. Raises ArtifactError saying file, record, what was found and what was expected.
    """
    place = Place(where, "directory")
    root = json_members(
        parse_json(data, where),
        place,
        ("components", "objects", "bindings", "uses", "files"),
        ("metadata", "provenance"),
    )
    files = _files(root["files"], Place(where, "files"), entry_name)
    payload = sum(record.payload_bytes for record in files)
    objects = read_objects(root["objects"], Place(where, "objects"), payload, read_descriptor)
    by_id = {record.id: record for record in objects}
    components = _components(root["components"], Place(where, "components"), by_id)
    bindings = json_mapping(
        root["bindings"], Place(where, "bindings"), lambda value, spot: _binding(value, spot, by_id)
    )
    uses = _uses(root["uses"], Place(where, "uses"), bindings, by_id)
    metadata = json_object(root.get("metadata", {}), Place(where, "metadata"))
    if "name" in metadata:
        json_identifier(metadata["name"], Place(where, "metadata.name"))
    provenance = json_object(root.get("provenance", {}), Place(where, "provenance"))
    return Directory(components, objects, bindings, uses, files, metadata, provenance)


def _files(value: Any, place: Place, entry_name: str | None) -> tuple[FileRecord, ...]:
    files: list[FileRecord] = []
    names = set() if entry_name is None else {entry_name}
    total = 0
    for index, item in enumerate(json_array(value, place, empty=False)):
        spot = place.at(f"[{index}]")
        record = json_members(item, spot, ("path", "payload_bytes"))
        path = record["path"]
        if index == 0:
            if path is not None:
                spot.fail(f"path: found {shown(path)}, expected null for the entry file")
        else:
            _check_part_name(path, spot.at(".path"), names)
            names.add(path)
        total += json_integer(record["payload_bytes"], spot.at(".payload_bytes"), 1)
        if total > U64_MAX:
            spot.fail("the payload bytes of all files sum to more than 2^64-1", "range")
        files.append(FileRecord(path, record["payload_bytes"]))
    return tuple(files)


def _check_part_name(path: Any, place: Place, taken: set[str]) -> None:
    if not isinstance(path, str):
        place.fail(f"found {shown(path)}, expected a file name")
    if not is_identifier(path) or path in (".", "..") or "/" in path or "\\" in path:
        place.fail(f"found {shown(path)}, expected a bare file name in the folder of the entry", "file")
    if path in taken:
        place.fail(f"{shown(path)} names the entry or an earlier part, expected one name for each file", "file")


def read_objects(value: Any, place: Place, payload: int, read: Callable[[Any, Place], Object]) -> tuple[Object, ...]:
    """The records of an `objects` array, each read by `read`: unique ids, ascending and disjoint ranges inside `payload`
    bytes (spec/container.md 5).
    """
    objects: list[Object] = []
    seen: set[str] = set()
    end = 0
    for index, item in enumerate(json_array(value, place, empty=False)):
        record = read(item, place.at(f"[{index}]"))
        spot = place.at(f"[{index}] {record.id!r}")
        if record.id in seen:
            spot.fail("an earlier object has this id, expected unique ids")
        seen.add(record.id)
        if record.end > U64_MAX:
            spot.fail(f"offset {record.offset} + bytes {record.bytes} exceeds 2^64-1", "range")
        if record.end > payload:
            spot.fail(f"ends at byte {record.end}, expected at most the payload's {payload} bytes", "range")
        if record.offset < end:
            spot.fail(
                f"begins at byte {record.offset}, expected at least {end}, the end of the object before it", "range"
            )
        end = record.end
        objects.append(record)
    return tuple(objects)


_TENSOR_MEMBERS = ("kind", "shape", "format", "layout", "offset", "bytes")
_RESOURCE_MEMBERS = ("kind", "encoding", "offset", "bytes")


def read_descriptor(value: Any, place: Place, id_member: str = "id", optional: Sequence[str] = ("divisors",)) -> Object:
    """One object descriptor. `id_member` names its id, `optional` what a tensor may have besides the fixed members."""
    kind = json_object(value, place).get("kind")
    if kind == "tensor":
        record = json_members(value, place, (id_member, *_TENSOR_MEMBERS), tuple(optional))
    elif kind == "resource":
        record = json_members(value, place, (id_member, *_RESOURCE_MEMBERS))
    else:
        place.fail(f"kind: found {shown(kind)}, expected 'tensor' or 'resource'")
    name = json_identifier(record[id_member], place.at(f".{id_member}"))
    place = place.at(f" {name!r}")
    offset = json_integer(record["offset"], place.at(".offset"), 0)
    size = json_integer(record["bytes"], place.at(".bytes"), 1)
    if kind == "resource":
        return ResourceObject(name, json_identifier(record["encoding"], place.at(".encoding")), offset, size)
    return TensorObject(
        name,
        json_shape(record["shape"], place.at(".shape")),
        json_identifier(record["format"], place.at(".format")),
        json_identifier(record["layout"], place.at(".layout")),
        offset,
        size,
        json_integer(record.get("divisors", 1), place.at(".divisors"), 1),
    )


def _components(value: Any, place: Place, objects: Mapping[str, Object]) -> Mapping[str, Component]:
    records = json_object(value, place)
    if not records:
        place.fail("found no component, expected at least one")

    def resource(target: Any, spot: Place) -> str:
        if not isinstance(objects.get(json_identifier(target, spot)), ResourceObject):
            spot.fail(f"found {target!r}, expected the id of a resource object", "reference")
        return target

    def component(item: Any, spot: Place) -> Component:
        record = json_members(item, spot, ("config",), ("target", "resources", "proposal"))
        config = json_object(record["config"], spot.at(".config"))
        target = record.get("target")
        if "target" in record and json_identifier(target, spot.at(".target")) not in records:
            spot.at(".target").fail(f"found {target!r}, expected a component: {', '.join(records)}", "reference")
        resources = json_mapping(record.get("resources", {}), spot.at(".resources"), resource)
        proposal = _proposal(record["proposal"], spot.at(".proposal")) if "proposal" in record else None
        return Component(config, target, resources, proposal)

    components = json_mapping(records, place, component)
    for name, record in components.items():
        if record.proposal is not None and name != "text":
            place.at(f"[{name!r}]").fail("has a proposal, expected one only in component 'text'")
    return components


def _proposal(value: Any, place: Place) -> Proposal:
    record = json_members(value, place, ("domain",), ("rows",))
    domain = record["domain"]
    if domain == "full" and "rows" not in record:
        return Proposal("full")
    if domain == "indexed" and "rows" in record:
        return Proposal("indexed", json_integer(record["rows"], place.at(".rows"), 1))
    place.fail(f"found {shown(record)}, expected domain 'full' without rows or 'indexed' with rows")


def _binding(value: Any, place: Place, objects: Mapping[str, Object]) -> Binding:
    record = json_object(value, place)
    if record.keys() == {"object"}:
        return Binding(_tensor(record["object"], place.at(".object"), objects).id)
    if record.keys() != {"parts"}:
        place.fail(f"found members {', '.join(record) or 'none'}, expected either 'object' or 'parts'")
    parts: list[Part] = []
    total = 0
    for index, item in enumerate(json_array(record["parts"], place.at(".parts"), empty=False)):
        part = _part(item, place.at(f".parts[{index}]"), objects)
        total += part.end - part.begin
        if total > U64_MAX:
            place.fail("its parts hold more than 2^64-1 elements", "range")
        parts.append(part)
    return Binding(None, tuple(parts))


def _part(value: Any, place: Place, objects: Mapping[str, Object]) -> Part:
    record = json_members(value, place, ("object", "range"))
    parent = _tensor(record["object"], place.at(".object"), objects)
    spot = place.at(".range")
    bounds = json_array(record["range"], spot)
    if len(bounds) != 2:
        spot.fail(f"found {shown(bounds)}, expected two integers")
    begin, end = (json_integer(bound, spot, 0) for bound in bounds)
    if not begin < end <= parent.elements:
        spot.fail(
            f"found [{begin}, {end}), expected a non-empty range of the {parent.elements} elements of {parent.id!r}",
            "range",
        )
    return Part(parent.id, begin, end)


def _tensor(value: Any, place: Place, objects: Mapping[str, Object]) -> TensorObject:
    record = objects.get(json_identifier(value, place))
    if not isinstance(record, TensorObject):
        place.fail(
            f"found {value!r}, {'a resource' if record else 'no object'}; expected the id of a tensor object",
            "reference",
        )
    return record


def _uses(value: Any, place: Place, bindings: Mapping[str, Binding], objects: Mapping[str, Object]) -> tuple[Use, ...]:
    uses: list[Use] = []
    seen: set[tuple[str, str]] = set()
    for index, item in enumerate(json_array(value, place)):
        spot = place.at(f"[{index}]")
        record = json_members(item, spot, ("parameter", "input"), ("activation_policy", "auxiliaries"))
        parameter = json_identifier(record["parameter"], spot.at(".parameter"))
        name = json_identifier(record["input"], spot.at(".input"))
        if parameter not in bindings:
            spot.at(".parameter").fail(f"found {parameter!r}, expected a bound parameter", "reference")
        if (parameter, name) in seen:
            spot.fail(f"an earlier use has parameter {parameter!r} and input {name!r}, expected unique pairs")
        seen.add((parameter, name))
        policy = record.get("activation_policy")
        if "activation_policy" in record and policy not in ACTIVATION_POLICIES:
            spot.at(".activation_policy").fail(f"found {shown(policy)}, expected {', '.join(ACTIVATION_POLICIES)}")
        auxiliaries = json_mapping(
            record.get("auxiliaries", {}), spot.at(".auxiliaries"), lambda entry, where: _binding(entry, where, objects)
        )
        uses.append(Use(parameter, name, policy, auxiliaries, "auxiliaries" in record and not auxiliaries))
    return tuple(uses)


def dump_directory(directory: Directory) -> bytes:
    """The compact JSON text of a directory, in the member order of the stock writer (spec/container.md 11)."""
    return dump_json(
        {
            "components": {name: _component_members(record) for name, record in directory.components.items()},
            "objects": [_object_members(record) for record in directory.objects],
            "bindings": {name: _binding_members(record) for name, record in directory.bindings.items()},
            "uses": [_use_members(record) for record in directory.uses],
            "metadata": directory.metadata,
            "provenance": directory.provenance,
            "files": [{"path": record.path, "payload_bytes": record.payload_bytes} for record in directory.files],
        }
    )


def _component_members(record: Component) -> dict[str, Any]:
    members: dict[str, Any] = {"config": record.config}
    if record.target is not None:
        members["target"] = record.target
    if record.resources:
        members["resources"] = record.resources
    if record.proposal is not None:
        rows = record.proposal.rows
        members["proposal"] = {"domain": record.proposal.domain} | ({} if rows is None else {"rows": rows})
    return members


def _object_members(record: Object) -> dict[str, Any]:
    span = {"offset": record.offset, "bytes": record.bytes}
    if isinstance(record, ResourceObject):
        return {"id": record.id, "encoding": record.encoding, **span, "kind": "resource"}
    members = {"id": record.id, "shape": record.shape, "format": record.format, "layout": record.layout, **span}
    if record.divisors != 1:
        members["divisors"] = record.divisors
    return members | {"kind": "tensor"}


def _binding_members(record: Binding) -> dict[str, Any]:
    if record.object is not None:
        return {"object": record.object}
    return {"parts": [{"object": part.object, "range": [part.begin, part.end]} for part in record.parts]}


def _use_members(record: Use) -> dict[str, Any]:
    members: dict[str, Any] = {"parameter": record.parameter, "input": record.input}
    if record.activation_policy is not None:
        members["activation_policy"] = record.activation_policy
    if record.auxiliaries or record.empty_auxiliaries:
        members["auxiliaries"] = {role: _binding_members(binding) for role, binding in record.auxiliaries.items()}
    return members
