// Collectives in which every rank posts its data and reads the data of all others.
//
// A rank copies its data to its stage (shared memory of its own for one step) and posts the step's
// number; when all have posted, every rank folds the stages in the order of ranks. So nothing has
// to be sent back, and results have the same bits for any order of arrival. Messages larger than a
// stage take one step for each piece.
#include <algorithm>
#include <array>
#include <vector>

#include "collective/algorithms.h"

namespace nostall::collective {
namespace {

// The stages of all ranks at `step`, from a byte offset on.
std::vector<const std::byte*> stages(Steps& steps, uint64_t step, uint64_t posted, uint64_t at) {
  std::vector<const std::byte*> all(steps.ranks());
  for (uint32_t r = 0; r < steps.ranks(); ++r) all[r] = steps.shared().stage(r, step, posted) + at;
  return all;
}

uint64_t elements_in(uint64_t bytes, uint64_t element) {
  if (element > bytes) {
    throw Error(ErrorKind::usage, "elements of " + std::to_string(element) +
                                      " bytes do not fit the stage of " + std::to_string(bytes) +
                                      " bytes");
  }
  return bytes / element;
}

void fold_to(std::byte* out, Steps& steps, uint64_t step, uint64_t count, const Reducer& reducer) {
  const uint64_t bytes = count * reducer.element_bytes();
  SharedMemory& shared = steps.shared();
  if (steps.ranks() == 1) {
    copy(out, shared.stage(0, step, bytes), bytes, false);
    return;
  }
  reducer.combine(out, shared.stage(0, step, bytes), shared.stage(1, step, bytes), count);
  for (uint32_t r = 2; r < steps.ranks(); ++r) {
    reducer.combine(out, out, shared.stage(r, step, bytes), count);
  }
}

}  // namespace

void posted_barrier(Steps& steps) {
  const uint64_t step = steps.begin_step();
  steps.post(step);
  steps.wait_for_posts(step);
}

void posted_allreduce(Steps& steps, const Message& message) {
  const uint64_t element = message.element();
  const uint64_t piece = elements_in(kStageBytes, element);
  uint64_t at = 0;
  do {
    const uint64_t n = std::min(piece, message.count - at), bytes = n * element;
    const uint64_t step = steps.begin_step();
    copy(steps.shared().stage(steps.rank(), step, bytes), message.in + at * element, bytes, false);
    steps.post(step);
    steps.wait_for_posts(step);
    if (n > 0) fold_to(message.out + at * element, steps, step, n, *message.reducer);
    at += n;
  } while (at < message.count);
}

void posted_reduce(Steps& steps, const Message& message, uint32_t root) {
  const uint64_t bytes = message.bytes();
  const uint64_t step = steps.begin_step();
  copy(steps.shared().stage(steps.rank(), step, bytes), message.in, bytes, false);
  steps.post(step);
  if (steps.rank() == root) {
    steps.wait_for_posts(step);
    if (bytes > 0) fold_to(message.out, steps, step, message.count, *message.reducer);
  } else {
    if (steps.shared().header().sleepers.load(std::memory_order_seq_cst) > 0 &&
        steps.all_posted(step)) {
      steps.wake(kAllPosted, step);
    }
    steps.check_arrived(step);
  }
  steps.finish_early(step);
}

void posted_broadcast(Steps& steps, const Message& message, uint32_t root) {
  const uint64_t bytes = message.bytes();
  const uint64_t step = steps.begin_step();
  std::byte* stage = steps.shared().stage(root, step, bytes);
  if (steps.rank() == root) {
    copy(stage, message.in, bytes, false);
    steps.post(step);
    steps.check_arrived(step);
  } else {
    steps.post(step);
    steps.wait_for_post(step, root);
    copy(message.out, stage, bytes, false);
  }
  steps.finish_early(step);
}

// A rank reads its own part where it is.
void posted_reduce_scatter(Steps& steps, const Message& message,
                           std::span<const uint64_t> borders) {
  const uint64_t begin = borders[steps.rank()], count = borders[steps.rank() + 1] - begin;
  const uint64_t bytes = message.bytes(), at = begin * message.element();
  const uint64_t end = at + count * message.element();
  const uint64_t step = steps.begin_step();
  std::byte* const stage = steps.shared().stage(steps.rank(), step, bytes);
  copy(stage, message.in, at, false);
  copy(stage + end, message.in + end, bytes - end, false);
  steps.post(step);
  steps.wait_for_posts(step);
  std::vector<const std::byte*> parts = stages(steps, step, bytes, at);
  parts[steps.rank()] = message.in + at;
  if (count > 0) message.reducer->fold(std::array{message.out}, parts, count, false);
}

// A rank copies what is there before it waits for the rest.
void posted_allgather(Steps& steps, const std::byte* in, std::span<const Gathered> parts) {
  const uint32_t ranks = steps.ranks();
  uint64_t most = 0, at = 0;
  for (const Gathered& part : parts) most = std::max(most, part.bytes);
  std::vector<uint32_t> missing;
  do {
    const auto bytes_of = [&](uint32_t r) {
      return std::min(kStageBytes, parts[r].bytes - std::min(at, parts[r].bytes));
    };
    const uint64_t step = steps.begin_step(), mine = bytes_of(steps.rank());
    std::byte* const stage = steps.shared().stage(steps.rank(), step, mine);
    if (mine > 0) copy(stage, in + at, mine, false);
    steps.post(step);
    const auto take = [&](uint32_t r) {
      std::byte* const to = static_cast<std::byte*>(parts[r].to) + at;
      const uint64_t bytes = bytes_of(r);
      // Only its own data may be there already: without any, `in` may be where another rank's go.
      const bool there = r == steps.rank() && to == in + at;
      if (bytes > 0 && !there) copy(to, steps.shared().stage(r, step, bytes), bytes, false);
    };
    missing.clear();
    for (uint32_t i = 0; i < ranks; ++i) {
      const uint32_t r = (steps.rank() + i) % ranks;
      steps.has_posted(step, r) ? take(r) : missing.push_back(r);
    }
    steps.wait_for_posts(step);
    for (const uint32_t r : missing) take(r);
    at += kStageBytes;
  } while (at < most);
}

}  // namespace nostall::collective
