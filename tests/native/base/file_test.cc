// Calls on files where signals come at short intervals.
#include "base/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "../temporary.h"
#include "base/error.h"
#include "base/own.h"

namespace {
// What posix_fallocate gives for so many bytes; none: the system's answer.
std::function<int(off_t size)> answer;
// How many calls of the next ones a signal interrupts, and whether those are done all the same.
int interrupted = 0;
bool done = false;

template <typename Call>
int amid_signals(Call call) {
  if (interrupted == 0) return static_cast<int>(call());
  --interrupted;
  if (done) call();
  errno = EINTR;
  return -1;
}
}  // namespace

// In place of the C library's.
extern "C" int posix_fallocate(int fd, off_t offset, off_t size) {
  if (const int error = answer ? answer(size) : 0) return error;
  return ::syscall(SYS_fallocate, fd, 0, offset, size) == 0 ? 0 : errno;
}

extern "C" int fsync(int fd) {
  return amid_signals([&] { return ::syscall(SYS_fsync, fd); });
}
extern "C" int renameat(int from, const char* old, int to, const char* fresh) noexcept {
  return amid_signals([&] { return ::syscall(SYS_renameat2, from, old, to, fresh, 0); });
}
extern "C" int unlinkat(int directory, const char* name, int flags) noexcept {
  return amid_signals([&] { return ::syscall(SYS_unlinkat, directory, name, flags); });
}

namespace nostall {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

class Allocate : public testing::Test {
 protected:
  void TearDown() override { answer = nullptr; }
  uint64_t held() const {
    struct stat status {};
    EXPECT_EQ(::fstat(file_.get(), &status), 0);
    return static_cast<uint64_t>(status.st_blocks) * 512;
  }

  const Descriptor file_ = memory_file("test").take();
};

TEST_F(Allocate, TakesAllAtOnceWhereNothingInterrupts) {
  int calls = 0;
  answer = [&](off_t) { return ++calls, 0; };
  EXPECT_EQ(FileSystem::real().allocate(file_.get(), 0, 5 * kMiB), 0);
  EXPECT_EQ(held(), 5 * kMiB);
  EXPECT_EQ(calls, 1);
}

TEST_F(Allocate, TakesSmallPiecesWhereSignalsComeOften) {
  int calls = 0;
  answer = [&](off_t size) {
    return static_cast<uint64_t>(size) > kMiB || ++calls % 10 != 0 ? EINTR : 0;
  };
  EXPECT_EQ(FileSystem::real().allocate(file_.get(), kMiB, 5 * kMiB + 4096), 0);
  EXPECT_EQ(held(), 5 * kMiB + 4096);
}

TEST_F(Allocate, EndsWhereSignalsNeverLetItEnd) {
  answer = [](off_t) { return EINTR; };
  EXPECT_EQ(FileSystem::real().allocate(file_.get(), 0, 32 * kMiB), -EINTR);
  EXPECT_STREQ(io_error("cannot have 5 more bytes in", "/dev/shm", EINTR).what(),
               "cannot have 5 more bytes in /dev/shm: signals interrupted the call: make "
               "them rarer, those of a profiler for example");
  answer = [](off_t) { return ENOSPC; };
  EXPECT_EQ(FileSystem::real().allocate(file_.get(), 0, kMiB), -ENOSPC);
}

// The kernel undoes a call that fails. What another rank was given in the range is not undone, or it
// would find a hole there (tier/node_cache.cc, collective/shared_memory.cc).
TEST_F(Allocate, ACallThatFailsTakesNothingFromOthers) {
  const TemporaryFolder folder;
  bool mounted = false;
  std::thread([&] {
    // Of this thread alone, and with it the mount.
    if (::unshare(CLONE_NEWNS) != 0) return;
    if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return;
    if (::mount("none", folder.path().c_str(), "tmpfs", 0, "size=4m") != 0) return;
    mounted = true;
    const auto file = [path = folder.path("file")] {
      return Descriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    };
    FileSystem& files = FileSystem::real();
    const Descriptor one = file(), other = file();
    ASSERT_EQ(files.allocate(one.get(), 0, 2 * kMiB), 0);
    for (const uint64_t begin : {uint64_t{0}, kMiB}) {
      EXPECT_EQ(files.allocate(other.get(), begin, 8 * kMiB), -ENOSPC);
      struct stat status {};
      EXPECT_EQ(::fstat(one.get(), &status), 0);
      EXPECT_EQ(static_cast<uint64_t>(status.st_blocks) * 512, 2 * kMiB);
    }
  }).join();
  if (!mounted) GTEST_SKIP() << "this user cannot mount a file system";
}

class AmidSignals : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override { done = GetParam(); }
  void TearDown() override { interrupted = 0; }
  std::string make(const std::string& name) const {
    std::ofstream(folder_.path(name)) << name;
    return folder_.path(name);
  }
  static std::string content(const std::string& path) {
    std::string text;
    std::ifstream(path) >> text;
    return text;
  }

  const TemporaryFolder folder_;
  FileSystem& files_ = FileSystem::real();
};

TEST_P(AmidSignals, CallsAreRepeated) {
  const std::string a = make("a"), b = make("b");
  const Descriptor file(::open(a.c_str(), O_RDWR | O_CLOEXEC));
  interrupted = 3;
  EXPECT_EQ(files_.fsync(file.get()), 0);
  EXPECT_EQ(interrupted, 0);
  interrupted = 3;
  EXPECT_EQ(files_.rename(a, b), 0);
  EXPECT_EQ(content(b), "a");
  EXPECT_NE(::access(a.c_str(), F_OK), 0);
  interrupted = 3;
  EXPECT_EQ(files_.unlink(b), 0);
  EXPECT_NE(::access(b.c_str(), F_OK), 0);
}

TEST_P(AmidSignals, WhatWasNeverThereIsMissed) {
  const std::string a = folder_.path("a"), b = make("b");
  interrupted = 1;
  EXPECT_EQ(files_.rename(a, b), -ENOENT);
  EXPECT_EQ(content(b), "b");
  EXPECT_EQ(files_.unlink(a), -ENOENT);
}

INSTANTIATE_TEST_SUITE_P(TriesThatAreDone, AmidSignals, testing::Bool());

TEST_F(Allocate, WhatIsGivenBackIsZeros) {
  ASSERT_EQ(FileSystem::real().allocate(file_.get(), 0, kMiB), 0);
  const std::byte one{1};
  ASSERT_EQ(FileSystem::real().pwrite(file_.get(), {&one, 1}, 8192), 1);
  EXPECT_EQ(FileSystem::real().give_back(file_.get(), 4096, 8192), 0);
  EXPECT_EQ(held(), kMiB - 8192);
  std::byte there = one;
  EXPECT_EQ(FileSystem::real().pread(file_.get(), {&there, 1}, 8192), 1);
  EXPECT_EQ(there, std::byte{0});
}

}  // namespace
}  // namespace nostall
