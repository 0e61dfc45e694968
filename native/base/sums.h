// base/sums.h - one checksum per sample, learned when it is read first and compared ever after.
//
// The checksum is the CRC32C of the sample's bytes; one of 0 is kept as 1, for 0 says that it is
// not known yet. The words lie in memory of the table's own or in memory that processes share; the
// first one that learns a checksum decides, all others compare.
// Thread-safety: all methods may be called from any thread, and by all processes that share words.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

namespace nostall {

// The checksum of a sample: never 0.
uint32_t sample_sum(std::span<const std::byte> bytes) noexcept;
inline uint32_t sample_sum_of_crc(uint32_t crc) noexcept { return crc == 0 ? 1 : crc; }

class SampleSums {
 public:
  SampleSums() = default;
  // All unknown; memory is taken as checksums are learned. Throws std::bad_alloc.
  explicit SampleSums(uint64_t samples);
  // Words of another owner, which keeps them while this object lives.
  SampleSums(std::atomic<uint32_t>* words, uint64_t samples) noexcept
      : words_(words), samples_(samples) {}
  // Words that others own one by one; `owner` finds them, and outlives this object.
  using Find = std::atomic<uint32_t>& (*)(const void* owner, uint64_t sample) noexcept;
  SampleSums(Find find, const void* owner, uint64_t samples) noexcept
      : samples_(samples), find_(find), owner_(owner) {}

  uint64_t size() const noexcept { return samples_; }
  // Where the checksum of a sample lies.
  std::atomic<uint32_t>& word(uint64_t sample) const noexcept {
    return find_ ? find_(owner_, sample) : words_[sample];
  }
  // 0: not known yet.
  uint32_t of(uint64_t sample) const noexcept {
    return word(sample).load(std::memory_order_relaxed);
  }
  // Whether the sample has this checksum, which is learned if none is known.
  bool agrees(uint64_t sample, uint32_t sum) noexcept {
    std::atomic<uint32_t>& learned = word(sample);
    uint32_t known = learned.load(std::memory_order_relaxed);
    return known == sum ||
           (known == 0 && (learned.compare_exchange_strong(known, sum, std::memory_order_relaxed) ||
                           known == sum));
  }
  bool agrees(uint64_t sample, std::span<const std::byte> bytes) noexcept {
    return agrees(sample, sample_sum(bytes));
  }
  // What is read next decides anew: what was learned is of bytes that are of no use.
  void forget(uint64_t sample) noexcept { word(sample).store(0, std::memory_order_relaxed); }
  // Takes over what is known there and not here.
  void learn(const SampleSums& other) noexcept;
  uint64_t known() const noexcept;

 private:
  struct Free {
    void operator()(std::atomic<uint32_t>* words) const noexcept { std::free(words); }
  };
  std::unique_ptr<std::atomic<uint32_t>, Free> own_;
  std::atomic<uint32_t>* words_ = nullptr;
  uint64_t samples_ = 0;
  Find find_ = nullptr;
  const void* owner_ = nullptr;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);

}  // namespace nostall
