// collective/communicator.h - collectives of the ranks of one node over shared memory. Read first.
//
//   Communicator c({.job = "my job", .rank = 1, .ranks = 4});
//   const Reducer sum(Op::sum, DataType::float32);
//   c.allreduce(in, out, 1 << 20, sum);
//
// All ranks call the same operations in the same order with the same counts, types, orders and
// algorithms; a rank that calls something else makes all of them throw, with both calls named. `in` may be `out` (in place);
// buffers that overlap otherwise are refused. Counts are elements, 0 is allowed, and they may
// exceed 2^31.
//
// Arrival: no rank waits for data that is not needed yet. With `cooperative`, ranks that have
// arrived combine their data in segments; after the last arrival only one pass over the last rank's
// data is left. If the buffers of the first rank to arrive come from allocate(), those of all are
// reduced where they are, all ranks sharing the work; a rank that has others copies them there and
// back. If its arena has no room for the copy, the call goes as with ordinary buffers on all ranks.
//
// Order: `fixed` gives a left fold in the order of ranks, the same bits for any arrival order, and
// for predefined and user's operations alike. Where an operation is not commutative ranks are always
// combined in their order, perhaps in other brackets. With `any`, floating-point sums of messages
// beyond kPostedBytes may differ from call to call in their last bits (never between ranks).
//
// Errors: a rank that dies, leaves or does not arrive within the timeout ends the communicator for
// all: every call, on every rank, throws Error(peer) that names it. A rank that waits for other nodes
// on behalf of its own (Elsewhere) is not blamed for them. No rank hangs, and the kernel frees the
// memory when the last process ends.
// Thread-safety: calls of one communicator from several threads take turns. Ranks are processes or
// threads. After a fork the child's calls throw Error(usage).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/error.h"
#include "collective/reducer.h"
#include "collective/types.h"

namespace nostall::collective {

struct CommunicatorConfig {
  std::string job;  // the same for all ranks of this communicator, different for any other
  uint32_t rank = 0;
  uint32_t ranks = 1;                          // 1 to 1023
  uint64_t window_bytes = uint64_t{64} << 20;  // how far early ranks run ahead; two of them
  uint64_t arena_bytes = uint64_t{1} << 30;    // a rank's, for allocate(); only addresses
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);  // of each call, and of joining:
  std::chrono::nanoseconds join_timeout{0};                     // unless this is given
  std::string directory = "/dev/shm";
  std::string selection;  // the text of a table of algorithms (selection.h), the same on all ranks
  // Called now and then by a rank that waits, between its sleeps; an MPI's progress engine needs
  // it.
  std::function<void()> progress;
};

// Up to here every rank reads the data of all others, and the order of sums is that of ranks.
inline constexpr uint64_t kPostedBytes = 4 << 10;

struct CallOptions {
  // cooperative: what the table says for allreduces whose order is free, if there is one.
  Algorithm algorithm = Algorithm::cooperative;
  Order order = Order::any;
};

struct Gathered {
  void* to = nullptr;
  uint64_t bytes = 0;
};

struct CommunicatorStats {
  uint64_t calls = 0;
  uint64_t bytes = 0;       // this rank's input
  uint64_t sleeps = 0;      // waits that outlasted the spin
  int64_t wait_ns = 0;      // in those
  uint64_t imbalanced = 0;  // allreduces whose ranks the table took for imbalanced
};

class Communicator {
 public:
  // Waits for all ranks. Throws Error(peer) when they do not join or have other arguments.
  explicit Communicator(const CommunicatorConfig& config);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  uint32_t rank() const noexcept;
  uint32_t ranks() const noexcept;

  void barrier();
  // out on all ranks = the ranks' `in` combined. All algorithms.
  void allreduce(const void* in, void* out, uint64_t count, const Reducer& reducer,
                 const CallOptions& options = {});
  // As above, on the root only; elsewhere `out` is not touched and may be null. Ranks leave when
  // they have given their part. cooperative, arrival_leader, arrival_chain, leader, binomial.
  void reduce(const void* in, void* out, uint64_t count, const Reducer& reducer, uint32_t root,
              const CallOptions& options = {});
  // cooperative, binomial. `type` of the elements is compared, as all else; ranks that describe the
  // same bytes by different types give none.
  void broadcast(void* data, uint64_t bytes, uint32_t root, const CallOptions& options = {},
                 std::optional<DataType> type = {});
  // `in` holds `count` elements for each rank, `out` gets the combined ones for this rank. It may
  // be `in`, or this rank's block there. One algorithm.
  void reduce_scatter(const void* in, void* out, uint64_t count, const Reducer& reducer,
                      Order order = Order::any);
  // As above, counts[r] for rank r; the same counts on all ranks.
  void reduce_scatterv(const void* in, void* out, std::span<const uint64_t> counts,
                       const Reducer& reducer, Order order = Order::any);
  // `out` holds `bytes` for each rank; `in` may be this rank's part of it.
  void allgather(const void* in, void* out, uint64_t bytes, std::optional<DataType> type = {});
  // parts[r] is where the data of rank r go; their sizes are the same on all ranks, the places need
  // not be. `in`, of this rank's size, may be its own part.
  void allgatherv(const void* in, std::span<const Gathered> parts,
                  std::optional<DataType> type = {});

  // Memory that all ranks reach, page-aligned, until release() or the communicator's end.
  // nullptr if the arena has no room; throws Error(io) if the node has no memory.
  void* allocate(uint64_t bytes);
  // False if `data` is not from allocate() of this rank.
  bool release(void* data) noexcept;

  // Of this rank's next calls. Throws Error(usage) unless it is positive.
  void set_timeout(std::chrono::nanoseconds timeout);

  // `callback` is called once in every wait that lasts longer than `after`, with the ranks that
  // have not arrived, by the thread that waits. 0: never. Between calls.
  void on_late(std::chrono::nanoseconds after,
               std::function<void(std::span<const uint32_t> missing)> callback);

  // Ends the communicator for all its ranks: every call, also of a rank that waits, throws `why`:
  // its text, its number and, if it is usage, peer or stopped, its kind. From any thread, at any
  // time; false if the communicator had ended before.
  bool end(const Error& why) noexcept;
  // As above, but calls that this rank has completed may still end well on the others.
  bool end_from_here(const Error& why) noexcept;
  // Leaves as the destructor does, while memory of allocate() may keep this alive: ranks that still
  // wait for this one get an error that says so. No call of this rank may follow.
  void leave() noexcept;
  // Throws if the communicator has ended, also where that is in a call after the one that this rank is
  // in: who waits for something else meanwhile, such as other nodes, is told at once. From any thread.
  void check() const;
  // Whether it was this rank that ended it, by end() or by an error in a call of its own.
  bool ended_here() const noexcept;

  CommunicatorStats stats() const;

 private:
  friend class Elsewhere;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// While it lives, its rank waits for something outside of the communicator, which the other ranks
// need as well: their timeout begins anew now, at each progress and at the end. They wait a few
// seconds longer than the timeout, so that the error of the rank itself, if it has the same
// timeout, comes first. They may nest. By the thread of the rank's calls.
class Elsewhere {
 public:
  explicit Elsewhere(Communicator& communicator) noexcept;
  ~Elsewhere();
  Elsewhere(const Elsewhere&) = delete;
  Elsewhere& operator=(const Elsewhere&) = delete;
  static void progressed(Communicator& communicator) noexcept;

 private:
  static void mark(Communicator& communicator, int change) noexcept;

  Communicator& communicator_;
};

}  // namespace nostall::collective
