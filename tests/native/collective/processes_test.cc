// Ranks that are processes: killed, absent, forked.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <thread>

#include "../forked.h"
#include "../temporary.h"
#include "base/clock.h"
#include "base/error.h"
#include "collective/communicator.h"
#include "collective/selection.h"
#include "collective/shared_memory.h"
#include "collective/steps.h"
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

// What each of three ranks does after memory for shared files became full, in a file system of their
// own. Nothing if this user cannot mount one.
std::vector<int> on_a_full_file_system(const std::function<int(Communicator&)>& body) {
  const Directory directory;
  const CommunicatorConfig config = directory.config();
  std::vector<int> results;
  std::thread([&] {
    // Of this thread and the processes that it starts, and with it the mount.
    if (::unshare(CLONE_NEWNS) != 0) return;
    if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return;
    if (::mount("none", config.directory.c_str(), "tmpfs", 0, "size=4m") != 0) return;
    results = run_processes(3, config, [&](Communicator& c) {
      if (c.rank() == 0) {
        std::ofstream fill(config.directory + "/fill");
        while (fill.put('x').flush()) fill << std::string(4095, 'x');
      }
      c.barrier();
      return body(c);
    });
  }).join();
  return results;
}

// Whether there are more ranks than cores, if both are bound to one core each.
bool is_oversubscribed(const CommunicatorConfig& common, int mine, int other) {
  const auto join = [&common](uint32_t rank, int core) noexcept {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    ::sched_setaffinity(0, sizeof set, &set);
    SharedMemoryConfig config;
    config.job = common.job;
    config.rank = rank;
    config.ranks = 2;
    config.window_bytes = common.window_bytes;
    config.arena_bytes = common.arena_bytes;
    config.directory = common.directory;
    return std::make_unique<SharedMemory>(config, common.timeout);
  };
  cpu_set_t before;
  ::sched_getaffinity(0, sizeof before, &before);
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(100);
    const auto memory = join(1, other);
    ::pause();  // until it is killed
  }
  const auto memory = join(0, mine);
  const bool found = Steps(*memory, 0, 2, common.timeout, {}).oversubscribed();
  ::sched_setaffinity(0, sizeof before, &before);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  return found;
}

TEST(Processes, HaveTheCoresThatAllOfThemAreBoundTo) {
  cpu_set_t usable;
  ASSERT_EQ(::sched_getaffinity(0, sizeof usable, &usable), 0);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &usable)) cores.push_back(core);
  }
  if (cores.size() < 2) GTEST_SKIP() << "one core for all ranks";
  const Directory directory;
  EXPECT_TRUE(is_oversubscribed(directory.config(), cores[0], cores[0]));
  EXPECT_FALSE(is_oversubscribed(directory.config(), cores[0], cores[1]));
}

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

// The last rank to call does so when the others have each other's data, not before; the data are
// more than a rank's share of the window.
TEST(Processes, HaveEachOthersDataBeforeTheLastArrivesAtAnAllgather) {
  constexpr uint32_t kRanks = 4;
  constexpr uint64_t kBytes = 3 << 20, kWords = kBytes / 8;
  const Directory directory;
  void* const memory = ::mmap(nullptr, kRanks * kRanks * kBytes, PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const auto part_of = [memory](uint32_t owner, uint32_t of) {
    return static_cast<uint64_t*>(memory) + (uint64_t{owner} * kRanks + of) * kWords;
  };
  const auto results = run_processes(kRanks, directory.config(), [&](Communicator& c) {
    std::vector<uint64_t> mine(kWords);
    for (uint64_t last = 0; last < kRanks; ++last) {
      for (uint64_t i = 0; i < kWords; ++i)
        mine[i] = uint64_t{c.rank() + 1} << 32 | (last << 24) | i;
      c.barrier();
      const auto there = [&] {
        for (uint32_t r = 0; r < kRanks; ++r) {
          for (uint32_t of = 0; of < kRanks; ++of) {
            if (r == last || of == last || r == of) continue;
            const std::atomic_ref<uint64_t> word(part_of(r, of)[kWords / 4]);
            if (word.load() != (uint64_t{of + 1} << 32 | (last << 24) | (kWords / 4))) return false;
          }
        }
        return true;
      };
      const int64_t end = now_ns() + 60'000'000'000;
      while (c.rank() == last && !there()) {
        if (now_ns() > end) return 1;
        std::this_thread::yield();
      }
      c.allgather(mine.data(), part_of(c.rank(), 0), kBytes);
      for (uint32_t of = 0; of < kRanks; ++of) {
        for (uint64_t i = 0; i < kWords; ++i) {
          if (part_of(c.rank(), of)[i] != (uint64_t{of + 1} << 32 | (last << 24) | i)) return 2;
        }
      }
    }
    return 0;
  });
  ::munmap(memory, kRanks * kRanks * kBytes);
  EXPECT_EQ(results, (std::vector<int>(kRanks, 0)));
}

TEST(Processes, AreToldThatChannelsGetNoMemory) {
  using enum Algorithm;
  for (const Algorithm algorithm : {recursive_doubling, ring, rsa, binomial}) {
    const auto results = on_a_full_file_system([algorithm](Communicator& c) {
      std::vector<float> data(10'000, 1);
      try {
        c.allreduce(data.data(), data.data(), data.size(), sum(), {.algorithm = algorithm});
      } catch (const Error& error) {
        const std::string told = error.what();
        const bool own = told.find("no memory for 65664 more bytes") != std::string::npos;
        return own || told.find("could not go on in allreduce") != std::string::npos ? 7 : 1;
      }
      return 0;
    });
    if (results.empty()) GTEST_SKIP() << "this user cannot mount a file system";
    EXPECT_EQ(results, (std::vector<int>{7, 7, 7})) << name_of(algorithm);
  }
}

TEST(Processes, AreToldWhoIsMissingInAnAllgather) {
  const Directory directory;
  const auto results = run_processes(3, directory.config(), [](Communicator& c) {
    std::vector<char> mine(1 << 20), all(3 << 20);
    c.allgather(mine.data(), all.data(), mine.size());
    if (c.rank() == 1) ::raise(SIGKILL);
    try {
      c.allgather(mine.data(), all.data(), mine.size());
    } catch (const Error& error) {
      return std::string(error.what()).find("rank 1") != std::string::npos ? 7 : 1;
    }
    return 2;
  });
  EXPECT_EQ(results, (std::vector<int>{7, -SIGKILL, 7}));
}

// The last rank to call does so when the others have added up all that they have, not before: of
// each element one addition is left. The data are more than the window.
TEST(Processes, HaveTheirSumsBeforeTheLastArrivesAtAReduceScatter) {
  constexpr uint32_t kRanks = 4;
  constexpr uint64_t kCount = 1 << 17;  // of each block
  const Directory directory;
  CommunicatorConfig config = directory.config();
  config.window_bytes = kRanks * kCount * sizeof(uint64_t);
  void* const memory =
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const UserFunction add = [](const void* in, void* inout, uint64_t count, void* added) {
    const auto* const left = static_cast<const uint64_t*>(in);
    auto* const right = static_cast<uint64_t*>(inout);
    for (uint64_t i = 0; i < count; ++i) right[i] += left[i];
    std::atomic_ref<uint64_t>(*static_cast<uint64_t*>(added)).fetch_add(count);
  };
  const auto results = run_processes(kRanks, config, [&](Communicator& c) {
    const Reducer sum(add, memory, sizeof(uint64_t), true);
    const std::atomic_ref<uint64_t> added(*static_cast<uint64_t*>(memory));
    std::vector<uint64_t> data(kRanks * kCount), block(kCount);
    for (uint64_t last = 0; last < kRanks; ++last) {
      for (uint64_t i = 0; i < data.size(); ++i) data[i] = i + (c.rank() << last);
      c.barrier();
      const uint64_t before = last * (kRanks - 1) * data.size();
      const int64_t end = now_ns() + 60'000'000'000;
      while (c.rank() == last && added.load() < before + (kRanks - 2) * data.size()) {
        if (now_ns() > end) return 1;
        std::this_thread::yield();
      }
      c.reduce_scatter(data.data(), block.data(), kCount, sum);
      c.barrier();
      if (added.load() != before + (kRanks - 1) * data.size()) return 2;
      for (uint64_t i = 0; i < kCount; ++i) {
        const uint64_t ranks = kRanks * (kRanks - 1) / 2;
        if (block[i] != kRanks * (c.rank() * kCount + i) + (ranks << last)) return 3;
      }
    }
    return 0;
  });
  ::munmap(memory, 4096);
  EXPECT_EQ(results, (std::vector<int>(kRanks, 0)));
}

// A rank without a block does not wait for one that comes late.
TEST(Processes, LeaveAReduceScatterEarlyThatGivesThemNothing) {
  const Directory directory;
  const CommunicatorConfig config = directory.config();
  const std::string left = config.directory + "/left";
  const auto results = run_processes(3, config, [&left](Communicator& c) {
    std::vector<float> data(100'000, 1), block(100'000);
    const std::vector<uint64_t> counts{0, 100'000, 0};
    for (int call = 0; call < 2; ++call) {
      const int64_t end = now_ns() + 60'000'000'000;
      while (call == 0 && c.rank() == 1 && !std::filesystem::exists(left)) {
        if (now_ns() > end) return 2;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      c.reduce_scatterv(data.data(), block.data(), counts, sum());
      if (c.rank() == 0 && call == 0) std::ofstream(left).put('x');
      if (c.rank() == 1 && (block.front() != 3 || block.back() != 3)) return 1;
    }
    c.barrier();
    return 0;
  });
  EXPECT_EQ(results, (std::vector<int>(3, 0)));
}

TEST(Processes, AreToldOfAnEndInALaterCallWhileTheyWaitForSomethingElse) {
  const Directory directory;
  const auto results = run_processes(3, directory.config(), [](Communicator& c) {
    float value = 1;
    c.broadcast(&value, sizeof value, 1);
    if (c.rank() == 2) ::raise(SIGKILL);
    if (c.rank() == 1) {
      try {
        c.broadcast(&value, sizeof value, 1);  // its root leaves before the others come
        c.barrier();
      } catch (const Error&) {
        return 7;
      }
      return 1;
    }
    // This rank does not come to the second broadcast.
    for (const int64_t end = now_ns() + 60'000'000'000; now_ns() < end;) {
      try {
        c.check();
      } catch (const Error&) {
        return 7;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return 3;
  });
  EXPECT_EQ(results, (std::vector<int>{7, 7, -SIGKILL}));
}

TEST(Processes, AreToldWhoIsMissingInAReduceScatter) {
  const Directory directory;
  for (const bool dies : {true, false}) {
    const auto results = run_processes(3, directory.config(), [dies](Communicator& c) {
      std::vector<float> data(3 << 20), block(1 << 20);
      c.reduce_scatter(data.data(), block.data(), block.size(), sum());
      c.barrier();  // nobody is in that one any more
      // One rank gives up, and tells the other one why.
      if (c.rank() == 0 && !dies) c.set_timeout(std::chrono::milliseconds(500));
      if (c.rank() == 1 && dies) ::raise(SIGKILL);
      if (c.rank() == 1) {
        // Until the others have waited in vain.
        for (const int64_t end = now_ns() + 60'000'000'000; now_ns() < end;) {
          try {
            c.check();
          } catch (const Error&) {
            return 0;
          }
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        return 3;
      }
      try {
        c.reduce_scatter(data.data(), block.data(), block.size(), sum());
      } catch (const Error& error) {
        const std::string what = error.what();
        const bool named = what.find(dies ? "rank 1" : "not arrived: 1") != std::string::npos;
        return named && what.find("reduce_scatter (call 3)") != std::string::npos ? 7 : 1;
      }
      return 2;
    });
    EXPECT_EQ(results, (std::vector<int>{7, dies ? -SIGKILL : 0, 7}));
  }
}

TEST(Processes, AreToldWhoWasKilledInsideACall) {
  const Directory directory;
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
  EXPECT_TRUE(directory.empty());
}

// Whether the process is dead, and nobody has waited for it yet.
bool is_over(int process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  return text.find(") Z ") != std::string::npos;
}

// Rank 1 gives what rank 0 waits for, and dies before rank 0 looks for ranks that have died.
TEST(Processes, TakeWhatARankGaveBeforeItDied) {
  const Directory directory;
  void* const memory =
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const std::atomic_ref<int> waits(static_cast<int*>(memory)[0]);
  const std::atomic_ref<int> giver(static_cast<int*>(memory)[1]);
  CommunicatorConfig config = directory.config();
  config.progress = [&] {
    waits = 1;
    const int64_t end = now_ns() + 60'000'000'000;
    while (!is_over(giver) && now_ns() < end) std::this_thread::yield();
  };
  const auto results = run_processes(2, config, [&](Communicator& c) {
    int value = 0;
    if (c.rank() == 1) {
      value = 5;
      giver = ::getpid();
      while (waits == 0) std::this_thread::yield();
    }
    c.broadcast(&value, sizeof value, 1);
    if (c.rank() == 1) ::raise(SIGKILL);
    return value;
  });
  ::munmap(memory, 4096);
  EXPECT_EQ(results, (std::vector<int>{5, -SIGKILL}));
}

// An error whose text cannot be copied to the end: the rank dies after the first word of its end, and
// before the last one.
class Deadly : public Error {
 public:
  Deadly() : Error(ErrorKind::peer, "") {}
  const char* what() const noexcept override {
    ::raise(SIGKILL);
    return "";
  }
};

TEST(Processes, AreToldWhoDiedWhileItSaidWhyItEnds) {
  const Directory directory;
  const auto results = run_processes(3, directory.config(), [](Communicator& c) {
    c.barrier();
    if (c.rank() == 1) c.end_from_here(Deadly());
    for (int call = 0; call < 2; ++call) {
      try {
        c.barrier();
        return 1;
      } catch (const Error& error) {
        if (std::string(error.what()).find("rank 1 died while it said why") == std::string::npos) {
          std::fprintf(stderr, "rank %u: %s\n", c.rank(), error.what());
          return 2;
        }
      }
    }
    return 7;
  });
  EXPECT_EQ(results, (std::vector<int>{7, -SIGKILL, 7}));
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

// Rank 0 leaves a reduce and a broadcast early, comes to the next call, and its program ends there.
// Only then rank 2 begins, for which rank 1 waits in the reduce.
TEST(Processes, FinishWhatARankCompletedBeforeItsProgramEnded) {
  const Directory directory;
  CommunicatorConfig config = directory.config();
  const TemporaryFolder folder;
  const std::string ended = folder.path() + "/ended";
  std::atomic<bool> waits{false};  // of rank 0, in its third call
  std::atomic<int> calls{0};
  config.progress = [&] { waits = calls == 2; };
  const auto results = run_processes(3, config, [&](Communicator& c) {
    const auto told = [&] {
      try {
        c.barrier();
      } catch (const Error& error) {
        return std::string(error.what()).find("rank 0 ends its program") != std::string::npos;
      }
      return false;
    };
    if (c.rank() == 2) {
      while (!std::filesystem::exists(ended)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    float value = 1, word = c.rank() == 0 ? 7 : 0;
    c.reduce(&value, &value, 1, sum(), 1);
    c.broadcast(&word, sizeof word, 0);
    if (c.rank() == 0) {
      calls = 2;
      bool was_told = false;
      std::thread third([&] { was_told = told(); });
      while (!waits) std::this_thread::yield();
      c.end_from_here(Error(ErrorKind::peer, "rank 0 ends its program"));
      third.join();
      c.leave();
      std::ofstream(ended).put('x');
      return was_told ? 0 : 1;
    }
    if (word != 7 || (c.rank() == 1 && value != 3)) return 2;
    return told() ? 0 : 3;
  });
  EXPECT_EQ(results, (std::vector<int>{0, 0, 0}));
  EXPECT_TRUE(directory.empty());
}

// Rank 1 gives what is reduced, and dies. Only when rank 0 has seen that, rank 2 begins.
TEST(Processes, FinishWhatARankCompletedBeforeItDied) {
  const Directory directory;
  CommunicatorConfig config = directory.config();
  struct Shared {
    std::atomic<pid_t> dies;
    std::atomic<int> looks;  // of rank 0, since then
  };
  void* const memory =
      ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* const shared = static_cast<Shared*>(memory);
  config.progress = [&] {
    std::ifstream file("/proc/" + std::to_string(shared->dies.load()) + "/stat");
    std::string stat;
    std::getline(file, stat);
    if (stat.find(") Z ") != std::string::npos) ++shared->looks;
  };
  const auto results = run_processes(3, config, [&](Communicator& c) {
    const int64_t end = now_ns() + 60'000'000'000;
    // Naps between them are up to 2 ms long, and it looks whether others live every 25 ms.
    while (c.rank() == 2 && shared->looks < 100 && now_ns() < end) {
      try {
        c.check();
      } catch (const Error&) {
        return 1;
      }
      std::this_thread::yield();
    }
    float value = 1;
    c.reduce(&value, &value, 1, sum(), 0);
    if (c.rank() == 1) {
      shared->dies = ::getpid();
      ::raise(SIGKILL);
    }
    if (c.rank() == 0 && value != 3) return 2;
    try {
      c.barrier();
    } catch (const Error& error) {
      const std::string told = error.what();
      return told.find("died before it finished barrier (call 2)") != std::string::npos ? 7 : 3;
    }
    return 4;
  });
  EXPECT_GE(shared->looks, 100);
  ::munmap(memory, 4096);
  EXPECT_EQ(results, (std::vector<int>{7, -SIGKILL, 7}));
}

TEST(Processes, WaitNoLongerThanTheTimeout) {
  const Directory directory;
  CommunicatorConfig config = directory.config();
  const std::string told = config.directory + "/told";
  const auto results = run_processes(2, config, [&told](Communicator& c) {
    if (c.rank() == 1) {
      while (!std::filesystem::exists(told)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return 0;
    }
    c.set_timeout(std::chrono::milliseconds(500));
    try {
      c.barrier();
    } catch (const Error& error) {
      std::ofstream(told).put('x');
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

// Rank 0 gives up waiting for rank 2 and lives on: rank 1 is told that, not that rank 0 died.
TEST(Processes, AreToldWhyAnotherStoppedWaitingForTheRest) {
  const Directory directory;
  CommunicatorConfig config = directory.config();
  config.ranks = 3;
  std::string told[2];
  const auto join = [&told, config](uint32_t rank, std::chrono::seconds timeout) mutable {
    config.rank = rank;
    config.timeout = timeout;
    try {
      const Communicator communicator(config);
    } catch (const Error& error) {
      told[rank] = error.what();
    }
  };
  // Rank 1 has come before the limit of rank 0 begins.
  std::thread other(join, 1, std::chrono::seconds(60));
  while (mapped_from(config.directory).second < config.window_bytes) std::this_thread::yield();
  const auto* const header = reinterpret_cast<const Header*>(mapped_from(config.directory).first);
  // Read as a file: ThreadSanitizer takes another thread's mapping for a write.
  const Descriptor memory(::open("/proc/self/mem", O_RDONLY));
  for (uint32_t joined = 0; joined == 0;) {
    ASSERT_EQ(
        ::pread(memory.get(), &joined, sizeof joined, reinterpret_cast<off_t>(&header->joined)),
        static_cast<ssize_t>(sizeof joined));
  }
  std::thread(join, 0, std::chrono::seconds(1)).join();
  other.join();
  EXPECT_THAT(told[0], HasSubstr("rank 0 of"));
  EXPECT_THAT(told[0], HasSubstr("in vain for rank 2 to join"));
  EXPECT_EQ(told[1], told[0]);
  EXPECT_TRUE(directory.empty());
}

// The limit of rank 1 passes in the moment in which the last rank joins, so that the others have joined.
TEST(Processes, AreToldWhyARankStoppedWaitingWhenAllHadJoined) {
  CommunicatorConfig config = config_of(fresh_job(), 0, 2);
  std::thread other([&config] {
    SharedMemory memory({config.job, 1, 2, config.window_bytes, config.arena_bytes,
                         config.directory, Selection(config.selection, 2).hash()},
                        config.timeout);
    EXPECT_THROW(memory.stop_joining(Error(ErrorKind::peer, "rank 1 waited in vain")), Error);
  });
  Communicator first(config);
  try {
    first.barrier();
    ADD_FAILURE() << "the barrier ended without rank 1";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 1 waited in vain"));
  }
  other.join();
}

TEST(Processes, AForkedChildKeepsItsOwnMemoryWhereTheSegmentWas) {
  const Directory directory;
  const CommunicatorConfig config = directory.config();
  auto communicator = std::make_unique<Communicator>(config);
  const auto [begin, size] = mapped_from(config.directory);
  ASSERT_GT(size, 0U);
  EXPECT_EQ(status_of_child([&, begin = begin] {
              // The first page alone: a sanitizer's thread may have its stack in the last ones already.
              void* const own = ::mmap(begin, 4096, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
              if (own != begin) return 3;
              *begin = 'x';
              communicator.reset();
              return *begin == 'x' ? 0 : 4;
            }),
            0);
  communicator->barrier();
}

TEST(Processes, LeaveTheirCommunicatorToTheirParent) {
  Communicator communicator(config_of(fresh_job(), 0, 1));
  EXPECT_EQ(status_of_child([&] {
              try {
                communicator.barrier();
              } catch (const Error& error) {
                return error.kind() == ErrorKind::usage ? 7 : 1;
              }
              return 2;
            }),
            7);
  communicator.barrier();
}

}  // namespace
}  // namespace nostall::collective
