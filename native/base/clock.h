// base/clock.h - the one clock of every room: CLOCK_MONOTONIC, the same for all processes of a
// node.
#pragma once

#include <time.h>

#include <cstdint>

namespace nostall {

// Nanoseconds since an arbitrary fixed point of this boot.
inline int64_t now_ns() noexcept {
  timespec t{};
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// CPU time used by the calling thread, in nanoseconds.
inline int64_t thread_cpu_ns() noexcept {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

}  // namespace nostall
