// The parser of stored indexes must take any bytes: it gives an index that serialises back to the
// same content, or an error. The checksum is repaired first, or nothing would get past it.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/crc32c.h"
#include "source/index.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<std::byte> bytes(size);
  if (size > 0) std::memcpy(bytes.data(), data, size);
  constexpr uint64_t kOptions = 1;
  static_cast<void>(nostall::source::parse_index(bytes, kOptions));
  if (size < 4) return 0;
  const uint32_t crc = nostall::crc32c(std::span(bytes).first(size - 4));
  for (size_t i = 0; i < 4; ++i) bytes[size - 4 + i] = std::byte((crc >> (8 * i)) & 0xff);
  const auto index = nostall::source::parse_index(bytes, kOptions);
  if (index && nostall::source::serialize_index(index.value(), kOptions) != bytes) std::abort();
  return 0;
}
