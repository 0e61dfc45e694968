// plan/bound.h - the fewest bytes that must leave the shared file system.
#pragma once

#include <cstdint>
#include <span>

#include "plan/plan.h"

namespace nostall::plan {

// The least number of bytes that any policy, however clairvoyant, must read from the source for
// global batches from `begin` on over all ranks, when `capacity` bytes can be kept in total and
// samples may be kept in part (so it is a true lower bound). Accesses of one sample within one
// epoch count once. With full shuffles it equals S + (E-1) * max(0, S - capacity).
uint64_t source_bytes_lower_bound(const JobSpec& spec, std::span<const uint64_t> sizes,
                                  uint64_t capacity, Position begin = {});
// The same of these epochs, one after the other, where `begin` says only where in its epoch a job
// began. Takes time and memory by how many they are, whatever their numbers.
uint64_t source_bytes_lower_bound(const JobSpec& spec, std::span<const uint64_t> sizes,
                                  uint64_t capacity, Position begin,
                                  std::span<const uint32_t> epochs);

}  // namespace nostall::plan
