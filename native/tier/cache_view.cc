// Translates the numbers of a choice of samples to those of the cache, call by call.
#include "tier/cache_view.h"

#include <utility>

namespace nostall::tier {
namespace {

class CacheView final : public NodeCache {
 public:
  CacheView(std::shared_ptr<NodeCache> whole, std::vector<uint64_t> numbers)
      : whole_(std::move(whole)), numbers_(std::move(numbers)) {
    sums_ = SampleSums(&word, this, numbers_.empty() ? whole_->sums().size() : numbers_.size());
  }

  State state(uint64_t s) const noexcept override { return whole_->state(of(s)); }
  TierKind kind(uint64_t s) const noexcept override { return whole_->kind(of(s)); }
  size_t tier_of(uint64_t s) const noexcept override { return whole_->tier_of(of(s)); }
  bool placed(uint64_t s) const noexcept override { return whole_->placed(of(s)); }
  bool claim(uint64_t s) noexcept override { return whole_->claim(of(s)); }
  std::span<std::byte> ram_slot(uint64_t s) override { return whole_->ram_slot(of(s)); }
  void file_write(uint64_t s, std::span<const std::byte> bytes) override {
    whole_->file_write(of(s), bytes);
  }
  void publish(uint64_t s) noexcept override { whole_->publish(of(s)); }
  void abandon(uint64_t s) noexcept override { whole_->abandon(of(s)); }
  void try_again() override { whole_->try_again(); }
  RamView ram_view(uint64_t s) const noexcept override { return whole_->ram_view(of(s)); }
  bool file_read(uint64_t s, std::span<std::byte> into) override {
    return whole_->file_read(of(s), into);
  }
  void file_read(std::span<TierRead> reads, RecordReader& reader) override {
    std::vector<TierRead> theirs(reads.begin(), reads.end());
    for (TierRead& read : theirs) read.sample = of(read.sample);
    whole_->file_read(theirs, reader);
    for (size_t i = 0; i < reads.size(); ++i) reads[i].good = theirs[i].good;
  }
  SampleSums& sums() noexcept override { return sums_; }
  void reject(uint64_t s) noexcept override { whole_->reject(of(s)); }
  State wait(uint64_t s, std::chrono::nanoseconds timeout, std::stop_token stop) override {
    return whole_->wait(of(s), timeout, std::move(stop));
  }
  std::optional<PeerFailure> dead_peer() const override { return std::nullopt; }
  uint64_t ram_bytes() const noexcept override { return whole_->ram_bytes(); }
  uint64_t file_bytes() const noexcept override { return whole_->file_bytes(); }

 private:
  uint64_t of(uint64_t s) const noexcept { return numbers_.empty() ? s : numbers_[s]; }
  static std::atomic<uint32_t>& word(const void* view, uint64_t s) noexcept {
    const auto* self = static_cast<const CacheView*>(view);
    return self->whole_->sums().word(self->of(s));
  }

  const std::shared_ptr<NodeCache> whole_;
  const std::vector<uint64_t> numbers_;
  SampleSums sums_;
};

}  // namespace

std::unique_ptr<NodeCache> view_of(std::shared_ptr<NodeCache> whole,
                                   std::vector<uint64_t> numbers) {
  return std::make_unique<CacheView>(std::move(whole), std::move(numbers));
}

}  // namespace nostall::tier
