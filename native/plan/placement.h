// plan/placement.h - which sample a node keeps in which tier, and where: the rule of HDMLP
// [Böhringer 2020, sec. 3.2.2].
//
// Highest access frequency into the fastest tier, then the next; samples of equal frequency by
// first access; within a tier records lie in the order of first access, which is also the fill
// order. As sizes are known, the offset of every record is known too: no allocator, no metadata
// traffic.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/copies_by_use.h"
#include "plan/plan.h"

namespace nostall::plan {

// What one node (the ranks [first_rank, first_rank + ranks)) reads during the job.
struct NodeAccess {
  std::vector<uint32_t> frequency;     // accesses of each sample by this node
  std::vector<uint64_t> first_access;  // time of the first access, kNever if there is none
  bool whole = true;                   // false: the job goes on behind the epochs that are counted
};
inline constexpr uint64_t kNever = ~uint64_t{0};

// Global batches from `begin` on. Time is epoch * epoch_length + position in the epoch.
NodeAccess node_access(const JobSpec& spec, uint32_t first_rank, uint32_t ranks,
                       Position begin = {});

inline constexpr uint8_t kNoTier = 255;

struct TierShape {
  uint64_t capacity = 0;  // bytes
  uint32_t overhead = 0;  // bytes each record needs beside the sample's own
};

struct Placement {
  std::vector<uint8_t> tier;  // per sample: index of its tier, or kNoTier
  // Per sample: of its record in that tier (overhead included before it).
  std::vector<uint64_t> offset;
  std::vector<uint64_t> used;               // per tier: bytes used, never above the capacity
  std::vector<std::vector<SampleId>> fill;  // per tier: samples in fill order
  // Behind what is placed in tier number `copy_tier`: of copies that come and go (plan/cluster.h).
  CopyPlaces copies{};
  size_t copy_tier = 0;
  // What ranks of a node may be apart, in units of CopyUse::filled: a copy that came later, by no more than
  // that, is of a rank that is ahead.
  uint32_t copy_lead = 2;
};

// A sample that a tier holds already, from an earlier job, and where.
struct Resident {
  SampleId sample = 0;
  uint64_t offset = 0;
};

// `sizes` has one entry per sample, bytes. A sample larger than what a tier has left is passed to
// the next tier, smaller ones may still enter. Samples never accessed are not placed.
Placement place(std::span<const uint64_t> sizes, const NodeAccess& access,
                std::span<const TierShape> tiers,
                std::span<const std::vector<Resident>> resident = {});

}  // namespace nostall::plan
