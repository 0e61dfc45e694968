// sync/negotiated_order.h - Horovod's protocol: in cycles, the ranks agree on what all of them
// have.
//
// [Pumma 2020, sec. 6.2.2]. A cycle sleeps for what the cycle before left of its time. Then an
// all-reduce of one bit for each known tensor finds those that all ranks have submitted. New
// tensors go through rank 0, which fixes their order once. What all ranks have is fused and reduced
// through one buffer. Two remedies for the costs of this:
//   global_sleep_every  GS, sec. 6.3.1: every so many cycles, the shortest sleep of all ranks
//   nonblocking         NBCS, sec. 6.3.2: the all-reduce is started and tested
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sync/bucket.h"
#include "sync/coordinator.h"

namespace nostall::sync {

class NegotiatedOrder : public Coordinator {
 public:
  explicit NegotiatedOrder(Step& step);

  void set_plan(ReductionPlan plan) override;
  Place enter(uint32_t) override NOSTALL_REQUIRES(step_.mutex) { return {}; }
  bool filled(uint32_t, int64_t) override NOSTALL_REQUIRES(step_.mutex) { return false; }
  Turn next() override;

 private:
  // What a rank brings into a cycle's agreement.
  struct Mine {
    std::vector<uint64_t> words;  // flags, then a bit for each known tensor
    int64_t oldest = 0;           // gradient, when it was submitted; 0: none waits
    bool warn = false, expired = false;
  };

  bool cycle();
  void sleep(uint64_t cycle, int64_t previous_ns);
  bool agree(std::vector<uint32_t>& ready);
  Mine collect();
  void all_and(std::span<uint64_t> words);
  void add_new(std::vector<uint32_t>& ready);
  void name_lacking(const Mine& mine);

  Bucket bucket_;
  std::vector<std::vector<uint32_t>> groups_;  // of this cycle's agreement
  size_t next_ = 0;                            // group
  uint64_t cycles_ = 0;
  int64_t begin_ns_ = 0, agreed_ns_ = 0;  // of this cycle
  int64_t warned_ = 0;                    // of the gradient that was submitted then
  std::vector<uint32_t> known_;           // tensors, in the order that rank 0 fixed
  std::vector<bool> is_known_, announced_;
  std::vector<std::vector<bool>> announced_by_;  // rank 0: for each tensor, by rank
};

}  // namespace nostall::sync
