// Ranks that are processes: killed, absent, forked.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "base/clock.h"
#include "base/error.h"
#include "collective/communicator.h"
#include "ranks.h"

namespace nostall::collective {
namespace {

using testing::config_of;
using testing::fresh_job;
using ::testing::HasSubstr;
using testing::run_processes;

const Reducer& sum() {
  static const Reducer reducer(Op::sum, DataType::float32);
  return reducer;
}

// A directory of its own, so that what is left behind is this test's.
class Directory {
 public:
  Directory() { std::filesystem::create_directories(path_); }
  ~Directory() { std::filesystem::remove_all(path_); }
  CommunicatorConfig config() const {
    CommunicatorConfig config = config_of(fresh_job(), 0, 1);
    config.directory = path_;
    return config;
  }
  bool empty() const { return std::filesystem::is_empty(path_); }

 private:
  std::string path_ = "/dev/shm/nostall-test-" + std::to_string(::getpid());
};

TEST(Processes, ReduceTogetherAndLeaveNothing) {
  const Directory directory;
  const auto results = run_processes(4, directory.config(), [](Communicator& c) {
    std::vector<float> data(100'000);
    for (int i = 0; i < 30; ++i) {
      std::fill(data.begin(), data.end(), static_cast<float>(c.rank() + 1));
      c.allreduce(data.data(), data.data(), data.size(), sum());
      if (data.front() != 10 || data.back() != 10) return 1;
    }
    return 0;
  });
  EXPECT_EQ(results, (std::vector<int>{0, 0, 0, 0}));
  EXPECT_TRUE(directory.empty());
}

TEST(Processes, AreToldWhoWasKilledInsideACall) {
  const Directory directory;
  const int64_t begin = now_ns();
  const auto results = run_processes(3, directory.config(), [](Communicator& c) {
    std::vector<float> data(1 << 20);
    c.allreduce(data.data(), data.data(), data.size(), sum());
    if (c.rank() == 1) {
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        ::kill(::getpid(), SIGKILL);
      }).detach();
      for (;;) c.allreduce(data.data(), data.data(), data.size(), sum());
    }
    try {
      for (;;) c.allreduce(data.data(), data.data(), data.size(), sum());
    } catch (const Error& error) {
      const std::string what = error.what();
      return error.kind() == ErrorKind::peer && what.find("rank 1") != std::string::npos &&
                     what.find("died") != std::string::npos
                 ? 7
                 : 1;
    }
  });
  EXPECT_EQ(results, (std::vector<int>{7, -SIGKILL, 7}));
  EXPECT_LT(now_ns() - begin, 5'000'000'000);
  EXPECT_TRUE(directory.empty());
}

TEST(Processes, AreToldWhoLeft) {
  const Directory directory;
  const auto results = run_processes(2, directory.config(), [](Communicator& c) {
    if (c.rank() == 1) return 0;
    try {
      c.barrier();
    } catch (const Error& error) {
      return std::string(error.what()).find("rank 1") != std::string::npos ? 7 : 1;
    }
    return 2;
  });
  EXPECT_EQ(results, (std::vector<int>{7, 0}));
}

TEST(Processes, WaitNoLongerThanTheTimeout) {
  const Directory directory;
  CommunicatorConfig config = directory.config();
  config.timeout = std::chrono::milliseconds(500);
  const auto results = run_processes(2, config, [](Communicator& c) {
    if (c.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::seconds(2));
      return 0;
    }
    try {
      c.barrier();
    } catch (const Error& error) {
      return std::string(error.what()).find("have not arrived: 1") != std::string::npos ? 7 : 1;
    }
    return 2;
  });
  EXPECT_EQ(results, (std::vector<int>{7, 0}));
}

TEST(Processes, WaitInVainForARankThatNeverJoins) {
  const Directory directory;
  CommunicatorConfig config = directory.config();
  config.ranks = 2;
  config.timeout = std::chrono::milliseconds(300);
  try {
    const Communicator communicator(config);
    FAIL() << "joined alone";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::peer);
    EXPECT_THAT(error.what(), HasSubstr("rank 1"));
  }
  EXPECT_TRUE(directory.empty());
}

// Rank 0 gives up waiting for rank 2 and lives on: rank 1 is told that, not that rank 0 died.
TEST(Processes, AreToldWhyAnotherStoppedWaitingForTheRest) {
  const Directory directory;
  CommunicatorConfig config = directory.config();
  config.ranks = 3;
  std::string told[2];
  std::vector<std::thread> ranks;
  for (uint32_t r = 0; r < 2; ++r) {
    ranks.emplace_back([&told, config, r]() mutable {
      config.rank = r;
      if (r == 0) config.timeout = std::chrono::milliseconds(1500);
      try {
        const Communicator communicator(config);
      } catch (const Error& error) {
        told[r] = error.what();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  EXPECT_THAT(told[0], HasSubstr("rank 0 of"));
  EXPECT_THAT(told[0], HasSubstr("in vain for rank 2 to join"));
  EXPECT_EQ(told[1], told[0]);
  EXPECT_TRUE(directory.empty());
}

// Where this process has mapped files of the directory: one piece of addresses.
std::pair<char*, size_t> mapped_from(const std::string& directory) {
  std::ifstream maps("/proc/self/maps");
  uintptr_t begin = 0, end = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find(directory) == std::string::npos) continue;
    uintptr_t from = 0, to = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx", &from, &to) != 2) continue;
    if (begin == 0) begin = from;
    end = to;
  }
  return {reinterpret_cast<char*>(begin), end - begin};
}

TEST(Processes, AForkedChildKeepsItsOwnMemoryWhereTheSegmentWas) {
  const Directory directory;
  const CommunicatorConfig config = directory.config();
  auto communicator = std::make_unique<Communicator>(config);
  const auto [begin, size] = mapped_from(config.directory);
  ASSERT_GT(size, 0U);
  const pid_t child = ::fork();
  if (child == 0) {
    // The first page alone: a sanitizer's thread may have its stack in the last ones already.
    void* const own = ::mmap(begin, 4096, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    if (own != begin) ::_exit(3);
    *begin = 'x';
    communicator.reset();
    ::_exit(*begin == 'x' ? 0 : 4);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  communicator->barrier();
}

TEST(Processes, LeaveTheirCommunicatorToTheirParent) {
  Communicator communicator(config_of(fresh_job(), 0, 1));
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      communicator.barrier();
    } catch (const Error& error) {
      ::_exit(error.kind() == ErrorKind::usage ? 7 : 1);
    }
    ::_exit(2);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 7);
  communicator.barrier();
}

}  // namespace
}  // namespace nostall::collective
