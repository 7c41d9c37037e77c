"""Laws of the gguf block decoders: other tools' bits, every table entry, every kind of scale, independent blocks."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gguf import constants, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from golden import golden, load_tensors
from ninfer_torch.errors import FormatError, LayoutError
from ninfer_torch.formats import FORMATS, GgufFormat
from ninfer_torch.kernels.grids import GRIDS, _grid_on, grid
from ninfer_torch.kernels.reference_gguf import BLOCK_DECODERS

RECORDS = {name: record for name, record in FORMATS.items() if isinstance(record, GgufFormat)}
NAMES = sorted(RECORDS)

# Byte offsets of a block's binary16 words; iq1_m scatters its one over the top nibbles of bytes 49, 51, 53 and 55.
HALF_WORDS = dict.fromkeys(NAMES, (0,)) | {
    "gguf_q2_k": (80, 82),
    "gguf_q3_k": (108,),
    "gguf_q4_k": (0, 2),
    "gguf_q5_k": (0, 2),
    "gguf_q6_k": (208,),
    "gguf_iq1_m": (),
}
SUBNORMAL = np.arange(0x0001, 0x0400, dtype=np.uint16)
SPECIAL = np.array([0x0000, 0x8000, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFE00, 0xFFFF], dtype=np.uint16)


def set_half_words(name: str, blocks: np.ndarray, words: np.ndarray) -> None:
    """Set the binary16 words of every block: block i gets `words[i]` as its first, an earlier one as its second."""
    if name == "gguf_iq1_m":
        for nibble, offset in enumerate((49, 51, 53, 55)):
            blocks[:, offset] = blocks[:, offset] & 0x0F | (words >> 4 * nibble & 0xF) << 4
    for offset in HALF_WORDS[name]:
        blocks[:, offset] = words & 0xFF
        blocks[:, offset + 1] = words >> 8
        words = np.roll(words, 24)


def random_blocks(name: str, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([RECORDS[name].ggml_type, seed])
    return rng.integers(0, 256, (count, RECORDS[name].block_bytes), dtype=np.uint8)


def scalar_q2_0(block: bytes) -> list[float]:
    """One block of ggml type 42, as spec/layouts.md 8.1 words it."""
    (d,) = struct.unpack("<e", block[:2])
    return [d * ((block[2 + j // 4] >> 2 * (j % 4) & 3) - 1.0) for j in range(64)]


def oracle(name: str, blocks: np.ndarray) -> np.ndarray:
    """Values [n, block values] of blocks [n, block bytes] by the gguf package, by the scalar decoder for type 42."""
    if name == "gguf_q2_0":
        return np.array([scalar_q2_0(block.tobytes()) for block in blocks], dtype=np.float32)
    with np.errstate(all="ignore"):
        return quants.dequantize(blocks, constants.GGMLQuantizationType(RECORDS[name].ggml_type))


def assert_same_values(found: torch.Tensor, expected: np.ndarray) -> None:
    """Equal bits, the sign of zero included; NaN where the other has NaN."""
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    bits = np.where(np.isnan(expected), 0, expected.view(np.uint32))
    found_bits = np.where(np.isnan(found.numpy()), 0, found.contiguous().numpy().view(np.uint32))
    np.testing.assert_array_equal(np.isnan(found.numpy()), np.isnan(expected))
    np.testing.assert_array_equal(found_bits, bits)


def test_every_block_format_has_a_decoder() -> None:
    assert set(BLOCK_DECODERS) == set(RECORDS)
    assert len(RECORDS) == 18


# Other tools' values


@pytest.mark.parametrize("name", NAMES)
def test_golden_blocks(name: str) -> None:
    tensors = load_tensors(golden("gguf", "blocks", f"{name.removeprefix('gguf_')}.safetensors"))
    cases = [key for key in tensors if f"{key}_f32" in tensors]
    assert {"quantized", "random"} <= set(cases)
    for case in cases:
        blocks = tensors[case].unflatten(-1, (-1, RECORDS[name].block_bytes))
        found = BLOCK_DECODERS[name](blocks).flatten(-2)
        assert torch.equal(found.view(torch.int32), tensors[f"{case}_f32"].view(torch.int32)), case


@pytest.mark.parametrize("name", NAMES)
def test_random_bytes(name: str) -> None:
    blocks = random_blocks(name, 1500, seed=0)
    assert_same_values(BLOCK_DECODERS[name](torch.from_numpy(blocks)), oracle(name, blocks))


@pytest.mark.parametrize("name", NAMES)
def test_subnormal_scales(name: str) -> None:
    words = np.concatenate([SUBNORMAL, SUBNORMAL | 0x8000])
    blocks = random_blocks(name, words.size, seed=1)
    set_half_words(name, blocks, words)
    expected = oracle(name, blocks)
    assert np.isfinite(expected).all()
    assert (np.abs(expected).max(-1) > 0).mean() > 0.99
    assert_same_values(BLOCK_DECODERS[name](torch.from_numpy(blocks)), expected)


@pytest.mark.parametrize("name", NAMES)
def test_zero_largest_infinite_and_nan_scales(name: str) -> None:
    words = np.repeat(SPECIAL, 16)
    blocks = random_blocks(name, words.size, seed=2)
    set_half_words(name, blocks, words)
    expected = oracle(name, blocks)
    assert np.isnan(expected).any() and np.isinf(expected).any() and (expected == 0).any()
    assert_same_values(BLOCK_DECODERS[name](torch.from_numpy(blocks)), expected)


@given(name=st.sampled_from(NAMES), data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_bytes(name: str, data: st.DataObject) -> None:
    content = data.draw(st.binary(min_size=RECORDS[name].block_bytes, max_size=RECORDS[name].block_bytes))
    blocks = np.frombuffer(content, dtype=np.uint8).copy()[None]
    assert_same_values(BLOCK_DECODERS[name](torch.from_numpy(blocks)), oracle(name, blocks))


def test_q2_0_example_of_the_specification() -> None:
    block = torch.tensor([0x00, 0x38, *[0xE4] * 16], dtype=torch.uint8)
    assert BLOCK_DECODERS["gguf_q2_0"](block).tolist() == [-0.5, 0.0, 0.5, 1.0] * 16


# Tables


@pytest.mark.parametrize("name", ["iq1_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"])
def test_grids_are_those_of_the_gguf_package(name: str) -> None:
    quant = getattr(quants, name.upper())
    quant.init_grid()
    table = grid(name)
    assert table.dtype == torch.int8
    np.testing.assert_array_equal(table.numpy(), quant.grid[0, 0])


def test_codebook_and_signs_are_those_of_the_gguf_package() -> None:
    assert grid("iq4_nl").tolist() == [[value] for value in quants.IQ4_NL.kvalues]
    words = np.frombuffer(quants.IQ2_XXS.ksigns, dtype=np.uint8)
    bits = np.unpackbits(words[:, None], axis=-1, bitorder="little").astype(np.int8)
    np.testing.assert_array_equal(grid("even_signs").numpy(), 1 - 2 * bits)
    every = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=-1, bitorder="little").astype(np.int8)
    np.testing.assert_array_equal(grid("signs").numpy(), 1 - 2 * every)


@dataclass(frozen=True)
class IndexFields:
    """Where a block keeps its grid indices: byte offsets of their low bytes, and of words with the `bits` above them.

    The indices share these words of type `word` equally, the first index of a word lowest, `stride` bits apart.
    """

    low: range | list[int]
    high: range = range(0)
    bits: int = 0
    stride: int = 1
    word: str = "<u1"

    def write(self, blocks: np.ndarray, indices: np.ndarray) -> None:
        """Write indices [n, per block] into blocks [n, block bytes]."""
        blocks[:, self.low] = indices & 0xFF
        if self.bits:
            words = len(self.high) // np.dtype(self.word).itemsize
            high = (indices >> 8).reshape(len(indices), words, -1)
            packed = (high << self.stride * np.arange(high.shape[-1])).sum(-1).astype(self.word)
            blocks[:, self.high] = packed.view(np.uint8)


INDEX_FIELDS = {
    "gguf_iq1_s": IndexFields(range(2, 34), range(34, 50), bits=3, stride=3, word="<u2"),
    "gguf_iq1_m": IndexFields(range(32), range(32, 48), bits=3, stride=4),
    "gguf_iq2_xxs": IndexFields([2 + 8 * word + byte for word in range(8) for byte in range(4)]),
    "gguf_iq2_xs": IndexFields(range(2, 66, 2), range(3, 66, 2), bits=1),
    "gguf_iq2_s": IndexFields(range(2, 34), range(66, 74), bits=2, stride=2),
    "gguf_iq3_xxs": IndexFields(range(2, 66)),
    "gguf_iq3_s": IndexFields(range(2, 66), range(66, 74), bits=1),
}


@pytest.mark.parametrize(
    ("name", "scale", "shift"),
    [
        ("gguf_iq1_s", 1.0, 0.125),
        ("gguf_iq1_m", 1.0, 0.125),
        ("gguf_iq2_xxs", 0.125, 0.0),
        ("gguf_iq2_xs", 0.125, 0.0),
        ("gguf_iq2_s", 0.125, 0.0),
        ("gguf_iq3_xxs", 0.25, 0.0),
        ("gguf_iq3_s", 1.0, 0.0),
    ],
)
def test_every_grid_entry_is_reached(name: str, scale: float, shift: float) -> None:
    """With d = 1 and every scale and sign field zero, a block holds its grid entries times a constant of the format."""
    quant = getattr(quants, name.removeprefix("gguf_").upper())
    quant.init_grid()
    entries = quant.grid[0, 0]
    fields = INDEX_FIELDS[name]
    indices = np.arange(len(entries)).reshape(-1, len(fields.low))
    indices = np.concatenate([indices, indices[:, ::-1]])
    blocks = np.zeros((len(indices), RECORDS[name].block_bytes), dtype=np.uint8)
    set_half_words(name, blocks, np.full(len(blocks), 0x3C00, dtype=np.uint16))
    fields.write(blocks, indices)
    expected = (entries[indices].astype(np.float32) + np.float32(shift)) * np.float32(scale)
    assert_same_values(BLOCK_DECODERS[name](torch.from_numpy(blocks)), expected.reshape(len(blocks), 256))


def test_a_grid_first_read_under_inference_mode_is_an_ordinary_tensor() -> None:
    _grid_on.cache_clear()
    with torch.inference_mode():
        BLOCK_DECODERS["gguf_iq3_s"](torch.from_numpy(random_blocks("gguf_iq3_s", 1, seed=3)))
        table = grid("iq3_s")
    assert not table.is_inference()
    factor = torch.ones(table.shape, requires_grad=True)
    (factor * table).sum().backward()
    assert factor.grad is not None and torch.equal(factor.grad, table.to(torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_ambient_defaults_do_not_matter(name: str) -> None:
    """A model is often built under another default dtype and on the meta device."""
    _grid_on.cache_clear()
    blocks = torch.from_numpy(random_blocks(name, 8, seed=7))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = BLOCK_DECODERS[name](blocks)
    finally:
        torch.set_default_dtype(default)
    assert_same_values(found, oracle(name, blocks.numpy()))


def test_grids_are_decoded_once() -> None:
    assert all(grid(name) is grid(name, torch.device("cpu")) for name in GRIDS)


def test_unknown_grid_is_refused() -> None:
    with pytest.raises(FormatError, match="iq9_z.*iq3_s"):
        grid("iq9_z")


# Blocks are independent


@given(
    name=st.sampled_from(NAMES),
    batch=st.lists(st.integers(0, 3), max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_batch_axes_are_kept(name: str, batch: list[int], seed: int) -> None:
    record = RECORDS[name]
    blocks = torch.from_numpy(random_blocks(name, int(np.prod(batch, dtype=int)), seed))
    found = BLOCK_DECODERS[name](blocks.reshape(*batch, record.block_bytes))
    assert found.shape == (*batch, record.block_values)
    assert_same_values(found.reshape(-1, record.block_values), BLOCK_DECODERS[name](blocks).numpy())


@given(name=st.sampled_from(NAMES), begin=st.integers(0, 6), step=st.integers(1, 3), seed=st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_decoding_commutes_with_slicing(name: str, begin: int, step: int, seed: int) -> None:
    blocks = torch.from_numpy(random_blocks(name, 6, seed))
    part = slice(begin, None, step)
    assert_same_values(BLOCK_DECODERS[name](blocks[part]), BLOCK_DECODERS[name](blocks)[part].numpy())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lead", [1, 3])
def test_unaligned_and_strided_blocks(name: str, lead: int) -> None:
    record = RECORDS[name]
    content = random_blocks(name, 12, seed=4)
    expected = BLOCK_DECODERS[name](torch.from_numpy(content)).numpy()

    padded = bytearray(lead) + content.tobytes()
    unaligned = torch.frombuffer(padded, dtype=torch.uint8, offset=lead).view(12, record.block_bytes)
    assert_same_values(BLOCK_DECODERS[name](unaligned), expected)

    wide = torch.zeros(12, record.block_bytes + lead + 1, dtype=torch.uint8)
    wide[:, lead:-1] = torch.from_numpy(content)
    assert_same_values(BLOCK_DECODERS[name](wide[:, lead:-1]), expected)

    byte_major = torch.from_numpy(content).t().contiguous().t()
    assert_same_values(BLOCK_DECODERS[name](byte_major), expected)


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_only_read(name: str) -> None:
    blocks = torch.from_numpy(random_blocks(name, 4, seed=5))
    before = blocks.clone()
    BLOCK_DECODERS[name](blocks).zero_()
    assert torch.equal(blocks, before)


def test_decoding_leaves_the_shared_tables_alone() -> None:
    for name in NAMES:
        BLOCK_DECODERS[name](torch.from_numpy(random_blocks(name, 4, seed=6))).zero_()
    for key, table in GRIDS.items():
        assert grid(key).tolist() == table.rows(), key


@pytest.mark.parametrize("name", NAMES)
def test_other_lengths_and_dtypes_are_refused(name: str) -> None:
    record = RECORDS[name]
    refused = [
        torch.zeros(2, record.block_bytes + 1, dtype=torch.uint8),
        torch.zeros(2, record.block_bytes, dtype=torch.int8),
        torch.zeros((), dtype=torch.uint8),
    ]
    for blocks in refused:
        with pytest.raises(LayoutError, match=f"{name}.*{record.block_bytes}"):
            BLOCK_DECODERS[name](blocks)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_cuda_gives_the_same_bits(name: str) -> None:
    blocks = torch.from_numpy(random_blocks(name, 1000, seed=6))
    assert_same_values(BLOCK_DECODERS[name](blocks.cuda()).cpu(), BLOCK_DECODERS[name](blocks).numpy())
