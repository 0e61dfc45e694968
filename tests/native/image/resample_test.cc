// The vector kernels against the portable ones, and what filters must be.
#include "image/resample.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>

namespace nostall::image {
namespace {

TEST(Filter, WeightsSumToOneAndStayInside) {
  for (const int64_t from : {1, 2, 7, 224, 375, 5000}) {
    for (const int64_t to : {1, 3, 224, 301}) {
      Filter filter;
      filter.prepare(0, static_cast<double>(from), to, 0, to, 0, from);
      for (size_t i = 0; i < filter.first.size(); ++i) {
        const auto* weights = &filter.weights[i * static_cast<size_t>(filter.taps)];
        EXPECT_EQ(std::accumulate(weights, weights + filter.taps, 0), 1 << 14);
        EXPECT_GE(filter.first[i], 0);
        EXPECT_LE(filter.first[i] + filter.count[i], from);
      }
    }
  }
}

TEST(Filter, AnIdentityTakesTheInputOfItsResult) {
  for (const Curve curve : {Curve{}, Curve{true, true}, Curve{false, false}}) {
    for (const int64_t size : {1, 2, 4, 9}) {
      for (int64_t begin = 0; begin < size; ++begin) {
        for (int64_t results = 1; results <= size - begin; ++results) {
          Filter filter;
          filter.prepare(3, 3 + static_cast<double>(size), size, begin, results, 1, size + 2,
                         curve);
          ASSERT_TRUE(filter.identity);
          for (int64_t i = 0; i < results; ++i) {
            EXPECT_EQ(filter.first[static_cast<size_t>(i)], 3 + begin + i - 1);
          }
        }
      }
    }
  }
}

TEST(Kernels, AgreeBitForBit) {
  std::mt19937 random(1);
  const Kernels &best = kernels(), &portable = portable_kernels();
  for (const int64_t from : {1, 5, 33, 450}) {
    for (const int64_t to : {1, 8, 31, 224}) {
      Buffer source, ours, theirs;
      uint8_t* rows = source.reserve(static_cast<size_t>(from) * 8);
      for (int64_t i = 0; i < from * 8; ++i) rows[i] = static_cast<uint8_t>(random());
      Filter filter;
      filter.prepare(0, static_cast<double>(from), to, 0, to, 0, from);
      const size_t stride = static_cast<size_t>(to * 4 + 31) / 32 * 32;
      uint8_t *a = ours.reserve(stride * 3), *b = theirs.reserve(stride * 3);
      best.horizontal(filter, rows, rows + from * 4, a, a + stride);
      portable.horizontal(filter, rows, rows + from * 4, b, b + stride);
      const uint8_t* pair[] = {a, a + stride};
      const int16_t weights[] = {5000, 11384};
      best.vertical(pair, weights, 2, a + 2 * stride, static_cast<size_t>(to) * 4);
      portable.vertical(pair, weights, 2, b + 2 * stride, static_cast<size_t>(to) * 4);
      for (size_t row = 0; row < 3; ++row) {
        for (int64_t x = 0; x < to * 4; ++x) {
          if (x % 4 == 3) continue;
          ASSERT_EQ(a[row * stride + static_cast<size_t>(x)],
                    b[row * stride + static_cast<size_t>(x)]);
        }
      }
      const float scale[] = {0.5f, 0.017f, 3}, offset[] = {-2, 0.1f, 7};
      std::vector<float> x(static_cast<size_t>(to) * 3), y(x.size());
      float* px[] = {x.data(), x.data() + to, x.data() + 2 * to};
      float* py[] = {y.data(), y.data() + to, y.data() + 2 * to};
      for (const bool mirror : {false, true}) {
        best.planes_f32(a, to, mirror, scale, offset, px);
        portable.planes_f32(a, to, mirror, scale, offset, py);
        ASSERT_EQ(x, y);
      }
    }
  }
}

}  // namespace
}  // namespace nostall::image
