// sync/step.h - the step in progress: what the threads that submit, the progress thread and the
// coordinator share.
//
// In memory of its own: a forked child leaves it alone, since it cannot destroy a mutex that a
// thread of the parent holds, or a condition that one waits for.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "sync/collectives.h"
#include "sync/options.h"
#include "sync/order.h"

namespace nostall::sync {

// One tensor in the step.
struct Pending {
  void* gradient = nullptr;  // null: the result stays in the bucket
  bool submitted = false, present = false, reduced = false;
  int64_t since_ns = 0;  // when it was submitted

  bool waits() const noexcept { return submitted && !reduced; }
};

struct Step {
  Step(GradientOptions chosen, std::shared_ptr<Collectives> connection,
       std::vector<TensorSpec> specs);

  // At most eight names, and how many more there are.
  std::string names(std::span<const uint32_t> list) const;
  // Since when the oldest submitted gradient waits for its reduction; 0: none does.
  int64_t oldest() const NOSTALL_REQUIRES(mutex);
  // Throws the error that has ended the engine, or Error(usage) after stop().
  void check_runs(const char* call) const NOSTALL_REQUIRES(mutex);
  // Adds what the processor has done so far for the calling thread, the progress thread.
  void account() NOSTALL_REQUIRES(mutex);

  const GradientOptions options;
  const std::shared_ptr<Collectives> collectives;  // buckets' memory holds it too
  const std::vector<TensorSpec> tensors;

  Mutex mutex;
  Condition work;  // the next group is complete, or `stop`
  Condition done;  // tensors are reduced, the thread is idle, or `ended`
  std::vector<Pending> pending NOSTALL_GUARDED_BY(mutex);
  uint64_t submitted NOSTALL_GUARDED_BY(mutex) = 0, reduced NOSTALL_GUARDED_BY(mutex) = 0;
  bool stop NOSTALL_GUARDED_BY(mutex) = false;
  bool ended NOSTALL_GUARDED_BY(mutex) = false;        // the progress thread has
  std::exception_ptr error NOSTALL_GUARDED_BY(mutex);  // has ended the engine
  GradientStats stats NOSTALL_GUARDED_BY(mutex);

  Mutex stopping;  // one stop() after the other
};

}  // namespace nostall::sync
