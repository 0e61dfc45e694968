// scheduler.h - runs ranks that are threads one at a time, and chooses who goes on at every
// operation on a shared atomic. collective/ is compiled against it once more (collective/atomic.h).
//
//   Explorer explorer({.preemptions = 2});
//   explorer.run(bodies);   // again and again, by a different schedule each time, until all are
//   done
//
// Futexes have no timeout here: a lost wake-up leaves no rank that can run, and that is reported.
// Operations are sequentially consistent; what weaker orders allow is ThreadSanitizer's to find.
// A thread that no scheduler runs may have random delays put in instead (Delays).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace nostall::collective::model {

// Before every operation on an atomic.
void point() noexcept;
bool is_scheduled() noexcept;

template <typename T>
class Atomic {
 public:
  Atomic() = default;
  Atomic(T value) : value_(value) {}
  Atomic(const Atomic&) = delete;
  Atomic& operator=(const Atomic&) = delete;
  T load(std::memory_order order = std::memory_order_seq_cst) const noexcept {
    point();
    return value_.load(order);
  }
  void store(T value, std::memory_order order = std::memory_order_seq_cst) noexcept {
    point();
    value_.store(value, order);
  }
  T fetch_add(T by, std::memory_order order = std::memory_order_seq_cst) noexcept {
    point();
    return value_.fetch_add(by, order);
  }
  T fetch_sub(T by, std::memory_order order = std::memory_order_seq_cst) noexcept {
    point();
    return value_.fetch_sub(by, order);
  }
  bool compare_exchange_weak(T& seen, T value,
                             std::memory_order order = std::memory_order_seq_cst) noexcept {
    return compare_exchange_strong(seen, value, order);
  }
  bool compare_exchange_strong(T& seen, T value,
                               std::memory_order order = std::memory_order_seq_cst) noexcept {
    point();
    return value_.compare_exchange_strong(seen, value, order);
  }
  const std::atomic<T>& raw() const noexcept { return value_; }

 private:
  std::atomic<T> value_{};
};

// In place of base/futex.h.
void futex_wait(const Atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds) noexcept;
void futex_wake_all(const Atomic<uint32_t>& word) noexcept;

using Body = std::function<void()>;

struct Limits {
  uint32_t preemptions = 2;  // switches away from a rank that could go on, in one schedule
  uint64_t schedules = 10'000;
  uint64_t seed = 0;               // not 0: random schedules instead of all
  std::function<void()> before{};  // each schedule
};

struct Findings {
  uint64_t schedules = 0;
  bool exhausted = false;  // all schedules with so many preemptions were run
  uint64_t deadlocks = 0;  // schedules after which no rank could run
  std::string first;       // the first of these: the ranks that ran, as digits
};

// Runs the bodies, each on a thread of its own, by one schedule after the other. They must do the
// same in each run. Stops at the first deadlock, after letting the bodies end unscheduled.
Findings explore(const std::vector<Body>& bodies, const Limits& limits);

// While it lives, this thread's operations on atomics are delayed now and then: yields, pauses of
// some microseconds, sleeps. Its futexes have no timeout.
class Delays {
 public:
  explicit Delays(uint64_t seed);
  ~Delays();
};

}  // namespace nostall::collective::model
