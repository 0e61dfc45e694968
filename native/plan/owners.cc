#include "plan/owners.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "base/error.h"

namespace nostall::plan {
namespace {

// Samples whose accesses are counted at once: what a block needs (epochs bytes a sample, twice)
// stays small whatever the size of the data set.
constexpr uint64_t kWide = std::numeric_limits<uint16_t>::max();

// node[position] of one epoch, as a table over the positions of a global batch.
std::vector<uint16_t> node_of_position(const JobSpec& spec, uint64_t size,
                                       uint32_t ranks_per_node) {
  std::vector<uint16_t> nodes(size, 0);
  for (uint32_t r = 0; r < spec.world; ++r) {
    for (const uint64_t p : batch_positions(spec, r, size)) {
      nodes[p] = static_cast<uint16_t>(r / ranks_per_node);
    }
  }
  return nodes;
}

struct Best {
  uint32_t count = 0;
  uint32_t node = kNoOwner;
};

}  // namespace

std::vector<uint32_t> owners(const JobSpec& spec, std::span<const uint64_t> sizes,
                             std::span<const uint64_t> capacities, uint32_t ranks_per_node) {
  const auto nodes = static_cast<uint32_t>(capacities.size());
  if (ranks_per_node == 0 || uint64_t{nodes} * ranks_per_node != spec.world || nodes > kWide) {
    throw Error(ErrorKind::usage,
                std::to_string(nodes) + " nodes of " + std::to_string(ranks_per_node) +
                    " ranks do not make up a world of " + std::to_string(spec.world));
  }
  const uint64_t count = spec.samples, length = epoch_length(spec);
  const std::vector<uint16_t> full = node_of_position(spec, spec.global_batch, ranks_per_node);

  // readers[s * epochs + k]: the node of the k-th access of sample s. Linear in the samples.
  std::vector<uint16_t> readers(count * spec.epochs);
  std::vector<uint16_t> accesses(count, 0);
  std::vector<uint32_t> first(count, std::numeric_limits<uint32_t>::max());
  for (uint32_t epoch = 0; epoch < spec.epochs; ++epoch) {
    const std::vector<SampleId> order = epoch_order(spec, epoch);
    for (uint64_t begin = 0; begin < length; begin += spec.global_batch) {
      const uint64_t size = std::min<uint64_t>(spec.global_batch, length - begin);
      const std::vector<uint16_t> rest = size == spec.global_batch
                                             ? std::vector<uint16_t>{}
                                             : node_of_position(spec, size, ranks_per_node);
      const std::vector<uint16_t>& table = rest.empty() ? full : rest;
      for (uint64_t p = 0; p < size; ++p) {
        if (begin + p + 16 < length) {
          __builtin_prefetch(&readers[order[begin + p + 16] * spec.epochs], 1);
        }
        const SampleId s = order[begin + p];
        if (accesses[s] == spec.epochs) continue;  // padding: a second time in the epoch
        if (accesses[s] == 0) {
          first[s] = static_cast<uint32_t>(std::min<uint64_t>(
              begin + p + epoch * length, std::numeric_limits<uint32_t>::max() - 1));
        }
        readers[s * spec.epochs + accesses[s]++] = table[p];
      }
    }
  }

  // The node that reads each sample most often; the first of them that reads it.
  std::vector<uint16_t> counts(nodes, 0);
  std::vector<Best> best(count);
  for (SampleId s = 0; s < count; ++s) {
    const uint16_t* begin = &readers[s * spec.epochs];
    const uint16_t* end = begin + accesses[s];
    for (const uint16_t* r = begin; r != end; ++r) ++counts[*r];
    for (const uint16_t* r = begin; r != end; ++r) {
      if (counts[*r] > best[s].count) best[s] = {counts[*r], *r};
    }
    for (const uint16_t* r = begin; r != end; ++r) counts[*r] = 0;
  }

  std::vector<SampleId> ranked(count);
  std::iota(ranked.begin(), ranked.end(), SampleId{0});
  std::sort(ranked.begin(), ranked.end(), [&](SampleId a, SampleId b) {
    if (best[a].count != best[b].count) return best[a].count > best[b].count;
    return first[a] != first[b] ? first[a] < first[b] : a < b;
  });
  std::vector<uint64_t> left(capacities.begin(), capacities.end());
  std::vector<uint32_t> owner(count, kNoOwner);
  uint32_t roomiest = 0;  // where the search for any room goes on
  for (const SampleId s : ranked) {
    if (best[s].count == 0) continue;
    uint32_t chosen = left[best[s].node] >= sizes[s] ? best[s].node : kNoOwner;
    uint32_t chosen_count = 0;
    if (chosen == kNoOwner) {
      const uint16_t* begin = &readers[s * spec.epochs];
      const uint16_t* end = begin + accesses[s];
      for (const uint16_t* r = begin; r != end; ++r) {
        const auto times = static_cast<uint32_t>(std::count(begin, end, *r));
        if (left[*r] >= sizes[s] && times > chosen_count) {
          chosen = *r;
          chosen_count = times;
        }
      }
    }
    for (uint32_t tried = 0; chosen == kNoOwner && tried < nodes; ++tried) {
      if (left[roomiest] >= sizes[s]) {
        chosen = roomiest;
      } else {
        roomiest = (roomiest + 1) % nodes;
      }
    }
    if (chosen == kNoOwner) continue;
    owner[s] = chosen;
    left[chosen] -= sizes[s];
  }
  return owner;
}

}  // namespace nostall::plan
