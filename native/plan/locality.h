// plan/locality.h - samples of a global batch to the ranks whose node keeps them.
#pragma once

#include <cstdint>
#include <span>

#include "plan/owners.h"
#include "plan/plan.h"

namespace nostall::plan {

// One rank's share of an epoch when the samples of each global batch are dealt to the ranks of
// their owners first, then to any rank with room. Every rank gets as many as rank_epoch gives it.
// The global batches are those of `order`, in another order within. Pure; O(length) time.
// Ranks then no longer see a random part of each batch: sums over the global batch do not change,
// statistics over a local one (batch norm) may.
RankEpoch local_rank_epoch(const JobSpec& spec, std::span<const SampleId> order, uint32_t rank,
                           const Ownership& ownership, std::span<const uint32_t> node_of_rank);

}  // namespace nostall::plan
