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

// Places of a period that are worked out together: few enough to begin quickly in the middle of one,
// so many that what is kept for each part is little beside it.
constexpr uint64_t kPatternPart = kMostSources;

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

// When the next unit of a source may come and when it must, counted in places from 1. Both grow by
// the same fraction from unit to unit: no division.
class Next {
 public:
  Next(const Shares& shares, uint64_t slack, size_t source, uint64_t number)
      : below_(uint64_t{shares.of[source]} * slack),
        step_(shares.period / shares.of[source]),
        rest_(slack * (shares.period % shares.of[source])) {
    const uint64_t begin = number * shares.period * slack + below_ - 1;
    may_ = (begin + shares.period) / below_;
    may_rest_ = (begin + shares.period) % below_;
    must_ = (begin + shares.period * (slack - 1)) / below_;
    must_rest_ = (begin + shares.period * (slack - 1)) % below_;
  }
  uint64_t may() const noexcept { return may_; }
  uint64_t must() const noexcept { return must_; }
  void advance() noexcept {
    advance(may_, may_rest_);
    advance(must_, must_rest_);
  }

 private:
  void advance(uint64_t& value, uint64_t& rest) const noexcept {
    rest += rest_;
    const bool carry = rest >= below_;
    rest -= carry ? below_ : 0;
    value += step_ + (carry ? 1 : 0);
  }
  uint64_t below_, step_, rest_;
  uint64_t may_, may_rest_, must_, must_rest_;
};

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

Mixture::Pattern Mixture::pattern_of(const Shares& shares, std::vector<uint32_t>& had,
                                     uint64_t begin, uint64_t places) {
  const uint64_t slack = slack_of(shares);
  Pattern pattern{begin, had, std::vector<uint16_t>(places), std::vector<uint32_t>(places)};
  constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
  // Sources whose next unit may come: when it must, and the source in the low bits.
  constexpr unsigned kSourceBits = 16;
  static_assert(uint64_t{1} << kSourceBits == kMostSources);
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> due;
  // Those that may later: in a list for each place.
  std::vector<uint32_t> first(places + 1, kNone), next(shares.of.size(), kNone);
  std::vector<uint32_t> sources(shares.of.size(), kNone);  // the places of sources in `units`
  std::vector<Next> units;
  const auto wait = [&](uint32_t source, const Next& unit, uint64_t now) {
    if (unit.may() <= now) {
      due.push(unit.must() << kSourceBits | source);
    } else if (unit.may() <= begin + places) {
      next[source] = std::exchange(first[unit.may() - begin], source);
    }
  };
  for (uint32_t i = 0; i < shares.of.size(); ++i) {
    if (shares.of[i] == 0) continue;
    sources[i] = static_cast<uint32_t>(units.size());
    units.emplace_back(shares, slack, i, had[i]);
    wait(i, units.back(), begin);
  }
  for (uint64_t n = 1; n <= places; ++n) {
    for (uint32_t i = first[n]; i != kNone; i = next[i]) {
      due.push(units[sources[i]].must() << kSourceBits | i);
    }
    const auto i = static_cast<uint32_t>(due.top() % kMostSources);
    due.pop();
    pattern.source[n - 1] = static_cast<uint16_t>(i);
    pattern.before[n - 1] = had[i]++;
    Next& unit = units[sources[i]];
    unit.advance();
    wait(i, unit, begin + n);
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
    if (add_change(spec_.changes[c], last ? kEndless : spec_.changes[c + 1].place)) continue;
    if (spec_.at_end == AtEnd::reweight) check_changes_reached(c + 1);
    break;
  }
}

void Mixture::check_changes_reached(size_t first) const {
  const std::vector<uint64_t> given = counts(end_);
  for (size_t c = first; c < spec_.changes.size(); ++c) {
    const Change& change = spec_.changes[c];
    for (size_t i = 0; i < given.size(); ++i) {
      if (change.weights[i] == 0.0 || given[i] == spec_.samples[i]) continue;
      fail("the weights change after " + std::to_string(change.place) +
           " samples of an epoch, but the sources that have one before are used up after " +
           std::to_string(end_) + ", so that source " + std::to_string(i) + " would not give " +
           std::to_string(spec_.samples[i] - given[i]) +
           " of its samples: let the weights change before, or give it a weight from the start");
    }
  }
}

bool Mixture::add_change(const Change& change, uint64_t next) {
  std::vector<double> weights = change.weights;
  uint64_t begin = change.place;
  std::vector<uint64_t> before(spec_.samples.size());
  if (!stretches_.empty()) before = counts_in(stretches_.size() - 1, begin);
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
    const size_t last = stretches_.size() - 1;
    const uint64_t end = exhausted(last);
    if (end >= next) return true;
    if (spec_.at_end == AtEnd::stop) {
      end_ = end;
      return false;
    }
    before = counts_in(last, end);
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

uint64_t Mixture::exhausted(size_t number) const {
  const Stretch& stretch = stretches_[number];
  const Shares& shares = stretch.shares;
  // For each source the period of the first sample too many, and its number within that period.
  std::vector<uint64_t> periods(shares.of.size(), kEndless), numbers(shares.of.size());
  uint64_t soonest = kEndless;
  for (size_t i = 0; i < shares.of.size(); ++i) {
    if (shares.of[i] == 0) continue;
    const uint64_t left = spec_.samples[i] - stretch.before[i];
    periods[i] = left / shares.of[i];
    numbers[i] = left % shares.of[i];
    soonest = std::min(soonest, periods[i]);
  }
  for (uint64_t at = 0; at < stretch.places;) {
    const std::shared_ptr<const Pattern> part = pattern(number, at);
    for (; at < part->end(); ++at) {
      const uint32_t source = part->source[at - part->begin];
      if (periods[source] == soonest && part->before[at - part->begin] == numbers[source]) {
        return stretch.begin + soonest * shares.period + at;
      }
    }
  }
  return kEndless;  // the weights change before
}

std::vector<uint64_t> Mixture::counts_in(size_t number, uint64_t place) const {
  const Stretch& stretch = stretches_[number];
  std::vector<uint64_t> counts = stretch.before;
  const uint64_t periods = (place - stretch.begin) / stretch.shares.period;
  const uint64_t rest = (place - stretch.begin) % stretch.shares.period;
  for (size_t i = 0; i < counts.size(); ++i) counts[i] += periods * stretch.shares.of[i];
  if (rest == 0) return counts;
  const std::shared_ptr<const Pattern> part = pattern(number, rest - 1);
  for (size_t i = 0; i < counts.size(); ++i) counts[i] += part->had[i];
  for (uint64_t k = part->begin; k < rest; ++k) ++counts[part->source[k - part->begin]];
  return counts;
}

size_t Mixture::stretch_of(uint64_t place) const noexcept {
  const auto after = std::upper_bound(stretches_.begin(), stretches_.end(), place,
                                      [](uint64_t p, const Stretch& s) { return p < s.begin; });
  return static_cast<size_t>(after - stretches_.begin()) - 1;
}

std::shared_ptr<const Mixture::Pattern> Mixture::pattern(size_t stretch, uint64_t at) const {
  const Stretch& of = stretches_[stretch];
  const uint64_t part = at / kPatternPart;
  const MutexLock lock(mutex_);
  const auto is_of = [&](const Known& known) {
    return !known.before.empty() && known.stretch == stretch;
  };
  auto& [known, other] = known_;
  if (!is_of(known)) std::swap(known, other);
  if (!is_of(known)) known = {stretch, {std::vector<uint32_t>(of.shares.of.size())}, {}};
  auto& [newest, older] = known.last;
  if (older && older->begin / kPatternPart == part) std::swap(newest, older);
  if (newest && newest->begin / kPatternPart == part) return newest;
  std::shared_ptr<const Pattern> made;
  for (uint64_t p = std::min<uint64_t>(part, known.before.size() - 1); p <= part; ++p) {
    const uint64_t begin = p * kPatternPart;
    std::vector<uint32_t> had = known.before[p];
    made = std::make_shared<const Pattern>(
        pattern_of(of.shares, had, begin, std::min(kPatternPart, of.places - begin)));
    worked_out_.fetch_add(made->source.size(), std::memory_order_relaxed);
    if (p + 1 == known.before.size()) known.before.push_back(std::move(had));
  }
  older = std::exchange(newest, std::move(made));
  return newest;
}

Mixture::Place Mixture::at(uint64_t place) const {
  const size_t number = stretch_of(place);
  const Stretch& stretch = stretches_[number];
  const uint64_t periods = (place - stretch.begin) / stretch.shares.period;
  const uint64_t rest = (place - stretch.begin) % stretch.shares.period;
  const std::shared_ptr<const Pattern> part = pattern(number, rest);
  const uint32_t source = part->source[rest - part->begin];
  return {source, stretch.before[source] + periods * stretch.shares.of[source] +
                      part->before[rest - part->begin]};
}

std::vector<uint64_t> Mixture::counts(uint64_t place) const {
  return counts_in(stretch_of(place), std::min(place, end_));
}

Mixture::Walk::Walk(const Mixture& mixture, uint64_t place)
    : mixture_(mixture), place_(place), until_(place), counts_(mixture.counts(place)) {}

Mixture::Place Mixture::Walk::next() {
  if (place_ == until_) go_on();
  ++place_;
  const uint32_t source = part_->source[at_++];
  return {source, counts_[source]++};
}

void Mixture::Walk::go_on() {
  const size_t number = mixture_.stretch_of(place_);
  const std::vector<Stretch>& stretches = mixture_.stretches_;
  const uint64_t rest = (place_ - stretches[number].begin) % stretches[number].shares.period;
  part_ = mixture_.pattern(number, rest);
  at_ = rest - part_->begin;
  until_ = place_ + part_->end() - rest;
  if (number + 1 < stretches.size()) until_ = std::min(until_, stretches[number + 1].begin);
}

Mixture::Samples::Samples(const Mixture& mixture, uint64_t seed, uint32_t epoch, uint64_t first)
    : mixture_(mixture),
      seed_(seed),
      epoch_(epoch),
      repeats_(mixture.spec_.at_end == AtEnd::repeat),
      before_(mixture.counts(repeats_ ? first : 0)) {
  for (size_t i = 0; i < before_.size(); ++i) {
    first_.push_back(pass(i, before_[i] / mixture.spec_.samples[i]));
  }
  passes_ = first_;
}

Mixture::Samples::Pass Mixture::Samples::pass(size_t source, uint64_t number) const {
  const uint64_t samples = mixture_.spec_.samples[source];
  return {KeyedPermutation(samples, seed_ + 0x9e3779b97f4a7c15u * (uint64_t{source} + 1),
                           repeats_ ? static_cast<uint32_t>(number) : epoch_),
          number, number * samples};
}

uint64_t Mixture::Samples::at(const Place& place) {
  const uint64_t samples = mixture_.spec_.samples[place.source];
  Pass& here = passes_[place.source];
  if (place.number - here.begin >= samples) here = pass(place.source, place.number / samples);
  last_ = place;
  sample_ = here.order(place.number - here.begin);
  return mixture_.begins_[place.source] + sample_;
}

uint32_t Mixture::Samples::occurrence() const noexcept {
  const Pass &begun = first_[last_.source], &here = passes_[last_.source];
  if (here.number == begun.number) return 0;
  // Once in each whole pass between, and in the first one unless the epoch before had it.
  const bool had = begun.begin + begun.order.inverse(sample_) >= before_[last_.source];
  return static_cast<uint32_t>(here.number - begun.number - 1) + (had ? 1 : 0);
}

template <typename Id>
void Mixture::fill(uint64_t seed, uint32_t epoch, uint64_t first, std::span<Id> out) const {
  Walk walk(*this, first);
  Samples samples(*this, seed, epoch, first);
  for (Id& id : out) id = static_cast<Id>(samples.at(walk.next()));
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
