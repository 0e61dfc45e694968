// tier/catalog.h - the shared memory of a node's cache, as all its ranks see it.
//
// Header, then where each place of the two halves lies, then what each place of copies holds (held_of).
// Then rows of one word per arena chunk: the chunks' states, then for each local rank how many views it
// has of them. Then for each local rank how often it reads places of copies; places share these words.
// Then one state per entry (a sample, a place of a half, a place of a copy), then one checksum per sample
// (base/sums.h). A state has its State in the low two bits; above them, while the sample is filling, the
// claiming local rank, and one of a sample that failed for want of memory, or that is ready because an
// earlier job wrote it. Stamped with magic, version and layout size, so that builds that do not agree
// refuse each other.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace nostall::tier {

inline constexpr uint32_t kMaxMembers = 1024;
inline constexpr uint32_t kMaxTiers = 8;
inline constexpr size_t kArgumentBytes = 2048;
inline constexpr uint32_t kBuckets = 64;  // of waiters: samples share the words they wait on

enum class Membership : uint32_t { absent = 0, joined = 1, left = 2 };

struct Member {
  std::atomic<Membership> membership;
  std::atomic<int32_t> pid;
  // The numbers of chunks of sub-batches, and one more; 0: none yet. It uses `chunk` and the next one,
  // and writes to the half of `reading`.
  std::atomic<uint64_t> chunk, reading;
};

// One cache line each, since every publish touches one.
struct alignas(64) Bucket {
  std::atomic<uint32_t> sequence;  // futex word
  std::atomic<uint32_t> waiters;
};

// Where a place of a half lies in the arena, for the chunk that has the half.
struct PlaceRange {
  std::atomic<uint64_t> begin, size;
};

// What a word of CatalogHeader::halves holds beside twice the number of its chunk and one more.
inline constexpr uint64_t kTurning = 1;  // a rank is giving it to that chunk's successor

struct CatalogHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t layout_bytes;  // sizeof(CatalogHeader)
  uint64_t dataset;
  uint64_t files_stamp;  // of the data set
  uint64_t plan;
  uint64_t loads;  // of states, before this start of the job
  uint64_t start;  // NodeCacheConfig::plan: without the placement, which takes long to compute
  uint64_t samples;
  uint64_t arena_bytes;
  uint32_t local_world;
  std::atomic<uint32_t> given_up;  // bit t: tier t takes no more bytes; what it has is read
  std::atomic<uint64_t> ram_bytes;
  std::atomic<uint64_t> file_bytes;
  std::atomic<uint64_t> unfilled;  // not 0: samples failed for want of memory since the last trial
  std::array<std::atomic<uint32_t>, kMaxTiers> failed_writes;
  std::array<Member, kMaxMembers> members;
  std::array<Bucket, kBuckets> buckets;
  std::array<std::atomic<uint64_t>, 2> halves;
  Bucket turned;  // of those who wait for a half
  // "name=value" lines of the job's arguments, for the message to a rank that disagrees; padded
  // with zeros, cut if they are longer.
  std::array<char, kArgumentBytes> arguments;
};

inline constexpr uint64_t kCatalogMagic = 0x315441434c54534e;  // "NSTLCAT1"
inline constexpr uint32_t kCatalogVersion = 15;

// Memory is taken from the system in pieces of this size, just before it is first touched: a 64th
// of the arena, in whole MiB up to 32, so that ranks which look at a limit at the same time pass it
// by little.
constexpr uint64_t chunk_bytes(uint64_t arena_bytes) {
  constexpr uint64_t mib = uint64_t{1} << 20;
  return std::clamp(arena_bytes / 64 / mib, uint64_t{1}, uint64_t{32}) * mib;
}

// Of a rank's counts of places that it reads.
constexpr uint64_t pin_words(uint64_t places) { return std::min<uint64_t>(places, 4096); }

// What is in a place of copies: the batch in which the plan has it come (CopyUse::filled), and below it the
// sample and one more. 0: nothing.
constexpr uint64_t held_of(uint32_t filled, uint64_t sample) {
  return uint64_t{filled} << 32 | (sample + 1);
}
constexpr uint32_t filled_of(uint64_t held) { return static_cast<uint32_t>(held >> 32); }
constexpr uint64_t sample_of(uint64_t held) { return (held & 0xffffffffu) - 1; }

// Words of a row, in whole cache lines: what a rank counts is in no other rank's line.
constexpr uint64_t row_words(uint64_t chunks) { return (chunks + 15) / 16 * 16; }

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace nostall::tier
