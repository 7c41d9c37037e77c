"""Show what a `.ninfer` file holds; only its directory is read."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ninfer_torch.artifact import Artifact, Part, ResourceObject, TensorObject, open_artifact


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="the .ninfer file (the entry file of a set)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--objects", action="store_true", help="list every object and what is bound to it")


def run(arguments: argparse.Namespace) -> None:
    with open_artifact(arguments.file) as artifact:
        described = describe(artifact)
    print(
        json.dumps(described, indent=1, ensure_ascii=False) if arguments.json else _text(described, arguments.objects)
    )


def describe(artifact: Artifact) -> dict[str, Any]:
    """The directory of an artifact in numbers and names: identity, components, formats by bytes, objects, policies."""
    bound = _bound(artifact)
    policies: dict[str, dict[str, str]] = {}
    for use in artifact.uses:
        policies.setdefault(use.parameter, {})[use.input] = use.activation_policy or "none"
    tensors = [record for record in artifact.objects.values() if isinstance(record, TensorObject)]
    resources = [record for record in artifact.objects.values() if isinstance(record, ResourceObject)]
    return {
        "file": artifact.path.name,
        "container_version": artifact.version,
        "artifact_id": artifact.artifact_id,
        "metadata": artifact.metadata,
        "provenance": artifact.provenance,
        "components": {
            name: {
                "architectures": component.config.get("architectures"),
                "model_type": component.config.get("model_type"),
            }
            for name, component in artifact.components.items()
        },
        "files": [
            {"path": file.path or artifact.path.name, "payload_bytes": file.payload_bytes} for file in artifact.files
        ],
        "parameters": len(artifact.bindings),
        "unbound": artifact.unbound,
        "weights": sum(math.prod(record.shape) for record in tensors),
        "tensor_bytes": sum(record.bytes for record in tensors),
        "formats": _formats(tensors),
        "policies": dict(Counter(use.activation_policy or "none" for use in artifact.uses)),
        "resources": {record.id: record.bytes for record in resources},
        "objects": [
            {
                "id": record.id,
                "format": record.format,
                "layout": record.layout,
                "shape": list(record.shape),
                "bytes": record.bytes,
                "parameters": list(dict.fromkeys(piece.name for piece in bound.get(record.id, []))),
                "pieces": [
                    {"name": piece.name, "begin": piece.begin, "end": piece.end, "uses": policies.get(piece.name, {})}
                    for piece in bound.get(record.id, [])
                ],
            }
            for record in tensors
        ],
    }


@dataclass(frozen=True)
class _Piece:
    """Elements [begin, end) of an object, in C order, and what they are: a parameter, or an auxiliary of a use."""

    name: str
    begin: int
    end: int


def _bound(artifact: Artifact) -> dict[str, list[_Piece]]:
    """Object id -> everything that is bound to it."""
    named = list(artifact.bindings.items())
    for use in artifact.uses:
        named += [(f"{use.parameter} @ {use.input}: {role}", binding) for role, binding in use.auxiliaries.items()]
    bound: dict[str, list[_Piece]] = {}
    for name, binding in named:
        whole = () if binding.object is None else (Part(binding.object, 0, _elements(artifact, binding.object)),)
        for part in whole or binding.parts:
            bound.setdefault(part.object, []).append(_Piece(name, part.begin, part.end))
    return bound


def _elements(artifact: Artifact, object_id: str) -> int:
    record = artifact.objects[object_id]
    return record.elements if isinstance(record, TensorObject) else record.bytes


def _formats(tensors: list[TensorObject]) -> dict[str, dict[str, float]]:
    """Per format: objects, weights, bytes and share of all tensor bytes, largest first."""
    total = sum(record.bytes for record in tensors) or 1
    table: dict[str, dict[str, float]] = {}
    for record in tensors:
        row = table.setdefault(record.format, {"objects": 0, "weights": 0, "bytes": 0})
        row["objects"] += 1
        row["weights"] += math.prod(record.shape)
        row["bytes"] += record.bytes
    for row in table.values():
        row["share"] = row["bytes"] / total
    return dict(sorted(table.items(), key=lambda item: -item[1]["bytes"]))


def _text(described: dict[str, Any], objects: bool) -> str:
    lines = [
        f"{described['file']}  id {described['artifact_id']}  {len(described['files'])} file(s)",
        f"container version {described['container_version']}",
        f"name: {described['metadata'].get('name', '-')}",
        _totals(described),
    ]
    if described["unbound"]:
        lines.append(f"no parameters: {described['unbound']}")
    for name, component in described["components"].items():
        lines.append(f"component {name}: {' '.join(component['architectures'] or ['-'])} ({component['model_type']})")
    for name, row in described["formats"].items():
        lines.append(f"  {name:<22} {row['objects']:>5} objects {row['bytes']:>15,} bytes {row['share']:>7.1%}")
    policies = ", ".join(f"{name} x {count}" for name, count in described["policies"].items())
    lines.append(f"policies: {policies or 'none'}")
    for name, size in described["resources"].items():
        lines.append(f"resource {name}: {size:,} bytes")
    if described["provenance"]:
        lines.append(f"provenance: {json.dumps(described['provenance'], ensure_ascii=False)}")
    if objects:
        lines += [_object_line(row) for row in described["objects"]]
    return "\n".join(lines)


def _totals(described: dict[str, Any]) -> str:
    weights, tensor_bytes = described["weights"], described["tensor_bytes"]
    bits = 8 * tensor_bytes / max(weights, 1)
    return (
        f"{described['parameters']} parameters, {weights:,} weights, {tensor_bytes:,} bytes, {bits:.3f} bits per weight"
    )


def _object_line(row: dict[str, Any]) -> str:
    columns = row["shape"][-1] if len(row["shape"]) > 1 else 1
    lines = [
        f"{row['id']}  {row['format']}  {row['shape']}  {row['bytes']:,} bytes"
        + ("" if row["pieces"] else "  <- nothing")
    ]
    for piece in row["pieces"]:
        rows = f"[{piece['begin'] // columns}:{piece['end'] // columns}]"
        uses = ", ".join(f"{policy} with {name}" for name, policy in piece["uses"].items())
        lines.append(f"    {rows} {piece['name']}" + (f"  ({uses})" if uses else ""))
    return "\n".join(lines)
