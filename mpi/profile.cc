// The profile: NOSTALL_MPI_PROFILE/mpi-RANK.profile, one line of JSON and then the records, little
// endian, 40 bytes each (docs/guide/collectives.md, "The profile").
//
// Times are CLOCK_MONOTONIC of the rank's node. Each node's clock is compared with that of rank 0
// by message round trips at the beginning and at the end; the reader interpolates between the two,
// so that a drift does not matter.
#include "profile.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <span>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "base/mutex.h"
#include "mpi_state.h"

namespace nostall::mpi {

struct Record {
  int64_t arrived, left;  // in ticks() until the file is written
  uint64_t bytes, count;
  uint32_t communicator;
  uint8_t call, ours;
  uint16_t flags;
};
static_assert(sizeof(Record) == 40);

namespace {

constexpr uint16_t kNonblocking = 1;

// A part of a block, filled by one thread at a time.
class Chunk {
 public:
  static constexpr size_t kRecords = 4369;  // 12 a block
  explicit Chunk(std::span<Record> room) noexcept
      : begin_(room.data()), next_(begin_), end_(begin_ + room.size()) {}
  bool full() const noexcept { return next_ == end_; }
  Record* add(const Record& record) noexcept {
    *next_ = record;
    return next_++;
  }
  std::span<const Record> records() const noexcept { return {begin_, next_}; }

 private:
  Record *begin_, *next_, *end_;
};

// Memory for records, in one large page where the system has one to give; none is touched for the
// first time while a call is recorded.
class Block {
 public:
  // Throws std::bad_alloc.
  explicit Block(uint64_t most)
      : memory_(static_cast<Record*>(std::aligned_alloc(kBytes, kBytes))),
        records_(std::min<uint64_t>(most, kBytes / sizeof(Record))) {
    if (!memory_) throw std::bad_alloc();
    ::madvise(memory_.get(), kBytes, MADV_HUGEPAGE);
    auto* bytes = reinterpret_cast<volatile char*>(memory_.get());
    for (size_t page = 0; page < kBytes; page += 4096) bytes[page] = 0;
    chunks_.reserve(records_ / Chunk::kRecords + 1);
    const std::span<Record> all(memory_.get(), records_);
    for (size_t at = 0; at < records_; at += Chunk::kRecords) {
      chunks_.emplace_back(all.subspan(at, std::min(Chunk::kRecords, records_ - at)));
    }
  }
  std::span<Chunk> chunks() noexcept { return chunks_; }
  std::span<const Chunk> chunks() const noexcept { return chunks_; }
  uint64_t room() const noexcept { return records_; }

 private:
  static constexpr size_t kBytes = 2 << 20;
  struct Free {
    void operator()(Record* records) const noexcept { std::free(records); }
  };
  std::unique_ptr<Record[], Free> memory_;
  size_t records_;
  std::vector<Chunk> chunks_;  // at fixed addresses
};
constexpr size_t kFirstBlocks = 3;  // made ready at the beginning: 157,284 calls

// The chunk that this thread fills. The library is loaded with the program, so that this needs no
// call.
thread_local Chunk* filling __attribute__((tls_model("initial-exec"))) = nullptr;
// The thread has given its chunk back; what destructors record after that is dropped.
thread_local bool ended __attribute__((tls_model("initial-exec"))) = false;

// The two clocks at one time.
struct Reading {
  uint64_t ticks = 0;
  int64_t ns = 0;
};

// Those that are kept lie this many ns apart at least, so that their own errors, some tens of ns,
// do not weigh in the rate between them.
constexpr int64_t kApart = 10'000'000;

Reading read_clocks() noexcept {
  Reading best;
  uint64_t shortest = ~uint64_t{0};
  for (int i = 0; i < 5; ++i) {
    const uint64_t before = ticks();
    const int64_t ns = now_ns();
    const uint64_t took = ticks() - before;
    if (took >= shortest) continue;
    shortest = took;
    best = {before + took / 2, ns};
  }
  return best;
}

// Nanoseconds of what was read in ticks, between the readings before and after; the kernel's clock
// may be slowed down or sped up as it goes.
class Clock {
 public:
  // At least two, in their order.
  explicit Clock(std::span<const Reading> readings) : readings_(readings) {}
  int64_t ns(uint64_t ticks) const {
    auto after = std::upper_bound(readings_.begin() + 1, readings_.end() - 1, ticks,
                                  [](uint64_t t, const Reading& r) { return t < r.ticks; });
    const Reading &a = *(after - 1), &b = *after;
    const double span = static_cast<double>(b.ticks - a.ticks);
    const double rate = span > 0 ? static_cast<double>(b.ns - a.ns) / span : 0;
    return a.ns +
           static_cast<int64_t>(static_cast<double>(static_cast<int64_t>(ticks - a.ticks)) * rate);
  }

 private:
  std::span<const Reading> readings_;
};

struct Comparison {
  int64_t at = 0, offset = 0;  // this node's clock + offset = rank 0's
};

struct Known {
  uint64_t name, ranks, node_ranks;
  // Once one record is dropped, all later ones are, so call numbers still match across ranks. The
  // communicator's state is not `recorded` then.
  bool lost = false;
};

struct Profile {
  Mutex mutex;
  std::string directory;
  uint64_t most = 1 << 20;
  uint64_t dropped NOSTALL_GUARDED_BY(mutex) = 0;
  std::vector<std::unique_ptr<Block>> blocks NOSTALL_GUARDED_BY(mutex);
  size_t chunks NOSTALL_GUARDED_BY(mutex) = 0;         // of all blocks
  std::vector<Chunk*> idle NOSTALL_GUARDED_BY(mutex);  // that no thread fills
  // Records for which the blocks have room.
  uint64_t granted NOSTALL_GUARDED_BY(mutex) = 0;
  // The system had none; what needs more is dropped from then on.
  bool no_memory NOSTALL_GUARDED_BY(mutex) = false;
  std::vector<Reading> readings NOSTALL_GUARDED_BY(mutex);
  std::map<uint32_t, Known> communicators NOSTALL_GUARDED_BY(mutex);  // by their id
  UnderWay under_way NOSTALL_GUARDED_BY(mutex);
  Comparison begin, end;

  uint64_t records() const NOSTALL_REQUIRES(mutex) {
    uint64_t sum = 0;
    for (const auto& block : blocks) {
      for (const Chunk& chunk : block->chunks()) sum += chunk.records().size();
    }
    return sum;
  }
  // Throws std::bad_alloc, and has granted nothing then.
  void grant() NOSTALL_REQUIRES(mutex) {
    auto block = std::make_unique<Block>(most - granted);
    chunks += block->chunks().size();
    idle.reserve(chunks);  // giving a chunk back needs no memory
    blocks.push_back(std::move(block));
    granted += blocks.back()->room();
    const std::span<Chunk> made = blocks.back()->chunks();
    for (auto chunk = made.rbegin(); chunk != made.rend(); ++chunk) idle.push_back(&*chunk);
  }
};

Profile* profile() {
  static const std::unique_ptr<Profile> only = [] {
    const char* directory = std::getenv("NOSTALL_MPI_PROFILE");
    if (directory == nullptr || *directory == '\0') return std::unique_ptr<Profile>();
    auto made = std::make_unique<Profile>();
    made->directory = directory;
    if (const char* most = std::getenv("NOSTALL_MPI_PROFILE_RECORDS")) {
      made->most = std::strtoull(most, nullptr, 10);
    }
    return made;
  }();
  return only.get();
}

constexpr int kTag = 1;
constexpr int kRounds = 20;

// The shortest round trip bounds best what the other clock showed in its middle.
Comparison compare_with(MPI_Comm comm, int rank_zero) {
  Comparison best;
  int64_t shortest = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < kRounds; ++i) {
    int64_t theirs = 0;
    const int64_t sent = now_ns();
    PMPI_Send(&sent, 1, MPI_INT64_T, rank_zero, kTag, comm);
    PMPI_Recv(&theirs, 1, MPI_INT64_T, rank_zero, kTag, comm, MPI_STATUS_IGNORE);
    const int64_t back = now_ns();
    if (back - sent >= shortest) continue;
    shortest = back - sent;
    best = {sent + (back - sent) / 2, theirs - (sent + (back - sent) / 2)};
  }
  return best;
}

void answer(MPI_Comm comm, int rank) {
  for (int i = 0; i < kRounds; ++i) {
    int64_t sent = 0;
    PMPI_Recv(&sent, 1, MPI_INT64_T, rank, kTag, comm, MPI_STATUS_IGNORE);
    const int64_t now = now_ns();
    PMPI_Send(&now, 1, MPI_INT64_T, rank, kTag, comm);
  }
}

MPI_Comm ranks_of_node() {
  MPI_Comm node = MPI_COMM_NULL;
  int rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  PMPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
  return node;
}

// The first rank of each node compares clocks with rank 0, one after the other.
Comparison compare_clocks(MPI_Comm node) {
  MPI_Comm leaders = MPI_COMM_NULL;
  int rank = 0, node_rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  PMPI_Comm_rank(node, &node_rank);
  PMPI_Comm_split(MPI_COMM_WORLD, node_rank == 0 ? 0 : MPI_UNDEFINED, rank, &leaders);
  Comparison mine{now_ns(), 0};
  if (leaders != MPI_COMM_NULL) {
    int leader = 0, all = 0;
    PMPI_Comm_rank(leaders, &leader);
    PMPI_Comm_size(leaders, &all);
    for (int other = 1; leader == 0 && other < all; ++other) answer(leaders, other);
    if (leader > 0) mine = compare_with(leaders, 0);
    PMPI_Comm_free(&leaders);
  }
  PMPI_Bcast(&mine, 2, MPI_INT64_T, 0, node);
  return mine;
}

// All ranks of a node take the readings of its first one where all read the same counter: with
// readings of their own they would disagree about calls while the kernel changed its clock's rate.
void share_readings(MPI_Comm node, std::vector<Reading>& readings) {
  int mine = reads_tsc ? 1 : 0, all = 0;
  PMPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_MIN, node);
  if (all == 0) return;
  uint64_t many = readings.size();
  PMPI_Bcast(&many, 1, MPI_UINT64_T, 0, node);
  readings.resize(many);
  static_assert(sizeof(Reading) == 2 * sizeof(uint64_t));
  PMPI_Bcast(readings.data(), static_cast<int>(2 * many), MPI_UINT64_T, 0, node);
}

// The time of one message.
struct Message {
  uint64_t bytes = 0;
  int64_t ns = 0;
};

// What rank 0 exchanges messages with: the first rank of another node, or rank 1 where there is
// none.
int partner_of_zero(MPI_Comm node, int rank) {
  constexpr int kNone = std::numeric_limits<int>::max();
  int node_rank = 0, mine = kNone, first = kNone;
  PMPI_Comm_rank(node, &node_rank);
  if (node_rank == 0 && rank != 0) mine = rank;
  PMPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  return first == kNone ? 1 : first;
}

// Half of the shortest round trip of several, by size; on rank 0 alone.
std::vector<Message> time_messages(MPI_Comm node) {
  constexpr int kTrips = 10;
  constexpr std::array<int, 6> kSizes{8, 1 << 10, 16 << 10, 128 << 10, 1 << 20, 4 << 20};
  std::vector<Message> found;
  int rank = 0, ranks = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  PMPI_Comm_size(MPI_COMM_WORLD, &ranks);
  const int partner = partner_of_zero(node, rank);
  const bool takes_part = ranks > 1 && (rank == 0 || rank == partner);
  // On MPI_COMM_WORLD a receive that the program left could take the messages.
  MPI_Comm both = MPI_COMM_NULL;
  PMPI_Comm_split(MPI_COMM_WORLD, takes_part ? 0 : MPI_UNDEFINED, rank, &both);
  if (both == MPI_COMM_NULL) return found;
  const int other = rank == 0 ? 1 : 0;
  std::vector<std::byte> data(static_cast<size_t>(kSizes.back()));
  for (const int bytes : kSizes) {
    int64_t shortest = std::numeric_limits<int64_t>::max();
    for (int i = 0; i < kTrips; ++i) {
      const int64_t sent = now_ns();
      const auto send = [&] { PMPI_Send(data.data(), bytes, MPI_BYTE, other, kTag, both); };
      if (rank == 0) send();
      PMPI_Recv(data.data(), bytes, MPI_BYTE, other, kTag, both, MPI_STATUS_IGNORE);
      if (rank != 0) send();
      shortest = std::min(shortest, now_ns() - sent);
    }
    if (rank == 0) found.push_back({static_cast<uint64_t>(bytes), shortest / 2});
  }
  PMPI_Comm_free(&both);
  return found;
}

std::string header(const Profile& p, int rank, int ranks, std::span<const Message> messages)
    NOSTALL_REQUIRES(p.mutex) {
  std::array<char, 512> line{};
  std::string text =
      "{\"nostall\": \"mpi profile\", \"version\": 2, \"rank\": " + std::to_string(rank) +
      ", \"ranks\": " + std::to_string(ranks);
  std::array<char, MPI_MAX_PROCESSOR_NAME> node{};
  int length = 0;
  PMPI_Get_processor_name(node.data(), &length);
  const char* named = std::getenv("NOSTALL_NODE");
  text += ", \"node\": \"" + std::string(named != nullptr ? named : node.data()) + "\"";
  std::snprintf(line.data(), line.size(),
                ", \"clock\": [[%lld, %lld], [%lld, %lld]], \"records\": %llu, \"dropped\": %llu",
                static_cast<long long>(p.begin.at), static_cast<long long>(p.begin.offset),
                static_cast<long long>(p.end.at), static_cast<long long>(p.end.offset),
                static_cast<unsigned long long>(p.records()),
                static_cast<unsigned long long>(p.dropped));
  text += line.data();
  text += ", \"communicators\": {";
  for (auto it = p.communicators.begin(); it != p.communicators.end(); ++it) {
    text += (it == p.communicators.begin() ? "\"" : ", \"") + std::to_string(it->first) + "\": [" +
            std::to_string(it->second.name) + ", " + std::to_string(it->second.ranks) + ", " +
            std::to_string(it->second.node_ranks) + "]";
  }
  text += "}, \"passed\": {";
  for (int i = 1; i < kFallbacks; ++i) {
    text += std::string(i == 1 ? "\"" : ", \"") + name_of(static_cast<Fallback>(i)) +
            "\": " + std::to_string(counters().passed[static_cast<size_t>(i)].load());
  }
  text += "}, \"unrecorded\": {\"early\": " + std::to_string(counters().early.load()) +
          ", \"persistent\": " + std::to_string(counters().persistent.load()) + "}, \"alpha\": [";
  for (const Message& message : messages) {
    text += (&message == messages.data() ? "[" : ", [") + std::to_string(message.bytes) + ", " +
            std::to_string(message.ns) + "]";
  }
  return text + "]}\n";
}

}  // namespace

const bool asked_to_profile = profile() != nullptr;
const bool reads_tsc = [] {
  if (!asked_to_profile) return false;
  std::array<char, 32> name{};
  const auto close = [](std::FILE* file) { std::fclose(file); };
  const std::unique_ptr<std::FILE, decltype(close)> file(
      std::fopen("/sys/devices/system/clocksource/clocksource0/current_clocksource", "r"), close);
  return file && std::fgets(name.data(), name.size(), file.get()) != nullptr &&
         std::string_view(name.data()) == "tsc\n";
}();

void profile_begin() {
  Profile& p = *profile();
  {
    const MutexLock lock(p.mutex);
    p.readings.push_back(read_clocks());  // before any rank of the node leaves the comparison
  }
  MPI_Comm node = ranks_of_node();
  p.begin = compare_clocks(node);
  PMPI_Comm_free(&node);
  const MutexLock lock(p.mutex);
  try {
    while (p.blocks.size() < kFirstBlocks && p.granted < p.most) p.grant();
  } catch (const std::bad_alloc&) {
    p.no_memory = true;
  }
}

void profile_end() {
  Profile& p = *profile();
  MPI_Comm node = ranks_of_node();
  p.end = compare_clocks(node);
  std::vector<Reading> readings;
  {
    const MutexLock lock(p.mutex);
    readings = p.readings;
  }
  const Reading last = read_clocks();  // after the last calls of all ranks of the node
  if (readings.size() > 1 && last.ns - readings.back().ns < kApart) readings.pop_back();
  readings.push_back(last);
  share_readings(node, readings);
  const std::vector<Message> messages = time_messages(node);
  PMPI_Comm_free(&node);
  int rank = 0, ranks = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  PMPI_Comm_size(MPI_COMM_WORLD, &ranks);
  ::mkdir(p.directory.c_str(), 0777);
  const std::string path = p.directory + "/mpi-" + std::to_string(rank) + ".profile";
  const MutexLock lock(p.mutex);
  const auto close = [](std::FILE* file) { std::fclose(file); };
  const std::unique_ptr<std::FILE, decltype(close)> file(std::fopen(path.c_str(), "wb"), close);
  const std::string text = header(p, rank, ranks, messages);
  bool written = file && std::fwrite(text.data(), 1, text.size(), file.get()) == text.size();
  const Clock clock(readings);
  std::vector<Record> all;
  try {
    all.reserve(p.records());
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "nostall: no memory to write %s; lower NOSTALL_MPI_PROFILE_RECORDS\n",
                 path.c_str());
    return;
  }
  for (const auto& block : p.blocks) {
    for (const Chunk& chunk : block->chunks()) {
      for (Record record : chunk.records()) {
        record.arrived = clock.ns(static_cast<uint64_t>(record.arrived));
        record.left = clock.ns(static_cast<uint64_t>(record.left));
        all.push_back(record);
      }
    }
  }
  // Threads fill chunks of their own; calls on one communicator follow each other.
  const auto earlier = [](const Record& a, const Record& b) { return a.arrived < b.arrived; };
  if (!std::is_sorted(all.begin(), all.end(), earlier)) {
    std::stable_sort(all.begin(), all.end(), earlier);
  }
  written =
      written && std::fwrite(all.data(), sizeof(Record), all.size(), file.get()) == all.size();
  if (!written || std::fflush(file.get()) != 0) {
    std::fprintf(stderr, "nostall: cannot write %s: %s\n", path.c_str(), std::strerror(errno));
  }
}

namespace {

// Another thread goes on with the chunk of one that ends.
struct GivesBack {
  GivesBack() = default;
  ~GivesBack() {
    Profile& p = *profile();
    const MutexLock lock(p.mutex);
    if (!filling->full()) p.idle.push_back(filling);
    filling = nullptr;
    ended = true;
  }
  GivesBack(const GivesBack&) = delete;
  GivesBack& operator=(const GivesBack&) = delete;
};

// A chunk with room for this thread; throws std::bad_alloc.
bool take_chunk(Profile& p) NOSTALL_REQUIRES(p.mutex) {
  if (filling != nullptr && !filling->full()) return true;
  if (p.idle.empty() && p.granted < p.most) p.grant();
  if (p.idle.empty()) return false;
  const Reading now = read_clocks();
  if (p.readings.empty() || now.ns - p.readings.back().ns >= kApart) p.readings.push_back(now);
  filling = p.idle.back();
  p.idle.pop_back();
  thread_local GivesBack gives_back;
  static_cast<void>(gives_back);
  return true;
}

// Whether the communicator's next call has a place; throws std::bad_alloc.
bool take_place(Profile& p, CommunicatorState& state) NOSTALL_REQUIRES(p.mutex) {
  Known& known = p.communicators
                     .try_emplace(state.id, Known{state.name, static_cast<uint64_t>(state.ranks),
                                                  static_cast<uint64_t>(state.node_ranks)})
                     .first->second;
  known.lost = known.lost || ended || !take_chunk(p);
  return !known.lost;
}

// A place for a record where the thread's chunk is full, or its communicator not known yet. After a
// call that got none the communicator is not `recorded`, so that its later ones come here too.
bool make_room(CommunicatorState* state) noexcept {
  Profile& p = *profile();
  const MutexLock lock(p.mutex);
  bool place = false;
  try {
    place = state != nullptr && !p.no_memory && take_place(p, *state);
  } catch (const std::bad_alloc&) {
    p.no_memory = true;
  }
  if (!place) ++p.dropped;
  if (state != nullptr) state->recorded = place;
  return place;
}

}  // namespace

namespace {

// Null where there is no room.
Record* add(Call call, CommunicatorState* state, uint64_t count, uint64_t bytes, uint64_t arrived,
            uint64_t left, bool ours, uint16_t flags) noexcept {
  const bool has_room =
      state != nullptr && state->recorded && filling != nullptr && !filling->full();
  if (!has_room && !make_room(state)) return nullptr;
  return filling->add({static_cast<int64_t>(arrived), static_cast<int64_t>(left), bytes, count,
                       state->id, static_cast<uint8_t>(call), uint8_t{ours}, flags});
}

}  // namespace

void record(Call call, CommunicatorState* state, uint64_t count, uint64_t bytes, uint64_t arrived,
            bool ours, uint64_t left) noexcept {
  add(call, state, count, bytes, arrived, left, ours, 0);
}

Begun::Begun(Call call, MPI_Comm comm) : call_(call) {
  if (!profiling()) return;
  arrived_ = ticks();
  state_ = known_state_of(comm);
  if (state_ == nullptr) counters().early.fetch_add(1, std::memory_order_relaxed);
}

void Begun::record(uint64_t count, uint64_t bytes, bool ours, MPI_Request request) const noexcept {
  if (state_ == nullptr) return;
  Record* made = add(call_, state_, count, bytes, arrived_, ticks(), ours, kNonblocking);
  if (made == nullptr || request == MPI_REQUEST_NULL) return;
  Profile& p = *profile();
  const MutexLock lock(p.mutex);
  try {
    p.under_way[request] = made;
  } catch (const std::bad_alloc&) {
    p.no_memory = true;  // its record ends with the call that started it
  }
}

Endings::Endings(int count, const MPI_Request* requests) {
  if (!profiling() || requests == nullptr || count <= 0) return;
  Profile& p = *profile();
  const MutexLock lock(p.mutex);
  if (p.under_way.empty()) return;
  try {
    waited_.reserve(static_cast<size_t>(count));
  } catch (const std::bad_alloc&) {
    return;
  }
  for (int i = 0; i < count; ++i) waited_.push_back(p.under_way.extract(requests[i]));
}

Endings::~Endings() {
  if (waited_.empty()) return;
  Profile& p = *profile();
  const MutexLock lock(p.mutex);
  for (auto& one : waited_) p.under_way.insert(std::move(one));
}

void Endings::ended(int index) noexcept {
  if (index < 0 || static_cast<size_t>(index) >= waited_.size()) return;
  auto& one = waited_[static_cast<size_t>(index)];
  if (one.empty()) return;
  one.mapped()->left = static_cast<int64_t>(ticks());
  one = {};
}

void Endings::all_ended() noexcept {
  for (size_t i = 0; i < waited_.size(); ++i) ended(static_cast<int>(i));
}

}  // namespace nostall::mpi
