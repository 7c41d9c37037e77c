// The vector vocabulary of the row kernels in portable C++: what every other instruction set must equal.
//
// Bytes: 32 bytes in two halves of 16. Ints and Floats: 8 lanes; lane i of a dot product holds bytes 4i..4i+3.

struct Bytes { uint8_t b[32]; };
struct Ints { int32_t i[8]; };
struct Floats { float f[8]; };
struct Scales { int16_t w[16]; };  // by 16 columns

static constexpr bool kByteDot = false;  // whether unsigned bytes up to 255 multiply without saturation
static constexpr int kWide = 8;
using Wide = Floats;

#define EACH(n, expression) for (int i = 0; i < n; i++) { expression; }

INLINE float half(const void* p) { return half_to_float(load_word(p)); }
INLINE uint16_t narrow_half(float v) { return float_to_half(v); }

INLINE Bytes load32(const void* p) { Bytes r; std::memcpy(r.b, p, 32); return r; }
INLINE void store32(void* p, Bytes v) { std::memcpy(p, v.b, 32); }
INLINE void store_words(void* p, uint64_t low, uint64_t high) { std::memcpy(p, &low, 8); std::memcpy(static_cast<uint8_t*>(p) + 8, &high, 8); }
INLINE Bytes load16x2(const void* p) { Bytes r; std::memcpy(r.b, p, 16); std::memcpy(r.b + 16, p, 16); return r; }
INLINE Bytes load8x4(const void* p) { Bytes r; EACH(4, std::memcpy(r.b + 8 * i, p, 8)) return r; }
INLINE Bytes load4x8(const void* p) { Bytes r; EACH(8, std::memcpy(r.b + 4 * i, p, 4)) return r; }
INLINE Bytes double_bytes(const uint8_t* p) { Bytes r; EACH(32, r.b[i] = p[i / 2]) return r; }  // each of 16 twice
INLINE Bytes splat16(int v) { Bytes r; EACH(32, r.b[i] = uint8_t(v >> 8 * (i & 1))) return r; }
INLINE Bytes splat8(int v) { Bytes r; std::memset(r.b, v, 32); return r; }
INLINE Bytes band(Bytes a, Bytes b) { EACH(32, a.b[i] &= b.b[i]) return a; }
INLINE Bytes bor(Bytes a, Bytes b) { EACH(32, a.b[i] |= b.b[i]) return a; }
INLINE Bytes bxor(Bytes a, Bytes b) { EACH(32, a.b[i] ^= b.b[i]) return a; }
INLINE Bytes bandnot(Bytes a, Bytes b) { EACH(32, a.b[i] = uint8_t(~a.b[i] & b.b[i])) return a; }
INLINE Bytes badd(Bytes a, Bytes b) { EACH(32, a.b[i] = uint8_t(a.b[i] + b.b[i])) return a; }
INLINE Bytes bsub(Bytes a, Bytes b) { EACH(32, a.b[i] = uint8_t(a.b[i] - b.b[i])) return a; }
// Shifts leave stray bits of the neighbouring byte on vector units: callers mask what they keep.
template <int N> INLINE Bytes shr(Bytes a) { EACH(32, a.b[i] = uint8_t(a.b[i] >> N)) return a; }
template <int N> INLINE Bytes shl(Bytes a) { EACH(32, a.b[i] = uint8_t(a.b[i] << N)) return a; }
template <int LOW, int HIGH> INLINE Bytes shr_halves(Bytes a) {
  EACH(32, a.b[i] = uint8_t(a.b[i] >> (i < 16 ? LOW : HIGH))) return a;
}
// Byte i of each half picks byte index[i] (0..15) of that half.
INLINE Bytes shuffle(Bytes table, Bytes index) {
  Bytes r; EACH(32, r.b[i] = table.b[(i & 16) + (index.b[i] & 15)]) return r;
}
INLINE Bytes has_bits(Bytes a, Bytes mask) { EACH(32, a.b[i] = (a.b[i] & mask.b[i]) == mask.b[i] ? 255 : 0) return a; }
INLINE Bytes is_equal(Bytes a, Bytes b) { EACH(32, a.b[i] = a.b[i] == b.b[i] ? 255 : 0) return a; }
INLINE bool any_set(Bytes a) { int s = 0; EACH(32, s |= a.b[i]) return s != 0; }
INLINE Bytes with_sign(Bytes a, Bytes s) {  // s is +1 or -1 everywhere
  EACH(32, a.b[i] = uint8_t(int8_t(a.b[i]) * int8_t(s.b[i]))) return a;
}
INLINE Bytes entries8(const int8_t* table, int a, int b, int c, int d) {
  Bytes r;
  std::memcpy(r.b, table + 8 * a, 8); std::memcpy(r.b + 8, table + 8 * b, 8);
  std::memcpy(r.b + 16, table + 8 * c, 8); std::memcpy(r.b + 24, table + 8 * d, 8);
  return r;
}
INLINE Bytes entries4(const int8_t* table, const int (&index)[8]) {
  Bytes r; EACH(8, std::memcpy(r.b + 4 * i, table + 4 * index[i], 4)) return r;
}

INLINE Floats zerof() { return Floats{}; }
INLINE Floats splat(float v) { Floats r; EACH(8, r.f[i] = v) return r; }
INLINE Floats loadf(const float* p) { Floats r; std::memcpy(r.f, p, 32); return r; }
INLINE void storef(float* p, Floats v) { std::memcpy(p, v.f, 32); }
// a0 b0 a1 b1 ... of eight each.
INLINE void store_interleaved(float* p, Floats a, Floats b) { EACH(8, (p[2 * i] = a.f[i], p[2 * i + 1] = b.f[i])) }
INLINE Floats addf(Floats a, Floats b) { EACH(8, a.f[i] += b.f[i]) return a; }
INLINE Floats subf(Floats a, Floats b) { EACH(8, a.f[i] -= b.f[i]) return a; }
INLINE Floats mulf(Floats a, Floats b) { EACH(8, a.f[i] *= b.f[i]) return a; }
INLINE Floats divf(Floats a, Floats b) { EACH(8, a.f[i] /= b.f[i]) return a; }
INLINE Floats muladd(Floats a, Floats b, Floats c) { EACH(8, c.f[i] += a.f[i] * b.f[i]) return c; }
INLINE float sumf(Floats a) {
  return ((a.f[0] + a.f[4]) + (a.f[2] + a.f[6])) + ((a.f[1] + a.f[5]) + (a.f[3] + a.f[7]));
}
INLINE float max_magnitude32(const float* p) {
  float m[8] = {};
  bool unordered = false;
  for (int k = 0; k < 32; k++) {
    const float a = std::fabs(p[k]);
    m[k & 7] = a > m[k & 7] ? a : m[k & 7];
    unordered |= !(a <= 3.4028235e38f);
  }
  float best = 0;
  EACH(8, best = m[i] > best ? m[i] : best)
  return unordered ? NAN : best;
}
// round(p / scale) as int8, within [-127, 127].
INLINE void quantize32(const float* p, float scale, int8_t* out) {
  for (int k = 0; k < 32; k++) {
    const float v = p[k] / scale;
    out[k] = int8_t(int(std::nearbyint(v < -127 ? -127 : v > 127 ? 127 : v)));
  }
}

// Sixteen floats: the unit of decoded values. H counts the halves of Bytes.
struct Sixteen { float f[16]; };
INLINE Sixteen splat16f(float v) { Sixteen r; EACH(16, r.f[i] = v) return r; }
INLINE Sixteen halves16f(float low, float high) { Sixteen r; EACH(16, r.f[i] = i < 8 ? low : high) return r; }
INLINE Sixteen load16f(const float* p) { Sixteen r; std::memcpy(r.f, p, 64); return r; }
INLINE void store16f(float* p, Sixteen v) { std::memcpy(p, v.f, 64); }
INLINE Sixteen add16f(Sixteen a, Sixteen b) { EACH(16, a.f[i] += b.f[i]) return a; }
INLINE Sixteen sub16f(Sixteen a, Sixteen b) { EACH(16, a.f[i] -= b.f[i]) return a; }
INLINE Sixteen mul16f(Sixteen a, Sixteen b) { EACH(16, a.f[i] *= b.f[i]) return a; }
INLINE Sixteen div16f(Sixteen a, Sixteen b) { EACH(16, a.f[i] /= b.f[i]) return a; }
INLINE Sixteen muladd16f(Sixteen a, Sixteen b, Sixteen c) { EACH(16, c.f[i] += a.f[i] * b.f[i]) return c; }
INLINE float sum16f(Sixteen a) { Floats r; EACH(8, r.f[i] = a.f[i] + a.f[i + 8]) return sumf(r); }
// Signed bytes of half H as floats.
template <int H> INLINE Sixteen widen(Bytes v) { Sixteen r; EACH(16, r.f[i] = float(int8_t(v.b[16 * H + i]))) return r; }
// The sign of lane i turned where byte 16H + i has its top bit set.
template <int H> INLINE Sixteen turn_sign(Sixteen v, Bytes s) {
  EACH(16, v.f[i] = from_bits(to_bits(v.f[i]) ^ uint32_t(s.b[16 * H + i] & 0x80) << 24)) return v;
}
// The sixteen E4M3FN words at p, NaN included.
INLINE Sixteen e4m3x16(const uint8_t* p) { Sixteen r; EACH(16, r.f[i] = e4m3_to_float(p[i])) return r; }
// The four E4M3FN words at p, each in two neighbouring lanes.
INLINE Floats e4m3x4_pairs(const uint8_t* p) { Floats r; EACH(8, r.f[i] = e4m3_to_float(p[i / 2])) return r; }
// Finite E4M3FN words of half H, times 2^-8.
template <int H> INLINE Sixteen e4m3_small(Bytes v) {
  Sixteen r; EACH(16, r.f[i] = e4m3_to_float(v.b[16 * H + i]) * 0x1p-8f) return r;
}

INLINE Ints zeroi() { return Ints{}; }
INLINE Ints loadi(const int32_t* p) { Ints r; std::memcpy(r.i, p, 32); return r; }
INLINE Ints addi(Ints a, Ints b) { EACH(8, a.i[i] += b.i[i]) return a; }
INLINE Floats to_float(Ints a) { Floats r; EACH(8, r.f[i] = float(a.i[i])) return r; }
// start + sums of four u8 * s8. dot1 takes u <= 127, dot2 u <= 63; dot_signed takes int8 codes.
INLINE Ints dot1(Ints start, Bytes u, Bytes x) {
  EACH(32, start.i[i / 4] += int(u.b[i]) * int8_t(x.b[i])) return start;
}
INLINE Ints dot2(Ints start, Bytes u, Bytes x, Bytes v, Bytes y) { return dot1(dot1(start, u, x), v, y); }
INLINE Ints dot_signed(Ints start, Bytes c, Bytes x) {
  EACH(32, start.i[i / 4] += int(int8_t(c.b[i])) * int8_t(x.b[i])) return start;
}
// Scales of 256 columns: sixteen of 16 columns, or eight of 32.
template <int GROUP> INLINE Scales load_scales(const int8_t* p) {
  Scales r; EACH(16, r.w[i] = p[GROUP == 16 ? i : i / 2]) return r;
}
template <int GROUP, int U> INLINE Ints dot_scaled(Ints acc, Bytes u, Bytes x, const Scales& s) {
  EACH(32, acc.i[i / 4] += int(u.b[i]) * int8_t(x.b[i]) * s.w[2 * U + i / 16]) return acc;
}
template <int GROUP, int U> INLINE Ints dot_scaled_signed(Ints acc, Bytes c, Bytes x, const Scales& s) {
  EACH(32, acc.i[i / 4] += int(int8_t(c.b[i])) * int8_t(x.b[i]) * s.w[2 * U + i / 16]) return acc;
}
// Sum over groups of scale times the sum of the group's codes; `sums` holds sixteen sums of 16 and then eight of 32.
template <int GROUP> INLINE Ints dot_sums(const Scales& s, const int16_t* sums) {
  Ints r{}; EACH(16, r.i[i / 2] += int(s.w[i]) * sums[i]) return r;
}
template <int FACTOR> INLINE Ints minus_times(Ints a, Ints b) { EACH(8, a.i[i] -= FACTOR * b.i[i]) return a; }

INLINE Wide wide_load(const float* p) { return loadf(p); }
INLINE Wide wide_zero() { return zerof(); }
INLINE Wide wide_muladd(Wide a, Wide b, Wide c) { return muladd(a, b, c); }
INLINE float wide_sum(Wide a) { return sumf(a); }

INLINE void widen_halves(const uint16_t* p, float* out, int64_t n) { for (int64_t i = 0; i < n; i++) out[i] = half_to_float(p[i]); }
INLINE void prefetch(const void*) {}

#undef EACH
INLINE void narrow_halves(const float* p, uint16_t* out, int64_t n) { for (int64_t i = 0; i < n; i++) out[i] = float_to_half(p[i]); }
INLINE void narrow_bfloats(const float* p, uint16_t* out, int64_t n) { for (int64_t i = 0; i < n; i++) out[i] = float_to_bfloat(p[i]); }
