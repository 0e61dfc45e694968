// plan/stand_in.h - which samples may stand in for one that cannot be used.
//
// Every rank, thread and form of transform must choose the same replacement, so the candidates are
// a pure function of (seed, sample); see docs/formats/order.md. Thread-safety: values.
#pragma once

#include <cstdint>

#include "base/random.h"
#include "plan/plan.h"

namespace nostall::plan {

class StandIns {
 public:
  // Candidates to try before giving up on a data set that is mostly damaged.
  static constexpr uint32_t kMost = 1024;

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

}  // namespace nostall::plan
