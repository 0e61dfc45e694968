// A sample that a node of N reads comes there once in N epochs on average: what is known of three times as
// many has nineteen of twenty next uses. Of many nodes and samples fewer are looked at: the room is for the
// copies that are needed soonest, and those are seen.
#include "plan/copy_schedule.h"

#include <algorithm>
#include <utility>

namespace nostall::plan {
namespace {

constexpr uint64_t kUsesAhead = 3;
// Samples of the epochs that are known ahead: about a second's work.
constexpr uint64_t kMostKnown = uint64_t{1} << 25;

uint32_t epochs_ahead(const JobSpec& spec, uint32_t ranks) {
  const uint64_t wanted = kUsesAhead * ((spec.world + ranks - 1) / ranks);
  const uint64_t most = kMostKnown / std::max<uint64_t>(1, epoch_length(spec));
  return static_cast<uint32_t>(std::clamp<uint64_t>(most, 2, std::max<uint64_t>(2, wanted)));
}

}  // namespace

CopySchedule::CopySchedule(const JobSpec& spec, uint32_t first_rank, uint32_t ranks, uint32_t rank,
                           uint32_t first_epoch, std::span<const uint64_t> sizes, CopyPlaces places,
                           std::function<bool(SampleId)> copied)
    : spec_(spec),
      first_rank_(first_rank),
      ranks_(ranks),
      rank_(rank),
      ahead_(epochs_ahead(spec, ranks)),
      copied_(std::move(copied)),
      filled_(places.count()),
      copies_(sizes, std::move(places)),
      epoch_(first_epoch),
      known_(first_epoch) {
  for (uint32_t r = first_rank; r < first_rank + ranks; ++r) {
    of_batch_ += batch_share(spec, r, largest_batch(spec));
  }
}

void CopySchedule::look_at(uint32_t epoch, const std::stop_token& stop) {
  epoch_order_into(spec_, epoch, order_, stop);
  std::vector<uint8_t> accesses;
  std::vector<uint32_t> copied;
  std::vector<std::pair<uint64_t, uint8_t>> places;  // in a batch: those of each rank in turn
  uint64_t of_size = 0;
  for (uint64_t begin = 0; begin < order_.size() && !stop.stop_requested();
       begin += spec_.global_batch) {
    const uint64_t size = std::min<uint64_t>(spec_.global_batch, order_.size() - begin);
    if (size != std::exchange(of_size, size)) {
      places.clear();
      for (uint32_t r = first_rank_; r < first_rank_ + ranks_; ++r) {
        const uint8_t mine = r == rank_ ? kMine : 0;
        for (const uint64_t p : batch_positions(spec_, r, size)) places.emplace_back(p, mine);
      }
    }
    for (const auto& [p, mine] : places) {
      const uint32_t sample = order_[begin + p];
      const bool is_copied = copied_(sample);
      if (is_copied) copied.push_back(sample);
      accesses.push_back(is_copied ? mine | kCopied : mine);
    }
  }
  if (stop.stop_requested()) return;
  copies_.know(copied, epoch + 1 == spec_.epochs);
  waiting_.push_back(std::move(accesses));
}

std::vector<CopyUse> CopySchedule::next_epoch(std::stop_token stop) {
  for (; known_ < spec_.epochs && known_ <= epoch_ + ahead_ && !stop.stop_requested(); ++known_) {
    look_at(known_, stop);
  }
  std::vector<CopyUse> uses;
  if (stop.stop_requested() || waiting_.empty()) return uses;
  const uint64_t first_batch = epoch_ * batches_per_epoch(spec_);
  uint64_t at = 0;
  for (const uint8_t access : waiting_.front()) {
    if (stop.stop_requested()) return {};
    CopyUse use;
    if (access & kCopied) use = copies_.next();
    if (use.place != kNoPlace) {
      if (!use.held) filled_[use.place] = static_cast<uint32_t>(first_batch + at / of_batch_);
      use.filled = filled_[use.place];
    }
    if (access & kMine) uses.push_back(use);
    ++at;
  }
  waiting_.pop_front();
  ++epoch_;
  return uses;
}

}  // namespace nostall::plan
