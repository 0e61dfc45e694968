// The manifest of a kept tier: its stored form, and damage of every byte.
#include "tier/record.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace nostall::tier {
namespace {

std::vector<std::byte> serialize_manifest(uint64_t dataset, const Manifest& manifest) {
  std::vector<std::byte> all;
  const int error = write_manifest(
      dataset, manifest.stamp, manifest.records.size(),
      [&, i = size_t{0}]() mutable { return manifest.records[i++]; },
      [&](std::span<const std::byte> piece) {
        // However many there are.
        EXPECT_LE(piece.size(), size_t{100'000});
        all.insert(all.end(), piece.begin(), piece.end());
        return 0;
      });
  EXPECT_EQ(error, 0);
  return all;
}

TEST(Manifest, IsWrittenInPieces) {
  Manifest manifest{5, {}};
  for (const uint64_t count : {3275u, 3276u, 3277u, 20'000u}) {
    while (manifest.records.size() < count) {
      const uint64_t s = manifest.records.size();
      manifest.records.push_back({s, 100 * s, static_cast<uint32_t>(7 * s)});
    }
    const auto bytes = serialize_manifest(42, manifest);
    EXPECT_EQ(bytes.size(), manifest_bytes(count));
    const auto parsed = parse_manifest(bytes, 42);
    ASSERT_TRUE(parsed) << count;
    EXPECT_EQ(parsed.value().records, manifest.records);
  }
  int writes = 0;
  const auto full = [&](std::span<const std::byte>) { return ++writes == 2 ? -28 : 0; };
  EXPECT_EQ(write_manifest(
                42, 5, 20'000, [] { return KeptRecord{}; }, full),
            -28);
  EXPECT_EQ(writes, 2);
}

TEST(Manifest, SurvivesTheRoundTripAndNothingElse) {
  const Manifest manifest{5, {{1, 0, 11}, {7, 124, 12}, {9, 5000, 0xffffffff}}};
  const auto bytes = serialize_manifest(42, manifest);
  EXPECT_EQ(bytes.size(), manifest_bytes(3));
  const auto parsed = parse_manifest(bytes, 42);
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed.value().stamp, 5u);
  EXPECT_EQ(parsed.value().records, manifest.records);
  EXPECT_FALSE(parse_manifest(bytes, 43));
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_FALSE(parse_manifest(std::span(bytes).first(i), 42)) << i;
    auto damaged = bytes;
    damaged[i] ^= std::byte{1};
    EXPECT_FALSE(parse_manifest(damaged, 42)) << i;
  }
}

TEST(Manifest, IsWrittenAsTheFormatSays) {
  const auto bytes = serialize_manifest(0x0102030405060708, {9, {{1, 24, 0xe3069283}}});
  std::string text;
  for (const std::byte b : bytes) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    text += kDigits[size_t(b) >> 4];
    text += kDigits[size_t(b) & 15];
  }
  EXPECT_EQ(text,
            "4e534d3202000000080706050403020109000000000000000100000000000000"
            "01000000000000001800000000000000839206e3"
            "c6273a4d");
}

}  // namespace
}  // namespace nostall::tier
