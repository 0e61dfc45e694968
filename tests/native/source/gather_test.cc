// Records of gathered samples.
#include "source/gather.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
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

void append(std::vector<std::byte>& record, uint32_t word) {
  record.resize(record.size() + sizeof word);
  std::memcpy(record.data() + record.size() - sizeof word, &word, sizeof word);
}

TEST(GatheredView, TakesAnyBytes) {
  std::mt19937 random(3);
  uint64_t members = 0, refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<uint32_t> sizes(random() % 4);
    for (uint32_t& size : sizes) size = random() % 10;
    std::vector<std::byte> bytes((std::accumulate(sizes.begin(), sizes.end(), 0u) + 3) / 4 * 4);
    for (const uint32_t size : sizes) {
      for (const uint32_t word : {size, 1u, 2u}) append(bytes, word);
    }
    append(bytes, static_cast<uint32_t>(sizes.size()));
    for (uint32_t damages = random() % 3; damages > 0; --damages) {
      bytes[random() % bytes.size()] ^= std::byte{1} << random() % 8;
    }
    bytes.resize(bytes.size() - (random() % 8 == 0 ? random() % bytes.size() : 0));
    auto view = GatheredView::of(bytes);
    refused += view ? 0 : 1;
    uint64_t records = 0;
    for (uint32_t i = 0; view && i < view.value().size(); ++i, ++members) {
      const auto member = view.value().next();
      ASSERT_GE(member.record.data(), bytes.data());
      ASSERT_LE(member.record.data() + member.record.size(), bytes.data() + bytes.size());
      records += member.record.size();
    }
    if (view) {
      ASSERT_EQ((records + 3) / 4 * 4 + 12 * view.value().size() + 4, bytes.size());
    }
  }
  EXPECT_GT(members, 0u);
  EXPECT_GT(refused, 0u);
}

}  // namespace
}  // namespace nostall::source
