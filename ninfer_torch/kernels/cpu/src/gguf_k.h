// K-quants (spec/layouts.md 8): 256 columns under binary16 super scales, with integer scales (and minima) of 16 or 32 columns.
//
// A cursor stands on one row; `head` unpacks the scales of one block and `codes<U>` the words of its columns 32U..32U+31.

struct Head {
  float d, dmin;
  alignas(16) int8_t scale[16];    // of 16 columns, or eight of 32 and then zeros
  alignas(16) int8_t minimum[16];  // likewise
};

INLINE uint64_t load_eight(const void* p) { uint64_t w; std::memcpy(&w, p, 8); return w; }

// Fields of a word spread over the bytes of a wider one, lowest first: eight nibbles, or eight pairs of bits.
INLINE uint64_t spread_nibbles(uint64_t x) {
  x = (x | x << 16) & 0x0000ffff0000ffff;
  x = (x | x << 8) & 0x00ff00ff00ff00ff;
  return (x | x << 4) & 0x0f0f0f0f0f0f0f0f;
}
INLINE uint64_t spread_pairs(uint64_t x) {
  x = (x | x << 24) & 0x000000ff000000ff;
  x = (x | x << 12) & 0x000f000f000f000f;
  return (x | x << 6) & 0x0303030303030303;
}
// Bytes 0..63 less 32, in two's complement.
INLINE uint64_t less_32(uint64_t bytes) {
  const uint64_t turned = bytes ^ 0x2020202020202020;
  return turned | (turned & 0x2020202020202020) * 6;
}

template <int BYTES, int GROUP> struct SuperRow {
  static constexpr bool kInt8 = true, kSuper = true;
  static constexpr int kStep = 256, kVectors = 8, kGroup = GROUP, kBytes = BYTES;
  static constexpr Order kOrder = kNatural;
  const uint8_t* blocks;

  INLINE SuperRow(const Matrix& m, int64_t n) : blocks(m.planes[0] + n * (m.columns / 256) * BYTES) {}
  INLINE float divisor() const { return 1; }
  INLINE const uint8_t* block(int64_t b) const { return blocks + BYTES * b; }
  INLINE void fetch(int64_t b) const {
    for (int at = 0; at < BYTES; at += 64) prefetch(block(b) + kAhead + at);
  }
};

struct GgufQ2K : SuperRow<84, 16> {
  static constexpr int kBias = 0;
  static constexpr bool kSigned = false, kMinima = true;
  INLINE GgufQ2K(const Matrix& m, int64_t n) : SuperRow<84, 16>(m, n) {}
  static INLINE void head(const uint8_t* p, Head& h) {
    h.d = half(p + 80);
    h.dmin = half(p + 82);
    const uint64_t low = load_eight(p), high = load_eight(p + 8), nibbles = 0x0f0f0f0f0f0f0f0f;
    store_words(h.scale, low & nibbles, high & nibbles);
    store_words(h.minimum, low >> 4 & nibbles, high >> 4 & nibbles);
  }
  template <int U> static INLINE Bytes codes(const uint8_t* p) {
    return band(shr<2 * (U % 4)>(load32(p + 16 + 32 * (U / 4))), splat8(3));
  }
};

struct GgufQ3K : SuperRow<110, 16> {
  static constexpr int kBias = 4;
  static constexpr bool kSigned = false, kMinima = false;
  INLINE GgufQ3K(const Matrix& m, int64_t n) : SuperRow<110, 16>(m, n) {}
  static INLINE void head(const uint8_t* p, Head& h) {
    h.d = half(p + 108);
    const uint64_t low = load_eight(p + 96), nibbles = 0x0f0f0f0f0f0f0f0f, pair = 0x30303030;
    const uint64_t high = load_dword(p + 104);  // byte j has the top bits of scales j, j + 4, j + 8 and j + 12
    store_words(h.scale, less_32((low & nibbles) | (high << 4 & pair) | (high << 2 & pair) << 32),
                less_32((low >> 4 & nibbles) | (high & pair) | (high >> 2 & pair) << 32));
  }
  template <int U> static INLINE Bytes codes(const uint8_t* p) {
    const Bytes low = band(shr<2 * (U % 4)>(load32(p + 32 + 32 * (U / 4))), splat8(3));
    const Bytes mask = load32(p);
    if constexpr (U < 2) return bor(low, band(shl<2 - U>(mask), splat8(4)));
    else return bor(low, band(shr<U - 2>(mask), splat8(4)));
  }
};

// The eight 6-bit scales and minima in twelve bytes that q4_k and q5_k share.
INLINE void six_bit_pairs(const uint8_t* p, Head& h) {
  const uint32_t a = load_dword(p), b = load_dword(p + 4), c = load_dword(p + 8);
  const uint32_t scales = (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030), minima = (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030);
  store_words(h.scale, (a & 0x3f3f3f3f) | uint64_t(scales) << 32, 0);
  store_words(h.minimum, (b & 0x3f3f3f3f) | uint64_t(minima) << 32, 0);
}

struct GgufQ4K : SuperRow<144, 32> {
  static constexpr int kBias = 0;
  static constexpr bool kSigned = false, kMinima = true;
  INLINE GgufQ4K(const Matrix& m, int64_t n) : SuperRow<144, 32>(m, n) {}
  static INLINE void head(const uint8_t* p, Head& h) {
    h.d = half(p);
    h.dmin = half(p + 2);
    six_bit_pairs(p + 4, h);
  }
  template <int U> static INLINE Bytes codes(const uint8_t* p) {
    return band(shr<4 * (U % 2)>(load32(p + 16 + 32 * (U / 2))), splat8(15));
  }
};

struct GgufQ5K : SuperRow<176, 32> {
  static constexpr int kBias = 0;
  static constexpr bool kSigned = false, kMinima = true;
  INLINE GgufQ5K(const Matrix& m, int64_t n) : SuperRow<176, 32>(m, n) {}
  static INLINE void head(const uint8_t* p, Head& h) {
    h.d = half(p);
    h.dmin = half(p + 2);
    six_bit_pairs(p + 4, h);
  }
  template <int U> static INLINE Bytes codes(const uint8_t* p) {
    const Bytes low = band(shr<4 * (U % 2)>(load32(p + 48 + 32 * (U / 2))), splat8(15)), high = load32(p + 16);
    if constexpr (U < 4) return bor(low, band(shl<4 - U>(high), splat8(16)));
    else return bor(low, band(shr<U - 4>(high), splat8(16)));
  }
};

struct GgufQ6K : SuperRow<210, 16> {
  static constexpr int kBias = 32;
  static constexpr bool kSigned = false, kMinima = false;
  INLINE GgufQ6K(const Matrix& m, int64_t n) : SuperRow<210, 16>(m, n) {}
  static INLINE void head(const uint8_t* p, Head& h) {
    h.d = half(p + 208);
    std::memcpy(h.scale, p + 192, 16);
  }
  template <int U> static INLINE Bytes codes(const uint8_t* p) {
    constexpr int H = U / 4, V = U % 4;
    const Bytes low = band(shr<4 * (V / 2)>(load32(p + 64 * H + 32 * (V % 2))), splat8(15)), pairs = load32(p + 128 + 32 * H);
    if constexpr (V < 2) return bor(low, band(shl<4 - 2 * V>(pairs), splat8(48)));
    else return bor(low, band(shr<2 * V - 4>(pairs), splat8(48)));
  }
};
