// simulate/accesses.h - every node's access string R [Böhringer 2020, eq. 3.1], batch by batch.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"
#include "simulate/decision.h"

namespace nostall::simulate {

struct Accesses {
  std::vector<std::vector<uint32_t>> samples;  // [node]: all epochs, in order
  std::vector<std::vector<uint64_t>> ends;     // [node][batch]: where each batch ends
  uint64_t batches = 0;                        // over all epochs
  uint64_t batches_per_epoch = 0;
};

// From the plan, or from decision.order if that is given. 4 bytes per access. Throws Error(usage) if
// decision.order does not go with the plan.
Accesses accesses_of(const plan::JobSpec& spec, const Decision& decision);

// [node][sample]: how often the node reads it. 4 bytes each.
std::vector<std::vector<uint32_t>> reads_of(const Accesses& accesses, uint64_t samples);

}  // namespace nostall::simulate
