// Lets one thread run at a time, and explores the schedules of the others.
#include "scheduler.h"

#include <sched.h>

#include <algorithm>
#include <semaphore>
#include <thread>

#include "base/futex.h"

namespace nostall::collective::model {
namespace {

uint64_t next_random(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

struct Choice {
  uint32_t taken = 0, options = 1;
};

// What runs where: one thread at a time, the others wait for their turn.
class Scheduler {
 public:
  Scheduler(size_t threads, const Limits& limits) : limits_(limits), random_(limits.seed) {
    for (size_t i = 0; i < threads; ++i) ranks_.push_back(std::make_unique<Rank>());
  }

  Findings run(const std::vector<Body>& bodies) {
    Findings found;
    std::vector<std::thread> threads;
    for (size_t i = 0; i < ranks_.size(); ++i) {
      threads.emplace_back([this, i, &bodies] { serve(static_cast<uint32_t>(i), bodies[i]); });
    }
    do {
      if (limits_.before) limits_.before();
      run_once();
      ++found.schedules;
      if (deadlock_) {
        ++found.deadlocks;
        found.first = history_;
        break;
      }
      found.exhausted = limits_.seed == 0 && !backtrack();
    } while (!found.exhausted && found.schedules < limits_.schedules);
    ends_ = true;
    for (const auto& rank : ranks_) rank->turn.release();
    for (std::thread& thread : threads) thread.join();
    return found;
  }

  void point(uint32_t me) noexcept {
    if (free_running_.load(std::memory_order_relaxed)) return;
    switch_to(choose(me, true), me);
  }

  // The value was compared without a point in between: no other rank runs.
  void block(uint32_t me, const std::atomic<uint32_t>& word, uint32_t seen) noexcept {
    if (free_running_.load(std::memory_order_relaxed)) {
      ::sched_yield();
      return;
    }
    if (word.load() != seen) return;
    ranks_[me]->waits_for = &word;
    ranks_[me]->state = State::blocked;
    switch_to(choose(me, false), me);
  }

  void wake(const std::atomic<uint32_t>& word) noexcept {
    for (const auto& rank : ranks_) {
      if (rank->state == State::blocked && rank->waits_for == &word) rank->state = State::ready;
    }
  }

 private:
  enum class State { ready, blocked, done };
  struct Rank {
    std::binary_semaphore turn{0};
    State state = State::ready;
    const std::atomic<uint32_t>* waits_for = nullptr;
  };
  static constexpr uint32_t kNone = ~uint32_t{0};

  void run_once() {
    for (const auto& rank : ranks_) rank->state = State::ready;
    free_running_ = deadlock_ = false;
    position_ = 0;
    preemptions_ = 0;
    history_.clear();
    remaining_ = ranks_.size();
    ranks_[choose(kNone, false)]->turn.release();
    all_done_.acquire();
  }

  void serve(uint32_t me, const Body& body);

  void finish(uint32_t me) {
    ranks_[me]->state = State::done;
    if (!free_running_.load()) {
      const uint32_t next = choose(me, false);
      if (next != kNone) ranks_[next]->turn.release();
    }
    if (remaining_.fetch_sub(1) == 1) all_done_.release();
  }

  void switch_to(uint32_t next, uint32_t me) noexcept {
    if (next == me || next == kNone) return;
    ranks_[next]->turn.release();
    ranks_[me]->turn.acquire();
  }

  // The next to run: `me` first if it can, then the others in order. If none can, all run freely.
  uint32_t choose(uint32_t me, bool may_stay) noexcept {
    options_.clear();
    if (may_stay) options_.push_back(me);
    const auto n = static_cast<uint32_t>(ranks_.size());
    for (uint32_t i = 0; i < n; ++i) {
      if ((i != me || !may_stay) && ranks_[i]->state == State::ready) options_.push_back(i);
    }
    if (options_.empty()) {
      const bool blocked = std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) {
        return rank->state == State::blocked;
      });
      if (blocked) release_all(me);
      return kNone;
    }
    uint32_t taken = 0;
    if (limits_.seed != 0) {
      // Stays most of the time, or nothing would ever get far.
      const bool moves = !may_stay || next_random(random_) % 8 == 0;
      taken = moves ? static_cast<uint32_t>(next_random(random_) % options_.size()) : 0;
    } else {
      const bool bound = may_stay && preemptions_ >= limits_.preemptions;
      const uint32_t count = bound ? 1 : static_cast<uint32_t>(options_.size());
      if (position_ == choices_.size()) choices_.push_back({0, count});
      taken = std::min(choices_[position_].taken, count - 1);
      ++position_;
    }
    if (may_stay && taken != 0) ++preemptions_;
    if (options_[taken] != me) history_ += static_cast<char>('0' + options_[taken]);
    return options_[taken];
  }

  void release_all(uint32_t me) noexcept {
    deadlock_ = true;
    free_running_ = true;
    for (uint32_t i = 0; i < ranks_.size(); ++i) {
      if (i != me && ranks_[i]->state == State::blocked) ranks_[i]->turn.release();
    }
  }

  // The next schedule in the order of a depth-first search; false after the last.
  bool backtrack() {
    choices_.resize(std::min(choices_.size(), position_));
    while (!choices_.empty() && choices_.back().taken + 1 >= choices_.back().options) {
      choices_.pop_back();
    }
    if (choices_.empty()) return false;
    ++choices_.back().taken;
    return true;
  }

  const Limits limits_;
  uint64_t random_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<Choice> choices_;
  std::vector<uint32_t> options_;
  size_t position_ = 0;
  uint32_t preemptions_ = 0;
  std::string history_;
  std::atomic<size_t> remaining_{0};
  std::atomic<bool> free_running_{false};
  bool deadlock_ = false, ends_ = false;
  std::binary_semaphore all_done_{0};
};

struct ThisThread {
  Scheduler* scheduler = nullptr;
  uint32_t rank = 0;
  uint64_t delays = 0;  // random state; 0: none
};
thread_local ThisThread here;

void Scheduler::serve(uint32_t me, const Body& body) {
  for (;;) {
    ranks_[me]->turn.acquire();
    if (ends_) return;
    here = {this, me, 0};
    body();
    here = {};
    finish(me);
  }
}

void delay(uint64_t& random) noexcept {
  const uint64_t draw = next_random(random) % 4096;
  if (draw > 8) return;
  if (draw == 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(1));
  } else if (draw < 4) {
    ::sched_yield();
  } else {
    const uint64_t spins = next_random(random) % 4000;
    for (uint64_t i = 0; i < spins; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
  }
}

}  // namespace

void point() noexcept {
  if (here.scheduler != nullptr) {
    here.scheduler->point(here.rank);
  } else if (here.delays != 0) {
    delay(here.delays);
  }
}

bool is_scheduled() noexcept { return here.scheduler != nullptr; }

void futex_wait(const Atomic<uint32_t>& word, uint32_t seen,
                std::chrono::nanoseconds timeout) noexcept {
  point();
  if (here.scheduler != nullptr) {
    here.scheduler->block(here.rank, word.raw(), seen);
  } else {
    nostall::futex_wait(word.raw(), seen, here.delays != 0 ? std::chrono::hours(24) : timeout);
  }
}

void futex_wake_all(const Atomic<uint32_t>& word) noexcept {
  point();
  if (here.scheduler != nullptr) {
    here.scheduler->wake(word.raw());
  } else {
    nostall::futex_wake_all(word.raw());
  }
}

Findings explore(const std::vector<Body>& bodies, const Limits& limits) {
  Scheduler scheduler(bodies.size(), limits);
  return scheduler.run(bodies);
}

Delays::Delays(uint64_t seed) { here.delays = seed * 0x9e3779b97f4a7c15u | 1; }
Delays::~Delays() { here.delays = 0; }

}  // namespace nostall::collective::model
