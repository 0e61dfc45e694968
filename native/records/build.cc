// The parallel passes that make record tables. Threads take blocks of consecutive records from one
// counter, so that the reads of a thread follow each other.
#include "records/build.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <optional>

#include "base/crc32c.h"
#include "base/crew.h"
#include "base/mutex.h"
#include "base/sums.h"
#include "records/tar.h"
#include "records/tfrecord.h"
#include "records/window.h"

namespace nostall::records {
namespace {

constexpr std::chrono::milliseconds kReportEvery{100};
// Records that a thread takes at a time, so that its reads follow each other.
constexpr uint64_t kPayloadsAtOnce = 64;
constexpr size_t kPayloadAhead = 16 << 10;
// What is looked at of a record before and after its image, at most, to tell the image's checksum
// from the record's.
constexpr size_t kMostBeside = 4096;

std::vector<std::byte> head_of(Window& window, uint64_t offset, uint64_t length) {
  const auto bytes = window.get(offset, std::min<uint64_t>(length, kMostBeside));
  return {bytes.begin(), bytes.end()};
}

uint32_t sum_of(Window& window, uint32_t crc, std::span<const std::byte> head, uint64_t offset,
                uint64_t length, const Payload& payload) {
  const uint64_t before = payload.offset - offset, end = payload.offset + payload.length;
  const uint64_t after = offset + length - end;
  if (before > head.size() || after > kMostBeside) return 0;
  const auto tail = window.get(end, after);
  if (tail.size() != after) return 0;
  return sample_sum_of_crc(crc32c_between(crc, head.first(before), payload.length, tail));
}

}  // namespace

void each_in_parallel(const Storage& storage, uint64_t count, unsigned threads,
                      const std::function<void(RangeReader&, uint64_t)>& work,
                      const std::function<void(uint64_t)>& progress) {
  std::atomic<uint64_t> next{0}, done{0};
  Mutex mutex;
  Condition finished;
  std::exception_ptr error;
  unsigned ended = 0;
  const auto loop = [&] {
    try {
      const auto reader = storage.make_reader(source::ReaderKind::pread, 1);
      for (uint64_t i = next++; i < count; i = next++) {
        work(*reader, i);
        ++done;
      }
    } catch (...) {
      next = count;
      const MutexLock lock(mutex);
      if (!error) error = std::current_exception();
    }
    const MutexLock lock(mutex);
    ++ended;
    finished.notify_all();
  };
  Crew workers;
  unsigned running =
      workers.start(static_cast<unsigned>(std::min<uint64_t>(std::max(1u, threads), count)), loop);
  if (running == 0 && count > 0) {
    loop();
    running = 1;
  }
  {
    MutexLock lock(mutex);
    while (ended < running) {
      if (finished.wait_for(lock, kReportEvery) || !progress) continue;
      lock.unlock();
      try {
        progress(done);
      } catch (...) {
        next = count;  // the user stopped it
        lock.lock();
        if (!error) error = std::current_exception();
        while (ended < running) finished.wait(lock);
        break;
      }
      lock.lock();
    }
  }
  workers.join();
  if (error) std::rethrow_exception(error);
  if (progress) progress(count);
}

TarMembers scan_tars(const Storage& storage, const std::string& keep_content, unsigned threads,
                     const std::function<void(uint64_t)>& progress) {
  std::vector<std::vector<TarMember>> all(storage.files().size());
  each_in_parallel(
      storage, all.size(), threads,
      [&](RangeReader& reader, uint64_t i) {
        Window window(reader, storage, static_cast<uint32_t>(i));
        all[i] = scan_tar(window, keep_content).take();
      },
      progress);
  TarMembers members;
  for (size_t f = 0; f < all.size(); ++f) {
    for (TarMember& m : all[f]) {
      members.file.push_back(static_cast<uint32_t>(f));
      members.offset.push_back(m.offset);
      members.size.push_back(m.size);
      members.names.push_back(std::move(m.name));
      members.contents.push_back(std::move(m.content));
    }
  }
  return members;
}

TfRecordPlaces scan_tfrecords(const Storage& storage, bool check, unsigned threads,
                              const std::function<void(uint64_t)>& progress) {
  std::vector<TfRecords> all(storage.files().size());
  each_in_parallel(
      storage, all.size(), threads,
      [&](RangeReader& reader, uint64_t i) {
        Window window(reader, storage, static_cast<uint32_t>(i));
        all[i] = scan_tfrecord(window, check).take();
      },
      progress);
  TfRecordPlaces places;
  for (size_t f = 0; f < all.size(); ++f) {
    places.file.insert(places.file.end(), all[f].length.size(), static_cast<uint32_t>(f));
    places.offset.insert(places.offset.end(), all[f].offset.begin(), all[f].offset.end());
    places.length.insert(places.length.end(), all[f].length.begin(), all[f].length.end());
    places.crc.insert(places.crc.end(), all[f].crc.begin(), all[f].crc.end());
  }
  return places;
}

std::vector<Payload> find_payloads(const Storage& storage, std::span<const uint32_t> file,
                                   std::span<const uint64_t> offset,
                                   std::span<const uint64_t> length, PayloadKind kind,
                                   const std::string& image, const std::string& label,
                                   unsigned threads, const std::function<void(uint64_t)>& progress,
                                   std::span<const uint32_t> crc) {
  const uint64_t n = length.size();
  std::vector<Payload> payloads(n);
  const auto find = [&](Window& window, uint64_t i) {
    switch (kind) {
      case PayloadKind::datum:
        return find_datum(window, offset[i], length[i]);
      case PayloadKind::pickled:
        return find_pickled(window, offset[i], length[i]);
      case PayloadKind::example:
        break;
    }
    return find_example(window, offset[i], length[i], image, label);
  };
  const uint64_t chunks = (n + kPayloadsAtOnce - 1) / kPayloadsAtOnce;
  each_in_parallel(
      storage, chunks, threads,
      [&](RangeReader& reader, uint64_t chunk) {
        std::optional<Window> window;
        const uint64_t end = std::min(n, (chunk + 1) * kPayloadsAtOnce);
        for (uint64_t i = chunk * kPayloadsAtOnce; i < end; ++i) {
          const uint32_t f = file.empty() ? 0 : file[i];
          if (!window || window->file() != f) window.emplace(reader, storage, f, kPayloadAhead);
          std::vector<std::byte> head;
          if (!crc.empty()) head = head_of(*window, offset[i], length[i]);
          payloads[i] = find(*window, i).take();
          if (!crc.empty()) {
            payloads[i].sum = sum_of(*window, crc[i], head, offset[i], length[i], payloads[i]);
          }
        }
      },
      progress ? [&](uint64_t done) { progress(std::min(n, done * kPayloadsAtOnce)); }
               : std::function<void(uint64_t)>());
  return payloads;
}

}  // namespace nostall::records
