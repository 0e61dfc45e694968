// stage/run.h - private to the stage: the threads between two seeks, and what they share.
#pragma once

#include <deque>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <optional>
#include <queue>
#include <set>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "plan/stand_in.h"
#include "stage/copy_plan.h"
#include "stage/loader.h"

namespace nostall::stage {

// Batches that are finished within this time are handed over together.
constexpr int64_t kTogetherNs = 500'000;

// Memory for what is held until its batch is complete: small values share buffers.
class Holding : public fields::Holder {
 public:
  explicit Holding(BufferPool& pool) : pool_(pool) {}
  std::byte* take(size_t bytes) override;
  uint64_t bytes() const;
  void release() noexcept;

 private:
  BufferPool& pool_;
  mutable Mutex mutex_;
  std::vector<std::shared_ptr<Buffer>> buffers_ NOSTALL_GUARDED_BY(mutex_);
  std::byte* free_ NOSTALL_GUARDED_BY(mutex_) = nullptr;  // what is left of the last shared one
  size_t left_ NOSTALL_GUARDED_BY(mutex_) = 0;
  uint64_t bytes_ NOSTALL_GUARDED_BY(mutex_) = 0;  // of all buffers
};

// A batch on its way. Items are written by the one thread that holds them; `left`, `ready` and
// `error` belong to Run's mutex.
struct Task {
  struct Item {
    plan::SampleId sample = 0;
    uint64_t entry = 0;           // of the cache: the sample, or its place in a half
    uint32_t occurrence = 0;      // of the sample in its epoch
    plan::CopyUse copy;           // of a place for copies that come and go
    std::shared_ptr<Buffer> raw;  // transient bytes; null when they lie in the RAM tier
    uint64_t charged = 0;         // bytes of the transient budget that it holds
    int read_error = 0;
    std::string read_why;  // its text
  };
  uint64_t sequence = 0;  // batches since the run began
  uint64_t chunk = 0;     // its number; 0 without chunks
  std::shared_ptr<const plan::KeptChunk>
      kept;  // of it; null without, and beyond the last whole batch
  std::vector<Item> items;
  size_t left = 0;
  bool ready = false;
  std::optional<Error> error;
  std::unique_ptr<Batch> batch;
  std::vector<fields::Ragged> ragged;  // those of the first sample, those of the second, ...
  std::optional<Holding> holding;      // of them
  Mutex counters;  // of batch->origins, transform_ns and substitutions, and candidates
  uint64_t candidates NOSTALL_GUARDED_BY(counters) = 0;  // that were read to stand in
  Mutex memory;                                          // of batch->buffer, while it is taken
};

class Loader::Run {
 public:
  Run(const LoaderConfig& config, std::shared_ptr<BufferPool> batch_pool,
      std::shared_ptr<BufferPool> raw_pool, Speeds& speeds, CopyCounts& copies, CopyPlan* copy_plan,
      image::HeldBytes& decoding, Position start);
  ~Run();

  std::unique_ptr<Batch> next(std::chrono::nanoseconds timeout);
  bool ready() const;
  // Whether next() throws what a thread or the next batch failed with.
  bool failed() const;
  // Forgets the checksum of a sample that has its first bytes and cannot be decoded, now and when this
  // run ends: whoever repairs it gives it other bytes.
  void forget(plan::SampleId sample);

 private:
  struct Work {
    Task* task = nullptr;
    size_t index = 0;
  };
  // One fetch thread's view of one sample of its chunk.
  struct Fetch {
    Work work;
    std::span<std::byte> into;
    tier::Claim claim{};          // this rank fills its place in a tier
    bool in_ram_tier = false;     // that place is `into`
    bool patient = true;          // may wait for a push of another node
    bool patient_locally = true;  // and for a read of another rank of this node
    int64_t waited_since = 0;     // for a half, while the consumer waits for the batch; 0: not yet
    bool looked_for_copy = false;
    bool shunned = false;  // its owner failed to deliver: not asked again
  };
  // What a fetch thread has of its own; `scratch` is for samples that it unpacks itself.
  struct Fetcher {
    source::Reader& reader;
    tier::RecordReader& records;  // of file tiers
    fields::Scratch& scratch;
    std::vector<source::ReadRequest> requests{};
    // Of samples that are unpacked where they are read: their bytes, how many groups of them there
    // were, and the processor's time for a byte of one that was measured.
    std::shared_ptr<Buffer> bytes{};
    unsigned groups = 0;
    double ns_per_byte = 0.0;
    size_t made_together = 0;  // of samples that take their time one by one: in one read
  };
  // The same of the consumer's thread.
  struct Helper {
    explicit Helper(Run& run);
    fields::Scratch scratch;
    std::unique_ptr<source::Reader> reader;
    tier::RecordReader records;
    Fetcher fetcher;
    std::vector<Fetch> chunk{};
  };
  enum class Route : uint8_t { done, file, copy, source, peer, wait };
  // Bytes to write to a file tier or push to another node after their own batch has them.
  struct Kept {
    plan::SampleId sample = 0;
    tier::Claim claim;  // of a file tier, if it is to be written there
    bool push = false;
    std::shared_ptr<void> keep;
    std::span<const std::byte> bytes;
  };

  // A sample that is read for a tier alone.
  struct Beside {
    tier::Claim claim;
    std::shared_ptr<Buffer> buffer;  // of a file tier's; null: its slot of the RAM tier
    std::span<std::byte> into;
  };

  // Runs the body of a thread; an exception ends the run, and next() throws it.
  void guarded(const std::function<void()>& work) noexcept;
  void end_threads() noexcept;
  void start_threads();
  // The first call of each thread that decodes.
  fields::Scratch make_scratch();
  void wait_until_started();
  void fetch_loop(std::stop_token stop);
  void transform_loop(std::stop_token stop);
  void own_loop(std::span<const plan::SampleId> samples, std::stop_token stop);

  // Of one of the threads that read ahead of need: what it has claimed and not read yet.
  struct Filling {
    std::unique_ptr<source::Reader> reader;
    std::vector<source::ReadRequest> requests{};
    std::vector<tier::Claim> claims{};               // one for each request
    std::vector<std::shared_ptr<Buffer>> buffers{};  // of samples of file tiers
  };
  // Claims an entry for its sample if it is empty; reads when enough are claimed.
  void claim_ahead(plan::SampleId sample, uint64_t entry, Filling& filling);
  void read_ahead(Filling& filling);
  // Reads this rank's part of each chunk as soon as its half is free.
  void chunk_loop(std::stop_token stop);
  void fill_chunk(uint64_t chunk, const plan::KeptChunk& kept, Filling& filling,
                  std::stop_token stop);
  using KeptChunk = std::shared_future<std::shared_ptr<const plan::KeptChunk>>;
  KeptChunk kept_chunk(uint64_t chunk) NOSTALL_REQUIRES(mutex_);
  // That of a batch; for the one after the job's last, that of no batch.
  uint64_t chunk_of(Position position) const;
  // What the consumer's next batch makes this rank use.
  void use_chunk_of(Position next) NOSTALL_REQUIRES(mutex_);
  // Whether to go on waiting for other ranks that use what is in the half of this sample's chunk.
  bool worth_waiting_for_half(Fetch& fetch);

  // Replaces `chunk` by the next samples in plan order; by none when stopped.
  void take_chunk(std::vector<Fetch>& chunk, std::stop_token stop);
  // The same without waiting: by none if there is no room for more. `one`: of one batch.
  void take_now(std::vector<Fetch>& chunk, bool one) NOSTALL_REQUIRES(mutex_);
  // The consumer fetches as the fetch threads do instead of waiting for them, where that is quickly
  // done: it takes a part of a batch. False if there is none to take.
  // `lock` holds the mutex, but while it fetches.
  bool help(MutexLock& lock) NOSTALL_REQUIRES(mutex_) NOSTALL_UNCHECKED;
  // Brings what is looked up for samples nearer: orders are random, and each look-up is a miss.
  void prefetch(std::span<const plan::SampleId> samples) const noexcept;
  void set_most_staged() NOSTALL_REQUIRES(mutex_);
  // Whether samples come from memory, and are unpacked where they were read.
  bool is_quick() const;
  // How many batches may be staged now.
  uint64_t staged_now() const NOSTALL_REQUIRES(mutex_);
  // Whether to wake the consumer for batches that are ready; `all`: no more will be for a while.
  bool worth_handing_over(bool all) const NOSTALL_REQUIRES(mutex_);
  bool may_take(const Task& task, uint64_t transient) const NOSTALL_REQUIRES(mutex_);
  bool chunk_full(size_t samples, uint64_t bytes) const NOSTALL_REQUIRES(mutex_);
  // Whether fetching may go on after a wait: for more than one batch, where that is quickly done.
  bool worth_waking(const Task* task) const NOSTALL_REQUIRES(mutex_);
  Task* open_task() NOSTALL_REQUIRES(mutex_);
  // Batches of an epoch that are planned together; `number` counts them in the epoch.
  struct Part {
    uint32_t epoch = 0;
    uint64_t number = 0;
    auto operator<=>(const Part&) const = default;
  };
  using Planned = std::shared_ptr<const plan::RankEpoch>;
  Part part_of(Position position) const noexcept {
    return {position.epoch, position.batch / part_batches_};
  }
  // The part with the batch under the cursor.
  Planned planned() NOSTALL_REQUIRES(mutex_);
  // Begins to plan a part and the next one.
  void plan_ahead(Part part) NOSTALL_REQUIRES(mutex_);
  plan::RankEpoch plan_of(Part part) const;
  // How an epoch is dealt by what nodes keep (plan/locality.h), which takes its whole order.
  bool dealt_by_owners(uint32_t epoch) const {
    return config_.peers && config_.locality && epoch > config_.begin.epoch;
  }

  void fetch(std::vector<Fetch>& chunk, Fetcher& fetcher, std::stop_token stop);
  void fetch_light(std::span<const Fetch> chunk, Fetcher& fetcher, std::stop_token stop);
  // Reads and unpacks samples of a chunk; they are not settled yet.
  void read_light(std::span<const Fetch> group, Fetcher& fetcher);
  // Reads from the source and compares; what it took in nanoseconds.
  int64_t ask_source(std::span<source::ReadRequest> requests, uint64_t bytes,
                     source::Reader& reader);
  Route route(Fetch& fetch);
  // Where to take a sample from that a file tier of this node or another node has.
  Origin origin_of(plan::SampleId sample, bool in_file_tier, bool there);
  // Of the node that has the sample, or is to push it here; null if there is none.
  SpeedEstimate* speed_of_peer(plan::SampleId sample) const;
  bool worth_waiting(const Fetch& fetch, std::chrono::nanoseconds waited);
  bool from_memory(Fetch& fetch);
  // Takes samples from where copies come and go. Returns those that are not there.
  std::vector<Fetch*> read_copies(std::span<Fetch* const> fetches, Fetcher& fetcher);
  void keep_for_next_use(const Fetch& fetch);
  std::vector<Fetch*> read_files(std::span<Fetch* const> fetches, Fetcher& fetcher);
  void wait_for_others(const Fetch& fetch, std::stop_token stop);
  // False if there is no memory for the sample: it has its error then.
  bool prepare(Fetch& fetch);
  void prepare_all(std::vector<Fetch*>& fetches);
  void settle_claim(Fetch& fetch, int error, std::string why);
  void read_in_parts(std::span<Fetch* const> fetches, Fetcher& fetcher, std::stop_token stop);
  void read_source(std::span<Fetch* const> fetches, Fetcher& fetcher, std::stop_token stop);
  // Claims samples next to those to read that the tiers have room for: reading on is cheaper than
  // reading them later (Source::around).
  std::vector<Beside> claim_beside(std::span<Fetch* const> fetches);
  void keep_beside(std::vector<Beside> beside, std::span<const source::ReadRequest> requests);
  std::shared_ptr<peer::FetchGroup> ask_peers(std::span<Fetch* const> fetches);
  std::vector<Fetch*> take_from_peers(std::span<Fetch* const> fetches,
                                      const peer::FetchGroup& group, Fetcher& fetcher);
  void keep_copy(Fetch& fetch, std::vector<Kept>& kept);
  void pass_on(Kept& kept, std::stop_token stop);
  void write_to_tier(Kept& kept);
  std::span<std::byte> raw_destination(Fetch& fetch);

  void take_memory(Task& task);
  void transform(Work work, fields::Scratch& scratch, source::Reader& reader);
  // Several, one after the other; accounts for them.
  void transform(std::span<const Work> works, fields::Scratch& scratch, source::Reader& reader);
  // From the record of `sample` to its place in the batch.
  Result<std::monostate> unpack(Work work, plan::SampleId sample, std::span<const std::byte> record,
                                fields::Scratch& scratch);
  // The same of the item's own sample; what fails is handled.
  void unpack_or_replace(Work work, std::span<const std::byte> record, fields::Scratch& scratch,
                         source::Reader& reader);
  // Whether a batch needs more than its samples.
  bool completes() const {
    return config_.labels_in_slab || config_.program->ragged() > 0 || config_.program->mixes();
  }
  // Puts the ragged values of a task together, of which every sample is done, and mixes it.
  void complete(Task& task);
  void lay(Task& task);
  // Memory for the tail of a batch. Null where the zeros that it is padded with take what the limits of
  // memory do not leave: the batch has its error then. It is not for a stand-in to change a batch by
  // the memory that there is.
  std::shared_ptr<Buffer> take_tail(Task& task, uint64_t bytes);
  void mix(Task& task);
  // Accounts for samples that are transformed; completes their batch if they were the last ones.
  void settle(Task& task, size_t samples);
  // The same of samples of several batches, in their order.
  void settle(std::span<const Fetch> fetches);
  // With a `fetcher`: called by that thread, which may unpack them itself.
  void finish(std::span<const Work> works, Fetcher* fetcher);
  // Compares what was read with the samples' checksums, or learns them. Other bytes are read once
  // more: the request has its error if they are other bytes again.
  void compare(std::span<source::ReadRequest> requests, source::Reader& reader);
  // The bytes of an item in the RAM tier if they still have their checksum, else read anew. An
  // empty span, and the item's error, if they cannot be read.
  std::span<const std::byte> checked_view(Task::Item& item, source::Reader& reader,
                                          tier::RamView& view);
  // A sample whose bytes could not be read, for `error`: a bad one unless this process lacks
  // something.
  void handle_unread(Work work, int error, const std::string& why, fields::Scratch* scratch,
                     source::Reader& reader);
  // Puts another sample in the place of a bad one, or records the error of the batch.
  void handle_bad(Work work, const std::string& reason, fields::Scratch* scratch,
                  source::Reader& reader);
  // Of the job; made for the first bad sample.
  const plan::StandIns& stand_ins();
  // Records the error of the batch: it is not the sample that is bad.
  void fail(Task& task, plan::SampleId sample, const Error& error);
  // Gives an errno, and says more in `reason`.
  int read_whole(plan::SampleId sample, std::span<std::byte> into, source::Reader& reader,
                 std::string& reason);
  // Of raw batches.
  std::span<std::byte> place_of(Work work) const;
  // What the draws for `sample`, in that place, depend on.
  image::SampleKey key_of(Work work, plan::SampleId sample) const;
  void count(Task& task, Origin origin, uint64_t bytes, int64_t nanoseconds, uint64_t samples = 1);
  static void add_to(Task& task, Origin origin, uint64_t bytes, int64_t nanoseconds,
                     uint64_t samples) NOSTALL_REQUIRES(task.counters);

  bool transformed() const { return config_.program != nullptr; }
  uint32_t fetchers() const { return std::max(1u, config_.fetchers); }
  uint32_t workers() const { return transformed() ? std::max(1u, config_.workers) : 0; }
  uint64_t transient_bytes(const Task::Item& item) const;

  const LoaderConfig& config_;
  const std::shared_ptr<BufferPool> batch_pool_, raw_pool_;
  Speeds& speeds_;
  CopyCounts& copies_;
  CopyPlan* const copy_plan_;  // null where no copies come and go; used under the mutex
  image::HeldBytes& decoding_;
  std::atomic<double> best_source_{0.0};   // seconds per byte, the least so far
  std::atomic<uint64_t> own_bytes_{0};     // read for the tiers alone, not yet in any batch's count
  SampleSums& sums_;                       // the node's, or this process's where there are no tiers
  std::atomic<bool> ring_refused_{false};  // to a reader of file tiers
  std::atomic<bool> warned_of_reading_{false}, warned_of_peers_{false};
  const std::span<const uint64_t> sizes_;
  const bool light_;            // unpacking a sample costs less than handing it to another thread
  const bool direct_;           // and all come from the source: unpacked where they were read
  const bool helps_;            // and the consumer may do so too
  const bool stay_near_;        // other ranks of the node follow the same plan of copies
  const uint32_t first_epoch_;  // of this run
  const uint64_t part_batches_;
  const Position last_;      // of the job's batches
  uint64_t slab_bytes_ = 0;  // of a whole batch, about
  uint64_t overhead_ = 0;    // bytes of a batch beside its contents
  double cached_ = 0.0;      // seconds per byte of samples that are read from memory, at most

  mutable Mutex mutex_;
  // Batches with a buffer, not yet handed out.
  uint64_t max_staged_ NOSTALL_GUARDED_BY(mutex_) = 2;
  uint64_t staged_ NOSTALL_GUARDED_BY(mutex_) = 2;       // of them now: staged_now()
  int64_t waits_since_ NOSTALL_GUARDED_BY(mutex_) = 0;   // the consumer; 0: it does not
  uint64_t most_ragged_ NOSTALL_GUARDED_BY(mutex_) = 0;  // bytes of the largest batch so far
  StopCondition fetchable_, transformable_, started_;
  uint32_t starting_ NOSTALL_GUARDED_BY(mutex_) = 0;  // threads that have no decoders yet
  Condition ready_;
  std::map<Part, std::shared_future<Planned>> parts_ NOSTALL_GUARDED_BY(mutex_);
  std::set<plan::SampleId> undecodable_ NOSTALL_GUARDED_BY(mutex_);
  // Front: the next one to hand out.
  std::deque<std::unique_ptr<Task>> tasks_ NOSTALL_GUARDED_BY(mutex_);
  std::optional<Helper> helper_;  // once it was needed; consumer only
  int64_t asked_ = 0;  // since when the consumer waits, while recording, else 0; consumer only
  uint64_t handed_out_ NOSTALL_GUARDED_BY(mutex_) = 0;  // batches, since the run began
  uint64_t opened_ NOSTALL_GUARDED_BY(mutex_) = 0;
  Position cursor_ NOSTALL_GUARDED_BY(mutex_);  // of the batch that fetching has reached
  Task* fetching_ NOSTALL_GUARDED_BY(mutex_) = nullptr;
  size_t fetch_index_ NOSTALL_GUARDED_BY(mutex_) = 0;
  uint64_t transient_ NOSTALL_GUARDED_BY(mutex_) = 0;  // bytes of raw buffers taken
  uint64_t charged_ NOSTALL_GUARDED_BY(mutex_) = 0;    // samples that have them
  bool exhausted_ NOSTALL_GUARDED_BY(mutex_) = false;
  uint64_t chunk_ NOSTALL_GUARDED_BY(mutex_) = 0;  // of the next batch to hand out
  StopCondition next_chunk_;
  std::map<uint64_t, std::shared_future<std::shared_ptr<const plan::KeptChunk>>> chunks_
      NOSTALL_GUARDED_BY(mutex_);
  // One padded batch at a time takes memory that the limits have to leave.
  Mutex padding_;
  std::once_flag stand_ins_made_;
  std::optional<plan::StandIns> stand_ins_;
  std::atomic<bool> lapsed_{false};  // other ranks were waited for long enough, until they move
  // Made beforehand: a copy needs no memory.
  const Error no_memory_{ErrorKind::io,
                         "there is no memory for a batch: make batches, staging or tiers smaller",
                         ENOMEM};
  std::optional<Error> broken_ NOSTALL_GUARDED_BY(mutex_);  // why a thread ended early
  int64_t last_peer_check_ NOSTALL_GUARDED_BY(mutex_) = 0;

  using Ranked = std::pair<std::pair<uint64_t, size_t>, Task*>;  // (sequence, index)
  std::priority_queue<Ranked, std::vector<Ranked>, std::greater<>> fetched_
      NOSTALL_GUARDED_BY(mutex_);

  std::stop_source stop_;
  std::vector<std::jthread> threads_;
};

}  // namespace nostall::stage
