"""What decides the bytes of a conversion, as one fingerprint: an unfinished one is continued only under the same."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ninfer_torch.convert.planning import ConversionPlan

__all__ = ["fingerprint"]


def fingerprint(plan: ConversionPlan, paths: Iterable[str | os.PathLike[str]], limit: int | None) -> str:
    """A SHA-256 over the plan, the method arguments, the sources' files (name, size, time of change) and the file limit.

    `paths` are the sources' files or folders, and the recipe's, where they have any.
    """
    digest = hashlib.sha256()
    uses = [dataclasses.asdict(use) for use in plan.uses]
    components = {name: [dict(c.config), c.target, dict(c.resources)] for name, c in plan.components.items()}
    described = [plan.outline.to_dict(), components, dict(plan.bindings), uses, limit]
    digest.update(json.dumps(described, sort_keys=True).encode())
    for task in plan.tasks:
        for name, value in task.arguments.items():
            digest.update(f"{task.object_id} {name} ".encode())
            digest.update(_argument_bytes(value))
    for line in _files(paths):
        digest.update(line.encode())
    for name, data in plan.resources.items():
        digest.update(name.encode() + data)
    return digest.hexdigest()


def _argument_bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return value.contiguous().view(torch.uint8).numpy().tobytes()
    return json.dumps(value, sort_keys=True).encode()


def _files(paths: Iterable[str | os.PathLike[str]]) -> Iterator[str]:
    for path in map(Path, paths):
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.is_file():
                state = file.stat()
                yield f"{file.name} {state.st_size} {state.st_mtime_ns}\n"
