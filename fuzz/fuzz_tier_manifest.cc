// The same for the manifest of a kept tier file.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/crc32c.h"
#include "tier/record.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::byte> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), data, size);
  constexpr uint64_t kDataset = 0x0101010101010101;
  static_cast<void>(nostall::tier::parse_manifest(bytes, kDataset));
  if (size < 4) return 0;
  const uint32_t crc = nostall::crc32c(std::span(bytes).first(size - 4));
  for (size_t i = 0; i < 4; ++i) bytes[size - 4 + i] = std::byte((crc >> (8 * i)) & 0xff);
  const auto manifest = nostall::tier::parse_manifest(bytes, kDataset);
  if (!manifest) return 0;
  std::vector<std::byte> again;
  const auto& records = manifest.value().records;
  nostall::tier::write_manifest(
      kDataset, manifest.value().stamp, records.size(),
      [&, i = size_t{0}]() mutable { return records[i++]; },
      [&](std::span<const std::byte> piece) {
        again.insert(again.end(), piece.begin(), piece.end());
        return 0;
      });
  if (again != bytes) std::abort();
  return 0;
}
