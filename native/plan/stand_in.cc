// The samples that an order can give, as ranges of numbers.
#include "plan/stand_in.h"

#include <algorithm>

#include "plan/mixture.h"

namespace nostall::plan {

StandIns::StandIns(const JobSpec& job) : seed_(job.seed) {
  if (job.order == OrderKind::user) {
    named_ = *job.user_order;
    count_ = named_.size();
  } else if (job.order == OrderKind::weighted) {
    for (SampleId s = 0; s < job.samples; ++s) {
      if ((*job.weights)[s] > 0.0) add(s, 1);
    }
  } else if (job.order == OrderKind::mixture) {
    const Mixture::Spec& mixture = job.mixture->spec();
    SampleId first = 0;
    for (size_t i = 0; i < mixture.samples.size(); first += mixture.samples[i++]) {
      const auto gives = [i](const Mixture::Change& change) { return change.weights[i] > 0.0; };
      if (std::any_of(mixture.changes.begin(), mixture.changes.end(), gives)) {
        add(first, mixture.samples[i]);
      }
    }
  } else {
    add(0, job.samples);
  }
  ranges_.shrink_to_fit();
}

void StandIns::add(SampleId first, uint64_t count) {
  const bool adjoins =
      !ranges_.empty() && first - ranges_.back().first == count_ - ranges_.back().before;
  if (!adjoins) ranges_.push_back({first, count_});
  count_ += count;
}

SampleId StandIns::sample(uint64_t k) const noexcept {
  if (!named_.empty()) return named_[k];
  const auto behind = std::upper_bound(ranges_.begin(), ranges_.end(), k,
                                       [](uint64_t n, const Range& r) { return n < r.before; });
  const Range& range = *std::prev(behind);
  return range.first + (k - range.before);
}

std::string none_stands_in(uint64_t unusable, uint64_t tried) {
  const uint64_t percent = tried == 0 ? 100 : unusable * 100 / tried;
  return "; no other sample could stand in its place: of " + std::to_string(tried) +
         " that were tried for this batch " + std::to_string(unusable) + " (" +
         std::to_string(percent) + " %) cannot be used: check the data set";
}

}  // namespace nostall::plan
