"""Broken and odd containers made by another tool: each behaves as its index says, at its stage and at bounded cost."""

from __future__ import annotations

import resource
import time
import tracemalloc
from typing import Any

import pytest
import torch

from golden import GOLDEN, golden, load_json
from ninfer_torch.artifact import Artifact, TensorObject, open_artifact
from ninfer_torch.errors import ArtifactError
from ninfer_torch.tensors import NinferTensor

INDEX = GOLDEN / "ninfer" / "malformed" / "index.json"
CASES: list[dict[str, Any]] = load_json(INDEX)["cases"] if INDEX.exists() else []

# The index follows an older wording of the container text; an artifact without `text` opens (spec/container.md 14).
OPENS_AFTER_ALL = {"components_without_text"}

# The index speaks for readers of version 3 alone. Here version 2 is known, and its header leaves no legal JSON text.
KINDS = {"magic_version2": "json"}


def cases(expected: str) -> Any:
    found: list[Any] = [case for case in CASES if case["expected"] == expected]
    return pytest.mark.parametrize("case", found or [None], ids=[case["name"] for case in found] or ["absent"])


def open_case(case: dict[str, Any] | None) -> Artifact:
    folder = golden("ninfer", "malformed")
    assert case is not None
    return open_artifact(folder / case["files"][0])


def read(artifact: Artifact, object_id: str, check: bool = True) -> None:
    """Everything a reader can ask of one object."""
    if isinstance(artifact.objects[object_id], TensorObject):
        tensor = artifact.tensor(object_id)
        (tensor.dequantize() if isinstance(tensor, NinferTensor) else tensor).sum()
    else:
        artifact.resource(object_id)
    artifact.read_object(object_id, check=check)


@cases("reject")
def test_rejected_at_its_stage_with_its_kind(case: dict[str, Any] | None) -> None:
    golden("ninfer", "malformed")
    assert case is not None
    if case["name"] in OPENS_AFTER_ALL:
        assert "text" not in open_case(case).components
        return
    if case["stage"] == "open":
        with pytest.raises(ArtifactError) as caught:
            open_case(case)
        assert caught.value.kind == KINDS.get(case["name"], case["kind"]), str(caught.value)
        assert case["files"][0] in str(caught.value)
        return
    artifact = open_case(case)
    broken = set(case["ninfer_reader"]["at_objects"])
    for object_id in artifact.objects:
        if object_id not in broken:
            read(artifact, object_id)
            continue
        is_tensor = isinstance(artifact.objects[object_id], TensorObject)
        for ask in (artifact.tensor if is_tensor else artifact.resource, artifact.read_object):
            with pytest.raises(ArtifactError) as caught:
                ask(object_id)
            assert caught.value.kind == case["kind"], str(caught.value)
            assert object_id in str(caught.value) or case["stage"] == "part"


@cases("accept")
def test_accepted_and_readable(case: dict[str, Any] | None) -> None:
    artifact = open_case(case)
    assert case is not None
    unreadable = set(case["ninfer_reader"].get("at_objects", ()))
    assert (artifact.objects.keys() > unreadable) or not unreadable
    for object_id in artifact.objects:
        if object_id in unreadable:
            with pytest.raises(ArtifactError):
                artifact.read_object(object_id)
        else:
            read(artifact, object_id)
    for name, binding in artifact.bindings.items():
        if not unreadable.intersection(binding.objects):
            artifact.dequantize_parameter(name)


@cases("illegal_values")
def test_illegal_words_decode_and_fail_the_check(case: dict[str, Any] | None) -> None:
    artifact = open_case(case)
    assert case is not None
    failed = []
    for object_id in artifact.objects:
        read(artifact, object_id, check=False)
        try:
            artifact.read_object(object_id, check=True)
        except ArtifactError as error:
            assert error.kind == "value" and object_id in str(error) and case["files"][0] in str(error)
            failed.append(object_id)
    assert len(failed) == 1
    assert set(case["ninfer_reader"].get("at_decode", failed)) == set(failed)


def test_no_case_hangs_or_allocates_much() -> None:
    golden("ninfer", "malformed")
    torch.empty(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for case in CASES:
        tracemalloc.start()
        started = time.perf_counter()
        try:
            artifact = open_case(case)
            for object_id in artifact.objects:
                artifact.read_object(object_id)
        except ArtifactError:
            pass
        elapsed, peak = time.perf_counter() - started, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert elapsed < 5 and peak < 1 << 26, case["name"]
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 1 << 26
