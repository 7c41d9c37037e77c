// What crosses the borders between the Python module, the driver and the kernels of one instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ninfer {

// Canonical format names, in the order of the names the Python side hands over at load.
enum Format : int {
  kQ2G64, kQ4G64, kQ5G64, kQ6G64, kQ8G32, kT2G128, kNvfp4, kFp8RowBf16, kFp8RowFp16,
  kGgufQ4_0, kGgufQ5_0, kGgufQ8_0, kGgufQ2K, kGgufQ3K, kGgufQ4K, kGgufQ5K, kGgufQ6K,
  kGgufIq2Xxs, kGgufIq2Xs, kGgufIq3Xxs, kGgufIq1S, kGgufIq4Nl, kGgufIq3S, kGgufIq2S, kGgufIq4Xs, kGgufIq1M, kGgufQ2_0,
  kFormats,
};

enum Dtype : int { kFloat32, kBfloat16, kFloat16 };

inline size_t dtype_bytes(int dtype) { return dtype == kFloat32 ? 4 : 2; }

// A matrix or row view [rows, columns]: the planes of its layout, and its place in the parent object.
struct Matrix {
  const uint8_t* planes[3];
  int64_t rows, columns, row_begin, parent_rows, divisors;
};

// M activation rows, widened to float32 or quantized to int8, in the order in which a format's codes leave their bytes.
struct Activations {
  const float* values;    // [M, stride], or null when quantized
  const int8_t* codes;    // [M, stride]
  const float* scales;    // per row: lane scales of every step, or one scale per 256 columns
  const int32_t* starts;  // per row: where the int32 lanes of every step begin, -bias * (sum of the lane's codes)
  const int16_t* sums;    // per row: sums of 16 codes, then of 32 (256-column blocks only)
  int64_t stride, scale_stride, start_stride, sum_stride;
  // For kernels that hold weight rows side by side, null for others: the scale of every 32 columns, and of every group of a format
  // -bias * (sum of its codes) and scale * (sum of its codes).
  const float* block_scales;
  const int32_t* group_starts;
  const float* group_sums;
  int64_t block_stride, group_stride;
  // Bfloat16 words in the order of the pairs that are multiplied [M, stride], or null.
  const uint16_t* pairs;
};

// Output [M, row_stride] in x's dtype, one column per weight row.
struct Output {
  void* data;
  int64_t row_stride;
  int dtype;
  const void* bias;
  int bias_dtype;
};

// How large the pieces of one prepared activation row are, in elements of their type.
struct PreparedSizes {
  int64_t values, codes, scales, starts, sums, blocks, groups, pairs;
};

struct Kernels {
  // Rows [first, last) of a matrix to out [last - first, columns] of `dtype`; row i is taken from ids[i] when ids are given.
  void (*dequantize)(const Matrix&, const int64_t* ids, int64_t first, int64_t last, void* out, int dtype);
  PreparedSizes (*sizes)(int64_t columns, int64_t m, int dtype, bool int8);
  // Activation rows [first, last) into the arrays of `prepared`.
  void (*prepare)(const void* x, int dtype, int64_t columns, int64_t first, int64_t last, const Activations& prepared);
  // Weight rows [first, last) times activation rows [begin, end); the output column of weight row n is n - origin.
  void (*multiply)(const Matrix&, const Activations&, int64_t first, int64_t last, int64_t origin, int64_t begin,
                   int64_t end, const Output&);
  // A natural column order and float32 activations: the caller's own array can serve as prepared values.
  bool natural;
  // Whether the family has an int8 product.
  bool int8;
};

// Lookup tables of the codebook formats, owned by the Python side: kernels/grids.py.
struct Grids {
  const int8_t *iq4_nl, *even_signs, *signs, *iq2_xxs, *iq2_xs, *iq2_s, *iq3_xxs, *iq3_s, *iq1_s;
};
extern Grids grids;

namespace scalar { const Kernels* kernels(int format); }
namespace avx2 { const Kernels* kernels(int format); }
namespace avx512 { const Kernels* kernels(int format); }
namespace avx512_bf16 { const Kernels* kernels(int format); }
namespace neon { const Kernels* kernels(int format); }
namespace dotprod { const Kernels* kernels(int format); }

}  // namespace ninfer
