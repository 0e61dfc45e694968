// The table of algorithms: its text, and that all ranks follow the same finding at the same call.
#include "collective/selection.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <numeric>

#include "base/error.h"
#include "ranks.h"

namespace nostall::collective {
namespace {

constexpr const char* kTable = R"({"version": 1, "cores": 2, "table": [
  "2 together 65536 rsa",
  "2 together 1048576 ring",
  "2 apart 65536 arrival_chain",
  "4 together 8192 leader",
  "4 apart 1048576 arrival_leader"]})";

TEST(Selection, TakesTheRowsOfTheNearestNumberOfRanks) {
  const Selection two(kTable, 3), four(kTable, 16), one(kTable, 1);
  EXPECT_EQ(two.choose(8192, false), Algorithm::rsa);
  EXPECT_EQ(two.choose(65537, false), Algorithm::ring);
  EXPECT_EQ(two.choose(65536, true), Algorithm::arrival_chain);
  EXPECT_EQ(two.choose(2 << 20, false), Algorithm::cooperative);
  EXPECT_EQ(four.choose(8192, false), Algorithm::leader);
  EXPECT_EQ(four.choose(8192, true), Algorithm::arrival_leader);
  EXPECT_EQ(one.hash(), two.hash());
  EXPECT_NE(two.hash(), four.hash());
  EXPECT_TRUE(Selection("", 4).empty());
  EXPECT_FALSE(Selection(R"({"version":1,"table":["2 apart 10 ring"]})", 4).empty());
}

TEST(Selection, NamesWhatItCannotRead) {
  const auto refused = [](const std::string& text, const std::string& why) {
    try {
      const Selection selection(text, 2);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::usage);
      EXPECT_THAT(error.what(), ::testing::HasSubstr(why));
    }
  };
  refused("{}", "version 1");
  refused(R"({"version": 12, "table": []})", "version 1");
  refused(R"({"version": 1})", "no array");
  refused(R"({"version": 1, "table": ["2 together 10 magic"]})", "2 together 10 magic");
  refused(R"({"version": 1, "table": ["2 sometimes 10 ring"]})", "2 sometimes 10 ring");
  refused(R"({"version": 1, "table": ["2 apart ring"]})", "2 apart ring");
  refused(R"({"version": 1, "table": ["2 apart 10 ring 5"]})", "2 apart 10 ring 5");
  refused(R"({"version": 1, "table": ["2 apart ]})", "without an end");
}

TEST(SharedMemory, MemoryThatLiesInNoDirectoryLeavesItsReserveToOthers) {
  const std::filesystem::path root = std::filesystem::temp_directory_path() / testing::fresh_job();
  std::filesystem::create_directories(root / "self");
  const auto segment = [&](int available) {
    std::ofstream(root / "meminfo") << "MemTotal: 80000 kB\nMemAvailable: " << available << " kB\n";
    SharedMemoryConfig config{testing::fresh_job(), 0, 1, 8 << 20, 0, (root / "none").string()};
    config.proc_directory = root.string();
    return std::make_unique<SharedMemory>(config, std::chrono::seconds(60));
  };
  try {
    segment(10000);
    ADD_FAILURE() << "took the reserve";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::io);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("MemAvailable"));
  }
  const auto made = segment(15000);
  // What is used later is asked for later.
  EXPECT_FALSE(made->allocate_window(0, 8 << 20));
  EXPECT_TRUE(made->allocate_window(0, 1 << 20));
  std::filesystem::remove_all(root);
}

TEST(SharedMemory, LeavesTheAddressesOfALimitToTheProgram) {
  const std::filesystem::path root = std::filesystem::temp_directory_path() / testing::fresh_job();
  std::filesystem::create_directories(root / "self");
  std::ofstream(root / "self" / "statm") << "1000 10 10";
  constexpr uint64_t kAsked = uint64_t{1} << 30;
  const auto arena_where = [&](const std::string& limit) {
    std::ofstream(root / "self" / "limits") << "Max address space  " << limit << "  bytes\n";
    SharedMemoryConfig config{testing::fresh_job(), 0, 1, 8 << 20, kAsked, "/dev/shm"};
    config.proc_directory = root.string();
    return SharedMemory(config, std::chrono::seconds(60)).arena_bytes();
  };
  EXPECT_EQ(arena_where("unlimited"), kAsked);
  const uint64_t some = arena_where(std::to_string(kAsked));
  EXPECT_GT(some, kAsked / 16);
  EXPECT_LT(some, kAsked / 8);
  EXPECT_EQ(arena_where(std::to_string(16 << 20)), 0U);
  std::filesystem::remove_all(root);
}

// Clocks of the test's own: what is found depends on nothing else.
TEST(Selection, AllRanksFollowWhatOneOfThemFinds) {
  constexpr uint32_t kRanks = 3;
  const std::string job = testing::fresh_job();
  std::array<std::unique_ptr<SharedMemory>, kRanks> segments;
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      segments[r] = std::make_unique<SharedMemory>(
          SharedMemoryConfig{job, r, kRanks, 1 << 16, 0, "/dev/shm"}, std::chrono::seconds(60));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<Phase> phases;
  for (uint32_t r = 0; r < kRanks; ++r) phases.emplace_back(*segments[r], r, kRanks);
  std::vector<bool> found;
  int64_t now = 1'000'000;
  for (int call = 0; call < 100; ++call) {
    const bool late = call / 40 == 0 || call >= 80;
    // Rank 0, which finds out, is the last to look before the call, and has written before it.
    const bool second = phases[1].arrive(now), third = phases[2].arrive(now + (late ? 900 : 5));
    const bool first = phases[0].arrive(now + 2);
    EXPECT_EQ(first, second) << call;
    EXPECT_EQ(first, third) << call;
    found.push_back(first);
    now += 1000;
    for (Phase& phase : phases) phase.leave(now);
  }
  // Eight calls until it is certain, two until all know.
  EXPECT_FALSE(found[8]);
  EXPECT_TRUE(found[9]);
  EXPECT_TRUE(found[40 + 16]);
  EXPECT_FALSE(found[40 + 17]);
  EXPECT_FALSE(found[80 + 16]);
  EXPECT_TRUE(found[80 + 17]);
}

// A rank may look at call c + 1 after rank 0 has left call c and written what it found.
TEST(Selection, GivesTheResultWhoeverIsLate) {
  const std::string job = testing::fresh_job();
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      CommunicatorConfig config = testing::config_of(job, r, 3);
      config.selection =
          R"({"version": 1, "table": ["3 together 99999 rsa", "3 apart 99999 ring"]})";
      Communicator c(config);
      const Reducer sum(Op::sum, DataType::int32);
      std::vector<int32_t> data(2000);
      for (int32_t call = 0; call < 60; ++call) {
        if (call / 20 == 1 && r == 2) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        std::fill(data.begin(), data.end(), call);
        c.allreduce(data.data(), data.data(), data.size(), sum);
        if (data.front() != 3 * call || data.back() != 3 * call) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// The first rank waits for the second one in vain. Where a busy machine runs the second one only after
// that, nobody was refused, and they meet again.
TEST(Selection, RanksWithDifferentTablesAreRefused) {
  std::atomic<int> refused{0};
  for (int attempt = 0; attempt < 20 && refused == 0; ++attempt) {
    const std::string job = testing::fresh_job();
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < 2; ++r) {
      threads.emplace_back([&, r] {
        CommunicatorConfig config = testing::config_of(job, r, 2);
        config.join_timeout = std::chrono::seconds(2);
        if (r == 1) config.selection = kTable;
        try {
          const Communicator c(config);
          ADD_FAILURE() << "rank " << r << " has joined";
        } catch (const Error& error) {
          if (std::string(error.what()).find("different tables") != std::string::npos) ++refused;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_EQ(refused, 1);
}

}  // namespace
}  // namespace nostall::collective
