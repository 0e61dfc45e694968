// plan/mixture.h - samples of several sources in one order, by weights that hold over every prefix.
//
// Place p of a mixture has one source, and is the n-th place of it. After any number of places each
// source has had its share of them to less than one place (to 1 - 1/(2m - 2) for m sources
// [Tijdeman 1980]): mixing is no draw, so that no stretch of training sees more of a source than
// its weight says. Weights become whole shares of a period of at most kMostShares places, after
// which the pattern comes again; so any place is found without those before it. Where the weights
// change, a new pattern begins. docs/formats/order.md. Thread-safety: immutable, but for a pattern
// that is kept from one call to the next.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "base/mutex.h"

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

 private:
  // The sources of one period in order, and how often each came in it before; of a stretch that
  // ends within its first period no more than it needs.
  struct Pattern {
    std::vector<uint16_t> source;
    std::vector<uint32_t> before;
  };
  struct Stretch {
    uint64_t begin = 0;
    std::vector<uint64_t> before;  // places of each source before `begin`
    Shares shares;
    uint64_t places = 0;  // of its pattern
  };
  static Pattern pattern_of(const Shares& shares, uint64_t places);
  // How many places of the period are needed of a stretch that ends at `next` at the latest.
  uint64_t places_of(const Stretch& stretch, uint64_t next) const;

  // The stretches from a change to the next one; whether the mixture goes on there.
  bool add_change(const Change& change, uint64_t next);
  std::vector<uint64_t> counts_in(const Stretch& stretch, const Pattern& pattern,
                                  uint64_t place) const;
  // The first place from which on a source needs a sample that it does not have.
  uint64_t exhausted(const Stretch& stretch, const Pattern& pattern) const;
  size_t stretch_of(uint64_t place) const noexcept;
  // The first `places` of a stretch's pattern, or more.
  std::shared_ptr<const Pattern> pattern(size_t stretch, uint64_t places) const;
  // How many of them `count` places from `begin` on need.
  static uint64_t needed(const Stretch& stretch, uint64_t begin, uint64_t count) noexcept;

  Spec spec_;
  std::vector<uint64_t> begins_;  // the first sample id of each source
  std::vector<Stretch> stretches_;
  uint64_t end_ = kEndless;
  mutable Mutex mutex_;
  mutable size_t kept_ NOSTALL_GUARDED_BY(mutex_) = 0;  // the stretch of `pattern_`
  mutable std::shared_ptr<const Pattern> pattern_ NOSTALL_GUARDED_BY(mutex_);
};

}  // namespace nostall::plan
