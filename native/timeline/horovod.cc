// Assembles operations from events, tensor by tensor. Each tensor has a small state: the operation
// that is open and its nesting. A burst ends when no operation is in flight; a tensor that is
// reduced again in a later burst begins a new round (see the header).
#include "timeline/horovod.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"

namespace nostall::timeline {
namespace {

constexpr size_t kMaxName = 4096;
constexpr int64_t kJump = 1'000'000'000;
constexpr std::string_view kNegotiate = "NEGOTIATE_";

constexpr std::array<std::pair<std::string_view, OpKind>, 8> kKinds = {
    {{"ALLREDUCE", OpKind::allreduce},
     {"REDUCESCATTER", OpKind::reducescatter},
     {"ADASUM", OpKind::adasum},
     {"ALLGATHER", OpKind::allgather},
     {"BROADCAST", OpKind::broadcast},
     {"ALLTOALL", OpKind::alltoall},
     {"JOIN", OpKind::other},
     {"BARRIER", OpKind::other}}};

bool kind_of(std::string_view name, OpKind& kind) {
  for (const auto& [known, value] : kKinds) {
    if (known == name) {
      kind = value;
      return true;
    }
  }
  return false;
}

int32_t rank_of(std::string_view name) {
  int32_t rank = 0;
  if (name.empty() || name.size() > 7) return -1;
  for (const char b : name) {
    if (b < '0' || b > '9') return -1;
    rank = rank * 10 + (b - '0');
  }
  return rank < kMaxRank ? rank : -1;
}

void append(Operations& to, Operations& from) {
  to.rows.insert(to.rows.end(), from.rows.begin(), from.rows.end());
  to.tick_rank.insert(to.tick_rank.end(), from.tick_rank.begin(), from.tick_rank.end());
  to.tick_time.insert(to.tick_time.end(), from.tick_time.begin(), from.tick_time.end());
  from.rows.clear();
  from.tick_rank.clear();
  from.tick_time.clear();
}

void note(uint64_t& count, int64_t& first, uint64_t offset) {
  if (count++ == 0) first = static_cast<int64_t>(offset);
}

}  // namespace

uint32_t HorovodAssembler::tensor_of(int64_t pid) {
  const auto [place, fresh] = by_pid_.try_emplace(pid, static_cast<uint32_t>(all_.size()));
  if (fresh) {
    if (all_.size() == kMaxTensors) {
      throw Error(ErrorKind::corruption, "the timeline names more than " +
                                             std::to_string(kMaxTensors) +
                                             " tensors: it is not one of Horovod's");
    }
    all_.emplace_back();
    names_.push_back("pid " + std::to_string(pid));
  }
  return place->second;
}

void HorovodAssembler::add(const Event& event, uint64_t offset) {
  if (event.phase == 'M') {
    if (event.name == "process_name" && event.pid > 0 && !event.arg_name.empty()) {
      names_[tensor_of(event.pid)] = unescape(event.arg_name.substr(0, kMaxName));
    }
    return;
  }
  if (event.phase != 'B' && event.phase != 'E' && event.phase != 'X') return;
  if (event.time == kNoTime || event.pid < 0) {
    note(report_.untimed, report_.first_untimed, offset);
    return;
  }
  if (latest_ != kNoTime && event.time < latest_ - kJump) {
    note(report_.jumps, report_.first_jump, offset);
    latest_ = event.time;
  }
  latest_ = std::max(latest_, event.time);
  if (event.phase == 'B') {
    on_begin(event, offset);
  } else if (event.phase == 'E') {
    on_end(event);
  } else {
    on_tick(event);
  }
}

void HorovodAssembler::on_begin(const Event& event, uint64_t offset) {
  const uint32_t index = tensor_of(event.pid);
  Tensor& tensor = all_[index];
  OpKind kind = OpKind::other;
  if (event.name.substr(0, kNegotiate.size()) == kNegotiate) {
    if (tensor.phase != Phase::idle) abandon(tensor);
    static_cast<void>(kind_of(event.name.substr(kNegotiate.size()), kind));
    begin(tensor, index, kind, event.time, true, offset);
    return;
  }
  if (tensor.depth > 0) {
    ++tensor.depth;
    return;
  }
  tensor.depth = 1;
  if (!kind_of(event.name, kind)) {
    if (tensor.phase == Phase::idle) tensor.phase = Phase::ignored;
    return;
  }
  if (tensor.phase != Phase::waiting) begin(tensor, index, kind, event.time, false, offset);
  tensor.phase = Phase::reducing;
  tensor.open.reduce_begin = event.time;
}

void HorovodAssembler::begin(Tensor& tensor, uint32_t index, OpKind kind, int64_t time,
                             bool negotiated, uint64_t offset) {
  tensor.open = Operation{};
  tensor.open.tensor = index;
  tensor.open.kind = kind;
  tensor.open.offset = static_cast<int64_t>(offset);
  tensor.ranks.clear();
  tensor.times.clear();
  tensor.depth = 1;
  if (negotiated) {
    tensor.phase = Phase::negotiating;
    tensor.open.negotiate_begin = time;
  }
  if (reduces(kind)) assign_round(tensor, index);
  tensor.open.round = round_;
}

void HorovodAssembler::assign_round(Tensor& tensor, uint32_t index) {
  if (in_flight_++ == 0) release();
  const bool repeated = tensor.last_round == round_;
  if (repeated && !burst_repeats_ &&
      std::find(burst_.begin(), burst_.end(), index) == burst_.end()) {
    // All that is in flight together is of the new round.
    ++round_;
    burst_repeats_ = true;
    for (const uint32_t other : burst_) {
      all_[other].last_round = round_;
      all_[other].open.round = round_;
    }
    for (Operation& row : pending_.rows) {
      if (reduces(row.kind)) row.round = round_;
    }
  } else if (repeated) {
    append(done_, pending_);
    burst_.clear();
    burst_repeats_ = true;
    ++round_;
  }
  tensor.last_round = round_;
  burst_.push_back(index);
}

void HorovodAssembler::on_end(const Event& event) {
  const auto place = by_pid_.find(event.pid);
  if (place == by_pid_.end() || all_[place->second].depth == 0) {
    ++report_.stray;
    return;
  }
  Tensor& tensor = all_[place->second];
  if (--tensor.depth > 0) return;
  switch (tensor.phase) {
    case Phase::negotiating:
      tensor.open.negotiate_end = event.time;
      tensor.phase = Phase::waiting;
      break;
    case Phase::reducing:
      tensor.open.reduce_end = event.time;
      tensor.open.bytes = tensor_bytes(event.dtype, event.shape);
      complete(tensor);
      break;
    case Phase::ignored:
      tensor.phase = Phase::idle;
      break;
    case Phase::waiting:
    case Phase::idle:
      break;
  }
}

void HorovodAssembler::on_tick(const Event& event) {
  const int32_t rank = rank_of(event.name);
  if (rank < 0) return;
  const auto place = by_pid_.find(event.pid);
  if (place == by_pid_.end()) return;
  Tensor& tensor = all_[place->second];
  if (tensor.phase != Phase::negotiating || tensor.depth != 1) return;
  tensor.ranks.push_back(rank);
  tensor.times.push_back(event.time);
}

void HorovodAssembler::complete(Tensor& tensor) {
  tensor.open.ticks = static_cast<uint32_t>(tensor.ranks.size());
  pending_.rows.push_back(tensor.open);
  pending_.tick_rank.insert(pending_.tick_rank.end(), tensor.ranks.begin(), tensor.ranks.end());
  pending_.tick_time.insert(pending_.tick_time.end(), tensor.times.begin(), tensor.times.end());
  end_operation(tensor);
}

void HorovodAssembler::abandon(Tensor& tensor) {
  if (tensor.phase != Phase::ignored) {
    note(report_.abandoned, report_.first_abandoned, static_cast<uint64_t>(tensor.open.offset));
    end_operation(tensor);
  }
  tensor.phase = Phase::idle;
  tensor.depth = 0;
}

void HorovodAssembler::end_operation(Tensor& tensor) {
  tensor.phase = Phase::idle;
  tensor.depth = 0;
  if (reduces(tensor.open.kind) && --in_flight_ == 0) release();
}

void HorovodAssembler::release() {
  append(done_, pending_);
  burst_.clear();
  burst_repeats_ = false;
}

void HorovodAssembler::finish() {
  for (Tensor& tensor : all_) {
    if (tensor.phase != Phase::idle) abandon(tensor);
  }
  release();
}

Operations HorovodAssembler::take() { return std::exchange(done_, Operations{}); }

uint32_t HorovodAssembler::closed_rounds() const { return round_ == 0 ? 0 : round_ - 1; }

}  // namespace nostall::timeline
