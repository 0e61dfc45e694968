// The textbook's algorithms, on messages between pairs of ranks.
//
// A channel leads from each rank to each other one: two chunks of memory, and two counters, of
// chunks sent and of chunks received. Counters only grow, so they say which of the two chunks is
// free.
//   recursive doubling  in round i each rank swaps its whole sum with the rank whose number differs
//                       in bit i: log2(p) rounds
//   ring                p-th parts go round twice: summed on the first round, stored on the second
//   RSA (Rabenseifner)  recursive halving of the message, then doubling back
//   binomial            a tree: in round i the ranks with bit i send to those without
// Numbers of ranks that are no power of two: the first ranks hand their data to a neighbour before,
// and get the result after. Sums are combined in the order of ranks.
#include <algorithm>
#include <bit>
#include <exception>
#include <vector>

#include "collective/algorithms.h"

namespace nostall::collective {
namespace {

// Messages between two ranks. Since counters only grow, these algorithms need one step per call,
// to compare what is called.
class Pairs {
 public:
  explicit Pairs(Steps& steps) : steps_(steps), shared_(steps.shared()) {
    const uint64_t step = steps_.begin_step();
    steps_.post(step);
    steps_.check_arrived(step);
    step_ = step;
  }
  // Every rank posted in this step; nothing of it is read later. After an exception others may still
  // wait for what this rank was to send.
  ~Pairs() {
    if (std::uncaught_exceptions() == exceptions_) steps_.finish_early(step_);
  }
  Pairs(const Pairs&) = delete;
  Pairs& operator=(const Pairs&) = delete;

  // Sends and receives at the same time; whichever count is 0 is left out. `take(at, chunk, n)` is
  // called for what is received, n whole elements from element `at` on.
  template <typename Take>
  void exchange(uint32_t to, const std::byte* data, uint64_t send_count, uint32_t from,
                uint64_t receive_count, uint64_t element, Take take) {
    const uint64_t piece = std::max<uint64_t>(1, kChannelChunk / element);
    if (element > kChannelChunk) {
      throw Error(ErrorKind::usage, "elements of " + std::to_string(element) +
                                        " bytes are too large for this algorithm");
    }
    if (send_count > 0) shared_.allocate_channel(steps_.rank(), to);
    if (receive_count > 0) shared_.allocate_channel(from, steps_.rank());
    uint64_t sent = 0, received = 0;
    while (sent < send_count || received < receive_count) {
      if (sent < send_count && may_send(to)) {
        const uint64_t n = std::min(piece, send_count - sent);
        send_chunk(to, data + sent * element, n * element);
        sent += n;
      } else if (received < receive_count && may_receive(from)) {
        const uint64_t n = std::min(piece, receive_count - received);
        const uint64_t number = shared_.received(from, steps_.rank()).load();
        take(received, shared_.chunk(from, steps_.rank(), number), n);
        steps_.publish(shared_.received(from, steps_.rank()), number + 1);
        received += n;
      } else {
        wait(to, sent < send_count, from, received < receive_count);
      }
    }
  }
  void send(uint32_t to, const std::byte* data, uint64_t count, uint64_t element) {
    exchange(to, data, count, to, 0, element, [](uint64_t, const std::byte*, uint64_t) {});
  }

 private:
  bool may_send(uint32_t to) const {
    return shared_.sent(steps_.rank(), to).load(std::memory_order_seq_cst) <
           shared_.received(steps_.rank(), to).load(std::memory_order_seq_cst) + 2;
  }
  bool may_receive(uint32_t from) const {
    return shared_.received(from, steps_.rank()).load(std::memory_order_seq_cst) <
           shared_.sent(from, steps_.rank()).load(std::memory_order_seq_cst);
  }
  void send_chunk(uint32_t to, const std::byte* data, uint64_t bytes) {
    Word& sent = shared_.sent(steps_.rank(), to);
    const uint64_t number = sent.load(std::memory_order_relaxed);
    copy(shared_.chunk(steps_.rank(), to, number), data, bytes, false);
    steps_.publish(sent, number + 1);
  }
  void wait(uint32_t to, bool sends, uint32_t from, bool receives) {
    const Word& room = shared_.received(steps_.rank(), to);
    const Word& data = shared_.sent(from, steps_.rank());
    Want out{0, ~uint64_t{0}}, in{0, ~uint64_t{0}};
    if (sends) out = {shared_.key(room), room.load(std::memory_order_seq_cst) + 1};
    if (receives) in = {shared_.key(data), data.load(std::memory_order_seq_cst) + 1};
    steps_.wait([&] { return (sends && may_send(to)) || (receives && may_receive(from)); },
                {out, in});
  }

  Steps& steps_;
  SharedMemory& shared_;
  const int exceptions_ = std::uncaught_exceptions();
  uint64_t step_ = 0;
};

// Adds what is received to `sum`, on the side where it belongs in rank order.
auto adding(std::byte* sum, const Reducer& reducer, bool from_the_left) {
  return [=, &reducer](uint64_t at, const std::byte* chunk, uint64_t n) {
    std::byte* here = sum + at * reducer.element_bytes();
    if (from_the_left) {
      reducer.combine(here, chunk, here, n);
    } else {
      reducer.combine(here, here, chunk, n);
    }
  };
}
auto storing(std::byte* to, uint64_t element) {
  return [=](uint64_t at, const std::byte* chunk, uint64_t n) {
    copy(to + at * element, chunk, n * element, false);
  };
}

void start_from_own(const Message& m) {
  if (m.in != m.out) copy(m.out, m.in, m.bytes(), false);
}

// Ranks beyond a power of two hand their data to a neighbour first and get the result last. The
// ranks that stay are numbered anew, in order.
struct Folded {
  uint32_t power, extra;
  int64_t number;  // -1: has handed over
  uint32_t rank_of(uint32_t n) const { return n < extra ? 2 * n + 1 : n + extra; }
};

Folded fold_in(Pairs& pairs, Steps& steps, const Message& m) {
  const uint32_t p = steps.ranks(), me = steps.rank();
  const uint32_t power = std::bit_floor(p), extra = p - power;
  Folded f{power, extra, me < 2 * extra ? me / 2 : me - extra};
  if (me >= 2 * extra) return f;
  if (me % 2 == 0) {
    pairs.send(me + 1, m.out, m.count, m.element());
    f.number = -1;
  } else {
    pairs.exchange(me, nullptr, 0, me - 1, m.count, m.element(), adding(m.out, *m.reducer, true));
  }
  return f;
}

void fold_out(Pairs& pairs, Steps& steps, const Message& m, const Folded& f) {
  const uint32_t me = steps.rank();
  if (me >= 2 * f.extra) return;
  if (me % 2 == 1) {
    pairs.send(me - 1, m.out, m.count, m.element());
  } else {
    pairs.exchange(me, nullptr, 0, me + 1, m.count, m.element(), storing(m.out, m.element()));
  }
}

}  // namespace

void recursive_doubling_allreduce(Steps& steps, const Message& m) {
  Pairs pairs(steps);
  start_from_own(m);
  const Folded f = fold_in(pairs, steps, m);
  // What is sent must not change while received data is added.
  std::vector<std::byte> before(f.number >= 0 ? m.bytes() : 0);
  for (uint32_t bit = 1; f.number >= 0 && bit < f.power; bit *= 2) {
    const uint32_t partner = static_cast<uint32_t>(f.number) ^ bit;
    const uint32_t rank = f.rank_of(partner);
    copy(before.data(), m.out, m.bytes(), false);
    pairs.exchange(rank, before.data(), m.count, rank, m.count, m.element(),
                   adding(m.out, *m.reducer, partner < f.number));
  }
  fold_out(pairs, steps, m, f);
}

void ring_allreduce(Steps& steps, const Message& m) {
  Pairs pairs(steps);
  start_from_own(m);
  const uint32_t p = steps.ranks(), me = steps.rank();
  const uint32_t right = (me + 1) % p, left = (me + p - 1) % p;
  const auto begin = [&](uint32_t part) { return m.count * part / p; };
  const auto size = [&](uint32_t part) { return begin(part + 1) - begin(part); };
  const uint64_t e = m.element();
  for (uint32_t round = 0; round + 1 < p; ++round) {
    const uint32_t out = (me + p - round) % p, in = (me + 2 * p - round - 1) % p;
    pairs.exchange(right, m.out + begin(out) * e, size(out), left, size(in), e,
                   adding(m.out + begin(in) * e, *m.reducer, true));
  }
  for (uint32_t round = 0; round + 1 < p; ++round) {
    const uint32_t out = (me + 1 + p - round) % p, in = (me + p - round) % p;
    pairs.exchange(right, m.out + begin(out) * e, size(out), left, size(in), e,
                   storing(m.out + begin(in) * e, e));
  }
}

void rsa_allreduce(Steps& steps, const Message& m) {
  Pairs pairs(steps);
  start_from_own(m);
  const Folded f = fold_in(pairs, steps, m);
  const uint64_t e = m.element();
  struct Half {
    uint32_t partner;
    uint64_t begin, middle, end;
    bool upper;
  };
  std::vector<Half> halves;
  uint64_t begin = 0, end = m.count;
  for (uint32_t bit = f.power / 2; f.number >= 0 && bit > 0; bit /= 2) {
    const Half h{f.rank_of(static_cast<uint32_t>(f.number) ^ bit), begin, begin + (end - begin) / 2,
                 end, (static_cast<uint32_t>(f.number) & bit) != 0};
    const uint64_t give = h.upper ? h.begin : h.middle,
                   give_n = h.upper ? h.middle - h.begin : h.end - h.middle;
    (h.upper ? begin : end) = h.middle;
    pairs.exchange(h.partner, m.out + give * e, give_n, h.partner, end - begin, e,
                   adding(m.out + begin * e, *m.reducer, h.upper));
    halves.push_back(h);
  }
  for (auto h = halves.rbegin(); h != halves.rend(); ++h) {
    const uint64_t have = h->upper ? h->middle : h->begin, get = h->upper ? h->begin : h->middle;
    const uint64_t low = h->middle - h->begin, high = h->end - h->middle;
    pairs.exchange(h->partner, m.out + have * e, h->upper ? high : low, h->partner,
                   h->upper ? low : high, e, storing(m.out + get * e, e));
  }
  fold_out(pairs, steps, m, f);
}

// Ranks relative to the root; only a commutative operation may be summed in that order.
void binomial_reduce(Steps& steps, const Message& m, uint32_t root) {
  Pairs pairs(steps);
  const uint32_t p = steps.ranks(), me = (steps.rank() + p - root) % p;
  std::vector<std::byte> own(steps.rank() == root ? 0 : m.bytes());
  std::byte* sum = steps.rank() == root ? m.out : own.data();
  if (sum != m.in) copy(sum, m.in, m.bytes(), false);
  for (uint32_t bit = 1; bit < p; bit *= 2) {
    if ((me & bit) != 0) {
      pairs.send((me - bit + root) % p, sum, m.count, m.element());
      return;
    }
    if (me + bit < p) {
      pairs.exchange(steps.rank(), nullptr, 0, (me + bit + root) % p, m.count, m.element(),
                     adding(sum, *m.reducer, false));
    }
  }
}

void binomial_broadcast(Steps& steps, const Message& m, uint32_t root) {
  Pairs pairs(steps);
  const uint32_t p = steps.ranks(), me = (steps.rank() + p - root) % p;
  const std::byte* data = me == 0 ? m.in : m.out;
  uint32_t bit = me == 0 ? std::bit_ceil(p) : me & (~me + 1);
  if (me != 0) {
    pairs.exchange(steps.rank(), nullptr, 0, (me - bit + root) % p, m.count, m.element(),
                   storing(m.out, m.element()));
  }
  for (bit /= 2; bit > 0; bit /= 2) {
    if (me + bit < p) pairs.send((me + bit + root) % p, data, m.count, m.element());
  }
}

}  // namespace nostall::collective
