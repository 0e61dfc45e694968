// stage/copy_plan.h - private to the stage: what a rank does with copies that come and go, an epoch ahead.
//
// It outlives the threads between two seeks: where a job leaves an epoch early and goes on with the next
// one, the places hold what the schedule says, but for what was not read.
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <stop_token>
#include <vector>

#include "plan/copy_schedule.h"

namespace nostall::stage {

class CopyPlan {
 public:
  // Of the rank's samples of an epoch, in their order.
  using Uses = std::shared_ptr<const std::vector<plan::CopyUse>>;
  // Makes the schedule of a job that goes on at that epoch with no copies.
  using Begin = std::function<std::unique_ptr<plan::CopySchedule>(uint32_t epoch)>;

  explicit CopyPlan(Begin begin) : begin_(std::move(begin)) {}
  // Waits for the order of one epoch at most, and not for a shuffle.
  ~CopyPlan() { stop_.request_stop(); }
  CopyPlan(const CopyPlan&) = delete;
  CopyPlan& operator=(const CopyPlan&) = delete;

  // Begins to decide the uses of the epoch, if that is not done or under way.
  void prepare(uint32_t epoch);
  // Waits for them. An epoch that is neither the last one asked for nor the one behind it begins anew,
  // with no copies.
  Uses of(uint32_t epoch);

 private:
  void decide();

  const Begin begin_;
  std::stop_source stop_;
  std::unique_ptr<plan::CopySchedule> schedule_;
  Uses uses_;  // of the epoch before next_epoch_; null: not decided
  uint32_t next_epoch_ = 0;
  std::future<Uses> next_;  // of next_epoch_; ends before the schedule
};

}  // namespace nostall::stage
