// plan/chunks.h - what a node keeps while a chunk of sub-batches is in use, and where
// [Pumma 2020, sec. 8.4.1].
//
// Chunks (plan.h, SubBatches) are numbered through the job. A node keeps those samples of a chunk
// that its ranks use more than once in it, in one half of a part of its RAM tier. The next chunk
// has the other half, so that it is read while this one is in use, and the one after that has this
// half again. Which half a chunk has, and where in it each sample lies, follow from the plan: room
// for two chunks serves a data set of any size, with one `reuse`-th of the bytes of an epoch from
// the source.
// Thread-safety: all methods, from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/mutex.h"
#include "plan/plan.h"

namespace nostall::plan {

// One chunk in its half.
struct KeptChunk {
  std::vector<SampleId> samples;  // rising
  std::vector<uint64_t> offsets;  // of each, from the begin of the half
  std::vector<uint32_t> fill;     // places in `samples`, in the order of first use

  // The place of a sample; nothing if it is not kept.
  std::optional<uint64_t> find(SampleId sample) const;
};

// Of a half: its bytes, and the most samples in it.
struct HalfShape {
  uint64_t bytes = 0, places = 0;
};

class Chunks {
 public:
  // Of the ranks [first_rank, first_rank + ranks). `sizes` has one entry per sample, and stays.
  Chunks(const JobSpec& spec, uint32_t first_rank, uint32_t ranks, std::span<const uint64_t> sizes);

  // The chunk that a batch belongs to; never falls from a batch to the next. Batches that are in no
  // chunk (those beyond the last whole one) have the number of the last one before them.
  uint64_t number(uint32_t epoch, uint64_t batch) const noexcept;
  bool in_chunk(uint64_t batch) const noexcept { return batch < whole_; }

  // What to take for halves of a RAM tier of so many bytes; nothing if tiers that keep their
  // samples for the whole job spare the source more. The largest chunk of the rounds that begin
  // with `first_epoch`, as far as two of its size have room.
  HalfShape shape(uint64_t ram_bytes, uint32_t first_epoch) const;

  // What is kept of a chunk in a half of that shape: in the order of first use, as long as there is
  // room, without the samples that are `elsewhere`.
  KeptChunk keep(uint64_t number, const HalfShape& half,
                 const std::function<bool(SampleId)>& elsewhere) const;

 private:
  using Order = std::vector<uint32_t>;
  // The node's samples that occur more than once in a chunk, in the order of first use.
  std::vector<SampleId> used_again(uint64_t number) const;
  std::shared_ptr<const Order> order_of(uint32_t round) const;

  const JobSpec spec_;
  const std::span<const uint64_t> sizes_;
  const uint64_t whole_;             // batches of an epoch that are in chunks
  const uint64_t per_round_;         // chunks
  std::vector<uint64_t> positions_;  // of the node in a whole batch
  mutable Mutex mutex_;
  mutable uint32_t round_ NOSTALL_GUARDED_BY(mutex_) = 0;
  mutable std::shared_ptr<const Order> order_ NOSTALL_GUARDED_BY(mutex_);
};

// Whether a job uses samples again while they are in memory.
bool has_chunks(const JobSpec& spec) noexcept;

}  // namespace nostall::plan
