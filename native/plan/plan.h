// plan/plan.h - the future of a training job, as pure functions of (index, seed, batch, epochs,
// world).
//
// Read this first. A JobSpec fixes the order of all samples for all epochs. Everything else in this
// room follows from it: which rank reads what (rank_epoch), how often a node reads a sample and
// what it keeps in which tier and at which offset (placement.h), what it keeps of sub-batches while
// they are in use (chunks.h), which node owns a sample (owners.h), what a node copies for a while
// (copies_by_use.h), and the fewest bytes that must leave the shared file system (bound.h).
// Nothing here touches a file, a clock or another process;
// every process computes the same plan. Thread-safety: values and pure functions.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <vector>

namespace nostall::plan {

class Mixture;

using SampleId = uint64_t;

enum class OrderKind : uint8_t {
  torch,  // torch.randperm seeded with seed + epoch: identical to DistributedSampler, bit for bit
  keyed,  // a keyed pseudo-random permutation (Feistel with cycle walking): look-ups in O(1) memory
  user,   // the user's own sequence, the same in every epoch
  sequential,  // 0, 1, 2, ...: DistributedSampler(shuffle=False)
  // Data reuse by sub-batch shuffling [Pumma 2020, sec. 8.4.1]: samples are used several
  // times while they are in memory, in other batches each time. See SubBatches.
  sub_batch,
  weighted,  // drawn anew for every epoch by the samples' weights: sampling.h
  // Repeated augmentation [Hoffer 2020], as in the RASampler of DeiT and timm: each sample of the
  // order "torch" `times` times running, of which the epoch takes no more than the data set has.
  repeated,
  mixture,   // samples of several sources by weights: mixture.h
  bucketed,  // batches of samples of like length: buckets.h
};

// OrderKind::sub_batch. `reuse` epochs make a round. A round has one order "torch" of its own, with
// the random seed `seed` + round. Each `resident` global batches of that order form a chunk, which
// is passed over `reuse` times before the next chunk begins: first as it is, then in batches
// recombined from its sub-batches. A sub-batch is the part of a batch that one rank takes; it stays
// among the `together` ranks that hold it: with 1 nothing moves between processes, with the ranks
// of a node nothing moves between nodes. A round's batches are cut into epochs of equal length, and
// every sample comes as often in a round as in as many epochs of "torch". Samples beyond the last
// whole batch end every epoch. With reuse 1 it is "torch".
struct SubBatches {
  uint32_t reuse = 1;
  uint64_t resident = 1;
  uint32_t together = 1;
};

// How a global batch is divided among the ranks [Böhringer 2020, sec. 4.1.3].
enum class Scheme : uint8_t {
  uniform,  // rank r takes positions r, r + world, ... of the batch
  whole,    // every rank takes the whole batch
  // Half of the ranks take four times as much as the other half. [Böhringer 2020] gives them
  // 2*ceil(B/world) and ceil(B/world)/2, which has this ratio but adds up to more than the batch;
  // here the batch is divided.
  imbalanced,
};

// The version of the order algorithms below; part of the fingerprint of a plan.
inline constexpr uint32_t kOrderVersion = 3;

struct JobSpec {
  uint64_t samples = 0;       // F
  uint64_t global_batch = 1;  // B, samples over all ranks
  uint32_t epochs = 1;        // E
  uint32_t world = 1;         // ranks that share a global batch
  // The world that padding and dropping follow: DistributedSampler makes the epoch a multiple of
  // it. Kept from the first run when a job resumes on another number of ranks; 0 means `world`.
  uint32_t order_world = 0;
  uint64_t seed = 0;
  // Drop the samples that do not fill the world, then the last partial batch.
  bool drop_last = false;
  OrderKind order = OrderKind::torch;
  Scheme scheme = Scheme::uniform;
  // OrderKind::user only: ids below `samples`, any length.
  std::shared_ptr<const std::vector<SampleId>> user_order;
  SubBatches sub_batches;  // OrderKind::sub_batch only
  // OrderKind::weighted only: one weight per sample, draws in an epoch, and whether a sample may be
  // drawn again in it.
  std::shared_ptr<const std::vector<double>> weights;
  // Also the places of an epoch of a mixture without an end, which are rounded up to whole batches.
  uint64_t draws = 0;
  bool replacement = true;
  uint32_t times = 1;                                    // OrderKind::repeated only
  std::shared_ptr<const Mixture> mixture;                // OrderKind::mixture only
  std::shared_ptr<const std::vector<uint32_t>> buckets;  // OrderKind::bucketed only: one a sample
  // Global batches of the job, if it ends within its last epoch; 0: with it.
  uint64_t steps = 0;
};

// The next global batch of a job.
struct Position {
  uint32_t epoch = 0;
  uint64_t batch = 0;  // in the epoch
  friend bool operator==(const Position&, const Position&) = default;
};

// Throws Error(usage) with the offending value if the spec cannot be planned.
void validate(const JobSpec& spec);

// Samples in one epoch after padding or dropping for the world (DistributedSampler's total_size),
// then, with drop_last, cut to whole global batches.
uint64_t epoch_length(const JobSpec& spec);
// Global batches in one epoch.
uint64_t batches_per_epoch(const JobSpec& spec);
// The same of an epoch in which `steps` may end.
uint64_t batches_in(const JobSpec& spec, uint32_t epoch);
// Its samples.
uint64_t length_of(const JobSpec& spec, uint32_t epoch);
// Samples of a whole global batch, or of the only one of an epoch that is shorter.
uint64_t largest_batch(const JobSpec& spec);
// Whether an epoch may have a sample several times, or not at all.
bool repeats_or_leaves_out(const JobSpec& spec);

// The order of one epoch: length_of(spec, epoch) sample ids. Global batch h is
// [h * global_batch, min((h + 1) * global_batch, length)) of it. O(F) time and memory.
std::vector<SampleId> epoch_order(const JobSpec& spec, uint32_t epoch);

// Which pass over its chunk a global batch of OrderKind::sub_batch is, and its place in it; pass 0
// is fresh from the source. `size`: batches of the chunk. Others, and what is beyond the last whole
// batch, are pass 0 of a chunk of one.
struct Pass {
  uint64_t chunk = 0, pass = 0, place = 0, size = 1;
};
Pass pass_of(const JobSpec& spec, uint32_t epoch, uint64_t batch);
// The batch of that pass and place of a chunk, from its round's own order `fresh`: global_batch ids.
void deal_into(const JobSpec& spec, uint32_t round, const Pass& at, std::span<const uint32_t> fresh,
               std::span<uint32_t> batch);

// The same into memory that is used again, for walks over many epochs; fewer than 2^32 samples. After a
// stop a shuffle ends at once, and the order means nothing.
void epoch_order_into(const JobSpec& spec, uint32_t epoch, std::vector<uint32_t>& order,
                      const std::stop_token& stop = {});

// Positions within a global batch of `size` samples that `rank` consumes, in order.
std::vector<uint64_t> batch_positions(const JobSpec& spec, uint32_t rank, uint64_t size);
// How many these are, in O(1).
uint64_t batch_share(const JobSpec& spec, uint32_t rank, uint64_t size);

// One rank's share of an epoch: its samples in order, and where each of its batches ends.
// `batch_ends` has batches_in entries; a rank's batch may be empty (end equals start).
// `occurrences` counts, for each of its samples, how often the epoch had it before, on any rank;
// empty where no sample comes again.
struct RankEpoch {
  std::vector<SampleId> samples;
  std::vector<uint64_t> batch_ends;
  std::vector<uint32_t> occurrences;
};
RankEpoch rank_epoch(const JobSpec& spec, uint32_t epoch, uint32_t rank);
// The same, of an order that was computed already.
RankEpoch rank_epoch(const JobSpec& spec, const std::vector<SampleId>& order, uint32_t rank);
// The same of the global batches from `first` to before `end` alone, which are in the epoch;
// `occurrences` is empty where these name no sample that the epoch had before. Where the order is
// found place by place it costs no more than these batches do (of a mixture: all their places);
// other orders are computed as a whole.
RankEpoch rank_batches(const JobSpec& spec, uint32_t epoch, uint32_t rank, uint64_t first,
                       uint64_t end);
bool found_by_place(const JobSpec& spec);

// Of each position of an epoch's order, how often its sample came before. Empty where none repeats,
// and for orders that name no sample twice of themselves: what pads an epoch there draws as it did
// the first time.
std::vector<uint32_t> occurrences(const JobSpec& spec, std::span<const SampleId> order);

// 64-bit hash of everything that decides the order; ranks compare it before the first batch.
uint64_t fingerprint(const JobSpec& spec);

}  // namespace nostall::plan
