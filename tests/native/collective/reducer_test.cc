// Operations on every type, the same for all instruction sets.
#include "collective/reducer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <random>

#include "base/error.h"
#include "collective/kernels.h"

namespace nostall::collective {
namespace {

template <typename T>
std::vector<T> combined(Op op, DataType type, std::vector<T> left, const std::vector<T>& right) {
  const Reducer reducer(op, type);
  reducer.combine(left.data(), left.data(), right.data(), left.size());
  return left;
}

TEST(Reducer, AddsAndMultipliesIntegersModuloTheirWidth) {
  EXPECT_EQ(combined<uint8_t>(Op::sum, DataType::uint8, {250, 1}, {10, 2}),
            (std::vector<uint8_t>{4, 3}));
  EXPECT_EQ(combined<int16_t>(Op::prod, DataType::int16, {-300, 7}, {300, -3}),
            (std::vector<int16_t>{static_cast<int16_t>(-90000), -21}));
  const int64_t most = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(combined<int64_t>(Op::sum, DataType::int64, {most}, {1}),
            (std::vector<int64_t>{std::numeric_limits<int64_t>::min()}));
}

TEST(Reducer, ComparesSignedAndUnsigned) {
  EXPECT_EQ(combined<int8_t>(Op::max, DataType::int8, {-1, 5}, {1, -5}),
            (std::vector<int8_t>{1, 5}));
  EXPECT_EQ(combined<uint8_t>(Op::max, DataType::uint8, {255, 5}, {1, 6}),
            (std::vector<uint8_t>{255, 6}));
  EXPECT_EQ(combined<int32_t>(Op::min, DataType::int32, {-7}, {7}), (std::vector<int32_t>{-7}));
}

TEST(Reducer, HandsOnNotANumberInMinAndMax) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Op op : {Op::min, Op::max}) {
    for (const float f : combined<float>(op, DataType::float32, {nan, 1}, {1, nan})) {
      EXPECT_TRUE(std::isnan(f));
    }
  }
}

TEST(Reducer, KnowsLogicalAndBitwiseOperations) {
  EXPECT_EQ(combined<int32_t>(Op::land, DataType::int32, {2, 0, 3}, {4, 4, 0}),
            (std::vector<int32_t>{1, 0, 0}));
  EXPECT_EQ(combined<int32_t>(Op::lxor, DataType::int32, {2, 0, 3}, {4, 4, 0}),
            (std::vector<int32_t>{0, 1, 1}));
  EXPECT_EQ(combined<uint64_t>(Op::bxor, DataType::uint64, {6}, {3}), (std::vector<uint64_t>{5}));
  EXPECT_EQ(combined<float>(Op::lor, DataType::float32, {0.0F, 2.5F}, {0.0F, 0.0F}),
            (std::vector<float>{0.0F, 1.0F}));
  for (const Op op : {Op::sum, Op::lor, Op::bor, Op::max}) {
    EXPECT_EQ(combined<uint8_t>(op, DataType::boolean, {1, 0, 1}, {1, 0, 0}),
              (std::vector<uint8_t>{1, 0, 1}));
  }
  for (const Op op : {Op::prod, Op::land, Op::band, Op::min}) {
    EXPECT_EQ(combined<uint8_t>(op, DataType::boolean, {1, 0, 1}, {1, 0, 0}),
              (std::vector<uint8_t>{1, 0, 0}));
  }
}

TEST(Reducer, MultipliesComplexNumbers) {
  using C = std::complex<float>;
  EXPECT_EQ(combined<C>(Op::prod, DataType::complex64, {C(1, 2)}, {C(3, 4)}),
            (std::vector<C>{C(-5, 10)}));
  EXPECT_THROW(Reducer(Op::max, DataType::complex64), Error);
  EXPECT_THROW(Reducer(Op::band, DataType::float32), Error);
}

// Every finite half, doubled: exact unless it overflows or rounds in the subnormals.
TEST(Reducer, AddsHalvesExactlyWhereTheyAreExact) {
  const auto value = [](uint16_t h) {
    const int exponent = (h >> 10) & 31, fraction = h & 1023;
    const double magnitude =
        exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    return (h & 0x8000) != 0 ? -magnitude : magnitude;
  };
  std::vector<uint16_t> all;
  for (uint32_t h = 0; h < 0x10000; ++h) {
    if (((h >> 10) & 31) != 31) all.push_back(static_cast<uint16_t>(h));
  }
  const auto doubled = combined<uint16_t>(Op::sum, DataType::float16, all, all);
  for (size_t i = 0; i < all.size(); ++i) {
    const double expected = 2 * value(all[i]);
    if (std::abs(expected) > 65504) {
      EXPECT_EQ(doubled[i] & 0x7fff, 0x7c00);
    } else {
      EXPECT_EQ(value(doubled[i]), expected) << all[i];
    }
  }
}

TEST(Reducer, RoundsBrainFloatsToNearestEven) {
  const auto brain = [](float f) {
    return static_cast<uint16_t>(std::bit_cast<uint32_t>(f) >> 16);
  };
  // 1 + 2^-8 lies between two neighbours: the even one is 1; 1 + 3 * 2^-8 goes up.
  EXPECT_EQ(combined<uint16_t>(Op::sum, DataType::bfloat16, {brain(1.0F), brain(1.0078125F)},
                               {brain(0.00390625F), brain(0.00390625F)}),
            (std::vector<uint16_t>{brain(1.0F), brain(1.015625F)}));
}

// The highest bit of each element's exponent: without it there are no infinities and NaNs, whose
// payload depends on which operand the compiler puts first.
uint64_t exponent_bit(DataType type) {
  switch (type) {
    case DataType::float16:
    case DataType::bfloat16:
      return 0x4000400040004000;
    case DataType::float32:
    case DataType::complex64:
      return 0x4000000040000000;
    case DataType::float64:
    case DataType::complex128:
      return 0x4000000000000000;
    default:
      return 0;
  }
}

TEST(Kernels, AreTheSameForAllInstructionSets) {
  std::mt19937_64 random(7);
  std::vector<uint64_t> left(300), right(300), wide(300), portable(300);
  for (int type = 0; type < kDataTypes; ++type) {
    for (int op = 0; op < kOps; ++op) {
      const Kernels a = find_kernels(static_cast<Op>(op), static_cast<DataType>(type));
      const Kernels b = find_portable_kernels(static_cast<Op>(op), static_cast<DataType>(type));
      ASSERT_EQ(a.to_one == nullptr, b.to_one == nullptr);
      ASSERT_EQ(a.to_one == nullptr, a.to_two == nullptr);
      if (a.to_one == nullptr) continue;
      for (size_t i = 0; i < left.size(); ++i) {
        left[i] = random() & ~exponent_bit(static_cast<DataType>(type));
        right[i] = random() & ~exponent_bit(static_cast<DataType>(type));
      }
      const size_t count = 8 * left.size() / size_of(static_cast<DataType>(type)) - 1;
      const auto same = [&](const std::vector<uint64_t>& one, const std::vector<uint64_t>& other) {
        return std::memcmp(one.data(), other.data(), 8 * left.size() - 16) == 0;
      };
      a.to_one(wide.data(), left.data(), right.data(), count);
      b.to_one(portable.data(), left.data(), right.data(), count);
      EXPECT_TRUE(same(wide, portable))
          << name_of(static_cast<Op>(op)) << " of " << name_of(static_cast<DataType>(type));
      // In place, as the last rank of a chain does.
      std::vector<uint64_t> sum(left), mine(right);
      a.to_two(sum.data(), mine.data(), sum.data(), mine.data(), count);
      EXPECT_TRUE(same(sum, portable) && same(mine, portable))
          << name_of(static_cast<Op>(op)) << " of " << name_of(static_cast<DataType>(type));
    }
  }
}

TEST(Copy, MovesEveryByteWhereverItLies) {
  std::vector<std::byte> from(9000), to(9000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + i / 251);
  for (const bool stream : {false, true}) {
    for (const size_t bytes : {1, 63, 1023, 1024, 1025, 1300, 4096, 8191}) {
      for (const size_t source : {0, 1, 16, 63}) {
        for (const size_t target : {0, 1, 8, 17, 64}) {
          std::fill(to.begin(), to.end(), std::byte{0xee});
          copy(to.data() + target, from.data() + source, bytes, stream);
          EXPECT_EQ(std::memcmp(to.data() + target, from.data() + source, bytes), 0);
          EXPECT_TRUE(target == 0 || to[target - 1] == std::byte{0xee});
          EXPECT_EQ(to[target + bytes], std::byte{0xee});
        }
      }
    }
  }
}

// One, two and more to add, one, two and more to write to, which may be those.
TEST(Reducer, FoldsFromTheLeftIntoAllItIsGiven) {
  constexpr uint64_t kCount = 5000;
  const Reducer difference(
      [](const void* in, void* inout, uint64_t count, void*) {
        for (uint64_t i = 0; i < count; ++i) {
          static_cast<int32_t*>(inout)[i] =
              2 * static_cast<const int32_t*>(in)[i] - static_cast<int32_t*>(inout)[i];
        }
      },
      nullptr, sizeof(int32_t), false);
  const Reducer sum(Op::sum, DataType::int32);
  for (size_t sources = 1; sources <= 4; ++sources) {
    for (size_t targets = 1; targets <= 4; ++targets) {
      for (const Reducer* reducer : {&sum, &difference}) {
        std::vector<std::vector<int32_t>> data(4, std::vector<int32_t>(kCount));
        std::vector<int32_t> expected(kCount);
        for (uint64_t i = 0; i < kCount; ++i) {
          for (size_t s = 0; s < data.size(); ++s)
            data[s][i] = static_cast<int32_t>(i % 97 * (s + 1));
          expected[i] = data[0][i];
          for (size_t s = 1; s < sources; ++s) {
            expected[i] = reducer == &sum ? expected[i] + data[s][i] : 2 * expected[i] - data[s][i];
          }
        }
        std::vector<const std::byte*> from;
        std::vector<std::byte*> to;
        for (size_t s = 0; s < sources; ++s) {
          from.push_back(reinterpret_cast<const std::byte*>(data[s].data()));
        }
        for (size_t t = 0; t < targets; ++t)
          to.push_back(reinterpret_cast<std::byte*>(data[t].data()));
        reducer->fold(to, from, kCount, false);
        for (size_t t = 0; t < targets; ++t) EXPECT_EQ(data[t], expected) << sources << targets;
      }
    }
  }
}

TEST(Types, HaveNames) {
  EXPECT_EQ(find_data_type("bfloat16"), DataType::bfloat16);
  EXPECT_EQ(find_op("bxor"), Op::bxor);
  EXPECT_EQ(find_algorithm("rsa"), Algorithm::rsa);
  EXPECT_FALSE(find_op("mean").has_value());
}

}  // namespace
}  // namespace nostall::collective
