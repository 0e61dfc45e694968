// Chooses the kernels for an operation and a type at the processor's best instruction set.
#include "collective/reducer.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "collective/kernels.h"
#include "collective/signature.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace nostall::collective {
namespace {

// What is computed and then copied at once, so that the copy finds it in the first-level cache.
constexpr uint64_t kBlockBytes = 8 << 10;

}  // namespace

void copy(void* dst, const void* src, uint64_t bytes, bool stream) noexcept {
#if defined(__SSE2__)
  constexpr uint64_t kLine = 64;
  if (stream && bytes >= 4 * kLine) {
    auto* to = static_cast<char*>(dst);
    const auto* from = static_cast<const char*>(src);
    const uint64_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, head);
    uint64_t i = head;
    for (; i + kLine <= bytes; i += kLine) {
      const auto* f = reinterpret_cast<const __m128i*>(from + i);
      auto* t = reinterpret_cast<__m128i*>(to + i);
      const __m128i a = _mm_loadu_si128(f), b = _mm_loadu_si128(f + 1);
      const __m128i c = _mm_loadu_si128(f + 2), d = _mm_loadu_si128(f + 3);
      _mm_stream_si128(t, a);
      _mm_stream_si128(t + 1, b);
      _mm_stream_si128(t + 2, c);
      _mm_stream_si128(t + 3, d);
    }
    std::memcpy(to + i, from + i, bytes - i);
    _mm_sfence();
    return;
  }
#endif
  static_cast<void>(stream);
  if (bytes > 0) copy_lines(dst, src, bytes);
}

bool is_defined(Op op, DataType type) noexcept { return find_kernels(op, type).to_one != nullptr; }

Reducer::Reducer(Op op, DataType type)
    : kernels_(find_kernels(op, type)),
      element_bytes_(size_of(type)),
      alignment_(alignment_of(type)),
      commutative_(true),
      elements_(elements_of(type, op)) {
  if (kernels_.to_one == nullptr) {
    throw Error(ErrorKind::usage, "the operation " + std::string(name_of(op)) +
                                      " is not defined for " + std::string(name_of(type)));
  }
}

Reducer::Reducer(UserFunction function, void* context, size_t element_bytes, bool commutative)
    : user_(function),
      context_(context),
      element_bytes_(element_bytes),
      alignment_(1),
      commutative_(commutative),
      elements_(elements_of(element_bytes)) {
  if (function == nullptr || element_bytes == 0) {
    throw Error(ErrorKind::usage, "a user's operation needs a function and elements of 1 byte up");
  }
}

uint64_t Reducer::block() const noexcept {
  return std::max<uint64_t>(1, kBlockBytes / element_bytes_);
}

void Reducer::combine(void* dst, const void* left, const void* right, uint64_t count) const {
  if (kernels_.to_one != nullptr) {
    kernels_.to_one(dst, left, right, count);
    return;
  }
  if (dst != left) {
    if (dst != right) std::memcpy(dst, right, count * element_bytes_);
    user_(left, dst, count, context_);
    return;
  }
  std::vector<std::byte> scratch(static_cast<const std::byte*>(right),
                                 static_cast<const std::byte*>(right) + count * element_bytes_);
  user_(left, scratch.data(), count, context_);
  std::memcpy(dst, scratch.data(), scratch.size());
}

void Reducer::combine_and_copy(void* dst, void* also, const void* left, const void* right,
                               uint64_t count, bool stream) const {
  if (kernels_.to_two != nullptr && !stream) {
    kernels_.to_two(dst, also, left, right, count);
    return;
  }
  const uint64_t step = block();
  for (uint64_t i = 0; i < count; i += step) {
    const uint64_t n = std::min(step, count - i), at = i * element_bytes_;
    auto* to = static_cast<std::byte*>(dst) + at;
    combine(to, static_cast<const std::byte*>(left) + at, static_cast<const std::byte*>(right) + at,
            n);
    copy(static_cast<std::byte*>(also) + at, to, n * element_bytes_, stream);
  }
}

void Reducer::fold(std::span<std::byte* const> dsts, std::span<const std::byte* const> srcs,
                   uint64_t count, bool stream) const {
  const uint64_t step = block();
  alignas(64) std::array<std::byte, kBlockBytes> fixed;
  std::vector<std::byte> larger(step * element_bytes_ > fixed.size() ? step * element_bytes_ : 0);
  std::byte* sum = larger.empty() ? fixed.data() : larger.data();
  for (uint64_t i = 0; i < count; i += step) {
    const uint64_t n = std::min(step, count - i), at = i * element_bytes_;
    const std::byte* result = srcs[0] + at;
    for (size_t s = 1; s < srcs.size(); ++s) {
      combine(sum, result, srcs[s] + at, n);
      result = sum;
    }
    for (std::byte* dst : dsts) {
      // Read from the first-level cache, written to lines of other cores: memcpy's rate is best.
      if (stream) {
        copy(dst + at, result, n * element_bytes_, true);
      } else if (dst + at != result) {
        std::memcpy(dst + at, result, n * element_bytes_);
      }
    }
  }
}

}  // namespace nostall::collective
