"""Random objects of several formats, packed with numpy from codes and scales, and their values by the formulas of
spec/layouts.md 2, 3, 5, 6 and 8; no library in it.
"""

from __future__ import annotations

import math

import numpy as np

from official_names import Shape


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def encoded_size(format: str, shape: Shape, divisors: int = 1) -> int:
    """Bytes of one object."""
    if format in ("bf16", "fp32", "int32"):
        return math.prod(shape) * (2 if format == "bf16" else 4)
    rows, columns = shape
    if format in _GROUPED:
        bits, group = _GROUPED[format]
        groups = rows * round_up(columns, 128) // group
        base = groups * group * min(bits, 4 if bits < 8 else 8) // 8
        high = groups * group * (bits - 4) // 8 if bits in (5, 6) else 0
        return round_up(base, 256) + round_up(high, 256) + 2 * groups
    if format == "nvfp4":
        return round_up(rows * columns // 2, 256) + rows * columns // 16 + 4 * divisors
    if format == "fp8_e4m3fn_row_bf16":
        return round_up(rows * columns, 256) + 2 * rows
    values, size = _BLOCKS[format]
    return rows * columns // values * size


_GROUPED = {
    "q4_g64_fp16": (4, 64),
    "q5_g64_fp16": (5, 64),
    "q6_g64_fp16": (6, 64),
    "q8_g32_fp16": (8, 32),
    "t2_g128_fp16": (2, 128),
}
_BLOCKS = {"gguf_q8_0": (32, 34), "gguf_q4_0": (32, 18)}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def draw(format: str, shape: Shape, rng: np.random.Generator, divisors: int = 1) -> tuple[bytes, np.ndarray]:
    """A random object: its bytes, and its float32 values."""
    if format in ("bf16", "fp32"):
        values = (rng.standard_normal(shape) * 0.3).astype(np.float32)
        if format == "fp32":
            return values.tobytes(), values
        words = (values.view(np.uint32) >> 16).astype(np.uint16)
        return words.tobytes(), (words.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    rows, columns = shape
    if format in _GROUPED:
        return _draw_grouped(format, rows, columns, rng)
    if format == "nvfp4":
        return _draw_nvfp4(rows, columns, rng, divisors)
    if format == "fp8_e4m3fn_row_bf16":
        return _draw_row_float(rows, columns, rng)
    return _draw_blocks(format, rows, columns, rng)


def _draw_grouped(format: str, rows: int, columns: int, rng: np.random.Generator) -> tuple[bytes, np.ndarray]:
    bits, group = _GROUPED[format]
    physical = round_up(columns, 128)
    largest = 1 if bits == 2 else (1 << bits - 1) - 1
    codes = np.zeros((rows, physical), dtype=np.int64)
    codes[:, :columns] = rng.integers(-largest, largest + 1, (rows, columns))
    exponents = rng.integers(-2, 1, (rows, physical // group))
    scales = (2.0**exponents * rng.choice([-1, 1], exponents.shape) * 0.25 / largest).astype(np.float16)
    if bits == 2:
        scales = (2.0 ** (exponents - 5)).astype(np.float16)
    scales[:, -(-columns // group) :] = 0
    values = np.repeat(scales.astype(np.float32), group, 1) * codes.astype(np.float32)
    words = codes & ((1 << bits) - 1)
    planes = [_pack(words & 15, 4) if bits < 8 else words.astype(np.uint8).tobytes()]
    if bits == 2:
        planes = [_pack(words, 2)]
    planes.append(_pack(words >> 4, bits - 4) if bits in (5, 6) else b"")
    data = b"".join(plane.ljust(round_up(len(plane), 256), b"\0") for plane in planes)
    return data + scales.tobytes(), values[:, :columns]


def _pack(words: np.ndarray, bits: int) -> bytes:
    """A stream of `bits` per word, lowest bit first."""
    stream = (words.reshape(-1, 1) >> np.arange(bits)) & 1
    return np.packbits(stream.reshape(-1).astype(np.uint8), bitorder="little").tobytes()


def _draw_nvfp4(rows: int, columns: int, rng: np.random.Generator, divisors: int) -> tuple[bytes, np.ndarray]:
    codes = rng.integers(0, 16, (rows, columns))
    exponents = rng.integers(5, 9, (rows, columns // 16))
    scales = np.float32(2.0) ** (exponents - 7)
    factors = rng.uniform(8, 16, divisors).astype(np.float32)
    spread = np.repeat(factors, rows // divisors)[:, None]
    values = _E2M1[codes] * np.repeat(scales, 16, 1).astype(np.float32) / spread
    tiles = np.zeros(rows * columns // 16, dtype=np.uint8)
    row, block = np.indices((rows, columns // 16))
    place = ((row // 128) * (columns // 64) + block // 4) * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
    tiles[place] = exponents << 3
    code_bytes = _pack(codes, 4)
    data = code_bytes.ljust(round_up(len(code_bytes), 256), b"\0") + tiles.tobytes() + factors.tobytes()
    return data, values.astype(np.float32)


def _draw_row_float(rows: int, columns: int, rng: np.random.Generator) -> tuple[bytes, np.ndarray]:
    words = rng.integers(0, 256, (rows, columns)) & 0xF7  # exponents below that of NaN
    exponent, fraction = words >> 3 & 15, words & 7
    magnitude = np.where(exponent == 0, fraction / 512, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    scales = (rng.choice([-1, 1], rows) * 2.0 ** rng.integers(-10, -8, rows)).astype(np.float32)
    values = np.where(words & 0x80, -magnitude, magnitude).astype(np.float32) * scales[:, None]
    data = words.astype(np.uint8).tobytes().ljust(round_up(rows * columns, 256), b"\0")
    return data + (scales.view(np.uint32) >> 16).astype(np.uint16).tobytes(), values


def _draw_blocks(format: str, rows: int, columns: int, rng: np.random.Generator) -> tuple[bytes, np.ndarray]:
    scales = (rng.uniform(0.5, 1, (rows, columns // 32)) / 64).astype(np.float16)
    if format == "gguf_q8_0":
        codes = rng.integers(-127, 128, (rows, columns // 32, 32))
        scales = (scales / np.float16(16)).astype(np.float16)
        quants = codes.astype(np.int8).view(np.uint8)
    else:  # low nibbles are the first half of a block, high nibbles the second; the code is the nibble - 8
        nibbles = rng.integers(0, 16, (rows, columns // 32, 32))
        codes = nibbles - 8
        quants = (nibbles[..., :16] | nibbles[..., 16:] << 4).astype(np.uint8)
    blocks = np.concatenate([scales[..., None].view(np.uint8), quants], -1)
    values = scales[..., None].astype(np.float32) * codes.astype(np.float32)
    return blocks.tobytes(), values.reshape(rows, columns)


LAYOUTS = {
    **dict.fromkeys(("bf16", "fp32", "int32"), "contiguous_le_v1"),
    **dict.fromkeys(_GROUPED, "row_split_k128_v1"),
    "nvfp4": "block_scale_k16_m128x4_v1",
    "fp8_e4m3fn_row_bf16": "row_scale_v1",
    **dict.fromkeys(_BLOCKS, "gguf_blocks_v1"),
}
