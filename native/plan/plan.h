// plan/plan.h - the future of a training job, as pure functions of (index, seed, batch, epochs,
// world).
//
// Read this first. A JobSpec fixes the order of all samples for all epochs. Everything else in this
// room follows from it: which rank reads what (rank_string), how often (frequencies), what a node
// keeps in which tier and at which offset (placement.h), who owns a sample among nodes (owners.h),
// and the fewest bytes that must leave the shared file system (bound.h).
// Nothing here touches a file, a clock or another process; every process computes the same plan.
// Thread-safety: values and pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nostall::plan {

using SampleId = uint64_t;

enum class OrderKind : uint8_t {
  torch,  // torch.randperm seeded with seed + epoch: identical to DistributedSampler, bit for bit
  keyed,  // a keyed pseudo-random permutation (Feistel with cycle walking): O(1) memory a look-up
  user,   // the user's own sequence, the same in every epoch
  sequential,  // 0, 1, 2, ...: DistributedSampler(shuffle=False)
};

// How a global batch is divided among the ranks (seed clairvoyant-prefetching, 4.1.3).
enum class Scheme : uint8_t {
  uniform,  // rank r takes positions r, r + world, ... of the batch
  whole,    // every rank takes the whole batch
  // Half of the ranks take four times as much as the other half. The seed gives them
  // 2*ceil(B/world) and ceil(B/world)/2, which is this ratio but adds up to more than the batch:
  // here it is divided.
  imbalanced,
};

// The version of the order algorithms below; part of the fingerprint of a plan.
inline constexpr uint32_t kOrderVersion = 1;

struct JobSpec {
  uint64_t samples = 0;       // F
  uint64_t global_batch = 1;  // B, samples over all ranks
  uint32_t epochs = 1;        // E
  uint32_t world = 1;         // ranks that share a global batch
  // The world that padding and dropping follow: DistributedSampler makes the epoch a multiple of
  // it. Kept from the first run when a job resumes on another number of ranks; 0 means `world`.
  uint32_t order_world = 0;
  uint64_t seed = 0;
  bool drop_last =
      false;  // drop the samples that do not fill the world, then the last partial batch
  OrderKind order = OrderKind::torch;
  Scheme scheme = Scheme::uniform;
  std::vector<SampleId> user_order;  // OrderKind::user only; ids below `samples`, any length
};

// Throws Error(usage) with the offending value if the spec cannot be planned.
void validate(const JobSpec& spec);

// Samples in one epoch after padding or dropping for the world (DistributedSampler's total_size),
// then, with drop_last, cut to whole global batches.
uint64_t epoch_length(const JobSpec& spec);
// Global batches in one epoch.
uint64_t batches_per_epoch(const JobSpec& spec);

// The order of one epoch: epoch_length(spec) sample ids. Global batch h is
// [h * global_batch, min((h + 1) * global_batch, length)) of it. O(F) time and memory.
std::vector<SampleId> epoch_order(const JobSpec& spec, uint32_t epoch);

// The same into memory that is used again, for walks over many epochs; fewer than 2^32 samples.
void epoch_order_into(const JobSpec& spec, uint32_t epoch, std::vector<uint32_t>& order);

// Positions within a global batch of `size` samples that `rank` consumes, in order.
std::vector<uint64_t> batch_positions(const JobSpec& spec, uint32_t rank, uint64_t size);

// One rank's share of an epoch: its samples in order, and where each of its batches ends.
// `batch_ends` has batches_per_epoch entries; a rank's batch may be empty (end equals start).
struct RankEpoch {
  std::vector<SampleId> samples;
  std::vector<uint64_t> batch_ends;
};
RankEpoch rank_epoch(const JobSpec& spec, uint32_t epoch, uint32_t rank);
// The same, of an order that was computed already.
RankEpoch rank_epoch(const JobSpec& spec, const std::vector<SampleId>& order, uint32_t rank);

// 64-bit hash of everything that decides the order; ranks compare it before the first batch.
uint64_t fingerprint(const JobSpec& spec);

}  // namespace nostall::plan
