// Bytes of which processes keep one copy, exchanged under their readers.
#include "base/shareable.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>

#include "../temporary.h"
#include "base/own.h"

// ThreadSanitizer takes the mapping of a file for a write of all its bytes. Readers may go on while
// Shareable exchanges its memory: the kernel replaces the pages under its own lock, by equal bytes.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:nostall::Shareable::exchange\n";
}

namespace nostall {
namespace {

constexpr uint64_t kSize = (1 << 20) + 123;

std::unique_ptr<Shareable> filled(uint64_t seed) {
  auto made = std::make_unique<Shareable>(kSize);
  std::memcpy(made->data(), random_bytes(kSize, seed).data(), kSize);
  return made;
}

// The line of /proc/self/maps with the bytes.
std::string mapped(const Shareable& bytes) {
  std::ostringstream begin;
  begin << std::hex << reinterpret_cast<uintptr_t>(bytes.data()) << '-';
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.starts_with(begin.str())) return line;
  }
  return "";
}

TEST(Shareable, TwoThatHaveTheSameBytesKeepOneCopyAtTheirOldAddresses) {
  const auto first = filled(1), second = filled(1), content = filled(1);
  const std::byte *here = first->data(), *there = second->data();
  const Descriptor file = first->share().take();
  EXPECT_TRUE(second->adopt(file));
  for (const auto* one : {first.get(), second.get()}) {
    EXPECT_TRUE(one->is_shared());
    EXPECT_NE(mapped(*one).find("r--s"), std::string::npos) << mapped(*one);
    EXPECT_NE(mapped(*one).find("memfd:nostall-listing"), std::string::npos);
    EXPECT_EQ(std::memcmp(one->data(), content->data(), kSize), 0);
  }
  EXPECT_EQ(first->data(), here);
  EXPECT_EQ(second->data(), there);
  // Those that adopted it pass it on.
  const auto third = filled(1);
  EXPECT_TRUE(third->adopt(second->share().take()));
}

TEST(Shareable, TakesNoOtherBytesAndNoFileThatCanChange) {
  const auto other = filled(2);
  const auto file = filled(1)->share().take();
  EXPECT_FALSE(other->adopt(file));
  const Descriptor open = memory_file("open").take();
  ASSERT_EQ(FileSystem::real().pwrite(open.get(), {other->data(), kSize}, 0), int64_t{kSize});
  EXPECT_FALSE(other->adopt(open));
  EXPECT_FALSE(other->is_shared());
  EXPECT_EQ(mapped(*other).find("memfd"), std::string::npos);
  // And nothing can change what was shared.
  const std::byte one{};
  EXPECT_EQ(FileSystem::real().pwrite(file.get(), {&one, 1}, 0), -EPERM);
}

TEST(Shareable, ReadersSeeTheSameBytesWhileTheMemoryIsExchanged) {
  const auto content = filled(3);
  for (int round = 0; round < 20; ++round) {
    const auto first = filled(3), second = filled(3);
    std::atomic<bool> over{false};
    std::atomic<int> reads{0}, wrong{0};
    std::thread reader([&] {
      while (!over || reads == 0) {
        wrong += std::memcmp(second->data(), content->data(), kSize) != 0;
        ++reads;
      }
    });
    while (reads == 0) std::this_thread::yield();
    EXPECT_TRUE(second->adopt(first->share().take()));
    over = true;
    reader.join();
    EXPECT_EQ(wrong, 0);
  }
}

}  // namespace
}  // namespace nostall
