"""Artifacts of the published sizes, with a payload of holes: opened and bound in seconds, no weight read."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import official_models
import official_names
from ninfer_torch.artifact import open_artifact
from ninfer_torch.artifact.legacy_models import PUBLISHED
from ninfer_transformers.binding import bind_parameters


@pytest.fixture(autouse=True)
def overlay_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NINFER_TORCH_CACHE", str(tmp_path / "cache"))


def sparse_directory(model_id: str, drafts: bool) -> official_models.Directory:
    """The directory of a published model by the groupwise recipe: real shapes, and a payload of holes."""
    published = PUBLISHED[model_id, "groupwise-int"]
    keep = {name: dict(c) for name, c in published.configs.items() if drafts or "dflash" not in name}
    moe = "num_experts" in keep["text"]
    formats = (*official_models.TEXT_FORMATS, ("", "q8_g32_fp16" if moe else "q4_g64_fp16"))
    recipe = official_models.Recipe(formats, official_models.PAIRS, official_models.ONE_BANK)
    known = official_names.parameters(keep, published.proposal_rows)
    directory = official_models.new_directory(keep)
    for members in official_models.objects(known, recipe):
        shapes, inputs = [known[name][0] for name in members], known[members[0]][1]
        format = "int32" if members[0] == "proposal/token_ids" else recipe.format_of(members[0], inputs)
        shape = shapes[0] if len(members) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
        object_id = directory.add(f"weight/{len(directory.objects):06d}", format, shape)
        begin = 0
        for name, member in zip(members, shapes, strict=True):
            end = begin + int(np.prod(member))
            part = {"parts": [{"object": object_id, "range": [begin, end]}]}
            directory.bindings[name] = {"object": object_id} if len(members) == 1 else part
            begin = end
            directory.uses += [{"parameter": name, "input": i, "activation_policy": "A16Only"} for i in known[name][1]]
    return directory


def resident_kilobytes(path: Path) -> int:
    """Resident memory of this process's mappings of a file."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps")
@pytest.mark.parametrize(
    "model_id, drafts, parameters",
    [("qwen3.6-27b", False, 1422), ("qwen3.6-27b", True, 1513), ("qwen3.6-35b-a3b", True, 32713)],
)
def test_published_sizes_open_and_bind_without_reading_weights(
    model_id: str, drafts: bool, parameters: int, tmp_path: Path
) -> None:
    path = sparse_directory(model_id, drafts).write(tmp_path / "large.ninfer")
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    began = time.process_time()  # not of the machine, which other tests may share
    with open_artifact(path) as artifact:
        assert len(artifact.bindings) == parameters
        bound = bind_parameters(model, artifact)
        tensors = {name: b.read(artifact) for name, b in bound.items() if b.assembly.quantized}
    elapsed = time.process_time() - began
    assert elapsed < 10, f"{elapsed:.1f} s"
    assert bound.keys() == set(model.state_dict())
    assert len(tensors) > 400 and sum(t.nbytes for t in tensors.values()) > 1e10
    assert resident_kilobytes(path) == 0
