// Memory that one process writes, and that others map when nothing can change it any more.
#include "base/sealed.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

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

// Forks while memory is written: the child has none of it, and may end as any process does.
TEST(SealedMemory, IsSealedAlsoWhereAChildWasForkedMeanwhile) {
  auto made = std::make_unique<SealedMemory>("nostall-made", kSize);
  std::byte* const at = made->data();
  at[5000] = std::byte{7};
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[1]);
    // What the child has in the place of the memory is the child's own.
    void* const own = ::mmap(at, 4096, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    made.reset();
    const bool kept = own == at && ::mprotect(at, 4096, PROT_READ) == 0;
    char end = 0;
    static_cast<void>(!::read(ends[0], &end, 1));
    ::_exit(kept ? 0 : 1);
  }
  ::close(ends[0]);
  EXPECT_NO_THROW(made->seal());
  EXPECT_EQ(made->data()[5000], std::byte{7});
  ::close(ends[1]);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(SealedMemory, CanBeReadWhereItCannotBeSealed) {
  SealedMemory made("nostall-refused", 4096);
  made.data()[7] = std::byte{7};
  // Other memory of the file that can be written to: by the descriptor that the process has.
  void* other = MAP_FAILED;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    if (std::filesystem::read_symlink(entry, gone).string().find("nostall-refused") !=
        std::string::npos) {
      const int file = std::stoi(entry.path().filename());
      other = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
  }
  ASSERT_NE(other, MAP_FAILED);
  EXPECT_THROW(made.seal(), Error);
  EXPECT_EQ(made.data()[7], std::byte{7});
  ::munmap(other, 4096);
}

}  // namespace
}  // namespace nostall
