// Lays out the shared memory, maps it once per process, and lets ranks join and leave.
//
// Joining: the first rank creates the file, the others get its descriptor (base/handover.h). Each
// rank locks its own byte of the file, then counts itself as joined; the constructor returns when
// all have. A rank whose lock is free and that did not mark itself as left is dead.
#include "collective/shared_memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <new>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "base/futex.h"
#include "base/limits.h"
#include "base/log.h"
#include "base/mutex.h"

namespace nostall::collective {
namespace {

constexpr uint64_t kMagic = 0x31434c4c4f43534e;  // "NSCOLLC1"
constexpr uint32_t kVersion = 9;
// Of the lock protocol, beyond any byte that could be read or written.
constexpr uint64_t kFirstRank = (uint64_t{1} << 61) + 16;
constexpr uint64_t kPage = 4096;
// In which a window gets memory.
constexpr uint64_t kLeastPiece = 64 << 10, kMostPiece = 4 << 20;
constexpr std::chrono::milliseconds kJoinSlice{20};
// Arenas use addresses long before they use memory. Of what a limit leaves they take an eighth at most.
constexpr uint64_t kShareOfAddresses = 8;

// Counts the forks between this process and the one that was started: cheaper to ask than a pid.
uint32_t forks() {
  static std::atomic<uint32_t> count{0};
  static const int registered =
      ::pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  return count.load(std::memory_order_relaxed);
}

// One mapping per communicator and process. A forked child does not inherit it: what lies at these
// addresses there is the child's own, so the child may neither use nor unmap it.
std::shared_ptr<Mapping> map_once(Descriptor file, const std::string& name, uint64_t bytes) {
  static Mutex mutex;
  using Mapped = std::map<std::tuple<uint32_t, dev_t, ino_t>, std::weak_ptr<Mapping>>;
  static Mapped& mapped = *new Mapped;  // a program's exit handlers may make communicators
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw io_error("cannot examine", name, errno);
  const uint32_t made = forks();
  const MutexLock lock(mutex);
  std::erase_if(mapped, [](const auto& entry) { return entry.second.expired(); });
  auto& entry = mapped[{made, status.st_dev, status.st_ino}];
  std::shared_ptr<Mapping> mapping = entry.lock();
  if (!mapping) {
    auto unmap = [made](Mapping* m) {
      if (made == forks()) delete m;
    };
    mapping = {new Mapping(Mapping::map(std::move(file), name, bytes).take()), std::move(unmap)};
    ::madvise(mapping->data(), bytes, MADV_DONTFORK);
    ::madvise(mapping->data(), bytes, MADV_DONTDUMP);
    entry = mapping;
  }
  return mapping;
}

}  // namespace

SharedMemory::SharedMemory(const SharedMemoryConfig& config, std::chrono::nanoseconds timeout)
    : config_(config),
      ranks_(config.ranks),
      window_bytes_((config.window_bytes + kPage - 1) / kPage * kPage),
      wanted_arena_((config.arena_bytes + kPage - 1) / kPage * kPage),
      forks_(forks()),
      handover_("collective " + config.directory + " " + config.job, config.rank, config.ranks),
      channels_there_(2 * size_t{config.ranks}) {
  lay_out();
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  open(deadline);
  wait_for_all(deadline, timeout);
  handover_.stop();
}

SharedMemory::~SharedMemory() {
  if (base_ != nullptr) leave();
}

void SharedMemory::leave() noexcept {
  if (!is_forked_child()) line(config_.rank).left.store(1);
}

bool SharedMemory::is_forked_child() const noexcept { return forks_ != forks(); }

void SharedMemory::lay_out() {
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
  arenas_ = take(0, kPage);
}

void SharedMemory::set_arenas(uint64_t bytes_each) noexcept {
  arena_bytes_ = bytes_each;
  total_ = arenas_ + ranks_ * bytes_each;
}

uint64_t SharedMemory::possible_arena() const {
  uint64_t all = wanted_arena_ * ranks_;
  rlimit file{};
  if (::getrlimit(RLIMIT_FSIZE, &file) == 0 && file.rlim_cur != RLIM_INFINITY) {
    if (file.rlim_cur < arenas_) {
      throw Error(ErrorKind::io,
                  "the ranks of \"" + config_.job + "\" need " + std::to_string(arenas_) +
                      " bytes of shared memory, and the limit of a file's size (ulimit -f) is " +
                      std::to_string(file.rlim_cur) + " bytes: raise it",
                  EFBIG);
    }
    all = std::min<uint64_t>(all, file.rlim_cur - arenas_);
  }
  if (all == 0) return 0;
  for (const MemoryLimit& limit : MemoryLimits(config_.directory, config_.proc_directory).read()) {
    if (limit.kind != LimitKind::address_space) continue;
    all = std::min(all, (limit.left() - std::min(limit.left(), arenas_)) / kShareOfAddresses);
  }
  return all / ranks_ / kPage * kPage;
}

void SharedMemory::open(std::chrono::steady_clock::time_point deadline) {
  for (;;) {
    const Handover::Turn turn = handover_.turn(deadline);
    std::vector<Descriptor> files = handover_.ask(deadline);
    if (files.empty()) set_arenas(possible_arena());
    Descriptor file = files.empty() ? create() : std::move(files.front());
    struct stat status {};
    const bool known = ::fstat(file.get(), &status) == 0;
    const auto size = static_cast<uint64_t>(status.st_size);
    if (known && size >= arenas_) set_arenas((size - arenas_) / ranks_);
    if (!known || size != total_ || arena_bytes_ > wanted_arena_ || arena_bytes_ % kPage != 0) {
      throw Error(ErrorKind::peer, "rank " + std::to_string(config_.rank) + " of \"" + config_.job +
                                       "\" asks for another number of ranks or other sizes than "
                                       "the ranks before it; give all ranks the same arguments");
    }
    lock_ = LockFile(reopen(file.get()).take());
    mapping_ = map_once(std::move(file), config_.directory, total_);
    base_ = mapping_->data();
    check();
    // Given up by ranks that waited in vain, or of an earlier communicator of this name: others are about
    // to leave it.
    RankLine& own = line(config_.rank);
    const bool was_here =
        own.pid.load() != 0 &&
        (own.left.load() != 0 || !lock_.is_held_elsewhere(kFirstRank + config_.rank));
    if ((header().broken.load() != 0 || was_here) && std::chrono::steady_clock::now() < deadline) {
      base_ = nullptr;
      std::this_thread::sleep_for(kJoinSlice / 4);
      continue;
    }
    if (was_here && header().broken.load() == 0) {
      base_ = nullptr;
      throw Error(ErrorKind::peer, "an earlier \"" + config_.job +
                                       "\" of these ranks has not ended on all of them; leave it "
                                       "on all ranks first, or give this one another name");
    }
    const Locked mine = lock_.try_lock(kFirstRank + config_.rank, LockMode::exclusive);
    if (mine == Locked::unsupported || mine == Locked::failed) {
      throw io_error("cannot lock", "the shared memory of \"" + config_.job + "\"",
                     lock_.error_number());
    }
    if (mine == Locked::elsewhere) {
      throw Error(ErrorKind::usage, "rank " + std::to_string(config_.rank) + " of \"" +
                                        config_.job + "\" runs already, as process " +
                                        std::to_string(line(config_.rank).pid.load()) +
                                        ": give each rank its own number");
    }
    own.pid.store(::getpid());
    if (ranks_ > 1) handover_.give({mapping_->fd()});
    if (header().joined.fetch_add(1) + 1 == ranks_) futex_wake_all(header().joined);
    return;
  }
}

Descriptor SharedMemory::create() {
  // What every call touches must exist; windows, channels and arenas get memory when they are used.
  const auto with_room = [this](Result<Descriptor> file) -> Result<Descriptor> {
    if (!file) return file;
    if (::ftruncate(file.value().get(), static_cast<off_t>(total_)) != 0) {
      return io_error("cannot size a file in", config_.directory, errno);
    }
    if (auto error = take_memory(file.value().get(), 0, windows_)) return std::move(*error);
    return file;
  };
  auto made = with_room(unnamed_file(config_.directory));
  if (!made) {
    log(LogLevel::warning, std::string(made.error().what()) + "; the ranks of \"" + config_.job +
                               "\" share memory that is in no directory instead");
    made = with_room(memory_file("nostall-collective"));
  }
  Descriptor file = std::move(made).take();
  const Mapping mapped =
      Mapping::map(reopen(file.get()).take(), config_.directory, sizeof(Header)).take();
  auto* header = new (mapped.data()) Header{};
  header->version = kVersion;
  header->layout_bytes = sizeof(Header);
  header->ranks = ranks_;
  header->window_bytes = window_bytes_;
  header->arena_bytes = wanted_arena_;
  header->selection = config_.selection;
  header->end_step.store(~uint64_t{0});
  header->magic = kMagic;
  return file;
}

void SharedMemory::check() const {
  const Header& h = header();
  if (h.magic != kMagic || h.version != kVersion || h.layout_bytes != sizeof(Header) ||
      h.ranks != ranks_ || h.window_bytes != window_bytes_ || h.arena_bytes != wanted_arena_) {
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

void SharedMemory::wait_for_all(std::chrono::steady_clock::time_point deadline,
                                std::chrono::nanoseconds timeout) {
  std::atomic<uint32_t>& joined = header().joined;
  for (;;) {
    const uint32_t seen = joined.load();
    if (seen >= ranks_) return;
    if (header().broken.load() == kExplained) {
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
// lock goes, so that no rank takes this one for dead.
void SharedMemory::stop_joining(const Error& error) {
  publish_error(error, 0);
  line(config_.rank).left.store(1);
  throw error;
}

bool SharedMemory::publish_error(const Error& error, uint64_t step) noexcept {
  Header& h = header();
  uint64_t seen = h.end_step.load(std::memory_order_seq_cst);
  while (step < seen && !h.end_step.compare_exchange_weak(seen, step, std::memory_order_seq_cst)) {
  }
  uint32_t none = 0;
  if (!h.broken.compare_exchange_strong(none, kWriter + config_.rank)) return false;
  // To the others, what went wrong on this rank is a peer's failure, and its errno nothing of
  // theirs.
  const bool same = error.kind() == ErrorKind::usage || error.kind() == ErrorKind::stopped;
  h.end_kind = same ? error.kind() : ErrorKind::peer;
  h.end_number = error.kind() == ErrorKind::io ? 0 : error.error_number();
  const std::string_view text = error.what();
  const size_t n = std::min(text.size(), h.message.size() - 1);
  std::memcpy(h.message.data(), text.data(), n);
  h.message[n] = '\0';
  h.broken.store(kExplained, std::memory_order_seq_cst);
  return true;
}

Error SharedMemory::end(const std::string& before) const {
  const Header& h = header();
  // Another process wrote it: of what it is not, nothing is read.
  const bool known = h.end_kind >= ErrorKind::usage && h.end_kind <= ErrorKind::bug;
  const std::string message(h.message.data(), ::strnlen(h.message.data(), h.message.size()));
  return {known ? h.end_kind : ErrorKind::peer, before + message, h.end_number};
}

std::optional<Error> SharedMemory::take_memory(int file, uint64_t offset, uint64_t bytes,
                                               bool fresh) const {
  const std::string what = "no memory for " + std::to_string(bytes) + " more bytes ";
  struct stat own {
  }, directory{};
  const bool in_directory = ::stat(config_.directory.c_str(), &directory) == 0 &&
                            ::fstat(file, &own) == 0 && own.st_dev == directory.st_dev;
  if (!in_directory) {
    std::vector<MemoryLimit> limits =
        MemoryLimits(config_.directory, config_.proc_directory).read();
    std::erase_if(limits, [](const MemoryLimit& limit) {
      return limit.kind == LimitKind::shared_memory || limit.kind == LimitKind::address_space;
    });
    if (const auto refused = refusal(limits, bytes)) {
      return Error(ErrorKind::io, what + "that ranks share: " + *refused, ENOMEM);
    }
  }
  const int error = FileSystem::real().allocate(file, offset, bytes);
  if (error == 0) return std::nullopt;
  if (fresh) FileSystem::real().give_back(file, offset, bytes);
  return io_error(what + "in", config_.directory, -error);
}

bool SharedMemory::allocate_window(uint64_t step, uint64_t bytes) noexcept {
  Word& have = header().allocated[step % 2].value;
  const uint64_t there = have.load(std::memory_order_relaxed);
  if (there >= bytes) return true;
  const uint64_t piece = std::clamp(window_bytes_ / 64 / kPage * kPage, kLeastPiece, kMostPiece);
  const uint64_t wanted = std::min((bytes + piece - 1) / piece * piece, window_bytes_);
  const uint64_t begin = windows_ + (step % 2) * window_bytes_;
  try {
    // Other ranks may have it already, and have written there.
    if (take_memory(mapping_->fd(), begin + there, wanted - there, false)) return false;
  } catch (const std::bad_alloc&) {
    return false;
  }
  uint64_t known = there;
  while (known < wanted && !have.compare_exchange_weak(known, wanted, std::memory_order_relaxed)) {
  }
  return true;
}

void SharedMemory::allocate_channel(uint32_t from, uint32_t to) {
  const auto there = channels_there_.begin() + (from == config_.rank ? to : ranks_ + from);
  if (*there) return;
  // The other rank may have it already, and have sent something.
  const auto error =
      take_memory(mapping_->fd(), channel(from, to), 2 * kLine + 2 * kChannelChunk, false);
  if (error) throw *error;
  *there = true;
}

void SharedMemory::allocate_arena(uint64_t offset, uint64_t bytes) {
  const uint64_t begin = arenas_ + config_.rank * arena_bytes_ + offset;
  if (const auto error = take_memory(mapping_->fd(), begin, bytes)) throw *error;
}

void SharedMemory::release_arena(uint64_t offset, uint64_t bytes) noexcept {
  if (is_forked_child()) return;
  FileSystem::real().give_back(mapping_->fd(), arenas_ + config_.rank * arena_bytes_ + offset,
                               bytes);
}

std::optional<uint64_t> SharedMemory::arena_offset(const void* data,
                                                   uint64_t bytes) const noexcept {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(base_) + arenas_;
  const uint64_t all = ranks_ * arena_bytes_;
  if (address < begin || address - begin >= all || bytes > all - (address - begin)) {
    return std::nullopt;
  }
  return address - begin + arenas_;
}

bool SharedMemory::is_dead(uint32_t rank) const noexcept {
  // In this order: the mark of leaving is set before the lock goes.
  return !lock_.is_held_elsewhere(kFirstRank + rank) && line(rank).left.load() == 0;
}

}  // namespace nostall::collective
