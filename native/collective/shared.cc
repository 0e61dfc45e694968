// An allreduce of buffers that lie in shared arenas: they are reduced where they are.
//
// Each rank posts the offsets of its input and output and counts itself as ready. When all are, the
// message is cut into pieces of about 32 KiB. Every rank claims the next piece that is not taken
// (one atomic counter), folds the inputs of all ranks in the order of ranks, and writes the result
// to the outputs of all. A second counter says how many pieces are finished; the call ends when all
// are. A rank that is slow, or not running, claims fewer pieces. If any buffer lies in no arena,
// all ranks see that in the posted offsets and return before anything is written.
#include <algorithm>
#include <vector>

#include "collective/algorithms.h"

namespace nostall::collective {
namespace {

constexpr uint64_t kCountBits24 = 24;
constexpr uint64_t kPieceBytes = 32 << 10;

// Counts what happens in a step; needs no reset. Returns the count with this one.
uint64_t bump(Word& word, uint64_t step) {
  uint64_t seen = word.load(std::memory_order_seq_cst);
  for (;;) {
    const uint64_t next = seen >> kCountBits24 == step ? seen + 1 : step << kCountBits24 | 1;
    if (word.compare_exchange_weak(seen, next, std::memory_order_seq_cst)) {
      return next & ((uint64_t{1} << kCountBits24) - 1);
    }
  }
}

// The last rank to count wakes the ranks that wait for all.
void bump_and_wait(Steps& steps, Word& word, uint64_t step, uint64_t all, bool counts) {
  const uint64_t target = step << kCountBits24 | all;
  SharedMemory& shared = steps.shared();
  if (counts && bump(word, step) == all) {
    if (shared.header().sleepers.load(std::memory_order_seq_cst) > 0) {
      steps.wake(shared.key(word), target);
    }
    return;
  }
  steps.wait([&] { return word.load(std::memory_order_seq_cst) == target; },
             {{shared.key(word), target}});
}

struct Offsets {
  Word in, out;
};
constexpr uint64_t kNotShared = ~uint64_t{0};

}  // namespace

bool shared_allreduce(Steps& steps, const Message& message, const Arrival& arrival) {
  SharedMemory& shared = steps.shared();
  Header& h = shared.header();
  const uint64_t step = arrival.step;
  const uint32_t ranks = steps.ranks();
  const auto offsets = [&](uint32_t r) {
    return reinterpret_cast<Offsets*>(shared.post(r, step).data.data());
  };
  Offsets* mine = offsets(steps.rank());
  mine->in.store(shared.arena_offset(message.in, message.bytes()).value_or(kNotShared),
                 std::memory_order_relaxed);
  mine->out.store(shared.arena_offset(message.out, message.bytes()).value_or(kNotShared),
                  std::memory_order_relaxed);
  steps.check_arrived(step);
  bump_and_wait(steps, h.ready[step % 2].value, step, ranks, true);

  std::vector<const std::byte*> ins(ranks), from(ranks);
  std::vector<std::byte*> outs(ranks), to(ranks);
  for (uint32_t r = 0; r < ranks; ++r) {
    const uint64_t in = offsets(r)->in.load(std::memory_order_relaxed);
    const uint64_t out = offsets(r)->out.load(std::memory_order_relaxed);
    if (in == kNotShared || out == kNotShared) return false;  // all read the same: all return here
    if (!shared.in_arenas(in, message.bytes()) || !shared.in_arenas(out, message.bytes())) {
      steps.fail(Error(ErrorKind::corruption, "rank " + std::to_string(r) +
                                                  " names data outside of the shared arenas; "
                                                  "start the job again"));
    }
    ins[r] = shared.at_offset(in);
    outs[r] = shared.at_offset(out);
  }
  const uint64_t element = message.element();
  const uint64_t most = (uint64_t{1} << kCountBits24) - 1 - ranks;
  const uint64_t per_piece =
      std::max({uint64_t{1}, kPieceBytes / element, message.count / most + 1});
  const uint64_t pieces = (message.count + per_piece - 1) / per_piece;
  const bool stream = message.bytes() >= kStreamFrom;
  Word& done = h.done[step % 2].value;
  bool finished_last = false;
  for (;;) {
    const uint64_t piece = bump(h.claim[step % 2].value, step) - 1;
    if (piece >= pieces) break;
    const uint64_t at = piece * per_piece * element;
    const uint64_t n = std::min(per_piece, message.count - piece * per_piece);
    for (uint32_t r = 0; r < ranks; ++r) {
      from[r] = ins[r] + at;
      to[r] = outs[r] + at;
    }
    message.reducer->fold(to, from, n, stream);
    finished_last = bump(done, step) == pieces;
  }
  if (!finished_last) {
    bump_and_wait(steps, done, step, pieces, false);
  } else if (h.sleepers.load(std::memory_order_seq_cst) > 0) {
    steps.wake(shared.key(done), step << kCountBits24 | pieces);
  }
  steps.all_arrived(step);
  return true;
}

}  // namespace nostall::collective
