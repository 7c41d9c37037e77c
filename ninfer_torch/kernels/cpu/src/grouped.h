// row_split_k128_v1 (spec/layouts.md 3): codes of 2 to 8 bits and one binary16 scale per group.
//
// Every cursor stands on one row. `codes(s, c)` decodes step s as unsigned words (value = word - kBias) or, when kSigned, as
// int8 codes; `lanes(s)` gives the scale of each int32 lane and `scale(s, h)` that of each code in half h of every vector.

template <int G, int BASE, int HIGH> struct GroupedRow {
  static constexpr bool kInt8 = true, kSuper = false, kMinima = false;
  static constexpr int kGroup = 32;  // columns under one scale, of the weight or of the activations
  const uint8_t *base, *high, *scales;

  INLINE GroupedRow(const Matrix& m, int64_t n) {
    const int64_t groups = (m.columns + 127) / 128 * 128 / G;
    base = m.planes[0] + n * groups * BASE;
    high = m.planes[1] + n * groups * HIGH;
    scales = m.planes[HIGH ? 2 : 1] + n * groups * 2;
  }
  INLINE float scale_of(int64_t group) const { return half(scales + 2 * group); }
  INLINE float divisor() const { return 1; }
};

template <int BITS> struct FourBitBase : GroupedRow<64, 32, (BITS - 4) * 8> {
  static constexpr int kStep = 64, kVectors = 2, kBias = 1 << (BITS - 1);
  static constexpr bool kSigned = false;
  static constexpr Order kOrder = kEvenOdd;
  INLINE FourBitBase(const Matrix& m, int64_t n) : GroupedRow<64, 32, (BITS - 4) * 8>(m, n) {}

  INLINE Floats lanes(int64_t s) const { return splat(this->scale_of(s)); }
  INLINE Sixteen scale(int64_t s, int) const { return splat16f(this->scale_of(s)); }
  INLINE void fetch(int64_t s) const {
    prefetch(this->base + 32 * s + kAhead);
    if constexpr (BITS > 4) { if ((s & 3) == 0) prefetch(this->high + (BITS - 4) * 8 * s + 512); }
  }
  INLINE void codes(int64_t s, Bytes* c) const {
    // Two's complement words: turning the top bit makes them code + 2^(BITS - 1).
    const Bytes v = load32(this->base + 32 * s);
    if constexpr (BITS == 4) {
      const Bytes turned = bxor(v, splat8(0x88));
      c[0] = low_nibbles(turned);
      c[1] = high_nibbles(turned);
    } else if constexpr (BITS == 5) {
      const Bytes spread = shuffle(load8x4(this->high + 8 * s), load32(kSpreadPairs64));
      const Bytes even = has_bits(spread, load4x8("\x01\x04\x10\x40")), odd = has_bits(spread, load4x8("\x02\x08\x20\x80"));
      // A clear high bit is a code of the upper half after the turn.
      c[0] = badd(low_nibbles(v), bandnot(even, splat8(16)));
      c[1] = badd(high_nibbles(v), bandnot(odd, splat8(16)));
    } else {
      // Word w of the spread high plane is one byte twice: lanes 4w..4w+3 of the group, two bits each.
      const Bytes twice = double_bytes(this->high + 16 * s);
      const Bytes low = splat16(0x0030), top = splat16(0x3000), turn = splat8(0x20);
      const Bytes even = bor(band(shl<4>(twice), low), band(twice, top));
      const Bytes odd = bor(band(shl<2>(twice), low), band(shr<2>(twice), top));
      c[0] = bxor(bor(low_nibbles(v), even), turn);
      c[1] = bxor(bor(high_nibbles(v), odd), turn);
    }
  }
};

// Four two-bit lanes per byte: sixteen bytes are 64 columns, plane p of which holds columns 4j + p.
INLINE void two_bit_planes(const uint8_t* p, Bytes* c) {
  const Bytes v = load16x2(p), mask = splat8(3);
  c[0] = band(shr_halves<0, 2>(v), mask);
  c[1] = band(shr_halves<4, 6>(v), mask);
}

template <int G, bool TERNARY> struct TwoBitBase : GroupedRow<G, G / 4, 0> {
  static constexpr int kStep = 64, kVectors = 2, kBias = TERNARY ? 2 : 1;
  static constexpr bool kSigned = false;
  static constexpr Order kOrder = kFourPlanes;
  INLINE TwoBitBase(const Matrix& m, int64_t n) : GroupedRow<G, G / 4, 0>(m, n) {}

  INLINE Floats lanes(int64_t s) const { return splat(this->scale_of(s / (G / 64))); }
  INLINE Sixteen scale(int64_t s, int) const { return splat16f(this->scale_of(s / (G / 64))); }
  INLINE void fetch(int64_t s) const { if ((s & 3) == 0) prefetch(this->base + 16 * s + kAhead); }
  INLINE void codes(int64_t s, Bytes* c) const {
    two_bit_planes(this->base + 16 * s, c);
    if constexpr (TERNARY) {
      c[0] = bxor(c[0], splat8(2));
      c[1] = bxor(c[1], splat8(2));
    }
  }
};

struct Q8G32 : GroupedRow<32, 32, 0> {
  static constexpr int kStep = 32, kVectors = 1, kBias = 0;
  static constexpr bool kSigned = true;
  static constexpr Order kOrder = kNatural;
  INLINE Q8G32(const Matrix& m, int64_t n) : GroupedRow<32, 32, 0>(m, n) {}

  INLINE Floats lanes(int64_t s) const { return splat(scale_of(s)); }
  INLINE Sixteen scale(int64_t s, int) const { return splat16f(scale_of(s)); }
  INLINE void fetch(int64_t s) const { prefetch(base + 32 * s + kAhead); }
  INLINE void codes(int64_t s, Bytes* c) const { c[0] = load32(base + 32 * s); }
};
