// The collectives that the MPI always answers, of allgathers and reduce_scatters the nonblocking
// ones. They stand here so that a profile has them; without one they cost a comparison.
//
// Bytes of a call are what this rank gives: to all others together where it gives each its own
// part (alltoall), and what it receives where the root alone gives (scatter).
#include "profile.h"
#include "wrappers.h"

namespace nostall::mpi {
namespace {

struct Given {
  uint64_t count = 0, bytes = 0;
};

template <typename Count>
Given given(Count count, MPI_Datatype type, int times = 1) {
  if (count < 0 || type == MPI_DATATYPE_NULL) return {};  // an error; the MPI says so
  const uint64_t all = static_cast<uint64_t>(count) * static_cast<uint64_t>(times);
  return {all, bytes_of(all, type)};
}

int ranks_of(MPI_Comm comm) {
  int ranks = 0;
  PMPI_Comm_size(comm, &ranks);
  return ranks;
}

int rank_of(MPI_Comm comm) {
  int rank = 0;
  PMPI_Comm_rank(comm, &rank);
  return rank;
}

template <typename Count>
Given sum(const Count* counts, MPI_Datatype type, MPI_Comm comm) {
  Given all;
  for (int r = 0, ranks = ranks_of(comm); counts != nullptr && r < ranks; ++r) {
    const Given one = given(counts[r], type);
    all.count += one.count;
    all.bytes += one.bytes;
  }
  return all;
}

template <typename Count>
Given sum(const Count* counts, const MPI_Datatype* types, MPI_Comm comm) {
  Given all;
  for (int r = 0, ranks = ranks_of(comm); counts != nullptr && r < ranks; ++r) {
    const Given one = given(counts[r], types[r]);
    all.count += one.count;
    all.bytes += one.bytes;
  }
  return all;
}

// What a call that returned `result` gave. Of one that failed the arguments may be anything, and of
// one between two groups those that matter depend on the side.
template <typename Size>
Given given_by(int result, MPI_Comm comm, Size size) {
  int inter = 0;
  if (result != MPI_SUCCESS) return {};
  PMPI_Comm_test_inter(comm, &inter);
  return inter != 0 ? Given{} : size();
}

template <typename Size, typename Pass>
int recorded(Call call, MPI_Comm comm, Size size, Pass pass) {
  if (!profiling()) return pass();
  const uint64_t arrived = ticks();
  CommunicatorState* state = state_of(comm);
  const int result = pass();
  const uint64_t left = ticks();
  const Given mine = given_by(result, comm, size);
  record(call, state, mine.count, mine.bytes, arrived, false, left);
  return result;
}

template <typename Size, typename Pass>
int started(Call call, MPI_Comm comm, Size size, MPI_Request* request, Pass pass) {
  if (!profiling()) return pass();
  const Begun begun(call, comm);
  const int result = pass();
  const Given mine = given_by(result, comm, size);
  begun.record(mine.count, mine.bytes, false, result == MPI_SUCCESS ? *request : MPI_REQUEST_NULL);
  return result;
}

}  // namespace
}  // namespace nostall::mpi

namespace own = nostall::mpi;

// A collective and its nonblocking form. `size` is an expression over the parameters.
#define NOSTALL_LIST(...) __VA_ARGS__
#define NOSTALL_RECORDED(Name, Iname, call, size, parameters, arguments)                     \
  NOSTALL_EXPORT int MPI_##Name(NOSTALL_LIST parameters) {                                   \
    return own::recorded(                                                                    \
        own::Call::call, comm, [&] { return size; }, [&] { return PMPI_##Name arguments; }); \
  }                                                                                          \
  NOSTALL_STARTED(Iname, call, size, parameters, arguments)
#define NOSTALL_STARTED(Iname, call, size, parameters, arguments)                 \
  NOSTALL_EXPORT int MPI_##Iname(NOSTALL_LIST parameters, MPI_Request* request) { \
    return own::started(                                                          \
        own::Call::call, comm, [&] { return size; }, request,                     \
        [&] { return PMPI_##Iname(NOSTALL_LIST arguments, request); });           \
  }

// All of them, with counts and displacements of one type each; S is the suffix of their names.
#define NOSTALL_RECORDED_ALL(S, Count, Place)                                                      \
  NOSTALL_STARTED(Iallgather##S, allgather,                                                        \
                  (send == MPI_IN_PLACE ? own::given(out, to) : own::given(in, from)),             \
                  (const void* send, Count in, MPI_Datatype from, void* receive, Count out,        \
                   MPI_Datatype to, MPI_Comm comm),                                                \
                  (send, in, from, receive, out, to, comm))                                        \
  NOSTALL_STARTED(                                                                                 \
      Iallgatherv##S, allgatherv,                                                                  \
      (send == MPI_IN_PLACE ? own::given(out[own::rank_of(comm)], to) : own::given(in, from)),     \
      (const void* send, Count in, MPI_Datatype from, void* receive, const Count* out,             \
       const Place* places, MPI_Datatype to, MPI_Comm comm),                                       \
      (send, in, from, receive, out, places, to, comm))                                            \
  NOSTALL_RECORDED(Gather##S, Igather##S, gather,                                                  \
                   (send == MPI_IN_PLACE ? own::given(out, to) : own::given(in, from)),            \
                   (const void* send, Count in, MPI_Datatype from, void* receive, Count out,       \
                    MPI_Datatype to, int root, MPI_Comm comm),                                     \
                   (send, in, from, receive, out, to, root, comm))                                 \
  NOSTALL_RECORDED(                                                                                \
      Gatherv##S, Igatherv##S, gatherv,                                                            \
      (send == MPI_IN_PLACE ? own::given(out[own::rank_of(comm)], to) : own::given(in, from)),     \
      (const void* send, Count in, MPI_Datatype from, void* receive, const Count* out,             \
       const Place* places, MPI_Datatype to, int root, MPI_Comm comm),                             \
      (send, in, from, receive, out, places, to, root, comm))                                      \
  NOSTALL_RECORDED(Scatter##S, Iscatter##S, scatter,                                               \
                   (receive == MPI_IN_PLACE ? own::given(in, from) : own::given(out, to)),         \
                   (const void* send, Count in, MPI_Datatype from, void* receive, Count out,       \
                    MPI_Datatype to, int root, MPI_Comm comm),                                     \
                   (send, in, from, receive, out, to, root, comm))                                 \
  NOSTALL_RECORDED(                                                                                \
      Scatterv##S, Iscatterv##S, scatterv,                                                         \
      (receive == MPI_IN_PLACE ? own::given(in[own::rank_of(comm)], from) : own::given(out, to)),  \
      (const void* send, const Count* in, const Place* places, MPI_Datatype from, void* receive,   \
       Count out, MPI_Datatype to, int root, MPI_Comm comm),                                       \
      (send, in, places, from, receive, out, to, root, comm))                                      \
  NOSTALL_RECORDED(Alltoall##S, Ialltoall##S, alltoall,                                            \
                   (send == MPI_IN_PLACE ? own::given(out, to, own::ranks_of(comm))                \
                                         : own::given(in, from, own::ranks_of(comm))),             \
                   (const void* send, Count in, MPI_Datatype from, void* receive, Count out,       \
                    MPI_Datatype to, MPI_Comm comm),                                               \
                   (send, in, from, receive, out, to, comm))                                       \
  NOSTALL_RECORDED(                                                                                \
      Alltoallv##S, Ialltoallv##S, alltoallv,                                                      \
      (send == MPI_IN_PLACE ? own::sum(out, to, comm) : own::sum(in, from, comm)),                 \
      (const void* send, const Count* in, const Place* at, MPI_Datatype from, void* receive,       \
       const Count* out, const Place* places, MPI_Datatype to, MPI_Comm comm),                     \
      (send, in, at, from, receive, out, places, to, comm))                                        \
  NOSTALL_RECORDED(Alltoallw##S, Ialltoallw##S, alltoallw,                                         \
                   (send == MPI_IN_PLACE ? own::sum(out, to, comm) : own::sum(in, from, comm)),    \
                   (const void* send, const Count* in, const Place* at, const MPI_Datatype* from,  \
                    void* receive, const Count* out, const Place* places, const MPI_Datatype* to,  \
                    MPI_Comm comm),                                                                \
                   (send, in, at, from, receive, out, places, to, comm))                           \
  NOSTALL_STARTED(Ireduce_scatter##S, reduce_scatter, own::sum(counts, type, comm),                \
                  (const void* send, void* receive, const Count* counts, MPI_Datatype type,        \
                   MPI_Op op, MPI_Comm comm),                                                      \
                  (send, receive, counts, type, op, comm))                                         \
  NOSTALL_STARTED(                                                                                 \
      Ireduce_scatter_block##S, reduce_scatter_block,                                              \
      own::given(count, type, own::ranks_of(comm)),                                                \
      (const void* send, void* receive, Count count, MPI_Datatype type, MPI_Op op, MPI_Comm comm), \
      (send, receive, count, type, op, comm))                                                      \
  NOSTALL_RECORDED(                                                                                \
      Scan##S, Iscan##S, scan, own::given(count, type),                                            \
      (const void* send, void* receive, Count count, MPI_Datatype type, MPI_Op op, MPI_Comm comm), \
      (send, receive, count, type, op, comm))                                                      \
  NOSTALL_RECORDED(                                                                                \
      Exscan##S, Iexscan##S, exscan, own::given(count, type),                                      \
      (const void* send, void* receive, Count count, MPI_Datatype type, MPI_Op op, MPI_Comm comm), \
      (send, receive, count, type, op, comm))

NOSTALL_RECORDED_ALL(, int, int)
#if MPI_VERSION >= 4
NOSTALL_RECORDED_ALL(_c, MPI_Count, MPI_Aint)
#endif
