// Ranks of a node that are apart follow one plan of copies in one cache: what they still find.
#include <gtest/gtest.h>

#include "caches.h"
#include "plan/copy_schedule.h"

namespace nostall::tier {
namespace {

class CopiesApart : public NodeCacheTest {
 protected:
  static constexpr uint64_t kAll = 240, kRoom = 36;  // other nodes own half of them
  static bool copied(plan::SampleId s) { return s % 2 == 1; }

  CopiesApart() {
    job_.samples = kAll;
    job_.global_batch = 12;
    job_.world = 4;
    job_.epochs = 10;
    job_.seed = 3;
  }

  // What the two ranks of a node ask other nodes for, the second one so many batches behind the first;
  // `unit`: batches in which nothing counts as later.
  uint64_t asked(uint64_t behind, uint32_t unit = 1) {
    plan::Placement placed;
    placed.tier.assign(kAll, plan::kNoTier);
    placed.offset.assign(kAll, 0);
    placed.used = {0};
    placed.fill.resize(1);
    placed.copies = plan::CopyPlaces(sizes_, copied, kRoom * kSize);
    placed.copy_lead = static_cast<uint32_t>(2 * plan::batches_per_epoch(job_)) / unit;
    struct Rank {
      std::unique_ptr<NodeCache> cache;
      std::vector<plan::SampleId> samples;
      std::vector<plan::CopyUse> uses;
    };
    std::vector<Rank> ranks;
    for (const uint32_t rank : {0u, 1u}) {
      NodeCacheConfig c = config(rank, 2);
      c.job += std::to_string(behind) + " " + std::to_string(unit);
      Rank& r = ranks.emplace_back(Rank{NodeCache::attach(c, sizes_, fixed(placed)), {}, {}});
      plan::CopySchedule schedule(job_, 0, 2, rank, 0, sizes_, placed.copies, copied);
      for (uint32_t epoch = 0; epoch < job_.epochs; ++epoch) {
        const auto read = plan::rank_epoch(job_, epoch, rank).samples;
        r.samples.insert(r.samples.end(), read.begin(), read.end());
        for (plan::CopyUse use : schedule.next_epoch()) {
          use.filled /= unit;
          r.uses.push_back(use);
        }
      }
    }
    const uint64_t local = job_.global_batch / job_.world;
    const uint64_t batches = ranks[0].samples.size() / local;
    uint64_t asked = 0;
    std::vector<std::byte> into(kSize);
    for (uint64_t turn = 0; turn < batches + behind; ++turn) {
      for (const uint64_t rank : {0u, 1u}) {
        const uint64_t batch = turn - rank * behind;
        if (batch >= batches) continue;  // not begun, or ended
        Rank& r = ranks[rank];
        for (uint64_t i = batch * local; i < (batch + 1) * local; ++i) {
          if (!copied(r.samples[i])) continue;
          if (r.uses[i].place != plan::kNoPlace &&
              r.cache->read_copy(r.uses[i], r.samples[i], into)) {
            continue;
          }
          ++asked;
          if (r.uses[i].keep) {
            r.cache->write_copy(r.uses[i], r.samples[i],
                                std::vector<std::byte>(kSize, std::byte(r.samples[i])));
          }
        }
      }
    }
    return asked;
  }

  plan::JobSpec job_;
  const std::vector<uint64_t> sizes_ = std::vector<uint64_t>(kAll, kSize);
};

TEST_F(CopiesApart, TheOneBehindPutsNothingInThePlaceOfWhatIsLater) {
  const auto epoch = static_cast<uint32_t>(plan::batches_per_epoch(job_));
  const uint64_t together = asked(0);
  for (const uint64_t behind : {epoch / 4, epoch / 2, epoch}) {
    EXPECT_GT(asked(behind), together);
    // Copies that came earlier in the same epoch than what is there are not put in its place.
    EXPECT_LT(asked(behind), asked(behind, epoch));
    EXPECT_LT(asked(behind), together * 6 / 5);
  }
}

}  // namespace
}  // namespace nostall::tier
