// peer/messenger.h - private to the room: the threads of an Exchange and what they know.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <thread>
#include <unordered_set>

#include "peer/exchange.h"
#include "peer/session.h"

namespace nostall::peer {

class Exchange::Messenger final : public Receiver {
 public:
  Messenger(std::unique_ptr<Transport> transport, ExchangeConfig config, plan::Ownership ownership,
            std::span<const uint64_t> sizes, std::shared_ptr<tier::NodeCache> cache,
            std::atomic<uint64_t>& events);
  ~Messenger() override;

  Where where(uint64_t sample, uint32_t epoch) const noexcept;
  bool push_wanted(uint64_t sample) const noexcept;
  void try_again();
  void begin(const std::shared_ptr<FetchGroup>& group);
  void finish(FetchGroup& group, std::stop_token stop);
  bool push(uint64_t sample, std::span<const std::byte> bytes, std::shared_ptr<void> keep,
            std::stop_token stop);
  void wait_for_progress(std::chrono::nanoseconds timeout, std::stop_token stop);
  const plan::Ownership& ownership() const noexcept { return ownership_; }
  std::span<const uint32_t> node_of_rank() const noexcept { return config_.node_of_rank; }
  std::span<const uint64_t> owned() const noexcept { return owned_; }
  ExchangeStats stats() const;
  uint32_t nodes() const noexcept { return static_cast<uint32_t>(ranks_of_node_.size()); }
  uint32_t nodes_alive() const noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  enum class Link : uint8_t { connecting, ready, lost };

  // A node is asked through its target, the first of its ranks that is not lost.
  struct Node {
    std::atomic<bool> alive{true};
    std::atomic<uint64_t> progress{0};
    std::atomic<bool> heard{false};   // its progress is known
    std::atomic<bool> linked{false};  // its target can be asked now
    bool ending = false;  // one of its ranks has sent `done`: they may leave without a warning
  };
  // An action that needs the session to be ready, and the fetches that it belongs to.
  struct Waiting {
    const FetchGroup* group = nullptr;  // null: of a push
    Clock::time_point deadline;
    std::function<void(bool)> action;
  };
  struct Peer {
    Link link = Link::connecting;  // of the session that this rank began
    Nonce nonce{};
    Clock::time_point hello_at{};  // the last one; none yet if zero
    Clock::time_point since{};     // of the first hello, or since it is lost
    Clock::time_point opened{};    // the handshake that is under way
    Clock::time_point heard{};     // the last message that was authentic
    std::unique_ptr<Session> out;  // this rank sends requests
    std::unique_ptr<Session> in;   // this rank answers
    uint64_t accepted = 0;         // sessions that it began
    bool done = false;             // it requests nothing more
    bool for_good = false;         // not tried again once lost: it left or violated the protocol
    bool warned = false;           // of its other plan
    uint64_t notified = 0;         // the progress that was sent to it last
    std::vector<Waiting> waiting;  // for the session to be ready
    uint64_t losses = 0;           // how often its connection was dropped
    uint32_t moving = 0;           // payloads on their way to it or from it since then
    uint64_t moving_bytes = 0;     // of all of them: they share the link
    Clock::time_point moved{};     // when one of them ended last, or the first began
    // When it answered last, and which request.
    Clock::time_point answered{};
    uint64_t answered_request = 0;
  };
  struct Pending {
    std::shared_ptr<FetchGroup> group;
    size_t index = 0;
    uint32_t rank = 0;
    uint64_t losses = 0;  // the rank's, when it was asked
    Clock::time_point begun, deadline;
    bool receiving = false;
  };

  // Also while the transport ends.
  Clock::time_point time() const noexcept { return transport_ ? transport_->now() : Clock::now(); }

  // What only the message thread calls.
  void run(std::stop_token stop);
  bool run_commands();
  void tick();
  Delivery on_message(std::span<const std::byte> header, uint64_t payload) override;
  void on_gone(uint32_t rank, const std::string& why) override;
  Delivery handle(std::span<const std::byte> header, uint64_t payload);
  void on_hello(const Header& header);
  void on_challenge(const Header& header);
  void on_proof(const Header& header);
  void on_fetch(const Header& header);
  Delivery on_reply(const Header& header);
  Delivery on_push(const Header& header);
  Delivery into_tier(const Header& header);
  void heard_progress(uint32_t rank, uint64_t progress);
  bool reach(uint32_t rank);
  void send_hello(uint32_t rank) noexcept;
  // Sends another hello to a rank that is not reached; on a new connection if the last attempt has
  // led to nothing.
  void retry_hello(uint32_t rank);
  // The session that a hello with this nonce leads to, and its challenge. No state is kept before
  // the proof: hellos are not authenticated, and must not displace one another.
  std::unique_ptr<Session> challenge(uint32_t from, const Nonce& nonce, HeaderBytes& sealed) const;
  void send(uint32_t rank, Session& session, Header header, std::span<const std::byte> payload,
            std::function<void(bool)> done);
  void answer(const Header& request, Status status, std::span<const std::byte> bytes,
              std::shared_ptr<void> keep);
  void when_ready(uint32_t node, const FetchGroup* group,
                  std::function<void(uint32_t rank, bool)> action);
  // Ends, as failed, what waits for a session and is chosen.
  template <typename Chosen>
  void end_waiting(Chosen&& chosen);
  // Calls `done` when a payload has ended; a rank with a payload that does not end is dropped.
  std::function<void(bool)> watched(uint32_t rank, uint64_t bytes, std::function<void(bool)> done);
  // How long a rank may be silent where so many bytes come before its next sign of life.
  Clock::duration patience(uint64_t bytes) const noexcept;
  void ask(const std::shared_ptr<FetchGroup>& group, size_t index);
  void conclude(FetchGroup& group, size_t index, Outcome outcome);
  void lose(uint32_t rank, const std::string& why, bool warn, bool for_good = false);
  std::optional<uint32_t> target_of(uint32_t node) const;
  // No rank of its node that is asked rather than this one is reached.
  bool wanted(uint32_t rank) const;
  // Publishes to other threads whether the node can be asked.
  void publish_link(uint32_t node);
  void violate(uint32_t rank, const std::string& why);
  uint64_t own_progress();
  void send_to_all(Kind kind);
  void finish_serving();
  void leave() noexcept;
  // Calls `work`, and logs the first exception. A message or command may fail, for lack of memory
  // above all; waits for its answer have a deadline, and other work goes on.
  template <typename Work>
  void guarded(Work&& work) noexcept {
    try {
      work();
    } catch (const std::exception& e) {
      warn_once(e.what());
    }
  }
  void warn_once(const char* what) noexcept;

  void submit(std::function<void()> command);
  void run_files(std::stop_token stop);
  void submit_file(std::function<void()> work);
  void notify_progress();
  // No message carries what is larger: every node reads it from the source.
  bool travels(uint64_t sample) const noexcept { return sizes_[sample] <= kMaxPayload; }
  // The owner is another node that can be reached and has not answered `never`.
  bool reachable(uint64_t sample) const noexcept;

  std::unique_ptr<Transport> transport_;
  const ExchangeConfig config_;
  const Key secret_;
  const Key own_key_;  // of this rank alone: its nonces follow from it
  const plan::Ownership ownership_;
  const std::span<const uint64_t> sizes_;
  const std::shared_ptr<tier::NodeCache> cache_;
  const uint32_t node_;
  std::vector<std::vector<uint32_t>> ranks_of_node_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<plan::SampleId> owned_;  // by this node, by first access

  const Clock::time_point begun_ = time();

  // Of the message thread alone.
  std::map<uint32_t, Peer> peers_;
  std::map<uint64_t, Pending> pending_;                 // in the order in which they were asked for
  std::vector<std::shared_ptr<FetchGroup>> abandoned_;  // transfers that never ended
  uint64_t next_request_ = 1;
  bool leaving_ = false;
  std::atomic<bool> failed_{false};  // of any thread: one message or more could not be handled
  size_t reached_ = 0;               // in owned_
  Clock::time_point reached_at_{};
  Clock::time_point next_tick_{};

  Mutex commands_mutex_;
  std::vector<std::function<void()>> commands_ NOSTALL_GUARDED_BY(commands_mutex_);
  Mutex files_mutex_;
  StopCondition files_ready_;
  std::atomic<uint64_t> filing_{0};  // bytes of pushes that wait for the file thread
  std::deque<std::function<void()>> files_ NOSTALL_GUARDED_BY(files_mutex_);

  Mutex push_mutex_;
  StopCondition push_room_;
  uint64_t pushing_ NOSTALL_GUARDED_BY(push_mutex_) = 0;  // bytes

  std::atomic<uint64_t>& events_;
  Mutex events_mutex_;  // taken to change events_, so that no waiter misses it
  StopCondition progressed_;

  mutable Mutex absent_mutex_;
  // absent_: samples that their owner has no room for in this epoch. lacking_: samples that their
  // owner should have by now, but does not.
  std::unordered_set<uint64_t> absent_ NOSTALL_GUARDED_BY(absent_mutex_), lacking_
      NOSTALL_GUARDED_BY(absent_mutex_);
  std::atomic<bool> any_absent_{false}, any_lacking_{false};

  ExchangeCounters<std::atomic<uint64_t>> count_;  // but for thread_nanoseconds
  std::atomic<uint64_t> message_cpu_ns_{0}, file_cpu_ns_{0};
  std::jthread files_thread_, thread_;
};

}  // namespace nostall::peer
