// CRC32C. With the instruction (SSE4.2, ARM's CRC32), three blocks are summed side by side and then
// combined: a CRC is linear, so the CRC of AB is that of A, advanced by the length of B, plus that of
// B. With products of 512 bits without carries, 256 bytes at a time are advanced onto those that
// follow, until 64 are left. Without the instruction, each byte is looked up in a table of 256 entries.
// Advancing is a product of polynomials modulo the CRC's own; crc32c_between uses the same product to
// take a part of unknown bytes out of a known whole.
#include "base/crc32c.h"

#include <array>
#include <cstring>

#include "base/processor.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#endif

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

// Polynomials modulo that of CRC32C, reflected: bit 31 is 1, bit 30 is x.
constexpr uint32_t product(uint32_t a, uint32_t b) noexcept {
  uint32_t sum = 0;
  for (uint32_t bit = uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if ((a & bit) != 0) sum ^= b;
    b = (b >> 1) ^ ((b & 1u) ? kPolynomial : 0u);
  }
  return sum;
}

// x is its own power again after so many steps.
constexpr uint64_t kOrder = (uint64_t{1} << 31) - 1;

constexpr uint32_t power_of_x(uint64_t exponent) noexcept {
  uint32_t result = uint32_t{1} << 31, square = uint32_t{1} << 30;
  for (; exponent != 0; exponent >>= 1) {
    if ((exponent & 1u) != 0) result = product(result, square);
    square = product(square, square);
  }
  return result;
}

constexpr uint64_t bits_of(uint64_t bytes) noexcept { return bytes % kOrder * 8 % kOrder; }

#if defined(__x86_64__)
#define NOSTALL_CRC __attribute__((target("sse4.2,crc32")))
constexpr const char* kInstruction = "SSE4.2";
NOSTALL_CRC inline uint64_t add(uint64_t crc, uint64_t word) noexcept {
  return __builtin_ia32_crc32di(crc, word);
}
NOSTALL_CRC inline uint32_t add(uint32_t crc, uint8_t byte) noexcept {
  return __builtin_ia32_crc32qi(crc, byte);
}
#elif defined(__aarch64__)
#if defined(__clang__)
#define NOSTALL_CRC __attribute__((target("crc")))
#else
#define NOSTALL_CRC __attribute__((target("+crc")))
#endif
constexpr const char* kInstruction = "CRC32";
NOSTALL_CRC inline uint64_t add(uint64_t crc, uint64_t word) noexcept {
  return __crc32cd(static_cast<uint32_t>(crc), word);
}
NOSTALL_CRC inline uint32_t add(uint32_t crc, uint8_t byte) noexcept {
  return __crc32cb(crc, byte);
}
#endif

#if defined(NOSTALL_CRC)
// What kBytes bytes of zero do to a register, looked up one byte of the register at a time.
template <uint64_t kBytes>
struct Zeros {
  using Tables = std::array<std::array<uint32_t, 256>, 4>;
  static constexpr Tables make() {
    Tables tables{};
    const uint32_t power = power_of_x(bits_of(kBytes));
    for (unsigned byte = 0; byte < 4; ++byte) {
      for (uint32_t value = 0; value < 256; ++value) {
        tables[byte][value] = product(value << (8 * byte), power);
      }
    }
    return tables;
  }
  static constexpr Tables kTables = make();
  static uint32_t after(uint64_t crc) noexcept {
    return kTables[0][crc & 0xff] ^ kTables[1][(crc >> 8) & 0xff] ^ kTables[2][(crc >> 16) & 0xff] ^
           kTables[3][(crc >> 24) & 0xff];
  }
};

uint64_t word_at(const std::byte* p) noexcept {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

// The instruction takes three cycles, but one can begin in each: three blocks side by side.
template <uint64_t kBlock>
NOSTALL_CRC uint32_t three_blocks(const std::byte* p, uint32_t crc) noexcept {
  uint64_t a = crc, b = 0, c = 0;
  for (const std::byte* const end = p + kBlock; p < end; p += 8) {
    a = add(a, word_at(p));
    b = add(b, word_at(p + kBlock));
    c = add(c, word_at(p + 2 * kBlock));
  }
  const uint32_t both = Zeros<kBlock>::after(a) ^ static_cast<uint32_t>(b);
  return Zeros<kBlock>::after(both) ^ static_cast<uint32_t>(c);
}

NOSTALL_CRC uint32_t by_instruction(std::span<const std::byte> bytes, uint32_t crc) noexcept {
  constexpr uint64_t kLong = 4096, kShort = 256;
  const std::byte* p = bytes.data();
  size_t left = bytes.size();
  for (; left >= 3 * kLong; left -= 3 * kLong, p += 3 * kLong) crc = three_blocks<kLong>(p, crc);
  for (; left >= 3 * kShort; left -= 3 * kShort, p += 3 * kShort) {
    crc = three_blocks<kShort>(p, crc);
  }
  uint64_t c = crc;
  for (; left >= 8; left -= 8, p += 8) c = add(c, word_at(p));
  auto narrow = static_cast<uint32_t>(c);
  for (; left > 0; --left, ++p) narrow = add(narrow, uint8_t(*p));
  return narrow;
}
#endif

#if defined(__x86_64__)
#define NOSTALL_FOLD __attribute__((target("avx512f,avx512dq,vpclmulqdq,pclmul,sse4.2,crc32")))
constexpr uint64_t kFold = 256;  // bytes that are folded at once, in four registers

// What 64 bits are multiplied by to advance them over `bits`; a product of reflected numbers is
// one bit further than its place.
constexpr int64_t advance(uint64_t bits) noexcept {
  return static_cast<int64_t>(uint64_t{power_of_x(bits - 1)} << 32);
}

// Four lanes of 128 bits, each advanced over `kBits`; the first half of a lane lies 64 bits before
// the second.
template <uint64_t kBits>
NOSTALL_FOLD inline __m512i advanced(__m512i lanes) noexcept {
  constexpr int64_t kFirst = advance(kBits + 64), kSecond = advance(kBits);
  const __m512i by = _mm512_set4_epi64(kSecond, kFirst, kSecond, kFirst);
  return _mm512_xor_si512(_mm512_clmulepi64_epi128(lanes, by, 0x00),
                          _mm512_clmulepi64_epi128(lanes, by, 0x11));
}

// A register of four folds 256 bytes ahead onto those that lie there; at the end the four become one
// of 64 bytes, which is summed by the instruction.
NOSTALL_FOLD uint32_t by_folding(std::span<const std::byte> bytes, uint32_t crc) noexcept {
  if (bytes.size() < kFold) return by_instruction(bytes, crc);
  const std::byte* p = bytes.data();
  size_t left = bytes.size();
  __m512i sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = _mm512_loadu_si512(p + 64 * i);
  sum[0] = _mm512_xor_si512(sum[0], _mm512_castsi128_si512(_mm_cvtsi32_si128(int(crc))));
  for (p += kFold, left -= kFold; left >= kFold; p += kFold, left -= kFold) {
    for (int i = 0; i < 4; ++i) {
      sum[i] = _mm512_xor_si512(advanced<8 * kFold>(sum[i]), _mm512_loadu_si512(p + 64 * i));
    }
  }
  for (int i = 1; i < 4; ++i) sum[i] = _mm512_xor_si512(advanced<512>(sum[i - 1]), sum[i]);
  alignas(64) std::array<std::byte, 64> last;
  _mm512_store_si512(last.data(), sum[3]);
  return by_instruction({p, left}, by_instruction(last, 0));
}
#endif

}  // namespace

uint32_t crc32c_between(uint32_t whole, std::span<const std::byte> before, uint64_t length,
                        std::span<const std::byte> after) noexcept {
  // crc(AB) = crc(A) x^(bits of B) + crc(B), solved for the part in the middle.
  const uint32_t without =
      product(whole ^ crc32c(after), power_of_x(kOrder - bits_of(after.size())));
  return without ^ product(crc32c(before), power_of_x(bits_of(length)));
}

std::span<const Crc32cKernel> crc32c_kernels() noexcept {
  // Not of the heap: the first sum may come when there is no memory.
  struct Found {
    std::array<Crc32cKernel, 3> kernels;
    size_t count = 0;
  };
  static const Found kFound = [] {
    Found found;
#if defined(__x86_64__)
    if (processor().wide_clmul) found.kernels[found.count++] = {"VPCLMULQDQ", by_folding};
#endif
#if defined(NOSTALL_CRC)
    if (processor().crc32c) found.kernels[found.count++] = {kInstruction, by_instruction};
#endif
    found.kernels[found.count++] = {"portable", portable};
    return found;
  }();
  return std::span(kFound.kernels).first(kFound.count);
}

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc) noexcept {
  static const auto kBest = crc32c_kernels().front().add;
  return ~kBest(bytes, ~crc);
}

}  // namespace nostall
