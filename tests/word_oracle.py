"""A slow second decoder: one value at a time, from the bytes of an object, from the formulas of the specification.

Written from spec/layouts.md 3, 5, 6 and 7. It shares nothing with the library: sizes, offsets and
words are worked out here again.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

GROUPED = {
    # bits, group, base bytes per group, high bytes per group
    "q2_g64_fp16": (2, 64, 16, 0),
    "q4_g64_fp16": (4, 64, 32, 0),
    "q5_g64_fp16": (5, 64, 32, 8),
    "q6_g64_fp16": (6, 64, 32, 16),
    "q8_g32_fp16": (8, 32, 32, 0),
    "t2_g128_fp16": (2, 128, 32, 0),
}

SCALED = (*GROUPED, "nvfp4", "fp8_e4m3fn_row_bf16", "fp8_e4m3fn_row_fp16")
"""The formats this oracle decodes: all quantized ones but the gguf_* blocks."""


def up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


def half(low: int, high: int) -> float:
    return struct.unpack("<e", bytes((low, high)))[0]


def brain(low: int, high: int) -> float:
    return struct.unpack("<f", bytes((0, 0, low, high)))[0]


def e2m1(word: int) -> float:
    """Sign, two exponent bits of bias 1, one fraction bit."""
    exponent, fraction = (word >> 1) & 3, word & 1
    magnitude = fraction * 0.5 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
    return -magnitude if word & 8 else magnitude


def e4m3(word: int) -> float:
    """Sign, four exponent bits of bias 7, three fraction bits; all ones below the sign is NaN."""
    exponent, fraction = (word >> 3) & 15, word & 7
    if exponent == 15 and fraction == 7:
        return float("nan")
    magnitude = fraction / 512 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -magnitude if word & 0x80 else magnitude


def grouped_word(name: str, data: bytes, shape: tuple[int, int], row: int, column: int) -> int:
    """The stored word u of one physical column."""
    bits, group, base_bytes, high_bytes = GROUPED[name]
    groups = up(shape[1], 128) // group
    at = row * groups + column // group
    lane = column % group
    base = data[at * base_bytes : (at + 1) * base_bytes]
    if bits == 8:
        return base[lane]
    if bits == 2:
        return base[lane // 4] >> 2 * (lane % 4) & 3
    word = base[lane // 2] >> 4 * (lane % 2) & 15
    high_offset = up(shape[0] * groups * base_bytes, 256) + at * high_bytes
    for extra in range(bits - 4):
        stream = lane * (bits - 4) + extra
        word |= (data[high_offset + stream // 8] >> stream % 8 & 1) << 4 + extra
    return word


def grouped_code(name: str, word: int) -> int:
    if name == "q2_g64_fp16":
        return word - 1
    bits = GROUPED[name][0]
    return word - (1 << bits) if word >= 1 << (bits - 1) else word


def grouped_scale(name: str, data: bytes, shape: tuple[int, int], row: int, group_index: int) -> float:
    _, group, base_bytes, high_bytes = GROUPED[name]
    groups = up(shape[1], 128) // group
    high_offset = up(shape[0] * groups * base_bytes, 256)
    scale_offset = high_offset + up(shape[0] * groups * high_bytes, 256)
    at = scale_offset + 2 * (row * groups + group_index)
    return half(data[at], data[at + 1])


def swizzled(row: int, group: int, columns: int) -> int:
    """The place of an nvfp4 scale word inside the scale plane (spec/layouts.md 5.3)."""
    tile = (row // 128) * (columns // 64) + group // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + group % 4


def decode_value(name: str, data: bytes, shape: tuple[int, int], divisors: int) -> Callable[[int, int], np.float32]:
    """The function (row, column) -> value of an object's bytes."""
    rows, columns = shape

    def grouped(row: int, column: int) -> np.float32:
        code = grouped_code(name, grouped_word(name, data, shape, row, column))
        scale = grouped_scale(name, data, shape, row, column // GROUPED[name][1])
        return np.float32(scale) * np.float32(code)

    def nvfp4(row: int, column: int) -> np.float32:
        scale_offset = up(rows * columns // 2, 256)
        divisor_offset = scale_offset + rows * columns // 16
        code = data[(row * columns + column) // 2] >> 4 * (column % 2) & 15
        scale = data[scale_offset + swizzled(row, column // 16, columns)]
        (divisor,) = struct.unpack_from("<f", data, divisor_offset + 4 * (row // (rows // divisors)))
        return np.float32(e2m1(code) * e4m3(scale)) / np.float32(divisor)

    def row_bf16(row: int, column: int) -> np.float32:
        at = up(rows * columns, 256) + 2 * row
        return np.float32(e4m3(data[row * columns + column])) * np.float32(brain(data[at], data[at + 1]))

    def row_fp16(row: int, column: int) -> np.float32:
        record = data[row * (columns + 2) : (row + 1) * (columns + 2)]
        return np.float32(e4m3(record[column])) * np.float32(half(record[-2], record[-1]))

    others = {"nvfp4": nvfp4, "fp8_e4m3fn_row_bf16": row_bf16, "fp8_e4m3fn_row_fp16": row_fp16}
    return others.get(name, grouped)


def decode(name: str, data: bytes, shape: tuple[int, int], divisors: int = 1) -> np.ndarray:
    """The float32 values [N, K] of an object's bytes."""
    value = decode_value(name, data, shape, divisors)
    with np.errstate(all="ignore"):
        rows = [[value(row, column) for column in range(shape[1])] for row in range(shape[0])]
    return np.array(rows, dtype=np.float32)
