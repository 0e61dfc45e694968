// Orders of samples, and each rank's share of them.
//
// "torch" repeats torch.randperm bit for bit: Fisher-Yates with MT19937, in two variants by size.
// "keyed" is a permutation that is computed position by position (permutation.h). "sub_batch" takes
// the order of a round and recombines its sub-batches (SubBatches in plan.h). "weighted" draws
// (sampling.h), "repeated" takes each sample of a "torch" order several times. All are then padded
// or cut to the epoch's length as DistributedSampler does. A rank's share of a global batch depends
// on the batch's size alone (batch_positions), so it is computed once for all full batches.
#include "plan/plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <numeric>
#include <optional>

#include "base/error.h"
#include "base/fnv.h"
#include "base/random.h"
#include "plan/buckets.h"
#include "plan/mixture.h"
#include "plan/permutation.h"
#include "plan/sampling.h"

namespace nostall::plan {
namespace {

// From this many elements on torch draws 64-bit numbers, to keep the bias of the modulus small, and
// shuffles inside out.
constexpr uint64_t kTorchWideFrom = std::numeric_limits<uint32_t>::max() / 20;
// Draws that run ahead of the swaps: they do not depend on the data, so that the swaps' cache
// misses overlap.
constexpr uint64_t kAhead = 64;

// r[0, n) is 0, 1, ...; element i is swapped with one not before it.
template <typename Index>
void shuffle_narrow(Mt19937& random, std::vector<Index>& order, const std::stop_token& stop) {
  const uint64_t n = order.size();
  std::iota(order.begin(), order.end(), Index{0});
  std::array<uint64_t, kAhead> targets;
  for (uint64_t begin = 0; begin + 1 < n && !stop.stop_requested(); begin += kAhead) {
    const uint64_t count = std::min(kAhead, n - 1 - begin);
    for (uint64_t k = 0; k < count; ++k) {
      const uint64_t i = begin + k;
      targets[k] = i + random() % static_cast<uint32_t>(n - i);
      __builtin_prefetch(&order[targets[k]], 1);
    }
    for (uint64_t k = 0; k < count; ++k) std::swap(order[begin + k], order[targets[k]]);
  }
}

// Element i is put at a place not after it; the value of that place moves to place i.
template <typename Index>
void shuffle_wide(Mt19937& random, std::vector<Index>& order, const std::stop_token& stop) {
  const uint64_t n = order.size();
  std::array<uint64_t, kAhead> targets;
  for (uint64_t begin = 0; begin < n && !stop.stop_requested(); begin += kAhead) {
    const uint64_t count = std::min(kAhead, n - begin);
    for (uint64_t k = 0; k < count; ++k) {
      const uint64_t high = random(), low = random();
      targets[k] = ((high << 32) | low) % (begin + k + 1);
      __builtin_prefetch(&order[targets[k]], 1);
    }
    for (uint64_t k = 0; k < count; ++k) {
      order[begin + k] = order[targets[k]];
      order[targets[k]] = static_cast<Index>(begin + k);
    }
  }
}

// torch.randperm(n, generator=torch.Generator().manual_seed(seed)) on the CPU.
template <typename Index>
void torch_randperm(uint64_t seed, std::vector<Index>& order, const std::stop_token& stop) {
  Mt19937 random(seed);
  if (order.size() < kTorchWideFrom) {
    shuffle_narrow(random, order, stop);
  } else {
    shuffle_wide(random, order, stop);
  }
}

uint64_t ceil_div(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

uint64_t order_world(const JobSpec& spec) {
  return spec.order_world == 0 ? spec.world : spec.order_world;
}

// Samples before padding and dropping.
uint64_t base_length(const JobSpec& spec) {
  switch (spec.order) {
    case OrderKind::user:
      return spec.user_order->size();
    case OrderKind::weighted:
      return spec.draws;
    case OrderKind::repeated:
      return repeated_length(spec.samples);
    case OrderKind::mixture:
      return spec.mixture->end() == Mixture::kEndless
                 ? ceil_div(spec.draws, spec.global_batch) * spec.global_batch
                 : spec.mixture->end();
    default:
      return spec.samples;
  }
}

// DistributedSampler's total_size.
uint64_t sampler_length(const JobSpec& spec) {
  const uint64_t length = base_length(spec), world = order_world(spec);
  if (spec.scheme == Scheme::whole) return length;
  if (spec.drop_last || spec.order == OrderKind::repeated) return length / world * world;
  return ceil_div(length, world) * world;
}

void fail(const std::string& what) { throw Error(ErrorKind::usage, what); }

void validate_mixture(const JobSpec& spec) {
  if (!spec.mixture) fail("there is no mixture to take the order of");
  uint64_t samples = 0;
  for (const uint64_t of_source : spec.mixture->spec().samples) samples += of_source;
  if (samples != spec.samples) {
    fail("the sources of the mixture have " + std::to_string(samples) +
         " samples, and the data set has " + std::to_string(spec.samples));
  }
  if (spec.mixture->end() == Mixture::kEndless && spec.draws == 0) {
    fail("an epoch of a mixture has at least one sample");
  }
}

void validate_sub_batches(const JobSpec& spec) {
  const SubBatches& s = spec.sub_batches;
  const uint64_t world = order_world(spec);
  if (s.reuse == 0 || s.resident == 0) fail("sub-batches must be resident and used at least once");
  if (s.resident > std::numeric_limits<uint32_t>::max() / world) {
    fail(std::to_string(s.resident) + " resident batches are more than a plan counts");
  }
  if (s.together == 0 || world % s.together != 0) {
    fail("groups of " + std::to_string(s.together) + " ranks do not divide a world of " +
         std::to_string(world));
  }
  if (spec.global_batch % world != 0) {
    fail("a global batch of " + std::to_string(spec.global_batch) +
         " has no equal sub-batches for " + std::to_string(world) + " ranks");
  }
  if (spec.scheme != Scheme::uniform) fail("sub-batches go with the scheme \"uniform\" only");
}

// How the sub-batches of one group of ranks are dealt in one pass over one chunk.
KeyedPermutation dealt(const JobSpec& spec, uint32_t round, const Pass& at, uint32_t group) {
  constexpr uint32_t kStream = 0x73756262;  // keeps these draws apart from all others
  const auto draw = philox4x32({round, static_cast<uint32_t>(at.chunk), group, kStream},
                               {uint32_t(spec.seed), uint32_t(spec.seed >> 32)});
  return {at.size * spec.sub_batches.together, uint64_t{draw[1]} << 32 | draw[0],
          static_cast<uint32_t>(at.pass)};
}

// One batch of a round, from the round's own order.
template <typename Id>
void deal(const JobSpec& spec, uint32_t round, const Pass& at, std::span<const Id> fresh,
          std::span<Id> batch) {
  const uint64_t size = spec.global_batch, world = order_world(spec);
  const uint64_t together = spec.sub_batches.together;
  const uint64_t first = at.chunk * spec.sub_batches.resident;
  if (at.pass == 0) {
    std::ranges::copy(fresh.subspan((first + at.place) * size, size), batch.begin());
    return;
  }
  for (uint32_t group = 0; group < world / together; ++group) {
    const KeyedPermutation dealer = dealt(spec, round, at, group);
    for (uint64_t k = 0; k < together; ++k) {
      const uint64_t unit = dealer(at.place * together + k);
      const uint64_t from = (first + unit / together) * size + group * together + unit % together;
      const uint64_t to = group * together + k;
      for (uint64_t i = 0; i < size; i += world) batch[to + i] = fresh[from + i];
    }
  }
}

// One epoch of a round, from the round's own order.
template <typename Id>
void recombine(const JobSpec& spec, uint32_t epoch, std::vector<Id>& order) {
  const std::vector<Id> fresh = order;
  const uint64_t size = spec.global_batch;
  for (uint64_t h = 0; h < order.size() / size; ++h) {
    deal<Id>(spec, epoch / spec.sub_batches.reuse, pass_of(spec, epoch, h), fresh,
             std::span(order).subspan(h * size, size));
  }
}

}  // namespace

void validate(const JobSpec& spec) {
  if (spec.samples == 0) fail("the data set has no samples");
  if (spec.world == 0) fail("the world size must be at least 1");
  if (spec.global_batch == 0) fail("the batch size must be at least 1");
  if (spec.epochs == 0) fail("the number of epochs must be at least 1");
  if (spec.order == OrderKind::sub_batch) validate_sub_batches(spec);
  if (spec.order == OrderKind::weighted) validate_weighted(spec);
  if (spec.order == OrderKind::mixture) validate_mixture(spec);
  if (spec.order == OrderKind::bucketed) validate_buckets(spec);
  if (spec.order == OrderKind::repeated && spec.times == 0) fail("a sample comes at least once");
  if (spec.order == OrderKind::user) {
    if (!spec.user_order || spec.user_order->empty()) fail("the user's order is empty");
    for (const SampleId id : *spec.user_order) {
      if (id >= spec.samples) {
        fail("the user's order names sample " + std::to_string(id) + ", but there are only " +
             std::to_string(spec.samples));
      }
    }
  }
}

uint64_t epoch_length(const JobSpec& spec) {
  const uint64_t length = sampler_length(spec);
  return spec.drop_last ? length / spec.global_batch * spec.global_batch : length;
}

uint64_t batches_per_epoch(const JobSpec& spec) {
  return ceil_div(epoch_length(spec), spec.global_batch);
}

uint64_t batches_in(const JobSpec& spec, uint32_t epoch) {
  const uint64_t batches = batches_per_epoch(spec);
  if (spec.steps == 0) return batches;
  return std::min(batches, spec.steps - std::min(spec.steps, epoch * batches));
}

uint64_t length_of(const JobSpec& spec, uint32_t epoch) {
  return std::min(epoch_length(spec), batches_in(spec, epoch) * spec.global_batch);
}

uint64_t largest_batch(const JobSpec& spec) {
  return std::min(spec.global_batch, epoch_length(spec));
}

bool repeats_or_leaves_out(const JobSpec& spec) {
  return spec.order == OrderKind::user || spec.order == OrderKind::sub_batch ||
         spec.order == OrderKind::weighted || spec.order == OrderKind::repeated ||
         spec.order == OrderKind::mixture || spec.steps > 0 || epoch_length(spec) < spec.samples;
}

namespace {

template <typename Id>
void fill_order(const JobSpec& spec, uint32_t epoch, std::vector<Id>& order,
                const std::stop_token& stop = {}) {
  const uint64_t base = base_length(spec), length = epoch_length(spec);
  order.resize(base);
  switch (spec.order) {
    case OrderKind::torch:
      torch_randperm(spec.seed + epoch, order, stop);
      break;
    case OrderKind::sub_batch:
      torch_randperm(spec.seed + epoch / spec.sub_batches.reuse, order, stop);
      break;
    case OrderKind::keyed: {
      const KeyedPermutation permutation(spec.samples, spec.seed, epoch);
      if constexpr (sizeof(Id) == sizeof(uint32_t)) {
        if (base < KeyedPermutation::kFillBelow) {
          permutation.fill(order);
          break;
        }
      }
      for (uint64_t i = 0; i < base; ++i) order[i] = static_cast<Id>(permutation(i));
      break;
    }
    case OrderKind::user:
      std::transform(spec.user_order->begin(), spec.user_order->end(), order.begin(),
                     [](SampleId id) { return static_cast<Id>(id); });
      break;
    case OrderKind::sequential:
      std::iota(order.begin(), order.end(), Id{0});
      break;
    case OrderKind::weighted:
      draw_weighted(spec, epoch, order);
      break;
    case OrderKind::repeated: {
      std::vector<Id> drawn(spec.samples);
      torch_randperm(spec.seed + epoch, drawn, stop);
      for (uint64_t i = 0; i < base; ++i) order[i] = drawn[i / spec.times];
      break;
    }
    case OrderKind::mixture: {
      const bool endless = spec.mixture->end() == Mixture::kEndless;
      spec.mixture->fill<Id>(spec.seed, epoch, endless ? epoch * length : 0, order);
      break;
    }
    case OrderKind::bucketed:
      fill_bucketed(spec, epoch, order);
      break;
  }
  // Padding wraps around as often as it must; dropping cuts the tail.
  order.resize(length);
  for (uint64_t i = base; i < length; ++i) order[i] = order[i % base];
  if (spec.order == OrderKind::sub_batch && spec.sub_batches.reuse > 1) {
    recombine(spec, epoch, order);
  }
  order.resize(length_of(spec, epoch));
}

}  // namespace

Pass pass_of(const JobSpec& spec, uint32_t epoch, uint64_t batch) {
  const SubBatches& s = spec.sub_batches;
  const uint64_t whole = epoch_length(spec) / spec.global_batch;
  if (spec.order != OrderKind::sub_batch || batch >= whole) return {};
  // In the round's batches: all chunks have `resident` of them, the last one what is left.
  const uint64_t at = (epoch % s.reuse) * whole + batch;
  const uint64_t chunk = std::min(at / (s.resident * s.reuse), ceil_div(whole, s.resident) - 1);
  const uint64_t size = std::min(s.resident, whole - chunk * s.resident);
  const uint64_t within = at - chunk * s.resident * s.reuse;
  return {chunk, within / size, within % size, size};
}

void deal_into(const JobSpec& spec, uint32_t round, const Pass& at, std::span<const uint32_t> fresh,
               std::span<uint32_t> batch) {
  deal(spec, round, at, fresh, batch);
}

std::vector<SampleId> epoch_order(const JobSpec& spec, uint32_t epoch) {
  std::vector<SampleId> order;
  if (spec.samples > std::numeric_limits<uint32_t>::max()) {
    fill_order(spec, epoch, order);
  } else {
    // Half the memory to shuffle in.
    std::vector<uint32_t> narrow;
    fill_order(spec, epoch, narrow);
    order.assign(narrow.begin(), narrow.end());
  }
  return order;
}

void epoch_order_into(const JobSpec& spec, uint32_t epoch, std::vector<uint32_t>& order,
                      const std::stop_token& stop) {
  if (spec.samples > std::numeric_limits<uint32_t>::max()) {
    fail("placement and owners are planned for fewer than 2^32 samples, not " +
         std::to_string(spec.samples));
  }
  fill_order(spec, epoch, order, stop);
}

namespace {

// Where the ranks before `rank` end. Half of the ranks take four times as much as the others: see
// Scheme::imbalanced.
uint64_t imbalanced_begin(const JobSpec& spec, uint64_t rank, uint64_t size) {
  const uint64_t heavy_ranks = spec.world / 2;
  const uint64_t whole = 4 * heavy_ranks + (spec.world - heavy_ranks);
  const uint64_t before = rank <= heavy_ranks ? 4 * rank : 4 * heavy_ranks + (rank - heavy_ranks);
  return size * before / whole;
}

}  // namespace

uint64_t batch_share(const JobSpec& spec, uint32_t rank, uint64_t size) {
  if (spec.scheme == Scheme::whole) return size;
  if (spec.scheme == Scheme::uniform)
    return ceil_div(size - std::min<uint64_t>(rank, size), spec.world);
  return imbalanced_begin(spec, uint64_t{rank} + 1, size) - imbalanced_begin(spec, rank, size);
}

std::vector<uint64_t> batch_positions(const JobSpec& spec, uint32_t rank, uint64_t size) {
  std::vector<uint64_t> positions;
  if (spec.scheme == Scheme::whole) {
    positions.resize(size);
    std::iota(positions.begin(), positions.end(), uint64_t{0});
  } else if (spec.scheme == Scheme::uniform) {
    for (uint64_t p = rank; p < size; p += spec.world) positions.push_back(p);
  } else {
    positions.resize(batch_share(spec, rank, size));
    std::iota(positions.begin(), positions.end(), imbalanced_begin(spec, rank, size));
  }
  return positions;
}

RankEpoch rank_epoch(const JobSpec& spec, const std::vector<SampleId>& order, uint32_t rank) {
  RankEpoch result;
  const uint64_t batches = ceil_div(order.size(), spec.global_batch);
  result.batch_ends.reserve(batches);
  result.samples.reserve(spec.scheme == Scheme::whole ? order.size()
                                                      : order.size() / spec.world + batches);
  const std::vector<uint32_t> before = occurrences(spec, order);
  const auto take = [&](uint64_t position) {
    result.samples.push_back(order[position]);
    if (!before.empty()) result.occurrences.push_back(before[position]);
  };
  const std::vector<uint64_t> full = batch_positions(spec, rank, largest_batch(spec));
  for (uint64_t h = 0; h < batches; ++h) {
    const uint64_t begin = h * spec.global_batch;
    const uint64_t size = std::min<uint64_t>(spec.global_batch, order.size() - begin);
    if (size == spec.global_batch) {
      for (const uint64_t p : full) take(begin + p);
    } else {
      for (const uint64_t p : batch_positions(spec, rank, size)) take(begin + p);
    }
    result.batch_ends.push_back(result.samples.size());
  }
  return result;
}

RankEpoch rank_epoch(const JobSpec& spec, uint32_t epoch, uint32_t rank) {
  return rank_epoch(spec, epoch_order(spec, epoch), rank);
}

namespace {

// The samples of an epoch at places that are asked for in rising order, of an order that
// found_by_place().
class Places {
 public:
  // `dense`: most places are asked for.
  Places(const JobSpec& spec, uint32_t epoch, bool dense)
      : kind_(spec.order), base_(base_length(spec)), permutation_(spec.samples, spec.seed, epoch) {
    // Many at a time cost less than one.
    dense_ = dense && spec.samples < KeyedPermutation::kFillBelow;
    if (kind_ != OrderKind::mixture) return;
    mixture_ = spec.mixture.get();
    if (mixture_->end() == Mixture::kEndless) begin_ = uint64_t{epoch} * epoch_length(spec);
    samples_.emplace(*mixture_, spec.seed, epoch, begin_);
  }

  SampleId at(uint64_t place, uint32_t& occurrence) {
    const uint64_t within = place % base_;  // behind the base comes what pads the epoch
    if (kind_ == OrderKind::sequential) return within;
    if (kind_ == OrderKind::keyed) return dense_ ? keyed(within) : permutation_(within);
    const uint64_t wanted = begin_ + within;
    if (!walk_ || walk_->place() > wanted) walk_.emplace(*mixture_, wanted);
    while (walk_->place() < wanted) walk_->next();
    const SampleId sample = samples_->at(walk_->next());
    // Where an epoch is padded no source repeats (found_by_place).
    occurrence = samples_->occurrence() + static_cast<uint32_t>(place / base_);
    return sample;
  }

 private:
  SampleId keyed(uint64_t place) {
    if (place < first_ || place - first_ >= filled_) {
      first_ = place;
      filled_ = std::min<uint64_t>(block_.size(), base_ - place);
      permutation_.fill(std::span(block_).first(filled_), first_);
    }
    return block_[place - first_];
  }

  OrderKind kind_;
  uint64_t base_;
  KeyedPermutation permutation_;
  bool dense_ = false;
  std::array<uint32_t, 512> block_;
  uint64_t first_ = 0, filled_ = 0;  // of `block_`
  const Mixture* mixture_ = nullptr;
  uint64_t begin_ = 0;  // the epoch's first place of the mixture
  std::optional<Mixture::Walk> walk_;
  std::optional<Mixture::Samples> samples_;
};

}  // namespace

bool found_by_place(const JobSpec& spec) {
  if (spec.order == OrderKind::mixture) {
    // What pads an epoch may have come several times before, where sources repeat.
    return spec.mixture->end() != Mixture::kEndless || epoch_length(spec) <= base_length(spec);
  }
  return spec.order == OrderKind::keyed || spec.order == OrderKind::sequential;
}

RankEpoch rank_batches(const JobSpec& spec, uint32_t epoch, uint32_t rank, uint64_t first,
                       uint64_t end) {
  RankEpoch part;
  if (!found_by_place(spec)) {
    RankEpoch whole = rank_epoch(spec, epoch, rank);
    if (first == 0 && end == whole.batch_ends.size()) return whole;
    const uint64_t begin = first == 0 ? 0 : whole.batch_ends[first - 1];
    for (uint64_t h = first; h < end; ++h) part.batch_ends.push_back(whole.batch_ends[h] - begin);
    const auto cut = [&](const auto& from, auto& to) {
      if (from.empty() || first == end) return;
      to.assign(from.begin() + static_cast<ptrdiff_t>(begin),
                from.begin() + static_cast<ptrdiff_t>(whole.batch_ends[end - 1]));
    };
    cut(whole.samples, part.samples);
    cut(whole.occurrences, part.occurrences);
    return part;
  }
  const uint64_t length = length_of(spec, epoch);
  const std::vector<uint64_t> full = batch_positions(spec, rank, largest_batch(spec));
  constexpr uint64_t kFillCost = 8;  // how many places are filled in the time of one look-up
  Places places(spec, epoch, full.size() * kFillCost >= largest_batch(spec));
  part.samples.reserve(full.size() * (end - first));
  part.batch_ends.reserve(end - first);
  bool again = false;
  for (uint64_t h = first; h < end; ++h) {
    const uint64_t begin = h * spec.global_batch;
    const uint64_t size = std::min(spec.global_batch, length - begin);
    const std::vector<uint64_t> last =
        size < spec.global_batch ? batch_positions(spec, rank, size) : std::vector<uint64_t>{};
    for (const uint64_t p : size < spec.global_batch ? last : full) {
      uint32_t occurrence = 0;
      part.samples.push_back(places.at(begin + p, occurrence));
      if (spec.order == OrderKind::mixture) part.occurrences.push_back(occurrence);
      again = again || occurrence > 0;
    }
    part.batch_ends.push_back(part.samples.size());
  }
  if (!again) part.occurrences.clear();
  return part;
}

std::vector<uint32_t> occurrences(const JobSpec& spec, std::span<const SampleId> order) {
  if (spec.order != OrderKind::user && spec.order != OrderKind::weighted &&
      spec.order != OrderKind::repeated && spec.order != OrderKind::mixture) {
    return {};
  }
  std::vector<uint32_t> seen(spec.samples), before(order.size());
  bool again = false;
  for (size_t i = 0; i < order.size(); ++i) {
    before[i] = seen[order[i]]++;
    again = again || before[i] > 0;
  }
  return again ? before : std::vector<uint32_t>{};
}

uint64_t fingerprint(const JobSpec& spec) {
  Fnv hash;
  for (const uint64_t value :
       {uint64_t{kOrderVersion}, uint64_t{spec.samples}, uint64_t{spec.global_batch},
        uint64_t{spec.epochs}, uint64_t{spec.world}, uint64_t{order_world(spec)},
        uint64_t{spec.seed}, uint64_t{spec.drop_last}, static_cast<uint64_t>(spec.order),
        static_cast<uint64_t>(spec.scheme)}) {
    hash.number(value);
  }
  if (spec.order == OrderKind::user) {
    for (const SampleId id : *spec.user_order) hash.number(id);
  } else if (spec.order == OrderKind::sub_batch) {
    hash.number(spec.sub_batches.reuse)
        .number(spec.sub_batches.resident)
        .number(spec.sub_batches.together);
  } else if (spec.order == OrderKind::weighted) {
    hash.number(spec.draws).number(spec.replacement);
    for (const double weight : *spec.weights) hash.number(std::bit_cast<uint64_t>(weight));
  } else if (spec.order == OrderKind::repeated) {
    hash.number(spec.times);
  } else if (spec.order == OrderKind::mixture) {
    hash.number(spec.draws).number(spec.mixture->fingerprint());
  } else if (spec.order == OrderKind::bucketed) {
    for (const uint32_t bucket : *spec.buckets) hash.word(bucket);
  }
  hash.number(spec.steps);
  return hash.value();
}

}  // namespace nostall::plan
