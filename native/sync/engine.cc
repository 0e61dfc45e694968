#include "sync/engine.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "sync/convert.h"
#include "trace/trace.h"

namespace nostall::sync {
namespace {

constexpr size_t kMostNames = 8;

int64_t nanoseconds(const timeval& t) {
  return int64_t{t.tv_sec} * 1'000'000'000 + int64_t{t.tv_usec} * 1000;
}

std::string text_of(const TensorSpec& t) {
  return t.name + " (" + std::to_string(t.count) + " x " +
         std::string(collective::name_of(t.type)) +
         (t.wire == t.type ? "" : ", sent as " + std::string(collective::name_of(t.wire))) + ")";
}

}  // namespace

Engine::Engine(EngineConfig config, std::unique_ptr<Transport> transport,
               std::vector<TensorSpec> tensors)
    : config_(std::move(config)),
      transport_(std::move(transport)),
      tensors_(std::move(tensors)),
      scale_(config_.mean ? 1.0 / transport_->ranks() : 1.0),
      owner_(::getpid()),
      pending_(tensors_.size()),
      contributors_(tensors_.size()),
      group_of_(tensors_.size()),
      index_of_(tensors_.size()),
      cached_(tensors_.size()),
      announced_(tensors_.size()),
      table_(tensors_.size()) {
  if (tensors_.empty()) throw Error(ErrorKind::usage, "there is no gradient to reduce");
  transport_->on_late(config_.warn, [this](auto missing) { tell_late(missing); });
  for (const TensorSpec& t : tensors_) {
    if (!is_floating(t.type) || !is_floating(t.wire)) {
      throw Error(ErrorKind::usage,
                  "gradient " + text_of(t) + " cannot be reduced: it must be floating point");
    }
  }
  compare_tensors();
  timeline_ = Timeline::open(config_.timeline, *transport_, tensors_, config_.shapes);
  if (config_.mode == Mode::planned) {
    std::vector<uint32_t> order(tensors_.size());
    for (uint32_t i = 0; i < order.size(); ++i)
      order[i] = static_cast<uint32_t>(order.size()) - 1 - i;
    set_plan(fuse(order, tensors_, config_.threshold_bytes));
  } else {
    shared_bucket_ = std::make_unique<Bucket>(transport_, tensors_);
  }
  thread_ = std::thread([this] { run(); });
}

Engine::~Engine() {
  if (::getpid() != owner_) {
    // All of this is the parent's, and in the state of the moment of the fork.
    thread_.detach();
    for (auto& bucket : buckets_) static_cast<void>(bucket.release());
    static_cast<void>(shared_bucket_.release());
    static_cast<void>(meeting_.release());
    static_cast<void>(new (std::nothrow) std::shared_ptr<Transport>(transport_));
    return;
  }
  {
    const MutexLock lock(mutex_);
    stop_ = true;
  }
  work_.notify_all();
  thread_.join();
  give_cores_back();
}

void Engine::compare_tensors() {
  std::string mine;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    mine += text_of(tensors_[i]);
    if (i < config_.shapes.size()) mine += " of shape " + config_.shapes[i];
    mine += '\n';
  }
  const auto all = transport_->all_gather(std::as_bytes(std::span(mine)));
  for (uint32_t r = 0; r < all.size(); ++r) {
    const std::string theirs(reinterpret_cast<const char*>(all[r].data()), all[r].size());
    if (theirs == mine) continue;
    const auto differ = std::mismatch(mine.begin(), mine.end(), theirs.begin(), theirs.end());
    const auto line = [](const std::string& s, size_t at) {
      const size_t begin = at == 0 ? 0 : s.rfind('\n', at - 1) + 1;
      return begin >= s.size() ? "nothing" : s.substr(begin, s.find('\n', begin) - begin);
    };
    const auto at = static_cast<size_t>(differ.first - mine.begin());
    throw Error(ErrorKind::peer, "rank " + std::to_string(transport_->rank()) + " has gradient " +
                                     line(mine, at) + " where rank " + std::to_string(r) + " has " +
                                     line(theirs, at) + ": all ranks must build the same model");
  }
}

void Engine::set_plan(ReductionPlan plan) {
  check_usable("set_plan");
  if (config_.mode != Mode::planned) {
    throw Error(ErrorKind::usage, "an engine that negotiates has no plan");
  }
  std::vector<uint32_t> group(tensors_.size(), ~uint32_t{0});
  for (uint32_t g = 0; g < plan.groups.size(); ++g) {
    for (const uint32_t t : plan.groups[g]) {
      if (t >= group.size() || group[t] != ~uint32_t{0}) {
        throw Error(ErrorKind::usage, "a plan must have every gradient once");
      }
      group[t] = g;
    }
  }
  if (std::find(group.begin(), group.end(), ~uint32_t{0}) != group.end()) {
    throw Error(ErrorKind::usage, "a plan must have every gradient once");
  }
  MutexLock lock(mutex_);
  if (submitted_ > 0) {
    throw Error(ErrorKind::usage, "the plan changes between steps only: wait() first");
  }
  while (!idle_ && !error_) done_.wait(lock);
  if (error_) std::rethrow_exception(error_);
  const uint64_t fingerprint = plan.fingerprint();
  const auto all = transport_->all_gather(std::as_bytes(std::span(&fingerprint, 1)));
  for (uint32_t r = 0; r < all.size(); ++r) {
    uint64_t theirs = 0;
    if (all[r].size() == sizeof theirs) std::memcpy(&theirs, all[r].data(), sizeof theirs);
    if (theirs != fingerprint) {
      throw Error(ErrorKind::peer, "rank " + std::to_string(r) +
                                       " has another plan of reductions than rank " +
                                       std::to_string(transport_->rank()));
    }
  }
  try {
    adopt(std::move(plan), std::move(group));
  } catch (...) {
    error_ = std::current_exception();  // there are no buffers any more
    done_.notify_all();
    throw;
  }
}

// Under the mutex, between steps: on all ranks, or on none.
void Engine::adopt(ReductionPlan plan, std::vector<uint32_t> group) {
  buckets_.clear();  // first: there may not be room for the memory of both plans
  std::vector<std::unique_ptr<Bucket>> buckets;
  std::vector<uint32_t> missing, index(tensors_.size());
  std::vector<bool> begun;
  std::exception_ptr error;
  std::string failure;
  try {
    for (const auto& tensors : plan.groups) {
      buckets.push_back(std::make_unique<Bucket>(transport_, tensors_));
      buckets.back()->shape(tensors);
      missing.push_back(static_cast<uint32_t>(tensors.size()));
      for (uint32_t i = 0; i < tensors.size(); ++i) index[tensors[i]] = i;
    }
    begun.assign(plan.groups.size(), false);
  } catch (const std::exception& e) {
    error = std::current_exception();
    failure = std::string("cannot follow the new plan of reductions: ") + e.what();
  }
  const auto failures = transport_->all_gather(std::as_bytes(std::span(failure)));
  if (error) std::rethrow_exception(error);
  for (uint32_t r = 0; r < failures.size(); ++r) {
    if (failures[r].empty()) continue;
    throw Error(ErrorKind::peer, "rank " + std::to_string(r) + " " +
                                     std::string(reinterpret_cast<const char*>(failures[r].data()),
                                                 failures[r].size()));
  }
  buckets_ = std::move(buckets);
  missing_ = std::move(missing);
  index_of_ = std::move(index);
  begun_ = std::move(begun);
  plan_ = std::move(plan);
  group_of_ = std::move(group);
  next_ = 0;
}

std::vector<std::byte> Engine::broadcast(std::span<const std::byte> bytes, uint32_t root) {
  check_usable("broadcast");
  const MutexLock lock(mutex_);
  check_quiet("broadcast");
  return transport_->broadcast(bytes, root);
}

std::vector<std::vector<std::byte>> Engine::all_gather(std::span<const std::byte> bytes) {
  check_usable("all_gather");
  const MutexLock lock(mutex_);
  check_quiet("all_gather");
  return transport_->all_gather(bytes);
}

// The control plane is the progress thread's while it negotiates.
void Engine::check_quiet(const char* call) const {
  if (config_.mode != Mode::planned && thread_.joinable()) {
    throw Error(ErrorKind::usage,
                std::string(call) + " is for engines that do not negotiate: mode planned");
  }
  if (error_) std::rethrow_exception(error_);
}

void Engine::check_usable(const char* call) const {
  if (::getpid() != owner_) {
    throw Error(ErrorKind::usage, std::string(call) +
                                      ": this process was forked from the one that made the "
                                      "gradient engine; make one of its own");
  }
}

void Engine::submit(uint32_t tensor, void* gradient, bool present) {
  Bucket* const bucket = enter(tensor, gradient, gradient, present);
  // In a negotiated cycle nobody is woken: it ends by the clock.
  if (bucket) fill(tensor, *bucket, present ? gradient : nullptr);
}

std::shared_ptr<void> Engine::submit_in_place(uint32_t tensor, const void* gradient, bool present) {
  if (config_.mode != Mode::planned) {
    throw Error(ErrorKind::usage,
                "submit_in_place is for engines whose groups are fixed: mode planned");
  }
  if (tensor < tensors_.size() && tensors_[tensor].wire != tensors_[tensor].type) {
    throw Error(ErrorKind::usage, "gradient " + text_of(tensors_[tensor]) +
                                      " cannot stay in the buffer it travels in");
  }
  Bucket* const bucket = enter(tensor, nullptr, gradient, present);
  std::shared_ptr<void> place(bucket->memory(), bucket->place(index_of_[tensor]));
  fill(tensor, *bucket, present ? gradient : nullptr);
  return place;
}

// The bucket to fill, if there is a plan.
Bucket* Engine::enter(uint32_t tensor, void* result, const void* gradient, bool present) {
  check_usable("submit");
  if (tensor >= tensors_.size()) {
    throw Error(ErrorKind::usage, "there is no gradient number " + std::to_string(tensor));
  }
  if (present && config_.check_finite) {
    const TensorSpec& spec = tensors_[tensor];
    const uint64_t bad = first_not_finite(gradient, spec.type, spec.count);
    if (bad != spec.count) {
      throw Error(ErrorKind::usage, "gradient " + spec.name + " of rank " +
                                        std::to_string(transport_->rank()) +
                                        " is not finite at element " + std::to_string(bad));
    }
  }
  const MutexLock lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  Pending& p = pending_[tensor];
  if (p.submitted) {
    throw Error(ErrorKind::usage, "gradient " + tensors_[tensor].name +
                                      " was submitted twice in one step: wait() ends a step");
  }
  Bucket* bucket = nullptr;
  if (config_.mode == Mode::planned) {
    const uint32_t group = group_of_[tensor];
    bucket = buckets_[group].get();
    if (!begun_[group]) bucket->renew();
    begun_[group] = true;
  }
  p = {result, true, present, false, now_ns()};
  if (++submitted_ == 1 && transport_->ranks() > 1) reducing_.emplace();
  return bucket;
}

// By the thread that submits; `gradient` null: absent.
void Engine::fill(uint32_t tensor, Bucket& bucket, const void* gradient) {
  const int64_t begin = now_ns();
  bucket.take(index_of_[tensor], gradient, scale_);
  bool wake = false;
  {
    const MutexLock lock(mutex_);
    Pending& p = pending_[tensor];
    p.since_ns = now_ns();
    stats_.submit_copy_ns += p.since_ns - begin;
    const uint32_t group = group_of_[tensor];
    wake = --missing_[group] == 0 && group == next_;
    if (wake) complete_ns_ = p.since_ns;
  }
  if (wake) work_.notify_one();
}

void Engine::wait() {
  check_usable("wait");
  MutexLock lock(mutex_);
  if (!error_ && submitted_ < tensors_.size()) {
    std::vector<uint32_t> absent;
    for (uint32_t t = 0; t < tensors_.size(); ++t) {
      if (!pending_[t].submitted) absent.push_back(t);
    }
    throw Error(ErrorKind::usage,
                "rank " + std::to_string(transport_->rank()) +
                    " waits for gradients that it did not submit: " + names(absent));
  }
  while (reduced_ < tensors_.size() && !error_) done_.wait(lock);
  // A step that is complete is good, even if a rank has closed its engine since.
  if (reduced_ < tensors_.size()) std::rethrow_exception(error_);
  for (Pending& p : pending_) p = {};
  submitted_ = reduced_ = 0;
  ++stats_.steps;
}

void Engine::wait_for(uint32_t tensor) {
  check_usable("wait_for");
  if (tensor >= tensors_.size()) {
    throw Error(ErrorKind::usage, "there is no gradient number " + std::to_string(tensor));
  }
  MutexLock lock(mutex_);
  ++watchers_;
  while (!pending_[tensor].reduced && !error_) done_.wait(lock);
  --watchers_;
  if (!pending_[tensor].reduced) std::rethrow_exception(error_);
}

std::vector<uint32_t> Engine::contributors() const {
  const MutexLock lock(mutex_);
  return contributors_;
}

EngineStats Engine::stats() const {
  const MutexLock lock(mutex_);
  return stats_;
}

std::string Engine::names(const std::vector<uint32_t>& tensors) const {
  std::string text;
  for (size_t i = 0; i < tensors.size() && i < kMostNames; ++i) {
    text += (i ? ", " : "") + tensors_[tensors[i]].name;
  }
  if (tensors.size() > kMostNames) {
    text += " and " + std::to_string(tensors.size() - kMostNames) + " more";
  }
  return text;
}

// ------------------------------------------------------------------------------ the thread's side

void Engine::run() noexcept {
  pthread_setname_np(pthread_self(), "nostall-sync");
  try {
    partition_cores();
    if (config_.mode == Mode::planned) {
      planned_loop();
    } else {
      negotiated_loop();
    }
  } catch (...) {
    const MutexLock lock(mutex_);
    error_ = std::current_exception();
    reducing_.reset();
  }
  done_.notify_all();
}

void Engine::reduce(Bucket& bucket) {
  static const trace::Kind kReduce =
      trace::define("sync", "reduce", {"tensors", "bytes", "first tensor"});
  const auto list = bucket.tensors();
  trace::Span span(kReduce);
  span.values = {static_cast<int64_t>(list.size()), static_cast<int64_t>(bucket.bytes()),
                 static_cast<int64_t>(list.front())};
  taken_.clear();
  {
    const MutexLock lock(mutex_);
    for (const uint32_t t : list) taken_.push_back(pending_[t]);
  }
  const int64_t begin = now_ns();
  for (size_t i = 0; i < list.size() && config_.mode == Mode::negotiated; ++i) {
    bucket.take(i, taken_[i].present ? taken_[i].gradient : nullptr, scale_);
  }
  const int64_t copied = now_ns(), waited = transport_->waited_ns();
  in_reduction_ = list;
  try {
    bucket.reduce();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::peer) throw;
    throw Error(ErrorKind::peer, std::string(error.what()) + " (in the reduction of " +
                                     names(std::vector<uint32_t>(list.begin(), list.end())) + ")");
  }
  in_reduction_ = {};
  const int64_t summed = now_ns(), waited_here = transport_->waited_ns() - waited;
  for (size_t i = 0; i < list.size(); ++i) {
    if (void* const result = taken_[i].gradient) bucket.give(i, result);
  }
  const int64_t end = now_ns();
  if (timeline_) {
    std::vector<int64_t> ready;
    for (const Pending& p : taken_) ready.push_back(p.since_ns);
    timeline_->add(list, ready, {agreed_ns_, begin, copied, summed, end});
  }
  bool step = false, told = false;
  {
    const MutexLock lock(mutex_);
    for (size_t i = 0; i < list.size(); ++i) {
      contributors_[list[i]] = bucket.contributors(i);
      pending_[list[i]].reduced = true;
    }
    reduced_ += list.size();
    if (reduced_ == tensors_.size()) reducing_.reset();
    stats_.copy_ns += copied - begin + end - summed;
    stats_.reduce_ns += summed - copied;
    stats_.reduce_wait_ns += std::min(waited_here, summed - copied);
    ++stats_.reductions;
    stats_.tensors += list.size();
    stats_.bytes += bucket.bytes();
    account();
    step = reduced_ == tensors_.size();
    told = step || watchers_ > 0;
  }
  if (told) done_.notify_all();
  if (step && timeline_) timeline_->write();
}

// Under the mutex: what the processor did for this thread so far.
void Engine::account() {
  rusage use{};
  if (::getrusage(RUSAGE_THREAD, &use) != 0) return;
  stats_.user_ns = nanoseconds(use.ru_utime) + transport_->own_cpu_ns();
  stats_.system_ns = nanoseconds(use.ru_stime);
  stats_.voluntary_switches = static_cast<uint64_t>(use.ru_nvcsw);
  stats_.involuntary_switches = static_cast<uint64_t>(use.ru_nivcsw);
}

void Engine::planned_loop() {
  for (;;) {
    Bucket* bucket = nullptr;
    {
      MutexLock lock(mutex_);
      const int64_t begin = now_ns();
      idle_ = true;
      done_.notify_all();
      const bool asleep = missing_[next_] > 0;
      while (!stop_ && missing_[next_] > 0) {
        work_.wait_for(lock, std::min(config_.warn, config_.timeout) / 4);
        check_for_stall();
      }
      if (stop_) return;
      idle_ = false;
      const int64_t now = now_ns();
      stats_.sleep_ns += now - begin;
      if (asleep) {
        stats_.latency_ns += now - complete_ns_;
        ++stats_.oversleeps[bin_of(now - complete_ns_, stats_.oversleeps.size())];
      }
      bucket = buckets_[next_].get();
      missing_[next_] = static_cast<uint32_t>(bucket->tensors().size());
      begun_[next_] = false;
    }
    reduce(*bucket);
    const MutexLock lock(mutex_);
    next_ = (next_ + 1) % buckets_.size();
  }
}

// Of a rank that waits for others, in a reduction or while they agree.
void Engine::tell_late(std::span<const uint32_t> missing) const {
  std::string ranks;
  for (const uint32_t r : missing) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
  const std::vector<uint32_t> list(in_reduction_.begin(), in_reduction_.end());
  log(LogLevel::warning,
      "rank " + std::to_string(transport_->rank()) + " has waited for " +
          std::to_string(config_.warn.count() / 1'000'000'000) + " s for rank " + ranks +
          (list.empty() ? std::string(", which does not take part in an agreement")
                        : ", which has not submitted all of " + names(list)));
}

// What this rank lacks of what it is waiting for.
void Engine::check_for_stall() {
  std::vector<uint32_t> missing;
  int64_t since = 0;
  for (const uint32_t t : plan_.groups[next_]) {
    if (!pending_[t].submitted) missing.push_back(t);
  }
  if (missing.empty()) return;
  for (const Pending& p : pending_) {
    if (p.submitted && !p.reduced) since = since == 0 ? p.since_ns : std::min(since, p.since_ns);
  }
  if (since == 0) return;
  const int64_t waited = now_ns() - since;
  if (waited > config_.timeout.count()) stalled(missing, since);
  if (waited > config_.warn.count() && warned_ != since) {
    warned_ = since;
    log(LogLevel::warning, "rank " + std::to_string(transport_->rank()) + " has not submitted " +
                               names(missing) + " for " + std::to_string(waited / 1'000'000'000) +
                               " s: the other gradients, and all ranks, wait for it");
  }
}

void Engine::stalled(const std::vector<uint32_t>& missing, int64_t since) {
  throw Error(ErrorKind::peer, "rank " + std::to_string(transport_->rank()) + " did not submit " +
                                   names(missing) + " within " +
                                   std::to_string((now_ns() - since) / 1'000'000'000) +
                                   " s: every rank must submit every gradient in each step");
}

}  // namespace nostall::sync
