// stage/loader.h - the staging buffer and the pipeline that fills it in plan order. Read this
// first.
//
//   plan order -> fetch threads -> (raw bytes: RAM tier slot, or a transient buffer)
//              -> transform threads -> (the sample's place in its batch) -> next()
//
// Fetch threads walk the rank's plan ahead of the transform threads and the consumer. A sample that
// a tier of the node holds is taken from there. Any other sample is read from the source once,
// straight into its slot of the RAM tier if it has one, so that the read for the stage also fills
// the tier. Transform threads unpack the record's fields (fields/program.h) into the batch; its
// buffer comes from a pool. Fields whose sizes differ are held until the batch is complete, and put
// together by the thread that completes it, which also mixes the batch (image/mix.h). With other nodes
// (peer/exchange.h) the rank that needs a sample first reads it from the source and pushes it to
// its owner; later readers fetch it from the owner. Where chunks of sub-batches are used again
// (plan/chunks.h), one more thread reads this rank's part of the chunk in use and of the next one into
// their halves of the RAM tier, and a batch that is handed out tells the node's ranks which chunk
// this one is at. The consumer gets batches in the plan's order,
// whatever order they were finished in.
//
// Bounds: at most `staging_bytes` of batches are in flight (never fewer than two batches; ragged
// fields count as those of the largest batch so far), and at most `io_bytes` of transient raw bytes,
// or, of the batch that is waited for, a sample for each thread. Transform threads keep at most as
// much again for the next images, and free what a larger image took as soon as it is done. Batches
// handed out belong to the consumer. Nothing spins; every wait ends on stop. A stage that is full
// costs no CPU time.
// Order: batch h of epoch e is what the plan says, whatever fails. A sample that cannot be read or
// decoded ends the iteration (OnError::raise), or is replaced by another one that follows from
// (seed, sample) alone and so is the same on every rank (OnError::substitute). What this process
// lacks, memory or descriptors, is no fault of a sample and always ends the iteration.
// Thread-safety: next(), seek() and the destructor from one thread at a time.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fields/program.h"
#include "peer/exchange.h"
#include "plan/plan.h"
#include "source/source.h"
#include "stage/buffer.h"
#include "stage/node.h"
#include "stage/origin.h"
#include "tier/node_cache.h"

namespace nostall::stage {

// `report`: raw batches only, for a caller that finds the stand-in itself: the sample's place is
// left empty and its number goes to Batch::failures.
enum class OnError : uint8_t { raise, substitute, report };

using plan::Position;

struct LoaderConfig {
  plan::JobSpec job;
  uint32_t rank = 0;
  std::shared_ptr<const source::Source> source;
  std::shared_ptr<const fields::Program> program;  // null: batches of raw bytes
  std::shared_ptr<tier::NodeCache> cache;          // null: no tiers, until attach()
  std::shared_ptr<peer::Exchange> peers;           // null: no other nodes
  Sharing sharing = Sharing::push;                 // with peers
  // With peers: which of others' samples a node keeps too.
  plan::CopyRule copies = plan::CopyRule::fixed;
  plan::CopyPlaces places;  // of those that come and go, in the cache
  bool locality = false;    // with peers: deal samples to their owners' ranks (plan/locality.h)
  Position begin;           // of the placement: no owner has its samples before it
  // With peers, what is read ahead of need: a thread for each list reads this rank's part of it.
  std::vector<std::vector<plan::SampleId>> ahead;
  uint32_t local_rank = 0, local_world = 1;  // of the node, for `ahead` and `chunks`
  // Chunks of sub-batches that the cache keeps while they are in use, in halves of that shape; null:
  // it does not.
  std::shared_ptr<const plan::Chunks> chunks;
  plan::HalfShape half;
  OnError on_error = OnError::raise;
  uint32_t fetchers = 2;  // threads that read
  uint32_t workers = 2;   // threads that transform; unused for raw batches
  uint32_t depth = 16;    // reads that one fetch thread keeps in flight
  source::ReaderKind reader = source::ReaderKind::automatic;
  // The speeds to assume until they are measured, seconds per byte; 0: not known.
  std::vector<double> expected_tiers;  // of each tier of the node
  double expected_peer = 0.0, expected_source = 0.0;
  uint64_t staging_bytes = uint64_t{256} << 20;
  uint64_t io_bytes = uint64_t{64} << 20;
  std::string proc_directory = "/proc";      // where the limits of memory are read (base/limits.h)
  TakeMemory batch_memory = take_from_heap;  // of batches: a device may want it page-locked
  uint64_t keep_bytes = 0;                   // of batches' memory that is free; 0: staging_bytes
  bool labels_in_slab = false;  // of a program: behind its outputs, as a device needs them
  // Calls what starts threads, and returns when each of them has made its decoders, or after
  // `start_limit`: nothing may change the environment meanwhile (image/decode.h).
  std::function<void(const std::function<void()>&)> while_starting = [](const auto& start) {
    start();
  };
  std::chrono::milliseconds start_limit = std::chrono::seconds(10);
  // The longest wait for another rank of this node that is reading a sample, or uses what is in the
  // half of a chunk that the consumer waits for.
  std::chrono::milliseconds local_patience = std::chrono::seconds(10);
};

// `config` with the cache that the ranks of `node` share and, with a transport, the exchange with
// other nodes; `peers` names addresses, secret and timeout. Throws what attach_node_cache throws, and
// before that what Loader throws.
LoaderConfig attach(LoaderConfig config, const NodeSpec& node, peer::ExchangeConfig peers,
                    std::unique_ptr<peer::Transport> transport);

struct OriginCount {
  uint64_t samples = 0;
  uint64_t bytes = 0;
  int64_t nanoseconds = 0;  // summed over the threads that fetched
};

struct Substitution {
  uint64_t sample = 0;       // the one that could not be used
  uint64_t replacement = 0;  // the one that stands in its place
  std::string reason;
};

// Samples that the plan has this rank find among copies that come and go, and those that it found.
struct CopyCounts {
  std::atomic<uint64_t> planned{0}, found{0};
};

// The most bytes that lived at once, or those that live.
struct Memory {
  uint64_t ram_tier = 0, file_tier = 0;  // of the node
  uint64_t staging = 0;                  // of batch buffers, those of the consumer included
  uint64_t io_buffers = 0;               // of transient raw buffers
  uint64_t decoding = 0;                 // most that the transform threads held at once
};

struct Failure {
  uint64_t place = 0;  // in the batch
  std::string reason;
};

// One local batch. Of a program: `buffer` is the slab, `tail` has the ragged outputs
// (fields/program.h). Raw: sample i lies at offsets[i], lengths[i] long.
struct Batch {
  Position position;
  std::shared_ptr<Buffer> buffer;  // null if there is nothing in it
  uint64_t bytes = 0;              // of `buffer` in use
  std::shared_ptr<Buffer> tail;    // null if no output is ragged
  std::vector<fields::Laid> laid;  // of each ragged output, in `tail`
  image::Mixture mixture;          // of a program that mixes
  std::vector<plan::SampleId> samples;
  std::vector<int64_t> labels;
  std::optional<uint64_t> labels_at;       // where they lie in `buffer` too
  std::vector<uint32_t> occurrences;       // plan::RankEpoch's; empty where no sample comes again
  std::vector<uint64_t> offsets, lengths;  // raw batches only
  std::array<OriginCount, kOrigins> origins{};
  int64_t transform_ns = 0;  // CPU time of the transform threads
  std::vector<Substitution> substitutions;
  std::vector<Failure> failures;  // OnError::report
  uint32_t queue = 0;  // finished batches that waited behind this one when it was handed out
  Memory memory;       // of the loader then
};

// The batch of one sample, from its record; targets of a mix are not set. Throws the Error of a
// sample that cannot be used.
std::unique_ptr<Batch> unpack_one(const source::Source& source, const fields::Program& program,
                                  std::span<const std::byte> record, const image::SampleKey& key,
                                  fields::Scratch& scratch);

class CopyPlan;

class Loader {
 public:
  // Throws Error(usage) if the configuration cannot work. Starts threads at the first next().
  explicit Loader(LoaderConfig config);
  ~Loader();  // stops; waits for reads under way
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // The next batch in order; null if none was ready in `timeout`. Throws the Error of a sample that
  // could not be used (OnError::raise; again at every further call), Error(peer) when a rank of the
  // node died, Error(usage) after the last batch of the job or in a forked child.
  std::unique_ptr<Batch> next(std::chrono::nanoseconds timeout);
  // Whether that batch is there. Never waits: false where a thread is about to change it.
  bool ready() const;

  // Continues at `position`, dropping what was prepared for another one. Throws Error(usage) in a
  // forked child.
  void seek(Position position);
  Position position() const noexcept;
  // For the consumer that decodes batches of raw samples: this one cannot be decoded. Its checksum is
  // not kept, for whoever repairs the sample gives it other bytes.
  void forget_sum(plan::SampleId sample);
  // Ends all threads and releases the tiers; a later next() throws Error(stopped).
  void close();

  uint64_t batches_per_epoch() const noexcept;
  Memory memory() const;
  const CopyCounts& copies() const noexcept { return copies_; }
  const LoaderConfig& config() const noexcept;

 private:
  // Throws Error(usage) in a forked child: the threads of a run do not exist there.
  void refuse_child() const;

  class Run;
  void plan_copies();

  LoaderConfig config_;
  std::shared_ptr<BufferPool> batch_pool_, raw_pool_;
  Speeds speeds_;
  CopyCounts copies_;
  image::HeldBytes decoding_;
  Position position_;
  int owner_pid_;
  bool closed_ = false;
  std::unique_ptr<CopyPlan>
      copy_plan_;  // of copies that come and go; null: there are none, or not yet
  std::unique_ptr<Run> run_;
};

}  // namespace nostall::stage
