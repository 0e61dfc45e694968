// Recorded events: names, times, full rings, forked children, full disks.
#include "trace/trace.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include <array>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "../forked.h"
#include "base/error.h"
#include "base/log.h"

namespace nostall::trace {
namespace {

class Trace : public testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::temp_directory_path() /
            ("nostall-trace-" + std::to_string(::getpid()) + ".json.gz");
  }
  void TearDown() override {
    stop();
    std::filesystem::remove(path_);
  }
  std::string content() const { return content(path_); }
  static std::string content(const std::filesystem::path& path) {
    std::string out;
    const gzFile file = gzopen(path.c_str(), "rb");
    std::array<char, 4096> piece{};
    for (int n = 0; (n = gzread(file, piece.data(), piece.size())) > 0;) {
      out.append(piece.data(), static_cast<size_t>(n));
    }
    gzclose(file);
    return out;
  }
  static size_t count(const std::string& text, const std::string& what) {
    size_t n = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
    return n;
  }
  std::filesystem::path path_;
};

TEST_F(Trace, NothingIsRecordedUnlessAsked) {
  const Kind kind = define("test", "off");
  EXPECT_FALSE(on());
  record(kind, 1, 2);
  start({path_, 0, 1});
  const Summary done = stop();
  EXPECT_EQ(done.events, 0u);
}

TEST_F(Trace, AnEventHasItsNamesTimesAndValues) {
  const Kind kind = define("data", "re\"ad\n", {"samples", "bytes"});
  EXPECT_EQ(define("data", "re\"ad\n").index, kind.index);
  start({path_, 3, 8});
  record(kind, 1'234'567, 1'236'007, {16, -9});
  const Summary done = stop();
  EXPECT_EQ(done.events, 1u);
  EXPECT_EQ(done.bytes, std::filesystem::file_size(path_));
  const std::string text = content();
  EXPECT_NE(text.find(R"("distributedInfo": {"backend": "nostall", "rank": 3, "world_size": 8})"),
            std::string::npos);
  EXPECT_NE(text.find(R"("cat": "data", "name": "re\"ad\u000a", "pid": )"), std::string::npos);
  EXPECT_NE(text.find(R"("ts": 1234.567, "dur": 1.440, "args": {"samples": 16, "bytes": -9}})"),
            std::string::npos);
  EXPECT_NE(text.find(R"({"events": 1, "dropped": 0}})"), std::string::npos);
  EXPECT_EQ(text.substr(text.size() - 4), "\n]}\n");
}

TEST_F(Trace, EveryThreadIsNamedAndNothingIsLost) {
  const Kind kind = define("test", "tick", {"i"});
  start({path_, 0, 1, std::chrono::milliseconds(1)});
  std::vector<std::jthread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([kind, t] {
      pthread_setname_np(pthread_self(), ("worker " + std::to_string(t)).c_str());
      for (int i = 0; i < 2000; ++i) {
        Span span(kind);
        span.values[0] = i;
      }
    });
  }
  threads.clear();
  const Summary done = stop();
  EXPECT_EQ(done.events + done.dropped, 8000u);
  EXPECT_EQ(done.dropped, 0u);
  const std::string text = content();
  EXPECT_EQ(count(text, "\"name\": \"tick\""), 8000u);
  EXPECT_EQ(count(text, "\"thread_name\""), 4u);
  EXPECT_EQ(count(text, "{\"name\": \"worker 2\"}"), 1u);
}

TEST_F(Trace, AFullRingDropsAndCounts) {
  const Kind kind = define("test", "flood");
  start({path_, 0, 1, std::chrono::seconds(60)});
  for (size_t i = 0; i < kRingEvents + 100; ++i) record(kind, 1, 2);
  const Summary done = stop();
  EXPECT_EQ(done.events, kRingEvents);
  EXPECT_EQ(done.dropped, 100u);
}

TEST_F(Trace, AForkedChildRecordsNothingAndLeavesTheFileAlone) {
  const Kind kind = define("test", "fork");
  start({path_, 0, 1});
  record(kind, 1, 2);
  EXPECT_EQ(status_of_child([&] {
              record(kind, 3, 4);
              const Summary none = stop();
              return on() || none.events != 0 ? 1 : 0;
            }),
            0);
  record(kind, 5, 6);
  EXPECT_EQ(stop().events, 2u);
}

// The other thread opens a FIFO that nobody reads: it stays in start() over the fork.
TEST_F(Trace, AChildForkedAmidAStartRecordsItsOwn) {
  const std::string fifo = path_.string() + ".fifo", own = path_.string() + ".child";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const Kind kind = define("test", "own");
  std::jthread starting([&] { start({fifo, 0, 1}); });
  while (!on()) std::this_thread::yield();
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(30);
    const Kind same = define("test", "own"), other = define("test", "another");
    start({own, 0, 1});
    record(same, 1, 2);
    record(other, 3, 4);
    ::_exit(same.index == kind.index && stop().events == 2 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_NE(content(own).find("\"tid\": " + std::to_string(child)), std::string::npos);
  const int reader = ::open(fifo.c_str(), O_RDONLY | O_NONBLOCK);
  starting.join();
  stop();
  ::close(reader);
  std::filesystem::remove(fifo);
  std::filesystem::remove(own);
}

// The system cuts names of threads after 15 bytes.
TEST_F(Trace, ANameThatIsCutInACharacterIsStillText) {
  const Kind kind = define("test", "\xc3\xa4 \xe2\x82 \xff\"");
  start({path_, 0, 1});
  std::jthread([&] {
    pthread_setname_np(pthread_self(), "Vorverarbeitun\xc3");
    record(kind, 1, 2);
  }).join();
  stop();
  EXPECT_NE(content().find("\"Vorverarbeitun\\ufffd\""), std::string::npos);
  EXPECT_NE(content().find("\"\xc3\xa4 \\ufffd\\ufffd \\ufffd\\\"\""), std::string::npos);
}

TEST_F(Trace, MistakesAreToldInOneSentence) {
  EXPECT_THROW(start({"/nonexistent/trace.json.gz", 0, 1}), Error);
  EXPECT_FALSE(on());
  start({path_, 0, 1});
  EXPECT_THROW(start({path_, 0, 1}), Error);
  EXPECT_THROW(define("a", "b", {"1", "2", "3", "4", "5", "6", "7", "8"}), Error);
}

TEST_F(Trace, AFullDiskEndsTheRecordingNotTheJob) {
  const Kind kind = define("test", "full");
  start({"/dev/full", 0, 1, std::chrono::milliseconds(1)});
  for (int i = 0; i < 30'000 && on(); ++i) {
    record(kind, i, i + 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_FALSE(on());
  EXPECT_EQ(stop().bytes, 0u);
}

// The last one: this process has no room for kinds afterwards.
TEST_F(Trace, MoreKindsThanFitAreOneKindAndSaidOnce) {
  std::vector<std::string> said;
  set_log_sink([&](LogLevel, const std::string& message) { said.push_back(message); });
  Kind last = define("test", "first");
  for (size_t i = 0; i < kMaxKinds + 100; ++i) last = define("many", std::to_string(i));
  EXPECT_EQ(define("many", "one more").index, last.index);
  EXPECT_EQ(define("test", "first").index, define("test", "first").index);
  EXPECT_NE(define("test", "first").index, last.index);
  EXPECT_EQ(said.size(), 1u);
  start({path_, 0, 1});
  record(last, 1, 2);
  EXPECT_EQ(stop().events, 1u);
  EXPECT_NE(content().find(R"("cat": "other", "name": "other", "pid": )"), std::string::npos);
  set_log_sink({});
}

}  // namespace
}  // namespace nostall::trace
