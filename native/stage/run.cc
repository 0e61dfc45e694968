#include "stage/run.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "base/clock.h"
#include "base/random.h"
#include "plan/locality.h"

namespace nostall::stage {
namespace {

// Samples that fetching may be ahead of the consumer, when they cost no memory: enough to keep a
// slow storage busy through a burst of compute, little enough that a seek stays cheap.
constexpr uint64_t kMaxAhead = 16384;
// How long to wait for another rank that reads a sample before reading it oneself: at most; while
// no node makes any progress, or the consumer waits for that very batch; and at a stretch.
constexpr std::chrono::seconds kPatience{60};
constexpr std::chrono::seconds kSilence{2};
constexpr std::chrono::milliseconds kSlice{10};
// How long to wait when the batch is needed: reads of the sample from the source, and seconds for
// the other node to have its turn of the processor.
constexpr double kWaitForReads = 20.0, kWaitSeconds = 0.05;
// The same for another rank of this node, which is reading it at this moment.
constexpr std::chrono::seconds kLocalPatience{10};
// An origin that is avoided is tried again this often.
constexpr int64_t kProbeNs = 2'000'000'000;
constexpr int64_t kPeerCheckNs = 500'000'000;
// Candidates tried in place of a bad sample before giving up on a data set that is mostly damaged.
constexpr uint32_t kMaxCandidates = 1024;
constexpr uint64_t kSubstituteStream =
    0x5375627374697475;  // keeps these draws apart from all others

}  // namespace

Loader::Run::Run(const LoaderConfig& config, std::shared_ptr<BufferPool> batch_pool,
                 std::shared_ptr<BufferPool> raw_pool, std::array<SpeedEstimate, kOrigins>& speeds,
                 Position start)
    : config_(config),
      batch_pool_(std::move(batch_pool)),
      raw_pool_(std::move(raw_pool)),
      speeds_(speeds),
      sizes_(config.source->sizes()),
      batches_per_epoch_(plan::batches_per_epoch(config.job)),
      cursor_(start) {
  const uint64_t local = std::max<uint64_t>(
      1, plan::batch_positions(config.job, config.rank, config.job.global_batch).size());
  const uint64_t mean_size =
      sizes_.empty() ? 1 : std::max<uint64_t>(1, config.source->total_bytes() / sizes_.size());
  const uint64_t batch_bytes =
      local * (transformed() ? config.pipeline->output().bytes() : mean_size);
  max_staged_ = std::max<uint64_t>(2, config.staging_bytes / std::max<uint64_t>(1, batch_bytes));
  exhausted_ = cursor_.epoch >= config.job.epochs;
  if (!exhausted_) plan_ahead(cursor_.epoch);
  try {
    for (uint32_t i = 0; i < std::max(1u, config.fetchers); ++i) {
      threads_.emplace_back([this] {
        pthread_setname_np(pthread_self(), "nostall-fetch");
        guarded([this] { fetch_loop(stop_.get_token()); });
      });
    }
    if (config.peers && config.sharing == Sharing::owners_read) {
      threads_.emplace_back([this] {
        pthread_setname_np(pthread_self(), "nostall-own");
        guarded([this] { own_loop(stop_.get_token()); });
      });
    }
    for (uint32_t i = 0; transformed() && i < std::max(1u, config.workers); ++i) {
      threads_.emplace_back([this] {
        pthread_setname_np(pthread_self(), "nostall-image");
        guarded([this] { transform_loop(stop_.get_token()); });
      });
    }
  } catch (...) {
    // The system gives no more threads: those that run must end before they can be joined.
    end_threads();
    throw;
  }
}

Loader::Run::~Run() { end_threads(); }

void Loader::Run::end_threads() noexcept {
  stop_.request_stop();
  fetchable_.notify_all();
  transformable_.notify_all();
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
    error.emplace(ErrorKind::io,
                  "there is no memory for a batch: make batches, staging or tiers smaller", ENOMEM);
  } catch (const std::exception& e) {
    error.emplace(ErrorKind::bug, std::string("a thread of the loader failed: ") + e.what());
  }
  {
    const std::scoped_lock lock(mutex_);
    if (!broken_) broken_ = std::move(error);
  }
  stop_.request_stop();
  ready_.notify_all();
}

// ---------------------------------------------------------------------------- the consumer's side

std::unique_ptr<Batch> Loader::Run::next(std::chrono::nanoseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::unique_lock lock(mutex_);
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
    const auto slice = std::min(
        deadline, std::chrono::steady_clock::now() + std::chrono::nanoseconds(kPeerCheckNs));
    if (ready_.wait_until(lock, slice) == std::cv_status::timeout &&
        std::chrono::steady_clock::now() >= deadline && !broken_ &&
        !(!tasks_.empty() && tasks_.front()->ready)) {
      return nullptr;
    }
  }
  Task& front = *tasks_.front();
  if (front.error) throw *front.error;
  std::unique_ptr<Batch> batch = std::move(front.batch);
  tasks_.pop_front();
  ++handed_out_;
  batch->origins[size_t(Origin::source)].bytes += own_bytes_.exchange(0);
  for (const auto& task : tasks_) {
    if (!task->ready) break;
    ++batch->queue;
  }
  lock.unlock();
  fetchable_.notify_all();
  transformable_.notify_all();
  return batch;
}

// ------------------------------------------------------------------------------------ the future

void Loader::Run::plan_ahead(uint32_t epoch) {
  for (uint32_t e = epoch; e < std::min(epoch + 2, config_.job.epochs); ++e) {
    if (epochs_.contains(e)) continue;
    epochs_.emplace(e, std::async(std::launch::async, [this, e] {
                         if (config_.peers && config_.locality && e > config_.first_epoch) {
                           return std::make_shared<const plan::RankEpoch>(plan::local_rank_epoch(
                               config_.job, plan::epoch_order(config_.job, e), config_.rank,
                               config_.peers->ownership(), config_.peers->node_of_rank()));
                         }
                         return std::make_shared<const plan::RankEpoch>(
                             plan::rank_epoch(config_.job, e, config_.rank));
                       }).share());
  }
  epochs_.erase(epochs_.begin(), epochs_.lower_bound(epoch));
}

std::shared_ptr<const plan::RankEpoch> Loader::Run::rank_epoch(uint32_t epoch) {
  plan_ahead(epoch);
  return epochs_.at(epoch).get();
}

// Under the mutex: makes the task of the batch under the cursor and moves the cursor past it.
Task* Loader::Run::open_task() {
  if (exhausted_) return nullptr;
  const auto epoch = rank_epoch(cursor_.epoch);
  const uint64_t begin = cursor_.batch == 0 ? 0 : epoch->batch_ends[cursor_.batch - 1];
  const uint64_t end = epoch->batch_ends[cursor_.batch];
  auto task = std::make_unique<Task>();
  task->sequence = opened_;
  task->items.resize(end - begin);
  task->left = task->items.size();
  task->ready = task->items.empty();
  task->batch = std::make_unique<Batch>();
  Batch& batch = *task->batch;
  batch.position = cursor_;
  batch.samples.assign(epoch->samples.begin() + static_cast<ptrdiff_t>(begin),
                       epoch->samples.begin() + static_cast<ptrdiff_t>(end));
  batch.labels.reserve(batch.samples.size());
  const auto labels = config_.source->labels();
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const plan::SampleId sample = batch.samples[i];
    task->items[i].sample = sample;
    batch.labels.push_back(labels[sample]);
    if (!transformed()) {
      batch.offsets.push_back(batch.bytes);
      batch.lengths.push_back(sizes_[sample]);
      batch.bytes += sizes_[sample];
    }
  }
  if (transformed()) {
    batch.bytes = task->items.size() * config_.pipeline->output().bytes();
  } else if (!task->items.empty()) {
    // Before anybody can see the task: there may be no memory.
    batch.buffer = batch_pool_->take(batch.bytes);
  }
  ++opened_;
  if (++cursor_.batch == batches_per_epoch_) {
    cursor_ = {cursor_.epoch + 1, 0};
    exhausted_ = cursor_.epoch >= config_.job.epochs;
  }
  tasks_.push_back(std::move(task));
  Task* opened = tasks_.back().get();
  if (opened->ready) ready_.notify_one();
  return opened;
}

uint64_t Loader::Run::transient_bytes(plan::SampleId sample) const {
  if (!transformed()) return 0;  // raw batches are filled in place
  if (config_.cache && config_.cache->placed(sample) &&
      config_.cache->kind(sample) == tier::TierKind::ram &&
      config_.cache->state(sample) != tier::State::failed) {
    return 0;
  }
  return sizes_[sample];
}

bool Loader::Run::may_take(const Task& task, uint64_t transient) const {
  const bool staged = task.sequence < handed_out_ + max_staged_;
  if (!transformed()) return staged;
  if (task.sequence == handed_out_) return true;  // never starve the batch that is waited for
  const uint64_t local = std::max<uint64_t>(1, task.items.size());
  if ((task.sequence - handed_out_) * local > std::max(kMaxAhead, max_staged_ * local))
    return false;
  // Samples of a RAM tier that has no memory take transient bytes too, when that is found out: so
  // even what should cost nothing waits while the budget is overdrawn.
  return transient_ == 0 || transient_ + transient <= config_.io_bytes;
}

std::vector<Loader::Run::Fetch> Loader::Run::take_chunk(std::stop_token stop) {
  std::vector<Fetch> chunk;
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    while (chunk.size() < config_.depth) {
      if (!fetching_) {
        // A chunk stays inside what may be staged: raw batches get their buffer here.
        if (!transformed() && opened_ >= handed_out_ + max_staged_) break;
        if (transformed() && tasks_.size() > kMaxAhead) break;
        fetching_ = open_task();
        fetch_index_ = 0;
        if (!fetching_) break;
        if (fetching_->items.empty()) fetching_ = nullptr;
        continue;
      }
      const plan::SampleId sample = fetching_->items[fetch_index_].sample;
      const uint64_t transient = transient_bytes(sample);
      if (!may_take(*fetching_, transient)) break;
      transient_ += transient;
      fetching_->items[fetch_index_].charged = transient;
      Fetch fetch;
      fetch.work = {fetching_, fetch_index_++};
      chunk.push_back(fetch);
      // Once its last sample is taken the task may be finished, handed out and gone at any time.
      if (fetch_index_ == fetching_->items.size()) fetching_ = nullptr;
    }
    if (!chunk.empty()) return chunk;
    fetchable_.wait(lock, stop, [&] {
      if (fetching_) {
        return may_take(*fetching_, transient_bytes(fetching_->items[fetch_index_].sample));
      }
      if (exhausted_) return false;
      return transformed() ? tasks_.size() <= kMaxAhead : opened_ < handed_out_ + max_staged_;
    });
  }
  return chunk;
}

// --------------------------------------------------------------------------------------- fetching

void Loader::Run::fetch_loop(std::stop_token stop) {
  const std::unique_ptr<source::Reader> reader =
      config_.source->make_reader(config_.reader, config_.depth);
  for (;;) {
    std::vector<Fetch> chunk = take_chunk(stop);
    if (chunk.empty()) return;
    fetch(chunk, *reader, stop);
  }
}

// This rank's part of what the node owns, read ahead of need in the order of first access.
void Loader::Run::own_loop(std::stop_token stop) {
  const std::unique_ptr<source::Reader> reader =
      config_.source->make_reader(config_.reader, config_.depth);
  tier::NodeCache& cache = *config_.cache;
  const std::span<const uint64_t> owned = config_.peers->owned();
  std::vector<source::ReadRequest> requests;
  std::vector<std::shared_ptr<Buffer>> buffers;
  const auto read = [&] {
    const int64_t begin = now_ns();
    reader->read(requests);
    uint64_t bytes = 0;
    for (const source::ReadRequest& r : requests) {
      if (r.error != 0) {
        cache.abandon(r.sample);
        continue;
      }
      bytes += r.into.size();
      if (cache.kind(r.sample) == tier::TierKind::ram) {
        cache.publish(r.sample);
      } else {
        cache.file_write(r.sample, r.into);
      }
    }
    speeds_[size_t(Origin::source)].record(bytes, now_ns() - begin);
    own_bytes_ += bytes;
    requests.clear();
    buffers.clear();
  };
  for (size_t i = config_.local_rank; i < owned.size() && !stop.stop_requested();
       i += config_.local_world) {
    const plan::SampleId sample = owned[i];
    if (cache.state(sample) != tier::State::empty || !cache.claim(sample)) continue;
    std::span<std::byte> into;
    if (cache.kind(sample) == tier::TierKind::ram) {
      into = cache.ram_slot(sample);
      if (into.size() != sizes_[sample]) continue;  // no memory: the cache has said so
    } else {
      buffers.push_back(raw_pool_->take(sizes_[sample]));
      into = {buffers.back()->data(), sizes_[sample]};
    }
    requests.push_back({sample, into, 0});
    if (requests.size() == config_.depth) read();
  }
  if (!requests.empty()) read();
}

std::span<std::byte> Loader::Run::raw_destination(Fetch& fetch) {
  Task::Item& item = fetch.work.task->items[fetch.work.index];
  if (!transformed()) return place_of(fetch.work);
  item.raw = raw_pool_->take(sizes_[item.sample]);
  if (item.charged == 0) {
    const std::scoped_lock lock(mutex_);
    item.charged = sizes_[item.sample];
    transient_ += item.charged;
  }
  return {item.raw->data(), sizes_[item.sample]};
}

// A chunk goes round until every sample has its bytes: what the tiers have, then what can be read
// or fetched now, and only when nothing else is left to do, waiting for what others bring.
void Loader::Run::fetch(std::vector<Fetch>& chunk, source::Reader& reader, std::stop_token stop) {
  std::vector<Fetch*> open;
  for (Fetch& f : chunk) open.push_back(&f);
  const auto begun = std::chrono::steady_clock::now();
  auto heard = begun;
  uint64_t news = config_.peers ? config_.peers->news() : 0;
  while (!open.empty() && !stop.stop_requested()) {
    const auto now = std::chrono::steady_clock::now();
    if (config_.peers && config_.peers->news() != news) {
      news = config_.peers->news();
      heard = now;
    }
    std::vector<Fetch*> to_read, from_peers, left;
    std::vector<Work> finished;
    for (Fetch* f : open) {
      f->patient =
          now - begun < kPatience && now - heard < kSilence && worth_waiting(*f, now - begun);
      f->patient_locally = now - begun < kLocalPatience;
      switch (route(*f)) {
        case Route::done:
          finished.push_back(f->work);
          break;
        case Route::source:
          to_read.push_back(f);
          break;
        case Route::peer:
          from_peers.push_back(f);
          break;
        case Route::wait:
          left.push_back(f);
          break;
      }
    }
    finish(finished);
    const bool idle = finished.empty() && to_read.empty() && from_peers.empty();
    prepare_all(to_read);
    prepare_all(from_peers);
    std::shared_ptr<peer::FetchGroup> group;
    if (!from_peers.empty()) group = ask_peers(from_peers);
    if (!to_read.empty()) read_source(to_read, reader, stop);
    if (group) {
      config_.peers->finish(*group, stop);
      for (Fetch* f : take_from_peers(from_peers, *group)) left.push_back(f);
    }
    if (idle) wait_for_others(*left.front(), stop);
    open = std::move(left);
  }
}

// For a sample that another node reads first: as long as nobody needs the batch, or the source
// would hardly be quicker.
bool Loader::Run::worth_waiting(const Fetch& fetch, std::chrono::nanoseconds waited) {
  const double peer = speeds_[size_t(Origin::peer)].seconds_per_byte();
  const double source = speeds_[size_t(Origin::source)].seconds_per_byte();
  if (!worth_pushing(peer, source)) return false;
  const Task& task = *fetch.work.task;
  const double read = source * static_cast<double>(sizes_[task.items[fetch.work.index].sample]);
  if (std::chrono::duration<double>(waited).count() < kWaitForReads * read + kWaitSeconds) {
    return true;
  }
  const std::scoped_lock lock(mutex_);
  return task.sequence != handed_out_;
}

// What to do next about a sample; with Route::source or Route::peer it may have been claimed.
Loader::Run::Route Loader::Run::route(Fetch& fetch) {
  const Task& task = *fetch.work.task;
  const plan::SampleId sample = task.items[fetch.work.index].sample;
  tier::NodeCache* const cache = config_.cache.get();
  const peer::Where where = !config_.peers || fetch.shunned
                                ? peer::Where::source
                                : config_.peers->where(sample, task.batch->position.epoch);
  const bool awaited =
      where == peer::Where::awaited && fetch.patient && config_.sharing == Sharing::push;
  const Route elsewhere = where == peer::Where::there ? peer_or_source() : Route::source;
  if (!cache || !cache->placed(sample)) return awaited ? Route::wait : elsewhere;
  for (;;) {
    switch (cache->state(sample)) {
      case tier::State::ready:
        return from_tier(fetch) ? Route::done : elsewhere;
      case tier::State::failed:
        return awaited ? Route::wait : elsewhere;
      case tier::State::filling:
        // Another rank is reading it: the shared file system is not asked twice.
        return fetch.patient_locally ? Route::wait : elsewhere;
      case tier::State::empty:
        break;
    }
    if (awaited) return Route::wait;
    if (cache->claim(sample)) {
      fetch.claimed = true;
      fetch.to_file_tier = cache->kind(sample) == tier::TierKind::file;
      return elsewhere;
    }
    // Somebody else was first, or the tier was given up since: then it stays empty for ever.
    if (!cache->placed(sample)) return elsewhere;
  }
}

// The owner has it; is it also the place to get it from?
Loader::Run::Route Loader::Run::peer_or_source() {
  SpeedEstimate &peer = speeds_[size_t(Origin::peer)], &source = speeds_[size_t(Origin::source)];
  const Choice choice =
      choose({Candidate{}, {}, {true, peer.seconds_per_byte()}, {true, source.seconds_per_byte()}});
  // Against the day when the slower one is faster again.
  if (choice.origin == Origin::source) return peer.stale(kProbeNs) ? Route::peer : Route::source;
  const double best = best_source_.load(std::memory_order_relaxed);
  const bool source_was_better =
      best > 0.0 && peer.seconds_per_byte() > kSourceAdvantageOverPeers * best;
  return source_was_better && source.stale(kProbeNs) ? Route::source : Route::peer;
}

// A sample that is ready in a tier of this node; false if it is better, or must be, had elsewhere.
bool Loader::Run::from_tier(Fetch& fetch) {
  tier::NodeCache& cache = *config_.cache;
  Task& task = *fetch.work.task;
  const plan::SampleId sample = task.items[fetch.work.index].sample;
  const uint64_t size = sizes_[sample];
  const int64_t begin = now_ns();
  if (cache.kind(sample) == tier::TierKind::ram) {
    if (!transformed()) {
      std::memcpy(place_of(fetch.work).data(), cache.ram_view(sample).data(), size);
    }
    count(task, Origin::ram, size, now_ns() - begin);
    return true;
  }
  const Choice choice = choose({Candidate{},
                                {true, speeds_[size_t(Origin::file)].seconds_per_byte()},
                                {},
                                {true, speeds_[size_t(Origin::source)].seconds_per_byte()}});
  if (choice.origin != Origin::file) return false;
  if (!cache.file_read(sample, raw_destination(fetch))) return false;
  speeds_[size_t(Origin::file)].record(size, now_ns() - begin);
  count(task, Origin::file, size, now_ns() - begin);
  return true;
}

void Loader::Run::wait_for_others(const Fetch& fetch, std::stop_token stop) {
  const plan::SampleId sample = fetch.work.task->items[fetch.work.index].sample;
  if (config_.cache && config_.cache->placed(sample) &&
      config_.cache->state(sample) == tier::State::filling) {
    config_.cache->wait(sample, kSlice, stop);
  } else if (config_.peers) {
    config_.peers->wait_for_news(kSlice, stop);
  }  // else it was settled since it was looked at
}

// Where the bytes of a sample go: its slot of the RAM tier if this rank claimed it.
bool Loader::Run::prepare(Fetch& fetch) {
  Task::Item& item = fetch.work.task->items[fetch.work.index];
  if (fetch.claimed && !fetch.to_file_tier) {
    fetch.into = config_.cache->ram_slot(item.sample);
    if (fetch.into.size() == sizes_[item.sample]) return true;
    fetch.claimed = false;  // no memory to be had: the cache has said so
  }
  try {
    fetch.into = raw_destination(fetch);
  } catch (const std::bad_alloc&) {
    settle(fetch, ENOMEM);
    return false;
  }
  return true;
}

// Those for which there is no memory are finished, with that error.
void Loader::Run::prepare_all(std::vector<Fetch*>& fetches) {
  std::vector<Work> finished;
  std::erase_if(fetches, [&](Fetch* f) {
    if (prepare(*f)) return false;
    finished.push_back(f->work);
    return true;
  });
  finish(finished);
}

// The bytes of a sample are in `into`, or an errno says why not: settles the claim.
void Loader::Run::settle(Fetch& fetch, int error) {
  Task::Item& item = fetch.work.task->items[fetch.work.index];
  item.read_error = error;
  if (!fetch.claimed) return;
  if (error != 0) {
    config_.cache->abandon(item.sample);
    fetch.claimed = fetch.to_file_tier = false;
  } else if (!fetch.to_file_tier) {
    config_.cache->publish(item.sample);
    if (!transformed())
      std::memcpy(place_of(fetch.work).data(), fetch.into.data(), fetch.into.size());
  }
}

void Loader::Run::read_source(std::span<Fetch* const> fetches, source::Reader& reader,
                              std::stop_token stop) {
  std::vector<source::ReadRequest> requests;
  requests.reserve(fetches.size());
  uint64_t bytes = 0;
  for (Fetch* f : fetches) {
    requests.push_back({f->work.task->items[f->work.index].sample, f->into, 0});
    bytes += f->into.size();
  }
  const int64_t begin = now_ns();
  reader.read(requests);
  const int64_t took = now_ns() - begin;
  SpeedEstimate& speed = speeds_[size_t(Origin::source)];
  speed.record(bytes, took);
  const double best = best_source_.load(std::memory_order_relaxed);
  if (best == 0.0 || speed.seconds_per_byte() < best) {
    best_source_.store(speed.seconds_per_byte(), std::memory_order_relaxed);
  }
  std::vector<Work> finished;
  std::vector<Kept> kept;
  for (size_t i = 0; i < fetches.size(); ++i) {
    Fetch& f = *fetches[i];
    settle(f, requests[i].error);
    count(*f.work.task, Origin::source, requests[i].error == 0 ? requests[i].into.size() : 0,
          took / static_cast<int64_t>(fetches.size()));
    if (requests[i].error == 0) {
      keep_copy(f, kept);
    } else if (!transformed()) {
      handle_bad(f.work, source::read_error_text(requests[i].error), nullptr, reader);
    }
    finished.push_back(f.work);
  }
  finish(finished);
  for (const Kept& k : kept) pass_on(k, stop);
}

std::shared_ptr<peer::FetchGroup> Loader::Run::ask_peers(std::span<Fetch* const> fetches) {
  std::vector<peer::Fetch> requests;
  requests.reserve(fetches.size());
  for (Fetch* f : fetches) {
    const Task::Item& item = f->work.task->items[f->work.index];
    std::shared_ptr<void> keep = item.raw;
    if (!keep)
      keep = f->claimed ? std::static_pointer_cast<void>(config_.cache)
                        : std::static_pointer_cast<void>(f->work.task->batch->buffer);
    requests.push_back({item.sample, f->into, std::move(keep), peer::Outcome::waiting});
  }
  return config_.peers->begin(std::move(requests));
}

// Those that did not come go round again, without asking that owner; the others are finished.
std::vector<Loader::Run::Fetch*> Loader::Run::take_from_peers(std::span<Fetch* const> fetches,
                                                              const peer::FetchGroup& group) {
  std::vector<Fetch*> again;
  std::vector<Work> finished;
  std::vector<Kept> kept;
  const int64_t took = group.nanoseconds();
  uint64_t bytes = 0;
  for (size_t i = 0; i < fetches.size(); ++i) {
    Fetch& f = *fetches[i];
    if (group.requests[i].outcome == peer::Outcome::here) {
      settle(f, 0);
      bytes += f.into.size();
      count(*f.work.task, Origin::peer, f.into.size(), took / static_cast<int64_t>(fetches.size()));
      if (f.claimed && f.to_file_tier) keep_copy(f, kept);
      finished.push_back(f.work);
      continue;
    }
    settle(f, EHOSTUNREACH);
    f.work.task->items[f.work.index].raw.reset();
    f.shunned = true;
    again.push_back(&f);
  }
  if (bytes > 0) speeds_[size_t(Origin::peer)].record(bytes, took);
  finish(finished);
  for (const Kept& k : kept) {
    if (k.to_file_tier) config_.cache->file_write(k.sample, k.bytes);
  }
  return again;
}

// What is still to be done with bytes that the transform threads, or the consumer, get now.
void Loader::Run::keep_copy(const Fetch& fetch, std::vector<Kept>& kept) {
  const Task::Item& item = fetch.work.task->items[fetch.work.index];
  const bool to_file_tier = fetch.claimed && fetch.to_file_tier;
  const bool push = config_.peers && config_.sharing == Sharing::push &&
                    config_.peers->push_wanted(item.sample) &&
                    worth_pushing(speeds_[size_t(Origin::peer)].seconds_per_byte(),
                                  speeds_[size_t(Origin::source)].seconds_per_byte());
  if (!to_file_tier && !push) return;
  Kept k{item.sample, to_file_tier, push, item.raw, fetch.into};
  if (fetch.claimed && !fetch.to_file_tier) {
    k.keep = config_.cache;  // its slot of the RAM tier
  } else if (!transformed()) {
    const std::shared_ptr<Buffer> copy = raw_pool_->take(fetch.into.size());
    std::memcpy(copy->data(), fetch.into.data(), fetch.into.size());
    k.keep = copy;
    k.bytes = {copy->data(), fetch.into.size()};
  }
  kept.push_back(std::move(k));
}

void Loader::Run::pass_on(const Kept& kept, std::stop_token stop) {
  if (kept.push) config_.peers->push(kept.sample, kept.bytes, kept.keep, stop);
  if (kept.to_file_tier) config_.cache->file_write(kept.sample, kept.bytes);
}

// ----------------------------------------------------------------------------------- transforming

std::span<std::byte> Loader::Run::place_of(Work work) const {
  const Batch& batch = *work.task->batch;
  if (!transformed()) {
    return {batch.buffer->data() + batch.offsets[work.index],
            static_cast<size_t>(sizes_[work.task->items[work.index].sample])};
  }
  const size_t bytes = config_.pipeline->output().bytes();
  return {batch.buffer->data() + work.index * bytes, bytes};
}

void Loader::Run::transform_loop(std::stop_token stop) {
  image::Scratch scratch;
  const std::unique_ptr<source::Reader> reader =
      config_.source->make_reader(source::ReaderKind::pread, 1);
  for (;;) {
    Work work;
    {
      std::unique_lock lock(mutex_);
      const auto startable = [&] {
        return !fetched_.empty() && fetched_.top().first.first < handed_out_ + max_staged_;
      };
      if (!transformable_.wait(lock, stop, startable)) return;
      work = {fetched_.top().second, fetched_.top().first.second};
      fetched_.pop();
      Batch& batch = *work.task->batch;
      if (!batch.buffer) batch.buffer = batch_pool_->take(batch.bytes);
    }
    transform(work, scratch, *reader);
    bool done = false;
    {
      const std::scoped_lock lock(mutex_);
      done = --work.task->left == 0;
      work.task->ready = done;
    }
    if (done) ready_.notify_one();
  }
}

void Loader::Run::transform(Work work, image::Scratch& scratch, source::Reader& reader) {
  Task::Item& item = work.task->items[work.index];
  const int64_t begin = thread_cpu_ns();
  if (item.read_error != 0) {
    handle_bad(work, source::read_error_text(item.read_error), &scratch, reader);
  } else {
    const std::span<const std::byte> bytes =
        item.raw ? std::span<const std::byte>(item.raw->data(), sizes_[item.sample])
                 : config_.cache->ram_view(item.sample);
    const auto result = config_.pipeline->apply(
        bytes, {config_.job.seed, work.task->batch->position.epoch, item.sample}, scratch,
        place_of(work));
    if (!result) handle_bad(work, result.error().what(), &scratch, reader);
  }
  item.raw.reset();
  if (item.charged != 0) {
    {
      const std::scoped_lock lock(mutex_);
      transient_ -= item.charged;
    }
    fetchable_.notify_one();
  }
  const std::scoped_lock lock(work.task->counters);
  work.task->batch->transform_ns += thread_cpu_ns() - begin;
}

// The bytes are there: raw samples are finished, others are the transform threads' work.
void Loader::Run::finish(std::span<const Work> works) {
  if (works.empty()) return;
  bool ready = false;
  {
    const std::scoped_lock lock(mutex_);
    for (const Work& work : works) {
      if (transformed()) {
        fetched_.push({{work.task->sequence, work.index}, work.task});
      } else if (--work.task->left == 0) {
        work.task->ready = ready = true;
      }
    }
  }
  if (ready) ready_.notify_one();
  if (transformed()) {
    if (works.size() == 1) {
      transformable_.notify_one();
    } else {
      transformable_.notify_all();
    }
  }
}

void Loader::Run::count(Task& task, Origin origin, uint64_t bytes, int64_t nanoseconds) {
  const std::scoped_lock lock(task.counters);
  OriginCount& c = task.batch->origins[size_t(origin)];
  c.samples += 1;
  c.bytes += bytes;
  c.nanoseconds += nanoseconds;
}

// ------------------------------------------------------------------------------------ bad samples

bool Loader::Run::read_whole(plan::SampleId sample, std::span<std::byte> into,
                             source::Reader& reader, std::string& reason) {
  if (config_.cache && config_.cache->placed(sample) &&
      config_.cache->state(sample) == tier::State::ready) {
    if (config_.cache->kind(sample) == tier::TierKind::ram) {
      std::memcpy(into.data(), config_.cache->ram_view(sample).data(), into.size());
      return true;
    }
    if (config_.cache->file_read(sample, into)) return true;
  }
  source::ReadRequest request{sample, into, 0};
  reader.read({&request, 1});
  if (request.error != 0) reason = source::read_error_text(request.error);
  return request.error == 0;
}

void Loader::Run::handle_bad(Work work, const std::string& reason, image::Scratch* scratch,
                             source::Reader& reader) {
  Task& task = *work.task;
  const plan::SampleId bad = task.items[work.index].sample;
  const std::string what = config_.source->describe(bad) + " (sample " + std::to_string(bad) +
                           ") cannot be used: " + reason;
  const auto give_up = [&](const std::string& more) {
    const std::scoped_lock lock(mutex_);
    if (!task.error) task.error.emplace(ErrorKind::corruption, what + more);
  };
  if (config_.on_error == OnError::raise) {
    give_up("; remove or repair the file, or pass on_error=\"substitute\"");
    return;
  }
  SampleRandom random(config_.job.seed ^ kSubstituteStream, 0, bad);
  for (uint32_t i = 0; i < kMaxCandidates; ++i) {
    const uint64_t draw = (uint64_t{random.next()} << 32) | random.next();
    const plan::SampleId candidate = draw % config_.job.samples;
    // A raw batch has room for what the plan put there.
    if (candidate == bad || (!transformed() && sizes_[candidate] > sizes_[bad])) continue;
    std::string why;
    bool good = false;
    if (transformed()) {
      std::shared_ptr<Buffer> raw;
      try {
        raw = raw_pool_->take(sizes_[candidate]);
      } catch (const std::bad_alloc&) {
        continue;
      }
      const std::span<std::byte> bytes(raw->data(), sizes_[candidate]);
      good =
          read_whole(candidate, bytes, reader, why) &&
          config_.pipeline->apply(bytes, {config_.job.seed, task.batch->position.epoch, candidate},
                                  *scratch, place_of(work));
    } else {
      good = read_whole(candidate, place_of(work).first(sizes_[candidate]), reader, why);
    }
    if (!good) continue;
    const std::scoped_lock lock(task.counters);
    task.batch->samples[work.index] = candidate;
    task.batch->labels[work.index] = config_.source->labels()[candidate];
    if (!transformed()) task.batch->lengths[work.index] = sizes_[candidate];
    task.batch->substitutions.push_back({bad, candidate, what});
    return;
  }
  give_up("; and of " + std::to_string(kMaxCandidates) +
          " candidates none could stand in its place: check the data set");
}

}  // namespace nostall::stage
