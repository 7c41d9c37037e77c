// The vector vocabulary in AVX2, FMA and F16C; with NINFER_VNNI also byte dot products and 512-bit float accumulation.
// vec_scalar.h says what each name means.

using Bytes = __m256i;
using Ints = __m256i;
using Floats = __m256;
using Scales = __m256i;

INLINE float half(const void* p) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(load_word(p)))); }
INLINE uint16_t narrow_half(float v) { return uint16_t(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(v), _MM_FROUND_TO_NEAREST_INT))); }

INLINE Bytes load32(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
INLINE void store32(void* p, Bytes v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
INLINE __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
// One store, so that a load of all sixteen bytes need not wait.
INLINE void store_words(void* p, uint64_t low, uint64_t high) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm_set_epi64x(int64_t(high), int64_t(low)));
}
INLINE Bytes load16x2(const void* p) { return _mm256_broadcastsi128_si256(load16(p)); }
INLINE Bytes load8x4(const void* p) { int64_t w; std::memcpy(&w, p, 8); return _mm256_set1_epi64x(w); }
INLINE Bytes load4x8(const void* p) { int32_t w; std::memcpy(&w, p, 4); return _mm256_set1_epi32(w); }
INLINE Bytes double_bytes(const uint8_t* p) {
  const __m256i words = _mm256_cvtepu8_epi16(load16(p));
  return _mm256_or_si256(words, _mm256_slli_epi16(words, 8));
}
INLINE Bytes splat16(int v) { return _mm256_set1_epi16(int16_t(v)); }
INLINE Bytes splat8(int v) { return _mm256_set1_epi8(char(v)); }
INLINE Bytes band(Bytes a, Bytes b) { return _mm256_and_si256(a, b); }
INLINE Bytes bor(Bytes a, Bytes b) { return _mm256_or_si256(a, b); }
INLINE Bytes bxor(Bytes a, Bytes b) { return _mm256_xor_si256(a, b); }
INLINE Bytes bandnot(Bytes a, Bytes b) { return _mm256_andnot_si256(a, b); }
INLINE Bytes badd(Bytes a, Bytes b) { return _mm256_add_epi8(a, b); }
INLINE Bytes bsub(Bytes a, Bytes b) { return _mm256_sub_epi8(a, b); }
template <int N> INLINE Bytes shr(Bytes a) { if constexpr (N == 0) return a; else return _mm256_srli_epi16(a, N); }
template <int N> INLINE Bytes shl(Bytes a) { if constexpr (N == 0) return a; else return _mm256_slli_epi16(a, N); }
template <int LOW, int HIGH> INLINE Bytes shr_halves(Bytes a) {
  return _mm256_srlv_epi32(a, _mm256_setr_epi32(LOW, LOW, LOW, LOW, HIGH, HIGH, HIGH, HIGH));
}
INLINE Bytes shuffle(Bytes table, Bytes index) { return _mm256_shuffle_epi8(table, index); }
INLINE Bytes has_bits(Bytes a, Bytes mask) { return _mm256_cmpeq_epi8(_mm256_and_si256(a, mask), mask); }
INLINE Bytes is_equal(Bytes a, Bytes b) { return _mm256_cmpeq_epi8(a, b); }
INLINE bool any_set(Bytes a) { return !_mm256_testz_si256(a, a); }
INLINE Bytes with_sign(Bytes a, Bytes s) { return _mm256_sign_epi8(a, s); }
INLINE int64_t entry8(const int8_t* table, int i) { int64_t w; std::memcpy(&w, table + 8 * i, 8); return w; }
INLINE Bytes entries8(const int8_t* table, int a, int b, int c, int d) {
  return _mm256_setr_epi64x(entry8(table, a), entry8(table, b), entry8(table, c), entry8(table, d));
}
INLINE int32_t entry4(const int8_t* table, int i) { int32_t w; std::memcpy(&w, table + 4 * i, 4); return w; }
INLINE Bytes entries4(const int8_t* table, const int (&i)[8]) {
  return _mm256_setr_epi32(entry4(table, i[0]), entry4(table, i[1]), entry4(table, i[2]), entry4(table, i[3]),
                           entry4(table, i[4]), entry4(table, i[5]), entry4(table, i[6]), entry4(table, i[7]));
}

INLINE Floats zerof() { return _mm256_setzero_ps(); }
INLINE Floats splat(float v) { return _mm256_set1_ps(v); }
INLINE Floats loadf(const float* p) { return _mm256_loadu_ps(p); }
INLINE void storef(float* p, Floats v) { _mm256_storeu_ps(p, v); }
INLINE Floats addf(Floats a, Floats b) { return _mm256_add_ps(a, b); }
INLINE Floats subf(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
INLINE Floats mulf(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INLINE Floats divf(Floats a, Floats b) { return _mm256_div_ps(a, b); }
INLINE Floats muladd(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
// a0 b0 a1 b1 ... of eight each.
INLINE void store_interleaved(float* p, Floats a, Floats b) {
  const __m256 low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
  storef(p, _mm256_permute2f128_ps(low, high, 0x20));
  storef(p + 8, _mm256_permute2f128_ps(low, high, 0x31));
}
INLINE float sumf(Floats a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
INLINE float max_magnitude32(const float* p) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  // Magnitudes order like integers, and infinities and NaN stand above every number.
  __m256i m = _mm256_setzero_si256();
  for (int k = 0; k < 32; k += 8)
    m = _mm256_max_epi32(m, _mm256_castps_si256(_mm256_and_ps(magnitude, _mm256_loadu_ps(p + k))));
  __m128i s = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  s = _mm_max_epi32(s, _mm_shuffle_epi32(s, 0xb1));
  const int32_t bits = _mm_cvtsi128_si32(s);
  return bits >= 0x7f800000 ? NAN : from_bits(uint32_t(bits));
}
INLINE void quantize32(const float* p, float scale, int8_t* out) {
  const __m256 by = _mm256_set1_ps(scale), low = _mm256_set1_ps(-127), high = _mm256_set1_ps(127);
  __m256i q[4];
  for (int k = 0; k < 4; k++)
    q[k] = _mm256_cvtps_epi32(_mm256_min_ps(high, _mm256_max_ps(low, _mm256_div_ps(_mm256_loadu_ps(p + 8 * k), by))));
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  store32(out, _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}
// E4M3FN words in the top bytes of 16-bit words have the bits of a binary16 that is 2^8 smaller, one place too high.
INLINE __m128i e4m3_as_half(__m128i words) {  // eight bytes, low half of `words`
  const __m128i top = _mm_unpacklo_epi8(_mm_setzero_si128(), words);
  return _mm_and_si128(_mm_srai_epi16(top, 1), _mm_set1_epi16(int16_t(0xbf80)));
}
INLINE Floats e4m3_words(__m128i words) {
  const __m128i bits = e4m3_as_half(words), magnitude = _mm_set1_epi16(0x3f80);
  const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(bits, magnitude), magnitude);
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(bits, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)))), _mm256_set1_ps(256));
}
INLINE Floats e4m3x4_pairs(const uint8_t* p) {
  const __m128i four = _mm_cvtsi32_si128(int32_t(load_dword(p)));
  return e4m3_words(_mm_unpacklo_epi8(four, four));
}
template <int H> INLINE __m128i half_of(Bytes v) { return H ? _mm256_extracti128_si256(v, 1) : _mm256_castsi256_si128(v); }

#if NINFER_VNNI

using Sixteen = __m512;
INLINE Sixteen splat16f(float v) { return _mm512_set1_ps(v); }
INLINE Sixteen pair16f(Floats low, Floats high) { return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1); }
INLINE Sixteen load16f(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store16f(float* p, Sixteen v) { _mm512_storeu_ps(p, v); }
INLINE Sixteen add16f(Sixteen a, Sixteen b) { return _mm512_add_ps(a, b); }
INLINE Sixteen sub16f(Sixteen a, Sixteen b) { return _mm512_sub_ps(a, b); }
INLINE Sixteen mul16f(Sixteen a, Sixteen b) { return _mm512_mul_ps(a, b); }
INLINE Sixteen div16f(Sixteen a, Sixteen b) { return _mm512_div_ps(a, b); }
INLINE Sixteen muladd16f(Sixteen a, Sixteen b, Sixteen c) { return _mm512_fmadd_ps(a, b, c); }
INLINE float sum16f(Sixteen a) { return sumf(addf(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1))); }
template <int H> INLINE Sixteen widen(Bytes v) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(half_of<H>(v))); }
template <int H> INLINE Sixteen turn_sign(Sixteen v, Bytes s) {
  const __m512i top = _mm512_and_si512(_mm512_cvtepi8_epi32(half_of<H>(s)), _mm512_set1_epi32(int(0x80000000)));
  return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(v), top));
}
template <int H> INLINE Sixteen e4m3_small(Bytes v) {
  const __m256i top = _mm256_slli_epi16(_mm256_cvtepu8_epi16(half_of<H>(v)), 8);
  return _mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(top, 1), _mm256_set1_epi16(int16_t(0xbf80))));
}

#else

struct Sixteen { Floats low, high; };
INLINE Sixteen pair16f(Floats low, Floats high) { return {low, high}; }
INLINE Sixteen splat16f(float v) { return {splat(v), splat(v)}; }
INLINE Sixteen load16f(const float* p) { return {loadf(p), loadf(p + 8)}; }
INLINE void store16f(float* p, Sixteen v) { storef(p, v.low); storef(p + 8, v.high); }
INLINE Sixteen add16f(Sixteen a, Sixteen b) { return {addf(a.low, b.low), addf(a.high, b.high)}; }
INLINE Sixteen sub16f(Sixteen a, Sixteen b) { return {subf(a.low, b.low), subf(a.high, b.high)}; }
INLINE Sixteen mul16f(Sixteen a, Sixteen b) { return {mulf(a.low, b.low), mulf(a.high, b.high)}; }
INLINE Sixteen div16f(Sixteen a, Sixteen b) { return {divf(a.low, b.low), divf(a.high, b.high)}; }
INLINE Sixteen muladd16f(Sixteen a, Sixteen b, Sixteen c) { return {muladd(a.low, b.low, c.low), muladd(a.high, b.high, c.high)}; }
INLINE float sum16f(Sixteen a) { return sumf(addf(a.low, a.high)); }
INLINE Floats widen8(__m128i v) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v)); }
INLINE __m128i upper(__m128i v) { return _mm_unpackhi_epi64(v, v); }
template <int H> INLINE Sixteen widen(Bytes v) { return {widen8(half_of<H>(v)), widen8(upper(half_of<H>(v)))}; }
INLINE Floats turn_sign8(Floats v, __m128i s) {
  const __m256i top = _mm256_and_si256(_mm256_cvtepi8_epi32(s), _mm256_set1_epi32(int(0x80000000)));
  return _mm256_xor_ps(v, _mm256_castsi256_ps(top));
}
template <int H> INLINE Sixteen turn_sign(Sixteen v, Bytes s) {
  return {turn_sign8(v.low, half_of<H>(s)), turn_sign8(v.high, upper(half_of<H>(s)))};
}
template <int H> INLINE Sixteen e4m3_small(Bytes v) {
  return {_mm256_cvtph_ps(e4m3_as_half(half_of<H>(v))), _mm256_cvtph_ps(e4m3_as_half(upper(half_of<H>(v))))};
}

#endif

INLINE Sixteen halves16f(float low, float high) { return pair16f(splat(low), splat(high)); }
INLINE Sixteen e4m3x16(const uint8_t* p) {
  const __m128i words = load16(p);
  return pair16f(e4m3_words(words), e4m3_words(_mm_unpackhi_epi64(words, words)));
}

INLINE Ints zeroi() { return _mm256_setzero_si256(); }
INLINE Ints loadi(const int32_t* p) { return load32(p); }
INLINE Ints addi(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
INLINE Floats to_float(Ints a) { return _mm256_cvtepi32_ps(a); }

template <int GROUP> INLINE Scales load_scales(const int8_t* p) {
  if constexpr (GROUP == 16) return load16x2(p);
  return _mm256_broadcastsi128_si256(_mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
// The scales of unit U, one 16-bit word per pair of its 32 bytes.
template <int GROUP, int U> INLINE Bytes unit_scales(const Scales& s) {
  if constexpr (GROUP == 16) {
    constexpr int a = 0x01010101 * (2 * U), b = 0x01010101 * (2 * U + 1);
    return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(_mm256_castsi256_si128(s), _mm_setr_epi32(a, a, b, b)));
  } else {
    return _mm256_shuffle_epi8(s, _mm256_set1_epi16(int16_t((2 * U + 1) << 8 | 2 * U)));
  }
}
template <int GROUP> INLINE Ints dot_sums(const Scales& s, const int16_t* sums) {
  if constexpr (GROUP == 16) return _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(s)), load32(sums));
  return _mm256_castsi128_si256(_mm_madd_epi16(_mm256_castsi256_si128(s), load16(sums + 16)));
}
template <int FACTOR> INLINE Ints minus_times(Ints a, Ints b) {
  static_assert((FACTOR & (FACTOR - 1)) == 0, "a power of two");
  return _mm256_sub_epi32(a, _mm256_slli_epi32(b, __builtin_ctz(FACTOR)));
}
INLINE Bytes pairs(Bytes u, Bytes x) { return _mm256_maddubs_epi16(u, x); }
INLINE Bytes pairs_signed(Bytes c, Bytes x) { return _mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8(x, c)); }

#if NINFER_VNNI

static constexpr bool kByteDot = true;
INLINE Bytes negated(Bytes a, uint32_t where) { return _mm256_mask_sub_epi8(a, where, _mm256_setzero_si256(), a); }
INLINE Ints dot1(Ints start, Bytes u, Bytes x) { return _mm256_dpbusd_epi32(start, u, x); }
INLINE Ints dot2(Ints start, Bytes u, Bytes x, Bytes v, Bytes y) { return dot1(dot1(start, u, x), v, y); }
INLINE Ints dot_signed(Ints start, Bytes c, Bytes x) { return _mm256_dpbusd_epi32(start, _mm256_abs_epi8(c), _mm256_sign_epi8(x, c)); }
template <int GROUP, int U> INLINE Ints dot_scaled(Ints acc, Bytes u, Bytes x, const Scales& s) {
  const Bytes words = unit_scales<GROUP, U>(s);
  return _mm256_dpwssd_epi32(acc, pairs(u, x), words);
}
template <int GROUP, int U> INLINE Ints dot_scaled_signed(Ints acc, Bytes c, Bytes x, const Scales& s) {
  const Bytes words = unit_scales<GROUP, U>(s);
  return _mm256_dpwssd_epi32(acc, pairs_signed(c, x), words);
}

static constexpr int kWide = 16;
using Wide = __m512;
INLINE Wide wide_load(const float* p) { return _mm512_loadu_ps(p); }
INLINE Wide wide_zero() { return _mm512_setzero_ps(); }
INLINE Wide wide_muladd(Wide a, Wide b, Wide c) { return _mm512_fmadd_ps(a, b, c); }
INLINE float wide_sum(Wide a) { return sum16f(a); }
INLINE Wide wide_splat(float v) { return _mm512_set1_ps(v); }
INLINE Wide wide_mul(Wide a, Wide b) { return _mm512_mul_ps(a, b); }
INLINE Wide wide_minus_product(Wide c, Wide a, Wide b) { return _mm512_fnmadd_ps(a, b, c); }
INLINE void wide_store(float* p, Wide v) { _mm512_storeu_ps(p, v); }

using Wide32 = __m512i;
INLINE Wide32 wide_load32(const void* p) { return _mm512_loadu_si512(p); }
INLINE void wide_store32(void* p, Wide32 v) { _mm512_storeu_si512(p, v); }
INLINE Wide32 wide_splat32(int32_t v) { return _mm512_set1_epi32(v); }
INLINE Wide32 wide_pair(const void* low, const void* high) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(load32(low)), load32(high), 1);
}
INLINE Wide32 wide_unpack_low32(Wide32 a, Wide32 b) { return _mm512_unpacklo_epi32(a, b); }
INLINE Wide32 wide_unpack_high32(Wide32 a, Wide32 b) { return _mm512_unpackhi_epi32(a, b); }
INLINE Wide32 wide_unpack_low64(Wide32 a, Wide32 b) { return _mm512_unpacklo_epi64(a, b); }
INLINE Wide32 wide_unpack_high64(Wide32 a, Wide32 b) { return _mm512_unpackhi_epi64(a, b); }
// Quarters 0 and 2, or 1 and 3, of a and of b: a0 b0 a2 b2.
INLINE Wide32 wide_even_quarters(Wide32 a, Wide32 b) { return _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13), b); }
INLINE Wide32 wide_odd_quarters(Wide32 a, Wide32 b) { return _mm512_permutex2var_epi64(a, _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15), b); }
INLINE Wide32 wide_repeat16(const void* p) { return _mm512_broadcast_i32x4(load16(p)); }
INLINE Wide32 wide_shuffle(Wide32 table, Wide32 index) { return _mm512_shuffle_epi8(table, index); }
INLINE Wide32 wide_low_nibbles(Wide32 v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
INLINE Wide32 wide_high_nibbles(Wide32 v) { return wide_low_nibbles(_mm512_srli_epi16(v, 4)); }
// The eight bytes of two dwords, each twice, in the low half.
INLINE Bytes dwords_twice(const void* low, const void* high) {
  const __m128i eight = _mm_set_epi32(0, 0, int32_t(load_dword(high)), int32_t(load_dword(low)));
  return _mm256_castsi128_si256(_mm_unpacklo_epi8(eight, eight));
}
INLINE Wide32 wide_dot(Wide32 start, Wide32 u, Wide32 x) { return _mm512_dpbusd_epi32(start, u, x); }
INLINE Wide wide_to_float(Wide32 v) { return _mm512_cvtepi32_ps(v); }

#if NINFER_PAIRS

using PairWords = __m512i;
INLINE Wide32 wide_join(Bytes low, Bytes high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
INLINE Wide wide_join_floats(Floats low, Floats high) { return pair16f(low, high); }
INLINE PairWords join_low(Wide32 low, Wide32 high) { return _mm512_unpacklo_epi8(low, high); }
INLINE PairWords join_high(Wide32 low, Wide32 high) { return _mm512_unpackhi_epi8(low, high); }
INLINE PairWords load_pairs(const uint16_t* p) { return _mm512_loadu_si512(p); }
INLINE Wide pair_products(Wide sums, PairWords a, PairWords b) { return _mm512_dpbf16_ps(sums, __m512bh(a), __m512bh(b)); }
INLINE Wide32 lookup64(const uint8_t* table, Wide32 index) { return _mm512_permutexvar_epi8(index, wide_load32(table)); }
// By the low seven bits of the index.
INLINE Wide32 lookup128(const uint8_t* table, Wide32 index) {
  return _mm512_permutex2var_epi8(wide_load32(table), index, wide_load32(table + 64));
}
// The top bit of every byte of `signs` set in `bytes` too.
INLINE Wide32 with_top_bits(Wide32 bytes, Wide32 signs) {
  return _mm512_ternarylogic_epi32(bytes, signs, _mm512_set1_epi8(char(0x80)), 0xf8);
}
INLINE Wide32 load_up_to_64(const uint8_t* p, int64_t count) {
  return count >= 64 ? wide_load32(p) : _mm512_maskz_loadu_epi8((uint64_t(1) << count) - 1, p);
}
template <int N> INLINE Wide wide_load_some(const float* p) {
  if constexpr (N == 16) return wide_load(p);
  else return _mm512_zextps256_ps512(loadf(p));
}
// The scales of the groups that 64 columns are in, Q-th of four, each over the lanes of its pairs.
template <int GROUP, int Q> INLINE Wide spread_groups(Wide scales) {
  constexpr int a = GROUP == 16 ? 4 * Q : 2 * Q, b = GROUP == 16 ? a + 1 : a, c = GROUP == 16 ? a + 2 : a + 1, d = GROUP == 16 ? a + 3 : c;
  return _mm512_permutexvar_ps(_mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d), scales);
}
// Scales of 16 even-odd columns, by int32 lane, over the lanes of the first or second pairs.
template <int H> INLINE Wide spread_lanes(Floats lanes) {
  constexpr int a = 2 * H, b = 2 * H + 4;
  return _mm512_permutexvar_ps(_mm512_setr_epi32(a, a, a, a, b, b, b, b, a, a, a, a, b, b, b, b), _mm512_castps256_ps512(lanes));
}

#endif

#else

static constexpr bool kByteDot = false;
INLINE Ints dot1(Ints start, Bytes u, Bytes x) { return addi(start, _mm256_madd_epi16(pairs(u, x), _mm256_set1_epi16(1))); }
INLINE Ints dot2(Ints start, Bytes u, Bytes x, Bytes v, Bytes y) {
  return addi(start, _mm256_madd_epi16(_mm256_add_epi16(pairs(u, x), pairs(v, y)), _mm256_set1_epi16(1)));
}
INLINE Ints dot_signed(Ints start, Bytes c, Bytes x) { return addi(start, _mm256_madd_epi16(pairs_signed(c, x), _mm256_set1_epi16(1))); }
template <int GROUP, int U> INLINE Ints dot_scaled(Ints acc, Bytes u, Bytes x, const Scales& s) {
  return addi(acc, _mm256_madd_epi16(pairs(u, x), unit_scales<GROUP, U>(s)));
}
template <int GROUP, int U> INLINE Ints dot_scaled_signed(Ints acc, Bytes c, Bytes x, const Scales& s) {
  return addi(acc, _mm256_madd_epi16(pairs_signed(c, x), unit_scales<GROUP, U>(s)));
}

static constexpr int kWide = 8;
using Wide = Floats;
INLINE Wide wide_load(const float* p) { return loadf(p); }
INLINE Wide wide_zero() { return zerof(); }
INLINE Wide wide_muladd(Wide a, Wide b, Wide c) { return muladd(a, b, c); }
INLINE float wide_sum(Wide a) { return sumf(a); }

#endif

INLINE void widen_halves(const uint16_t* p, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) storef(out + i, _mm256_cvtph_ps(load16(p + i)));
  for (; i < n; i++) out[i] = half_to_float(p[i]);
}
INLINE void narrow_halves(const float* p, uint16_t* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(loadf(p + i), _MM_FROUND_TO_NEAREST_INT));
  for (; i < n; i++) out[i] = narrow_half(p[i]);
}
// To nearest even; NaN stays NaN by a bit of its own.
INLINE __m256i bfloat_dwords(Floats v) {
  const __m256i bits = _mm256_castps_si256(v), last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)), quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
INLINE void narrow_bfloats(const float* p, uint16_t* out, int64_t n) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i words = _mm256_packus_epi32(bfloat_dwords(loadf(p + i)), bfloat_dwords(loadf(p + i + 8)));
    store32(out + i, _mm256_permute4x64_epi64(words, 0xd8));
  }
  for (; i < n; i++) out[i] = float_to_bfloat(p[i]);
}
INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
