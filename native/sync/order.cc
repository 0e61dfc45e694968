// The walk of the graph in the executor's order, and the fusion of what follows each other.
#include "sync/order.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <tuple>

#include "base/error.h"
#include "base/fnv.h"

namespace nostall::sync {
namespace {

uint64_t wire_bytes(const TensorSpec& t) { return t.count * collective::size_of(t.wire); }

// The nodes that the tensors depend on, found by walking back from them.
std::vector<bool> reached(std::span<const GraphNode> graph) {
  std::vector<bool> seen(graph.size());
  std::vector<uint32_t> open;
  for (uint32_t n = 0; n < graph.size(); ++n) {
    if (graph[n].tensor >= 0) open.push_back(n);
  }
  for (const uint32_t n : open) seen[n] = true;
  while (!open.empty()) {
    const uint32_t n = open.back();
    open.pop_back();
    for (const uint32_t p : graph[n].parents) {
      if (p >= graph.size()) throw Error(ErrorKind::usage, "a graph node has an unknown parent");
      if (!seen[p]) {
        seen[p] = true;
        open.push_back(p);
      }
    }
  }
  return seen;
}

struct Walk {
  std::vector<uint32_t> nodes;  // those that were reached, as they run
  uint64_t edges = 0;
};

Walk run(std::span<const GraphNode> graph) {
  const std::vector<bool> needed = reached(graph);
  std::vector<uint32_t> waits(graph.size()), depth(graph.size());
  std::vector<std::vector<uint32_t>> children(graph.size());
  Walk walk;
  uint64_t count = 0;
  for (uint32_t n = 0; n < graph.size(); ++n) {
    if (!needed[n]) continue;
    ++count;
    for (const uint32_t p : graph[n].parents) {
      children[p].push_back(n);
      ++waits[n];
      ++walk.edges;
    }
  }
  using Key = std::tuple<int64_t, uint32_t, uint32_t>;  // -priority, depth, node
  std::priority_queue<Key, std::vector<Key>, std::greater<>> ready;
  const auto add = [&](uint32_t n) { ready.emplace(-graph[n].priority, depth[n], n); };
  for (uint32_t n = 0; n < graph.size(); ++n) {
    if (needed[n] && waits[n] == 0) add(n);
  }
  while (!ready.empty()) {
    const uint32_t n = std::get<2>(ready.top());
    ready.pop();
    walk.nodes.push_back(n);
    for (const uint32_t c : children[n]) {
      depth[c] = std::max(depth[c], depth[n] + 1);
      if (--waits[c] == 0) add(c);
    }
  }
  if (walk.nodes.size() != count) {
    throw Error(ErrorKind::usage, "the graph of the gradients has a cycle");
  }
  return walk;
}

// Which tensors each tensor needs the reduction of, a bit each.
class Dependencies {
 public:
  Dependencies(std::span<const GraphNode> graph, const Walk& walk, uint64_t tensors)
      : words_((tensors + 63) / 64), of_tensor_(tensors * words_) {
    std::vector<uint64_t> of_node(graph.size() * words_);
    for (const uint32_t n : walk.nodes) {
      uint64_t* mine = of_node.data() + n * words_;
      for (const uint32_t p : graph[n].parents) {
        const uint64_t* theirs = of_node.data() + p * words_;
        for (size_t w = 0; w < words_; ++w) mine[w] |= theirs[w];
      }
      const int64_t tensor = graph[n].tensor;
      if (tensor < 0) continue;
      std::copy(mine, mine + words_, of_tensor_.data() + static_cast<size_t>(tensor) * words_);
      mine[tensor / 64] |= uint64_t{1} << (tensor % 64);
    }
  }
  bool needs(uint32_t tensor, uint32_t other) const {
    return (of_tensor_[tensor * words_ + other / 64] >> (other % 64)) & 1;
  }

 private:
  size_t words_;
  std::vector<uint64_t> of_tensor_;
};

using MayFuse = std::function<bool(const std::vector<uint32_t>& group, uint32_t tensor)>;

void fuse_into(ReductionPlan& plan, std::span<const uint32_t> order,
               std::span<const TensorSpec> tensors, uint64_t threshold, const MayFuse& may_fuse) {
  uint64_t bytes = 0;
  bool open = false;
  for (const uint32_t t : order) {
    const uint64_t size = wire_bytes(tensors[t]);
    if (open && bytes + size <= threshold &&
        tensors[plan.groups.back().front()].wire == tensors[t].wire &&
        may_fuse(plan.groups.back(), t)) {
      plan.groups.back().push_back(t);
      bytes += size;
      continue;
    }
    plan.groups.push_back({t});
    bytes = size;
    open = true;
  }
}

void add_rest(ReductionPlan& plan, std::span<const TensorSpec> tensors, uint64_t threshold) {
  std::vector<bool> has(tensors.size());
  for (const auto& group : plan.groups) {
    for (const uint32_t t : group) has[t] = true;
  }
  std::vector<uint32_t> rest;
  for (uint32_t t = 0; t < tensors.size(); ++t) {
    if (!has[t]) rest.push_back(t);
  }
  fuse_into(plan, rest, tensors, threshold, [](const auto&, uint32_t) { return true; });
}

}  // namespace

uint64_t ReductionPlan::fingerprint() const noexcept {
  Fnv hash;
  for (const auto& group : groups) {
    hash.number(group.size());
    for (const uint32_t t : group) hash.number(t);
  }
  return hash.value();
}

std::vector<uint32_t> order_of(std::span<const GraphNode> graph, uint64_t tensors) {
  std::vector<uint32_t> order;
  std::vector<bool> has(tensors);
  for (const uint32_t n : run(graph).nodes) {
    const int64_t t = graph[n].tensor;
    if (t < 0) continue;
    if (static_cast<uint64_t>(t) >= tensors) {
      throw Error(ErrorKind::usage, "the graph names gradient " + std::to_string(t) + " of " +
                                        std::to_string(tensors));
    }
    if (has[static_cast<size_t>(t)]) {
      throw Error(ErrorKind::usage,
                  "two nodes of the graph make gradient " + std::to_string(t) + " ready");
    }
    has[static_cast<size_t>(t)] = true;
    order.push_back(static_cast<uint32_t>(t));
  }
  return order;
}

ReductionPlan plan_reductions(std::span<const GraphNode> graph, std::span<const TensorSpec> tensors,
                              uint64_t threshold_bytes) {
  const std::vector<uint32_t> order = order_of(graph, tensors.size());
  const Walk walk = run(graph);
  const Dependencies dependencies(graph, walk, tensors.size());
  ReductionPlan plan;
  plan.nodes = walk.nodes.size();
  plan.edges = walk.edges;
  fuse_into(plan, order, tensors, threshold_bytes,
            [&](const std::vector<uint32_t>& group, uint32_t tensor) {
              return std::none_of(group.begin(), group.end(), [&](uint32_t other) {
                return dependencies.needs(tensor, other);
              });
            });
  add_rest(plan, tensors, threshold_bytes);
  return plan;
}

ReductionPlan fuse(std::span<const uint32_t> order, std::span<const TensorSpec> tensors,
                   uint64_t threshold_bytes) {
  std::vector<bool> has(tensors.size());
  for (const uint32_t t : order) {
    if (t >= tensors.size() || has[t]) {
      throw Error(ErrorKind::usage, "an order of gradients has each at most once");
    }
    has[t] = true;
  }
  ReductionPlan plan;
  fuse_into(plan, order, tensors, threshold_bytes, [](const auto&, uint32_t) { return true; });
  add_rest(plan, tensors, threshold_bytes);
  return plan;
}

}  // namespace nostall::sync
