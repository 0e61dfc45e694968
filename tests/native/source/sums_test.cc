// Checksums of samples: what is learned, how it is kept, and the probe.
#include "source/sums.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "../failing_files.h"
#include "../temporary.h"
#include "base/crc32c.h"
#include "source/folder.h"
#include "source/index.h"
#include "source/scan.h"

namespace nostall::source {
namespace {

namespace fs = std::filesystem;

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

TEST(SampleSums, TheFirstOneDecides) {
  SampleSums sums(3);
  EXPECT_EQ(sums.of(1), 0u);
  EXPECT_TRUE(sums.agrees(1, bytes_of("123456789")));
  EXPECT_EQ(sums.of(1), 0xe3069283u);
  EXPECT_TRUE(sums.agrees(1, bytes_of("123456789")));
  EXPECT_FALSE(sums.agrees(1, bytes_of("123456788")));
  EXPECT_EQ(sums.of(1), 0xe3069283u);
  EXPECT_EQ(sums.known(), 1u);
}

TEST(SampleSums, NoBytesHaveAChecksumToo) {
  SampleSums sums(1);
  EXPECT_TRUE(sums.agrees(0, bytes_of("")));
  EXPECT_EQ(sums.of(0), 1u);
}

TEST(SampleSums, APartsFollowsFromTheWhole) {
  const std::string text = random_bytes(5000, 3);
  for (const size_t before : {size_t{0}, size_t{1}, size_t{37}, size_t{2500}}) {
    for (const size_t after : {size_t{0}, size_t{1}, size_t{111}, size_t{2500}}) {
      const size_t length = text.size() - before - after;
      EXPECT_EQ(crc32c_between(crc32c(bytes_of(text)), bytes_of(text.substr(0, before)), length,
                               bytes_of(text.substr(before + length))),
                crc32c(bytes_of(text.substr(before, length))))
          << before << " " << after;
    }
  }
}

TEST(StoredSums, AreWrittenAsTheFormatSays) {
  SampleSums sums(2);
  sums.agrees(1, 0xe3069283);
  const auto bytes = serialize_sums(0x0102030405060708, 9, sums);
  std::string text;
  for (const std::byte b : bytes) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    text += kDigits[size_t(b) >> 4];
    text += kDigits[size_t(b) & 15];
  }
  EXPECT_EQ(text,
            "314e535301000000080706050403020109000000000000000200000000000000"
            "00000000839206e3"
            "74b25290");
}

TEST(StoredSums, SurviveTheRoundTripAndNothingElse) {
  SampleSums sums(5);
  for (uint32_t i = 0; i < 4; ++i) sums.agrees(i, 1 + i * 0x3fffffffu);
  const auto bytes = serialize_sums(42, 7, sums);
  EXPECT_EQ(bytes.size(), stored_sums_bytes(5));
  SampleSums back(5);
  const auto stamp = parse_sums(bytes, 42, back);
  ASSERT_TRUE(stamp);
  EXPECT_EQ(stamp.value(), 7u);
  for (uint64_t i = 0; i < 5; ++i) EXPECT_EQ(back.of(i), sums.of(i));
  SampleSums other(6), empty(5);
  EXPECT_FALSE(parse_sums(bytes, 43, back));
  EXPECT_FALSE(parse_sums(bytes, 42, other));
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_FALSE(parse_sums(std::span(bytes).first(i), 42, empty)) << i;
    auto damaged = bytes;
    damaged[i] ^= std::byte{0x10};
    EXPECT_FALSE(parse_sums(damaged, 42, empty)) << i;
  }
  EXPECT_EQ(empty.known(), 0u);
}

// Samples of one byte, which is that of their number.
class Many : public Source {
 public:
  Many(uint64_t samples, uint64_t fingerprint)
      : sizes_(samples, 1), labels_(samples), fingerprint_(fingerprint) {}
  uint64_t size() const override { return sizes_.size(); }
  std::span<const uint64_t> sizes() const override { return sizes_; }
  std::span<const int64_t> labels() const override { return labels_; }
  uint64_t total_bytes() const override { return sizes_.size(); }
  uint64_t fingerprint() const override { return fingerprint_; }
  std::string describe(uint64_t sample) const override { return std::to_string(sample); }
  std::unique_ptr<Reader> make_reader(ReaderKind, unsigned) const override {
    return std::make_unique<Bytes>(*this);
  }
  mutable size_t memory = 0;           // that was in use when samples were read
  mutable std::vector<uint64_t> read;  // samples

 private:
  class Bytes : public Reader {
   public:
    explicit Bytes(const Many& source) : source_(source) {}
    std::string_view name() const override { return "bytes"; }
    void read(std::span<ReadRequest> requests) override {
      const auto in_use = mallinfo2();
      source_.memory = in_use.uordblks + in_use.hblkhd;
      for (ReadRequest& r : requests) {
        r.into[0] = static_cast<std::byte>(r.sample);
        source_.read.push_back(r.sample);
      }
    }
    const Many& source_;
  };
  std::vector<uint64_t> sizes_;
  std::vector<int64_t> labels_;
  const uint64_t fingerprint_;
};

TEST(StoredSums, TakeTheMemoryOfOneTableWhileTheyAreOpened) {
  constexpr uint64_t kSamples = 3 << 20;
  const TemporaryFolder folder;
  const Many source(kSamples, 42);
  {
    SampleSums sums(kSamples);
    for (uint64_t s = 1; s < kSamples; s += 3) {
      const std::byte byte = static_cast<std::byte>(s);
      sums.agrees(s, {&byte, 1});
    }
    ASSERT_EQ(store_index(folder.path("sums"), serialize_sums(42, 7, sums)), 0);
  }
  const auto before = mallinfo2();
  EXPECT_EQ(open_sums(source, folder.path("sums")), "");
  EXPECT_EQ(source.read.size(), 64u);
  for (const uint64_t s : source.read) EXPECT_EQ(s % 3, 1u);
  EXPECT_LE(source.memory, before.uordblks + before.hblkhd + 4 * kSamples);
  EXPECT_EQ(source.sums().known(), kSamples / 3);
  EXPECT_EQ(source.sums_kept(), kSamples / 3);
}

TEST(Probe, LooksAtOnePercentWithinBounds) {
  EXPECT_EQ(probe_size(0, true), 0u);
  EXPECT_EQ(probe_size(10, true), 10u);
  EXPECT_EQ(probe_size(1000, true), 16u);
  EXPECT_EQ(probe_size(3000, true), 30u);
  EXPECT_EQ(probe_size(1'000'000, true), 64u);
  EXPECT_EQ(probe_size(1000, false), 64u);
  const Many one(0, 3), other(0, 4);
  const auto drawn = draw(one, 500, false);
  ASSERT_EQ(drawn.size(), 64u);
  for (size_t i = 1; i < drawn.size(); ++i) EXPECT_LT(drawn[i - 1], drawn[i]);
  EXPECT_LT(drawn.back(), 500u);
  EXPECT_NE(drawn, draw(other, 500, false));
  EXPECT_EQ(draw(one, 3, false), (std::vector<uint64_t>{0, 1, 2}));
}

class KeptSums : public testing::Test {
 protected:
  static constexpr int kFiles = 100;
  void SetUp() override {
    fs::create_directory(root_);
    for (int i = 0; i < kFiles; ++i) write(i, "first version of file ");
  }
  void write(int file, const std::string& text) {
    std::ofstream(root_ / std::to_string(1000 + file)) << text << (1000 + file);
  }
  // What is left of 100 checksums that were kept.
  uint64_t reopened(std::string& why) {
    const auto source = open();
    why = open_sums(*source, kept_);
    return source->sums().known();
  }
  std::unique_ptr<FolderSource> open() {
    SampleIndex index = scan_folder(root_.string(), {{}, false, false, 1});
    index.set_times({});  // as where the listing is stored, and checksums beside it
    return std::make_unique<FolderSource>(root_.string(), std::move(index));
  }
  void keep() {
    const auto source = open();
    EXPECT_EQ(open_sums(*source, kept_), "");
    const auto reader = source->make_reader(ReaderKind::pread, 1);
    for (uint64_t s = 0; s < source->size(); ++s) {
      std::vector<std::byte> bytes(source->sizes()[s]);
      ReadRequest request{s, bytes};
      reader->read({&request, 1});
      ASSERT_EQ(request.error, 0);
      source->sums().agrees(s, bytes);
    }
    EXPECT_EQ(keep_sums(*source), 0);
    EXPECT_EQ(source->sums_kept(), source->size());
  }

  const TemporaryFolder folder_;
  const fs::path root_ = folder_.path("data");
  const std::string kept_ = folder_.path("kept.sums");
};

TEST_F(KeptSums, HoldForTheSameContent) {
  keep();
  std::string why;
  EXPECT_EQ(reopened(why), 100u);
  EXPECT_EQ(why, "");
}

TEST_F(KeptSums, GiveWayOnlyToOnesThatAreOnTheDisk) {
  keep();
  write(100, "one more: ");
  const auto source = open();
  source->set_sums_file(kept_);
  for (uint64_t s = 0; s < source->size(); ++s) source->sums().agrees(s, 7);
  FailingFiles files;
  files.errors["fsync"] = EIO;
  EXPECT_EQ(keep_sums(*source, files), -EIO);
  fs::remove(root_ / "1100");
  std::string why;
  EXPECT_EQ(reopened(why), 100u);
  EXPECT_EQ(why, "");
}

TEST_F(KeptSums, HoldForTheSameContentThatMoved) {
  keep();
  fs::rename(root_, folder_.path("moved"));
  fs::create_directory_symlink(folder_.path("moved"), root_);
  std::string why;
  EXPECT_EQ(reopened(why), 100u);
  EXPECT_EQ(why, "");
}

TEST_F(KeptSums, OfAnotherVersionAreDropped) {
  keep();
  for (int i = 0; i < kFiles; ++i) write(i, "other version of file ");
  std::string why;
  EXPECT_EQ(reopened(why), 0u);
  EXPECT_NE(why.find("16 of 16 samples have another content"), std::string::npos) << why;
}

TEST_F(KeptSums, OfAFewDamagedSamplesHold) {
  keep();
  for (int i = 0; i < 10; ++i) write(i, "First version of file ");
  std::string why;
  EXPECT_EQ(reopened(why), 100u);
  EXPECT_EQ(why, "");
}

TEST_F(KeptSums, AreNotReadFromWhatTheyCannotBe) {
  keep();
  fs::resize_file(kept_, uint64_t{1} << 42);
  std::string why;
  EXPECT_EQ(reopened(why), 0u);
  fs::remove(kept_);
  ASSERT_EQ(::mkfifo(kept_.c_str(), 0600), 0);
  EXPECT_EQ(reopened(why), 0u);
}

TEST_F(KeptSums, AnIndexIsARegularFileOfItsKindAndSize) {
  const std::string path = folder_.path("index");
  const auto refused = [&](const std::string& word) {
    const auto bytes = load_bytes(path, kIndexMagic);
    ASSERT_FALSE(bytes);
    EXPECT_EQ(bytes.error().kind(), ErrorKind::corruption);
    EXPECT_NE(std::string(bytes.error().what()).find(word), std::string::npos)
        << bytes.error().what();
  };
  std::ofstream(path) << "1NSI and more";
  EXPECT_TRUE(load_bytes(path, kIndexMagic));
  fs::resize_file(path, uint64_t{1} << 42);
  refused("more than it can need");
  std::ofstream(path) << "";
  fs::resize_file(path, uint64_t{1} << 42);
  refused("magic");
  fs::remove(path);
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  refused("not a regular file");
}

}  // namespace
}  // namespace nostall::source
