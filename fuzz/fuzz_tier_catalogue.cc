// A rank joins a node's cache whose shared memory another rank damaged: header, words of chunks and
// of samples, the list of what kept tiers hold, the files' lengths. It is told Error, or it has a
// cache that stays within its memory and waits for nothing for ever.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

#include "base/handover.h"
#include "base/log.h"
#include "tier/catalog.h"
#include "tier/node_cache.h"

namespace {

using namespace nostall;
using namespace nostall::tier;
using namespace std::chrono_literals;

constexpr uint64_t kSamples = 8;
constexpr auto kLimit = 200ms;

// The catalogue, the arena, what is kept, the listing, one file of a tier and its directory (Handed
// in node_cache.cc): what a rank that is alone hands to the next one.
struct Job {
  Job() {
    char pattern[] = "/tmp/nostall-fuzz-XXXXXX";
    config.shm_directory = ::mkdtemp(pattern);
    config.job = "fuzz";
    config.local_world = 2;
    config.arguments = "seed=1\nbatch_size=4\n";
    config.tiers = {{TierKind::ram, uint64_t{1} << 16, ""}};
    config.halves = {0, {64, 2}};
    chunk.samples = {1, 2};
    chunk.offsets = {0, 17};
    placement.fill.resize(1);
    uint64_t at = 0;
    for (uint64_t s = 0; s < kSamples; ++s) {
      sizes.push_back(16 + s);
      placement.tier.push_back(s == 7 ? plan::kNoTier : 0);
      placement.offset.push_back(at);
      at += s == 7 ? 0 : sizes[s];
    }
    placement.used = {at};
    placement.copies = plan::CopyPlaces(
        sizes, [](uint64_t s) { return s == 7; }, sizes[7]);
    const auto cache = NodeCache::attach(config, sizes, fixed(placement));
    Handover asks("tiers " + config.shm_directory + " " + config.job, 1, 2);
    const auto files = asks.ask(std::chrono::steady_clock::now() + 60s);
    if (files.size() != 6) std::abort();
    catalogue.resize(std::filesystem::file_size("/proc/self/fd/" + std::to_string(files[0].get())));
    FileSystem::real().pread(files[0].get(), catalogue, 0);
  }
  ~Job() { std::filesystem::remove_all(config.shm_directory); }

  NodeCacheConfig config;
  std::vector<uint64_t> sizes;
  plan::Placement placement;
  plan::KeptChunk chunk;
  std::vector<std::byte> catalogue;
};

Descriptor file_of(std::span<const std::byte> bytes) {
  Descriptor file = memory_file("nostall-fuzz").take();
  FileSystem::real().pwrite(file.get(), bytes, 0);
  return file;
}

}  // namespace

// Lengths of the three files, then patches of the catalogue: place (2 bytes), count, bytes; what
// follows a patch of no bytes is the list of kept samples.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  set_log_sink([](LogLevel, const std::string&) {});
  static Job job;
  if (size < 2) return 0;
  std::vector<std::byte> bytes = job.catalogue;
  const size_t length = data[0] < 128 ? bytes.size() : bytes.size() * (data[0] - 128) / 64;
  const uint64_t whole =
      job.placement.used[0] + 2 * job.config.halves.shape.bytes + job.placement.copies.bytes();
  const uint64_t arena = data[1] < 128 ? whole : data[1] < 192 ? 0 : data[1];
  size_t at = 2;
  for (size_t n = 1; at + 3 <= size && n > 0;) {
    const size_t place = (data[at] | size_t{data[at + 1]} << 8) % bytes.size();
    n = std::min({size_t{data[at + 2]}, size - at - 3, bytes.size() - place});
    if (n > 0) std::memcpy(bytes.data() + place, data + at + 3, n);
    at += 3 + n;
  }
  bytes.resize(length);
  const Descriptor catalogue = file_of(bytes), memory = memory_file("nostall-fuzz").take();
  if (::ftruncate(memory.get(), static_cast<off_t>(arena)) != 0) std::abort();
  const Descriptor kept = file_of(std::as_bytes(std::span(data + at, size - at)));

  Handover liar("tiers " + job.config.shm_directory + " " + job.config.job, 0, 2);
  liar.give({catalogue.get(), memory.get(), kept.get(), -1, -1, -1});
  NodeCacheConfig config = job.config;
  config.local_rank = 1;
  uint64_t sum = 0;
  try {
    const auto cache = NodeCache::attach(config, job.sizes, fixed(job.placement), kLimit);
    liar.stop();
    for (uint64_t s = 0; s < kSamples; ++s) {
      const State seen = cache->wait(s, 0ns, {});
      if (seen != State::filling && cache->claim(s)) {
        const auto slot = cache->ram_slot(s);
        if (!slot.empty() && slot.size() != job.sizes[s]) std::abort();
        if (!slot.empty()) std::memset(slot.data(), 1, slot.size());
        if (!slot.empty()) cache->publish(s);
      } else if (seen == State::ready && cache->placed(s)) {
        const auto view = cache->ram_view(s);
        if (!view) continue;  // its memory was given back meanwhile
        if (view.bytes().size() != job.sizes[s]) std::abort();
        if (!cache->sums().agrees(s, sample_sum(view.bytes()))) cache->reject(s);
      }
    }
    // Places may be said to lie anywhere: what is given of them lies in the arena.
    for (const uint64_t i : {0, 1}) {
      const uint64_t entry = cache->entry_of(0, i);
      if (cache->claim(entry)) {
        for (std::byte& b : cache->ram_slot(entry)) b = std::byte{1};
        cache->publish(entry);
      }
      const auto view = cache->ram_view(entry);
      for (const std::byte b : view.bytes()) sum += std::to_integer<uint64_t>(b);
    }
    std::vector<std::byte> copy(job.sizes[7], std::byte{2});
    const plan::CopyUse use{0, true, true, 1};
    static_cast<void>(cache->read_copy(use, 7, copy));
    static_cast<void>(cache->write_copy(use, 7, copy));
    for (uint64_t s = 0; s < kSamples; ++s) {
      copy.resize(job.sizes[s]);
      if (cache->read_copy(use, s, copy) && !cache->sums().agrees(s, copy)) std::abort();
    }
    cache->use_chunk(0);
    static_cast<void>(cache->half_of(0, job.chunk));
    cache->wait_for_half(0ns);
    static_cast<void>(cache->dead_peer());
    static_cast<void>(cache->ram_bytes());
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::bug) std::abort();
  }
  if (sum == ~uint64_t{0}) std::abort();  // it is read
  return 0;
}
