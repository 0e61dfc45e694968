// sync/gradient_engine.h - reduces gradients over all ranks while the backward pass goes on. Read
// first.
//
//   GradientEngine engine(options, make_node_collectives(...), specs);
//   engine.set_plan(plan_reductions(graph, specs, 64 << 20));
//   engine.submit(tensor, gradient);   // from any thread, in any order, as each becomes ready
//   engine.wait();                     // all gradients hold the mean over the ranks
//
// A step is one submit of every tensor on every rank, and a wait. A rank that has no gradient for a
// tensor submits null with a place for the result: it counts as zeros, and contributors() gives all
// ranks the number that had one. One progress thread per engine reduces.
//
// Which tensors are reduced together, and when, is the Coordinator's decision (coordinator.h).
// Planned, a submit copies the gradient into the buffer of its group, while it is in the caches of
// the thread that computed it, and the progress thread copies the result out, unless the gradient
// is to stay in the buffer (submit_in_place). Negotiated, the progress thread copies both ways.
//
// Five modes [Pumma 2020, ch. 6], with the same results:
//   TOPO     mode = planned: no messages but the reductions (planned_order.h)
//   Horovod  mode = negotiated: its protocol (negotiated_order.h)
//   GS       and global_sleep_every: the shortest sleep of all ranks
//   NBCS     and nonblocking: agreements are started and tested
//   SCP      and cores: the progress thread has cores of its own (cores.h)
//
// From the first gradient of a step to its last sum the engine is an Activity (base/activity.h),
// with several ranks: what else the process does in the background waits for the forward pass.
//
// Errors: a rank that dies or exceeds the timeout ends the engine: every call throws Error(peer)
// then, on all nodes at once. Tensors that do not arrive are named in a warning after `warn`, with
// the ranks that lack them, and end the engine after `timeout`. Planned, the rank that lacks a tensor
// of a group names it, and the others of its node name that rank; ranks of other nodes may be told of
// the connection that it closed. Ranks with other tensors or plans, or of which one adds up and another
// takes means, are refused with the first difference.
// Thread-safety: submit() from any thread; wait() and set_plan() from one at a time. After a fork
// the child's calls throw Error(usage).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/activity.h"
#include "base/own_thread.h"
#include "sync/collectives.h"
#include "sync/coordinator.h"
#include "sync/cores.h"
#include "sync/options.h"
#include "sync/order.h"
#include "sync/step.h"
#include "sync/timeline_writer.h"

namespace nostall::sync {

class GradientEngine {
 public:
  // Compares the tensors of all ranks; throws Error(peer) with the first difference.
  GradientEngine(GradientOptions options, std::unique_ptr<Collectives> collectives,
                 std::vector<TensorSpec> tensors);
  ~GradientEngine();
  GradientEngine(const GradientEngine&) = delete;
  GradientEngine& operator=(const GradientEngine&) = delete;

  std::span<const TensorSpec> tensors() const noexcept { return step_->tensors; }
  // Between steps, the same plan on all ranks, called by all of them; throws Error(usage) if it
  // does not have every tensor once, Error(peer) if ranks differ. A rank that has no memory for it
  // ends the engine on all of them.
  void set_plan(ReductionPlan plan);
  // Mode planned, between steps, called by all ranks: the root's bytes on all of them (parameters
  // at the start, an order for the next plan), and the bytes of all ranks.
  std::vector<std::byte> broadcast(std::span<const std::byte> bytes, uint32_t root);
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> bytes);

  // `gradient` is replaced by the result before wait() returns; after an error it may be read until
  // the engine is gone. Without `present` its content does not count. Throws Error(usage) for the
  // second submit of a tensor in a step.
  void submit(uint32_t tensor, void* gradient, bool present = true);
  // Mode planned, types that travel as they are: as submit(), but the result stays in the group's
  // buffer. The holder of what this returns may read and write there from the end of wait() on, as
  // long as it likes: memory that is held is not used for another step. `gradient` is not needed
  // after the call, and may be null without `present`.
  std::shared_ptr<void> submit_in_place(uint32_t tensor, const void* gradient, bool present = true);
  // Until every tensor is reduced. Throws Error(usage) that names tensors not submitted here.
  void wait();
  // Until that one is, in this step.
  void wait_for(uint32_t tensor);
  // Of the last step: ranks that had a gradient, per tensor.
  std::vector<uint32_t> contributors() const;

  GradientStats stats() const;

  // Ends the progress thread; the destructor does so too. From any thread. A reduction or agreement
  // under way has a second to end: ranks that it waits for may not come. Then it ends with
  // Error(peer) here, on this node, and on ranks of other nodes that wait for this very rank; what
  // else waits there does so until its timeout. Calls that wait here, or would wait afterwards,
  // throw that error, or Error(usage) where nothing was under way.
  void stop() noexcept;

 private:
  void check_usable(const char* call) const;
  void check_quiet(const char* call) const NOSTALL_REQUIRES(step_->mutex);
  bool ends_until(std::chrono::steady_clock::time_point deadline);
  void compare_tensors();
  template <typename Call>
  auto numbered(Call&& call) const -> decltype(call());
  void check_finite(uint32_t tensor, const void* gradient) const;
  Coordinator::Place enter(uint32_t tensor, void* result, const void* gradient, bool present);
  void fill(uint32_t tensor, const Coordinator::Place& place, const void* gradient);

  // By the progress thread.
  void run() noexcept;
  void reduce(const Coordinator::Turn& turn);
  void sum(Bucket& bucket);
  bool record(const Bucket& bucket, const Moments& at, int64_t waited_ns);
  void warn_of_late(std::span<const uint32_t> missing) const;

  std::unique_ptr<Step> step_;
  const double scale_;
  const int owner_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<TimelineWriter> timeline_;  // of the progress thread
  CorePartition cores_;

  std::vector<uint32_t> contributors_ NOSTALL_GUARDED_BY(step_->mutex);
  unsigned watchers_ NOSTALL_GUARDED_BY(step_->mutex) = 0;  // threads in wait_for()
  // From a step's first gradient to its last sum.
  std::optional<Activity> reducing_ NOSTALL_GUARDED_BY(step_->mutex);

  // Of the progress thread.
  std::vector<Pending> taken_;  // what was submitted of the group in reduction
  std::span<const uint32_t> in_reduction_;

  OwnThread thread_;
};

}  // namespace nostall::sync
