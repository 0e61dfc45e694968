// Access strings of all nodes, from each epoch's order and each node's share of it.
#include "simulate/accesses.h"

#include <string>

#include "base/error.h"

namespace nostall::simulate {

Accesses accesses_of(const plan::JobSpec& spec, const Decision& decision) {
  const uint32_t nodes = spec.world;
  if (!decision.order.empty() && decision.order.size() != uint64_t{spec.epochs} * nodes) {
    throw Error(ErrorKind::usage, "a policy's order needs one list for each of " +
                                      std::to_string(spec.epochs) + " epochs and " +
                                      std::to_string(nodes) + " nodes, not " +
                                      std::to_string(decision.order.size()));
  }
  Accesses accesses;
  accesses.batches_per_epoch = plan::batches_per_epoch(spec);
  accesses.batches = accesses.batches_per_epoch * spec.epochs;
  accesses.samples.resize(nodes);
  accesses.ends.resize(nodes);
  for (uint32_t epoch = 0; epoch < spec.epochs; ++epoch) {
    const std::vector<plan::SampleId> order = plan::epoch_order(spec, epoch);
    for (uint32_t node = 0; node < nodes; ++node) {
      const plan::RankEpoch share = plan::rank_epoch(spec, order, node);
      std::vector<uint32_t>& mine = accesses.samples[node];
      const uint64_t before = mine.size();
      if (decision.order.empty()) {
        mine.insert(mine.end(), share.samples.begin(), share.samples.end());
      } else {
        const auto& own = decision.order[uint64_t{epoch} * nodes + node];
        if (own.size() != share.samples.size()) {
          throw Error(ErrorKind::usage, "node " + std::to_string(node) + " reads " +
                                            std::to_string(share.samples.size()) +
                                            " samples in epoch " + std::to_string(epoch) +
                                            "; the policy's order has " +
                                            std::to_string(own.size()));
        }
        for (const uint32_t s : own) {
          if (s >= spec.samples) {
            throw Error(ErrorKind::usage, "the policy's order names sample " + std::to_string(s) +
                                              " of " + std::to_string(spec.samples));
          }
        }
        mine.insert(mine.end(), own.begin(), own.end());
      }
      for (const uint64_t end : share.batch_ends) accesses.ends[node].push_back(before + end);
    }
  }
  return accesses;
}

std::vector<std::vector<uint32_t>> reads_of(const Accesses& accesses, uint64_t samples) {
  std::vector<std::vector<uint32_t>> reads;
  for (const auto& mine : accesses.samples) {
    auto& counts = reads.emplace_back(samples, 0);
    for (const uint32_t s : mine) ++counts[s];
  }
  return reads;
}

}  // namespace nostall::simulate
