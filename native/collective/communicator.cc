// The public calls: each checks its arguments, takes its turn, chooses an algorithm and runs it.
#include "collective/communicator.h"

#include <exception>
#include <string_view>
#include <utility>

#include "base/fnv.h"
#include "base/mutex.h"
#include "collective/algorithms.h"
#include "collective/arena.h"
#include "collective/selection.h"
#include "collective/signature.h"

namespace nostall::collective {
namespace {

SharedMemoryConfig checked(const CommunicatorConfig& config) {
  if (config.ranks == 0 || config.ranks >= kMaxRanks || config.rank >= config.ranks) {
    throw Error(ErrorKind::usage, "rank " + std::to_string(config.rank) + " of " +
                                      std::to_string(config.ranks) +
                                      " is not possible: there may be 1 to " +
                                      std::to_string(kMaxRanks - 1) + " ranks, counted from 0");
  }
  if (config.window_bytes < 4 * kMinSlot || config.timeout.count() <= 0) {
    throw Error(ErrorKind::usage, "window_bytes must be at least " + std::to_string(4 * kMinSlot) +
                                      " and the timeout positive, not " +
                                      std::to_string(config.window_bytes) + " and " +
                                      std::to_string(config.timeout.count()) + " ns");
  }
  return {config.job,
          config.rank,
          config.ranks,
          config.window_bytes,
          config.arena_bytes,
          config.directory,
          Selection(config.selection, config.ranks).hash()};
}

bool overlap(const void* a, uint64_t a_bytes, const void* b, uint64_t b_bytes) {
  const auto x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
  return x < y + b_bytes && y < x + a_bytes;
}

void refuse_overlap(std::string_view call, const void* in, uint64_t in_bytes, const void* out,
                    uint64_t out_bytes, const void* in_place) {
  if (in == in_place || !overlap(in, in_bytes, out, out_bytes)) return;
  throw Error(ErrorKind::usage, "the buffers of " + std::string(call) +
                                    " overlap; pass the same one twice, or separate ones");
}

void check_buffer(std::string_view call, const void* data, uint64_t bytes, size_t alignment) {
  if (bytes == 0) return;
  if (data == nullptr) {
    throw Error(ErrorKind::usage, "a buffer of " + std::string(call) + " is null");
  }
  if (reinterpret_cast<uintptr_t>(data) % alignment != 0) {
    throw Error(ErrorKind::usage, "a buffer of " + std::string(call) + " is not aligned to " +
                                      std::to_string(alignment) + " bytes, as its type must be");
  }
}

uint64_t bytes_of(uint64_t count, size_t element, uint64_t copies = 1) {
  if (count > ~uint64_t{0} / 2 / copies / element) {
    throw Error(ErrorKind::usage, std::to_string(count) + " elements of " +
                                      std::to_string(element) + " bytes exceed all memory");
  }
  return count * element * copies;
}

[[noreturn]] void throw_unavailable(Call call, Algorithm algorithm, std::string_view available) {
  throw Error(ErrorKind::usage, std::string(name_of(call)) + " has no algorithm \"" +
                                    std::string(name_of(algorithm)) + "\"; choose " +
                                    std::string(available));
}

// The algorithm that keeps the order of ranks where one is asked for that does not; in a `fixed` order
// one that is a left fold.
Algorithm in_rank_order(Algorithm algorithm, bool fixed) {
  switch (algorithm) {
    case Algorithm::arrival_leader:
      return Algorithm::leader;
    case Algorithm::ring:
    case Algorithm::rsa:
      return fixed ? Algorithm::cooperative : Algorithm::recursive_doubling;
    case Algorithm::recursive_doubling:
    case Algorithm::binomial:
      return fixed ? Algorithm::cooperative : algorithm;
    default:
      return algorithm;
  }
}

}  // namespace

struct Communicator::Impl {
  explicit Impl(const CommunicatorConfig& config)
      : memory(checked(config),
               config.join_timeout.count() > 0 ? config.join_timeout : config.timeout),
        steps(memory, config.rank, config.ranks, config.timeout, config.progress),
        arena(memory, config.rank),
        selection(config.selection, config.ranks),
        phase(memory, config.rank, config.ranks) {}

  // One call's turn. If it ends by an exception after this rank has arrived, the others cannot
  // finish it: the communicator ends at once, not by their timeout.
  class NOSTALL_THREAD_ATTRIBUTE(scoped_lockable) Turn {
   public:
    Turn(Impl& impl, const Signature& what, uint64_t bytes) NOSTALL_ACQUIRE(impl.mutex)
        : lock_(impl.checked_mutex()), steps_(impl.steps), exceptions_(std::uncaught_exceptions()) {
      impl.enter(what, bytes);
      begun_ = steps_.stats().steps;
    }
    ~Turn() NOSTALL_RELEASE() {
      if (std::uncaught_exceptions() == exceptions_) {
        steps_.complete();
      } else if (steps_.stats().steps != begun_) {
        steps_.end_by_own_error();
      }
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    MutexLock lock_;
    Steps& steps_;
    uint64_t begun_ = 0;  // steps, when the call began
    const int exceptions_;
  };

  Mutex& checked_mutex() NOSTALL_RETURNS_MUTEX(mutex) {
    if (memory.is_forked_child()) {
      throw Error(ErrorKind::usage,
                  "this process was forked from rank " + std::to_string(steps.rank()) +
                      ", which owns the communicator; make a new one in the child");
    }
    return mutex;
  }
  void enter(const Signature& what, uint64_t bytes) NOSTALL_REQUIRES(mutex) {
    ++stats.calls;
    stats.bytes += bytes;
    steps.enter(name_of(what.call), pack(what));
  }
  void check_root(Call call, uint32_t root) const {
    if (root < steps.ranks()) return;
    throw Error(ErrorKind::usage, "the root of " + std::string(name_of(call)) + " is rank " +
                                      std::to_string(root) + ", but there are only " +
                                      std::to_string(steps.ranks()) + " ranks");
  }

  void gather(const void* in, std::span<const Gathered> parts);
  // Rank r's block reaches from borders[r] to borders[r + 1].
  static void check_scatter(const void* in, const void* out, std::span<const uint64_t> borders,
                            uint32_t rank, const Reducer& reducer);
  void reduce_scatter(const void* in, void* out, std::span<const uint64_t> borders,
                      const Reducer& reducer, Order order);
  void allreduce(const Message& message, Algorithm algorithm, Order order);
  void cooperative_allreduce(const Message& message, bool by_rank);
  // Copies what is not shared to shared memory and back. False if some rank has no room for that.
  bool allreduce_in_place(const Message& message, bool shared, const Arrival& arrival);

  std::byte* allocate(uint64_t bytes) {
    const MutexLock lock(arena_mutex);
    return arena.allocate(bytes);
  }
  // nullptr also when the node has no memory: the caller can do without.
  std::byte* allocate_if_possible(uint64_t bytes) {
    try {
      return allocate(bytes);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::io) throw;
      return nullptr;
    }
  }
  bool release(const void* data) noexcept {
    // A child has none of this memory, and maybe a mutex that its parent's thread held.
    if (memory.is_forked_child()) return false;
    const MutexLock lock(arena_mutex);
    return arena.release(static_cast<const std::byte*>(data));
  }

  Mutex mutex;        // of calls
  Mutex arena_mutex;  // memory can be freed during a call
  SharedMemory memory;
  Steps steps;  // in calls, and from any thread: its ends, check(), ended_here()
  Arena arena NOSTALL_GUARDED_BY(arena_mutex);
  const Selection selection;
  Phase phase NOSTALL_GUARDED_BY(mutex);
  CommunicatorStats stats NOSTALL_GUARDED_BY(mutex);
};

Communicator::Communicator(const CommunicatorConfig& config)
    : impl_(std::make_unique<Impl>(config)) {}
Communicator::~Communicator() = default;

uint32_t Communicator::rank() const noexcept { return impl_->steps.rank(); }
uint32_t Communicator::ranks() const noexcept { return impl_->steps.ranks(); }

void Communicator::barrier() {
  const Impl::Turn turn(*impl_, {.call = Call::barrier}, 0);
  posted_barrier(impl_->steps);
}

void Communicator::allreduce(const void* in, void* out, uint64_t count, const Reducer& reducer,
                             const CallOptions& options) {
  const uint64_t bytes = bytes_of(count, reducer.element_bytes());
  check_buffer("allreduce", in, bytes, reducer.alignment());
  check_buffer("allreduce", out, bytes, reducer.alignment());
  refuse_overlap("allreduce", in, bytes, out, bytes, out);
  const Impl::Turn turn(*impl_,
                        {.call = Call::allreduce,
                         .order = options.order,
                         .algorithm = options.algorithm,
                         .elements = reducer.elements(),
                         .count = count},
                        bytes);
  Steps& steps = impl_->steps;
  const Message message{static_cast<const std::byte*>(in), static_cast<std::byte*>(out), count,
                        &reducer};
  const bool by_rank = options.order == Order::fixed || !reducer.commutative();
  if (steps.ranks() == 1 || count == 0) {
    if (count == 0) {
      posted_barrier(steps);
    } else if (in != out) {
      copy(out, in, bytes, false);
    }
    return;
  }
  const bool selects = !impl_->selection.empty() && !by_rank && bytes > kPostedBytes &&
                       options.algorithm == Algorithm::cooperative;
  if (!selects) return impl_->allreduce(message, options.algorithm, options.order);
  const bool imbalanced = impl_->phase.arrive(now_ns());
  if (imbalanced) ++impl_->stats.imbalanced;
  impl_->allreduce(message, impl_->selection.choose(bytes, imbalanced), options.order);
  impl_->phase.leave(now_ns());
}

void Communicator::Impl::allreduce(const Message& message, Algorithm algorithm, Order order) {
  const bool fixed = order == Order::fixed, by_rank = fixed || !message.reducer->commutative();
  switch (by_rank ? in_rank_order(algorithm, fixed) : algorithm) {
    case Algorithm::cooperative:
      return cooperative_allreduce(message, by_rank);
    case Algorithm::arrival_leader:
      return leader_allreduce(steps, message, true);
    case Algorithm::arrival_chain:
      return chain(steps, message, {.by_rank = by_rank, .whole = true});
    case Algorithm::leader:
      return leader_allreduce(steps, message, false);
    case Algorithm::recursive_doubling:
      return recursive_doubling_allreduce(steps, message);
    case Algorithm::ring:
      return ring_allreduce(steps, message);
    case Algorithm::rsa:
      return rsa_allreduce(steps, message);
    case Algorithm::binomial:
      binomial_reduce(steps, message, 0);
      return binomial_broadcast(steps, {message.out, message.out, message.bytes(), nullptr}, 0);
  }
}

void Communicator::Impl::cooperative_allreduce(const Message& message, bool by_rank) {
  if (message.bytes() <= kPostedBytes) return posted_allreduce(steps, message);
  const bool shared = memory.arena_offset(message.in, message.bytes()) &&
                      memory.arena_offset(message.out, message.bytes());
  const Arrival arrival = arrive(steps, shared);
  if (arrival.in_place && allreduce_in_place(message, shared, arrival)) return;
  chain_after(steps, message, {.by_rank = by_rank}, arrival);
}

bool Communicator::Impl::allreduce_in_place(const Message& message, bool shared,
                                            const Arrival& arrival) {
  const auto end = [this](std::byte* data) { release(data); };
  const std::unique_ptr<std::byte, decltype(end)> scratch(
      shared ? nullptr : allocate_if_possible(message.bytes()), end);
  if (scratch == nullptr) return shared_allreduce(steps, message, arrival);
  copy(scratch.get(), message.in, message.bytes(), false);
  if (!shared_allreduce(steps, {scratch.get(), scratch.get(), message.count, message.reducer},
                        arrival)) {
    return false;
  }
  copy(message.out, scratch.get(), message.bytes(), false);
  return true;
}

void Communicator::reduce(const void* in, void* out, uint64_t count, const Reducer& reducer,
                          uint32_t root, const CallOptions& options) {
  const uint64_t bytes = bytes_of(count, reducer.element_bytes());
  const bool is_root = root == rank();
  impl_->check_root(Call::reduce, root);
  check_buffer("reduce", in, bytes, reducer.alignment());
  if (is_root) {
    check_buffer("reduce", out, bytes, reducer.alignment());
    refuse_overlap("reduce", in, bytes, out, bytes, out);
  }
  const Impl::Turn turn(*impl_,
                        {.call = Call::reduce,
                         .root = root,
                         .order = options.order,
                         .algorithm = options.algorithm,
                         .elements = reducer.elements(),
                         .count = count},
                        bytes);
  Steps& steps = impl_->steps;
  const Message message{static_cast<const std::byte*>(in), static_cast<std::byte*>(out), count,
                        &reducer};
  const bool by_rank = options.order == Order::fixed || !reducer.commutative();
  const auto to = static_cast<int32_t>(root);
  if (count == 0) return posted_reduce(steps, message, root);
  if (steps.ranks() == 1) {
    if (in != out) copy(out, in, bytes, false);
    return;
  }
  switch (options.algorithm) {
    case Algorithm::cooperative:
      if (bytes <= kPostedBytes) return posted_reduce(steps, message, root);
      return chain(steps, message, {.root = to, .by_rank = by_rank});
    case Algorithm::arrival_leader:
      return leader_reduce(steps, message, root, !by_rank);
    case Algorithm::leader:
      return leader_reduce(steps, message, root, false);
    case Algorithm::arrival_chain:
      return chain(steps, message, {.root = to, .by_rank = by_rank, .whole = true});
    case Algorithm::binomial:
      // A tree is no left fold, and its order starts at the root.
      if (options.order == Order::fixed || (!reducer.commutative() && root != 0)) {
        return chain(steps, message, {.root = to, .by_rank = true});
      }
      return binomial_reduce(steps, message, root);
    default:
      throw_unavailable(Call::reduce, options.algorithm,
                        "cooperative, arrival_leader, arrival_chain, leader or binomial");
  }
}

void Communicator::broadcast(void* data, uint64_t bytes, uint32_t root, const CallOptions& options,
                             std::optional<DataType> type) {
  impl_->check_root(Call::broadcast, root);
  check_buffer("broadcast", data, bytes, 1);
  const Impl::Turn turn(*impl_,
                        {.call = Call::broadcast,
                         .root = root,
                         .algorithm = options.algorithm,
                         .elements = elements_of(type),
                         .count = bytes},
                        bytes);
  Steps& steps = impl_->steps;
  auto* all = static_cast<std::byte*>(data);
  const Message message{all, all, bytes, nullptr};
  if (steps.ranks() == 1) return;
  switch (options.algorithm) {
    case Algorithm::cooperative:
      if (bytes <= kPostedBytes) return posted_broadcast(steps, message, root);
      return chain(steps, message, {.root = static_cast<int32_t>(root), .broadcast = true});
    case Algorithm::binomial:
      return binomial_broadcast(steps, message, root);
    default:
      throw_unavailable(Call::broadcast, options.algorithm, "cooperative or binomial");
  }
}

void Communicator::reduce_scatter(const void* in, void* out, uint64_t count, const Reducer& reducer,
                                  Order order) {
  const uint64_t all = bytes_of(count, reducer.element_bytes(), ranks());
  std::vector<uint64_t> borders(ranks() + 1);
  for (uint32_t r = 0; r < ranks(); ++r) borders[r + 1] = borders[r] + count;
  Impl::check_scatter(in, out, borders, rank(), reducer);
  const Impl::Turn turn(*impl_,
                        {.call = Call::reduce_scatter,
                         .order = order,
                         .elements = reducer.elements(),
                         .count = count},
                        all);
  impl_->reduce_scatter(in, out, borders, reducer, order);
}

void Communicator::reduce_scatterv(const void* in, void* out, std::span<const uint64_t> counts,
                                   const Reducer& reducer, Order order) {
  if (counts.size() != ranks()) {
    throw Error(ErrorKind::usage, "a reduce_scatterv of " + std::to_string(ranks()) +
                                      " ranks has " + std::to_string(counts.size()) +
                                      " counts; give one for each");
  }
  std::vector<uint64_t> borders(1);
  Fnv sizes;
  for (const uint64_t count : counts) {
    bytes_of(count, reducer.element_bytes(), ranks());  // so that their sum is no overflow
    borders.push_back(borders.back() + count);
    sizes.number(count);
  }
  Impl::check_scatter(in, out, borders, rank(), reducer);
  const Impl::Turn turn(*impl_,
                        {.call = Call::reduce_scatterv,
                         .order = order,
                         .elements = reducer.elements(),
                         .count = sizes.value()},
                        borders.back() * reducer.element_bytes());
  impl_->reduce_scatter(in, out, borders, reducer, order);
}

void Communicator::Impl::check_scatter(const void* in, const void* out,
                                       std::span<const uint64_t> borders, uint32_t rank,
                                       const Reducer& reducer) {
  const uint64_t element = reducer.element_bytes(), all = borders.back() * element;
  const uint64_t mine = (borders[rank + 1] - borders[rank]) * element;
  check_buffer("reduce_scatter", in, all, reducer.alignment());
  check_buffer("reduce_scatter", out, mine, reducer.alignment());
  if (mine == 0 || out == static_cast<const std::byte*>(in) + borders[rank] * element) return;
  refuse_overlap("reduce_scatter", in, all, out, mine, out);
}

void Communicator::Impl::reduce_scatter(const void* in, void* out,
                                        std::span<const uint64_t> borders, const Reducer& reducer,
                                        Order order) {
  const Message message{static_cast<const std::byte*>(in), static_cast<std::byte*>(out),
                        borders.back(), &reducer};
  if (message.count == 0) return posted_barrier(steps);
  if (steps.ranks() == 1) {
    if (in != out) copy(out, in, message.bytes(), false);
    return;
  }
  if (message.bytes() <= kScatterFrom) return posted_reduce_scatter(steps, message, borders);
  const bool by_rank = order == Order::fixed || !reducer.commutative();
  chain(steps, message, {.by_rank = by_rank, .borders = borders});
}

void Communicator::allgather(const void* in, void* out, uint64_t bytes,
                             std::optional<DataType> type) {
  const uint64_t all = bytes_of(bytes, 1, ranks());
  check_buffer("allgather", in, bytes, 1);
  check_buffer("allgather", out, all, 1);
  refuse_overlap("allgather", in, bytes, out, all,
                 static_cast<const std::byte*>(out) + bytes * rank());
  std::vector<Gathered> parts(ranks());
  for (uint32_t r = 0; r < ranks(); ++r)
    parts[r] = {static_cast<std::byte*>(out) + r * bytes, bytes};
  const Impl::Turn turn(
      *impl_, {.call = Call::allgather, .elements = elements_of(type), .count = bytes}, bytes);
  impl_->gather(in, parts);
}

void Communicator::allgatherv(const void* in, std::span<const Gathered> parts,
                              std::optional<DataType> type) {
  if (parts.size() != ranks()) {
    throw Error(ErrorKind::usage, "an allgatherv of " + std::to_string(ranks()) + " ranks has " +
                                      std::to_string(parts.size()) + " parts; give one for each");
  }
  const uint64_t mine = parts[rank()].bytes;
  Fnv sizes;
  check_buffer("allgatherv", in, mine, 1);
  for (const Gathered& part : parts) {
    check_buffer("allgatherv", part.to, part.bytes, 1);
    if (mine > 0) {
      refuse_overlap("allgatherv", in, mine, part.to, part.bytes, parts[rank()].to);
    }
    sizes.number(part.bytes);
  }
  const Impl::Turn turn(
      *impl_, {.call = Call::allgatherv, .elements = elements_of(type), .count = sizes.value()},
      mine);
  impl_->gather(in, parts);
}

void Communicator::Impl::gather(const void* in, std::span<const Gathered> parts) {
  const auto* from = static_cast<const std::byte*>(in);
  if (steps.ranks() > 1 && gathers_by_arrival(steps, memory.window_bytes(), parts)) {
    return gather_by_arrival(steps, from, parts);
  }
  posted_allgather(steps, from, parts);
}

void* Communicator::allocate(uint64_t bytes) { return impl_->allocate(bytes); }
bool Communicator::release(void* data) noexcept { return impl_->release(data); }

void Communicator::set_timeout(std::chrono::nanoseconds timeout) {
  if (timeout.count() <= 0) {
    throw Error(ErrorKind::usage, "the timeout of a communicator must be positive, not " +
                                      std::to_string(timeout.count()) + " ns");
  }
  const MutexLock lock(impl_->mutex);
  impl_->steps.set_timeout(timeout);
}

void Communicator::on_late(std::chrono::nanoseconds after,
                           std::function<void(std::span<const uint32_t>)> callback) {
  const MutexLock lock(impl_->mutex);
  impl_->steps.on_late(after, std::move(callback));
}

Elsewhere::Elsewhere(Communicator& communicator) noexcept : communicator_(communicator) {
  mark(communicator_, 1);
}
Elsewhere::~Elsewhere() { mark(communicator_, -1); }
void Elsewhere::progressed(Communicator& communicator) noexcept { mark(communicator, 0); }
void Elsewhere::mark(Communicator& communicator, int change) noexcept {
  Communicator::Impl& impl = *communicator.impl_;
  if (!impl.memory.is_forked_child()) impl.steps.wait_elsewhere(change);
}

// A forked child has none of the memory in which to say or see it.
bool Communicator::end(const Error& why) noexcept {
  return !impl_->memory.is_forked_child() && impl_->steps.end_at_once(why);
}

bool Communicator::end_from_here(const Error& why) noexcept {
  return !impl_->memory.is_forked_child() && impl_->steps.end_from_here(why);
}

void Communicator::leave() noexcept { impl_->memory.leave(); }

void Communicator::check() const {
  if (!impl_->memory.is_forked_child()) impl_->steps.check_all();
}

bool Communicator::ended_here() const noexcept { return impl_->steps.ended_here(); }

CommunicatorStats Communicator::stats() const {
  const MutexLock lock(impl_->mutex);
  CommunicatorStats stats = impl_->stats;
  stats.sleeps = impl_->steps.stats().sleeps;
  stats.wait_ns = impl_->steps.stats().wait_ns;
  return stats;
}

}  // namespace nostall::collective
