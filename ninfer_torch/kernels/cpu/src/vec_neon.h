// The vector vocabulary in NEON, as every 64-bit ARM processor has it; with NINFER_DOTPROD also four-byte dot products.
// vec_scalar.h says what each name means.

struct Bytes { uint8x16_t v[2]; };
struct Ints { int32x4_t v[2]; };
struct Floats { float32x4_t v[2]; };
struct Scales { int16x8_t v[2]; };  // by 16 columns

static constexpr bool kByteDot = false;
static constexpr int kWide = 8;
using Wide = Floats;

#define BOTH(expression) { constexpr int h = 0; expression; } { constexpr int h = 1; expression; }

INLINE float half(const void* p) { return float(vget_lane_f32(vget_low_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(load_word(p))))), 0)); }
INLINE uint16_t narrow_half(float v) { return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(v))), 0); }

INLINE Bytes load32(const void* p) { const auto* b = static_cast<const uint8_t*>(p); return {{vld1q_u8(b), vld1q_u8(b + 16)}}; }
INLINE void store32(void* p, Bytes a) { auto* b = static_cast<uint8_t*>(p); vst1q_u8(b, a.v[0]); vst1q_u8(b + 16, a.v[1]); }
INLINE void store_words(void* p, uint64_t low, uint64_t high) {
  vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_u64(vcombine_u64(vcreate_u64(low), vcreate_u64(high))));
}
INLINE Bytes load16x2(const void* p) { const uint8x16_t b = vld1q_u8(static_cast<const uint8_t*>(p)); return {{b, b}}; }
INLINE Bytes load8x4(const void* p) { const uint8x8_t b = vld1_u8(static_cast<const uint8_t*>(p)); return {{vcombine_u8(b, b), vcombine_u8(b, b)}}; }
INLINE Bytes load4x8(const void* p) { const uint8x16_t b = vreinterpretq_u8_u32(vdupq_n_u32(load_dword(p))); return {{b, b}}; }
INLINE Bytes double_bytes(const uint8_t* p) { const uint8x16_t b = vld1q_u8(p); return {{vzip1q_u8(b, b), vzip2q_u8(b, b)}}; }
INLINE Bytes splat16(int v) { const uint8x16_t b = vreinterpretq_u8_u16(vdupq_n_u16(uint16_t(v))); return {{b, b}}; }
INLINE Bytes splat8(int v) { const uint8x16_t b = vdupq_n_u8(uint8_t(v)); return {{b, b}}; }
INLINE Bytes band(Bytes a, Bytes b) { BOTH(a.v[h] = vandq_u8(a.v[h], b.v[h])) return a; }
INLINE Bytes bor(Bytes a, Bytes b) { BOTH(a.v[h] = vorrq_u8(a.v[h], b.v[h])) return a; }
INLINE Bytes bxor(Bytes a, Bytes b) { BOTH(a.v[h] = veorq_u8(a.v[h], b.v[h])) return a; }
INLINE Bytes bandnot(Bytes a, Bytes b) { BOTH(a.v[h] = vbicq_u8(b.v[h], a.v[h])) return a; }
INLINE Bytes badd(Bytes a, Bytes b) { BOTH(a.v[h] = vaddq_u8(a.v[h], b.v[h])) return a; }
INLINE Bytes bsub(Bytes a, Bytes b) { BOTH(a.v[h] = vsubq_u8(a.v[h], b.v[h])) return a; }
template <int N> INLINE uint8x16_t shifted_right(uint8x16_t a) { if constexpr (N == 0) return a; else return vshrq_n_u8(a, N); }
template <int N> INLINE Bytes shr(Bytes a) { BOTH(a.v[h] = shifted_right<N>(a.v[h])) return a; }
template <int N> INLINE Bytes shl(Bytes a) { BOTH(a.v[h] = vshlq_n_u8(a.v[h], N)) return a; }
template <int LOW, int HIGH> INLINE Bytes shr_halves(Bytes a) { return {{shifted_right<LOW>(a.v[0]), shifted_right<HIGH>(a.v[1])}}; }
INLINE Bytes shuffle(Bytes table, Bytes index) {
  BOTH(index.v[h] = vqtbl1q_u8(table.v[h], vandq_u8(index.v[h], vdupq_n_u8(15)))) return index;
}
INLINE Bytes has_bits(Bytes a, Bytes mask) { BOTH(a.v[h] = vceqq_u8(vandq_u8(a.v[h], mask.v[h]), mask.v[h])) return a; }
INLINE Bytes is_equal(Bytes a, Bytes b) { BOTH(a.v[h] = vceqq_u8(a.v[h], b.v[h])) return a; }
INLINE bool any_set(Bytes a) { return vmaxvq_u8(vorrq_u8(a.v[0], a.v[1])) != 0; }
INLINE int8x16_t as_signed(uint8x16_t a) { return vreinterpretq_s8_u8(a); }
INLINE Bytes with_sign(Bytes a, Bytes s) {
  BOTH(a.v[h] = vreinterpretq_u8_s8(vmulq_s8(as_signed(a.v[h]), as_signed(s.v[h])))) return a;
}
INLINE uint8x8_t entry8(const int8_t* table, int i) { return vreinterpret_u8_s8(vld1_s8(table + 8 * i)); }
INLINE Bytes entries8(const int8_t* table, int a, int b, int c, int d) {
  return {{vcombine_u8(entry8(table, a), entry8(table, b)), vcombine_u8(entry8(table, c), entry8(table, d))}};
}
INLINE Bytes entries4(const int8_t* table, const int (&index)[8]) {
  uint32_t words[8];
  UNROLL for (int i = 0; i < 8; i++) words[i] = load_dword(table + 4 * index[i]);
  return load32(words);
}

INLINE Floats splat(float v) { return {{vdupq_n_f32(v), vdupq_n_f32(v)}}; }
INLINE Floats zerof() { return splat(0); }
INLINE Floats loadf(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4)}}; }
INLINE void storef(float* p, Floats a) { vst1q_f32(p, a.v[0]); vst1q_f32(p + 4, a.v[1]); }
INLINE void store_interleaved(float* p, Floats a, Floats b) { BOTH(vst2q_f32(p + 8 * h, (float32x4x2_t{{a.v[h], b.v[h]}}))) }
INLINE Floats addf(Floats a, Floats b) { BOTH(a.v[h] = vaddq_f32(a.v[h], b.v[h])) return a; }
INLINE Floats subf(Floats a, Floats b) { BOTH(a.v[h] = vsubq_f32(a.v[h], b.v[h])) return a; }
INLINE Floats mulf(Floats a, Floats b) { BOTH(a.v[h] = vmulq_f32(a.v[h], b.v[h])) return a; }
INLINE Floats divf(Floats a, Floats b) { BOTH(a.v[h] = vdivq_f32(a.v[h], b.v[h])) return a; }
INLINE Floats muladd(Floats a, Floats b, Floats c) { BOTH(c.v[h] = vfmaq_f32(c.v[h], a.v[h], b.v[h])) return c; }
INLINE float sumf(Floats a) { return vaddvq_f32(vaddq_f32(a.v[0], a.v[1])); }
INLINE float max_magnitude32(const float* p) {
  // Magnitudes order like integers, and infinities and NaN stand above every number.
  uint32x4_t m = vdupq_n_u32(0);
  for (int k = 0; k < 32; k += 4) m = vmaxq_u32(m, vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(p + k))));
  const uint32_t bits = vmaxvq_u32(m);
  return bits >= 0x7f800000 ? NAN : from_bits(bits);
}
INLINE int32x4_t quantized4(const float* p, float32x4_t by) {
  return vcvtnq_s32_f32(vminq_f32(vdupq_n_f32(127), vmaxq_f32(vdupq_n_f32(-127), vdivq_f32(vld1q_f32(p), by))));
}
INLINE void quantize32(const float* p, float scale, int8_t* out) {
  const float32x4_t by = vdupq_n_f32(scale);
  for (int k = 0; k < 32; k += 8) {
    const int16x8_t words = vcombine_s16(vmovn_s32(quantized4(p + k, by)), vmovn_s32(quantized4(p + k + 4, by)));
    vst1_s8(out + k, vmovn_s16(words));
  }
}

#define EACH4(expression) UNROLL for (int q = 0; q < 4; q++) { expression; }

struct Sixteen { float32x4_t v[4]; };
INLINE Sixteen pair16f(Floats low, Floats high) { return {{low.v[0], low.v[1], high.v[0], high.v[1]}}; }
INLINE Sixteen splat16f(float v) { return pair16f(splat(v), splat(v)); }
INLINE Sixteen halves16f(float low, float high) { return pair16f(splat(low), splat(high)); }
INLINE Sixteen load16f(const float* p) { return pair16f(loadf(p), loadf(p + 8)); }
INLINE void store16f(float* p, Sixteen a) { EACH4(vst1q_f32(p + 4 * q, a.v[q])) }
INLINE Sixteen add16f(Sixteen a, Sixteen b) { EACH4(a.v[q] = vaddq_f32(a.v[q], b.v[q])) return a; }
INLINE Sixteen sub16f(Sixteen a, Sixteen b) { EACH4(a.v[q] = vsubq_f32(a.v[q], b.v[q])) return a; }
INLINE Sixteen mul16f(Sixteen a, Sixteen b) { EACH4(a.v[q] = vmulq_f32(a.v[q], b.v[q])) return a; }
INLINE Sixteen div16f(Sixteen a, Sixteen b) { EACH4(a.v[q] = vdivq_f32(a.v[q], b.v[q])) return a; }
INLINE Sixteen muladd16f(Sixteen a, Sixteen b, Sixteen c) { EACH4(c.v[q] = vfmaq_f32(c.v[q], a.v[q], b.v[q])) return c; }
INLINE float sum16f(Sixteen a) { return vaddvq_f32(vaddq_f32(vaddq_f32(a.v[0], a.v[1]), vaddq_f32(a.v[2], a.v[3]))); }
struct Dwords16 { int32x4_t v[4]; };
INLINE Dwords16 sign_extended(uint8x16_t bytes) {
  const int16x8_t low = vmovl_s8(vget_low_s8(as_signed(bytes))), high = vmovl_high_s8(as_signed(bytes));
  return {{vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high)}};
}
template <int H> INLINE Sixteen widen(Bytes a) {
  const Dwords16 d = sign_extended(a.v[H]);
  Sixteen r;
  EACH4(r.v[q] = vcvtq_f32_s32(d.v[q]))
  return r;
}
template <int H> INLINE Sixteen turn_sign(Sixteen a, Bytes s) {
  const Dwords16 d = sign_extended(s.v[H]);
  EACH4(a.v[q] = vreinterpretq_f32_s32(veorq_s32(vreinterpretq_s32_f32(a.v[q]), vandq_s32(d.v[q], vdupq_n_s32(int32_t(0x80000000))))))
  return a;
}
// E4M3FN words in the top bytes of 16-bit words have the bits of a binary16 that is 2^8 smaller, one place too high.
INLINE uint16x8_t e4m3_as_half(uint8x8_t words) {
  const int16x8_t top = vreinterpretq_s16_u16(vshll_n_u8(words, 8));
  return vandq_u16(vreinterpretq_u16_s16(vshrq_n_s16(top, 1)), vdupq_n_u16(0xbf80));
}
INLINE Floats half_floats(uint16x8_t bits) {
  const float16x8_t halves = vreinterpretq_f16_u16(bits);
  return {{vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)}};
}
INLINE Floats e4m3_floats(uint8x8_t words) {
  const uint16x8_t bits = e4m3_as_half(words), magnitude = vdupq_n_u16(0x3f80);
  const uint16x8_t nan = vandq_u16(vceqq_u16(vandq_u16(bits, magnitude), magnitude), vdupq_n_u16(0x7e00));
  return mulf(half_floats(vorrq_u16(bits, nan)), splat(256));
}
INLINE Sixteen e4m3x16(const uint8_t* p) { return pair16f(e4m3_floats(vld1_u8(p)), e4m3_floats(vld1_u8(p + 8))); }
INLINE Floats e4m3x4_pairs(const uint8_t* p) {
  const uint8x8_t four = vreinterpret_u8_u32(vdup_n_u32(load_dword(p)));
  return e4m3_floats(vzip1_u8(four, four));
}
template <int H> INLINE Sixteen e4m3_small(Bytes a) {
  return pair16f(half_floats(e4m3_as_half(vget_low_u8(a.v[H]))), half_floats(e4m3_as_half(vget_high_u8(a.v[H]))));
}

INLINE Ints zeroi() { return {{vdupq_n_s32(0), vdupq_n_s32(0)}}; }
INLINE Ints loadi(const int32_t* p) { return {{vld1q_s32(p), vld1q_s32(p + 4)}}; }
INLINE Ints addi(Ints a, Ints b) { BOTH(a.v[h] = vaddq_s32(a.v[h], b.v[h])) return a; }
INLINE Floats to_float(Ints a) { return {{vcvtq_f32_s32(a.v[0]), vcvtq_f32_s32(a.v[1])}}; }
// Four bytes of either sign a lane; without the instruction, two products fit 16 bits because no activation is -128.
INLINE int32x4_t four_products(int32x4_t start, uint8x16_t c, uint8x16_t x) {
#if NINFER_DOTPROD
  return vdotq_s32(start, as_signed(c), as_signed(x));
#else
  const int16x8_t low = vmull_s8(vget_low_s8(as_signed(c)), vget_low_s8(as_signed(x))), high = vmull_high_s8(as_signed(c), as_signed(x));
  return vpadalq_s16(start, vpaddq_s16(low, high));
#endif
}
INLINE Ints dot_signed(Ints start, Bytes c, Bytes x) { BOTH(start.v[h] = four_products(start.v[h], c.v[h], x.v[h])) return start; }
INLINE Ints dot1(Ints start, Bytes u, Bytes x) { return dot_signed(start, u, x); }
INLINE Ints dot2(Ints start, Bytes u, Bytes x, Bytes v, Bytes y) { return dot1(dot1(start, u, x), v, y); }
template <int GROUP> INLINE Scales load_scales(const int8_t* p) {
  if constexpr (GROUP == 16) return {{vmovl_s8(vld1_s8(p)), vmovl_s8(vld1_s8(p + 8))}};
  const int16x8_t eight = vmovl_s8(vld1_s8(p));
  return {{vzip1q_s16(eight, eight), vzip2q_s16(eight, eight)}};
}
template <int GROUP, int U> INLINE Ints dot_scaled_signed(Ints acc, Bytes c, Bytes x, const Scales& s) {
  BOTH(constexpr int at = 2 * U + h; const int scale = vgetq_lane_s16(s.v[at / 8], at % 8);
       acc.v[h] = vmlaq_n_s32(acc.v[h], four_products(vdupq_n_s32(0), c.v[h], x.v[h]), scale))
  return acc;
}
template <int GROUP, int U> INLINE Ints dot_scaled(Ints acc, Bytes u, Bytes x, const Scales& s) {
  return dot_scaled_signed<GROUP, U>(acc, u, x, s);
}
INLINE int32x4_t pair_sums(int16x8_t scales, const int16_t* sums) {
  const int16x8_t w = vld1q_s16(sums);
  return vpaddq_s32(vmull_s16(vget_low_s16(scales), vget_low_s16(w)), vmull_high_s16(scales, w));
}
template <int GROUP> INLINE Ints dot_sums(const Scales& s, const int16_t* sums) {
  return {{pair_sums(s.v[0], sums), pair_sums(s.v[1], sums + 8)}};
}
template <int FACTOR> INLINE Ints minus_times(Ints a, Ints b) { BOTH(a.v[h] = vmlsq_n_s32(a.v[h], b.v[h], FACTOR)) return a; }

INLINE Wide wide_load(const float* p) { return loadf(p); }
INLINE Wide wide_zero() { return zerof(); }
INLINE Wide wide_muladd(Wide a, Wide b, Wide c) { return muladd(a, b, c); }
INLINE float wide_sum(Wide a) { return sumf(a); }

INLINE void widen_halves(const uint16_t* p, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) storef(out + i, half_floats(vld1q_u16(p + i)));
  for (; i < n; i++) out[i] = half_to_float(p[i]);
}
INLINE void narrow_halves(const float* p, uint16_t* out, int64_t n) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) vst1_u16(out + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(p + i))));
  for (; i < n; i++) out[i] = narrow_half(p[i]);
}
// To nearest even; NaN stays NaN by a bit of its own.
INLINE void narrow_bfloats(const float* p, uint16_t* out, int64_t n) {
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const float32x4_t value = vld1q_f32(p + i);
    const uint32x4_t bits = vreinterpretq_u32_f32(value), last = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), last), quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    vst1_u16(out + i, vshrn_n_u32(vbslq_u32(vceqq_f32(value, value), rounded, quiet), 16));
  }
  for (; i < n; i++) out[i] = float_to_bfloat(p[i]);
}
INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

#undef BOTH
#undef EACH4
