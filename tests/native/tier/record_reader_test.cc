// Records of a real file; where the kernel has no io_uring the side by side reads are plain ones.
#include "tier/record_reader.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <thread>
#include <vector>

#include "../failing_files.h"
#include "../refuse.h"
#include "base/log.h"
#include "base/sums.h"
#include "tier/turns.h"

namespace nostall::tier {
namespace {

constexpr uint64_t kRecords = 40, kSize = 5000, kWhole = kSize + kRecordHeader;
constexpr uint64_t kFlipped = 3, kOther = 17, kCut = kRecords - 1;

class RecordReaderTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/nostall-records-XXXXXX";
    file_ = Descriptor(::mkstemp(pattern));
    path_ = pattern;
    FileSystem& disk = FileSystem::real();
    for (uint64_t s = 0; s < kRecords; ++s) {
      const auto bytes = bytes_of(s);
      ASSERT_EQ(write_record(disk, file_.get(), s * kWhole, s == kOther ? s + 1 : s,
                             sample_sum(bytes), bytes),
                0);
    }
    const std::vector<std::byte> wrong(1, std::byte{255});
    ASSERT_EQ(disk.pwrite(file_.get(), wrong, kFlipped * kWhole + 2000), 1);
    ASSERT_EQ(disk.truncate(file_.get(), kRecords * kWhole - 1), 0);
  }
  void TearDown() override { std::filesystem::remove(path_); }

  static std::vector<std::byte> bytes_of(uint64_t sample) {
    return std::vector<std::byte>(kSize, static_cast<std::byte>(sample));
  }
  // Reads that waited for a device, as far as a new reader knows.
  static ColdReads cold() {
    ColdReads seen;
    for (int i = 0; i < 2; ++i) seen.took(kSize, 1'000'000'000);
    return seen;
  }
  std::vector<RecordRead> read_all(RecordReader& reader, FileSystem& files = FileSystem::real()) {
    std::vector<RecordRead> reads;
    into_.assign(kRecords, std::vector<std::byte>(kSize));
    for (uint64_t s = 0; s < kRecords; ++s) {
      reads.push_back({file_.get(), s * kWhole, s, into_[s]});
    }
    reader.read(files, reads);
    return reads;
  }
  // All but the three damaged ones have their bytes, and those say what is wrong.
  void expect_read(const std::vector<RecordRead>& reads) {
    for (uint64_t s = 0; s < kRecords; ++s) {
      const bool damaged = s == kFlipped || s == kOther || s == kCut;
      ASSERT_EQ(static_cast<bool>(reads[s].sum), !damaged) << s;
      if (damaged) {
        EXPECT_STREQ(
            reads[s].sum.error().what(),
            s == kCut ? "a record is cut short" : "the CRC32C or the header of a record is wrong");
        continue;
      }
      EXPECT_EQ(into_[s], bytes_of(s));
      EXPECT_EQ(reads[s].sum.value(), sample_sum(bytes_of(s)));
    }
  }

  Descriptor file_;
  std::string path_;
  std::vector<std::vector<std::byte>> into_;
  std::atomic<bool> refused_{false};
};

TEST_F(RecordReaderTest, RecordsAreTheSameOneAtATimeAndSideBySide) {
  RecordReader reader(7, refused_, cold()), plain(1, refused_);
  for (int i = 0; i < 3; ++i) expect_read(read_all(reader));
  EXPECT_EQ(reader.many(), has_uring());
  expect_read(read_all(plain));
}

TEST_F(RecordReaderTest, WhereTheKernelTakesNoReadsPlainCallsGoOn) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, const std::string& message) { said.push_back(message); });
  RecordReader reader(7, refused_, cold());
  with_refused({SYS_io_uring_enter}, EAGAIN, [&] { expect_read(read_all(reader)); });
  EXPECT_FALSE(reader.many());
  expect_read(read_all(reader));
  EXPECT_EQ(said.size(), has_uring() ? 1u : 0u);
  RecordReader none(7, refused_, cold());
  with_refused({SYS_io_uring_setup}, ENOMEM, [&] { expect_read(read_all(none)); });
  set_log_sink({});
}

TEST_F(RecordReaderTest, WhatStandsForTheSystemSeesEachRead) {
  FailingFiles failing;
  failing.errors["pread"] = EIO;
  RecordReader reader(7, refused_, cold());
  for (const RecordRead& r : read_all(reader, failing)) {
    ASSERT_FALSE(r.sum);
    EXPECT_EQ(r.sum.error().kind(), ErrorKind::io);
  }
}

TEST(ColdReads, OneSlowReadIsNotADisk) {
  ColdReads reads;
  reads.took(1000, 5'000'000);
  EXPECT_FALSE(reads.many());
  reads.took(1000, 5'000);
  reads.took(1000, 5'000'000);
  EXPECT_FALSE(reads.many());
  reads.took(1000, 5'000'000);
  EXPECT_TRUE(reads.many());
  int plain = 0;
  for (int i = 0; i < 640; ++i) plain += !reads.many();
  EXPECT_EQ(plain, 10);
  reads.took(1000, 5'000);
  EXPECT_FALSE(reads.many());
}

TEST(Turns, AreGivenAsFarAsTheyGoAndTakenAgain) {
  Turns turns, unlimited;
  turns.limit(3);
  EXPECT_EQ(unlimited.take(100).count(), 100u);
  {
    const auto first = turns.take(2), second = turns.take(5);
    EXPECT_EQ(second.count(), 1u);
  }
  auto held = std::make_unique<Turns::Taken>(turns.take(5));
  EXPECT_EQ(held->count(), 3u);
  std::atomic<size_t> got{0};
  std::thread waits([&] { got = turns.take(2).count(); });
  held.reset();
  waits.join();
  EXPECT_EQ(got, 2u);
}

}  // namespace
}  // namespace nostall::tier
