// base/activity.h - who in this process needs storage or network at the moment.
//
// Rooms with a training that waits for them (the loader reading its source, the gradient engine
// reducing) say so by an Activity for as long as they do; rooms that can wait (a checkpoint's
// drain) look whether it is quiet, and use what is left over. Nobody knows anybody: this is the
// process's register of what goes on, two words of memory. Thread-safety: all of it is thread-safe.
// Cost: two atomic operations an Activity, two loads a look. A forked child sees what its parent
// did at the fork; whoever waits for quiet has a limit of its own.
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

  // Whether nothing goes on, and has not for `since`: between two reads of a row is no quiet.
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
