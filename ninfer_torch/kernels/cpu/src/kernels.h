// The row kernels of one instruction set, generic over formats; included inside its namespace.

// Widening and narrowing

INLINE void load_values(const void* x, int dtype, int64_t at, int64_t n, float* out) {
  if (dtype == kFloat32) {
    std::memcpy(out, static_cast<const float*>(x) + at, size_t(n) * 4);
  } else if (dtype == kFloat16) {
    widen_halves(static_cast<const uint16_t*>(x) + at, out, n);
  } else {
    const uint16_t* words = static_cast<const uint16_t*>(x) + at;
    for (int64_t i = 0; i < n; i++) out[i] = bfloat_to_float(words[i]);
  }
}

INLINE void store_value(void* y, int dtype, int64_t at, float value) {
  if (dtype == kFloat32) static_cast<float*>(y)[at] = value;
  else if (dtype == kFloat16) static_cast<uint16_t*>(y)[at] = narrow_half(value);
  else static_cast<uint16_t*>(y)[at] = float_to_bfloat(value);
}

inline void store_values(void* out, int dtype, int64_t at, const float* values, int64_t n) {
  if (dtype == kFloat32) std::memcpy(static_cast<float*>(out) + at, values, size_t(n) * 4);
  else if (dtype == kFloat16) narrow_halves(values, static_cast<uint16_t*>(out) + at, n);
  else narrow_bfloats(values, static_cast<uint16_t*>(out) + at, n);
}

INLINE float load_value(const void* x, int dtype, int64_t at) {
  if (dtype == kFloat32) return static_cast<const float*>(x)[at];
  const uint16_t* word = static_cast<const uint16_t*>(x) + at;
  return dtype == kFloat16 ? half(word) : bfloat_to_float(*word);
}

INLINE void store_product(const Output& y, int64_t m, int64_t column, float value) {
  if (y.bias) value += load_value(y.bias, y.bias_dtype, column);
  store_value(y.data, y.dtype, m * y.row_stride + column, value);
}

// Products of activation row m with weight rows of `count` columns of y from `column` on; the values may be changed.
INLINE void store_products(const Output& y, int64_t m, int64_t column, float* values, int64_t count) {
  if (y.bias)
    for (int64_t i = 0; i < count; i++) values[i] += load_value(y.bias, y.bias_dtype, column + i);
  store_values(y.data, y.dtype, m * y.row_stride + column, values, count);
}

constexpr int64_t steps_of(int64_t columns, int64_t step) { return (columns + step - 1) / step; }

// Exact decode: body(vector, part, values) takes decoded positions 32 * vector + 16 * part .. + 15 of step s.

template <class F, class Body> INLINE void decode_step(const F& row, int64_t s, Body&& body) {
  if constexpr (F::kSuper) {
    const uint8_t* block = row.block(s);
    Head h;
    F::head(block, h);
    alignas(64) float scales[16], minima[16];
    store16f(scales, mul16f(widen<0>(load16x2(h.scale)), splat16f(h.d)));
    if constexpr (F::kMinima) store16f(minima, mul16f(widen<0>(load16x2(h.minimum)), splat16f(h.dmin)));
    unroll<8>([&](auto unit) INLINE_LAMBDA {
      constexpr int U = decltype(unit)::value;
      const Bytes codes = F::kBias ? bsub(F::template codes<U>(block), splat8(F::kBias)) : F::template codes<U>(block);
      unroll<2>([&](auto part) INLINE_LAMBDA {
        constexpr int H = decltype(part)::value, G = F::kGroup == 16 ? 2 * U + H : U;
        Sixteen values = mul16f(widen<H>(codes), splat16f(scales[G]));
        if constexpr (F::kMinima) values = sub16f(values, splat16f(minima[G]));
        body(unit, part, values);
      });
    });
  } else {
    Bytes codes[F::kVectors];
    row.codes(s, codes);
    unroll<F::kVectors>([&](auto vector) INLINE_LAMBDA {
      const Bytes c = codes[decltype(vector)::value];
      const Bytes signed_codes = F::kBias ? bsub(c, splat8(F::kBias)) : c;
      unroll<2>([&](auto part) INLINE_LAMBDA {
        constexpr int H = decltype(part)::value;
        body(vector, part, mul16f(widen<H>(signed_codes), row.scale(s, H)));
      });
    });
  }
}

template <bool I, class Body> INLINE void decode_step(const RowFloat<I>& row, int64_t s, Body&& body) {
  uint8_t spare[32];
  const uint8_t* words = row.step(s, spare);
  const Sixteen scale = splat16f(row.row_scale);
  unroll<2>([&](auto part) INLINE_LAMBDA {
    body(Index<0>{}, part, mul16f(e4m3x16(words + 16 * decltype(part)::value), scale));
  });
}

// Steps [begin, end) of a row as exact values in decoded order.
template <class F> NOINLINE void decode_steps(const F& row, int64_t begin, int64_t end, float* out) {
  for (int64_t s = begin; s < end; s++, out += F::kStep) {
    row.fetch(s);
    if constexpr (std::is_same_v<F, Nvfp4>) {
      row.exact(s, out);
    } else {
      decode_step(row, s, [&](auto vector, auto part, Sixteen values) INLINE_LAMBDA {
        store16f(out + 32 * decltype(vector)::value + 16 * decltype(part)::value, values);
      });
    }
  }
}

// The first half of 2n values interleaved with the second.
template <int N> INLINE void interleave_halves(const float* values, float* out) {
  UNROLL for (int i = 0; i < N; i += 8) store_interleaved(out + 2 * i, loadf(values + i), loadf(values + N + i));
}

template <Order ORDER> void to_natural(const float* decoded, int64_t steps, float* natural) {
  for (int64_t s = 0; s < steps; s++, decoded += 64, natural += 64) {
    if constexpr (ORDER == kEvenOdd) {
      interleave_halves<32>(decoded, natural);
    } else {  // planes 0 2 with each other, planes 1 3 likewise, then both
      alignas(64) float pairs[64];
      UNROLL for (int i = 0; i < 16; i += 8) {
        store_interleaved(pairs + 2 * i, loadf(decoded + i), loadf(decoded + 32 + i));
        store_interleaved(pairs + 32 + 2 * i, loadf(decoded + 16 + i), loadf(decoded + 48 + i));
      }
      interleave_halves<32>(pairs, natural);
    }
  }
}

template <class F> void dequantize(const Matrix& m, const int64_t* ids, int64_t first, int64_t last, void* out, int dtype) {
  constexpr int kSpan = 512;
  alignas(64) float decoded[kSpan], natural[kSpan];
  for (int64_t i = first; i < last; i++) {
    const F row(m, ids ? ids[i] : i);
    for (int64_t k = 0; k < m.columns; k += kSpan) {
      const int64_t count = std::min<int64_t>(kSpan, m.columns - k), begin = k / F::kStep;
      const int64_t steps = (count + F::kStep - 1) / F::kStep;
      decode_steps(row, begin, begin + steps, decoded);
      if constexpr (F::kOrder != kNatural) to_natural<F::kOrder>(decoded, steps, natural);
      store_values(out, dtype, (i - first) * m.columns + k, F::kOrder == kNatural ? decoded : natural, count);
    }
  }
}

// Activations in the order of the decoded codes

// What a step must know of its format to order and quantize activations.
struct StepShape {
  int64_t step;
  int bias;  // of the int32 lanes
  bool super, int8;
  int group, group_bias;  // of weight rows side by side
};

// A natural step of the padded row, as floats.
inline void load_step(const void* x, int dtype, int64_t columns, int64_t m, int64_t k, int64_t step, float* out) {
  const int64_t count = std::min(step, columns - k);
  load_values(x, dtype, m * columns + k, count, out);
  for (int64_t i = count; i < step; i++) out[i] = 0;
}

template <Order ORDER>
void prepare_values(const StepShape& f, const void* x, int dtype, int64_t columns, int64_t first, int64_t last, const Activations& a) {
  alignas(64) float natural[256];
  for (int64_t m = first; m < last; m++) {
    float* out = const_cast<float*>(a.values) + m * a.stride;
    for (int64_t k = 0; k < columns; k += f.step) {
      if constexpr (ORDER == kNatural) {
        load_step(x, dtype, columns, m, k, f.step, out + k);
      } else {
        load_step(x, dtype, columns, m, k, 64, natural);
        for (int p = 0; p < 64; p++) out[k + p] = natural[column_of(ORDER, p)];
      }
    }
  }
}

#if NINFER_PAIRS
#include "pairs.h"
#else
template <class F> constexpr bool pairs_serve(int64_t) { return false; }
#endif

// Quantize 32n values of largest magnitude `largest` to int8 and return the scale. Scales are rounded to binary16 when asked
// and when they are normal binary16 numbers; beyond that range a float32 scale neither overflows nor loses its digits.
INLINE float quantize(const float* x, int n, float largest, bool round_scale, int8_t* codes) {
  float scale = largest / 127;
  if (!(largest > 0)) {  // zeros, or NaN and infinities, which the scale carries
    std::memset(codes, 0, size_t(n));
    return scale;
  }
  if (round_scale && scale >= 0x1p-14f && scale <= 65504) {
    const uint16_t word = narrow_half(scale);
    scale = half(&word);
  }
  if (scale < 0x1p-100f) {
    alignas(64) float raised[256];
    for (int i = 0; i < n; i++) raised[i] = x[i] * 0x1p64f;
    const float raised_scale = largest * 0x1p64f / 127;
    for (int i = 0; i < n; i += 32) quantize32(raised + i, raised_scale, codes + i);
    return scale;
  }
  for (int i = 0; i < n; i += 32) quantize32(x + i, scale, codes + i);
  return scale;
}

inline void prepare_super(const float* x, int64_t s, int8_t* codes, float* scales, int16_t* sums) {
  float largest = 0;
  bool unordered = false;
  for (int i = 0; i < 256; i += 32) {
    const float m = max_magnitude32(x + i);
    unordered |= m != m;
    largest = m > largest ? m : largest;
  }
  scales[s] = quantize(x, 256, unordered ? NAN : largest, false, codes);
  for (int g = 0; g < 16; g++) {
    int sum = 0;
    for (int i = 0; i < 16; i++) sum += codes[16 * g + i];
    sums[g] = int16_t(sum);
  }
  for (int g = 0; g < 8; g++) sums[16 + g] = int16_t(sums[2 * g] + sums[2 * g + 1]);
}

template <int STEP, Order ORDER>
INLINE void prepare_step(const float* x, int bias, int64_t s, int8_t* codes, float* scales, int32_t* starts, int8_t* natural, float* block) {
  for (int i = 0; i < STEP / 32; i++) block[i] = quantize(x + 32 * i, 32, max_magnitude32(x + 32 * i), true, natural + 32 * i);
  for (int p = 0; p < STEP; p++) codes[p] = natural[column_of(ORDER, p)];
  if constexpr (STEP == 32) scales[s] = block[0];
  else for (int l = 0; l < 8; l++) scales[8 * s + l] = block[column_of(ORDER, 4 * l) / 32];
  if (bias == 0) return;
  for (int l = 0; l < 8; l++) {
    int sum = 0;
    for (int v = 0; v < STEP; v += 32)
      for (int i = 0; i < 4; i++) sum += codes[v + 4 * l + i];
    starts[8 * s + l] = -bias * sum;
  }
}

// What the lanes of side-by-side rows need of one step: `codes` in their natural order, the scale of its 32-column blocks.
inline void prepare_groups(const StepShape& f, const int8_t* codes, const float* scales, int64_t m, int64_t k, const Activations& a) {
  float* block_scales = const_cast<float*>(a.block_scales) + m * a.block_stride + k / 32;
  for (int64_t b = 0; b < f.step / 32; b++) block_scales[b] = scales[b];
  const int64_t at = m * a.group_stride + k / f.group;
  for (int64_t g = 0; g < f.step / f.group; g++) {
    int sum = 0;
    for (int i = 0; i < f.group; i++) sum += codes[g * f.group + i];
    const_cast<int32_t*>(a.group_starts)[at + g] = -f.group_bias * sum;
    const_cast<float*>(a.group_sums)[at + g] = scales[g * f.group / 32] * float(sum);
  }
}

template <Order ORDER>
void prepare_codes(const StepShape& f, const void* x, int dtype, int64_t columns, int64_t first, int64_t last, const Activations& a) {
  alignas(64) float natural[256];
  for (int64_t m = first; m < last; m++) {
    int8_t* codes = const_cast<int8_t*>(a.codes) + m * a.stride;
    float* scales = const_cast<float*>(a.scales) + m * a.scale_stride;
    int32_t* starts = const_cast<int32_t*>(a.starts) + m * a.start_stride;
    int16_t* sums = const_cast<int16_t*>(a.sums) + m * a.sum_stride;
    for (int64_t k = 0, s = 0; k < columns; k += f.step, s++) {
      load_step(x, dtype, columns, m, k, f.step, natural);
      int8_t in_order[64];
      float blocks[8];
      if constexpr (ORDER != kNatural) {
        prepare_step<64, ORDER>(natural, f.bias, s, codes + k, scales, starts, in_order, blocks);
      } else if (f.super) {
        prepare_super(natural, s, codes + k, scales, sums + 24 * s);
        std::fill_n(blocks, 8, scales[s]);
      } else {
        prepare_step<32, kNatural>(natural, f.bias, s, codes + k, scales, starts, in_order, blocks);
      }
      if (a.block_scales) prepare_groups(f, f.super ? codes + k : in_order, blocks, m, k, a);
    }
  }
}

// Unsigned words carry a bias; signed codes take one where bytes multiply without saturation.
template <class F> constexpr int lane_bias() { return F::kSigned ? (kByteDot ? 128 : 0) : F::kBias; }

template <class F> constexpr StepShape shape_of() {
  if constexpr (!F::kInt8) return {F::kStep, 0, false, false, 0, 0};
  else return {F::kStep, F::kSuper ? 0 : lane_bias<F>(), F::kSuper, true, F::kGroup, F::kSigned ? 128 : F::kBias};
}

template <class F> void prepare(const void* x, int dtype, int64_t columns, int64_t first, int64_t last, const Activations& a) {
  constexpr StepShape shape = shape_of<F>();
#if NINFER_PAIRS
  if (a.pairs) return prepare_pairs<F>(static_cast<const uint16_t*>(x), columns, first, last, a);
#endif
  if (shape.int8 && a.codes) prepare_codes<F::kOrder>(shape, x, dtype, columns, first, last, a);
  else prepare_values<F::kOrder>(shape, x, dtype, columns, first, last, a);
}

template <class F> PreparedSizes sizes(int64_t columns, int64_t m, int dtype, bool int8) {
  constexpr StepShape shape = shape_of<F>();
  const int64_t steps = steps_of(columns, shape.step), padded = steps * shape.step;
  if (!int8 || !shape.int8) {
    if (dtype != kBfloat16 || !pairs_serve<F>(m)) return {padded, 0, 0, 0, 0, 0, 0, 0};
    return {0, 0, 0, 0, 0, 0, shape.super ? padded / shape.group : 0, (padded + 63) / 64 * 64};
  }
  const bool lanes = kByteDot && m > 1;
  const int64_t blocks = lanes ? padded / 32 : 0, groups = lanes ? padded / shape.group : 0;
  if (shape.super) return {0, padded, steps, 0, 24 * steps, blocks, groups, 0};
  return {0, padded, shape.step == 32 ? steps : 8 * steps, shape.bias ? 8 * steps : 0, 0, blocks, groups, 0};
}

// Products of one weight row with one activation row, or int8 ones with MB

template <class F> INLINE float dot_values(const F& row, int64_t columns, const float* x) {
  Sixteen acc[4] = {splat16f(0), splat16f(0), splat16f(0), splat16f(0)};
  for (int64_t s = 0; s < steps_of(columns, F::kStep); s++, x += F::kStep) {
    row.fetch(s);
    decode_step(row, s, [&](auto vector, auto part, Sixteen values) INLINE_LAMBDA {
      constexpr int at = 2 * decltype(vector)::value + decltype(part)::value;
      acc[at % 4] = muladd16f(values, load16f(x + 16 * at), acc[at % 4]);
    });
  }
  return sum16f(add16f(add16f(acc[0], acc[1]), add16f(acc[2], acc[3]))) / row.divisor();
}

// E4M3FN words are multiplied without looking for NaN; a row that holds one gives NaN whatever the activations are.
template <bool INTERLEAVED> INLINE float dot_values(const RowFloat<INTERLEAVED>& row, int64_t columns, const float* x) {
  Sixteen low = splat16f(0), high = splat16f(0);
  Bytes nan = splat8(0);
  uint8_t spare[32];
  for (int64_t s = 0; s < steps_of(columns, 32); s++, x += 32) {
    row.fetch(s);
    const Bytes words = load32(row.step(s, spare));
    nan = bor(nan, is_equal(band(words, splat8(0x7f)), splat8(0x7f)));
    low = muladd16f(e4m3_small<0>(words), load16f(x), low);
    high = muladd16f(e4m3_small<1>(words), load16f(x + 16), high);
  }
  if (any_set(nan)) return NAN;
  return sum16f(add16f(low, high)) * (row.row_scale * 256);
}

template <class F, int MB> INLINE void dot_steps(const F& row, int64_t columns, const Activations& a, int64_t m, float* out) {
  Floats acc[MB];
  UNROLL for (int j = 0; j < MB; j++) acc[j] = zerof();
  const int8_t* x = a.codes + m * a.stride;
  const float* scales = a.scales + m * a.scale_stride;
  const int32_t* starts = a.starts + m * a.start_stride;
  for (int64_t s = 0; s < steps_of(columns, F::kStep); s++, x += F::kStep) {
    row.fetch(s);
    Bytes c[F::kVectors];
    row.codes(s, c);
    if constexpr (F::kSigned && kByteDot) { UNROLL for (int v = 0; v < F::kVectors; v++) c[v] = bxor(c[v], splat8(0x80)); }
    const Floats lanes = row.lanes(s);
    UNROLL for (int j = 0; j < MB; j++) {
      Ints t = lane_bias<F>() ? loadi(starts + j * a.start_stride + 8 * s) : zeroi();
      const int8_t* xj = x + j * a.stride;
      if constexpr (F::kSigned && !kByteDot) t = dot_signed(t, c[0], load32(xj));
      else if constexpr (F::kVectors == 2) t = dot2(t, c[0], load32(xj), c[1], load32(xj + 32));
      else t = dot1(t, c[0], load32(xj));
      const float* scale = scales + j * a.scale_stride;
      acc[j] = muladd(to_float(t), mulf(lanes, F::kStep == 32 ? splat(scale[s]) : loadf(scale + 8 * s)), acc[j]);
    }
  }
  UNROLL for (int j = 0; j < MB; j++) out[j] = sumf(acc[j]) / row.divisor();
}

template <class F, int MB> INLINE void dot_supers(const F& row, int64_t columns, const Activations& a, int64_t m, float* out) {
  Floats acc[MB], low[MB];
  UNROLL for (int j = 0; j < MB; j++) acc[j] = low[j] = zerof();
  const int8_t* x = a.codes + m * a.stride;
  const int16_t* sums = a.sums + m * a.sum_stride;
  const float* x_scales = a.scales + m * a.scale_stride;
  for (int64_t b = 0; b < columns / 256; b++, x += 256, sums += 24) {
    row.fetch(b);
    const auto& block = row.block(b);
    Head h;
    F::head(block, h);
    const Scales scales = load_scales<F::kGroup>(h.scale);
    Ints t[MB];
    UNROLL for (int j = 0; j < MB; j++) t[j] = zeroi();
    unroll<8>([&](auto unit) INLINE_LAMBDA {
      constexpr int U = decltype(unit)::value;
      const Bytes c = F::template codes<U>(block);
      UNROLL for (int j = 0; j < MB; j++) {
        const Bytes xj = load32(x + j * a.stride + 32 * U);
        if constexpr (F::kSigned) t[j] = dot_scaled_signed<F::kGroup, U>(t[j], c, xj, scales);
        else t[j] = dot_scaled<F::kGroup, U>(t[j], c, xj, scales);
      }
    });
    UNROLL for (int j = 0; j < MB; j++) {
      const float d = x_scales[j * a.scale_stride + b];
      const int16_t* sum = sums + j * a.sum_stride;
      if constexpr (F::kBias != 0) t[j] = minus_times<F::kBias>(t[j], dot_sums<F::kGroup>(scales, sum));
      acc[j] = muladd(to_float(t[j]), splat(h.d * d), acc[j]);
      if constexpr (F::kMinima)
        low[j] = muladd(to_float(dot_sums<F::kGroup>(load_scales<F::kGroup>(h.minimum), sum)), splat(h.dmin * d), low[j]);
    }
  }
  UNROLL for (int j = 0; j < MB; j++) out[j] = sumf(F::kMinima ? subf(acc[j], low[j]) : acc[j]);
}

template <class F, int MB> INLINE void dot_codes(const F& row, int64_t columns, const Activations& a, int64_t m, float* out) {
  if constexpr (F::kSuper) dot_supers<F, MB>(row, columns, a, m, out);
  else dot_steps<F, MB>(row, columns, a, m, out);
}

#if NINFER_VNNI
// Two steps in one register: what a step costs by itself, decoding its four scales, is paid once for 128 columns. Scale words are
// multiplied without looking for NaN, as those of RowFloat are.
template <> INLINE void dot_codes<Nvfp4, 1>(const Nvfp4& row, int64_t columns, const Activations& a, int64_t m, float* out) {
  alignas(64) static constexpr uint8_t kZeros[64] = {};
  const int8_t* x = a.codes + m * a.stride;
  const float* scales = a.scales + m * a.scale_stride;
  const int32_t* starts = a.starts + m * a.start_stride;
  const Wide32 table = wide_repeat16(kE2m1Words);
  Wide acc = wide_zero();
  Bytes nan = splat8(0);
  // Step s, and a next one: of the row, or zeros after its end.
  const auto two_steps = [&](int64_t s, const uint8_t* codes, const uint8_t* tile, const int8_t* next_x, const float* next_scales,
                             const int32_t* next_starts) INLINE_LAMBDA {
    const Wide32 v = wide_pair(row.base + 32 * s, codes);
    const Bytes words = dwords_twice(row.tiles + 512 * s, tile);
    nan = bor(nan, is_equal(band(words, splat8(0x7f)), splat8(0x7f)));
    Wide32 t = wide_pair(starts + 8 * s, next_starts);
    t = wide_dot(t, wide_shuffle(table, wide_low_nibbles(v)), wide_pair(x + 64 * s, next_x));
    t = wide_dot(t, wide_shuffle(table, wide_high_nibbles(v)), wide_pair(x + 64 * s + 32, next_x + 32));
    const Wide lanes = wide_mul(e4m3_small<0>(words), pair16f(loadf(scales + 8 * s), loadf(next_scales)));
    acc = wide_muladd(wide_to_float(t), lanes, acc);
  };
  int64_t s = 0;
  for (const int64_t steps = columns / 64; s < steps; s += 2) {
    row.fetch(s);
    row.fetch_scales(s + 1);
    if (s + 1 < steps) {
      two_steps(s, row.base + 32 * s + 32, row.tiles + 512 * s + 512, x + 64 * s + 64, scales + 8 * s + 8, starts + 8 * s + 8);
    } else {
      two_steps(s, kZeros, kZeros, reinterpret_cast<const int8_t*>(kZeros), reinterpret_cast<const float*>(kZeros),
                reinterpret_cast<const int32_t*>(kZeros));
    }
  }
  // Codes are twice the E2M1 values, scales the E4M3FN values over 256.
  *out = any_set(nan) ? NAN : wide_sum(acc) * 128 / row.divisor();
}
#endif
