// The cache that the ranks of a node share: attaching, memory, waiting, leaving.
//
// Attaching (meet): ranks take turns (base/handover.h). The first one creates catalogue, arena and
// tier files, reads what kept tiers hold, and offers all descriptors; later ones ask for them, map
// them, and compare fingerprints. Each rank then holds a lock on its own byte of the catalogue
// file. A rank that cannot share files works without tiers (go_without). A rank that goes on from a state
// makes the cache anew when those that have not loaded it yet have left (await_late); until then it
// holds none of their files, for with a kept tier's it would have its lock.
//
// States: one word per sample, changed by compare-and-swap. The word of a sample that is filling
// names the claiming rank. A waiter sleeps on one of kBuckets futex words; publish, abandon and
// fail increment the word and wake its waiters. A waiter that finds the claimer's lock free sets
// the sample back to empty.
//
// Memory: the arena is a sparse file. A chunk is allocated before its first record is filled, if
// every limit keeps its reserve; a refused chunk fails its samples until try_again(). Where a
// reserve is in use, ease() gives chunks back, the last ones first, and always what is there of
// refused ones: a chunk is marked `leaving`, so that nothing more is filled there, its ready samples
// fail, and once no sample of it is being filled and no view counted, its pages are freed. A reader
// counts itself before it looks at the state, and ease() looks at the count after it has changed the
// state: one of them sees the other. Each rank has counts of its own, so that those of a rank that
// died do not count.
//
// Halves: a word names the chunk that has the half. A rank says which chunks it uses before it looks
// at the word; a rank that gives the half away marks the word, and then looks at what the others use:
// one of them sees the other. The places of the next chunk are written down while the mark is there.
//
// Places of copies: a thread that fills one claims it, and then looks whether a rank reads it; a thread
// that reads one counts itself first, and then looks whether the place is ready and has its sample. One
// of them sees the other, and goes without. The sample's number changes while the place is claimed.
//
// Kept tiers: a thread of the first rank writes their manifests now and then, so that a job that is
// killed loses the last minutes only. Leaving: under the turn, every rank writes them. The last rank
// flushes the tier files first.
#include "tier/node_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <new>
#include <string_view>
#include <thread>
#include <utility>

#include "base/fnv.h"
#include "base/futex.h"
#include "base/handover.h"
#include "base/limits.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/mapping.h"
#include "base/own.h"
#include "tier/catalog.h"
#include "tier/names.h"
#include "tier/record_reader.h"
#include "tier/turns.h"
#include "tier/watch.h"

namespace nostall::tier {
namespace {

using namespace std::chrono_literals;

// A waiter checks at this interval whether it was stopped or the claimer died.
constexpr std::chrono::milliseconds kWaitSlice{20};
constexpr std::chrono::seconds kLeavePatience{5};
// In which a rank has read and judged what kept tiers hold, while it lives: of items that a data set in
// Python makes, some take minutes.
constexpr std::chrono::minutes kJudgePatience{30};
// In which all ranks of a node make their loaders; later ones are not waited for.
constexpr std::chrono::seconds kJoinPatience{10};
constexpr int kOpenAttempts = 20;
// How often one rank looks whether the tier's memory is wanted back.
constexpr std::chrono::milliseconds kEaseInterval{250};
// Of the time between two writings of the manifests, the most that a writing takes.
constexpr int kKeepShare = 100;
// Others are chosen in the place of a chunk that is still in use after so many looks (5 seconds).
constexpr uint32_t kPatientLooks = 20;
// A tier takes no more bytes after this many failed writes.
constexpr uint32_t kMaxFailedWrites = 16;

// The directory right below the root of the file system that is missing, as where no disk is mounted;
// empty if none is.
std::string unmounted(const std::string& path) {
  const auto whole = std::filesystem::absolute(path).lexically_normal();
  const auto below = whole.relative_path();
  if (below.empty()) return "";
  const auto top = whole.root_path() / *below.begin();
  std::error_code unknown;
  const bool missing =
      std::filesystem::status(top, unknown).type() == std::filesystem::file_type::not_found;
  return missing ? top.string() : "";
}

// Makes the directory of a tier. Why it cannot be made, and what of its path is there; else "".
std::string not_made(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (!error) return "";
  auto there = std::filesystem::absolute(path).lexically_normal();
  std::error_code unknown;
  while (there.has_relative_path() && !std::filesystem::exists(there, unknown)) {
    there = there.parent_path();
  }
  const bool is_file = !std::filesystem::is_directory(there, unknown) && !unknown;
  return std::string(io_error("cannot make the directory", path, error.value()).what()) +
         (is_file ? " (" + there.string() + " is no directory)" : " (in " + there.string() + ")");
}

uint32_t word_of(State state, uint32_t local_rank = 0) {
  return (local_rank << 2) | static_cast<uint32_t>(state);
}
State state_of(uint32_t word) { return static_cast<State>(word & 3u); }
// A sample that failed because its tier had no memory: try_again() makes it empty.
constexpr uint32_t kUnfilled = (1u << 2) | static_cast<uint32_t>(State::failed);
// A sample that is ready because an earlier job wrote it.
constexpr uint32_t kResident = (1u << 2) | static_cast<uint32_t>(State::ready);

// What the catalogue has room for, without a last line that is cut.
std::string_view that_fit(std::string_view text) {
  if (text.size() < kArgumentBytes) return text;
  text = text.substr(0, kArgumentBytes);
  return text.substr(0, text.rfind('\n'));
}

// The names and values in "name=value" lines.
std::vector<std::pair<std::string, std::string>> lines_of(std::string_view text) {
  std::vector<std::pair<std::string, std::string>> lines;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    const size_t equals = std::min(line.find('='), line.size());
    lines.emplace_back(line.substr(0, equals), line.substr(std::min(equals + 1, line.size())));
  }
  return lines;
}

// What a tier warns of: its directory or file at the start, a refused piece of memory, a failed write, the
// last one, a record that is read in vain, memory whose bytes changed, a manifest that is not written.
enum class Told : uint32_t { start, memory, write, full, read, changed, manifest };

// `partial`: refused, and some of its memory is there.
enum class Chunk : uint32_t { untouched = 0, there = 1, refused = 2, leaving = 3, partial = 4 };

// A chunk that is given back once it is not in use.
struct Leaving {
  uint64_t chunk = 0;
  uint64_t lowest = 0;              // the first chunk that a sample in it begins in
  std::vector<uint64_t> filling{};  // its samples that were being filled at the last look
  uint32_t looks = 0;               // that found it in use
};

// The files that an attached rank hands to one that attaches: these four, then one file per tier,
// then the directory of each kept tier.
enum Handed : size_t { kCatalogFile, kArenaFile, kKeptSamples, kListing, kFirstTier };

using Kept = std::vector<std::vector<plan::Resident>>;

// What kept tiers held when the first rank looked, for the ranks that attach later: for each tier a
// count and that many residents, as they are in memory.
Descriptor shared_list(const Kept& kept) {
  Descriptor file = memory_file("nostall-kept").take();
  uint64_t at = 0;
  const auto append = [&](std::span<const std::byte> bytes) {
    const int64_t n = FileSystem::real().pwrite(file.get(), bytes, at);
    if (n < 0) throw io_error("no memory for", "the list of kept samples", static_cast<int>(-n));
    at += bytes.size();
  };
  for (const auto& residents : kept) {
    const uint64_t count = residents.size();
    append(std::as_bytes(std::span(&count, 1)));
    append(std::as_bytes(std::span(residents)));
  }
  return file;
}

Kept read_shared_list(const Descriptor& file, size_t tiers) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw io_error("cannot examine", "a shared list", errno);
  const auto end = static_cast<uint64_t>(status.st_size);
  Kept kept(tiers);
  uint64_t at = 0;
  const auto next = [&](std::span<std::byte> bytes) {
    FileSystem::real().pread(file.get(), bytes, at);
    at += bytes.size();
  };
  for (auto& residents : kept) {
    uint64_t count = 0;
    next(std::as_writable_bytes(std::span(&count, 1)));
    residents.resize(std::min(count, (end - std::min(at, end)) / sizeof(plan::Resident)));
    next(std::as_writable_bytes(std::span(residents)));
  }
  return kept;
}

// The header of a catalogue; nothing if the file is too short for one.
Mapping head_of(const Descriptor& catalog) {
  struct stat status {};
  if (::fstat(catalog.get(), &status) != 0)
    throw io_error("cannot examine", "the catalogue", errno);
  if (static_cast<uint64_t>(status.st_size) < sizeof(CatalogHeader)) return {};
  return Mapping::map(reopen(catalog.get()).take(), "the catalogue", sizeof(CatalogHeader)).take();
}

constexpr uint64_t kLayout =
    kCatalogMagic ^ kCatalogVersion ^ (uint64_t{sizeof(CatalogHeader)} << 32);
uint64_t layout_of(const CatalogHeader& h) {
  return h.magic ^ h.version ^ (uint64_t{h.layout_bytes} << 32);
}

class NodeCacheImpl final : public NodeCache {
 public:
  NodeCacheImpl(const NodeCacheConfig& config, std::span<const uint64_t> sizes)
      : config_(config),
        files_(config.files ? *config.files : FileSystem::real()),
        limits_(config.shm_directory, config.proc_directory),
        sizes_(sizes.begin(), sizes.end()),
        tier_files_(config.tiers.size()),
        kept_files_(config.tiers.size()),
        kept_directories_(config.tiers.size()),
        tier_paths_(config.tiers.size()),
        disabled_(config.tiers.size()),
        warned_(config.tiers.size()),
        turns_(config.tiers.size()),
        me_(config.any_member ? 0 : config.local_rank),
        owner_pid_(::getpid()),
        handover_("tiers " + config.shm_directory + " " + config.job,
                  config.any_member ? static_cast<uint32_t>(owner_pid_) % config.local_world
                                    : config.local_rank,
                  config.local_world) {
    for (size_t t = 0; t < turns_.size(); ++t) turns_[t].limit(config.tiers[t].readers);
  }

  ~NodeCacheImpl() override {
    watch_.reset();
    keeper_.reset();
    if (joined_ && owner_pid_ == ::getpid()) leave();
  }

  void join(const Placer& place, std::chrono::nanoseconds timeout);

  State state(uint64_t sample) const noexcept override {
    const State seen = state_of(words_[sample].load(std::memory_order_acquire));
    return seen == State::empty && !fills(sample) ? State::failed : seen;
  }
  TierKind kind(uint64_t sample) const noexcept override {
    return config_.tiers[tier_[sample]].kind;
  }
  size_t tier_of(uint64_t sample) const noexcept override { return tier_[sample]; }
  bool placed(uint64_t sample) const noexcept override {
    return tier_[sample] != plan::kNoTier &&
           !disabled_[tier_[sample]].load(std::memory_order_relaxed);
  }

  bool claim(uint64_t sample) noexcept override {
    uint32_t expected = word_of(State::empty);
    return placed(sample) && fills(sample) &&
           words_[sample].compare_exchange_strong(expected, word_of(State::filling, me_));
  }

  std::span<std::byte> ram_slot(uint64_t sample) override {
    const auto [begin, size] = range_of(sample);
    for (uint64_t c = begin / chunk_bytes_; c * chunk_bytes_ < begin + size; ++c) {
      if (!have_chunk(c, tier_[sample])) {
        store(sample, kUnfilled);
        header_->unfilled.fetch_add(1);
        return {};
      }
    }
    return {arena_.data() + begin, static_cast<size_t>(size)};
  }

  void file_write(uint64_t sample, std::span<const std::byte> bytes) override {
    const size_t t = tier_[sample];
    // What is known of the sample, not what lies here now: bytes that changed meanwhile are found.
    const uint32_t known = sums_.of(sample), sum = known != 0 ? known : sample_sum(bytes);
    std::string told;
    const int error = write(sample, sum, bytes, told);
    if (error == 0) {
      sums_.agrees(sample, sum);
      publish(sample);
      return;
    }
    const bool full = error == -ENOSPC || error == -EDQUOT || error == -EROFS;
    if (full || header_->failed_writes[t].fetch_add(1) + 1 >= kMaxFailedWrites) {
      header_->given_up.fetch_or(1u << t, std::memory_order_relaxed);
      warn(t, Told::full,
           told +
               "; the tier takes no more samples, those that it lacks are read from the source: "
               "free space or give the tier a smaller size");
    } else {
      warn(t, Told::write, told + "; the sample is read from the source");
    }
    set(sample, State::failed);
  }

  void publish(uint64_t sample) noexcept override {
    auto& used = kind(sample) == TierKind::ram ? header_->ram_bytes : header_->file_bytes;
    used.fetch_add(range_of(sample).size + record_overhead(kind(sample)),
                   std::memory_order_relaxed);
    set(sample, State::ready);
  }
  void abandon(uint64_t sample) noexcept override { set(sample, State::empty); }

  RamView ram_view(uint64_t sample) const noexcept override {
    const auto [begin, size] = range_of(sample);
    std::atomic<uint32_t>& readers = readers_of(me_)[first_chunk(begin)];
    readers.fetch_add(1);
    RamView view({arena_.data() + begin, static_cast<size_t>(size)}, readers);
    if (state_of(words_[sample].load()) != State::ready) return {};
    return view;
  }

  bool file_read(uint64_t sample, std::span<std::byte> into) override {
    const Turns::Taken turn = turns_[tier_[sample]].take(1);
    const uint32_t seen = words_[sample].load();
    return accept(sample, seen, read(sample, into));
  }

  void file_read(std::span<TierRead> reads, RecordReader& reader) override {
    if (reads.empty()) return;
    const size_t t = tier_[reads.front().sample];
    if (config_.tiers[t].store) {
      for (TierRead& r : reads) r.good = file_read(r.sample, r.into);
      return;
    }
    std::vector<RecordRead> records;
    std::vector<uint32_t> seen;
    records.reserve(reads.size());
    seen.reserve(reads.size());
    for (const TierRead& r : reads) {
      records.push_back({tier_files_[t].get(), offset_[r.sample], r.sample, r.into});
      seen.push_back(words_[r.sample].load());
    }
    for (size_t next = 0; next < records.size();) {
      const Turns::Taken turns = turns_[t].take(records.size() - next);
      reader.read(files_, std::span(records).subspan(next, turns.count()));
      next += turns.count();
    }
    for (size_t i = 0; i < reads.size(); ++i) {
      reads[i].good = accept(reads[i].sample, seen[i], records[i].sum);
    }
  }

  SampleSums& sums() noexcept override { return sums_; }
  void reject(uint64_t sample) noexcept override {
    try {
      warn(tier_[sample], Told::changed,
           (sample < sizes_.size() ? "sample " + std::to_string(sample)
                                   : std::string("a sample of sub-batches")) +
               " in the RAM tier has changed since it was read (wrong CRC32C): check this "
               "machine's memory; it is read from the source instead");
    } catch (const std::bad_alloc&) {
      // The sample is not served, whether that could be logged or not.
    }
    const TierKind where = kind(sample);
    const uint64_t held = range_of(sample).size + record_overhead(where);
    if (state_of(words_[sample].exchange(word_of(State::failed))) == State::ready) {
      auto& used = where == TierKind::ram ? header_->ram_bytes : header_->file_bytes;
      used.fetch_sub(held, std::memory_order_relaxed);
    }
    wake(sample);
  }

  uint64_t entry_of(uint64_t chunk, uint64_t place) const noexcept override {
    return sizes_.size() + (chunk % 2) * config_.halves.shape.places + place;
  }
  void use_chunk(uint64_t chunk) noexcept override {
    header_->members[me_].chunk.store(chunk + 1);
    wake(header_->turned);
  }
  void read_for_chunk(std::optional<uint64_t> chunk) noexcept override {
    header_->members[me_].reading.store(chunk ? *chunk + 1 : 0);
    if (!chunk) wake(header_->turned);
  }
  bool read_copy(const plan::CopyUse& use, uint64_t sample, std::span<std::byte> into) override;
  bool write_copy(const plan::CopyUse& use, uint64_t sample,
                  std::span<const std::byte> bytes) override;
  Half half_of(uint64_t chunk, const plan::KeptChunk& kept) override;
  void wait_for_half(std::chrono::nanoseconds timeout) const override;

  void try_again() override;
  State wait(uint64_t sample, std::chrono::nanoseconds timeout, std::stop_token stop) override;
  std::optional<PeerFailure> dead_peer() const override;

  uint64_t ram_bytes() const noexcept override { return header_->ram_bytes.load(); }
  uint64_t file_bytes() const noexcept override { return header_->file_bytes.load(); }

 private:
  struct Range {
    uint64_t begin = 0, size = 0;
  };
  uint64_t catalog_bytes() const {
    const uint64_t rows = 1 + uint64_t{config_.local_world};
    return sizeof(CatalogHeader) + places() * sizeof(PlaceRange) +
           copies_.count() * sizeof(uint64_t) +
           (rows * row_words(chunks()) + config_.local_world * pin_words(copies_.count()) +
            entries() + sizes_.size()) *
               sizeof(uint32_t);
  }
  uint64_t places() const { return 2 * config_.halves.shape.places; }
  uint64_t entry_of_copy(uint32_t place) const { return sizes_.size() + places() + place; }
  uint64_t entries() const { return entry_of_copy(copies_.count()); }
  uint64_t chunks() const {
    return std::max<uint64_t>(1, (arena_bytes_ + chunk_bytes_ - 1) / chunk_bytes_);
  }
  // One word per chunk: how many views the rank has.
  std::atomic<uint32_t>* readers_of(uint32_t local_rank) const noexcept {
    return chunk_words_ + (1 + uint64_t{local_rank}) * row_words(chunks());
  }
  // Of a place of copies: how many threads of the rank read it, or another that shares the word.
  std::atomic<uint32_t>& pin_of(uint32_t local_rank, uint32_t place) const noexcept {
    const uint64_t words = pin_words(copies_.count());
    return readers_of(config_.local_world)[local_rank * words + place % words];
  }
  bool is_pinned(uint32_t place) const noexcept;
  Range range_of_chunk(uint64_t chunk) const noexcept {
    const uint64_t begin = chunk * chunk_bytes_;
    return {begin, std::min(chunk_bytes_, arena_bytes_ - begin)};
  }
  // Of a sample of the RAM tier, or a place, in the arena. The memory of places is shared.
  Range range_of(uint64_t entry) const noexcept {
    if (entry < sizes_.size()) {
      const uint64_t base = kind(entry) == TierKind::ram ? arena_base_[tier_[entry]] : 0;
      return {base + offset_[entry], sizes_[entry]};
    }
    if (entry >= entry_of_copy(0)) {
      const auto place = static_cast<uint32_t>(entry - entry_of_copy(0));
      const uint64_t sample = sample_of(held_[place].load());
      const uint64_t size = sample < sizes_.size() ? sizes_[sample] : 0;
      return {copies_base_ + copies_.begin_of(place), std::min(size, copies_.size_of(place))};
    }
    const PlaceRange& place = ranges_[entry - sizes_.size()];
    const Range range{place.begin.load(), place.size.load()};
    const bool fits = range.size <= arena_bytes_ && range.begin <= arena_bytes_ - range.size;
    return fits ? range : Range{};
  }
  // A sample without bytes may lie at the very end.
  uint64_t first_chunk(uint64_t begin) const noexcept {
    return std::min(begin / chunk_bytes_, chunks() - 1);
  }
  Bucket& bucket_of(uint64_t sample) const { return header_->buckets[sample % kBuckets]; }

  void set(uint64_t sample, State state) noexcept { store(sample, word_of(state)); }
  void store(uint64_t sample, uint32_t word) noexcept {
    words_[sample].store(word, std::memory_order_seq_cst);
    wake(sample);
  }
  void wake(uint64_t sample) const noexcept { wake(bucket_of(sample)); }
  static void wake(Bucket& bucket) noexcept {
    bucket.sequence.fetch_add(1, std::memory_order_seq_cst);
    if (bucket.waiters.load(std::memory_order_seq_cst) > 0) futex_wake_all(bucket.sequence);
  }
  // Whether the sample's tier takes bytes.
  bool fills(uint64_t sample) const noexcept {
    return tier_[sample] == plan::kNoTier ||
           (header_->given_up.load(std::memory_order_relaxed) & (1u << tier_[sample])) == 0;
  }
  // Whether what was read of a sample, whose word was `seen` before, is that sample. Else it is not
  // ready any more. What a store dropped, or an earlier job wrote, is written again; but what this job
  // wrote fails for good, or a bad disk would be written to for ever.
  bool accept(uint64_t sample, uint32_t seen, const Result<uint32_t>& result) {
    const bool dropped = result && result.value() == 0;
    if (result && !dropped && sums_.agrees(sample, result.value())) return true;
    const bool again = dropped || seen == kResident;
    // Where another reader has found that before, what is there by now is not what was read.
    if (state_of(seen) != State::ready ||
        !words_[sample].compare_exchange_strong(seen,
                                                word_of(again ? State::empty : State::failed))) {
      return false;
    }
    header_->file_bytes.fetch_sub(sizes_[sample] + kRecordHeader);
    if (dropped) return false;
    const size_t t = tier_[sample];
    warn(t, Told::read,
         "sample " + std::to_string(sample) + " in the tier " + tier_paths_[t] + ": " +
             (result ? "a record is of another content than the one that was read first"
                     : result.error().what()) +
             "; it is read from the source " + (again ? "and written again" : "instead"));
    return false;
  }
  // 0, or -errno with the text.
  int write(uint64_t sample, uint32_t sum, std::span<const std::byte> bytes, std::string& told);
  // The checksum of what was read; 0 if it is there no more.
  Result<uint32_t> read(uint64_t sample, std::span<std::byte> into);
  // Once for each tier and kind.
  void warn(size_t tier, Told kind, const std::string& message) {
    const uint32_t bit = 1u << static_cast<uint32_t>(kind);
    if ((warned_[tier].fetch_or(bit) & bit) == 0) log(LogLevel::warning, message);
  }

  bool is_used(uint64_t chunk) const noexcept;
  Chunk state_of_chunk(uint64_t chunk) const noexcept {
    return static_cast<Chunk>(chunk_words_[chunk].load());
  }
  // False if it is not in that state.
  bool change(uint64_t chunk, Chunk from, Chunk to) noexcept {
    auto expected = static_cast<uint32_t>(from);
    return chunk_words_[chunk].compare_exchange_strong(expected, static_cast<uint32_t>(to));
  }
  bool have_chunk(uint64_t chunk, size_t tier);
  std::optional<std::string> refusal(uint64_t size, bool modest) const;
  void watch();
  void ease();
  bool choose_leaving(uint64_t bytes);
  void look_at_leaving();
  bool is_filling(uint64_t sample);
  bool in_use(Leaving& leaving);
  bool is_read(const Leaving& leaving) const;
  bool give_back(uint64_t chunk);
  void meet(const Placer& place, std::chrono::nanoseconds timeout);
  bool is_late(const Descriptor& catalog) const;
  void await_late(const Descriptor& catalog, Handover::Deadline deadline) const;
  void go_without(const std::string& why, const Placer& place);
  void set_placement(plan::Placement placement);
  void take_places(plan::Placement& placement);
  Descriptor create_catalog();
  Descriptor create_arena();
  void map_shared();
  void find_words();
  void map_arena();
  [[noreturn]] void differ(const std::string& what) const;
  void check(const CatalogHeader& h) const;
  void enter_member();
  void open_tier_files();
  bool open_kept(size_t tier, std::string& why);
  void shorten_kept(size_t tier);
  void take_tier_files(std::vector<Descriptor>& files);
  void share_listing();
  void give();
  Manifest kept_in(size_t tier) const;
  void load_residents(size_t tier, std::span<const KeptRecord> records);
  void leave() noexcept;
  void keep_on();
  void keep() noexcept;
  void write_manifest(size_t tier, bool last);

  const NodeCacheConfig config_;
  FileSystem& files_;
  const MemoryLimits limits_;
  const std::vector<uint64_t> sizes_;
  bool placed_ = false;
  std::vector<uint8_t> tier_;
  std::vector<uint64_t> offset_;
  std::vector<uint64_t> arena_base_;
  uint64_t halves_base_ = 0;  // of the first half in the arena
  uint64_t copies_base_ = 0;  // of the first place of copies
  plan::CopyPlaces copies_;
  uint32_t copy_lead_ = 0;
  uint64_t arena_bytes_ = 0, chunk_bytes_ = 0;
  uint64_t plan_ = 0;  // of plan and placement

  LockFile lock_;
  Descriptor catalog_file_, arena_file_;
  Mapping catalog_, arena_;
  Descriptor kept_samples_, listing_;
  CatalogHeader* header_ = nullptr;
  PlaceRange* ranges_ = nullptr;
  std::atomic<uint64_t>* held_ = nullptr;
  std::atomic<uint32_t>* chunk_words_ = nullptr;
  std::atomic<uint32_t>* words_ = nullptr;
  SampleSums sums_;
  std::vector<Descriptor> tier_files_;
  std::vector<LockFile> kept_files_;  // of kept tiers, what locks them as long as a rank lives
  std::vector<Descriptor> kept_directories_;
  std::vector<std::string> tier_paths_;
  std::vector<std::atomic<bool>> disabled_;
  std::vector<std::atomic<uint32_t>> warned_;  // a bit for each Told
  std::vector<Turns> turns_;                   // of reads of file tiers
  uint32_t me_;                                // this process's number on the node
  bool joined_ = false;
  const std::chrono::steady_clock::time_point made_ = std::chrono::steady_clock::now();
  const int owner_pid_;
  Handover handover_;  // ends before what it gives is closed
  // Of the thread that eases:
  bool eased_ = false;
  bool stuck_ = false;  // the last chunk could not be given back
  std::vector<Leaving> leaving_;
  LockFile ease_lock_;
  std::optional<Watch> watch_;                       // uses both of them, and ends first
  std::chrono::steady_clock::time_point next_keep_;  // of the thread that keeps
  std::optional<Watch> keeper_;
};

// ------------------------------------------------------------------------------- joining

void NodeCacheImpl::join(const Placer& place, std::chrono::nanoseconds timeout) {
  std::string why;
  try {
    meet(place, timeout);
    watch();
    keep_on();
    return;
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::io) throw;
    why = e.what();
  }
  go_without(why, place);
}

void NodeCacheImpl::watch() {
  if (arena_.data() == nullptr) return;
  const auto without = [](const std::string& why) {
    log(LogLevel::warning, why + "; the RAM tier gives no memory back to others");
  };
  auto file = reopen(catalog_file_.get());
  if (!file) return without(file.error().what());
  try {
    ease_lock_ = LockFile(std::move(file).take());  // lock_ belongs to this thread
    watch_.emplace("nostall-ease", kEaseInterval, [this] { ease(); });
  } catch (const Error& e) {
    without(e.what());
  } catch (const std::system_error& e) {
    without(std::string("cannot start a thread: ") + e.what());
  }
}

void NodeCacheImpl::meet(const Placer& place, std::chrono::nanoseconds timeout) {
  const bool keeps = std::any_of(config_.tiers.begin(), config_.tiers.end(),
                                 [](const TierSpec& spec) { return spec.keep; });
  Kept kept(config_.tiers.size());
  std::vector<std::vector<KeptRecord>> records(config_.tiers.size());
  // Ranks compute at the same time what does not depend on what earlier jobs left.
  if (!keeps) set_placement(place(kept));
  const auto patience = std::chrono::steady_clock::now() + config_.late;
  std::optional<Handover::Turn> turn;
  std::vector<Descriptor> files;
  for (;;) {
    // Deadlines cover waits for other ranks only, not what this rank computes itself.
    const auto set_up = std::max<std::chrono::nanoseconds>(timeout, keeps ? kJudgePatience : 0min);
    turn.emplace(handover_.turn(std::chrono::steady_clock::now() + set_up, config_.waiting));
    files = handover_.ask(std::chrono::steady_clock::now() + timeout, config_.waiting);
    if (files.empty() || !is_late(files[kCatalogFile])) break;
    if (std::chrono::steady_clock::now() >= patience) break;
    const Descriptor catalog = std::move(files[kCatalogFile]);
    files.clear();
    turn.reset();
    await_late(catalog, patience);
  }
  const bool first = files.empty();
  if (first) {
    open_tier_files();
    if (keeps) {
      for (size_t t = 0; t < kept.size(); ++t) {
        if (!kept_files_[t]) continue;
        Manifest manifest = kept_in(t);
        kept[t].reserve(manifest.records.size());
        for (const KeptRecord& r : manifest.records) kept[t].push_back({r.sample, r.offset});
        records[t] = std::move(manifest.records);
      }
      kept_samples_ = shared_list(kept);
    }
  } else {
    if (files.size() != kFirstTier + 2 * config_.tiers.size()) differ("number of tiers");
    catalog_file_ = std::move(files[kCatalogFile]);
    arena_file_ = std::move(files[kArenaFile]);
    kept_samples_ = std::move(files[kKeptSamples]);
    listing_ = std::move(files[kListing]);
    take_tier_files(files);
    // Offered to others before the turn ends: the rank that gave the files may leave before this
    // one has placed its samples, and the next rank would then create a second cache.
    try {
      give();
    } catch (const Error&) {
      // The ranks before it are found in its place.
    }
    turn.reset();
    if (kept_samples_) kept = read_shared_list(kept_samples_, config_.tiers.size());
  }
  if (!placed_) set_placement(place(kept));
  if (first) {
    catalog_file_ = create_catalog();
    arena_file_ = create_arena();
    map_shared();
    for (size_t t = 0; t < kept.size(); ++t) {
      if (kept_files_[t]) load_residents(t, records[t]);
    }
    enter_member();
    share_listing();
    try {
      give();
    } catch (const Error&) {
      if (config_.local_world > 1) throw;  // a single rank need not be found
    }
  } else {
    map_shared();
    enter_member();
    if (listing_ && config_.listing != nullptr) config_.listing->adopt(listing_);
  }
}

// Whether the catalogue is of ranks that have yet to load the state that this one goes on from.
bool NodeCacheImpl::is_late(const Descriptor& catalog) const {
  const Mapping head = head_of(catalog);
  if (head.data() == nullptr) return false;
  const auto& h = *reinterpret_cast<const CatalogHeader*>(head.data());
  const bool alike = layout_of(h) == kLayout && h.local_world == config_.local_world &&
                     h.dataset == config_.dataset;
  return alike && h.loads < config_.loads && h.start != config_.plan;
}

// Returns when no rank that lives has the catalogue any more, or at the deadline.
void NodeCacheImpl::await_late(const Descriptor& catalog, Handover::Deadline deadline) const {
  const LockFile ranks(reopen(catalog.get()).take());
  const auto somebody_lives = [&] {
    for (uint32_t rank = 0; rank < config_.local_world; ++rank) {
      if (ranks.is_held_elsewhere(kFirstMember + rank)) return true;
    }
    return false;
  };
  do {  // one that is about to lock its byte has it by the next look
    std::this_thread::sleep_for(kWaitSlice);
    if (config_.waiting) config_.waiting();
  } while (somebody_lives() && std::chrono::steady_clock::now() < deadline);
}

// Where there is no memory for the second copy that there is for a moment, every rank keeps its own.
void NodeCacheImpl::share_listing() {
  if (config_.listing == nullptr || config_.local_world == 1) return;
  try {
    if (!config_.listing->is_shared() && refusal(config_.listing->size(), false)) return;
    auto file = config_.listing->share();
    if (file) listing_ = std::move(file).take();
  } catch (const std::bad_alloc&) {
    // Nothing has changed.
  }
}

// A cache that holds nothing, where the ranks cannot share one.
void NodeCacheImpl::go_without(const std::string& why, const Placer& place) {
  joined_ = false;
  handover_.stop();
  lock_ = LockFile();
  if (!placed_) set_placement(place(Kept(config_.tiers.size())));
  for (size_t t = 0; t < config_.tiers.size(); ++t) {
    tier_files_[t].reset();
    kept_files_[t] = LockFile();
    disabled_[t] = true;
  }
  catalog_file_.reset();
  arena_file_.reset();
  // What failed may be the files that ranks share.
  catalog_ = Mapping::alone("the catalogue", catalog_bytes()).take();
  new (catalog_.data()) CatalogHeader{};
  find_words();
  log(LogLevel::warning, why + "; local rank " + std::to_string(config_.local_rank) +
                             " has no tiers, samples are read from the source");
}

void NodeCacheImpl::set_placement(plan::Placement placement) {
  const auto unfit = [](const std::string& what) { throw Error(ErrorKind::usage, what); };
  if (placement.tier.size() != sizes_.size() || placement.offset.size() != sizes_.size() ||
      placement.used.size() != config_.tiers.size()) {
    unfit("the placement does not go with the tiers or the sizes");
  }
  plan_ = config_.plan;
  for (size_t s = 0; s < sizes_.size(); ++s) {
    const size_t t = placement.tier[s];
    if (t == plan::kNoTier) continue;
    plan_ = Fnv(plan_).number(s).number(placement.offset[s]).value();
    const uint64_t capacity = t < config_.tiers.size() ? config_.tiers[t].capacity : 0;
    const uint64_t overhead = t < config_.tiers.size() ? record_overhead(config_.tiers[t].kind) : 0;
    const uint64_t offset = placement.offset[s];
    if (offset > capacity || overhead > capacity - offset ||
        sizes_[s] > capacity - offset - overhead) {
      unfit("the placement puts sample " + std::to_string(s) + " beyond the capacity of tier " +
            std::to_string(t));
    }
  }
  for (size_t t = 0; t < config_.tiers.size(); ++t) {
    plan_ = Fnv(plan_).number(placement.used[t]).value();
    arena_base_.push_back(arena_bytes_);
    if (config_.tiers[t].kind == TierKind::ram) arena_bytes_ += placement.used[t];
  }
  const Halves& halves = config_.halves;
  if (places() > 0) {
    const TierSpec* const tier =
        halves.tier < config_.tiers.size() ? &config_.tiers[halves.tier] : nullptr;
    if (!tier || tier->kind != TierKind::ram ||
        halves.shape.bytes > (tier->capacity - placement.used[halves.tier]) / 2) {
      unfit("two halves of " + std::to_string(halves.shape.bytes) + " bytes do not fit into tier " +
            std::to_string(halves.tier));
    }
    plan_ = Fnv(plan_).number(halves.tier).number(halves.shape.bytes).number(places()).value();
    halves_base_ = arena_bytes_;
    arena_bytes_ += 2 * halves.shape.bytes;
    placement.tier.resize(entries(), static_cast<uint8_t>(halves.tier));
  }
  take_places(placement);
  chunk_bytes_ = chunk_bytes(arena_bytes_);
  tier_ = std::move(placement.tier);
  offset_ = std::move(placement.offset);
  placed_ = true;
}

// The room of copies that come and go, behind what is placed and the halves.
void NodeCacheImpl::take_places(plan::Placement& placement) {
  if (placement.copies.count() == 0) return;
  const size_t t = placement.copy_tier;
  const TierSpec* const tier = t < config_.tiers.size() ? &config_.tiers[t] : nullptr;
  const uint64_t bytes = placement.copies.bytes();
  const uint64_t halves = config_.halves.tier == t ? 2 * config_.halves.shape.bytes : 0;
  if (!tier || tier->kind != TierKind::ram ||
      bytes > tier->capacity - placement.used[t] - (places() > 0 ? halves : 0)) {
    throw Error(ErrorKind::usage, "places of copies, of " + std::to_string(bytes) +
                                      " bytes, do not fit into tier " + std::to_string(t));
  }
  copies_ = std::move(placement.copies);
  copy_lead_ = placement.copy_lead;
  plan_ = Fnv(plan_).number(t).number(bytes).number(copies_.count()).value();
  copies_base_ = arena_bytes_;
  arena_bytes_ += bytes;
  placement.tier.resize(entries(), static_cast<uint8_t>(t));
}

Descriptor NodeCacheImpl::create_catalog() {
  Descriptor file = memory_file("nostall-catalog").take();
  // The catalogue is touched everywhere: it must be there, or there is no cache.
  int error = FileSystem::real().truncate(file.get(), catalog_bytes());
  if (error == 0) error = FileSystem::real().allocate(file.get(), 0, catalog_bytes());
  if (error != 0) throw io_error("no memory for", "the catalogue of the node's cache", -error);
  const Mapping mapped =
      Mapping::map(reopen(file.get()).take(), "nostall-catalog", catalog_bytes()).take();
  auto* header = new (mapped.data()) CatalogHeader{};
  header->version = kCatalogVersion;
  header->layout_bytes = sizeof(CatalogHeader);
  header->dataset = config_.dataset;
  header->files_stamp = config_.files_stamp;
  header->plan = plan_;
  header->loads = config_.loads;
  header->start = config_.plan;
  header->samples = sizes_.size();
  header->arena_bytes = arena_bytes_;
  header->local_world = config_.local_world;
  config_.arguments.copy(header->arguments.data(), header->arguments.size());
  header->magic = kCatalogMagic;
  return file;
}

// Only given its length here; its memory comes chunk by chunk. Empty if there is none to be had.
Descriptor NodeCacheImpl::create_arena() {
  if (arena_bytes_ == 0) return {};
  auto file = unnamed_file(config_.shm_directory);
  std::string why;
  if (!file) {
    why = file.error().what();
  } else if (const int error = files_.truncate(file.value().get(), arena_bytes_); error != 0) {
    why = io_error("cannot size a file in", config_.shm_directory, -error).what();
  } else {
    return std::move(file).take();
  }
  for (size_t t = 0; t < config_.tiers.size(); ++t) {
    if (config_.tiers[t].kind == TierKind::ram)
      warn(t, Told::start, why + "; there is no RAM tier");
  }
  return {};
}

void NodeCacheImpl::map_shared() {
  struct stat status {};
  if (::fstat(catalog_file_.get(), &status) != 0)
    throw io_error("cannot examine", "the catalogue", errno);
  // The header says in what the ranks disagree, which the size alone does not.
  if (const Mapping head = head_of(catalog_file_); head.data() != nullptr) {
    check(*reinterpret_cast<const CatalogHeader*>(head.data()));
  }
  if (static_cast<uint64_t>(status.st_size) != catalog_bytes()) {
    throw Error(ErrorKind::peer,
                "local rank " + std::to_string(config_.local_rank) +
                    " disagrees with the other ranks of this node: their catalogue has " +
                    std::to_string(status.st_size) + " bytes, this rank expects " +
                    std::to_string(catalog_bytes()) +
                    "; give all ranks the same data set and arguments");
  }
  // Not what is mapped: a forked child would keep its locks.
  lock_ = LockFile(reopen(catalog_file_.get()).take(), files_);
  catalog_ =
      Mapping::map(reopen(catalog_file_.get()).take(), "the catalogue", catalog_bytes()).take();
  find_words();
  map_arena();
}

void NodeCacheImpl::find_words() {
  header_ = reinterpret_cast<CatalogHeader*>(catalog_.data());
  ranges_ = reinterpret_cast<PlaceRange*>(catalog_.data() + sizeof(CatalogHeader));
  held_ = reinterpret_cast<std::atomic<uint64_t>*>(ranges_ + places());
  chunk_words_ = reinterpret_cast<std::atomic<uint32_t>*>(held_ + copies_.count());
  // Behind those of all ranks.
  words_ = readers_of(config_.local_world) + config_.local_world * pin_words(copies_.count());
  sums_ = SampleSums(words_ + entries(), sizes_.size());
}

void NodeCacheImpl::map_arena() {
  if (arena_file_) {
    struct stat status {};
    if (::fstat(arena_file_.get(), &status) != 0 ||
        static_cast<uint64_t>(status.st_size) < arena_bytes_) {
      differ("size of the RAM tier");
    }
    auto mapped = Mapping::map(reopen(arena_file_.get()).take(), "the RAM tier", arena_bytes_);
    if (mapped) {
      arena_ = std::move(mapped).take();
      return;
    }
    log(LogLevel::warning, std::string(mapped.error().what()) + "; there is no RAM tier");
  }
  for (size_t t = 0; t < config_.tiers.size(); ++t) {
    if (config_.tiers[t].kind == TierKind::ram && arena_bytes_ > 0) disabled_[t] = true;
  }
}

void NodeCacheImpl::differ(const std::string& what) const {
  throw Error(ErrorKind::peer, "local rank " + std::to_string(config_.local_rank) +
                                   " disagrees with the other ranks of this node on the " + what +
                                   "; give all ranks the same data set and arguments");
}

void NodeCacheImpl::check(const CatalogHeader& h) const {
  const auto compare = [this](const std::string& what, uint64_t theirs, uint64_t mine) {
    if (theirs == mine) return;
    differ(what + ": " + std::to_string(mine) + " here, " + std::to_string(theirs) + " there");
  };
  compare("cache's layout", layout_of(h), kLayout);
  compare("number of local ranks", h.local_world, config_.local_world);
  if (h.dataset == config_.dataset && h.plan == plan_ && h.samples == sizes_.size()) {
    if (h.files_stamp == config_.files_stamp) return;
    throw Error(ErrorKind::io,
                "the data set of this rank lies elsewhere than that of the other "
                "ranks of its node, or its files have other times: open the same "
                "files in all of them, when no process writes there");
  }
  // Lines of the same name are at the same place: both sides wrote all of them.
  const std::string_view there(h.arguments.data(), ::strnlen(h.arguments.data(), kArgumentBytes));
  const auto mine = lines_of(that_fit(config_.arguments)), others = lines_of(that_fit(there));
  std::string found;
  for (size_t i = 0; i < std::min(mine.size(), others.size()); ++i) {
    if (mine[i] == others[i]) continue;
    found += (found.empty() ? "" : ", ") + mine[i].first + " (" + mine[i].second + " here, " +
             others[i].second + " there)";
  }
  if (!found.empty()) differ(found);
  if (h.dataset != config_.dataset) differ("files of the data set, their sizes or their order");
  const bool all_seen = std::max(config_.arguments.size(), there.size()) < kArgumentBytes;
  differ(std::string("places of samples in the tiers") +
         (all_seen ? ", though all arguments are the same" : ""));
}

void NodeCacheImpl::enter_member() {
  const auto fail = [this] {
    throw io_error("cannot lock", "the catalogue of the node's cache", lock_.error_number());
  };
  Locked own = lock_.try_lock(kFirstMember + me_, LockMode::exclusive);
  while (config_.any_member && own == Locked::elsewhere && me_ + 1 < config_.local_world) {
    own = lock_.try_lock(kFirstMember + ++me_, LockMode::exclusive);
  }
  if (own == Locked::elsewhere && config_.any_member) {
    throw Error(ErrorKind::usage, std::to_string(config_.local_world) +
                                      " processes of this node share these tiers, and no more can: "
                                      "read with fewer processes, or give some of them tiers of "
                                      "their own (job=)");
  }
  if (own == Locked::elsewhere) {
    const int pid = header_->members[me_].pid.load();
    throw Error(ErrorKind::usage, "local rank " + std::to_string(me_) + " of job \"" + config_.job +
                                      "\" runs already, as process " + std::to_string(pid) +
                                      ": give each rank its own local_rank, or another job");
  }
  if (own != Locked::yes) fail();
  // Until this rank leaves, no other one is the last.
  if (lock_.try_lock(kAlive, LockMode::shared) != Locked::yes) fail();
  Member& me = header_->members[me_];
  me.pid.store(::getpid());
  me.chunk.store(0);
  me.reading.store(0);
  me.membership.store(Membership::joined);
  joined_ = true;
  // Claims and views of an earlier process of this rank are void.
  std::fill_n(readers_of(me_), chunks(), 0u);
  for (uint32_t p = 0; p < pin_words(copies_.count()); ++p) pin_of(me_, p).store(0);
  for (uint64_t s = 0; s < entries(); ++s) {
    uint32_t mine = word_of(State::filling, me_);
    words_[s].compare_exchange_strong(mine, word_of(State::empty));
  }
}

void NodeCacheImpl::open_tier_files() {
  for (size_t t = 0; t < config_.tiers.size(); ++t) {
    const TierSpec& spec = config_.tiers[t];
    if (spec.kind != TierKind::file || spec.capacity == 0) continue;
    if (spec.store) {
      tier_paths_[t] = spec.path;
      continue;
    }
    tier_paths_[t] = spec.path;
    if (const std::string missing = unmounted(spec.path); !missing.empty()) {
      disabled_[t] = true;
      warn(t, Told::start,
           "tier " + spec.path + " is not used, samples are read from the source: " + missing +
               " is not there, and would lie on the disk of the system (is a disk not mounted? "
               "mount it, or make " +
               missing + ")");
      continue;
    }
    if (const std::string why = not_made(spec.path); !why.empty()) {
      disabled_[t] = true;
      warn(t, Told::start,
           why +
               "; this file tier is not used, samples are read from the source: make the "
               "directory, or give the tier another one");
      continue;
    }
    std::string not_kept;
    if (spec.keep && open_kept(t, not_kept)) {
      shorten_kept(t);
      continue;
    }
    auto file = unnamed_file(spec.path);
    if (!file) {
      disabled_[t] = true;
      warn(t, Told::start,
           std::string(file.error().what()) +
               "; this file tier is not used, samples are read from the source: let this user "
               "write there, or give the tier another directory");
      continue;
    }
    tier_files_[t] = std::move(file).take();
    if (!not_kept.empty()) {
      warn(t, Told::start,
           not_kept + "; this tier is not kept: put that right, or give it another directory");
    }
  }
}

// A kept file serves one job at a time; another job, or one that cannot have it, uses a file that
// is not kept; `why` says so.
bool NodeCacheImpl::open_kept(size_t t, std::string& why) {
  const TierSpec& spec = config_.tiers[t];
  const std::string directory = kept_directory(spec.path);
  const std::string path = kept_file_name(spec.path, config_.dataset);
  const auto refuse = [&why](std::string told) {
    why = std::move(told);
    return false;
  };
  auto own = own_directory(directory);
  if (!own) return refuse(own.error().what());
  reclaim_kept_files(directory, own.value(), files_);
  bool used = false;
  for (int attempt = 0; attempt < kOpenAttempts; ++attempt) {
    auto file = open_own(path, O_RDWR | O_CREAT, own.value().get());
    if (!file) return refuse(file.error().what());
    LockFile lock(file.value(), files_);
    switch (lock.try_lock(kAlive, LockMode::exclusive)) {
      case Locked::elsewhere:
        // By another job, or for a moment by one that looks for abandoned files.
        used = true;
        std::this_thread::sleep_for(kWaitSlice);
        continue;
      case Locked::unsupported:
        return refuse("the file system of " + spec.path +
                      " has no locks on bytes of a file (fcntl), so that two jobs could write one "
                      "kept tier");
      case Locked::failed:
        return refuse(io_error("cannot lock", path, lock.error_number()).what());
      case Locked::yes:
        break;
    }
    // Another job that clears abandoned files may have removed it before it was locked.
    if (!lock.is_current(path, own.value().get())) continue;
    // Read and written by another descriptor: a forked child keeps that one, not the lock.
    auto again = reopen(lock.get());
    if (!again) return refuse(again.error().what());
    tier_files_[t] = std::move(again).take();
    kept_files_[t] = std::move(lock);
    kept_directories_[t] = std::move(own).take();
    tier_paths_[t] = path;
    return true;
  }
  return refuse(used ? "another job uses " + path + ", and a kept tier serves one at a time"
                     : "other jobs remove " + path + " again and again");
}

// An earlier job may have had more room than the user gives this one.
void NodeCacheImpl::shorten_kept(size_t t) {
  struct stat status {};
  const uint64_t capacity = config_.tiers[t].capacity;
  if (::fstat(tier_files_[t].get(), &status) != 0) return;
  if (static_cast<uint64_t>(status.st_size) <= capacity) return;
  if (const int error = files_.truncate(tier_files_[t].get(), capacity); error != 0) {
    warn(t, Told::start, io_error("cannot shorten", tier_paths_[t], -error).what());
  }
}

void NodeCacheImpl::give() {
  const size_t tiers = config_.tiers.size();
  std::vector<int> files(kFirstTier + 2 * tiers, -1);
  files[kCatalogFile] = catalog_file_.get();
  files[kArenaFile] = arena_file_.get();
  files[kKeptSamples] = kept_samples_.get();
  files[kListing] = listing_.get();
  for (size_t t = 0; t < tiers; ++t) {
    files[kFirstTier + t] = kept_files_[t] ? kept_files_[t].get() : tier_files_[t].get();
    files[kFirstTier + tiers + t] = kept_directories_[t].get();
  }
  handover_.give(std::move(files));
}

void NodeCacheImpl::take_tier_files(std::vector<Descriptor>& files) {
  const size_t tiers = config_.tiers.size();
  for (size_t t = 0; t < tiers; ++t) {
    const TierSpec& spec = config_.tiers[t];
    if (spec.kind != TierKind::file || spec.capacity == 0) continue;
    tier_files_[t] = std::move(files[kFirstTier + t]);
    tier_paths_[t] = spec.path;
    if (spec.store) continue;
    if (!tier_files_[t]) disabled_[t] = true;
    kept_directories_[t] = std::move(files[kFirstTier + tiers + t]);
    if (!kept_directories_[t]) continue;
    kept_files_[t] = LockFile(tier_files_[t], files_);
    tier_files_[t] = reopen(kept_files_[t].get()).take();
    tier_paths_[t] = kept_file_name(spec.path, config_.dataset);
  }
}

// What the tier's file holds of what its manifest says: another job may have cut the file since, and
// others remove it.
Manifest NodeCacheImpl::kept_in(size_t t) const {
  Manifest manifest = kept_records(config_.tiers[t], config_.dataset, sizes_.size());
  struct stat status {};
  const bool known = ::fstat(tier_files_[t].get(), &status) == 0;
  const uint64_t end = known ? static_cast<uint64_t>(status.st_size) : 0;
  std::erase_if(manifest.records, [&](const KeptRecord& r) {
    return r.offset > end || end - r.offset < kRecordHeader + sizes_[r.sample];
  });
  if (config_.judge) config_.judge(config_.tiers[t], manifest);
  return manifest;
}

// Of what kept_in() gives, which names no other samples than the data set's.
void NodeCacheImpl::load_residents(size_t t, std::span<const KeptRecord> records) {
  for (const KeptRecord& r : records) {
    if (tier_[r.sample] == t && offset_[r.sample] == r.offset) {
      sums_.agrees(r.sample, r.sum);
      words_[r.sample].store(kResident);
      header_->file_bytes.fetch_add(sizes_[r.sample] + kRecordHeader);
    }
  }
}

// ----------------------------------------------------------------------------- memory and waiting

bool NodeCacheImpl::have_chunk(uint64_t chunk, size_t tier) try {
  if (state_of_chunk(chunk) == Chunk::untouched) {
    const auto [begin, size] = range_of_chunk(chunk);
    auto why = refusal(size, config_.tiers[tier].modest);
    int error = 0;
    if (why) {
      change(chunk, Chunk::untouched, Chunk::refused);
    } else {
      // Two ranks may both ask for the same memory: the second call changes nothing, also if it
      // fails. So only ease() gives back what is there of a chunk that was refused to one of them.
      error = -files_.allocate(arena_.fd(), begin, size);
      if (!change(chunk, Chunk::untouched, error == 0 ? Chunk::there : Chunk::partial)) {
        change(chunk, Chunk::refused, Chunk::partial);
      }
    }
    if (error != 0) {
      why = io_error("cannot have " + std::to_string(size) + " more bytes in",
                     config_.shm_directory, error)
                .what();
    }
    if (why) {
      warn(tier, Told::memory,
           "the RAM tier takes no more memory: " + *why + "; the rest is read from the source" +
               (error == EINTR ? "" : ": free memory or give the RAM tier a smaller size"));
    }
  }
  return state_of_chunk(chunk) == Chunk::there;
} catch (const std::bad_alloc&) {
  return false;
}

// Which limit forbids so many bytes more. What its reserve holds is left to others: beyond it they,
// and this program, are killed, and not only refused.
std::optional<std::string> NodeCacheImpl::refusal(uint64_t size, bool modest) const {
  uint64_t taken = 0;
  for (uint64_t c = 0; modest && c < chunks(); ++c) {
    if (state_of_chunk(c) == Chunk::there) taken += chunk_bytes_;
  }
  std::vector<MemoryLimit> limits = limits_.read();
  // The arena's addresses are taken already.
  std::erase_if(limits, [](const MemoryLimit& l) { return l.kind == LimitKind::address_space; });
  auto refused = nostall::refusal(limits, size + taken);
  if (refused && modest) *refused += ", and as much is left to others as the tier has";
  return refused;
}

// Gives back what others need of a reserve, or less if it is being used.
void NodeCacheImpl::ease() try {
  if (ease_lock_.try_lock(kEasing, LockMode::exclusive) != Locked::yes) return;  // another rank
  std::vector<MemoryLimit> limits = limits_.read();
  std::erase_if(limits, [](const MemoryLimit& l) { return l.kind == LimitKind::address_space; });
  const auto most = std::max_element(limits.begin(), limits.end(),
                                     [](auto& a, auto& b) { return a.over() < b.over(); });
  const uint64_t over = most == limits.end() ? 0 : most->over();
  if (!stuck_ && choose_leaving(over) && !std::exchange(eased_, true) &&
      ease_lock_.try_lock(kEasingTold, LockMode::exclusive) == Locked::yes) {
    log(LogLevel::warning, "the RAM tier gives memory back: " + most->in_words() +
                               "; its samples are read from the source: give the RAM tier a "
                               "smaller size");
  }
  look_at_leaving();
  std::erase_if(leaving_, [this](Leaving& l) { return !in_use(l) && give_back(l.chunk); });
  // Another rank may be next: this one may be stopped for any time.
  if (leaving_.empty()) ease_lock_.unlock(kEasing);
} catch (const std::exception&) {
  // No memory for the lists: the next time.
}

// Marks chunks of so many bytes, with those that are marked already, and all that are there in part;
// whether samples are lost by it.
bool NodeCacheImpl::choose_leaving(uint64_t bytes) {
  uint64_t marked = 0;
  bool any = false;
  for (uint64_t c = 0; c < chunks(); ++c) {
    if (state_of_chunk(c) == Chunk::leaving) marked += chunk_bytes_;
    change(c, Chunk::partial, Chunk::leaving);
  }
  for (const Leaving& l : leaving_) marked -= l.looks > kPatientLooks ? chunk_bytes_ : 0;
  for (uint64_t c = chunks(); marked < bytes && c-- > 0;) {
    if (change(c, Chunk::there, Chunk::leaving)) {
      marked += chunk_bytes_;
      any = true;
    }
  }
  return any;
}

// Fails the ready samples of chunks that leave. One look at all samples for each chunk: nothing is
// filled there any more but what was being filled.
void NodeCacheImpl::look_at_leaving() {
  std::vector<Leaving> fresh;
  for (uint64_t c = 0; c < chunks(); ++c) {
    if (state_of_chunk(c) == Chunk::leaving &&
        std::none_of(leaving_.begin(), leaving_.end(),
                     [c](const Leaving& l) { return l.chunk == c; })) {
      fresh.push_back({c, c});
    }
  }
  if (fresh.empty()) return;
  for (uint64_t s = 0; s < entries(); ++s) {
    if (tier_[s] == plan::kNoTier || kind(s) != TierKind::ram) continue;
    const auto [begin, size] = range_of(s);
    if (size == 0) continue;
    const uint64_t first = begin / chunk_bytes_, last = (begin + size - 1) / chunk_bytes_;
    auto at = std::lower_bound(fresh.begin(), fresh.end(), first,
                               [](const Leaving& l, uint64_t c) { return l.chunk < c; });
    if (at == fresh.end() || at->chunk > last) continue;
    const bool filling = is_filling(s);
    for (; at != fresh.end() && at->chunk <= last; ++at) {
      at->lowest = std::min(at->lowest, first);
      if (filling) at->filling.push_back(s);
    }
  }
  leaving_.insert(leaving_.end(), std::make_move_iterator(fresh.begin()),
                  std::make_move_iterator(fresh.end()));
}

// Whether a sample of a chunk that leaves is being filled; a ready one fails, and the claim of a
// rank that died is taken back.
bool NodeCacheImpl::is_filling(uint64_t sample) {
  uint32_t seen = word_of(State::ready);
  if (words_[sample].compare_exchange_strong(seen, kUnfilled)) {
    header_->ram_bytes.fetch_sub(range_of(sample).size, std::memory_order_relaxed);
    return false;
  }
  if (state_of(seen) != State::filling) return false;
  if (ease_lock_.is_held_elsewhere(kFirstMember + (seen >> 2))) return true;
  const bool taken = words_[sample].compare_exchange_strong(seen, word_of(State::empty));
  if (taken) wake(sample);
  return !taken;
}

bool NodeCacheImpl::in_use(Leaving& leaving) {
  std::erase_if(leaving.filling, [this](uint64_t s) { return !is_filling(s); });
  const bool used = !leaving.filling.empty() || is_read(leaving);
  leaving.looks += used ? 1 : 0;
  return used;
}

// By a rank that lives.
bool NodeCacheImpl::is_read(const Leaving& leaving) const {
  for (uint32_t r = 0; r < config_.local_world; ++r) {
    const std::atomic<uint32_t>* readers = readers_of(r);
    const bool reads = std::any_of(readers + leaving.lowest, readers + leaving.chunk + 1,
                                   [](const std::atomic<uint32_t>& n) { return n.load() != 0; });
    if (reads && !ease_lock_.is_free_elsewhere(kFirstMember + r)) return true;
  }
  return false;
}

// One that cannot be given back stays marked, and is tried again at the next look.
bool NodeCacheImpl::give_back(uint64_t chunk) {
  const auto [begin, size] = range_of_chunk(chunk);
  const int error = -files_.give_back(arena_.fd(), begin, size);
  if (error != 0 && !std::exchange(stuck_, true)) {
    log(LogLevel::warning, std::string(io_error("the RAM tier cannot give memory back to",
                                                config_.shm_directory, error)
                                           .what()) +
                               "; it is tried again, and its other samples stay");
  }
  if (error != 0) return false;
  stuck_ = false;
  change(chunk, Chunk::leaving, Chunk::refused);
  header_->unfilled.fetch_add(1);
  return true;
}

void NodeCacheImpl::try_again() {
  if (header_->unfilled.load() == 0) return;
  const bool modest = std::any_of(config_.tiers.begin(), config_.tiers.end(),
                                  [](const TierSpec& spec) { return spec.modest; });
  if (refusal(std::min(chunk_bytes_, arena_bytes_), modest)) return;
  // What another rank leaves unfilled from here on is for the next time.
  header_->unfilled.store(0);
  for (uint64_t c = 0; c < chunks(); ++c) {
    change(c, Chunk::refused, Chunk::untouched);
    change(c, Chunk::partial, Chunk::untouched);
  }
  for (uint64_t s = 0; s < entries(); ++s) {
    uint32_t unfilled = kUnfilled;
    words_[s].compare_exchange_strong(unfilled, word_of(State::empty));
  }
}

int NodeCacheImpl::write(uint64_t sample, uint32_t sum, std::span<const std::byte> bytes,
                         std::string& told) {
  const size_t t = tier_[sample];
  const TierSpec& spec = config_.tiers[t];
  if (!spec.store) {
    const int error =
        write_record(files_, tier_files_[t].get(), offset_[sample], sample, sum, bytes);
    if (error != 0) told = io_error("cannot write to the file tier", tier_paths_[t], -error).what();
    return error;
  }
  try {
    spec.store->put(config_.dataset, sample, bytes);
    return 0;
  } catch (const std::exception& e) {
    told = "cannot keep samples in the tier " + spec.path + ": " + e.what();
    return -EIO;
  }
}

Result<uint32_t> NodeCacheImpl::read(uint64_t sample, std::span<std::byte> into) {
  const size_t t = tier_[sample];
  const TierSpec& spec = config_.tiers[t];
  if (!spec.store) {
    return read_record(files_, tier_files_[t].get(), offset_[sample], sample, into);
  }
  try {
    return spec.store->get(config_.dataset, sample, into) ? sample_sum(into) : 0;
  } catch (const Error& e) {
    return e;
  } catch (const std::exception& e) {
    return Error(ErrorKind::io, e.what());
  }
}

State NodeCacheImpl::wait(uint64_t sample, std::chrono::nanoseconds timeout, std::stop_token stop) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  Bucket& bucket = bucket_of(sample);
  bucket.waiters.fetch_add(1, std::memory_order_seq_cst);
  State seen = State::filling;
  for (;;) {
    const uint32_t sequence = bucket.sequence.load(std::memory_order_seq_cst);
    uint32_t word = words_[sample].load(std::memory_order_seq_cst);
    seen = state_of(word);
    if (seen != State::filling || stop.stop_requested()) break;
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left.count() <= 0) break;
    const uint32_t claimer = word >> 2;
    if (claimer != me_ && !lock_.is_held_elsewhere(kFirstMember + claimer)) {
      if (words_[sample].compare_exchange_strong(word, word_of(State::empty))) wake(sample);
      continue;
    }
    futex_wait(bucket.sequence, sequence, std::min<std::chrono::nanoseconds>(left, kWaitSlice));
  }
  bucket.waiters.fetch_sub(1, std::memory_order_seq_cst);
  return seen;
}

std::optional<PeerFailure> NodeCacheImpl::dead_peer() const {
  for (uint32_t r = 0; r < config_.local_world; ++r) {
    const Member& member = header_->members[r];
    if (r == me_ || member.membership.load() != Membership::joined) continue;
    // Read again: it may have left in an orderly way between the two looks.
    if (!lock_.is_held_elsewhere(kFirstMember + r) &&
        member.membership.load() == Membership::joined) {
      return PeerFailure{r, member.pid.load()};
    }
  }
  return std::nullopt;
}

// ------------------------------------------------------------------------- chunks of sub-batches

// Whether a rank uses the chunk, or may: one that has not said so yet begins with any. One that has
// not come for long may never come; if it does, it finds the chunk gone.
bool NodeCacheImpl::is_used(uint64_t chunk) const noexcept {
  const bool absent_for_good = std::chrono::steady_clock::now() - made_ > kJoinPatience;
  for (uint32_t r = 0; r < config_.local_world; ++r) {
    const Member& member = header_->members[r];
    const Membership membership = member.membership.load();
    if (membership == Membership::left) continue;
    if (membership == Membership::absent && absent_for_good) continue;
    const uint64_t first = member.chunk.load();
    if (membership == Membership::absent || first == 0 || first == chunk + 1 || first == chunk ||
        member.reading.load() == chunk + 1) {
      return true;
    }
  }
  return false;
}

Half NodeCacheImpl::half_of(uint64_t chunk, const plan::KeptChunk& kept) {
  if (!joined_) return Half::gone;  // alone, without tiers
  std::atomic<uint64_t>& half = header_->halves[chunk % 2];
  const uint64_t wanted = (chunk + 1) * 2;
  uint64_t seen = half.load();
  if (seen == wanted) return Half::here;
  if ((seen & kTurning) != 0) return Half::awaited;
  const auto in_use = [&] { return seen != 0 && is_used(seen / 2 - 1); };
  const Half refused = seen > wanted ? Half::gone : Half::awaited;
  if (in_use()) return refused;
  if (!half.compare_exchange_strong(seen, seen | kTurning)) return Half::awaited;
  if (in_use()) {
    half.store(seen);
    wake(header_->turned);
    return refused;
  }
  const uint64_t base = halves_base_ + (chunk % 2) * config_.halves.shape.bytes;
  for (uint64_t i = 0; i < config_.halves.shape.places; ++i) {
    const uint64_t entry = entry_of(chunk, i);
    const uint64_t held = range_of(entry).size;
    if (state_of(words_[entry].exchange(word_of(State::empty))) == State::ready) {
      header_->ram_bytes.fetch_sub(held, std::memory_order_relaxed);
    }
    PlaceRange& range = ranges_[entry - sizes_.size()];
    range.begin.store(i < kept.samples.size() ? base + kept.offsets[i] : 0);
    range.size.store(i < kept.samples.size() ? sizes_[kept.samples[i]] : 0);
  }
  half.store(wanted);
  wake(header_->turned);
  return Half::here;
}

void NodeCacheImpl::wait_for_half(std::chrono::nanoseconds timeout) const {
  Bucket& bucket = header_->turned;
  bucket.waiters.fetch_add(1, std::memory_order_seq_cst);
  futex_wait(bucket.sequence, bucket.sequence.load(std::memory_order_seq_cst), timeout);
  bucket.waiters.fetch_sub(1, std::memory_order_seq_cst);
}

// ------------------------------------------------------------------------ copies that come and go

bool NodeCacheImpl::read_copy(const plan::CopyUse& use, uint64_t sample,
                              std::span<std::byte> into) {
  const uint32_t place = use.place;
  const uint64_t entry = entry_of_copy(place);
  if (!placed(entry) || sample_of(held_[place].load()) != sample) return false;
  std::atomic<uint32_t>& pin = pin_of(me_, place);
  std::atomic<uint32_t>& readers = readers_of(me_)[first_chunk(range_of(entry).begin)];
  pin.fetch_add(1);
  readers.fetch_add(1);
  const Range range = range_of(entry);
  bool good = state_of(words_[entry].load()) == State::ready &&
              sample_of(held_[place].load()) == sample && range.size == into.size();
  if (good) {
    std::memcpy(into.data(), arena_.data() + range.begin, range.size);
    good = sums_.agrees(sample, into);
    uint32_t ready = word_of(State::ready);
    if (!good && words_[entry].compare_exchange_strong(ready, word_of(State::empty))) {
      header_->ram_bytes.fetch_sub(range.size, std::memory_order_relaxed);
      warn(tier_[entry], Told::changed,
           "the copy of sample " + std::to_string(sample) +
               " in the RAM tier has changed since it was read (wrong CRC32C): check "
               "this machine's memory; it is fetched again");
    }
  }
  readers.fetch_sub(1, std::memory_order_release);
  pin.fetch_sub(1, std::memory_order_release);
  return good;
}

bool NodeCacheImpl::write_copy(const plan::CopyUse& use, uint64_t sample,
                               std::span<const std::byte> bytes) {
  const uint32_t place = use.place;
  const uint64_t entry = entry_of_copy(place);
  if (!placed(entry) || bytes.size() > copies_.size_of(place)) return false;
  const uint32_t seen = words_[entry].load();
  const State state = state_of(seen);
  if (state == State::failed) return false;
  if (state == State::ready) {
    const uint64_t held = held_[place].load();
    if (sample_of(held) == sample) return true;
    // A rank that is ahead has put a later copy there. What is still later is of before a step back.
    const uint32_t ahead = filled_of(held) - use.filled;
    if (ahead > 0 && ahead <= copy_lead_) return false;
  }
  // Of a rank that died: there is no other that could be filling it.
  const bool theirs = state == State::filling;
  if (theirs && (seen >> 2 == me_ || lock_.is_held_elsewhere(kFirstMember + (seen >> 2)))) {
    return false;
  }
  uint32_t word = seen;
  if (!words_[entry].compare_exchange_strong(word, word_of(State::filling, me_))) return false;
  if (is_pinned(place)) {
    words_[entry].store(theirs ? word_of(State::empty) : seen);
    return false;
  }
  if (state == State::ready) {
    header_->ram_bytes.fetch_sub(range_of(entry).size, std::memory_order_relaxed);
  }
  held_[place].store(held_of(use.filled, sample));
  const std::span<std::byte> into = ram_slot(entry);
  if (into.size() != bytes.size()) {
    if (!into.empty()) abandon(entry);
    return false;
  }
  std::memcpy(into.data(), bytes.data(), bytes.size());
  publish(entry);
  return true;
}

// By a thread of a rank that lives.
bool NodeCacheImpl::is_pinned(uint32_t place) const noexcept {
  for (uint32_t r = 0; r < config_.local_world; ++r) {
    if (pin_of(r, place).load() == 0) continue;
    if (r == me_ || lock_.is_held_elsewhere(kFirstMember + r)) return true;
  }
  return false;
}

// ------------------------------------------------------------------------------- leaving

void NodeCacheImpl::leave() noexcept {
  try {
    std::optional<Handover::Turn> turn;
    try {
      turn.emplace(handover_.turn(std::chrono::steady_clock::now() + kLeavePatience));
    } catch (const std::exception&) {
      // What a tier keeps is written by those that leave after this one.
    }
    for (uint64_t s = 0; s < entries(); ++s) {
      uint32_t mine = word_of(State::filling, me_);
      if (words_[s].compare_exchange_strong(mine, word_of(State::empty))) wake(s);
    }
    header_->members[me_].membership.store(Membership::left);
    wake(header_->turned);
    lock_.unlock(kFirstMember + me_);
    handover_.stop();
    const bool last = turn && lock_.try_lock(kAlive, LockMode::exclusive) == Locked::yes;
    for (size_t t = 0; turn && t < config_.tiers.size(); ++t) {
      if (kept_files_[t]) write_manifest(t, last);
    }
    // Before the turn ends: the next rank to attach may use what was kept, and the next one to
    // leave may be the last.
    lock_.unlock(kAlive);
    for (LockFile& kept : kept_files_) kept = LockFile();
    for (Descriptor& file : tier_files_) file.reset();
  } catch (const std::exception& e) {
    try {
      log(LogLevel::warning, std::string("leaving the node's cache: ") + e.what());
    } catch (const std::bad_alloc&) {
      // It has left, whether that could be logged or not.
    }
  }
}

void NodeCacheImpl::keep_on() {
  if (me_ != 0 || std::ranges::none_of(kept_files_, [](const LockFile& f) { return bool(f); })) {
    return;
  }
  try {
    keeper_.emplace("nostall-keep", config_.keep_every, [this] { keep(); });
  } catch (const std::system_error&) {
    // Without a thread the manifests are written at the end.
  }
}

void NodeCacheImpl::keep() noexcept {
  const auto begun = std::chrono::steady_clock::now();
  if (begun < next_keep_) return;
  try {
    const Handover::Turn turn = handover_.turn(begun);
    for (size_t t = 0; t < config_.tiers.size(); ++t) {
      if (kept_files_[t]) write_manifest(t, false);
    }
  } catch (const std::exception&) {
    // A rank that attaches or leaves has the turn, or there is no memory: the next time.
  }
  const auto ended = std::chrono::steady_clock::now();
  next_keep_ = ended + kKeepShare * (ended - begun);
}

// Every rank that leaves writes what is there by then, so that ranks which die later cost only what
// came later. The last one flushes the file first; until then a record that never reached the disk
// is found by its checksum.
void NodeCacheImpl::write_manifest(size_t t, bool last) {
  // As they are now: other ranks go on.
  std::vector<bool> kept(sizes_.size());
  uint64_t count = 0;
  for (uint64_t s = 0; s < sizes_.size(); ++s) {
    // One without a checksum could not be decoded: by the next job it may be repaired.
    kept[s] = tier_[s] == t && state(s) == State::ready && sums_.of(s) != 0;
    count += kept[s] ? 1 : 0;
  }
  const auto next = [&, s = uint64_t{0}]() mutable {
    while (!kept[s]) ++s;
    const KeptRecord record{s, offset_[s], sums_.of(s)};
    ++s;
    return record;
  };
  const std::string path = manifest_name(tier_paths_[t]), temporary = path + ".tmp";
  const int directory = kept_directories_[t].get();
  int error = last ? files_.fsync(tier_files_[t].get()) : 0;
  if (error == 0) {
    const auto file = open_own(temporary, O_WRONLY | O_CREAT | O_TRUNC, directory);
    const int fd = file ? file.value().get() : -1;
    const auto append = [&, at = uint64_t{0}](std::span<const std::byte> bytes) mutable {
      const int64_t n = files_.pwrite(fd, bytes, at);
      at += bytes.size();
      return n < 0 ? static_cast<int>(n) : 0;
    };
    error = file ? tier::write_manifest(config_.dataset, config_.stamp, count, next, append)
                 : -file.error().error_number();
    if (error == 0) error = files_.fsync(fd);
  }
  if (error == 0) error = files_.rename(temporary, path, directory);
  if (error != 0) {
    warn(t, Told::manifest,
         io_error("cannot keep the file tier: cannot write", path, -error).what());
    files_.unlink(temporary, directory);
  }
}

}  // namespace

uint64_t NodeCache::entry_of(uint64_t /*chunk*/, uint64_t place) const noexcept { return place; }
void NodeCache::use_chunk(uint64_t /*chunk*/) noexcept {}
void NodeCache::read_for_chunk(std::optional<uint64_t> /*chunk*/) noexcept {}
Half NodeCache::half_of(uint64_t /*chunk*/, const plan::KeptChunk& /*kept*/) { return Half::gone; }
void NodeCache::wait_for_half(std::chrono::nanoseconds /*timeout*/) const {}
bool NodeCache::read_copy(const plan::CopyUse& /*use*/, uint64_t /*sample*/,
                          std::span<std::byte> /*into*/) {
  return false;
}
bool NodeCache::write_copy(const plan::CopyUse& /*use*/, uint64_t /*sample*/,
                           std::span<const std::byte> /*bytes*/) {
  return false;
}

uint32_t record_overhead(TierKind kind) { return kind == TierKind::file ? kRecordHeader : 0; }

std::shared_ptr<RamView> shared_view(std::shared_ptr<NodeCache> cache, uint64_t sample) {
  struct Both {
    std::shared_ptr<NodeCache> cache;
    RamView view;
  };
  RamView view = cache->ram_view(sample);
  if (!view) return nullptr;
  auto both = std::make_shared<Both>(Both{std::move(cache), std::move(view)});
  return {both, &both->view};
}

Manifest kept_records(const TierSpec& spec, uint64_t dataset, uint64_t samples) {
  if (spec.kind != TierKind::file || !spec.keep) return {};
  const std::string path = manifest_name(kept_file_name(spec.path, dataset));
  const auto own = own_directory(kept_directory(spec.path));
  if (!own) return {};
  const auto opened = open_own(path, O_RDONLY, own.value().get());
  if (!opened) {
    if (opened.error().error_number() != ENOENT) log(LogLevel::warning, opened.error().what());
    return {};
  }
  const Descriptor& file = opened.value();
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return {};
  const auto refuse = [&path](const std::string& why) {
    log(LogLevel::warning, path + ": " + why + "; the kept tier starts empty");
    return Manifest{};
  };
  if (static_cast<uint64_t>(status.st_size) > manifest_bytes(samples)) {
    return refuse("damaged manifest: it lists more than the data set's " + std::to_string(samples) +
                  " samples");
  }
  std::vector<std::byte> bytes(static_cast<size_t>(status.st_size));
  if (FileSystem::real().pread(file.get(), bytes, 0) != status.st_size) return {};
  auto manifest = parse_manifest(bytes, dataset);
  if (!manifest) return refuse(manifest.error().what());
  std::erase_if(manifest.value().records,
                [samples](const KeptRecord& r) { return r.sample >= samples || r.sum == 0; });
  return std::move(manifest).take();
}

std::unique_ptr<NodeCache> NodeCache::attach(const NodeCacheConfig& config,
                                             std::span<const uint64_t> sizes, const Placer& place,
                                             std::chrono::nanoseconds timeout) {
  if (config.local_world == 0 || config.local_world > kMaxMembers ||
      config.local_rank >= config.local_world) {
    throw Error(ErrorKind::usage, "local rank " + std::to_string(config.local_rank) + " of " +
                                      std::to_string(config.local_world) + ": a node has 1 to " +
                                      std::to_string(kMaxMembers) + " ranks");
  }
  if (config.tiers.size() > kMaxTiers) {
    throw Error(ErrorKind::usage, std::to_string(config.tiers.size()) +
                                      " tiers: a node has at most " + std::to_string(kMaxTiers));
  }
  auto cache = std::make_unique<NodeCacheImpl>(config, sizes);
  cache->join(place, timeout);
  return cache;
}

}  // namespace nostall::tier
