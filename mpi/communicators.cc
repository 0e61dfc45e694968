// Makes, keeps and frees the state of the program's communicators, as an attribute of each.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <system_error>

#include "base/clock.h"
#include "base/error.h"
#include "base/mutex.h"
#include "between.h"
#include "collective/selection.h"
#include "mpi_state.h"
#include "profile.h"

#ifdef MPIX_STREAM_NULL
// Not in every MPI of MPICH's ABI.
extern "C" __attribute__((weak)) int PMPIX_Stream_progress(MPIX_Stream stream);
#endif

namespace nostall::mpi {
namespace {

struct Registry {
  Mutex mutex;
  // In the order of their first calls, which is that of all ranks: they free what is the MPI's
  // together.
  std::vector<CommunicatorState*> all NOSTALL_GUARDED_BY(mutex);
  // Those of them whose communicator was freed.
  std::vector<CommunicatorState*> ended NOSTALL_GUARDED_BY(mutex);
  uint32_t next_id NOSTALL_GUARDED_BY(mutex) = 0;
};
// Nothing static here has a destructor: a program may call MPI_Finalize in its exit handlers, behind
// those.
Registry& registry() {
  static Registry& one = *new Registry;
  return one;
}

// Counts communicators that ended: what a thread has cached of one is valid for one count only, for
// handles are used again.
std::atomic<uint64_t>& endings() {
  static std::atomic<uint64_t> count{1};
  return count;
}

// From MPI_Finalize on.
std::atomic<bool>& over() {
  static std::atomic<bool> now{false};
  return now;
}

// Where the MPI_Finalize of another preloaded library comes first, this is what reaches us.
void end_with_comm_self() {
  const auto at_end = [](MPI_Comm, int, void*, void*) {
    end();
    return MPI_SUCCESS;
  };
  int key = MPI_KEYVAL_INVALID;
  PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, at_end, &key, nullptr);
  PMPI_Comm_set_attr(MPI_COMM_SELF, key, nullptr);
  PMPI_Comm_free_keyval(&key);
}

// Between MPI_Init and MPI_Finalize, whose calls need not come to us. A communicator of a session may
// exist without, but then there is no MPI_COMM_SELF.
bool is_live() {
  static std::atomic<bool> begun{false};
  if (over().load(std::memory_order_acquire)) return false;
  if (begun.load(std::memory_order_acquire)) return true;
  int initialized = 0;
  PMPI_Initialized(&initialized);
  if (initialized != 0 && !begun.exchange(true)) end_with_comm_self();
  return initialized != 0;
}

struct Arena {
  std::shared_ptr<collective::Communicator> kept;
  std::atomic<collective::Communicator*> now{nullptr};
};
Arena& shared_arena() {
  static Arena& one = *new Arena;
  return one;
}

int forget(MPI_Comm, int, void* attribute, void*) {
  endings().fetch_add(1);
  Registry& known = registry();
  const MutexLock lock(known.mutex);
  const auto found = std::find_if(known.all.begin(), known.all.end(),
                                  [attribute](auto* state) { return state == attribute; });
  if (found != known.all.end()) known.ended.push_back(*found);
  // What was freed with work in flight stays until that is done.
  std::erase_if(known.ended, [&known](CommunicatorState* freed) NOSTALL_REQUIRES(known.mutex) {
    if (freed->queue && !freed->queue->idle()) return false;
    std::erase(known.all, freed);
    delete freed;
    return true;
  });
  return MPI_SUCCESS;
}

int keyval() {
  static const int key = [] {
    int made = MPI_KEYVAL_INVALID;
    PMPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, forget, &made, nullptr);
    return made;
  }();
  return key;
}

bool switched_off() {
  static const bool off = [] {
    const char* mode = std::getenv("NOSTALL_MPI");
    return mode != nullptr && std::string(mode) == "off";
  }();
  return off;
}

std::chrono::nanoseconds timeout() {
  const char* seconds = std::getenv("NOSTALL_MPI_TIMEOUT");
  const double value = seconds == nullptr ? 0 : std::atof(seconds);
  constexpr double kMost = 1e9;  // as the table of options says; more would overflow
  return value > 0 && value <= kMost ? std::chrono::nanoseconds(static_cast<int64_t>(value * 1e9))
                                     : std::chrono::hours(24);
}

// Bound on what a rank gets from MPI_Alloc_mem in shared memory; only addresses until then.
uint64_t shared_bytes() {
  const char* bytes = std::getenv("NOSTALL_MPI_SHARED");
  return bytes == nullptr ? uint64_t{1} << 30 : uint64_t{std::strtoull(bytes, nullptr, 10)};
}

// A program makes many communicators.
const std::string& selection_text_once() {
  static const std::string& text = *new std::string([] {
    const char* named = std::getenv("NOSTALL_COLLECTIVES");
    return collective::selection_text(named != nullptr ? named : "");
  }());
  return text;
}

// While a rank waits in shared memory, the messages that it sent before must still go out, and
// others' one-sided operations on its windows be answered.
void progress(CommunicatorState& state) {
  listen(state);
#ifdef MPIX_STREAM_NULL
  // A probe of MPICH's looks at what there is to match, and moves nothing.
  if (PMPIX_Stream_progress != nullptr) {
    PMPIX_Stream_progress(MPIX_STREAM_NULL);
    return;
  }
#endif
  int flag = 0;
  PMPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_SELF, &flag, MPI_STATUS_IGNORE);
}

// The ranks of `comm` that share memory, or null if the MPI does not say; NOSTALL_NODE lets one
// machine stand for several.
MPI_Comm split_by_node(MPI_Comm comm, int rank) {
  MPI_Comm node = MPI_COMM_NULL;
  int result = MPI_SUCCESS;
  if (const char* name = std::getenv("NOSTALL_NODE")) {
    const auto color = static_cast<int>(std::hash<std::string>{}(name)&0x3fffffff);
    result = PMPI_Comm_split(comm, color, rank, &node);
  } else {
    result = PMPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &node);
  }
  return result == MPI_SUCCESS ? node : MPI_COMM_NULL;
}

// A communicator keeps two. The program may have as many communicators as it likes, and needs
// descriptors for its own files.
bool has_descriptors() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return true;
  std::error_code error;
  rlim_t used = 0;
  for (std::filesystem::directory_iterator at("/proc/self/fd", error), end; !error && at != end;
       at.increment(error)) {
    ++used;
  }
  return error ? error.value() != EMFILE : used <= limit.rlim_cur / 2;
}

// False if the MPI failed; no node if the ranks cannot share memory.
bool join_node(CommunicatorState& state, MPI_Comm node, bool is_world) {
  std::array<char, 96> job{};
  if (state.node_rank == 0) {
    static std::atomic<uint32_t> made{0};
    std::snprintf(job.data(), job.size(), "mpi %ld %lld %u", static_cast<long>(::getpid()),
                  static_cast<long long>(now_ns()), made.fetch_add(1));
  }
  if (PMPI_Bcast(job.data(), static_cast<int>(job.size()), MPI_CHAR, 0, node) != MPI_SUCCESS) {
    return false;
  }
  collective::CommunicatorConfig config;
  config.job = job.data();
  config.rank = static_cast<uint32_t>(state.node_rank);
  config.ranks = static_cast<uint32_t>(state.node_ranks);
  config.arena_bytes = is_world ? shared_bytes() : 0;
  config.join_timeout = std::chrono::minutes(1);
  state.timeout_ns = timeout().count();
  // The program's own limit holds from the end of set_up on.
  config.timeout = std::max(std::chrono::nanoseconds(state.timeout_ns), config.join_timeout);
  config.progress = [&state] { progress(state); };
  const bool few = config.ranks < 1024;
  int joined = few && has_descriptors() ? 1 : 0;
  std::string why =
      few ? "a rank has more than half of the files open that it may: raise the limit "
            "(ulimit -n)"
          : "more than 1023 ranks share a node";
  // All ranks try or none: one that failed alone would leave the others waiting.
  if (PMPI_Allreduce(MPI_IN_PLACE, &joined, 1, MPI_INT, MPI_MIN, node) != MPI_SUCCESS) return false;
  static std::atomic<bool> told_of_files{false};  // or there would be a line for each communicator
  const bool told = joined == 0 && few && told_of_files.exchange(true);
  if (joined == 1) {
    try {
      config.selection = selection_text_once();
      state.node = std::make_shared<collective::Communicator>(config);
    } catch (const Error& error) {
      joined = 0;
      why = error.what();
    }
  }
  // A reason that holds for every communicator would fill the program's output.
  constexpr int kMostTold = 10;
  static std::atomic<int> lines{0};
  if (joined == 0 && state.node_rank == 0 && !told && lines.fetch_add(1) < kMostTold) {
    std::fprintf(stderr, "nostall: the MPI's own collectives are used: %s\n", why.c_str());
  }
  return true;
}

uint64_t new_name() {
  static std::atomic<uint64_t> made{0};
  return (static_cast<uint64_t>(::getpid()) << 32 ^ static_cast<uint64_t>(now_ns()) << 8 ^
          made.fetch_add(1)) &
         ((uint64_t{1} << 53) - 1);  // JSON's numbers
}

// Nothing if the communicator is not good for anything: a revoked one.
std::optional<uint64_t> agree_on_name(const CommunicatorState& state, MPI_Comm comm, bool inter) {
  uint64_t name = state.rank == 0 ? new_name() : 0;
  if (inter) {
    // Each group gets the other's name, then its own back.
    uint64_t theirs = 0, ours = 0;
    if (PMPI_Allreduce(&name, &theirs, 1, MPI_UINT64_T, MPI_BXOR, comm) != MPI_SUCCESS) return {};
    name = state.rank == 0 ? theirs : 0;
    if (PMPI_Allreduce(&name, &ours, 1, MPI_UINT64_T, MPI_BXOR, comm) != MPI_SUCCESS) return {};
    return ours ^ theirs;
  }
  if (PMPI_Bcast(&name, 1, MPI_UINT64_T, 0, comm) != MPI_SUCCESS) return std::nullopt;
  return name;
}

// Of a communicator over several nodes: the node of each rank, and the communicators between nodes.
// False if the MPI failed.
bool set_up_nodes(CommunicatorState& state, MPI_Comm comm) {
  const int color = state.node_rank == 0 ? 0 : MPI_UNDEFINED;
  if (PMPI_Comm_split(comm, color, state.rank, &state.leaders) != MPI_SUCCESS) {
    state.leaders = MPI_COMM_NULL;
    return false;
  }
  MPI_Comm notices = MPI_COMM_NULL;  // not a duplicate, which would copy attributes
  if (PMPI_Comm_split(comm, 0, state.rank, &notices) != MPI_SUCCESS) return false;
  std::array<int, 2> mine{0, state.node_rank};
  // Errors go to the program's handler, on its communicator, for all ranks of a node alike.
  if (PMPI_Comm_set_errhandler(notices, MPI_ERRORS_RETURN) != MPI_SUCCESS) return false;
  if (state.node_rank == 0 &&
      (state.leaders == MPI_COMM_NULL ||
       PMPI_Comm_set_errhandler(state.leaders, MPI_ERRORS_RETURN) != MPI_SUCCESS ||
       PMPI_Comm_rank(state.leaders, mine.data()) != MPI_SUCCESS)) {
    return false;
  }
  try {
    state.node->broadcast(mine.data(), sizeof(int), 0);
  } catch (const Error& error) {
    std::fprintf(stderr, "nostall: a communicator of several nodes was not made: %s\n",
                 error.what());
    mine[0] = -1;  // the others are in the call below
  }
  std::vector<int> all(2 * static_cast<size_t>(state.ranks));
  if (PMPI_Allgather(mine.data(), 2, MPI_INT, all.data(), 2, MPI_INT, comm) != MPI_SUCCESS) {
    return false;
  }
  for (size_t r = 0; r < all.size(); r += 2) {
    if (all[r] < 0) return false;
    state.node_of.push_back(all[r]);
    state.node_rank_of.push_back(all[r + 1]);
  }
  state.comm = comm;
  state.notices = notices;
  return true;
}

// All ranks of `comm` are here. False if the MPI failed: the program's call is left to it, and says
// why.
bool set_up(CommunicatorState& state, MPI_Comm comm) {
  MPI_Comm node = split_by_node(comm, state.rank);
  if (node == MPI_COMM_NULL || PMPI_Comm_rank(node, &state.node_rank) != MPI_SUCCESS ||
      PMPI_Comm_size(node, &state.node_ranks) != MPI_SUCCESS) {
    return false;
  }
  const bool asked = join_node(state, node, comm == MPI_COMM_WORLD);
  PMPI_Comm_free(&node);
  std::array<int, 3> agreed{state.node ? 1 : 0, state.node_ranks == state.ranks ? 1 : 0,
                            nonblocking_from() != ~uint64_t{0} ? 1 : 0};
  if (!asked ||
      PMPI_Allreduce(MPI_IN_PLACE, agreed.data(), 3, MPI_INT, MPI_MIN, comm) != MPI_SUCCESS) {
    return false;
  }
  if (agreed[0] == 0) {
    state.passed = Fallback::not_shared;
    state.node.reset();
    return true;
  }
  state.one_node = agreed[1] == 1;
  state.background = agreed[2] == 1;
  if (!state.one_node && !set_up_nodes(state, comm)) return false;
  state.node->set_timeout(std::chrono::nanoseconds(state.timeout_ns));
  return true;
}

// The attribute of a communicator that gets no state, a revoked one for example: its end is noticed
// too, for the next one may have its handle.
char* no_state() {
  static char mark = 0;
  return &mark;
}

CommunicatorState* leave_to_mpi(MPI_Comm comm) {
  PMPI_Comm_set_attr(comm, keyval(), no_state());
  return nullptr;
}

CommunicatorState* look_up(MPI_Comm comm, bool make) {
  void* attribute = nullptr;
  int found = 0;
  if (comm == MPI_COMM_NULL || !is_live()) return nullptr;
  PMPI_Comm_get_attr(comm, keyval(), &attribute, &found);
  if (found != 0) {
    return attribute == no_state() ? nullptr : static_cast<CommunicatorState*>(attribute);
  }
  if (!make) return nullptr;
  auto made = std::make_unique<CommunicatorState>();
  int inter = 0;
  PMPI_Comm_test_inter(comm, &inter);
  PMPI_Comm_rank(comm, &made->rank);
  PMPI_Comm_size(comm, &made->ranks);
  if (inter != 0) {
    int others = 0;
    PMPI_Comm_remote_size(comm, &others);
    made->ranks += others;
  }
  if (inter == 0 || profiling()) {
    const auto name = agree_on_name(*made, comm, inter != 0);
    if (!name) return leave_to_mpi(comm);
    made->name = *name;
  }
  if (switched_off()) {
    made->passed = Fallback::switched_off;
  } else if (inter != 0) {
    made->passed = Fallback::inter_communicator;
  } else if (!set_up(*made, comm)) {
    return leave_to_mpi(comm);
  }
  Registry& known = registry();
  const MutexLock lock(known.mutex);
  made->id = known.next_id++;
  CommunicatorState* state = made.release();
  known.all.push_back(state);
  PMPI_Comm_set_attr(comm, keyval(), state);
  return state;
}

}  // namespace

CommunicatorState::~CommunicatorState() {
  // A notice may still be on its way, and find a new communicator of the same number.
  if (notices != MPI_COMM_NULL && !has_ended(*this)) PMPI_Comm_free(&notices);
  // Open MPI 5.0 ends the process when a nonblocking collective goes on whose communicator went.
  if (leaders != MPI_COMM_NULL && !keeps_leaders) PMPI_Comm_free(&leaders);
}

CommunicatorState* state_of(MPI_Comm comm) {
  thread_local MPI_Comm last = MPI_COMM_NULL;
  thread_local CommunicatorState* its_state = nullptr;
  thread_local uint64_t at = 0;
  if (!is_live()) return nullptr;
  const uint64_t now = endings().load(std::memory_order_acquire);
  if (comm == last && at == now) return its_state;
  its_state = look_up(comm, true);
  last = comm;
  at = now;
  static std::atomic<bool> begun{false};
  if (comm == MPI_COMM_WORLD && !begun.exchange(true)) {
    if (its_state != nullptr) {
      shared_arena().kept = its_state->node;
      shared_arena().now.store(its_state->node.get(), std::memory_order_release);
    }
    begin();
  }
  return its_state;
}

CommunicatorState* known_state_of(MPI_Comm comm) { return look_up(comm, false); }

collective::Communicator* arena() noexcept {
  return shared_arena().now.load(std::memory_order_acquire);
}

void free_arena() noexcept {
  shared_arena().now.store(nullptr, std::memory_order_release);
  shared_arena().kept.reset();
}

void free_states() {
  over().store(true, std::memory_order_release);
  Registry& known = registry();
  const MutexLock lock(known.mutex);
  known.ended.clear();
  for (CommunicatorState* state : known.all) delete state;
  known.all.clear();
}

Counters& counters() {
  static Counters all;
  return all;
}

}  // namespace nostall::mpi
