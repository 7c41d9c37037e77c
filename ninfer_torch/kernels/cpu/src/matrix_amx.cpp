#include "matrix_units.h"

#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16")
#endif

namespace ninfer {

// Eight registers of sixteen rows of 64 bytes. A constant in memory: compilers may not see that the instruction reads all of it.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
extern const TileShapes kTileShapes;
const TileShapes kTileShapes{};

bool has_matrix_units() {
  static const bool usable = [] {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool bf16 = d >> 22 & 1, tiles = d >> 24 & 1;
    if (!bf16 || !tiles || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return false;  // and AVX-512 BF16
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return usable;
}

static void configure() { _tile_loadconfig(&kTileShapes); }
static void release() { _tile_release(); }
MatrixUnits::MatrixUnits() { configure(); }
MatrixUnits::~MatrixUnits() { release(); }

// Sums [kTile weight rows, kTile activation rows] across: activation row j is column j.
static void store_sums(const TileProduct& p, const float* sums, int half, int tile) {
  const int rows = p.rows - half * kTile < kTile ? p.rows - half * kTile : kTile;
  if (rows <= 0) return;
  const __mmask16 mask = __mmask16((1u << rows) - 1);
  const __m512i places = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(kTile));
  const __m512 bias = p.bias ? _mm512_maskz_loadu_ps(mask, p.bias + half * kTile) : _mm512_setzero_ps();
  for (int j = 0; j < p.counts[tile]; j++) {
    const __m512 column = _mm512_add_ps(_mm512_i32gather_ps(places, sums + j, 4), bias);
    uint16_t* out = p.y + (tile * kTile + j) * p.stride + half * kTile;
    _mm256_mask_storeu_epi16(out, mask, __m256i(_mm512_cvtneps_pbh(column)));
  }
}

void multiply_tiles(const TileProduct& p) {
  constexpr int kRowBytes = kTileColumns * 2, kPairs = kTileColumns / 2;
  alignas(64) float sums[kTile * kTile];
  const int64_t stride = p.depth * 2;
  const uint16_t *low = p.weights, *high = p.weights + kTile * p.depth;
  const bool both = p.activations[1] != nullptr;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < p.depth; k += kTileColumns) {
    _tile_loadd(4, low + k, stride);
    _tile_loadd(5, high + k, stride);
    _tile_loadd(6, p.activations[0] + k * kTile, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if (both) {
      _tile_loadd(7, p.activations[1] + k * kTile, kRowBytes);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  static_assert(kPairs * 2 == kTileColumns, "a tile holds pairs of columns");
  const auto store = [&](int half, int tile) { store_sums(p, sums, half, tile); };
  _tile_stored(0, sums, kTile * 4);
  store(0, 0);
  _tile_stored(1, sums, kTile * 4);
  store(1, 0);
  if (!both) return;
  _tile_stored(2, sums, kTile * 4);
  store(0, 1);
  _tile_stored(3, sums, kTile * 4);
  store(1, 1);
}

}  // namespace ninfer

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace ninfer {
bool has_matrix_units() { return false; }
MatrixUnits::MatrixUnits() {}
MatrixUnits::~MatrixUnits() {}
void multiply_tiles(const TileProduct&) {}
}  // namespace ninfer

#endif
