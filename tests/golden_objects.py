"""A second reader of single-file version 3 containers, for tests that judge what lies behind the container.

Written from spec/container.md 3, 4 and 5 alone and free of checks: it hands out each tensor object's bytes.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class StoredObject:
    """A tensor object's record and payload, as they lie in the file."""

    id: str
    shape: tuple[int, ...]
    format: str
    layout: str
    divisors: int
    payload: bytes

    @property
    def tensor(self) -> torch.Tensor:
        """The payload as a fresh uint8 vector."""
        return torch.frombuffer(bytearray(self.payload), dtype=torch.uint8)


def read_objects(path: Path) -> dict[str, StoredObject]:
    """The tensor objects of a container in one file, by id."""
    data = path.read_bytes()
    (json_bytes,) = struct.unpack_from("<Q", data, 8)
    directory = json.loads(data[32 : 32 + json_bytes])
    start = -(-(32 + json_bytes) // 4096) * 4096
    objects = {}
    for record in directory["objects"]:
        if record["kind"] == "tensor":
            begin = start + record["offset"]
            objects[record["id"]] = StoredObject(
                record["id"],
                tuple(record["shape"]),
                record["format"],
                record["layout"],
                record.get("divisors", 1),
                data[begin : begin + record["bytes"]],
            )
    return objects
