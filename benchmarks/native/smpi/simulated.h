// benchmarks/native/smpi/simulated.h - what the simulated collectives stand on: SMPI's messages,
// and the cost of adding up.
//
// SimGrid's SMPI runs all ranks of an MPI program in one process and moves a clock of its own:
// messages take the time that the platform's links need, adding takes bytes over `Costs::add`.
// Times are read by MPI_Wtime(). Thread-safety: simulated ranks take turns; nothing is concurrent.
#pragma once

#include <smpi/mpi.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

#include "collective/node_allreduce.h"
#include "receives.h"

namespace nostall::simulated {

// Bytes per second of one core; with `real` the data is there and is added, else only time passes.
struct Costs {
  double add = 16e9;
  double copy = 16e9;
  bool real = false;
  uint64_t largest = 0;  // message, in bytes
};
Costs& costs();

void charge(double seconds);
// into = a + b, or b where there is no a.
void add_up(float* into, const float* a, const float* b, uint64_t count);

// Memory for one message or part of one. Where only time is kept, all of it is one piece that
// SimGrid maps to a few pages and does not copy.
class Memory {
 public:
  explicit Memory(uint64_t bytes);
  std::byte* get() const noexcept { return data_; }

 private:
  std::vector<std::byte> own_;
  std::byte* data_;
};

// The rank's place in the cluster.
struct Place {
  int rank = 0, ranks = 1, per_node = 1;
  MPI_Comm node = MPI_COMM_NULL;  // the ranks of this node
  MPI_Comm lane = MPI_COMM_NULL;  // the ranks of its local rank, one a node
  int local() const noexcept { return rank % per_node; }
  int nodes() const noexcept { return ranks / per_node; }
  int node_index() const noexcept { return rank / per_node; }
};

// Messages in flight; each that comes is handed on with its cookie. Of those to other nodes a few
// leave at a time, in order, as a network card's queue would let them.
class Mailroom {
 public:
  // `queued`: the receiver is there, so that waiting for it holds nothing up.
  void send(MPI_Comm comm, uint32_t to, uint32_t tag, const void* data, uint64_t bytes,
            bool queued);
  void receive(MPI_Comm comm, uint32_t from, uint32_t tag, void* data, uint64_t bytes,
               uint64_t cookie);
  using Handler = std::function<void(uint64_t cookie, uint64_t bytes)>;
  // Hands on what is there already.
  void look(const Handler& handler);
  // Hands on one message when it comes, or lets one more go.
  void wait(const Handler& handler);
  // Until all that was sent has gone.
  void flush();

 private:
  bool look_once(const Handler& handler);
  struct Letter {
    MPI_Comm comm;
    int to, tag, bytes;
    const void* data;
  };
  static constexpr size_t kAtOnce = 8;
  static void start(const Letter& letter, std::vector<MPI_Request>& requests);
  mpi::Receives receives_;
  std::vector<MPI_Request> sends_, leaving_;
  std::deque<Letter> queue_;
};

// collectives.cc: sums of `count` floats.
struct Tuning {
  uint64_t small = 8 << 10;    // bytes up to which one rank of a node does it all
  uint64_t direct = 12 << 10;  // each node beyond eight costs the direct exchange so many bytes
  uint64_t chunk = 256 << 10;  // bytes that a chunk should have at least,
  uint32_t chunks = 4;         // and how many there are at most
  uint32_t late = 1;           // nodes that own nothing
};
// Ours: the node's ranks add up a part each, NodeAllreduce runs between the nodes for each part,
// the node's ranks hand each other the results; in chunks that overlap. A message that is small for
// so many nodes is halved and doubled between them instead (RSA of each part): log2 of the nodes
// messages a rank, not their number.
void ours_allreduce(const Place& place, const float* in, float* out, uint64_t count,
                    const Tuning& tuning);
// Chapter 6: reduce to the node's first rank, allreduce among those, broadcast, each by the MPI.
void hierarchical_allreduce(const Place& place, const float* in, float* out, uint64_t count,
                            MPI_Op op);

}  // namespace nostall::simulated
