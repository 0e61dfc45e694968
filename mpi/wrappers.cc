// The functions that a program calls instead of its MPI's.
#include "wrappers.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "between.h"
#include "device_memory.h"
#include "mpi_state.h"
#include "traced.h"
#include "two_level.h"

namespace nostall::mpi {
namespace {

template <typename Pass>
int allreduce(const void* send, void* receive, uint64_t count, MPI_Datatype type, MPI_Op op,
              MPI_Comm comm, Pass pass) {
  Traced traced(Call::allreduce, count);
  CommunicatorState* state = state_of(comm);
  if (state == nullptr || state->passed != Fallback::no) {
    return traced.passed(state, state ? state->passed : Fallback::no, type, pass());
  }
  if (state->queue) state->queue->drain();
  listen(*state);
  const MpiReducer* reducer = MpiReducer::find(type, op);
  if (!reducer) return traced.passed(state, Fallback::type, type, pass());
  // Of several nodes only orders that do not matter: a node's ranks need not be neighbours.
  if (!state->one_node && !reducer->get().commutative()) {
    return traced.passed(state, Fallback::multi_node, type, pass());
  }
  const uint64_t bytes = count * reducer->element_bytes();
  if (const auto why = device_error(*state, {{send, bytes}, {receive, bytes}})) {
    return failed(*state, comm, *why);
  }
  try {
    const size_t alignment = reducer->get().alignment();
    Aligned out(receive, bytes, alignment, send == MPI_IN_PLACE);
    Aligned in(send == MPI_IN_PLACE ? out.get() : send, bytes, alignment, true, out.get());
    const Outlast outlast(*state, out.memory());
    if (state->one_node) {
      state->node->allreduce(in.get(), out.get(), count, reducer->get());
    } else {
      two_level_allreduce(*state, static_cast<const std::byte*>(in.get()),
                          static_cast<std::byte*>(out.get()), count, type, op, *reducer);
    }
    out.write_back();
  } catch (const Error& error) {
    return failed(*state, comm, error);
  } catch (const std::bad_alloc&) {
    return failed_without_memory(*state, comm);
  }
  return traced.ours(state, bytes);
}

template <typename Pass>
int reduce(const void* send, void* receive, uint64_t count, MPI_Datatype type, MPI_Op op, int root,
           MPI_Comm comm, Pass pass) {
  Traced traced(Call::reduce, count);
  CommunicatorState* state = state_of(comm);
  if (state == nullptr || state->passed != Fallback::no) {
    return traced.passed(state, state ? state->passed : Fallback::no, type, pass());
  }
  if (state->queue) state->queue->drain();
  const MpiReducer* reducer = MpiReducer::find(type, op);
  if (!reducer) return traced.passed(state, Fallback::type, type, pass());
  if (!state->one_node) return traced.passed(state, Fallback::multi_node, type, pass());
  if (root < 0 || root >= state->ranks) return pass();  // an error; the MPI says so
  const bool is_root = state->rank == root;
  const uint64_t bytes = count * reducer->element_bytes(), written = is_root ? bytes : 0;
  if (const auto why = device_error(*state, {{send, bytes}, {receive, written}})) {
    return failed(*state, comm, *why);
  }
  try {
    const size_t alignment = reducer->get().alignment();
    Aligned out(is_root ? receive : nullptr, written, alignment, send == MPI_IN_PLACE);
    Aligned in(send == MPI_IN_PLACE ? out.get() : send, bytes, alignment, true, out.get());
    state->node->reduce(in.get(), out.get(), count, reducer->get(), static_cast<uint32_t>(root));
    if (is_root) out.write_back();
  } catch (const Error& error) {
    return failed(*state, comm, error);
  } catch (const std::bad_alloc&) {
    return failed_without_memory(*state, comm);
  }
  return traced.ours(state, bytes);
}

void two_level_bcast(CommunicatorState& state, void* data, uint64_t bytes, int root) {
  const auto at = static_cast<size_t>(root);
  const int node = state.node_of[at];
  const bool here = state.node_of[static_cast<size_t>(state.rank)] == node;
  if (here) state.node->broadcast(data, bytes, static_cast<uint32_t>(state.node_rank_of[at]));
  if (state.node_rank == 0) {
    constexpr uint64_t kMost = 1 << 30;
    LeaderRequests requests(state, "bcast");
    size_t part = 0;
    for (uint64_t done = 0; done < bytes; done += kMost) {
      requests.start([&](MPI_Request* request) {
        return PMPI_Ibcast(static_cast<std::byte*>(data) + done,
                           static_cast<int>(std::min(kMost, bytes - done)), MPI_BYTE, node,
                           state.leaders, request);
      });
      requests.wait(part++);
    }
  }
  if (!here) state.node->broadcast(data, bytes, 0);
}

// Ranks may describe the same bytes by different types, so every type is ours: one that is not
// contiguous is packed first.
template <typename Pass>
int bcast(void* buffer, uint64_t count, MPI_Datatype type, int root, MPI_Comm comm, Pass pass) {
  const uint64_t bytes = bytes_of(count, type);
  Traced traced(Call::bcast, count);
  CommunicatorState* state = state_of(comm);
  if (state == nullptr || state->passed != Fallback::no) {
    return traced.passed(state, state ? state->passed : Fallback::no, type, pass());
  }
  if (state->queue) state->queue->drain();
  listen(*state);
  if (root < 0 || root >= state->ranks || bytes > 0x7fffffff || type == MPI_DATATYPE_NULL) {
    return traced.passed(state, Fallback::type, type, pass());
  }
  if (const auto why = device_error(*state, {{buffer, bytes}})) return failed(*state, comm, *why);
  try {
    const bool is_root = state->rank == root;
    Packed data(buffer, count, type, comm, is_root);
    const Outlast outlast(*state, data.memory());
    if (bytes == 0) {
      state->node->broadcast(nullptr, 0, 0);
    } else if (state->one_node) {
      state->node->broadcast(data.get(), bytes, static_cast<uint32_t>(root));
    } else {
      two_level_bcast(*state, data.get(), bytes, root);
    }
    if (!is_root) data.unpack();
  } catch (const Error& error) {
    return failed(*state, comm, error);
  } catch (const std::bad_alloc&) {
    return failed_without_memory(*state, comm);
  }
  return traced.ours(state, bytes);
}

int barrier(MPI_Comm comm) {
  Traced traced(Call::barrier, 0);
  CommunicatorState* state = state_of(comm);
  if (state == nullptr || state->passed != Fallback::no) {
    return traced.passed(state, state ? state->passed : Fallback::no, MPI_BYTE, PMPI_Barrier(comm));
  }
  if (state->queue) state->queue->drain();
  listen(*state);
  try {
    state->node->barrier();
    if (!state->one_node) {
      if (state->node_rank == 0) {
        LeaderRequests requests(*state, "barrier");
        requests.start(
            [&](MPI_Request* request) { return PMPI_Ibarrier(state->leaders, request); });
        requests.wait(0);
      }
      state->node->barrier();
    }
  } catch (const Error& error) {
    return failed(*state, comm, error);
  } catch (const std::bad_alloc&) {
    return failed_without_memory(*state, comm);
  }
  return traced.ours(state, 0);
}

// A preloaded library does not end a program for a setting: it says what it does instead.
void check_settings() {
  int rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank != 0) return;
  const auto one_of = [](const char* name, std::array<std::string_view, 2> values,
                         const char* hint) {
    const char* given = std::getenv(name);
    if (given == nullptr || *given == '\0' || std::string_view(given) == values[0] ||
        std::string_view(given) == values[1]) {
      return;
    }
    std::fprintf(stderr, "nostall: %s=%s is neither \"%s\" nor \"%s\": it is taken as \"%s\"%s\n",
                 name, given, values[0].data(), values[1].data(), values[0].data(), hint);
  };
  const char* between = std::getenv("NOSTALL_MPI_BETWEEN");
  const bool is_old = between != nullptr && std::string_view(between) == "exchange";
  one_of("NOSTALL_MPI", {"replace", "off"}, "");
  one_of("NOSTALL_MPI_BETWEEN", {"allreduce", "arrival"},
         is_old ? "; \"arrival\" was called \"exchange\"" : "");
}

void report() {
  const char* verbose = std::getenv("NOSTALL_MPI_VERBOSE");
  int rank = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (verbose == nullptr || std::atoi(verbose) == 0 || rank != 0) return;
  const Counters& all = counters();
  std::string line = "nostall: rank 0:";
  const auto add = [&line](const std::string& name, const std::atomic<uint64_t>& n) {
    line += " " + name + " " + std::to_string(n.load());
  };
  for (const Answered& each : kAnswered) add(each.name, all.ours[static_cast<size_t>(each.call)]);
  add("background", all.background);
  add("allocations", all.allocations);
  line += "; left to the MPI:";
  for (int i = 1; i < kFallbacks; ++i) {
    add(name_of(static_cast<Fallback>(i)), all.passed[static_cast<size_t>(i)]);
  }
  add("nonblocking", all.nonblocking);
  add("persistent", all.persistent);
  // In one piece: others, MPICH for one, write there as well.
  std::fprintf(stderr, "%s\n", line.c_str());
}

}  // namespace

int class_of(const Error& error) noexcept {
  const bool numbered = error.kind() == ErrorKind::peer || error.kind() == ErrorKind::stopped;
  return numbered && error.error_number() != 0 ? error.error_number() : MPI_ERR_OTHER;
}

int fail(MPI_Comm comm, const Error& error) {
  const int code = class_of(error);
  // What was stopped is the program's own doing.
  if (error.kind() != ErrorKind::stopped) std::fprintf(stderr, "nostall: %s\n", error.what());
  PMPI_Comm_call_errhandler(comm, code);
  return code;
}

void begin() {
  static std::atomic<bool> begun{false};
  if (begun.exchange(true)) return;
  check_settings();
  if (profiling()) profile_begin();
}

void end() {
  static std::atomic<bool> ended{false};
  if (ended.exchange(true)) return;
  report();
  begin();  // no collective on MPI_COMM_WORLD may have come, where another library answers MPI_Init
  if (profiling()) profile_end();
  free_states();
}

const char* name_of(Fallback passed) noexcept {
  static constexpr std::array<const char*, kFallbacks> names{
      "none", "switched-off", "inter-communicator", "not-shared", "type", "several-nodes"};
  return names[static_cast<size_t>(passed)];
}

}  // namespace nostall::mpi

namespace own = nostall::mpi;

NOSTALL_EXPORT int MPI_Init(int* argc, char*** argv) {
  const int result = PMPI_Init(argc, argv);
  if (result == MPI_SUCCESS) own::state_of(MPI_COMM_WORLD);
  return result;
}

NOSTALL_EXPORT int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  const int result = PMPI_Init_thread(argc, argv, required, provided);
  if (result == MPI_SUCCESS) own::state_of(MPI_COMM_WORLD);
  return result;
}

NOSTALL_EXPORT int MPI_Finalize() {
  own::end();
  const int result = PMPI_Finalize();
  own::free_arena();
  return result;
}

NOSTALL_EXPORT int MPI_Allreduce(const void* send, void* receive, int count, MPI_Datatype type,
                                 MPI_Op op, MPI_Comm comm) {
  const auto pass = [&] { return PMPI_Allreduce(send, receive, count, type, op, comm); };
  return count < 0
             ? pass()
             : own::allreduce(send, receive, static_cast<uint64_t>(count), type, op, comm, pass);
}

NOSTALL_EXPORT int MPI_Reduce(const void* send, void* receive, int count, MPI_Datatype type,
                              MPI_Op op, int root, MPI_Comm comm) {
  const auto pass = [&] { return PMPI_Reduce(send, receive, count, type, op, root, comm); };
  return count < 0
             ? pass()
             : own::reduce(send, receive, static_cast<uint64_t>(count), type, op, root, comm, pass);
}

NOSTALL_EXPORT int MPI_Bcast(void* buffer, int count, MPI_Datatype type, int root, MPI_Comm comm) {
  const auto pass = [&] { return PMPI_Bcast(buffer, count, type, root, comm); };
  return count < 0 ? pass()
                   : own::bcast(buffer, static_cast<uint64_t>(count), type, root, comm, pass);
}

NOSTALL_EXPORT int MPI_Barrier(MPI_Comm comm) { return own::barrier(comm); }

#if MPI_VERSION >= 4
NOSTALL_EXPORT int MPI_Allreduce_c(const void* send, void* receive, MPI_Count count,
                                   MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  const auto pass = [&] { return PMPI_Allreduce_c(send, receive, count, type, op, comm); };
  return count < 0
             ? pass()
             : own::allreduce(send, receive, static_cast<uint64_t>(count), type, op, comm, pass);
}
NOSTALL_EXPORT int MPI_Reduce_c(const void* send, void* receive, MPI_Count count, MPI_Datatype type,
                                MPI_Op op, int root, MPI_Comm comm) {
  const auto pass = [&] { return PMPI_Reduce_c(send, receive, count, type, op, root, comm); };
  return count < 0
             ? pass()
             : own::reduce(send, receive, static_cast<uint64_t>(count), type, op, root, comm, pass);
}
NOSTALL_EXPORT int MPI_Bcast_c(void* buffer, MPI_Count count, MPI_Datatype type, int root,
                               MPI_Comm comm) {
  const auto pass = [&] { return PMPI_Bcast_c(buffer, count, type, root, comm); };
  return count < 0 ? pass()
                   : own::bcast(buffer, static_cast<uint64_t>(count), type, root, comm, pass);
}
#endif

#ifdef NOSTALL_ERR_REVOKED
extern "C" int PMPIX_Comm_revoke(MPI_Comm comm);
// Ranks that wait in shared memory do not see the MPI's notifications.
NOSTALL_EXPORT int MPIX_Comm_revoke(MPI_Comm comm) {
  own::CommunicatorState* state = own::known_state_of(comm);
  if (state != nullptr && state->node) {
    const nostall::Error why(nostall::ErrorKind::stopped, "the communicator was revoked",
                             NOSTALL_ERR_REVOKED);
    state->node->end(why);
    own::notify_other_nodes(*state, why);
  }
  return PMPIX_Comm_revoke(comm);
}
#endif
