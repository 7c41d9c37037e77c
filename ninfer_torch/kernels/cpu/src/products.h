// Blocks of weight rows times blocks of activation rows; included inside the namespace of one instruction set.
//
// One activation row: every weight row is decoded in registers and multiplied at once. More: weight rows are decoded once
// into a tile that stays in the cache, and the activations pass over it; int8 ones over rows side by side (lanes.h) where bytes
// multiply and accumulate in one instruction.

static constexpr int kTileRows = 16;

#if NINFER_VNNI
#include "lanes.h"
#endif

template <class F> NOINLINE void one_row_values(const Matrix& w, const Activations& a, int64_t first, int64_t last, int64_t origin,
                                                int64_t m, const Output& y) {
  for (int64_t n = first; n < last; n++)
    store_product(y, m, n - origin, dot_values(F(w, n), w.columns, a.values + m * a.stride));
}

template <class F> NOINLINE void one_row_codes(const Matrix& w, const Activations& a, int64_t first, int64_t last, int64_t origin,
                                               int64_t m, const Output& y) {
  for (int64_t n = first; n < last; n++) {
    float out;
    dot_codes<F, 1>(F(w, n), w.columns, a, m, &out);
    store_product(y, m, n - origin, out);
  }
}

// Decoded rows of int8 codes: what a format's own cursor offers, read back from a tile. Their types name what the product
// must know and no format, so that formats share the code behind them.

template <int STEP, bool SIGNED, bool BIASED> struct DecodedSteps {
  static constexpr bool kSuper = false, kSigned = SIGNED, kMinima = false;
  static constexpr int kStep = STEP, kVectors = STEP / 32, kBias = BIASED;
  uint8_t* stored;
  float* stored_lanes;
  float row_divisor;

  static int64_t bytes(int64_t columns) { return steps_of(columns, kStep) * (kStep + 32); }
  template <class F> INLINE void fill(const F& row, int64_t columns, uint8_t* at) {
    const int64_t steps = steps_of(columns, kStep);
    stored = at;
    stored_lanes = reinterpret_cast<float*>(at + steps * kStep);
    row_divisor = row.divisor();
    for (int64_t s = 0; s < steps; s++) {
      Bytes c[kVectors];
      row.fetch(s);
      row.codes(s, c);
      UNROLL for (int v = 0; v < kVectors; v++) store32(stored + s * kStep + 32 * v, c[v]);
      storef(stored_lanes + 8 * s, row.lanes(s));
    }
  }
  INLINE void fetch(int64_t) const {}
  INLINE float divisor() const { return row_divisor; }
  INLINE Floats lanes(int64_t s) const { return loadf(stored_lanes + 8 * s); }
  INLINE void codes(int64_t s, Bytes* c) const {
    UNROLL for (int v = 0; v < kVectors; v++) c[v] = load32(stored + s * kStep + 32 * v);
  }
};

template <int GROUP, bool SIGNED, int BIAS, bool MINIMA> struct DecodedSupers {
  static constexpr bool kSuper = true, kSigned = SIGNED, kMinima = MINIMA;
  static constexpr int kStep = 256, kGroup = GROUP, kBias = BIAS;
  struct Block {
    alignas(32) uint8_t codes[256];
    Head head;
  };
  Block* blocks;

  static int64_t bytes(int64_t columns) { return columns / 256 * int64_t(sizeof(Block)); }
  template <class F> INLINE void fill(const F& row, int64_t columns, uint8_t* at) {
    blocks = reinterpret_cast<Block*>(at);
    for (int64_t b = 0; b < columns / 256; b++) {
      row.fetch(b);
      F::head(row.block(b), blocks[b].head);
      unroll<8>([&](auto unit) INLINE_LAMBDA {
        constexpr int U = decltype(unit)::value;
        store32(blocks[b].codes + 32 * U, F::template codes<U>(row.block(b)));
      });
    }
  }
  INLINE void fetch(int64_t) const {}
  INLINE const Block& block(int64_t b) const { return blocks[b]; }
  static INLINE void head(const Block& block, Head& h) { h = block.head; }
  template <int U> static INLINE Bytes codes(const Block& block) { return load32(block.codes + 32 * U); }
};

template <class F> constexpr auto decoded_type() {
  if constexpr (F::kSuper) return DecodedSupers<F::kGroup, F::kSigned, F::kBias, F::kMinima>{};
  else return DecodedSteps<F::kStep, F::kSigned, F::kBias != 0>{};
}

template <class Row> NOINLINE void tile_codes(const Row* tile, int rows, int64_t columns, const Activations& a, int64_t begin,
                                              int64_t end, int64_t column, const Output& y) {
  const auto block = [&](auto count, int64_t m) INLINE_LAMBDA {
    constexpr int MB = decltype(count)::value;
    float out[MB];
    for (int r = 0; r < rows; r++) {
      dot_codes<Row, MB>(tile[r], columns, a, m, out);
      UNROLL for (int j = 0; j < MB; j++) store_product(y, m + j, column + r, out[j]);
    }
  };
  over_rows_of<4>(begin, end, block);
  over_rows_of<2>(begin, end, block);
  over_rows_of<1>(begin, end, block);
}

template <class F> void many_rows_codes(const Matrix& w, const Activations& a, int64_t first, int64_t last, int64_t origin,
                                        int64_t begin, int64_t end, const Output& y) {
  using Row = decltype(decoded_type<F>());
  const int64_t stride = (Row::bytes(w.columns) + 63) / 64 * 64;
  Scratch<uint8_t> storage(stride * kTileRows);
  Row tile[kTileRows];
  for (int64_t n = first; n < last; n += kTileRows) {
    const int rows = int(std::min<int64_t>(kTileRows, last - n));
    for (int r = 0; r < rows; r++) tile[r].fill(F(w, n + r), w.columns, storage.data() + r * stride);
    tile_codes<Row>(tile, rows, w.columns, a, begin, end, n - origin, y);
  }
}

// A tile of float32 values: kQuad weight rows by kDepth columns, times activations in blocks of kAcross rows.

static constexpr int kQuad = 4, kAcross = kWide == 16 ? 4 : 2;
static constexpr int64_t kDepth = 1024;

template <int MB> NOINLINE void quad_block(const float* tile, const float* x, int64_t stride, int64_t depth, float* sums) {
  Wide acc[kQuad][MB];
  UNROLL for (int r = 0; r < kQuad; r++) UNROLL for (int j = 0; j < MB; j++) acc[r][j] = wide_zero();
  for (int64_t k = 0; k < depth; k += kWide) {
    Wide w[kQuad];
    UNROLL for (int r = 0; r < kQuad; r++) w[r] = wide_load(tile + r * kDepth + k);
    UNROLL for (int j = 0; j < MB; j++) {
      const Wide v = wide_load(x + j * stride + k);
      UNROLL for (int r = 0; r < kQuad; r++) acc[r][j] = wide_muladd(w[r], v, acc[r][j]);
    }
  }
  UNROLL for (int j = 0; j < MB; j++) UNROLL for (int r = 0; r < kQuad; r++) sums[j * kQuad + r] += wide_sum(acc[r][j]);
}

template <class F> void many_rows_values(const Matrix& w, const Activations& a, int64_t first, int64_t last, int64_t origin,
                                         int64_t begin, int64_t end, const Output& y) {
  const int64_t padded = steps_of(w.columns, F::kStep) * F::kStep;
  Scratch<float> tile(kQuad * kDepth), sums((end - begin) * kQuad);
  std::memset(tile.data(), 0, kQuad * kDepth * sizeof(float));
  for (int64_t n = first; n < last; n += kQuad) {
    const int rows = int(std::min<int64_t>(kQuad, last - n));
    std::memset(sums.data(), 0, size_t(end - begin) * kQuad * sizeof(float));
    for (int64_t k = 0; k < padded; k += kDepth) {
      const int64_t depth = std::min(kDepth, padded - k), step = k / F::kStep;
      for (int r = 0; r < rows; r++) decode_steps(F(w, n + r), step, step + depth / F::kStep, tile.data() + r * kDepth);
      int64_t m = begin;
      const auto block = [&](auto count, int64_t at) {
        quad_block<decltype(count)::value>(tile.data(), a.values + at * a.stride + k, a.stride, depth, sums.data() + (at - begin) * kQuad);
      };
      over_rows_of<kAcross>(m, end, block);
      over_rows_of<1>(m, end, block);
    }
    for (int r = 0; r < rows; r++)
      for (int64_t m = begin; m < end; m++) store_product(y, m, n + r - origin, sums.data()[(m - begin) * kQuad + r]);
  }
}

template <class F> void multiply(const Matrix& w, const Activations& a, int64_t first, int64_t last, int64_t origin, int64_t begin,
                                 int64_t end, const Output& y) {
#if NINFER_PAIRS
  if (a.pairs) return rows_of_pairs<F>(w, a, first, last, origin, begin, end, y);
#endif
  if constexpr (F::kInt8) {
    if (a.codes && end - begin == 1) return one_row_codes<F>(w, a, first, last, origin, begin, y);
#if NINFER_VNNI
    if (a.codes) return many_rows_lanes<F>(w, a, first, last, origin, begin, end, y);
#else
    if (a.codes) return many_rows_codes<F>(w, a, first, last, origin, begin, end, y);
#endif
  }
  if (end - begin == 1) one_row_values<F>(w, a, first, last, origin, begin, y);
  else many_rows_values<F>(w, a, first, last, origin, begin, end, y);
}

template <class F> constexpr Kernels kernels_of() {
  return {dequantize<F>, sizes<F>, prepare<F>, multiply<F>, F::kOrder == kNatural, F::kInt8};
}
