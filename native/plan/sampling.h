// plan/sampling.h - orders that draw samples: by weights, or each of them several times.
//
// All draws are pure functions of (seed, epoch): docs/formats/order.md. Memory: O(samples).
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace nostall::plan {

// Throws Error(usage) if the weights of the spec cannot be drawn from.
void validate_weighted(const JobSpec& spec);

// OrderKind::weighted: spec.draws samples into `order`, before padding.
template <typename Id>
void draw_weighted(const JobSpec& spec, uint32_t epoch, std::vector<Id>& order);

// Samples of an epoch of OrderKind::repeated, before it is cut for the world: as many whole groups
// of 256 as the data set has, or all samples of one that is smaller.
uint64_t repeated_length(uint64_t samples) noexcept;

}  // namespace nostall::plan
