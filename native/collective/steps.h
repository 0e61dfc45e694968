// collective/steps.h - what all algorithms stand on: steps, posts, and waiting.
//
// A step is one round in which every rank of the communicator takes part. A rank writes the shared
// memory of step t only when all ranks have finished step t - 2, which used the same memory
// (begin_step). Calls in which ranks leave early must say when they are finished (finish_early).
//
// Waiting: a short spin, whose length follows its success, then a futex. A publisher of a word
// looks for sleepers, and wakes those that sleep for that word and value. Both sides use
// sequentially consistent operations: either the publisher reads the sleeper's mark or the sleeper
// reads the value. A sleeper checks every 50 ms for the deadline, a broken communicator and dead
// ranks.
// Thread-safety: one thread at a time; ranks are threads or processes.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "collective/shared_memory.h"

namespace nostall::collective {

struct Want {
  uint64_t key;
  uint64_t target;
};
// The key of "all ranks have posted step <target>".
inline constexpr uint64_t kAllPosted = 0;
// The key of "some rank has posted step <target>".
inline constexpr uint64_t kAnyPosted = 1;

struct StepStats {
  uint64_t steps = 0;
  uint64_t sleeps = 0;
  int64_t wait_ns = 0;
};

class Steps {
 public:
  Steps(SharedMemory& memory, uint32_t rank, uint32_t ranks, std::chrono::nanoseconds timeout,
        std::function<void()> progress = {});

  SharedMemory& shared() noexcept { return shared_; }
  uint32_t rank() const noexcept { return rank_; }
  uint32_t ranks() const noexcept { return ranks_; }
  bool oversubscribed() const noexcept { return oversubscribed_; }
  const StepStats& stats() const noexcept { return stats_; }
  void on_late(std::chrono::nanoseconds after,
               std::function<void(std::span<const uint32_t>)> callback);

  // What the next steps belong to, for the messages of errors: "allreduce" and the call's number.
  void enter(const char* operation, uint64_t signature);
  // Throws if the communicator has ended for the step that this rank is in, or comes to next. From any
  // thread.
  void check() const {
    if (has_ended()) throw_broken();
  }
  // As check, also if it has ended for later steps alone.
  void check_all() const {
    if (shared_.header().broken.load(std::memory_order_seq_cst) != 0) throw_broken();
  }
  // This rank's call is complete: it has given all that others need of its steps.
  void complete() noexcept {
    open_.store(step_ + 1, std::memory_order_release);
    publish(shared_.finished(rank_), step_);
  }
  // The next step, when its memory is free.
  uint64_t begin_step();
  // Shows that this rank has arrived at `step`; what it wrote to its stage before is visible then.
  void post(uint64_t step);
  bool all_posted(uint64_t step) noexcept;
  bool has_posted(uint64_t step, uint32_t rank) const noexcept {
    return shared_.post(rank, step).flag.load(std::memory_order_seq_cst) == step;
  }
  // Waits for the posts of all; throws if a rank calls something else.
  void wait_for_posts(uint64_t step);
  // Of those that have posted already: throws if one calls something else. A rank that leaves a step
  // before others have posted calls it after its own post: of any two one sees the other's.
  void check_arrived(uint64_t step);
  // As wait_for_posts, for one rank.
  void wait_for_post(uint64_t step, uint32_t rank);
  // All have arrived at `step`, hence all have finished the one before.
  void all_arrived(uint64_t step) noexcept { safe_ = step - 1; }
  // The last thing in a step that this rank may leave before the others arrive.
  void finish_early(uint64_t step);

  void publish(Word& word, uint64_t value) noexcept {
    word.store(value, std::memory_order_seq_cst);
    if (shared_.header().sleepers.load(std::memory_order_seq_cst) > 0)
      wake(shared_.key(word), value);
  }
  void wake(uint64_t key, uint64_t value) noexcept;
  // Whatever they sleep for: they look whether they are still to wait.
  void wake_all() noexcept;
  // The window of `step` gets no more memory. It may hold less than ranks wait for in a batch, so all
  // are woken, and wait for each part from here on.
  void shrink(uint64_t step) noexcept;
  bool is_shrunk(uint64_t step) const noexcept {
    return shared_.header().shrunk[step % 2].value.load(std::memory_order_seq_cst) == step;
  }

  // Returns when ready() does; it is woken for any of `wants` (at most two).
  template <typename Ready>
  void wait(Ready ready, std::initializer_list<Want> wants) {
    if (ready() || spin(ready)) return;
    nap_ = kShortestNap;
    while (!sleep_once(ready, wants)) {
      // What a rank gave before it was lost may have come since.
      if (const auto error = look_around(); error && !ready()) fail(*error);
    }
    adapt_to_wait();
  }

  // Ends the communicator for all its ranks, from the step on that this rank is in, and throws.
  [[noreturn]] void fail(const Error& error);
  // As fail, without throwing; from any thread. False if it had ended before.
  bool end_from_here(const Error& error) noexcept {
    return end_for_all(error, open_.load(std::memory_order_acquire));
  }
  // In whatever step the other ranks are.
  bool end_at_once(const Error& error) noexcept { return end_for_all(error, 0); }
  bool ended_here() const noexcept { return ended_here_.load(std::memory_order_acquire); }
  // Ends the communicator because this rank left the call by an error of its own.
  void end_by_own_error() noexcept;
  void set_timeout(std::chrono::nanoseconds timeout) noexcept { timeout_ = timeout; }
  // This rank begins to wait outside of the communicator (1), ends it (-1), or progresses there (0).
  void wait_elsewhere(int change) noexcept {
    elsewhere_ += change;
    shared_.line(rank_).elsewhere.store((now_ns() & ~int64_t{1}) | int64_t{elsewhere_ > 0},
                                        std::memory_order_relaxed);
  }

 private:
  // A rank that leaves a step by an error ends the communicator from that step on. So who is in an
  // earlier one waits for ranks alone that have completed it, or are in it.
  bool end_for_all(const Error& error, uint64_t step) noexcept;
  bool has_ended() const noexcept {
    const Header& h = shared_.header();
    return h.broken.load(std::memory_order_seq_cst) != 0 &&
           h.end_step.load(std::memory_order_seq_cst) <= open_.load(std::memory_order_relaxed);
  }
  static void pause() noexcept {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
  }

  template <typename Ready>
  bool spin(Ready& ready) {
    if (is_scheduled()) return false;
    wait_began_ = now_ns();
    int64_t now = wait_began_;
    bool yields = oversubscribed_;
    do {
      for (int i = 0; i < 16; ++i) {
        pause();
        if (ready()) return true;
      }
      now = now_ns();
      if (shares_core()) {
        // A spin would keep the other one from arriving. A sleeper is woken on an idle core if
        // there is one, so some of these waits sleep at once.
        yields = ++on_one_core_ % kSleepsApart != 0;
        break;
      }
    } while (now - wait_began_ < spin_ns_);
    // Ranks that share cores hand them to each other for less than a sleep costs; another
    // process that gets one may keep it for long.
    if (without_yield_ > 0) {
      --without_yield_;
      return false;
    }
    const int64_t end = yields ? now + kYieldNs : now;
    while (now < end) {
      ::sched_yield();
      if (ready()) return true;
      const int64_t before = std::exchange(now, now_ns());
      if (now - before > kLongYield) {
        without_yield_ = kWithoutYield;
        break;
      }
    }
    return false;
  }

  template <typename Ready>
  bool sleep_once(Ready& ready, std::initializer_list<Want> wants) {
    RankLine& me = shared_.line(rank_);
    size_t i = 0;
    for (const Want& want : wants) {
      me.want_key[i].store(want.key, std::memory_order_relaxed);
      me.want_target[i++].store(want.target, std::memory_order_relaxed);
    }
    for (; i < me.want_key.size(); ++i) me.want_target[i].store(kNever, std::memory_order_relaxed);
    me.asleep.store(1, std::memory_order_seq_cst);
    shared_.header().sleepers.fetch_add(1, std::memory_order_seq_cst);
    bool is_ready = ready();
    if (!is_ready && !has_ended()) {
      doze();
      is_ready = ready();
    }
    me.asleep.store(0, std::memory_order_seq_cst);
    shared_.header().sleepers.fetch_sub(1, std::memory_order_seq_cst);
    return is_ready;
  }

  // There is a core for every rank, but another one was on this one when it last looked.
  bool shares_core() noexcept;
  void doze() noexcept;
  // Lengthens the spin that was just too short, shortens the one that was in vain.
  void adapt(bool longer) noexcept {
    spin_ns_ =
        longer ? std::min(2 * spin_ns_, spin_limit_ns_) : std::max(spin_ns_ / 2, kShortestSpin);
  }
  void adapt_to_wait() noexcept;
  // Why a wait is in vain, if the deadline has passed or a rank is gone. Throws if the communicator is
  // broken or a rank calls something else.
  std::optional<Error> look_around();
  int64_t deadline(int64_t now) const noexcept;
  [[noreturn]] void throw_broken() const;
  void check_signature(uint64_t step, uint32_t rank);
  std::string where() const;

  static constexpr int64_t kShortestSpin = 1'000;
  // Between calls of `progress`; twice as long each time, up to kLongestNap.
  static constexpr std::chrono::nanoseconds kShortestNap{50'000};
  static constexpr std::chrono::nanoseconds kLongestNap{2'000'000};
  static constexpr uint32_t kWithoutYield = 64;  // waits, after such a one
  static constexpr int64_t kYieldNs = 50'000;
  static constexpr uint32_t kSleepsApart = 64;
  static constexpr int64_t kLongYield = 200'000;
  static constexpr uint64_t kNever = ~uint64_t{0};

  SharedMemory& shared_;
  const uint32_t rank_, ranks_;
  std::chrono::nanoseconds timeout_;
  const std::function<void()> progress_;
  std::chrono::nanoseconds nap_;
  bool oversubscribed_;
  int64_t spin_limit_ns_, spin_ns_;
  uint32_t on_one_core_ = 0, without_yield_ = 0;
  const char* operation_ = "";
  uint64_t signature_ = 0;
  uint64_t calls_ = 0;
  int elsewhere_ = 0;  // waits outside of the communicator that this rank is in
  uint64_t step_ = 0;
  std::atomic<uint64_t> open_{1};  // the first step that this rank has not completed
  uint64_t safe_ = 0;              // all ranks have finished this step
  int64_t wait_began_ = 0;
  int64_t looked_ = 0;
  std::chrono::nanoseconds late_{0};
  std::function<void(std::span<const uint32_t>)> late_callback_;
  int64_t warned_ = 0;  // the beginning of the wait that was reported
  StepStats stats_;
  std::atomic<bool> ended_here_{false};  // this rank said why the communicator ends
};

}  // namespace nostall::collective
