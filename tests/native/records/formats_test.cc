// What the format of a table adds to reading it.
#include "records/formats.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "../temporary.h"
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

// As a writer commits through a map of the file, with neither a new time nor a new size.
TEST(Formats, ACommitThatChangesNoTimeIsFound) {
  for (const uint32_t page_size : {4096u, 16384u}) {
    lmdb::LmdbFile file(page_size);
    const lmdb::Tree tree = file.add_tree({{"cat", "meow"}, {"dog", "woof"}});
    file.commit(tree, 7);
    const TemporaryFolder folder;
    const std::string path = folder.path() + "/data.mdb";
    std::ofstream(path, std::ios::binary) << file.bytes;
    const auto time = std::filesystem::last_write_time(path);
    const std::shared_ptr<const Storage> storage = open_files({path});
    const auto ranges = storage->make_reader(ReaderKind::pread, 1);
    const auto found = lmdb::scan(*ranges, *storage);
    ASSERT_TRUE(found) << found.error().what();
    RecordTable table;
    table.kind = "lmdb";
    table.stamp = lmdb::stamp(found.value(), "");
    table.offset = found.value().offset;
    table.length = found.value().length;
    table.label = {0, 0};
    const RecordSource source(storage, table, options_for(table, storage, "", 0));
    const auto reader = source.make_reader(ReaderKind::pread, 1);
    std::vector<std::byte> into(4);
    ReadRequest request{1, into};
    for (int i = 0; i < 2; ++i) {
      reader->read({&request, 1});
      EXPECT_EQ(request.error, 0) << request.why;
    }
    // The older of the two meta pages is the one that a commit writes.
    file.meta(0, tree, 8);
    std::fstream(path, std::ios::binary | std::ios::in | std::ios::out) << file.bytes;
    std::filesystem::last_write_time(path, time);
    ASSERT_EQ(storage->changed(0), "");
    reader->read({&request, 1});
    EXPECT_EQ(request.error, kWrongBytes);
    EXPECT_NE(request.why.find("it was written to since it was indexed"), std::string::npos)
        << request.why;
  }
}

TEST(Formats, AddsNothingToATableOfTheCaller) {
  const auto storage = std::make_shared<MemoryStorage>(std::vector<std::string>{"bytes"});
  RecordTable table;
  table.kind = "hdf5";
  const RecordOptions options = options_for(table, storage, "", 0);
  EXPECT_FALSE(options.check);
  EXPECT_FALSE(options.name);
  EXPECT_FALSE(options.same);
  EXPECT_FALSE(options.state);
}

}  // namespace
}  // namespace nostall::records
