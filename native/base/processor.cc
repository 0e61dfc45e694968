// Reads the features of the processor itself. __builtin_cpu_supports reads a table of the compiler's library, and there
// are compilers that link an empty one: all vector code would be off, with the same results.
#include "base/processor.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace nostall {
namespace {

#if defined(__x86_64__)
// Which registers the system saves (XCR0), by bits.
uint32_t saved_registers() noexcept {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

Processor ask() noexcept {
  constexpr uint32_t kVectors = 0x06, kWideVectors = 0xe6;
  Processor found;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return found;
  found.crc32c = (c & bit_SSE4_2) != 0;
  const uint32_t saved = (c & bit_OSXSAVE) != 0 ? saved_registers() : 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return found;
  found.avx2 = (saved & kVectors) == kVectors && (b & bit_AVX2) != 0;
  found.avx512 =
      (saved & kWideVectors) == kWideVectors && (b & bit_AVX512F) != 0 && (b & bit_AVX512DQ) != 0;
  found.wide_clmul = found.crc32c && found.avx512 && (c & bit_VPCLMULQDQ) != 0;
  return found;
}
#elif defined(__aarch64__)
Processor ask() noexcept {
  Processor found;
  found.crc32c = (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
  return found;
}
#else
Processor ask() noexcept { return {}; }
#endif

}  // namespace

const Processor& processor() noexcept {
  static const Processor kFound = ask();
  return kFound;
}

}  // namespace nostall
