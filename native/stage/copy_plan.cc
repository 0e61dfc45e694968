// Decides an epoch while the one before it is read.
#include "stage/copy_plan.h"

#include <utility>

namespace nostall::stage {

void CopyPlan::decide() {
  // Deferred: if the system gives no more threads, the thread that needs the epoch decides it.
  next_ = std::async(std::launch::async | std::launch::deferred, [schedule = schedule_.get(),
                                                                  stop = stop_.get_token()] {
    return std::make_shared<const std::vector<plan::CopyUse>>(schedule->next_epoch(stop));
  });
}

void CopyPlan::prepare(uint32_t epoch) {
  if (next_.valid() && (epoch == next_epoch_ || (uses_ && epoch + 1 == next_epoch_))) return;
  if (next_.valid()) {
    stop_.request_stop();
    next_.wait();
    next_ = {};  // no whole plan, if what follows throws
    stop_ = std::stop_source();
  }
  schedule_ = begin_(epoch);
  uses_.reset();
  next_epoch_ = epoch;
  decide();
}

CopyPlan::Uses CopyPlan::of(uint32_t epoch) {
  prepare(epoch);
  if (epoch == next_epoch_) {
    uses_ = next_.get();
    ++next_epoch_;
    decide();
  }
  return uses_;
}

}  // namespace nostall::stage
