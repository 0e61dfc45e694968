#include "tier/node_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <new>

#include "base/futex.h"
#include "base/limits.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/mapping.h"
#include "tier/catalog.h"
#include "tier/names.h"
#include "tier/record.h"

namespace nostall::tier {
namespace {

// A waiter looks this often whether it was stopped or the reader died.
constexpr std::chrono::milliseconds kWaitSlice{20};
constexpr std::chrono::seconds kLeavePatience{5};
constexpr int kOpenAttempts = 20;

uint32_t word_of(State state, uint32_t local_rank = 0) {
  return (local_rank << 2) | static_cast<uint32_t>(state);
}
State state_of(uint32_t word) { return static_cast<State>(word & 3u); }

enum class Chunk : uint32_t { untouched = 0, there = 1, refused = 2 };

class NodeCacheImpl final : public NodeCache {
 public:
  NodeCacheImpl(const NodeCacheConfig& config, std::span<const uint64_t> sizes,
                const plan::Placement& placement)
      : config_(config),
        files_(config.files ? *config.files : FileSystem::real()),
        limits_(config.shm_directory, config.proc_directory),
        names_(shm_names(config.shm_directory, config.job)),
        sizes_(sizes.begin(), sizes.end()),
        tier_(placement.tier),
        offset_(placement.offset),
        warned_(config.tiers.size()),
        owner_pid_(::getpid()) {
    uint64_t base = 0;
    for (size_t t = 0; t < config_.tiers.size(); ++t) {
      arena_base_.push_back(base);
      if (config_.tiers[t].kind == TierKind::ram) base += placement.used[t];
    }
    arena_bytes_ = base;
    chunk_bytes_ = chunk_bytes(base);
    tier_files_.resize(config_.tiers.size());
    tier_paths_.resize(config_.tiers.size());
    disabled_ = std::vector<std::atomic<bool>>(config_.tiers.size());
  }

  ~NodeCacheImpl() override {
    if (joined_ && owner_pid_ == ::getpid()) leave();
  }

  void join(std::chrono::nanoseconds timeout);

  State state(uint64_t sample) const noexcept override {
    return state_of(words_[sample].load(std::memory_order_acquire));
  }
  TierKind kind(uint64_t sample) const noexcept override {
    return config_.tiers[tier_[sample]].kind;
  }
  bool placed(uint64_t sample) const noexcept override {
    return tier_[sample] != plan::kNoTier &&
           !disabled_[tier_[sample]].load(std::memory_order_relaxed) &&
           (header_->given_up.load(std::memory_order_relaxed) & (1u << tier_[sample])) == 0;
  }

  bool claim(uint64_t sample) noexcept override {
    uint32_t expected = word_of(State::empty);
    return placed(sample) &&
           words_[sample].compare_exchange_strong(
               expected, word_of(State::filling, config_.local_rank), std::memory_order_acq_rel);
  }

  std::span<std::byte> ram_slot(uint64_t sample) override {
    const uint64_t begin = arena_base_[tier_[sample]] + offset_[sample];
    const uint64_t end = begin + sizes_[sample];
    for (uint64_t c = begin / chunk_bytes_; c * chunk_bytes_ < end; ++c) {
      if (!have_chunk(c, tier_[sample])) {
        set(sample, State::failed);
        return {};
      }
    }
    return {arena_.data() + begin, static_cast<size_t>(sizes_[sample])};
  }

  void file_write(uint64_t sample, std::span<const std::byte> bytes) override {
    const size_t t = tier_[sample];
    const int error = write_record(files_, tier_files_[t].get(), offset_[sample], sample, bytes);
    if (error == 0) {
      publish(sample);
      return;
    }
    // A full disk stays full: nothing more is tried, by no rank.
    header_->given_up.fetch_or(1u << t, std::memory_order_relaxed);
    warn(t, io_error("cannot write to the file tier", tier_paths_[t], -error).what() +
                std::string("; the tier is not used any further, samples are read from the source: "
                            "free space or give the tier a smaller size"));
    set(sample, State::failed);
  }

  void publish(uint64_t sample) noexcept override {
    auto& used = kind(sample) == TierKind::ram ? header_->ram_bytes : header_->file_bytes;
    used.fetch_add(sizes_[sample] + record_overhead(kind(sample)), std::memory_order_relaxed);
    set(sample, State::ready);
  }
  void abandon(uint64_t sample) noexcept override { set(sample, State::empty); }

  std::span<const std::byte> ram_view(uint64_t sample) const noexcept override {
    return {arena_.data() + arena_base_[tier_[sample]] + offset_[sample],
            static_cast<size_t>(sizes_[sample])};
  }

  bool file_read(uint64_t sample, std::span<std::byte> into) override {
    const size_t t = tier_[sample];
    const auto result = read_record(files_, tier_files_[t].get(), offset_[sample], sample, into);
    if (result) return true;
    warn(t, "sample " + std::to_string(sample) + " in the file tier " + tier_paths_[t] + ": " +
                result.error().what() + "; it is read from the source instead");
    set(sample, State::failed);
    return false;
  }

  State wait(uint64_t sample, std::chrono::nanoseconds timeout, std::stop_token stop) override;
  std::optional<PeerFailure> dead_peer() const override;

  uint64_t ram_bytes() const noexcept override { return header_->ram_bytes.load(); }
  uint64_t file_bytes() const noexcept override { return header_->file_bytes.load(); }

 private:
  uint64_t catalog_bytes() const {
    return sizeof(CatalogHeader) + (chunks() + sizes_.size()) * sizeof(uint32_t);
  }
  uint64_t chunks() const { return (arena_bytes_ + chunk_bytes_ - 1) / chunk_bytes_; }
  Bucket& bucket_of(uint64_t sample) const { return header_->buckets[sample % kBuckets]; }

  void set(uint64_t sample, State state) noexcept {
    words_[sample].store(word_of(state), std::memory_order_seq_cst);
    wake(sample);
  }
  void wake(uint64_t sample) const noexcept {
    Bucket& bucket = bucket_of(sample);
    bucket.sequence.fetch_add(1, std::memory_order_seq_cst);
    if (bucket.waiters.load(std::memory_order_seq_cst) > 0) futex_wake_all(bucket.sequence);
  }
  void warn(size_t tier, const std::string& message) {
    if (!warned_[tier].exchange(true)) log(LogLevel::warning, message);
  }

  bool have_chunk(uint64_t chunk, size_t tier);
  std::optional<std::string> allocate_chunk(uint64_t chunk, bool modest);
  void map_shared();
  void create();
  void check() const;
  void enter_member();
  void open_tier_files(bool first);
  void open_tier_file(size_t tier, bool first);
  void load_residents(size_t tier);
  void leave() noexcept;
  void write_manifest(size_t tier, bool last);

  const NodeCacheConfig config_;
  FileSystem& files_;
  const MemoryLimits limits_;
  const Names names_;
  const std::vector<uint64_t> sizes_;
  const std::vector<uint8_t> tier_;
  const std::vector<uint64_t> offset_;
  std::vector<uint64_t> arena_base_;
  uint64_t arena_bytes_ = 0, chunk_bytes_ = 0;

  LockFile lock_;
  Mapping catalog_, arena_;
  CatalogHeader* header_ = nullptr;
  std::atomic<uint32_t>* chunk_words_ = nullptr;
  std::atomic<uint32_t>* words_ = nullptr;
  std::vector<LockFile> tier_files_;
  std::vector<std::string> tier_paths_;
  std::vector<std::atomic<bool>> disabled_;
  std::vector<std::atomic<bool>> warned_;
  bool joined_ = false;
  const int owner_pid_;
};

// ------------------------------------------------------------------------------- joining

void NodeCacheImpl::join(std::chrono::nanoseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  reclaim_shm(config_.shm_directory);
  for (const TierSpec& spec : config_.tiers) {
    if (spec.kind == TierKind::file) reclaim_tier_files(spec.path);
  }
  bool first = false;
  for (;;) {
    auto opened = LockFile::open(names_.catalog, true);
    if (!opened) throw opened.error();
    lock_ = std::move(opened).take();
    const auto left = deadline - std::chrono::steady_clock::now();
    if (!lock_.lock(kSetUp, LockMode::exclusive, left)) {
      throw Error(ErrorKind::peer, "another rank of this job holds the set-up lock of " +
                                       names_.catalog + " for too long; end that process");
    }
    // The last rank of an earlier job may have removed the file while we waited for its lock.
    if (!lock_.is_current(names_.catalog)) continue;
    first = lock_.try_lock(kAlive, LockMode::exclusive);
    struct stat status {};
    if (!first || (::fstat(lock_.get(), &status) == 0 && status.st_size == 0)) break;
    // What a dead job left is not cut short in place: whoever still maps it would be killed.
    ::unlink(names_.catalog.c_str());
  }
  if (first) create();
  if (!lock_.try_lock(kAlive, LockMode::shared)) {
    throw Error(ErrorKind::bug, "cannot share the liveness lock of " + names_.catalog);
  }
  map_shared();
  check();
  enter_member();
  open_tier_files(first);
  lock_.unlock(kSetUp);
}

void NodeCacheImpl::create() {
  ::unlink(names_.arena.c_str());
  // The catalogue is touched everywhere: it must be there, or there is no cache.
  {
    const Descriptor file(FileSystem::real().open(names_.catalog, O_RDWR));
    if (::ftruncate(file.get(), static_cast<off_t>(catalog_bytes())) != 0) {
      throw io_error("cannot size", names_.catalog, errno);
    }
    const int error = FileSystem::real().allocate(file.get(), 0, catalog_bytes());
    if (error != 0) throw io_error("no room for the catalogue", names_.catalog, -error);
  }
  // The arena is only given its length here; its memory comes chunk by chunk.
  const Descriptor arena(FileSystem::real().open(names_.arena, O_RDWR | O_CREAT | O_TRUNC));
  if (!arena || ::ftruncate(arena.get(), static_cast<off_t>(arena_bytes_)) != 0) {
    throw io_error("cannot create", names_.arena, errno);
  }
  const Mapping mapped = Mapping::map(names_.catalog, catalog_bytes()).take();
  auto* header = new (mapped.data()) CatalogHeader{};
  header->version = kCatalogVersion;
  header->layout_bytes = sizeof(CatalogHeader);
  header->dataset = config_.dataset;
  header->plan = config_.plan;
  header->samples = sizes_.size();
  header->arena_bytes = arena_bytes_;
  header->local_world = config_.local_world;
  header->magic = kCatalogMagic;
}

void NodeCacheImpl::map_shared() {
  struct stat status {};
  if (::fstat(lock_.get(), &status) != 0) throw io_error("cannot examine", names_.catalog, errno);
  if (static_cast<uint64_t>(status.st_size) != catalog_bytes()) {
    throw Error(ErrorKind::peer, "the ranks of this node disagree: " + names_.catalog + " has " +
                                     std::to_string(status.st_size) + " bytes, this rank expects " +
                                     std::to_string(catalog_bytes()) +
                                     "; give all ranks the same data set and arguments");
  }
  catalog_ = Mapping::map(names_.catalog, catalog_bytes()).take();
  header_ = reinterpret_cast<CatalogHeader*>(catalog_.data());
  chunk_words_ = reinterpret_cast<std::atomic<uint32_t>*>(catalog_.data() + sizeof(CatalogHeader));
  words_ = chunk_words_ + chunks();
}

void NodeCacheImpl::check() const {
  const auto differ = [this](const std::string& what) {
    throw Error(ErrorKind::peer, "local rank " + std::to_string(config_.local_rank) +
                                     " disagrees with the other ranks of this node on the " + what +
                                     "; give all ranks the same data set and arguments");
  };
  const auto compare = [&differ](const std::string& what, uint64_t theirs, uint64_t mine) {
    if (theirs == mine) return;
    differ(what + ": " + std::to_string(mine) + " here, " + std::to_string(theirs) + " there");
  };
  const CatalogHeader& h = *header_;
  compare("cache's layout", h.magic ^ h.version ^ (uint64_t{h.layout_bytes} << 32),
          kCatalogMagic ^ kCatalogVersion ^ (uint64_t{sizeof(CatalogHeader)} << 32));
  compare("number of local ranks", h.local_world, config_.local_world);
  compare("number of samples", h.samples, sizes_.size());
  if (h.dataset != config_.dataset) differ("files of the data set, their sizes or their order");
  if (h.plan != config_.plan) {
    differ("plan: the batch size, epochs, seed, world size, order, drop_last or tiers");
  }
}

void NodeCacheImpl::enter_member() {
  if (!lock_.try_lock(kFirstMember + config_.local_rank, LockMode::exclusive)) {
    const int pid = header_->members[config_.local_rank].pid.load();
    throw Error(ErrorKind::usage, "local rank " + std::to_string(config_.local_rank) +
                                      " of job \"" + config_.job + "\" runs already, as process " +
                                      std::to_string(pid) +
                                      ": give each rank its own local_rank, or another job");
  }
  Member& me = header_->members[config_.local_rank];
  me.pid.store(::getpid());
  me.membership.store(Membership::joined);
  joined_ = true;
  // A claim of an earlier process of this rank is nobody's.
  for (uint64_t s = 0; s < sizes_.size(); ++s) {
    uint32_t mine = word_of(State::filling, config_.local_rank);
    words_[s].compare_exchange_strong(mine, word_of(State::empty));
  }
  if (arena_bytes_ > 0) {
    auto mapped = Mapping::map(names_.arena, arena_bytes_);
    if (mapped) {
      arena_ = std::move(mapped).take();
      return;
    }
    for (size_t t = 0; t < config_.tiers.size(); ++t) {
      if (config_.tiers[t].kind != TierKind::ram) continue;
      disabled_[t] = true;
      warn(t, std::string(mapped.error().what()) + "; there is no RAM tier");
    }
  }
}

void NodeCacheImpl::open_tier_files(bool first) {
  for (size_t t = 0; t < config_.tiers.size(); ++t) {
    if (config_.tiers[t].kind == TierKind::file && config_.tiers[t].capacity > 0) {
      open_tier_file(t, first);
    }
  }
}

void NodeCacheImpl::open_tier_file(size_t t, bool first) {
  const TierSpec& spec = config_.tiers[t];
  std::error_code ignored;
  std::filesystem::create_directories(spec.path, ignored);
  const uint32_t bit = 1u << t;
  if (spec.keep && (first || (header_->kept_open.load() & bit) != 0)) {
    tier_paths_[t] = kept_file_name(spec.path, config_.dataset);
    auto kept = LockFile::open(tier_paths_[t], true);
    // A kept file serves one job at a time; a second one makes a file of its own.
    if (kept && (!first || kept.value().try_lock(kAlive, LockMode::exclusive)) &&
        kept.value().try_lock(kAlive, LockMode::shared)) {
      tier_files_[t] = std::move(kept).take();
      if (first) {
        // An earlier job may have had more room than the user gives this one.
        struct stat status {};
        if (::fstat(tier_files_[t].get(), &status) == 0 &&
            static_cast<uint64_t>(status.st_size) > spec.capacity &&
            ::ftruncate(tier_files_[t].get(), static_cast<off_t>(spec.capacity)) != 0) {
          warn(t, io_error("cannot shorten", tier_paths_[t], errno).what());
        }
        header_->kept_open.fetch_or(bit);
        load_residents(t);
      }
      return;
    }
  }
  tier_paths_[t] = tier_file_name(spec.path, config_.job, t);
  // Another job that clears abandoned files may hold or remove ours before it is locked: again
  // then.
  for (int attempt = 0; attempt < kOpenAttempts; ++attempt) {
    auto opened = LockFile::open(tier_paths_[t], true);
    if (!opened) {
      disabled_[t] = true;
      warn(t, std::string(opened.error().what()) +
                  "; this file tier is not used, samples are read from the source");
      return;
    }
    tier_files_[t] = std::move(opened).take();
    if (tier_files_[t].lock(kAlive, LockMode::shared, std::chrono::milliseconds(100)) &&
        tier_files_[t].is_current(tier_paths_[t])) {
      break;
    }
  }
  if (first && ::ftruncate(tier_files_[t].get(), 0) != 0) {
    disabled_[t] = true;
    warn(t, io_error("cannot empty", tier_paths_[t], errno).what());
  }
}

void NodeCacheImpl::load_residents(size_t t) {
  for (const plan::Resident& r : resident_samples(config_.tiers[t], config_.dataset)) {
    if (r.sample < sizes_.size() && tier_[r.sample] == t && offset_[r.sample] == r.offset) {
      words_[r.sample].store(word_of(State::ready));
      header_->file_bytes.fetch_add(sizes_[r.sample] + kRecordHeader);
    }
  }
}

// ------------------------------------------------------------------------------- living

bool NodeCacheImpl::have_chunk(uint64_t chunk, size_t tier) {
  std::atomic<uint32_t>& word = chunk_words_[chunk];
  auto seen = static_cast<Chunk>(word.load(std::memory_order_acquire));
  if (seen == Chunk::untouched) {
    // Two ranks may both ask for the same memory: the second call changes nothing.
    const auto refused = allocate_chunk(chunk, config_.tiers[tier].modest);
    auto untouched = static_cast<uint32_t>(Chunk::untouched);
    seen = refused ? Chunk::refused : Chunk::there;
    if (!word.compare_exchange_strong(untouched, static_cast<uint32_t>(seen))) {
      seen = static_cast<Chunk>(untouched);
    }
    if (refused) {
      warn(tier, "the RAM tier takes no more memory: " + *refused +
                     "; the rest is read from the source: free memory or give the RAM tier a "
                     "smaller size");
    }
  }
  return seen == Chunk::there;
}

// Why there is no memory for the chunk; nothing if there is. What a limit's reserve holds is left
// to others: beyond it they, and this program, are killed, and not only refused.
std::optional<std::string> NodeCacheImpl::allocate_chunk(uint64_t chunk, bool modest) {
  const uint64_t begin = chunk * chunk_bytes_, size = std::min(chunk_bytes_, arena_bytes_ - begin);
  uint64_t taken = 0;
  for (uint64_t c = 0; modest && c < chunks(); ++c) {
    if (chunk_words_[c].load(std::memory_order_relaxed) == static_cast<uint32_t>(Chunk::there)) {
      taken += chunk_bytes_;
    }
  }
  std::vector<MemoryLimit> limits = limits_.read();
  // The arena's addresses are taken already.
  std::erase_if(limits, [](const MemoryLimit& l) { return l.kind == LimitKind::address_space; });
  const MemoryLimit* limit = least(limits);
  if (limit != nullptr && limit->left() < size + taken) {
    return std::to_string(limit->used) + " of " + std::to_string(limit->limit) + " bytes of " +
           limit->what + " are in use, " + std::to_string(limit->reserve()) + " are kept free" +
           (modest ? ", and as much is left to others as the tier has" : "");
  }
  const int error = files_.allocate(arena_.fd(), begin, size);
  if (error == 0) return std::nullopt;
  return io_error("no room for " + std::to_string(size) + " more bytes in", names_.arena, -error)
      .what();
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
    if (claimer != config_.local_rank && !lock_.is_held_elsewhere(kFirstMember + claimer)) {
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
    if (r == config_.local_rank || member.membership.load() != Membership::joined) continue;
    // Read again: it may have left in an orderly way between the two looks.
    if (!lock_.is_held_elsewhere(kFirstMember + r) &&
        member.membership.load() == Membership::joined) {
      return PeerFailure{r, member.pid.load()};
    }
  }
  return std::nullopt;
}

// ------------------------------------------------------------------------------- leaving

void NodeCacheImpl::leave() noexcept {
  try {
    const bool alone = lock_.lock(kSetUp, LockMode::exclusive, kLeavePatience);
    for (uint64_t s = 0; s < sizes_.size(); ++s) {
      uint32_t mine = word_of(State::filling, config_.local_rank);
      if (words_[s].compare_exchange_strong(mine, word_of(State::empty))) wake(s);
    }
    header_->members[config_.local_rank].membership.store(Membership::left);
    lock_.unlock(kFirstMember + config_.local_rank);
    if (!alone) return;
    const bool last = lock_.try_lock(kAlive, LockMode::exclusive);
    for (size_t t = 0; t < config_.tiers.size(); ++t) {
      if (!tier_files_[t]) continue;
      if ((header_->kept_open.load() & (1u << t)) != 0) {
        write_manifest(t, last);
      } else if (last) {
        ::unlink(tier_paths_[t].c_str());
      }
    }
    if (!last) return;
    ::unlink(names_.arena.c_str());
    ::unlink(names_.catalog.c_str());
  } catch (const std::exception& e) {
    log(LogLevel::warning, std::string("leaving the node's cache: ") + e.what());
  }
}

// Every rank that leaves writes what is there by then, so that ranks which die later cost only what
// came later. The last one flushes the file first; until then a record that never reached the disk
// is found by its checksum.
void NodeCacheImpl::write_manifest(size_t t, bool last) {
  std::vector<plan::Resident> residents;
  for (uint64_t s = 0; s < sizes_.size(); ++s) {
    if (tier_[s] == t && state(s) == State::ready) residents.push_back({s, offset_[s]});
  }
  const std::vector<std::byte> bytes = serialize_manifest(config_.dataset, residents);
  const std::string path = manifest_name(tier_paths_[t]), temporary = path + ".tmp";
  int error = last ? files_.fsync(tier_files_[t].get()) : 0;
  if (error == 0) {
    const int fd = files_.open(temporary, O_WRONLY | O_CREAT | O_TRUNC);
    const Descriptor file(fd);
    const int64_t n = fd < 0 ? fd : files_.pwrite(fd, bytes, 0);
    error = n < 0 ? static_cast<int>(n) : files_.fsync(fd);
  }
  if (error == 0 && std::rename(temporary.c_str(), path.c_str()) != 0) error = -errno;
  if (error != 0) {
    warn(t, io_error("cannot keep the file tier: cannot write", path, -error).what());
    ::unlink(temporary.c_str());
  }
}

}  // namespace

uint32_t record_overhead(TierKind kind) { return kind == TierKind::file ? kRecordHeader : 0; }

std::vector<plan::Resident> resident_samples(const TierSpec& spec, uint64_t dataset) {
  if (spec.kind != TierKind::file || !spec.keep) return {};
  const std::string path = manifest_name(kept_file_name(spec.path, dataset));
  const Descriptor file(FileSystem::real().open(path, O_RDONLY));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0) return {};
  std::vector<std::byte> bytes(static_cast<size_t>(status.st_size));
  if (FileSystem::real().pread(file.get(), bytes, 0) != status.st_size) return {};
  auto residents = parse_manifest(bytes, dataset);
  if (!residents) {
    log(LogLevel::warning, path + ": " + residents.error().what() + "; the kept tier starts empty");
    return {};
  }
  return std::move(residents).take();
}

std::unique_ptr<NodeCache> NodeCache::attach(const NodeCacheConfig& config,
                                             std::span<const uint64_t> sizes,
                                             const plan::Placement& placement,
                                             std::chrono::nanoseconds timeout) {
  if (config.local_world == 0 || config.local_world > kMaxMembers ||
      config.local_rank >= config.local_world) {
    throw Error(ErrorKind::usage, "local rank " + std::to_string(config.local_rank) + " of " +
                                      std::to_string(config.local_world) + ": a node has 1 to " +
                                      std::to_string(kMaxMembers) + " ranks");
  }
  for (size_t s = 0; s < std::min(sizes.size(), placement.tier.size()); ++s) {
    const size_t t = placement.tier[s];
    if (t == plan::kNoTier) continue;
    const uint64_t capacity = t < config.tiers.size() ? config.tiers[t].capacity : 0;
    const uint64_t overhead = t < config.tiers.size() ? record_overhead(config.tiers[t].kind) : 0;
    const uint64_t offset = s < placement.offset.size() ? placement.offset[s] : capacity;
    if (offset > capacity || overhead > capacity - offset ||
        sizes[s] > capacity - offset - overhead) {
      throw Error(ErrorKind::usage, "the placement puts sample " + std::to_string(s) +
                                        " beyond the capacity of tier " + std::to_string(t));
    }
  }
  if (config.tiers.size() > 8 || placement.tier.size() != sizes.size() ||
      placement.used.size() != config.tiers.size()) {
    throw Error(ErrorKind::usage, "the placement does not go with the tiers or the sizes");
  }
  auto cache = std::make_unique<NodeCacheImpl>(config, sizes, placement);
  cache->join(timeout);
  return cache;
}

}  // namespace nostall::tier
