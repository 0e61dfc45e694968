// sync/coordinator.h - decides which gradients are reduced next, and when: the part of the engine
// that differs between its modes.
//
//   PlannedOrder     (planned_order.h)     the order of a plan, without a word between ranks
//   NegotiatedOrder  (negotiated_order.h)  Horovod's protocol: the ranks agree in cycles
//
// On all ranks next() gives buckets of the same tensors in the same order.
#pragma once

#include <cstdint>
#include <vector>

#include "sync/bucket.h"
#include "sync/step.h"

namespace nostall::sync {

class Coordinator {
 public:
  struct Turn {
    Bucket* bucket = nullptr;  // null: the engine ends
    int64_t agreed_ns = 0;     // when the ranks agreed on it; 0: they did not have to
  };
  // A gradient's place: the bucket that submit() copies it into, and its number there.
  struct Place {
    Bucket* bucket = nullptr;  // null: not known yet; the progress thread copies it
    uint32_t index = 0;
  };

  virtual ~Coordinator() = default;

  // Between steps, collective. Throws Error(usage) where plans are not followed.
  virtual void set_plan(ReductionPlan plan) = 0;
  // With Step::mutex held, which clang can check in the implementations only: the place of a tensor
  // that is being submitted.
  virtual Place enter(uint32_t tensor) = 0;
  // With Step::mutex held: the gradient is at that place. True: the progress thread has to be woken.
  virtual bool filled(uint32_t tensor, int64_t now) = 0;
  // Waits until a bucket's turn has come on this rank; by the progress thread, which has reduced
  // the bucket of the call before. Throws Error(peer) for a stall.
  virtual Turn next() NOSTALL_EXCLUDES(step_.mutex) = 0;

 protected:
  explicit Coordinator(Step& step) : step_(step) {}
  Step& step_;
};

}  // namespace nostall::sync
