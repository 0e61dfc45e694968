// mpi/traced.h - the record of a call that may be answered here, and what it returns when it fails.
#pragma once

#include <string>

#include "base/error.h"
#include "between.h"
#include "profile.h"
#include "wrappers.h"

namespace nostall::mpi {

// Times one call for the profile, and counts it.
class Traced {
 public:
  Traced(Call call, uint64_t count, uint64_t arrived = profiling() ? ticks() : 0)
      : call_(call), count_(count), arrived_(arrived) {}
  int passed(CommunicatorState* state, Fallback why, MPI_Datatype type, int result) {
    counters().passed[static_cast<size_t>(why)].fetch_add(1, std::memory_order_relaxed);
    // Between two groups it depends on the side which arguments matter.
    const uint64_t bytes = why == Fallback::inter_communicator ? 0 : bytes_of(count_, type);
    if (profiling()) record(call_, state, count_, bytes, arrived_, false);
    return result;
  }
  int ours(CommunicatorState* state, uint64_t bytes) {
    counters().ours[static_cast<size_t>(call_)].fetch_add(1, std::memory_order_relaxed);
    if (profiling()) record(call_, state, count_, bytes, arrived_, true);
    return MPI_SUCCESS;
  }

 private:
  const Call call_;
  const uint64_t count_;
  const uint64_t arrived_;
};

// What a call returns when its node, or another one, has failed.
inline int failed(CommunicatorState& state, MPI_Comm comm, const Error& error) {
  notify_other_nodes(state, error);
  return fail(comm, error);
}

// The same where this rank has no memory for its part: the others do not wait for it.
inline int failed_without_memory(CommunicatorState& state, MPI_Comm comm) {
  const Error why(ErrorKind::io, "rank " + std::to_string(state.rank) +
                                     " has no memory for its part of a collective call");
  if (state.node) state.node->end_from_here(why);
  return failed(state, comm, why);
}

}  // namespace nostall::mpi
