// Memory that one process writes, and that others map when nothing can change it any more.
#include "base/sealed.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "base/own.h"

namespace nostall {
namespace {

constexpr uint64_t kSize = (64 << 20) + 123;

TEST(SealedMemory, IsOneFileThatNothingCanChange) {
  SealedMemory made("nostall-made", kSize);
  std::memset(made.data() + 5000, 7, 1000);
  const Descriptor file = made.seal();
  struct stat status {};
  ASSERT_EQ(::fstat(file.get(), &status), 0);
  // What is not written to takes none; a page may be of some MiB.
  EXPECT_LT(static_cast<uint64_t>(status.st_blocks) * 512, kSize);
  const SealedMemory other(file);
  EXPECT_EQ(other.size(), kSize);
  EXPECT_EQ(std::memcmp(made.data(), other.data(), 10000), 0);
  EXPECT_EQ(other.data()[5999], std::byte{7});
  EXPECT_EQ(other.data()[6000], std::byte{0});
  const char byte = 1;
  EXPECT_LT(::pwrite(file.get(), &byte, 1, 0), 0);
  // Memory that a process still writes to is nothing that others may use.
  EXPECT_THROW(SealedMemory(memory_file("nostall-open").take()), Error);
}

}  // namespace
}  // namespace nostall
