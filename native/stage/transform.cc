// The transform threads, and what stands in for a sample that cannot be used.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "base/clock.h"
#include "base/random.h"
#include "stage/events.h"
#include "stage/run.h"

namespace nostall::stage {
namespace {
// A thread that has had no image to decode for this long gives its memory back.
constexpr auto kIdle = std::chrono::seconds(1);

uint64_t memory_of_the_machine() {
  return static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
         static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

// Why a sample of `size` bytes cannot be read, where the reason is none of its file: another sample
// in its place would change the data by what this process lacks.
std::optional<Error> lacking(int error, const std::string& why, uint64_t size) {
  switch (error) {
    case EFAULT:
      return Error(ErrorKind::io,
                   "memory of the loader cannot be written (" + why +
                       "), for another part of the program has closed or unmapped it: the file is "
                       "not at fault",
                   error);
    case EMFILE:
    case ENFILE:
      return Error(ErrorKind::io,
                   why + ": the file is not at fault; close files, or raise the limit (ulimit -n)",
                   error);
    case ENOMEM:
      if (size > memory_of_the_machine()) return std::nullopt;
      return Error(ErrorKind::io,
                   why +
                       ": the file is not at fault; free memory, raise the limit (ulimit -v), or "
                       "give the loader fewer threads",
                   error);
    default:
      return std::nullopt;
  }
}
}  // namespace

std::span<std::byte> Loader::Run::place_of(Work work) const {
  const Batch& batch = *work.task->batch;
  return {batch.buffer->data() + batch.offsets[work.index],
          static_cast<size_t>(sizes_[work.task->items[work.index].sample])};
}

image::SampleKey Loader::Run::key_of(Work work, plan::SampleId sample) const {
  return {seed_of_occurrence(config_.job.seed, work.task->items[work.index].occurrence),
          work.task->batch->position.epoch, sample};
}

void Loader::Run::transform_loop(std::stop_token stop) {
  fields::Scratch scratch = make_scratch();
  const uint64_t keep = config_.io_bytes / workers();
  const std::unique_ptr<source::Reader> reader =
      config_.source->make_reader(source::ReaderKind::pread, 1);
  for (;;) {
    Work work;
    {
      MutexLock lock(mutex_);
      const auto startable = [&]() NOSTALL_REQUIRES(mutex_) {
        return !fetched_.empty() && fetched_.top().first.first < handed_out_ + max_staged_;
      };
      if (!transformable_.wait_for(lock, stop, kIdle, startable)) {
        scratch.release_above(keep);
        transformable_.wait(lock, stop, startable);
      }
      // What is left may be thousands of samples.
      if (stop.stop_requested()) return;
      work = {fetched_.top().second, fetched_.top().first.second};
      fetched_.pop();
    }
    transform({&work, 1}, scratch, *reader);
    scratch.trim(keep);
  }
}

// Without mutex_: LoaderConfig::batch_memory may take long, or call what uses this loader.
void Loader::Run::take_memory(Task& task) {
  Batch& batch = *task.batch;
  const MutexLock lock(task.memory);
  if (!batch.buffer && batch.bytes > 0) batch.buffer = batch_pool_->take(batch.bytes);
}

void Loader::Run::settle(Task& task, size_t samples) {
  {
    const MutexLock lock(mutex_);
    task.left -= samples;
    if (task.left > 0) return;
    // Once it is ready it may be handed out and gone at any time.
    if (!completes()) task.ready = true;
  }
  if (completes()) {
    const int64_t begin = thread_cpu_ns();
    complete(task);
    {
      const MutexLock lock(task.counters);
      task.batch->transform_ns += thread_cpu_ns() - begin;
    }
    const MutexLock lock(mutex_);
    task.ready = true;
  }
  ready_.notify_one();
}

void Loader::Run::settle(std::span<const Fetch> fetches) {
  bool ready = false;
  std::vector<std::pair<Task*, size_t>> whole;  // batches that need more, and their samples here
  {
    const MutexLock lock(mutex_, Briefly());
    while (!fetches.empty()) {
      Task* const task = fetches[0].work.task;
      size_t samples = 0;
      while (samples < fetches.size() && fetches[samples].work.task == task) ++samples;
      fetches = fetches.subspan(samples);
      if (completes()) {
        whole.emplace_back(task, samples);
      } else if ((task->left -= samples) == 0) {
        task->ready = ready = true;
      }
    }
    ready = ready && worth_handing_over(false);
  }
  if (ready) ready_.notify_one();
  for (const auto& [task, samples] : whole) settle(*task, samples);
}

Result<std::monostate> Loader::Run::unpack(Work work, plan::SampleId sample,
                                           std::span<const std::byte> record,
                                           fields::Scratch& scratch) {
  auto located = config_.source->locate(sample, record, scratch.located);
  if (!located) return located;
  Task& task = *work.task;
  const size_t ragged = config_.program->ragged();
  const fields::Place place{task.batch->buffer ? task.batch->buffer->data() : nullptr,
                            task.items.size(), work.index,
                            std::span(task.ragged).subspan(work.index * ragged, ragged),
                            task.holding ? &*task.holding : nullptr};
  return config_.program->apply(scratch.located, key_of(work, sample), scratch, place);
}

void Loader::Run::transform(Work work, fields::Scratch& scratch, source::Reader& reader) {
  Task::Item& item = work.task->items[work.index];
  trace::Span span(kDecode);
  const Position position = work.task->batch->position;
  span.values = {static_cast<int64_t>(item.sample), static_cast<int64_t>(sizes_[item.sample]),
                 position.epoch, static_cast<int64_t>(position.batch)};
  std::span<const std::byte> bytes;
  tier::RamView view;
  if (item.read_error == 0) bytes = checked_view(item, reader, view);
  if (item.read_error != 0) {
    handle_unread(work, item.read_error, item.read_why, &scratch, reader);
  } else {
    unpack_or_replace(work, bytes, scratch, reader);
  }
  item.raw.reset();
}

void Loader::Run::unpack_or_replace(Work work, std::span<const std::byte> record,
                                    fields::Scratch& scratch, source::Reader& reader) {
  const plan::SampleId sample = work.task->items[work.index].sample;
  const auto result = unpack(work, sample, record, scratch);
  if (result) return;
  if (result.error().kind() == ErrorKind::corruption) {
    forget(sample);
    handle_bad(work, result.error().what(), &scratch, reader);
  } else {
    fail(*work.task, sample, result.error());
  }
}

void Loader::Run::transform(std::span<const Work> works, fields::Scratch& scratch,
                            source::Reader& reader) {
  while (!works.empty()) {
    Task& task = *works[0].task;
    take_memory(task);
    const int64_t begin = thread_cpu_ns();
    uint64_t charged = 0, bytes = 0;
    size_t samples = 0;
    for (; samples < works.size() && works[samples].task == &task; ++samples) {
      transform(works[samples], scratch, reader);
      const uint64_t held = task.items[works[samples].index].charged;
      bytes += held;
      charged += held > 0 ? 1 : 0;
    }
    if (charged != 0) {
      {
        const MutexLock lock(mutex_);
        transient_ -= bytes;
        charged_ -= charged;
      }
      fetchable_.notify_one();
    }
    {
      const MutexLock lock(task.counters);
      task.batch->transform_ns += thread_cpu_ns() - begin;
    }
    works = works.subspan(samples);
    settle(task, samples);
  }
}

// The bytes of these samples have arrived: raw ones are finished, others are unpacked here where
// that is quicker than waking another thread, or queued for transforms.
void Loader::Run::finish(std::span<const Work> works, Fetcher* fetcher) {
  if (works.empty()) return;
  bool ready = false;
  std::vector<Work> here;
  size_t queued = 0;
  {
    const MutexLock lock(mutex_);
    for (const Work& work : works) {
      if (!transformed()) {
        if (--work.task->left == 0) work.task->ready = ready = true;
      } else if (fetcher && light_ && work.task->sequence < handed_out_ + max_staged_) {
        here.push_back(work);
      } else {
        fetched_.push({{work.task->sequence, work.index}, work.task});
        ++queued;
      }
    }
  }
  if (ready) ready_.notify_one();
  if (queued == 1) transformable_.notify_one();
  if (queued > 1) transformable_.notify_all();
  if (!here.empty()) transform(here, fetcher->scratch, fetcher->reader);
}

void Loader::Run::count(Task& task, Origin origin, uint64_t bytes, int64_t nanoseconds,
                        uint64_t samples) {
  const MutexLock lock(task.counters);
  add_to(task, origin, bytes, nanoseconds, samples);
}

void Loader::Run::add_to(Task& task, Origin origin, uint64_t bytes, int64_t nanoseconds,
                         uint64_t samples) {
  OriginCount& c = task.batch->origins[size_t(origin)];
  c.samples += samples;
  c.bytes += bytes;
  c.nanoseconds += nanoseconds;
}

// ------------------------------------------------------------------------------------ bad samples

int Loader::Run::read_whole(plan::SampleId sample, std::span<std::byte> into,
                            source::Reader& reader, std::string& reason) {
  if (config_.cache && config_.cache->placed(sample) &&
      config_.cache->state(sample) == tier::State::ready) {
    if (config_.cache->kind(sample) == tier::TierKind::ram) {
      if (const tier::RamView view = config_.cache->ram_view(sample)) {
        std::memcpy(into.data(), view.bytes().data(), into.size());
        if (sums_.agrees(sample, into)) return 0;
        config_.cache->reject(sample);
      }
    } else if (config_.cache->file_read(sample, into)) {
      return 0;
    }
  }
  source::ReadRequest request{sample, into, 0};
  reader.read({&request, 1});
  compare({&request, 1}, reader);
  if (request.error != 0) reason = source::read_error_text(request);
  return request.error;
}

void Loader::Run::fail(Task& task, plan::SampleId sample, const Error& error) {
  const std::string name = config_.source->describe(sample) + " (sample " + std::to_string(sample);
  const MutexLock lock(mutex_);
  if (task.error) return;
  task.error.emplace(error.kind(), name + "): " + error.what(), error.error_number());
}

void Loader::Run::handle_unread(Work work, int error, const std::string& why,
                                fields::Scratch* scratch, source::Reader& reader) {
  const plan::SampleId sample = work.task->items[work.index].sample;
  if (const auto lack = lacking(error, why, sizes_[sample])) {
    fail(*work.task, sample, *lack);
  } else {
    handle_bad(work, why, scratch, reader);
  }
}

void Loader::Run::forget(plan::SampleId sample) {
  const MutexLock lock(mutex_);
  undecodable_.insert(sample);
  sums_.forget(sample);
  config_.source->sums().forget(sample);
}

const plan::StandIns& Loader::Run::stand_ins() {
  std::call_once(stand_ins_made_, [this] { stand_ins_.emplace(config_.job); });
  return *stand_ins_;
}

void Loader::Run::handle_bad(Work work, const std::string& reason, fields::Scratch* scratch,
                             source::Reader& reader) {
  Task& task = *work.task;
  const plan::SampleId bad = task.items[work.index].sample;
  const std::string what = config_.source->describe(bad) + " (sample " + std::to_string(bad) +
                           ") cannot be used: " + reason;
  const auto give_up = [&](const std::string& more) {
    const MutexLock lock(mutex_);
    if (!task.error) task.error.emplace(ErrorKind::corruption, what + more);
  };
  if (config_.on_error == OnError::raise) {
    give_up("; remove or repair the file, or pass on_error=\"substitute\"");
    return;
  }
  if (config_.on_error == OnError::report) {
    const MutexLock lock(task.counters);
    task.batch->lengths[work.index] = 0;
    task.batch->failures.push_back({work.index, reason});
    return;
  }
  plan::StandIns::Candidates candidates = stand_ins().of(bad);
  uint64_t tried = 0;
  for (uint32_t i = 0; i < plan::StandIns::kMost && tried < plan::StandIns::kReads; ++i) {
    const plan::SampleId candidate = candidates.next();
    // A raw batch has room for what the plan put there.
    if (candidate == bad || (!transformed() && sizes_[candidate] > sizes_[bad])) continue;
    ++tried;
    std::string why;
    std::shared_ptr<Buffer> raw;
    int error = 0;
    try {
      if (transformed()) raw = raw_pool_->take(sizes_[candidate]);
      const std::span<std::byte> bytes(raw ? raw->data() : place_of(work).data(),
                                       sizes_[candidate]);
      error = read_whole(candidate, bytes, reader, why);
    } catch (const std::bad_alloc&) {
      error = ENOMEM;
      why = source::read_error_text(error);
    }
    if (const auto lack = lacking(error, why, sizes_[candidate])) {
      return fail(task, candidate, *lack);
    }
    if (error != 0) continue;
    if (transformed()) {
      const auto result = unpack(work, candidate, {raw->data(), sizes_[candidate]}, *scratch);
      if (!result && result.error().kind() != ErrorKind::corruption) {
        return fail(task, candidate, result.error());
      }
      if (!result) {
        forget(candidate);
        continue;
      }
    }
    const MutexLock lock(task.counters);
    task.candidates += tried;
    task.batch->samples[work.index] = candidate;
    task.batch->labels[work.index] = config_.source->labels()[candidate];
    if (!transformed()) task.batch->lengths[work.index] = sizes_[candidate];
    task.batch->substitutions.push_back({bad, candidate, what});
    return;
  }
  uint64_t unusable = 0;
  {
    const MutexLock lock(task.counters);
    task.candidates += tried;
    unusable = task.candidates - task.batch->substitutions.size();
    tried = task.candidates;
  }
  give_up(plan::none_stands_in(unusable, tried));
}

}  // namespace nostall::stage
