// The table of checksums: zeroed pages from calloc, filled as samples are read.
#include "base/sums.h"

#include <algorithm>
#include <new>

#include "base/crc32c.h"

namespace nostall {

uint32_t sample_sum(std::span<const std::byte> bytes) noexcept {
  return sample_sum_of_crc(crc32c(bytes));
}

SampleSums::SampleSums(uint64_t samples) : samples_(samples) {
  // Zeroed pages of the system, which are not there before they are written to.
  void* memory = std::calloc(std::max<uint64_t>(1, samples), sizeof(std::atomic<uint32_t>));
  if (!memory) throw std::bad_alloc();
  own_.reset(static_cast<std::atomic<uint32_t>*>(memory));
  words_ = own_.get();
}

void SampleSums::learn(const SampleSums& other) noexcept {
  for (uint64_t s = 0; s < std::min(samples_, other.samples_); ++s) {
    const uint32_t sum = other.of(s);
    uint32_t unknown = 0;
    if (sum != 0) word(s).compare_exchange_strong(unknown, sum, std::memory_order_relaxed);
  }
}

uint64_t SampleSums::known() const noexcept {
  uint64_t count = 0;
  for (uint64_t s = 0; s < samples_; ++s) count += of(s) != 0;
  return count;
}

}  // namespace nostall
