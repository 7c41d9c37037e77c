// block_scale_k16_m128x4_v1 (spec/layouts.md 5): E2M1 codes, an E4M3FN scale per 16 columns in swizzled tiles, float32 divisors.

// Twice the E2M1 values, plus 12 to keep them unsigned.
alignas(16) static constexpr uint8_t kE2m1Words[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
alignas(16) static constexpr uint8_t kE2m1Magnitudes[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, 1, 2, 3, 4, 6, 8, 12};

struct Nvfp4 {
  static constexpr bool kInt8 = true, kSuper = false, kMinima = false, kSigned = false;
  static constexpr int kStep = 64, kVectors = 2, kGroup = 16, kBias = 12;
  static constexpr Order kOrder = kEvenOdd;
  const uint8_t *base, *tiles;
  float row_divisor;

  INLINE Nvfp4(const Matrix& m, int64_t n) {
    const int64_t parent = m.row_begin + n, lane = parent % 128;
    base = m.planes[0] + n * (m.columns / 2);
    tiles = m.planes[1] + parent / 128 * (m.columns / 64) * 512 + lane % 32 * 16 + lane / 32 * 4;
    std::memcpy(&row_divisor, m.planes[2] + 4 * (parent / (m.parent_rows / m.divisors)), 4);
  }
  INLINE float divisor() const { return row_divisor; }
  INLINE Floats lanes(int64_t s) const { return mulf(e4m3x4_pairs(tiles + 512 * s), splat(0.5f)); }
  INLINE Sixteen scale(int64_t s, int h) const {
    alignas(32) float by_lane[8];
    storef(by_lane, lanes(s));
    return halves16f(by_lane[4 * h], by_lane[4 * h + 2]);
  }
  INLINE void fetch(int64_t s) const {
    prefetch(base + 32 * s + kAhead);
    fetch_scales(s);
  }
  // Four rows share the cache line of a tile: the next four's.
  INLINE void fetch_scales(int64_t s) const { prefetch(tiles + 512 * s + 64); }
  INLINE void codes(int64_t s, Bytes* c) const {
    const Bytes v = load32(base + 32 * s), table = load16x2(kE2m1Words);
    c[0] = shuffle(table, low_nibbles(v));
    c[1] = shuffle(table, high_nibbles(v));
  }
  // Exact values of step s: magnitudes first, so that the word of -0 keeps its sign, and one division of the exact product.
  INLINE void exact(int64_t s, float* out) const {
    const Bytes v = load32(base + 32 * s), table = load16x2(kE2m1Magnitudes);
    const Bytes magnitudes[2] = {shuffle(table, low_nibbles(v)), shuffle(table, high_nibbles(v))};
    const Bytes signs[2] = {shl<4>(v), v};
    const Sixteen by = splat16f(row_divisor);
    unroll<2>([&](auto vector) INLINE_LAMBDA {
      constexpr int V = decltype(vector)::value;
      unroll<2>([&](auto part) INLINE_LAMBDA {
        constexpr int H = decltype(part)::value;
        const Sixteen product = mul16f(widen<H>(magnitudes[V]), scale(s, H));
        store16f(out + 32 * V + 16 * H, div16f(turn_sign<H>(product, signs[V]), by));
      });
    });
  }
};
