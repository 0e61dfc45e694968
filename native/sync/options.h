// sync/options.h - what a gradient engine is made with, and what it counts.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace nostall::sync {

enum class Mode : uint8_t { planned, negotiated };

struct GradientOptions {
  Mode mode = Mode::planned;
  std::chrono::nanoseconds warn = std::chrono::seconds(60);
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
  bool mean = true;           // else the sum
  bool check_finite = false;  // Error(usage) that names tensor and rank instead of NaNs everywhere
  uint64_t threshold_bytes = uint64_t{64} << 20;  // of what is fused without a plan of the caller
  std::vector<int> cores;  // for the progress thread alone (sync/cores.h); empty: no partition
  std::string timeline;    // rank 0's file of it (sync/timeline_writer.h); empty: none
  std::vector<std::string> shapes;  // of the first tensors: compared, and for the timeline
  std::string numbers;  // ends messages whose ranks do not have the job's numbers: whose they are

  // Mode negotiated (sync/negotiated_order.h).
  std::chrono::nanoseconds cycle = std::chrono::milliseconds(5);         // HOROVOD_CYCLE_TIME
  uint32_t global_sleep_every = 0;                                       // cycles; 0: never
  bool nonblocking = false;                                              // agreements are tested
  std::chrono::nanoseconds test_sleep = std::chrono::microseconds(200);  // between two tests
};

// Of the progress thread, since the engine began. Times are nanoseconds.
struct GradientStats {
  uint64_t steps = 0, reductions = 0, tensors = 0, bytes = 0;
  uint64_t cycles = 0, empty_cycles = 0;  // negotiated
  int64_t sleep_ns = 0;                   // between cycles, or until a group was complete
  int64_t order_ns = 0;                   // agreeing on what comes next
  int64_t copy_ns = 0;                    // into and out of fusion buffers
  int64_t submit_copy_ns = 0;             // into them, on the threads that submit
  int64_t reduce_ns = 0;
  // Parts of the above. Cycle latency: asleep while a gradient (planned: a whole group) was there
  // to be reduced. Stalling: waiting for other ranks meanwhile, in agreements and in reductions.
  int64_t latency_ns = 0;
  int64_t order_wait_ns = 0, reduce_wait_ns = 0;
  // How much later than asked for the thread woke: entry i counts [2^i, 2^(i+1)) microseconds,
  // the first one less than 2.
  std::array<uint64_t, 24> oversleeps{};
  int64_t user_ns = 0, system_ns = 0;  // of the processor
  uint64_t voluntary_switches = 0, involuntary_switches = 0;

  void count_oversleep(int64_t ns) noexcept {
    size_t bin = 0;
    for (int64_t us = ns / 2000; us > 0 && bin + 1 < oversleeps.size(); us /= 2) ++bin;
    ++oversleeps[bin];
  }
};

}  // namespace nostall::sync
