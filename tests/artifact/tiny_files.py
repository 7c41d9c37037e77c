"""A second, tiny writer of containers, made of struct and json only, for tests to judge the library by."""

from __future__ import annotations

import copy
import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

ARTIFACT_ID = bytes(range(16))

NOTE = b"hello"
Q8_CODES = (np.arange(4 * 128).reshape(4, 128) % 255 - 127).astype(np.int8)
Q8_SCALES = (np.arange(16).reshape(4, 4) / 16 + 0.25).astype(np.float16)
Q8_VALUES = np.repeat(Q8_SCALES.astype(np.float32), 32, axis=1) * Q8_CODES.astype(np.float32)
BF_WORDS = np.array([[0x3F80, 0x8000, 0x7FC1], [0x0001, 0xFF80, 0x4049]], dtype=np.uint16)
SCALAR = np.array(2.5, dtype=np.float32)

OBJECTS: list[dict[str, Any]] = [
    {"id": "r.note", "encoding": "raw_bytes_v1", "offset": 0, "bytes": 5, "kind": "resource"},
    {
        "id": "w.q8",
        "shape": [4, 128],
        "format": "q8_g32_fp16",
        "layout": "row_split_k128_v1",
        "offset": 256,
        "bytes": 544,
        "kind": "tensor",
    },
    {
        "id": "w.bf",
        "shape": [2, 3],
        "format": "bf16",
        "layout": "contiguous_le_v1",
        "offset": 1024,
        "bytes": 12,
        "kind": "tensor",
    },
    {
        "id": "w.s",
        "shape": [],
        "format": "fp32",
        "layout": "contiguous_le_v1",
        "offset": 1280,
        "bytes": 4,
        "kind": "tensor",
    },
]

DIRECTORY: dict[str, Any] = {
    "components": {"text": {"config": {"hidden_size": 128, "eps": 1e-6}, "resources": {"note": "r.note"}}},
    "objects": OBJECTS,
    "bindings": {
        "text/q8": {"object": "w.q8"},
        "text/rows": {"parts": [{"object": "w.q8", "range": [128, 384]}]},
        "text/bf": {"object": "w.bf"},
        "text/last": {"parts": [{"object": "w.bf", "range": [5, 6]}, {"object": "w.bf", "range": [0, 2]}]},
    },
    "uses": [
        {
            "parameter": "text/q8",
            "input": "text/x",
            "activation_policy": "AllowA8",
            "auxiliaries": {"activation_input_divisor": {"object": "w.s"}},
        }
    ],
    "metadata": {"name": "tiny"},
    "provenance": {"source": "made by hand"},
    "files": [{"path": None, "payload_bytes": 1284}],
}


def directory() -> dict[str, Any]:
    """A fresh copy of the base directory, to be edited."""
    return copy.deepcopy(DIRECTORY)


def payload() -> bytes:
    data = bytearray(1284)
    data[0:5] = NOTE
    data[256:768] = Q8_CODES.tobytes()
    data[768:800] = Q8_SCALES.tobytes()
    data[1024:1036] = BF_WORDS.tobytes()
    data[1280:1284] = SCALAR.tobytes()
    return bytes(data)


def json_text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def entry_bytes(text: bytes, segment: bytes, artifact_id: bytes = ARTIFACT_ID, magic: bytes = b"NINFER\0\3") -> bytes:
    start = math.ceil((32 + len(text)) / 4096) * 4096
    return (struct.pack("<8sQ16s", magic, len(text), artifact_id) + text).ljust(start, b"\0") + segment


def part_bytes(index: int, segment: bytes, artifact_id: bytes = ARTIFACT_ID, magic: bytes = b"NINPRT\0\3") -> bytes:
    return struct.pack("<8sQ16s", magic, index, artifact_id).ljust(4096, b"\0") + segment


def write(path: Path, value: Any = None, *, text: bytes | None = None, data: bytes | None = None) -> Path:
    """One file: `value` (the base directory by default) or raw JSON `text`, and the payload `data`."""
    path.write_bytes(
        entry_bytes(json_text(directory() if value is None else value) if text is None else text, data or payload())
    )
    return path


def write_set(path: Path, sizes: list[int], names: list[str] | None = None) -> Path:
    """The base artifact cut into segments of `sizes`; parts are called `names`."""
    names = names or [f"{path.name}.p{index}" for index in range(1, len(sizes))]
    value = directory()
    value["files"] = [{"path": name, "payload_bytes": size} for name, size in zip([None, *names], sizes, strict=True)]
    ends = np.cumsum(sizes).tolist()
    segments = [payload()[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    path.write_bytes(entry_bytes(json_text(value), segments[0]))
    for index, (name, segment) in enumerate(zip(names, segments[1:], strict=True), start=1):
        (path.parent / name).write_bytes(part_bytes(index, segment))
    return path


def parse(path: Path) -> tuple[dict[str, Any], bytes, bytes]:
    """Directory, logical payload and artifact id of a set, with every length checked by hand."""
    blob = path.read_bytes()
    magic, size, artifact_id = struct.unpack("<8sQ16s", blob[:32])
    assert magic == b"NINFER\0\3"
    value = json.loads(blob[32 : 32 + size])
    start = (32 + size + 4095) // 4096 * 4096
    whole = blob[start:]
    assert len(whole) == value["files"][0]["payload_bytes"]
    for index, record in enumerate(value["files"][1:], start=1):
        part = (path.parent / record["path"]).read_bytes()
        assert struct.unpack("<8sQ16s", part[:32]) == (b"NINPRT\0\3", index, artifact_id)
        assert part[32:4096] == bytes(4064) and len(part) == 4096 + record["payload_bytes"]
        whole += part[4096:]
    return value, whole, artifact_id
