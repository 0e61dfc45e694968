// Access counts of a node, and the greedy placement that follows from them.
//
// place() works in two steps. First it keeps residents: samples that a tier holds from an earlier
// job stay where they are if they are still wanted. Then it goes through the tiers, fastest first.
// A tier takes the samples of the highest access frequency that fit into its free bytes; these are
// then laid out in the order of first access, each in the first gap that is large enough. Samples
// that a tier does not take go on to the next one.
#include "plan/placement.h"

#include <algorithm>
#include <numeric>

#include "plan/permutation.h"

namespace nostall::plan {
namespace {

// A look-up of the keyed order costs about this many times what it costs within a whole order.
constexpr uint64_t kLookUpCost = 12;

}  // namespace

NodeAccess node_access(const JobSpec& spec, uint32_t first_rank, uint32_t ranks,
                       uint32_t first_epoch) {
  NodeAccess access;
  access.frequency.assign(spec.samples, 0);
  access.first_access.assign(spec.samples, kNever);
  const uint64_t length = epoch_length(spec);
  // Which positions of a global batch belong to the node: the same for all full batches.
  const auto owned = [&](uint64_t size) {
    std::vector<uint64_t> positions;
    for (uint32_t r = first_rank; r < first_rank + ranks; ++r) {
      const auto mine = batch_positions(spec, r, size);
      positions.insert(positions.end(), mine.begin(), mine.end());
    }
    std::sort(positions.begin(), positions.end());
    return positions;
  };
  const std::vector<uint64_t> full = owned(spec.global_batch);
  // A node that reads few of the positions looks only those up, where the order allows it.
  const bool look_up =
      spec.order == OrderKind::keyed && full.size() * kLookUpCost < spec.global_batch;
  std::vector<uint32_t> order;
  for (uint32_t epoch = first_epoch; epoch < spec.epochs; ++epoch) {
    const KeyedPermutation permutation(spec.samples, spec.seed, epoch);
    if (!look_up) epoch_order_into(spec, epoch, order);
    const uint64_t end = length_of(spec, epoch);
    for (uint64_t begin = 0; begin < end; begin += spec.global_batch) {
      const uint64_t size = std::min<uint64_t>(spec.global_batch, end - begin);
      const std::vector<uint64_t> rest =
          size == spec.global_batch ? std::vector<uint64_t>{} : owned(size);
      for (const uint64_t p : size == spec.global_batch ? full : rest) {
        const SampleId sample =
            look_up ? permutation((begin + p) % spec.samples) : order[begin + p];
        ++access.frequency[sample];
        if (access.first_access[sample] == kNever) {
          access.first_access[sample] = epoch * length + begin + p;
        }
      }
    }
  }
  return access;
}

namespace {

// A free range of a tier, in bytes.
struct Gap {
  uint64_t begin = 0, end = 0;
};

// What `taken` leaves free below `capacity`, in order.
std::vector<Gap> gaps_between(std::vector<Gap> taken, uint64_t capacity) {
  std::sort(taken.begin(), taken.end(), [](Gap a, Gap b) { return a.begin < b.begin; });
  std::vector<Gap> gaps;
  uint64_t at = 0;
  for (const Gap& t : taken) {
    if (t.begin > at) gaps.push_back({at, t.begin});
    at = std::max(at, t.end);
  }
  if (at < capacity) gaps.push_back({at, capacity});
  return gaps;
}

}  // namespace

Placement place(std::span<const uint64_t> sizes, const NodeAccess& access,
                std::span<const TierShape> tiers, std::span<const std::vector<Resident>> resident) {
  const uint64_t count = sizes.size();
  Placement placement;
  placement.tier.assign(count, kNoTier);
  placement.offset.assign(count, 0);
  placement.used.assign(tiers.size(), 0);
  placement.fill.resize(tiers.size());
  const auto earlier = [&](SampleId a, SampleId b) {
    return access.first_access[a] != access.first_access[b]
               ? access.first_access[a] < access.first_access[b]
               : a < b;
  };
  const auto enter = [&](SampleId s, size_t t, uint64_t offset, uint64_t record) {
    placement.tier[s] = static_cast<uint8_t>(t);
    placement.offset[s] = offset;
    placement.used[t] += record;
    placement.fill[t].push_back(s);
  };

  std::vector<std::vector<Gap>> gaps(tiers.size());
  for (size_t t = 0; t < tiers.size(); ++t) {
    std::vector<Gap> taken;
    if (t < resident.size()) {
      for (const Resident& r : resident[t]) {
        if (r.sample >= count || access.frequency[r.sample] == 0 ||
            placement.tier[r.sample] != kNoTier) {
          continue;
        }
        const uint64_t record = sizes[r.sample] + tiers[t].overhead;
        if (r.offset > tiers[t].capacity || record > tiers[t].capacity - r.offset) continue;
        enter(r.sample, t, r.offset, record);
        taken.push_back({r.offset, r.offset + record});
      }
    }
    gaps[t] = gaps_between(std::move(taken), tiers[t].capacity);
  }

  std::vector<SampleId> ranked;
  ranked.reserve(count);
  for (SampleId s = 0; s < count; ++s) {
    if (access.frequency[s] > 0 && placement.tier[s] == kNoTier) ranked.push_back(s);
  }
  std::sort(ranked.begin(), ranked.end(), [&](SampleId a, SampleId b) {
    return access.frequency[a] != access.frequency[b] ? access.frequency[a] > access.frequency[b]
                                                      : earlier(a, b);
  });
  for (size_t t = 0; t < tiers.size(); ++t) {
    const bool fragmented = gaps[t].size() > 1;
    std::vector<SampleId> chosen, passed;
    uint64_t left = 0;
    for (const Gap& g : gaps[t]) left += g.end - g.begin;
    for (const SampleId s : ranked) {
      const uint64_t record = sizes[s] + tiers[t].overhead;
      if (record <= left) {
        left -= record;
        chosen.push_back(s);
      } else {
        passed.push_back(s);
      }
    }
    // Among those chosen by frequency, the order in the tier is that of first access. With gaps
    // some may not find room; they go on to the next tier.
    std::sort(chosen.begin(), chosen.end(), earlier);
    size_t open = 0;
    for (const SampleId s : chosen) {
      const uint64_t record = sizes[s] + tiers[t].overhead;
      while (fragmented && open < gaps[t].size() && gaps[t][open].begin == gaps[t][open].end)
        ++open;
      size_t g = open;
      while (g < gaps[t].size() && gaps[t][g].end - gaps[t][g].begin < record) ++g;
      if (g == gaps[t].size()) {
        passed.push_back(s);
        continue;
      }
      enter(s, t, gaps[t][g].begin, record);
      gaps[t][g].begin += record;
    }
    std::sort(placement.fill[t].begin(), placement.fill[t].end(), earlier);
    ranked = std::move(passed);
  }
  return placement;
}

}  // namespace nostall::plan
