// What the format of a table adds to reading it.
#include "records/formats.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "lmdb_file.h"
#include "memory_storage.h"

namespace nostall::records {
namespace {

using namespace source;

TEST(Formats, ChecksAndNamesTheSamplesOfAnLmdbDatabase) {
  lmdb::LmdbFile file;
  file.commit(file.add_tree({{"cat", std::string(5000, 'x')}, {"dog", std::string(9000, 'y')}}));
  const auto storage = std::make_shared<MemoryStorage>(std::vector<std::string>{file.bytes});
  const auto reader = storage->make_reader(ReaderKind::pread, 1);
  const auto found = lmdb::scan(*reader, *storage);
  ASSERT_TRUE(found) << found.error().what();
  RecordTable table;
  table.kind = "lmdb";
  table.stamp = lmdb::stamp(found.value(), "") + " more";
  table.offset = found.value().offset;
  table.length = found.value().length;
  table.label = {0, 0};
  table.head = {lmdb::kPageHeader, lmdb::kPageHeader};
  const RecordOptions options = options_for(table, storage, "", 4096);

  std::vector<std::byte> head(lmdb::kPageHeader);
  std::memcpy(head.data(), file.bytes.data() + table.offset[1] - head.size(), head.size());
  const RecordSource source(storage, table, {});
  EXPECT_EQ(options.check(source.table(), 1, head), "");
  head[0] ^= std::byte{1};
  EXPECT_NE(options.check(source.table(), 1, head), "");
  EXPECT_EQ(options.name(source.table(), 1), "dog");

  EXPECT_TRUE(options.same(*reader, source.table(), 0));
  table.stamp = "another database";
  const RecordSource another(storage, table, {});
  EXPECT_FALSE(options.same(*reader, another.table(), 0));
}

TEST(Formats, AddsNothingToATableOfTheCaller) {
  const auto storage = std::make_shared<MemoryStorage>(std::vector<std::string>{"bytes"});
  RecordTable table;
  table.kind = "hdf5";
  const RecordOptions options = options_for(table, storage, "", 0);
  EXPECT_FALSE(options.check);
  EXPECT_FALSE(options.name);
  EXPECT_FALSE(options.same);
}

}  // namespace
}  // namespace nostall::records
