// Plain loops that the compiler turns into vectors, compiled twice: for this machine's least and
// for AVX2, which a processor's first call chooses. The build file asks for -O3.
#include "image/color_kernels.h"

#include <cstring>

#include "base/processor.h"

namespace nostall::image {
namespace {

// Of a kernel's `run`, which is compiled into each of the functions below.
#define NOSTALL_INLINE static inline __attribute__((always_inline))

#if defined(__x86_64__)
template <typename Kernel, typename... Arguments>
__attribute__((target("avx2"))) auto run_avx2(Arguments... arguments) {
  return Kernel::run(arguments...);
}
#endif

template <typename Kernel, typename... Arguments>
auto run_best(Arguments... arguments) {
#if defined(__x86_64__)
  if (processor().avx2) return run_avx2<Kernel>(arguments...);
#endif
  return Kernel::run(arguments...);
}

struct Saturate {
  NOSTALL_INLINE void run(uint8_t* pixels, size_t count, float factor) {
    for (size_t i = 0; i < count; ++i) {
      uint32_t pixel;
      std::memcpy(&pixel, pixels + 4 * i, 4);
      const auto r = static_cast<int>(pixel & 255), g = static_cast<int>(pixel >> 8 & 255);
      const auto b = static_cast<int>(pixel >> 16 & 255);
      const int level = grey(r, g, b);
      const auto mixed = [level, factor](int v) {
        const float value = static_cast<float>(level) + factor * static_cast<float>(v - level);
        const float low = value > 0 ? value : 0;
        return static_cast<uint32_t>(static_cast<int>(low < 255 ? low : 255));
      };
      pixel = mixed(r) | mixed(g) << 8 | mixed(b) << 16;
      std::memcpy(pixels + 4 * i, &pixel, 4);
    }
  }
};

struct SumGrey {
  NOSTALL_INLINE uint64_t run(const uint8_t* pixels, size_t count) {
    uint64_t total = 0;
    constexpr size_t kBlock = size_t{1} << 16;  // whose sum fits 32 bits
    for (size_t begin = 0; begin < count; begin += kBlock) {
      const size_t end = begin + kBlock < count ? begin + kBlock : count;
      uint32_t sum = 0;
      for (size_t i = begin; i < end; ++i) {
        uint32_t pixel;
        std::memcpy(&pixel, pixels + 4 * i, 4);
        sum += static_cast<uint32_t>(grey(static_cast<int>(pixel & 255),
                                          static_cast<int>(pixel >> 8 & 255),
                                          static_cast<int>(pixel >> 16 & 255)));
      }
      total += sum;
    }
    return total;
  }
};

// sum / 13, rounded, for every sum of 13 levels.
constexpr int thirteenth(int sum) { return ((2 * sum + 13) * 20165) >> 19; }
constexpr bool thirteenths_hold() {
  for (int sum = 0; sum <= 13 * 255; ++sum) {
    if (thirteenth(sum) != (2 * sum + 13) / 26) return false;
  }
  return true;
}
static_assert(thirteenths_hold());

struct Sharpen {
  NOSTALL_INLINE void run(const uint8_t* __restrict above, const uint8_t* __restrict row,
                          const uint8_t* __restrict below, uint8_t* __restrict out, size_t count,
                          float factor) {
    for (size_t i = 0; i < count; ++i) {
      const int sum = above[i] + above[i + 4] + above[i + 8] + row[i] + 5 * row[i + 4] +
                      row[i + 8] + below[i] + below[i + 4] + below[i + 8];
      out[i + 4] = blend(thirteenth(sum), row[i + 4], factor);
    }
  }
};

struct AddWeighted {
  template <typename Value>
  NOSTALL_INLINE void run(int32_t* __restrict sums, const Value* a, const Value* b, int32_t weight,
                          size_t count) {
    for (size_t i = 0; i < count; ++i) sums[i] += weight * (a[i] + b[i]);
  }
};

}  // namespace

void saturate(uint8_t* pixels, size_t count, float factor) noexcept {
  run_best<Saturate>(pixels, count, factor);
}

uint64_t sum_grey(const uint8_t* pixels, size_t count) noexcept {
  return run_best<SumGrey>(pixels, count);
}

void sharpen_row(const uint8_t* above, const uint8_t* row, const uint8_t* below, uint8_t* out,
                 size_t count, float factor) noexcept {
  run_best<Sharpen>(above, row, below, out, count, factor);
}

void add_weighted(int32_t* sums, const uint8_t* a, const uint8_t* b, int32_t weight,
                  size_t count) noexcept {
  run_best<AddWeighted>(sums, a, b, weight, count);
}

void add_weighted(int32_t* sums, const uint16_t* a, const uint16_t* b, int32_t weight,
                  size_t count) noexcept {
  run_best<AddWeighted>(sums, a, b, weight, count);
}

}  // namespace nostall::image
