// mpi/between.h - what the local leaders of nodes do among each other, and how all ranks learn that
// it failed.
//
// They run the MPI's nonblocking operations on CommunicatorState::leaders and look around while
// these last. An error there ends the node's communicator, so that its ranks, which wait in shared
// memory, return the same class of error.
//
// A communicator that has ended on one node, by such an error, by one of its ranks or by the
// program (MPIX_Comm_revoke), ends on all: the rank that ended it notifies those of the other nodes
// by a message on CommunicatorState::notices, for which a rank looks at the beginning of each call
// and, every few milliseconds, while it waits. No fault tolerance of the MPI is needed for that;
// if the MPI has its own flag for a revoked communicator, that is read too.
// Thread-safety: as calls of the MPI on one communicator, but for notify_other_nodes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "mpi_state.h"

namespace nostall::mpi {

// Ends the node's communicator if another node has ended its own. For one that waits or begins.
void listen(CommunicatorState& state) noexcept;
// Whether any node is known to have ended it.
bool has_ended(CommunicatorState& state) noexcept;
// Notifies the other nodes, if it was this rank that ended its node's communicator. From any
// thread.
void notify_other_nodes(CommunicatorState& state, const Error& why) noexcept;
// Ends the node's communicator and throws if `result`, of the MPI between nodes, is an error.
void check_between(CommunicatorState& state, const char* operation, int result);

// For a local leader that waits for other nodes (collective::Elsewhere): listens, and throws if the
// node's communicator has ended. Times out before the other ranks of the node, which wait for this
// one. A look at the clock in most calls.
class Lookout {
 public:
  Lookout(CommunicatorState& state, const char* operation);
  void look();
  // The wait begins anew: something was received, or this rank did something else.
  void restart();

 private:
  CommunicatorState& state_;
  const char* const operation_;
  int64_t began_, next_;
};

// Memory that the MPI may still write, for as long as the process lasts.
void keep(std::shared_ptr<void> memory);

// Requests that end, or are given up where the call fails: the MPI may still write their buffers,
// and CommunicatorState::keeps_leaders says so.
void give_up(CommunicatorState& state, std::vector<MPI_Request>& requests) noexcept;

// Made after a call's own buffer and before its operations: keeps the buffer if these are given up.
class Outlast {
 public:
  Outlast(const CommunicatorState& state, std::vector<std::byte>& memory)
      : state_(state), before_(state.keeps_leaders), memory_(memory) {}
  ~Outlast() {
    if (state_.keeps_leaders == before_ || memory_.empty()) return;
    keep(std::make_shared<std::vector<std::byte>>(std::move(memory_)));
  }
  Outlast(const Outlast&) = delete;
  Outlast& operator=(const Outlast&) = delete;

 private:
  const CommunicatorState& state_;
  const bool before_;
  std::vector<std::byte>& memory_;
};

// Nonblocking operations among the first ranks.
class LeaderRequests {
 public:
  LeaderRequests(CommunicatorState& state, const char* operation)
      : state_(state), operation_(operation) {}
  ~LeaderRequests() { give_up(state_, requests_); }
  LeaderRequests(const LeaderRequests&) = delete;
  LeaderRequests& operator=(const LeaderRequests&) = delete;

  // `start(request)` calls the MPI; not on a communicator that has ended.
  template <typename Start>
  void start(Start start) {
    state_.node->check();
    check_between(state_, operation_, start(&requests_.emplace_back(MPI_REQUEST_NULL)));
  }
  // The index-th that was started.
  void wait(size_t index);

 private:
  CommunicatorState& state_;
  const char* const operation_;
  std::vector<MPI_Request> requests_;
};

}  // namespace nostall::mpi
