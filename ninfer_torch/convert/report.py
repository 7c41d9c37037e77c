"""What a conversion will do, or did, tensor by tensor."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ninfer_torch.artifact.schema import FileRecord
from ninfer_torch.convert.source import UnusedTensor
from ninfer_torch.formats import get_format
from ninfer_torch.layouts import layout_of

__all__ = ["Outline", "Report", "ResourceEntry", "TensorEntry", "report_path"]


def report_path(artifact: Path) -> Path:
    """Where the report of an artifact lies: beside it (spec/conversion.md 9)."""
    return artifact.with_name(f"{artifact.name}.conversion.json")


@dataclass(frozen=True)
class TensorEntry:
    """One stored object: the parameters bound to it, where it came from, what it became. `bytes` is its complete
    encoded size; `reason` says why weights that look quantizable stay direct.
    """

    parameters: tuple[str, ...]
    object: str
    shape: tuple[int, ...]
    source: str
    encoding: str
    format: str
    method: str
    bytes: int
    note: str = ""
    fallback: bool = False
    reason: str = ""
    method_parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def weights(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def layout(self) -> str:
        """Storage layout of the object."""
        return layout_of(self.format).name

    def to_dict(self) -> dict[str, Any]:
        """The entry as JSON-serialisable values."""
        members = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {**members, "method_parameters": dict(self.method_parameters), "layout": self.layout}


@dataclass(frozen=True)
class ResourceEntry:
    """One stored small file."""

    name: str
    object: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Everything about a conversion that is known before it writes.

    `preset` names the preset or recipe file, `settings` the overrides of a command line, `uses` counts the uses.
    """

    name: str
    preset: str
    architecture: str
    provenance: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]
    resources: tuple[ResourceEntry, ...]
    unused: tuple[UnusedTensor, ...]
    uses: int = 0
    settings: tuple[str, ...] = ()

    @property
    def weights(self) -> int:
        """Elements of all stored tensors; tied weights count once."""
        return sum(entry.weights for entry in self.tensors)

    @property
    def tensor_bytes(self) -> int:
        """Encoded bytes of all stored tensors."""
        return sum(entry.bytes for entry in self.tensors)

    @property
    def bits_per_weight(self) -> float:
        """Encoded bits per element over all tensors, scales and padding included."""
        return 8 * self.tensor_bytes / self.weights

    @property
    def fallbacks(self) -> tuple[TensorEntry, ...]:
        """Tensors whose block type could not be kept."""
        return tuple(entry for entry in self.tensors if entry.fallback)

    def format_counts(self) -> dict[str, int]:
        """Number of tensors per format, in the order of the registry's first use."""
        counts: dict[str, int] = {}
        for entry in self.tensors:
            counts[entry.format] = counts.get(entry.format, 0) + 1
        return counts

    def to_dict(self) -> dict[str, Any]:
        """The outline as JSON-serialisable values, totals included."""
        totals = {
            "tensors": len(self.tensors),
            "parameters": len({name for entry in self.tensors for name in entry.parameters}),
            "uses": self.uses,
            "objects": len(self.tensors) + len(self.resources),
            "weights": self.weights,
            "bytes": self.tensor_bytes,
            "resource_bytes": sum(resource.bytes for resource in self.resources),
            "bits_per_weight": self.bits_per_weight,
            "formats": self.format_counts(),
            "fallbacks": [entry.parameters[0] for entry in self.fallbacks],
        }
        return {
            **{item.name: getattr(self, item.name) for item in dataclasses.fields(self)},
            "tensors": [entry.to_dict() for entry in self.tensors],
            "resources": [dataclasses.asdict(resource) for resource in self.resources],
            "unused": [tensor._asdict() for tensor in self.unused],
            "totals": totals,
        }

    def to_json(self) -> str:
        """The same as indented JSON text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def title(self) -> str:
        """One line: what is made of what."""
        return f"{self.architecture} {self.name!r}, {' '.join([self.preset, *self.settings])}"

    def summary(self) -> str:
        """A few lines: what is made, of what, how large, and whatever needs a look."""
        quantized = [entry for entry in self.tensors if get_format(entry.format).quantized]
        lines = [
            self.title(),
            f"{len(self.tensors)} tensors ({len(quantized)} quantized), {self.weights:,} weights",
            f"{self.tensor_bytes:,} bytes, {self.bits_per_weight:.3f} bits per weight",
            "formats: " + ", ".join(f"{name} x {count}" for name, count in self.format_counts().items()),
        ]
        if self.fallbacks:
            share = sum(entry.weights for entry in self.fallbacks) / self.weights
            lines.append(f"{len(self.fallbacks)} tensors ({share:.1%} of the weights) could not keep their block type:")
            lines += [f"  {entry.parameters[0]}: {entry.note}" for entry in self.fallbacks]
        for reason in dict.fromkeys(entry.reason for entry in self.tensors if entry.reason):
            kept = [entry for entry in self.tensors if entry.reason == reason]
            share = sum(entry.weights for entry in kept) / self.weights
            lines.append(f"{len(kept)} tensors ({share:.1%} of the weights) stay direct: {reason}")
        if self.unused:
            lines.append(f"{len(self.unused)} source tensors are not used:")
            lines += [f"  {tensor.name}: {tensor.reason}" for tensor in self.unused]
        return "\n".join(lines)

    def table(self) -> str:
        """Every tensor as one row of a text table, under the summary."""
        header = ("parameter", "shape", "source", "format", "method", "bytes", "bits", "note")
        rows = [header, *(_row(entry) for entry in self.tensors)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.summary(), "", *lines])


@dataclass(frozen=True, kw_only=True)
class Report(Outline):
    """A finished conversion. Everything but the artifact id and the seconds repeats when the conversion is repeated."""

    artifact: str
    artifact_id: str
    payload_bytes: int = 0
    files: tuple[FileRecord, ...] = ()
    seconds: float = 0.0

    def title(self) -> str:
        return f"{self.artifact}: {super().title()}"

    def to_dict(self) -> dict[str, Any]:
        files = [{"path": file.path or self.artifact, "payload_bytes": file.payload_bytes} for file in self.files]
        return {
            **super().to_dict(),
            "files": files,
            "components": ["text"],
            "device": "cpu",
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        }

    def write(self, path: Path) -> None:
        """Put the report as JSON at `path`, whole or not at all; a report of an earlier artifact gives way."""
        temporary = path.with_name(f".ninfer-{uuid.uuid4().hex}-report.tmp")
        try:
            temporary.write_text(self.to_json(), encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _row(entry: TensorEntry) -> tuple[str, ...]:
    names = " = ".join(entry.parameters)
    shape = "x".join(map(str, entry.shape)) or "scalar"
    arguments = ",".join(f"{name}={value}" for name, value in entry.method_parameters.items())
    method = f"{entry.method}:{arguments}" if arguments else entry.method
    bits = f"{8 * entry.bytes / entry.weights:.2f}"
    note = "; ".join(filter(None, (entry.note, entry.reason)))
    return names, shape, entry.encoding, entry.format, method, f"{entry.bytes:,}", bits, note
