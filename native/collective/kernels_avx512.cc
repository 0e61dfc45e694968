// Compiled with -mavx512f where the target is x86-64; only called where the processor has it.
#include <cstdint>
#include <cstring>

#include "base/processor.h"
#include "collective/kernels.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace nostall::collective {
namespace {

#if defined(__AVX512F__)
void copy_wide(std::byte* to, const std::byte* from, size_t bytes) noexcept {
  constexpr size_t kLine = 64;
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from, head);
  size_t i = head;
  for (; i + 4 * kLine <= bytes; i += 4 * kLine) {
    const __m512i a = _mm512_loadu_si512(from + i), b = _mm512_loadu_si512(from + i + kLine);
    const __m512i c = _mm512_loadu_si512(from + i + 2 * kLine);
    const __m512i d = _mm512_loadu_si512(from + i + 3 * kLine);
    _mm512_store_si512(to + i, a);
    _mm512_store_si512(to + i + kLine, b);
    _mm512_store_si512(to + i + 2 * kLine, c);
    _mm512_store_si512(to + i + 3 * kLine, d);
  }
  std::memcpy(to + i, from + i, bytes - i);
}
#endif

}  // namespace

void copy_lines(void* dst, const void* src, size_t bytes) noexcept {
#if defined(__AVX512F__)
  constexpr size_t kWorth = 1024;
  if (processor().avx512 && bytes >= kWorth) {
    return copy_wide(static_cast<std::byte*>(dst), static_cast<const std::byte*>(src), bytes);
  }
#endif
  std::memcpy(dst, src, bytes);
}

}  // namespace nostall::collective
