// 16-bit floating words in portable arithmetic, exact in both directions (round to nearest even when narrowing).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace ninfer {

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline uint16_t load_word(const void* p) {
  uint16_t word;
  std::memcpy(&word, p, 2);
  return word;
}

inline uint32_t load_dword(const void* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 31) return from_bits(sign | 0x7f800000 | fraction << 13);
  if (exponent == 0) return from_bits(sign | to_bits(float(fraction) * 0x1p-24f));
  return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = to_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000) return uint16_t(sign | uint32_t(std::nearbyint(from_bits(magnitude) * 0x1p24f)));
  return uint16_t(sign | (magnitude + 0xfff + (magnitude >> 13 & 1) - 0x38000000) >> 13);
}

inline float bfloat_to_float(uint16_t word) { return from_bits(uint32_t(word) << 16); }

inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// E4M3FN: bias 7, subnormals, no infinity; 0x7f and 0xff are NaN (spec/layouts.md 5.3).
inline float e4m3_to_float(uint8_t word) {
  const uint32_t sign = uint32_t(word & 0x80) << 24, magnitude = word & 0x7f;
  if (magnitude == 0x7f) return from_bits(sign | 0x7fc00000);
  if (magnitude < 8) return from_bits(sign | to_bits(float(magnitude) * 0x1p-9f));
  return from_bits(sign | ((magnitude << 20) + 0x3c000000));
}

}  // namespace ninfer
