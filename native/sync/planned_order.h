// sync/planned_order.h - gradients are reduced in the order of a plan that all ranks know.
//
// Horovod-TOPO [Pumma 2020, sec. 6.3.4]. Groups are fixed between two plans, so every group has a
// buffer of its own, and the thread that submits a gradient copies it there. The progress thread
// sleeps until the next group is complete on this rank; the reduction itself waits for the others.
// A step goes through all groups once.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "sync/coordinator.h"

namespace nostall::sync {

class PlannedOrder : public Coordinator {
 public:
  // The first plan is the tensors' order backwards, fused up to the threshold.
  explicit PlannedOrder(Step& step);

  void set_plan(ReductionPlan plan) override;
  Place enter(uint32_t tensor) override NOSTALL_REQUIRES(step_.mutex);
  bool filled(uint32_t tensor, int64_t now) override NOSTALL_REQUIRES(step_.mutex);
  Turn next() override;

 private:
  struct Group {
    std::unique_ptr<Bucket> bucket;
    uint32_t missing = 0;  // tensors that are not submitted yet
    bool begun = false;    // has tensors of this step
  };

  std::vector<uint32_t> groups_of(const ReductionPlan& plan) const;
  void compare(const ReductionPlan& plan) NOSTALL_REQUIRES(step_.mutex);
  void adopt(const ReductionPlan& plan, std::vector<uint32_t> group_of)
      NOSTALL_REQUIRES(step_.mutex);
  void check_for_stall() NOSTALL_REQUIRES(step_.mutex);

  std::vector<Group> groups_ NOSTALL_GUARDED_BY(step_.mutex);
  std::vector<uint32_t> group_of_ NOSTALL_GUARDED_BY(step_.mutex);  // by tensor
  std::vector<uint32_t> index_of_ NOSTALL_GUARDED_BY(step_.mutex);  // by tensor, in its group
  size_t next_ NOSTALL_GUARDED_BY(step_.mutex) = 0;                 // group
  bool idle_ NOSTALL_GUARDED_BY(step_.mutex) = true;         // the progress thread holds no group
  int64_t complete_ns_ NOSTALL_GUARDED_BY(step_.mutex) = 0;  // when group next_ became complete
  int64_t warned_ NOSTALL_GUARDED_BY(step_.mutex) = 0;       // of the stall since that moment
};

}  // namespace nostall::sync
