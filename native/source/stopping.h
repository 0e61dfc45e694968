// source/stopping.h - how readers that wait long learn that a thread's reads are of no use any more.
#pragma once

#include <stop_token>
#include <utility>

namespace nostall::source {

// The stop of the thread's reads; one that never comes by default.
inline std::stop_token& stop_of_reads() {
  thread_local std::stop_token stop;
  return stop;
}

// While it lives, the reads of this thread end early once a stop is requested: a reader that can
// answers those that have not begun with an error.
class StopsReads {
 public:
  explicit StopsReads(std::stop_token stop)
      : before_(std::exchange(stop_of_reads(), std::move(stop))) {}
  ~StopsReads() { stop_of_reads() = std::move(before_); }
  StopsReads(const StopsReads&) = delete;
  StopsReads& operator=(const StopsReads&) = delete;

 private:
  std::stop_token before_;
};

}  // namespace nostall::source
