// Draws with replacement look a uniform number up in the sums of the weights; draws without it
// give each sample a waiting time with its weight as rate, and take the shortest ones [Efraimidis and
// Spirakis 2006]. Only additions, multiplications and divisions of IEEE 754 double precision are used,
// in a fixed order, so that all machines draw the same.
#include "plan/sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "base/error.h"
#include "base/random.h"

namespace nostall::plan {
namespace {

constexpr uint32_t kWithReplacement = 0x77676874, kWithout = 0x77616974;  // streams of draws
constexpr uint64_t kRound = 256;
constexpr double kUnit = 0x1p-53;

// 53 bits of the draw `number`.
uint64_t draw_bits(uint64_t seed, uint32_t epoch, uint64_t number, uint32_t stream) {
  const auto block = philox4x32(
      {static_cast<uint32_t>(number), static_cast<uint32_t>(number >> 32), epoch, stream},
      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return (uint64_t{block[1]} << 32 | block[0]) >> 11;
}

// The natural logarithm of a normal number, to about 1e-15: that of the C library differs between
// machines.
double log_of(double value) {
  constexpr double kLn2 = 0x1.62e42fefa39efp-1, kRootHalf = 0x1.6a09e667f3bcdp-1;
  constexpr int kTerms = 11;
  int exponent = 0;
  double mantissa = std::frexp(value, &exponent);
  if (mantissa < kRootHalf) {
    mantissa *= 2.0;
    --exponent;
  }
  const double s = (mantissa - 1.0) / (mantissa + 1.0), z = s * s;
  double sum = 0.0;
  for (int k = kTerms; k > 0; --k) sum = (sum + 1.0 / (2 * k + 1)) * z;
  return exponent * kLn2 + 2.0 * (s + s * sum);
}

template <typename Id>
void draw_with_replacement(const JobSpec& spec, uint32_t epoch, std::vector<Id>& order) {
  const std::vector<double>& weights = *spec.weights;
  std::vector<double> sums(weights.size());
  std::partial_sum(weights.begin(), weights.end(), sums.begin());
  const double total = sums.back();
  // begin[b]: the first sum in bucket b or beyond. Buckets rise with the sums, so a search begins
  // in the bucket of its number.
  const size_t buckets = sums.size();
  const double scale = static_cast<double>(buckets) / total;
  const auto bucket_of = [&](double sum) {
    return std::min(static_cast<size_t>(std::min(sum * scale, 0x1p62)), buckets - 1);
  };
  std::vector<Id> begin(buckets);
  for (size_t i = 0, b = 0; i < sums.size(); ++i) {
    for (const size_t at = bucket_of(sums[i]); b <= at; ++b) begin[b] = static_cast<Id>(i);
  }
  order.resize(spec.draws);
  for (uint64_t i = 0; i < spec.draws; ++i) {
    const double wanted =
        static_cast<double>(draw_bits(spec.seed, epoch, i, kWithReplacement)) * kUnit * total;
    Id sample = begin[bucket_of(wanted)];
    while (sums[sample] <= wanted) ++sample;
    order[i] = sample;
  }
}

template <typename Id>
void draw_without(const JobSpec& spec, uint32_t epoch, std::vector<Id>& order) {
  const std::vector<double>& weights = *spec.weights;
  struct Waiting {
    double time;
    Id sample;
    bool operator<(const Waiting& other) const {
      return time != other.time ? time < other.time : sample < other.sample;
    }
  };
  std::vector<Waiting> waiting;
  for (size_t s = 0; s < weights.size(); ++s) {
    if (weights[s] == 0.0) continue;
    const double u = (static_cast<double>(draw_bits(spec.seed, epoch, s, kWithout)) + 0.5) * kUnit;
    waiting.push_back({-log_of(u) / weights[s], static_cast<Id>(s)});
  }
  const auto end = waiting.begin() + static_cast<ptrdiff_t>(spec.draws);
  if (end != waiting.end()) std::nth_element(waiting.begin(), end, waiting.end());
  std::sort(waiting.begin(), end);
  order.resize(spec.draws);
  std::transform(waiting.begin(), end, order.begin(), [](const Waiting& w) { return w.sample; });
}

void fail(const std::string& what) { throw Error(ErrorKind::usage, what); }

}  // namespace

void validate_weighted(const JobSpec& spec) {
  if (!spec.weights || spec.weights->size() != spec.samples) {
    fail("there are " + std::to_string(spec.weights ? spec.weights->size() : 0) + " weights for " +
         std::to_string(spec.samples) + " samples: a weighted order needs one per sample");
  }
  double total = 0.0;
  uint64_t positive = 0;
  for (size_t s = 0; s < spec.weights->size(); ++s) {
    const double weight = (*spec.weights)[s];
    if (!(weight >= 0.0) || std::isinf(weight)) {
      fail("the weight of sample " + std::to_string(s) + " is " + std::to_string(weight) +
           ": weights are finite and not negative");
    }
    total += weight;
    positive += weight > 0.0;
  }
  if (positive == 0) fail("all weights are 0: no sample can be drawn");
  if (std::isinf(total)) fail("the sum of the weights is beyond the range of double precision");
  if (total < 0x1p-900) fail("the sum of the weights is too small for double precision");
  if (spec.draws == 0) fail("a weighted order draws at least one sample an epoch");
  if (!spec.replacement && spec.draws > positive) {
    fail(std::to_string(spec.draws) + " samples cannot be drawn without replacement from " +
         std::to_string(positive) + " that have a weight");
  }
}

template <typename Id>
void draw_weighted(const JobSpec& spec, uint32_t epoch, std::vector<Id>& order) {
  if (spec.replacement) {
    draw_with_replacement(spec, epoch, order);
  } else {
    draw_without(spec, epoch, order);
  }
}

template void draw_weighted(const JobSpec&, uint32_t, std::vector<uint32_t>&);
template void draw_weighted(const JobSpec&, uint32_t, std::vector<uint64_t>&);

uint64_t repeated_length(uint64_t samples) noexcept {
  return samples < kRound ? samples : samples / kRound * kRound;
}

}  // namespace nostall::plan
