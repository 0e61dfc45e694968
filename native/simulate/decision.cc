// Layouts of the policies: what HDMLP, nostall and the loaders they are compared with keep and
// read.
#include "simulate/decision.h"

#include <algorithm>
#include <numeric>

#include "base/random.h"
#include "plan/cluster.h"
#include "plan/locality.h"
#include "plan/placement.h"

namespace nostall::simulate {
namespace {

std::vector<plan::TierShape> shapes(std::span<const uint64_t> capacities) {
  std::vector<plan::TierShape> result;
  for (const uint64_t c : capacities) result.push_back({c, 0});
  return result;
}

std::vector<std::vector<uint32_t>> narrow(const std::vector<std::vector<plan::SampleId>>& fill) {
  std::vector<std::vector<uint32_t>> lists;
  for (const auto& list : fill) lists.emplace_back(list.begin(), list.end());
  return lists;
}

uint64_t total(std::span<const uint64_t> capacities) {
  return std::accumulate(capacities.begin(), capacities.end(), uint64_t{0});
}

plan::Nodes one_rank_a_node(const plan::JobSpec& spec, uint64_t capacity) {
  return plan::equal_nodes(spec, std::vector<uint64_t>(spec.world, capacity), 1);
}

}  // namespace

Decision keep_frequent(const plan::JobSpec& spec, std::span<const uint64_t> bytes,
                       std::span<const uint64_t> capacities, bool in_order) {
  Decision decision;
  decision.filling = Filling::prefetch;
  for (uint32_t node = 0; node < spec.world; ++node) {
    const plan::NodeAccess access = plan::node_access(spec, node, 1);
    auto lists = narrow(plan::place(bytes, access, shapes(capacities)).fill);
    if (!in_order) {
      for (auto& list : lists) {
        std::stable_sort(list.begin(), list.end(), [&](uint32_t a, uint32_t b) {
          return access.frequency[a] > access.frequency[b];
        });
      }
    }
    decision.keep.push_back(std::move(lists));
  }
  return decision;
}

Decision keep_owned(const plan::JobSpec& spec, std::span<const uint64_t> bytes,
                    std::span<const uint64_t> capacities, plan::CopyRule copies) {
  Decision decision;
  decision.filling = Filling::reading;
  plan::Ownership ownership = plan::owners(spec, bytes, one_rank_a_node(spec, total(capacities)));
  for (uint32_t node = 0; node < spec.world; ++node) {
    plan::Placement placed = plan::place_cluster(
        bytes, ownership, node, plan::node_access(spec, node, 1), shapes(capacities), copies);
    if (copies == plan::CopyRule::next_use) decision.copies.push_back(std::move(placed.copies));
    decision.keep.push_back(narrow(placed.fill));
  }
  decision.owner = std::move(ownership.owner);
  return decision;
}

std::vector<uint32_t> first_readers(const plan::JobSpec& spec) {
  const std::vector<uint64_t> bytes(spec.samples, 0);
  return plan::owners(spec, bytes, one_rank_a_node(spec, 0)).first_reader;
}

void read_own_only(const plan::JobSpec& spec, Decision& decision) {
  decision.order.assign(uint64_t{spec.epochs} * spec.world, {});
  for (uint32_t node = 0; node < spec.world; ++node) {
    std::vector<uint32_t> own;
    for (const auto& list : decision.keep[node]) own.insert(own.end(), list.begin(), list.end());
    for (uint32_t epoch = 0; epoch < spec.epochs; ++epoch) {
      auto& order = decision.order[uint64_t{epoch} * spec.world + node];
      const plan::RankEpoch share = plan::rank_epoch(spec, epoch, node);
      order.assign(share.samples.begin(), share.samples.end());
      if (own.empty()) continue;
      SampleRandom random(spec.seed, epoch, node);
      for (size_t at = 0; at < order.size(); ++at) {
        const size_t i = at % own.size();
        // Each pass over the node's own is a new shuffle (Fisher-Yates as it goes).
        std::swap(own[i], own[i + random.below(static_cast<uint32_t>(own.size() - i))]);
        order[at] = own[i];
      }
    }
  }
}

void read_local_first(const plan::JobSpec& spec, Decision& decision) {
  plan::Ownership ownership;
  ownership.owner.assign(spec.samples, plan::kNoOwner);
  std::vector<uint32_t> node_of_rank(spec.world);
  std::iota(node_of_rank.begin(), node_of_rank.end(), 0);
  for (uint32_t node = 0; node < spec.world; ++node) {
    for (const auto& list : decision.keep[node]) {
      for (const uint32_t s : list) ownership.owner[s] = node;
    }
  }
  decision.order.clear();
  for (uint32_t epoch = 0; epoch < spec.epochs; ++epoch) {
    const std::vector<plan::SampleId> order = plan::epoch_order(spec, epoch);
    for (uint32_t node = 0; node < spec.world; ++node) {
      const plan::RankEpoch share =
          plan::local_rank_epoch(spec, order, node, ownership, node_of_rank);
      decision.order.emplace_back(share.samples.begin(), share.samples.end());
    }
  }
}

}  // namespace nostall::simulate
