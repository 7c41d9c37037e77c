// row_scale_v1 and row_interleaved_v1 (spec/layouts.md 6, 7): E4M3FN words of any number of columns, one scale per row.
//
// The words have no int8 product: a policy that permits int8 activations runs with float32 ones.

template <bool INTERLEAVED> struct RowFloat {
  static constexpr bool kInt8 = false, kSuper = false, kInterleaved = INTERLEAVED;
  static constexpr int kStep = 32, kVectors = 1;
  static constexpr Order kOrder = kNatural;
  const uint8_t* words;
  float row_scale;
  int64_t columns;

  INLINE RowFloat(const Matrix& m, int64_t n) : columns(m.columns) {
    words = m.planes[0] + n * (m.columns + (INTERLEAVED ? 2 : 0));
    row_scale = INTERLEAVED ? half(words + m.columns) : bfloat_to_float(load_word(m.planes[1] + 2 * n));
  }
  INLINE float divisor() const { return 1; }
  INLINE void fetch(int64_t s) const { prefetch(words + 32 * s + kAhead); }
  // The 32 words of step s, zeros after the row's end; `spare` holds them where the row ends inside the step.
  INLINE const uint8_t* step(int64_t s, uint8_t (&spare)[32]) const {
    const int64_t left = columns - 32 * s;
    if (left >= 32) return words + 32 * s;
    std::memset(spare, 0, 32);
    std::memcpy(spare, words + 32 * s, size_t(left));
    return spare;
  }
};
