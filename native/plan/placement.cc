// Access counts of a node, and the greedy placement that follows from them.
//
// place() works in two steps. First it keeps residents: samples that a tier holds from an earlier
// job stay where they are if they are still needed. Then it goes through the tiers, fastest first.
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

NodeAccess node_access(const JobSpec& spec, uint32_t first_rank, uint32_t ranks, Position begin) {
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
  const std::vector<uint64_t> full = owned(largest_batch(spec));
  // A node that reads few of the positions looks only those up, where the order allows it.
  const bool look_up =
      spec.order == OrderKind::keyed && full.size() * kLookUpCost < largest_batch(spec);
  std::vector<uint32_t> order;
  for (uint32_t epoch = begin.epoch; epoch < spec.epochs; ++epoch) {
    const KeyedPermutation permutation(spec.samples, spec.seed, epoch);
    if (!look_up) epoch_order_into(spec, epoch, order);
    const uint64_t end = length_of(spec, epoch);
    const uint64_t skipped = epoch == begin.epoch ? begin.batch : 0;
    for (uint64_t at = skipped * spec.global_batch; at < end; at += spec.global_batch) {
      const uint64_t size = std::min<uint64_t>(spec.global_batch, end - at);
      const std::vector<uint64_t> rest =
          size == spec.global_batch ? std::vector<uint64_t>{} : owned(size);
      for (const uint64_t p : size == spec.global_batch ? full : rest) {
        const SampleId sample = look_up ? permutation((at + p) % spec.samples) : order[at + p];
        ++access.frequency[sample];
        if (access.first_access[sample] == kNever) {
          access.first_access[sample] = epoch * length + at + p;
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

// Fills one placement, tier by tier.
class PlacementBuilder {
 public:
  PlacementBuilder(std::span<const uint64_t> sizes, const NodeAccess& access,
                   std::span<const TierShape> tiers)
      : sizes_(sizes), access_(access), tiers_(tiers), gaps_(tiers.size()) {
    placement_.tier.assign(sizes.size(), kNoTier);
    placement_.offset.assign(sizes.size(), 0);
    placement_.used.assign(tiers.size(), 0);
    placement_.fill.resize(tiers.size());
  }

  // Samples of an earlier job that are still needed stay where they are.
  void keep(size_t t, std::span<const Resident> resident) {
    std::vector<Gap> taken;
    taken.reserve(resident.size());
    for (const Resident& r : resident) {
      if (r.sample >= sizes_.size() || access_.frequency[r.sample] == 0 ||
          placement_.tier[r.sample] != kNoTier) {
        continue;
      }
      const uint64_t record = sizes_[r.sample] + tiers_[t].overhead;
      if (r.offset > tiers_[t].capacity || record > tiers_[t].capacity - r.offset) continue;
      enter(r.sample, t, r.offset, record);
      taken.push_back({r.offset, r.offset + record});
    }
    gaps_[t] = gaps_between(std::move(taken), tiers_[t].capacity);
  }

  // Samples that are read and have no place yet, the most frequently read first.
  std::vector<SampleId> ranked() const {
    std::vector<SampleId> samples;
    samples.reserve(sizes_.size());
    for (SampleId s = 0; s < sizes_.size(); ++s) {
      if (access_.frequency[s] > 0 && placement_.tier[s] == kNoTier) samples.push_back(s);
    }
    std::sort(samples.begin(), samples.end(), [&](SampleId a, SampleId b) {
      return access_.frequency[a] != access_.frequency[b]
                 ? access_.frequency[a] > access_.frequency[b]
                 : is_earlier(a, b);
    });
    return samples;
  }

  // Takes the first of `ranked` that fit, and returns the others.
  std::vector<SampleId> fill(size_t t, std::span<const SampleId> ranked) {
    const auto earlier = [&](SampleId a, SampleId b) { return is_earlier(a, b); };
    std::vector<Gap>& gaps = gaps_[t];
    const bool fragmented = gaps.size() > 1;
    std::vector<SampleId> chosen, passed;
    uint64_t left = 0;
    for (const Gap& g : gaps) left += g.end - g.begin;
    for (const SampleId s : ranked) {
      const uint64_t record = sizes_[s] + tiers_[t].overhead;
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
      const uint64_t record = sizes_[s] + tiers_[t].overhead;
      while (fragmented && open < gaps.size() && gaps[open].begin == gaps[open].end) ++open;
      size_t g = open;
      while (g < gaps.size() && gaps[g].end - gaps[g].begin < record) ++g;
      if (g == gaps.size()) {
        passed.push_back(s);
        continue;
      }
      enter(s, t, gaps[g].begin, record);
      gaps[g].begin += record;
    }
    std::sort(placement_.fill[t].begin(), placement_.fill[t].end(), earlier);
    return passed;
  }

  Placement take() { return std::move(placement_); }

 private:
  bool is_earlier(SampleId a, SampleId b) const {
    return access_.first_access[a] != access_.first_access[b]
               ? access_.first_access[a] < access_.first_access[b]
               : a < b;
  }
  void enter(SampleId s, size_t t, uint64_t offset, uint64_t record) {
    placement_.tier[s] = static_cast<uint8_t>(t);
    placement_.offset[s] = offset;
    placement_.used[t] += record;
    placement_.fill[t].push_back(s);
  }

  const std::span<const uint64_t> sizes_;
  const NodeAccess& access_;
  const std::span<const TierShape> tiers_;
  std::vector<std::vector<Gap>> gaps_;  // of each tier
  Placement placement_;
};

}  // namespace

Placement place(std::span<const uint64_t> sizes, const NodeAccess& access,
                std::span<const TierShape> tiers, std::span<const std::vector<Resident>> resident) {
  PlacementBuilder placer(sizes, access, tiers);
  for (size_t t = 0; t < tiers.size(); ++t) {
    placer.keep(t, t < resident.size() ? std::span<const Resident>(resident[t])
                                       : std::span<const Resident>());
  }
  std::vector<SampleId> ranked = placer.ranked();
  for (size_t t = 0; t < tiers.size(); ++t) ranked = placer.fill(t, ranked);
  return placer.take();
}

}  // namespace nostall::plan
