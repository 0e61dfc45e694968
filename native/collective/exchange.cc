#include <algorithm>
#include <array>
#include <vector>

#include "collective/algorithms.h"

namespace nostall::collective {
namespace {

// The stages of all ranks at `step`, from a byte offset on.
std::vector<const std::byte*> stages(Engine& engine, uint64_t step, uint64_t posted, uint64_t at) {
  std::vector<const std::byte*> all(engine.ranks());
  for (uint32_t r = 0; r < engine.ranks(); ++r)
    all[r] = engine.shared().stage(r, step, posted) + at;
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

void fold_to(std::byte* out, Engine& engine, uint64_t step, uint64_t count,
             const Reducer& reducer) {
  const uint64_t bytes = count * reducer.element_bytes();
  Segment& shared = engine.shared();
  if (engine.ranks() == 1) {
    copy(out, shared.stage(0, step, bytes), bytes, false);
    return;
  }
  reducer.combine(out, shared.stage(0, step, bytes), shared.stage(1, step, bytes), count);
  for (uint32_t r = 2; r < engine.ranks(); ++r) {
    reducer.combine(out, out, shared.stage(r, step, bytes), count);
  }
}

}  // namespace

void exchange_barrier(Engine& engine) {
  const uint64_t step = engine.begin_step();
  engine.post(step);
  engine.wait_for_posts(step);
}

void exchange_allreduce(Engine& engine, const Message& message) {
  const uint64_t element = message.element();
  const uint64_t piece = elements_in(kStageBytes, element);
  uint64_t at = 0;
  do {
    const uint64_t n = std::min(piece, message.count - at), bytes = n * element;
    const uint64_t step = engine.begin_step();
    copy(engine.shared().stage(engine.rank(), step, bytes), message.in + at * element, bytes,
         false);
    engine.post(step);
    engine.wait_for_posts(step);
    if (n > 0) fold_to(message.out + at * element, engine, step, n, *message.reducer);
    at += n;
  } while (at < message.count);
}

void exchange_reduce(Engine& engine, const Message& message, uint32_t root) {
  const uint64_t bytes = message.bytes();
  const uint64_t step = engine.begin_step();
  copy(engine.shared().stage(engine.rank(), step, bytes), message.in, bytes, false);
  engine.post(step);
  if (engine.rank() == root) {
    engine.wait_for_posts(step);
    if (bytes > 0) fold_to(message.out, engine, step, message.count, *message.reducer);
  } else if (engine.shared().header().sleepers.load(std::memory_order_seq_cst) > 0 &&
             engine.all_posted(step)) {
    engine.wake(kAllPosted, step);
  }
  engine.finish_early(step);
}

void exchange_broadcast(Engine& engine, const Message& message, uint32_t root) {
  const uint64_t bytes = message.bytes();
  const uint64_t step = engine.begin_step();
  std::byte* stage = engine.shared().stage(root, step, bytes);
  if (engine.rank() == root) {
    copy(stage, message.in, bytes, false);
    engine.post(step);
  } else {
    engine.post(step);
    engine.wait_for_post(step, root);
    copy(message.out, stage, bytes, false);
  }
  engine.finish_early(step);
}

// A piece of every rank's share at a time; each rank folds its own.
void exchange_reduce_scatter(Engine& engine, const Message& message) {
  const uint64_t element = message.element();
  const uint32_t ranks = engine.ranks();
  const uint64_t piece = elements_in(kStageBytes / ranks, element);
  uint64_t at = 0;
  do {
    const uint64_t n = std::min(piece, message.count - at), bytes = n * element;
    const uint64_t step = engine.begin_step();
    for (uint32_t r = 0; r < ranks; ++r) {
      copy(engine.shared().stage(engine.rank(), step, bytes * ranks) + r * bytes,
           message.in + (r * message.count + at) * element, bytes, false);
    }
    engine.post(step);
    engine.wait_for_posts(step);
    if (n > 0) {
      std::byte* out = message.out + at * element;
      message.reducer->fold(std::array{out},
                            stages(engine, step, bytes * ranks, engine.rank() * bytes), n, false);
    }
    at += n;
  } while (at < message.count);
}

void exchange_allgather(Engine& engine, const Message& message) {
  const uint64_t bytes = message.bytes();
  uint64_t at = 0;
  do {
    const uint64_t n = std::min(kStageBytes, bytes - at);
    const uint64_t step = engine.begin_step();
    copy(engine.shared().stage(engine.rank(), step, n), message.in + at, n, false);
    engine.post(step);
    engine.wait_for_posts(step);
    for (uint32_t i = 0; i < engine.ranks(); ++i) {
      const uint32_t r = (engine.rank() + i) % engine.ranks();
      std::byte* to = message.out + r * bytes + at;
      if (to != message.in + at) copy(to, engine.shared().stage(r, step, n), n, false);
    }
    at += n;
  } while (at < bytes);
}

}  // namespace nostall::collective
