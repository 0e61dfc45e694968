// Every schedule of two ranks with few preemptions, random ones of three, and long runs with delays
// at every operation on shared atomics: no lost wake-up, no mix-up of one call with the next.
//
//   NOSTALL_MODEL_PREEMPTIONS=3 NOSTALL_MODEL_SCHEDULES=10000000 test_collective_model
//   NOSTALL_STRESS_CALLS=10000000 test_collective_model --gtest_filter='Stress.*'
#include <gtest/gtest.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "../refuse.h"
#include "base/futex.h"
#include "collective/communicator.h"
#include "ranks.h"
#include "scheduler.h"

namespace nostall::collective {
namespace {

using testing::config_of;
using testing::fresh_job;

uint64_t setting(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Communicators of ranks in this process, for threads to use.
constexpr uint64_t kArena = 64 << 20;

std::vector<std::unique_ptr<Communicator>> join(uint32_t ranks, uint64_t arena_bytes = kArena,
                                                uint64_t window_bytes = 8 << 20) {
  std::vector<std::unique_ptr<Communicator>> all(ranks);
  std::vector<std::thread> threads;
  const std::string job = fresh_job();
  for (uint32_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&all, &job, r, ranks, arena_bytes, window_bytes] {
      CommunicatorConfig config = config_of(job, r, ranks);
      config.arena_bytes = arena_bytes;
      config.window_bytes = window_bytes;
      all[r] = std::make_unique<Communicator>(config);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return all;
}

const Reducer& sum() {
  static const Reducer reducer(Op::sum, DataType::int32);
  return reducer;
}

// What a rank calls; false if the result is wrong.
using Calls = std::function<bool(Communicator&)>;

struct Scenario {
  const char* name;
  Calls calls;
  uint64_t arena_bytes = kArena;
  uint64_t window_bytes = 8 << 20;
  Calls before{};        // all ranks at once, by no scheduler, before the first schedule
  bool is_last = false;  // a communicator of its own for each schedule
};
void PrintTo(const Scenario& scenario, std::ostream* out) { *out << scenario.name; }

model::Findings explore(uint32_t ranks, const Scenario& scenario, const model::Limits& limits) {
  std::vector<std::unique_ptr<Communicator>> communicators;
  model::Limits all = limits;
  all.before = [&] {
    if (!communicators.empty() && !scenario.is_last) return;
    communicators.clear();
    communicators = join(ranks, scenario.arena_bytes, scenario.window_bytes);
    std::vector<std::jthread> threads;
    for (const auto& each : communicators) {
      if (scenario.before) threads.emplace_back([&] { EXPECT_TRUE(scenario.before(*each)); });
    }
  };
  const Calls& calls = scenario.calls;
  std::atomic<bool> right{true};
  std::string error;
  std::vector<model::Body> bodies;
  for (uint32_t r = 0; r < ranks; ++r) {
    bodies.emplace_back([&calls, &right, &communicators, r] {
      try {
        if (!calls(*communicators[r])) right = false;
      } catch (const std::exception& thrown) {
        std::fprintf(stderr, "rank %u: %s\n", r, thrown.what());
        right = false;
      }
    });
  }
  const model::Findings found = model::explore(bodies, all);
  EXPECT_EQ(found.deadlocks, 0U) << "nobody could run after " << found.first;
  EXPECT_TRUE(right) << "a wrong result in one of " << found.schedules << " schedules";
  std::printf("%llu schedules%s\n", static_cast<unsigned long long>(found.schedules),
              found.exhausted ? ", all there are" : "");
  return found;
}

bool allreduce_is_right(Communicator& c, Algorithm algorithm, uint64_t count, int32_t call) {
  std::vector<int32_t> data(count, static_cast<int32_t>(c.rank() + 1) * call);
  c.allreduce(data.data(), data.data(), count, sum(), {.algorithm = algorithm});
  const auto ranks = static_cast<int32_t>(c.ranks());
  return data.front() == ranks * (ranks + 1) / 2 * call && data.back() == data.front();
}

bool reduce_is_right(Communicator& c, Algorithm algorithm, uint64_t count, int32_t call) {
  std::vector<int32_t> data(count, static_cast<int32_t>(c.rank() + 1) * call);
  const uint32_t root = static_cast<uint32_t>(call) % c.ranks();
  c.reduce(data.data(), data.data(), count, sum(), root, {.algorithm = algorithm});
  const auto ranks = static_cast<int32_t>(c.ranks());
  return c.rank() != root || data.back() == ranks * (ranks + 1) / 2 * call;
}

// Rank r gives `bytes` * r.
bool gather_is_right(Communicator& c, uint64_t bytes, uint8_t call) {
  std::vector<uint8_t> mine(bytes * c.rank(), static_cast<uint8_t>(c.rank() + call));
  std::vector<std::vector<uint8_t>> all(c.ranks());
  std::vector<Gathered> parts;
  for (uint32_t r = 0; r < c.ranks(); ++r) {
    all[r].resize(bytes * r);
    parts.push_back({all[r].data(), all[r].size()});
  }
  c.allgatherv(mine.data(), parts);
  for (uint32_t r = 0; r < c.ranks(); ++r) {
    if (all[r] != std::vector<uint8_t>(bytes * r, static_cast<uint8_t>(r + call))) return false;
  }
  return true;
}

// Rank 1 has no block.
bool scatter_is_right(Communicator& c, uint64_t count, int32_t call) {
  std::vector<uint64_t> counts(c.ranks(), count);
  counts[1] = 0;
  const uint64_t all = std::accumulate(counts.begin(), counts.end(), uint64_t{0});
  std::vector<int32_t> data(all, static_cast<int32_t>(c.rank() + 1) * call), mine(counts[c.rank()]);
  c.reduce_scatterv(data.data(), mine.data(), counts, sum());
  const auto ranks = static_cast<int32_t>(c.ranks());
  return mine == std::vector<int32_t>(counts[c.rank()], ranks * (ranks + 1) / 2 * call);
}

// Back to back, so that a rank is in the next call while another is still in the last.
const Scenario kScenarios[]{
    {"exchange",
     [](Communicator& c) {
       return allreduce_is_right(c, Algorithm::cooperative, 3, 1) &&
              allreduce_is_right(c, Algorithm::cooperative, 3, 2) &&
              allreduce_is_right(c, Algorithm::cooperative, 3, 3);
     }},
    {"arrival_leader",
     [](Communicator& c) {
       return allreduce_is_right(c, Algorithm::arrival_leader, 3, 1) &&
              allreduce_is_right(c, Algorithm::arrival_leader, 3, 2);
     }},
    {"pipeline",
     [](Communicator& c) {
       return allreduce_is_right(c, Algorithm::cooperative, 6000, 1) &&
              allreduce_is_right(c, Algorithm::cooperative, 2000, 2);
     }},
    {"early_leave",
     [](Communicator& c) {
       return reduce_is_right(c, Algorithm::cooperative, 3, 1) &&
              reduce_is_right(c, Algorithm::arrival_chain, 2000, 2) &&
              reduce_is_right(c, Algorithm::arrival_leader, 3, 3);
     }},
    {"mixed",
     [](Communicator& c) {
       int32_t word = c.rank() == 1 ? 77 : 0;
       c.broadcast(&word, sizeof word, 1);
       const bool first = reduce_is_right(c, Algorithm::cooperative, 2000, 1);
       c.barrier();
       return word == 77 && first && allreduce_is_right(c, Algorithm::ring, 5, 2);
     }},
    {"in_place",
     [](Communicator& c) {
       auto* data = static_cast<int32_t*>(c.allocate(80'000));
       bool right = true;
       for (int32_t call = 1; call <= 2; ++call) {
         std::fill(data, data + 20'000, static_cast<int32_t>(c.rank() + 1) * call);
         c.allreduce(data, data, 20'000, sum());
         const auto ranks = static_cast<int32_t>(c.ranks());
         right = right && data[0] == ranks * (ranks + 1) / 2 * call && data[19'999] == data[0];
       }
       c.barrier();
       c.release(data);
       return right;
     }},
    // Rank 0 has no room to be reduced with the others where they are, the other ranks have shared
    // buffers: at first all by the chain, then in place.
    {"declined",
     [](Communicator& c) {
       auto* full = static_cast<int32_t*>(c.allocate(8000));
       const auto ranks = static_cast<int32_t>(c.ranks());
       bool right = true;
       for (int32_t call = 1; call <= 3; ++call) {
         std::vector<int32_t> own(2000);
         int32_t* data = c.rank() == 0 && call < 3 ? own.data() : full;
         std::fill(data, data + 2000, static_cast<int32_t>(c.rank() + 1) * call);
         c.allreduce(data, data, 2000, sum());
         right = right && data[0] == ranks * (ranks + 1) / 2 * call && data[1999] == data[0];
       }
       c.barrier();
       c.release(full);
       return right;
     },
     12 << 10},
    // A rank has two slots for its five segments or more; then rank 0 has nothing to give.
    {"gather",
     [](Communicator& c) {
       std::vector<uint8_t> mine(70'000, static_cast<uint8_t>(c.rank()));
       std::vector<uint8_t> all(mine.size() * c.ranks());
       c.allgather(mine.data(), all.data(), mine.size());
       for (uint32_t r = 0; r < c.ranks(); ++r) {
         if (all[r * mine.size()] != r || all[(r + 1) * mine.size() - 1] != r) return false;
       }
       return gather_is_right(c, 70'000, 1) && gather_is_right(c, 3, 2);
     },
     kArena, 64 << 10},
    // A window of two slots for six segments: the first rank waits for all others to copy each.
    {"full_window",
     [](Communicator& c) {
       return allreduce_is_right(c, Algorithm::cooperative, 11'000, 1) &&
              allreduce_is_right(c, Algorithm::cooperative, 7000, 2);
     },
     kArena, 16 << 10},
    // One slot of the window has memory, and no rank gets more: three ranks waited for two segments at a
    // time, and would wait for ever.
    {"no_memory",
     [](Communicator& c) {
       static thread_local bool refused = false;
       if (!std::exchange(refused, true)) refuse({SYS_fallocate}, ENOSPC);
       return allreduce_is_right(c, Algorithm::cooperative, 256 << 10, 1) &&
              allreduce_is_right(c, Algorithm::cooperative, 256 << 10, 2);
     },
     kArena, 12 * (64 << 10),
     [](Communicator& c) {
       const uint64_t count = c.ranks() == 2 ? 64 << 10 : 2000;
       return allreduce_is_right(c, Algorithm::cooperative, count, 1) &&
              allreduce_is_right(c, Algorithm::cooperative, count, 2);
     }},
    // A rank has one slot with memory, and no one gets more; ranks waited for two segments at a time.
    {"gather_without_memory",
     [](Communicator& c) {
       static thread_local bool refused = false;
       if (!std::exchange(refused, true)) refuse({SYS_fallocate}, ENOSPC);
       std::vector<uint8_t> mine(c.ranks() == 2 ? 2 << 20 : 72 << 10,
                                 static_cast<uint8_t>(c.rank() + 1));
       std::vector<uint8_t> all(mine.size() * c.ranks());
       c.allgather(mine.data(), all.data(), mine.size());
       for (uint32_t r = 0; r < c.ranks(); ++r) {
         if (all[r * mine.size()] != r + 1 || all[(r + 1) * mine.size() - 1] != r + 1) return false;
       }
       return true;
     },
     kArena, 2 << 20,
     [](Communicator& c) {
       const uint64_t count = c.ranks() == 2 ? 150'000 : 2000;
       return allreduce_is_right(c, Algorithm::cooperative, count, 1) &&
              allreduce_is_right(c, Algorithm::cooperative, count, 2);
     }},
    // The last rank leaves both calls early and ends its program: they end well on the others, and the
    // next one by its error.
    {"end_of_program",
     [](Communicator& c) {
       const uint32_t last = c.ranks() - 1;
       int32_t sum_of = static_cast<int32_t>(c.rank()) + 1, word = c.rank() == last ? 77 : 0;
       c.reduce(&sum_of, &sum_of, 1, sum(), 0);
       c.broadcast(&word, sizeof word, last);
       if (c.rank() == last) {
         c.end_from_here(Error(ErrorKind::peer, "the last rank ends"));
         c.leave();
         return true;
       }
       const auto ranks = static_cast<int32_t>(c.ranks());
       if (word != 77 || (c.rank() == 0 && sum_of != ranks * (ranks + 1) / 2)) return false;
       try {
         c.barrier();
       } catch (const Error& error) {
         return error.kind() == ErrorKind::peer;
       }
       return false;
     },
     4096,
     16 << 10,
     {},
     true},
    // Rank 0 runs ahead until its step needs memory that the others used in the call before, which is
    // their last one.
    {"ahead_of_the_last_call",
     [](Communicator& c) {
       const bool first = allreduce_is_right(c, Algorithm::cooperative, 3, 1);
       int32_t word = 77;
       for (int call = 0; call < 2 && c.rank() == 0; ++call) c.broadcast(&word, sizeof word, 0);
       return first;
     },
     4096,
     16 << 10,
     {},
     true},
    // A window of two slots for six segments or more; then one step for all.
    {"scatter",
     [](Communicator& c) {
       return scatter_is_right(c, 11'000, 1) && scatter_is_right(c, 6000, 2) &&
              scatter_is_right(c, 3, 3);
     },
     kArena, 16 << 10},
};

class Schedules : public ::testing::TestWithParam<Scenario> {};
INSTANTIATE_TEST_SUITE_P(Of, Schedules, ::testing::ValuesIn(kScenarios),
                         [](const auto& each) { return std::string(each.param.name); });

TEST_P(Schedules, OfTwoRanksAllGiveTheResult) {
  const auto preemptions = static_cast<uint32_t>(setting("NOSTALL_MODEL_PREEMPTIONS", 1));
  const uint64_t schedules = setting("NOSTALL_MODEL_SCHEDULES", 3000);
  const auto found = explore(2, GetParam(), {.preemptions = preemptions, .schedules = schedules});
  EXPECT_TRUE(found.exhausted || found.schedules == schedules);
  EXPECT_GT(found.schedules, 20U);
}

TEST_P(Schedules, OfThreeRanksAtRandomGiveTheResult) {
  const uint64_t schedules = setting("NOSTALL_MODEL_SCHEDULES", 60);
  const auto found = explore(3, GetParam(), {.schedules = schedules, .seed = 20261});
  EXPECT_EQ(found.schedules, schedules);
}

// That it would find one: a sleeper looks at the flag before it marks itself as asleep.
TEST(Explorer, FindsALostWakeUp) {
  for (const bool looks_again : {false, true}) {
    model::Atomic<uint32_t> flag{0}, asleep{0};
    uint32_t sleeps = 0, wakes = 0;  // runs; flags only grow, as in the collectives
    const auto sleeper = [&] {
      const uint32_t run = ++sleeps;
      if (flag.load() >= run) return;
      asleep.store(1);
      if (!looks_again || flag.load() < run) model::futex_wait(asleep, 1, {});
      asleep.store(0);
    };
    const auto waker = [&] {
      flag.store(++wakes);
      if (asleep.load() == 0) return;
      asleep.store(0);
      model::futex_wake_all(asleep);
    };
    const auto found = model::explore({sleeper, waker}, {.preemptions = 1, .schedules = 1000});
    EXPECT_EQ(found.deadlocks, looks_again ? 0U : 1U);
  }
}

// Ranks that run at once, late by chance anywhere; a lost wake-up stops them for ever.
TEST(Stress, SmallCallsWithDelaysAtEveryAtomic) {
  const uint64_t calls = setting("NOSTALL_STRESS_CALLS", 1000);
  const auto ranks = static_cast<uint32_t>(setting("NOSTALL_STRESS_RANKS", 3));
  const auto communicators = join(ranks);
  std::atomic<uint64_t> done{0}, wrong{0};
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      const model::Delays delays(r + 1);
      Communicator& c = *communicators[r];
      for (uint64_t call = 1; call <= calls; ++call) {
        const auto value = static_cast<int32_t>(call % 1000 + 1);
        if (!allreduce_is_right(c, Algorithm::cooperative, 2, value)) ++wrong;
        if (r == 0) done = call;
      }
    });
  }
  uint64_t seen = 0;
  int standing = 0;
  while (done < calls) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    standing = done == seen ? standing + 1 : 0;
    seen = done;
    if (standing == 1200) {
      std::fprintf(stderr, "no call ended for two minutes after %llu: a lost wake-up\n",
                   static_cast<unsigned long long>(seen));
      std::abort();
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0U);
  std::printf("%llu calls of %u ranks, %llu sleeps of rank 0\n",
              static_cast<unsigned long long>(calls), ranks,
              static_cast<unsigned long long>(communicators[0]->stats().sleeps));
}

}  // namespace
}  // namespace nostall::collective
