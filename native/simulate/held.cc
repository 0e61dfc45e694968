// A copy may go while another node holds the sample, so each node has those of its copies in the order of
// their next use; a sample's second copy makes both of them spare, its last one none.
#include "simulate/held.h"

#include <algorithm>
#include <limits>

namespace nostall::simulate {
namespace {

constexpr uint32_t kNeverAgain = std::numeric_limits<uint32_t>::max();

}  // namespace

Held::Held(const Accesses& accesses, std::span<const double> sizes, const Model& model)
    : accesses_(accesses), sizes_(sizes), holders_(sizes.size()) {
  for (const auto& samples : accesses.samples) {
    Node& node = nodes_.emplace_back();
    node.storage_class.assign(sizes.size(), 0);
    node.next_use.assign(sizes.size(), kNeverAgain);
    for (size_t j = 1; j < model.classes.size(); ++j)
      node.left.push_back(model.classes[j].capacity);
    node.spare.resize(node.left.size());
    auto& uses = next_use_.emplace_back(samples.size());
    for (size_t k = samples.size(); k-- > 0;) {
      uses[k] = std::exchange(node.next_use[samples[k]], static_cast<uint32_t>(k));
    }
  }
}

std::optional<Held::Copy> Held::copy_for(uint32_t node, uint32_t sample) const {
  if (const size_t own = nodes_[node].storage_class[sample]) return Copy{node, own};
  std::optional<Copy> best;
  for (const uint32_t holder : holders_[sample]) {
    const size_t there = nodes_[holder].storage_class[sample];
    if (!best || there < best->storage_class) best = {holder, there};
  }
  return best;
}

std::optional<Held::Copy> Held::read(uint32_t node, uint64_t access) {
  const uint32_t sample = accesses_.samples[node][access];
  const bool held = nodes_[node].storage_class[sample] > 0;
  const bool again = held && spare(node, sample).erase(key(node, sample)) > 0;
  nodes_[node].next_use[sample] = next_use_[node][access];
  if (again) spare(node, sample).insert(key(node, sample));
  if (held) return std::nullopt;
  return holders_[sample].empty() ? keep_first(node, sample) : keep_spare(node, sample);
}

std::optional<Held::Copy> Held::keep_first(uint32_t node, uint32_t sample) {
  const auto count = static_cast<uint32_t>(nodes_.size());
  for (uint32_t away = 0; away < count; ++away) {
    const uint32_t there = (node + away) % count;
    if (const auto room = make_room(there, sizes_[sample], 0)) {
      add({there, *room}, sample);
      return Copy{there, *room};
    }
  }
  return std::nullopt;
}

std::optional<Held::Copy> Held::keep_spare(uint32_t node, uint32_t sample) {
  const uint32_t next = nodes_[node].next_use[sample];
  const auto room = next == kNeverAgain ? std::nullopt : make_room(node, sizes_[sample], next);
  if (!room) return std::nullopt;
  add({node, *room}, sample);
  return Copy{node, *room};
}

std::optional<size_t> Held::make_room(uint32_t node, double mb, uint32_t until) {
  Node& mine = nodes_[node];
  std::optional<size_t> best;
  for (size_t j = 0; j < mine.left.size(); ++j) {
    if (mine.left[j] >= mb) return j + 1;
    double room = mine.left[j];
    const auto& spare = mine.spare[j];
    for (auto at = spare.rbegin(); at != spare.rend() && at->first >= until && room < mb; ++at) {
      room += sizes_[at->second];
    }
    if (room < mb) continue;
    if (!best || spare.rbegin()->first > mine.spare[*best - 1].rbegin()->first) best = j + 1;
  }
  while (best && mine.left[*best - 1] < mb) drop(node, mine.spare[*best - 1].rbegin()->second);
  return best;
}

void Held::add(const Copy& copy, uint32_t sample) {
  Node& node = nodes_[copy.node];
  node.storage_class[sample] = static_cast<uint8_t>(copy.storage_class);
  node.left[copy.storage_class - 1] -= sizes_[sample];
  auto& holders = holders_[sample];
  holders.push_back(copy.node);
  if (holders.size() == 1) return;
  for (const uint32_t holder : holders) spare(holder, sample).insert(key(holder, sample));
}

void Held::drop(uint32_t node, uint32_t sample) {
  spare(node, sample).erase(key(node, sample));
  Node& mine = nodes_[node];
  mine.left[mine.storage_class[sample] - 1] += sizes_[sample];
  mine.storage_class[sample] = 0;
  auto& holders = holders_[sample];
  holders.erase(std::find(holders.begin(), holders.end(), node));
  if (holders.size() == 1) spare(holders[0], sample).erase(key(holders[0], sample));
}

std::set<std::pair<uint32_t, uint32_t>>& Held::spare(uint32_t node, uint32_t sample) {
  return nodes_[node].spare[nodes_[node].storage_class[sample] - 1];
}

std::pair<uint32_t, uint32_t> Held::key(uint32_t node, uint32_t sample) const {
  return {nodes_[node].next_use[sample], sample};
}

}  // namespace nostall::simulate
