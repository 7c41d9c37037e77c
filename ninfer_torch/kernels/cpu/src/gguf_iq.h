// Codebook blocks of 256 columns (spec/layouts.md 8): grid entries with signs, under odd integer scales of 16 or 32 columns.
//
// The fixed factor of a format (1/8 of iq2 and iq1, 1/4 of iq3_xxs) is a power of two and goes to the super scale, which
// leaves every product exact. The grids come from kernels/grids.py.

// 2n + 1 of bytes below 64.
INLINE uint64_t odd(uint64_t bytes) { return bytes << 1 | 0x0101010101010101; }

struct GgufIq4Xs : SuperRow<136, 32> {
  static constexpr int kBias = 0;
  static constexpr bool kSigned = true, kMinima = false;
  INLINE GgufIq4Xs(const Matrix& m, int64_t n) : SuperRow<136, 32>(m, n) {}
  static INLINE void head(const uint8_t* p, Head& h) {
    h.d = half(p);
    store_words(h.scale, less_32(spread_nibbles(load_dword(p + 4)) | spread_pairs(load_word(p + 2)) << 4), 0);
  }
  template <int U> static INLINE Bytes codes(const uint8_t* p) {
    return shuffle(load16x2(grids.iq4_nl), nibble_halves(p + 8 + 16 * U));
  }
};

// The signs that four fields of seven bits stand for.
INLINE Bytes even_signs(uint32_t word) {
  return entries8(grids.even_signs, word & 127, word >> 7 & 127, word >> 14 & 127, word >> 21 & 127);
}
// A byte of 32 negative where its bit of the four bytes at p is set.
INLINE Bytes with_sign_bits(Bytes a, const uint8_t* p) {
#if NINFER_VNNI
  return negated(a, load_dword(p));
#else
  return with_sign(a, entries8(grids.signs, p[0], p[1], p[2], p[3]));
#endif
}

struct GgufIq2Xxs : SuperRow<66, 32> {
  static constexpr int kBias = 0;
  static constexpr bool kSigned = true, kMinima = false;
  INLINE GgufIq2Xxs(const Matrix& m, int64_t n) : SuperRow<66, 32>(m, n) {}
  static INLINE void head(const uint8_t* p, Head& h) {
    h.d = half(p) * 0.125f;
    uint64_t steps = 0;
    UNROLL for (int i = 0; i < 8; i++) steps |= uint64_t(p[2 + 8 * i + 7] >> 4) << 8 * i;
    store_words(h.scale, odd(steps), 0);
  }
  template <int U> static INLINE Bytes codes(const uint8_t* p) {
    const uint8_t* q = p + 2 + 8 * U;
    return with_sign(entries8(grids.iq2_xxs, q[0], q[1], q[2], q[3]), even_signs(load_dword(q + 4)));
  }
};

struct GgufIq2Xs : SuperRow<74, 16> {
  static constexpr int kBias = 0;
  static constexpr bool kSigned = true, kMinima = false;
  INLINE GgufIq2Xs(const Matrix& m, int64_t n) : SuperRow<74, 16>(m, n) {}
  static INLINE void head(const uint8_t* p, Head& h) {
    h.d = half(p) * 0.125f;
    store_words(h.scale, odd(spread_nibbles(load_dword(p + 66))), odd(spread_nibbles(load_dword(p + 70))));
  }
  template <int U> static INLINE Bytes codes(const uint8_t* p) {
    const uint8_t* q = p + 2 + 8 * U;
    const int a = load_word(q), b = load_word(q + 2), c = load_word(q + 4), d = load_word(q + 6);
    return with_sign(entries8(grids.iq2_xs, a & 511, b & 511, c & 511, d & 511),
                     entries8(grids.even_signs, a >> 9, b >> 9, c >> 9, d >> 9));
  }
};

struct GgufIq2S : SuperRow<82, 16> {
  static constexpr int kBias = 0;
  static constexpr bool kSigned = true, kMinima = false;
  INLINE GgufIq2S(const Matrix& m, int64_t n) : SuperRow<82, 16>(m, n) {}
  static INLINE void head(const uint8_t* p, Head& h) {
    h.d = half(p) * 0.125f;
    store_words(h.scale, odd(spread_nibbles(load_dword(p + 74))), odd(spread_nibbles(load_dword(p + 78))));
  }
  template <int U> static INLINE Bytes codes(const uint8_t* p) {
    const uint8_t* q = p + 2 + 4 * U;
    const int high = p[66 + U];
    return with_sign_bits(entries8(grids.iq2_s, q[0] | (high << 8 & 768), q[1] | (high << 6 & 768), q[2] | (high << 4 & 768),
                                   q[3] | (high << 2 & 768)),
                          p + 34 + 4 * U);
  }
};

struct GgufIq3Xxs : SuperRow<98, 32> {
  static constexpr int kBias = 0;
  static constexpr bool kSigned = true, kMinima = false;
  INLINE GgufIq3Xxs(const Matrix& m, int64_t n) : SuperRow<98, 32>(m, n) {}
  static INLINE void head(const uint8_t* p, Head& h) {
    h.d = half(p) * 0.25f;
    uint64_t steps = 0;
    UNROLL for (int i = 0; i < 8; i++) steps |= uint64_t(p[66 + 4 * i + 3] >> 4) << 8 * i;
    store_words(h.scale, odd(steps), 0);
  }
  template <int U> static INLINE Bytes codes(const uint8_t* p) {
    const uint8_t* q = p + 2 + 8 * U;
    const int index[8] = {q[0], q[1], q[2], q[3], q[4], q[5], q[6], q[7]};
    return with_sign(entries4(grids.iq3_xxs, index), even_signs(load_dword(p + 66 + 4 * U)));
  }
};

struct GgufIq3S : SuperRow<110, 32> {
  static constexpr int kBias = 0;
  static constexpr bool kSigned = true, kMinima = false;
  INLINE GgufIq3S(const Matrix& m, int64_t n) : SuperRow<110, 32>(m, n) {}
  static INLINE void head(const uint8_t* p, Head& h) {
    h.d = half(p);
    store_words(h.scale, odd(spread_nibbles(load_dword(p + 106))), 0);
  }
  template <int U> static INLINE Bytes codes(const uint8_t* p) {
    const uint8_t* q = p + 2 + 8 * U;
    const int high = p[66 + U];
    const int index[8] = {q[0] | (high << 8 & 256), q[1] | (high << 7 & 256), q[2] | (high << 6 & 256), q[3] | (high << 5 & 256),
                          q[4] | (high << 4 & 256), q[5] | (high << 3 & 256), q[6] | (high << 2 & 256), q[7] | (high << 1 & 256)};
    return with_sign_bits(entries4(grids.iq3_s, index), p + 74 + 4 * U);
  }
};

// Ternary points with a shift of one eighth: eight times the value is 8 * point + 1 or - 1.
INLINE Bytes eighths(Bytes points, Bytes shifts) {
  return badd(band(shl<3>(points), splat8(0xf8)), shifts);
}
alignas(16) static constexpr int8_t kShiftRows[16] = {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1};

struct GgufIq1S : SuperRow<50, 32> {
  static constexpr int kBias = 0;
  static constexpr bool kSigned = true, kMinima = false;
  INLINE GgufIq1S(const Matrix& m, int64_t n) : SuperRow<50, 32>(m, n) {}
  static INLINE void head(const uint8_t* p, Head& h) {
    h.d = half(p) * 0.125f;
    uint64_t steps = 0;
    UNROLL for (int i = 0; i < 8; i++) steps |= uint64_t(p[35 + 2 * i] >> 4 & 7) << 8 * i;
    store_words(h.scale, odd(steps), 0);
  }
  template <int U> static INLINE Bytes codes(const uint8_t* p) {
    const uint8_t* q = p + 2 + 4 * U;
    const int high = load_word(p + 34 + 2 * U);
    const Bytes points = entries8(grids.iq1_s, q[0] | (high << 8 & 1792), q[1] | (high << 5 & 1792), q[2] | (high << 2 & 1792),
                                  q[3] | (high >> 1 & 1792));
    return eighths(points, splat8(high & 0x8000 ? -1 : 1));
  }
};

struct GgufIq1M : SuperRow<56, 16> {
  static constexpr int kBias = 0;
  static constexpr bool kSigned = true, kMinima = false;
  INLINE GgufIq1M(const Matrix& m, int64_t n) : SuperRow<56, 16>(m, n) {}
  static INLINE void head(const uint8_t* p, Head& h) {
    // The binary16 super scale is spread over the top nibbles of the four scale words.
    const uint8_t* s = p + 48;
    const uint16_t d = uint16_t(s[1] >> 4 | (s[3] & 0xf0) | (s[5] & 0xf0) << 4 | (s[7] & 0xf0) << 8);
    h.d = half(&d) * 0.125f;
    uint64_t steps[2] = {0, 0};
    UNROLL for (int i = 0; i < 16; i++) steps[i / 8] |= uint64_t(load_word(s + 2 * (i / 4)) >> 3 * (i % 4) & 7) << 8 * (i % 8);
    store_words(h.scale, odd(steps[0]), odd(steps[1]));
  }
  template <int U> static INLINE Bytes codes(const uint8_t* p) {
    const uint8_t* q = p + 4 * U;
    const int a = p[32 + 2 * U], b = p[33 + 2 * U];
    const Bytes points = entries8(grids.iq1_s, q[0] | (a << 8 & 1792), q[1] | (a << 4 & 1792), q[2] | (b << 8 & 1792),
                                  q[3] | (b << 4 & 1792));
    return eighths(points, entries8(kShiftRows, a >> 3 & 1, a >> 7, b >> 3 & 1, b >> 7));
  }
};
