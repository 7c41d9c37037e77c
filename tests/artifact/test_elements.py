"""Reading a range of a direct object's elements, without mapping the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from artifact import tiny_files
from ninfer_torch.artifact import open_artifact
from ninfer_torch.errors import ArtifactError, UnsupportedOperation


@pytest.mark.parametrize("begin, end", [(0, 6), (1, 4), (5, 6), (3, 3)])
def test_elements_are_the_words_of_the_range(tmp_path: Path, begin: int, end: int) -> None:
    artifact = open_artifact(tiny_files.write(tmp_path / "tiny.ninfer"))
    found = artifact.read_elements("w.bf", begin, end)
    assert found.dtype == torch.bfloat16
    assert np.array_equal(found.view(torch.uint16).numpy(), tiny_files.BF_WORDS.reshape(-1)[begin:end])


@pytest.mark.parametrize("sizes", [[1025, 259], [4, 1020, 2, 3, 255]])
def test_elements_across_files(tmp_path: Path, sizes: list[int]) -> None:
    artifact = open_artifact(tiny_files.write_set(tmp_path / "tiny.ninfer", sizes))
    found = artifact.read_elements("w.bf", 0, 6)
    assert np.array_equal(found.view(torch.uint16).numpy(), tiny_files.BF_WORDS.reshape(-1))


def test_a_scalar_is_one_element(tmp_path: Path) -> None:
    artifact = open_artifact(tiny_files.write(tmp_path / "tiny.ninfer"))
    assert artifact.read_elements("w.s", 0, 1).tolist() == [2.5]


def test_what_has_no_such_elements_is_refused(tmp_path: Path) -> None:
    artifact = open_artifact(tiny_files.write(tmp_path / "tiny.ninfer"))
    with pytest.raises(ArtifactError, match=r"elements \[0, 6\), not \[2, 7\)") as error:
        artifact.read_elements("w.bf", 2, 7)
    assert error.value.kind == "range"
    with pytest.raises(UnsupportedOperation, match="q8_g32_fp16 has no elements to read one by one; slice rows"):
        artifact.read_elements("w.q8", 0, 4)
    with pytest.raises(ArtifactError, match="is a resource, expected a tensor"):
        artifact.read_elements("r.note", 0, 1)
