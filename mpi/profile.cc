// The profile: NOSTALL_MPI_PROFILE/mpi-RANK.profile, one line of JSON and then the records, little
// endian, 40 bytes each (docs/guide/collectives.md, "The profile").
//
// Times are CLOCK_MONOTONIC of the rank's node. Each node's clock is compared with that of rank 0
// by message round trips at the beginning and at the end; the reader interpolates between the two,
// so that a drift does not matter.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "base/clock.h"
#include "mpi_state.h"

namespace nostall::mpi {
namespace {

struct Record {
  int64_t arrived, left;
  uint64_t bytes, count;
  uint32_t communicator;
  uint8_t call, ours;
  uint16_t reserved;
};
static_assert(sizeof(Record) == 40);

struct Comparison {
  int64_t at = 0, offset = 0;  // this node's clock + offset = rank 0's
};

struct Profile {
  std::mutex mutex;
  std::string directory;
  uint64_t most = 1 << 20;
  uint64_t dropped = 0;
  std::vector<std::unique_ptr<std::array<Record, 1 << 14>>> chunks;
  uint64_t records = 0;
  std::map<uint32_t, std::array<uint64_t, 3>> communicators;  // id: name, ranks, node's ranks
  Comparison begin, end;
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

// Who has the shortest round trip knows best what the other clock showed in its middle.
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

// The first rank of each node compares clocks with rank 0, one after the other.
Comparison compare_clocks() {
  MPI_Comm node = MPI_COMM_NULL, heads = MPI_COMM_NULL;
  int rank = 0, node_rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  PMPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
  PMPI_Comm_rank(node, &node_rank);
  PMPI_Comm_split(MPI_COMM_WORLD, node_rank == 0 ? 0 : MPI_UNDEFINED, rank, &heads);
  Comparison mine{now_ns(), 0};
  if (heads != MPI_COMM_NULL) {
    int head = 0, all = 0;
    PMPI_Comm_rank(heads, &head);
    PMPI_Comm_size(heads, &all);
    for (int other = 1; head == 0 && other < all; ++other) answer(heads, other);
    if (head > 0) mine = compare_with(heads, 0);
    PMPI_Comm_free(&heads);
  }
  PMPI_Bcast(&mine, 2, MPI_INT64_T, 0, node);
  PMPI_Comm_free(&node);
  return mine;
}

std::string header(const Profile& p, int rank, int ranks) {
  std::array<char, 512> line{};
  std::string text =
      "{\"nostall\": \"mpi profile\", \"version\": 1, \"rank\": " + std::to_string(rank) +
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
                static_cast<unsigned long long>(p.records),
                static_cast<unsigned long long>(p.dropped));
  text += line.data();
  text += ", \"communicators\": {";
  for (auto it = p.communicators.begin(); it != p.communicators.end(); ++it) {
    text += (it == p.communicators.begin() ? "\"" : ", \"") + std::to_string(it->first) + "\": [" +
            std::to_string(it->second[0]) + ", " + std::to_string(it->second[1]) + ", " +
            std::to_string(it->second[2]) + "]";
  }
  text += "}, \"passed\": {";
  for (int i = 1; i < kPassed; ++i) {
    text += std::string(i == 1 ? "\"" : ", \"") + name_of(static_cast<Passed>(i)) +
            "\": " + std::to_string(counters().passed[static_cast<size_t>(i)].load());
  }
  return text + "}, \"nonblocking\": " + std::to_string(counters().nonblocking.load()) + "}\n";
}

}  // namespace

bool profiling() noexcept {
  static const bool on = profile() != nullptr;
  return on;
}

void profile_begin() { profile()->begin = compare_clocks(); }

void profile_end() {
  Profile& p = *profile();
  p.end = compare_clocks();
  int rank = 0, ranks = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  PMPI_Comm_size(MPI_COMM_WORLD, &ranks);
  ::mkdir(p.directory.c_str(), 0777);
  const std::string path = p.directory + "/mpi-" + std::to_string(rank) + ".profile";
  const std::scoped_lock lock(p.mutex);
  const auto close = [](std::FILE* file) { std::fclose(file); };
  const std::unique_ptr<std::FILE, decltype(close)> file(std::fopen(path.c_str(), "wb"), close);
  const std::string text = header(p, rank, ranks);
  bool written = file && std::fwrite(text.data(), 1, text.size(), file.get()) == text.size();
  uint64_t left = p.records;
  for (const auto& chunk : p.chunks) {
    const size_t n = std::min<uint64_t>(left, chunk->size());
    written = written && std::fwrite(chunk->data(), sizeof(Record), n, file.get()) == n;
    left -= n;
  }
  if (!written || std::fflush(file.get()) != 0) {
    std::fprintf(stderr, "nostall: cannot write %s: %s\n", path.c_str(), std::strerror(errno));
  }
}

void record(Call call, CommunicatorState* state, uint64_t count, uint64_t bytes, int64_t arrived,
            bool ours) noexcept {
  const int64_t left = now_ns();
  Profile& p = *profile();
  const std::scoped_lock lock(p.mutex);
  if (state == nullptr || p.records == p.most) {
    ++p.dropped;
    return;
  }
  constexpr uint64_t kChunk = 1 << 14;
  if (p.records == p.chunks.size() * kChunk) {
    p.chunks.push_back(std::make_unique_for_overwrite<std::array<Record, kChunk>>());
  }
  (*p.chunks[p.records / kChunk])[p.records % kChunk] = {
      arrived, left, bytes, count, state->id, static_cast<uint8_t>(call), uint8_t{ours}, 0};
  ++p.records;
  if (!std::exchange(state->recorded, true)) {
    p.communicators[state->id] = {state->name, static_cast<uint64_t>(state->ranks),
                                  static_cast<uint64_t>(state->node_ranks)};
  }
}

}  // namespace nostall::mpi
