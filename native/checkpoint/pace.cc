// The gate, the rate and the priorities of background writing.
#include "checkpoint/pace.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "base/activity.h"

namespace nostall::checkpoint {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kLook{1};

void Gate::hold() {
  const MutexLock lock(mutex_);
  ++holds_;
}

void Gate::release() {
  const MutexLock lock(mutex_);
  if (holds_ > 0 && --holds_ == 0) opened_.notify_all();
}

bool Gate::wait_open(std::chrono::nanoseconds patience, bool considerate) {
  MutexLock lock(mutex_);
  if (is_open(considerate)) return true;
  const Clock::time_point began = Clock::now(), end = began + patience;
  // Polled: a notification would slow the foreground threads.
  while (!is_open(considerate) && Clock::now() < end) {
    opened_.wait_until(lock, considerate ? std::min(end, Clock::now() + kLook) : end);
  }
  waited_ += Clock::now() - began;
  return is_open(considerate);
}

bool Gate::is_open(bool considerate) const {
  return holds_ == 0 && (!considerate || Activity::quiet());
}

std::chrono::nanoseconds Gate::waited() const {
  const MutexLock lock(mutex_);
  return waited_;
}

bool Gate::is_held() const {
  const MutexLock lock(mutex_);
  return holds_ > 0;
}

void Pace::take(uint64_t bytes) {
  MutexLock lock(mutex_);
  if (rate_ == 0) return;
  const auto cost = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(static_cast<double>(bytes) / static_cast<double>(rate_)));
  const Clock::time_point mine = std::max(free_, Clock::now());
  free_ = mine + cost;
  while (rate_ != 0 && lifted_.wait_until(lock, mine)) continue;
}

void Pace::lift() {
  const MutexLock lock(mutex_);
  rate_ = 0;
  lifted_.notify_all();
}

void set_priority(Priority priority) noexcept {
  if (priority == Priority::normal) return;
  const auto thread = static_cast<pid_t>(::syscall(SYS_gettid));
  if (priority == Priority::idle) {
    sched_param none{};
    ::sched_setscheduler(thread, SCHED_IDLE, &none);
  }
  // Of the thread alone on Linux.
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(thread), 19);
  // ioprio_set has no wrapper: class in the upper bits (2 best effort, 3 idle), level below.
  constexpr int kClassShift = 13, kThread = 1;
  const int io = priority == Priority::idle ? 3 << kClassShift : (2 << kClassShift) | 7;
  ::syscall(SYS_ioprio_set, kThread, thread, io);
}

void Lowered::enter(Priority priority) noexcept {
  const MutexLock lock(mutex_);
  if (raised_ || priority == Priority::normal) return;
  // The record first: what cannot be raised again is not lowered.
  try {
    threads_.push_back(static_cast<int>(::syscall(SYS_gettid)));
  } catch (const std::bad_alloc&) {
    return;
  }
  set_priority(priority);
}

void Lowered::leave() noexcept {
  const MutexLock lock(mutex_);
  std::erase(threads_, static_cast<int>(::syscall(SYS_gettid)));
}

void Lowered::raise() {
  const MutexLock lock(mutex_);
  raised_ = true;
  const int nice = ::getpriority(PRIO_PROCESS, 0);
  constexpr int kThread = 1;
  const auto io = ::syscall(SYS_ioprio_get, kThread, 0);
  for (const int thread : threads_) {
    const sched_param none{};
    ::sched_setscheduler(thread, SCHED_OTHER, &none);
    ::setpriority(PRIO_PROCESS, static_cast<id_t>(thread), nice);
    ::syscall(SYS_ioprio_set, kThread, thread, io);
  }
}

}  // namespace nostall::checkpoint
