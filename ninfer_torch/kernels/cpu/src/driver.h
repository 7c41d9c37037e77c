// The four operations, for any format and instruction set.
#pragma once

#include "types.h"

namespace ninfer {

enum InstructionSet : int { kScalar, kAvx2, kAvx512, kAvx512Bf16, kNeon, kDotprod, kInstructionSets };

bool supported(int instruction_set);
const Kernels& kernels_for(int instruction_set, int format);

void dequantize(const Kernels&, const Matrix&, void* out, int dtype, int threads);

// Rows `ids` of a matrix. Returns false, having written nothing, when an id lies outside it.
bool embedding(const Kernels&, const Matrix&, const int64_t* ids, int64_t count, void* out, int dtype, int threads);

// x [M, K] times the matrix transposed, to `y` [M, N].
void linear(const Kernels&, const Matrix&, const void* x, int64_t m, const Output& y, bool int8, int threads);

// The same for bfloat16 x and y in matrix units: weight rows are rounded to bfloat16 (criterion A16T).
void linear_in_tiles(const Kernels&, const Matrix&, const void* x, int64_t m, const Output& y, int threads);

// Tokens sorted by expert, x [T, K], each range times its expert's rows of the bank, to [T, N]; zeros after the last token.
// Returns false, having written nothing, when the cumulative `offsets` do not ascend from 0 to at most T.
bool expert_linear(const Kernels&, const Matrix&, const void* x, int64_t tokens, const int32_t* offsets, int64_t experts,
                   const Output& y, bool int8, int threads);

}  // namespace ninfer
