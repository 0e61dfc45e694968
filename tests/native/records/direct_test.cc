// When files of this machine are read past the page cache.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <string>

#include "../readers.h"
#include "../refuse.h"
#include "../temporary.h"
#include "base/file.h"
#include "base/own.h"
#include "records/ranges.h"

namespace nostall::records {
namespace {

using namespace source;

class DirectTest : public testing::Test {
 protected:
  // Mostly a hole: it has that size without taking the room.
  std::string file(const std::string& name, uint64_t size) const {
    std::string path = folder_.path(name);
    const Descriptor fd(::open(path.c_str(), O_CREAT | O_WRONLY, 0600));
    EXPECT_EQ(::pwrite(fd.get(), "bytes", 5, 8192), 5);
    EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(size)), 0);
    return path;
  }
  bool has_direct(const std::string& path) const {
    const Descriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECT));
    void* page = std::aligned_alloc(4096, 4096);
    const bool can = static_cast<bool>(fd) && ::pread(fd.get(), page, 4096, 0) == 4096;
    std::free(page);
    return can;
  }

  const TemporaryFolder folder_;
};

// Bytes that one small read asks the storage for.
uint64_t asked(const Storage& storage, bool once) {
  std::array<std::byte, 5> bytes{};
  const auto reader = storage.make_reader(reader_kinds().back(), 2);
  RangeRead range;
  range.offset = 8192;
  range.into = bytes;
  range.once = once;
  reader->read({&range, 1});
  EXPECT_EQ(range.error, 0);
  EXPECT_EQ(bytes[0], std::byte{'b'});
  return reader->bytes_read();
}

TEST_F(DirectTest, FilesLargerThanMemoryTogetherPassThePageCache) {
  const uint64_t memory = static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) *
                          static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::string a = file("a", memory / 2 + 8192), b = file("b", memory / 2 + 8192);
  const uint64_t page = has_direct(a) ? 4096 : 5;
  EXPECT_EQ(asked(*open_files({a}), false), 5u);
  EXPECT_EQ(asked(*open_files({a}), true), has_uring() ? page : 5);
  EXPECT_EQ(asked(*open_files({a, b}), false), page);
  EXPECT_EQ(asked(*open_files({a, b}, Direct::never), true), 5u);
}

// More than one read brings: the next one goes on, past the page cache too.
TEST_F(DirectTest, ALargeRangeIsReadOnce) {
  constexpr uint64_t kShared = uint64_t{4} << 20, kSize = (uint64_t{1} << 30) + kShared;
  const std::string large = file("large", kSize);
  if (!has_direct(large) || !has_uring()) GTEST_SKIP() << "nothing to read past the page cache";
  // Addresses for all of it, and the same memory again and again.
  const Descriptor memory = memory_file("test").take();
  ASSERT_EQ(::ftruncate(memory.get(), kShared), 0);
  void* const addresses = ::mmap(nullptr, kSize, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(addresses, MAP_FAILED);
  auto* const begin = static_cast<std::byte*>(addresses);
  for (uint64_t at = 0; at < kSize; at += kShared) {
    ASSERT_EQ(::mmap(begin + at, kShared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                     memory.get(), 0),
              begin + at);
  }
  const auto storage = open_files({large}, Direct::always);
  with_refused({SYS_pread64, SYS_preadv}, EIO, [&] {
    const auto reader = storage->make_reader(reader_kinds().back(), 2);
    RangeRead range;
    range.into = {begin, kSize};
    reader->read({&range, 1});
    EXPECT_EQ(range.error, 0);
    EXPECT_EQ(reader->bytes_read(), kSize);
  });
  ::munmap(addresses, kSize);
}

}  // namespace
}  // namespace nostall::records
