// Random submissions with random delays, from two threads a rank, while plans change.
//
//   NOSTALL_STRESS_SUBMISSIONS=1000000 build/dev/tests/native/test_sync --gtest_filter='*Stress*'
//
// is the long form, in each mode; CI does a part of it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>

#include "base/error.h"
#include "sync/gradient_engine.h"

namespace nostall::sync {
namespace {

using namespace std::chrono_literals;

constexpr uint32_t kRanks = 3, kTensors = 24, kSubmitters = 2;
constexpr uint64_t kShort = 6'000;
constexpr int kPlanEvery = 40;

uint64_t submissions() {
  const char* text = std::getenv("NOSTALL_STRESS_SUBMISSIONS");
  return text == nullptr ? kShort : std::strtoull(text, nullptr, 10);
}

std::vector<TensorSpec> tensors() {
  std::vector<TensorSpec> specs;
  for (uint32_t t = 0; t < kTensors; ++t) {
    specs.push_back({"layer" + std::to_string(t), t * 37 % 200 + 1});
  }
  return specs;
}

// What every rank can tell of every other one.
bool present(uint64_t step, uint32_t rank, uint32_t t) {
  return (step * 2654435761u + rank * 40503u + t * 97u) % 8 != 0;
}
float value(uint64_t step, uint32_t rank, uint32_t t) {
  return static_cast<float>(step % 97 + rank * 3 + t % 5);
}

// Mostly none, often short, sometimes longer than a negotiated cycle.
void delay(std::mt19937& random) {
  const uint32_t die = random() % 256;
  if (die < 12) std::this_thread::sleep_for(std::chrono::microseconds(random() % 150));
  if (die == 12) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
}

class Rank {
 public:
  Rank(GradientEngine& engine, uint32_t rank)
      : engine_(engine), rank_(rank), random_(rank * 77 + 1) {
    for (const TensorSpec& spec : engine.tensors()) gradients_.emplace_back(spec.count);
    order_.resize(kTensors);
    std::iota(order_.begin(), order_.end(), 0);
  }

  void run(uint64_t steps, bool planned) {
    std::barrier<> turn(kSubmitters);
    std::thread other([&] {
      std::mt19937 random(rank_ * 31 + 7);
      for (uint64_t step = 0; step < steps; ++step) {
        turn.arrive_and_wait();
        submit(step, 1, random);
        turn.arrive_and_wait();
      }
    });
    for (uint64_t step = 0; step < steps; ++step) {
      if (planned && step % kPlanEvery == 0) change_plan(step);
      std::shuffle(order_.begin(), order_.end(), random_);
      turn.arrive_and_wait();
      submit(step, 0, random_);
      turn.arrive_and_wait();
      if (random_() % 4 == 0) engine_.wait_for(random_() % kTensors);
      engine_.wait();
      check(step);
    }
    other.join();
  }

 private:
  void submit(uint64_t step, uint32_t submitter, std::mt19937& random) {
    for (uint32_t i = submitter; i < kTensors; i += kSubmitters) {
      const uint32_t t = order_[i];
      std::fill(gradients_[t].begin(), gradients_[t].end(), value(step, rank_, t));
      delay(random);
      engine_.submit(t, gradients_[t].data(), present(step, rank_, t));
    }
  }

  // The same on all ranks: another order, other groups.
  void change_plan(uint64_t step) {
    std::mt19937 common(static_cast<uint32_t>(step));
    std::vector<uint32_t> order(kTensors);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), common);
    engine_.set_plan(fuse(order, engine_.tensors(), common() % 4000));
  }

  void check(uint64_t step) {
    const std::vector<uint32_t> had = engine_.contributors();
    for (uint32_t t = 0; t < kTensors; ++t) {
      float sum = 0;
      uint32_t ranks = 0;
      for (uint32_t r = 0; r < kRanks; ++r) {
        if (!present(step, r, t)) continue;
        sum += value(step, r, t);
        ++ranks;
      }
      ASSERT_EQ(had[t], ranks) << "step " << step << ", tensor " << t;
      for (const float g : gradients_[t]) ASSERT_EQ(g, sum) << "step " << step << ", tensor " << t;
    }
  }

  GradientEngine& engine_;
  const uint32_t rank_;
  std::mt19937 random_;
  std::vector<std::vector<float>> gradients_;
  std::vector<uint32_t> order_;
};

struct Case {
  const char* name;
  bool planned, nonblocking;
  uint32_t global_sleep_every;
};

class Stress : public testing::TestWithParam<Case> {};

TEST_P(Stress, EverySumIsRight) {
  const Case& mode = GetParam();
  const uint64_t steps = submissions() / (kRanks * kTensors) + 1;
  const std::string job = "stress " + std::string(mode.name) + " " + std::to_string(::getpid());
  std::vector<std::string> errors(kRanks);
  std::vector<uint64_t> done(kRanks);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      try {
        NodeCollectivesConfig node;
        node.job = job;
        node.rank = r;
        node.ranks = kRanks;
        node.fixed_order = true;
        node.timeout = 100s;
        GradientOptions config;
        config.mode = mode.planned ? Mode::planned : Mode::negotiated;
        config.nonblocking = mode.nonblocking;
        config.global_sleep_every = mode.global_sleep_every;
        config.cycle = 300us;
        config.test_sleep = 50us;
        config.threshold_bytes = 2000;
        config.mean = false;
        GradientEngine engine(config, make_node_collectives(node), tensors());
        Rank(engine, r).run(steps, mode.planned);
        done[r] = engine.stats().tensors;
      } catch (const std::exception& error) {
        errors[r] = error.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(errors, std::vector<std::string>(kRanks));
  EXPECT_EQ(done, std::vector<uint64_t>(kRanks, steps * kTensors));
}

INSTANTIATE_TEST_SUITE_P(Modes, Stress,
                         testing::Values(Case{"planned", true, false, 0},
                                         Case{"negotiated", false, false, 0},
                                         Case{"both", false, true, 2}),
                         [](const auto& mode) { return std::string(mode.param.name); });

}  // namespace
}  // namespace nostall::sync
