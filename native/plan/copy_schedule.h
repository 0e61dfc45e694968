// plan/copy_schedule.h - what a rank does with copies that come and go, epoch by epoch.
//
// All ranks of a node follow the same accesses: batch by batch, those of its first rank, then those of
// the next. So they agree on what lies in which place, without a message. It begins with no copies.
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <span>
#include <stop_token>
#include <vector>

#include "plan/copies_by_use.h"
#include "plan/plan.h"

namespace nostall::plan {

class CopySchedule {
 public:
  // Of rank `rank` among the ranks [first_rank, first_rank + ranks) of a node, from `first_epoch` on.
  // `copied` says which samples are copied. `sizes` outlives this.
  CopySchedule(const JobSpec& spec, uint32_t first_rank, uint32_t ranks, uint32_t rank,
               uint32_t first_epoch, std::span<const uint64_t> sizes, CopyPlaces places,
               std::function<bool(SampleId)> copied);

  // The uses of the rank's samples of the next epoch, in its order. O(samples of the epoch), and
  // O(log places) for each that is copied; the first call looks at all epochs that are known ahead.
  // After a stop it returns nothing, soon, and this is of no more use.
  std::vector<CopyUse> next_epoch(std::stop_token stop = {});

 private:
  // Of an access: whether it is this rank's, and whether its sample is copied.
  static constexpr uint8_t kMine = 1, kCopied = 2;
  void look_at(uint32_t epoch, const std::stop_token& stop);

  const JobSpec spec_;
  const uint32_t first_rank_, ranks_, rank_;
  const uint32_t ahead_;  // epochs that are known beyond the one that is decided
  const std::function<bool(SampleId)> copied_;
  uint64_t of_batch_ = 0;         // accesses of the node in a whole global batch
  std::vector<uint32_t> filled_;  // [place]: the batch in which what it holds came there
  CopiesByUse copies_;
  uint32_t epoch_, known_;                    // the next to decide, and to look at
  std::deque<std::vector<uint8_t>> waiting_;  // of the epochs between, for each access of the node
  std::vector<uint32_t> order_;               // of the epoch that is looked at
};

}  // namespace nostall::plan
