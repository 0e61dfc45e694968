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
// Cost: that of std::mutex and std::condition_variable.
#pragma once

#include <chrono>
#include <condition_variable>
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

// A condition variable. wait() releases the lock while it waits, and may return early.
class Condition {
 public:
  void notify_one() noexcept { condition_.notify_one(); }
  void notify_all() noexcept { condition_.notify_all(); }

  void wait(MutexLock& lock) { condition_.wait(lock.lock_); }
  // False if the time is over.
  template <typename Clock, typename Duration>
  bool wait_until(MutexLock& lock, const std::chrono::time_point<Clock, Duration>& deadline) {
    return condition_.wait_until(lock.lock_, deadline) == std::cv_status::no_timeout;
  }
  template <typename Rep, typename Period>
  bool wait_for(MutexLock& lock, const std::chrono::duration<Rep, Period>& time) {
    return condition_.wait_for(lock.lock_, time) == std::cv_status::no_timeout;
  }

 private:
  std::condition_variable condition_;
};

// A condition variable whose wait a stop token ends as well. The predicate is called with the mutex
// held: [&]() NOSTALL_REQUIRES(mutex_) { ... }.
class StopCondition {
 public:
  void notify_one() noexcept { condition_.notify_one(); }
  void notify_all() noexcept { condition_.notify_all(); }

  // What the predicate said last.
  template <typename Predicate>
  bool wait(MutexLock& lock, std::stop_token stop, Predicate predicate) NOSTALL_UNCHECKED {
    return condition_.wait(lock.lock_, std::move(stop), std::move(predicate));
  }
  template <typename Duration, typename Predicate>
  bool wait_for(MutexLock& lock, std::stop_token stop, const Duration& time,
                Predicate predicate) NOSTALL_UNCHECKED {
    return condition_.wait_for(lock.lock_, std::move(stop), time, std::move(predicate));
  }

 private:
  std::condition_variable_any condition_;
};

}  // namespace nostall
