// stage/record.h - what a consumer was handed: sums of the epoch under way, and its last batches one
// by one.
//
// Thread-safety: all functions may be called from any thread; what they return is of one moment.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/mutex.h"
#include "stage/loader.h"

namespace nostall::stage {

// Of one epoch.
struct Taken {
  uint32_t epoch = 0;
  uint64_t batches = 0, samples = 0;
  double stall = 0;  // seconds that the consumer waited
  int64_t transform_ns = 0;
  std::array<OriginCount, kOrigins> origins{};
  std::vector<uint64_t> substituted;
};

class Record {
 public:
  // Of each batch: epoch, batch, time, wait, samples by origin, queue.
  static constexpr size_t kColumns = 5 + kOrigins;
  using Columns = std::array<std::vector<double>, kColumns>;

  // Keeps the last `kept` batches one by one, and at most twice as many.
  explicit Record(size_t kept) : kept_(kept) {}

  void begin(uint32_t epoch) {
    const MutexLock lock(mutex_);
    taken_ = {};
    taken_.epoch = epoch;
  }
  // The consumer got the batch at `time` and waited `wait` for it, in seconds.
  void add(const Batch& batch, double time, double wait);
  // Substitutions that were found after the stage.
  void substitute(uint64_t sample) {
    const MutexLock lock(mutex_);
    taken_.substituted.push_back(sample);
  }

  Taken taken() const {
    const MutexLock lock(mutex_);
    return taken_;
  }
  Memory most() const {
    const MutexLock lock(mutex_);
    return most_;
  }
  Columns columns() const {
    const MutexLock lock(mutex_);
    return columns_;
  }

 private:
  const size_t kept_;
  mutable Mutex mutex_;
  Taken taken_ NOSTALL_GUARDED_BY(mutex_);
  Memory most_ NOSTALL_GUARDED_BY(mutex_);
  Columns columns_ NOSTALL_GUARDED_BY(mutex_);
};

}  // namespace nostall::stage
