// mpi/mpi_state.h - what libnostall_mpi.so keeps between the calls of an MPI program.
//
// Loaded with LD_PRELOAD into an unmodified program, it answers MPI_Allreduce, MPI_Reduce,
// MPI_Bcast and MPI_Barrier from collective/ on communicators within a node, and in two levels on
// others, and their nonblocking forms within a node (nonblocking.h); within a node it answers
// MPI_Allgather and MPI_Allgatherv too (gathers.cc), and MPI_Reduce_scatter and
// MPI_Reduce_scatter_block (scatters.cc). MPI_Alloc_mem gives memory in which allreduces of
// MPI_COMM_WORLD need no copy. All else reaches the MPI untouched. NOSTALL_MPI chooses: "replace"
// (the default), "off"; with NOSTALL_MPI_PROFILE=DIRECTORY every collective is recorded
// (profile.cc), those that the MPI always answers too (recorded.cc).
//
// Whether a call is ours must come out the same on every rank without asking: it depends only on
// what MPI requires to be the same everywhere (communicator, operation, type signature), never on a
// buffer.
// Thread-safety: as the MPI's; several threads may call on different communicators.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "calls.h"
#include "collective/communicator.h"
#include "nonblocking.h"

// MPI's fault tolerance, in the MPIs that have it.
#if defined(MPI_ERR_REVOKED)
#define NOSTALL_ERR_REVOKED MPI_ERR_REVOKED
#elif defined(MPIX_ERR_REVOKED)
#define NOSTALL_ERR_REVOKED MPIX_ERR_REVOKED
#endif

namespace nostall::mpi {

// A communicator of the program, as we see it; one attribute on it holds this.
struct CommunicatorState {
  int rank = 0, ranks = 1;  // between two groups: the rank in its own, and the ranks of both
  uint32_t id = 0;          // in the order of first use on this rank
  uint64_t name = 0;        // the same on all its ranks, different for any other
  Fallback passed = Fallback::no;
  bool recorded = false;                           // it is in the profile
  std::shared_ptr<collective::Communicator> node;  // its ranks on this node
  std::shared_ptr<Queue> queue;                    // of nonblocking calls; at the first one
  int64_t timeout_ns = 0;                          // its timeout
  int node_rank = 0, node_ranks = 1;
  bool one_node = true;
  bool background = false;           // all its ranks let threads call the MPI (nonblocking.h)
  MPI_Comm comm = MPI_COMM_NULL;     // the program's, while it exists
  MPI_Comm leaders = MPI_COMM_NULL;  // node rank 0 of every node; null on the others
  // Of all ranks where there are several nodes: that it has ended (between.h).
  MPI_Comm notices = MPI_COMM_NULL;
  std::atomic<bool> notified{false};  // this rank has notified the other nodes, or was notified
  bool keeps_leaders = false;         // the MPI still works there, for a call that failed
  std::vector<int> node_of;           // of every rank, where there are several
  std::vector<int> node_rank_of;
  ~CommunicatorState();
};

// The state of a communicator; made at its first collective call, in which all its ranks take part.
// Null before MPI_Init and from MPI_Finalize on, also in what that calls (attributes of MPI_COMM_SELF),
// and where the MPI failed meanwhile: a revoked one.
CommunicatorState* state_of(MPI_Comm comm);
// The same, but null where none was made yet; other ranks need not be in a call. Whether one was
// made is the same on all ranks, since all make the same calls. (Not of a session's, if a thread calls
// on that while another is in MPI_Init.)
CommunicatorState* known_state_of(MPI_Comm comm);
// Whose memory MPI_Alloc_mem gives; null where the MPI does.
collective::Communicator* arena() noexcept;
// When the state of MPI_COMM_WORLD was made, by all its ranks: after MPI_Init, which is collective as
// MPI_Alloc_mem is not, or at the first collective where another library answers MPI_Init.
void begin();
// At MPI_Finalize, whoever answers that; once.
void end();
// The class of error that a peer's or the program's own error carries as its number, else
// MPI_ERR_OTHER.
int class_of(const Error& error) noexcept;
// What a call that failed returns, after the error handler. Says why on standard error unless the
// program stopped it.
int fail(MPI_Comm comm, const Error& error);
// The part of end() that frees what is kept but the arena.
void free_states();
// After MPI_Finalize, which calls what the program has to do at its end.
void free_arena() noexcept;

}  // namespace nostall::mpi
