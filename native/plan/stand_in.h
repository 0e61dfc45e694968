// plan/stand_in.h - which samples may stand in for one that cannot be used.
//
// Every rank, thread and form of transform must choose the same replacement, so the candidates are
// a pure function of (job, sample); see docs/formats/order.md. They are samples that the order can
// give: none of weight 0, of a user's order none that it does not name. Thread-safety: values.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/random.h"
#include "plan/plan.h"

namespace nostall::plan {

class StandIns {
 public:
  // Candidates to look at, and to read, before giving up on a data set that is mostly damaged. Raw
  // samples that are too long for the place are not read.
  static constexpr uint32_t kMost = 1024, kReads = 64;

  // Those of one bad sample, in the order in which they are tried. Refers to the StandIns.
  class Candidates {
   public:
    // The next one; it may be the bad sample itself, or one that was drawn before.
    SampleId next() noexcept {
      const uint64_t high = random_.next();
      return of_.sample((high << 32 | random_.next()) % of_.count_);
    }

   private:
    friend class StandIns;
    Candidates(const StandIns& of, SampleId bad) noexcept
        : of_(of), random_(of.seed_ ^ kStream, 0, bad) {}

    const StandIns& of_;
    SampleRandom random_;
  };

  // Refers to the job. Time and memory are O(samples) where a weight is 0.
  explicit StandIns(const JobSpec& job);

  Candidates of(SampleId bad) const noexcept { return {*this, bad}; }

 private:
  static constexpr uint64_t kStream = 0x5375627374697475;  // apart from all other draws
  struct Range {
    SampleId first = 0;
    uint64_t before = 0;  // samples of the ranges before
  };
  void add(SampleId first, uint64_t count);
  // Number k of those that the order can give.
  SampleId sample(uint64_t k) const noexcept;

  uint64_t seed_, count_ = 0;
  std::span<const SampleId> named_;  // by a user's order
  std::vector<Range> ranges_;        // of other orders
};

// Why an epoch ends, behind what is wrong with a sample: of `tried` candidates of its batch so many are
// unusable, as a sample of the data set.
std::string none_stands_in(uint64_t unusable, uint64_t tried);

}  // namespace nostall::plan
