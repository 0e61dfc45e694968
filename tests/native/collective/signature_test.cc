// What ranks compare at each step.
#include "collective/signature.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace nostall::collective {
namespace {

Signature broadcast_of(uint64_t bytes) {
  return {.call = Call::broadcast, .root = 3, .count = bytes};
}

TEST(Signature, SizesOfAnyNumberOfBitsDiffer) {
  std::set<uint64_t> packed;
  uint64_t sizes = 0;
  const auto add = [&](uint64_t bytes) {
    packed.insert(pack(broadcast_of(bytes)));
    ++sizes;
  };
  for (int bit = 2; bit < 64; ++bit) {
    for (const int more : {-1, 0, 1}) add((uint64_t{1} << bit) + static_cast<uint64_t>(more));
  }
  for (uint64_t gib = 3; gib < 1000; gib += 2) add(gib << 30);
  EXPECT_EQ(packed.size(), sizes);
}

TEST(Signature, SizesThatAreNearEachOtherDiffer) {
  // Multiples of the golden section come nearest to whole numbers at Fibonacci's.
  for (uint64_t before = 1, apart = 1; apart < uint64_t{1} << 30;) {
    for (const uint64_t bytes : {uint64_t{1} << 31, uint64_t{1} << 33, uint64_t{12345678901}}) {
      EXPECT_NE(pack_count(bytes), pack_count(bytes + apart)) << apart;
    }
    before = std::exchange(apart, apart + before);
  }
}

TEST(Signature, IsDescribed) {
  EXPECT_EQ(describe_signature(pack(broadcast_of((uint64_t{1} << 31) - 1))),
            "broadcast of 2147483647 bytes, from rank 3");
  const uint64_t large = pack(broadcast_of(uint64_t{8} << 30));
  EXPECT_EQ(describe_signature(large), "broadcast of bytes, whose number has the hash " +
                                           std::to_string(large & 0xffffffffu) + ", from rank 3");
  const Signature blocks{.call = Call::reduce_scatterv,
                         .elements = elements_of(DataType::float32, Op::sum),
                         .count = 0x1'f000'0001};
  EXPECT_EQ(describe_signature(pack(blocks)),
            "reduce_scatterv of float32 elements, sum, in blocks whose sizes have the hash " +
                std::to_string(0xf000'0001));
}

}  // namespace
}  // namespace nostall::collective
