// KeyedPermutation::fill: many consecutive positions at once, by vector code. A run of positions in
// one row l has consecutive r, so each round is the same operation on every lane. Values outside
// [0, n) are rare and are walked on one by one. The kernel is compiled for AVX2, AVX-512 and the
// baseline from one source, and each call chooses the best one.
#include "plan/permutation.h"

#include <algorithm>

#include "base/processor.h"

namespace nostall::plan {
namespace {

struct Bounds {
  uint32_t a, b;
};
using Keys = std::array<uint32_t, 8>;

// The values l * b + r, l * b + r + 1, ... through the network; `count` must not leave row l. One
// loop without branches, so that compilers turn it into vector code: x mod n is min(x, x - n) in
// unsigned numbers, for x < 2 n.
[[gnu::always_inline]] inline void forward_row(const Keys& keys, Bounds bounds, uint32_t row,
                                               uint32_t column, uint32_t* out, uint32_t count) {
  const auto scaled = [](uint32_t x, uint32_t key, uint32_t bound) {
    x = (x ^ key) * 0x85ebca6bu;
    x ^= x >> 15;
    x *= 0xc2b2ae35u;
    x ^= x >> 13;
    return static_cast<uint32_t>((uint64_t{x} * bound) >> 32);
  };
  const Keys k = keys;
  const uint32_t a = bounds.a, b = bounds.b;
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t l = row, r = column + i;
    l += scaled(r, k[0], a), l = std::min(l, l - a);
    r += scaled(l, k[1], b), r = std::min(r, r - b);
    l += scaled(r, k[2], a), l = std::min(l, l - a);
    r += scaled(l, k[3], b), r = std::min(r, r - b);
    l += scaled(r, k[4], a), l = std::min(l, l - a);
    r += scaled(l, k[5], b), r = std::min(r, r - b);
    l += scaled(r, k[6], a), l = std::min(l, l - a);
    r += scaled(l, k[7], b), r = std::min(r, r - b);
    out[i] = l * b + r;
  }
}

void row_plain(const Keys& keys, Bounds bounds, uint32_t row, uint32_t column, uint32_t* out,
               uint32_t count) {
  forward_row(keys, bounds, row, column, out, count);
}

struct Kernel {
  const char* name;
  void (*row)(const Keys&, Bounds, uint32_t, uint32_t, uint32_t*, uint32_t);
};

#if defined(__x86_64__)
__attribute__((target("avx2"))) void row_avx2(const Keys& keys, Bounds bounds, uint32_t row,
                                              uint32_t column, uint32_t* out, uint32_t count) {
  forward_row(keys, bounds, row, column, out, count);
}
// gcc would stay with 256 bits; clang has no such option for one function.
#if defined(__clang__)
#define NOSTALL_WIDE "avx512f,avx512dq"
#else
#define NOSTALL_WIDE "avx512f,avx512dq,prefer-vector-width=512"
#endif
__attribute__((target(NOSTALL_WIDE))) void row_avx512(const Keys& keys, Bounds bounds, uint32_t row,
                                                      uint32_t column, uint32_t* out,
                                                      uint32_t count) {
  forward_row(keys, bounds, row, column, out, count);
}
#endif

Kernel best() noexcept {
#if defined(__x86_64__)
  if (processor().avx512) return {"AVX-512", row_avx512};
  if (processor().avx2) return {"AVX2", row_avx2};
#endif
  return {"portable", row_plain};
}

}  // namespace

void KeyedPermutation::fill(std::span<uint32_t> out, uint64_t first) const noexcept {
  const Kernel kernel = best();
  const uint32_t n = static_cast<uint32_t>(n_);
  uint32_t row = static_cast<uint32_t>(first / b_), column = static_cast<uint32_t>(first % b_);
  for (uint32_t done = 0; done < out.size(); ++row, column = 0) {
    const auto count = static_cast<uint32_t>(std::min<uint64_t>(b_ - column, out.size() - done));
    uint32_t* values = out.data() + done;
    kernel.row(keys_, {a_, b_}, row, column, values, count);
    for (uint32_t i = 0; i < count; ++i) {
      if (values[i] >= n) values[i] = static_cast<uint32_t>((*this)(values[i]));
    }
    done += count;
  }
}

const char* KeyedPermutation::kernel() noexcept { return best().name; }

}  // namespace nostall::plan
