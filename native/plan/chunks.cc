// Which samples of a chunk a node uses again, by walking the batches of all its passes; their places.
#include "plan/chunks.h"

#include <algorithm>
#include <numeric>

namespace nostall::plan {
namespace {

// How many rounds are looked at for the largest chunk: later ones differ little from these.
constexpr uint64_t kRounds = 2;

uint64_t whole_batches(const JobSpec& spec) { return epoch_length(spec) / spec.global_batch; }

// The spec whose epochs are the rounds' own orders.
JobSpec rounds_of(const JobSpec& spec) {
  JobSpec rounds = spec;
  rounds.sub_batches.reuse = 1;
  rounds.steps = 0;
  return rounds;
}

}  // namespace

bool has_chunks(const JobSpec& spec) noexcept {
  return spec.order == OrderKind::sub_batch && spec.sub_batches.reuse > 1 &&
         whole_batches(spec) > 0;
}

std::optional<uint64_t> KeptChunk::find(SampleId sample) const {
  const auto at = std::lower_bound(samples.begin(), samples.end(), sample);
  if (at == samples.end() || *at != sample) return std::nullopt;
  return static_cast<uint64_t>(at - samples.begin());
}

Chunks::Chunks(const JobSpec& spec, uint32_t first_rank, uint32_t ranks,
               std::span<const uint64_t> sizes)
    : spec_(spec),
      sizes_(sizes),
      whole_(whole_batches(spec)),
      per_round_((whole_ + spec.sub_batches.resident - 1) / spec.sub_batches.resident) {
  for (uint32_t r = first_rank; r < first_rank + ranks; ++r) {
    const auto of_rank = batch_positions(spec, r, spec.global_batch);
    positions_.insert(positions_.end(), of_rank.begin(), of_rank.end());
  }
  std::sort(positions_.begin(), positions_.end());
}

uint64_t Chunks::number(uint32_t epoch, uint64_t batch) const noexcept {
  const uint64_t round = epoch / spec_.sub_batches.reuse;
  return round * per_round_ + pass_of(spec_, epoch, std::min(batch, whole_ - 1)).chunk;
}

std::shared_ptr<const Chunks::Order> Chunks::order_of(uint32_t round) const {
  const MutexLock lock(mutex_);
  if (!order_ || round_ != round) {
    auto order = std::make_shared<Order>();
    epoch_order_into(rounds_of(spec_), round, *order);
    order_ = std::move(order);
    round_ = round;
  }
  return order_;
}

std::vector<SampleId> Chunks::used_again(uint64_t number) const {
  const auto round = static_cast<uint32_t>(number / per_round_);
  const std::shared_ptr<const Order> fresh = order_of(round);
  Pass at;
  at.chunk = number % per_round_;
  at.size = std::min(spec_.sub_batches.resident, whole_ - at.chunk * spec_.sub_batches.resident);
  Order batch(spec_.global_batch), uses;
  for (at.pass = 0; at.pass < spec_.sub_batches.reuse; ++at.pass) {
    for (at.place = 0; at.place < at.size; ++at.place) {
      deal_into(spec_, round, at, *fresh, batch);
      for (const uint64_t p : positions_) uses.push_back(batch[p]);
    }
  }
  // By sample, then by place: each sample's first use comes first of its own.
  std::vector<uint64_t> ranked(uses.size());
  std::iota(ranked.begin(), ranked.end(), uint64_t{0});
  std::sort(ranked.begin(), ranked.end(),
            [&](uint64_t a, uint64_t b) { return uses[a] != uses[b] ? uses[a] < uses[b] : a < b; });
  std::vector<uint64_t> first;
  for (size_t i = 0, end = 0; i < ranked.size(); i = end) {
    while (end < ranked.size() && uses[ranked[end]] == uses[ranked[i]]) ++end;
    if (end - i > 1) first.push_back(ranked[i]);
  }
  std::sort(first.begin(), first.end());
  std::vector<SampleId> samples(first.size());
  std::transform(first.begin(), first.end(), samples.begin(), [&](uint64_t u) { return uses[u]; });
  return samples;
}

HalfShape Chunks::shape(uint64_t ram_bytes, uint32_t first_epoch) const {
  const uint64_t reuse = spec_.sub_batches.reuse, rounds = (spec_.epochs + reuse - 1) / reuse;
  const uint64_t begin = std::min(first_epoch / reuse, rounds - 1);
  HalfShape half;
  uint64_t all = 0;  // bytes of a round that chunks could keep
  for (uint64_t round = begin; round < std::min(begin + kRounds, rounds); ++round) {
    all = 0;
    for (uint64_t c = 0; c < per_round_; ++c) {
      uint64_t bytes = 0;
      const std::vector<SampleId> samples = used_again(round * per_round_ + c);
      for (const SampleId s : samples) bytes += sizes_[s];
      all += bytes;
      half.bytes = std::max(half.bytes, bytes);
      half.places = std::max<uint64_t>(half.places, samples.size());
    }
  }
  if (half.bytes == 0) return {};
  const uint64_t largest = half.bytes;
  half.bytes = std::min(half.bytes, ram_bytes / 2);
  // Bytes that a round is spared: a kept sample of a chunk at all uses but its first, one that a
  // tier holds for the whole job at all.
  const double kept = static_cast<double>(all) * static_cast<double>(half.bytes) /
                      static_cast<double>(largest) * static_cast<double>(reuse - 1);
  const auto held = static_cast<double>(ram_bytes - 2 * half.bytes);
  return kept + held > static_cast<double>(ram_bytes) * static_cast<double>(reuse) ? half
                                                                                   : HalfShape{};
}

KeptChunk Chunks::keep(uint64_t number, const HalfShape& half,
                       const std::function<bool(SampleId)>& elsewhere) const {
  struct Kept {
    SampleId sample;
    uint64_t offset;
    uint32_t turn;  // among those kept, by first use
  };
  std::vector<Kept> kept;
  uint64_t end = 0;
  for (const SampleId s : used_again(number)) {
    if (kept.size() == half.places) break;
    if (elsewhere(s) || sizes_[s] > half.bytes - end) continue;
    kept.push_back({s, end, static_cast<uint32_t>(kept.size())});
    end += sizes_[s];
  }
  std::sort(kept.begin(), kept.end(),
            [](const Kept& a, const Kept& b) { return a.sample < b.sample; });
  KeptChunk chunk;
  chunk.fill.resize(kept.size());
  for (uint32_t i = 0; i < kept.size(); ++i) {
    chunk.samples.push_back(kept[i].sample);
    chunk.offsets.push_back(kept[i].offset);
    chunk.fill[kept[i].turn] = i;
  }
  return chunk;
}

}  // namespace nostall::plan
