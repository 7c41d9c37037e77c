"""A tiny writer of containers of versions 1 and 2, made of struct and json only, for tests to judge the library by."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

from artifact.tiny_files import BF_WORDS, NOTE, Q8_CODES, Q8_SCALES

MAGIC = {1: b"NINFER\0\1", 2: b"NINFER\0\2"}

OBJECTS: list[dict[str, Any]] = [
    {"name": "frontend/tokenizer.json", "kind": "resource", "encoding": "raw-bytes-v1", "offset": 0, "bytes": 5},
    {
        "name": "w/q8",
        "kind": "tensor",
        "shape": [4, 128],
        "format": "W8G32_F16S",
        "layout": "row-split-k128-v1",
        "offset": 512,
        "bytes": 544,
    },
    {
        "name": "w/bf",
        "kind": "tensor",
        "shape": [2, 3],
        "format": "BF16",
        "layout": "contiguous-le-v1",
        "offset": 1280,
        "bytes": 12,
    },
    {
        "name": "frontend/chat_template.jinja",
        "kind": "resource",
        "encoding": "raw-bytes-v1",
        "offset": 1292,
        "bytes": 1,
    },
]

IDENTITY = {"model_id": "tiny", "weights_id": "by-hand"}
ROOTS: dict[int, dict[str, Any]] = {
    1: {"model_id": "tiny", "objects": OBJECTS},
    2: {"identity": IDENTITY, "objects": OBJECTS},
}


def root(version: int) -> dict[str, Any]:
    """A fresh directory of `version`, to be edited."""
    return copy.deepcopy(ROOTS[version])


def payload() -> bytes:
    data = bytearray(1293)
    data[0:5] = NOTE
    data[512:1024] = Q8_CODES.tobytes()
    data[1024:1056] = Q8_SCALES.tobytes()
    data[1280:1292] = BF_WORDS.tobytes()
    data[1292:1293] = b"\n"
    return bytes(data)


def file_bytes(version: int, text: bytes, data: bytes) -> bytes:
    head = struct.pack("<8sQ", MAGIC[version], len(text)) + text
    return head + bytes(-len(head) % 4096) + data


def write(path: Path, version: int, value: Any = None, *, text: bytes | None = None, data: bytes | None = None) -> Path:
    """One file: `value` (the base directory by default) or raw JSON `text`, and the payload `data`."""
    if text is None:
        text = json.dumps(root(version) if value is None else value).encode()
    path.write_bytes(file_bytes(version, text, payload() if data is None else data))
    return path


def write_sparse(path: Path, identity: dict[str, str], objects: list[dict[str, Any]]) -> Path:
    """A version 2 file as long as its objects say, without a single payload byte on the disk."""
    text = json.dumps({"identity": identity, "objects": objects}).encode()
    head = file_bytes(2, text, b"")
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + objects[-1]["offset"] + objects[-1]["bytes"])
    return path


def place(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records with offsets: tensors at multiples of 256, resources anywhere."""
    end = 0
    for record in records:
        record["offset"] = -(-end // 256) * 256 if record["kind"] == "tensor" else end
        end = record["offset"] + record["bytes"]
    return records
