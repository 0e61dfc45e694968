// The stored index, and both readers over real files.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "../closed_memory.h"
#include "../failing_files.h"
#include "../readers.h"
#include "../refuse.h"
#include "../temporary.h"
#include "base/log.h"
#include "source/folder.h"
#include "source/reader_choice.h"
#include "source/scan.h"

namespace nostall::source {
namespace {

namespace fs = std::filesystem;

SampleIndex small_index() {
  SampleIndex index;
  index.add("a/1.jpg", 10, 0);
  index.add("b/2.jpg", 20, 1);
  index.set_classes({"a", "b"});
  index.set_directories({{"", 5}, {"a", 6}});
  return index;
}

TEST(StoredIndex, TellsWhichCallFailedAndLeavesNothing) {
  const TemporaryFolder folder;
  const auto bytes = serialize_index(small_index(), 9);
  const std::pair<const char*, int> cases[] = {
      {"open", EROFS}, {"pwrite", ENOSPC}, {"rename", EROFS}};
  for (const auto& [call, error] : cases) {
    FailingFiles files;
    files.errors[call] = error;
    EXPECT_EQ(store_index(folder.path("index"), bytes, files), -error) << call;
    EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << call;
  }
  EXPECT_EQ(store_index(folder.path("index"), bytes, FileSystem::real()), 0);
  for (const auto& [call, error] : {std::pair{"open", EACCES}, std::pair{"pread", EIO}}) {
    FailingFiles files;
    files.errors[call] = error;
    const auto loaded = load_bytes(folder.path("index"), kIndexMagic, 1 << 20, files);
    ASSERT_FALSE(loaded);
    EXPECT_EQ(loaded.error().error_number(), error);
  }
}

TEST(Index, SurvivesTheRoundTrip) {
  const auto bytes = serialize_index(small_index(), 9);
  const auto parsed = parse_index(bytes, 9);
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed.value().path(1), "b/2.jpg");
  EXPECT_EQ(parsed.value().total_bytes(), 30u);
  EXPECT_EQ(parsed.value().classes(), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(parsed.value().directories()[1].mtime_ns, 6);
  EXPECT_EQ(parsed.value().fingerprint(), small_index().fingerprint());
  EXPECT_FALSE(parse_index(bytes, 8));
}

TEST(Index, RefusesEveryDamage) {
  const auto bytes = serialize_index(small_index(), 9);
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_FALSE(parse_index(std::span(bytes).first(i), 9)) << i;
    auto damaged = bytes;
    damaged[i] ^= std::byte{0x40};
    EXPECT_FALSE(parse_index(damaged, 9)) << i;
  }
}

TEST(Choice, KeepsManyInFlightOnlyWhereReadsWait) {
  EXPECT_FALSE(choose_reader(0.0).many_in_flight);
  EXPECT_FALSE(choose_reader(15e-6).many_in_flight);
  EXPECT_TRUE(choose_reader(1e-3).many_in_flight);
}

TEST(Printable, KeepsTextAndEscapesOtherBytes) {
  using namespace std::string_literals;
  EXPECT_EQ(printable("n01440764/x 1.jpg"), "n01440764/x 1.jpg");
  EXPECT_EQ(printable("\xc3\xa4\xe6\xbc\xa2\xf0\x9f\x90\x9f"),
            "\xc3\xa4\xe6\xbc\xa2\xf0\x9f\x90\x9f");
  EXPECT_EQ(printable("\x05\0\0\0"s), "\\x05\\x00\\x00\\x00");
  EXPECT_EQ(printable("a\n\x7f\xc2\x85"), "a\\x0a\\x7f\\xc2\\x85");
  // Cut, too long a form, a surrogate, beyond the last character.
  for (const char* wrong : {"\xc3", "\xe6\xbc", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80",
                            "\xf5\x80\x80\x80", "\xf4\x90\x80\x80", "\x80", "\xff"}) {
    EXPECT_EQ(printable(wrong).substr(0, 2), "\\x") << wrong;
  }
  EXPECT_EQ(printable(std::string(500, 'k')), std::string(120, 'k') + "...");
}

class ReaderTest : public testing::TestWithParam<ReaderKind> {
 protected:
  void SetUp() override {
    for (int i = 0; i < 40; ++i) write(i, static_cast<size_t>(i) * 1000);
    source_ =
        std::make_unique<FolderSource>(root_.string(), scan_folder(root_.string(), options()));
  }

  static ScanOptions options() {
    ScanOptions o;
    o.class_per_folder = false;
    return o;
  }
  void write(int i, size_t size) {
    char name[16];
    std::snprintf(name, sizeof name, "%03d", i);
    std::ofstream(root_ / name, std::ios::binary) << std::string(size, static_cast<char>(i));
  }
  std::vector<ReadRequest> read_all() { return read_all(*source_->make_reader(GetParam(), 7)); }
  std::vector<ReadRequest> read_all(Reader& reader) {
    memory_.clear();
    for (const uint64_t size : source_->sizes()) memory_.emplace_back(size);
    std::vector<ReadRequest> requests;
    for (uint64_t s = 0; s < source_->size(); ++s) requests.push_back({s, memory_[s], -1});
    reader.read(requests);
    return requests;
  }

  const TemporaryFolder folder_;
  const fs::path root_ = folder_.path();
  std::unique_ptr<FolderSource> source_;
  std::vector<std::vector<std::byte>> memory_;
};

TEST_P(ReaderTest, BringsEveryFile) {
  for (const ReadRequest& r : read_all()) {
    ASSERT_EQ(r.error, 0);
    for (const std::byte b : r.into) ASSERT_EQ(b, static_cast<std::byte>(r.sample));
  }
}

TEST_P(ReaderTest, TellsWhatIsWrongWithEachFile) {
  fs::remove(root_ / "005");
  write(6, 100);
  write(7, 99999);
  write(0, 1);
  for (const ReadRequest& r : read_all()) {
    const int expected = r.sample == 5                                     ? ENOENT
                         : r.sample == 6 || r.sample == 7 || r.sample == 0 ? kSizeChanged
                                                                           : 0;
    EXPECT_EQ(r.error, expected) << r.sample;
  }
  // Lists of files have no stored listing, and one may lie elsewhere or be of other extensions.
  EXPECT_EQ(
      read_error_text(kSizeChanged),
      "its size is not the one that was listed (if it was changed on purpose: start again, and "
      "where the listing is stored run `nostall index ROOT` before, with its --index and options)");
}

TEST_P(ReaderTest, WaitsForNoPipe) {
  fs::remove(root_ / "008");
  ASSERT_EQ(::mkfifo((root_ / "008").c_str(), 0600), 0);
  for (const ReadRequest& r : read_all()) EXPECT_EQ(r.error != 0, r.sample == 8) << r.sample;
}

TEST_P(ReaderTest, ReadsOnWhereTheKernelTakesNoMoreRequests) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, const std::string& message) { said.push_back(message); });
  const auto reader = source_->make_reader(GetParam(), 7);
  with_refused({SYS_io_uring_enter}, EAGAIN, [&] {
    for (const ReadRequest& r : read_all(*reader)) {
      ASSERT_EQ(r.error, 0);
      for (const std::byte b : r.into) ASSERT_EQ(b, static_cast<std::byte>(r.sample));
    }
  });
  // Once for the source, whatever reads it. The automatic reader asks the kernel where reads take long.
  for (const ReadRequest& r : read_all()) ASSERT_EQ(r.error, 0);
  EXPECT_GE(said.size(), GetParam() == ReaderKind::uring ? 1u : 0u);
  EXPECT_LE(said.size(), GetParam() == ReaderKind::pread ? 0u : 1u);
  set_log_sink({});
}

// Memory that is closed wholly, or behind its first page: the other files come, and once it is open
// this one comes too.
TEST_P(ReaderTest, ReadsOnWhereMemoryIsClosed) {
  const auto reader = source_->make_reader(GetParam(), 7);
  for (const size_t open : {0u, 1u}) {
    ClosedMemory closed(open, 3);
    memory_.clear();
    for (const uint64_t size : source_->sizes()) memory_.emplace_back(size);
    std::vector<ReadRequest> requests;
    for (uint64_t s = 0; s < source_->size(); ++s) requests.push_back({s, memory_[s], -1});
    requests[12].into = closed.all().first(requests[12].into.size());  // of 12000 bytes
    reader->read(requests);
    for (const ReadRequest& r : requests) {
      ASSERT_EQ(r.error, r.sample == 12 ? EFAULT : 0) << r.sample;
      if (r.error) continue;
      for (const std::byte b : r.into) ASSERT_EQ(b, static_cast<std::byte>(r.sample));
    }
    EXPECT_EQ(closed.all()[open * closed.page()], std::byte{'?'});
    closed.reopen();
    reader->read({&requests[12], 1});
    ASSERT_EQ(requests[12].error, 0);
    for (const std::byte b : requests[12].into) ASSERT_EQ(b, std::byte{12});
  }
}

TEST_P(ReaderTest, IsListedWhereNoThreadIsToBeHad) {
  const auto index = scan_folder(root_.string(), options());
  with_refused(kThreadCalls, EAGAIN, [&] {
    EXPECT_EQ(scan_folder(root_.string(), options()).fingerprint(), index.fingerprint());
  });
}

INSTANTIATE_TEST_SUITE_P(All, ReaderTest, testing::ValuesIn(reader_kinds()));

}  // namespace
}  // namespace nostall::source
