// sync/timeline_writer.h - what the engine reduces, as a timeline in Horovod's format, written by
// rank 0.
//
//   timeline = TimelineWriter::open(path, collectives, tensors, shapes);  // all ranks; null: none
//   timeline->add(tensors, ready, moments);  // all ranks, after each reduction
//   timeline->write();                       // when all tensors were added
//
// One pid per tensor: NEGOTIATE_ALLREDUCE from the first rank's gradient to the last rank's
// (planned) or to the agreement (negotiated), with a tick at the moment at which each rank
// submitted; then ALLREDUCE with QUEUE, MEMCPY_IN_FUSION_BUFFER, NOSTALL_ALLREDUCE and
// MEMCPY_OUT_FUSION_BUFFER as rank 0's thread spent the time. What that thread did before the last
// rank was ready, waiting included, is left to the negotiation. Times are microseconds since the
// file was opened; a step's events are in the order of time. The array is closed by the destructor;
// of a killed job all steps but the last are there. Tensors whose names begin with a parenthesis
// are signs of the engine's user and left out.
//
// Cost: one all_gather of 8 bytes per tensor for each reduction, for the ranks' ticks. Ranks of one
// boot of a kernel have one clock; those of others are placed by the end of the reduction.
// Thread-safety: none, the engine's progress thread has it. A file that cannot be written any more
// ends with a warning.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/file.h"
#include "sync/collectives.h"
#include "sync/order.h"

namespace nostall::sync {

// Of one reduction on this rank, now_ns(). `agreed` is 0 with a planned order.
struct Moments {
  int64_t agreed = 0, begin = 0, copied = 0, summed = 0, end = 0;
};

class TimelineWriter {
 public:
  // Collective. Rank 0's path counts, an empty one means none; shapes are as "[3, 4]", missing ones
  // are the number of elements. Throws Error(io) on rank 0, Error(peer) on the others.
  static std::unique_ptr<TimelineWriter> open(const std::string& path, Collectives& collectives,
                                              std::span<const TensorSpec> tensors,
                                              std::vector<std::string> shapes);
  ~TimelineWriter();
  TimelineWriter(const TimelineWriter&) = delete;
  TimelineWriter& operator=(const TimelineWriter&) = delete;

  // Collective: `ready[i]` is when this rank submitted tensors[i].
  void add(std::span<const uint32_t> tensors, std::span<const int64_t> ready, const Moments& at);
  void write();

 private:
  struct Event {
    int64_t time;
    uint32_t tensor;
    char phase;        // B, E, X, or Z: the E that carries type and shape
    const char* name;  // of a B
    uint32_t rank;     // of an X
  };

  TimelineWriter(Collectives& collectives, std::span<const TensorSpec> tensors,
                 std::vector<std::string> shapes);
  void begin_file();
  void append(const Event& event);
  void flush();

  Collectives& collectives_;
  const std::span<const TensorSpec> tensors_;
  std::vector<std::string> shapes_;
  const int owner_;       // the process; a forked one leaves the file alone
  const uint64_t clock_;  // the same on ranks that share one
  std::string path_;
  Descriptor file_;  // rank 0's
  int64_t start_ = 0;
  std::vector<Event> events_;
  std::string text_;
};

}  // namespace nostall::sync
