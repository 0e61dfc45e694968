// Limits of memory, read from directories that look like /proc and the control groups.
#include "base/limits.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <vector>

#include "../sanitized.h"
#include "../temporary.h"
#include "base/heap.h"

namespace nostall {
namespace {

namespace fs = std::filesystem;

class Limits : public testing::Test {
 protected:
  void SetUp() override {
    write("proc/meminfo", "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable:   900 kB\n");
    write("proc/self/limits",
          "Limit Soft Hard Units\nMax address space   unlimited unlimited bytes\n");
    write("proc/self/statm", "10 1 1 1 0 1 0\n");
  }

  void write(const std::string& path, const std::string& text) const {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  // `type` is the file system's and, after a space, its options.
  void mount(const std::string& root, const std::string& type, const std::string& options) const {
    write("proc/self/mountinfo", "20 1 0:1 / / rw - ext4 /dev/sda rw\n30 20 0:2 " + root + " " +
                                     (root_ / "group").string() + " rw shared:3 - " + type +
                                     " cgroup " + options + "\n");
  }
  std::vector<MemoryLimit> read(LimitKind kind) const {
    auto limits = MemoryLimits((root_ / "shm").string(), (root_ / "proc").string()).read();
    std::erase_if(limits, [kind](const MemoryLimit& l) { return l.kind != kind; });
    return limits;
  }

  const TemporaryFolder folder_;
  const fs::path root_ = folder_.path();
};

TEST_F(Limits, TheMachinesMemoryIsWhatTheKernelCallsAvailable) {
  const auto machine = read(LimitKind::machine);
  ASSERT_EQ(machine.size(), 1u);
  EXPECT_EQ(machine[0].limit, 1000u * 1024);
  EXPECT_EQ(machine[0].used, 100u * 1024);
  EXPECT_EQ(machine[0].reserve(), 125u * 1024);
  EXPECT_EQ(machine[0].left(), 775u * 1024);
}

TEST_F(Limits, EachLevelOfTheUnifiedHierarchyBinds) {
  mount("/", "cgroup2", "rw");
  write("proc/self/cgroup", "3:cpu:/elsewhere\n0::/job/step\n");
  write("group/job/step/memory.max", "max\n");
  write("group/job/step/memory.high", "8000\n");
  write("group/job/step/memory.current", "1000\n");
  write("group/job/step/memory.stat",
        "anon 5\nactive_file 7\ninactive_file 400\nslab_reclaimable 3\n");
  write("group/job/memory.max", "4000\n");
  write("group/job/memory.high", "max\n");
  write("group/job/memory.current", "3000\n");
  const auto groups = read(LimitKind::cgroup);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].limit, 8000u);
  EXPECT_EQ(groups[0].used, 600u);
  EXPECT_EQ(groups[0].cached, 10u);
  EXPECT_EQ(groups[1].limit, 4000u);
  EXPECT_EQ(groups[1].used, 3000u);
  EXPECT_NE(groups[1].what.find("group/job/memory.max"), std::string::npos);
  EXPECT_EQ(least(groups)->limit, 4000u);
}

TEST_F(Limits, EachLevelOfTheMemoryControllersOwnHierarchyBinds) {
  mount("/", "cgroup", "rw,memory");
  write("proc/self/cgroup", "4:memory:/a/b\n0::/other\n");
  for (const std::string group : {"group/", "group/a/", "group/a/b/"}) {
    write(group + "memory.limit_in_bytes", "9223372036854771712\n");
    write(group + "memory.usage_in_bytes", "5000\n");
  }
  EXPECT_TRUE(read(LimitKind::cgroup).empty());
  write("group/a/memory.limit_in_bytes", "6000\n");
  write("group/a/memory.stat",
        "inactive_file 1\ntotal_inactive_file 2000\ntotal_active_file 100\n");
  const auto groups = read(LimitKind::cgroup);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].limit, 6000u);
  EXPECT_EQ(groups[0].used, 3000u);
  EXPECT_EQ(groups[0].cached, 100u);
}

TEST(MemoryLimit, OnlyWhatIsNotFreedUnderPressureUsesTheReserve) {
  EXPECT_EQ((MemoryLimit{LimitKind::cgroup, "", 8000, 7000}.over()), 0u);
  EXPECT_EQ((MemoryLimit{LimitKind::cgroup, "", 8000, 7500}.over()), 500u);
  EXPECT_EQ((MemoryLimit{LimitKind::cgroup, "", 8000, 7500, 300}.over()), 200u);
  EXPECT_EQ((MemoryLimit{LimitKind::cgroup, "", 8000, 7500, 9000}.over()), 0u);
  EXPECT_EQ((MemoryLimit{LimitKind::cgroup, "", 8000, 7500, 300}.rest()), 800u);
  EXPECT_EQ((MemoryLimit{LimitKind::cgroup, "", 8000, 9000, 500}.rest()), 0u);
}

// As of memory.high: all that is over is given back at once, not a reserve at a time.
TEST(MemoryLimit, WhatIsUsedBeyondTheLimitIsOverToo) {
  EXPECT_EQ((MemoryLimit{LimitKind::cgroup, "", 8000, 12000}.over()), 5000u);
  EXPECT_EQ((MemoryLimit{LimitKind::cgroup, "", 8000, 12000, 500}.over()), 4500u);
}

TEST_F(Limits, AContainersMountShowsAPartOfTheHierarchy) {
  mount("/docker/abc", "cgroup", "rw,memory");
  write("group/memory.limit_in_bytes", "6000\n");
  write("group/memory.usage_in_bytes", "1000\n");
  write("group/inner/memory.limit_in_bytes", "5000\n");
  write("group/inner/memory.usage_in_bytes", "1000\n");
  for (const auto& [group, limits] : {std::pair{"/docker/abc", 1u},
                                      {"/docker/abc/inner", 2u},
                                      {"/docker/other", 1u},
                                      {"/docker/abcinner", 1u},
                                      {"/../..", 1u}}) {
    write("proc/self/cgroup", std::string("4:memory:") + group + "\n");
    EXPECT_EQ(read(LimitKind::cgroup).size(), limits) << group;
  }
}

TEST_F(Limits, AddressSpaceThatIsLimitedBinds) {
  EXPECT_TRUE(read(LimitKind::address_space).empty());
  write("proc/self/limits", "Max address space   1048576   unlimited bytes\n");
  const auto space = read(LimitKind::address_space);
  ASSERT_EQ(space.size(), 1u);
  EXPECT_EQ(space[0].limit, 1048576u);
  EXPECT_EQ(space[0].used, 10u * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)));
}

TEST_F(Limits, SharedMemoryThatIsNotThereHasNoRoom) {
  const auto none = read(LimitKind::shared_memory);
  ASSERT_EQ(none.size(), 1u);
  EXPECT_EQ(none[0].left(), 0u);
  fs::create_directory(root_ / "shm");
  EXPECT_GT(read(LimitKind::shared_memory)[0].limit, 0u);
}

TEST_F(Limits, ThoseOfThisProcessCanBeRead) {
  const auto limits = MemoryLimits().read();
  EXPECT_NE(least(limits), nullptr);
  EXPECT_EQ(least({}), nullptr);
}

#if !NOSTALL_SANITIZED_HEAP
TEST(Heap, GivesBackWhatManySmallPiecesLeftBehind) {
  const auto resident = [] {
    std::ifstream file("/proc/self/statm");
    uint64_t size = 0, pages = 0;
    file >> size >> pages;
    return pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  };
  const uint64_t before = resident();
  constexpr size_t kPieces = 400'000;
  std::vector<std::unique_ptr<std::string>> pieces;
  for (size_t i = 0; i < kPieces; ++i) pieces.push_back(std::make_unique<std::string>(100, 'x'));
  // The last one keeps the allocator from giving back the rest by itself.
  const std::unique_ptr<std::string> last = std::move(pieces.back());
  pieces.clear();
  give_back_free_memory(kPieces);
  EXPECT_LT(resident(), before + kPieces * 50);
}
#endif

}  // namespace
}  // namespace nostall
