// MPI_Allgather and MPI_Allgatherv, which are answered here on communicators within a node.
#include <algorithm>
#include <new>
#include <vector>

#include "base/error.h"
#include "device_memory.h"
#include "traced.h"

namespace nostall::mpi {
namespace {

// What an allgather does with its buffers. Ranks may describe the same bytes by different types, so
// every type is ours: one that is not contiguous is packed first, and unpacked at the end.
struct Gathering {
  const void* send = nullptr;  // MPI_IN_PLACE: this rank's part of `receive`
  uint64_t count = 0;          // of `from`
  MPI_Datatype from = MPI_DATATYPE_NULL;
  void* receive = nullptr;
  MPI_Datatype to = MPI_DATATYPE_NULL;
  std::vector<uint64_t> counts{};  // of each rank, of `to`
  std::vector<MPI_Aint> places{};  // in elements of `to`
  bool equal = false;              // MPI_Allgather
};

std::byte* place_of(const Gathering& call, size_t rank) {
  MPI_Aint begin = 0, extent = 0;
  PMPI_Type_get_extent(call.to, &begin, &extent);
  return static_cast<std::byte*>(call.receive) + call.places[rank] * extent;
}

// Where the data go: to their places, or one after the other to memory that is unpacked later.
std::vector<collective::Gathered> parts_of(const Gathering& call, std::vector<std::byte>& packed) {
  uint64_t all = 0;
  std::vector<collective::Gathered> parts;
  for (size_t r = 0; r < call.counts.size(); ++r) {
    parts.push_back({place_of(call, r), bytes_of(call.counts[r], call.to)});
    all += parts.back().bytes;
  }
  if (is_contiguous(call.to)) return parts;
  packed.resize(all);
  std::byte* at = packed.data();
  for (collective::Gathered& part : parts) {
    part.to = at;
    at += part.bytes;
  }
  return parts;
}

void unpack(const Gathering& call, std::span<const collective::Gathered> parts) {
  for (size_t r = 0; r < parts.size(); ++r) {
    int position = 0;
    if (parts[r].bytes == 0) continue;
    PMPI_Unpack(parts[r].to, static_cast<int>(parts[r].bytes), &position, place_of(call, r),
                static_cast<int>(call.counts[r]), call.to, MPI_COMM_SELF);
  }
}

void gather(CommunicatorState& state, const Gathering& call, MPI_Comm comm) {
  const auto rank = static_cast<size_t>(state.rank);
  std::vector<std::byte> packed, apart;
  const std::vector<collective::Gathered> parts = parts_of(call, packed);
  const uint64_t mine = parts[rank].bytes;
  const bool in_place = call.send == MPI_IN_PLACE;
  if (!in_place && bytes_of(call.count, call.from) != mine) {
    const Error why(ErrorKind::usage, "rank " + std::to_string(rank) + " gives " +
                                          std::to_string(bytes_of(call.count, call.from)) +
                                          " bytes to an allgather that has " +
                                          std::to_string(mine) + " of it; make both the same");
    state.node->end_from_here(why);
    throw why;
  }
  Packed own(in_place ? place_of(call, rank) : const_cast<void*>(call.send),
             in_place ? call.counts[rank] : call.count, in_place ? call.to : call.from, comm, true);
  const auto* in = static_cast<const std::byte*>(own.get());
  const bool overlaps =
      in != parts[rank].to && std::any_of(parts.begin(), parts.end(), [&](auto& part) {
        const auto x = reinterpret_cast<uintptr_t>(in), y = reinterpret_cast<uintptr_t>(part.to);
        return x < y + part.bytes && y < x + mine;
      });
  if (overlaps) {
    apart.assign(in, in + mine);
    in = apart.data();
  }
  if (call.equal) {
    state.node->allgather(in, parts.front().to, mine);
  } else {
    state.node->allgatherv(in, parts);
  }
  if (!packed.empty()) unpack(call, parts);
}

// `fill` gives the counts and places of so many ranks.
template <typename Fill, typename Pass>
int answer(Gathering call, MPI_Comm comm, Fill fill, Pass pass) {
  constexpr uint64_t kMost = 0x7fffffff;
  const Call kind = call.equal ? Call::allgather : Call::allgatherv;
  const uint64_t arrived = profiling() ? ticks() : 0;
  CommunicatorState* state = state_of(comm);
  const bool ours = state != nullptr && state->passed == Fallback::no;
  if (state != nullptr && state->passed != Fallback::inter_communicator) {
    fill(call, static_cast<size_t>(state->ranks));
    if (call.send == MPI_IN_PLACE) {
      call.count = call.counts[static_cast<size_t>(state->rank)];
    }
  }
  Traced traced(kind, call.count, arrived);
  if (!ours) {
    return traced.passed(state, state ? state->passed : Fallback::no, call.from, pass());
  }
  if (state->queue) state->queue->drain();
  listen(*state);
  if (!state->one_node) return traced.passed(state, Fallback::multi_node, call.from, pass());
  uint64_t all = 0;
  for (const uint64_t count : call.counts) {
    const uint64_t bytes = bytes_of(count, call.to);
    if (bytes > kMost) return traced.passed(state, Fallback::type, call.from, pass());
    all += bytes;
  }
  const uint64_t mine = bytes_of(call.count, call.from);
  if (const auto why = device_error(*state, {{call.send, mine}, {call.receive, all}})) {
    return failed(*state, comm, *why);
  }
  try {
    gather(*state, call, comm);
  } catch (const Error& error) {
    return failed(*state, comm, error);
  } catch (const std::bad_alloc&) {
    return failed_without_memory(*state, comm);
  }
  return traced.ours(state, mine);
}

// Arguments that are errors; the MPI says so.
template <typename Count>
bool wrong(const void* send, Count count, MPI_Datatype from, MPI_Datatype to) {
  return to == MPI_DATATYPE_NULL ||
         (send != MPI_IN_PLACE && (count < 0 || from == MPI_DATATYPE_NULL));
}

template <typename Count>
Gathering begun(const void* send, Count in, MPI_Datatype from, void* receive, MPI_Datatype to) {
  const bool in_place = send == MPI_IN_PLACE;
  return {.send = send,
          .count = in_place ? 0 : static_cast<uint64_t>(in),
          .from = in_place ? to : from,
          .receive = receive,
          .to = to};
}

template <typename Count, typename Pass>
int allgather(const void* send, Count in, MPI_Datatype from, void* receive, Count out,
              MPI_Datatype to, MPI_Comm comm, Pass pass) {
  if (wrong(send, in, from, to) || out < 0) return pass();
  Gathering call = begun(send, in, from, receive, to);
  call.equal = true;
  const auto fill = [out](Gathering& all, size_t ranks) {
    all.counts.assign(ranks, static_cast<uint64_t>(out));
    for (size_t r = 0; r < ranks; ++r) {
      all.places.push_back(static_cast<MPI_Aint>(r) * static_cast<MPI_Aint>(out));
    }
  };
  return answer(std::move(call), comm, fill, pass);
}

template <typename Count, typename Place, typename Pass>
int allgatherv(const void* send, Count in, MPI_Datatype from, void* receive, const Count* out,
               const Place* places, MPI_Datatype to, MPI_Comm comm, Pass pass) {
  if (wrong(send, in, from, to) || out == nullptr || places == nullptr) return pass();
  Gathering call = begun(send, in, from, receive, to);
  const auto fill = [out, places](Gathering& all, size_t ranks) {
    all.counts.assign(out, out + ranks);
    all.places.assign(places, places + ranks);
  };
  return answer(std::move(call), comm, fill, pass);
}

}  // namespace
}  // namespace nostall::mpi

namespace own = nostall::mpi;

#define NOSTALL_GATHERS(S, Count, Place)                                                          \
  NOSTALL_EXPORT int MPI_Allgather##S(const void* send, Count in, MPI_Datatype from,              \
                                      void* receive, Count out, MPI_Datatype to, MPI_Comm comm) { \
    return own::allgather(send, in, from, receive, out, to, comm, [&] {                           \
      return PMPI_Allgather##S(send, in, from, receive, out, to, comm);                           \
    });                                                                                           \
  }                                                                                               \
  NOSTALL_EXPORT int MPI_Allgatherv##S(const void* send, Count in, MPI_Datatype from,             \
                                       void* receive, const Count* out, const Place* places,      \
                                       MPI_Datatype to, MPI_Comm comm) {                          \
    return own::allgatherv(send, in, from, receive, out, places, to, comm, [&] {                  \
      return PMPI_Allgatherv##S(send, in, from, receive, out, places, to, comm);                  \
    });                                                                                           \
  }

NOSTALL_GATHERS(, int, int)
#if MPI_VERSION >= 4
NOSTALL_GATHERS(_c, MPI_Count, MPI_Aint)
#endif
