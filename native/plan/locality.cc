// Deals the samples of each global batch to ranks, in two passes. The first pass gives a sample to
// a rank of its owner's node, in turn, while that rank has room. The second pass gives what is left
// to the first rank with room. Every rank computes the whole deal and keeps its own part.
#include "plan/locality.h"

#include <algorithm>

namespace nostall::plan {

RankEpoch local_rank_epoch(const JobSpec& spec, std::span<const SampleId> order, uint32_t rank,
                           const Ownership& ownership, std::span<const uint32_t> node_of_rank) {
  const uint32_t nodes = *std::max_element(node_of_rank.begin(), node_of_rank.end()) + 1;
  std::vector<std::vector<uint32_t>> ranks_of(nodes);
  for (uint32_t r = 0; r < node_of_rank.size(); ++r) ranks_of[node_of_rank[r]].push_back(r);

  RankEpoch mine;
  std::vector<uint64_t> room(spec.world);
  std::vector<size_t> turn(nodes);
  std::vector<uint32_t> dealt;
  const std::vector<uint32_t> before = occurrences(spec, order);
  for (uint64_t begin = 0; begin < order.size(); begin += spec.global_batch) {
    const std::span<const SampleId> batch =
        order.subspan(begin, std::min<uint64_t>(spec.global_batch, order.size() - begin));
    for (uint32_t r = 0; r < spec.world; ++r) {
      room[r] = batch_share(spec, r, batch.size());
    }
    std::fill(turn.begin(), turn.end(), 0);
    dealt.assign(batch.size(), kNoOwner);
    for (size_t p = 0; p < batch.size(); ++p) {
      const uint32_t owner = ownership.owner[batch[p]];
      if (owner >= nodes) continue;
      const std::vector<uint32_t>& ranks = ranks_of[owner];
      for (size_t tried = 0; tried < ranks.size(); ++tried) {
        const uint32_t r = ranks[turn[owner]++ % ranks.size()];
        if (room[r] == 0) continue;
        --room[r];
        dealt[p] = r;
        break;
      }
    }
    uint32_t next = 0;
    for (size_t p = 0; p < batch.size(); ++p) {
      if (dealt[p] == kNoOwner) {
        while (room[next] == 0) ++next;
        --room[next];
        dealt[p] = next;
      }
      if (dealt[p] != rank) continue;
      mine.samples.push_back(batch[p]);
      if (!before.empty()) mine.occurrences.push_back(before[begin + p]);
    }
    mine.batch_ends.push_back(mine.samples.size());
  }
  return mine;
}

}  // namespace nostall::plan
