// What starts now and ends later: nonblocking and persistent calls, and the waits for requests.
#include <new>
#include <utility>

#include "base/error.h"
#include "device_memory.h"
#include "profile.h"
#include "traced.h"
#include "wrappers.h"

namespace nostall::mpi {
namespace {

// The state of a communicator whose nonblocking calls may be ours: decided by what is the same on
// all its ranks.
CommunicatorState* background_state(MPI_Comm comm, uint64_t bytes) {
  CommunicatorState* state = known_state_of(comm);
  const bool ours = state != nullptr && state->passed == Fallback::no && state->one_node &&
                    state->background && bytes >= nonblocking_from() && bytes <= 0x7fffffff;
  return ours ? state : nullptr;
}

int start(CommunicatorState& state, std::function<void()> run, MPI_Request* request) {
  counters().background.fetch_add(1, std::memory_order_relaxed);
  if (!state.queue) state.queue = std::make_shared<Queue>();
  const auto guarded = [run = std::move(run)] {
    try {
      run();
    } catch (const Error& error) {
      return fail(MPI_COMM_WORLD, error);  // its communicator may have been freed
    } catch (const std::bad_alloc&) {
      return fail(MPI_COMM_WORLD, Error(ErrorKind::io, "no memory for a nonblocking collective"));
    }
    return MPI_SUCCESS;
  };
  return state.queue->start(guarded, request);
}

// One nonblocking call: who answers it, and its record.
class Starting {
 public:
  Starting(Call call, uint64_t count, MPI_Datatype type, MPI_Comm comm, MPI_Request* request)
      : begun_(call, comm), count_(count), type_(type), request_(request) {}

  template <typename Pass>
  int left_to_mpi(Pass pass) const {
    counters().nonblocking.fetch_add(1, std::memory_order_relaxed);
    return recorded(pass(), false);
  }
  int ours(CommunicatorState& state, std::function<void()> run) const {
    return recorded(start(state, std::move(run), request_), true);
  }

 private:
  int recorded(int result, bool ours) const {
    if (!profiling()) return result;
    const bool runs = result == MPI_SUCCESS;
    begun_.record(count_, runs ? bytes_of(count_, type_) : 0, ours,
                  runs ? *request_ : MPI_REQUEST_NULL);
    return result;
  }

  const Begun begun_;
  const uint64_t count_;
  const MPI_Datatype type_;
  MPI_Request* const request_;
};

template <typename Pass>
int iallreduce(const void* send, void* receive, uint64_t count, MPI_Datatype type, MPI_Op op,
               MPI_Comm comm, MPI_Request* request, Pass pass) {
  const Starting starting(Call::allreduce, count, type, comm, request);
  CommunicatorState* state = background_state(comm, bytes_of(count, type));
  // A user's operation may not expect to run beside the program.
  const MpiReducer* found = state == nullptr ? nullptr : MpiReducer::find(type, op);
  if (found == nullptr || !found->has_kernel()) return starting.left_to_mpi(pass);
  const collective::Reducer reducer = found->get();
  const uint64_t bytes = count * reducer.element_bytes();
  if (const auto why = device_error(*state, {{send, bytes}, {receive, bytes}})) {
    return failed(*state, comm, *why);
  }
  const bool in_place = send == MPI_IN_PLACE;
  auto out = std::make_shared<Aligned>(receive, bytes, reducer.alignment(), in_place);
  auto in = in_place
                ? out
                : std::make_shared<Aligned>(send, bytes, reducer.alignment(), true, out->get());
  const auto run = [node = state->node.get(), in, out, count, reducer] {
    node->allreduce(in->get(), out->get(), count, reducer);
    out->write_back();
  };
  return starting.ours(*state, run);
}

template <typename Pass>
int ireduce(const void* send, void* receive, uint64_t count, MPI_Datatype type, MPI_Op op, int root,
            MPI_Comm comm, MPI_Request* request, Pass pass) {
  const Starting starting(Call::reduce, count, type, comm, request);
  CommunicatorState* state = background_state(comm, bytes_of(count, type));
  const MpiReducer* found = state == nullptr ? nullptr : MpiReducer::find(type, op);
  if (found == nullptr || !found->has_kernel() || root < 0 || root >= state->ranks) {
    return starting.left_to_mpi(pass);
  }
  const collective::Reducer reducer = found->get();
  const bool is_root = state->rank == root, in_place = send == MPI_IN_PLACE;
  const uint64_t bytes = count * reducer.element_bytes(), written = is_root ? bytes : 0;
  if (const auto why = device_error(*state, {{send, bytes}, {receive, written}})) {
    return failed(*state, comm, *why);
  }
  auto out = std::make_shared<Aligned>(is_root ? receive : nullptr, written, reducer.alignment(),
                                       in_place);
  auto in = in_place
                ? out
                : std::make_shared<Aligned>(send, bytes, reducer.alignment(), true, out->get());
  const auto run = [node = state->node.get(), in, out, count, reducer, root, is_root] {
    node->reduce(in->get(), out->get(), count, reducer, static_cast<uint32_t>(root));
    if (is_root) out->write_back();
  };
  return starting.ours(*state, run);
}

template <typename Pass>
int ibcast(void* buffer, uint64_t count, MPI_Datatype type, int root, MPI_Comm comm,
           MPI_Request* request, Pass pass) {
  const Starting starting(Call::bcast, count, type, comm, request);
  const uint64_t bytes = bytes_of(count, type);
  CommunicatorState* state = background_state(comm, bytes);
  if (state == nullptr || root < 0 || root >= state->ranks || type == MPI_DATATYPE_NULL) {
    return starting.left_to_mpi(pass);
  }
  if (const auto why = device_error(*state, {{buffer, bytes}})) return failed(*state, comm, *why);
  const bool is_root = state->rank == root;
  auto data = std::make_shared<Packed>(buffer, count, type, comm, is_root);
  const auto run = [node = state->node.get(), data, root, is_root] {
    const uint64_t n = data->bytes();
    node->broadcast(n == 0 ? nullptr : data->get(), n, n == 0 ? 0 : static_cast<uint32_t>(root));
    if (!is_root) data->unpack();
  };
  return starting.ours(*state, run);
}

template <typename Pass>
int ibarrier(MPI_Comm comm, MPI_Request* request, Pass pass) {
  const Starting starting(Call::barrier, 0, MPI_BYTE, comm, request);
  CommunicatorState* state = background_state(comm, 0);
  if (state == nullptr) return starting.left_to_mpi(pass);
  return starting.ours(*state, [node = state->node.get()] { node->barrier(); });
}

template <typename Pass>
int persistent(Pass pass) {
  counters().persistent.fetch_add(1, std::memory_order_relaxed);
  return pass();
}

}  // namespace
}  // namespace nostall::mpi

namespace own = nostall::mpi;

NOSTALL_EXPORT int MPI_Iallreduce(const void* send, void* receive, int count, MPI_Datatype type,
                                  MPI_Op op, MPI_Comm comm, MPI_Request* request) {
  const auto pass = [&] { return PMPI_Iallreduce(send, receive, count, type, op, comm, request); };
  return count < 0 ? pass()
                   : own::iallreduce(send, receive, static_cast<uint64_t>(count), type, op, comm,
                                     request, pass);
}
NOSTALL_EXPORT int MPI_Ireduce(const void* send, void* receive, int count, MPI_Datatype type,
                               MPI_Op op, int root, MPI_Comm comm, MPI_Request* request) {
  const auto pass = [&] {
    return PMPI_Ireduce(send, receive, count, type, op, root, comm, request);
  };
  return count < 0 ? pass()
                   : own::ireduce(send, receive, static_cast<uint64_t>(count), type, op, root, comm,
                                  request, pass);
}
NOSTALL_EXPORT int MPI_Ibcast(void* buffer, int count, MPI_Datatype type, int root, MPI_Comm comm,
                              MPI_Request* request) {
  const auto pass = [&] { return PMPI_Ibcast(buffer, count, type, root, comm, request); };
  return count < 0
             ? pass()
             : own::ibcast(buffer, static_cast<uint64_t>(count), type, root, comm, request, pass);
}
NOSTALL_EXPORT int MPI_Ibarrier(MPI_Comm comm, MPI_Request* request) {
  return own::ibarrier(comm, request, [&] { return PMPI_Ibarrier(comm, request); });
}

// A thread that waits for one of ours runs it instead of spinning.
NOSTALL_EXPORT int MPI_Wait(MPI_Request* request, MPI_Status* status) {
  own::Endings endings(1, request);
  own::finish(*request);
  const int result = PMPI_Wait(request, status);
  endings.all_ended();
  return result;
}
NOSTALL_EXPORT int MPI_Waitall(int count, MPI_Request* requests, MPI_Status* statuses) {
  own::Endings endings(count, requests);
  for (int i = 0; i < count; ++i) own::finish(requests[i]);
  const int result = PMPI_Waitall(count, requests, statuses);
  endings.all_ended();
  return result;
}

// The profile alone needs these.
NOSTALL_EXPORT int MPI_Waitany(int count, MPI_Request* requests, int* index, MPI_Status* status) {
  own::Endings endings(count, requests);
  const int result = PMPI_Waitany(count, requests, index, status);
  if (result == MPI_SUCCESS) endings.ended(*index);
  return result;
}
NOSTALL_EXPORT int MPI_Waitsome(int count, MPI_Request* requests, int* done, int* indices,
                                MPI_Status* statuses) {
  own::Endings endings(count, requests);
  const int result = PMPI_Waitsome(count, requests, done, indices, statuses);
  for (int i = 0; result == MPI_SUCCESS && i < *done; ++i) endings.ended(indices[i]);
  return result;
}
NOSTALL_EXPORT int MPI_Test(MPI_Request* request, int* flag, MPI_Status* status) {
  own::Endings endings(1, request);
  const int result = PMPI_Test(request, flag, status);
  if (result == MPI_SUCCESS && *flag != 0) endings.all_ended();
  return result;
}
NOSTALL_EXPORT int MPI_Testall(int count, MPI_Request* requests, int* flag, MPI_Status* statuses) {
  own::Endings endings(count, requests);
  const int result = PMPI_Testall(count, requests, flag, statuses);
  if (result == MPI_SUCCESS && *flag != 0) endings.all_ended();
  return result;
}
NOSTALL_EXPORT int MPI_Testany(int count, MPI_Request* requests, int* index, int* flag,
                               MPI_Status* status) {
  own::Endings endings(count, requests);
  const int result = PMPI_Testany(count, requests, index, flag, status);
  if (result == MPI_SUCCESS && *flag != 0) endings.ended(*index);
  return result;
}
NOSTALL_EXPORT int MPI_Testsome(int count, MPI_Request* requests, int* done, int* indices,
                                MPI_Status* statuses) {
  own::Endings endings(count, requests);
  const int result = PMPI_Testsome(count, requests, done, indices, statuses);
  for (int i = 0; result == MPI_SUCCESS && i < *done; ++i) endings.ended(indices[i]);
  return result;
}

#if MPI_VERSION >= 4
NOSTALL_EXPORT int MPI_Iallreduce_c(const void* send, void* receive, MPI_Count count,
                                    MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                                    MPI_Request* request) {
  const auto pass = [&] {
    return PMPI_Iallreduce_c(send, receive, count, type, op, comm, request);
  };
  return count < 0 ? pass()
                   : own::iallreduce(send, receive, static_cast<uint64_t>(count), type, op, comm,
                                     request, pass);
}
NOSTALL_EXPORT int MPI_Ireduce_c(const void* send, void* receive, MPI_Count count,
                                 MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm,
                                 MPI_Request* request) {
  const auto pass = [&] {
    return PMPI_Ireduce_c(send, receive, count, type, op, root, comm, request);
  };
  return count < 0 ? pass()
                   : own::ireduce(send, receive, static_cast<uint64_t>(count), type, op, root, comm,
                                  request, pass);
}
NOSTALL_EXPORT int MPI_Ibcast_c(void* buffer, MPI_Count count, MPI_Datatype type, int root,
                                MPI_Comm comm, MPI_Request* request) {
  const auto pass = [&] { return PMPI_Ibcast_c(buffer, count, type, root, comm, request); };
  return count < 0
             ? pass()
             : own::ibcast(buffer, static_cast<uint64_t>(count), type, root, comm, request, pass);
}
#endif

// Open MPI has these before the rest of MPI 4.
#if MPI_VERSION >= 4 || (defined(OMPI_MAJOR_VERSION) && OMPI_MAJOR_VERSION >= 5)
NOSTALL_EXPORT int MPI_Allreduce_init(const void* send, void* receive, int count, MPI_Datatype type,
                                      MPI_Op op, MPI_Comm comm, MPI_Info info,
                                      MPI_Request* request) {
  return own::persistent(
      [&] { return PMPI_Allreduce_init(send, receive, count, type, op, comm, info, request); });
}
NOSTALL_EXPORT int MPI_Reduce_init(const void* send, void* receive, int count, MPI_Datatype type,
                                   MPI_Op op, int root, MPI_Comm comm, MPI_Info info,
                                   MPI_Request* request) {
  return own::persistent(
      [&] { return PMPI_Reduce_init(send, receive, count, type, op, root, comm, info, request); });
}
NOSTALL_EXPORT int MPI_Bcast_init(void* buffer, int count, MPI_Datatype type, int root,
                                  MPI_Comm comm, MPI_Info info, MPI_Request* request) {
  return own::persistent(
      [&] { return PMPI_Bcast_init(buffer, count, type, root, comm, info, request); });
}
NOSTALL_EXPORT int MPI_Barrier_init(MPI_Comm comm, MPI_Info info, MPI_Request* request) {
  return own::persistent([&] { return PMPI_Barrier_init(comm, info, request); });
}
#endif
#if MPI_VERSION >= 4
NOSTALL_EXPORT int MPI_Allreduce_init_c(const void* send, void* receive, MPI_Count count,
                                        MPI_Datatype type, MPI_Op op, MPI_Comm comm, MPI_Info info,
                                        MPI_Request* request) {
  return own::persistent(
      [&] { return PMPI_Allreduce_init_c(send, receive, count, type, op, comm, info, request); });
}
NOSTALL_EXPORT int MPI_Reduce_init_c(const void* send, void* receive, MPI_Count count,
                                     MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm,
                                     MPI_Info info, MPI_Request* request) {
  return own::persistent([&] {
    return PMPI_Reduce_init_c(send, receive, count, type, op, root, comm, info, request);
  });
}
NOSTALL_EXPORT int MPI_Bcast_init_c(void* buffer, MPI_Count count, MPI_Datatype type, int root,
                                    MPI_Comm comm, MPI_Info info, MPI_Request* request) {
  return own::persistent(
      [&] { return PMPI_Bcast_init_c(buffer, count, type, root, comm, info, request); });
}
#endif
