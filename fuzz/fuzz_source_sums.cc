// The same for stored checksums.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/crc32c.h"
#include "source/sums.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::byte> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), data, size);
  constexpr uint64_t kDataset = 0x0101010101010101, kSamples = 3;
  nostall::SampleSums first(kSamples), second(kSamples);
  static_cast<void>(nostall::source::parse_sums(bytes, kDataset, first));
  if (size < 4) return 0;
  const uint32_t crc = nostall::crc32c(std::span(bytes).first(size - 4));
  for (size_t i = 0; i < 4; ++i) bytes[size - 4 + i] = std::byte((crc >> (8 * i)) & 0xff);
  const auto stamp = nostall::source::parse_sums(bytes, kDataset, second);
  if (stamp && nostall::source::serialize_sums(kDataset, stamp.value(), second) != bytes) {
    std::abort();
  }
  return 0;
}
