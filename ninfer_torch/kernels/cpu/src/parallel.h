// Work shared over threads: through the OpenMP pool that torch uses as well, or plain threads where OpenMP cannot serve.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace ninfer {

// An OpenMP pool does not survive fork: a child would wait for threads that it does not have.
inline std::atomic<bool>& forked() {
  static std::atomic<bool> flag{false};
  return flag;
}

inline void watch_forks() {
#if defined(__unix__) || defined(__APPLE__)
  pthread_atfork(nullptr, nullptr, [] { forked() = true; });
#endif
}

// body(thread, threads) on each of `threads` threads; the first exception is rethrown here.
template <class Body> void parallel(int threads, const Body& body) {
  if (threads <= 1) return body(0, 1);
  std::exception_ptr error;
  std::mutex guard;
  const auto guarded = [&](int thread) {
    try {
      body(thread, threads);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(guard);
      if (!error) error = std::current_exception();
    }
  };
#if defined(_OPENMP)
  if (!forked()) {
    // The runtime may grant fewer threads than asked for; every part is done all the same.
#pragma omp parallel num_threads(threads)
    for (int part = omp_get_thread_num(); part < threads; part += omp_get_num_threads()) guarded(part);
    if (error) std::rethrow_exception(error);
    return;
  }
#endif
  std::vector<std::thread> workers;
  for (int part = 1; part < threads; part++) workers.emplace_back(guarded, part);
  guarded(0);
  for (std::thread& worker : workers) worker.join();
  if (error) std::rethrow_exception(error);
}

// body(first, last) over pieces of [0, count), cut at multiples of `grain`: a thread takes the next piece when it has finished one, so that
// a slow processor holds nobody up. Which thread computes a piece changes nothing about it.
template <class Body> void over_pieces(int64_t count, int64_t grain, int threads, const Body& body) {
  if (threads <= 1) return body(int64_t(0), count);
  constexpr int64_t kPieces = 8;  // a thread
  const int64_t grains = (count + grain - 1) / grain;
  const int64_t piece = std::max<int64_t>(1, grains / (threads * kPieces)) * grain;
  std::atomic<int64_t> next{0};
  parallel(threads, [&](int, int) {
    for (int64_t first; (first = next.fetch_add(piece, std::memory_order_relaxed)) < count;) body(first, std::min(count, first + piece));
  });
}

// How many threads `work` (weights times activation rows) is worth.
inline int worth(int64_t work, int threads) { return int(std::clamp<int64_t>(work >> 16, 1, threads)); }

}  // namespace ninfer
