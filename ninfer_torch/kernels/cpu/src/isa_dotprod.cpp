// NEON with the byte dot products of ARMv8.2.
#include "scratch.h"

#if defined(__aarch64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#include <arm_neon.h>

#define NINFER_DOTPROD 1

namespace ninfer::dotprod {
#include "vec_neon.h"
#include "isa.h"
}  // namespace ninfer::dotprod

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else

namespace ninfer::dotprod {
const Kernels* kernels(int) { return nullptr; }
}  // namespace ninfer::dotprod

#endif
