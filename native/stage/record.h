// stage/record.h - what a consumer was handed: sums of the epoch under way, and its last batches one
// by one.
//
// Thread-safety: one thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

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
    taken_ = {};
    taken_.epoch = epoch;
  }
  // The consumer got the batch at `time` and waited `wait` for it, in seconds.
  void add(const Batch& batch, double time, double wait);
  // Substitutions that were found after the stage.
  void substitute(uint64_t sample) { taken_.substituted.push_back(sample); }

  const Taken& taken() const noexcept { return taken_; }
  const Memory& most() const noexcept { return most_; }
  const Columns& columns() const noexcept { return columns_; }

 private:
  const size_t kept_;
  Taken taken_;
  Memory most_;
  Columns columns_;
};

}  // namespace nostall::stage
