// plan/buckets.h - an order whose batches have samples of like length.
//
// Each global batch has samples of one bucket, the same one on all ranks: no rank waits for another
// that has longer samples, and little is padded. What buckets leave beside whole batches makes
// batches of neighbouring buckets. Pure in (buckets, seed, epoch, batch): docs/formats/order.md.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace nostall::plan {

// Buckets that a plan may have.
inline constexpr uint32_t kMostBuckets = 1u << 16;

// Throws Error(usage) if the spec has not one bucket for each sample.
void validate_buckets(const JobSpec& spec);

// OrderKind::bucketed, before padding; `order` has a place for each sample.
template <typename Id>
void fill_bucketed(const JobSpec& spec, uint32_t epoch, std::vector<Id>& order);

}  // namespace nostall::plan
