// sync/collectives.h - the collective operations that the engine needs of what connects the ranks.
//
// Two planes: data (fused gradients) and control (a few words, for the modes that negotiate).
// Called by one thread at a time, but for end(), which any thread may call meanwhile. Errors:
// Error(peer) when a rank is gone or too late.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "collective/two_level.h"
#include "collective/types.h"

namespace nostall::sync {

class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual uint32_t rank() const = 0;
  virtual uint32_t ranks() const = 0;

  // Memory in which reductions are cheapest; nullptr: any other will do. Error(io): it is full.
  virtual void* allocate(uint64_t bytes) = 0;
  virtual void release(void* data) noexcept = 0;
  // data = the sum over all ranks, the same bits on every rank.
  virtual void allreduce(void* data, uint64_t count, collective::DataType type) = 0;

  // words = the bitwise and over all ranks.
  virtual void all_and(std::span<uint64_t> words) = 0;
  virtual int64_t all_min(int64_t value) = 0;
  // What each rank gave, on all ranks.
  virtual std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> bytes) = 0;
  // The root's bytes, on all ranks.
  virtual std::vector<std::byte> broadcast(std::span<const std::byte> bytes, uint32_t root) = 0;
  // all_and without waiting: `words` must stay as they are until test() returns true.
  virtual void start_and(std::span<uint64_t> words) = 0;
  virtual bool test() = 0;
  // Ends what ranks of this node wait for in these calls, and all later ones, with this error; and
  // what a rank of another node waits for from this one.
  virtual void end(const Error& why) noexcept = 0;
  // Ends this rank's connections to other nodes: it has failed and comes to no more calls, which those
  // that wait for it there would not learn before it closes them.
  virtual void hang_up() noexcept {}
  // Processor time of threads that these collectives started, nanoseconds.
  virtual int64_t own_cpu_ns() const = 0;
  // Nanoseconds in which calls so far waited for other ranks; 0 where that is not known.
  virtual int64_t waited_ns() const { return 0; }
  // Whether the rank may be missing because it waits for ranks of other nodes.
  virtual bool may_wait_elsewhere(uint32_t /*rank*/) const { return false; }
  // Calls `callback` once in every wait that lasts longer than `after`, with the ranks that are
  // missing, on the thread that waits; never where that is not known.
  virtual void on_late(std::chrono::nanoseconds /*after*/,
                       std::function<void(std::span<const uint32_t> missing)> /*callback*/) {}
};

struct NodeCollectivesConfig {
  std::string job;  // the same on all ranks, different for any other engine
  uint32_t rank = 0;
  uint32_t ranks = 1;
  bool fixed_order = false;                  // of sums: the order of ranks
  uint64_t arena_bytes = uint64_t{4} << 30;  // for fused gradients; only addresses
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
};

// Ranks of one node, by collective/. Waits for all of them.
std::unique_ptr<Collectives> make_node_collectives(const NodeCollectivesConfig& config);

// What connects ranks of several nodes beside their shared memory.
class Network {
 public:
  virtual ~Network() = default;
  virtual uint32_t rank() const = 0;
  virtual uint32_t ranks() const = 0;
  // The ranks of this rank's node in ascending order; the first is its local leader.
  virtual const std::vector<uint32_t>& node() const = 0;
  // On local leaders: memory that leaders() can reduce, and its release. Gradients lie in it.
  virtual void* allocate(uint64_t bytes) = 0;
  virtual void release(void* data) noexcept = 0;
  // On local leaders: the sum of elements of this type among them, for one allreduce.
  virtual std::unique_ptr<collective::Leaders> leaders(collective::DataType type) = 0;
  // Ends this rank's connections: who waits for it gets an error.
  virtual void end() noexcept = 0;
  // As in Collectives.
  virtual std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> bytes) = 0;
  virtual std::vector<std::byte> broadcast(std::span<const std::byte> bytes, uint32_t root) = 0;
};

// Ranks of several nodes: gradients in two levels (collective/two_level.h), control by the network
// alone. `config` is of this rank on its node: job, rank and ranks are the node's.
std::unique_ptr<Collectives> make_two_level_collectives(const NodeCollectivesConfig& config,
                                                        std::unique_ptr<Network> network);

}  // namespace nostall::sync
