#include "stage/run.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "base/clock.h"
#include "base/random.h"

namespace nostall::stage {
namespace {

// Samples that fetching may be ahead of the consumer, when they cost no memory: enough to keep a
// slow storage busy through a burst of compute, little enough that a seek stays cheap.
constexpr uint64_t kMaxAhead = 16384;
// How long to wait for another rank that reads a sample, before reading it oneself.
constexpr std::chrono::seconds kPeerPatience{10};
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

// True if the sample has its bytes from a tier; false if it must be read from the source.
bool Loader::Run::from_tier(Fetch& fetch, std::stop_token stop) {
  if (!config_.cache) return false;
  tier::NodeCache& cache = *config_.cache;
  Task& task = *fetch.work.task;
  const plan::SampleId sample = task.items[fetch.work.index].sample;
  if (!cache.placed(sample)) return false;
  const bool ram = cache.kind(sample) == tier::TierKind::ram;
  const uint64_t size = sizes_[sample];
  const auto patience = std::chrono::steady_clock::now() + kPeerPatience;
  for (tier::State state = cache.state(sample);; state = cache.state(sample)) {
    if (state == tier::State::ready) {
      const int64_t begin = now_ns();
      if (ram) {
        if (!transformed()) {
          std::memcpy(place_of(fetch.work).data(), cache.ram_view(sample).data(), size);
        }
        count(task, Origin::ram, size, now_ns() - begin);
        return true;
      }
      const Choice choice =
          choose({Candidate{}, Candidate{true, speeds_[size_t(Origin::file)].seconds_per_byte()},
                  Candidate{true, speeds_[size_t(Origin::source)].seconds_per_byte()}});
      if (choice.origin != Origin::file) return false;
      if (!cache.file_read(sample, raw_destination(fetch))) return false;
      speeds_[size_t(Origin::file)].record(size, now_ns() - begin);
      count(task, Origin::file, size, now_ns() - begin);
      return true;
    }
    if (state == tier::State::failed) return false;
    if (state == tier::State::empty) {
      if (!cache.claim(sample)) {
        // Somebody else was first, or the tier was given up since: then it stays empty for ever.
        if (!cache.placed(sample)) return false;
        continue;
      }
      fetch.claimed = true;
      fetch.to_file_tier = !ram;
      return false;
    }
    // Another rank is reading it: the shared file system is not asked twice.
    const auto left = patience - std::chrono::steady_clock::now();
    if (left.count() <= 0 || stop.stop_requested()) return false;
    cache.wait(sample, left, stop);
  }
}

bool Loader::Run::prepare_source_read(Fetch& fetch) {
  Task::Item& item = fetch.work.task->items[fetch.work.index];
  if (fetch.claimed && !fetch.to_file_tier) {
    fetch.into = config_.cache->ram_slot(item.sample);
    if (fetch.into.size() == sizes_[item.sample]) return true;
    fetch.claimed = false;  // no memory to be had: the cache has said so
  }
  try {
    fetch.into = raw_destination(fetch);
  } catch (const std::bad_alloc&) {
    after_source_read(fetch, ENOMEM);
    return false;
  }
  return true;
}

void Loader::Run::after_source_read(Fetch& fetch, int error) {
  Task::Item& item = fetch.work.task->items[fetch.work.index];
  item.read_error = error;
  if (!fetch.claimed) return;
  if (error != 0) {
    config_.cache->abandon(item.sample);
  } else if (!fetch.to_file_tier) {
    config_.cache->publish(item.sample);
    if (!transformed())
      std::memcpy(place_of(fetch.work).data(), fetch.into.data(), fetch.into.size());
  }
}

void Loader::Run::fetch(std::vector<Fetch>& chunk, source::Reader& reader, std::stop_token stop) {
  // Samples that another rank is reading come last, so that this rank's own reads are not held up.
  std::vector<Fetch*> later, to_read;
  for (Fetch& f : chunk) {
    const plan::SampleId sample = f.work.task->items[f.work.index].sample;
    const bool busy = config_.cache && config_.cache->placed(sample) &&
                      config_.cache->state(sample) == tier::State::filling;
    if (busy) {
      later.push_back(&f);
    } else if (from_tier(f, stop)) {
      f.done = true;
    } else {
      to_read.push_back(&f);
    }
  }
  std::vector<Work> finished;
  for (const Fetch& f : chunk) {
    if (f.done) finished.push_back(f.work);
  }
  finish(finished);

  for (;;) {
    if (!to_read.empty()) {
      std::vector<source::ReadRequest> requests;
      requests.reserve(to_read.size());
      uint64_t bytes = 0;
      finished.clear();
      std::erase_if(to_read, [&](Fetch* f) {
        if (prepare_source_read(*f)) return false;
        finished.push_back(f->work);
        return true;
      });
      finish(finished);
      for (const Fetch* f : to_read) {
        const plan::SampleId sample = f->work.task->items[f->work.index].sample;
        requests.push_back({sample, f->into, 0});
        bytes += f->into.size();
      }
      const int64_t begin = now_ns();
      reader.read(requests);
      const int64_t took = now_ns() - begin;
      speeds_[size_t(Origin::source)].record(bytes, took);
      finished.clear();
      // What goes to the file tier is written after the transform threads got it.
      std::vector<std::pair<plan::SampleId, std::shared_ptr<Buffer>>> to_write;
      for (size_t i = 0; i < to_read.size(); ++i) {
        Fetch& f = *to_read[i];
        after_source_read(f, requests[i].error);
        count(*f.work.task, Origin::source, requests[i].error == 0 ? requests[i].into.size() : 0,
              took / static_cast<int64_t>(to_read.size()));
        if (f.claimed && f.to_file_tier && requests[i].error == 0) {
          if (transformed()) {
            to_write.emplace_back(requests[i].sample, f.work.task->items[f.work.index].raw);
          } else {
            config_.cache->file_write(requests[i].sample, f.into);
          }
        }
        if (!transformed() && requests[i].error != 0) {
          handle_bad(f.work, source::read_error_text(requests[i].error), nullptr, reader);
        }
        finished.push_back(f.work);
      }
      finish(finished);
      for (const auto& [sample, raw] : to_write) {
        config_.cache->file_write(sample, {raw->data(), sizes_[sample]});
      }
      to_read.clear();
    }
    if (later.empty()) break;
    finished.clear();
    std::vector<Fetch*> still;
    for (Fetch* f : later) {
      // What this thread has claimed is read before it waits again: it may be the same sample, or
      // one that the rank waited for waits for.
      const plan::SampleId sample = f->work.task->items[f->work.index].sample;
      if (!to_read.empty() && config_.cache->state(sample) == tier::State::filling) {
        still.push_back(f);
      } else if (from_tier(*f, stop)) {
        finished.push_back(f->work);
      } else {
        to_read.push_back(f);
      }
    }
    later = std::move(still);
    finish(finished);
  }
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
