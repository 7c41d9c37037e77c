"""import_encoded: words of other files become planes, byte for byte, or are refused by tensor, row and group."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exact import assert_same_words
from golden import golden, load_json, load_tensors
from ninfer_torch.artifact import open_artifact
from ninfer_torch.convert.encoded import IMPORTERS, import_encoded, import_rows, stack_rows
from ninfer_torch.convert.gguf_file import GgufFile
from ninfer_torch.convert.methods import METHODS, quantize
from ninfer_torch.convert.source import EncodedRows
from ninfer_torch.errors import ConversionError
from ninfer_torch.formats import FORMATS, GgufFormat, get_format
from ninfer_torch.kernels.checks import check_payload
from ninfer_torch.tensors import encode
from quantized import random_weight

GGUF = tuple(name for name, record in FORMATS.items() if isinstance(record, GgufFormat))
FP8 = "fp8_e4m3fn_row_bf16"


def payload(weight: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(encode(weight)), dtype=torch.uint8)


# --- golden objects --------------------------------------------------------------------------------------------------


def golden_sources() -> dict[str, EncodedRows]:
    """The checkpoint tensors and blocks behind import.ninfer, read as spec/conversion.md 6 says, without the library."""
    stored = load_tensors(golden("ninfer", "import", "source.safetensors"))
    expected = load_tensors(golden("ninfer", "import", "import.safetensors"))
    rows: dict[str, EncodedRows] = {}
    for key, tensor in stored.items():
        name, _, part = key.rpartition(".")
        scales = stored.get(f"{name}.weight_scale")
        if part == "weight_packed":
            words = (tensor, scales.view(torch.uint8))
            rows[f"test/{name}"] = EncodedRows("nvfp4", words, stored[f"{name}.weight_global_scale"], name)
        elif part == "weight" and tensor.dtype == torch.uint8:
            divisor = np.float32(1.0 / float(stored[f"{name}.weight_scale_2"]))
            words = (tensor, scales.view(torch.uint8))
            rows[f"test/{name}"] = EncodedRows("nvfp4", words, torch.tensor([divisor]), name)
        elif part == "weight":
            per_row = scales.flatten().expand(len(tensor)).to(torch.bfloat16)
            rows[f"test/{name}"] = EncodedRows(FP8, (tensor.view(torch.uint8), per_row), None, name)
    for key, tensor in expected.items():
        if key.endswith(".source_blocks"):
            name = key.removesuffix(".source_blocks")
            rows[name] = EncodedRows("gguf_q2_0" if "q2" in name else "gguf_q8_0", (tensor,), None, name)
    return rows


def test_golden_imports_are_reproduced() -> None:
    """Every object of the golden artifact, byte for byte, with one or several sources and divisors."""
    sources = golden_sources()
    index = load_json(golden("ninfer", "import", "index.json"))
    artifact = open_artifact(golden("ninfer", "import", "import.ninfer"))
    several = 0
    for record in index["objects"]:
        parts = [sources.pop(name) for name in record["parameters"]]
        weight = import_encoded(parts if len(parts) > 1 else parts[0], record["format"])
        assert tuple(weight.shape) == tuple(record["shape"])
        data = encode(weight)
        assert data == artifact.read_object(record["object"]), record["parameters"]
        check_payload(
            record["format"], weight.shape, payload(weight), index["divisors"].get(record["object"], 1), "object"
        )
        several += len(parts) > 1
    assert several == 2 and not sources


def test_golden_values() -> None:
    """Imported words decode to what the other tools decode the sources to."""
    expected = load_tensors(golden("ninfer", "import", "import.safetensors"))
    for name, rows in golden_sources().items():
        target = {"gguf_q2_0": "q2_g64_fp16", "gguf_q8_0": "q8_g32_fp16"}.get(rows.encoding, rows.encoding)
        assert_same_words(import_encoded(rows, target).dequantize(), expected[name])


def ternary_file(name: str) -> dict[str, EncodedRows]:
    file = GgufFile(golden("gguf", name))
    return {
        key: EncodedRows(tensor.type.name, (torch.from_numpy(file.rows(tensor).copy()),), None, key)
        for key, tensor in file.tensors.items()
        if tensor.type.number in (142, 143)
    }


def test_golden_ternary_blocks_become_t2_planes() -> None:
    expected = load_tensors(golden("gguf", "ternary_142_143.safetensors"))
    tensors = ternary_file("ternary_142_143.gguf")
    assert {rows.encoding for rows in tensors.values()} == {"pq2_0", "ptq1_0"} and len(tensors) == 9
    for name, rows in tensors.items():
        weight = import_encoded(rows, "t2_g128_fp16")
        # A code 0 has no sign, so that zeros are compared as numbers.
        assert torch.equal(weight.dequantize(), expected[name]), name
    for name in (key for key in tensors if key.endswith(".pq2_0")):
        twin = tensors[name.removesuffix(".pq2_0") + ".ptq1_0"]
        assert encode(import_encoded(tensors[name], "t2_g128_fp16")) == encode(import_encoded(twin, "t2_g128_fp16"))


def test_golden_code_three_is_refused() -> None:
    (rows,) = ternary_file("ternary_142_code3.gguf").values()
    with pytest.raises(ConversionError, match="tensor 'bad.pq2_0', row 1, group 1, lane 22: 0x03 is code 3"):
        import_encoded(rows, "t2_g128_fp16")


# --- GGUF blocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GGUF)
def test_blocks_of_the_same_format_move_whole(name: str) -> None:
    record = get_format(name)
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 2 * record.block_bytes), dtype=torch.uint8, generator=generator)
    for source in (blocks, EncodedRows(name, (blocks,))):
        imported = import_encoded(source, name)
        assert imported.shape == (3, 2 * record.block_values) and imported.format == name
        assert encode(imported) == blocks.numpy().tobytes()


def half_blocks(scales: list[list[float]], code_bytes: int, seed: int) -> torch.Tensor:
    """Blocks that begin with a binary16 scale, [rows, groups * (2 + code bytes)], with codes of any value."""
    rng = np.random.default_rng(seed)
    words = np.array(scales, dtype="<f2").view(np.uint8).reshape(len(scales), len(scales[0]), 2)
    codes = rng.integers(0, 256, (*words.shape[:2], code_bytes), dtype=np.uint8)
    return torch.from_numpy(np.concatenate([words, codes], axis=2).reshape(len(scales), -1))


FINITE_HALVES = st.floats(width=16, allow_nan=False, allow_infinity=False)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**31), st.data())
def test_q2_words_decode_as_their_blocks(rows: int, groups: int, seed: int, data: st.DataObject) -> None:
    """Any finite scale stands above any codes, -0 included; odd group counts are padded legally."""
    line = st.lists(FINITE_HALVES, min_size=groups, max_size=groups)
    blocks = half_blocks(data.draw(st.lists(line, min_size=rows, max_size=rows)), 16, seed)
    weight = import_encoded(EncodedRows("gguf_q2_0", (blocks,)), "q2_g64_fp16")
    check_payload("q2_g64_fp16", weight.shape, payload(weight))
    found = weight.dequantize()
    for row in range(rows):
        for group in range(groups):
            block = bytes(blocks[row, group * 18 : group * 18 + 18].tolist())
            (scale,) = struct.unpack("<e", block[:2])
            expected = [((block[2 + j // 4] >> 2 * (j % 4) & 3) - 1) * scale for j in range(64)]
            assert found[row, group * 64 : group * 64 + 64].tolist() == expected


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**31))
def test_q8_words_decode_as_their_blocks(rows: int, groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = half_blocks(rng.normal(size=(rows, groups)).tolist(), 32, seed).unflatten(1, (groups, 34))
    blocks[..., 2:][blocks[..., 2:] == 0x80] = 0x81
    weight = import_encoded(EncodedRows("gguf_q8_0", (blocks.flatten(1),)), "q8_g32_fp16")
    check_payload("q8_g32_fp16", weight.shape, payload(weight))
    codes = blocks[..., 2:].view(torch.int8).float()
    scales = blocks[..., :2].contiguous().view(torch.float16).float()
    assert_same_words(weight.dequantize(), (codes * scales).flatten(1))


def q8_block(scale_word: int, codes: dict[int, int]) -> torch.Tensor:
    block = torch.zeros(3, 5 * 34, dtype=torch.uint8)
    block[:, 1::34] = 0x3C  # scales of 1
    block[2, 3 * 34 : 3 * 34 + 2] = torch.tensor([scale_word & 255, scale_word >> 8])
    for lane, code in codes.items():
        block[2, 3 * 34 + 2 + lane] = code
    return block


@pytest.mark.parametrize(
    "word, codes, message",
    [
        (0x7C00, {}, "group 3: 0x7c00 is no finite binary16 scale"),
        (0xFE01, {}, "group 3: 0xfe01 is no finite"),
        (0x8000, {}, "group 3: 0x8000 is a scale of negative zero"),
        (0x3C00, {7: 0x80}, "group 3, lane 7: 0x80 is code -128"),
        (0x0000, {31: 1}, "group 3, lane 31: 0x01 is a code other than 0 under a zero scale"),
    ],
)
def test_q8_refusals(word: int, codes: dict[int, int], message: str) -> None:
    rows = EncodedRows("gguf_q8_0", (q8_block(word, codes),), name="a.weight", first_row=40)
    with pytest.raises(ConversionError, match=f"tensor 'a.weight', row 42, {message}"):
        import_encoded(rows, "q8_g32_fp16")
    assert import_encoded(rows, "gguf_q8_0").shape == (3, 160)  # as blocks every word is legal


def test_infinite_scales_of_other_blocks_are_refused() -> None:
    for encoding, target, values in (("gguf_q2_0", "q2_g64_fp16", 18), ("pq2_0", "t2_g128_fp16", 34)):
        blocks = torch.zeros(1, values, dtype=torch.uint8)
        blocks[0, 1] = 0x7C
        with pytest.raises(ConversionError, match="row 0, group 0: 0x7c00 is no finite binary16 scale"):
            import_encoded(EncodedRows(encoding, (blocks,)), target)
    blocks = torch.zeros(1, 28, dtype=torch.uint8)
    blocks[0, 26:] = torch.tensor([1, 0xFC])
    with pytest.raises(ConversionError, match="0xfc01 is no finite"):
        import_encoded(EncodedRows("ptq1_0", (blocks,)), "t2_g128_fp16")


@pytest.mark.parametrize("encoding, size, scale, code", [("pq2_0", 34, 0, 33), ("ptq1_0", 28, 26, 3)])
def test_ternary_zero_scales_stand_above_zero_codes(encoding: str, size: int, scale: int, code: int) -> None:
    zeros = torch.full((2, size), 0x55 if encoding == "pq2_0" else 0x80, dtype=torch.uint8)
    zeros[:, scale : scale + 2] = 0
    if encoding == "ptq1_0":
        zeros[:, :26] = 0x80  # 128/256 begins with the digits 1, 1, 1, ...
    rows = EncodedRows(encoding, (zeros,))
    assert not import_encoded(rows, "t2_g128_fp16").dequantize().any()
    zeros[1, code] = 0xAA
    with pytest.raises(ConversionError, match="row 1, group 0, lane .*: .* is a code other than 0 under a zero scale"):
        import_encoded(rows, "t2_g128_fp16")
    zeros[1, scale + 1] = 0x80
    with pytest.raises(ConversionError, match="row 1, group 0: 0x8000 is a scale of negative zero"):
        import_encoded(rows, "t2_g128_fp16")


def test_other_pairs_and_extents_are_refused() -> None:
    blocks = torch.zeros(3, 144, dtype=torch.uint8)
    for wrong in (blocks[:, :100], blocks.to(torch.int8), blocks[0]):
        with pytest.raises(ConversionError, match="144-byte blocks"):
            import_encoded(wrong, "gguf_q4_k")
    with pytest.raises(ConversionError, match="import_encoded does not write bf16; it writes q2_g64_fp16, q4_g64_fp16"):
        import_encoded(blocks, "bf16")
    with pytest.raises(ConversionError, match="q4_g64_fp16 planes come without the number of columns"):
        import_encoded(blocks, "q4_g64_fp16")
    with pytest.raises(ConversionError, match="does not write q8_g32_fp16 from gguf_q4_k; it takes .*gguf_q8_0"):
        import_encoded(EncodedRows("gguf_q4_k", (blocks,)), "q8_g32_fp16")


def test_targets_of_the_method_are_the_table() -> None:
    assert set(METHODS["import_encoded"].targets) == {target for _, target in IMPORTERS}
    assert set(METHODS["import_encoded"].targets) == {name for name, record in FORMATS.items() if record.quantized}


# --- planes of another object ----------------------------------------------------------------------------------------

PLANES = tuple(name for name, record in FORMATS.items() if record.family in ("grouped", "row_float"))


@pytest.mark.parametrize("name", PLANES)
def test_planes_move_whole_and_stack(name: str) -> None:
    first, second = (random_weight(name, rows, 256, seed=rows) for rows in (3, 5))
    sources = [EncodedRows(name, tuple(weight.planes.values()), columns=256) for weight in (first, second)]
    assert encode(import_encoded(sources[0], name)) == encode(first)
    stacked = import_encoded(sources, name)
    assert_same_words(stacked.dequantize(), torch.cat([first.dequantize(), second.dequantize()]))


@pytest.mark.parametrize("name", ("q4_g64_fp16", "q6_g64_fp16", "q8_g32_fp16"))
def test_padded_planes_move_with_their_padding(name: str) -> None:
    """130 and 192 columns have planes of one shape; the number that is stated decides."""
    weight = quantize(torch.randn(4, 130, generator=torch.Generator().manual_seed(1)), name)
    again = import_encoded(EncodedRows(name, tuple(weight.planes.values()), columns=130), name)
    assert again.shape == (4, 130) and encode(again) == encode(weight)


def test_planes_of_other_extents_or_illegal_words_are_refused() -> None:
    weight = random_weight("q4_g64_fp16", 6, 256)
    codes, scales = weight.planes.values()
    with pytest.raises(ConversionError, match=r"tensor 'w', row 0: planes .*expected .* for q4_g64_fp16"):
        import_rows(EncodedRows("q4_g64_fp16", (codes, scales[:5]), name="w", columns=256), "q4_g64_fp16")
    broken = scales.clone()
    broken[4, 1] = torch.inf
    with pytest.raises(ConversionError, match="tensor 'w'.*row 14, group 1.*0x7c00"):
        import_rows(EncodedRows("q4_g64_fp16", (codes, broken), None, "w", 10, 256), "q4_g64_fp16")
    with pytest.raises(ConversionError, match="stacked on"):
        stack_rows([EncodedRows("q4_g64_fp16", (codes, scales), columns=columns) for columns in (256, 250)])


# --- checkpoints -----------------------------------------------------------------------------------------------------


def nvfp4_rows(rows: int, columns: int, divisor: float, seed: int = 0, name: str = "") -> EncodedRows:
    rng = np.random.default_rng(seed)
    codes = torch.from_numpy(rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8))
    scales = torch.from_numpy(rng.integers(0, 0x7F, (rows, columns // 16), dtype=np.uint8))
    return EncodedRows("nvfp4", (codes, scales), torch.tensor([divisor]), name)


MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nvfp4_value(rows: EncodedRows, row: int, column: int) -> np.float32:
    """One value by hand: code * scale / divisor, one binary32 division."""
    nibble = int(rows.words[0][row, column // 2]) >> 4 * (column % 2) & 15
    word = int(rows.words[1][row, column // 16])
    scale = (word & 7) / 512 if word < 8 else (8 + (word & 7)) / 8 * 2.0 ** ((word >> 3) - 7)
    value = MAGNITUDES[nibble & 7] * (-1 if nibble & 8 else 1)
    return np.float32(value * scale) / np.float32(rows.divisors[0].item())


@pytest.mark.parametrize("divisors", [(3.7,), (3.7, 3.7), (3.7, 1.9, 2500.0)])
def test_stacked_nvfp4_equals_its_sources(divisors: tuple[float, ...]) -> None:
    """Unequal divisors are kept, one per source; equal ones become one (case J4)."""
    parts = [nvfp4_rows(256, 64, divisor, seed) for seed, divisor in enumerate(divisors)]
    weight = import_encoded(parts, "nvfp4")
    stored = weight.planes["divisors"]
    assert stored.tolist() == (torch.tensor(divisors).tolist() if len(set(divisors)) > 1 else [np.float32(3.7)])
    check_payload("nvfp4", weight.shape, payload(weight), len(stored))
    found = weight.dequantize()
    for index, part in enumerate(parts):
        alone = import_encoded(part, "nvfp4").dequantize()
        assert_same_words(found[256 * index : 256 * (index + 1)].contiguous(), alone)
        for row, column in ((0, 0), (5, 63), (31, 17), (32, 1), (129, 40), (255, 62)):
            assert alone[row, column].item() == nvfp4_value(part, row, column)


def test_the_same_matrix_in_both_senses_is_the_same_weight() -> None:
    """A global scale that multiplies is the reciprocal of one that divides (case J1)."""
    stored = load_tensors(golden("ninfer", "import", "source.safetensors"))
    multiplier = float(stored["mo.d.weight_scale_2"])
    words = (stored["mo.d.weight"], stored["mo.d.weight_scale"].view(torch.uint8))
    divided = EncodedRows("nvfp4", words, torch.tensor([1.0 / multiplier], dtype=torch.float64).float())
    expected = load_tensors(golden("ninfer", "import", "import.safetensors"))["test/mo.d"]
    assert_same_words(import_encoded(divided, "nvfp4").dequantize(), expected)


def test_rows_in_tiles_give_the_planes_of_the_whole() -> None:
    rows = nvfp4_rows(384, 128, 2.0)
    codes, tiles, divisors = import_rows(rows, "nvfp4")
    for tile in range(3):
        span = slice(128 * tile, 128 * (tile + 1))
        part = EncodedRows("nvfp4", tuple(word[span] for word in rows.words), rows.divisors, "", 128 * tile)
        some = METHODS["import_encoded"].encode(part, get_format("nvfp4"), 128 * tile)
        assert torch.equal(some[0], codes[span]) and torch.equal(some[1], tiles[tile : tile + 1])
        assert torch.equal(some[2], divisors)


@pytest.mark.parametrize("word", [0x7F, 0xFF, 0x80, 0x81])
def test_illegal_block_scales_are_refused_by_place(word: int) -> None:
    """NaN and signed scale words (case H6)."""
    rows = nvfp4_rows(128, 64, 1.0, name="layers.0.weight")
    rows.words[1][77, 3] = word
    with pytest.raises(
        ConversionError, match=f"tensor 'layers.0.weight', row 77, group 3: 0x{word:02x} is no block scale"
    ):
        import_encoded(rows, "nvfp4")


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("inf"), float("nan")])
def test_illegal_divisors_are_refused(divisor: float) -> None:
    with pytest.raises(ConversionError, match=f"divisor 0 is {divisor}, expected finite and above 0"):
        import_encoded(nvfp4_rows(128, 64, divisor), "nvfp4")


def test_shapes_that_nvfp4_does_not_hold() -> None:
    for shape in ((127, 64), (200, 64), (128, 96), (1, 64)):
        with pytest.raises(ConversionError, match=r"needs N % 128 = 0 and K % 64 = 0, found shape"):
            import_encoded(nvfp4_rows(*shape, 1.0), "nvfp4")
    rows = nvfp4_rows(128, 64, 1.0)
    with pytest.raises(ConversionError, match="expected uint8 codes"):
        import_encoded(EncodedRows("nvfp4", (rows.words[0], rows.words[1][:, :3]), rows.divisors), "nvfp4")
    with pytest.raises(ConversionError, match="without a divisor"):
        import_encoded(EncodedRows("nvfp4", rows.words), "nvfp4")


def test_stacks_that_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"divisors \[1.0, 2.0\] and \[128, 256\] rows"):
        stack_rows([nvfp4_rows(128, 64, 1.0), nvfp4_rows(256, 64, 2.0)])
    with pytest.raises(ConversionError, match=r"divisors \[1.0, 2.0\] and \[64, 64\] rows"):
        stack_rows([nvfp4_rows(64, 64, 1.0), nvfp4_rows(64, 64, 2.0)])
    with pytest.raises(ConversionError, match="'b' holds nvfp4 rows .* is stacked on 'a'"):
        stack_rows([nvfp4_rows(128, 64, 1.0, name="a"), nvfp4_rows(128, 128, 1.0, name="b")])
    with pytest.raises(ConversionError, match="1 of 2 stacked sources have no divisor"):
        rows = nvfp4_rows(128, 64, 1.0)
        stack_rows([rows, EncodedRows("nvfp4", rows.words)])
    with pytest.raises(ConversionError, match="at least one source"):
        import_encoded([], "nvfp4")
    equal = stack_rows([nvfp4_rows(128, 64, 2.0), nvfp4_rows(256, 64, 2.0)])
    assert equal.rows == 384 and equal.divisors.tolist() == [2.0]


@pytest.mark.parametrize(
    "code, scale_word, message",
    [
        (0x7F, 0x3F80, "lane 9: 0x7f is the code of NaN"),
        (0xFF, 0x3F80, "lane 9: 0xff is the code of NaN"),
        (0x01, 0x0000, "lane 9: 0x01 is a code under a zero scale"),
        (0x00, 0x8000, "0x8000 is a scale with its sign set"),
        (0x00, 0xBF80, "0xbf80 is a scale with its sign set"),
        (0x00, 0x7F80, "0x7f80 is no finite bfloat16 scale"),
        (0x00, 0x7FC0, "0x7fc0 is no finite bfloat16 scale"),
    ],
)
def test_illegal_fp8_rows_are_refused_by_place(code: int, scale_word: int, message: str) -> None:
    codes, scales = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4).bfloat16()
    codes[2, 9] = code
    scales.view(torch.uint16)[2] = scale_word
    with pytest.raises(ConversionError, match=f"tensor 'w', row 2, group 0[,:] {message}"):
        import_encoded(EncodedRows(FP8, (codes, scales), name="w"), FP8)


def test_legal_fp8_rows_move_whole() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(2, 128)
    codes[(codes & 0x7F) == 0x7F] = 0x80
    scales = torch.tensor([0.0, 0.5]).bfloat16()
    codes[0] = 0x80  # -0 is a zero code
    weight = import_encoded(EncodedRows(FP8, (codes, scales)), FP8)
    assert torch.equal(weight.planes["codes"], codes) and torch.equal(weight.planes["scales"], scales)
    check_payload(FP8, (2, 128), payload(weight))
    with pytest.raises(ConversionError, match="expected uint8"):
        import_encoded(EncodedRows(FP8, (codes, scales.float())), FP8)
