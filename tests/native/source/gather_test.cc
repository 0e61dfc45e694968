// Records of gathered samples.
#include "source/gather.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

namespace nostall::source {
namespace {

TEST(GatheredView, HasItsMembers) {
  const std::string text = std::string("abcde\0\0\0", 8);
  std::vector<std::byte> record(8 + 2 * 12 + 4);
  const uint32_t table[] = {2, 7, 3, 3, 0, 1, 2};
  std::memcpy(record.data(), text.data(), 8);
  std::memcpy(record.data() + 8, table, sizeof table);
  auto view = GatheredView::of(record).take();
  ASSERT_EQ(view.size(), 2u);
  const auto first = view.next(), second = view.next();
  EXPECT_EQ(std::memcmp(first.record.data(), "ab", 2), 0);
  EXPECT_EQ(first.first, 7u);
  EXPECT_EQ(first.second, 3u);
  EXPECT_EQ(second.record.size(), 3u);
  EXPECT_EQ(std::memcmp(second.record.data(), "cde", 3), 0);
  EXPECT_EQ(second.second, 1u);
}

TEST(GatheredView, TakesAnyBytes) {
  std::mt19937 random(3);
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::byte> bytes(random() % 60);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random() % 4);
    auto view = GatheredView::of(bytes);
    if (!view) continue;
    uint64_t records = 0;
    for (uint32_t i = 0; i < view.value().size(); ++i) {
      const auto member = view.value().next();
      EXPECT_LE(member.record.data() + member.record.size(), bytes.data() + bytes.size());
      records += member.record.size();
    }
    EXPECT_EQ((records + 3) / 4 * 4 + 12 * view.value().size() + 4, bytes.size());
  }
}

}  // namespace
}  // namespace nostall::source
