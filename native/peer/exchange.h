// peer/exchange.h - samples travel between the tiers of nodes. Read this first.
//
// The plan says which node owns a sample (plan/owners.h), so ranks need no messages to find one. The
// rank that reads a sample first pushes it to its owner; later readers fetch it from the owner. A
// fetch is sent only if the owner has the sample: every reply, and a periodic notice, carry the
// node's `progress`, the first access before which all that it owns is there. A node is reached
// through one of its ranks; if that rank is lost, through another one. If none is left, where()
// says so, and the node's samples come from the source.
//
// One thread per rank moves all messages and sleeps when there are none; a second one reads and
// writes the file tier for peers. Samples of the RAM tier are sent and received in place. Messages
// are authenticated (session.h); others are counted and ignored. A rank that does not answer, whose
// transfers stop, or that sends bytes with a wrong CRC32C is dropped with a warning, and tried
// again every one to five seconds. A rank that violates the protocol is dropped for good. While no
// rank of a node is reached, its samples come from the source. Thread-safety: all methods may be
// called from any thread.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "peer/guess.h"
#include "peer/transport.h"
#include "plan/owners.h"
#include "tier/node_cache.h"

namespace nostall::peer {

struct ExchangeConfig {
  uint32_t rank = 0;
  std::vector<uint32_t> node_of_rank;
  std::vector<std::string> addresses;  // of every rank's transport
  std::string secret;                  // the same on all ranks, at least 16 bytes
  uint64_t plan = 0;                   // fingerprint: ranks with another one are refused
  uint64_t epoch_length = 1;           // samples in an epoch, as in first_access
  // A rank that has not answered the next request, or ended the next payload, is lost for now after
  // this long and a second more for each 4 MiB of what it was asked for up to that request, and of
  // the payloads that move between the two. So one that hangs is noticed after the time of its first
  // request, and of the payloads that were on their way then.
  std::chrono::milliseconds timeout{10'000};
  // Of pushes on their way at once; above, push() waits. As many bytes of pushes may wait for this
  // node's file tier; above, pushes are not taken.
  uint64_t push_bytes = uint64_t{32} << 20;
  // Where set: owners have what this says, whatever their progress; nothing is awaited or pushed.
  std::shared_ptr<Guess> guess;
};

enum class Where : uint8_t {
  source,  // no node keeps it, its node cannot be reached, this node is to read it first or has lost
           // what it had, or no message carries it (kMaxPayload)
  there,   // its owner, another node, has it
  awaited,  // another node reads it first: its owner (which may be this node) will have it
};

enum class Outcome : uint8_t { waiting, here, not_yet, never, failed };

struct Fetch {
  uint64_t sample = 0;
  std::span<std::byte> into;   // exactly the sample's size
  std::shared_ptr<void> keep;  // keeps `into` alive; may be empty if the node cache does
  Outcome outcome = Outcome::waiting;
  int64_t ended_ns = 0;  // base/clock.h; when it had its outcome
};

// Requests that were begun together.
class FetchGroup {
 public:
  std::vector<Fetch> requests;

  // When they were begun, base/clock.h.
  int64_t begun_ns() const noexcept { return begun_ns_; }

 private:
  friend class Exchange;
  Mutex mutex_;
  Condition done_;
  size_t left_ NOSTALL_GUARDED_BY(mutex_) = 0;
  int64_t begun_ns_ = 0;
};

// What an exchange counts; Number is uint64_t, or atomic where threads count.
template <typename Number>
struct ExchangeCounters {
  Number fetched{0}, fetched_bytes{0};
  Number asked_too_early{0};  // fetches answered `not_yet`: false positives
  Number asked_in_vain{0};    // fetches answered `never`
  Number pushed{0}, pushed_bytes{0}, pushes_given_up{0};
  Number served{0}, served_bytes{0};
  Number received{0}, received_bytes{0};  // pushes taken
  Number redundant{0};                    // pushes of what was there already, or had no room
  Number refused{0};                      // messages malformed or not authentic
  Number dropped_ranks{0};
  Number returned_ranks{0};      // that were dropped and are reached again
  Number fetch_nanoseconds{0};   // summed over fetches, from request to bytes
  Number thread_nanoseconds{0};  // CPU time of the two threads
};
using ExchangeStats = ExchangeCounters<uint64_t>;

// All counters and their names, in one order for every Number.
template <typename Number>
constexpr auto counters_of_exchange() {
  using C = ExchangeCounters<Number>;
  return std::to_array<std::pair<const char*, Number C::*>>({
      {"fetched", &C::fetched},
      {"fetched_bytes", &C::fetched_bytes},
      {"asked_too_early", &C::asked_too_early},
      {"asked_in_vain", &C::asked_in_vain},
      {"pushed", &C::pushed},
      {"pushed_bytes", &C::pushed_bytes},
      {"pushes_given_up", &C::pushes_given_up},
      {"served", &C::served},
      {"served_bytes", &C::served_bytes},
      {"received", &C::received},
      {"received_bytes", &C::received_bytes},
      {"redundant", &C::redundant},
      {"refused", &C::refused},
      {"dropped_ranks", &C::dropped_ranks},
      {"returned_ranks", &C::returned_ranks},
      {"fetch_nanoseconds", &C::fetch_nanoseconds},
      {"thread_nanoseconds", &C::thread_nanoseconds},
  });
}

class Exchange {
 public:
  // Connects in the background. `sizes` must outlive it. Throws Error(usage) for a configuration
  // that does not go together.
  Exchange(std::unique_ptr<Transport> transport, ExchangeConfig config, plan::Ownership ownership,
           std::span<const uint64_t> sizes, std::shared_ptr<tier::NodeCache> cache);
  // Notifies the others that this rank leaves; ends all fetches as failed.
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  // Where a rank of this node that needs the sample in `epoch` finds it, unless its own tiers have
  // it.
  Where where(uint64_t sample, uint32_t epoch) const noexcept;
  // The owner is another node that can be reached and, as far as is known, lacks the sample.
  bool push_wanted(uint64_t sample) const noexcept;

  // Allows requests again for samples that their owners had no memory for.
  void try_again();

  // Sends the requests; finish() returns when each has its outcome. After a stop they fail soon.
  std::shared_ptr<FetchGroup> begin(std::vector<Fetch> requests);
  void finish(FetchGroup& group, std::stop_token stop);

  // Sends the sample to its owner. `keep` keeps `bytes` alive. Waits while too much is under way;
  // false after a second, if the owner cannot be reached, or without memory.
  bool push(uint64_t sample, std::span<const std::byte> bytes, std::shared_ptr<void> keep,
            std::stop_token stop);

  // Returns at the next sign of progress of any node, at the timeout or on stop.
  void wait_for_progress(std::chrono::nanoseconds timeout, std::stop_token stop);
  // Grows with every sign of progress.
  uint64_t progress_events() const noexcept { return events_.load(std::memory_order_acquire); }

  const plan::Ownership& ownership() const noexcept;
  std::span<const uint32_t> node_of_rank() const noexcept;
  // What this node owns and keeps, by first access.
  std::span<const uint64_t> owned() const noexcept;

  ExchangeStats stats() const;
  uint32_t nodes() const noexcept;
  // Nodes of which a rank can be reached; this one counts.
  uint32_t nodes_alive() const noexcept;

 private:
  class Messenger;
  std::atomic<uint64_t> events_{0};
  std::unique_ptr<Messenger> messenger_;
};

}  // namespace nostall::peer
