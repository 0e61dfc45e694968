// A pipeline through shared memory: each rank adds its data to the sum of the ranks before it.
//
//   place     a rank's position in the chain, from 0: its order of arrival, or its rank
//   segment   a part of the message, 8 to 512 KiB; it is handed on as a whole
//   window    shared memory of one step, cut into slots
//   slot      memory for one segment; the slot table says which slot holds which segment
//   first     the rank at place 0; last: the rank at the highest place
//
// The first rank copies segment after segment into slots. The rank at place k waits until place
// k - 1 has handed a segment on, adds its own data to it in the slot, and hands it on. What the
// last rank hands on is the result; all ranks that want it copy it out. Each rank publishes two
// numbers that only grow: segments handed on (progress), and segments copied out (copied).
//
// The first rank reuses the slot of a segment that all readers have copied out. It takes slots that
// were not used yet only up to kAhead bytes, so that the window stays in cache, or without that
// limit while a rank has not arrived: then it has nothing better to do.
//
// In a reduce_scatter a rank copies out the segments of its own block alone; segments may reach over
// the borders of blocks. The last rank writes what is its own to its result, past the window.
//
// Early ranks have done their work when the last one arrives, so only one pass over its data
// remains [Mohammadalizadehbakhtevari 2021, alg. 5.1, there without segments].
#include <algorithm>
#include <optional>
#include <vector>

#include "collective/algorithms.h"

namespace nostall::collective {
namespace {

constexpr uint64_t kLargestSegment = 64 << 10;
// Two ranks have a short pipeline to fill, and move their data between caches faster in long runs.
constexpr uint64_t kLargestOfTwo = 512 << 10;

// One rank's part in one chain.
class Link {
 public:
  Link(Steps& steps, const Message& message, const ChainShape& shape, const Arrival& arrival)
      : steps_(steps),
        shared_(steps.shared()),
        message_(message),
        shape_(shape),
        step_(arrival.step),
        place_(place_of(arrival)),
        last_(shape.broadcast ? 0 : steps.ranks() - 1),
        stream_(message.bytes() >= kStreamFrom) {
    size_segments();
    block_ = block_of(steps.rank());
    wanted_ = wanted_by(steps.rank());
  }

  void run() {
    const bool copies_out = place_ != static_cast<int64_t>(last_);
    uint64_t forwarded = place_ >= 0 ? 0 : segments_;
    uint64_t copied = copies_out ? wanted_.begin : wanted_.end;
    while (forwarded < segments_ || copied < wanted_.end) {
      if (copied < wanted_.end && copied < results()) {
        copy_out(copied++);
      } else if (forwarded < segments_ && may_forward(forwarded)) {
        forward(forwarded++);
      } else {
        wait(forwarded, copied);
      }
    }
  }

 private:
  // Elements, or segments.
  struct Range {
    uint64_t begin, end;
    bool has(uint64_t one) const { return one >= begin && one < end; }
  };

  // The part of the result that a rank gets.
  Range block_of(uint32_t rank) const {
    if (!shape_.borders.empty()) return {shape_.borders[rank], shape_.borders[rank + 1]};
    const bool is_root = rank == static_cast<uint32_t>(shape_.root);
    const bool reads = shape_.broadcast ? !is_root : shape_.root < 0 || is_root;
    return {0, reads ? message_.count : 0};
  }
  // The segments in which it lies.
  Range wanted_by(uint32_t rank) const {
    const Range block = block_of(rank);
    if (block.begin == block.end) return {0, 0};
    return {block.begin / per_segment_, (block.end + per_segment_ - 1) / per_segment_};
  }
  // The first segment that a rank has still to copy out.
  uint64_t next_of(uint32_t rank) const {
    const Range wanted = wanted_by(rank);
    const uint64_t next = std::max(wanted.begin, count_in(shared_.copied(rank, step_)));
    return next < wanted.end ? next : segments_;
  }

  int64_t place_of(const Arrival& arrival) const {
    if (shape_.broadcast) return steps_.rank() == static_cast<uint32_t>(shape_.root) ? 0 : -1;
    return shape_.by_rank ? steps_.rank() : arrival.place;
  }

  void size_segments() {
    const uint64_t element = message_.element(), window = shared_.window_bytes();
    const Segments cut = segments_of(message_.count, element, steps_.ranks(), shape_.whole, window);
    per_segment_ = cut.elements;
    segments_ = cut.count;
    slot_bytes_ = (per_segment_ * element + kMinSlot - 1) / kMinSlot * kMinSlot;
    slots_ = window / slot_bytes_;
    ahead_ = std::min(slots_, std::max<uint64_t>(2, kAhead / slot_bytes_));
    // Woken in batches; so small that chained sleepers never all wait for more than the first
    // rank may send.
    const uint64_t most = segments_ <= ahead_ ? segments_ : ahead_ / (2 * steps_.ranks());
    batch_ = std::max<uint64_t>(1, steps_.oversubscribed() ? most : std::min(segments_ / 4, most));
  }

  uint64_t stamp(uint64_t segments) const { return step_ << kSegmentBits | segments; }
  uint64_t count_in(const Word& word) const {
    const uint64_t value = word.load(std::memory_order_seq_cst);
    return value >> kSegmentBits == step_ ? value & ((uint64_t{1} << kSegmentBits) - 1) : 0;
  }

  // Segments whose result is there.
  uint64_t results() {
    if (known_results_ < segments_) known_results_ = count_in(shared_.progress(last_, step_));
    return known_results_;
  }

  bool may_forward(uint64_t segment) {
    if (place_ == 0) return slot_for(segment);
    if (segment < known_input_) return true;
    known_input_ = count_in(shared_.progress(static_cast<uint32_t>(place_ - 1), step_));
    return segment < known_input_;
  }

  // The slot that was used last and is free again; one not used yet while a rank has not arrived.
  bool slot_for(uint64_t segment) {
    if (next_slot_ >= 0) return true;
    if (fresh_ < ahead_ && take_fresh()) return true;
    collect_free(segment);
    if (!free_.empty()) {
      next_slot_ = free_.back();
      free_.pop_back();
      return true;
    }
    return !all_arrived() && take_fresh();
  }

  bool take_fresh() {
    if (fresh_ >= slots_) return false;
    if (!shared_.allocate_window(step_, (fresh_ + 1) * slot_bytes_)) {
      // Of a message that fits, readers do not say what they have copied, and no slot comes back.
      if (fresh_ == 0 || segments_ <= ahead_) throw_no_memory();
      slots_ = fresh_;  // these have to do
      batch_ = 1;
      steps_.shrink(step_);
      return false;
    }
    next_slot_ = static_cast<int64_t>(fresh_++);
    return true;
  }

  [[noreturn]] void throw_no_memory() {
    steps_.fail(Error(ErrorKind::io, "no shared memory for a message of " +
                                         std::to_string(message_.bytes()) +
                                         " bytes: free some of /dev/shm"));
  }

  void collect_free(uint64_t segment) {
    uint64_t done = segment;
    for (uint32_t r = 0; r < steps_.ranks() && done > freed_; ++r) {
      done = std::min(done, next_of(r));
    }
    for (; freed_ < done; ++freed_) free_.push_back(slot_of(freed_));
  }

  bool all_arrived() {
    return (shared_.header().ticket[step_ % 2].value.load(std::memory_order_seq_cst) & 0x7fffu) ==
           steps_.ranks();
  }

  uint32_t slot_of(uint64_t segment) const {
    return shared_.slots(step_)[segment % table()].load(std::memory_order_relaxed);
  }
  uint64_t table() const { return shared_.window_bytes() / kMinSlot; }
  std::byte* memory_of(uint64_t segment) const {
    const uint32_t slot = slot_of(segment);
    if (slot >= slots_) {
      steps_.fail(Error(ErrorKind::corruption,
                        "the collectives' shared memory names slot " + std::to_string(slot) +
                            " of " + std::to_string(slots_) + "; start the job again"));
    }
    return shared_.window(step_) + slot * slot_bytes_;
  }

  void forward(uint64_t segment) {
    const uint64_t first = segment * per_segment_;
    const uint64_t n = std::min(per_segment_, message_.count - first);
    const uint64_t at = first * message_.element(), bytes = n * message_.element();
    const std::byte* mine = message_.in + at;
    if (place_ == 0) {
      shared_.slots(step_)[segment % table()].store(static_cast<uint32_t>(next_slot_),
                                                    std::memory_order_relaxed);
      next_slot_ = -1;
      copy(memory_of(segment), mine, bytes, false);
    } else {
      add(segment, memory_of(segment), mine, first, n);
    }
    steps_.publish(shared_.progress(static_cast<uint32_t>(place_), step_), stamp(segment + 1));
    if (place_ == static_cast<int64_t>(last_) && wanted_.has(segment)) mark_copied(segment + 1);
  }

  // Adds this rank's elements to the sum of those before it; what of it is the result of the last
  // rank goes there.
  void add(uint64_t segment, std::byte* sum, const std::byte* mine, uint64_t first, uint64_t n) {
    const Reducer& reducer = *message_.reducer;
    if (place_ != static_cast<int64_t>(last_) || !wanted_.has(segment)) {
      reducer.combine(sum, sum, mine, n);
    } else if (shape_.root < 0 && shape_.borders.empty()) {
      reducer.combine_and_copy(sum, result_of(first), sum, mine, n, stream_);
    } else if (first >= block_.begin && first + n <= block_.end && !is_shifted()) {
      reducer.combine(result_of(first), sum, mine, n);
    } else {
      reducer.combine(sum, sum, mine, n);
      copy_block(segment);
    }
  }

  // The result goes to the beginning of the input, where other ranks' blocks are.
  bool is_shifted() const { return message_.out == message_.in && block_.begin > 0; }
  std::byte* result_of(uint64_t element) const {
    return message_.out + (element - block_.begin) * message_.element();
  }

  void copy_out(uint64_t segment) {
    copy_block(segment);
    mark_copied(segment + 1);
  }

  // What of a segment is this rank's.
  void copy_block(uint64_t segment) {
    const uint64_t first = segment * per_segment_;
    const uint64_t begin = std::max(first, block_.begin);
    const uint64_t end = std::min(first + per_segment_, block_.end);
    copy(result_of(begin), memory_of(segment) + (begin - first) * message_.element(),
         (end - begin) * message_.element(), stream_);
  }

  // Read by the first rank alone, and only for messages longer than it may run ahead.
  void mark_copied(uint64_t segments) {
    if (segments_ > ahead_) steps_.publish(shared_.copied(steps_.rank(), step_), stamp(segments));
  }

  void wait(uint64_t forwarded, uint64_t copied) {
    if (batch_ > 1 && steps_.is_shrunk(step_)) batch_ = 1;
    const bool in_batches = batch_ > 1;
    Want input{0, ~uint64_t{0}}, output{0, ~uint64_t{0}};
    std::optional<uint32_t> slowest;
    if (forwarded < segments_ && place_ > 0) {
      const Word& before = shared_.progress(static_cast<uint32_t>(place_ - 1), step_);
      input = {shared_.key(before), stamp(std::min(forwarded + batch_, segments_))};
    } else if (forwarded < segments_) {
      slowest = slowest_reader();
      const Word& next = slowest ? shared_.copied(*slowest, step_) : shared_.progress(last_, step_);
      input = {shared_.key(next), stamp(freed_ + 1)};
    }
    if (copied < wanted_.end) {
      output = {shared_.key(shared_.progress(last_, step_)),
                stamp(std::min(copied + batch_, wanted_.end))};
    }
    // When that reader has copied, another one may be the slowest: the next wait is for it.
    steps_.wait(
        [&] {
          return (copied < wanted_.end && copied < results()) ||
                 (forwarded < segments_ && may_forward(forwarded)) ||
                 (slowest && next_of(*slowest) > freed_) || (in_batches && steps_.is_shrunk(step_));
        },
        {input, output});
  }

  // A reader that the first rank waits for before it can use a slot again.
  std::optional<uint32_t> slowest_reader() const {
    for (uint32_t r = 0; r < steps_.ranks(); ++r) {
      if (r != steps_.rank() && next_of(r) <= freed_) return r;
    }
    return std::nullopt;
  }

  Steps& steps_;
  SharedMemory& shared_;
  const Message& message_;
  const ChainShape& shape_;
  const uint64_t step_;
  const int64_t place_;  // -1: only reads
  const uint32_t last_;
  const bool stream_;
  Range block_{0, 0}, wanted_{0, 0};  // what of the result this rank gets, and its segments
  uint64_t per_segment_ = 0, slot_bytes_ = 0, segments_ = 0, slots_ = 0, ahead_ = 0, batch_ = 0;
  uint64_t known_results_ = 0, known_input_ = 0;
  // Slots, of the first rank.
  std::vector<uint32_t> free_;
  uint64_t fresh_ = 0, freed_ = 0;
  int64_t next_slot_ = -1;
};

}  // namespace

// The same on all ranks: of what they can know of each other.
Segments segments_of(uint64_t count, uint64_t element, uint32_t ranks, bool whole,
                     uint64_t window) {
  const bool two = ranks == 2;
  const uint64_t bytes = count * element, fewest = (count + kMostSegments - 1) / kMostSegments;
  uint64_t wanted =
      std::clamp(bytes / (two ? 4 : 8), kSmallestSegment, two ? kLargestOfTwo : kLargestSegment);
  if (whole) wanted = bytes;
  wanted = std::max(std::min(std::max(wanted, fewest * element), window / 2), element);
  if (wanted > window / 2) {
    throw Error(ErrorKind::usage, "elements of " + std::to_string(element) +
                                      " bytes do not fit the window of " + std::to_string(window) +
                                      " bytes; make it larger");
  }
  const uint64_t elements = wanted / element;
  if (elements < fewest) {
    throw Error(ErrorKind::usage, "a message of " + std::to_string(bytes) + " bytes is more than " +
                                      std::to_string(kMostSegments) +
                                      " segments of half the window of " + std::to_string(window) +
                                      " bytes; make the window larger, or the message smaller");
  }
  return {elements, (count + elements - 1) / elements};
}

Arrival arrive(Steps& steps, bool offers_in_place) {
  const uint64_t step = steps.begin_step();
  Header& h = steps.shared().header();
  Word& ticket = h.ticket[step % 2].value;
  steps.post(step);
  uint64_t seen = ticket.load(std::memory_order_seq_cst);
  for (;;) {
    const bool first = seen >> 16 != step;
    const uint64_t mode = first ? uint64_t{offers_in_place} << 15 : seen & 0x8000u;
    const uint64_t place = first ? 0 : seen & 0x7fffu;
    if (ticket.compare_exchange_weak(seen, step << 16 | mode | (place + 1),
                                     std::memory_order_seq_cst)) {
      return {step, static_cast<uint32_t>(place), mode != 0};
    }
  }
}

void chain_after(Steps& steps, const Message& message, const ChainShape& shape,
                 const Arrival& arrival) {
  steps.check_arrived(arrival.step);
  Link(steps, message, shape, arrival).run();
  // A rank without a block may leave before others arrive.
  if (shape.root < 0 &&
      (shape.borders.empty() || shape.borders[steps.rank()] < shape.borders[steps.rank() + 1])) {
    steps.all_arrived(arrival.step);
  } else {
    steps.finish_early(arrival.step);
  }
}

void chain(Steps& steps, const Message& message, const ChainShape& shape) {
  chain_after(steps, message, shape, arrive(steps, false));
}

}  // namespace nostall::collective
