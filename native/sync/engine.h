// sync/engine.h - reduces gradients over all ranks while the backward pass goes on. Read first.
//
//   Engine engine(config, make_node_transport(...), specs);
//   engine.set_plan(plan_reductions(graph, specs, 64 << 20));
//   engine.submit(tensor, gradient);   // from any thread, in any order, as each becomes ready
//   engine.wait();                     // all gradients hold the mean over the ranks
//
// Planned, a submit copies the gradient into the buffer of its group, while it is in the caches of
// the thread that computed it, and the progress thread copies the result out, unless the gradient
// is to stay in the buffer (submit_in_place). Negotiated, the progress thread does both.
//
// A step is one submit of every tensor on every rank, and a wait. A rank that has no gradient for a
// tensor submits null with a place for the result: it counts as zeros, and contributors() tells all
// ranks how many had one. One progress thread per engine moves everything.
//
// Modes (seed lmdbio-and-horovod, chapter 6), all with the same results:
//   planned     groups in the order of the plan; the thread sleeps until the next group is complete
//               (Horovod-TOPO, 6.3.4). No rank asks another one anything.
//   negotiated  Horovod's protocol (6.2.2): every cycle the ranks find out by an all-reduce which
//               tensors all of them have; new ones go through rank 0. With global_sleep_every (GS,
//               6.3.1): the shortest sleep of all ranks, every so many cycles; with nonblocking
//               (NBCS, 6.3.2): the all-reduce is started and tested.
//   cores       keeps the progress thread on these, the others of the process off them
//   (SCP, 6.3.3).
//
// From the first gradient of a step to its last sum the engine is an Activity (base/activity.h),
// with several ranks: what else the process does in the background waits for the forward pass.
//
// Errors: a rank that dies, or does not come in time, ends the engine: every call throws
// Error(peer) then. Tensors that do not come are named in a warning after `warn`, with the ranks
// that lack them, and end the engine after `timeout`. Planned, the rank that lacks a tensor of a
// group names it, and the others name that rank. Ranks with other tensors or plans are refused with
// the first difference.
// Thread-safety: submit() from any thread; wait() and set_plan() from one at a time. After a fork
// the child's calls throw Error(usage).
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/activity.h"
#include "base/mutex.h"
#include "sync/bucket.h"
#include "sync/order.h"
#include "sync/timeline.h"
#include "sync/transport.h"

namespace nostall::sync {

enum class Mode : uint8_t { planned, negotiated };

struct EngineConfig {
  Mode mode = Mode::planned;
  bool nonblocking = false;
  uint32_t global_sleep_every = 0;  // cycles; 0: every rank sleeps by itself
  std::vector<int> cores;
  std::chrono::nanoseconds cycle = std::chrono::milliseconds(5);         // HOROVOD_CYCLE_TIME
  std::chrono::nanoseconds test_sleep = std::chrono::microseconds(200);  // between two tests
  uint64_t threshold_bytes = uint64_t{64} << 20;  // of what is fused, negotiated
  std::chrono::nanoseconds warn = std::chrono::seconds(60);
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
  bool mean = true;           // else the sum
  bool check_finite = false;  // Error(usage) that names tensor and rank instead of NaNs everywhere
  std::string timeline;       // rank 0's file of it (sync/timeline.h); empty: none
  std::vector<std::string> shapes;  // of the first tensors: compared, and for the timeline
};

// Of the progress thread, since the engine began. Times are nanoseconds.
struct EngineStats {
  uint64_t steps = 0, reductions = 0, tensors = 0, bytes = 0;
  uint64_t cycles = 0, empty_cycles = 0;  // negotiated
  int64_t sleep_ns = 0;                   // between cycles, or until a group was complete
  int64_t order_ns = 0;                   // agreeing on what comes next
  int64_t copy_ns = 0;                    // into and out of fusion buffers
  int64_t submit_copy_ns = 0;             // into them, on the threads that submit
  int64_t reduce_ns = 0;
  // Parts of the above. Cycle latency: asleep while a gradient (planned: a whole group) was there
  // to be reduced. Stalling: waiting for other ranks meanwhile, in agreements and in reductions.
  int64_t latency_ns = 0;
  int64_t order_wait_ns = 0, reduce_wait_ns = 0;
  // How much later than asked for the thread woke: entry i counts [2^i, 2^(i+1)) microseconds,
  // the first one less than 2.
  std::array<uint64_t, 24> oversleeps{};
  int64_t user_ns = 0, system_ns = 0;  // of the processor
  uint64_t voluntary_switches = 0, involuntary_switches = 0;
};

// The entry of `oversleeps` that counts this time.
inline size_t bin_of(int64_t ns, size_t bins) noexcept {
  size_t bin = 0;
  for (int64_t us = ns / 2000; us > 0 && bin + 1 < bins; us /= 2) ++bin;
  return bin;
}

class Engine {
 public:
  // Compares the tensors of all ranks; throws Error(peer) with the first difference.
  Engine(EngineConfig config, std::unique_ptr<Transport> transport,
         std::vector<TensorSpec> tensors);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  std::span<const TensorSpec> tensors() const noexcept { return tensors_; }
  // Between steps, the same plan on all ranks, called by all of them; throws Error(usage) if it
  // does not have every tensor once, Error(peer) if ranks differ. A rank that has no memory for it
  // ends the engine on all of them.
  void set_plan(ReductionPlan plan);
  // Mode planned, between steps, called by all ranks: the root's bytes on all of them (parameters
  // at the start, an order for the next plan), and everyone's.
  std::vector<std::byte> broadcast(std::span<const std::byte> bytes, uint32_t root);
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> bytes);

  // `gradient` is replaced by the result before wait() returns; after an error it may be read until
  // the engine is gone. Without `present` its content does not count. Throws Error(usage) for the
  // second submit of a tensor in a step.
  void submit(uint32_t tensor, void* gradient, bool present = true);
  // Mode planned, types that travel as they are: as submit(), but the result stays in the group's
  // buffer. Who holds what this returns may read and write there, from the end of wait() on, for as
  // long as it likes: memory that is held is not used for another step. `gradient` is not needed
  // after the call, and may be null without `present`.
  std::shared_ptr<void> submit_in_place(uint32_t tensor, const void* gradient, bool present = true);
  // Until every tensor is reduced. Throws Error(usage) that names tensors nobody submitted here.
  void wait();
  // Until that one is, in this step.
  void wait_for(uint32_t tensor);
  // Of the last step: ranks that had a gradient, per tensor.
  std::vector<uint32_t> contributors() const;

  EngineStats stats() const;

 private:
  struct Pending {
    void* gradient = nullptr;  // null: the result stays in the bucket
    bool submitted = false, present = false, reduced = false;
    int64_t since_ns = 0;
  };

  Bucket* enter(uint32_t tensor, void* result, const void* gradient, bool present);
  void fill(uint32_t tensor, Bucket& bucket, const void* gradient);
  void adopt(ReductionPlan plan, std::vector<uint32_t> group) NOSTALL_REQUIRES(mutex_);

  void run() noexcept;
  void planned_loop();
  void negotiated_loop();
  // One cycle's agreement: the tensors that all ranks have, in one order. False: a rank shuts down.
  bool negotiate(std::vector<uint32_t>& ready);
  void control(std::span<uint64_t> words);
  void add_new(std::vector<uint32_t>& ready);
  void reduce(Bucket& bucket);
  void sleep_cycle(uint64_t cycle, int64_t previous_ns);
  void name_lacking(int64_t oldest, bool warn, bool give_up);
  void tell_late(std::span<const uint32_t> missing) const;
  void check_for_stall() NOSTALL_REQUIRES(mutex_);
  [[noreturn]] void stalled(const std::vector<uint32_t>& missing, int64_t since);
  std::string names(const std::vector<uint32_t>& tensors) const;
  void check_usable(const char* call) const;
  void check_quiet(const char* call) const NOSTALL_REQUIRES(mutex_);
  void compare_tensors();
  void account() NOSTALL_REQUIRES(mutex_);
  void partition_cores();
  void give_cores_back() noexcept;

  const EngineConfig config_;
  std::shared_ptr<Transport> transport_;  // buckets' memory holds it too
  const std::vector<TensorSpec> tensors_;
  const double scale_;
  const int owner_;

  // Apart, for a forked child cannot destroy what the parent's threads hold or wait for.
  struct Meeting {
    Mutex mutex;
    Condition work, done;
  };
  std::unique_ptr<Meeting> meeting_ = std::make_unique<Meeting>();
  Mutex& mutex_ = meeting_->mutex;
  Condition &work_ = meeting_->work, &done_ = meeting_->done;
  std::vector<Pending> pending_ NOSTALL_GUARDED_BY(mutex_);
  std::vector<uint32_t> contributors_ NOSTALL_GUARDED_BY(mutex_);
  uint64_t reduced_ NOSTALL_GUARDED_BY(mutex_) = 0;  // tensors, in this step
  uint64_t submitted_ NOSTALL_GUARDED_BY(mutex_) = 0;
  unsigned watchers_ NOSTALL_GUARDED_BY(mutex_) = 0;  // threads in wait_for()
  ReductionPlan plan_ NOSTALL_GUARDED_BY(mutex_);
  // Of the plan's groups; missing_: tensors a group waits for; begun_: has tensors of this step.
  std::vector<std::unique_ptr<Bucket>> buckets_ NOSTALL_GUARDED_BY(mutex_);
  std::vector<uint32_t> group_of_ NOSTALL_GUARDED_BY(mutex_), missing_ NOSTALL_GUARDED_BY(mutex_);
  std::vector<bool> begun_ NOSTALL_GUARDED_BY(mutex_);
  size_t next_ NOSTALL_GUARDED_BY(mutex_) = 0;   // group
  bool idle_ NOSTALL_GUARDED_BY(mutex_) = true;  // the thread holds no group
  bool stop_ NOSTALL_GUARDED_BY(mutex_) = false;
  int64_t complete_ns_ NOSTALL_GUARDED_BY(mutex_) =
      0;  // when the group that is next became complete
  std::exception_ptr error_ NOSTALL_GUARDED_BY(mutex_);
  EngineStats stats_ NOSTALL_GUARDED_BY(mutex_);
  // From a step's first gradient to its last sum.
  std::optional<Activity> reducing_ NOSTALL_GUARDED_BY(mutex_);

  // Of a tensor in its group. Changes with the plan, between steps, and is read within a step.
  std::vector<uint32_t> index_of_;

  // Of the progress thread.
  std::vector<Pending> taken_;  // what was submitted of the group in reduction
  std::span<const uint32_t> in_reduction_;
  int64_t warned_ = 0;
  std::vector<uint32_t> cache_;  // tensors whose order is known, in that order
  std::vector<bool> cached_, announced_;
  std::vector<std::vector<bool>> table_;  // rank 0: who has announced each tensor
  std::unique_ptr<Bucket> shared_bucket_;
  std::vector<std::pair<int, std::vector<uint8_t>>> moved_;  // threads and their cores before
  int64_t agreed_ns_ = 0;                                    // on what is reduced now

  std::unique_ptr<Timeline> timeline_;  // the progress thread's

  std::thread thread_;
};

}  // namespace nostall::sync
