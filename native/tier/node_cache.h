// tier/node_cache.h - the storage classes of one node, shared by all its ranks. Read this first.
//
// All ranks of a job on one node attach to one catalogue and one RAM arena in shared memory and to
// the same tier files; there is one copy of a sample on the node and no daemon. Where a sample
// lives (tier, offset) is fixed by the plan's Placement, which every rank computes for itself; its
// fingerprint is compared at attach. The catalogue holds one state per sample:
//
//   empty --claim--> filling --publish--> ready
//                       |------abandon--> empty    (the claimer could not read it)
//                       `------fail-----> failed   (no room in the tier, or a bad record)
//
// A record of an earlier job (a kept tier) that turns out damaged goes from ready to empty, and is
// written again. A rank that waits for a sample takes back the claim of a rank that died. Liveness is a lock that
// the kernel drops when a process ends, however it ends. Nothing but a kept tier has a name: a rank
// that attaches gets the files from one that is attached (base/handover.h), and memory and disk are
// free again when the last process that had them has ended.
//
// Memory is taken chunk by chunk, as long as every limit keeps its reserve (base/limits.h). Where
// others use a reserve, chunks that are not being read or filled are given back, by a thread of one
// of the ranks; their samples are `failed` until try_again().
//
// Failures degrade. If there is no room in /dev/shm or on the disk, or a record of this job has a
// wrong CRC32C, the sample is `failed` from then on, with one warning per tier and kind, and the caller reads
// the source.
// A sample that failed for want of memory is empty again after try_again(). A rank that cannot
// share files with the others has no tiers.
//
// Chunks of sub-batches (plan/chunks.h) have two halves of the RAM tier in turn. Their places are
// entries of the catalogue like samples: where a method below takes a sample, it takes the entry of a
// place too. A half goes to the next chunk when no rank uses its chunk any more.
//
// Copies that come and go (plan/copies_by_use.h) have places of the RAM tier, which are entries too. What
// lies in one is a sample and its bytes; they are copied in and out, and nobody waits: where another
// thread or rank is using a place, the caller does without it.
//
// Thread-safety: all methods but attach/close are thread-safe and lock-free unless said otherwise.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/shareable.h"
#include "base/sums.h"
#include "plan/chunks.h"
#include "plan/placement.h"
#include "tier/record_reader.h"

namespace nostall::tier {

enum class TierKind : uint8_t { ram, file };

// Where a user keeps records: a tier of kind `file` that has no files. All processes of the node reach
// what one of them put there. Thread-safety: all methods, from any thread, several at a time.
class Store {
 public:
  virtual ~Store() = default;
  // Keeps the bytes, in the place of what was there. Throws Error.
  virtual void put(uint64_t dataset, uint64_t sample, std::span<const std::byte> bytes) = 0;
  // Fills `into`; false if it is there no more. Throws Error, also for another length.
  virtual bool get(uint64_t dataset, uint64_t sample, std::span<std::byte> into) = 0;
};

struct TierSpec {
  TierKind kind = TierKind::ram;
  uint64_t capacity = 0;  // bytes, respected to the byte, record headers included
  std::string path;       // file tiers: a directory
  bool keep = false;      // file tiers: survive the job, and be reused when the dataset matches
  bool modest = false;    // RAM tiers: take no more memory than is left to others
  std::shared_ptr<Store> store{};  // instead of files; `path` is its name
  uint32_t readers = 0;  // file tiers: the most reads in flight of each process; 0: no limit
};

// Bytes a record of this tier needs beside the sample's own: the plan's TierShape::overhead.
uint32_t record_overhead(TierKind kind);

// Of chunks of sub-batches: tier `tier` has two of this shape beside what is placed there.
struct Halves {
  size_t tier = 0;
  plan::HalfShape shape{};
};

// The local_world of processes whose number is not known.
inline constexpr uint32_t kAnyMembers = 1024;

struct NodeCacheConfig {
  std::string job;  // the same for all ranks of this job on this node, and for no other
  uint32_t local_rank = 0;
  uint32_t local_world = 1;  // ranks of this job on this node
  bool any_member = false;  // local_rank is the first number that no process has, not the one given
  uint64_t dataset = 0;     // Source::fingerprint()
  uint64_t plan = 0;        // fingerprint of the plan: all ranks must have the same
  // How many states this rank has loaded. One that has another plan than ranks which have loaded fewer
  // waits until they have left, which they do to load theirs; for so long.
  uint64_t loads = 0;
  std::chrono::nanoseconds late = std::chrono::minutes(2);
  std::string arguments;  // what these follow from, "name=value" lines: says where ranks disagree
  std::vector<TierSpec> tiers;  // fastest first, at most 8
  std::string shm_directory = "/dev/shm";
  std::string proc_directory = "/proc";  // where the limits of memory are read (base/limits.h)
  FileSystem* files = nullptr;           // FileSystem::real() when null
  uint64_t stamp = 0;                    // Source::stamp(), for the manifests of kept tiers
  uint64_t files_stamp = 0;              // Source::files_stamp(): what differs in it is not shared
  Shareable* listing = nullptr;          // what every rank has alike: the node keeps one copy
  // Takes out of what a kept tier holds what is not of the content that is there now. Asked by the
  // first rank of the node alone; empty: all of it is.
  std::function<void(const TierSpec& spec, Manifest& kept)> judge{};
  // How often what kept tiers hold by then is written down, for the job that follows should this one
  // be killed. Writing takes a hundredth of the time at most.
  std::chrono::milliseconds keep_every = std::chrono::minutes(5);
  Halves halves{};
  // Is called now and then while attaching waits for other ranks, which ends with what it throws.
  std::function<void()> waiting{};
};

// What a kept file tier of an earlier job holds of a data set of so many samples; nothing if there
// is none that matches `dataset`.
Manifest kept_records(const TierSpec& spec, uint64_t dataset, uint64_t samples);

// What lies where, given what each kept tier holds already, which stays where it is. Every rank
// asks for itself and must get the same; which samples are kept is read by the first rank alone.
using Placer = std::function<plan::Placement(std::span<const std::vector<plan::Resident>> kept)>;
// Where no tier is kept.
inline Placer fixed(plan::Placement placement) {
  return [placement = std::move(placement)](auto) { return placement; };
}

// One sample of file_read(); `good` as file_read() of one returns it.
struct TierRead {
  uint64_t sample = 0;
  std::span<std::byte> into;
  bool good = false;
};

enum class State : uint8_t { empty = 0, filling = 1, ready = 2, failed = 3 };

// Whether a chunk has its half: it does; another chunk has it, which a rank still uses; or a later
// chunk has it.
enum class Half : uint8_t { here, awaited, gone };

struct PeerFailure {
  uint32_t local_rank = 0;
  int pid = 0;
};

// The bytes of a sample of the RAM tier, which stay while this object lives. False if the sample is
// not ready. Ends before the cache, or with its process.
class RamView {
 public:
  RamView() = default;
  // `readers` counts this rank's views of its memory, this one included.
  RamView(std::span<const std::byte> bytes, std::atomic<uint32_t>& readers) noexcept
      : bytes_(bytes), readers_(&readers) {}
  ~RamView() {
    if (readers_ != nullptr) readers_->fetch_sub(1, std::memory_order_release);
  }
  RamView(RamView&& other) noexcept
      : bytes_(other.bytes_), readers_(std::exchange(other.readers_, nullptr)) {}
  RamView& operator=(RamView&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    std::swap(readers_, other.readers_);
    return *this;
  }

  explicit operator bool() const noexcept { return readers_ != nullptr; }
  std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
  std::atomic<uint32_t>* readers_ = nullptr;
};

class NodeCache {
 public:
  virtual ~NodeCache() = default;  // leaves

  // Attaches to the node's cache, creating it if this process is first. Bounded: throws Error(peer)
  // after `timeout` (30 minutes if a tier keeps, which takes a judge) if another rank takes that long to
  // set up, Error(peer) if this rank's dataset, plan or placement differs from the other ranks', after
  // NodeCacheConfig::late if they may be late. A rank of which only the files_stamp differs
  // has no tiers. `sizes` has one entry per sample and is copied.
  static std::unique_ptr<NodeCache> attach(
      const NodeCacheConfig& config, std::span<const uint64_t> sizes, const Placer& place,
      std::chrono::nanoseconds timeout = std::chrono::seconds(30));

  virtual State state(uint64_t sample) const noexcept = 0;
  virtual TierKind kind(uint64_t sample) const noexcept = 0;   // of a placed sample
  virtual size_t tier_of(uint64_t sample) const noexcept = 0;  // of a placed sample: an index
  virtual bool placed(uint64_t sample) const noexcept = 0;

  // empty -> filling for this rank; false if another claim was first or the sample is not placed.
  virtual bool claim(uint64_t sample) noexcept = 0;
  // The sample's place in the RAM arena, to be filled between claim and publish. Empty span (and
  // state failed, one warning) if the memory cannot be had: the caller uses memory of its own.
  virtual std::span<std::byte> ram_slot(uint64_t sample) = 0;
  // Writes header and bytes to the file tier and publishes; on failure the sample is failed. A tier
  // that is full, or fails again and again, takes no more bytes; those it has are read.
  virtual void file_write(uint64_t sample, std::span<const std::byte> bytes) = 0;
  virtual void publish(uint64_t sample) noexcept = 0;  // filling -> ready, wakes waiters
  virtual void abandon(uint64_t sample) noexcept = 0;  // filling -> empty, wakes waiters

  // If every limit has room for memory by now, samples that failed for want of it become empty.
  // Asked at the start of an epoch: it may look at every sample.
  virtual void try_again() = 0;

  virtual RamView ram_view(uint64_t sample) const noexcept = 0;
  // Reads a ready sample of the file tier and checks its CRC32C, and that against sums(); false
  // (not ready any more, one warning) if it cannot be read or is not what was written.
  virtual bool file_read(uint64_t sample, std::span<std::byte> into) = 0;
  // The same of several samples of one tier, side by side where its disk makes reads wait. `reader`
  // is the calling thread's.
  virtual void file_read(std::span<TierRead> reads, RecordReader& reader) = 0;

  // Checksums of samples, shared by the ranks of the node. Code that fills a tier learns them
  // before it publishes; code that takes bytes out of the RAM tier compares them.
  virtual SampleSums& sums() noexcept = 0;
  // The copy of a ready sample does not have the sample's checksum: ready -> failed, one warning
  // per tier of this kind.
  virtual void reject(uint64_t sample) noexcept = 0;

  // Waits while the sample is `filling`, until the deadline or a stop; takes back the claim of a
  // dead rank (the sample is then `empty`). Returns the state seen last.
  virtual State wait(uint64_t sample, std::chrono::nanoseconds timeout, std::stop_token stop) = 0;

  // Places of chunks: number i of the half of a chunk, as an entry.
  virtual uint64_t entry_of(uint64_t chunk, uint64_t place) const noexcept;
  // This rank uses `chunk` and the next one, and none before or after, from now on.
  virtual void use_chunk(uint64_t chunk) noexcept;
  // This rank may write to the half of a chunk that it does not use, until it says nothing.
  virtual void read_for_chunk(std::optional<uint64_t> chunk) noexcept;
  // Gives the half to the chunk, which must be in use by this rank or read for, as soon as no rank
  // uses the one that has it. Its places are valid while it is here.
  virtual Half half_of(uint64_t chunk, const plan::KeptChunk& kept);
  // Waits until a half or what a rank uses may have changed.
  virtual void wait_for_half(std::chrono::nanoseconds timeout) const;

  // The bytes of a sample out of a place of the placement's copies; false if they are not there.
  virtual bool read_copy(const plan::CopyUse& use, uint64_t sample, std::span<std::byte> into);
  // Puts them there, instead of what is there; false if that came later (plan::Placement::copy_lead) or is
  // being used, or if there is no memory.
  virtual bool write_copy(const plan::CopyUse& use, uint64_t sample,
                          std::span<const std::byte> bytes);

  // A rank of this node that joined and then ended without leaving, if there is one. Cheap enough
  // for a few calls per second.
  virtual std::optional<PeerFailure> dead_peer() const = 0;

  // Bytes of shared memory and of tier files in use by this node's ready samples.
  virtual uint64_t ram_bytes() const noexcept = 0;
  virtual uint64_t file_bytes() const noexcept = 0;
};

// A claim of this rank, if there is one, that is abandoned with this object unless it is let go: it is
// published or written then, or has failed. Ends before the cache.
class Claim {
 public:
  Claim() = default;
  Claim(NodeCache& cache, uint64_t sample) noexcept
      : cache_(cache.claim(sample) ? &cache : nullptr), sample_(sample) {}
  ~Claim() { abandon(); }
  Claim(Claim&& other) noexcept
      : cache_(std::exchange(other.cache_, nullptr)), sample_(other.sample_) {}
  Claim& operator=(Claim&& other) noexcept {
    abandon();
    cache_ = std::exchange(other.cache_, nullptr);
    sample_ = other.sample_;
    return *this;
  }

  explicit operator bool() const noexcept { return cache_ != nullptr; }
  uint64_t sample() const noexcept { return sample_; }
  void let_go() noexcept { cache_ = nullptr; }
  void abandon() noexcept {
    if (cache_ != nullptr) std::exchange(cache_, nullptr)->abandon(sample_);
  }

 private:
  NodeCache* cache_ = nullptr;
  uint64_t sample_ = 0;
};

// A view that keeps its cache, for a reader that may outlive other holders of the cache; null if the
// sample is not ready.
std::shared_ptr<RamView> shared_view(std::shared_ptr<NodeCache> cache, uint64_t sample);

}  // namespace nostall::tier
