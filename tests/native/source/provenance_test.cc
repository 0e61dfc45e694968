// Places computed from how a database was written, held against what liblmdb did.
#include "source/provenance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "lmdb_file.h"
#include "memory_storage.h"

namespace nostall::source::lmdb {
namespace {

using testing::HasSubstr;

// First pages of values that liblmdb 0.9 wrote with pages of 4096 bytes, for keys of 8 or 60 digits
// in order, and the sum of all of them.
struct Written {
  uint64_t records, size;
  Provenance facts;
  std::vector<std::pair<size_t, uint64_t>> pages;
  uint64_t sum;
};

class Computed : public testing::TestWithParam<Written> {};

TEST_P(Computed, PlacesAreThoseOfLiblmdb) {
  Written w = GetParam();
  w.facts.sizes.assign(w.records, w.size);
  const auto pages = compute_pages(w.facts, 4096);
  ASSERT_EQ(pages.size(), w.records);
  for (const auto& [record, page] : w.pages) EXPECT_EQ(pages[record], page) << record;
  EXPECT_EQ(std::accumulate(pages.begin(), pages.end(), uint64_t{0}), w.sum);
}

INSTANTIATE_TEST_SUITE_P(
    All, Computed,
    testing::Values(
        // One transaction of plain puts, and of MDB_APPEND.
        Written{500,
                3000,
                {0, 155, 0, false, {}},
                {{0, 3}, {155, 158}, {156, 161}, {310, 315}, {311, 317}, {499, 506}},
                127161},
        Written{500,
                3000,
                {0, 156, 0, true, {}},
                {{0, 3}, {155, 158}, {156, 161}, {311, 316}, {312, 318}, {499, 506}},
                127158},
        // Three levels: a branch page is full after record 2957, or 3016.
        Written{6000,
                9000,
                {0, 51, 58, false, {}},
                {{51, 156}, {52, 161}, {53, 164}, {2957, 8932}, {3010, 9095}, {5999, 18121}},
                54370790},
        Written{6000,
                9000,
                {0, 52, 58, true, {}},
                {{51, 156}, {52, 161}, {53, 164}, {3015, 9106}, {3016, 9110}, {5999, 18118}},
                54363972}));

// A second transaction copies the way to the last leaf.
TEST(Provenance, KnowsTransactions) {
  const auto pages = compute_pages({200, 155, 0, false, std::vector<uint64_t>(400, 3000)}, 4096);
  EXPECT_EQ(pages[199], 204u);
  EXPECT_EQ(pages[200], 207u);
  EXPECT_EQ(pages[399], 407u);
}

Result<Records> scan_bytes(const std::string& bytes) {
  const MemoryStorage storage({bytes});
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  return scan(*reader, storage);
}

TEST(Provenance, IsVerifiedAgainstTheTree) {
  LmdbFile file;
  std::vector<Entry> entries;
  for (char i = 'a'; i < 'k'; ++i) entries.push_back({std::string(1, i), std::string(3000, i)});
  file.commit(file.add_tree(entries));  // a leaf on page 2, the values behind it
  const auto records = scan_bytes(file.bytes);
  ASSERT_TRUE(records);
  const Provenance facts = derive(records.value());
  EXPECT_EQ(facts.sizes, records.value().length);
  auto pages = compute_pages(facts, 4096);
  EXPECT_EQ(verify(records.value(), pages), "");
  pages[4] += 1;
  EXPECT_THAT(
      verify(records.value(), pages),
      HasSubstr("9 of 10 records only, and the first wrong one is record 4 (key \"e\": page "
                "7, not 8)"));
  pages.pop_back();
  EXPECT_THAT(verify(records.value(), pages), HasSubstr("9 computed places for 10 records"));

  entries[6].value = "small";
  LmdbFile mixed;
  mixed.commit(mixed.add_tree(entries));
  const auto others = scan_bytes(mixed.bytes);
  ASSERT_TRUE(others);
  EXPECT_THAT(verify(others.value(), compute_pages(derive(others.value()), 4096)),
              HasSubstr("record 6 (5 bytes) lies among the keys"));
}

TEST(Provenance, OfNothingIsNothing) {
  LmdbFile file;
  Tree empty;
  empty.root = kNoPage;
  file.commit(empty);
  const auto records = scan_bytes(file.bytes);
  ASSERT_TRUE(records);
  EXPECT_TRUE(compute_pages(derive(records.value()), 4096).empty());
  EXPECT_EQ(verify(records.value(), {}), "");
}

}  // namespace
}  // namespace nostall::source::lmdb
