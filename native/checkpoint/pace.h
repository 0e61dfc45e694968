// checkpoint/pace.h - how background writing stays out of the training's way.
//
// Three means: a rate, below what the storage gives; a gate, which is closed while the training
// needs storage or network itself: by hand, or because a loader or a gradient engine of this
// process is at work (base/activity.h); and a low priority for processor and disk. Thread-safety:
// all of it is thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "base/mutex.h"

namespace nostall::checkpoint {

// Closed by threads that need the storage, for as long as one of them holds it.
class Gate {
 public:
  void hold();
  void release();
  // Waits until no thread holds the gate and, if `considerate`, no loader reads and no gradient is
  // under way, or `patience` is over: a gate that is never opened must not keep a checkpoint from
  // becoming safe. False if patience ended it.
  bool wait_open(std::chrono::nanoseconds patience, bool considerate = false);
  // What callers waited so far, together.
  std::chrono::nanoseconds waited() const;
  bool is_held() const;

 private:
  bool is_open(bool considerate) const NOSTALL_REQUIRES(mutex_);

  mutable Mutex mutex_;
  Condition opened_;
  int holds_ NOSTALL_GUARDED_BY(mutex_) = 0;
  std::chrono::nanoseconds waited_ NOSTALL_GUARDED_BY(mutex_){0};
};

// Lets `rate` bytes per second pass, all callers together; 0: any.
class Pace {
 public:
  explicit Pace(uint64_t rate) : rate_(rate) {}
  // Sleeps until `bytes` more may pass; returns early once lift was called.
  void take(uint64_t bytes);
  // No limit from now on: a caller waits for the end.
  void lift();

 private:
  Mutex mutex_;
  Condition lifted_;
  uint64_t rate_ NOSTALL_GUARDED_BY(mutex_);
  std::chrono::steady_clock::time_point free_ NOSTALL_GUARDED_BY(mutex_){};
};

enum class Priority {
  normal,
  low,   // nice 19, the lowest best-effort class of the disk
  idle,  // only processor and disk time that is left over
};

// Of the calling thread. What the system refuses stays as it was: priority is advice.
void set_priority(Priority priority) noexcept;

// Threads that lowered themselves, and can be raised again where the system allows it (to root, or
// within RLIMIT_NICE): one that waits for the processor would keep its block for long.
class Lowered {
 public:
  // Lowers the calling thread, unless raise was called.
  void enter(Priority priority) noexcept;
  // Before the thread ends.
  void leave() noexcept;
  // Gives them the caller's priority.
  void raise();
  bool is_raised() const {
    const MutexLock lock(mutex_);
    return raised_;
  }

  // Lowers the calling thread for a scope.
  class Scope {
   public:
    Scope(Lowered& lowered, Priority priority) : lowered_(lowered) { lowered_.enter(priority); }
    ~Scope() { lowered_.leave(); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Lowered& lowered_;
  };

 private:
  mutable Mutex mutex_;
  std::vector<int> threads_ NOSTALL_GUARDED_BY(mutex_);
  bool raised_ NOSTALL_GUARDED_BY(mutex_) = false;
};

}  // namespace nostall::checkpoint
