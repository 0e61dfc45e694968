// Records of TFRecord files: framing and both checksums.
#include "records/tfrecord.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "../temporary.h"
#include "base/crc32c.h"
#include "memory_storage.h"
#include "records/build.h"

namespace nostall::records {
namespace {

using namespace source;
using testing::HasSubstr;

std::string little(uint64_t value, size_t size) {
  std::string s;
  for (size_t i = 0; i < size; ++i) s += static_cast<char>(value >> (8 * i));
  return s;
}
std::string masked(const std::string& bytes) {
  const uint32_t crc = crc32c(std::as_bytes(std::span(bytes)));
  return little(((crc >> 15) | (crc << 17)) + 0xa282ead8u, 4);
}
std::string head(uint64_t length) { return little(length, 8) + masked(little(length, 8)); }
std::string record(const std::string& data) { return head(data.size()) + data + masked(data); }

Result<TfRecords> scan_bytes(const std::string& bytes, bool check = true) {
  const MemoryStorage storage({bytes});
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  FileWindow window(*reader, storage, 0);
  return scan_tfrecord(window, check);
}
std::string error_of(const std::string& bytes, bool check) {
  const auto result = scan_bytes(bytes, check);
  if (result) return "no error";
  EXPECT_EQ(result.error().kind(), ErrorKind::corruption);
  return result.error().what();
}

TEST(TfRecord, FindsEveryRecord) {
  const std::vector<std::string> contents = {"", "a", random_bytes(700'000, 1),
                                             random_bytes(4096, 2), std::string(262144, 'x')};
  std::string bytes;
  for (const std::string& c : contents) bytes += record(c);
  for (const bool check : {false, true}) {
    const auto records = scan_bytes(bytes, check);
    ASSERT_TRUE(records) << records.error().what();
    ASSERT_EQ(records.value().length.size(), contents.size());
    for (size_t i = 0; i < contents.size(); ++i) {
      EXPECT_EQ(bytes.substr(records.value().offset[i], records.value().length[i]), contents[i]);
      EXPECT_EQ(records.value().crc[i], crc32c(std::as_bytes(std::span(contents[i]))));
    }
    EXPECT_TRUE(scan_bytes("", check).value().length.empty());
  }
}

TEST(TfRecord, ScansAllFilesOfAStorageInOrder) {
  const std::vector<std::string> contents = {record("a") + record("bb"), "", record("ccc")};
  const MemoryStorage storage(contents);
  const TfRecordPlaces places = scan_tfrecords(storage, true, 2);
  EXPECT_EQ(places.file, (std::vector<uint32_t>{0, 0, 2}));
  EXPECT_EQ(places.length, (std::vector<uint64_t>{1, 2, 3}));
  ASSERT_EQ(places.crc.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    const std::string data = contents[places.file[i]].substr(places.offset[i], places.length[i]);
    EXPECT_EQ(data, (std::vector<std::string>{"a", "bb", "ccc"})[i]);
    EXPECT_EQ(places.crc[i], crc32c(std::as_bytes(std::span(data))));
  }
  const MemoryStorage damaged({contents[0], contents[2].substr(0, 14)});
  EXPECT_THROW(scan_tfrecords(damaged, true, 2), Error);
}

TEST(TfRecord, FindsEveryFlippedByte) {
  const std::string bytes = record("first") + record(random_bytes(300, 1)) + record("third");
  for (size_t at = 0; at < bytes.size(); ++at) {
    std::string bent = bytes;
    bent[at] = static_cast<char>(bent[at] ^ 0x10);
    const auto result = scan_bytes(bent);
    ASSERT_FALSE(result) << at;
    EXPECT_EQ(result.error().kind(), ErrorKind::corruption);
  }
  std::string bent = bytes;
  bent[21 + 12 + 5] = static_cast<char>(bent[21 + 12 + 5] ^ 1);
  EXPECT_EQ(error_of(bent, true), "memory/0: record 1 at offset 21 is damaged (its CRC is wrong)")
      << "21 bytes are the first record";
  EXPECT_EQ(error_of(bent, false), "no error");
}

TEST(TfRecord, FindsEveryCut) {
  const std::string bytes = record("first") + record(random_bytes(300, 1));
  for (size_t size = 1; size < bytes.size(); ++size) {
    for (const bool check : {false, true}) {
      const auto result = scan_bytes(bytes.substr(0, size), check);
      ASSERT_EQ(static_cast<bool>(result), size == 21) << size;
      if (result) continue;
      EXPECT_THAT(result.error().what(), HasSubstr("is cut off"));
    }
  }
  for (const uint64_t length : {~uint64_t{0}, ~uint64_t{0} - 15, uint64_t{1} << 63, uint64_t{5}}) {
    EXPECT_THAT(error_of(head(length) + "1234", false), HasSubstr("is cut off")) << length;
  }
}

TEST(TfRecord, NamesCompressionAsACause) {
  EXPECT_THAT(error_of("\x1f\x8b\x08" + std::string(100, 'z'), false),
              HasSubstr("no TFRecord file, or it is compressed"));
}

TEST(TfRecord, PassesOnWhatTheStorageSays) {
  MemoryStorage storage({record(random_bytes(900'000, 1)) + record("x")});
  for (const uint64_t bad : {0u, 300'000u, 900'010u}) {
    storage.before = [bad](const RangeRead& r) {
      return r.offset <= bad && bad < r.offset + r.size() ? EIO : 0;
    };
    const auto reader = storage.make_reader(ReaderKind::pread, 1);
    FileWindow window(*reader, storage, 0);
    const auto result = scan_tfrecord(window, true);
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().kind(), ErrorKind::io);
    EXPECT_EQ(result.error().error_number(), EIO);
  }
}

}  // namespace
}  // namespace nostall::records
