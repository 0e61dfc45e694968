// An allgather through shared memory in the order of arrival.
//
//   segment   a part of a rank's data, 8 to 64 KiB (of two ranks up to 256): handed over as a whole
//   slot      memory for one segment; of the step's window every rank owns one slot in `ranks`
//   progress  segments that a rank has handed over; copied: of all ranks, those that it has read
//
// A rank that arrives copies its data to its slots, segment after segment, and copies out what the
// others have handed over so far. So when the last rank arrives the others have each other's data
// already, and only its own are left to be copied.
//
// A rank uses a slot again when all others have copied it. It takes slots that were not used yet
// only up to its share of kAhead bytes, so that the window stays in cache, or without that limit
// while a rank has not arrived: then there is nothing better to do.
//
// Sleeps: for the rank of which this one has copied least, and for the slowest reader of its own
// slots or, while ranks are missing, for the next arrival. They end in batches of no more segments
// than a rank may be ahead, so whichever pair of ranks has moved least can always go on.
#include <algorithm>
#include <optional>
#include <vector>

#include "collective/algorithms.h"

namespace nostall::collective {
namespace {

// The bytes of a window that one rank has, in whole pairs of the smallest slots.
uint64_t share_of(uint64_t window, uint32_t ranks) {
  return window / ranks / (2 * kMinSlot) * (2 * kMinSlot);
}

uint64_t largest(std::span<const Gathered> parts) {
  uint64_t most = 0;
  for (const Gathered& part : parts) most = std::max(most, part.bytes);
  return most;
}

// One rank's part in one allgather.
class Gather {
 public:
  Gather(Steps& steps, const std::byte* in, std::span<const Gathered> parts)
      : steps_(steps),
        shared_(steps.shared()),
        in_(in),
        parts_(parts),
        rank_(steps.rank()),
        ranks_(steps.ranks()),
        step_(steps.begin_step()),
        copied_(ranks_),
        known_(ranks_) {
    size_segments();
    for (uint32_t i = 1; i < ranks_; ++i) {
      const uint32_t r = (rank_ + i) % ranks_;
      absent_.push_back(r);
      if (segments(r) > 0) unread_.push_back(r);
    }
    own_ = parts_[rank_].to == in_ ? segments(rank_) : 0;
  }

  void run() {
    steps_.post(step_);
    const uint64_t mine = segments(rank_);
    for (;;) {
      see_arrivals();
      if (forwarded_ == mine && unread_.empty() && absent_.empty()) break;
      if (forwarded_ < mine && may_forward()) {
        forward();
      } else if (const auto at = readable()) {
        read(*at);
      } else if (own_ < mine) {
        copy_own();
      } else {
        wait();
      }
    }
    while (own_ < mine) copy_own();
    steps_.all_arrived(step_);
  }

 private:
  void size_segments() {
    const uint64_t share = share_of(shared_.window_bytes(), ranks_), most = largest(parts_);
    const uint64_t window = std::min(share, std::max(kAhead / (2 * ranks_), 2 * kSmallestSegment));
    const Segments cut = segments_of(most, 1, ranks_, false, window);
    per_segment_ = cut.elements;
    most_segments_ = cut.count;
    slot_bytes_ = (per_segment_ + kMinSlot - 1) / kMinSlot * kMinSlot;
    slots_ = share / slot_bytes_;
    table_ = shared_.window_bytes() / kMinSlot / ranks_;
    ahead_ = std::min(slots_, std::max<uint64_t>(2, kAhead / (ranks_ * slot_bytes_)));
    const uint64_t batch = most_segments_ <= ahead_ ? most_segments_ : ahead_ / 2;
    batch_ = std::max<uint64_t>(
        1, steps_.oversubscribed() ? batch : std::min(most_segments_ / 4, batch));
    stream_ = most * ranks_ >= kStreamFrom;
  }

  uint64_t segments(uint32_t rank) const {
    return (parts_[rank].bytes + per_segment_ - 1) / per_segment_;
  }
  uint64_t bytes_in(uint32_t rank, uint64_t segment) const {
    return std::min(per_segment_, parts_[rank].bytes - segment * per_segment_);
  }
  std::byte* place_of(uint32_t rank, uint64_t segment) const {
    return static_cast<std::byte*>(parts_[rank].to) + segment * per_segment_;
  }
  uint64_t stamp(uint64_t segments) const { return step_ << kSegmentBits | segments; }
  uint64_t count_in(const Word& word) const {
    const uint64_t value = word.load(std::memory_order_seq_cst);
    return value >> kSegmentBits == step_ ? value & ((uint64_t{1} << kSegmentBits) - 1) : 0;
  }

  void see_arrivals() {
    std::erase_if(absent_, [this](uint32_t rank) {
      if (!steps_.has_posted(step_, rank)) return false;
      steps_.wait_for_post(step_, rank);  // checks what it calls
      return true;
    });
  }

  // This rank's own slots.

  bool may_forward() {
    if (next_slot_ >= 0) return true;
    if (fresh_ < ahead_ && take_fresh()) return true;
    collect_free();
    if (!free_.empty()) {
      next_slot_ = free_.back();
      free_.pop_back();
      return true;
    }
    return !absent_.empty() && take_fresh();
  }

  bool take_fresh() {
    if (fresh_ >= slots_) return false;
    if (!shared_.allocate_window(step_, (fresh_ + 1) * ranks_ * slot_bytes_)) {
      if (fresh_ == 0) {
        steps_.fail(Error(ErrorKind::io, "no shared memory for an allgather of " +
                                             std::to_string(parts_[rank_].bytes) +
                                             " bytes: free some of /dev/shm"));
      }
      slots_ = fresh_;  // these have to do
      batch_ = 1;
      steps_.shrink(step_);
      return false;
    }
    next_slot_ = static_cast<int64_t>(fresh_++);
    return true;
  }

  void collect_free() {
    uint64_t done = forwarded_;
    for (uint32_t r = 0; r < ranks_ && done > freed_; ++r) {
      if (r != rank_) done = std::min(done, count_in(shared_.copied(r, step_)));
    }
    for (; freed_ < done; ++freed_) free_.push_back(slot_of(rank_, freed_));
  }

  void forward() {
    shared_.slots(step_)[rank_ * table_ + forwarded_ % table_].store(
        static_cast<uint32_t>(next_slot_), std::memory_order_relaxed);
    next_slot_ = -1;
    copy(memory_of(rank_, forwarded_), in_ + forwarded_ * per_segment_, bytes_in(rank_, forwarded_),
         false);
    ++forwarded_;
    steps_.publish(shared_.progress(rank_, step_), stamp(forwarded_));
  }

  // The slots of others.

  uint32_t slot_of(uint32_t rank, uint64_t segment) const {
    return shared_.slots(step_)[rank * table_ + segment % table_].load(std::memory_order_relaxed);
  }
  std::byte* memory_of(uint32_t rank, uint64_t segment) const {
    const uint32_t slot = slot_of(rank, segment);
    if (slot >= share_of(shared_.window_bytes(), ranks_) / slot_bytes_) {
      steps_.fail(Error(ErrorKind::corruption, "the collectives' shared memory names slot " +
                                                   std::to_string(slot) + " of rank " +
                                                   std::to_string(rank) +
                                                   ", which it has not; start the job again"));
    }
    return shared_.window(step_) + (uint64_t{slot} * ranks_ + rank) * slot_bytes_;
  }

  // The index in unread_ of a rank that has handed over more; each in turn.
  std::optional<size_t> readable() {
    for (size_t i = 0; i < unread_.size(); ++i) {
      const size_t at = (turn_ + i) % unread_.size();
      const uint32_t r = unread_[at];
      if (copied_[r] == known_[r]) known_[r] = count_in(shared_.progress(r, step_));
      if (copied_[r] < known_[r]) return at;
    }
    return std::nullopt;
  }

  void read(size_t at) {
    const uint32_t r = unread_[at];
    const uint64_t segment = copied_[r]++;
    copy(place_of(r, segment), memory_of(r, segment), bytes_in(r, segment), stream_);
    turn_ = at + 1;
    if (copied_[r] == segments(r)) {
      unread_.erase(unread_.begin() + static_cast<std::ptrdiff_t>(at));
      turn_ = at;
    }
    const uint64_t least = least_copied();
    if (least > published_) {
      published_ = least;
      steps_.publish(shared_.copied(rank_, step_), stamp(least));
    }
  }

  uint64_t least_copied() const {
    uint64_t least = most_segments_;
    for (const uint32_t r : unread_) least = std::min(least, copied_[r]);
    return least;
  }

  void copy_own() {
    copy(place_of(rank_, own_), in_ + own_ * per_segment_, bytes_in(rank_, own_), stream_);
    ++own_;
  }

  void wait() {
    if (batch_ > 1 && steps_.is_shrunk(step_)) batch_ = 1;
    const bool in_batches = batch_ > 1;
    Want input{0, ~uint64_t{0}}, output{0, ~uint64_t{0}};
    const Word* slowest = nullptr;
    uint64_t least = ~uint64_t{0};
    for (const uint32_t r : unread_) {
      if (copied_[r] >= least || !steps_.has_posted(step_, r)) continue;
      least = copied_[r];
      input = {shared_.key(shared_.progress(r, step_)),
               stamp(std::min(least + batch_, segments(r)))};
    }
    if (!absent_.empty()) {
      output = {kAnyPosted, step_};
    } else if (forwarded_ < segments(rank_)) {
      slowest = slowest_reader();
      if (slowest != nullptr) output = {shared_.key(*slowest), stamp(freed_ + 1)};
    }
    // Whatever ends the reason for these wants ends the wait: the next one has others.
    steps_.wait(
        [&] {
          return readable().has_value() || (forwarded_ < segments(rank_) && may_forward()) ||
                 (slowest != nullptr && count_in(*slowest) > freed_) ||
                 (in_batches && steps_.is_shrunk(step_)) ||
                 std::any_of(absent_.begin(), absent_.end(),
                             [this](uint32_t r) { return steps_.has_posted(step_, r); });
        },
        {input, output});
  }

  const Word* slowest_reader() const {
    for (uint32_t r = 0; r < ranks_; ++r) {
      const Word& word = shared_.copied(r, step_);
      if (r != rank_ && count_in(word) <= freed_) return &word;
    }
    return nullptr;
  }

  Steps& steps_;
  SharedMemory& shared_;
  const std::byte* const in_;
  const std::span<const Gathered> parts_;
  const uint32_t rank_, ranks_;
  const uint64_t step_;
  uint64_t per_segment_ = 0, most_segments_ = 0, slot_bytes_ = 0, slots_ = 0, table_ = 0;
  uint64_t ahead_ = 0, batch_ = 0;
  bool stream_ = false;
  std::vector<uint32_t> absent_, unread_;
  std::vector<uint64_t> copied_, known_;  // of each rank: segments read here, handed over there
  size_t turn_ = 0;
  uint64_t published_ = 0, own_ = 0;
  // Its own slots.
  std::vector<uint32_t> free_;
  uint64_t forwarded_ = 0, fresh_ = 0, freed_ = 0;
  int64_t next_slot_ = -1;
};

}  // namespace

bool gathers_by_arrival(const Steps& steps, uint64_t window, std::span<const Gathered> parts) {
  return largest(parts) > kGatherFrom && share_of(window, steps.ranks()) > 0;
}

void gather_by_arrival(Steps& steps, const std::byte* in, std::span<const Gathered> parts) {
  Gather(steps, in, parts).run();
}

}  // namespace nostall::collective
