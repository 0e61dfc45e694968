// base/futex.h - waiting on a word of memory that processes share.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace nostall {

// Sleeps while `word` is `seen`, at most `timeout`; may wake early. Works across processes.
inline void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen,
                       std::chrono::nanoseconds timeout) noexcept {
  const timespec limit{static_cast<time_t>(timeout.count() / 1'000'000'000),
                       static_cast<long>(timeout.count() % 1'000'000'000)};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void futex_wake_all(const std::atomic<uint32_t>& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace nostall
