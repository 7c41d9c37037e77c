// Sixteen weight rows side by side: lane n of every register belongs to row n of a tile; included inside the namespace of an
// instruction set whose byte dot products accumulate in place (kByteDot).
//
// A chunk of a tile is decoded once, as unsigned words in *groups* of columns that share a scale, dword by dword across the rows;
// then every activation row passes over it. An int32 lane sums a whole group before it becomes a float, and no lane is ever summed
// with another.

static constexpr int kLanes = 16;
static constexpr int64_t kChunk = 1024;  // columns: 16 KiB of words

// The byte, inside its step, where the d-th dword of a permuted step lies, when dwords go by groups of columns.
constexpr int dword_offset(Order order, int group, int d) {
  const int of_group = group / 4, g = d / of_group, i = d % of_group;  // a group is as many dwords as it has columns / 4
  if (order == kNatural) return 4 * d;
  const int half = of_group / 2, quarter = of_group / 4;
  if (order == kEvenOdd) return 32 * (i / half) + 4 * (g * half + i % half);
  return 16 * (i / quarter) + 4 * (g * quarter + i % quarter);  // one dword or two from each of the four planes
}

// A chunk of a tile.
struct LaneChunk {
  uint8_t* words;           // [dwords][kLanes][4]
  float *scales, *minima;   // [groups][kLanes]
};

// The inverse: the place d of the dword at a byte offset of its step.
struct Places {
  uint8_t of[16];
};
constexpr Places places(Order order, int group) {
  Places p{};
  for (int d = 0; d < 16; d++) p.of[dword_offset(order, group, d) / 4 % 16] = uint8_t(d);
  return p;
}

template <class F> struct Cursors {
  F rows[kLanes];
};
// Rows n..n + 15; those after `last` stand for the row before it.
template <class F, int... I> Cursors<F> cursors_of(const Matrix& w, int64_t n, int64_t last, std::integer_sequence<int, I...>) {
  return {{F(w, std::min(n + I, last - 1))...}};
}

// The dwords of 32 bytes of sixteen rows, `stride` bytes apart, across lanes; out(d) is where dword d goes.
template <class Out> INLINE void across_lanes(const uint8_t* rows, int64_t stride, Out&& out) {
  Wide32 t[8], u[8];
  UNROLL for (int r = 0; r < 8; r++) t[r] = wide_pair(rows + r * stride, rows + (r + 8) * stride);
  UNROLL for (int r = 0; r < 8; r += 2) {
    u[r] = wide_unpack_low32(t[r], t[r + 1]);
    u[r + 1] = wide_unpack_high32(t[r], t[r + 1]);
  }
  UNROLL for (int r = 0; r < 8; r += 4) {
    t[r] = wide_unpack_low64(u[r], u[r + 2]);
    t[r + 1] = wide_unpack_high64(u[r], u[r + 2]);
    t[r + 2] = wide_unpack_low64(u[r + 1], u[r + 3]);
    t[r + 3] = wide_unpack_high64(u[r + 1], u[r + 3]);
  }
  UNROLL for (int d = 0; d < 4; d++) {
    wide_store32(out(d), wide_even_quarters(t[d], t[d + 4]));
    wide_store32(out(d + 4), wide_odd_quarters(t[d], t[d + 4]));
  }
}

// Columns [begin, begin + columns) of the rows at `cursors`.
template <class F> NOINLINE void fill_lanes(const F* cursors, int64_t begin, int64_t columns, const LaneChunk& chunk) {
  constexpr int kGroups = F::kStep / F::kGroup;
  static constexpr Places kPlaces = places(F::kOrder, F::kGroup);
  alignas(64) uint8_t words[kLanes * F::kStep];
  for (int64_t k = 0; k < columns; k += F::kStep) {
    const int64_t s = (begin + k) / F::kStep, group = k / F::kGroup;
    for (int r = 0; r < kLanes; r++) {
      const F& row = cursors[r];
      uint8_t* out = words + r * F::kStep;
      row.fetch(s);
      if constexpr (F::kSuper) {
        Head h;
        F::head(row.block(s), h);
        for (int g = 0; g < kGroups; g++) {
          chunk.scales[(group + g) * kLanes + r] = h.d * h.scale[g];
          if constexpr (F::kMinima) chunk.minima[(group + g) * kLanes + r] = h.dmin * h.minimum[g];
        }
        unroll<8>([&](auto unit) INLINE_LAMBDA {
          const Bytes c = F::template codes<decltype(unit)::value>(row.block(s));
          store32(out + 32 * decltype(unit)::value, F::kSigned ? bxor(c, splat8(0x80)) : c);
        });
      } else {
        alignas(32) float lanes[8];
        storef(lanes, row.lanes(s));
        UNROLL for (int g = 0; g < kGroups; g++)
          chunk.scales[(group + g) * kLanes + r] = lanes[dword_offset(F::kOrder, F::kGroup, g * F::kGroup / 4) / 4 % 8];
        Bytes c[F::kVectors];
        row.codes(s, c);
        UNROLL for (int v = 0; v < F::kVectors; v++) store32(out + 32 * v, F::kSigned ? bxor(c[v], splat8(0x80)) : c[v]);
      }
    }
    uint8_t* at = chunk.words + k * kLanes;
    for (int v = 0; v < F::kStep; v += 32) {
      across_lanes(words + v, F::kStep, [&](int d) INLINE_LAMBDA {
        const int offset = v + 4 * d;
        return at + (F::kOrder == kNatural ? offset : 4 * kPlaces.of[offset / 4]) * kLanes;
      });
    }
  }
}

// MB activation rows, from row m, over a chunk that begins at column `begin`; adds to sums [MB, kLanes].
template <int MB, Order ORDER, int GROUP, bool MINIMA>
NOINLINE void pass_lanes(const LaneChunk& chunk, int64_t begin, int64_t columns, const Activations& a, int64_t m, float* sums) {
  constexpr int kUnit = ORDER == kNatural ? 32 : 64, kPerBlock = 32 / GROUP;
  Wide total[MB];
  UNROLL for (int j = 0; j < MB; j++) total[j] = wide_load(sums + j * kLanes);
  const int8_t* x = a.codes + m * a.stride + begin;
  const float* scales = a.block_scales + m * a.block_stride + begin / 32;
  const int32_t* starts = a.group_starts + m * a.group_stride + begin / GROUP;
  const float* group_sums = MINIMA ? a.group_sums + m * a.group_stride + begin / GROUP : nullptr;
  const uint8_t* words = chunk.words;
  for (int64_t k = 0, group = 0; k < columns; k += kUnit) {
    unroll<kUnit / GROUP>([&](auto index) INLINE_LAMBDA {
      constexpr int G = decltype(index)::value;
      Wide32 t[MB];
      UNROLL for (int j = 0; j < MB; j++) t[j] = wide_splat32(starts[j * a.group_stride + group]);
      unroll<GROUP / 4>([&](auto dword) INLINE_LAMBDA {
        constexpr int D = G * (GROUP / 4) + decltype(dword)::value;
        const Wide32 w = wide_load32(words + 4 * kLanes * D);
        UNROLL for (int j = 0; j < MB; j++)
          t[j] = wide_dot(t[j], w, wide_splat32(int32_t(load_dword(x + j * a.stride + k + dword_offset(ORDER, GROUP, D)))));
      });
      const Wide scale = wide_load(chunk.scales + group * kLanes);
      UNROLL for (int j = 0; j < MB; j++) {
        const Wide by = wide_mul(scale, wide_splat(scales[j * a.block_stride + group / kPerBlock]));
        total[j] = wide_muladd(by, wide_to_float(t[j]), total[j]);
      }
      if constexpr (MINIMA) {
        const Wide minimum = wide_load(chunk.minima + group * kLanes);
        UNROLL for (int j = 0; j < MB; j++)
          total[j] = wide_minus_product(total[j], minimum, wide_splat(group_sums[j * a.group_stride + group]));
      }
      group++;
    });
    words += kUnit * kLanes;
  }
  UNROLL for (int j = 0; j < MB; j++) wide_store(sums + j * kLanes, total[j]);
}

template <class F> void many_rows_lanes(const Matrix& w, const Activations& a, int64_t first, int64_t last, int64_t origin,
                                        int64_t begin, int64_t end, const Output& y) {
  const int64_t padded = steps_of(w.columns, F::kStep) * F::kStep;
  constexpr int64_t kGroups = kChunk / F::kGroup;
  Scratch<uint8_t> words(kChunk * kLanes);
  Scratch<float> scales(2 * kGroups * kLanes), sums((end - begin) * kLanes);
  const LaneChunk chunk{words.data(), scales.data(), scales.data() + kGroups * kLanes};
  for (int64_t n = first; n < last; n += kLanes) {
    const auto cursors = cursors_of<F>(w, n, last, std::make_integer_sequence<int, kLanes>{});
    std::memset(sums.data(), 0, size_t(end - begin) * kLanes * sizeof(float));
    for (int64_t k = 0; k < padded; k += kChunk) {
      const int64_t columns = std::min(kChunk, padded - k);
      fill_lanes<F>(cursors.rows, k, columns, chunk);
      int64_t m = begin;
      const auto pass = [&](auto count, int64_t at) {
        pass_lanes<decltype(count)::value, F::kOrder, F::kGroup, F::kMinima>(chunk, k, columns, a, at,
                                                                            sums.data() + (at - begin) * kLanes);
      };
      over_rows_of<8>(m, end, pass);
      over_rows_of<4>(m, end, pass);
      over_rows_of<2>(m, end, pass);
      over_rows_of<1>(m, end, pass);
    }
    const int rows = int(std::min<int64_t>(kLanes, last - n));
    for (int64_t m = begin; m < end; m++) {
      float* out = sums.data() + (m - begin) * kLanes;
      for (int r = 0; r < rows; r++) out[r] /= cursors.rows[r].divisor();
      store_products(y, m, n - origin, out, rows);
    }
  }
}
