// Ranks as threads, on real collectives of a node.
#include "sync/gradient_engine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <random>
#include <regex>

#include "../forked.h"
#include "base/activity.h"
#include "base/error.h"
#include "base/log.h"
#include "sync/convert.h"

namespace nostall::sync {
namespace {

using namespace std::chrono_literals;
using collective::DataType;

std::string fresh_job() {
  static std::atomic<int> number{0};
  return "sync test " + std::to_string(::getpid()) + " " + std::to_string(number++);
}

std::vector<TensorSpec> model(size_t n, DataType wire = DataType::float32) {
  std::vector<TensorSpec> tensors;
  for (size_t i = 0; i < n; ++i) {
    tensors.push_back({"layer" + std::to_string(i), (i * 37) % 500 + 1, DataType::float32, wire});
  }
  return tensors;
}

using Body = std::function<void(GradientEngine&, uint32_t rank)>;
using Errors = std::vector<std::string>;
using Wrap = std::function<std::unique_ptr<Collectives>(std::unique_ptr<Collectives>)>;

Errors run(uint32_t ranks, const GradientOptions& config,
           const std::function<std::vector<TensorSpec>(uint32_t)>& tensors, const Body& body,
           std::chrono::nanoseconds timeout = 30s, const Wrap& wrap = std::identity()) {
  const std::string job = fresh_job();
  Errors errors(ranks);
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        NodeCollectivesConfig node;
        node.job = job;
        node.rank = r;
        node.ranks = ranks;
        node.fixed_order = true;
        node.timeout = timeout;
        GradientEngine engine(config, wrap(make_node_collectives(node)), tensors(r));
        body(engine, r);
      } catch (const std::exception& error) {
        errors[r] = error.what();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  return errors;
}

Errors run(uint32_t ranks, const GradientOptions& config, size_t tensors, const Body& body) {
  return run(
      ranks, config, [&](uint32_t) { return model(tensors); }, body);
}

struct Case {
  const char* name;
  GradientOptions config;
};

std::vector<Case> cases() {
  GradientOptions planned;
  planned.threshold_bytes = 3000;
  GradientOptions negotiated = planned;
  negotiated.mode = Mode::negotiated;
  negotiated.cycle = 500us;
  GradientOptions sleep = negotiated;
  sleep.global_sleep_every = 1;
  GradientOptions nonblocking = negotiated;
  nonblocking.nonblocking = true;
  GradientOptions both = nonblocking;
  both.global_sleep_every = 3;
  return {{"planned", planned},
          {"negotiated", negotiated},
          {"global_sleep", sleep},
          {"nonblocking", nonblocking},
          {"both", both}};
}

class Modes : public testing::TestWithParam<Case> {};

float value_of(uint32_t rank, uint32_t tensor, uint64_t i, int step) {
  return static_cast<float>((rank + 1) * 3 + tensor * 7 + i % 11 + static_cast<uint64_t>(step));
}

TEST_P(Modes, GradientsAreTheMeanWhateverTheOrder) {
  for (const uint32_t ranks : {1u, 2u, 4u}) {
    const Errors errors =
        run(ranks, GetParam().config, 40, [&](GradientEngine& engine, uint32_t rank) {
          std::mt19937 random(rank);
          const auto specs = engine.tensors();
          std::vector<std::vector<float>> gradients(specs.size());
          std::vector<uint32_t> order(specs.size());
          std::iota(order.begin(), order.end(), 0);
          for (int step = 0; step < 20; ++step) {
            std::shuffle(order.begin(), order.end(), random);
            for (const uint32_t t : order) {
              gradients[t].resize(specs[t].count);
              for (uint64_t i = 0; i < specs[t].count; ++i) {
                gradients[t][i] = value_of(rank, t, i, step);
              }
              engine.submit(t, gradients[t].data());
            }
            engine.wait();
            for (uint32_t t = 0; t < specs.size(); ++t) {
              for (uint64_t i = 0; i < specs[t].count; ++i) {
                float expected = 0;
                for (uint32_t r = 0; r < ranks; ++r) {
                  expected += value_of(r, t, i, step) * (1.0f / static_cast<float>(ranks));
                }
                ASSERT_FLOAT_EQ(gradients[t][i], expected) << "tensor " << t << " element " << i;
              }
            }
          }
          const GradientStats stats = engine.stats();
          EXPECT_EQ(stats.steps, 20u);
          EXPECT_EQ(stats.tensors, 800u);
          if (engine.stats().cycles == 0) {
            EXPECT_LT(stats.reductions, 800u);  // fused
          }
        });
    EXPECT_EQ(errors, Errors(ranks));
  }
}

TEST_P(Modes, AbsentGradientsAreZerosAndAllRanksKnow) {
  const Errors errors = run(3, GetParam().config, 6, [](GradientEngine& engine, uint32_t rank) {
    for (int step = 0; step < 5; ++step) {
      std::vector<std::vector<float>> gradients;
      for (const TensorSpec& spec : engine.tensors()) gradients.emplace_back(spec.count, 3.0f);
      for (uint32_t t = 0; t < 6; ++t) {
        // Tensor t comes from ranks below t; no rank has tensor 0.
        engine.submit(t, gradients[t].data(), rank < t);
      }
      engine.wait();
      EXPECT_EQ(engine.contributors(), (std::vector<uint32_t>{0, 1, 2, 3, 3, 3}));
      for (uint32_t t = 0; t < 6; ++t) {
        EXPECT_FLOAT_EQ(gradients[t].back(), static_cast<float>(std::min(t, 3u)));
      }
    }
  });
  EXPECT_EQ(errors, Errors(3));
}

TEST_P(Modes, ManyThreadsMaySubmit) {
  const Errors errors = run(2, GetParam().config, 64, [](GradientEngine& engine, uint32_t) {
    std::vector<std::vector<float>> gradients;
    for (const TensorSpec& spec : engine.tensors()) gradients.emplace_back(spec.count);
    for (int step = 0; step < 10; ++step) {
      for (auto& g : gradients) std::fill(g.begin(), g.end(), 2.0f);
      std::vector<std::thread> threads;
      for (uint32_t k = 0; k < 4; ++k) {
        threads.emplace_back([&, k] {
          for (uint32_t t = k; t < 64; t += 4) engine.submit(t, gradients[t].data());
        });
      }
      for (std::thread& t : threads) t.join();
      engine.wait();
      for (const auto& g : gradients) EXPECT_EQ(g.front(), 2.0f);
    }
  });
  EXPECT_EQ(errors, Errors(2));
}

// What can wait writes in the forward pass, when no gradient is under way.
TEST_P(Modes, AStepIsAnActivityFromItsFirstGradientToItsLastSum) {
  const Errors errors = run(2, GetParam().config, 3, [&](GradientEngine& engine, uint32_t) {
    std::vector<std::vector<float>> gradients;
    for (const TensorSpec& spec : engine.tensors()) gradients.emplace_back(spec.count);
    for (int step = 0; step < 3; ++step) {
      engine.submit(0, gradients[0].data());
      EXPECT_FALSE(Activity::quiet(0s));
      engine.submit(1, gradients[1].data());
      engine.submit(2, gradients[2].data());
      engine.wait();
    }
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  EXPECT_TRUE(Activity::quiet(0s));
}

TEST_P(Modes, NarrowTypesTravel) {
  for (const DataType wire : {DataType::float16, DataType::bfloat16}) {
    const Errors errors = run(
        2, GetParam().config, [&](uint32_t) { return model(5, wire); },
        [](GradientEngine& engine, uint32_t rank) {
          std::vector<std::vector<float>> gradients;
          for (const TensorSpec& spec : engine.tensors()) {
            gradients.emplace_back(spec.count, rank == 0 ? 0.5f : -3.0f);
          }
          for (uint32_t t = 0; t < 5; ++t) engine.submit(t, gradients[t].data());
          engine.wait();
          for (const auto& g : gradients) EXPECT_EQ(g.front(), -1.25f);
        });
    EXPECT_EQ(errors, Errors(2));
  }
}

TEST_P(Modes, ARankThatLeavesEndsTheOthers) {
  const Errors errors = run(2, GetParam().config, 3, [](GradientEngine& engine, uint32_t rank) {
    if (rank == 1) return;  // closes its engine
    std::vector<std::vector<float>> gradients;
    for (const TensorSpec& spec : engine.tensors()) gradients.emplace_back(spec.count);
    for (uint32_t t = 0; t < 3; ++t) engine.submit(t, gradients[t].data());
    engine.wait();
  });
  EXPECT_NE(errors[0], "");
  EXPECT_EQ(errors[1], "");
}

TEST_P(Modes, ATensorThatNeverComesIsNamed) {
  GradientOptions config = GetParam().config;
  config.timeout = 3s;
  const bool planned = config.mode == Mode::planned;
  const char* error =
      planned ? "rank 1 did not submit layer1 within" : "rank 1 has not submitted layer1";
  // On a busy machine another one may not be in time either, and is named too.
  Errors errors;
  std::string both;
  for (int attempt = 0; attempt < 5 && both.find(error) == std::string::npos; ++attempt) {
    errors = run(
        2, config, [](uint32_t) { return model(3); },
        [](GradientEngine& engine, uint32_t rank) {
          std::vector<std::vector<float>> gradients;
          for (const TensorSpec& spec : engine.tensors()) gradients.emplace_back(spec.count);
          for (uint32_t t = 0; t < 3; ++t) {
            if (rank == 0 || t != 1) engine.submit(t, gradients[t].data());
          }
          engine.wait_for(1);
        });
    both = errors[0] + "\n" + errors[1];
  }
  EXPECT_NE(both.find(error), std::string::npos) << both;
  EXPECT_NE(errors[0], "");
  EXPECT_NE(errors[1], "");
}

// What is late is named while it is waited for: rank 2 submits it when it has been.
TEST_P(Modes, ATensorThatIsLateIsNamed) {
  GradientOptions config = GetParam().config;
  config.warn = 100ms;
  config.timeout = 3600s;
  for (const uint32_t late : {0u, 1u}) {
    std::mutex mutex;
    std::string logged;
    set_log_sink([&](LogLevel, const std::string& message) {
      const std::scoped_lock lock(mutex);
      logged += message + "\n";
    });
    // Where the machine is slow other warnings come too: of rank 1, or from rank 2 itself.
    const std::regex named("rank ([01], )*2( has|, which has) not submitted .*layer" +
                           std::to_string(late));
    const auto warned = [&] {
      const std::scoped_lock lock(mutex);
      return std::regex_search(logged, named);
    };
    const Errors errors = run(3, config, 3, [&](GradientEngine& engine, uint32_t rank) {
      std::vector<std::vector<float>> gradients;
      for (const TensorSpec& spec : engine.tensors()) gradients.emplace_back(spec.count, 1.0f);
      const auto end = std::chrono::steady_clock::now() + 60s;  // without a warning it fails below
      for (uint32_t t = 0; t < 3; ++t) {
        while (rank == 2 && t == late && !warned() && std::chrono::steady_clock::now() < end) {
          std::this_thread::sleep_for(10ms);
        }
        engine.submit(t, gradients[t].data());
      }
      engine.wait();  // late, but in time
      for (const auto& g : gradients) EXPECT_FLOAT_EQ(g.front(), 1.0f);
    });
    set_log_sink(nullptr);
    EXPECT_EQ(errors, Errors(3));
    EXPECT_TRUE(warned()) << logged;
  }
}

TEST_P(Modes, AnEngineMayCloseWithWorkInFlight) {
  for (const bool all : {true, false}) {
    std::atomic<uint32_t> submitted{0};
    const Errors errors = run(3, GetParam().config, 30, [&](GradientEngine& engine, uint32_t rank) {
      // Beyond the engine: it may write to them until it is closed.
      static thread_local std::vector<std::vector<float>> gradients;
      gradients.clear();
      for (const TensorSpec& spec : engine.tensors()) gradients.emplace_back(spec.count);
      for (uint32_t t = 0; t < 30; ++t) engine.submit(t, gradients[t].data());
      ++submitted;
      // To submit to ranks of which one has closed is an error.
      while (submitted < 3) std::this_thread::sleep_for(1ms);
      if (all || rank == 1) return;
      engine.wait();  // with the sums, if rank 1 got that far, or with an error
    });
    EXPECT_EQ(submitted, 3u);
    EXPECT_EQ(errors[1], "");
    if (all) {
      EXPECT_EQ(errors, Errors(3));
    }
  }
}

TEST_P(Modes, ANotANumberReachesAllRanksAlike) {
  const Errors errors = run(3, GetParam().config, 4, [](GradientEngine& engine, uint32_t rank) {
    std::vector<std::vector<float>> gradients;
    for (const TensorSpec& spec : engine.tensors()) gradients.emplace_back(spec.count, 1.0f);
    if (rank == 1) gradients[2].back() = NAN;
    for (uint32_t t = 0; t < 4; ++t) engine.submit(t, gradients[t].data());
    engine.wait();
    EXPECT_TRUE(std::isnan(gradients[2].back()));
    EXPECT_FLOAT_EQ(gradients[2].front(), 1.0f);
    EXPECT_FLOAT_EQ(gradients[3].back(), 1.0f);
  });
  EXPECT_EQ(errors, Errors(3));
}

TEST_P(Modes, ANotANumberIsNamedWhereAskedFor) {
  GradientOptions config = GetParam().config;
  config.check_finite = true;
  // After an error they are read until the engine is gone.
  std::vector<std::vector<float>> memory[2];
  const Errors errors = run(2, config, 4, [&memory](GradientEngine& engine, uint32_t rank) {
    std::vector<std::vector<float>>& gradients = memory[rank];
    for (const TensorSpec& spec : engine.tensors()) gradients.emplace_back(spec.count, 1.0f);
    if (rank == 1) gradients[2].back() = NAN;
    for (uint32_t t = 0; t < 4; ++t) engine.submit(t, gradients[t].data());
    engine.wait();
  });
  EXPECT_NE(errors[1].find("gradient layer2 of rank 1 is not finite"), std::string::npos)
      << errors[1];
  EXPECT_NE(errors[0], "");
}

TEST_P(Modes, TwoEnginesInOneProcess) {
  const std::string job = fresh_job();
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      std::vector<std::unique_ptr<GradientEngine>> engines;
      for (int k = 0; k < 2; ++k) {
        NodeCollectivesConfig node;
        node.job = job + (k == 0 ? " first" : " second");
        node.rank = r;
        node.ranks = 2;
        node.timeout = 30s;
        engines.push_back(std::make_unique<GradientEngine>(GetParam().config,
                                                           make_node_collectives(node), model(12)));
      }
      std::vector<std::vector<float>> gradients[2];
      for (int step = 0; step < 10; ++step) {
        for (int k = 0; k < 2; ++k) {
          gradients[k].clear();
          for (const TensorSpec& spec : engines[0]->tensors()) {
            gradients[k].emplace_back(spec.count, static_cast<float>(step + 10 * k));
          }
        }
        // One tensor each in turns; the ranks begin with different engines.
        for (uint32_t i = 0; i < 24; ++i) {
          const uint32_t k = (i + r) % 2;
          engines[k]->submit(i / 2, gradients[k][i / 2].data());
        }
        for (uint32_t i = 0; i < 2; ++i) engines[(i + r) % 2]->wait();
        for (int k = 0; k < 2; ++k) {
          for (const auto& g : gradients[k]) EXPECT_EQ(g.back(), static_cast<float>(step + 10 * k));
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

INSTANTIATE_TEST_SUITE_P(All, Modes, testing::ValuesIn(cases()),
                         [](const auto& mode) { return std::string(mode.param.name); });

TEST(GradientEngine, RanksWithOtherTypesAreRefused) {
  for (const bool wire : {false, true}) {
    const Errors errors = run(
        2, {},
        [&](uint32_t rank) {
          auto tensors = model(4);
          if (rank == 1) (wire ? tensors[3].wire : tensors[3].type) = DataType::bfloat16;
          return tensors;
        },
        [](GradientEngine&, uint32_t) {});
    for (const std::string& error : errors) {
      EXPECT_NE(error.find("layer3"), std::string::npos) << error;
      EXPECT_NE(error.find("bfloat16"), std::string::npos) << error;
    }
  }
}

TEST(GradientEngine, RanksWithMoreTensorsAreRefused) {
  const Errors errors = run(
      2, {}, [](uint32_t rank) { return model(3 + rank); }, [](GradientEngine&, uint32_t) {});
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("layer3"), std::string::npos) << error;
  }
}

TEST(GradientEngine, RanksWithOtherTensorsAreRefused) {
  const Errors errors = run(
      2, {},
      [](uint32_t rank) {
        auto tensors = model(4);
        if (rank == 1) tensors[2].count = 9999;
        return tensors;
      },
      [](GradientEngine&, uint32_t) {});
  EXPECT_NE(errors[0].find("layer2"), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("9999"), std::string::npos) << errors[0];
}

TEST(GradientEngine, RanksWithOtherPlansAreRefused) {
  const Errors errors = run(2, {}, 4, [](GradientEngine& engine, uint32_t rank) {
    const std::vector<uint32_t> order{rank, 1 - rank};
    engine.set_plan(fuse(order, engine.tensors(), 1));
  });
  EXPECT_NE(errors[0].find("another plan"), std::string::npos) << errors[0];
}

TEST(GradientEngine, PlansChangeBetweenSteps) {
  const Errors errors = run(2, {}, 8, [](GradientEngine& engine, uint32_t rank) {
    std::vector<std::vector<float>> gradients;
    for (const TensorSpec& spec : engine.tensors()) gradients.emplace_back(spec.count);
    for (uint32_t step = 0; step < 16; ++step) {
      std::vector<uint32_t> order{rank == 0 ? step % 8 : 7 - step % 8};
      const auto agreed = engine.broadcast(std::as_bytes(std::span(order)), 0);
      ASSERT_EQ(agreed.size(), sizeof(uint32_t));
      std::memcpy(order.data(), agreed.data(), agreed.size());
      EXPECT_EQ(order, std::vector<uint32_t>{step % 8});
      engine.set_plan(fuse(order, engine.tensors(), step * 100));
      for (auto& g : gradients) std::fill(g.begin(), g.end(), static_cast<float>(step));
      for (uint32_t t = 0; t < 8; ++t) engine.submit(t, gradients[t].data());
      EXPECT_THROW(engine.set_plan(fuse(order, engine.tensors(), 1)), Error);
      engine.wait();
      for (const auto& g : gradients) EXPECT_EQ(g.front(), static_cast<float>(step));
    }
  });
  EXPECT_EQ(errors, Errors(2));
}

// A node's collectives, whose memory may fail, and whose calls that wait are told of.
class Failing : public Collectives {
 public:
  Failing(
      std::unique_ptr<Collectives> real, std::function<void()> before_memory,
      std::function<void()> before_wait = [] {})
      : real_(std::move(real)),
        before_memory_(std::move(before_memory)),
        before_wait_(std::move(before_wait)) {}
  uint32_t rank() const override { return real_->rank(); }
  uint32_t ranks() const override { return real_->ranks(); }
  void* allocate(uint64_t bytes) override {
    before_memory_();
    return real_->allocate(bytes);
  }
  void release(void* data) noexcept override { real_->release(data); }
  void allreduce(void* data, uint64_t count, DataType type) override {
    before_wait_();
    real_->allreduce(data, count, type);
  }
  void all_and(std::span<uint64_t> words) override { real_->all_and(words); }
  int64_t all_min(int64_t value) override { return real_->all_min(value); }
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> bytes) override {
    before_wait_();
    return real_->all_gather(bytes);
  }
  std::vector<std::byte> broadcast(std::span<const std::byte> bytes, uint32_t root) override {
    return real_->broadcast(bytes, root);
  }
  void start_and(std::span<uint64_t> words) override { real_->start_and(words); }
  bool test() override { return real_->test(); }
  void end(const Error& why) noexcept override { real_->end(why); }
  int64_t own_cpu_ns() const override { return real_->own_cpu_ns(); }

 private:
  std::unique_ptr<Collectives> real_;
  std::function<void()> before_memory_, before_wait_;
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "none";
}

// Far beyond what stop() may take on any machine, far below the timeout that it must not wait for.
constexpr auto kHang = 100s;
constexpr auto kLong = 3600s;

TEST_P(Modes, AnEngineThatStopsWaitsForNoRankThatDoesNotCome) {
  std::atomic<bool> stopped{false}, reduces{false};
  const bool planned = GetParam().config.mode == Mode::planned;
  const auto wrap = [&](std::unique_ptr<Collectives> real) -> std::unique_ptr<Collectives> {
    if (real->rank() == 1) return real;
    return std::make_unique<Failing>(
        std::move(real), [] {}, [&] { reduces = true; });
  };
  const Errors errors = run(
      2, GetParam().config, [](uint32_t) { return model(3); },
      [&](GradientEngine& engine, uint32_t rank) {
        // Beyond the engine: it may write to them until it is closed.
        static thread_local std::vector<std::vector<float>> gradients;
        gradients.clear();
        for (const TensorSpec& spec : engine.tensors()) gradients.emplace_back(spec.count);
        while (rank == 1 && !stopped) std::this_thread::sleep_for(1ms);
        if (rank == 0) {
          reduces = !planned;  // what negotiates begins no reduction that other ranks lack
          for (uint32_t t = 0; t < 3; ++t) engine.submit(t, gradients[t].data());
          while (!reduces) std::this_thread::sleep_for(1ms);
          const auto begin = std::chrono::steady_clock::now();
          std::jthread waits([&] { EXPECT_NE(error_of([&] { engine.wait(); }), "none"); });
          std::jthread also([&] { engine.stop(); });
          engine.stop();
          EXPECT_LT(std::chrono::steady_clock::now() - begin, kHang);
          stopped = true;
          return;
        }
        for (uint32_t t = 0; t < 3; ++t) engine.submit(t, gradients[t].data());
        engine.wait();
      },
      kLong, wrap);
  EXPECT_EQ(errors[0], "");
  EXPECT_NE(errors[1].find("closed its gradient engine"), std::string::npos) << errors[1];
}

TEST(GradientEngine, AStopEndsWaitsForWhatIsNotSubmittedAndCallsThatWaitForOtherRanks) {
  std::atomic<bool> stopped{false}, gathers{false};
  const auto wrap = [&](std::unique_ptr<Collectives> real) -> std::unique_ptr<Collectives> {
    if (real->rank() == 1) return real;
    return std::make_unique<Failing>(
        std::move(real), [] {}, [&] { gathers = true; });
  };
  const auto body = [&](GradientEngine& engine, uint32_t rank) {
    while (rank == 1 && !stopped) std::this_thread::sleep_for(1ms);
    if (rank == 1) return;
    const auto begin = std::chrono::steady_clock::now();
    std::jthread waits([&] {
      EXPECT_NE(error_of([&] { engine.wait_for(1); }).find("engine was stopped"),
                std::string::npos);
    });
    gathers = false;
    std::jthread agrees([&] {
      EXPECT_NE(error_of([&] { engine.all_gather({}); }).find("closed its gradient engine"),
                std::string::npos);
    });
    while (!gathers) std::this_thread::sleep_for(1ms);
    engine.stop();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kHang);
    EXPECT_NE(error_of([&] { engine.broadcast({}, 0); }).find("was stopped"), std::string::npos);
    stopped = true;
  };
  const Errors errors = run(
      2, {}, [](uint32_t) { return model(3); }, body, kLong, wrap);
  EXPECT_EQ(errors, Errors(2));
}

TEST(GradientEngine, APlanThatOneRankHasNoMemoryForEndsAllRanks) {
  std::atomic<int> left{1 << 30};  // of rank 1's pieces of memory
  const auto wrap = [&](std::unique_ptr<Collectives> real) -> std::unique_ptr<Collectives> {
    if (real->rank() == 0) return real;
    return std::make_unique<Failing>(std::move(real), [&] {
      if (left.fetch_sub(1) <= 0) throw std::bad_alloc();
    });
  };
  const auto body = [&](GradientEngine& engine, uint32_t rank) {
    std::vector<std::vector<float>> gradients(12, std::vector<float>(500, 1.0f));
    for (uint32_t t = 0; t < 12; ++t) engine.submit(t, gradients[t].data());
    engine.wait();
    engine.all_gather({});
    left = 3;  // in the middle of the plan
    std::vector<uint32_t> order(12);
    std::iota(order.begin(), order.end(), 0);
    const auto message_of = [&](const std::function<void()>& call) -> std::string {
      try {
        call();
      } catch (const std::exception& error) {
        return error.what();
      }
      return "none";
    };
    const std::string first =
        message_of([&] { engine.set_plan(fuse(order, engine.tensors(), 1)); });
    EXPECT_EQ(first, rank == 1 ? std::bad_alloc().what()
                               : "rank 1 cannot follow the new plan of reductions: " +
                                     std::string(std::bad_alloc().what()));
    EXPECT_EQ(message_of([&] { engine.submit(3, gradients[3].data()); }), first);
    EXPECT_EQ(message_of([&] { engine.submit_in_place(11, gradients[11].data()); }), first);
    EXPECT_EQ(message_of([&] { engine.wait(); }), first);
    EXPECT_EQ(message_of([&] { engine.wait_for(0); }), first);
    EXPECT_EQ(message_of([&] { engine.all_gather({}); }), first);
    EXPECT_EQ(message_of([&] { engine.set_plan(fuse(order, engine.tensors(), 1 << 20)); }), first);
  };
  GradientOptions config;
  config.threshold_bytes = 3000;
  config.warn = 4ms;  // the progress thread looks about meanwhile
  EXPECT_EQ(run(
                2, config, [](uint32_t) { return model(12); }, body, 30s, wrap),
            Errors(2));
}

TEST(GradientEngine, GradientsTravelFromTheHeapWhereSharedMemoryIsFull) {
  std::atomic<int> refused{0};
  const auto wrap = [&](std::unique_ptr<Collectives> real) -> std::unique_ptr<Collectives> {
    return std::make_unique<Failing>(std::move(real), [&] {
      ++refused;
      throw io_error("cannot allocate 1 byte of", "/dev/shm/full", ENOSPC);
    });
  };
  const auto body = [&](GradientEngine& engine, uint32_t rank) {
    std::vector<std::shared_ptr<void>> held;
    for (int step = 0; step < 3; ++step) {
      std::vector<std::shared_ptr<void>> places;
      for (uint32_t t = 0; t < 12; ++t) {
        const std::vector<float> mine(500, static_cast<float>(rank + t));
        places.push_back(engine.submit_in_place(t, mine.data()));
      }
      engine.wait();
      for (uint32_t t = 0; t < 12; ++t) {
        const auto* const mean = static_cast<const float*>(places[t].get());
        EXPECT_EQ(mean[0], static_cast<float>(t) + 0.5f);
      }
      held = std::move(places);  // over the next step, which needs other memory
    }
  };
  GradientOptions config;
  config.threshold_bytes = 3000;
  EXPECT_EQ(run(
                2, config, [](uint32_t) { return model(12); }, body, 30s, wrap),
            Errors(2));
  EXPECT_GT(refused.load(), 4);
}

TEST(GradientEngine, WhatStaysInABufferIsItsHoldersUntilItIsLetGo) {
  GradientOptions config;
  config.threshold_bytes = 30'000;  // groups of two
  const auto tensors = [](uint32_t) {
    return std::vector<TensorSpec>(4, {"t", 3001, DataType::float32, DataType::float32});
  };
  const Body body = [&](GradientEngine& engine, uint32_t rank) {
    std::vector<float> gradient(3001);
    using Place = std::shared_ptr<void>;
    const auto step = [&](float value) {
      std::vector<Place> places;
      for (uint32_t t = 0; t < 4; ++t) {
        std::fill(gradient.begin(), gradient.end(), value + static_cast<float>(rank + t));
        const bool present = t != 2 || rank == 1;
        // The same memory for all: it is read before the call returns.
        places.push_back(engine.submit_in_place(t, present ? gradient.data() : nullptr, present));
      }
      engine.wait();
      return places;
    };
    const auto holds = [](const Place& place, float value) {
      const auto* begin = static_cast<const float*>(place.get());
      return std::all_of(begin, begin + 3001, [&](float v) { return v == value; });
    };
    std::vector<Place> first = step(10);
    ASSERT_TRUE(holds(first[0], 10.5f) && holds(first[1], 11.5f));
    ASSERT_TRUE(holds(first[2], 6.5f) && holds(first[3], 13.5f));
    EXPECT_EQ(engine.contributors()[2], 1u);
    const void* const address = first[0].get();
    // Held: what it says stays, and goes on in other memory.
    std::vector<Place> second = step(20);
    ASSERT_TRUE(holds(first[0], 10.5f) && holds(first[3], 13.5f));
    ASSERT_TRUE(holds(second[0], 20.5f) && holds(second[2], 11.5f));
    // One of a group is enough; the other group's memory is free again.
    const void* const other = first[3].get();
    first.resize(1);
    const void* const latest = second[3].get();
    second.clear();
    std::vector<Place> third = step(30);
    ASSERT_TRUE(holds(first[0], 10.5f));
    EXPECT_NE(third[0].get(), address);
    EXPECT_TRUE(third[3].get() == other || third[3].get() == latest);
    // A plan that changes takes nothing away.
    ReductionPlan plan;
    plan.groups = {{0, 1, 2, 3}};
    engine.set_plan(plan);
    ASSERT_TRUE(holds(third[1], 31.5f) && holds(first[0], 10.5f));
    first.clear();
    third.clear();
    const std::vector<Place> fourth = step(40);
    const std::vector<Place> fifth = step(50);
    ASSERT_TRUE(holds(fourth[3], 43.5f) && holds(fifth[3], 53.5f));
  };
  EXPECT_EQ(run(2, config, tensors, body), Errors(2));
}

TEST(GradientEngine, WhatStaysOutlivesTheEngine) {
  std::vector<std::shared_ptr<void>> kept(2);
  std::vector<float> ones(5000, 1.0f);
  const auto tensors = [](uint32_t) {
    return std::vector<TensorSpec>{{"t", 5000, DataType::float32, DataType::float32}};
  };
  EXPECT_EQ(run(2, {}, tensors,
                [&](GradientEngine& engine, uint32_t rank) {
                  kept[rank] = engine.submit_in_place(0, ones.data());
                  engine.wait();
                }),
            Errors(2));
  for (const auto& place : kept) EXPECT_EQ(static_cast<const float*>(place.get())[4999], 1.0f);
  // A forked child has zeros of its own in these places.
  EXPECT_EQ(status_of_child([&] {
              bool zero = true;
              for (const auto& place : kept) {
                auto* const values = static_cast<float*>(place.get());
                for (size_t i = 0; i < ones.size(); ++i) zero = zero && values[i] == 0.0f;
                values[4999] = 2.0f;
              }
              kept.clear();
              return zero ? 0 : 1;
            }),
            0);
  for (const auto& place : kept) EXPECT_EQ(static_cast<const float*>(place.get())[4999], 1.0f);
}

TEST(GradientEngine, NothingStaysWhereGroupsOrTypesChange) {
  GradientOptions negotiated;
  negotiated.mode = Mode::negotiated;
  const auto narrow = [](uint32_t) { return model(1, DataType::float16); };
  std::vector<float> data(500);
  const Body body = [&](GradientEngine& engine, uint32_t) {
    engine.submit_in_place(0, data.data());
  };
  EXPECT_NE(run(1, negotiated, 1, body)[0].find("mode planned"), std::string::npos);
  EXPECT_NE(run(1, {}, narrow, body)[0].find("cannot stay in the buffer"), std::string::npos);
}

TEST(GradientEngine, WrongCallsAreRefusedAndNamed) {
  GradientOptions config;
  config.check_finite = true;
  const Errors errors = run(1, config, 3, [](GradientEngine& engine, uint32_t) {
    std::vector<float> gradient(600, 1.0f);
    engine.submit(0, gradient.data());
    try {
      engine.submit(0, gradient.data());
      FAIL();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("layer0"), std::string::npos);
    }
    EXPECT_THROW(engine.submit(3, gradient.data()), Error);
    try {
      engine.wait();
      FAIL();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("layer1, layer2"), std::string::npos);
    }
    gradient[5] = NAN;
    try {
      engine.submit(1, gradient.data());
      FAIL();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("layer1 of rank 0"), std::string::npos);
    }
    EXPECT_EQ(status_of_child([&] {
                try {
                  engine.submit(1, gradient.data(), false);
                } catch (const Error& error) {
                  return error.kind() == ErrorKind::usage ? 7 : 8;
                }
                return 9;
              }),
              7);
  });
  EXPECT_EQ(errors, Errors(1));
}

TEST(GradientEngine, KeepsTheProgressThreadOnItsCores) {
  cpu_set_t all;
  ASSERT_EQ(::sched_getaffinity(0, sizeof all, &all), 0);
  GradientOptions config;
  config.cores = {0};
  if (CPU_COUNT(&all) < 2) {
    config.cores = {0};
    const Errors errors = run(1, config, 1, [](GradientEngine& engine, uint32_t) {
      std::vector<float> gradient(1);
      engine.submit(0, gradient.data());
      engine.wait();
    });
    EXPECT_NE(errors[0].find("leave a core"), std::string::npos);
    return;
  }
  const Errors errors = run(1, config, 1, [&](GradientEngine& engine, uint32_t) {
    std::vector<float> gradient(1, 4.0f);
    engine.submit(0, gradient.data());
    engine.wait();
    cpu_set_t mine;
    ASSERT_EQ(::sched_getaffinity(0, sizeof mine, &mine), 0);
    EXPECT_FALSE(CPU_ISSET(0, &mine));
    EXPECT_EQ(CPU_COUNT(&mine), CPU_COUNT(&all) - 1);
  });
  EXPECT_EQ(errors, Errors(1));
  cpu_set_t after;
  ASSERT_EQ(::sched_getaffinity(0, sizeof after, &after), 0);
  EXPECT_TRUE(CPU_EQUAL(&after, &all));
}

TEST(Convert, RoundsToNearestEvenAndKeepsWhatFits) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    float wide = 0;
    scale_into(&wide, DataType::float32, &half, DataType::float16, 1, 1.0);
    uint16_t back = 0;
    scale_into(&back, DataType::float16, &wide, DataType::float32, 1, 1.0);
    if (std::isnan(wide)) {
      EXPECT_EQ(back & 0x7e00, 0x7e00);
    } else {
      ASSERT_EQ(back, half);
    }
  }
  const std::vector<std::pair<float, uint16_t>> halves{
      {65519.0f, 0x7bff},      {65520.0f, 0x7c00},      {2049.0f, 0x6800},      {2051.0f, 0x6802},
      {5.9604645e-8f, 0x0001}, {2.9802322e-8f, 0x0000}, {8.9406967e-8f, 0x0002}};
  for (const auto& [value, expected] : halves) {
    uint16_t got = 0;
    scale_into(&got, DataType::float16, &value, DataType::float32, 1, 1.0);
    EXPECT_EQ(got, expected) << value;
  }
  const float third = 1.0f / 3.0f;
  uint16_t brain = 0;
  scale_into(&brain, DataType::bfloat16, &third, DataType::float32, 1, 1.0);
  EXPECT_EQ(brain, 0x3eab);
}

}  // namespace
}  // namespace nostall::sync
