// tier/turns.h - private to the room: how many reads may be in flight at once, p_j of
// [Böhringer 2020].
//
// Thread-safety: all methods of Turns, from any thread; a Taken belongs to one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/mutex.h"

namespace nostall::tier {

class Turns {
 public:
  // Turns of the caller, given back when this goes.
  class Taken {
   public:
    Taken(Turns* of, size_t count) noexcept : of_(of), count_(count) {}
    Taken(Taken&& other) noexcept : of_(std::exchange(other.of_, nullptr)), count_(other.count_) {}
    Taken& operator=(Taken&&) = delete;
    ~Taken() {
      if (of_) of_->give_back(count_);
    }
    size_t count() const noexcept { return count_; }

   private:
    Turns* of_;
    size_t count_;
  };

  // Before anything is taken; 0: no limit.
  void limit(size_t most) noexcept { most_ = most; }

  // As many as are free, at most `wanted`; waits for one.
  Taken take(size_t wanted) {
    if (most_ == 0) return {nullptr, wanted};
    MutexLock lock(mutex_);
    while (taken_ == most_) free_.wait(lock);
    const size_t count = std::min(wanted, most_ - taken_);
    taken_ += count;
    return {this, count};
  }

 private:
  void give_back(size_t count) noexcept {
    {
      const MutexLock lock(mutex_);
      taken_ -= count;
    }
    free_.notify_all();
  }

  size_t most_ = 0;
  Mutex mutex_;
  Condition free_;
  size_t taken_ NOSTALL_GUARDED_BY(mutex_) = 0;
};

}  // namespace nostall::tier
