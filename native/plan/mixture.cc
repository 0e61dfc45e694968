// The pattern of a period is Tijdeman's answer to the chairman assignment problem: of the sources
// that may come (their share is ahead of what they had by 1 / (2m - 2) of a place), the one comes
// that must come first. All of it is arithmetic of whole numbers. Only weights are real, and they
// become shares by continued fractions, in double precision without fused operations.
#include "plan/mixture.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <numeric>
#include <queue>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/fnv.h"
#include "plan/permutation.h"
#include "plan/plan.h"

namespace nostall::plan {
namespace {

[[noreturn]] void fail(const std::string& what) { throw Error(ErrorKind::usage, what); }

uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// The least denominator of a fraction that is `value` to rounding; kMostShares + 1 if it is longer.
uint64_t denominator_of(double value) {
  constexpr double kRounding = 0x1p-46;
  uint64_t before = 0, now = 1;  // of the convergents
  double rest = value;
  for (;;) {
    const double whole = std::floor(rest);
    const double scaled = value * static_cast<double>(now);
    if (std::fabs(scaled - std::round(scaled)) <= kRounding * static_cast<double>(now)) return now;
    rest = 1.0 / (rest - whole);
    const double next = std::floor(rest) * static_cast<double>(now) + static_cast<double>(before);
    if (!(next <= kMostShares)) return uint64_t{kMostShares} + 1;
    before = std::exchange(now, static_cast<uint64_t>(next));
  }
}

// Shares of a period whose length is given: whole parts, then one more for the largest remainders.
Shares rounded(std::span<const double> weights, double total) {
  Shares shares{std::vector<uint32_t>(weights.size()), kMostShares};
  std::vector<double> exact(weights.size());
  int64_t left = kMostShares;
  for (size_t i = 0; i < weights.size(); ++i) {
    exact[i] = weights[i] / total * kMostShares;
    shares.of[i] = weights[i] > 0.0 ? std::max(1u, static_cast<uint32_t>(exact[i])) : 0;
    left -= shares.of[i];
  }
  std::vector<size_t> order(weights.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto remainder = [&](size_t i) { return exact[i] - shares.of[i]; };
  while (left != 0) {
    // Usually once: less than a place is missing for each source. Those that were raised to one
    // place may leave too few for the others.
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return left > 0 ? remainder(a) > remainder(b) : remainder(a) < remainder(b);
    });
    const int64_t before = left;
    for (const size_t i : order) {
      if (left == 0) break;
      if (weights[i] == 0.0 || (left < 0 && shares.of[i] <= 1)) continue;
      shares.of[i] += left > 0 ? 1 : -1;
      left -= left > 0 ? 1 : -1;
    }
    if (left == before) fail("there are more sources with a weight than a period has places");
  }
  return shares;
}

// The denominator of the slack that a source has [Tijdeman 1980].
uint64_t slack_of(const Shares& shares) {
  const auto sources = static_cast<uint64_t>(
      std::count_if(shares.of.begin(), shares.of.end(), [](uint32_t s) { return s > 0; }));
  return sources < 2 ? 1 : 2 * sources - 2;
}

// The last place, from 1 on, for the unit `number` of a source in a period.
uint64_t latest(const Shares& shares, uint64_t slack, size_t source, uint64_t number) {
  const uint64_t period = shares.period;
  return ceil_div(number * period * slack + period * (slack - 1),
                  uint64_t{shares.of[source]} * slack);
}

}  // namespace

Shares shares_of(std::span<const double> weights) {
  double total = 0.0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!(weights[i] >= 0.0) || std::isinf(weights[i])) {
      fail("the weight of source " + std::to_string(i) + " is " + std::to_string(weights[i]) +
           ": weights are finite and not negative");
    }
    total += weights[i];
  }
  if (total == 0.0) fail("all weights of the mixture are 0");
  if (std::isinf(total)) fail("the sum of the weights is beyond the range of double precision");
  uint64_t period = 1;
  for (const double weight : weights) {
    if (period <= kMostShares) period = std::lcm(period, denominator_of(weight / total));
  }
  if (period <= kMostShares) {
    Shares shares{{}, static_cast<uint32_t>(period)};
    uint64_t sum = 0;
    bool lost = false;  // a source with a weight
    for (const double weight : weights) {
      shares.of.push_back(
          static_cast<uint32_t>(std::round(weight / total * static_cast<double>(period))));
      sum += shares.of.back();
      lost |= weight > 0.0 && shares.of.back() == 0;
    }
    if (sum == period && !lost) return shares;
  }
  return rounded(weights, total);
}

Mixture::Pattern Mixture::pattern_of(const Shares& shares, uint64_t places) {
  const uint64_t period = shares.period, slack = slack_of(shares);
  Pattern pattern{std::vector<uint16_t>(places), std::vector<uint32_t>(places)};
  // Place n - 1 of the period may get the unit `had` of a source once n reaches the first number,
  // and must have got it when n reaches the second one.
  std::vector<uint64_t> had(shares.of.size());
  const auto may = [&](size_t i) {
    return ceil_div(had[i] * period * slack + period, uint64_t{shares.of[i]} * slack);
  };
  const auto must = [&](size_t i) { return latest(shares, slack, i, had[i]); };
  constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
  std::vector<uint32_t> first(places + 1, kNone), next(shares.of.size(), kNone);  // by `may`
  const auto wait = [&](size_t i) {
    const uint64_t from = may(i);
    if (from > places) return;
    next[i] = std::exchange(first[from], static_cast<uint32_t>(i));
  };
  for (size_t i = 0; i < shares.of.size(); ++i) {
    if (shares.of[i] > 0) wait(i);
  }
  using Due = std::pair<uint64_t, uint32_t>;
  std::priority_queue<Due, std::vector<Due>, std::greater<>> due;
  for (uint64_t n = 1; n <= places; ++n) {
    for (uint32_t i = first[n]; i != kNone; i = next[i]) due.emplace(must(i), i);
    const uint32_t i = due.top().second;
    due.pop();
    pattern.source[n - 1] = static_cast<uint16_t>(i);
    pattern.before[n - 1] = static_cast<uint32_t>(had[i]++);
    if (may(i) <= n) {
      due.emplace(must(i), i);
    } else {
      wait(i);
    }
  }
  return pattern;
}

Mixture::Mixture(Spec spec) : spec_(std::move(spec)) {
  if (spec_.samples.empty()) fail("a mixture needs at least one source");
  if (spec_.samples.size() > kMostSources) {
    fail("a mixture has at most " + std::to_string(kMostSources) + " sources, not " +
         std::to_string(spec_.samples.size()));
  }
  uint64_t begin = 0;
  for (size_t i = 0; i < spec_.samples.size(); ++i) {
    if (spec_.samples[i] == 0) fail("source " + std::to_string(i) + " has no samples");
    begins_.push_back(begin);
    begin += spec_.samples[i];
  }
  if (spec_.changes.empty() || spec_.changes.front().place != 0) {
    fail("the weights of a mixture begin at its first place");
  }
  for (size_t c = 0; c < spec_.changes.size(); ++c) {
    const Change& change = spec_.changes[c];
    if (change.weights.size() != spec_.samples.size()) {
      fail("there are " + std::to_string(change.weights.size()) + " weights for " +
           std::to_string(spec_.samples.size()) + " sources");
    }
    if (c > 0 && change.place <= spec_.changes[c - 1].place) {
      fail("the weights change at place " + std::to_string(change.place) + " after place " +
           std::to_string(spec_.changes[c - 1].place) + ": changes are in rising order");
    }
    shares_of(change.weights);
  }
  for (size_t c = 0; c < spec_.changes.size(); ++c) {
    const bool last = c + 1 == spec_.changes.size();
    if (!add_change(spec_.changes[c], last ? kEndless : spec_.changes[c + 1].place)) break;
  }
}

bool Mixture::add_change(const Change& change, uint64_t next) {
  std::vector<double> weights = change.weights;
  uint64_t begin = change.place;
  std::vector<uint64_t> before(spec_.samples.size());
  if (!stretches_.empty()) {
    before = counts_in(stretches_.back(),
                       *pattern(stretches_.size() - 1, needed(stretches_.back(), begin, 0)), begin);
  }
  for (;;) {
    if (spec_.at_end == AtEnd::reweight) {
      for (size_t i = 0; i < weights.size(); ++i) {
        if (before[i] == spec_.samples[i]) weights[i] = 0.0;
      }
      if (std::all_of(weights.begin(), weights.end(), [](double w) { return w == 0.0; })) {
        end_ = begin;
        return false;
      }
    }
    stretches_.push_back({begin, before, shares_of(weights)});
    stretches_.back().places = places_of(stretches_.back(), next);
    if (spec_.at_end == AtEnd::repeat) return true;
    const Stretch& stretch = stretches_.back();
    const std::shared_ptr<const Pattern> shown = pattern(stretches_.size() - 1, stretch.places);
    const uint64_t end = exhausted(stretch, *shown);
    if (end >= next) return true;
    if (spec_.at_end == AtEnd::stop) {
      end_ = end;
      return false;
    }
    before = counts_in(stretch, *shown, end);
    begin = end;
  }
}

uint64_t Mixture::places_of(const Stretch& stretch, uint64_t next) const {
  const Shares& shares = stretch.shares;
  uint64_t places = std::min<uint64_t>(shares.period, next - stretch.begin);
  if (spec_.at_end == AtEnd::repeat) return places;
  const uint64_t slack = slack_of(shares);
  for (size_t i = 0; i < shares.of.size(); ++i) {
    const uint64_t left = spec_.samples[i] - stretch.before[i];
    if (left < shares.of[i]) places = std::min(places, latest(shares, slack, i, left));
  }
  return places;
}

uint64_t Mixture::exhausted(const Stretch& stretch, const Pattern& pattern) const {
  const Shares& shares = stretch.shares;
  // For each source the period of the first sample too many, and its number within that period.
  std::vector<uint64_t> periods(shares.of.size(), kEndless), number(shares.of.size());
  uint64_t soonest = kEndless;
  for (size_t i = 0; i < shares.of.size(); ++i) {
    if (shares.of[i] == 0) continue;
    const uint64_t left = spec_.samples[i] - stretch.before[i];
    periods[i] = left / shares.of[i];
    number[i] = left % shares.of[i];
    soonest = std::min(soonest, periods[i]);
  }
  uint64_t at = 0;
  while (periods[pattern.source[at]] != soonest ||
         pattern.before[at] != number[pattern.source[at]]) {
    // The weights change before.
    if (++at == pattern.source.size()) return kEndless;
  }
  return stretch.begin + soonest * shares.period + at;
}

std::vector<uint64_t> Mixture::counts_in(const Stretch& stretch, const Pattern& pattern,
                                         uint64_t place) const {
  std::vector<uint64_t> counts = stretch.before;
  const uint64_t periods = (place - stretch.begin) / stretch.shares.period;
  const uint64_t rest = (place - stretch.begin) % stretch.shares.period;
  for (size_t i = 0; i < counts.size(); ++i) counts[i] += periods * stretch.shares.of[i];
  for (uint64_t k = 0; k < rest; ++k) ++counts[pattern.source[k]];
  return counts;
}

size_t Mixture::stretch_of(uint64_t place) const noexcept {
  const auto after = std::upper_bound(stretches_.begin(), stretches_.end(), place,
                                      [](uint64_t p, const Stretch& s) { return p < s.begin; });
  return static_cast<size_t>(after - stretches_.begin()) - 1;
}

uint64_t Mixture::needed(const Stretch& stretch, uint64_t begin, uint64_t count) noexcept {
  const uint64_t period = stretch.shares.period;
  const uint64_t rest = (begin - stretch.begin) % period;
  return count < period - rest ? rest + count : period;
}

std::shared_ptr<const Mixture::Pattern> Mixture::pattern(size_t stretch, uint64_t places) const {
  constexpr uint64_t kLeast = 4096;
  const Stretch& of = stretches_[stretch];
  const MutexLock lock(mutex_);
  if (!pattern_ || kept_ != stretch || pattern_->source.size() < std::min(places, of.places)) {
    kept_ = stretch;
    pattern_ = std::make_shared<const Pattern>(
        pattern_of(of.shares, std::min(of.places, std::bit_ceil(std::max(places, kLeast)))));
  }
  return pattern_;
}

Mixture::Place Mixture::at(uint64_t place) const {
  const size_t number = stretch_of(place);
  const Stretch& stretch = stretches_[number];
  const std::shared_ptr<const Pattern> shown = pattern(number, needed(stretch, place, 1));
  const uint64_t periods = (place - stretch.begin) / stretch.shares.period;
  const uint64_t rest = (place - stretch.begin) % stretch.shares.period;
  const uint32_t source = shown->source[rest];
  return {source,
          stretch.before[source] + periods * stretch.shares.of[source] + shown->before[rest]};
}

std::vector<uint64_t> Mixture::counts(uint64_t place) const {
  const size_t number = stretch_of(place);
  const uint64_t last = std::min(place, end_);
  const Stretch& stretch = stretches_[number];
  return counts_in(stretch, *pattern(number, needed(stretch, last, 0)), last);
}

template <typename Id>
void Mixture::fill(uint64_t seed, uint32_t epoch, uint64_t first, std::span<Id> out) const {
  const bool repeats = spec_.at_end == AtEnd::repeat;
  struct Current {
    KeyedPermutation order;
    uint64_t place;
    uint32_t epoch;
  };
  std::vector<Current> current;
  const auto order_of = [&](size_t source, uint32_t number) {
    return KeyedPermutation(spec_.samples[source],
                            seed + 0x9e3779b97f4a7c15u * (uint64_t{source} + 1), number);
  };
  const std::vector<uint64_t> before = counts(first);
  for (size_t i = 0; i < before.size(); ++i) {
    const uint64_t samples = spec_.samples[i];
    const auto number = repeats ? static_cast<uint32_t>(before[i] / samples) : epoch;
    current.push_back({order_of(i, number), repeats ? before[i] % samples : before[i], number});
  }
  for (uint64_t done = 0; done < out.size();) {
    const size_t number = stretch_of(first + done);
    const Stretch& stretch = stretches_[number];
    const bool last = number + 1 == stretches_.size();
    const uint64_t until = last ? kEndless : stretches_[number + 1].begin;
    uint64_t rest = (first + done - stretch.begin) % stretch.shares.period;
    const uint64_t end = std::min<uint64_t>(out.size(), done + (until - first - done));
    const std::shared_ptr<const Pattern> shown =
        pattern(number, needed(stretch, first + done, end - done));
    for (; done < end; ++done) {
      const uint32_t source = shown->source[rest];
      if (++rest == stretch.shares.period) rest = 0;
      Current& here = current[source];
      if (here.place == spec_.samples[source])
        here = {order_of(source, here.epoch + 1), 0, here.epoch + 1};
      out[done] = static_cast<Id>(begins_[source] + here.order(here.place++));
    }
  }
}

template void Mixture::fill(uint64_t, uint32_t, uint64_t, std::span<uint32_t>) const;
template void Mixture::fill(uint64_t, uint32_t, uint64_t, std::span<uint64_t>) const;

uint64_t Mixture::fingerprint(uint64_t place) const noexcept {
  Fnv hash;
  hash.number(kOrderVersion).number(static_cast<uint64_t>(spec_.at_end));
  hash.number(spec_.samples.size());
  for (const uint64_t samples : spec_.samples) hash.number(samples);
  for (const Change& change : spec_.changes) {
    if (change.place > 0 && change.place >= place) break;
    hash.number(change.place);
    for (const double weight : change.weights) hash.number(std::bit_cast<uint64_t>(weight));
  }
  return hash.value();
}

}  // namespace nostall::plan
