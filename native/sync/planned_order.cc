// The planned order: plans compared and adopted by all ranks, groups that fill, stalls named.
#include "sync/planned_order.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"

namespace nostall::sync {

PlannedOrder::PlannedOrder(Step& step)
    : Coordinator(step), group_of_(step.tensors.size()), index_of_(step.tensors.size()) {
  std::vector<uint32_t> order(step.tensors.size());
  std::iota(order.rbegin(), order.rend(), 0);
  PlannedOrder::set_plan(fuse(order, step.tensors, step.options.threshold_bytes));
}

void PlannedOrder::set_plan(ReductionPlan plan) {
  std::vector<uint32_t> group_of = groups_of(plan);
  MutexLock lock(step_.mutex);
  if (step_.submitted > 0) {
    throw Error(ErrorKind::usage, "the plan changes between steps only: wait() first");
  }
  while (!idle_ && !step_.ended) step_.done.wait(lock);
  step_.check_runs("set_plan");
  compare(plan);
  try {
    adopt(plan, std::move(group_of));
  } catch (...) {
    step_.error = std::current_exception();  // there are no buffers any more
    step_.work.notify_all();
    throw;
  }
}

// The group of each tensor.
std::vector<uint32_t> PlannedOrder::groups_of(const ReductionPlan& plan) const {
  constexpr uint32_t kNone = ~uint32_t{0};
  std::vector<uint32_t> group_of(step_.tensors.size(), kNone);
  const auto refuse = [] { throw Error(ErrorKind::usage, "a plan must have every gradient once"); };
  for (uint32_t g = 0; g < plan.groups.size(); ++g) {
    for (const uint32_t t : plan.groups[g]) {
      if (t >= group_of.size() || group_of[t] != kNone) refuse();
      group_of[t] = g;
    }
  }
  if (std::find(group_of.begin(), group_of.end(), kNone) != group_of.end()) refuse();
  return group_of;
}

void PlannedOrder::compare(const ReductionPlan& plan) {
  const uint64_t fingerprint = plan.fingerprint();
  const auto all = step_.collectives->all_gather(std::as_bytes(std::span(&fingerprint, 1)));
  for (uint32_t r = 0; r < all.size(); ++r) {
    uint64_t theirs = 0;
    if (all[r].size() == sizeof theirs) std::memcpy(&theirs, all[r].data(), sizeof theirs);
    if (theirs != fingerprint) {
      throw Error(ErrorKind::peer, "rank " + std::to_string(r) +
                                       " has another plan of reductions than rank " +
                                       std::to_string(step_.collectives->rank()));
    }
  }
}

// On all ranks, or on none.
void PlannedOrder::adopt(const ReductionPlan& plan, std::vector<uint32_t> group_of) {
  groups_.clear();  // first: there may not be room for the memory of both plans
  std::vector<Group> groups;
  std::vector<uint32_t> index_of(step_.tensors.size());
  std::exception_ptr error;
  std::string failure;
  try {
    for (const auto& tensors : plan.groups) {
      Group& group = groups.emplace_back();
      group.bucket = std::make_unique<Bucket>(step_.collectives, step_.tensors);
      group.bucket->shape(tensors);
      group.missing = static_cast<uint32_t>(tensors.size());
      for (uint32_t i = 0; i < tensors.size(); ++i) index_of[tensors[i]] = i;
    }
  } catch (const std::exception& e) {
    error = std::current_exception();
    failure = std::string("cannot follow the new plan of reductions: ") + e.what();
  }
  const auto failures = step_.collectives->all_gather(std::as_bytes(std::span(failure)));
  if (error) std::rethrow_exception(error);
  for (uint32_t r = 0; r < failures.size(); ++r) {
    if (failures[r].empty()) continue;
    throw Error(ErrorKind::peer, "rank " + std::to_string(r) + " " +
                                     std::string(reinterpret_cast<const char*>(failures[r].data()),
                                                 failures[r].size()));
  }
  groups_ = std::move(groups);
  index_of_ = std::move(index_of);
  group_of_ = std::move(group_of);
  next_ = 0;
}

Coordinator::Place PlannedOrder::enter(uint32_t tensor) {
  Group& group = groups_[group_of_[tensor]];
  if (!group.begun) group.bucket->renew();
  group.begun = true;
  return {group.bucket.get(), index_of_[tensor]};
}

bool PlannedOrder::filled(uint32_t tensor, int64_t now) {
  const uint32_t group = group_of_[tensor];
  const bool complete = --groups_[group].missing == 0 && group == next_;
  if (complete) complete_ns_ = now;
  return complete;
}

Coordinator::Turn PlannedOrder::next() {
  MutexLock lock(step_.mutex);
  if (!idle_) next_ = (next_ + 1) % groups_.size();
  const int64_t begin = now_ns();
  idle_ = true;
  step_.done.notify_all();
  bool asleep = false;
  for (;; asleep = true) {
    if (step_.stop || step_.error) return {};
    if (asleep) check_for_stall();
    if (groups_[next_].missing == 0) break;
    step_.work.wait_for(lock, std::min(step_.options.warn, step_.options.timeout) / 4);
  }
  idle_ = false;
  const int64_t now = now_ns();
  step_.stats.sleep_ns += now - begin;
  if (asleep) {
    step_.stats.latency_ns += now - complete_ns_;
    step_.stats.count_oversleep(now - complete_ns_);
  }
  Group& group = groups_[next_];
  group.missing = static_cast<uint32_t>(group.bucket->tensors().size());
  group.begun = false;
  return {group.bucket.get(), 0};
}

// Names what this rank has not submitted of the next group: a warning, then an error.
void PlannedOrder::check_for_stall() {
  std::vector<uint32_t> missing;
  for (const uint32_t t : groups_[next_].bucket->tensors()) {
    if (!step_.pending[t].submitted) missing.push_back(t);
  }
  const int64_t since = step_.oldest();
  if (missing.empty() || since == 0) return;
  const int64_t waited = now_ns() - since;
  const std::string rank = "rank " + std::to_string(step_.collectives->rank());
  const std::string seconds = std::to_string(waited / 1'000'000'000) + " s";
  if (waited > step_.options.timeout.count()) {
    throw Error(ErrorKind::peer, rank + " did not submit " + step_.names(missing) + " within " +
                                     seconds +
                                     ": every rank must submit every gradient in each step");
  }
  if (waited > step_.options.warn.count() && warned_ != since) {
    warned_ = since;
    log(LogLevel::warning, rank + " has not submitted " + step_.names(missing) + " for " + seconds +
                               ": the other gradients, and all ranks, wait for it" +
                               step_.options.numbers);
  }
}

}  // namespace nostall::sync
