// Documents, the scan for their ends, and the stored form of an index.
#include "tokens/stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>

#include "../records/memory_storage.h"
#include "base/crc32c.h"

namespace nostall::tokens {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string ids(const std::vector<uint16_t>& values) {
  return {reinterpret_cast<const char*>(values.data()), 2 * values.size()};
}

std::shared_ptr<records::MemoryStorage> storage(const std::vector<std::vector<uint16_t>>& files) {
  std::vector<std::string> contents;
  for (const auto& f : files) contents.push_back(ids(f));
  return std::make_shared<records::MemoryStorage>(contents);
}

std::vector<uint64_t> begins(const Documents& documents) {
  std::vector<uint64_t> found;
  for (uint64_t i = 0; i < documents.size(); ++i) found.push_back(documents.begin(i));
  return found;
}

TEST(Documents, BeginWhereTheyWereSaidTo) {
  const std::vector<uint64_t> said{0, 3, 3, 10};
  const auto documents = Documents::of(said, 12);
  EXPECT_EQ(begins(documents), said);
  EXPECT_EQ(documents.length(1), 0u);
  EXPECT_EQ(documents.length(3), 2u);
  EXPECT_EQ(documents.at(0), 0u);
  EXPECT_EQ(documents.at(3), 2u);
  EXPECT_EQ(documents.at(11), 3u);
}

TEST(Documents, KnowPlacesBeyond32Bits) {
  const uint64_t block = uint64_t{1} << 32;
  const std::vector<uint64_t> said{0, block - 1, block, block + 7, 2 * block, 4 * block - 1};
  std::vector<uint64_t> sound = said;
  sound.insert(sound.end() - 1, {3 * block - 5, 3 * block + 5});
  const auto documents = Documents::of(sound, 4 * block + 3);
  EXPECT_EQ(begins(documents), sound);
  for (uint64_t i = 0; i < documents.size(); ++i) EXPECT_EQ(documents.at(sound[i]), i);
  EXPECT_EQ(documents.at(3 * block - 6), 4u);
  EXPECT_EQ(documents.at(4 * block + 2), 7u);
  // One of 2^33 tokens.
  EXPECT_THROW(Documents::of(said, 4 * block + 3), Error);
}

TEST(Documents, RefuseWhatIsNoDivision) {
  for (const auto& said : std::vector<std::vector<uint64_t>>{{}, {1}, {0, 5, 4}, {0, 11}}) {
    EXPECT_THROW(Documents::of(said, 10), Error);
  }
  // The first one begins behind 2^32 tokens, with a low half of 0.
  auto low = std::make_unique<Shareable>(sizeof(uint32_t));
  EXPECT_THROW(Documents(std::move(low), {0, 0, 1}, uint64_t{1} << 32), Error);
}

TEST(Scan, EndsDocumentsWithTheirIdAndWithTheirFile) {
  const auto files = storage({{5, 0, 6, 7, 0}, {}, {0, 0, 8}});
  const std::vector<Extent> extents{{0, 0, 5}, {1, 0, 0}, {2, 0, 3}};
  EXPECT_THAT(begins(scan_documents(*files, 2, extents, {0, 0}, 2)), ElementsAre(0, 2, 5, 6, 7));
  EXPECT_THAT(begins(scan_documents(*files, 2, extents, {}, 2)), ElementsAre(0, 5));
}

TEST(Scan, FindsTheSameAcrossChunks) {
  std::vector<uint16_t> values(5'000'000, 9);
  std::vector<uint64_t> expected{0};
  for (size_t i = 1; i + 1 < values.size(); i += 499) {
    values[i] = 3;
    expected.push_back(i + 1);
  }
  const auto files = storage({values});
  const std::vector<Extent> extents{{0, 0, values.size()}};
  EXPECT_EQ(begins(scan_documents(*files, 2, extents, {3, 0}, 3)), expected);
}

// More documents than one block of memory has places for, beside few.
TEST(Scan, KeepsAsManyDocumentsAsThereAre) {
  const records::MemoryStorage files(
      {std::string(3'000'000, '\3'), std::string(9, '\3'), std::string(1'500'000, '\3')});
  const std::vector<Extent> extents{{0, 0, 3'000'000}, {1, 0, 9}, {2, 0, 1'500'000}};
  const Documents documents = scan_documents(files, 1, extents, {3, 0}, 3);
  ASSERT_EQ(documents.size(), 4'500'009u);
  for (uint64_t i = 0; i < documents.size(); ++i) ASSERT_EQ(documents.begin(i), i);
}

TEST(Scan, NamesAnIdOutsideTheVocabulary) {
  const auto files = storage({{1, 2, 900, 3}});
  const std::vector<Extent> extents{{0, 0, 4}};
  try {
    scan_documents(*files, 2, extents, {{}, 900}, 2);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("token 2 is 900, outside the vocabulary of 900"));
  }
}

// Ids are looked at in blocks; places at their borders, and what is left of the last one.
template <typename Id>
void expect_every_place() {
  constexpr uint64_t kIds = 300;
  for (uint64_t place = 0; place < kIds; ++place) {
    std::vector<Id> values(kIds, std::numeric_limits<Id>::max());
    values[place] = 7;
    const auto* bytes = reinterpret_cast<const char*>(values.data());
    const records::MemoryStorage file({std::string(bytes, sizeof(Id) * kIds)});
    const std::vector<Extent> extents{{0, 0, kIds}};
    // Neither all ids of a type nor more are a limit.
    const uint64_t all = uint64_t{1} << std::min<size_t>(8 * sizeof(Id), 32);
    const Scan ends{7, sizeof(Id) < 8 ? all : 0};
    std::vector<uint64_t> expected{0};
    if (place + 1 < kIds) expected.push_back(place + 1);
    ASSERT_EQ(begins(scan_documents(file, sizeof(Id), extents, ends, 1)), expected) << place;
    std::fill(values.begin(), values.end(), Id{6});
    values[place] = 7;
    const records::MemoryStorage other({std::string(bytes, sizeof(Id) * kIds)});
    try {
      scan_documents(other, sizeof(Id), extents, {{}, 7}, 1);
      FAIL() << place;
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("token " + std::to_string(place) + " is 7, outside"));
    }
  }
}

TEST(Scan, LooksAtEveryIdOfEveryType) {
  expect_every_place<uint8_t>();
  expect_every_place<uint16_t>();
  expect_every_place<uint32_t>();
  expect_every_place<uint64_t>();
}

Index small_index() {
  Index index{"s", {{"a", 12, 5}, {"b", 6, -7}}, 2, {{0, 2, 5}, {1, 0, 3}}, nullptr};
  const std::vector<uint64_t> said{0, 4, 5};
  index.documents = std::make_shared<const Documents>(Documents::of(said, 8));
  return index;
}

// Version 1, as docs/formats/tokens.md has it.
TEST(Index, IsStoredAsWritten) {
  const std::vector<std::byte> bytes = serialize_index(small_index());
  std::string hex;
  for (const std::byte b : bytes) {
    static constexpr char kDigits[] = "0123456789abcdef";
    hex += {kDigits[uint8_t(b) / 16], kDigits[uint8_t(b) % 16]};
  }
  EXPECT_EQ(hex,
            "314e535401000000020000000200000002000000000000000800000000000000"
            "030000000000000001000000730100000061"
            "0c0000000000000005000000000000000100000062"
            "0600000000000000f9ffffffffffffff"
            "0000000002000000000000000500000000000000"
            "0100000000000000000000000300000000000000"
            "00000000000000000300000000000000"
            "000000000400000005000000"
            "c82b876d");
  const Index parsed = parse_index(bytes).take();
  EXPECT_EQ(serialize_index(parsed), bytes);
  const std::string path = testing::TempDir() + "stored-" + std::to_string(::getpid());
  EXPECT_EQ(store_index(path, parsed), (std::pair<int, uint64_t>(0, bytes.size())));
  std::ifstream file(path, std::ios::binary);
  const std::string stored{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(std::ranges::equal(std::as_bytes(std::span(stored)), bytes));
  std::filesystem::remove(path);
  EXPECT_EQ(store_index("/no such folder/x", parsed).first, -ENOENT);
}

TEST(Index, RefusesWhatIsDamaged) {
  const std::vector<std::byte> good = serialize_index(small_index());
  for (size_t i = 0; i < good.size(); ++i) {
    std::vector<std::byte> bad = good;
    bad[i] ^= std::byte{1};
    EXPECT_FALSE(parse_index(bad));
    EXPECT_FALSE(parse_index(std::span(good).first(i)));
    // With the right checksum: refused, or an index that is written the same.
    const auto content = std::span(bad).first(bad.size() - 4);
    const uint32_t crc = crc32c(content);
    std::memcpy(bad.data() + content.size(), &crc, 4);
    if (const auto parsed = parse_index(bad)) {
      EXPECT_EQ(serialize_index(parsed.value()), bad);
    }
  }
}

TEST(Stream, RefusesFilesThatDoNotGoWithTheIndex) {
  EXPECT_THROW(Stream(storage({{1, 2, 3, 4, 5, 6}, {1, 2}}), small_index()), Error);
  EXPECT_THROW(Stream(storage({{1, 2, 3, 4, 5, 6}}), small_index()), Error);
  const Stream stream(storage({{1, 2, 3, 4, 5, 6}, {1, 2, 3}}), small_index());
  EXPECT_EQ(stream.tokens(), 8u);
  EXPECT_EQ(stream.describe(6, 2), "tokens 1 to 3 of memory/1");
}

}  // namespace
}  // namespace nostall::tokens
