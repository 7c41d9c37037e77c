#include "driver.h"

#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include "matrix_units.h"
#include "parallel.h"
#include "scratch.h"

namespace ninfer {

Grids grids;

#if defined(__aarch64__)
static bool has_dotprod() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
#endif

bool supported(int instruction_set) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (instruction_set == kAvx2) return avx2;
  const bool avx512 =
      avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (instruction_set == kAvx512) return avx512;
  if (instruction_set == kAvx512Bf16)
    return avx512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16") && avx512_bf16::kernels(0);
#elif defined(__aarch64__)
  if (instruction_set == kNeon) return true;
  if (instruction_set == kDotprod) return has_dotprod();
#endif
  return instruction_set == kScalar;
}

const Kernels& kernels_for(int instruction_set, int format) {
  switch (instruction_set) {
    case kDotprod: return *dotprod::kernels(format);
    case kNeon: return *neon::kernels(format);
    case kAvx512Bf16: return *avx512_bf16::kernels(format);
    case kAvx512: return *avx512::kernels(format);
    case kAvx2: return *avx2::kernels(format);
    default: return *scalar::kernels(format);
  }
}

static uint8_t* at(void* data, int64_t element, int dtype) {
  return static_cast<uint8_t*>(data) + element * int64_t(dtype_bytes(dtype));
}

void dequantize(const Kernels& kernels, const Matrix& w, void* out, int dtype, int threads) {
  over_pieces(w.rows, 1, worth(w.rows * w.columns, threads), [&](int64_t first, int64_t last) {
    kernels.dequantize(w, nullptr, first, last, at(out, first * w.columns, dtype), dtype);
  });
}

bool embedding(const Kernels& kernels, const Matrix& w, const int64_t* ids, int64_t count, void* out, int dtype, int threads) {
  for (int64_t i = 0; i < count; i++)
    if (ids[i] < 0 || ids[i] >= w.rows) return false;
  over_pieces(count, 1, worth(count * w.columns, threads), [&](int64_t first, int64_t last) {
    kernels.dequantize(w, ids, first, last, at(out, first * w.columns, dtype), dtype);
  });
  return true;
}

// Activation rows prepared for a format, in memory of their own; float32 rows that already serve are used as they are.
class Prepared {
 public:
  Prepared(const Kernels& kernels, const void* x, int64_t m, int64_t columns, int dtype, bool int8, int threads)
      : sizes_(kernels.sizes(columns, m, dtype, int8)), memory_(bytes(kernels, m, columns, dtype, int8)) {
    if (in_place(kernels, columns, dtype, int8)) {
      rows.values = static_cast<const float*>(x);
      rows.stride = columns;
      return;
    }
    uint8_t* next = memory_.data();
    rows.values = take<float>(next, m, sizes_.values);
    rows.codes = take<int8_t>(next, m, sizes_.codes);
    rows.scales = take<float>(next, m, sizes_.scales);
    rows.starts = take<int32_t>(next, m, sizes_.starts);
    rows.sums = take<int16_t>(next, m, sizes_.sums);
    rows.block_scales = take<float>(next, m, sizes_.blocks);
    rows.group_starts = take<int32_t>(next, m, sizes_.groups);
    rows.group_sums = take<float>(next, m, sizes_.groups);
    rows.pairs = take<uint16_t>(next, m, sizes_.pairs);
    rows.stride = sizes_.values + sizes_.codes + sizes_.pairs;
    rows.scale_stride = sizes_.scales;
    rows.start_stride = sizes_.starts;
    rows.sum_stride = sizes_.sums;
    rows.block_stride = sizes_.blocks;
    rows.group_stride = sizes_.groups;
    over_pieces(m, 1, worth(m * columns, threads), [&](int64_t first, int64_t last) {
      kernels.prepare(x, dtype, columns, first, last, rows);
    });
  }

  Activations rows{};

 private:
  bool in_place(const Kernels& kernels, int64_t columns, int dtype, bool int8) const {
    return kernels.natural && dtype == kFloat32 && !(int8 && kernels.int8) && sizes_.values == columns;
  }
  static int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }
  int64_t bytes(const Kernels& kernels, int64_t m, int64_t columns, int dtype, bool int8) const {
    if (in_place(kernels, columns, dtype, int8)) return 0;
    return padded(m * sizes_.values * 4) + padded(m * sizes_.codes) + padded(m * sizes_.scales * 4) + padded(m * sizes_.starts * 4) +
           padded(m * sizes_.sums * 2) + padded(m * sizes_.blocks * 4) + 2 * padded(m * sizes_.groups * 4) +
           padded(m * sizes_.pairs * 2);
  }
  template <class T> static T* take(uint8_t*& next, int64_t m, int64_t count) {
    T* taken = count ? reinterpret_cast<T*>(next) : nullptr;
    next += padded(m * count * int64_t(sizeof(T)));
    return taken;
  }

  PreparedSizes sizes_;
  Scratch<uint8_t> memory_;
};

static constexpr int64_t kGrain = 16;  // weight rows that are multiplied together

void linear(const Kernels& kernels, const Matrix& w, const void* x, int64_t m, const Output& y, bool int8, int threads) {
  if (m == 0 || w.rows == 0) return;
  const Prepared prepared(kernels, x, m, w.columns, y.dtype, int8, threads);
  over_pieces(w.rows, kGrain, worth(w.rows * w.columns * m, threads), [&](int64_t first, int64_t last) {
    kernels.multiply(w, prepared.rows, first, last, 0, 0, m, y);
  });
}

// Activation rows as tiles [tiles, depth / 2, kTile, 2], zeros after the last row and column.
static void tile_activations(const uint16_t* x, int64_t m, int64_t columns, int64_t depth, uint16_t* tiles, int threads) {
  over_pieces(m, kTile, worth(m * columns, threads), [&](int64_t first, int64_t last) {
    for (int64_t tile = first; tile < last; tile += kTile) {
      uint16_t* out = tiles + tile * depth;
      std::memset(out, 0, size_t(kTile * depth) * 2);
      for (int64_t j = 0; j < std::min<int64_t>(kTile, m - tile); j++) {
        const uint16_t* row = x + (tile + j) * columns;
        int64_t k = 0;
        for (; k + 2 <= columns; k += 2) std::memcpy(out + k * kTile + 2 * j, row + k, 4);
        if (k < columns) out[k * kTile + 2 * j] = row[k];
      }
    }
  });
}

static float bias_value(const Output& y, int64_t column) {
  if (y.bias_dtype == kFloat32) return static_cast<const float*>(y.bias)[column];
  const uint16_t word = static_cast<const uint16_t*>(y.bias)[column];
  return y.bias_dtype == kFloat16 ? half_to_float(word) : bfloat_to_float(word);
}

void linear_in_tiles(const Kernels& kernels, const Matrix& w, const void* x, int64_t m, const Output& y, int threads) {
  if (m == 0 || w.rows == 0) return;
  constexpr int64_t kRows = 2 * kTile;
  const int64_t depth = (w.columns + kTileColumns - 1) / kTileColumns * kTileColumns, tiles = (m + kTile - 1) / kTile;
  Scratch<uint16_t> activations(tiles * kTile * depth);
  tile_activations(static_cast<const uint16_t*>(x), m, w.columns, depth, activations.data(), threads);
  over_pieces(w.rows, kRows, worth(w.rows * w.columns * m, threads), [&](int64_t first, int64_t last) {
    const MatrixUnits units;
    Scratch<uint16_t> weights(kRows * depth);
    std::memset(weights.data(), 0, size_t(kRows * depth) * 2);
    float bias[kRows];
    for (int64_t n = first; n < last; n += kRows) {
      TileProduct p{};
      p.rows = int(std::min(kRows, last - n));
      for (int r = 0; r < p.rows; r++) {
        kernels.dequantize(w, nullptr, n + r, n + r + 1, weights.data() + r * depth, kBfloat16);
        if (y.bias) bias[r] = bias_value(y, n + r);
      }
      p.weights = weights.data();
      p.depth = depth;
      p.bias = y.bias ? bias : nullptr;
      p.stride = y.row_stride;
      for (int64_t tile = 0; tile < tiles; tile += 2) {
        p.activations[0] = activations.data() + tile * kTile * depth;
        p.activations[1] = tile + 1 < tiles ? p.activations[0] + kTile * depth : nullptr;
        for (int64_t i = 0; i < 2; i++) p.counts[i] = int(std::clamp<int64_t>(m - (tile + i) * kTile, 0, kTile));
        p.y = static_cast<uint16_t*>(y.data) + tile * kTile * y.row_stride + n;
        multiply_tiles(p);
      }
    }
  });
}

bool expert_linear(const Kernels& kernels, const Matrix& w, const void* x, int64_t tokens, const int32_t* offsets, int64_t experts,
                   const Output& y, bool int8, int threads) {
  int32_t used = 0;
  for (int64_t e = 0; e < experts; e++) {
    if (offsets[e] < used || offsets[e] > tokens) return false;
    used = offsets[e];
  }
  std::memset(at(y.data, used * y.row_stride, y.dtype), 0, size_t((tokens - used) * y.row_stride) * dtype_bytes(y.dtype));
  if (used == 0) return true;
  const int64_t rows = w.rows / experts;
  const Prepared prepared(kernels, x, used, w.columns, y.dtype, int8, threads);
  over_pieces(rows, kGrain, worth(rows * w.columns * used, threads), [&](int64_t first, int64_t last) {
    for (int64_t e = 0, begin = 0; e < experts; begin = offsets[e++])
      if (offsets[e] > begin) kernels.multiply(w, prepared.rows, e * rows + first, e * rows + last, e * rows, begin, offsets[e], y);
  });
  return true;
}

}  // namespace ninfer
