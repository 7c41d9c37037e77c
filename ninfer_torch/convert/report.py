"""What a conversion did, tensor by tensor."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ninfer_torch.convert.source import UnusedTensor
from ninfer_torch.formats import get_format

__all__ = ["Report", "ResourceEntry", "TensorEntry"]


@dataclass(frozen=True)
class TensorEntry:
    """One stored object: the parameters bound to it, where it came from, what it became. `bytes` is its complete
    encoded size.
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

    @property
    def weights(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ResourceEntry:
    """One stored small file."""

    name: str
    object: str
    bytes: int


@dataclass(frozen=True)
class Report:
    """A finished conversion. Everything but the artifact id repeats when the conversion is repeated."""

    artifact: str
    artifact_id: str
    name: str
    preset: str
    architecture: str
    provenance: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]
    resources: tuple[ResourceEntry, ...]
    unused: tuple[UnusedTensor, ...]

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
        """The report as JSON-serialisable values, totals included."""
        totals = {
            "tensors": len(self.tensors),
            "weights": self.weights,
            "bytes": self.tensor_bytes,
            "resource_bytes": sum(resource.bytes for resource in self.resources),
            "bits_per_weight": self.bits_per_weight,
            "formats": self.format_counts(),
            "fallbacks": [entry.parameters[0] for entry in self.fallbacks],
        }
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "tensors": [dataclasses.asdict(entry) for entry in self.tensors],
            "resources": [dataclasses.asdict(resource) for resource in self.resources],
            "unused": [tensor._asdict() for tensor in self.unused],
            "totals": totals,
        }

    def to_json(self) -> str:
        """The report as indented JSON text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False)

    def summary(self) -> str:
        """A few lines: what was made, of what, how large, and whatever needs a look."""
        quantized = [entry for entry in self.tensors if get_format(entry.format).quantized]
        lines = [
            f"{self.artifact}: {self.architecture} {self.name!r}, preset {self.preset}",
            f"{len(self.tensors)} tensors ({len(quantized)} quantized), {self.weights:,} weights",
            f"{self.tensor_bytes:,} bytes, {self.bits_per_weight:.3f} bits per weight",
            "formats: " + ", ".join(f"{name} x {count}" for name, count in self.format_counts().items()),
        ]
        if self.fallbacks:
            lines.append(f"{len(self.fallbacks)} tensors could not keep their block type:")
            lines += [f"  {entry.parameters[0]}: {entry.note}" for entry in self.fallbacks]
        if self.unused:
            lines.append(f"{len(self.unused)} source tensors are not used:")
            lines += [f"  {tensor.name}: {tensor.reason}" for tensor in self.unused]
        return "\n".join(lines)

    def table(self) -> str:
        """Every tensor as one row of a text table, under the summary."""
        header = ("parameter", "shape", "source", "format", "method", "bytes", "note")
        rows = [header, *(_row(entry) for entry in self.tensors)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.summary(), "", *lines])


def _row(entry: TensorEntry) -> tuple[str, ...]:
    names = " = ".join(entry.parameters)
    shape = "x".join(map(str, entry.shape)) or "scalar"
    return names, shape, entry.encoding, entry.format, entry.method, f"{entry.bytes:,}", entry.note
