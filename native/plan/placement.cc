#include "plan/placement.h"

#include <algorithm>
#include <numeric>

namespace nostall::plan {

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
  for (uint32_t epoch = first_epoch; epoch < spec.epochs; ++epoch) {
    const std::vector<SampleId> order = epoch_order(spec, epoch);
    for (uint64_t begin = 0; begin < length; begin += spec.global_batch) {
      const uint64_t size = std::min<uint64_t>(spec.global_batch, length - begin);
      const std::vector<uint64_t> rest =
          size == spec.global_batch ? std::vector<uint64_t>{} : owned(size);
      for (const uint64_t p : size == spec.global_batch ? full : rest) {
        const SampleId sample = order[begin + p];
        ++access.frequency[sample];
        if (access.first_access[sample] == kNever) {
          access.first_access[sample] = epoch * length + begin + p;
        }
      }
    }
  }
  return access;
}

Placement place(std::span<const uint64_t> sizes, const NodeAccess& access,
                std::span<const TierShape> tiers) {
  const uint64_t count = sizes.size();
  Placement placement;
  placement.tier.assign(count, kNoTier);
  placement.offset.assign(count, 0);
  placement.used.assign(tiers.size(), 0);
  placement.fill.resize(tiers.size());

  std::vector<SampleId> ranked;
  ranked.reserve(count);
  for (SampleId s = 0; s < count; ++s) {
    if (access.frequency[s] > 0) ranked.push_back(s);
  }
  std::sort(ranked.begin(), ranked.end(), [&](SampleId a, SampleId b) {
    if (access.frequency[a] != access.frequency[b]) {
      return access.frequency[a] > access.frequency[b];
    }
    return access.first_access[a] != access.first_access[b]
               ? access.first_access[a] < access.first_access[b]
               : a < b;
  });
  for (size_t t = 0; t < tiers.size(); ++t) {
    std::vector<SampleId> passed;
    for (const SampleId s : ranked) {
      const uint64_t record = sizes[s] + tiers[t].overhead;
      if (record <= tiers[t].capacity - placement.used[t]) {
        placement.tier[s] = static_cast<uint8_t>(t);
        placement.used[t] += record;
        placement.fill[t].push_back(s);
      } else {
        passed.push_back(s);
      }
    }
    std::sort(placement.fill[t].begin(), placement.fill[t].end(), [&](SampleId a, SampleId b) {
      return access.first_access[a] != access.first_access[b]
                 ? access.first_access[a] < access.first_access[b]
                 : a < b;
    });
    uint64_t offset = 0;
    for (const SampleId s : placement.fill[t]) {
      placement.offset[s] = offset;
      offset += sizes[s] + tiers[t].overhead;
    }
    ranked = std::move(passed);
  }
  return placement;
}

}  // namespace nostall::plan
