#include "plan/owners.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "base/error.h"
#include "plan/placement.h"

namespace nostall::plan {
namespace {

constexpr uint32_t kMaxNodes = std::numeric_limits<uint16_t>::max();
// Samples turned from epoch-major to sample-major at once: small enough for the second-level cache.
constexpr uint64_t kBlock = 512;

// The node that reads each position of a global batch of `size` samples.
template <typename Node>
std::vector<Node> node_of_position(const JobSpec& spec, uint64_t size, uint32_t ranks_per_node) {
  std::vector<Node> nodes(size, 0);
  for (uint32_t r = 0; r < spec.world; ++r) {
    for (const uint64_t p : batch_positions(spec, r, size)) {
      nodes[p] = static_cast<Node>(r / ranks_per_node);
    }
  }
  return nodes;
}

// Which node reads each sample in each epoch. Epoch-major, so that the scattered writes of one
// epoch stay within one row, which the caches hold.
template <typename Node>
struct Readers {
  std::vector<Node> rows;       // [epoch * samples + sample]
  std::vector<uint64_t> first;  // per sample: time of its first access, kNever
  std::vector<bool> missing;    // [epoch * samples + sample], of incomplete epochs only
};

template <typename Node>
Readers<Node> collect(const JobSpec& spec, uint32_t ranks_per_node) {
  const uint64_t count = spec.samples, length = epoch_length(spec);
  const std::vector<Node> full = node_of_position<Node>(spec, spec.global_batch, ranks_per_node);
  Readers<Node> readers;
  readers.rows.resize(count * spec.epochs);
  readers.first.assign(count, kNever);
  uint64_t without = count;  // samples not read so far
  std::vector<uint32_t> order;
  for (uint32_t epoch = 0; epoch < spec.epochs; ++epoch) {
    epoch_order_into(spec, epoch, order);
    Node* row = &readers.rows[uint64_t{epoch} * count];
    const bool partial = length < count || spec.order == OrderKind::user;
    if (partial) readers.missing.resize(count * spec.epochs, true);
    for (uint64_t begin = 0; begin < length; begin += spec.global_batch) {
      const uint64_t size = std::min<uint64_t>(spec.global_batch, length - begin);
      const std::vector<Node> rest = size == spec.global_batch
                                         ? std::vector<Node>{}
                                         : node_of_position<Node>(spec, size, ranks_per_node);
      const Node* node = rest.empty() ? full.data() : rest.data();
      for (uint64_t p = 0; p < size; ++p) row[order[begin + p]] = node[p];
      if (partial) {
        for (uint64_t p = 0; p < size; ++p) {
          readers.missing[uint64_t{epoch} * count + order[begin + p]] = false;
        }
      }
      if (without == 0) continue;
      for (uint64_t p = 0; p < size; ++p) {
        uint64_t& first = readers.first[order[begin + p]];
        if (first != kNever) continue;
        first = epoch * length + begin + p;
        --without;
      }
    }
  }
  return readers;
}

struct Best {
  uint32_t count = 0;
  uint32_t node = kNoOwner;
};

template <typename Node>
std::vector<uint32_t> choose(const JobSpec& spec, std::span<const uint64_t> sizes,
                             std::span<const uint64_t> capacities, uint32_t ranks_per_node) {
  const auto nodes = static_cast<uint32_t>(capacities.size());
  const uint64_t count = spec.samples;
  const Readers<Node> readers = collect<Node>(spec, ranks_per_node);
  const auto is_missing = [&](uint64_t s, uint32_t epoch) {
    return !readers.missing.empty() && readers.missing[uint64_t{epoch} * count + s];
  };

  // The node that reads each sample most often; of several, the one that reads it first.
  std::vector<Best> best(count);
  std::vector<uint16_t> counts(nodes, 0);
  std::vector<Node> block(kBlock * spec.epochs);
  for (uint64_t begin = 0; begin < count; begin += kBlock) {
    const uint64_t size = std::min(kBlock, count - begin);
    for (uint32_t epoch = 0; epoch < spec.epochs; ++epoch) {
      const Node* row = &readers.rows[uint64_t{epoch} * count + begin];
      for (uint64_t i = 0; i < size; ++i) block[i * spec.epochs + epoch] = row[i];
    }
    for (uint64_t i = 0; i < size; ++i) {
      const Node* mine = &block[i * spec.epochs];
      for (uint32_t e = 0; e < spec.epochs; ++e) {
        if (!is_missing(begin + i, e)) ++counts[mine[e]];
      }
      for (uint32_t e = 0; e < spec.epochs; ++e) {
        if (counts[mine[e]] > best[begin + i].count) best[begin + i] = {counts[mine[e]], mine[e]};
      }
      for (uint32_t e = 0; e < spec.epochs; ++e) counts[mine[e]] = 0;
    }
  }

  // Highest frequency first, then first access: one number, so that sorting touches nothing else.
  std::vector<std::pair<uint64_t, uint32_t>> ranked;
  ranked.reserve(count);
  for (SampleId s = 0; s < count; ++s) {
    if (best[s].count == 0) continue;
    const uint64_t frequency = std::min<uint32_t>(best[s].count, 0xffff);
    ranked.emplace_back(((0xffff - frequency) << 48) | (readers.first[s] & 0xffffffffffff),
                        static_cast<uint32_t>(s));
  }
  std::sort(ranked.begin(), ranked.end());

  std::vector<uint64_t> left(capacities.begin(), capacities.end());
  std::vector<uint32_t> owner(count, kNoOwner);
  uint32_t roomiest = 0;  // where the search for any room goes on
  for (const auto& [key, s] : ranked) {
    uint32_t chosen = left[best[s].node] >= sizes[s] ? best[s].node : kNoOwner;
    if (chosen == kNoOwner) {
      uint32_t most = 0;
      for (uint32_t e = 0; e < spec.epochs; ++e) {
        if (!is_missing(s, e)) ++counts[readers.rows[uint64_t{e} * count + s]];
      }
      for (uint32_t e = 0; e < spec.epochs; ++e) {
        const Node node = readers.rows[uint64_t{e} * count + s];
        if (counts[node] > most && left[node] >= sizes[s]) {
          chosen = node;
          most = counts[node];
        }
      }
      for (uint32_t e = 0; e < spec.epochs; ++e) counts[readers.rows[uint64_t{e} * count + s]] = 0;
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

}  // namespace

std::vector<uint32_t> owners(const JobSpec& spec, std::span<const uint64_t> sizes,
                             std::span<const uint64_t> capacities, uint32_t ranks_per_node) {
  const uint64_t nodes = capacities.size();
  if (ranks_per_node == 0 || nodes * ranks_per_node != spec.world || nodes > kMaxNodes) {
    throw Error(ErrorKind::usage,
                std::to_string(nodes) + " nodes of " + std::to_string(ranks_per_node) +
                    " ranks do not make up a world of " + std::to_string(spec.world));
  }
  return nodes <= 256 ? choose<uint8_t>(spec, sizes, capacities, ranks_per_node)
                      : choose<uint16_t>(spec, sizes, capacities, ranks_per_node);
}

}  // namespace nostall::plan
