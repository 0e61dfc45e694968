// plan/stand_in.h - which samples may stand in for one that cannot be used.
//
// Every rank, thread and form of transform must choose the same replacement, so the candidates are
// a pure function of (seed, sample); see docs/formats/order.md. Thread-safety: values.
#pragma once

#include <cstdint>
#include <string>

#include "base/random.h"
#include "plan/plan.h"

namespace nostall::plan {

class StandIns {
 public:
  // Candidates to look at, and to read, before giving up on a data set that is mostly damaged. Raw
  // samples that are too long for the place are not read.
  static constexpr uint32_t kMost = 1024, kReads = 64;

  StandIns(uint64_t seed, SampleId bad, uint64_t samples) noexcept
      : random_(seed ^ kStream, 0, bad), samples_(samples) {}

  // The next candidate; it may be the bad sample itself, or one that was drawn before.
  SampleId next() noexcept {
    const uint64_t high = random_.next();
    return (high << 32 | random_.next()) % samples_;
  }

 private:
  static constexpr uint64_t kStream = 0x5375627374697475;  // apart from all other draws
  SampleRandom random_;
  uint64_t samples_;
};

// Why an epoch ends, behind what is wrong with a sample: of `tried` candidates of its batch so many are
// unusable, as a sample of the data set.
inline std::string none_stands_in(uint64_t unusable, uint64_t tried) {
  const uint64_t percent = tried == 0 ? 100 : unusable * 100 / tried;
  return "; no other sample could stand in its place: of " + std::to_string(tried) +
         " that were tried for this batch " + std::to_string(unusable) + " (" +
         std::to_string(percent) + " %) cannot be used: check the data set";
}

}  // namespace nostall::plan
