// timeline/horovod.h - the operations of a Horovod timeline: negotiation, ready ticks, reduction.
//
// A timeline has one pid per tensor. An operation is NEGOTIATE_<OP> (first rank ready, an X event
// named by its number for each rank that becomes ready, end: all ready), then <OP> with nested
// activities. The assembler gives one row per operation, in the order of completion, with the round
// it belongs to:
//
//   A round ends where a tensor is reduced again. A burst is the operations that are in flight
//   together. The new round begins with the burst of the operation that repeats the tensor; if that
//   burst also has the tensor's previous operation, it begins with the operation itself.
//
// Memory: one entry per tensor, the ticks of open operations, and the operations of one burst. A
// file with more than kMaxTensors tensors is refused (Error: corruption). Not thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "timeline/event.h"

namespace nostall::timeline {

inline constexpr size_t kMaxTensors = size_t{1} << 20;
inline constexpr int32_t kMaxRank = 1 << 20;

enum class OpKind : uint8_t {
  allreduce,
  reducescatter,
  adasum,
  allgather,
  broadcast,
  alltoall,
  other
};

// Gradients are combined: such operations make rounds.
inline bool reduces(OpKind kind) { return kind <= OpKind::adasum; }

// Times are nanoseconds of the file's clock; kNoTime where the file has none.
struct Operation {
  uint32_t tensor = 0;
  OpKind kind = OpKind::other;
  uint32_t round = 0;
  uint32_t ticks = 0;  // of the ranks, in `Operations::tick_rank` behind those of the row before
  int64_t negotiate_begin = kNoTime;
  int64_t negotiate_end = kNoTime;
  int64_t reduce_begin = kNoTime;
  int64_t reduce_end = kNoTime;
  int64_t bytes = -1;  // -1: the file does not say
  int64_t offset = 0;  // of its first event in the file
};

// Rows with their ticks, one after the other.
struct Operations {
  std::vector<Operation> rows;
  std::vector<int32_t> tick_rank;
  std::vector<int64_t> tick_time;
};

struct HorovodReport {
  uint64_t abandoned = 0;        // operations begun and not ended, or with broken nesting
  int64_t first_abandoned = -1;  // offset
  uint64_t stray = 0;            // ends without a beginning
  uint64_t untimed = 0;          // events without a usable time
  int64_t first_untimed = -1;    // offset
  uint64_t jumps = 0;            // the clock went back by more than a second
  int64_t first_jump = -1;       // offset
};

class HorovodAssembler {
 public:
  void add(const Event& event, uint64_t offset);
  // No more events: what is finished is given out, what is open is abandoned.
  void finish();

  // The operations completed since the last call.
  Operations take();
  // Rounds below this one get no more operations.
  uint32_t closed_rounds() const;
  // Names by `Operation::tensor`.
  const std::vector<std::string>& tensors() const { return names_; }
  const HorovodReport& report() const { return report_; }

 private:
  enum class Phase : uint8_t { idle, negotiating, waiting, reducing, ignored };
  struct Tensor {
    Operation open;
    Phase phase = Phase::idle;
    int depth = 0;
    int64_t last_round = -1;  // in which it was last reduced
    std::vector<int32_t> ranks;
    std::vector<int64_t> times;
  };

  uint32_t tensor_of(int64_t pid);
  void begin(Tensor& tensor, uint32_t index, OpKind kind, int64_t time, bool negotiated,
             uint64_t offset);
  void on_begin(const Event& event, uint64_t offset);
  void on_end(const Event& event);
  void on_tick(const Event& event);
  void complete(Tensor& tensor);
  void abandon(Tensor& tensor);
  void end_operation(Tensor& tensor);
  void assign_round(Tensor& tensor, uint32_t index);
  void release();

  std::vector<Tensor> all_;
  std::vector<std::string> names_;
  std::unordered_map<int64_t, uint32_t> by_pid_;
  Operations pending_;  // of this burst: their round may still change
  Operations done_;
  std::vector<uint32_t> burst_;  // tensors reduced in this burst
  bool burst_repeats_ = false;   // a tensor of this burst has begun a round
  uint32_t round_ = 0;
  uint64_t in_flight_ = 0;
  int64_t latest_ = kNoTime;
  HorovodReport report_;
};

}  // namespace nostall::timeline
