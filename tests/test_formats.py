"""The registry of numeric formats is closed, canonical and complete (spec/layouts.md 1, 3.1, 8)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from golden import golden
from ninfer_torch.errors import FormatError, NinferError
from ninfer_torch.formats import (
    FORMATS,
    BlockFloatFormat,
    DirectFormat,
    GgufFormat,
    GroupedFormat,
    RowFloatFormat,
    get_format,
)
from ninfer_torch.kernels.packing import PACKERS, UNPACKERS
from ninfer_torch.kernels.reference import DECODERS
from ninfer_torch.layouts import layout_of

DIRECT = {"bf16": torch.bfloat16, "fp32": torch.float32, "int32": torch.int32}

# name: bits, group, base bytes, high bytes, lowest and highest legal code, word of code 0
GROUPED = {
    "q2_g64_fp16": (2, 64, 16, 0, -1, 2, 1),
    "q4_g64_fp16": (4, 64, 32, 0, -8, 7, 0),
    "q5_g64_fp16": (5, 64, 32, 8, -16, 15, 0),
    "q6_g64_fp16": (6, 64, 32, 16, -32, 31, 0),
    "q8_g32_fp16": (8, 32, 32, 0, -127, 127, 0),
    "t2_g128_fp16": (2, 128, 32, 0, -1, 1, 0),
}

ROW_FLOAT = {"fp8_e4m3fn_row_bf16": torch.bfloat16, "fp8_e4m3fn_row_fp16": torch.float16}

# name: ggml type, values and bytes per block, bits per weight
GGUF = {
    "gguf_q4_0": (2, 32, 18, 4.5),
    "gguf_q5_0": (6, 32, 22, 5.5),
    "gguf_q8_0": (8, 32, 34, 8.5),
    "gguf_q2_k": (10, 256, 84, 2.625),
    "gguf_q3_k": (11, 256, 110, 3.4375),
    "gguf_q4_k": (12, 256, 144, 4.5),
    "gguf_q5_k": (13, 256, 176, 5.5),
    "gguf_q6_k": (14, 256, 210, 6.5625),
    "gguf_iq2_xxs": (16, 256, 66, 2.0625),
    "gguf_iq2_xs": (17, 256, 74, 2.3125),
    "gguf_iq3_xxs": (18, 256, 98, 3.0625),
    "gguf_iq1_s": (19, 256, 50, 1.5625),
    "gguf_iq4_nl": (20, 32, 18, 4.5),
    "gguf_iq3_s": (21, 256, 110, 3.4375),
    "gguf_iq2_s": (22, 256, 82, 2.5625),
    "gguf_iq4_xs": (23, 256, 136, 4.25),
    "gguf_iq1_m": (29, 256, 56, 1.75),
    "gguf_q2_0": (42, 64, 18, 2.25),
}


def test_the_registry_holds_exactly_the_thirty_formats() -> None:
    expected = {*DIRECT, *GROUPED, "nvfp4", *ROW_FLOAT, *GGUF}
    assert len(expected) == 30
    assert set(FORMATS) == expected
    assert {name for name, record in FORMATS.items() if not record.quantized} == set(DIRECT)


@pytest.mark.parametrize("name", FORMATS)
def test_a_name_and_its_record_stand_for_each_other(name: str) -> None:
    record = get_format(name)
    assert record.name == name
    assert get_format(record) is record
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "name", ["BF16", "fp16", "q4", "Q4G64_F16S", "q4_g64_fp16 ", "gguf_q4_1", "nvfp4\0", "", None, 4, []]
)
def test_other_names_are_refused_with_the_known_ones(name: object) -> None:
    with pytest.raises(FormatError) as caught:
        get_format(name)  # type: ignore[arg-type]
    assert isinstance(caught.value, NinferError)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in FORMATS)


def test_the_registry_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        FORMATS["q3"] = FORMATS["bf16"]  # type: ignore[index]


@pytest.mark.parametrize("name", DIRECT)
def test_direct_formats(name: str) -> None:
    record = get_format(name)
    assert isinstance(record, DirectFormat) and record.family == "direct"
    assert record.dtype == DIRECT[name]


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_formats(name: str) -> None:
    record = get_format(name)
    assert isinstance(record, GroupedFormat) and record.family == "grouped"
    found = (
        record.bits,
        record.group,
        record.base_bytes,
        record.high_bytes,
        record.code_min,
        record.code_max,
        record.bias,
    )
    assert found == GROUPED[name]
    assert record.free_zero_scale == (name == "q2_g64_fp16")


def test_float_formats() -> None:
    block = get_format("nvfp4")
    assert isinstance(block, BlockFloatFormat) and block.family == "block_float" and block.group == 16
    for name, dtype in ROW_FLOAT.items():
        row = get_format(name)
        assert isinstance(row, RowFloatFormat) and row.family == "row_float" and row.scale_dtype == dtype


@pytest.mark.parametrize("name", GGUF)
def test_gguf_formats(name: str) -> None:
    record = get_format(name)
    assert isinstance(record, GgufFormat) and record.family == "gguf"
    bits_per_weight = record.block_bytes * 8 / record.block_values
    assert (record.ggml_type, record.block_values, record.block_bytes, bits_per_weight) == GGUF[name]


def test_every_quantized_format_has_a_decoder_and_every_one_with_codes_a_packer() -> None:
    assert set(DECODERS) == {*GROUPED, "nvfp4", *ROW_FLOAT, *GGUF}
    with_codes = {name for name in FORMATS if layout_of(name).name in PACKERS}
    assert with_codes == {*GROUPED, "nvfp4", *ROW_FLOAT}
    assert set(PACKERS) == set(UNPACKERS)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_golden_data(name: str) -> None:
    assert golden("ninfer", "formats", f"{name}.ninfer").stat().st_size > 0
    assert golden("ninfer", "formats", f"{name}.safetensors").stat().st_size > 0
