#include "collective/segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <new>
#include <string_view>

#include "base/futex.h"
#include "base/mutex.h"

namespace nostall::collective {
namespace {

constexpr uint64_t kMagic = 0x31434c4c4f43534e;  // "NSCOLLC1"
constexpr uint32_t kVersion = 3;
// Bytes of the lock protocol, beyond any that could be read or written.
constexpr uint64_t kSetUp = uint64_t{1} << 61;
constexpr uint64_t kAlive = kSetUp + 1;
constexpr uint64_t kFirstRank = kSetUp + 16;
constexpr uint64_t kPage = 4096;
constexpr std::chrono::milliseconds kJoinSlice{20};

uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3u;
  return hash;
}

std::string prefix() { return "nostall-" + std::to_string(::getuid()) + "-"; }
constexpr const char* kSuffix = "-collective";

// Communicators whose processes died before all had joined.
void reclaim(const std::string& directory) {
  std::error_code error;
  for (std::filesystem::directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error)) {
    const std::string name = it->path().filename().string(), path = it->path().string();
    if (!name.starts_with(prefix()) || !name.ends_with(kSuffix)) continue;
    auto file = LockFile::open(path, false);
    if (file && file.value().try_lock(kSetUp, LockMode::exclusive) &&
        file.value().try_lock(kAlive, LockMode::exclusive) && file.value().is_current(path)) {
      ::unlink(path.c_str());
    }
  }
}

// One mapping per segment and process.
std::shared_ptr<Mapping> map_once(int fd, const std::string& path, uint64_t bytes) {
  static Mutex mutex;
  static std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Mapping>> mapped;
  struct stat status {};
  if (::fstat(fd, &status) != 0) throw io_error("cannot examine", path, errno);
  const MutexLock lock(mutex);
  std::erase_if(mapped, [](const auto& entry) { return entry.second.expired(); });
  auto& entry = mapped[{status.st_dev, status.st_ino}];
  std::shared_ptr<Mapping> mapping = entry.lock();
  if (!mapping) {
    mapping = std::make_shared<Mapping>(Mapping::map(path, bytes).take());
    ::madvise(mapping->data(), bytes, MADV_DONTFORK);
    ::madvise(mapping->data(), bytes, MADV_DONTDUMP);
    entry = mapping;
  }
  return mapping;
}

// Counts the forks between this process and the one that was started: cheaper to ask than a pid.
uint32_t forks() {
  static std::atomic<uint32_t> count{0};
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  return count.load(std::memory_order_relaxed);
}

}  // namespace

Segment::Segment(const SegmentConfig& config, std::chrono::nanoseconds timeout)
    : config_(config),
      ranks_(config.ranks),
      window_bytes_((config.window_bytes + kPage - 1) / kPage * kPage),
      arena_bytes_((config.arena_bytes + kPage - 1) / kPage * kPage),
      forks_(forks()) {
  lay_out();
  char name[17];
  std::snprintf(name, sizeof name, "%016llx", static_cast<unsigned long long>(hash_of(config.job)));
  path_ = config_.directory + "/" + prefix() + name + kSuffix;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  reclaim(config_.directory);
  open(deadline);
  wait_for_all(deadline, timeout);
}

Segment::~Segment() {
  if (base_ != nullptr && !is_forked_child()) line(config_.rank).left.store(1);
}

bool Segment::is_forked_child() const noexcept { return forks_ != forks(); }

void Segment::lay_out() {
  uint64_t end = 0;
  const auto take = [&end](uint64_t bytes, uint64_t alignment) {
    const uint64_t begin = (end + alignment - 1) / alignment * alignment;
    end = begin + bytes;
    return begin;
  };
  const uint64_t n = ranks_;
  take(sizeof(Header), kPage);
  lines_ = take(n * sizeof(RankLine), kLine);
  posts_ = take(n * 2 * (sizeof(Post) + kStageBytes), kPage);
  results_ = take(2 * kStageBytes, kPage);
  words_ = take(n * 5 * sizeof(PaddedWord), kLine);
  slots_ = take(2 * (window_bytes_ / kMinSlot) * sizeof(uint32_t), kLine);
  windows_ = take(2 * window_bytes_, kPage);
  channels_ = take(n * n * (2 * kLine + 2 * kChannelChunk), kPage);
  arenas_ = take(n * arena_bytes_, kPage);
  total_ = (end + kPage - 1) / kPage * kPage;
}

void Segment::open(std::chrono::steady_clock::time_point deadline) {
  bool first = false;
  for (;;) {
    lock_ = LockFile::open(path_, true).take();
    if (!lock_.lock(kSetUp, LockMode::exclusive, deadline - std::chrono::steady_clock::now())) {
      throw Error(ErrorKind::peer, "another rank of \"" + config_.job +
                                       "\" holds the set-up lock of " + path_ +
                                       " for too long; end that process");
    }
    // Its name may have been removed while we waited for the lock.
    if (!lock_.is_current(path_)) continue;
    first = lock_.try_lock(kAlive, LockMode::exclusive);
    struct stat status {};
    if (!first || (::fstat(lock_.get(), &status) == 0 && status.st_size == 0)) break;
    ::unlink(path_.c_str());
  }
  try {
    if (first) create();
  } catch (...) {
    ::unlink(path_.c_str());
    throw;
  }
  if (!lock_.try_lock(kAlive, LockMode::shared)) {
    throw Error(ErrorKind::bug, "cannot share the liveness lock of " + path_);
  }
  struct stat status {};
  if (::fstat(lock_.get(), &status) != 0 || static_cast<uint64_t>(status.st_size) != total_) {
    throw Error(ErrorKind::peer, "rank " + std::to_string(config_.rank) + " of \"" + config_.job +
                                     "\" asks for another number of ranks or other sizes than the "
                                     "ranks before it; give all ranks the same arguments");
  }
  mapping_ = map_once(lock_.get(), path_, total_);
  base_ = mapping_->data();
  check();
  if (!lock_.try_lock(kFirstRank + config_.rank, LockMode::exclusive)) {
    throw Error(ErrorKind::usage, "rank " + std::to_string(config_.rank) + " of \"" + config_.job +
                                      "\" runs already, as process " +
                                      std::to_string(line(config_.rank).pid.load()) +
                                      ": give each rank its own number");
  }
  line(config_.rank).pid.store(::getpid());
  if (header().joined.fetch_add(1) + 1 == ranks_) {
    ::unlink(path_.c_str());
    futex_wake_all(header().joined);
  }
  lock_.unlock(kSetUp);
}

void Segment::create() {
  const Descriptor file(FileSystem::real().open(path_, O_RDWR));
  if (!file || ::ftruncate(file.get(), static_cast<off_t>(total_)) != 0) {
    throw io_error("cannot size", path_, errno);
  }
  // What every call touches must exist; windows, channels and arenas get memory when they are used.
  const int error = FileSystem::real().allocate(file.get(), 0, windows_);
  if (error != 0) {
    throw io_error("no room for " + std::to_string(windows_) + " bytes of shared memory in", path_,
                   -error);
  }
  const Mapping mapped = Mapping::map(path_, sizeof(Header)).take();
  auto* header = new (mapped.data()) Header{};
  header->version = kVersion;
  header->layout_bytes = sizeof(Header);
  header->ranks = ranks_;
  header->window_bytes = window_bytes_;
  header->arena_bytes = arena_bytes_;
  header->selection = config_.selection;
  header->magic = kMagic;
}

void Segment::check() const {
  const Header& h = header();
  if (h.magic != kMagic || h.version != kVersion || h.layout_bytes != sizeof(Header) ||
      h.ranks != ranks_ || h.window_bytes != window_bytes_ || h.arena_bytes != arena_bytes_) {
    throw Error(ErrorKind::peer, "the ranks of \"" + config_.job +
                                     "\" run different releases of nostall or have different "
                                     "arguments; give all the same");
  }
  if (h.selection != config_.selection) {
    throw Error(ErrorKind::peer, "the ranks of \"" + config_.job +
                                     "\" have different tables of collectives; set "
                                     "NOSTALL_COLLECTIVES to the same file, or to off, on all");
  }
}

void Segment::wait_for_all(std::chrono::steady_clock::time_point deadline,
                           std::chrono::nanoseconds timeout) {
  std::atomic<uint32_t>& joined = header().joined;
  for (;;) {
    const uint32_t seen = joined.load();
    if (seen == ranks_) return;
    if (header().broken.load() == 2) {
      line(config_.rank).left.store(1);
      throw end("");
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      std::string missing;
      for (uint32_t r = 0; r < ranks_; ++r) {
        if (line(r).pid.load() == 0) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
      }
      stop_joining(Error(
          ErrorKind::peer,
          "rank " + std::to_string(config_.rank) + " of \"" + config_.job + "\" waited " +
              std::to_string(std::chrono::duration_cast<std::chrono::seconds>(timeout).count()) +
              " s in vain for rank " + missing +
              " to join; start all ranks, or raise the timeout"));
    }
    for (uint32_t r = 0; r < ranks_; ++r) {
      if (r == config_.rank || line(r).pid.load() == 0 || !is_dead(r)) continue;
      stop_joining(Error(ErrorKind::peer, "rank " + std::to_string(r) + " (process " +
                                              std::to_string(line(r).pid.load()) + ") of \"" +
                                              config_.job + "\" died while rank " +
                                              std::to_string(config_.rank) +
                                              " waited for others to join; start the job again"));
    }
    futex_wait(joined, seen, kJoinSlice);
  }
}

// The destructor of what is not constructed does not run: the goodbye is said here, and before the
// lock goes, so that nobody takes this rank for dead.
void Segment::stop_joining(const Error& error) {
  if (lock_.is_current(path_)) ::unlink(path_.c_str());
  say_end(error);
  line(config_.rank).left.store(1);
  throw error;
}

bool Segment::say_end(const Error& error) noexcept {
  Header& h = header();
  uint32_t none = 0;
  if (!h.broken.compare_exchange_strong(none, 1)) return false;
  // To the others, what went wrong on this rank is a peer's failure, and its errno nothing of
  // theirs.
  const bool same = error.kind() == ErrorKind::usage || error.kind() == ErrorKind::stopped;
  h.end_kind = same ? error.kind() : ErrorKind::peer;
  h.end_number = error.kind() == ErrorKind::io ? 0 : error.error_number();
  const std::string_view text = error.what();
  const size_t n = std::min(text.size(), h.message.size() - 1);
  std::memcpy(h.message.data(), text.data(), n);
  h.message[n] = '\0';
  h.broken.store(2, std::memory_order_seq_cst);
  return true;
}

Error Segment::end(const std::string& before) const {
  const Header& h = header();
  return {h.end_kind, before + h.message.data(), h.end_number};
}

void Segment::allocate(uint64_t offset, uint64_t bytes) {
  const int error = FileSystem::real().allocate(mapping_->fd(), offset, bytes);
  if (error != 0) {
    throw io_error("no memory for " + std::to_string(bytes) + " more bytes in", config_.directory,
                   -error);
  }
}

bool Segment::allocate_window(uint64_t step, uint64_t bytes) noexcept {
  Word& have = header().allocated[step % 2].value;
  if (have.load(std::memory_order_relaxed) >= bytes) return true;
  constexpr uint64_t kPiece = 4 << 20;
  const uint64_t wanted = std::min((bytes + kPiece - 1) / kPiece * kPiece, window_bytes_);
  const uint64_t begin = windows_ + (step % 2) * window_bytes_;
  if (FileSystem::real().allocate(mapping_->fd(), begin, wanted) != 0) return false;
  have.store(wanted, std::memory_order_relaxed);
  return true;
}

void Segment::allocate_channel(uint32_t from, uint32_t to) {
  allocate(channel(from, to), 2 * kLine + 2 * kChannelChunk);
}

void Segment::allocate_arena(uint64_t offset, uint64_t bytes) {
  allocate(arenas_ + config_.rank * arena_bytes_ + offset, bytes);
}

void Segment::release_arena(uint64_t offset, uint64_t bytes) noexcept {
  if (is_forked_child()) return;
  ::fallocate(mapping_->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(arenas_ + config_.rank * arena_bytes_ + offset),
              static_cast<off_t>(bytes));
}

std::optional<uint64_t> Segment::arena_offset(const void* data, uint64_t bytes) const noexcept {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(base_) + arenas_;
  const uint64_t all = ranks_ * arena_bytes_;
  if (address < begin || address - begin >= all || bytes > all - (address - begin)) {
    return std::nullopt;
  }
  return address - begin + arenas_;
}

bool Segment::is_dead(uint32_t rank) const noexcept {
  // In this order: a goodbye comes before the lock goes.
  return !lock_.is_held_elsewhere(kFirstRank + rank) && line(rank).left.load() == 0;
}

}  // namespace nostall::collective
