// AVX2, FMA and F16C.
#include "scratch.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define NINFER_VNNI 0
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace ninfer::avx2 {
#include "vec_avx2.h"
#include "isa.h"
}  // namespace ninfer::avx2

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace ninfer::avx2 {
const Kernels* kernels(int) { return nullptr; }
}  // namespace ninfer::avx2

#endif
