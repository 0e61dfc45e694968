// Ranks of a communicator as threads, or as processes, for tests.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "collective/communicator.h"

namespace nostall::collective::testing {

inline std::string fresh_job() {
  static std::atomic<int> number{0};
  return "collective test " + std::to_string(::getpid()) + " " + std::to_string(number++);
}

inline CommunicatorConfig config_of(const std::string& job, uint32_t rank, uint32_t ranks) {
  CommunicatorConfig config;
  config.job = job;
  config.rank = rank;
  config.ranks = ranks;
  config.window_bytes = 8 << 20;
  config.arena_bytes = 64 << 20;
  config.timeout = std::chrono::seconds(60);
  return config;
}

using Body = std::function<void(Communicator&)>;

// Runs `body` on every rank at once; throws the first rank's error, if any.
inline void run_threads(uint32_t ranks, const Body& body) {
  const std::string job = fresh_job();
  std::vector<std::exception_ptr> errors(ranks);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        Communicator communicator(config_of(job, r, ranks));
        body(communicator);
      } catch (...) {
        errors[r] = std::current_exception();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::exception_ptr& e : errors) {
    if (e) std::rethrow_exception(e);
  }
}

// As above with processes; the exit status or, negative, the signal of each.
inline std::vector<int> run_processes(uint32_t ranks, const CommunicatorConfig& common,
                                      const std::function<int(Communicator&)>& body) {
  std::vector<pid_t> children;
  for (uint32_t r = 0; r < ranks; ++r) {
    const pid_t child = ::fork();
    if (child == 0) {
      int status = 99;
      try {
        CommunicatorConfig config = common;
        config.rank = r;
        config.ranks = ranks;
        Communicator communicator(config);
        status = body(communicator);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %u: %s\n", r, error.what());
      }
      ::_exit(status);
    }
    children.push_back(child);
  }
  std::vector<int> results;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    results.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  return results;
}

// Sleeps for a while that differs between ranks and calls, now and then.
class Delays {
 public:
  explicit Delays(uint32_t seed) : random_(seed) {}
  void maybe() {
    const uint32_t draw = random_() % 16;
    if (draw < 3) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
    if (draw == 3) std::this_thread::yield();
  }
  uint32_t next() { return random_(); }

 private:
  std::mt19937 random_;
};

inline constexpr Algorithm kAll[] = {Algorithm::cooperative,
                                     Algorithm::arrival_leader,
                                     Algorithm::arrival_chain,
                                     Algorithm::leader,
                                     Algorithm::recursive_doubling,
                                     Algorithm::ring,
                                     Algorithm::rsa,
                                     Algorithm::binomial};

}  // namespace nostall::collective::testing
