// The scan of LMDB files, over trees written page by page and bent in every field.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "lmdb_file.h"
#include "memory_storage.h"

namespace nostall::records::lmdb {
namespace {

using namespace source;
using testing::HasSubstr;

std::string number(unsigned i) {
  char text[16];
  std::snprintf(text, sizeof text, "%08u", i);
  return text;
}

std::string value_of(unsigned i, size_t size) {
  std::string s(size, '\0');
  for (size_t k = 0; k < size; ++k) s[k] = static_cast<char>(i * 31 + k * 7);
  return s;
}

std::vector<Entry> some(unsigned n, size_t size) {
  std::vector<Entry> entries;
  for (unsigned i = 0; i < n; ++i) entries.push_back({number(i), value_of(i, size)});
  return entries;
}

Result<Records> scan_bytes(const std::string& bytes, std::string_view database = {}) {
  const MemoryStorage storage({bytes});
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  return scan(*reader, storage, database);
}

std::string error_of(const std::string& bytes, std::string_view database = {}) {
  const auto result = scan_bytes(bytes, database);
  return result ? "no error" : result.error().what();
}

void expect_records(const std::string& bytes, const Result<Records>& result,
                    const std::vector<Entry>& entries) {
  ASSERT_TRUE(result) << result.error().what();
  const Records& r = result.value();
  ASSERT_EQ(r.size(), entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    ASSERT_EQ(r.key(i), entries[i].key);
    ASSERT_LE(r.offset[i] + r.length[i], bytes.size());
    ASSERT_EQ(bytes.substr(r.offset[i], r.length[i]), entries[i].value) << entries[i].key;
  }
}

struct Shape {
  uint32_t page_size;
  unsigned records;
  size_t value;
  size_t most_records, most_children;
  unsigned depth;
};

class LmdbShapes : public testing::TestWithParam<Shape> {};

TEST_P(LmdbShapes, FindsEveryValue) {
  const Shape& shape = GetParam();
  LmdbFile file(shape.page_size);
  const auto entries = some(shape.records, shape.value);
  const Tree tree = file.add_tree(entries, shape.most_records, shape.most_children);
  ASSERT_EQ(tree.depth, shape.depth);
  file.commit(tree);
  const auto result = scan_bytes(file.bytes);
  expect_records(file.bytes, result, entries);
  EXPECT_EQ(result.value().leaf_page, file.leaf_pages);
  EXPECT_EQ(result.value().pages_read, tree.leaf_pages + tree.branch_pages);
  EXPECT_EQ(result.value().snapshot.transaction, 7u);
  EXPECT_EQ(result.value().snapshot.page_size, shape.page_size);
  EXPECT_FALSE(result.value().snapshot.other_meta_used);
  const bool own = !file.value_pages.empty();
  EXPECT_THAT(result.value().own_pages, testing::Each(own ? 1 : 0));
}

INSTANTIATE_TEST_SUITE_P(
    All, LmdbShapes,
    testing::Values(Shape{4096, 1, 10, 1000, 1000, 1}, Shape{4096, 1, 0, 1000, 1000, 1},
                    Shape{4096, 300, 100, 1000, 1000, 2}, Shape{4096, 90, 5000, 1000, 1000, 1},
                    Shape{4096, 90, 5000, 10, 1000, 2}, Shape{4096, 60, 3000, 3, 4, 4},
                    Shape{4096, 12, 0, 2, 3, 3}, Shape{512, 600, 20, 1000, 1000, 3},
                    Shape{512, 40, 4000, 4, 1000, 2}, Shape{256, 50, 60, 1000, 5, 3},
                    Shape{32768, 900, 100, 1000, 1000, 2}, Shape{32768, 3, 150000, 1, 2, 3},
                    Shape{16384, 30, 9000, 10, 1000, 2}));

TEST(Lmdb, ReadsAnEmptyDatabase) {
  LmdbFile file;
  Tree empty;
  empty.root = kNoPage;
  file.commit(empty, 0);
  const auto result = scan_bytes(file.bytes);
  ASSERT_TRUE(result) << result.error().what();
  EXPECT_EQ(result.value().size(), 0u);
}

TEST(Lmdb, FollowsTheOrderOfKeysThatTheTreeHas) {
  {
    LmdbFile file;
    std::vector<Entry> entries;
    for (const char* key : {"0", "1", "10", "11", "2", "a", "\xff"}) entries.push_back({key, key});
    file.commit(file.add_tree(entries, 2));
    expect_records(file.bytes, scan_bytes(file.bytes), entries);
  }
  {
    LmdbFile file;
    std::vector<Entry> entries;
    for (const char* key : {"za", "a", "ab", "bb", "\xff"}) entries.push_back({key, key});
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return std::lexicographical_compare(a.key.rbegin(), a.key.rend(), b.key.rbegin(),
                                          b.key.rend(),
                                          [](char x, char y) { return uint8_t(x) < uint8_t(y); });
    });
    file.commit(file.add_tree(entries, 2, 1000, kReverseKey));
    expect_records(file.bytes, scan_bytes(file.bytes), entries);
  }
  for (const size_t size : {4u, 8u}) {
    LmdbFile file;
    std::vector<Entry> entries;
    for (const uint64_t i : {0u, 1u, 255u, 256u, 65536u, 3000000000u}) {
      std::string key(size, '\0');
      LmdbFile::store(key, 0, i, size);
      entries.push_back({key, value_of(static_cast<unsigned>(i), 9)});
    }
    const Tree tree = file.add_tree(entries, 2, 1000, kIntegerKey);
    file.commit(tree);
    expect_records(file.bytes, scan_bytes(file.bytes), entries);
    Tree plain = tree;
    plain.flags = 0;
    file.commit(plain);
    EXPECT_THAT(error_of(file.bytes), HasSubstr("out of order"));
  }
}

TEST(Lmdb, FindsNamedDatabases) {
  LmdbFile file;
  const auto train = some(50, 3000), test = some(7, 40);
  const std::string trees[] = {LmdbFile::description(file.add_tree(test, 2)),
                               LmdbFile::description(file.add_tree(train, 5)),
                               LmdbFile::description([] {
                                 Tree t;
                                 t.root = kNoPage;
                                 return t;
                               }())};
  file.commit(file.add_tree(
      {{"loose", "x"}, {"nothing", trees[2], 2}, {"test", trees[0], 2}, {"train", trees[1], 2}},
      2));
  expect_records(file.bytes, scan_bytes(file.bytes, "train"), train);
  expect_records(file.bytes, scan_bytes(file.bytes, "test"), test);
  expect_records(file.bytes, scan_bytes(file.bytes, "nothing"), {});
  const auto main = scan_bytes(file.bytes);
  expect_records(file.bytes, main, {{"loose", "x"}});
  EXPECT_EQ(main.value().databases, (std::vector<std::string>{"nothing", "test", "train"}));
  const auto absent = scan_bytes(file.bytes, "val");
  ASSERT_FALSE(absent);
  EXPECT_EQ(absent.error().kind(), ErrorKind::usage);
  EXPECT_THAT(absent.error().what(), HasSubstr("it has: nothing, test, train"));
  EXPECT_THAT(error_of(file.bytes, "loose"), HasSubstr("has no database \"loose\""));
}

TEST(Lmdb, RefusesSeveralValuesAKeyByName) {
  LmdbFile file;
  file.commit(file.add_tree(some(3, 10), 1000, 1000, kDupSort));
  auto result = scan_bytes(file.bytes);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().kind(), ErrorKind::usage);
  EXPECT_THAT(result.error().what(), HasSubstr("DUPSORT"));

  LmdbFile named;
  const std::string tree = LmdbFile::description(named.add_tree(some(3, 10), 1000, 1000, kDupSort));
  named.commit(named.add_tree({{"a", "b"}, {"dup", tree, 2}}));
  EXPECT_THAT(error_of(named.bytes, "dup"), HasSubstr("DUPSORT"));
  EXPECT_TRUE(scan_bytes(named.bytes));

  LmdbFile nodes;  // a node says so where the tree does not
  nodes.commit(nodes.add_tree({{"k", "v", 4}}));
  result = scan_bytes(nodes.bytes);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().kind(), ErrorKind::usage);
}

TEST(Lmdb, TakesTheNewerMetaPageOrTheOneThatIsWhole) {
  LmdbFile file;
  const auto old_entries = some(3, 10), new_entries = some(5, 3000);
  const Tree older = file.add_tree(old_entries), newer = file.add_tree(new_entries);
  for (const unsigned newer_at : {0u, 1u}) {
    file.meta(1 - newer_at, older, 20);
    file.meta(newer_at, newer, 21);
    expect_records(file.bytes, scan_bytes(file.bytes), new_entries);
    // Torn: any of its fields may be wrong.
    for (const size_t at :
         {size_t{16}, size_t{10}, size_t{0}, size_t{88 + 40 + 7}, size_t{88 + 6}}) {
      std::string torn = file.bytes;
      torn[newer_at * 4096 + at] = static_cast<char>(torn[newer_at * 4096 + at] ^ 0x7e);
      const auto result = scan_bytes(torn);
      expect_records(torn, result, old_entries);
      EXPECT_TRUE(result.value().snapshot.other_meta_used);
    }
    std::string none = file.bytes;
    none[16] = none[4096 + 16] = 0;
    EXPECT_THAT(error_of(none), HasSubstr("neither meta page can be used"));
  }
}

TEST(Lmdb, FindsTheSecondMetaPageWhateverThePageSize) {
  for (const uint32_t size : {256u, 512u, 4096u, 8192u, 32768u}) {
    LmdbFile file(size);
    const auto entries = some(9, 50);
    const Tree tree = file.add_tree(entries, 2);
    file.meta(1, tree, 3);  // the first one is zeros
    expect_records(file.bytes, scan_bytes(file.bytes), entries);
  }
}

TEST(Lmdb, RefusesOtherDataVersionsByName) {
  for (const uint64_t version : {2u, 3u}) {
    LmdbFile file;
    file.commit(file.add_tree(some(3, 10)));
    file.put(20, version, 4);
    file.put(4096 + 20, version, 4);
    auto result = scan_bytes(file.bytes);
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().kind(), ErrorKind::usage);
    EXPECT_THAT(result.error().what(), HasSubstr("data version " + std::to_string(version)));
    // Its pages have a header of 24 bytes.
    std::string moved(8192, '\0');
    for (const size_t meta : {0u, 4096u}) {
      LmdbFile::store(moved, meta, meta / 4096, 8);
      LmdbFile::store(moved, meta + 18, 8, 2);
      LmdbFile::store(moved, meta + 24, 0xBEEFC0DE, 4);
      LmdbFile::store(moved, meta + 28, version, 4);
    }
    result = scan_bytes(moved);
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().kind(), ErrorKind::usage) << result.error().what();
    EXPECT_THAT(result.error().what(), HasSubstr("data version " + std::to_string(version)));
  }
}

TEST(Lmdb, ReadsValuesThatShrankInPlace) {
  LmdbFile file;
  std::vector<Entry> entries = some(20, 5000);
  entries[3].spare_pages = 25;  // was 100 KB, then put again in the same transaction
  entries[7].value = "tiny";
  entries[7].spare_pages = 2;
  file.commit(file.add_tree(entries, 6));
  const auto result = scan_bytes(file.bytes);
  expect_records(file.bytes, result, entries);
  const auto header = std::as_bytes(std::span(file.bytes)).subspan(file.value_pages[3] * 4096, 16);
  EXPECT_EQ(check_value_page(header, file.value_pages[3], 2), "");
  EXPECT_NE(check_value_page(header, file.value_pages[3], 28), "");
}

TEST(Lmdb, ReadsAFileThatIsShorterByFreedPages) {
  LmdbFile file;
  const auto entries = some(5, 5000);
  file.commit(file.add_tree(entries));
  for (const size_t meta : {size_t{0}, size_t{4096}}) {
    file.put(meta + 136, file.bytes.size() / 4096 + 50, 8);
  }
  expect_records(file.bytes, scan_bytes(file.bytes), entries);
}

TEST(Lmdb, TellsOfACutFile) {
  LmdbFile file;
  file.commit(file.add_tree(some(40, 5000), 8));
  for (size_t size = 0; size < file.bytes.size(); size += 1000) {
    const auto result = scan_bytes(file.bytes.substr(0, size));
    ASSERT_FALSE(result) << size;
    EXPECT_EQ(result.error().kind(), ErrorKind::corruption) << result.error().what();
    if (size < 8192) continue;
    EXPECT_THAT(result.error().what(), HasSubstr("cut off")) << size;
  }
}

TEST(Lmdb, RefusesADescriptionThatIsNotInItsPage) {
  LmdbFile file;
  // Pages of its own: 8 bytes of the node are all that is left of the leaf.
  file.commit(file.add_tree({{"ab", std::string(48, '\0'), 2, 1}}));
  ASSERT_EQ(file.node_at(file.leaf_pages[0], 0) + 8 + 2 + 8, (file.leaf_pages[0] + 1) * 4096);
  const auto result = scan_bytes(file.bytes);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().kind(), ErrorKind::corruption);
  EXPECT_THAT(result.error().what(), HasSubstr("a damaged description of a named database"));
}

struct Damage {
  const char* name;
  void (*bend)(LmdbFile& file);
  const char* says;
};

// A tree of three levels: 24 records of 3000 bytes, 3 a leaf, 3 leaves a branch.
LmdbFile three_levels() {
  LmdbFile file;
  file.commit(file.add_tree(some(24, 3000), 3, 3));
  return file;
}
// Of the main tree's description in the newer meta page.
constexpr size_t kTree = 4096 + 88;

class LmdbDamage : public testing::TestWithParam<Damage> {};

TEST_P(LmdbDamage, IsFound) {
  LmdbFile file = three_levels();
  ASSERT_TRUE(scan_bytes(file.bytes));
  GetParam().bend(file);
  const auto result = scan_bytes(file.bytes);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().kind(), ErrorKind::corruption);
  EXPECT_THAT(result.error().what(), HasSubstr(GetParam().says));
}

INSTANTIATE_TEST_SUITE_P(
    All, LmdbDamage,
    testing::Values(
        Damage{"cycle",
               [](LmdbFile& f) {
                 const uint64_t root = f.branch_pages.back();
                 f.put(f.node_at(f.branch_pages[0], 1), root, 2);
               },
               "should be a leaf page"},
        Damage{"child_twice",
               [](LmdbFile& f) { f.put(f.node_at(f.branch_pages[0], 1), f.leaf_pages[0], 2); },
               "out of order"},
        Damage{"child_past_the_end",
               [](LmdbFile& f) { f.put(f.node_at(f.branch_pages[0], 1) + 4, 1, 2); },
               "which the database does not have"},
        Damage{"child_is_meta", [](LmdbFile& f) { f.put(f.node_at(f.branch_pages[0], 1), 1, 2); },
               "which the database does not have"},
        Damage{"child_is_value",
               [](LmdbFile& f) { f.put(f.node_at(f.branch_pages[0], 1), f.value_pages[0], 2); },
               "should be a leaf page"},
        Damage{"entries", [](LmdbFile& f) { f.put(kTree + 32, 25, 8); },
               "24 records instead of 25"},
        Damage{"leaves", [](LmdbFile& f) { f.put(kTree + 16, 9, 8); }, "8 leaf pages instead of 9"},
        Damage{"fewer_leaves", [](LmdbFile& f) { f.put(kTree + 16, 7, 8); }, "more leaf pages"},
        Damage{"branches", [](LmdbFile& f) { f.put(kTree + 8, 5, 8); }, "branch pages"},
        Damage{"fewer_branches", [](LmdbFile& f) { f.put(kTree + 8, 3, 8); }, "branch pages"},
        Damage{"no_depth", [](LmdbFile& f) { f.put(kTree + 6, 2, 2); }, "should be a leaf page"},
        Damage{"more_depth", [](LmdbFile& f) { f.put(kTree + 6, 4, 2); }, "more branch pages"},
        Damage{"fewer_overflow", [](LmdbFile& f) { f.put(kTree + 24, 23, 8); },
               "24 pages and not 23"},
        Damage{"counts_past_the_file", [](LmdbFile& f) { f.put(kTree + 16, uint64_t{1} << 60, 8); },
               "larger than the file"},
        Damage{"value_past_the_end",
               [](LmdbFile& f) {
                 f.put(f.node_at(f.leaf_pages[2], 1) + 16, f.bytes.size() / 4096, 8);
               },
               "00000007"},
        Damage{"value_page_overflows",
               [](LmdbFile& f) { f.put(f.node_at(f.leaf_pages[2], 1) + 16, ~uint64_t{0} - 1, 8); },
               "00000007"},
        Damage{"value_is_meta",
               [](LmdbFile& f) { f.put(f.node_at(f.leaf_pages[2], 1) + 16, 1, 8); }, "00000007"},
        Damage{"value_too_long",
               [](LmdbFile& f) { f.put(f.node_at(f.leaf_pages[2], 1) + 2, 0xffff, 2); },
               "00000007"},
        Damage{"value_longer_by_a_page",
               [](LmdbFile& f) { f.put(f.node_at(f.leaf_pages[2], 1), 5000, 2); }, "is used twice"},
        Damage{"last_value_longer",
               [](LmdbFile& f) {
                 // The next page is a branch page: nothing but a look at everything tells.
                 f.put(f.node_at(f.leaf_pages[7], 2), 5000, 2);
               },
               "is used twice"},
        Damage{"value_overlaps",
               [](LmdbFile& f) { f.put(f.node_at(f.leaf_pages[2], 1) + 16, f.value_pages[0], 8); },
               "is used twice"},
        Damage{"value_on_a_leaf",
               [](LmdbFile& f) { f.put(f.node_at(f.leaf_pages[2], 1) + 16, f.leaf_pages[3], 8); },
               "is used twice"},
        Damage{"value_on_a_branch",
               [](LmdbFile& f) { f.put(f.node_at(f.leaf_pages[2], 1) + 16, f.branch_pages[1], 8); },
               "is used twice"},
        Damage{"keys_out_of_order",
               [](LmdbFile& f) { f.bytes[f.node_at(f.leaf_pages[1], 1) + 8] = 'z'; },
               "out of order"},
        Damage{"branch_keys_out_of_order",
               [](LmdbFile& f) { f.bytes[f.node_at(f.branch_pages[0], 1) + 8] = 'z'; },
               "out of order"},
        Damage{"page_number", [](LmdbFile& f) { f.put(f.leaf_pages[1] * 4096, 99, 8); },
               "says that it is page 99"},
        Damage{"page_kind", [](LmdbFile& f) { f.put(f.leaf_pages[1] * 4096 + 10, 0x22, 2); },
               "should be a leaf page"},
        Damage{"no_nodes", [](LmdbFile& f) { f.put(f.branch_pages[1] * 4096 + 12, 16, 2); },
               "damaged header"},
        Damage{"lower", [](LmdbFile& f) { f.put(f.leaf_pages[1] * 4096 + 12, 5000, 2); },
               "damaged header"},
        Damage{"upper", [](LmdbFile& f) { f.put(f.leaf_pages[1] * 4096 + 14, 4097, 2); },
               "damaged header"},
        Damage{"node_outside", [](LmdbFile& f) { f.put(f.leaf_pages[1] * 4096 + 18, 4094, 2); },
               "not inside it"},
        Damage{"node_in_the_header", [](LmdbFile& f) { f.put(f.leaf_pages[1] * 4096 + 18, 2, 2); },
               "not inside it"},
        Damage{"key_outside",
               [](LmdbFile& f) { f.put(f.node_at(f.leaf_pages[1], 1) + 6, 0xffff, 2); },
               "not inside it"}),
    [](const auto& damage) { return damage.param.name; });

TEST(Lmdb, NamesKeysOfAnyBytesAsText) {
  LmdbFile file;
  file.commit(file.add_tree({{std::string("\x07\0\xff", 3), std::string(5000, 'x')}}));
  file.put(file.node_at(file.leaf_pages[0], 0) + 11, 1, 8);
  EXPECT_THAT(error_of(file.bytes), HasSubstr("the value of key \"\\x07\\x00\\xff\" (5000 bytes"));
}

TEST(Lmdb, RefusesNodesThatShareBytes) {
  LmdbFile file;
  file.commit(file.add_tree({{"aa", "1234567890"}, {"ab", "1234567890"}}));
  // The later node lies before the other one in the page, and now reaches into it.
  file.put(file.node_at(file.leaf_pages[0], 1), 12, 2);
  EXPECT_THAT(error_of(file.bytes), HasSubstr("share bytes"));

  LmdbFile branch;
  branch.commit(branch.add_tree(some(24, 100), 3));
  const uint64_t root = branch.branch_pages[0];
  branch.put(branch.node_at(root, 2) + 6, 12, 2);
  EXPECT_THAT(error_of(branch.bytes), HasSubstr("share bytes"));
}

// A flipped bit in any byte of the pages that are read gives a scan or an Error, and places inside
// the file.
TEST(Lmdb, StandsEveryFlippedBit) {
  LmdbFile file(512);
  const auto entries = some(8, 300);
  const std::string inner = LmdbFile::description(file.add_tree(some(5, 20), 3));
  auto all = entries;
  all.push_back({"named", inner, 2});
  file.commit(file.add_tree(all, 2, 3));
  const std::set<uint64_t> values(file.value_pages.begin(), file.value_pages.end());
  for (const std::string_view database : {"", "named"}) {
    ASSERT_TRUE(scan_bytes(file.bytes, database));
    for (size_t at = 0; at < file.bytes.size(); ++at) {
      if (values.count(at / 512)) continue;  // these are not read
      std::string bent = file.bytes;
      bent[at] = static_cast<char>(bent[at] ^ (at % 3 ? 0x80 : 0x02));
      const auto result = scan_bytes(bent, database);
      if (!result) continue;
      const Records& r = result.value();
      for (size_t i = 0; i < r.size(); ++i) {
        ASSERT_LE(r.offset[i], bent.size());
        ASSERT_LE(r.length[i], bent.size() - r.offset[i]);
      }
    }
  }
}

// Storage that a writer commits to while it is scanned.
TEST(Lmdb, ScansAgainWhenAWriterCommits) {
  LmdbFile file;
  const auto first_entries = some(12, 3000), second_entries = some(20, 3000);
  const Tree first = file.add_tree(first_entries, 3), second = file.add_tree(second_entries, 3);
  file.commit(first, 8);
  MemoryStorage storage({file.bytes});
  unsigned reads = 0;
  storage.before = [&](const RangeRead&) {
    // After the meta pages and some leaves: what was read until now is old.
    if (++reads == 3) {
      file.commit(second, 9);
      storage.content() = file.bytes;
    }
    return 0;
  };
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  const auto result = scan(*reader, storage);
  expect_records(file.bytes, result, second_entries);
  EXPECT_EQ(result.value().snapshot.transaction, 9u);
}

TEST(Lmdb, GivesUpOnAWriterThatIsFasterThanTheScan) {
  LmdbFile file;
  const Tree tree = file.add_tree(some(12, 3000), 3);
  file.commit(tree, 8);
  MemoryStorage storage({file.bytes});
  uint64_t transaction = 8;
  storage.before = [&](const RangeRead& r) {
    if (r.offset != 0) return 0;
    file.commit(tree, ++transaction);
    storage.content() = file.bytes;
    return 0;
  };
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  const auto result = scan(*reader, storage);
  ASSERT_FALSE(result);
  EXPECT_EQ(result.error().kind(), ErrorKind::io);
  EXPECT_THAT(result.error().what(), HasSubstr("is being written to"));
}

// The file grew after it was opened: what lies beyond its old end is not damage.
TEST(Lmdb, DoesNotCallAGrownFileDamaged) {
  LmdbFile file;
  file.commit(file.add_tree(some(12, 3000), 3), 8);
  const std::string change = "its size changed from 5000 to 90000 bytes";
  for (const size_t size : {size_t{100}, size_t{5000}, file.bytes.size() / 2}) {
    MemoryStorage storage({file.bytes.substr(0, size)});
    storage.change = change;
    const auto reader = storage.make_reader(ReaderKind::pread, 1);
    const auto result = scan(*reader, storage);
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().kind(), ErrorKind::io);
    EXPECT_THAT(result.error().what(), HasSubstr("is being written to (" + change + ")"));
    EXPECT_EQ(current_stamp(*reader, storage, "train").error().kind(), ErrorKind::io);
  }
}

// A meta page caught half written: the new tree, still under the old number.
TEST(Lmdb, DoesNotTakeAHalfWrittenMetaPageForTheOldOne) {
  LmdbFile file;
  const auto old_entries = some(12, 3000), new_entries = some(20, 3000);
  const Tree older = file.add_tree(old_entries, 3), newer = file.add_tree(new_entries, 3);
  file.commit(older, 9);
  LmdbFile half = file;
  half.meta(1, newer, 9);
  MemoryStorage storage({half.bytes});
  unsigned reads = 0;
  storage.before = [&](const RangeRead&) {
    if (++reads == 2) storage.content() = file.bytes;
    return 0;
  };
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  expect_records(file.bytes, scan(*reader, storage), old_entries);
}

TEST(Lmdb, PassesOnWhatTheStorageSays) {
  LmdbFile file = three_levels();
  MemoryStorage storage({file.bytes});
  for (unsigned fail = 1; fail < 8; ++fail) {
    unsigned reads = 0;
    storage.before = [&](const RangeRead&) { return ++reads == fail ? EIO : 0; };
    const auto reader = storage.make_reader(ReaderKind::pread, 1);
    const auto result = scan(*reader, storage);
    if (reads < fail) break;
    ASSERT_FALSE(result) << fail;
    EXPECT_EQ(result.error().kind(), ErrorKind::io);
    EXPECT_EQ(result.error().error_number(), EIO);
    EXPECT_THAT(result.error().what(), HasSubstr("memory/0"));
  }
}

TEST(Lmdb, StampsTellDatabasesApart) {
  LmdbFile file;
  file.commit(file.add_tree(some(12, 30), 3), 8);
  const auto first = scan_bytes(file.bytes);
  ASSERT_TRUE(first);
  EXPECT_NE(stamp(first.value(), ""), stamp(first.value(), "train"));
  file.commit(file.add_tree(some(12, 30), 3), 9);
  EXPECT_NE(stamp(first.value(), ""), stamp(scan_bytes(file.bytes).value(), ""));
}

TEST(Lmdb, ReadsFewPagesOfManyRecords) {
  LmdbFile file;
  file.commit(file.add_tree(some(500, 20000)));
  const MemoryStorage storage({file.bytes});
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  ASSERT_TRUE(scan(*reader, storage));
  EXPECT_LT(storage.bytes, file.bytes.size() / 200);
}

}  // namespace
}  // namespace nostall::records::lmdb
