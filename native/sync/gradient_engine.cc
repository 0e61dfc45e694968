// The calls of the threads that submit, and the progress thread's way with a bucket: copy, sum,
// give, count.
#include "sync/gradient_engine.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "sync/convert.h"
#include "sync/negotiated_order.h"
#include "sync/planned_order.h"
#include "trace/trace.h"

namespace nostall::sync {
namespace {

using Clock = std::chrono::steady_clock;

// What is under way when an engine is stopped gets this time, before it ends for all.
constexpr std::chrono::seconds kGrace{1};

// What a thread of the program waits for here.
const trace::Kind kWait = trace::define("peers", "wait for gradients");
const trace::Kind kExchange = trace::define("peers", "exchange values");

std::string text_of(const TensorSpec& t) {
  return t.name + " (" + std::to_string(t.count) + " x " +
         std::string(collective::name_of(t.type)) +
         (t.wire == t.type ? "" : ", sent as " + std::string(collective::name_of(t.wire))) + ")";
}

}  // namespace

GradientEngine::GradientEngine(GradientOptions options, std::unique_ptr<Collectives> collectives,
                               std::vector<TensorSpec> tensors)
    : step_(std::make_unique<Step>(std::move(options), std::move(collectives), std::move(tensors))),
      scale_(step_->options.mean ? 1.0 / step_->collectives->ranks() : 1.0),
      owner_(::getpid()),
      contributors_(step_->tensors.size()) {
  if (step_->tensors.empty()) throw Error(ErrorKind::usage, "there is no gradient to reduce");
  step_->collectives->on_late(step_->options.warn, [this](auto missing) { warn_of_late(missing); });
  for (const TensorSpec& t : step_->tensors) {
    if (!is_floating(t.type) || !is_floating(t.wire)) {
      throw Error(ErrorKind::usage,
                  "gradient " + text_of(t) + " cannot be reduced: it must be floating point");
    }
  }
  compare_tensors();
  timeline_ = TimelineWriter::open(step_->options.timeline, *step_->collectives, step_->tensors,
                                   step_->options.shapes);
  if (step_->options.mode == Mode::planned) {
    coordinator_ = std::make_unique<PlannedOrder>(*step_);
  } else {
    coordinator_ = std::make_unique<NegotiatedOrder>(*step_);
  }
  thread_ = OwnThread([this] { run(); });
}

GradientEngine::~GradientEngine() {
  if (::getpid() != owner_) {
    // All of this is the parent's, and in the state of the moment of the fork.
    static_cast<void>(coordinator_.release());
    static_cast<void>(step_.release());
    return;
  }
  stop();
}

void GradientEngine::stop() noexcept {
  if (::getpid() != owner_) return;
  const MutexLock one(step_->stopping);
  if (!thread_.joinable()) return;
  while (!ends_until(Clock::now() + kGrace)) {
    step_->collectives->end(
        Error(ErrorKind::peer, "rank " + std::to_string(step_->collectives->rank()) +
                                   " has closed its gradient engine amid a reduction"));
  }
  thread_.join();
  cores_.give_back();
}

// Asks the progress thread to end; false: it has not.
bool GradientEngine::ends_until(Clock::time_point deadline) {
  // A call that waits for other ranks to agree holds the mutex.
  while (!step_->mutex.try_lock()) {
    if (Clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  step_->stop = true;
  step_->mutex.unlock();
  step_->work.notify_all();
  MutexLock lock(step_->mutex);
  while (!step_->ended && step_->done.wait_until(lock, deadline)) {
  }
  return step_->ended;
}

void GradientEngine::compare_tensors() {
  std::string mine = step_->options.mean ? "(means: mean=True)\n" : "(sums: mean=False)\n";
  for (size_t i = 0; i < step_->tensors.size(); ++i) {
    mine += text_of(step_->tensors[i]);
    if (i < step_->options.shapes.size()) mine += " of shape " + step_->options.shapes[i];
    mine += '\n';
  }
  const auto all = step_->collectives->all_gather(std::as_bytes(std::span(mine)));
  for (uint32_t r = 0; r < all.size(); ++r) {
    const std::string theirs(reinterpret_cast<const char*>(all[r].data()), all[r].size());
    if (theirs == mine) continue;
    const auto differ = std::mismatch(mine.begin(), mine.end(), theirs.begin(), theirs.end());
    const auto line = [](const std::string& s, size_t at) {
      const size_t begin = at == 0 ? 0 : s.rfind('\n', at - 1) + 1;
      return begin >= s.size() ? "nothing" : s.substr(begin, s.find('\n', begin) - begin);
    };
    const auto at = static_cast<size_t>(differ.first - mine.begin());
    throw Error(ErrorKind::peer,
                "rank " + std::to_string(step_->collectives->rank()) + " has gradient " +
                    line(mine, at) + " where rank " + std::to_string(r) + " has " +
                    line(theirs, at) +
                    ": all ranks must build the same model, with the same options" +
                    step_->options.numbers);
  }
}

// Errors of `call` that name ranks say whose numbers these are.
template <typename Call>
auto GradientEngine::numbered(Call&& call) const -> decltype(call()) {
  try {
    return call();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::peer || step_->options.numbers.empty()) throw;
    throw Error(ErrorKind::peer, error.what() + step_->options.numbers);
  }
}

void GradientEngine::set_plan(ReductionPlan plan) {
  check_usable("set_plan");
  numbered([&] { coordinator_->set_plan(std::move(plan)); });
}

std::vector<std::byte> GradientEngine::broadcast(std::span<const std::byte> bytes, uint32_t root) {
  check_usable("broadcast");
  const trace::Span span(kExchange);
  const MutexLock lock(step_->mutex);
  check_quiet("broadcast");
  return numbered([&] { return step_->collectives->broadcast(bytes, root); });
}

std::vector<std::vector<std::byte>> GradientEngine::all_gather(std::span<const std::byte> bytes) {
  check_usable("all_gather");
  const trace::Span span(kExchange);
  const MutexLock lock(step_->mutex);
  check_quiet("all_gather");
  return numbered([&] { return step_->collectives->all_gather(bytes); });
}

// The control plane is the progress thread's while it negotiates.
void GradientEngine::check_quiet(const char* call) const {
  if (step_->options.mode != Mode::planned) {
    throw Error(ErrorKind::usage,
                std::string(call) + " is for engines that do not negotiate: mode planned");
  }
  step_->check_runs(call);
}

void GradientEngine::check_usable(const char* call) const {
  if (::getpid() != owner_) {
    throw Error(ErrorKind::usage, std::string(call) +
                                      ": this process was forked from the one that made the "
                                      "gradient engine; make one of its own");
  }
}

void GradientEngine::submit(uint32_t tensor, void* gradient, bool present) {
  const Coordinator::Place place = enter(tensor, gradient, gradient, present);
  if (place.bucket) fill(tensor, place, present ? gradient : nullptr);
}

std::shared_ptr<void> GradientEngine::submit_in_place(uint32_t tensor, const void* gradient,
                                                      bool present) {
  if (step_->options.mode != Mode::planned) {
    throw Error(ErrorKind::usage,
                "submit_in_place is for engines whose groups are fixed: mode planned");
  }
  if (tensor < step_->tensors.size() &&
      step_->tensors[tensor].wire != step_->tensors[tensor].type) {
    throw Error(ErrorKind::usage, "gradient " + text_of(step_->tensors[tensor]) +
                                      " cannot stay in the buffer it travels in");
  }
  const Coordinator::Place place = enter(tensor, nullptr, gradient, present);
  std::shared_ptr<void> result(place.bucket->memory(), place.bucket->place(place.index));
  fill(tensor, place, present ? gradient : nullptr);
  return result;
}

void GradientEngine::check_finite(uint32_t tensor, const void* gradient) const {
  const TensorSpec& spec = step_->tensors[tensor];
  const uint64_t bad = first_not_finite(gradient, spec.type, spec.count);
  if (bad == spec.count) return;
  throw Error(ErrorKind::usage, "gradient " + spec.name + " of rank " +
                                    std::to_string(step_->collectives->rank()) +
                                    " is not finite at element " + std::to_string(bad));
}

// Marks the tensor as submitted.
Coordinator::Place GradientEngine::enter(uint32_t tensor, void* result, const void* gradient,
                                         bool present) {
  check_usable("submit");
  if (tensor >= step_->tensors.size()) {
    throw Error(ErrorKind::usage, "there is no gradient number " + std::to_string(tensor));
  }
  if (present && step_->options.check_finite) check_finite(tensor, gradient);
  const MutexLock lock(step_->mutex);
  step_->check_runs("submit");
  Pending& p = step_->pending[tensor];
  if (p.submitted) {
    throw Error(ErrorKind::usage, "gradient " + step_->tensors[tensor].name +
                                      " was submitted twice in one step: wait() ends a step");
  }
  const Coordinator::Place place = coordinator_->enter(tensor);
  p = {result, true, present, false, now_ns()};
  if (++step_->submitted == 1 && step_->collectives->ranks() > 1) reducing_.emplace();
  return place;
}

// Copies the gradient to its place; null: this rank has none.
void GradientEngine::fill(uint32_t tensor, const Coordinator::Place& place, const void* gradient) {
  const int64_t begin = now_ns();
  place.bucket->take(place.index, gradient, scale_);
  bool wake = false;
  {
    const MutexLock lock(step_->mutex);
    Pending& p = step_->pending[tensor];
    p.since_ns = now_ns();
    step_->stats.submit_copy_ns += p.since_ns - begin;
    wake = coordinator_->filled(tensor, p.since_ns);
  }
  if (wake) step_->work.notify_one();
}

void GradientEngine::wait() {
  check_usable("wait");
  const trace::Span span(kWait);
  MutexLock lock(step_->mutex);
  if (!step_->error && step_->submitted < step_->tensors.size()) {
    std::vector<uint32_t> absent;
    for (uint32_t t = 0; t < step_->tensors.size(); ++t) {
      if (!step_->pending[t].submitted) absent.push_back(t);
    }
    throw Error(ErrorKind::usage,
                "rank " + std::to_string(step_->collectives->rank()) +
                    " waits for gradients that it did not submit: " + step_->names(absent));
  }
  // A step that is complete is good, even if a rank has closed its engine since.
  if (step_->reduced < step_->tensors.size()) step_->check_runs("wait");
  while (step_->reduced < step_->tensors.size() && !step_->ended) step_->done.wait(lock);
  if (step_->reduced < step_->tensors.size()) step_->check_runs("wait");
  for (Pending& p : step_->pending) p = {};
  step_->submitted = step_->reduced = 0;
  ++step_->stats.steps;
}

void GradientEngine::wait_for(uint32_t tensor) {
  check_usable("wait_for");
  if (tensor >= step_->tensors.size()) {
    throw Error(ErrorKind::usage, "there is no gradient number " + std::to_string(tensor));
  }
  MutexLock lock(step_->mutex);
  if (step_->pending[tensor].reduced) return;
  const trace::Span span(kWait);
  step_->check_runs("wait_for");
  ++watchers_;
  while (!step_->pending[tensor].reduced && !step_->ended) step_->done.wait(lock);
  --watchers_;
  if (!step_->pending[tensor].reduced) step_->check_runs("wait_for");
}

std::vector<uint32_t> GradientEngine::contributors() const {
  const MutexLock lock(step_->mutex);
  return contributors_;
}

GradientStats GradientEngine::stats() const {
  const MutexLock lock(step_->mutex);
  return step_->stats;
}

// ----------------------------------------------------------------------------- the progress thread

void GradientEngine::run() noexcept {
  pthread_setname_np(pthread_self(), "nostall-sync");
  try {
    cores_.take(step_->options.cores);
    numbered([this] {
      while (true) {
        const Coordinator::Turn turn = coordinator_->next();
        if (!turn.bucket) break;
        reduce(turn);
      }
    });
  } catch (...) {
    step_->collectives->hang_up();
    const MutexLock lock(step_->mutex);
    step_->error = std::current_exception();
  }
  {
    const MutexLock lock(step_->mutex);
    step_->ended = true;
    reducing_.reset();
  }
  step_->done.notify_all();
}

void GradientEngine::reduce(const Coordinator::Turn& turn) {
  static const trace::Kind kReduce =
      trace::define("sync", "reduce", {"tensors", "bytes", "first tensor"});
  Bucket& bucket = *turn.bucket;
  const auto list = bucket.tensors();
  trace::Span span(kReduce);
  span.values = {static_cast<int64_t>(list.size()), static_cast<int64_t>(bucket.bytes()),
                 static_cast<int64_t>(list.front())};
  taken_.clear();
  {
    const MutexLock lock(step_->mutex);
    for (const uint32_t t : list) taken_.push_back(step_->pending[t]);
  }
  Moments at;
  at.agreed = turn.agreed_ns;
  at.begin = now_ns();
  for (size_t i = 0; i < list.size() && step_->options.mode == Mode::negotiated; ++i) {
    bucket.take(i, taken_[i].present ? taken_[i].gradient : nullptr, scale_);
  }
  at.copied = now_ns();
  const int64_t waited = step_->collectives->waited_ns();
  sum(bucket);
  at.summed = now_ns();
  const int64_t waited_here = step_->collectives->waited_ns() - waited;
  for (size_t i = 0; i < list.size(); ++i) {
    if (void* const result = taken_[i].gradient) bucket.give(i, result);
  }
  at.end = now_ns();
  if (timeline_) {
    std::vector<int64_t> ready;
    for (const Pending& p : taken_) ready.push_back(p.since_ns);
    timeline_->add(list, ready, at);
  }
  const bool complete = record(bucket, at, waited_here);
  if (complete && timeline_) timeline_->write();
}

void GradientEngine::sum(Bucket& bucket) {
  in_reduction_ = bucket.tensors();
  try {
    bucket.reduce();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::peer) throw;
    throw Error(ErrorKind::peer, std::string(error.what()) + " (in the reduction of " +
                                     step_->names(bucket.tensors()) + ")");
  }
  in_reduction_ = {};
}

// Publishes the results; true: the step is complete.
bool GradientEngine::record(const Bucket& bucket, const Moments& at, int64_t waited_ns) {
  const auto list = bucket.tensors();
  bool complete = false, awaited = false;
  {
    const MutexLock lock(step_->mutex);
    for (size_t i = 0; i < list.size(); ++i) {
      contributors_[list[i]] = bucket.contributors(i);
      step_->pending[list[i]].reduced = true;
    }
    step_->reduced += list.size();
    complete = step_->reduced == step_->tensors.size();
    if (complete) reducing_.reset();
    GradientStats& stats = step_->stats;
    stats.copy_ns += at.copied - at.begin + at.end - at.summed;
    stats.reduce_ns += at.summed - at.copied;
    stats.reduce_wait_ns += std::min(waited_ns, at.summed - at.copied);
    ++stats.reductions;
    stats.tensors += list.size();
    stats.bytes += bucket.bytes();
    step_->account();
    awaited = complete || watchers_ > 0;
  }
  if (awaited) step_->done.notify_all();
  return complete;
}

// This rank waits for others, in a reduction or in an agreement.
void GradientEngine::warn_of_late(std::span<const uint32_t> missing) const {
  const bool elsewhere =
      missing.size() == 1 && step_->collectives->may_wait_elsewhere(missing.front());
  std::string ranks;
  for (const uint32_t r : missing) ranks += (ranks.empty() ? "" : ", ") + std::to_string(r);
  log(LogLevel::warning,
      "rank " + std::to_string(step_->collectives->rank()) + " has waited for " +
          std::to_string(step_->options.warn.count() / 1'000'000'000) + " s for rank " + ranks +
          (in_reduction_.empty()
               ? std::string(", which does not take part in an agreement")
               : ", which has not submitted all of " + step_->names(in_reduction_) +
                     (elsewhere ? ", or waits for other nodes" : "")) +
          step_->options.numbers);
}

}  // namespace nostall::sync
