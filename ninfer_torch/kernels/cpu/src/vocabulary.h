// Words shared by the row formats of one instruction set; included inside its namespace.
//
// A *step* is the run of columns (32 or 64) that a stepped format decodes at once into one or two Bytes. `order` says which
// column a byte of the step holds; activations are permuted to match, so that no format interleaves its codes.

static constexpr int kAhead = 2048;  // bytes that a row's cursor prefetches ahead

enum Order { kNatural, kEvenOdd, kFourPlanes };

// The column, inside its step, of decoded position p.
constexpr int column_of(Order order, int p) {
  return order == kNatural ? p : order == kEvenOdd ? 2 * (p % 32) + p / 32 : 4 * (p % 16) + p / 16;
}

template <int V> struct Index { static constexpr int value = V; };

template <class Body, int... I> INLINE void unroll(Body&& body, std::integer_sequence<int, I...>) { (body(Index<I>{}), ...); }
template <int N, class Body> INLINE void unroll(Body&& body) { unroll(body, std::make_integer_sequence<int, N>{}); }

INLINE Bytes low_nibbles(Bytes v) { return band(v, splat8(15)); }
INLINE Bytes high_nibbles(Bytes v) { return band(shr<4>(v), splat8(15)); }
// Sixteen bytes to 32 nibbles: the low ones, then the high ones.
INLINE Bytes nibble_halves(const uint8_t* p) { return band(shr_halves<0, 4>(load16x2(p)), splat8(15)); }

alignas(32) static constexpr uint8_t kSpreadBits32[32] = {  // byte j of 32 takes byte j / 8
    0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3};
alignas(32) static constexpr uint8_t kSpreadPairs64[32] = {  // byte j of 32 takes byte j / 4
    0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7};

template <int MB, class Body> INLINE void over_rows_of(int64_t& m, int64_t end, Body&& body) {
  for (; m + MB <= end; m += MB) body(Index<MB>{}, m);
}
