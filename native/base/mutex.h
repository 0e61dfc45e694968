// base/mutex.h - mutexes whose use the compiler checks.
//
// A member that a mutex guards is declared with NOSTALL_GUARDED_BY(mutex); a function that must be
// called with the mutex held, with NOSTALL_REQUIRES(mutex). Clang reports every access without the
// lock (-Wthread-safety); for other compilers the annotations are empty. A lambda is checked as a
// function of its own, so a condition is waited for in a loop:
//
//   MutexLock lock(mutex_);
//   while (queue_.empty()) filled_.wait(lock);
//
// Cost: that of std::mutex and pthread_cond_t. Nobody waits at a condition that is destroyed, but in a
// forked child, where the threads that did are not.
#pragma once

#include <pthread.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <mutex>
#include <stop_token>

#if defined(__clang__)
#define NOSTALL_THREAD_ATTRIBUTE(x) __attribute__((x))
#else
#define NOSTALL_THREAD_ATTRIBUTE(x)
#endif
#define NOSTALL_GUARDED_BY(mutex) NOSTALL_THREAD_ATTRIBUTE(guarded_by(mutex))
#define NOSTALL_REQUIRES(...) NOSTALL_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define NOSTALL_EXCLUDES(...) NOSTALL_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define NOSTALL_ACQUIRE(...) NOSTALL_THREAD_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define NOSTALL_RELEASE(...) NOSTALL_THREAD_ATTRIBUTE(release_capability(__VA_ARGS__))
#define NOSTALL_TRY_ACQUIRE(...) NOSTALL_THREAD_ATTRIBUTE(try_acquire_capability(__VA_ARGS__))
#define NOSTALL_RETURNS_MUTEX(mutex) NOSTALL_THREAD_ATTRIBUTE(lock_returned(mutex))
// For code whose exclusion the analysis cannot express; a comment beside it says what it is.
#define NOSTALL_UNCHECKED NOSTALL_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace nostall {

class NOSTALL_THREAD_ATTRIBUTE(capability("mutex")) Mutex {
 public:
  void lock() NOSTALL_ACQUIRE() { mutex_.lock(); }
  void unlock() NOSTALL_RELEASE() { mutex_.unlock(); }
  bool try_lock() NOSTALL_TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

// Of a lock whose holders need it for less time than a change of threads takes.
struct Briefly {};

// Holds a mutex until the end of its block; may be opened and closed in between.
class NOSTALL_THREAD_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) NOSTALL_ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  // Tries for about a microsecond before it sleeps.
  MutexLock(Mutex& mutex, Briefly) NOSTALL_ACQUIRE(mutex) : lock_(mutex.mutex_, std::defer_lock) {
    lock_briefly();
  }
  ~MutexLock() NOSTALL_RELEASE() = default;
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() NOSTALL_RELEASE() { lock_.unlock(); }
  void lock() NOSTALL_ACQUIRE() { lock_.lock(); }
  void lock(Briefly) NOSTALL_ACQUIRE() { lock_briefly(); }

 private:
  void lock_briefly() NOSTALL_UNCHECKED {
    for (int tries = 0; tries < 32; ++tries) {
      if (lock_.try_lock()) return;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    lock_.lock();
  }
  friend class Condition;
  friend class StopCondition;
  std::unique_lock<std::mutex> lock_;
};

// A condition variable. wait() releases the lock while it waits, and may return early. Times are those
// of the monotonic clock, which nobody sets: the standard library's waits go by the wall clock where
// it is built for a glibc without pthread_cond_clockwait.
class Condition {
 public:
  using Clock = std::chrono::steady_clock;

  Condition() noexcept {
    pthread_condattr_t attributes;
    ::pthread_condattr_init(&attributes);
    ::pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    ::pthread_cond_init(&condition_, &attributes);
    ::pthread_condattr_destroy(&attributes);
  }
  ~Condition() {
    if (owner_ == ::getpid()) ::pthread_cond_destroy(&condition_);  // waits for those that wait
  }
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;

  void notify_one() noexcept { ::pthread_cond_signal(&condition_); }
  void notify_all() noexcept { ::pthread_cond_broadcast(&condition_); }

  void wait(MutexLock& lock) noexcept {
    ::pthread_cond_wait(&condition_, lock.lock_.mutex()->native_handle());
  }
  // False if the time is over.
  template <typename Duration>
  bool wait_until(MutexLock& lock, std::chrono::time_point<Clock, Duration> deadline) noexcept {
    constexpr auto kNever = Clock::time_point::max();
    const auto end = deadline < kNever ? std::chrono::ceil<Clock::duration>(deadline) : kNever;
    const auto since_boot = std::max(end.time_since_epoch(), Clock::duration::zero());
    const auto seconds = std::chrono::floor<std::chrono::seconds>(since_boot);
    const std::chrono::nanoseconds rest = since_boot - seconds;
    const timespec at{static_cast<time_t>(seconds.count()), static_cast<long>(rest.count())};
    return ::pthread_cond_timedwait(&condition_, lock.lock_.mutex()->native_handle(), &at) == 0;
  }
  template <typename Rep, typename Period>
  bool wait_for(MutexLock& lock, const std::chrono::duration<Rep, Period>& time) noexcept {
    return wait_until(lock, Clock::now() + std::chrono::ceil<Clock::duration>(time));
  }

 private:
  pthread_cond_t condition_;
  const pid_t owner_ = ::getpid();
};

// A condition variable whose wait a stop token ends as well. The predicate is called with the mutex
// held: [&]() NOSTALL_REQUIRES(mutex_) { ... }.
class StopCondition {
 public:
  void notify_one() noexcept {
    const MutexLock own(own_);
    condition_.notify_one();
  }
  void notify_all() noexcept {
    const MutexLock own(own_);
    condition_.notify_all();
  }

  // What the predicate said last.
  template <typename Predicate>
  bool wait(MutexLock& lock, std::stop_token stop, Predicate predicate) {
    return wait(lock, stop, predicate, [this](MutexLock& own) {
      condition_.wait(own);
      return true;
    });
  }
  template <typename Duration, typename Predicate>
  bool wait_for(MutexLock& lock, std::stop_token stop, const Duration& time, Predicate predicate) {
    const auto deadline =
        Condition::Clock::now() + std::chrono::ceil<Condition::Clock::duration>(time);
    return wait(lock, stop, predicate,
                [this, deadline](MutexLock& own) { return condition_.wait_until(own, deadline); });
  }

 private:
  // A stop may be requested with or without the caller's mutex, so what is waited with is a mutex of
  // its own: it is held from the look at the token until the sleep, and by all that wake.
  template <typename Predicate, typename Sleep>
  bool wait(MutexLock& lock, const std::stop_token& stop, Predicate& predicate,
            Sleep sleep) NOSTALL_UNCHECKED {
    const std::stop_callback on_stop(stop, [this] { notify_all(); });
    for (bool in_time = true; !predicate();) {
      if (!in_time) return false;
      MutexLock own(own_);
      if (stop.stop_requested()) return false;
      lock.unlock();
      in_time = sleep(own);
      own.unlock();
      lock.lock();
    }
    return true;
  }

  Mutex own_;
  Condition condition_;
};

}  // namespace nostall
