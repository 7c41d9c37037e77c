"""Nothing of the registry is missing anywhere: a new format fails here until it has every piece."""

from __future__ import annotations

from pathlib import Path

import pytest

from golden import golden
from ninfer_torch.formats import FORMATS, get_format
from ninfer_torch.kernels.packing import PACKERS, UNPACKERS
from ninfer_torch.kernels.reference import DECODERS
from ninfer_torch.layouts import LAYOUTS, layout_of
from ninfer_torch.tensors.packed import FAMILIES, PackedTensor

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_its_pieces(name: str) -> None:
    record = get_format(name)
    layout = layout_of(name)
    assert name in layout.formats and LAYOUTS[layout.name] is layout
    if record.quantized:
        assert callable(DECODERS[name])
        family = FAMILIES[record.family]
        assert issubclass(family, PackedTensor) and family.cut_columns is not PackedTensor.cut_columns
    if record.quantized and record.family != "gguf":  # blocks are words and planes at once
        assert layout.name in PACKERS and layout.name in UNPACKERS


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_golden_data(name: str) -> None:
    assert golden("ninfer", "formats", f"{name}.ninfer").stat().st_size > 0
    assert golden("ninfer", "formats", f"{name}.safetensors").stat().st_size > 0


def test_the_readme_has_a_row_for_every_format() -> None:
    section = README.read_text().split("\n## Formats\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip().strip("`") for line in section.splitlines() if line.startswith("| `")]
    assert rows == list(FORMATS)
