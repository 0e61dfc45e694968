// Two ranks as threads, moments made to measure.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "sync/timeline_writer.h"

namespace nostall::sync {
namespace {

constexpr int64_t kMs = 1'000'000;

const std::vector<TensorSpec> kTensors = {
    {"w", 6, collective::DataType::float32, collective::DataType::float32},
    {"(sign)", 1, collective::DataType::float32, collective::DataType::float32},
    {"b\"", 2, collective::DataType::float64, collective::DataType::float64}};

using Body = std::function<void(TimelineWriter&, uint32_t rank, int64_t start)>;

std::vector<std::string> run(const std::string& path, const Body& body) {
  static int number = 0;
  const std::string job =
      "timeline test " + std::to_string(::getpid()) + " " + std::to_string(number++);
  const int64_t start = now_ns() + 3'600'000 * kMs;  // behind the file's opening
  std::vector<std::string> errors(2);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      try {
        const auto collectives = make_node_collectives({job, r, 2});
        const auto timeline =
            TimelineWriter::open(r == 0 ? path : "", *collectives, kTensors, {"[2, 3]"});
        if (timeline) {
          body(*timeline, r, start);
        } else {
          errors[r] = "none";
        }
      } catch (const std::exception& error) {
        errors[r] = error.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return errors;
}

struct Seen {
  int64_t us;
  std::string what;
  bool operator==(const Seen&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Seen& s) { return out << s.us << ' ' << s.what; }

// "B NAME", "X rank", "E" of one pid, times since its first event.
std::vector<Seen> events(const std::string& path, int pid) {
  std::ifstream file(path);
  std::vector<Seen> out;
  for (std::string line; std::getline(file, line);) {
    const auto value = [&](const std::string& key) {
      const size_t at = line.find("\"" + key + "\": ");
      return at == std::string::npos ? std::string() : line.substr(at + key.size() + 4);
    };
    if (value("ts").empty() || std::stoi(value("pid")) != pid) continue;
    std::string what = value("ph").substr(1, 1);
    if (const std::string name = value("name"); !name.empty()) {
      what += ' ' + name.substr(1, name.find('"', 1) - 1);
    }
    out.push_back({std::stoll(value("ts")), what});
  }
  const int64_t first = out.empty() ? 0 : out.front().us;
  for (Seen& s : out) s.us -= first;
  return out;
}

class TimelineTest : public ::testing::Test {
 protected:
  std::filesystem::path path_ = std::filesystem::temp_directory_path() /
                                ("nostall-timeline-" + std::to_string(::getpid()) + ".json");
  void TearDown() override { std::filesystem::remove(path_); }
};

TEST_F(TimelineTest, HasTicksOfAllRanksAndThePhasesOfRankZero) {
  const auto errors = run(path_, [](TimelineWriter& timeline, uint32_t rank, int64_t t) {
    // Rank 0 copies before rank 1 is ready: that is the negotiation's time.
    const std::vector<uint32_t> first = {0, 1};
    const std::vector<int64_t> ready = {t + (rank == 0 ? 1 : 20) * kMs, t};
    timeline.add(first, ready, {0, t + 2 * kMs, t + 5 * kMs, t + 30 * kMs, t + 33 * kMs});
    // Agreed on long after the last rank was ready, and queued behind the other.
    const std::vector<uint32_t> second = {2};
    const std::vector<int64_t> early = {t + (rank == 0 ? 8 : 4) * kMs};
    timeline.add(second, early,
                 {t + 12 * kMs, t + 34 * kMs, t + 35 * kMs, t + 40 * kMs, t + 41 * kMs});
    timeline.write();
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
  const std::vector<Seen> w = {{0, "B NEGOTIATE_ALLREDUCE"},
                               {0, "X 0"},
                               {19000, "X 1"},
                               {19000, "E"},
                               {19000, "B ALLREDUCE"},
                               {19000, "B NOSTALL_ALLREDUCE"},
                               {29000, "E"},
                               {29000, "B MEMCPY_OUT_FUSION_BUFFER"},
                               {32000, "E"},
                               {32000, "E"}};
  EXPECT_EQ(events(path_, 1), w);
  EXPECT_TRUE(events(path_, 2).empty());
  const std::vector<Seen> b = {{0, "B NEGOTIATE_ALLREDUCE"},
                               {0, "X 1"},
                               {4000, "X 0"},
                               {8000, "E"},
                               {8000, "B ALLREDUCE"},
                               {8000, "B QUEUE"},
                               {30000, "E"},
                               {30000, "B MEMCPY_IN_FUSION_BUFFER"},
                               {31000, "E"},
                               {31000, "B NOSTALL_ALLREDUCE"},
                               {36000, "E"},
                               {36000, "B MEMCPY_OUT_FUSION_BUFFER"},
                               {37000, "E"},
                               {37000, "E"}};
  EXPECT_EQ(events(path_, 3), b);
  std::stringstream all;
  all << std::ifstream(path_).rdbuf();
  EXPECT_NE(all.str().find(R"("name": "b\"")"), std::string::npos);
  EXPECT_NE(all.str().find(R"({"dtype": "float32", "shape": "[2, 3]"})"), std::string::npos);
  EXPECT_NE(all.str().find(R"({"dtype": "float64", "shape": "[2]"})"), std::string::npos);
  EXPECT_EQ(all.str().substr(all.str().size() - 3), "\n]\n");
}

TEST_F(TimelineTest, IsNoneWithoutAPathOfRankZero) {
  EXPECT_EQ(run("", [](TimelineWriter&, uint32_t, int64_t) {}),
            std::vector<std::string>(2, "none"));
}

TEST_F(TimelineTest, TellsAllRanksThatItsFileCannotBeMade) {
  const auto errors = run("/no/such/file", [](TimelineWriter&, uint32_t, int64_t) {});
  EXPECT_NE(errors[0].find("/no/such/file"), std::string::npos);
  EXPECT_EQ(errors[1], "rank 0 cannot write its timeline");
}

TEST_F(TimelineTest, AFullDiskEndsTheFileAndNotTheTraining) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, const std::string& text) { said.push_back(text); });
  const auto errors = run("/dev/full", [](TimelineWriter& timeline, uint32_t, int64_t t) {
    const std::vector<uint32_t> first = {0};
    const std::vector<int64_t> ready = {t};
    for (int step = 0; step < 2; ++step) {
      timeline.add(first, ready, {0, t, t + 1, t + 2, t + 3});
      timeline.write();
    }
  });
  set_log_sink(nullptr);
  EXPECT_EQ(errors, std::vector<std::string>(2));
  ASSERT_EQ(said.size(), 1);
  EXPECT_NE(said[0].find("/dev/full"), std::string::npos);
}

}  // namespace
}  // namespace nostall::sync
