// plan/copies_by_use.h - which of other nodes' samples a node copies for a while, by when it needs them next.
//
// What a node's owned samples leave of a tier is divided into places, each for one copy. A copy that is
// needed again gets a free place, or that of the copy that is needed last, if that is later: Belady's
// rule, with bypass. Owners keep what they own, so the last copy of a sample is never dropped. All of it
// follows from the node's own accesses and the sizes: no node asks another what it dropped.
//
// Places have a few sizes, about one eighth apart, so that memory is neither allocated nor fragmented:
// a place of a size holds any sample of that class. Copies compete within their class.
// Thread-safety: values, and none.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "plan/plan.h"

namespace nostall::plan {

inline constexpr uint32_t kNoPlace = ~uint32_t{0};

class CopyPlaces {
 public:
  // Places alike, numbered from `first` on, which lie one after the other from `begin` of the room on.
  struct Class {
    uint32_t number = 0;  // of the sizes that go there
    uint64_t bytes = 0;   // of each place: the largest sample that goes there
    uint32_t first = 0, count = 0;
    uint64_t begin = 0;
  };

  CopyPlaces() = default;
  // For copies of the samples that `copied` says, in a room of so many bytes. Every class of sizes
  // gets the same part of what its copies would take. O(samples).
  CopyPlaces(std::span<const uint64_t> sizes, const std::function<bool(SampleId)>& copied,
             uint64_t room);

  uint32_t count() const noexcept {
    return classes_.empty() ? 0 : classes_.back().first + classes_.back().count;
  }
  uint64_t bytes() const noexcept;
  const std::vector<Class>& classes() const noexcept { return classes_; }
  // The class of samples of that size: its index; nothing if there is no place for them.
  std::optional<size_t> class_of(uint64_t size) const noexcept;
  // Where a place lies in the room, and how many bytes it has.
  uint64_t begin_of(uint32_t place) const noexcept;
  uint64_t size_of(uint32_t place) const noexcept { return class_at(place).bytes; }

 private:
  const Class& class_at(uint32_t place) const noexcept;

  std::vector<Class> classes_;  // by rising sizes
};

// What to do at an access: its sample is in `place` (`held`), is to be there afterwards (`keep`), or
// neither.
struct CopyUse {
  uint32_t place = kNoPlace;
  bool held = false, keep = false;
  // With a CopySchedule: the global batch of the job in which it came there, or comes now, modulo 2^32.
  uint32_t filled = 0;
};

// The accesses are told ahead of their turn, for the future of a job may be too long to hold: what is
// not needed in what is known is needed last. Cost: O(log places) an access; 16 bytes for each that is
// known ahead, 12 per sample, about 40 per place.
class CopiesByUse {
 public:
  // `sizes` outlives this.
  CopiesByUse(std::span<const uint64_t> sizes, CopyPlaces places);

  // The accesses that follow those known so far, of samples that are copied; `last`: no more will.
  void know(std::span<const uint32_t> samples, bool last);
  // Decides the first known access that is not decided yet. There must be one.
  CopyUse next();

 private:
  static constexpr uint64_t kNotKnown = ~uint64_t{0};
  struct Access {
    uint32_t sample = 0;
    uint64_t next = kNotKnown;
  };
  // What each copy of a class is needed for next, the farthest on top; also what is not so any more.
  using Farthest = std::vector<std::pair<uint64_t, uint32_t>>;  // access and place

  void set_next(size_t of_class, uint32_t place, uint64_t next);
  // A place of the class whose copy is needed later than that, or that has none; kNoPlace: none.
  uint32_t place_for(size_t of_class, uint64_t next);

  const std::span<const uint64_t> sizes_;
  const CopyPlaces places_;
  std::vector<Access> accesses_;      // number begin_ and those behind it
  uint64_t begin_ = 0, decided_ = 0;  // numbers of accesses
  bool complete_ = false;
  std::vector<uint64_t> last_known_;  // [sample]: number of its last known access
  std::vector<uint32_t> place_of_;    // [sample]
  std::vector<uint32_t> sample_in_;   // [place]
  std::vector<uint64_t> next_use_;    // [place]
  std::vector<uint32_t> used_;        // [class]: places that something was in
  std::vector<Farthest> farthest_;    // [class]: heaps
};

}  // namespace nostall::plan
