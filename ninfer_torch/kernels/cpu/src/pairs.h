// Bfloat16 activations times codes as bfloat16 words, which are exact: pairs of products accumulate in float32 lanes. Included inside
// the namespace of an instruction set that has such products and looks bytes up in tables of 64 and 128 (AVX-512 BF16 and VBMI).
//
// Sixty-four codes become two registers of words: the first has bytes 0-7 of every sixteen, the second bytes 8-15; activations are put
// into that order once. Products below the smallest normal float32 count as zero.

// Whether pairs are faster than float32 values, for m activation rows: always where words are looked up whole, for one row where codes
// are below 64, and not for int8 codes, whose table would take longer than widening them.
template <class F> constexpr bool pairs_serve(int64_t m) {
  if constexpr (F::kInt8) return !F::kSigned && m == 1;
  else return true;
}

constexpr uint16_t bfloat_of_int(int v) {
  if (v == 0) return 0;
  const int magnitude = v < 0 ? -v : v;
  int exponent = 0;
  while (magnitude >> (exponent + 1)) exponent++;
  return uint16_t((v < 0 ? 0x8000 : 0) | (127 + exponent) << 7 | (magnitude << 7 >> exponent & 0x7f));
}

constexpr uint16_t bfloat_of_e4m3(int word) {  // without the sign
  if (word == 0x7f) return 0x7fc0;
  if (word >= 8) return uint16_t((word << 4) + (120 << 7));
  if (word == 0) return 0;
  int exponent = 0;
  while (word >> (exponent + 1)) exponent++;
  return uint16_t((127 - 9 + exponent) << 7 | (word << 7 >> exponent & 0x7f));
}

template <int N> struct WordTable {
  alignas(64) uint8_t low[N], high[N];
  constexpr void set(int i, uint16_t word) {
    low[i] = uint8_t(word & 255);
    high[i] = uint8_t(word >> 8);
  }
};

template <int BIAS> constexpr WordTable<64> unsigned_words() {
  WordTable<64> t{};
  for (int i = 0; i < 64; i++) t.set(i, bfloat_of_int(i - BIAS));
  return t;
}
constexpr WordTable<128> e4m3_table() {
  WordTable<128> t{};
  for (int i = 0; i < 128; i++) t.set(i, bfloat_of_e4m3(i));
  return t;
}

static constexpr WordTable<128> kE4m3Table = e4m3_table();
template <int BIAS> static constexpr WordTable<64> kUnsignedWords = unsigned_words<BIAS>();

struct WordPair { PairWords first, second; };
INLINE WordPair joined(Wide32 low, Wide32 high) { return {join_low(low, high), join_high(low, high)}; }

template <class F> INLINE WordPair code_words(Wide32 codes) {
  return joined(lookup64(kUnsignedWords<F::kBias>.low, codes), lookup64(kUnsignedWords<F::kBias>.high, codes));
}

INLINE Wide sum_pairs(const WordPair& w, const uint16_t* x, Wide start) {
  return pair_products(pair_products(start, w.first, load_pairs(x)), w.second, load_pairs(x + 32));
}

// One row of E4M3FN words times MB activation rows.
template <int MB, bool INTERLEAVED>
INLINE void dot_words(const RowFloat<INTERLEAVED>& row, int64_t columns, const Activations& a, int64_t m, float* out) {
  Wide acc[MB];
  UNROLL for (int j = 0; j < MB; j++) acc[j] = wide_zero();
  const uint16_t* x = a.pairs + m * a.stride;
  for (int64_t k = 0; k < columns; k += 64, x += 64) {
    prefetch(row.words + k + kAhead);
    const Wide32 words = load_up_to_64(row.words + k, columns - k);
    const Wide32 high = with_top_bits(lookup128(kE4m3Table.high, words), words);
    const WordPair w = joined(lookup128(kE4m3Table.low, words), high);
    UNROLL for (int j = 0; j < MB; j++) acc[j] = sum_pairs(w, x + j * a.stride, acc[j]);
  }
  UNROLL for (int j = 0; j < MB; j++) out[j] = wide_sum(acc[j]) * row.row_scale;
}

// One weight row times one activation row.
template <class F> INLINE float dot_pairs(const F& row, int64_t columns, const Activations& a, int64_t m) {
  Wide acc = wide_zero();
  const uint16_t* x = a.pairs + m * a.stride;
  const auto add = [&](const WordPair& w, Wide scale) INLINE_LAMBDA {
    acc = wide_muladd(scale, sum_pairs(w, x, wide_zero()), acc);
    x += 64;
  };
  if constexpr (F::kSuper) {
    const float* group_sums = a.group_sums + m * a.group_stride;
    for (int64_t b = 0; b < columns / 256; b++, group_sums += 256 / F::kGroup) {
      row.fetch(b);
      const uint8_t* block = row.block(b);
      Head h;
      F::head(block, h);
      const Wide scales = mul16f(widen<0>(load16x2(h.scale)), splat16f(h.d));
      unroll<4>([&](auto quarter) INLINE_LAMBDA {
        constexpr int Q = decltype(quarter)::value;
        const Wide32 codes = wide_join(F::template codes<2 * Q>(block), F::template codes<2 * Q + 1>(block));
        add(code_words<F>(codes), spread_groups<F::kGroup, Q>(scales));
      });
      if constexpr (F::kMinima) {
        const Wide minima = mul16f(widen<0>(load16x2(h.minimum)), splat16f(h.dmin));
        acc = wide_minus_product(acc, minima, wide_load_some<256 / F::kGroup>(group_sums));
      }
    }
  } else if constexpr (F::kStep == 64) {
    for (int64_t s = 0; s < steps_of(columns, 64); s++) {
      row.fetch(s);
      Bytes c[2];
      row.codes(s, c);
      const WordPair w = code_words<F>(wide_join(c[0], c[1]));
      if constexpr (F::kGroup == 32) {
        add(w, row.scale(s, 0));
      } else {  // a scale for each eight bytes of a vector: those of `first` and of `second` differ
        const Floats lanes = row.lanes(s);
        acc = wide_muladd(spread_lanes<0>(lanes), pair_products(wide_zero(), w.first, load_pairs(x)), acc);
        acc = wide_muladd(spread_lanes<1>(lanes), pair_products(wide_zero(), w.second, load_pairs(x + 32)), acc);
        x += 64;
      }
    }
  } else {
    const int64_t steps = steps_of(columns, 32);
    for (int64_t s = 0; s < steps; s += 2) {
      const bool whole = s + 1 < steps;
      row.fetch(s);
      Bytes low[1], high[1] = {splat8(0)};
      row.codes(s, low);
      if (whole) row.codes(s + 1, high);
      add(code_words<F>(wide_join(low[0], high[0])), wide_join_floats(row.lanes(s), whole ? row.lanes(s + 1) : zerof()));
    }
  }
  return wide_sum(acc) / row.divisor();
}

// Which decoded position of 64 stands at place i of the activations.
constexpr int pair_position(int i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }

template <class F> void prepare_pairs(const uint16_t* x, int64_t columns, int64_t first, int64_t last, const Activations& a) {
  for (int64_t m = first; m < last; m++) {
    uint16_t* out = const_cast<uint16_t*>(a.pairs) + m * a.stride;
    for (int64_t k = 0; k < a.stride; k += 64, out += 64) {
      uint16_t natural[64] = {};
      std::memcpy(natural, x + m * columns + k, size_t(std::min<int64_t>(64, columns - k)) * 2);
      UNROLL for (int i = 0; i < 64; i++) out[i] = natural[column_of(F::kOrder, pair_position(i))];
    }
    if constexpr (F::kSuper) {
      float* sums = const_cast<float*>(a.group_sums) + m * a.group_stride;
      for (int64_t g = 0; F::kMinima && g < columns / F::kGroup; g++) {
        float sum = 0;
        for (int i = 0; i < F::kGroup; i++) sum += bfloat_to_float(x[m * columns + g * F::kGroup + i]);
        sums[g] = sum;
      }
    }
  }
}

template <class F> NOINLINE void rows_of_pairs(const Matrix& w, const Activations& a, int64_t first, int64_t last, int64_t origin,
                                               int64_t begin, int64_t end, const Output& y) {
  for (int64_t n = first; n < last; n++) {
    const F row(w, n);
    int64_t m = begin;
    const auto block = [&](auto count, int64_t at) INLINE_LAMBDA {
      constexpr int MB = decltype(count)::value;
      float out[MB];
      if constexpr (F::kInt8) out[0] = dot_pairs(row, w.columns, a, at);
      else dot_words<MB>(row, w.columns, a, at, out);
      UNROLL for (int j = 0; j < MB; j++) store_product(y, at + j, n - origin, out[j]);
    };
    if constexpr (!F::kInt8) over_rows_of<4>(m, end, block);
    over_rows_of<1>(m, end, block);
  }
}
