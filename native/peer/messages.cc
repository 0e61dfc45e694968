// The exchange's side towards other ranks: what each message does.
//
// A session has an initiator, which sends requests, and a responder, which answers; two ranks may have one in
// each direction. It begins with four messages (docs/formats/wire.md):
//
//   initiator                           responder
//   hello (nonce, plan)      ------->
//                            <-------   challenge (nonce, tag): no state is kept yet
//   proof (nonce, tag)       ------->
//                            <-------   welcome (progress): the session exists
//
// A responder derives its nonce from the initiator's, so it can check a proof without a table of
// hellos. After the welcome the initiator sends fetch and push; the responder sends reply, and
// progress whenever its node's progress has changed. A payload is received straight into its place
// (a slot of the RAM tier, or the caller's buffer), compared with its CRC32C and with the sample's
// checksum, and published.
#include <algorithm>
#include <string>
#include <utility>

#include "base/crc32c.h"
#include "base/log.h"
#include "peer/messenger.h"

namespace nostall::peer {
namespace {

// A sample that cannot be read never becomes ready. After this long, progress passes it over.
constexpr std::chrono::seconds kStuck{1};
constexpr size_t kLookAhead = 4096;

// A pushed sample from its arrival until the file thread has written it, or it is given up.
struct Filed {
  Filed(std::atomic<uint64_t>& waiting, uint64_t size) : bytes(size), waiting_(waiting) {
    waiting_ += size;
  }
  ~Filed() { waiting_ -= bytes.size(); }
  Filed(const Filed&) = delete;
  Filed& operator=(const Filed&) = delete;

  std::vector<std::byte> bytes;

 private:
  std::atomic<uint64_t>& waiting_;
};

}  // namespace

Delivery Exchange::Messenger::on_message(std::span<const std::byte> bytes, uint64_t payload) {
  if (!transport_) return {};  // it is ending, and answers nobody
  Delivery delivery;
  guarded([&] { delivery = handle(bytes, payload); });
  return delivery;
}

Delivery Exchange::Messenger::handle(std::span<const std::byte> bytes, uint64_t payload) {
  const Result<Header> parsed = decode(bytes);
  const auto refuse = [&] {
    ++count_.refused;
    return Delivery{};
  };
  if (!parsed) return refuse();
  const Header& header = parsed.value();
  const auto found = peers_.find(header.from);
  if (header.to != config_.rank || header.length != payload || found == peers_.end()) {
    return refuse();
  }
  Peer& peer = found->second;
  if (peer.link == Link::lost && peer.for_good) return {};
  switch (header.kind) {
    case Kind::hello:
      on_hello(header);
      return {};
    case Kind::challenge:
      on_challenge(header);
      return {};
    case Kind::proof:
      on_proof(header);
      return {};
    default:
      break;
  }
  // Two ranks may have a session in each direction; the tag decides which one a message belongs to.
  const bool answers =
      header.kind == Kind::welcome || header.kind == Kind::reply || header.kind == Kind::progress;
  const bool asks = header.kind == Kind::fetch || header.kind == Kind::push;
  const bool of_out = !asks && peer.out && peer.out->open(header);
  const bool of_in = !of_out && !answers && peer.in && peer.in->open(header);
  if (!of_out && !of_in) return refuse();
  peer.heard = time();
  switch (header.kind) {
    case Kind::welcome:
      if (peer.link == Link::lost) {
        ++count_.returned_ranks;
        log(LogLevel::info, "rank " + std::to_string(config_.rank) + " reached rank " +
                                std::to_string(header.from) + " again");
      }
      peer.link = Link::ready;
      peer.moved = time();
      publish_link(config_.node_of_rank[header.from]);
      notify_progress();
      heard_progress(header.from, header.progress);
      for (const Waiting& w : std::exchange(peer.waiting, {})) w.action(true);
      return {};
    case Kind::progress:
      heard_progress(header.from, header.progress);
      return {};
    case Kind::fetch:
      on_fetch(header);
      return {};
    case Kind::reply:
      return on_reply(header);
    case Kind::push:
      return on_push(header);
    case Kind::done:
      peer.done = true;
      nodes_[config_.node_of_rank[header.from]]->ending = true;
      return {};
    default:
      lose(header.from, "it has left", false, true);
      return {};
  }
}

void Exchange::Messenger::on_gone(uint32_t rank, const std::string& why) { lose(rank, why, true); }

void Exchange::Messenger::violate(uint32_t rank, const std::string& why) {
  lose(rank, why, true, true);
}

// ---------------------------------------------------------------------------------- the handshake

bool Exchange::Messenger::reach(uint32_t rank) {
  try {
    transport_->connect(rank, config_.addresses[rank]);
    return true;
  } catch (const Error& e) {
    lose(rank, e.what(), true);
    return false;
  }
}

void Exchange::Messenger::send_hello(uint32_t rank) noexcept try {
  Peer& peer = peers_.at(rank);
  const Clock::time_point now = time();
  if (peer.hello_at == Clock::time_point{}) {
    peer.since = peer.opened = now;
    peer.nonce = random_nonce();
  }
  peer.hello_at = now;
  Header header;
  header.kind = Kind::hello;
  header.from = config_.rank;
  header.to = rank;
  header.sample = config_.plan;
  header.nonce = peer.nonce;
  if (reach(rank)) transport_->send(rank, encode(header), {}, nullptr);
} catch (const std::exception& e) {
  warn_once(e.what());  // tick() sends another one
}

void Exchange::Messenger::on_hello(const Header& header) {
  Peer& peer = peers_.at(header.from);
  if (header.sample != config_.plan) {
    ++count_.refused;
    // Once: hellos are not authenticated, and ranks repeat them.
    if (std::exchange(peer.warned, true)) return;
    log(LogLevel::warning, "rank " + std::to_string(header.from) + " has another plan than rank " +
                               std::to_string(config_.rank) +
                               ": give all ranks the same dataset, arguments and tiers");
    return;
  }
  HeaderBytes sealed;
  challenge(header.from, header.nonce, sealed);
  if (reach(header.from)) transport_->send(header.from, sealed, {}, nullptr);
}

std::unique_ptr<Session> Exchange::Messenger::challenge(uint32_t from, const Nonce& nonce,
                                                        HeaderBytes& sealed) const {
  Header header;
  header.kind = Kind::challenge;
  header.from = config_.rank;
  header.to = from;
  // Changes with each accepted session, so that no proof is accepted twice.
  header.nonce = derived_nonce(own_key_, from, peers_.at(from).accepted, nonce);
  auto session = std::make_unique<Session>(secret_, from, config_.rank, nonce, header.nonce);
  sealed = session->seal(header);
  return session;
}

void Exchange::Messenger::on_challenge(const Header& header) {
  Peer& peer = peers_.at(header.from);
  // A hello that was repeated is answered twice.
  if (peer.link == Link::ready || peer.out || peer.hello_at == Clock::time_point{}) return;
  auto session =
      std::make_unique<Session>(secret_, config_.rank, header.from, peer.nonce, header.nonce);
  if (!session->open(header)) {
    ++count_.refused;
    return;
  }
  peer.heard = time();
  peer.out = std::move(session);
  Header reply;
  reply.kind = Kind::proof;
  reply.to = header.from;
  reply.nonce = peer.nonce;
  send(header.from, *peer.out, reply, {}, nullptr);
}

void Exchange::Messenger::on_proof(const Header& header) {
  Peer& peer = peers_.at(header.from);
  HeaderBytes sealed;
  auto session = challenge(header.from, header.nonce, sealed);
  if (!session->open(header)) {
    ++count_.refused;
    return;
  }
  ++peer.accepted;
  peer.heard = time();
  peer.in = std::move(session);
  Header reply;
  reply.kind = Kind::welcome;
  reply.to = header.from;
  reply.progress = peer.notified = own_progress();
  if (!reach(header.from)) return;
  send(header.from, *peer.in, reply, {}, nullptr);
  // The rank is back: connect in the other direction now, not at the next tick.
  if (peer.link == Link::lost && wanted(header.from)) send_hello(header.from);
}

void Exchange::Messenger::send(uint32_t rank, Session& session, Header header,
                               std::span<const std::byte> payload, std::function<void(bool)> done) {
  header.from = config_.rank;
  transport_->send(rank, session.seal(header), payload, std::move(done));
}

// ---------------------------------------------------------------------------------------- serving

void Exchange::Messenger::answer(const Header& request, Status status,
                                 std::span<const std::byte> bytes, std::shared_ptr<void> keep) {
  const auto found = peers_.find(request.from);
  if (found == peers_.end() || !found->second.in || !reach(request.from)) return;
  Header reply;
  reply.kind = Kind::reply;
  reply.status = status;
  reply.to = request.from;
  reply.request = request.request;
  reply.sample = request.sample;
  reply.progress = found->second.notified = own_progress();
  reply.length = bytes.size();
  reply.crc = crc32c(bytes);
  if (status == Status::here &&
      !cache_->sums().agrees(request.sample, sample_sum_of_crc(reply.crc))) {
    cache_->reject(request.sample);
    answer(request, Status::never, {}, nullptr);
    return;
  }
  if (status == Status::here) {
    ++count_.served;
    count_.served_bytes += bytes.size();
  }
  send(request.from, *found->second.in, reply, bytes,
       watched(request.from, bytes.size(), [keep = std::move(keep)](bool) {}));
}

void Exchange::Messenger::on_fetch(const Header& request) {
  const uint64_t sample = request.sample;
  if (sample >= sizes_.size() || request.length != 0) {
    violate(request.from, "it asked for sample " + std::to_string(sample) + " of " +
                              std::to_string(sizes_.size()));
    return;
  }
  if (!cache_->placed(sample)) {
    answer(request, Status::never, {}, nullptr);
    return;
  }
  const auto lacking = [](tier::State state) {
    return state == tier::State::failed ? Status::never : Status::not_yet;
  };
  if (const tier::State state = cache_->state(sample); state != tier::State::ready) {
    answer(request, lacking(state), {}, nullptr);
    return;
  }
  if (cache_->kind(sample) == tier::TierKind::ram) {
    const auto view = tier::shared_view(cache_, sample);
    if (view) {
      answer(request, Status::here, view->bytes(), view);
    } else {
      answer(request, Status::never, {}, nullptr);
    }
    return;
  }
  submit_file([this, request, sample, lacking] {
    std::shared_ptr<std::vector<std::byte>> bytes;
    guarded([&] { bytes = std::make_shared<std::vector<std::byte>>(sizes_[sample]); });
    const bool good = bytes && cache_->file_read(sample, *bytes);
    submit([this, request, sample, bytes, good, lacking] {
      if (good) {
        answer(request, Status::here, *bytes, bytes);
      } else {
        // What an earlier job wrote, or a store dropped, is taken anew.
        answer(request, bytes ? lacking(cache_->state(sample)) : Status::never, {}, nullptr);
      }
    });
  });
}

Delivery Exchange::Messenger::on_push(const Header& header) {
  const uint64_t sample = header.sample;
  if (sample >= sizes_.size() || header.length != sizes_[sample]) {
    violate(header.from, "it pushed " + std::to_string(header.length) + " bytes as sample " +
                             std::to_string(sample));
    return {};
  }
  // A file system that falls behind costs reads from the source, not memory without bound.
  const bool filed = cache_->placed(sample) && cache_->kind(sample) == tier::TierKind::file;
  const uint64_t waiting = filed ? filing_.load() : 0;
  if (waiting > 0 && waiting + header.length > config_.push_bytes) {
    ++count_.redundant;
    return {};
  }
  if (!cache_->placed(sample) || !cache_->claim(sample)) {
    ++count_.redundant;
    return {};
  }
  try {
    return into_tier(header);
  } catch (const std::exception&) {
    cache_->abandon(sample);
    throw;
  }
}

// Where the payload of a claimed sample goes, and what follows when it has arrived.
Delivery Exchange::Messenger::into_tier(const Header& header) {
  const uint64_t sample = header.sample;
  const auto taken = [this, size = header.length] {
    ++count_.received;
    count_.received_bytes += size;
    notify_progress();
  };
  const auto bad = [this, sample, from = header.from] {
    cache_->abandon(sample);
    lose(from,
         "the bytes it pushed as sample " + std::to_string(sample) + " do not match their CRC32C",
         true);
  };
  if (cache_->kind(sample) == tier::TierKind::ram) {
    const std::span<std::byte> slot = cache_->ram_slot(sample);
    if (slot.size() != header.length) return {};  // no memory: the cache has said so
    return {slot, watched(header.from, header.length,
                          [this, slot, sample, crc = header.crc, taken, bad](bool arrived) {
                            if (!arrived) {
                              cache_->abandon(sample);
                            } else if (crc32c(slot) != crc) {
                              bad();
                            } else if (!cache_->sums().agrees(sample, sample_sum_of_crc(crc))) {
                              cache_->abandon(sample);  // not the content that this node read
                            } else {
                              cache_->publish(sample);
                              taken();
                            }
                          })};
  }
  auto filed = std::make_shared<Filed>(filing_, header.length);
  return {filed->bytes,
          watched(header.from, header.length,
                  [this, filed, sample, crc = header.crc, taken, bad](bool arrived) {
                    if (!arrived) {
                      cache_->abandon(sample);
                    } else if (crc32c(filed->bytes) != crc) {
                      bad();
                    } else if (!cache_->sums().agrees(sample, sample_sum_of_crc(crc))) {
                      cache_->abandon(sample);
                    } else {
                      try {
                        submit_file([this, filed, sample, taken] {
                          cache_->file_write(sample, filed->bytes);
                          taken();
                        });
                      } catch (const std::exception&) {
                        cache_->abandon(sample);
                        throw;
                      }
                    }
                  })};
}

// The first access before which all that this node owns is there.
uint64_t Exchange::Messenger::own_progress() {
  const Clock::time_point now = time();
  const auto settled = [&](plan::SampleId s) {
    const tier::State state = cache_->state(s);
    return state == tier::State::ready || state == tier::State::failed || !cache_->placed(s) ||
           !travels(s);
  };
  const size_t before = reached_;
  while (reached_ < owned_.size() && settled(owned_[reached_])) ++reached_;
  if (reached_ != before || reached_at_ == Clock::time_point{}) reached_at_ = now;
  if (reached_ < owned_.size() && now - reached_at_ > kStuck) {
    const size_t end = std::min(owned_.size(), reached_ + kLookAhead);
    for (size_t i = end; i > reached_; --i) {
      if (!settled(owned_[i - 1])) continue;
      reached_ = i;
      reached_at_ = now;
      break;
    }
  }
  const uint64_t progress =
      reached_ == owned_.size() ? plan::kNever : ownership_.first_access[owned_[reached_]];
  nodes_[node_]->progress.store(progress, std::memory_order_release);
  return progress;
}

// ----------------------------------------------------------------------------------------- asking

void Exchange::Messenger::heard_progress(uint32_t rank, uint64_t progress) {
  Node& node = *nodes_[config_.node_of_rank[rank]];
  std::atomic<uint64_t>& known = node.progress;
  uint64_t seen = known.load(std::memory_order_relaxed);
  while (seen < progress && !known.compare_exchange_weak(seen, progress)) {
  }
  if (!node.heard.exchange(true, std::memory_order_acq_rel) || seen < progress) notify_progress();
}

Delivery Exchange::Messenger::on_reply(const Header& header) {
  heard_progress(header.from, header.progress);
  const auto found = pending_.find(header.request);
  if (found == pending_.end()) return {};  // given up since
  Pending& pending = found->second;
  const Fetch& fetch = pending.group->requests[pending.index];
  if (pending.rank != header.from || fetch.sample != header.sample || pending.receiving ||
      (header.status == Status::here && header.length != fetch.into.size())) {
    violate(header.from, "it answered " + std::to_string(header.length) + " bytes of sample " +
                             std::to_string(header.sample) + " to a request for sample " +
                             std::to_string(fetch.sample));
    return {};
  }
  Peer& peer = peers_.at(header.from);
  if (header.status != Status::here) {
    peer.answered = time();
    peer.answered_request = header.request;
    const bool never = header.status == Status::never;
    {
      const MutexLock lock(absent_mutex_);
      (never ? absent_ : lacking_).insert(header.sample);
      (never ? any_absent_ : any_lacking_).store(true, std::memory_order_release);
    }
    ++(never ? count_.asked_in_vain : count_.asked_too_early);
    const Pending p = pending;
    pending_.erase(found);
    conclude(*p.group, p.index, never ? Outcome::never : Outcome::not_yet);
    return {};
  }
  const std::span<std::byte> into = fetch.into;
  Delivery delivery{
      into, watched(header.from, into.size(),
                    [this, &peer, into, id = header.request, crc = header.crc](bool arrived) {
                      const auto ended = pending_.find(id);
                      if (ended == pending_.end()) return;
                      const Pending p = ended->second;
                      pending_.erase(ended);
                      const bool good = arrived && crc32c(into) == crc;
                      if (good) {
                        peer.answered = time();
                        peer.answered_request = id;
                        ++count_.fetched;
                        count_.fetched_bytes += into.size();
                        count_.fetch_nanoseconds += static_cast<uint64_t>(
                            std::chrono::nanoseconds(time() - p.begun).count());
                      }
                      conclude(*p.group, p.index, good ? Outcome::here : Outcome::failed);
                      if (arrived && !good) {
                        lose(p.rank, "the bytes it sent do not match their CRC32C", true);
                      }
                    })};
  pending.receiving = true;
  return delivery;
}

}  // namespace nostall::peer
