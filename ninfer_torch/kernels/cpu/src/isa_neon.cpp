// NEON, which every 64-bit ARM processor has.
#include "scratch.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#define NINFER_DOTPROD 0

namespace ninfer::neon {
#include "vec_neon.h"
#include "isa.h"
}  // namespace ninfer::neon

#else

namespace ninfer::neon {
const Kernels* kernels(int) { return nullptr; }
}  // namespace ninfer::neon

#endif
