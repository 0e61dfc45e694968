// Horovod's protocol, one cycle after the other: sleep, agree, fuse what all ranks have.
#include "sync/negotiated_order.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "trace/trace.h"

namespace nostall::sync {
namespace {

// The first word of a cycle's all-reduce; inverted, so that the "and" of all words has a flag if
// one rank has it.
constexpr uint64_t kShutdown = 1, kUncached = 2, kLacking = 4;

}  // namespace

NegotiatedOrder::NegotiatedOrder(Step& step)
    : Coordinator(step),
      bucket_(step.collectives, step.tensors),
      is_known_(step.tensors.size()),
      announced_(step.tensors.size()),
      announced_by_(step.tensors.size()) {}

void NegotiatedOrder::set_plan(ReductionPlan /*plan*/) {
  throw Error(ErrorKind::usage, "an engine that negotiates has no plan");
}

Coordinator::Turn NegotiatedOrder::next() {
  while (next_ == groups_.size()) {
    if (!cycle()) return {};
  }
  bucket_.shape(groups_[next_++]);
  return {&bucket_, agreed_ns_};
}

// False: a rank shuts down.
bool NegotiatedOrder::cycle() {
  sleep(cycles_, cycles_ == 0 ? 0 : now_ns() - begin_ns_);
  ++cycles_;
  begin_ns_ = now_ns();
  std::vector<uint32_t> ready;
  const bool go_on = agree(ready);
  agreed_ns_ = now_ns();
  {
    const MutexLock lock(step_.mutex);
    ++step_.stats.cycles;
    step_.stats.empty_cycles += ready.empty() ? 1 : 0;
    step_.stats.order_ns += agreed_ns_ - begin_ns_;
    step_.account();
    if (!go_on) {
      if (!step_.stop) {
        step_.error = std::make_exception_ptr(Error(
            ErrorKind::peer, "another rank has closed its gradient engine: no more is reduced"));
      }
      return false;
    }
  }
  // Tensors that are not ready come last in what fuse() gives.
  groups_ = fuse(ready, step_.tensors, step_.options.threshold_bytes).groups;
  size_t used = 0;
  for (size_t done = 0; done < ready.size(); ++used) done += groups_[used].size();
  groups_.resize(used);
  next_ = 0;
  return true;
}

// HOROVOD_CYCLE_TIME less the previous cycle; with GS the least of all ranks, every N cycles.
void NegotiatedOrder::sleep(uint64_t cycle, int64_t previous_ns) {
  int64_t sleep = std::max<int64_t>(0, step_.options.cycle.count() - previous_ns);
  const uint32_t every = step_.options.global_sleep_every;
  const int64_t begin = now_ns();
  if (every > 0 && cycle % every == 0) sleep = step_.collectives->all_min(sleep);
  const int64_t agreed = now_ns();
  if (sleep > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(sleep));
  const int64_t now = now_ns();
  const MutexLock lock(step_.mutex);
  step_.stats.order_ns += agreed - begin;
  step_.stats.sleep_ns += now - agreed;
  if (sleep == 0) return;
  step_.stats.count_oversleep(std::max<int64_t>(0, now - agreed - sleep));
  const int64_t oldest = step_.oldest();
  if (oldest != 0) step_.stats.latency_ns += now - std::max(oldest, agreed);
}

// The tensors that all ranks have, in one order. False: a rank shuts down.
bool NegotiatedOrder::agree(std::vector<uint32_t>& ready) {
  static const trace::Kind kNegotiate = trace::define("sync", "negotiate", {"ready", "uncached"});
  trace::Span span(kNegotiate);
  Mine mine = collect();
  const int64_t begin = now_ns(), waited = step_.collectives->waited_ns();
  all_and(mine.words);
  if (mine.oldest != 0) {
    const int64_t stalled = std::min(step_.collectives->waited_ns() - waited, now_ns() - begin);
    const MutexLock lock(step_.mutex);
    step_.stats.order_wait_ns += stalled;
  }
  const uint64_t flags = ~mine.words[0];
  if (flags & kShutdown) return false;
  if (flags & kLacking) name_lacking(mine);
  for (size_t i = 0; i < known_.size(); ++i) {
    if (mine.words[1 + i / 64] >> (i % 64) & 1) ready.push_back(known_[i]);
  }
  if (flags & kUncached) add_new(ready);
  span.values = {static_cast<int64_t>(ready.size()), (flags & kUncached) ? 1 : 0};
  return true;
}

NegotiatedOrder::Mine NegotiatedOrder::collect() {
  Mine mine;
  mine.words.resize(1 + (known_.size() + 63) / 64);
  bool uncached = false, stop = false;
  {
    const MutexLock lock(step_.mutex);
    stop = step_.stop;
    mine.oldest = step_.oldest();
    for (uint32_t t = 0; t < step_.tensors.size(); ++t) {
      uncached = uncached || (step_.pending[t].waits() && !is_known_[t] && !announced_[t]);
    }
    for (size_t i = 0; i < known_.size(); ++i) {
      if (step_.pending[known_[i]].waits()) mine.words[1 + i / 64] |= uint64_t{1} << (i % 64);
    }
  }
  const int64_t age = mine.oldest == 0 ? 0 : now_ns() - mine.oldest;
  mine.expired = age > step_.options.timeout.count();
  mine.warn = age > step_.options.warn.count() && mine.oldest != warned_;
  if (mine.warn) warned_ = mine.oldest;
  mine.words[0] = ~((stop ? kShutdown : 0) | (uncached ? kUncached : 0) |
                    (mine.warn || mine.expired ? kLacking : 0));
  return mine;
}

void NegotiatedOrder::all_and(std::span<uint64_t> words) {
  if (!step_.options.nonblocking) {
    step_.collectives->all_and(words);
    return;
  }
  step_.collectives->start_and(words);
  while (!step_.collectives->test()) std::this_thread::sleep_for(step_.options.test_sleep);
}

// A rank has waited long for gradients that others lack: all ranks gather what they have, and those
// that waited name what is missing where.
void NegotiatedOrder::name_lacking(const Mine& mine) {
  std::vector<uint8_t> here(step_.tensors.size());
  {
    const MutexLock lock(step_.mutex);
    for (uint32_t t = 0; t < here.size(); ++t) here[t] = step_.pending[t].waits();
  }
  const auto all = step_.collectives->all_gather(std::as_bytes(std::span(here)));
  if (!mine.warn && !mine.expired) return;
  std::string text;
  for (uint32_t r = 0; r < all.size(); ++r) {
    std::vector<uint32_t> lacking;
    for (uint32_t t = 0; t < here.size() && t < all[r].size(); ++t) {
      if (here[t] != 0 && all[r][t] == std::byte{0}) lacking.push_back(t);
    }
    if (lacking.empty()) continue;
    text += (text.empty() ? "" : "; ") + std::string("rank ") + std::to_string(r) +
            " has not submitted " + step_.names(lacking);
  }
  if (text.empty()) return;
  const std::string waited =
      "rank " + std::to_string(step_.collectives->rank()) + " has waited for " +
      std::to_string((now_ns() - mine.oldest) / 1'000'000'000) + " s: " + text;
  if (mine.expired) throw Error(ErrorKind::peer, waited);
  log(LogLevel::warning, waited + step_.options.numbers);
}

// Tensors that are not known yet: all ranks announce them to rank 0, which keeps the announcements
// and broadcasts the order of those that all ranks have announced.
void NegotiatedOrder::add_new(std::vector<uint32_t>& ready) {
  std::vector<uint32_t> mine;
  {
    const MutexLock lock(step_.mutex);
    for (uint32_t t = 0; t < step_.tensors.size(); ++t) {
      if (step_.pending[t].waits() && !is_known_[t] && !announced_[t]) mine.push_back(t);
    }
  }
  for (const uint32_t t : mine) announced_[t] = true;
  const auto all = step_.collectives->all_gather(std::as_bytes(std::span(mine)));
  std::vector<uint32_t> answer;
  for (uint32_t r = 0; r < all.size() && step_.collectives->rank() == 0; ++r) {
    std::vector<uint32_t> theirs(all[r].size() / sizeof(uint32_t));
    if (!theirs.empty()) std::memcpy(theirs.data(), all[r].data(), all[r].size());
    for (const uint32_t t : theirs) {
      if (t >= step_.tensors.size()) continue;
      auto& ranks = announced_by_[t];
      ranks.resize(step_.collectives->ranks());
      ranks[r] = true;
      if (std::find(ranks.begin(), ranks.end(), false) == ranks.end()) answer.push_back(t);
    }
  }
  const auto bytes = step_.collectives->broadcast(std::as_bytes(std::span(answer)), 0);
  std::vector<uint32_t> agreed(bytes.size() / sizeof(uint32_t));
  if (!agreed.empty()) std::memcpy(agreed.data(), bytes.data(), bytes.size());
  for (const uint32_t t : agreed) {
    is_known_[t] = true;
    known_.push_back(t);
    ready.push_back(t);
  }
}

}  // namespace nostall::sync
