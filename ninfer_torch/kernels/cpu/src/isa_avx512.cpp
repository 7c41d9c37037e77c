// AVX2 with the byte dot products and the wide registers of AVX-512 (VL, VNNI).
#include "scratch.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define NINFER_VNNI 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512vnni")
#endif

namespace ninfer::avx512 {
#include "vec_avx2.h"
#include "isa.h"
}  // namespace ninfer::avx512

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace ninfer::avx512 {
const Kernels* kernels(int) { return nullptr; }
}  // namespace ninfer::avx512

#endif
