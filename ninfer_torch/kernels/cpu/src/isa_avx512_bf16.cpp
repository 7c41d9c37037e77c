// AVX-512 with the products of bfloat16 pairs (BF16) and byte tables (VBMI) besides.
#include "scratch.h"

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)

#include <immintrin.h>

#define NINFER_VNNI 1
#define NINFER_PAIRS 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512bf16")
#endif

namespace ninfer::avx512_bf16 {
#include "vec_avx2.h"
#include "isa.h"
}  // namespace ninfer::avx512_bf16

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace ninfer::avx512_bf16 {
const Kernels* kernels(int) { return nullptr; }
}  // namespace ninfer::avx512_bf16

#endif
