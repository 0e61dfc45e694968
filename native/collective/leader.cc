// One rank, the leader, reduces what all have copied to shared memory, and publishes the result.
//
// A message is cut into pieces that fit a stage (the memory in which a rank posts its data for a
// step). In each step every rank copies its piece to its stage and posts it. The leader folds the
// stages into the step's result and publishes it; the ranks that want it copy it out.
//   static leader   rank 0, or the root; it waits for all and folds in the order of ranks
//   by arrival      the first rank to arrive, found by a ticket; it adds each stage as it is posted
//                   [Mohammadalizadehbakhtevari 2021, alg. 4.1]
#include <algorithm>
#include <vector>

#include "collective/algorithms.h"

namespace nostall::collective {
namespace {

// The leader's side of one piece. By arrival: adds the stages that are posted. Otherwise
// waits for all and folds in rank order.
void lead(Steps& steps, const Message& message, uint64_t step, uint64_t at, uint64_t n,
          bool by_arrival) {
  SharedMemory& shared = steps.shared();
  const uint64_t bytes = n * message.element();
  std::byte* sum = shared.result(step);
  if (!by_arrival) {
    steps.wait_for_posts(step);
    copy(sum, shared.stage(0, step, bytes), bytes, false);
    for (uint32_t r = 1; r < steps.ranks(); ++r) {
      message.reducer->combine(sum, sum, shared.stage(r, step, bytes), n);
    }
    return;
  }
  copy(sum, message.in + at, bytes, false);
  std::vector<uint32_t> missing;
  for (uint32_t r = 0; r < steps.ranks(); ++r) {
    if (r != steps.rank()) missing.push_back(r);
  }
  while (!missing.empty()) {
    const auto there = [&](uint32_t r) {
      return shared.post(r, step).flag.load(std::memory_order_seq_cst) == step;
    };
    steps.wait([&] { return std::any_of(missing.begin(), missing.end(), there); },
               {{kAnyPosted, step}});
    for (size_t i = 0; i < missing.size();) {
      const uint32_t r = missing[i];
      if (!there(r)) {
        ++i;
        continue;
      }
      steps.check_arrived(step);
      message.reducer->combine(sum, sum, shared.stage(r, step, bytes), n);
      missing.erase(missing.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  steps.all_arrived(step);
}

uint32_t first_to_arrive(Steps& steps) {
  const Arrival arrival = arrive(steps, false);
  SharedMemory& shared = steps.shared();
  Word& leader = shared.header().result[arrival.step % 2].value;
  const uint64_t base = arrival.step << 16;
  if (arrival.place == 0) {
    steps.publish(leader, base | steps.rank());
  } else {
    steps.wait([&] { return leader.load(std::memory_order_seq_cst) >> 16 == arrival.step; },
               {{shared.key(leader), base}});
  }
  const auto rank = static_cast<uint32_t>(leader.load(std::memory_order_seq_cst) & 0xffffu);
  steps.check_arrived(arrival.step);
  steps.finish_early(arrival.step);
  return rank;
}

void run(Steps& steps, const Message& message, uint32_t leader, bool by_arrival, int64_t root) {
  SharedMemory& shared = steps.shared();
  const uint64_t element = message.element();
  if (element > kStageBytes) {
    throw Error(ErrorKind::usage, "elements of " + std::to_string(element) +
                                      " bytes are too large for a leader's stage");
  }
  const uint64_t piece = kStageBytes / element;
  uint64_t at = 0;
  do {
    const uint64_t n = std::min(piece, message.count - at), bytes = n * element;
    const uint64_t step = steps.begin_step();
    copy(shared.stage(steps.rank(), step, bytes), message.in + at * element, bytes, false);
    steps.post(step);
    Word& ready = shared.header().done[step % 2].value;
    const uint64_t stamp = step << 24;
    if (steps.rank() == leader) {
      lead(steps, message, step, at * element, n, by_arrival);
      steps.publish(ready, stamp);
    } else {
      if (shared.header().sleepers.load(std::memory_order_seq_cst) > 0 && steps.all_posted(step)) {
        steps.wake(kAllPosted, step);
      }
    }
    if (root < 0 || steps.rank() == static_cast<uint32_t>(root)) {
      steps.wait([&] { return ready.load(std::memory_order_seq_cst) == stamp; },
                 {{shared.key(ready), stamp}});
      copy(message.out + at * element, shared.result(step), bytes, false);
    }
    if (root < 0) {
      steps.all_arrived(step);
    } else {
      steps.check_arrived(step);
      steps.finish_early(step);
    }
    at += n;
  } while (at < message.count);
}

}  // namespace

void leader_allreduce(Steps& steps, const Message& message, bool by_arrival) {
  run(steps, message, by_arrival ? first_to_arrive(steps) : 0, by_arrival, -1);
}

void leader_reduce(Steps& steps, const Message& message, uint32_t root, bool by_arrival) {
  run(steps, message, by_arrival ? first_to_arrive(steps) : root, by_arrival, root);
}

}  // namespace nostall::collective
