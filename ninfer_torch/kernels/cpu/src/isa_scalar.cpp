// The portable kernels: exact, and the yardstick of the vector ones.
#include "scratch.h"

// Forced inlining and unrolling pay for vector registers only; here it would take minutes to compile.
#undef INLINE
#undef UNROLL
#undef INLINE_LAMBDA
#define INLINE inline
#define UNROLL
#define INLINE_LAMBDA

namespace ninfer::scalar {
#include "vec_scalar.h"
#include "isa.h"
}  // namespace ninfer::scalar
