// base/crc32c.h - CRC32C (Castagnoli), by the processor's instruction where there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace nostall {

// CRC32C of `bytes`, continued from `crc` (0 to start). crc32c("123456789") == 0xE3069283.
// Thread-safe. Cost: about 0.02 to 0.05 ns per byte with instructions for it, 2 ns without.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc = 0) noexcept;

// CRC32C of the `length` bytes between `before` and `after`, of which only `whole`, the CRC32C of
// all three, is known. Cost: O(log length) beside what is given.
uint32_t crc32c_between(uint32_t whole, std::span<const std::byte> before, uint64_t length,
                        std::span<const std::byte> after) noexcept;

// A way to do it: "VPCLMULQDQ", "SSE4.2", "CRC32" (ARM) or "portable". `add` continues from the
// complement of a CRC32C, and gives one.
struct Crc32cKernel {
  const char* name;
  uint32_t (*add)(std::span<const std::byte> bytes, uint32_t complement) noexcept;
};
// Those that this machine has, the one that crc32c uses first.
std::span<const Crc32cKernel> crc32c_kernels() noexcept;

}  // namespace nostall
