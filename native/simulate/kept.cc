// Copies by node, as sorted arrays, and for each sample and class the copy that was there first:
// remote look-ups need one that exists, not all of them.
#include "simulate/kept.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace nostall::simulate {

Kept::Kept(const Decision& decision, uint64_t samples, uint32_t nodes, size_t classes) {
  if (decision.keep.empty()) return;
  if (decision.keep.size() != nodes) {
    throw Error(ErrorKind::usage, "a policy keeps samples on " +
                                      std::to_string(decision.keep.size()) + " nodes of " +
                                      std::to_string(nodes));
  }
  first_.resize(classes - 1);
  shelves_.resize(nodes);
  std::vector<std::pair<uint32_t, uint8_t>> all;
  for (uint32_t node = 0; node < nodes; ++node) {
    if (decision.keep[node].size() > classes - 1) {
      throw Error(ErrorKind::usage, "a policy keeps samples in storage class " +
                                        std::to_string(decision.keep[node].size()) + " of " +
                                        std::to_string(classes - 1));
    }
    all.clear();
    for (size_t j = 0; j < decision.keep[node].size(); ++j) {
      if (!decision.keep[node][j].empty()) first_[j].resize(samples);
      for (const uint32_t s : decision.keep[node][j]) {
        if (s >= samples) {
          throw Error(ErrorKind::usage, "a policy keeps sample " + std::to_string(s) + " of " +
                                            std::to_string(samples));
        }
        all.emplace_back(s, static_cast<uint8_t>(j + 1));
      }
    }
    std::sort(all.begin(), all.end());
    Shelf& shelf = shelves_[node];
    for (const auto& [s, j] : all) {
      if (!shelf.samples.empty() && shelf.samples.back() == s) {
        throw Error(ErrorKind::usage, "a policy keeps sample " + std::to_string(s) +
                                          " twice on node " + std::to_string(node));
      }
      shelf.samples.push_back(s);
      shelf.storage_class.push_back(j);
    }
    shelf.since.assign(shelf.samples.size(), kNotYet);
  }
}

std::optional<Kept::Copy> Kept::own(uint32_t node, uint32_t sample) const {
  if (shelves_.empty()) return std::nullopt;
  const Shelf& shelf = shelves_[node];
  const auto found = std::lower_bound(shelf.samples.begin(), shelf.samples.end(), sample);
  if (found == shelf.samples.end() || *found != sample) return std::nullopt;
  const auto slot = static_cast<uint64_t>(found - shelf.samples.begin());
  return Copy{shelf.storage_class[slot], shelf.since[slot], slot};
}

std::optional<Kept::Remote> Kept::remote(uint32_t sample, double time) const {
  for (size_t j = 0; j < first_.size(); ++j) {
    if (first_[j].empty()) continue;
    const First& first = first_[j][sample];
    if (first.since <= time && first.since < kNotYet) {
      return Remote{j + 1, first.node, first.since};
    }
  }
  return std::nullopt;
}

void Kept::fill(uint32_t node, uint32_t sample, const Copy& copy, double time) {
  shelves_[node].since[copy.slot] = time;
  First& first = first_[copy.storage_class - 1][sample];
  if (time < first.since) first = {time, node};
}

void Kept::drop(uint32_t node, uint32_t sample, const Copy& copy) {
  shelves_[node].since[copy.slot] = kNotYet;
  // Copies elsewhere are forgotten with the first one: a little pessimistic, never wrong.
  First& first = first_[copy.storage_class - 1][sample];
  if (first.node == node) first.since = kNotYet;
}

}  // namespace nostall::simulate
