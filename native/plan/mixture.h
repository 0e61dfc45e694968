// plan/mixture.h - samples of several sources in one order, by weights that hold over every prefix.
//
// Place p of a mixture has one source, and is the n-th place of it. After any number of places each
// source has had its share of them to less than one place (to 1 - 1/(2m - 2) for m sources
// [Tijdeman 1980]): mixing is no draw, so that no stretch of training sees more of a source than
// its weight says. Weights become whole shares of a period of at most kMostShares places, after
// which the pattern comes again; so any place is found without those before its period. Where the
// weights change, a new pattern begins. docs/formats/order.md.
// Cost: a place of a pattern takes about 10 ns, once for places that are asked for in rising order.
// Thread-safety: immutable, but for what is known of a pattern, which is kept from one call to the
// next.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "plan/permutation.h"

namespace nostall::plan {

// Places of the longest period; a weight that is no multiple of 1 / kMostShares of all is rounded
// to one.
inline constexpr uint32_t kMostShares = 1u << 20;
inline constexpr uint32_t kMostSources = 1u << 16;

// Weights as shares of a period.
struct Shares {
  std::vector<uint32_t> of;  // places of each source in a period; 0 only for the weight 0
  uint32_t period = 0;       // their sum
};
// Throws Error(usage) for weights that are negative, infinite, NaN or all 0.
Shares shares_of(std::span<const double> weights);

// What happens when a source has no samples left.
enum class AtEnd : uint8_t {
  repeat,    // it begins again in another order; the mixture has no end
  stop,      // the mixture ends
  reweight,  // the others go on by their weights; the mixture ends with the last source
};

class Mixture {
 public:
  struct Change {
    uint64_t place = 0;           // from here on
    std::vector<double> weights;  // one for each source
  };
  struct Spec {
    std::vector<uint64_t> samples;  // of each source
    std::vector<Change> changes;    // in rising order; the first at place 0
    AtEnd at_end = AtEnd::repeat;
  };
  struct Place {
    uint32_t source = 0;
    uint64_t number = 0;  // how many places the source had before
    bool operator==(const Place&) const = default;
  };
  static constexpr uint64_t kEndless = std::numeric_limits<uint64_t>::max();

  // Throws Error(usage) if the spec makes no mixture.
  explicit Mixture(Spec spec);

  const Spec& spec() const noexcept { return spec_; }
  // Places until the mixture ends; kEndless if sources repeat.
  uint64_t end() const noexcept { return end_; }
  // What is at a place before the end.
  Place at(uint64_t place) const;
  // Places that each source had before this one.
  std::vector<uint64_t> counts(uint64_t place) const;
  // Sample ids at places from `first` on; those of a source follow those of the sources before it.
  // Samples of a source come in the order "keyed", a new one whenever it repeats; without
  // repeating, in that of `epoch`.
  template <typename Id>
  void fill(uint64_t seed, uint32_t epoch, uint64_t first, std::span<Id> out) const;
  // 64-bit hash of all that decides the places before this one.
  uint64_t fingerprint(uint64_t place = kEndless) const noexcept;
  // Places of patterns that were worked out so far.
  uint64_t worked_out() const noexcept { return worked_out_.load(std::memory_order_relaxed); }

  class Walk;
  class Samples;

 private:
  // A part of a period: its sources in order, and how often each came in the period before.
  struct Pattern {
    uint64_t begin = 0;         // in the period
    std::vector<uint32_t> had;  // of each source before that
    std::vector<uint16_t> source;
    std::vector<uint32_t> before;
    uint64_t end() const noexcept { return begin + source.size(); }
  };
  struct Stretch {
    uint64_t begin = 0;
    std::vector<uint64_t> before;  // places of each source before `begin`
    Shares shares;
    uint64_t places = 0;  // of a period, as far as the stretch needs them
  };
  // What is kept of one stretch: how often each source came before part 0, 1, ... of its period, as
  // far as parts were worked out, and the last two of these: that where an epoch begins, and that of
  // the batches that are planned.
  struct Known {
    size_t stretch = 0;
    std::vector<std::vector<uint32_t>> before;
    std::array<std::shared_ptr<const Pattern>, 2> last;
  };
  // `had`: of each source before `begin`, and afterwards at the end.
  static Pattern pattern_of(const Shares& shares, std::vector<uint32_t>& had, uint64_t begin,
                            uint64_t places);
  // How many places of the period are needed of a stretch that ends at `next` at the latest.
  uint64_t places_of(const Stretch& stretch, uint64_t next) const;

  // The stretches from a change to the next one; whether the mixture goes on there.
  bool add_change(const Change& change, uint64_t next);
  // Throws Error(usage) if sources that have samples left at the end get a weight from this change
  // on.
  void check_changes_reached(size_t first) const;
  std::vector<uint64_t> counts_in(size_t stretch, uint64_t place) const;
  // The first place from which on a source needs a sample that it does not have.
  uint64_t exhausted(size_t stretch) const;
  size_t stretch_of(uint64_t place) const noexcept;
  // The part of a stretch's period that has this place of the period.
  std::shared_ptr<const Pattern> pattern(size_t stretch, uint64_t at) const;

  Spec spec_;
  std::vector<uint64_t> begins_;  // the first sample id of each source
  std::vector<Stretch> stretches_;
  uint64_t end_ = kEndless;
  mutable std::atomic<uint64_t> worked_out_{0};
  mutable Mutex mutex_;
  // Of two stretches: that where an epoch begins, and that of the batches that are planned.
  mutable std::array<Known, 2> known_ NOSTALL_GUARDED_BY(mutex_);
};

// Places in rising order. Refers to the mixture. Thread-safety: one thread at a time.
class Mixture::Walk {
 public:
  Walk(const Mixture& mixture, uint64_t place);
  uint64_t place() const noexcept { return place_; }
  // What is at place(), which then is the next one.
  Place next();

 private:
  // Finds the places from place() on that lie in one part of a pattern.
  void go_on();

  const Mixture& mixture_;
  uint64_t place_, until_;        // `part_` has what is before `until_`
  uint64_t at_ = 0;               // in `part_`
  std::vector<uint64_t> counts_;  // of each source before place()
  std::shared_ptr<const Pattern> part_;
};

// The samples of places: those of a source come in the order "keyed", a new one whenever it repeats;
// without repeating, in that of `epoch`. Refers to the mixture. Thread-safety: one thread at a time.
class Mixture::Samples {
 public:
  // `first`: the first place of the epoch, if sources repeat.
  Samples(const Mixture& mixture, uint64_t seed, uint32_t epoch, uint64_t first);
  uint64_t at(const Place& place);
  // How often the epoch had the sample that at() gave last.
  uint32_t occurrence() const noexcept;

 private:
  struct Pass {
    KeyedPermutation order;  // of the samples of a source
    uint64_t number;         // of the pass
    uint64_t begin;          // places of the source before it
  };
  Pass pass(size_t source, uint64_t number) const;

  const Mixture& mixture_;
  uint64_t seed_;
  uint32_t epoch_;
  bool repeats_;
  std::vector<uint64_t> before_;      // places of each source before the epoch
  std::vector<Pass> first_, passes_;  // that the epoch begins in, and those of the last places
  Place last_;
  uint64_t sample_ = 0;  // of its source, at `last_`
};

}  // namespace nostall::plan
