// MPI_Reduce_scatter and MPI_Reduce_scatter_block, which are answered here on communicators within a
// node.
#include <algorithm>
#include <new>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "device_memory.h"
#include "traced.h"

namespace nostall::mpi {
namespace {

struct Scattering {
  const void* send = nullptr;  // MPI_IN_PLACE: `receive`, whose beginning gets the result
  void* receive = nullptr;
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op op = MPI_OP_NULL;
  bool equal = false;  // MPI_Reduce_scatter_block
};

void scatter(CommunicatorState& state, const Scattering& call, std::span<const uint64_t> counts,
             uint64_t given, uint64_t got, const collective::Reducer& reducer) {
  const uint64_t mine = counts[static_cast<size_t>(state.rank)];
  const bool in_place = call.send == MPI_IN_PLACE;
  Aligned out(call.receive, in_place ? given : got, reducer.alignment(), in_place);
  Aligned in(in_place ? out.get() : call.send, given, reducer.alignment(), true, out.get(), got);
  if (call.equal) {
    state.node->reduce_scatter(in.get(), out.get(), mine, reducer);
  } else {
    state.node->reduce_scatterv(in.get(), out.get(), counts, reducer);
  }
  out.write_back();
}

// `counts_of` gives the counts of so many ranks.
template <typename CountsOf, typename Pass>
int answer(const Scattering& call, MPI_Comm comm, CountsOf counts_of, Pass pass) {
  const uint64_t arrived = profiling() ? ticks() : 0;
  CommunicatorState* state = state_of(comm);
  std::vector<uint64_t> counts;
  if (state != nullptr && state->passed != Fallback::inter_communicator) {
    counts = counts_of(static_cast<size_t>(state->ranks));
  }
  const uint64_t all = std::accumulate(counts.begin(), counts.end(), uint64_t{0});
  Traced traced(call.equal ? Call::reduce_scatter_block : Call::reduce_scatter, all, arrived);
  if (state == nullptr || state->passed != Fallback::no) {
    return traced.passed(state, state ? state->passed : Fallback::no, call.type, pass());
  }
  if (state->queue) state->queue->drain();
  listen(*state);
  // Negative ones as well, which are errors: the MPI says so.
  constexpr uint64_t kMost = INT64_MAX;
  if (std::any_of(counts.begin(), counts.end(), [](uint64_t count) { return count > kMost; })) {
    return traced.passed(state, Fallback::type, call.type, pass());
  }
  const MpiReducer* reducer = MpiReducer::find(call.type, call.op);
  if (!reducer) return traced.passed(state, Fallback::type, call.type, pass());
  if (!state->one_node) return traced.passed(state, Fallback::multi_node, call.type, pass());
  const uint64_t element = reducer->element_bytes(), given = all * element;
  const uint64_t got = counts[static_cast<size_t>(state->rank)] * element;
  const uint64_t touched = call.send == MPI_IN_PLACE ? given : got;
  if (const auto why = device_error(*state, {{call.send, given}, {call.receive, touched}})) {
    return failed(*state, comm, *why);
  }
  try {
    scatter(*state, call, counts, given, got, reducer->get());
  } catch (const Error& error) {
    return failed(*state, comm, error);
  } catch (const std::bad_alloc&) {
    return failed_without_memory(*state, comm);
  }
  return traced.ours(state, given);
}

template <typename Count, typename Pass>
int reduce_scatter(const Scattering& call, const Count* counts, MPI_Comm comm, Pass pass) {
  if (counts == nullptr || call.type == MPI_DATATYPE_NULL) return pass();  // the MPI says so
  const auto counts_of = [counts](size_t ranks) {
    return std::vector<uint64_t>(counts, counts + ranks);
  };
  return answer(call, comm, counts_of, pass);
}

template <typename Count, typename Pass>
int reduce_scatter_block(Scattering call, Count count, MPI_Comm comm, Pass pass) {
  if (count < 0 || call.type == MPI_DATATYPE_NULL) return pass();
  call.equal = true;
  const auto counts_of = [count](size_t ranks) {
    return std::vector<uint64_t>(ranks, static_cast<uint64_t>(count));
  };
  return answer(call, comm, counts_of, pass);
}

}  // namespace
}  // namespace nostall::mpi

namespace own = nostall::mpi;

#define NOSTALL_SCATTERS(S, Count)                                                               \
  NOSTALL_EXPORT int MPI_Reduce_scatter##S(const void* send, void* receive, const Count* counts, \
                                           MPI_Datatype type, MPI_Op op, MPI_Comm comm) {        \
    return own::reduce_scatter({send, receive, type, op}, counts, comm, [&] {                    \
      return PMPI_Reduce_scatter##S(send, receive, counts, type, op, comm);                      \
    });                                                                                          \
  }                                                                                              \
  NOSTALL_EXPORT int MPI_Reduce_scatter_block##S(const void* send, void* receive, Count count,   \
                                                 MPI_Datatype type, MPI_Op op, MPI_Comm comm) {  \
    return own::reduce_scatter_block({send, receive, type, op}, count, comm, [&] {               \
      return PMPI_Reduce_scatter_block##S(send, receive, count, type, op, comm);                 \
    });                                                                                          \
  }

NOSTALL_SCATTERS(, int)
#if MPI_VERSION >= 4
NOSTALL_SCATTERS(_c, MPI_Count)
#endif
