// base/ring.h - an io_uring that falls back to plain calls when the kernel refuses it.
//
// The kernel may refuse to take reads at any time (EAGAIN, EBUSY, ENOMEM), for a moment or for
// good. A ring that is refused for long finishes what it has begun and is closed. Reads that it did
// not begin complete with ECANCELED, and the reader continues with plain calls. Thread-safety: a
// Ring belongs to one thread; `refused` is shared by those that read the same files.
#pragma once

#include <liburing.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/file.h"
#include "base/log.h"

namespace nostall {

// Why a ring cannot be started, by what start() gave.
inline std::string why_no_ring(int error) {
  if (error == -EMFILE) {
    return "the process has most of the files open that it may: raise the limit (ulimit -n)";
  }
  return "the kernel refuses it: " + std::generic_category().message(-error);
}

class Ring {
 public:
  // `refused` is set, with a warning, when a ring is closed because it was refused.
  explicit Ring(std::atomic<bool>& refused) : refused_(refused) {}
  ~Ring() { close(); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // 0 or -errno; -EMFILE also where it would take of the upper half of the process's descriptors.
  int start(unsigned entries, unsigned flags) {
    queued_.reserve(entries);
    const int error = io_uring_queue_init(entries, &ring_, flags);
    if (error < 0) return error;
    open_ = true;
    if (!is_crowded(ring_.ring_fd)) return 0;
    close();
    return -EMFILE;
  }
  io_uring* get() noexcept { return &ring_; }
  // Whether more entries may be added.
  bool usable() const noexcept { return open_ && !refused_.load(std::memory_order_relaxed); }

  io_uring_sqe* next() noexcept { return io_uring_get_sqe(&ring_); }
  // Queues a prepared entry; `data` identifies its completion.
  void add(io_uring_sqe* entry, uint64_t data) noexcept {
    entry->user_data = data;
    queued_.push_back(data);
  }

  // Hands the added entries to the kernel, waits for `wait` completions, and calls done(data,
  // result) for each there is, which must not throw.
  template <typename Done>
  void collect(unsigned wait, const Done& done) noexcept {
    const int error = io_uring_submit_and_wait(&ring_, wait);
    note_taken();
    if (reap(done) > 0 || error >= 0 || error == -EINTR) {
      refusals_ = 0;
      return;
    }
    const bool may_pass = error == -EAGAIN || error == -EBUSY || error == -ENOMEM;
    if (may_pass && ++refusals_ < kMostRefusals) {
      std::this_thread::sleep_for(kPause);
      return;
    }
    give_up(-error, done);
  }
  // Returns when nothing is under way any more: the kernel writes to memory of the caller.
  void drain() noexcept {
    while (open_ && (under_way_ > 0 || !queued_.empty())) collect(1, [](uint64_t, int) {});
  }

 private:
  // Together a second.
  static constexpr unsigned kMostRefusals = 1000;
  static constexpr std::chrono::milliseconds kPause{1};

  // What the kernel has not taken lies at the end of the queue.
  void note_taken() noexcept {
    const size_t left = io_uring_sq_ready(&ring_), taken = queued_.size() - left;
    queued_.erase(queued_.begin(), queued_.begin() + static_cast<ptrdiff_t>(taken));
    under_way_ += taken;
  }

  template <typename Done>
  unsigned reap(const Done& done) noexcept {
    unsigned head = 0, seen = 0;
    io_uring_cqe* completion = nullptr;
    io_uring_for_each_cqe(&ring_, head, completion) {
      ++seen;
      done(completion->user_data, completion->res);
    }
    io_uring_cq_advance(&ring_, seen);
    under_way_ -= seen;
    return seen;
  }

  template <typename Done>
  void give_up(int error, const Done& done) noexcept {
    if (!refused_.exchange(true)) warn(error);
    for (const uint64_t data : queued_) done(data, -ECANCELED);
    queued_.clear();
    // What the kernel has taken completes by itself, and is seen without a call of the ring.
    while (under_way_ > 0) {
      if (reap(done) == 0) std::this_thread::sleep_for(kPause);
    }
    close();
  }

  static void warn(int error) noexcept try {
    log(LogLevel::warning,
        "io_uring takes no reads any more: " + std::generic_category().message(error) +
            "; files are read with plain calls from now on");
  } catch (const std::exception&) {
    // No memory for the sentence.
  }

  void close() noexcept {
    if (open_) io_uring_queue_exit(&ring_);
    open_ = false;
  }

  std::atomic<bool>& refused_;
  io_uring ring_{};
  bool open_ = false;
  std::vector<uint64_t> queued_;  // added, not taken by the kernel; oldest first
  size_t under_way_ = 0;          // taken, not completed
  unsigned refusals_ = 0;         // in a row
};

}  // namespace nostall
