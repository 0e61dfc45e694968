// base/own_thread.h - a thread that belongs to the process that started it.
//
// A forked child has a copy of the object and not the thread. The system may have given the thread's
// place to another thread of the child, so that to join or detach it there is an error, or concerns that
// other thread. The child leaves it alone. Thread-safety: a value with one owner.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <thread>
#include <type_traits>
#include <utility>

namespace nostall {

class OwnThread {
 public:
  OwnThread() noexcept : thread_() {}
  // Throws std::system_error if there can be no thread.
  template <typename Work>
  requires(!std::is_same_v<std::remove_cvref_t<Work>, OwnThread>) explicit OwnThread(Work&& work)
      : thread_(std::forward<Work>(work)) {}
  OwnThread(OwnThread&& other) noexcept : thread_(), owner_(other.owner_) { swap(other); }
  OwnThread& operator=(OwnThread&& other) noexcept {
    OwnThread(std::move(other)).swap(*this);
    return *this;
  }
  // Joins it, if it is this process's.
  ~OwnThread() {
    if (owner_ == ::getpid()) thread_.~jthread();
  }

  bool joinable() const noexcept { return owner_ == ::getpid() && thread_.joinable(); }
  void join() { thread_.join(); }

 private:
  void swap(OwnThread& other) noexcept {
    thread_.swap(other.thread_);
    std::swap(owner_, other.owner_);
  }

  // Of a union, so that no destructor is called but by the one above.
  union {
    std::jthread thread_;
  };
  pid_t owner_ = ::getpid();
};

}  // namespace nostall
