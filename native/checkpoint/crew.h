// checkpoint/crew.h - threads of low priority, helped by the caller that waits for them.
//
// On a machine whose cores are all busy a lowered thread may get a thousandth of the processor. The
// caller waits at its own priority, and works too whenever the others got nothing done for a while,
// or once they were raised, as the work is urgent: that bounds how long a snapshot stays unwritten, and
// costs nothing on a machine with room.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>

#include "base/crew.h"
#include "base/mutex.h"
#include "checkpoint/pace.h"

namespace nostall::checkpoint {

inline constexpr std::chrono::milliseconds kStarved{100};

// Calls `step` in up to `threads` lowered threads, and now and then in this one, until it returns
// false or throws; the first exception is thrown again at the end.
template <typename Step>
void work_lowered(Lowered& lowered, Priority priority, unsigned threads, const Step& step) {
  Mutex mutex;
  Condition ended;
  unsigned ended_threads = 0;
  uint64_t done = 0;
  std::exception_ptr error;
  const auto guarded = [&]() noexcept {
    bool more = false;
    try {
      more = step();
    } catch (...) {
      const MutexLock lock(mutex);
      if (!error) error = std::current_exception();
    }
    const MutexLock lock(mutex);
    ++done;
    return more && !error;
  };
  Crew crew;
  const unsigned started = crew.start(threads, [&] {
    const Lowered::Scope scope(lowered, priority);
    while (guarded()) continue;
    const MutexLock lock(mutex);
    ++ended_threads;
    ended.notify_all();
  });
  bool more = true;
  while (started == 0 && more) more = guarded();
  for (uint64_t before = 0;;) {
    const bool urgent = more && lowered.is_raised();
    MutexLock lock(mutex);
    const auto until = std::chrono::steady_clock::now() + kStarved;
    while (!urgent && ended_threads < started && ended.wait_until(lock, until)) continue;
    if (ended_threads == started) break;
    const bool starved = done == before;
    before = done;
    lock.unlock();
    if (urgent || (starved && more)) more = guarded();
    if (!more) lowered.raise();  // all that is left for them is to end
  }
  crew.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace nostall::checkpoint
