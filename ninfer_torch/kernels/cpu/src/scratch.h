// What every translation unit of kernels includes before its instruction set is switched on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#include <utility>

#include "numbers.h"
#include "types.h"

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
// Small constant loops over register arrays must not stay loops.
#define UNROLL _Pragma("GCC unroll 16")
#define NOINLINE __attribute__((noinline))

namespace ninfer {

// Cache-line aligned memory for one call; throws std::bad_alloc.
template <class T> class Scratch {
 public:
  explicit Scratch(int64_t count) : memory_(std::aligned_alloc(64, (size_t(count) * sizeof(T) + 64) / 64 * 64)) {
    if (!memory_) throw std::bad_alloc();
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(memory_); }
  T* data() { return static_cast<T*>(memory_); }

 private:
  void* memory_;
};

}  // namespace ninfer
