// base/activity.h - whether work in this process needs storage or network at the moment.
//
// Foreground work (the loader reading its source, the gradient engine reducing) holds an Activity
// while it lasts. Background work (a checkpoint's drain) polls quiet() and uses what is left over.
// The two sides need no reference to each other: they share two words of memory per process.
// Thread-safety: all of it is thread-safe. Cost: two atomic operations per Activity, two loads per
// poll. A forked child starts with its parent's state; code that waits for quiet must have a
// deadline of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/clock.h"

namespace nostall {

class Activity {
 public:
  Activity() noexcept { running().fetch_add(1); }
  ~Activity() {
    ended().store(now_ns());
    running().fetch_sub(1);
  }
  Activity(const Activity&) = delete;
  Activity& operator=(const Activity&) = delete;

  // Whether no Activity lives, and none has for `since`. Shorter gaps, as between reads, are busy.
  static bool quiet(std::chrono::nanoseconds since = std::chrono::microseconds(500)) noexcept {
    return running().load() <= 0 && now_ns() - ended().load() >= since.count();
  }

 private:
  static std::atomic<int>& running() noexcept {
    static std::atomic<int> count{0};
    return count;
  }
  static std::atomic<int64_t>& ended() noexcept {
    static std::atomic<int64_t> at{0};
    return at;
  }
};

}  // namespace nostall
