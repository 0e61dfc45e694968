// The exchange's threads, and the calls of other threads.
//
// The message thread owns all sessions, pending requests and the transport. Other threads hand it
// commands (submit), which it runs between messages, and wait on conditions that it notifies. The
// file thread reads and writes the file tier, and hands the results back as commands. tick() runs
// every kTick: it drops ranks that missed a deadline, repeats hellos, and sends progress.
#include "peer/messenger.h"

#include <pthread.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/crc32c.h"
#include "base/log.h"

namespace nostall::peer {
namespace {

constexpr std::chrono::milliseconds kTick{20};
// A node that has not sent its progress after this long is taken to have nothing.
constexpr std::chrono::seconds kMeet{2};
// The interval of tick() while no request is open and no progress is to be sent.
constexpr std::chrono::milliseconds kIdleTick{250};
constexpr std::chrono::seconds kPushPatience{1};
// At the end: how long to serve ranks that still ask, and to flush the last messages.
constexpr std::chrono::seconds kLinger{1};
constexpr std::chrono::milliseconds kFlush{5};
// The first hello may take this many timeouts: ranks do not finish planning at the same time.
constexpr int kConnectTimeouts = 6;
// The pause between hellos to a rank that is not reached: a quarter of the time since it was lost,
// within these two.
constexpr std::chrono::seconds kHelloOften{1}, kHelloSeldom{5};
// After this long an attempt is repeated on a new connection: the kernel doubles the pause between
// its retries of an old one, which would outlast a partition of the network.
constexpr std::chrono::seconds kAttempt{5};
// Bytes a second that a link brings at least. Of slower ones, what is too large comes from the source.
constexpr uint64_t kSlowest = 4 << 20;
// Progress rounds without anything to do, before sleeping.
constexpr int kSpins = 50;

}  // namespace

Exchange::Messenger::Messenger(std::unique_ptr<Transport> transport, ExchangeConfig config,
                               plan::Ownership ownership, std::span<const uint64_t> sizes,
                               std::shared_ptr<tier::NodeCache> cache,
                               std::atomic<uint64_t>& events)
    : transport_(std::move(transport)),
      config_(std::move(config)),
      secret_(key_of(config_.secret)),
      own_key_(random_key()),
      ownership_(std::move(ownership)),
      sizes_(sizes),
      cache_(std::move(cache)),
      node_(config_.node_of_rank[config_.rank]),
      events_(events) {
  for (uint32_t r = 0; r < config_.node_of_rank.size(); ++r) {
    const uint32_t node = config_.node_of_rank[r];
    if (node >= config_.node_of_rank.size()) {
      throw Error(ErrorKind::usage, "rank " + std::to_string(r) + " is on node " +
                                        std::to_string(node) + " of a smaller job");
    }
    if (node >= ranks_of_node_.size()) ranks_of_node_.resize(node + 1);
    ranks_of_node_[node].push_back(r);
  }
  // Ranks of a node ask different ranks of another one first, so that all of them serve.
  const std::vector<uint32_t>& mine = ranks_of_node_[node_];
  const auto index = std::find(mine.begin(), mine.end(), config_.rank) - mine.begin();
  for (uint32_t node = 0; node < ranks_of_node_.size(); ++node) {
    std::vector<uint32_t>& ranks = ranks_of_node_[node];
    nodes_.push_back(std::make_unique<Node>());
    if (ranks.empty()) {
      nodes_.back()->alive = false;
    } else {
      std::rotate(ranks.begin(), ranks.begin() + index % static_cast<long>(ranks.size()),
                  ranks.end());
    }
  }
  for (plan::SampleId s = 0; s < ownership_.owner.size(); ++s) {
    if (ownership_.owner[s] == node_ && cache_->placed(s)) owned_.push_back(s);
  }
  std::sort(owned_.begin(), owned_.end(), [&](plan::SampleId a, plan::SampleId b) {
    return std::pair(ownership_.first_access[a], a) < std::pair(ownership_.first_access[b], b);
  });
  for (uint32_t r = 0; r < config_.node_of_rank.size(); ++r) {
    if (config_.node_of_rank[r] != node_) peers_[r];
  }
  files_thread_ = std::jthread([this](std::stop_token stop) {
    pthread_setname_np(pthread_self(), "nostall-pfile");
    run_files(std::move(stop));
  });
  thread_ = std::jthread([this](std::stop_token stop) {
    pthread_setname_np(pthread_self(), "nostall-peer");
    run(std::move(stop));
  });
}

Exchange::Messenger::~Messenger() {
  thread_.request_stop();
  transport_->wake();
  thread_.join();
  // Only then: what it has claimed for the file tier until its end is written too.
  files_thread_.request_stop();
  files_thread_.join();
  // Transfers under way end here, while the members that their callbacks use still exist.
  transport_.reset();
  run_files(files_thread_.get_stop_token());  // what has arrived at the very end
}

// ------------------------------------------------------------------------- what other threads call

bool Exchange::Messenger::reachable(uint64_t sample) const noexcept {
  const uint32_t owner = ownership_.owner[sample];
  if (owner == plan::kNoOwner || owner == node_ || !travels(sample)) return false;
  if (!nodes_[owner]->alive.load(std::memory_order_acquire)) return false;
  if (!any_absent_.load(std::memory_order_acquire)) return true;
  const MutexLock lock(absent_mutex_);
  return !absent_.contains(sample);
}

Where Exchange::Messenger::where(uint64_t sample, uint32_t epoch) const noexcept {
  const uint32_t owner = ownership_.owner[sample], reader = ownership_.first_reader[sample];
  const uint64_t first = ownership_.first_access[sample];
  if (!travels(sample)) return Where::source;
  if (owner != node_) {
    if (!reachable(sample)) return Where::source;
    const Node& node = *nodes_[owner];
    // The rank that was asked is lost, and the next one not there yet.
    if (node.heard.load(std::memory_order_acquire) &&
        !node.linked.load(std::memory_order_acquire)) {
      return Where::source;
    }
    if (config_.guess) {
      return node.linked.load(std::memory_order_acquire) && config_.guess->there(sample)
                 ? Where::there
                 : Where::source;
    }
    if (first < node.progress.load(std::memory_order_acquire)) return Where::there;
    // The node may have samples of an earlier job: wait for its first progress.
    if (!node.heard.load(std::memory_order_acquire) && time() < begun_ + kMeet) {
      return Where::awaited;
    }
  } else if (first < nodes_[node_]->progress.load(std::memory_order_acquire)) {
    return Where::source;  // it was here, or is overdue: it is not sent again
  }
  const bool reads_first = reader == node_ && first / config_.epoch_length == epoch;
  if (reads_first || reader >= nodes_.size()) return Where::source;
  return nodes_[reader]->alive.load(std::memory_order_acquire) ? Where::awaited : Where::source;
}

bool Exchange::Messenger::push_wanted(uint64_t sample) const noexcept {
  if (!reachable(sample)) return false;
  if (ownership_.first_access[sample] >=
      nodes_[ownership_.owner[sample]]->progress.load(std::memory_order_acquire)) {
    return true;
  }
  // Its push failed, or the owner's progress had passed the sample over before it arrived.
  if (!any_lacking_.load(std::memory_order_acquire)) return false;
  const MutexLock lock(absent_mutex_);
  return lacking_.contains(sample);
}

void Exchange::Messenger::try_again() {
  const MutexLock lock(absent_mutex_);
  absent_.clear();
  any_absent_.store(false, std::memory_order_release);
}

void Exchange::Messenger::begin(const std::shared_ptr<FetchGroup>& group) {
  submit([this, group] {
    for (size_t i = 0; i < group->requests.size(); ++i) {
      try {
        ask(group, i);
      } catch (const std::exception&) {
        conclude(*group, i, Outcome::failed);
      }
    }
  });
}

void Exchange::Messenger::finish(FetchGroup& group, std::stop_token stop) {
  const auto end_open = [this, &group] {
    end_waiting([&](const Waiting& w) { return w.group == &group; });
    std::vector<std::pair<uint64_t, size_t>> open;
    for (const auto& [id, p] : pending_) {
      if (p.group.get() == &group && !p.receiving) open.emplace_back(id, p.index);
    }
    for (const auto& [id, index] : open) {
      const std::shared_ptr<FetchGroup> held = pending_.at(id).group;
      pending_.erase(id);
      conclude(*held, index, Outcome::failed);
    }
  };
  // Without memory for that, they end with their answers or their deadline.
  const std::stop_callback on_stop(stop, [&] { guarded([&] { submit(end_open); }); });
  MutexLock lock(group.mutex_);
  while (group.left_ > 0) group.done_.wait(lock);
}

bool Exchange::Messenger::push(uint64_t sample, std::span<const std::byte> bytes,
                               std::shared_ptr<void> keep, std::stop_token stop) {
  const uint32_t owner = ownership_.owner[sample];
  if (owner == plan::kNoOwner || owner == node_ || !travels(sample) || !nodes_[owner]->alive) {
    return false;
  }
  {
    MutexLock lock(push_mutex_);
    const auto room = [&]() NOSTALL_REQUIRES(push_mutex_) {
      return pushing_ == 0 || pushing_ + bytes.size() <= config_.push_bytes;
    };
    // Pushes to a node that is not connected yet do not drain: do not wait for room.
    const bool moves = nodes_[owner]->linked.load(std::memory_order_acquire);
    if (!(moves ? push_room_.wait_for(lock, stop, kPushPatience, room) : room())) {
      ++count_.pushes_given_up;
      return false;
    }
    pushing_ += bytes.size();
  }
  if (any_lacking_.load(std::memory_order_acquire)) {
    const MutexLock lock(absent_mutex_);
    lacking_.erase(sample);
  }
  const auto ended = [this, size = bytes.size()](bool sent) {
    if (sent) {
      ++count_.pushed;
      count_.pushed_bytes += size;
    } else {
      ++count_.pushes_given_up;
    }
    {
      const MutexLock lock(push_mutex_);
      pushing_ -= size;
    }
    push_room_.notify_all();
  };
  auto command = [this, sample, bytes, owner, ended, keep = std::move(keep)]() mutable {
    auto done = [ended, keep = std::move(keep)](bool sent) { ended(sent); };
    const auto send_it = [this, sample, bytes, done = std::move(done)](uint32_t rank, bool ready) {
      if (!ready) {
        done(false);
        return;
      }
      Header header;
      header.kind = Kind::push;
      header.to = rank;
      header.sample = sample;
      header.length = bytes.size();
      header.crc = crc32c(bytes);
      if (!cache_->sums().agrees(sample, sample_sum_of_crc(header.crc))) {
        done(false);  // they changed since they were read
        return;
      }
      try {
        send(rank, *peers_.at(rank).out, header, bytes, watched(rank, bytes.size(), done));
      } catch (const std::exception&) {
        done(false);
      }
    };
    try {
      when_ready(owner, nullptr, send_it);
    } catch (const std::exception&) {
      send_it(0, false);
    }
  };
  try {
    submit(std::move(command));
  } catch (const std::bad_alloc&) {
    ended(false);
    return false;
  }
  return true;
}

void Exchange::Messenger::wait_for_progress(std::chrono::nanoseconds timeout,
                                            std::stop_token stop) {
  MutexLock lock(events_mutex_);
  const uint64_t seen = events_.load(std::memory_order_relaxed);
  progressed_.wait_for(lock, stop, timeout,
                       [&] { return events_.load(std::memory_order_relaxed) != seen; });
}

void Exchange::Messenger::notify_progress() {
  {
    const MutexLock lock(events_mutex_);
    events_.fetch_add(1, std::memory_order_release);
  }
  progressed_.notify_all();
}

ExchangeStats Exchange::Messenger::stats() const {
  constexpr auto from = counters_of_exchange<std::atomic<uint64_t>>();
  constexpr auto to = counters_of_exchange<uint64_t>();
  ExchangeStats stats;
  for (size_t i = 0; i < to.size(); ++i) stats.*to[i].second = count_.*from[i].second;
  stats.thread_nanoseconds = message_cpu_ns_ + file_cpu_ns_;
  return stats;
}

uint32_t Exchange::Messenger::nodes_alive() const noexcept {
  return static_cast<uint32_t>(
      std::count_if(nodes_.begin(), nodes_.end(), [](const auto& n) { return n->alive.load(); }));
}

// ------------------------------------------------------------------------------------- the threads

void Exchange::Messenger::submit(std::function<void()> command) {
  bool first = false;
  {
    const MutexLock lock(commands_mutex_);
    first = commands_.empty();
    commands_.push_back(std::move(command));
  }
  if (first) transport_->wake();
}

void Exchange::Messenger::warn_once(const char* what) noexcept try {
  if (failed_.exchange(true)) return;
  log(LogLevel::warning, "rank " + std::to_string(config_.rank) +
                             " failed to send or receive a sample: " + what +
                             "; such samples are read from the source");
} catch (const std::exception&) {
  // No memory for the sentence either.
}

bool Exchange::Messenger::run_commands() {
  std::vector<std::function<void()>> commands;
  {
    const MutexLock lock(commands_mutex_);
    commands.swap(commands_);
  }
  for (const auto& command : commands) guarded(command);
  return !commands.empty();
}

void Exchange::Messenger::submit_file(std::function<void()> work) {
  {
    const MutexLock lock(files_mutex_);
    files_.push_back(std::move(work));
  }
  files_ready_.notify_one();
}

void Exchange::Messenger::run_files(std::stop_token stop) {
  for (;;) {
    std::function<void()> work;
    {
      MutexLock lock(files_mutex_);
      if (!files_ready_.wait(lock, stop,
                             [&]() NOSTALL_REQUIRES(files_mutex_) { return !files_.empty(); }))
        return;
      work = std::move(files_.front());
      files_.pop_front();
    }
    guarded(work);
    file_cpu_ns_ = static_cast<uint64_t>(thread_cpu_ns());
  }
}

void Exchange::Messenger::run(std::stop_token stop) {
  for (uint32_t node = 0; node < nodes_.size(); ++node) {
    if (node != node_ && nodes_[node]->alive) send_hello(*target_of(node));
  }
  int idle = 0;
  while (!stop.stop_requested()) {
    bool any = false;
    guarded([&] {
      any = run_commands();
      any = transport_->progress(*this) || any;
    });
    if (time() >= next_tick_) guarded([this] { tick(); });
    if (any) {
      idle = 0;
    } else if (++idle > kSpins) {
      message_cpu_ns_ = static_cast<uint64_t>(thread_cpu_ns());
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_tick_ - time());
      if (left.count() > 0) transport_->wait(left);
    }
  }
  guarded([this] { finish_serving(); });
  leave();
}

void Exchange::Messenger::send_to_all(Kind kind) {
  for (auto& [rank, peer] : peers_) {
    for (Session* session : {peer.out.get(), peer.in.get()}) {
      if (!session) continue;
      Header header;
      header.kind = kind;
      header.to = rank;
      send(rank, *session, header, {}, nullptr);
    }
  }
}

// Ranks end at about the same time: the first one goes on serving those that still ask.
void Exchange::Messenger::finish_serving() {
  leaving_ = true;
  send_to_all(Kind::done);
  const auto asked = [&] {
    return std::any_of(peers_.begin(), peers_.end(), [](const auto& p) {
      return p.second.in && !p.second.done && p.second.link != Link::lost;
    });
  };
  const auto limit = time() + std::min<Clock::duration>(kLinger, config_.timeout);
  while (asked() && time() < limit) {
    run_commands();
    if (!transport_->progress(*this)) transport_->wait(kTick);
  }
  send_to_all(Kind::leave);
  const auto flushed = time() + kFlush;
  while (time() < flushed) {
    if (!transport_->progress(*this)) transport_->wait(std::chrono::milliseconds(1));
  }
}

// What is still open ends with its link: every payload that was being received is concluded.
void Exchange::Messenger::leave() noexcept {
  leaving_ = true;
  for (auto& [rank, peer] : peers_) {
    transport_->drop(rank);
    peer.link = Link::lost;
  }
  for (auto& node : nodes_) node->alive = false;
  guarded([this] { end_waiting([](const Waiting&) { return true; }); });
  guarded([this] { run_commands(); });
  const auto last = time() + std::chrono::seconds(2);
  const auto receiving = [&] {
    return std::any_of(pending_.begin(), pending_.end(),
                       [](const auto& p) { return p.second.receiving; });
  };
  while (receiving() && time() < last) guarded([this] { transport_->progress(*this); });
  for (const auto& entry : std::exchange(pending_, {})) {
    const Pending& p = entry.second;
    if (p.receiving) guarded([&] { abandoned_.push_back(p.group); });
    conclude(*p.group, p.index, Outcome::failed);
  }
  message_cpu_ns_ = static_cast<uint64_t>(thread_cpu_ns());
}

// Deadlines, hellos that were lost, and notices of progress.
void Exchange::Messenger::tick() {
  const Clock::time_point now = time();
  next_tick_ = now + kTick;
  std::vector<uint32_t> late;
  std::vector<uint64_t> endless;
  std::map<uint32_t, uint64_t> asked;  // bytes that each rank has not begun to send
  for (auto& [id, p] : pending_) {
    const Peer& peer = peers_.at(p.rank);
    // A transfer of an earlier connection says nothing of the present one.
    const bool present = p.losses == peer.losses;
    if (present) {
      // Answers come one after the other, and payloads that move share the link: the deadline is that
      // of all which may come first, since the last answer to what was asked for before.
      uint64_t& first = asked[p.rank];
      if (!p.receiving) first += p.group->requests[p.index].into.size();
      const auto since = id > peer.answered_request ? std::max(p.begun, peer.answered) : p.begun;
      p.deadline = std::max(p.deadline, since + patience(first + peer.moving_bytes));
    }
    if (now >= p.deadline && present) late.push_back(p.rank);
    const bool lost = peer.link == Link::lost;
    if ((p.receiving || lost) && now >= p.deadline + config_.timeout) endless.push_back(id);
  }
  for (const uint64_t id : endless) {
    // Its link was dropped one timeout ago, and the transfer has not even ended as failed.
    const Pending p = pending_.at(id);
    abandoned_.push_back(p.group);
    pending_.erase(id);
    conclude(*p.group, p.index, Outcome::failed);
  }
  const uint64_t progress = own_progress();
  bool notified = false;
  for (auto& [rank, peer] : peers_) {
    const bool connecting = peer.link == Link::connecting && peer.hello_at != Clock::time_point{};
    if (connecting && now - peer.since > kConnectTimeouts * config_.timeout) {
      late.push_back(rank);
    } else if (connecting || (peer.link == Link::lost && !peer.for_good && wanted(rank))) {
      const Clock::duration pause =
          std::clamp<Clock::duration>((now - peer.since) / 4, kHelloOften, kHelloSeldom);
      if (now - peer.hello_at >= pause) retry_hello(rank);
    }
    if (peer.link != Link::lost && peer.moving > 0 &&
        now - peer.moved > patience(peer.moving_bytes)) {
      late.push_back(rank);
    }
    if (peer.in && peer.link != Link::lost && peer.notified != progress) {
      notified = true;
      peer.notified = progress;
      Header header;
      header.kind = Kind::progress;
      header.to = rank;
      header.progress = progress;
      send(rank, *peer.in, header, {}, nullptr);
    }
  }
  std::sort(late.begin(), late.end());
  late.erase(std::unique(late.begin(), late.end()), late.end());
  for (const uint32_t rank : late) {
    lose(rank, "it did not answer within " + std::to_string(config_.timeout.count()) + " ms", true);
  }
  end_waiting([&](const Waiting& w) { return now >= w.deadline; });
  const bool busy = notified || !pending_.empty() || progress != plan::kNever;
  next_tick_ = now + (busy ? kTick : kIdleTick);
}

// ------------------------------------------------------------------------------------------ links

std::optional<uint32_t> Exchange::Messenger::target_of(uint32_t node) const {
  for (const uint32_t rank : ranks_of_node_[node]) {
    if (peers_.at(rank).link != Link::lost) return rank;
  }
  return std::nullopt;
}

bool Exchange::Messenger::wanted(uint32_t rank) const {
  for (const uint32_t other : ranks_of_node_[config_.node_of_rank[rank]]) {
    if (other == rank) return true;
    if (peers_.at(other).link != Link::lost) return false;
  }
  return false;
}

void Exchange::Messenger::retry_hello(uint32_t rank) {
  Peer& peer = peers_.at(rank);
  const Clock::time_point now = time();
  if (now - peer.opened > kAttempt) {
    if (now - peer.heard > kAttempt) transport_->drop(rank);
    peer.opened = now;
    peer.nonce = random_nonce();
    peer.out.reset();
  }
  send_hello(rank);
}

void Exchange::Messenger::publish_link(uint32_t node) {
  const std::optional<uint32_t> target = target_of(node);
  nodes_[node]->linked.store(target && peers_.at(*target).link == Link::ready,
                             std::memory_order_release);
  nodes_[node]->alive.store(target.has_value(), std::memory_order_release);
}

template <typename Chosen>
void Exchange::Messenger::end_waiting(Chosen&& chosen) {
  std::vector<Waiting> ended;
  for (auto& [rank, peer] : peers_) {
    const auto first = std::stable_partition(peer.waiting.begin(), peer.waiting.end(),
                                             [&](const Waiting& w) { return !chosen(w); });
    std::move(first, peer.waiting.end(), std::back_inserter(ended));
    peer.waiting.erase(first, peer.waiting.end());
  }
  for (const Waiting& w : ended) w.action(false);
}

std::function<void(bool)> Exchange::Messenger::watched(uint32_t rank, uint64_t bytes,
                                                       std::function<void(bool)> done) {
  Peer& peer = peers_.at(rank);
  if (peer.moving++ == 0) peer.moved = time();
  peer.moving_bytes += bytes;
  // Also if the transport throws, and never calls what it was given.
  std::shared_ptr<Peer> moving(&peer, [this, bytes, losses = peer.losses](Peer* moved) {
    if (moved->losses != losses) return;
    --moved->moving;
    moved->moving_bytes -= bytes;
    moved->moved = time();
  });
  return [this, moving = std::move(moving), done = std::move(done)](bool ended_well) mutable {
    moving.reset();
    guarded([&] { done(ended_well); });
  };
}

Exchange::Messenger::Clock::duration Exchange::Messenger::patience(uint64_t bytes) const noexcept {
  return config_.timeout + std::chrono::milliseconds(1000 * bytes / kSlowest);
}

void Exchange::Messenger::when_ready(uint32_t node, const FetchGroup* group,
                                     std::function<void(uint32_t, bool)> action) {
  if (!nodes_[node]->alive) {
    action(0, false);
    return;
  }
  const uint32_t rank = *target_of(node);
  Peer& peer = peers_.at(rank);
  if (peer.link == Link::ready) {
    action(rank, true);
    return;
  }
  peer.waiting.push_back({group, time() + config_.timeout,
                          [rank, action = std::move(action)](bool ready) { action(rank, ready); }});
}

void Exchange::Messenger::lose(uint32_t rank, const std::string& why, bool warn, bool for_good) {
  Peer& peer = peers_.at(rank);
  peer.for_good = peer.for_good || for_good || peer.done;
  if (transport_) transport_->drop(rank);  // else it is ending, and so are all connections
  peer.out.reset();
  // The rank may not know that it was dropped, so its requests are still answered. If its session
  // ended here, it would drop this rank in turn, and with it the session that this rank begins
  // next.
  if (peer.for_good) peer.in.reset();
  // A transfer may outlive its connection.
  peer.moving = 0;
  peer.moving_bytes = 0;
  ++peer.losses;
  if (peer.link == Link::lost) return;
  const uint32_t owner = config_.node_of_rank[rank];
  const std::optional<uint32_t> before = target_of(owner);
  peer.link = Link::lost;
  peer.hello_at = peer.since = peer.opened = time();
  peer.nonce = random_nonce();
  publish_link(owner);
  const std::optional<uint32_t> target = target_of(owner);
  if (warn && !leaving_ && !nodes_[owner]->ending) {
    ++count_.dropped_ranks;
    log(LogLevel::warning,
        "rank " + std::to_string(config_.rank) + " lost rank " + std::to_string(rank) + ": " + why +
            (target ? "; its node is asked through another rank"
                    : "; what node " + std::to_string(owner) + " keeps comes from the source" +
                          (peer.for_good ? "" : " until it is reached again") +
                          (nodes_alive() == 1 ? "; no other node is reached now" : "")));
  }
  if (target && target != before && peers_.at(*target).hello_at == Clock::time_point{} &&
      !leaving_) {
    send_hello(*target);
  }
  for (const Waiting& w : std::exchange(peer.waiting, {})) w.action(false);
  std::vector<uint64_t> open;
  for (const auto& [id, p] : pending_) {
    if (p.rank == rank && !p.receiving) open.push_back(id);
  }
  for (const uint64_t id : open) {
    const Pending p = pending_.at(id);
    pending_.erase(id);
    conclude(*p.group, p.index, Outcome::failed);
  }
  notify_progress();
}

void Exchange::Messenger::ask(const std::shared_ptr<FetchGroup>& group, size_t index) {
  const uint64_t sample = group->requests[index].sample;
  const uint32_t owner = ownership_.owner[sample];
  if (owner == plan::kNoOwner || owner == node_ || !travels(sample) ||
      group->requests[index].into.size() != sizes_[sample]) {
    conclude(*group, index, Outcome::failed);
    return;
  }
  when_ready(owner, group.get(), [this, group, index, sample](uint32_t rank, bool ready) {
    if (!ready) {
      conclude(*group, index, Outcome::failed);
      return;
    }
    const uint64_t id = next_request_++;
    const Clock::time_point now = time();
    Header header;
    header.kind = Kind::fetch;
    header.to = rank;
    header.request = id;
    header.sample = sample;
    try {
      Peer& peer = peers_.at(rank);
      pending_[id] = {group, index, rank, peer.losses, now, now + patience(sizes_[sample]), false};
      send(rank, *peer.out, header, {}, nullptr);
    } catch (const std::exception&) {
      pending_.erase(id);
      conclude(*group, index, Outcome::failed);
    }
    next_tick_ = std::min(next_tick_, now + kTick);
  });
}

void Exchange::Messenger::conclude(FetchGroup& group, size_t index, Outcome outcome) {
  const MutexLock lock(group.mutex_);
  group.requests[index].outcome = outcome;
  group.requests[index].ended_ns = now_ns();
  if (--group.left_ == 0) group.done_.notify_all();
}

}  // namespace nostall::peer
