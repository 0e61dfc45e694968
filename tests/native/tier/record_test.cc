#include "tier/record.h"

#include <gtest/gtest.h>

namespace nostall::tier {
namespace {

TEST(Manifest, SurvivesTheRoundTripAndNothingElse) {
  const std::vector<plan::Resident> residents{{1, 0}, {7, 124}, {9, 5000}};
  const auto bytes = serialize_manifest(42, residents);
  const auto parsed = parse_manifest(bytes, 42);
  ASSERT_TRUE(parsed);
  ASSERT_EQ(parsed.value().size(), 3u);
  EXPECT_EQ(parsed.value()[1].sample, 7u);
  EXPECT_EQ(parsed.value()[1].offset, 124u);
  EXPECT_FALSE(parse_manifest(bytes, 43));
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_FALSE(parse_manifest(std::span(bytes).first(i), 42)) << i;
    auto damaged = bytes;
    damaged[i] ^= std::byte{1};
    EXPECT_FALSE(parse_manifest(damaged, 42)) << i;
  }
}

}  // namespace
}  // namespace nostall::tier
