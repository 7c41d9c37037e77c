# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Words, bit fields and small floats inside Triton kernels: the vocabulary of every tile decoder.

Words are uint32 tiles. A field of a word becomes a float32 without a conversion instruction: left where it lies it serves as the low
mantissa bits of a power of two, which one exact subtraction takes off again together with the code's bias.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fetch(pointer, keep):
    """A load that gives zero where `keep` (None: everywhere true) is false."""
    if keep is None:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=keep, other=0)


@triton.jit
def load_u8(base, block, BYTES: tl.constexpr, offset, keep):
    """The byte at `block * BYTES + offset` after the byte pointers `base`, as uint32."""
    return fetch(base + (block * BYTES + offset), keep).to(tl.uint32)


@triton.jit
def load_u16(
    base, block, BYTES: tl.constexpr, OFFSET: tl.constexpr, item, STEP: tl.constexpr, keep, ALIGN: tl.constexpr
):
    """The 16-bit word at `block * BYTES + OFFSET + item * STEP`, as uint32; addresses are multiples of ALIGN bytes."""
    if ALIGN >= 2:
        index = block * (BYTES // 2) + item * (STEP // 2) + OFFSET // 2
        return fetch(base.to(tl.pointer_type(tl.uint16), bitcast=True) + index, keep).to(tl.uint32)
    else:
        index = block * BYTES + item * STEP + OFFSET
        return fetch(base + index, keep).to(tl.uint32) | fetch(base + index + 1, keep).to(tl.uint32) << 8


@triton.jit
def load_u32(
    base, block, BYTES: tl.constexpr, OFFSET: tl.constexpr, item, STEP: tl.constexpr, keep, ALIGN: tl.constexpr
):
    """The 32-bit word at `block * BYTES + OFFSET + item * STEP`; addresses are multiples of ALIGN bytes."""
    if ALIGN >= 4:
        index = block * (BYTES // 4) + item * (STEP // 4) + OFFSET // 4
        return fetch(base.to(tl.pointer_type(tl.uint32), bitcast=True) + index, keep)
    else:
        low = load_u16(base, block, BYTES, OFFSET, item, STEP, keep, ALIGN)
        return low | load_u16(base, block, BYTES, OFFSET + 2, item, STEP, keep, ALIGN) << 16


@triton.jit
def load_pair(
    base, block, BYTES: tl.constexpr, OFFSET: tl.constexpr, item, STEP: tl.constexpr, keep, ALIGN: tl.constexpr
):
    """The two 32-bit words at `block * BYTES + OFFSET + item * STEP`, one wide load where ALIGN permits."""
    if ALIGN >= 8:
        index = block * (BYTES // 8) + item * (STEP // 8) + OFFSET // 8
        wide = fetch(base.to(tl.pointer_type(tl.uint64), bitcast=True) + index, keep)
        return wide.to(tl.uint32), (wide >> 32).to(tl.uint32)
    else:
        low = load_u32(base, block, BYTES, OFFSET, item, STEP, keep, ALIGN)
        return low, load_u32(base, block, BYTES, OFFSET + 4, item, STEP, keep, ALIGN)


@triton.jit
def place(word, FROM: tl.constexpr, TO: tl.constexpr):
    """`word` with bit FROM shifted to bit TO."""
    if TO >= FROM:
        return word << (TO - FROM)
    else:
        return word >> (FROM - TO)


@triton.jit
def as_float(bits, SHIFT: tl.constexpr, BIAS: tl.constexpr):
    """Bits of 2**(23 - SHIFT) plus a code (its lowest bit at SHIFT) to the code less BIAS."""
    return bits.to(tl.float32, bitcast=True) - ((1 << (23 - SHIFT)) + BIAS)


@triton.jit
def field(word, SHIFT: tl.constexpr, BITS: tl.constexpr, FLIP: tl.constexpr, BIAS: tl.constexpr):
    """`(u ^ FLIP) - BIAS` for the unsigned field u of BITS (at most 16) bits at bit SHIFT, exact in float32; zero is +0.

    FLIP = BIAS = the sign bit reads two's complement. Mask, flip and power of two make one three-input logical instruction.
    """
    AT: tl.constexpr = SHIFT if SHIFT + BITS <= 23 else SHIFT - 16
    lowered = place(word, SHIFT, AT)
    bits = (lowered & (((1 << BITS) - 1) << AT)) ^ ((150 - AT << 23) + (FLIP << AT))
    return as_float(bits, AT, BIAS)


@triton.jit
def joined_field(
    word, SHIFT: tl.constexpr, BITS: tl.constexpr,
    high, HIGH_SHIFT: tl.constexpr, HIGH_BITS: tl.constexpr,
    FLIP: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """As `field`, of the field at SHIFT of `word` below the one at HIGH_SHIFT of `high`."""
    AT: tl.constexpr = SHIFT if SHIFT + BITS + HIGH_BITS <= 23 else SHIFT - 16
    lowered = place(word, SHIFT, AT)
    bits = (lowered & (((1 << BITS) - 1) << AT)) ^ ((150 - AT << 23) + (FLIP << AT))
    bits ^= place(high, HIGH_SHIFT, AT + BITS) & (((1 << HIGH_BITS) - 1) << (AT + BITS))
    return as_float(bits, AT, BIAS)


@triton.jit
def byte_field(
    low, high, BYTE: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, FLIP: tl.constexpr, BIAS: tl.constexpr
):
    """`field` at bit SHIFT of byte BYTE (0 to 7) of two words."""
    return field(low if BYTE < 4 else high, 8 * (BYTE % 4) + SHIFT, BITS, FLIP, BIAS)


@triton.jit
def half(bits):
    """The float32 value of binary16 words in the low half of uint32."""
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def brain(bits):
    """The float32 value of bfloat16 words in the low half of uint32."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def e4m3(word, BYTE: tl.constexpr):
    """The float32 value of the E4M3FN word in byte BYTE of uint32 words; 0x7f and 0xff are NaN (spec/layouts.md 5.3)."""
    # Exponent and fraction moved to float32's places are the value times 2**-120, subnormal words included.
    top = place(word, 8 * BYTE, 24)
    magnitude = (top.to(tl.int32, bitcast=True) >> 4) & -0x78100000
    value = magnitude.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((top & 0x7F000000) == 0x7F000000, float("nan"), value)


@triton.jit
def e2m1(word, SHIFT: tl.constexpr):
    """The float32 value of the E2M1 word at bit SHIFT of uint32 words; 8 is -0 (spec/layouts.md 5.2)."""
    # As with e4m3: one fraction bit and two exponent bits in float32's places are the value times 2**-126.
    bits = (place(word, SHIFT, 28).to(tl.int32, bitcast=True) >> 6) & -0x7E400000
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
