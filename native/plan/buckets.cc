// Makes an order of batches from buckets: shuffles each bucket, cuts it into whole batches, joins
// what is left bucket after bucket, and shuffles the batches.
#include "plan/buckets.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "plan/permutation.h"

namespace nostall::plan {

constexpr uint64_t kStream = 0x6275636b6574;  // keeps the order of batches apart from all others

void validate_buckets(const JobSpec& spec) {
  const auto fail = [](const std::string& what) { throw Error(ErrorKind::usage, what); };
  if (!spec.buckets || spec.buckets->size() != spec.samples) {
    fail("there are buckets for " + std::to_string(spec.buckets ? spec.buckets->size() : 0) +
         " of " + std::to_string(spec.samples) + " samples: each sample needs one");
  }
  for (const uint32_t bucket : *spec.buckets) {
    if (bucket >= kMostBuckets) {
      fail("there is a bucket " + std::to_string(bucket) + ": a plan has at most " +
           std::to_string(kMostBuckets));
    }
  }
}

template <typename Id>
void fill_bucketed(const JobSpec& spec, uint32_t epoch, std::vector<Id>& order) {
  const std::vector<uint32_t>& bucket_of = *spec.buckets;
  const uint64_t batch = spec.global_batch;
  std::vector<uint64_t> ends(*std::max_element(bucket_of.begin(), bucket_of.end()) + 2);
  for (const uint32_t bucket : bucket_of) ++ends[bucket + 1];
  for (size_t b = 1; b < ends.size(); ++b) ends[b] += ends[b - 1];
  // Samples by bucket, shuffled within it.
  std::vector<Id> sorted(spec.samples);
  const KeyedPermutation shuffled(spec.samples, spec.seed, epoch);
  std::vector<uint64_t> next(ends.begin(), ends.end() - 1);
  for (uint64_t i = 0; i < spec.samples; ++i) {
    const uint64_t sample = shuffled(i);
    sorted[next[bucket_of[sample]]++] = static_cast<Id>(sample);
  }
  // Whole batches of the buckets first, then what they leave, bucket after bucket.
  std::vector<Id> batches, left;
  batches.reserve(spec.samples);
  for (size_t b = 0; b + 1 < ends.size(); ++b) {
    const auto begin = sorted.begin() + static_cast<ptrdiff_t>(ends[b]);
    const auto end = sorted.begin() + static_cast<ptrdiff_t>(ends[b + 1]);
    const auto whole = begin + (end - begin) / static_cast<ptrdiff_t>(batch) * batch;
    batches.insert(batches.end(), begin, whole);
    left.insert(left.end(), whole, end);
  }
  batches.insert(batches.end(), left.begin(), left.end());
  order = batches;
  const uint64_t count = spec.samples / batch;
  if (count == 0) return;
  const KeyedPermutation dealt(count, spec.seed ^ kStream, epoch);
  for (uint64_t h = 0; h < count; ++h) {
    std::copy_n(batches.begin() + static_cast<ptrdiff_t>(dealt(h) * batch), batch,
                order.begin() + static_cast<ptrdiff_t>(h * batch));
  }
}

template void fill_bucketed(const JobSpec&, uint32_t, std::vector<uint32_t>&);
template void fill_bucketed(const JobSpec&, uint32_t, std::vector<uint64_t>&);

}  // namespace nostall::plan
