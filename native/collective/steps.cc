// Steps, posts, and the waiting of all algorithms.
//
// A wait spins, then sleeps on the futex word of its own rank. A publisher stores the value first
// and looks for sleepers afterwards; a sleeper marks itself first and looks for the value
// afterwards. So one of the two always sees the other, and no wake-up is lost.
#include "collective/steps.h"

#include <sched.h>

#include <algorithm>

#include "base/cpus.h"
#include "base/futex.h"
#include "collective/signature.h"

namespace nostall::collective {
namespace {

constexpr int64_t kLookNs = 50'000'000;
// Waits beyond this are so long that a spin before them costs nothing.
constexpr int64_t kLongNs = 1'000'000;
constexpr std::chrono::nanoseconds kSlice{kLookNs};
// In which a rank that ends the communicator writes down why, on a busy machine too.
constexpr int64_t kWordsNs = 60'000'000'000;
// In which a rank that waited elsewhere in vain says so, before those who wait for it blame it.
constexpr int64_t kGraceNs = 5'000'000'000;

// Of all ranks together: a launcher may have bound each of them to cores of its own.
uint32_t usable_cores(const SharedMemory& memory, uint32_t rank, uint32_t ranks) noexcept {
  Cpus all{}, set{};
  for (uint32_t r = 0; r < ranks; ++r) {
    const int process = r == rank ? 0 : memory.line(r).pid.load(std::memory_order_relaxed);
    if (::sched_getaffinity(process, sizeof set, set.data()) != 0) continue;
    CPU_OR_S(sizeof all, all.data(), all.data(), set.data());
  }
  return static_cast<uint32_t>(CPU_COUNT_S(sizeof all, all.data()));
}

}  // namespace

Steps::Steps(SharedMemory& memory, uint32_t rank, uint32_t ranks, std::chrono::nanoseconds timeout,
             std::function<void()> progress)
    : shared_(memory),
      rank_(rank),
      ranks_(ranks),
      timeout_(timeout),
      progress_(std::move(progress)),
      nap_(kShortestNap),
      oversubscribed_(ranks > usable_cores(memory, rank, ranks)),
      spin_limit_ns_(oversubscribed_ ? 1'000 : 20'000),
      spin_ns_(spin_limit_ns_) {}

void Steps::on_late(std::chrono::nanoseconds after,
                    std::function<void(std::span<const uint32_t>)> callback) {
  late_ = callback ? after : std::chrono::nanoseconds(0);
  late_callback_ = std::move(callback);
}

void Steps::enter(const char* operation, uint64_t signature) {
  operation_ = operation;
  signature_ = signature;
  ++calls_;
  check();
}

uint64_t Steps::begin_step() {
  const uint64_t step = ++step_;
  open_.store(step, std::memory_order_release);
  ++stats_.steps;
  if (safe_ + 2 >= step) return step;
  const uint64_t before = step - 2;
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (r == rank_) continue;
    wait(
        [&] {
          return shared_.finished(r).load(std::memory_order_seq_cst) >= before ||
                 shared_.post(r, 0).flag.load(std::memory_order_acquire) > before ||
                 shared_.post(r, 1).flag.load(std::memory_order_acquire) > before;
        },
        {{shared_.key(shared_.finished(r)), before},
         {shared_.key(shared_.post(r, before + 1).flag), before + 1}});
  }
  safe_ = before;
  return step;
}

void Steps::post(uint64_t step) {
  Post& mine = shared_.post(rank_, step);
  mine.signature.store(signature_, std::memory_order_relaxed);
  shared_.line(rank_).core.store(static_cast<uint32_t>(::sched_getcpu()) + 1,
                                 std::memory_order_relaxed);
  publish(mine.flag, step);
  if (shared_.header().sleepers.load(std::memory_order_seq_cst) > 0) wake(kAnyPosted, step);
}

bool Steps::all_posted(uint64_t step) noexcept {
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (!has_posted(step, r)) return false;
  }
  return true;
}

// The last rank to post sees all posts at its first look, and wakes the ranks that sleep for them.
void Steps::wait_for_posts(uint64_t step) {
  if (all_posted(step)) {
    if (shared_.header().sleepers.load(std::memory_order_seq_cst) > 0) wake(kAllPosted, step);
  } else {
    uint32_t next = 0;
    wait(
        [&] {
          while (next < ranks_ &&
                 shared_.post(next, step).flag.load(std::memory_order_seq_cst) == step) {
            ++next;
          }
          return next == ranks_;
        },
        {{kAllPosted, step}});
  }
  all_arrived(step);
  for (uint32_t r = 0; r < ranks_; ++r) check_signature(step, r);
}

void Steps::wait_for_post(uint64_t step, uint32_t rank) {
  Word& flag = shared_.post(rank, step).flag;
  wait([&] { return flag.load(std::memory_order_seq_cst) == step; }, {{shared_.key(flag), step}});
  check_signature(step, rank);
}

void Steps::finish_early(uint64_t step) { publish(shared_.finished(rank_), step); }

void Steps::wake(uint64_t key, uint64_t value) noexcept {
  for (uint32_t r = 0; r < ranks_; ++r) {
    RankLine& line = shared_.line(r);
    if (r == rank_ || line.asleep.load(std::memory_order_seq_cst) == 0) continue;
    for (size_t i = 0; i < line.want_key.size(); ++i) {
      if (line.want_key[i].load(std::memory_order_relaxed) != key ||
          line.want_target[i].load(std::memory_order_relaxed) > value) {
        continue;
      }
      uint32_t asleep = 1;
      if (line.asleep.compare_exchange_strong(asleep, 0)) futex_wake_all(line.asleep);
      break;
    }
  }
}

bool Steps::shares_core() noexcept {
  const auto here = static_cast<uint32_t>(::sched_getcpu()) + 1;
  shared_.line(rank_).core.store(here, std::memory_order_relaxed);
  if (oversubscribed_) return false;
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (r != rank_ && shared_.line(r).core.load(std::memory_order_relaxed) == here) return true;
  }
  return false;
}

void Steps::doze() noexcept {
  ++stats_.sleeps;
  futex_wait(shared_.line(rank_).asleep, 1, progress_ ? nap_ : kSlice);
}

void Steps::adapt_to_wait() noexcept {
  const int64_t waited = now_ns() - wait_began_;
  stats_.wait_ns += waited;
  if (waited < 4 * spin_limit_ns_) {
    adapt(true);
  } else if (waited < kLongNs) {
    adapt(false);
  }
}

void Steps::check_arrived(uint64_t step) {
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (has_posted(step, r)) check_signature(step, r);
  }
}

std::optional<Error> Steps::look_around() {
  if (progress_) {
    progress_();
    nap_ = std::min(2 * nap_, kLongestNap);
  }
  check();
  if (is_scheduled()) return std::nullopt;
  const int64_t now = now_ns();
  if (now - looked_ < kLookNs / 2) return std::nullopt;
  looked_ = now;
  check_arrived(step_);
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (r == rank_) continue;
    const bool dead = shared_.is_dead(r);
    // Looked at after that: what it has completed is there, and others are late.
    if (shared_.finished(r).load() >= step_) continue;
    const bool gone =
        !dead && shared_.line(r).left.load() != 0 && shared_.post(r, step_).flag.load() != step_;
    if (dead || gone) {
      check();  // it may have said why before it left
      return Error(ErrorKind::peer, "rank " + std::to_string(r) + " (process " +
                                        std::to_string(shared_.line(r).pid.load()) + ") " +
                                        (dead ? "died" : "left") + " before it finished " +
                                        where() +
                                        ": restart the job, or make a new communicator without it");
    }
  }
  const int64_t waited = now - wait_began_;
  const bool late = late_.count() > 0 && waited >= late_.count() && warned_ != wait_began_;
  const int64_t deadline = this->deadline(now);
  if (!late && now < deadline) return std::nullopt;
  std::vector<uint32_t> absent;
  std::string missing;
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (shared_.post(r, step_).flag.load() < step_) {
      absent.push_back(r);
      missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    }
  }
  if (late && !absent.empty()) {
    warned_ = wait_began_;
    late_callback_(absent);
  }
  if (now < deadline) return std::nullopt;
  return Error(ErrorKind::peer,
               "rank " + std::to_string(rank_) + " waited " +
                   std::to_string(static_cast<double>(timeout_.count()) / 1e9).substr(0, 6) +
                   " s in " + where() +
                   (missing.empty() ? std::string(" for ranks that arrived and are slow")
                                    : " for ranks that have not arrived: " + missing) +
                   "; find out what they do, or raise the timeout of this communicator");
}

// Ranks that wait elsewhere do so for the others: the timeout begins anew when they begin, progress
// and end.
int64_t Steps::deadline(int64_t now) const noexcept {
  int64_t begin = wait_began_;
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (r == rank_) continue;
    const int64_t mark = shared_.line(r).elsewhere.load(std::memory_order_relaxed);
    if (mark > 0) begin = std::max(begin, std::min(mark, now) + (mark % 2) * kGraceNs);
  }
  return begin + timeout_.count();
}

std::string Steps::where() const {
  return std::string(operation_) + " (call " + std::to_string(calls_) + ")";
}

void Steps::check_signature(uint64_t step, uint32_t rank) {
  const uint64_t theirs = shared_.post(rank, step).signature.load(std::memory_order_relaxed);
  if (theirs == signature_) return;
  fail(Error(ErrorKind::usage, "the ranks do not call the same: rank " + std::to_string(rank_) +
                                   " calls " + describe_signature(signature_) + ", rank " +
                                   std::to_string(rank) + " calls " + describe_signature(theirs) +
                                   " (call " + std::to_string(calls_) +
                                   "); make all ranks call the same in the same order"));
}

void Steps::fail(const Error& error) {
  end_from_here(error);
  throw error;
}

bool Steps::end_for_all(const Error& error, uint64_t step) noexcept {
  const bool first = shared_.publish_error(error, step);
  if (first) ended_here_.store(true, std::memory_order_release);
  wake_all();
  return first;
}

void Steps::wake_all() noexcept {
  for (uint32_t r = 0; r < ranks_; ++r) {
    uint32_t asleep = 1;
    if (shared_.line(r).asleep.compare_exchange_strong(asleep, 0)) {
      futex_wake_all(shared_.line(r).asleep);
    }
  }
}

void Steps::shrink(uint64_t step) noexcept {
  shared_.header().shrunk[step % 2].value.store(step, std::memory_order_seq_cst);
  wake_all();
}

void Steps::end_by_own_error() noexcept {
  end_from_here(Error(ErrorKind::peer, "rank " + std::to_string(rank_) + " could not go on in " +
                                           where() + "; its own error says why"));
}

void Steps::throw_broken() const {
  const Header& h = shared_.header();
  const int64_t begin = now_ns();
  const int64_t patience = is_scheduled() ? 0 : kWordsNs;
  for (;;) {
    const uint32_t broken = h.broken.load(std::memory_order_acquire);
    if (broken == kExplained) throw shared_.end("this communicator is broken: ");
    const uint32_t writer = broken - kWriter;
    // Looked at in this order: what it wrote before it died is there.
    const bool dead = writer < ranks_ && writer != rank_ && shared_.is_dead(writer) &&
                      h.broken.load(std::memory_order_acquire) != kExplained;
    if (dead || now_ns() - begin >= patience) {
      throw Error(ErrorKind::peer, "this communicator is broken: rank " + std::to_string(writer) +
                                       (dead ? " died while it said why" : " has not said why") +
                                       "; restart the job, or make a new communicator without it");
    }
    ::sched_yield();
  }
}

}  // namespace nostall::collective
