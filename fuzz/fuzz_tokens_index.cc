// The parser of stored token indexes must take any bytes: an index that is stored as the same bytes,
// or an error. The checksum is repaired first, or nothing would get past it.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "base/crc32c.h"
#include "tokens/stream.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 4) return 0;
  std::vector<std::byte> bytes(size);
  std::memcpy(bytes.data(), data, size);
  const uint32_t crc = nostall::crc32c(std::span(bytes).first(size - 4));
  std::memcpy(bytes.data() + size - 4, &crc, 4);
  const auto index = nostall::tokens::parse_index(bytes);
  if (index && nostall::tokens::serialize_index(index.value()) != bytes) std::abort();
  return 0;
}
