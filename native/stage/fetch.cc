// The fetch threads: where each sample comes from, and how its bytes get to where they are used.
//
// A fetch thread takes a chunk of samples in plan order (take_chunk) and repeats four steps until
// every sample of the chunk has its bytes or an error:
// 1. route() looks at each open sample. A tier of this node may have it (done). Else it is to be
//    read from the source, after claiming its place in the tier if it has one (source), or fetched
//    from its owner's node (peer), or it will arrive by itself (wait): another rank of this node is
//    reading it, or another node reads it first and will push it.
// 2. prepare() gives a destination to each sample that is to be read or fetched: its slot of the
//    RAM tier if this rank claimed it, else a transient buffer or its place in a raw batch.
// 3. Fetches from peers start, the reads from the source run meanwhile, then the fetches finish. A
//    sample that its owner failed to deliver stays open, and is read from the source next.
// 4. If nothing was done in this pass, the thread waits a moment for other ranks.
// A claim ends with settle_claim(): published with its bytes, or abandoned with the error. Copies
// for file tiers and for owners are made last, when the batch has its samples. An exception abandons
// the claims that it leaves open, once nothing moves to their places any more.
//
// The half of a sample's chunk of sub-batches may still be another chunk's. Then the sample waits for
// the ranks that use that one; but where the consumer waits for it, only for so long.
//
// With Sharing::owners_read and Sharing::hdmlp more threads (own_loop) read what this node is to keep,
// ahead of need; so does one (chunk_loop) for chunks.
#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/activity.h"
#include "base/clock.h"
#include "base/log.h"
#include "stage/events.h"
#include "stage/run.h"

namespace nostall::stage {
namespace {

// The longest wait for another node that reads a sample first; then this rank reads it itself.
constexpr std::chrono::seconds kPatience{60};
// The same while no node makes any progress.
constexpr std::chrono::seconds kSilence{2};
// One wait; then all samples are looked at again.
constexpr std::chrono::milliseconds kSlice{10};
// The longest wait while the consumer waits for that batch: the time of this many reads of the
// sample from the source, plus this many seconds in which the other node may not be scheduled.
constexpr double kWaitForReads = 20.0, kWaitSeconds = 0.05;
// An origin that is avoided is tried again at this interval.
constexpr int64_t kProbeNs = 2'000'000'000;
// Limits of what is read beside the wanted samples: bytes, and seconds at the source's speed, since
// the batch, and a stop, wait for the read.
constexpr uint64_t kMostBeside = uint64_t{16} << 20;
constexpr double kBesideSeconds = 0.25;
// Of groups of samples that are unpacked where they are read, one in so many is measured: to ask for
// the processor's time is a system call.
constexpr unsigned kMeasured = 16;
// Of samples that are made one by one: about as long as one read should take, since the batch, and a
// stop, wait for the whole of it.
constexpr int64_t kMadeTogetherNs = 50'000'000;
// A buffer that was made for so many times the bytes is given back.
constexpr size_t kSameBuffer = 8;

}  // namespace

void Loader::Run::fetch_loop(std::stop_token stop) {
  fields::Scratch scratch = make_scratch();
  const std::unique_ptr<source::Reader> reader =
      config_.source->make_reader(config_.reader, config_.depth);
  tier::RecordReader records(config_.depth, ring_refused_);
  Fetcher fetcher{*reader, records, scratch};
  std::vector<Fetch> chunk;
  chunk.reserve(2 * size_t{config_.depth});
  for (;;) {
    take_chunk(chunk, stop);
    if (chunk.empty()) return;
    if (direct_) {
      fetch_light(chunk, fetcher, stop);
    } else {
      fetch(chunk, fetcher, stop);
    }
  }
}

// Reads this rank's part of what the node is to keep, ahead of need, in the order given.
void Loader::Run::own_loop(std::span<const plan::SampleId> samples, std::stop_token stop) {
  Filling filling{config_.source->make_reader(config_.reader, config_.depth)};
  for (size_t i = config_.local_rank; i < samples.size() && !stop.stop_requested();
       i += config_.local_world) {
    claim_ahead(samples[i], samples[i], filling);
  }
  read_ahead(filling);
}

void Loader::Run::claim_ahead(plan::SampleId sample, uint64_t entry, Filling& filling) {
  tier::NodeCache& cache = *config_.cache;
  if (cache.state(entry) != tier::State::empty) return;
  tier::Claim claim(cache, entry);
  if (!claim) return;
  std::span<std::byte> into;
  if (cache.kind(entry) == tier::TierKind::ram) {
    into = cache.ram_slot(entry);
    if (into.size() != sizes_[sample]) return claim.let_go();  // no memory: the cache has said so
  } else {
    filling.buffers.push_back(raw_pool_->take(sizes_[sample]));
    into = {filling.buffers.back()->data(), sizes_[sample]};
  }
  filling.claims.push_back(std::move(claim));
  filling.requests.push_back({sample, into, 0});
  if (filling.requests.size() == config_.depth) read_ahead(filling);
}

void Loader::Run::read_ahead(Filling& filling) {
  if (filling.requests.empty()) return;
  tier::NodeCache& cache = *config_.cache;
  const int64_t begin = now_ns();
  {
    const Activity reading;
    filling.reader->read(filling.requests);
  }
  const int64_t took = now_ns() - begin;
  compare(filling.requests, *filling.reader);
  uint64_t bytes = 0;
  for (size_t i = 0; i < filling.requests.size(); ++i) {
    const source::ReadRequest& r = filling.requests[i];
    tier::Claim& claim = filling.claims[i];
    if (r.error != 0) continue;
    const uint64_t entry = claim.sample();
    bytes += r.into.size();
    if (cache.kind(entry) == tier::TierKind::ram) {
      cache.publish(entry);
    } else {
      cache.file_write(entry, r.into);
    }
    claim.let_go();
  }
  trace::record(kReadOwned, begin, now_ns(),
                {static_cast<int64_t>(filling.requests.size()), static_cast<int64_t>(bytes)});
  speeds_.source.record(bytes, took);
  own_bytes_ += bytes;
  filling.requests.clear();
  filling.claims.clear();
  filling.buffers.clear();
}

void Loader::Run::chunk_loop(std::stop_token stop) {
  Filling filling{config_.source->make_reader(config_.reader, config_.depth)};
  const uint64_t last = chunk_of(last_);
  for (uint64_t next = 0;; ++next) {
    KeptChunk kept;
    {
      MutexLock lock(mutex_);
      if (!next_chunk_.wait(lock, stop,
                            [&]() NOSTALL_REQUIRES(mutex_) { return next <= chunk_ + 1; })) {
        return;
      }
      next = std::max(next, chunk_);
      if (next > last) return;
      kept = kept_chunk(next);
    }
    fill_chunk(next, *kept.get(), filling, stop);
  }
}

void Loader::Run::fill_chunk(uint64_t chunk, const plan::KeptChunk& kept, Filling& filling,
                             std::stop_token stop) {
  tier::NodeCache& cache = *config_.cache;
  const auto passed = [&] {
    const MutexLock lock(mutex_);
    return chunk < chunk_ || stop.stop_requested();
  };
  struct Reading {
    tier::NodeCache& cache;
    Filling& filling;
    ~Reading() {
      filling.claims.clear();  // after an exception: of places that are another chunk's afterwards
      cache.read_for_chunk(std::nullopt);
    }
  } const reading{cache, filling};
  // The half stays the chunk's while this thread may write to it, whatever the consumer does.
  cache.read_for_chunk(chunk);
  tier::Half half = tier::Half::awaited;
  while (!passed() && (half = cache.half_of(chunk, kept)) == tier::Half::awaited) {
    cache.wait_for_half(kSlice);
  }
  for (size_t i = config_.local_rank; i < kept.fill.size() && half == tier::Half::here && !passed();
       i += config_.local_world) {
    const uint32_t place = kept.fill[i];
    claim_ahead(kept.samples[place], cache.entry_of(chunk, place), filling);
  }
  read_ahead(filling);
}

std::span<std::byte> Loader::Run::raw_destination(Fetch& fetch) {
  Task::Item& item = fetch.work.task->items[fetch.work.index];
  if (!transformed()) return place_of(fetch.work);
  item.raw = raw_pool_->take(sizes_[item.sample]);
  if (item.charged == 0) {
    const MutexLock lock(mutex_);
    item.charged = sizes_[item.sample];
    transient_ += item.charged;
    charged_ += item.charged > 0 ? 1 : 0;
  }
  return {item.raw->data(), sizes_[item.sample]};
}

// The four steps above, until no sample of the chunk is open.
void Loader::Run::fetch(std::vector<Fetch>& chunk, Fetcher& fetcher, std::stop_token stop) {
  std::vector<Fetch*> open;
  for (Fetch& f : chunk) open.push_back(&f);
  const auto begun = std::chrono::steady_clock::now();
  auto heard = begun;
  uint64_t events = config_.peers ? config_.peers->progress_events() : 0;
  while (!open.empty() && !stop.stop_requested()) {
    const auto now = std::chrono::steady_clock::now();
    if (config_.peers && config_.peers->progress_events() != events) {
      events = config_.peers->progress_events();
      heard = now;
    }
    std::vector<Fetch*> to_read, from_peers, from_files, from_copies, left;
    std::vector<Work> finished;
    const int64_t looked = now_ns();
    for (Fetch* f : open) {
      f->patient =
          now - begun < kPatience && now - heard < kSilence && worth_waiting(*f, now - begun);
      f->patient_locally = now - begun < config_.local_patience;
      switch (route(*f)) {
        case Route::done:
          finished.push_back(f->work);
          break;
        case Route::file:
          from_files.push_back(f);
          break;
        case Route::copy:
          from_copies.push_back(f);
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
    if (!finished.empty()) {
      trace::record(kReadTiers, looked, now_ns(), {static_cast<int64_t>(finished.size())});
    }
    finish(finished, &fetcher);
    const bool idle = finished.empty() && to_read.empty() && from_peers.empty() &&
                      from_files.empty() && from_copies.empty();
    prepare_all(from_copies);
    prepare_all(from_files);
    prepare_all(to_read);
    prepare_all(from_peers);
    std::shared_ptr<peer::FetchGroup> group;
    // An exception ends the claims of what is on its way into their places: not before it is there.
    struct Ending {
      peer::Exchange* peers;
      const std::shared_ptr<peer::FetchGroup>& group;
      std::stop_token stop;
      ~Ending() {
        if (group) peers->finish(*group, stop);
      }
    } const ending{config_.peers.get(), group, stop};
    if (!from_peers.empty()) group = ask_peers(from_peers);
    for (Fetch* f : read_copies(from_copies, fetcher)) left.push_back(f);
    for (Fetch* f : read_files(from_files, fetcher)) left.push_back(f);
    read_in_parts(to_read, fetcher, stop);
    if (group) {
      {
        const Activity receiving;
        config_.peers->finish(*group, stop);
      }
      for (Fetch* f : take_from_peers(from_peers, *group, fetcher)) left.push_back(f);
    }
    if (idle) wait_for_others(*left.front(), stop);
    open = std::move(left);
  }
}

// Where all samples come from the source and are quickly unpacked, the four steps are one: a group
// of samples is read into one buffer, and unpacked while it lies in the processor's cache. Batches
// are settled together, unless reading took long: the consumer is woken once for several.
void Loader::Run::fetch_light(std::span<const Fetch> chunk, Fetcher& fetcher,
                              std::stop_token stop) {
  const uint64_t most = config_.io_bytes / (fetchers() + (helps_ ? 1 : 0));
  int64_t began = now_ns();
  for (size_t first = 0, settled = 0; first < chunk.size() && !stop.stop_requested();) {
    size_t end = first;
    for (uint64_t bytes = 0; end < chunk.size(); ++end) {
      const Work& work = chunk[end].work;
      const uint64_t size = sizes_[work.task->items[work.index].sample];
      if (end - first >= config_.depth && bytes >= config_.source->batch_bytes()) break;
      if (end > first && bytes + size > most) break;
      bytes += size;
    }
    read_light(chunk.subspan(first, end - first), fetcher);
    first = end;
    if (first < chunk.size() && now_ns() - began < kTogetherNs) continue;
    settle(chunk.subspan(settled, first - settled));
    settled = first;
    began = now_ns();
  }
}

void Loader::Run::read_light(std::span<const Fetch> group, Fetcher& fetcher) {
  constexpr size_t kAligned = fields::Program::kAlignment;
  const auto sample_of = [](const Fetch& f) { return f.work.task->items[f.work.index].sample; };
  size_t bytes = 0;
  for (const Fetch& f : group) bytes += (sizes_[sample_of(f)] + kAligned - 1) / kAligned * kAligned;
  // The one before lies in this processor's cache.
  if (!fetcher.bytes || fetcher.bytes->capacity() < bytes ||
      fetcher.bytes->capacity() > kSameBuffer * bytes) {
    fetcher.bytes.reset();
    fetcher.bytes = raw_pool_->take(bytes);
  }
  std::byte* const buffer = fetcher.bytes->data();
  std::vector<source::ReadRequest>& requests = fetcher.requests;
  requests.clear();
  size_t at = 0;
  for (const Fetch& f : group) {
    const uint64_t size = sizes_[sample_of(f)];
    requests.push_back({sample_of(f), {buffer + at, size}});
    at += (size + kAligned - 1) / kAligned * kAligned;
  }
  const int64_t took = ask_source(requests, bytes, fetcher.reader);
  const bool measured = fetcher.groups++ % kMeasured == 0;
  const int64_t begin = measured ? thread_cpu_ns() : 0;
  const Task* ready = nullptr;
  for (size_t i = 0; i < group.size(); ++i) {
    const Work work = group[i].work;
    const source::ReadRequest& request = requests[i];
    if (work.task != ready) take_memory(*work.task);
    ready = work.task;
    if (request.error != 0) {
      handle_unread(work, request.error, source::read_error_text(request), &fetcher.scratch,
                    fetcher.reader);
      continue;
    }
    unpack_or_replace(work, request.into, fetcher.scratch, fetcher.reader);
  }
  const auto of_all = static_cast<double>(std::max<size_t>(bytes, 1));
  if (measured) fetcher.ns_per_byte = static_cast<double>(thread_cpu_ns() - begin) / of_all;
  const auto spent = static_cast<int64_t>(fetcher.ns_per_byte * of_all);
  for (size_t first = 0, end = 0; first < group.size(); first = end) {
    Task& task = *group[first].work.task;
    uint64_t read = 0;
    for (; end < group.size() && group[end].work.task == &task; ++end) {
      if (requests[end].error == 0) read += requests[end].into.size();
    }
    const auto share = static_cast<int64_t>(end - first), all = static_cast<int64_t>(group.size());
    const MutexLock lock(task.counters);
    add_to(task, Origin::source, read, took * share / all, end - first);
    task.batch->transform_ns += spent * share / all;
  }
}

// Whether to go on waiting for a sample that another node reads first: yes while the consumer does
// not wait for its batch, or the source would hardly be quicker.
bool Loader::Run::worth_waiting(const Fetch& fetch, std::chrono::nanoseconds waited) {
  const SpeedEstimate* const from = speed_of_peer(fetch.work.task->items[fetch.work.index].sample);
  const double peer = from ? from->seconds_per_byte() : 0.0;
  const double source = speeds_.source.seconds_per_byte();
  if (!worth_pushing(peer, source)) return false;
  const Task& task = *fetch.work.task;
  const double read = source * static_cast<double>(sizes_[task.items[fetch.work.index].sample]);
  if (std::chrono::duration<double>(waited).count() < kWaitForReads * read + kWaitSeconds) {
    return true;
  }
  const MutexLock lock(mutex_);
  return task.sequence != handed_out_;
}

// What to do next about a sample; with Route::source or Route::peer it may have been claimed.
Loader::Run::Route Loader::Run::route(Fetch& fetch) {
  const Task& task = *fetch.work.task;
  Task::Item& item = fetch.work.task->items[fetch.work.index];
  const plan::SampleId sample = item.sample;
  tier::NodeCache* const cache = config_.cache.get();
  // A tier without memory has no halves to wait for.
  if (item.entry != sample && !cache->placed(item.entry)) item.entry = sample;
  if (item.entry != sample) {
    const tier::Half half = cache->half_of(task.chunk, *task.kept);
    if (half == tier::Half::awaited && worth_waiting_for_half(fetch)) return Route::wait;
    if (half == tier::Half::here) lapsed_ = false;
    if (half != tier::Half::here) item.entry = sample;  // which no tier has
  }
  const uint64_t entry = item.entry;
  if (item.copy.place != plan::kNoPlace && !std::exchange(fetch.looked_for_copy, true)) {
    return Route::copy;
  }
  const peer::Where where = !config_.peers || fetch.shunned
                                ? peer::Where::source
                                : config_.peers->where(sample, task.batch->position.epoch);
  const bool awaited =
      where == peer::Where::awaited && fetch.patient && config_.sharing == Sharing::push;
  const bool there = where == peer::Where::there;
  const auto elsewhere = [&] {
    return origin_of(sample, false, there) == Origin::peer ? Route::peer : Route::source;
  };
  // What a tier is to have is read for it apart from what the batches need.
  const bool apart = config_.peers && config_.sharing == Sharing::hdmlp;
  if (!cache || !cache->placed(entry)) return awaited ? Route::wait : elsewhere();
  for (;;) {
    switch (cache->state(entry)) {
      case tier::State::ready:
        if (cache->kind(entry) == tier::TierKind::ram) {
          return from_memory(fetch) ? Route::done : elsewhere();
        }
        switch (origin_of(sample, true, there)) {
          case Origin::peer:
            return Route::peer;
          case Origin::source:
            return Route::source;
          default:
            return Route::file;
        }
      case tier::State::failed:
        return awaited ? Route::wait : elsewhere();
      case tier::State::filling:
        // Another rank is reading it: the shared file system is not asked twice.
        return fetch.patient_locally && !apart ? Route::wait : elsewhere();
      case tier::State::empty:
        break;
    }
    if (awaited) return Route::wait;
    if (apart) return elsewhere();
    fetch.claim = tier::Claim(*cache, entry);
    if (fetch.claim) return elsewhere();
    // Another rank was first; or the tier has failed since, and the sample stays empty.
    if (!cache->placed(entry)) return elsewhere();
  }
}

bool Loader::Run::worth_waiting_for_half(Fetch& fetch) {
  if (lapsed_) return false;
  {
    const MutexLock lock(mutex_);
    if (fetch.work.task->sequence != handed_out_) return true;
  }
  const int64_t now = now_ns();
  if (fetch.waited_since == 0) fetch.waited_since = now;
  const std::chrono::nanoseconds waited(now - fetch.waited_since);
  if (waited < config_.local_patience) return true;
  if (!lapsed_.exchange(true)) {
    log(LogLevel::warning,
        "another rank of this node is so far behind that its sub-batches are still in the RAM "
        "tier; "
        "this rank reads from the source until it follows");
  }
  return false;
}

SpeedEstimate* Loader::Run::speed_of_peer(plan::SampleId sample) const {
  if (!config_.peers) return nullptr;
  const plan::Ownership& owners = config_.peers->ownership();
  uint32_t node = owners.owner[sample];
  if (node == config_.peers->node_of_rank()[config_.rank]) node = owners.first_reader[sample];
  return node < speeds_.nodes.size() ? &speeds_.nodes[node] : nullptr;
}

Origin Loader::Run::origin_of(plan::SampleId sample, bool in_file_tier, bool there) {
  if (!in_file_tier && !there) return Origin::source;
  SpeedEstimate* const file =
      in_file_tier ? &speeds_.tiers[config_.cache->tier_of(sample)] : nullptr;
  SpeedEstimate* const peer = there ? speed_of_peer(sample) : nullptr;
  SpeedEstimate& source = speeds_.source;
  const auto cost = [](const SpeedEstimate* speed) {
    return speed ? speed->seconds_per_byte() : 0.0;
  };
  Choice choice = choose({Candidate{},
                          {file != nullptr, cost(file)},
                          {peer != nullptr, cost(peer)},
                          {true, cost(&source)}});
  // Those that are slower are tried at times, for they may have become faster.
  const double best = best_source_.load(std::memory_order_relaxed);
  if (file && choice.origin != Origin::file && file->stale(kProbeNs)) {
    choice = {Origin::file, Reason::again};
  } else if (peer && choice.origin != Origin::peer && peer->stale(kProbeNs)) {
    choice = {Origin::peer, Reason::again};
  } else if (choice.origin == Origin::peer && best > 0.0 &&
             cost(peer) > kSourceAdvantageOverPeers * best && source.stale(kProbeNs)) {
    choice = {Origin::source, Reason::again};
  }
  if (trace::on() && choice.reason != Reason::nearest) {
    const int64_t now = now_ns();
    trace::record(kChose[static_cast<size_t>(choice.reason)], now, now,
                  {static_cast<int64_t>(sample),
                   choice.reason == Reason::again ? static_cast<int64_t>(choice.origin)
                   : peer ? static_cast<int64_t>(peer - speeds_.nodes.data())
                          : 0});
  }
  return choice.origin;
}

// Takes a sample that is ready in the RAM tier; false if it is there no more, or its bytes are wrong.
bool Loader::Run::from_memory(Fetch& fetch) {
  tier::NodeCache& cache = *config_.cache;
  const Task::Item& item = fetch.work.task->items[fetch.work.index];
  const plan::SampleId sample = item.sample;
  const uint64_t entry = item.entry;
  const uint64_t size = sizes_[sample];
  const int64_t begin = now_ns();
  if (!transformed()) {
    const std::span<std::byte> place = place_of(fetch.work);
    const tier::RamView view = cache.ram_view(entry);
    if (!view) return false;
    std::memcpy(place.data(), view.bytes().data(), size);
    if (!sums_.agrees(sample, place)) {
      cache.reject(entry);
      return false;
    }
  }  // else compared just before it is decoded
  count(*fetch.work.task, Origin::ram, size, now_ns() - begin);
  return true;
}

std::vector<Loader::Run::Fetch*> Loader::Run::read_copies(std::span<Fetch* const> fetches,
                                                          Fetcher& fetcher) {
  std::vector<Fetch*> again;
  std::vector<Work> finished;
  const int64_t looked = now_ns();
  for (Fetch* f : fetches) {
    Task::Item& item = f->work.task->items[f->work.index];
    const int64_t begin = now_ns();
    const bool found = config_.cache->read_copy(item.copy, item.sample, f->into);
    if (item.copy.held) {
      copies_.planned.fetch_add(1, std::memory_order_relaxed);
      if (found) copies_.found.fetch_add(1, std::memory_order_relaxed);
    }
    if (found) {
      count(*f->work.task, Origin::ram, f->into.size(), now_ns() - begin);
      finished.push_back(f->work);
    } else {
      item.raw.reset();
      again.push_back(f);
    }
  }
  if (!finished.empty()) {
    trace::record(kReadTiers, looked, now_ns(), {static_cast<int64_t>(finished.size())});
  }
  finish(finished, &fetcher);
  return again;
}

// Puts what came from elsewhere where the plan has a place for it, if nobody uses that.
void Loader::Run::keep_for_next_use(const Fetch& fetch) {
  const Task::Item& item = fetch.work.task->items[fetch.work.index];
  if (item.copy.keep) config_.cache->write_copy(item.copy, item.sample, fetch.into);
}

// Reads samples of file tiers, those of a tier together. Returns those that cannot be read, which
// are not ready any more.
std::vector<Loader::Run::Fetch*> Loader::Run::read_files(std::span<Fetch* const> fetches,
                                                         Fetcher& fetcher) {
  std::vector<Fetch*> again;
  if (fetches.empty()) return again;
  tier::NodeCache& cache = *config_.cache;
  std::vector<Work> finished;
  const auto sample_of = [](const Fetch* f) { return f->work.task->items[f->work.index].sample; };
  std::vector<Fetch*> open(fetches.begin(), fetches.end());
  std::ranges::stable_sort(open, {}, [&](const Fetch* f) { return cache.tier_of(sample_of(f)); });
  std::vector<tier::TierRead> reads;
  for (size_t first = 0, end = 0; first < open.size(); first = end) {
    const size_t t = cache.tier_of(sample_of(open[first]));
    reads.clear();
    uint64_t bytes = 0;
    for (; end < open.size() && cache.tier_of(sample_of(open[end])) == t; ++end) {
      reads.push_back({sample_of(open[end]), open[end]->into});
      bytes += open[end]->into.size();
    }
    const int64_t begin = now_ns();
    {
      const Activity reading;
      cache.file_read(reads, fetcher.records);
    }
    const int64_t took = now_ns() - begin;
    trace::record(kReadFiles, begin, begin + took,
                  {static_cast<int64_t>(t), static_cast<int64_t>(reads.size()),
                   static_cast<int64_t>(bytes), fetcher.records.many() ? 1 : 0});
    for (size_t i = 0; i < reads.size(); ++i) {
      Fetch* const f = open[first + i];
      if (!reads[i].good) {
        bytes -= f->into.size();
        f->work.task->items[f->work.index].raw.reset();
        again.push_back(f);
        continue;
      }
      count(*f->work.task, Origin::file, f->into.size(), took / static_cast<int64_t>(reads.size()));
      finished.push_back(f->work);
    }
    speeds_.tiers[t].record(bytes, took);
  }
  finish(finished, &fetcher);
  return again;
}

void Loader::Run::wait_for_others(const Fetch& fetch, std::stop_token stop) {
  const Task& task = *fetch.work.task;
  const Task::Item& item = task.items[fetch.work.index];
  trace::Span span(kWaitOthers);
  span.values[0] = static_cast<int64_t>(item.sample);
  tier::NodeCache* const cache = config_.cache.get();
  if (item.entry != item.sample && cache->half_of(task.chunk, *task.kept) != tier::Half::here) {
    cache->wait_for_half(kSlice);
  } else if (cache && cache->placed(item.entry) &&
             cache->state(item.entry) == tier::State::filling) {
    cache->wait(item.entry, kSlice, stop);
  } else if (config_.peers) {
    config_.peers->wait_for_progress(kSlice, stop);
  }  // else its state has changed since route()
}

// Sets where the bytes of a sample go: its slot of the RAM tier if this rank claimed it.
bool Loader::Run::prepare(Fetch& fetch) {
  Task::Item& item = fetch.work.task->items[fetch.work.index];
  if (fetch.claim && config_.cache->kind(item.entry) == tier::TierKind::ram) {
    fetch.into = config_.cache->ram_slot(item.entry);
    fetch.in_ram_tier = fetch.into.size() == sizes_[item.sample];
    if (fetch.in_ram_tier) return true;
    fetch.claim.let_go();  // no memory: the cache has logged it
  }
  try {
    fetch.into = raw_destination(fetch);
  } catch (const std::bad_alloc&) {
    settle_claim(fetch, ENOMEM, source::read_error_text(ENOMEM));
    return false;
  }
  return true;
}

// Samples without memory for their bytes are finished with that error.
void Loader::Run::prepare_all(std::vector<Fetch*>& fetches) {
  std::vector<Work> finished;
  std::erase_if(fetches, [&](Fetch* f) {
    if (prepare(*f)) return false;
    finished.push_back(f->work);
    return true;
  });
  finish(finished, nullptr);
}

// Ends the claim of a sample, but that of a file tier which is yet to be written. Its bytes are in
// `into`, or `error` says why not.
void Loader::Run::settle_claim(Fetch& fetch, int error, std::string why) {
  Task::Item& item = fetch.work.task->items[fetch.work.index];
  item.read_error = error;
  item.read_why = std::move(why);
  if (error != 0) {
    fetch.claim.abandon();
    fetch.in_ram_tier = false;
  } else if (fetch.in_ram_tier) {
    if (!transformed())
      std::memcpy(place_of(fetch.work).data(), fetch.into.data(), fetch.into.size());
    config_.cache->publish(item.entry);
    fetch.claim.let_go();
  }
}

std::vector<Loader::Run::Beside> Loader::Run::claim_beside(std::span<Fetch* const> fetches) {
  std::vector<Beside> beside;
  tier::NodeCache* const cache = config_.cache.get();
  if (!cache) return beside;
  const double byte = speeds_.source.seconds_per_byte();
  uint64_t room = kMostBeside;
  if (byte > 0.0) room = std::min(room, static_cast<uint64_t>(kBesideSeconds / byte));
  std::vector<uint64_t> near;
  for (const Fetch* f : fetches) {
    if (!f->claim) continue;  // no tier will have this part of the source
    const Task& task = *f->work.task;
    near.clear();
    config_.source->around(task.items[f->work.index].sample, near);
    for (const uint64_t sample : near) {
      const uint64_t size = sizes_[sample];
      if (size > room) return beside;
      if (!cache->placed(sample) || cache->state(sample) != tier::State::empty) continue;
      // What another node reads first, or has, comes from there.
      if (config_.peers &&
          config_.peers->where(sample, task.batch->position.epoch) != peer::Where::source) {
        continue;
      }
      Beside b{tier::Claim(*cache, sample), {}, {}};
      if (!b.claim) continue;
      if (cache->kind(sample) == tier::TierKind::ram) {
        b.into = cache->ram_slot(sample);
        if (b.into.size() != size) {  // no memory: the cache has said so
          b.claim.let_go();
          continue;
        }
      } else {
        try {
          b.buffer = raw_pool_->take(size);
        } catch (const std::bad_alloc&) {
          return beside;
        }
        b.into = {b.buffer->data(), size};
      }
      room -= size;
      beside.push_back(std::move(b));
    }
  }
  return beside;
}

void Loader::Run::keep_beside(std::vector<Beside> beside,
                              std::span<const source::ReadRequest> requests) {
  for (size_t i = 0; i < beside.size(); ++i) {
    if (requests[i].error != 0) continue;  // reported when a batch needs it
    Beside& b = beside[i];
    own_bytes_ += b.into.size();
    if (b.buffer) {
      config_.cache->file_write(b.claim.sample(), b.into);
    } else {
      config_.cache->publish(b.claim.sample());
    }
    b.claim.let_go();
  }
}

int64_t Loader::Run::ask_source(std::span<source::ReadRequest> requests, uint64_t bytes,
                                source::Reader& reader) {
  const int64_t begin = now_ns();
  {
    const Activity reading;
    reader.read(requests);
  }
  const int64_t took = now_ns() - begin;
  compare(requests, reader);
  SpeedEstimate& speed = speeds_.source;
  speed.record(bytes, took);
  const double best = best_source_.load(std::memory_order_relaxed);
  if (best == 0.0 || speed.seconds_per_byte() < best) {
    best_source_.store(speed.seconds_per_byte(), std::memory_order_relaxed);
  }
  if (trace::on()) {
    const auto failed = std::count_if(requests.begin(), requests.end(),
                                      [](const auto& request) { return request.error != 0; });
    trace::record(kReadSource, begin, begin + took,
                  {static_cast<int64_t>(requests.size()), static_cast<int64_t>(bytes), failed});
  }
  return took;
}

// A chunk of samples that take a second each would be as many seconds away from its first batch.
void Loader::Run::read_in_parts(std::span<Fetch* const> fetches, Fetcher& fetcher,
                                std::stop_token stop) {
  const size_t least = config_.source->made_at_once();
  while (!fetches.empty() && !stop.stop_requested()) {
    size_t& most = fetcher.made_together;
    most = std::max(most, least);
    const auto part = fetches.first(least == 0 ? fetches.size() : std::min(most, fetches.size()));
    const int64_t begin = now_ns();
    read_source(part, fetcher, stop);
    const int64_t took = now_ns() - begin;
    if (took > 2 * kMadeTogetherNs) most /= 2;
    if (took < kMadeTogetherNs && part.size() == most) most *= 2;
    fetches = fetches.subspan(part.size());
  }
  for (Fetch* f : fetches) settle_claim(*f, ECANCELED, {});
}

void Loader::Run::read_source(std::span<Fetch* const> fetches, Fetcher& fetcher,
                              std::stop_token stop) {
  source::Reader& reader = fetcher.reader;
  std::vector<Beside> beside = claim_beside(fetches);
  std::vector<source::ReadRequest> requests;
  requests.reserve(fetches.size() + beside.size());
  uint64_t bytes = 0;
  const auto ask = [&](plan::SampleId sample, std::span<std::byte> into, bool once) {
    source::ReadRequest request{sample, into};
    request.once = once;
    requests.push_back(std::move(request));
    bytes += into.size();
  };
  for (const Fetch* f : fetches) {
    ask(f->work.task->items[f->work.index].sample, f->into, bool(f->claim));
  }
  for (const Beside& b : beside) ask(b.claim.sample(), b.into, true);
  const int64_t took = ask_source(requests, bytes, reader);
  std::vector<Work> finished;
  std::vector<Kept> kept;
  for (size_t i = 0; i < fetches.size(); ++i) {
    Fetch& f = *fetches[i];
    const source::ReadRequest& request = requests[i];
    const std::string why = request.error != 0 ? source::read_error_text(request) : std::string();
    settle_claim(f, request.error, why);
    count(*f.work.task, Origin::source, request.error == 0 ? request.into.size() : 0,
          took / static_cast<int64_t>(fetches.size()));
    if (request.error == 0) {
      keep_for_next_use(f);
      keep_copy(f, kept);
    } else if (!transformed()) {
      handle_unread(f.work, request.error, why, nullptr, reader);
    }
    finished.push_back(f.work);
  }
  finish(finished, &fetcher);
  keep_beside(std::move(beside), std::span(requests).subspan(fetches.size()));
  for (Kept& k : kept) pass_on(k, stop);
}

std::shared_ptr<peer::FetchGroup> Loader::Run::ask_peers(std::span<Fetch* const> fetches) {
  std::vector<peer::Fetch> requests;
  requests.reserve(fetches.size());
  for (Fetch* f : fetches) {
    const Task::Item& item = f->work.task->items[f->work.index];
    std::shared_ptr<void> keep = item.raw;
    if (!keep)
      keep = f->in_ram_tier ? std::static_pointer_cast<void>(config_.cache)
                            : std::static_pointer_cast<void>(f->work.task->batch->buffer);
    requests.push_back({item.sample, f->into, std::move(keep), peer::Outcome::waiting});
  }
  return config_.peers->begin(std::move(requests));
}

// Returns the samples that did not arrive: they are read from the source. The others are finished.
std::vector<Loader::Run::Fetch*> Loader::Run::take_from_peers(std::span<Fetch* const> fetches,
                                                              const peer::FetchGroup& group,
                                                              Fetcher& fetcher) {
  std::vector<Fetch*> again;
  std::vector<Work> finished;
  std::vector<Kept> kept;
  int64_t took = 0;
  for (const peer::Fetch& f : group.requests) took = std::max(took, f.ended_ns - group.begun_ns());
  // By the speed of the node that they are of: bytes, and the time until the last of them came.
  std::vector<std::pair<SpeedEstimate*, std::pair<uint64_t, int64_t>>> came;
  uint64_t bytes = 0;
  for (size_t i = 0; i < fetches.size(); ++i) {
    Fetch& f = *fetches[i];
    const plan::SampleId sample = f.work.task->items[f.work.index].sample;
    const bool here = group.requests[i].outcome == peer::Outcome::here;
    if (here && sums_.agrees(sample, f.into)) {
      settle_claim(f, 0, {});
      keep_for_next_use(f);
      bytes += f.into.size();
      SpeedEstimate* const speed = speed_of_peer(sample);
      auto of = std::find_if(came.begin(), came.end(), [&](auto& c) { return c.first == speed; });
      if (of == came.end()) of = came.insert(came.end(), {speed, {0, 0}});
      of->second.first += f.into.size();
      of->second.second =
          std::max(of->second.second, group.requests[i].ended_ns - group.begun_ns());
      count(*f.work.task, Origin::peer, f.into.size(), took / static_cast<int64_t>(fetches.size()));
      if (f.claim) keep_copy(f, kept);
      finished.push_back(f.work);
      continue;
    }
    if (here && !warned_of_peers_.exchange(true)) {
      log(LogLevel::warning, "another node sent " + config_.source->describe(sample) +
                                 " with other bytes than those that this node read first: its copy "
                                 "of the data set may be another one; the sample is read from the "
                                 "source instead");
    }
    settle_claim(f, EHOSTUNREACH, {});
    Task::Item& item = f.work.task->items[f.work.index];
    item.read_error = 0;  // of that owner, not of the sample
    item.raw.reset();
    f.shunned = true;
    again.push_back(&f);
  }
  for (const auto& [speed, seen] : came) {
    if (speed) speed->record(seen.first, seen.second);
  }
  const int64_t now = now_ns();
  trace::record(kFetchPeers, now - took, now,
                {static_cast<int64_t>(fetches.size()),
                 static_cast<int64_t>(fetches.size() - again.size()), static_cast<int64_t>(bytes)});
  finish(finished, &fetcher);
  for (Kept& k : kept) write_to_tier(k);
  return again;
}

// Notes that bytes are to be written to a file tier or pushed, if they are.
void Loader::Run::keep_copy(Fetch& fetch, std::vector<Kept>& kept) {
  const Task::Item& item = fetch.work.task->items[fetch.work.index];
  const SpeedEstimate* const owner = speed_of_peer(item.sample);
  const bool push =
      config_.peers && config_.sharing == Sharing::push &&
      config_.peers->push_wanted(item.sample) &&
      worth_pushing(owner ? owner->seconds_per_byte() : 0.0, speeds_.source.seconds_per_byte());
  if (!fetch.claim && !push) return;
  Kept k{item.sample, std::move(fetch.claim), push, item.raw, fetch.into};
  if (fetch.in_ram_tier) {
    const auto view = tier::shared_view(config_.cache, item.entry);
    if (!view) return;  // its memory was given back
    k.keep = view;
    k.bytes = view->bytes();
  } else if (!transformed()) {
    const std::shared_ptr<Buffer> copy = raw_pool_->take(fetch.into.size());
    std::memcpy(copy->data(), fetch.into.data(), fetch.into.size());
    k.keep = copy;
    k.bytes = {copy->data(), fetch.into.size()};
  }
  kept.push_back(std::move(k));
}

void Loader::Run::pass_on(Kept& kept, std::stop_token stop) {
  trace::Span span(kPassOn);
  span.values = {static_cast<int64_t>(kept.sample), static_cast<int64_t>(kept.bytes.size())};
  if (kept.push) config_.peers->push(kept.sample, kept.bytes, kept.keep, stop);
  write_to_tier(kept);
}

void Loader::Run::write_to_tier(Kept& kept) {
  if (!kept.claim) return;
  config_.cache->file_write(kept.sample, kept.bytes);
  kept.claim.let_go();
}

}  // namespace nostall::stage
