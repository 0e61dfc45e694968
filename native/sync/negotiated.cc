// Horovod's protocol (seed lmdbio-and-horovod 6.2.2) and the two ways to make it gentler.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "sync/engine.h"
#include "trace/trace.h"

namespace nostall::sync {
namespace {

// The first word of a cycle's all-reduce; inverted, so that an "and" is true where one rank says
// so.
constexpr uint64_t kShutdown = 1, kUncached = 2, kLacking = 4;

}  // namespace

void Engine::negotiated_loop() {
  int64_t previous = 0;
  for (uint64_t cycle = 0;; ++cycle) {
    sleep_cycle(cycle, previous);
    const int64_t begin = now_ns();
    std::vector<uint32_t> ready;
    const bool go_on = negotiate(ready);
    const int64_t agreed = agreed_ns_ = now_ns();
    {
      const MutexLock lock(mutex_);
      ++stats_.cycles;
      stats_.empty_cycles += ready.empty() ? 1 : 0;
      stats_.order_ns += agreed - begin;
      account();
    }
    if (!go_on) {
      const MutexLock lock(mutex_);
      if (!stop_) {
        error_ = std::make_exception_ptr(Error(
            ErrorKind::peer, "another rank has closed its gradient engine: no more is reduced"));
      }
      return;
    }
    const ReductionPlan plan =
        fuse(ready, tensors_, config_.threshold_bytes);  // those that are not ready come last
    size_t done = 0;
    for (const auto& group : plan.groups) {
      if (done == ready.size()) break;
      done += group.size();
      shared_bucket_->shape(group);
      reduce(*shared_bucket_);
    }
    previous = now_ns() - begin;
  }
}

// HOROVOD_CYCLE_TIME - T_previous; with GS the least of all ranks, every N cycles.
void Engine::sleep_cycle(uint64_t cycle, int64_t previous_ns) {
  int64_t sleep = std::max<int64_t>(0, config_.cycle.count() - previous_ns);
  const uint32_t every = config_.global_sleep_every;
  const int64_t begin = now_ns();
  if (every > 0 && cycle % every == 0) sleep = transport_->all_min(sleep);
  const int64_t agreed = now_ns();
  if (sleep > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(sleep));
  const int64_t now = now_ns();
  const MutexLock lock(mutex_);
  stats_.order_ns += agreed - begin;
  stats_.sleep_ns += now - agreed;
  if (sleep == 0) return;
  const int64_t late = std::max<int64_t>(0, now - agreed - sleep);
  ++stats_.oversleeps[bin_of(late, stats_.oversleeps.size())];
  int64_t oldest = now;
  for (const Pending& p : pending_) {
    if (p.submitted && !p.reduced) oldest = std::min(oldest, p.since_ns);
  }
  stats_.latency_ns += now - std::max(oldest, agreed);
}

void Engine::control(std::span<uint64_t> words) {
  if (!config_.nonblocking) {
    transport_->all_and(words);
    return;
  }
  transport_->start_and(words);
  while (!transport_->test()) std::this_thread::sleep_for(config_.test_sleep);
}

bool Engine::negotiate(std::vector<uint32_t>& ready) {
  static const trace::Kind kNegotiate = trace::define("sync", "negotiate", {"ready", "uncached"});
  trace::Span span(kNegotiate);
  std::vector<uint64_t> words(1 + (cache_.size() + 63) / 64);
  bool uncached = false, stop = false;
  int64_t oldest = 0;
  {
    const MutexLock lock(mutex_);
    stop = stop_;
    for (uint32_t t = 0; t < tensors_.size(); ++t) {
      const Pending& p = pending_[t];
      if (!p.submitted || p.reduced) continue;
      uncached = uncached || (!cached_[t] && !announced_[t]);
      if (oldest == 0 || p.since_ns < oldest) oldest = p.since_ns;
    }
    for (size_t i = 0; i < cache_.size(); ++i) {
      const Pending& p = pending_[cache_[i]];
      if (p.submitted && !p.reduced) words[1 + i / 64] |= uint64_t{1} << (i % 64);
    }
  }
  const int64_t begin = now_ns(), waited = transport_->waited_ns();
  const int64_t age = oldest == 0 ? 0 : begin - oldest;
  const bool give_up = age > config_.timeout.count();
  const bool warn = age > config_.warn.count() && oldest != warned_;
  if (warn) warned_ = oldest;
  words[0] =
      ~((stop ? kShutdown : 0) | (uncached ? kUncached : 0) | (warn || give_up ? kLacking : 0));
  control(words);
  if (oldest != 0) {
    const int64_t stalled = std::min(transport_->waited_ns() - waited, now_ns() - begin);
    const MutexLock lock(mutex_);
    stats_.order_wait_ns += stalled;
  }
  if (~words[0] & kShutdown) return false;
  if (~words[0] & kLacking) name_lacking(oldest, warn, give_up);
  for (size_t i = 0; i < cache_.size(); ++i) {
    if (words[1 + i / 64] >> (i % 64) & 1) ready.push_back(cache_[i]);
  }
  if (~words[0] & kUncached) add_new(ready);
  span.values = {static_cast<int64_t>(ready.size()), (~words[0] & kUncached) ? 1 : 0};
  return true;
}

// A rank has waited long for gradients that others lack: everyone says what it has, and those that
// waited name what is missing where.
void Engine::name_lacking(int64_t oldest, bool warn, bool give_up) {
  std::vector<uint8_t> mine(tensors_.size());
  {
    const MutexLock lock(mutex_);
    for (uint32_t t = 0; t < tensors_.size(); ++t) {
      mine[t] = pending_[t].submitted && !pending_[t].reduced;
    }
  }
  const auto all = transport_->all_gather(std::as_bytes(std::span(mine)));
  if (!warn && !give_up) return;
  std::string text;
  for (uint32_t r = 0; r < all.size(); ++r) {
    std::vector<uint32_t> lacking;
    for (uint32_t t = 0; t < tensors_.size() && t < all[r].size(); ++t) {
      if (mine[t] != 0 && all[r][t] == std::byte{0}) lacking.push_back(t);
    }
    if (lacking.empty()) continue;
    text += (text.empty() ? "" : "; ") + std::string("rank ") + std::to_string(r) +
            " has not submitted " + names(lacking);
  }
  if (text.empty()) return;
  const std::string waited = "rank " + std::to_string(transport_->rank()) + " has waited for " +
                             std::to_string((now_ns() - oldest) / 1'000'000'000) + " s: " + text;
  if (give_up) throw Error(ErrorKind::peer, waited);
  log(LogLevel::warning, waited);
}

// Tensors that no cache has yet: everyone tells rank 0, which knows who has told it before, and
// says in which order those that all ranks have come.
void Engine::add_new(std::vector<uint32_t>& ready) {
  std::vector<uint32_t> mine;
  {
    const MutexLock lock(mutex_);
    for (uint32_t t = 0; t < tensors_.size(); ++t) {
      const Pending& p = pending_[t];
      if (p.submitted && !p.reduced && !cached_[t] && !announced_[t]) mine.push_back(t);
    }
  }
  for (const uint32_t t : mine) announced_[t] = true;
  const auto all = transport_->all_gather(std::as_bytes(std::span(mine)));
  std::vector<uint32_t> answer;
  if (transport_->rank() == 0) {
    for (uint32_t r = 0; r < all.size(); ++r) {
      std::vector<uint32_t> told(all[r].size() / sizeof(uint32_t));
      if (!told.empty()) std::memcpy(told.data(), all[r].data(), all[r].size());
      for (const uint32_t t : told) {
        if (t >= tensors_.size()) continue;
        auto& ranks = table_[t];
        ranks.resize(transport_->ranks());
        ranks[r] = true;
        if (std::find(ranks.begin(), ranks.end(), false) == ranks.end()) answer.push_back(t);
      }
    }
  }
  const auto bytes = transport_->broadcast(std::as_bytes(std::span(answer)), 0);
  std::vector<uint32_t> agreed(bytes.size() / sizeof(uint32_t));
  if (!agreed.empty()) std::memcpy(agreed.data(), bytes.data(), bytes.size());
  for (const uint32_t t : agreed) {
    cached_[t] = true;
    cache_.push_back(t);
    ready.push_back(t);
  }
}

}  // namespace nostall::sync
