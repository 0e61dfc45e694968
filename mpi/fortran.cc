// The entry points of Fortran programs whose Fortran libraries go past MPI_Allreduce and the like,
// to PMPI_Allreduce: what wrappers.cc answers would never see those calls.
//
// Open MPI's all do. mpif.h and `use mpi` call mpi_allreduce_ (and its other manglings),
// `use mpi_f08` calls ompi_allreduce_f with the same arguments; here all go to the functions that C
// programs call. Of MPICH's only those of `use mpi_f08` that have no buffer do.
#include <dlfcn.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <vector>

#include "wrappers.h"

namespace {

using Fint = MPI_Fint;

void answer(Fint* error, int result) {
  if (error != nullptr) *error = result;
}

void started(Fint* request, Fint* error, int result, MPI_Request made) {
  if (result == MPI_SUCCESS) *request = PMPI_Request_c2f(made);
  answer(error, result);
}

}  // namespace

#ifdef OPEN_MPI

// One function under all the names that Fortran compilers give it.
#define NOSTALL_ALIAS(name, of, ...) \
  NOSTALL_EXPORT void name(__VA_ARGS__) __attribute__((alias(#of)))
#define NOSTALL_FORTRAN(lower, UPPER, ...)                       \
  NOSTALL_ALIAS(mpi_##lower, ompi_##lower##_f, __VA_ARGS__);     \
  NOSTALL_ALIAS(mpi_##lower##_, ompi_##lower##_f, __VA_ARGS__);  \
  NOSTALL_ALIAS(mpi_##lower##__, ompi_##lower##_f, __VA_ARGS__); \
  NOSTALL_ALIAS(MPI_##UPPER, ompi_##lower##_f, __VA_ARGS__)

namespace {

// Fortran's MPI_BOTTOM and MPI_IN_PLACE are variables of the program, by whatever name its compiler
// gives them.
class Sentinel {
 public:
  explicit Sentinel(const std::array<const char*, 4>& names) {
    for (size_t i = 0; i < names.size(); ++i) addresses_[i] = ::dlsym(RTLD_DEFAULT, names[i]);
  }
  bool is(const void* buffer) const {
    for (const void* address : addresses_) {
      if (address != nullptr && address == buffer) return true;
    }
    return false;
  }

 private:
  std::array<const void*, 4> addresses_{};
};

void* buffer_of(void* buffer) {
  static const Sentinel bottom(
      {"mpi_fortran_bottom_", "mpi_fortran_bottom", "mpi_fortran_bottom__", "MPI_FORTRAN_BOTTOM"});
  static const Sentinel in_place({"mpi_fortran_in_place_", "mpi_fortran_in_place",
                                  "mpi_fortran_in_place__", "MPI_FORTRAN_IN_PLACE"});
  if (in_place.is(buffer)) return MPI_IN_PLACE;
  return bottom.is(buffer) ? MPI_BOTTOM : buffer;
}

// Whether the program ignores the statuses.
bool ignored(const Fint* status) {
  static const Sentinel one({"mpi_fortran_status_ignore_", "mpi_fortran_status_ignore",
                             "mpi_fortran_status_ignore__", "MPI_FORTRAN_STATUS_IGNORE"});
  static const Sentinel all({"mpi_fortran_statuses_ignore_", "mpi_fortran_statuses_ignore",
                             "mpi_fortran_statuses_ignore__", "MPI_FORTRAN_STATUSES_IGNORE"});
  return one.is(status) || all.is(status);
}

}  // namespace

NOSTALL_EXPORT void ompi_init_f(Fint* error) { answer(error, MPI_Init(nullptr, nullptr)); }
NOSTALL_FORTRAN(init, INIT, Fint*);

NOSTALL_EXPORT void ompi_init_thread_f(Fint* required, Fint* provided, Fint* error) {
  int level = 0;
  const int result = MPI_Init_thread(nullptr, nullptr, *required, &level);
  if (result == MPI_SUCCESS) *provided = level;
  answer(error, result);
}
NOSTALL_FORTRAN(init_thread, INIT_THREAD, Fint*, Fint*, Fint*);

NOSTALL_EXPORT void ompi_finalize_f(Fint* error) { answer(error, MPI_Finalize()); }
NOSTALL_FORTRAN(finalize, FINALIZE, Fint*);

namespace {

MPI_Datatype type_of(const Fint* type) { return PMPI_Type_f2c(*type); }
MPI_Op op_of(const Fint* op) { return PMPI_Op_f2c(*op); }
MPI_Comm comm_of(const Fint* comm) { return PMPI_Comm_f2c(*comm); }

// A type for each rank that a call names.
std::vector<MPI_Datatype> types_of(const Fint* types, const Fint* comm) {
  int inter = 0, ranks = 0;
  PMPI_Comm_test_inter(comm_of(comm), &inter);
  inter != 0 ? PMPI_Comm_remote_size(comm_of(comm), &ranks) : PMPI_Comm_size(comm_of(comm), &ranks);
  std::vector<MPI_Datatype> all;
  for (int r = 0; r < ranks; ++r) all.push_back(PMPI_Type_f2c(types[r]));
  return all;
}

}  // namespace

// A collective and its nonblocking form, of which both take the same arguments first.
#define NOSTALL_LIST(...) __VA_ARGS__
#define NOSTALL_COLLECTIVE(lower, UPPER, Name, parameters, arguments)                          \
  NOSTALL_EXPORT void ompi_##lower##_f(NOSTALL_LIST parameters, Fint* error) {                 \
    answer(error, MPI_##Name arguments);                                                       \
  }                                                                                            \
  NOSTALL_FORTRAN(lower, UPPER, NOSTALL_LIST parameters, Fint* error);                         \
  NOSTALL_EXPORT void ompi_i##lower##_f(NOSTALL_LIST parameters, Fint* request, Fint* error) { \
    MPI_Request made = MPI_REQUEST_NULL;                                                       \
    const int result = MPI_I##lower(NOSTALL_LIST arguments, &made);                            \
    started(request, error, result, made);                                                     \
  }                                                                                            \
  NOSTALL_FORTRAN(i##lower, I##UPPER, NOSTALL_LIST parameters, Fint* request, Fint* error)

NOSTALL_COLLECTIVE(allreduce, ALLREDUCE, Allreduce,
                   (void* send, void* receive, Fint* count, Fint* type, Fint* op, Fint* comm),
                   (buffer_of(send), buffer_of(receive), *count, type_of(type), op_of(op),
                    comm_of(comm)));
NOSTALL_COLLECTIVE(reduce, REDUCE, Reduce,
                   (void* send, void* receive, Fint* count, Fint* type, Fint* op, Fint* root,
                    Fint* comm),
                   (buffer_of(send), buffer_of(receive), *count, type_of(type), op_of(op), *root,
                    comm_of(comm)));
NOSTALL_COLLECTIVE(bcast, BCAST, Bcast,
                   (void* buffer, Fint* count, Fint* type, Fint* root, Fint* comm),
                   (buffer_of(buffer), *count, type_of(type), *root, comm_of(comm)));
NOSTALL_COLLECTIVE(allgather, ALLGATHER, Allgather,
                   (void* send, Fint* in, Fint* from, void* receive, Fint* out, Fint* to,
                    Fint* comm),
                   (buffer_of(send), *in, type_of(from), buffer_of(receive), *out, type_of(to),
                    comm_of(comm)));
NOSTALL_COLLECTIVE(allgatherv, ALLGATHERV, Allgatherv,
                   (void* send, Fint* in, Fint* from, void* receive, Fint* out, Fint* places,
                    Fint* to, Fint* comm),
                   (buffer_of(send), *in, type_of(from), buffer_of(receive), out, places,
                    type_of(to), comm_of(comm)));
NOSTALL_COLLECTIVE(gather, GATHER, Gather,
                   (void* send, Fint* in, Fint* from, void* receive, Fint* out, Fint* to,
                    Fint* root, Fint* comm),
                   (buffer_of(send), *in, type_of(from), buffer_of(receive), *out, type_of(to),
                    *root, comm_of(comm)));
NOSTALL_COLLECTIVE(gatherv, GATHERV, Gatherv,
                   (void* send, Fint* in, Fint* from, void* receive, Fint* out, Fint* places,
                    Fint* to, Fint* root, Fint* comm),
                   (buffer_of(send), *in, type_of(from), buffer_of(receive), out, places,
                    type_of(to), *root, comm_of(comm)));
NOSTALL_COLLECTIVE(scatter, SCATTER, Scatter,
                   (void* send, Fint* in, Fint* from, void* receive, Fint* out, Fint* to,
                    Fint* root, Fint* comm),
                   (buffer_of(send), *in, type_of(from), buffer_of(receive), *out, type_of(to),
                    *root, comm_of(comm)));
NOSTALL_COLLECTIVE(scatterv, SCATTERV, Scatterv,
                   (void* send, Fint* in, Fint* places, Fint* from, void* receive, Fint* out,
                    Fint* to, Fint* root, Fint* comm),
                   (buffer_of(send), in, places, type_of(from), buffer_of(receive), *out,
                    type_of(to), *root, comm_of(comm)));
NOSTALL_COLLECTIVE(alltoall, ALLTOALL, Alltoall,
                   (void* send, Fint* in, Fint* from, void* receive, Fint* out, Fint* to,
                    Fint* comm),
                   (buffer_of(send), *in, type_of(from), buffer_of(receive), *out, type_of(to),
                    comm_of(comm)));
NOSTALL_COLLECTIVE(alltoallv, ALLTOALLV, Alltoallv,
                   (void* send, Fint* in, Fint* at, Fint* from, void* receive, Fint* out,
                    Fint* places, Fint* to, Fint* comm),
                   (buffer_of(send), in, at, type_of(from), buffer_of(receive), out, places,
                    type_of(to), comm_of(comm)));
NOSTALL_COLLECTIVE(reduce_scatter, REDUCE_SCATTER, Reduce_scatter,
                   (void* send, void* receive, Fint* counts, Fint* type, Fint* op, Fint* comm),
                   (buffer_of(send), buffer_of(receive), counts, type_of(type), op_of(op),
                    comm_of(comm)));
NOSTALL_COLLECTIVE(reduce_scatter_block, REDUCE_SCATTER_BLOCK, Reduce_scatter_block,
                   (void* send, void* receive, Fint* count, Fint* type, Fint* op, Fint* comm),
                   (buffer_of(send), buffer_of(receive), *count, type_of(type), op_of(op),
                    comm_of(comm)));
NOSTALL_COLLECTIVE(scan, SCAN, Scan,
                   (void* send, void* receive, Fint* count, Fint* type, Fint* op, Fint* comm),
                   (buffer_of(send), buffer_of(receive), *count, type_of(type), op_of(op),
                    comm_of(comm)));
NOSTALL_COLLECTIVE(exscan, EXSCAN, Exscan,
                   (void* send, void* receive, Fint* count, Fint* type, Fint* op, Fint* comm),
                   (buffer_of(send), buffer_of(receive), *count, type_of(type), op_of(op),
                    comm_of(comm)));

NOSTALL_EXPORT void ompi_alltoallw_f(void* send, Fint* in, Fint* at, Fint* from, void* receive,
                                     Fint* out, Fint* places, Fint* to, Fint* comm, Fint* error) {
  void* const given = buffer_of(send);
  const auto sent = given == MPI_IN_PLACE ? std::vector<MPI_Datatype>() : types_of(from, comm);
  answer(error, MPI_Alltoallw(given, in, at, sent.data(), buffer_of(receive), out, places,
                              types_of(to, comm).data(), comm_of(comm)));
}
NOSTALL_FORTRAN(alltoallw, ALLTOALLW, void*, Fint*, Fint*, Fint*, void*, Fint*, Fint*, Fint*, Fint*,
                Fint*);

NOSTALL_EXPORT void ompi_barrier_f(Fint* comm, Fint* error) {
  answer(error, MPI_Barrier(PMPI_Comm_f2c(*comm)));
}
NOSTALL_FORTRAN(barrier, BARRIER, Fint*, Fint*);

NOSTALL_EXPORT void ompi_ibarrier_f(Fint* comm, Fint* request, Fint* error) {
  MPI_Request made = MPI_REQUEST_NULL;
  const int result = MPI_Ibarrier(PMPI_Comm_f2c(*comm), &made);
  started(request, error, result, made);
}
NOSTALL_FORTRAN(ibarrier, IBARRIER, Fint*, Fint*, Fint*);

namespace {

// A logical: 1 is true to compilers that look at the lowest bit, and to those that look at all.
Fint logical(int flag) { return flag != 0 ? 1 : 0; }

Fint from_one(int index) { return index == MPI_UNDEFINED ? index : index + 1; }

// What a wait or a test for several requests gets from the program, and gives back.
struct Waited {
  Waited(Fint count, Fint* of)
      : handles(of),
        requests(static_cast<size_t>(count > 0 ? count : 0)),
        statuses(std::max<size_t>(requests.size(), 1)) {
    for (size_t i = 0; i < requests.size(); ++i) requests[i] = PMPI_Request_f2c(of[i]);
  }
  void give_back(Fint* to, Fint ended) {
    constexpr size_t kStatus = sizeof(MPI_Status) / sizeof(int);
    for (size_t i = 0; i < requests.size(); ++i) handles[i] = PMPI_Request_c2f(requests[i]);
    if (ignored(to)) return;
    for (size_t i = 0; static_cast<Fint>(i) < ended; ++i) {
      PMPI_Status_c2f(&statuses[i], to + i * kStatus);
    }
  }

  Fint* const handles;
  std::vector<MPI_Request> requests;
  std::vector<MPI_Status> statuses;  // a call that fails early may leave them
};

}  // namespace

NOSTALL_EXPORT void ompi_wait_f(Fint* request, Fint* status, Fint* error) {
  MPI_Request waited = PMPI_Request_f2c(*request);
  MPI_Status ended{};  // a wait that fails early may leave it
  const int result = MPI_Wait(&waited, &ended);
  *request = PMPI_Request_c2f(waited);
  if (!ignored(status)) PMPI_Status_c2f(&ended, status);
  answer(error, result);
}
NOSTALL_FORTRAN(wait, WAIT, Fint*, Fint*, Fint*);

NOSTALL_EXPORT void ompi_test_f(Fint* request, Fint* flag, Fint* status, Fint* error) {
  MPI_Request tested = PMPI_Request_f2c(*request);
  MPI_Status ended{};
  int done = 0;
  const int result = MPI_Test(&tested, &done, &ended);
  *request = PMPI_Request_c2f(tested);
  *flag = logical(done);
  if (done != 0 && !ignored(status)) PMPI_Status_c2f(&ended, status);
  answer(error, result);
}
NOSTALL_FORTRAN(test, TEST, Fint*, Fint*, Fint*, Fint*);

NOSTALL_EXPORT void ompi_waitall_f(Fint* count, Fint* requests, Fint* statuses, Fint* error) {
  Waited waited(*count, requests);
  const int result = MPI_Waitall(*count, waited.requests.data(), waited.statuses.data());
  waited.give_back(statuses, *count);
  answer(error, result);
}
NOSTALL_FORTRAN(waitall, WAITALL, Fint*, Fint*, Fint*, Fint*);

NOSTALL_EXPORT void ompi_testall_f(Fint* count, Fint* requests, Fint* flag, Fint* statuses,
                                   Fint* error) {
  Waited waited(*count, requests);
  int done = 0;
  const int result = MPI_Testall(*count, waited.requests.data(), &done, waited.statuses.data());
  waited.give_back(statuses, done != 0 ? *count : 0);
  *flag = logical(done);
  answer(error, result);
}
NOSTALL_FORTRAN(testall, TESTALL, Fint*, Fint*, Fint*, Fint*, Fint*);

NOSTALL_EXPORT void ompi_waitany_f(Fint* count, Fint* requests, Fint* index, Fint* status,
                                   Fint* error) {
  Waited waited(*count, requests);
  int which = MPI_UNDEFINED;
  const int result = MPI_Waitany(*count, waited.requests.data(), &which, waited.statuses.data());
  waited.give_back(status, 1);
  *index = from_one(which);
  answer(error, result);
}
NOSTALL_FORTRAN(waitany, WAITANY, Fint*, Fint*, Fint*, Fint*, Fint*);

NOSTALL_EXPORT void ompi_testany_f(Fint* count, Fint* requests, Fint* index, Fint* flag,
                                   Fint* status, Fint* error) {
  Waited waited(*count, requests);
  int which = MPI_UNDEFINED, done = 0;
  const int result =
      MPI_Testany(*count, waited.requests.data(), &which, &done, waited.statuses.data());
  waited.give_back(status, done != 0 ? 1 : 0);
  *index = from_one(which);
  *flag = logical(done);
  answer(error, result);
}
NOSTALL_FORTRAN(testany, TESTANY, Fint*, Fint*, Fint*, Fint*, Fint*, Fint*);

#define NOSTALL_SOME(lower, UPPER, Name)                                                       \
  NOSTALL_EXPORT void ompi_##lower##_f(Fint* count, Fint* requests, Fint* done, Fint* indices, \
                                       Fint* statuses, Fint* error) {                          \
    Waited waited(*count, requests);                                                           \
    int some = 0;                                                                              \
    const int result =                                                                         \
        MPI_##Name(*count, waited.requests.data(), &some, indices, waited.statuses.data());    \
    waited.give_back(statuses, some);                                                          \
    for (Fint i = 0; i < some; ++i) indices[i] = from_one(indices[i]);                         \
    *done = some;                                                                              \
    answer(error, result);                                                                     \
  }                                                                                            \
  NOSTALL_FORTRAN(lower, UPPER, Fint*, Fint*, Fint*, Fint*, Fint*, Fint*)

NOSTALL_SOME(waitsome, WAITSOME, Waitsome);
NOSTALL_SOME(testsome, TESTSOME, Testsome);

// Memory from a C function may be freed here, and the other way round.
NOSTALL_EXPORT void ompi_alloc_mem_f(MPI_Aint* size, Fint* info, void* base, Fint* error) {
  answer(error, MPI_Alloc_mem(*size, PMPI_Info_f2c(*info), base));
}
NOSTALL_FORTRAN(alloc_mem, ALLOC_MEM, MPI_Aint*, Fint*, void*, Fint*);
NOSTALL_ALIAS(ompi_alloc_mem_cptr_f, ompi_alloc_mem_f, MPI_Aint*, Fint*, void*, Fint*);
NOSTALL_ALIAS(mpi_alloc_mem_cptr, ompi_alloc_mem_f, MPI_Aint*, Fint*, void*, Fint*);
NOSTALL_ALIAS(mpi_alloc_mem_cptr_, ompi_alloc_mem_f, MPI_Aint*, Fint*, void*, Fint*);
NOSTALL_ALIAS(mpi_alloc_mem_cptr__, ompi_alloc_mem_f, MPI_Aint*, Fint*, void*, Fint*);
NOSTALL_ALIAS(MPI_ALLOC_MEM_CPTR, ompi_alloc_mem_f, MPI_Aint*, Fint*, void*, Fint*);

NOSTALL_EXPORT void ompi_free_mem_f(void* base, Fint* error) { answer(error, MPI_Free_mem(base)); }
NOSTALL_FORTRAN(free_mem, FREE_MEM, void*, Fint*);

#elif defined(MPICH)

namespace {

// The MPI's own entry point, which prepares what its others need.
template <typename... Arguments>
void hand_on(const char* name, Arguments... arguments) {
  using Function = void (*)(Arguments...);
  if (void* next = ::dlsym(RTLD_NEXT, name)) reinterpret_cast<Function>(next)(arguments...);
}

}  // namespace

NOSTALL_EXPORT void mpi_init_f08_(Fint* error) {
  Fint result = MPI_SUCCESS;
  hand_on("mpi_init_f08_", &result);
  if (result == MPI_SUCCESS) nostall::mpi::state_of(MPI_COMM_WORLD);
  answer(error, result);
}
NOSTALL_EXPORT void mpi_init_thread_f08_(Fint* required, Fint* provided, Fint* error) {
  Fint result = MPI_SUCCESS;
  hand_on("mpi_init_thread_f08_", required, provided, &result);
  if (result == MPI_SUCCESS) nostall::mpi::state_of(MPI_COMM_WORLD);
  answer(error, result);
}
NOSTALL_EXPORT void mpi_finalize_f08_(Fint* error) { answer(error, MPI_Finalize()); }
NOSTALL_EXPORT void mpi_barrier_f08_(Fint* comm, Fint* error) {
  answer(error, MPI_Barrier(PMPI_Comm_f2c(*comm)));
}
NOSTALL_EXPORT void mpi_ibarrier_f08_(Fint* comm, Fint* request, Fint* error) {
  MPI_Request made = MPI_REQUEST_NULL;
  const int result = MPI_Ibarrier(PMPI_Comm_f2c(*comm), &made);
  started(request, error, result, made);
}

#endif
