// base/crew.h - threads that share a piece of work, as many as the system gives.
//
// A process can be at its limit of threads (ulimit -u, the pids cgroup) at any moment. Work that is
// split over threads goes on with those that could be started, and in the caller's if there is
// none. Thread-safety: a Crew is a value with one owner; a forked child has none of its threads.
#pragma once

#include <algorithm>
#include <exception>
#include <vector>

#include "base/mutex.h"
#include "base/own_thread.h"

namespace nostall {

class Crew {
 public:
  // Starts up to `count` threads that call `work`, which must not throw; how many there are now.
  template <typename Work>
  unsigned start(unsigned count, const Work& work) noexcept {
    try {
      for (unsigned i = 0; i < count; ++i) threads_.emplace_back(work);
    } catch (const std::exception&) {
      // Neither the thread nor memory for it: those that run do its share.
    }
    return size();
  }
  // Returns when all have ended.
  void join() noexcept { threads_.clear(); }
  unsigned size() const noexcept { return static_cast<unsigned>(threads_.size()); }

 private:
  std::vector<OwnThread> threads_;
};

// Calls `work` in up to `threads` threads, in this one if there is none, and throws the first of
// their errors. `work(false)` is the call in this thread, whose priority is the caller's.
template <typename Work>
void share(unsigned threads, const Work& work) {
  Mutex mutex;
  std::exception_ptr error;
  const auto guarded = [&](bool own_thread) noexcept {
    try {
      work(own_thread);
    } catch (...) {
      const MutexLock lock(mutex);
      if (!error) error = std::current_exception();
    }
  };
  {
    Crew crew;
    if (crew.start(std::max(1u, threads), [&] { guarded(true); }) == 0) guarded(false);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace nostall
