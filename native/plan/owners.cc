// Chooses an owner for every sample, in three steps.
//
// 1. collect(): one pass over the epochs notes which node reads each sample in each epoch, and when
//    each sample is read first. Rows are epoch-major, so that the scattered writes of one epoch
//    stay within one row, which the caches hold.
// 2. The node that reads a sample most often is found by turning blocks of the rows to
//    sample-major.
// 3. Samples, the most frequently read first, are given to that node while it has room, else to the
//    next best node with room, else to any node with room.
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
std::vector<Node> node_of_position(const JobSpec& spec, uint64_t size,
                                   std::span<const uint32_t> node_of_rank) {
  std::vector<Node> nodes(size, 0);
  for (uint32_t r = 0; r < spec.world; ++r) {
    for (const uint64_t p : batch_positions(spec, r, size)) {
      nodes[p] = static_cast<Node>(node_of_rank[r]);
    }
  }
  return nodes;
}

// Which node reads each sample in each epoch that owners follow from. Epoch-major, so that the
// scattered writes of one epoch stay within one row, which the caches hold.
template <typename Node>
struct Readers {
  std::vector<Node> rows;      // [(epoch - first) * samples + sample]
  std::vector<uint64_t> ever;  // per sample: time of its first access, kNever
  // The same from the job's begin on, and the node that reads it then, or kNoOwner.
  std::vector<uint64_t> first;
  std::vector<uint32_t> first_reader;
  std::vector<bool> missing;  // as rows, of incomplete epochs only
};

template <typename Node>
Readers<Node> collect(const JobSpec& spec, std::span<const uint32_t> node_of_rank, Position from,
                      Epochs of) {
  const uint64_t count = spec.samples, length = epoch_length(spec);
  const std::vector<Node> full = node_of_position<Node>(spec, largest_batch(spec), node_of_rank);
  Readers<Node> readers;
  const uint64_t cells = count * (of.end - of.first);
  const bool partial = repeats_or_leaves_out(spec);
  readers.rows.resize(cells);
  if (partial) readers.missing.resize(cells, true);
  readers.ever.assign(count, kNever);
  readers.first.assign(count, kNever);
  readers.first_reader.assign(count, kNoOwner);
  uint64_t never = count, not_since = count;  // samples not read so far
  std::vector<uint32_t> order;
  for (uint32_t epoch = 0; epoch < spec.epochs; ++epoch) {
    const bool counts = epoch >= of.first && epoch < of.end;
    if (!counts && (epoch < from.epoch || not_since == 0)) continue;
    epoch_order_into(spec, epoch, order);
    const uint64_t at = counts ? uint64_t{epoch - of.first} * count : 0;
    for (uint64_t begin = 0; begin < order.size(); begin += spec.global_batch) {
      const uint64_t size = std::min<uint64_t>(spec.global_batch, order.size() - begin);
      const std::vector<Node> rest = size == spec.global_batch
                                         ? std::vector<Node>{}
                                         : node_of_position<Node>(spec, size, node_of_rank);
      const Node* node = rest.empty() ? full.data() : rest.data();
      for (uint64_t p = 0; counts && p < size; ++p) {
        const uint64_t sample = order[begin + p];
        if (partial) {
          // Again in the same epoch: the first reader fetches it.
          if (!readers.missing[at + sample]) continue;
          readers.missing[at + sample] = false;
        }
        readers.rows[at + sample] = node[p];
      }
      // Calls `read` with a sample and its node, where `times` had no access of it yet.
      const auto note = [&](std::vector<uint64_t>& times, uint64_t& left, const auto& read) {
        for (uint64_t p = 0; left > 0 && p < size; ++p) {
          const SampleId sample = order[begin + p];
          if (times[sample] != kNever) continue;
          times[sample] = epoch * length + begin + p;
          read(sample, node[p]);
          --left;
        }
      };
      if (counts) note(readers.ever, never, [](SampleId, Node) {});
      if (epoch > from.epoch || (epoch == from.epoch && begin >= from.batch * spec.global_batch)) {
        note(readers.first, not_since,
             [&](SampleId sample, Node by) { readers.first_reader[sample] = by; });
      }
    }
  }
  return readers;
}

struct Best {
  uint32_t count = 0;
  uint32_t node = kNoOwner;
};

// Counts how often each node reads one sample.
template <typename Node>
class ReadCounts {
 public:
  ReadCounts(const Readers<Node>& readers, uint64_t samples, uint32_t nodes, uint32_t epochs)
      : readers_(readers), samples_(samples), epochs_(epochs), counts_(nodes, 0) {}

  // The node that reads the sample most often and for which `has_room` is true; of several, the one
  // that reads it first. `of_epoch(e)` is the node that reads it in epoch e.
  template <typename OfEpoch, typename HasRoom>
  Best best(uint64_t sample, OfEpoch of_epoch, HasRoom has_room) {
    for (uint32_t e = 0; e < epochs_; ++e) {
      if (!is_missing(sample, e)) ++counts_[of_epoch(e)];
    }
    Best found;
    for (uint32_t e = 0; e < epochs_; ++e) {
      const Node node = of_epoch(e);
      if (counts_[node] > found.count && has_room(node)) found = {counts_[node], node};
    }
    for (uint32_t e = 0; e < epochs_; ++e) counts_[of_epoch(e)] = 0;
    return found;
  }

 private:
  bool is_missing(uint64_t sample, uint32_t epoch) const {
    return !readers_.missing.empty() && readers_.missing[uint64_t{epoch} * samples_ + sample];
  }

  const Readers<Node>& readers_;
  const uint64_t samples_;
  const uint32_t epochs_;
  std::vector<uint32_t> counts_;
};

template <typename Node>
std::vector<Best> most_frequent(const Readers<Node>& readers, ReadCounts<Node>& counts,
                                uint64_t count, uint32_t epochs) {
  std::vector<Best> best(count);
  std::vector<Node> block(kBlock * epochs);
  for (uint64_t begin = 0; begin < count; begin += kBlock) {
    const uint64_t size = std::min(kBlock, count - begin);
    for (uint32_t epoch = 0; epoch < epochs; ++epoch) {
      const Node* row = &readers.rows[uint64_t{epoch} * count + begin];
      for (uint64_t i = 0; i < size; ++i) block[i * epochs + epoch] = row[i];
    }
    for (uint64_t i = 0; i < size; ++i) {
      const Node* mine = &block[i * epochs];
      best[begin + i] = counts.best(
          begin + i, [&](uint32_t e) { return mine[e]; }, [](Node) { return true; });
    }
  }
  return best;
}

// Samples that are read, those of the highest frequency first, then by first access. The key is one
// number, so that sorting touches nothing else.
std::vector<std::pair<uint64_t, uint32_t>> by_frequency(std::span<const Best> best,
                                                        std::span<const uint64_t> first_access) {
  std::vector<std::pair<uint64_t, uint32_t>> ranked;
  ranked.reserve(best.size());
  for (SampleId s = 0; s < best.size(); ++s) {
    if (best[s].count == 0) continue;
    const uint64_t frequency = std::min<uint32_t>(best[s].count, 0xffff);
    ranked.emplace_back(((0xffff - frequency) << 48) | (first_access[s] & 0xffffffffffff),
                        static_cast<uint32_t>(s));
  }
  std::sort(ranked.begin(), ranked.end());
  return ranked;
}

template <typename Node>
Ownership choose(const JobSpec& spec, std::span<const uint64_t> sizes, const Nodes& job_nodes,
                 Position begin, Epochs of) {
  const auto nodes = static_cast<uint32_t>(job_nodes.capacity.size());
  const uint64_t count = spec.samples;
  const uint32_t epochs = of.end - of.first;
  Readers<Node> readers = collect<Node>(spec, job_nodes.of_rank, begin, of);
  ReadCounts<Node> counts(readers, count, nodes, epochs);
  const std::vector<Best> best = most_frequent(readers, counts, count, epochs);

  std::vector<uint64_t> left = job_nodes.capacity;
  Ownership ownership;
  ownership.owner.assign(count, kNoOwner);
  uint32_t roomiest = 0;  // where the search for any room goes on
  for (const auto& [key, s] : by_frequency(best, readers.ever)) {
    uint32_t chosen = left[best[s].node] >= sizes[s] ? best[s].node : kNoOwner;
    if (chosen == kNoOwner) {
      chosen = counts
                   .best(
                       s, [&, s = s](uint32_t e) { return readers.rows[uint64_t{e} * count + s]; },
                       [&, s = s](Node node) { return left[node] >= sizes[s]; })
                   .node;
    }
    for (uint32_t tried = 0; chosen == kNoOwner && tried < nodes; ++tried) {
      if (left[roomiest] >= sizes[s]) {
        chosen = roomiest;
      } else {
        roomiest = (roomiest + 1) % nodes;
      }
    }
    if (chosen == kNoOwner) continue;
    ownership.owner[s] = chosen;
    left[chosen] -= sizes[s];
  }

  ownership.first_access = std::move(readers.first);
  ownership.first_reader = std::move(readers.first_reader);
  return ownership;
}

}  // namespace

Nodes equal_nodes(const JobSpec& spec, std::vector<uint64_t> capacity, uint32_t ranks_per_node) {
  if (ranks_per_node == 0 || capacity.size() * ranks_per_node != spec.world) {
    throw Error(ErrorKind::usage,
                std::to_string(capacity.size()) + " nodes of " + std::to_string(ranks_per_node) +
                    " ranks do not make up a world of " + std::to_string(spec.world));
  }
  Nodes nodes;
  nodes.capacity = std::move(capacity);
  for (uint32_t r = 0; r < spec.world; ++r) nodes.of_rank.push_back(r / ranks_per_node);
  return nodes;
}

Ownership owners(const JobSpec& spec, std::span<const uint64_t> sizes, const Nodes& nodes,
                 Position begin, std::optional<Epochs> of) {
  const size_t count = nodes.capacity.size();
  const bool known = std::all_of(nodes.of_rank.begin(), nodes.of_rank.end(),
                                 [&](uint32_t node) { return node < count; });
  if (nodes.of_rank.size() != spec.world || count > kMaxNodes || !known) {
    throw Error(ErrorKind::usage,
                std::to_string(count) + " nodes with " + std::to_string(nodes.of_rank.size()) +
                    " ranks do not make up a world of " + std::to_string(spec.world));
  }
  if (begin.epoch >= spec.epochs) {
    throw Error(ErrorKind::usage, "epoch " + std::to_string(begin.epoch) + " is not among the " +
                                      std::to_string(spec.epochs) + " of the job");
  }
  const Epochs counted = of.value_or(Epochs{0, spec.epochs});
  if (counted.first >= counted.end || counted.end > spec.epochs) {
    throw Error(ErrorKind::usage, "epochs " + std::to_string(counted.first) + " to " +
                                      std::to_string(counted.end) + " are not among the " +
                                      std::to_string(spec.epochs) + " of the job");
  }
  return count <= 256 ? choose<uint8_t>(spec, sizes, nodes, begin, counted)
                      : choose<uint16_t>(spec, sizes, nodes, begin, counted);
}

}  // namespace nostall::plan
