// mpi/profile.h - the profile of an MPI program: one record a call, in memory until MPI_Finalize.
// Off unless asked for.
#pragma once

#include <cstdint>

#include "base/clock.h"
#include "calls.h"

namespace nostall::mpi {

struct CommunicatorState;

extern const bool asked_to_profile, reads_tsc;
inline bool profiling() noexcept { return asked_to_profile; }
// The time in the profile's own unit: the processor's counter where the kernel takes its own clock
// from it, less than half of the cost of asking the kernel.
inline uint64_t ticks() noexcept {
#if defined(__x86_64__)
  if (reads_tsc) return __builtin_ia32_rdtsc();
#endif
  return static_cast<uint64_t>(now_ns());
}
void profile_begin();  // at MPI_Init; estimates this node's clock against rank 0's
void profile_end();    // at MPI_Finalize; estimates it again, and writes the file
// A call that began at `arrived` and ends now.
void record(Call call, CommunicatorState* state, uint64_t count, uint64_t bytes, uint64_t arrived,
            bool ours) noexcept;

}  // namespace nostall::mpi
