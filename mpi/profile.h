// mpi/profile.h - the profile of an MPI program: one record a call, in memory until MPI_Finalize.
// Off unless asked for.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <map>
#include <vector>

#include "base/clock.h"
#include "calls.h"

namespace nostall::mpi {

struct CommunicatorState;
struct Record;
using UnderWay = std::map<MPI_Request, Record*>;

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
// At MPI_Finalize; estimates it again, measures the time of one message by size, and writes the
// file.
void profile_end();
// A call that began at `arrived`.
void record(Call call, CommunicatorState* state, uint64_t count, uint64_t bytes, uint64_t arrived,
            bool ours, uint64_t left = ticks()) noexcept;

// A nonblocking call, from here on. It lasts until a wait or a test finds its request complete, and
// is counted as early where its communicator is not known: to get to know it takes all ranks, which
// need not be here at the same time.
class Begun {
 public:
  Begun(Call call, MPI_Comm comm);
  void record(uint64_t count, uint64_t bytes, bool ours, MPI_Request request) const noexcept;

 private:
  const Call call_;
  CommunicatorState* state_ = nullptr;
  uint64_t arrived_ = 0;
};

// The requests of one wait or test, as they are before it: it may free them, and the MPI give the
// same handles again.
class Endings {
 public:
  Endings(int count, const MPI_Request* requests);
  ~Endings();  // those that did not end may do so at a later wait
  Endings(const Endings&) = delete;
  Endings& operator=(const Endings&) = delete;
  void ended(int index) noexcept;  // MPI_UNDEFINED: none did
  void all_ended() noexcept;

 private:
  std::vector<UnderWay::node_type> waited_;  // empty for those that are not recorded
};

}  // namespace nostall::mpi
