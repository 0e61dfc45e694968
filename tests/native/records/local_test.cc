// Ranges of real files: plain, direct, io_uring, and all of them over files that change.
#include "records/local.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "../closed_memory.h"
#include "../refuse.h"
#include "../temporary.h"

namespace {
std::atomic<size_t> most_aligned{0};  // bytes that were asked for at once
}  // namespace

// In place of the C library's.
extern "C" void* aligned_alloc(size_t alignment, size_t size) noexcept {
  if (size > most_aligned) most_aligned = size;
  void* memory = nullptr;
  return ::posix_memalign(&memory, alignment, size) == 0 ? memory : nullptr;
}

namespace nostall::records {
namespace {

using namespace source;
using testing::HasSubstr;

struct Way {
  ReaderKind kind;
  Direct direct;
  bool once;
};

class LocalRanges : public testing::TestWithParam<Way> {
 protected:
  // Sizes around the alignment of direct reads, and beyond a registered buffer and a part.
  static constexpr size_t kSizes[] = {0, 1, 4095, 4096, 4097, 5000, 70000, 700001, 3200001};

  void SetUp() override {
    for (size_t i = 0; i < std::size(kSizes); ++i) {
      contents_.push_back(random_bytes(kSizes[i], static_cast<unsigned>(i)));
      paths_.push_back(folder_.write(std::to_string(i), contents_.back()));
    }
    files_ = std::make_unique<LocalFiles>(paths_, GetParam().direct);
    reader_ = files_->make_reader(GetParam().kind, 5);
  }
  void expect(uint32_t file, uint64_t offset, size_t head, size_t size) {
    wanted_.push_back({file, offset, head, size});
  }
  // Reads all that was expected in one call.
  void read_expected() {
    std::vector<std::string> memory;
    std::vector<RangeRead> reads;
    for (const Wanted& w : wanted_) memory.emplace_back(w.head + w.size + 3, '?');
    for (size_t i = 0; i < wanted_.size(); ++i) {
      RangeRead r;
      const auto bytes = std::as_writable_bytes(std::span(memory[i]));
      r.file = wanted_[i].file;
      r.offset = wanted_[i].offset;
      // Apart from each other and from any alignment.
      r.head = bytes.subspan(1, wanted_[i].head);
      r.into = bytes.subspan(2 + wanted_[i].head, wanted_[i].size);
      r.once = GetParam().once;
      r.error = -1;
      reads.push_back(std::move(r));
    }
    reader_->read(reads);
    for (size_t i = 0; i < reads.size(); ++i) {
      const Wanted& w = wanted_[i];
      SCOPED_TRACE(std::to_string(w.file) + " " + std::to_string(w.offset) + " " +
                   std::to_string(w.head) + "+" + std::to_string(w.size));
      ASSERT_EQ(reads[i].error, 0);
      const std::string& content = contents_[w.file];
      ASSERT_EQ(memory[i].substr(1, w.head), content.substr(w.offset, w.head));
      ASSERT_EQ(memory[i].substr(2 + w.head, w.size), content.substr(w.offset + w.head, w.size));
      ASSERT_EQ(memory[i].front(), '?');
      ASSERT_EQ(memory[i][1 + w.head], '?');
      ASSERT_EQ(memory[i].back(), '?');
    }
    wanted_.clear();
  }
  int read_one(uint32_t file, uint64_t offset, size_t size) {
    std::string memory(size, '?');
    RangeRead r;
    r.file = file;
    r.offset = offset;
    r.into = std::as_writable_bytes(std::span(memory));
    r.once = GetParam().once;
    reader_->read({&r, 1});
    return r.error;
  }

  // Whether aligned bytes come through a buffer of the reader's own.
  bool bounces() const {
    return GetParam().direct == Direct::always &&
           (GetParam().kind == ReaderKind::pread || !has_uring());
  }

  struct Wanted {
    uint32_t file;
    uint64_t offset;
    size_t head, size;
  };
  TemporaryFolder folder_;
  std::vector<std::string> contents_, paths_;
  std::unique_ptr<LocalFiles> files_;
  std::unique_ptr<RangeReader> reader_;
  std::vector<Wanted> wanted_;
};

TEST_P(LocalRanges, BringTheBytesOfAnyPlace) {
  std::mt19937 random(1);
  for (int round = 0; round < 40; ++round) {
    // Fewer and more than may be in flight; the last round reads whole files.
    for (int i = 0; i < 1 + round; ++i) {
      const auto file = static_cast<uint32_t>(random() % std::size(kSizes));
      const uint64_t offset = random() % (kSizes[file] + 1);
      const size_t most = std::min<size_t>(kSizes[file] - offset, round % 2 ? 9000 : 400000);
      const size_t all = random() % (most + 1);
      const size_t head = i % 3 ? 0 : std::min<size_t>(all, random() % 20);
      expect(file, offset, head, all - head);
    }
    read_expected();
  }
  for (uint32_t file = 0; file < std::size(kSizes); ++file) expect(file, 0, 0, kSizes[file]);
  for (uint32_t file = 0; file < std::size(kSizes); ++file) expect(file, kSizes[file], 0, 0);
  read_expected();
  EXPECT_GT(reader_->bytes_read(), 700000u);
}

TEST_P(LocalRanges, TakeNoMemoryOfTheirOwnSize) {
  most_aligned = 0;
  expect(8, 5, 7, 3'100'000);
  read_expected();
  EXPECT_GE(reader_->bytes_read(), 3'100'007u);
  EXPECT_LE(most_aligned, kDirectPart);
}

TEST_P(LocalRanges, ComeWhereTheKernelTakesNoMoreRequests) {
  with_refused({SYS_io_uring_enter}, EBUSY, [&] {
    for (uint32_t file = 0; file < std::size(kSizes); ++file) expect(file, 0, 0, kSizes[file]);
    read_expected();
  });
  for (uint32_t file = 0; file < std::size(kSizes); ++file) expect(file, 0, 0, kSizes[file]);
  read_expected();
}

TEST_P(LocalRanges, TellOfAFileThatEndsBefore) {
  for (uint32_t file = 0; file < std::size(kSizes); ++file) {
    EXPECT_EQ(read_one(file, 0, kSizes[file] + 1), kSizeChanged) << file;
    EXPECT_EQ(read_one(file, kSizes[file], 1), kSizeChanged) << file;
    EXPECT_EQ(read_one(file, kSizes[file] + 100000, 10), kSizeChanged) << file;
  }
  std::filesystem::resize_file(paths_[6], 9000);
  EXPECT_EQ(read_one(6, 9000 - 4096, 4096), 0);
  EXPECT_EQ(read_one(6, 8999, 2), kSizeChanged);
  EXPECT_THAT(files_->changed(6), HasSubstr("from 70000 to 9000 bytes"));
}

TEST_P(LocalRanges, TakeBytesInPlaceWhereTheySuitTheDevice) {
  AlignedBuffer memory;
  RangeRead r;
  r.file = 7;
  r.offset = 8192;
  r.into = memory.take(65536);
  r.once = GetParam().once;
  reader_->read({&r, 1});
  ASSERT_EQ(r.error, 0);
  EXPECT_EQ(std::memcmp(r.into.data(), contents_[7].data() + 8192, 65536), 0);
}

// The kernel writes there: what comes through a bounce buffer is written by the reader's thread.
TEST_P(LocalRanges, ComeWhereMemoryIsClosedForOneOfThem) {
  for (const size_t open : {0u, 1u}) {
    ClosedMemory closed(open, 4);
    std::string memory[2];
    std::vector<RangeRead> reads(3);
    for (size_t i = 0; i < reads.size(); ++i) {
      memory[i % 2].resize(16384);
      reads[i].file = 7;
      reads[i].offset = 8192 * i;
      reads[i].into =
          i == 1 ? closed.all().first(16384) : std::as_writable_bytes(std::span(memory[i / 2]));
      reads[i].once = GetParam().once;
      reads[i].error = -1;
    }
    if (bounces()) reads.erase(reads.begin() + 1);
    reader_->read(reads);
    for (const RangeRead& r : reads) {
      const bool is_closed = r.into.data() == closed.all().data();
      ASSERT_EQ(r.error, is_closed ? EFAULT : 0) << r.offset;
      if (!is_closed) {
        EXPECT_EQ(std::memcmp(r.into.data(), contents_[7].data() + r.offset, r.size()), 0);
      }
    }
    closed.reopen();
    for (RangeRead& r : reads) r.error = -1;
    reader_->read(reads);
    for (const RangeRead& r : reads) {
      ASSERT_EQ(r.error, 0);
      EXPECT_EQ(std::memcmp(r.into.data(), contents_[7].data() + r.offset, r.size()), 0);
    }
  }
}

TEST_P(LocalRanges, DoWithoutPinnedMemory) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &none), 0);
  expect(7, 77, 0, 30000);
  expect(7, 5, 9, 600000);
  read_expected();
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &before), 0);
}

TEST_P(LocalRanges, MayHaveAnyDepth) {
  for (const unsigned depth : {0u, 1u, 2u, 100000u}) {
    reader_ = files_->make_reader(GetParam().kind, depth);
    for (unsigned i = 0; i < 50; ++i) expect(7, i * 4567, 3, 3000);
    read_expected();
  }
}

std::vector<Way> ways() {
  std::vector<Way> ways{{ReaderKind::pread, Direct::never, false},
                        {ReaderKind::pread, Direct::always, false},
                        {ReaderKind::pread, Direct::automatic, true},
                        {ReaderKind::automatic, Direct::automatic, true},
                        {ReaderKind::automatic, Direct::always, true}};
  if (has_uring()) {
    ways.insert(ways.end(), {{ReaderKind::uring, Direct::never, false},
                             {ReaderKind::uring, Direct::always, false},
                             {ReaderKind::uring, Direct::automatic, true}});
  }
  return ways;
}

INSTANTIATE_TEST_SUITE_P(All, LocalRanges, testing::ValuesIn(ways()));

TEST(LocalFiles, NoticeWhatChanged) {
  const TemporaryFolder folder;
  const std::string path = folder.write("a", "12345");
  const auto files = open_files({path});
  EXPECT_EQ(files->changed(0), "");
  const timespec times[2] = {{100, 0}, {100, 0}};
  ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
  EXPECT_THAT(files->changed(0), HasSubstr("written to"));
  folder.write("a", "123456");
  EXPECT_THAT(files->changed(0), HasSubstr("from 5 to 6 bytes"));
  // What was opened stays readable, whatever its name is given to.
  const auto kept = open_files({path});
  std::filesystem::remove(path);
  folder.write("a", "another");
  std::string memory(6, '?');
  read_range(*kept->make_reader(ReaderKind::pread, 1), *kept, 0, 0,
             std::as_writable_bytes(std::span(memory)));
  EXPECT_EQ(memory, "123456");
}

TEST(LocalFiles, RefuseWhatIsNoFile) {
  const TemporaryFolder folder;
  const auto error_of = [](const std::string& path) -> std::string {
    try {
      open_files({path});
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::io);
      return e.what();
    }
    return "no error";
  };
  EXPECT_THAT(error_of(folder.path("absent")), HasSubstr("absent: No such file"));
  EXPECT_THAT(error_of(folder.path()), HasSubstr("is not a regular file"));
  const std::string pipe = folder.path("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(error_of(pipe), HasSubstr("is not a regular file"));
}

// More files than a process may open at first: its limit is raised as far as that is allowed.
TEST(LocalFiles, MayBeMany) {
  const TemporaryFolder folder;
  std::vector<std::string> paths;
  for (int i = 0; i < 100; ++i) paths.push_back(folder.write(std::to_string(i), "12345"));
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  ASSERT_GT(before.rlim_max, 400u);
  rlimit few = before;
  few.rlim_cur = 60;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  EXPECT_EQ(open_files(paths)->files().size(), 100u);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);

  const auto refused = [&] {
    few.rlim_max = 60;
    if (::setrlimit(RLIMIT_NOFILE, &few) != 0) return;
    try {
      open_files(paths);
    } catch (const Error& e) {
      const bool says = std::strstr(e.what(), "ulimit -n") && e.error_number() == EMFILE;
      std::_Exit(says ? 7 : 8);
    }
  };
  EXPECT_EXIT(refused(), testing::ExitedWithCode(7), "");
}

// io_uring fails reads that would wait where the descriptor says so.
TEST(LocalFiles, WaitForTheirBytes) {
  const TemporaryFolder folder;
  const LocalFiles files({folder.write("a", "12345")}, Direct::automatic);
  EXPECT_EQ(::fcntl(files.buffered(0), F_GETFL) & O_NONBLOCK, 0);
  const int direct = files.direct(0) >= 0 ? files.direct(0) : files.buffered(0);
  EXPECT_EQ(::fcntl(direct, F_GETFL) & O_NONBLOCK, 0);
}

TEST(LocalFiles, NamePathAndOffsetOfWhatCannotBeRead) {
  const TemporaryFolder folder;
  const auto files = open_files({folder.write("abc", "12345")});
  std::byte memory[4];
  try {
    read_range(*files->make_reader(ReaderKind::pread, 1), *files, 0, 3, memory);
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(),
                HasSubstr("cannot read 4 bytes of " + folder.path("abc") + " at offset 3"));
  }
}

TEST(Align, WidensToWholeUnits) {
  for (const uint64_t offset : {0u, 1u, 4095u, 4096u, 10000u}) {
    for (const uint64_t size : {0u, 1u, 4096u, 9999u}) {
      const AlignedRange a = align(offset, size, 4096);
      EXPECT_EQ(a.offset % 4096, 0u);
      EXPECT_EQ(a.length % 4096, 0u);
      EXPECT_EQ(a.offset + a.skip, offset);
      EXPECT_GE(a.length, a.skip + size);
      EXPECT_LT(a.length, a.skip + size + 4096);
    }
  }
}

}  // namespace
}  // namespace nostall::records
