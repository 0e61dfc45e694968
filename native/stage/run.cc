// The consumer's side of the stage, and the plan it walks.
#include "stage/run.h"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <new>

#include "base/clock.h"
#include "base/cold_reads.h"
#include "base/heap.h"
#include "base/refusal.h"
#include "plan/locality.h"
#include "source/stopping.h"
#include "stage/events.h"

namespace nostall::stage {
namespace {

// How many samples that cost no memory fetching, and how many batches, may be ahead of the consumer:
// enough to keep slow storage busy during a burst of compute, few enough that a seek stays cheap.
constexpr uint64_t kMaxAhead = 16384;
constexpr int64_t kPeerCheckNs = 500'000'000;
constexpr uint64_t kLabelAlignment = alignof(int64_t);
constexpr size_t kMaxChunk = 4096;  // samples that one fetch thread holds at once
// A fetch thread takes no further sample once it has so many bytes: enough to keep a storage busy.
constexpr uint64_t kLargeRead = uint64_t{8} << 20;
// What a fetch thread takes at once of samples that are quickly unpacked: what the source reads in
// this time, so that neither locks nor wake-ups count.
constexpr double kLightSeconds = 40e-6;
// Batches of samples that come from memory are staged within this, for they are made anew as fast:
// what is staged stays in the processors' caches.
constexpr uint64_t kCacheBytes = uint64_t{4} << 20;
// Ranks of a node with copies that come and go stage no more than this part of an epoch: how far they can
// be apart, which costs copies.
constexpr uint64_t kPartsOfEpoch = 8;
constexpr uint64_t kWakeBatches = 16;  // of room, or half of all that may be staged
// Samples of all ranks that are planned together where the order is found place by place: a job that
// goes on waits for no more.
constexpr uint64_t kPlannedSamples = 16384;

// Global batches that are planned together.
uint64_t batches_of_part(const LoaderConfig& config) {
  const bool by_place = plan::found_by_place(config.job) && !(config.peers && config.locality);
  return std::max<uint64_t>(1, by_place ? kPlannedSamples / config.job.global_batch
                                        : plan::batches_per_epoch(config.job));
}

// What a staged batch takes beside its contents: most of it, where samples are a few bytes.
uint64_t overhead(uint64_t samples) {
  constexpr uint64_t kSample = sizeof(Task::Item) + sizeof(plan::SampleId) + sizeof(int64_t) +
                               2 * sizeof(uint64_t);  // of items, samples, labels, offsets, lengths
  return sizeof(Task) + sizeof(Batch) + sizeof(Buffer) + samples * kSample;
}

// Memory that others give may be taken by what calls this loader, which the consumer must not wait for.
bool is_plain(const TakeMemory& memory) {
  const auto* function = memory.target<decltype(&take_from_heap)>();
  return function && *function == &take_from_heap;
}

}  // namespace

Loader::Run::Run(const LoaderConfig& config, std::shared_ptr<BufferPool> batch_pool,
                 std::shared_ptr<BufferPool> raw_pool, Speeds& speeds, CopyCounts& copies,
                 CopyPlan* copy_plan, image::HeldBytes& decoding, Position start)
    : config_(config),
      batch_pool_(std::move(batch_pool)),
      raw_pool_(std::move(raw_pool)),
      speeds_(speeds),
      copies_(copies),
      copy_plan_(copy_plan),
      decoding_(decoding),
      sums_(config.cache ? config.cache->sums() : config.source->sums()),
      sizes_(config.source->sizes()),
      light_(config.program && config.program->light()),
      direct_(light_ && !config.cache && !config.peers),
      helps_(direct_ && config.source->is_local() && is_plain(config.batch_memory)),
      stay_near_(copy_plan != nullptr && config.local_world > 1),
      first_epoch_(start.epoch),
      part_batches_(batches_of_part(config)),
      last_{config.job.epochs - 1,
            std::max<uint64_t>(1, plan::batches_in(config.job, config.job.epochs - 1)) - 1},
      cursor_(start) {
  const uint64_t local = std::max<uint64_t>(
      1, plan::batch_share(config.job, config.rank, plan::largest_batch(config.job)));
  const uint64_t mean_size =
      sizes_.empty() ? 1 : std::max<uint64_t>(1, config.source->total_bytes() / sizes_.size());
  slab_bytes_ = transformed() ? config.program->slab_bytes(local) : local * mean_size;
  if (transformed() && config.labels_in_slab) slab_bytes_ += local * sizeof(int64_t);
  overhead_ = overhead(local);
  cached_ = ColdReads::cached_seconds(mean_size) / static_cast<double>(mean_size);
  {
    const MutexLock lock(mutex_);
    starting_ = fetchers() + workers();
    // Until a batch has shown it: values as large as their records.
    if (transformed() && config.program->ragged() > 0) most_ragged_ = local * mean_size;
    set_most_staged();
  }
  exhausted_ = cursor_.epoch >= config.job.epochs;
  if (copy_plan_ != nullptr && !exhausted_) copy_plan_->prepare(first_epoch_);
  if (!exhausted_) plan_ahead(part_of(cursor_));
  {
    const MutexLock lock(mutex_);
    use_chunk_of(cursor_);
  }
  try {
    config_.while_starting([this] { start_threads(); });
  } catch (...) {
    // The system gives no more threads: those that run must end before they can be joined.
    end_threads();
    throw;
  }
}

void Loader::Run::start_threads() {
  for (uint32_t i = 0; i < fetchers(); ++i) {
    threads_.emplace_back([this] {
      pthread_setname_np(pthread_self(), "nostall-fetch");
      const source::StopsReads stops(stop_.get_token());
      guarded([this] { fetch_loop(stop_.get_token()); });
    });
  }
  for (const std::vector<plan::SampleId>& samples : config_.ahead) {
    if (samples.empty()) continue;
    threads_.emplace_back([this, &samples] {
      pthread_setname_np(pthread_self(), "nostall-own");
      const source::StopsReads stops(stop_.get_token());
      guarded([this, &samples] { own_loop(samples, stop_.get_token()); });
    });
  }
  if (config_.chunks) {
    threads_.emplace_back([this] {
      pthread_setname_np(pthread_self(), "nostall-chunk");
      const source::StopsReads stops(stop_.get_token());
      guarded([this] { chunk_loop(stop_.get_token()); });
    });
  }
  for (uint32_t i = 0; i < workers(); ++i) {
    threads_.emplace_back([this] {
      pthread_setname_np(pthread_self(), "nostall-image");
      guarded([this] { transform_loop(stop_.get_token()); });
    });
  }
  wait_until_started();
}

fields::Scratch Loader::Run::make_scratch() {
  struct Arrival {
    Run& run;
    ~Arrival() {
      {
        const MutexLock lock(run.mutex_);
        --run.starting_;
      }
      run.started_.notify_all();
    }
  } const arrival{*this};
  return fields::Scratch(&decoding_, config_.source->fields());
}

// A thread that is late makes its decoders without the caller's protection, which costs less than to
// hold up the program for as long as the thread gets no processor.
void Loader::Run::wait_until_started() {
  MutexLock lock(mutex_);
  started_.wait_for(lock, stop_.get_token(), config_.start_limit,
                    [this]() NOSTALL_REQUIRES(mutex_) { return starting_ == 0; });
}

Loader::Run::~Run() {
  end_threads();
  // A sample may have been read, and its checksum learned, again since it was forgotten.
  const MutexLock lock(mutex_);
  for (const plan::SampleId sample : undecodable_) {
    sums_.forget(sample);
    config_.source->sums().forget(sample);
  }
}

void Loader::Run::set_most_staged() {
  // A batch has its ragged values where they are held or together, but for the one that is completed.
  const uint64_t bytes = slab_bytes_ + most_ragged_ + overhead_;
  const uint64_t room = config_.staging_bytes - std::min(config_.staging_bytes, most_ragged_);
  max_staged_ = std::min(room / bytes, kMaxAhead);
  if (copy_plan_ != nullptr) {
    const uint64_t epoch = plan::batches_per_epoch(config_.job);
    max_staged_ = std::min(
        max_staged_, stay_near_ ? epoch / kPartsOfEpoch : epoch - std::min<uint64_t>(epoch, 2));
  }
  max_staged_ = std::max<uint64_t>(2, max_staged_);
  staged_ = staged_now();
}

bool Loader::Run::is_quick() const {
  const double byte = speeds_.source.seconds_per_byte();
  return direct_ && byte > 0.0 && byte <= cached_;
}

uint64_t Loader::Run::staged_now() const {
  if (!is_quick()) return max_staged_;
  return std::min(max_staged_,
                  std::max<uint64_t>(2, kCacheBytes / std::max<uint64_t>(1, slab_bytes_)));
}

bool Loader::Run::worth_handing_over(bool all) const {
  if (waits_since_ == 0 || tasks_.empty() || !tasks_.front()->ready) return false;
  // Where reads take long the next one may be as long again.
  if (all || !is_quick() || now_ns() - waits_since_ > kTogetherNs) return true;
  uint64_t ready = 0;
  for (const auto& task : tasks_) {
    if (!task->ready) break;
    if (2 * ++ready >= staged_) return true;
  }
  return false;
}

void Loader::Run::end_threads() noexcept {
  stop_.request_stop();
  fetchable_.notify_all();
  transformable_.notify_all();
  next_chunk_.notify_all();
  threads_.clear();
}

void Loader::Run::guarded(const std::function<void()>& work) noexcept {
  std::optional<Error> error;
  try {
    work();
    return;
  } catch (const Error& e) {
    error.emplace(e);
  } catch (const std::bad_alloc&) {
    error.emplace(no_memory_);
  } catch (const std::system_error& e) {
    try {
      error.emplace(io_error(e));
    } catch (const std::bad_alloc&) {
      error.emplace(no_memory_);
    }
  } catch (const std::exception& e) {
    try {
      error.emplace(ErrorKind::bug, std::string("a thread of the loader failed: ") + e.what());
    } catch (const std::bad_alloc&) {
      error.emplace(no_memory_);
    }
  }
  {
    const MutexLock lock(mutex_);
    if (!broken_) broken_ = std::move(error);
  }
  stop_.request_stop();
  ready_.notify_all();
}

// ---------------------------------------------------------------------------- the consumer's side

bool Loader::Run::ready() const {
  if (!mutex_.try_lock()) return false;
  const bool there = !tasks_.empty() && tasks_.front()->ready;
  mutex_.unlock();
  return there;
}

bool Loader::Run::failed() const {
  const MutexLock lock(mutex_);
  return broken_ || (!tasks_.empty() && tasks_.front()->error);
}

std::unique_ptr<Batch> Loader::Run::next(std::chrono::nanoseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  if (asked_ == 0 && trace::on()) asked_ = now_ns();
  MutexLock lock(mutex_, Briefly());
  for (;;) {
    if (config_.cache && now_ns() - last_peer_check_ > kPeerCheckNs) {
      last_peer_check_ = now_ns();
      if (const auto dead = config_.cache->dead_peer()) {
        throw Error(ErrorKind::peer, "local rank " + std::to_string(dead->local_rank) +
                                         " (process " + std::to_string(dead->pid) +
                                         ") of this job ended without closing its loader; end the "
                                         "job and resume it from its last checkpoint");
      }
    }
    if (!tasks_.empty() && tasks_.front()->ready) break;
    if (broken_) throw Error(*broken_);
    if (exhausted_ && tasks_.empty()) {
      throw Error(ErrorKind::usage,
                  "the job's last batch was already handed out: give the loader more epochs, or go "
                  "back with set_epoch or load_state_dict");
    }
    if (std::chrono::steady_clock::now() < deadline && help(lock)) continue;
    // A batch is not announced at once where reads are quick: the next one may take long after all.
    const std::chrono::nanoseconds longest(is_quick() ? kTogetherNs : kPeerCheckNs);
    const auto slice = std::min(deadline, std::chrono::steady_clock::now() + longest);
    waits_since_ = now_ns();
    const bool woken = ready_.wait_until(lock, slice);
    waits_since_ = 0;
    if (!woken && std::chrono::steady_clock::now() >= deadline && !broken_ &&
        !(!tasks_.empty() && tasks_.front()->ready)) {
      return nullptr;
    }
  }
  if (tasks_.front()->error) throw Error(*tasks_.front()->error);
  const std::unique_ptr<Task> front = std::move(tasks_.front());  // freed without the mutex
  std::unique_ptr<Batch> batch = std::move(front->batch);
  tasks_.pop_front();
  ++handed_out_;
  Position following = batch->position;
  if (++following.batch == plan::batches_in(config_.job, following.epoch)) {
    following = {following.epoch + 1, 0};
  }
  use_chunk_of(following);
  batch->origins[size_t(Origin::source)].bytes += own_bytes_.exchange(0);
  for (const auto& task : tasks_) {
    if (!task->ready) break;
    ++batch->queue;
  }
  const bool startable = !fetched_.empty(), fetchable = worth_waking(fetching_);
  lock.unlock();
  if (fetchable) fetchable_.notify_all();
  if (startable) transformable_.notify_all();
  if (asked_ != 0) {
    const auto samples = [&](Origin o) {
      return static_cast<int64_t>(batch->origins[size_t(o)].samples);
    };
    trace::record(
        kWaitBatch, asked_, now_ns(),
        {batch->position.epoch, static_cast<int64_t>(batch->position.batch), samples(Origin::ram),
         samples(Origin::file), samples(Origin::peer), samples(Origin::source), batch->queue});
    asked_ = 0;
  }
  return batch;
}

// ------------------------------------------------------------------------------------ the future

plan::RankEpoch Loader::Run::plan_of(Part part) const {
  if (dealt_by_owners(part.epoch)) {
    return plan::local_rank_epoch(config_.job, plan::epoch_order(config_.job, part.epoch),
                                  config_.rank, config_.peers->ownership(),
                                  config_.peers->node_of_rank());
  }
  const uint64_t first = part.number * part_batches_;
  const uint64_t batches = plan::batches_in(config_.job, part.epoch);
  return plan::rank_batches(config_.job, part.epoch, config_.rank, first,
                            std::min(batches, first + part_batches_));
}

void Loader::Run::plan_ahead(Part part) {
  const uint64_t batches = plan::batches_in(config_.job, part.epoch);
  Part next = part_of({part.epoch, (part.number + 1) * part_batches_});
  if (next.number * part_batches_ >= batches) next = {part.epoch + 1, 0};
  for (const Part p : {part, next}) {
    if (p.epoch >= config_.job.epochs || parts_.contains(p)) continue;
    // What the first batch waits for has the processors for itself.
    if (p != part &&
        parts_.at(part).wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
      break;
    }
    // Deferred: if the system gives no more threads, the thread that needs the part plans it.
    parts_.emplace(p, std::async(std::launch::async | std::launch::deferred, [this, p] {
                        auto planned = std::make_shared<const plan::RankEpoch>(plan_of(p));
                        // Later plans take the memory that this one would leave behind.
                        if (p == Part{first_epoch_, 0}) {
                          give_back_free_memory(part_batches_ * config_.job.global_batch);
                        }
                        return planned;
                      }).share());
  }
  parts_.erase(parts_.begin(), parts_.lower_bound(part));
}

Loader::Run::Planned Loader::Run::planned() {
  const Part part = part_of(cursor_);
  plan_ahead(part);
  return parts_.at(part).get();
}

uint64_t Loader::Run::chunk_of(Position position) const {
  return config_.chunks ? config_.chunks->number(position.epoch, position.batch) : 0;
}

void Loader::Run::use_chunk_of(Position next) {
  if (!config_.chunks) return;
  const uint64_t chunk = chunk_of(next);
  if (chunk == chunk_ && handed_out_ > 0) return;
  chunk_ = chunk;
  config_.cache->use_chunk(chunk);
  chunks_.erase(chunks_.begin(), chunks_.lower_bound(chunk));
  next_chunk_.notify_all();
}

// This one, and the next one ahead of need: the thread that reads ahead asks for the chunk behind the
// consumer's, so that no chunk is worked out while the mutex is held.
Loader::Run::KeptChunk Loader::Run::kept_chunk(uint64_t chunk) {
  for (uint64_t c = chunk; c < chunk + 2; ++c) {
    if (chunks_.contains(c)) continue;
    if (c > chunk && (c > chunk_ + 2 || c > chunk_of(last_))) break;
    chunks_.emplace(
        c, std::async(std::launch::async | std::launch::deferred, [this, c] {
             const auto elsewhere = [this](plan::SampleId sample) {
               return config_.cache->tier_of(sample) != plan::kNoTier ||
                      (config_.peers && config_.peers->ownership().owner[sample] != plan::kNoOwner);
             };
             return std::make_shared<const plan::KeptChunk>(
                 config_.chunks->keep(c, config_.half, elsewhere));
           }).share());
  }
  return chunks_.at(chunk);
}

// Under the mutex: makes the task of the batch under the cursor and moves the cursor past it.
Task* Loader::Run::open_task() {
  if (exhausted_) return nullptr;
  if (cursor_.batch == 0 && opened_ > 0) {
    if (config_.cache) config_.cache->try_again();
    if (config_.peers) config_.peers->try_again();
  }
  const Planned part = planned();
  const uint64_t batch_in_part = cursor_.batch % part_batches_;
  const uint64_t begin = batch_in_part == 0 ? 0 : part->batch_ends[batch_in_part - 1];
  const uint64_t end = part->batch_ends[batch_in_part];
  auto task = std::make_unique<Task>();
  task->sequence = opened_;
  task->items.resize(end - begin);
  task->left = task->items.size();
  task->ready = task->items.empty();
  task->chunk = chunk_of(cursor_);
  if (config_.chunks && config_.chunks->in_chunk(cursor_.batch)) {
    task->kept = kept_chunk(task->chunk).get();
  }
  task->batch = std::make_unique<Batch>();
  Batch& batch = *task->batch;
  batch.position = cursor_;
  const auto of_batch = [&](const auto& all, auto& into) {
    into.assign(all.begin() + static_cast<ptrdiff_t>(begin),
                all.begin() + static_cast<ptrdiff_t>(end));
  };
  of_batch(part->samples, batch.samples);
  // Those of the batch behind it, which is opened when these are read.
  const std::span<const plan::SampleId> behind = std::span(part->samples).subspan(end);
  prefetch(behind.first(std::min<size_t>(behind.size(), end - begin)));
  if (!part->occurrences.empty()) of_batch(part->occurrences, batch.occurrences);
  batch.labels.reserve(batch.samples.size());
  const auto labels = config_.source->labels();
  const CopyPlan::Uses uses = copy_plan_ != nullptr ? copy_plan_->of(cursor_.epoch) : nullptr;
  const uint64_t first_use =
      uses ? cursor_.batch *
                 plan::batch_share(config_.job, config_.rank, plan::largest_batch(config_.job))
           : 0;
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const plan::SampleId sample = batch.samples[i];
    task->items[i].sample = task->items[i].entry = sample;
    if (const auto place = task->kept ? task->kept->find(sample) : std::nullopt) {
      task->items[i].entry = config_.cache->entry_of(task->chunk, *place);
    }
    if (uses && first_use + i < uses->size()) task->items[i].copy = (*uses)[first_use + i];
    if (!batch.occurrences.empty()) task->items[i].occurrence = batch.occurrences[i];
    batch.labels.push_back(labels[sample]);
    if (!transformed()) {
      batch.offsets.push_back(batch.bytes);
      batch.lengths.push_back(sizes_[sample]);
      batch.bytes += sizes_[sample];
    }
  }
  if (transformed()) {
    batch.bytes = config_.program->slab_bytes(task->items.size());
    if (config_.labels_in_slab && !task->items.empty()) {
      batch.labels_at = (batch.bytes + kLabelAlignment - 1) / kLabelAlignment * kLabelAlignment;
      batch.bytes = *batch.labels_at + task->items.size() * sizeof(int64_t);
    }
    if (const size_t ragged = config_.program->ragged(); ragged > 0) {
      task->ragged.resize(ragged * task->items.size());
      task->holding.emplace(*raw_pool_);  // of the heap: batch memory may be page-locked
      if (task->items.empty()) lay(*task);
    }
  } else if (!task->items.empty()) {
    // Before other threads see the task: there may be no memory.
    batch.buffer = batch_pool_->take(batch.bytes);
  }
  ++opened_;
  if (++cursor_.batch == plan::batches_in(config_.job, cursor_.epoch)) {
    cursor_ = {cursor_.epoch + 1, 0};
    exhausted_ = cursor_.epoch >= config_.job.epochs;
  }
  tasks_.push_back(std::move(task));
  Task* opened = tasks_.back().get();
  if (opened->ready) ready_.notify_one();
  return opened;
}

uint64_t Loader::Run::transient_bytes(const Task::Item& item) const {
  const plan::SampleId sample = item.sample;
  // Raw batches are filled in place, and what is unpacked at once is not kept.
  if (!transformed() || direct_ || item.entry != sample) return 0;
  if (config_.cache && config_.cache->placed(sample) &&
      config_.cache->kind(sample) == tier::TierKind::ram &&
      config_.cache->state(sample) != tier::State::failed) {
    return 0;
  }
  return sizes_[sample];
}

bool Loader::Run::may_take(const Task& task, uint64_t transient) const {
  const bool staged = task.sequence < handed_out_ + staged_;
  if (task.chunk > chunk_ + 1) return false;  // a half for it is this rank's own to leave
  if (!transformed()) return staged;
  const bool fits = transient_ == 0 || transient_ + transient <= config_.io_bytes;
  // Samples are taken in the order of the plan: what holds the budget now is of this batch, and
  // unpacked without waiting for anything else. Each thread has a sample, however large they are.
  if (task.sequence == handed_out_) {
    return fits || transient == 0 || charged_ < fetchers() + workers();
  }
  if (light_ && !staged) return false;  // as quickly unpacked as read
  if (copy_plan_ != nullptr && !staged) return false;
  const uint64_t local = std::max<uint64_t>(1, task.items.size());
  if ((task.sequence - handed_out_) * local > std::max(kMaxAhead, max_staged_ * local))
    return false;
  // Samples of a RAM tier that has no memory take transient bytes too, when that is found out: so
  // even what should cost nothing waits while the budget is overdrawn.
  return fits;
}

// A source whose samples have neighbours is asked for as many at once as make one large read. If
// tiers keep the neighbours, claim_beside() does that instead.
bool Loader::Run::chunk_full(size_t samples, uint64_t bytes) const {
  if (direct_ && samples < kMaxChunk) {
    const double byte = speeds_.source.seconds_per_byte();
    const double enough = std::max(byte > 0.0 ? kLightSeconds / byte : 0.0,
                                   static_cast<double>(config_.source->batch_bytes()));
    const auto has = static_cast<double>(bytes);
    if (has < enough || (samples < config_.depth && !is_quick())) return false;
    // Batches of which no other thread has a part stay in the cache of one processor.
    return !fetching_ || has >= 2 * enough;
  }
  // A batch waits for the whole of a read. What a source makes side by side, all fetchers together
  // ask for.
  if (bytes >= std::max(kLargeRead, config_.source->batch_bytes()) &&
      samples * fetchers() >= config_.source->made_at_once())
    return true;
  if (samples < config_.depth) return false;
  return config_.cache || samples >= kMaxChunk || bytes >= config_.source->batch_bytes();
}

bool Loader::Run::worth_waking(const Task* task) const {
  if (!direct_) return true;
  const uint64_t next = task ? task->sequence : opened_;
  return next + std::min(kWakeBatches, staged_ / 2) <= handed_out_ + staged_;
}

void Loader::Run::prefetch(std::span<const plan::SampleId> samples) const noexcept {
  const auto labels = config_.source->labels();
  for (const plan::SampleId sample : samples) {
    __builtin_prefetch(&sizes_[sample]);
    __builtin_prefetch(&labels[sample]);
    if (direct_) __builtin_prefetch(&sums_.word(sample));
  }
}

void Loader::Run::take_now(std::vector<Fetch>& chunk, bool one) {
  chunk.clear();
  uint64_t bytes = 0;
  staged_ = staged_now();
  while (!chunk_full(chunk.size(), bytes)) {
    if (!fetching_) {
      if (one && !chunk.empty()) return;
      // A chunk stays inside what may be staged: raw batches get their buffer here.
      if (!transformed() && opened_ >= handed_out_ + max_staged_) return;
      if (transformed() && tasks_.size() > kMaxAhead) return;
      fetching_ = open_task();
      fetch_index_ = 0;
      if (!fetching_) return;
      if (fetching_->items.empty()) fetching_ = nullptr;
      continue;
    }
    const plan::SampleId sample = fetching_->items[fetch_index_].sample;
    const uint64_t transient = transient_bytes(fetching_->items[fetch_index_]);
    if (!may_take(*fetching_, transient)) return;
    transient_ += transient;
    charged_ += transient > 0 ? 1 : 0;
    fetching_->items[fetch_index_].charged = transient;
    Fetch fetch;
    fetch.work = {fetching_, fetch_index_++};
    bytes += sizes_[sample];
    chunk.push_back(std::move(fetch));
    // Once its last sample is taken the task may be finished, handed out and gone at any time.
    if (fetch_index_ == fetching_->items.size()) fetching_ = nullptr;
  }
}

Loader::Run::Helper::Helper(Run& run)
    : scratch(&run.decoding_, run.config_.source->fields()),
      reader(run.config_.source->make_reader(run.config_.reader, run.config_.depth)),
      records(run.config_.depth, run.ring_refused_),
      fetcher{*reader, records, scratch} {}

bool Loader::Run::help(MutexLock& lock) {
  if (!helps_ || !is_quick()) return false;
  std::exception_ptr failed;
  if (helper_) {
    try {
      take_now(helper_->chunk, true);
      if (helper_->chunk.empty()) return false;
    } catch (...) {
      failed = std::current_exception();  // ends the run, as in a fetch thread
    }
  }
  lock.unlock();
  guarded([&] {
    if (failed) std::rethrow_exception(failed);
    if (helper_) return fetch_light(helper_->chunk, helper_->fetcher, stop_.get_token());
    helper_.emplace(*this);
  });
  lock.lock(Briefly());
  return true;
}

void Loader::Run::take_chunk(std::vector<Fetch>& chunk, std::stop_token stop) {
  chunk.clear();
  MutexLock lock(mutex_, Briefly());
  while (!stop.stop_requested()) {
    take_now(chunk, false);
    if (!chunk.empty()) return;
    if (worth_handing_over(true)) ready_.notify_one();
    fetchable_.wait(lock, stop, [&]() NOSTALL_REQUIRES(mutex_) {
      if (!worth_waking(fetching_)) return false;
      if (fetching_) {
        return may_take(*fetching_, transient_bytes(fetching_->items[fetch_index_]));
      }
      if (exhausted_) return false;
      return transformed() ? tasks_.size() <= kMaxAhead : opened_ < handed_out_ + max_staged_;
    });
  }
}

}  // namespace nostall::stage
