// Plain ggml blocks (spec/layouts.md 8): one binary16 scale, then the codes of 32 or 64 columns.

template <int BYTES, int STEP> struct PlainRow {
  static constexpr bool kInt8 = true, kSuper = false, kMinima = false;
  static constexpr int kStep = STEP, kVectors = STEP / 32, kGroup = 32;
  const uint8_t* blocks;

  INLINE PlainRow(const Matrix& m, int64_t n) : blocks(m.planes[0] + n * (m.columns / STEP) * BYTES) {}
  INLINE float divisor() const { return 1; }
  INLINE const uint8_t* block(int64_t s) const { return blocks + BYTES * s; }
  INLINE Floats lanes(int64_t s) const { return splat(half(block(s))); }
  INLINE Sixteen scale(int64_t s, int) const { return splat16f(half(block(s))); }
  INLINE void fetch(int64_t s) const { prefetch(block(s) + kAhead); }
};

struct GgufQ4_0 : PlainRow<18, 32> {
  static constexpr int kBias = 8;
  static constexpr bool kSigned = false;
  static constexpr Order kOrder = kNatural;
  INLINE GgufQ4_0(const Matrix& m, int64_t n) : PlainRow<18, 32>(m, n) {}
  INLINE void codes(int64_t s, Bytes* c) const { c[0] = nibble_halves(block(s) + 2); }
};

struct GgufQ5_0 : PlainRow<22, 32> {
  static constexpr int kBias = 16;
  static constexpr bool kSigned = false;
  static constexpr Order kOrder = kNatural;
  INLINE GgufQ5_0(const Matrix& m, int64_t n) : PlainRow<22, 32>(m, n) {}
  INLINE void codes(int64_t s, Bytes* c) const {
    const Bytes spread = shuffle(load4x8(block(s) + 2), load32(kSpreadBits32));
    const Bytes high = has_bits(spread, load8x4("\x01\x02\x04\x08\x10\x20\x40\x80"));
    c[0] = bor(nibble_halves(block(s) + 6), band(high, splat8(16)));
  }
};

struct GgufQ8_0 : PlainRow<34, 32> {
  static constexpr int kBias = 0;
  static constexpr bool kSigned = true;
  static constexpr Order kOrder = kNatural;
  INLINE GgufQ8_0(const Matrix& m, int64_t n) : PlainRow<34, 32>(m, n) {}
  INLINE void codes(int64_t s, Bytes* c) const { c[0] = load32(block(s) + 2); }
};

struct GgufIq4Nl : PlainRow<18, 32> {
  static constexpr int kBias = 0;
  static constexpr bool kSigned = true;
  static constexpr Order kOrder = kNatural;
  INLINE GgufIq4Nl(const Matrix& m, int64_t n) : PlainRow<18, 32>(m, n) {}
  INLINE void codes(int64_t s, Bytes* c) const { c[0] = shuffle(load16x2(grids.iq4_nl), nibble_halves(block(s) + 2)); }
};

// ggml type 42: four two-bit lanes per byte, as in q2_g64 (spec/layouts.md 8.1).
struct GgufQ2_0 : PlainRow<18, 64> {
  static constexpr int kBias = 1;
  static constexpr bool kSigned = false;
  static constexpr Order kOrder = kFourPlanes;
  INLINE GgufQ2_0(const Matrix& m, int64_t n) : PlainRow<18, 64>(m, n) {}
  INLINE void codes(int64_t s, Bytes* c) const { two_bit_planes(block(s) + 2, c); }
};
