#include "base/crc32c.h"

#include <array>
#include <cstring>

namespace nostall {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;  // reflected Castagnoli

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1u) ? kPolynomial : 0u);
    table[i] = c;
  }
  return table;
}

uint32_t portable(std::span<const std::byte> bytes, uint32_t crc) noexcept {
  static constexpr std::array<uint32_t, 256> kTable = make_table();
  for (const std::byte b : bytes) crc = (crc >> 8) ^ kTable[(crc ^ uint32_t(b)) & 0xffu];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(std::span<const std::byte> bytes,
                                                          uint32_t crc) noexcept {
  uint64_t c = crc;
  const std::byte* p = bytes.data();
  size_t left = bytes.size();
  for (; left >= 8; left -= 8, p += 8) {
    uint64_t word;
    std::memcpy(&word, p, 8);
    c = __builtin_ia32_crc32di(c, word);
  }
  auto narrow = static_cast<uint32_t>(c);
  for (; left > 0; --left, ++p) narrow = __builtin_ia32_crc32qi(narrow, uint8_t(*p));
  return narrow;
}
#endif

}  // namespace

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc) noexcept {
  crc = ~crc;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return ~by_instruction(bytes, crc);
#endif
  return ~portable(bytes, crc);
}

}  // namespace nostall
