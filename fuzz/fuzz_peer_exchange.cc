// An exchange as a state machine, with a peer that knows the secret and lies: each input is a list
// of messages, sealed or not, in and out of turn, with payloads that are right, wrong or of another
// length, said again or with a bit changed, between losses of the link. Whatever it says, a sample
// that is ready holds its own bytes or those of a push whose CRC32C was right, what is fetched is
// right or failed, and nothing hangs.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <optional>

#include "../tests/native/peer/parts.h"
#include "base/crc32c.h"
#include "base/log.h"
#include "peer/exchange.h"
#include "peer/session.h"

namespace {

using namespace nostall;
using namespace nostall::peer;

constexpr uint64_t kSamples = 8;
constexpr std::string_view kSecret = "the liar knows this secret";

std::vector<std::byte> bytes_of(uint64_t sample) {
  return std::vector<std::byte>(16 + sample, static_cast<std::byte>(sample + 1));
}

// The input, taken a byte at a time.
class Script {
 public:
  Script(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool ended() const { return at_ == size_; }
  uint8_t next() { return ended() ? 0 : data_[at_++]; }

 private:
  const uint8_t* data_;
  size_t size_, at_ = 0;
};

// The liar is the transport: it hears all that the exchange sends, and speaks when it is asked for
// progress.
class Liar final : public Transport {
 public:
  explicit Liar(Script script) : script_(script) {}

  std::string address() override { return "liar"; }
  void connect(uint32_t, const std::string&) override {}
  void drop(uint32_t) override {}
  void wait(std::chrono::milliseconds) override { std::this_thread::yield(); }
  void wake() noexcept override {}

  void send(uint32_t, const HeaderBytes& bytes, std::span<const std::byte>,
            std::function<void(bool)> done) override {
    const Header header = decode(bytes).take();
    if (header.kind == Kind::hello) {
      hello_ = header;
      asked_.reset();
    }
    if (header.kind == Kind::challenge && proposed_) {
      in_.emplace(key_of(kSecret), 0, 1, proposed_->nonce, header.nonce);
    }
    if (header.kind == Kind::fetch) fetch_ = header;
    if (done) done(true);
  }

  bool progress(Receiver& receiver) override {
    if (script_.ended()) {
      finished_ = true;
      return false;
    }
    const uint8_t what = script_.next();
    if (what == 0xff) {
      receiver.on_gone(0, "the script says so");
      return true;
    }
    if (what >= 0xfd && !said_.first.empty()) {
      if (what == 0xfd) {
        said_.first[script_.next() % kHeaderBytes] ^= static_cast<std::byte>(1 + script_.next());
      }
      deliver(receiver, what);
      return true;
    }
    Header header;
    header.kind = static_cast<Kind>(1 + what % kLastKind);
    header.status = static_cast<Status>(script_.next() % 3);
    header.to = 1;
    const uint8_t which = script_.next();
    header.sample = which % (kSamples + 2);
    header.progress = which >= 128 ? plan::kNever : which;
    header.request = fetch_ && (which & 1) == 0 ? fetch_->request : which;
    std::vector<std::byte> payload;
    const bool carries =
        header.kind == Kind::push || (header.kind == Kind::reply && header.status == Status::here);
    if (carries) {
      if (fetch_ && header.kind == Kind::reply && (which & 2) == 0) header.sample = fetch_->sample;
      payload = bytes_of(header.sample % kSamples);
      if (which % 5 == 0) payload.push_back(std::byte{0});
      header.crc = crc32c(payload);
      // The bytes are wrong and the sum is not.
      if (which % 7 == 0) payload[0] ^= std::byte{1};
    }
    header.length = payload.size();
    const HeaderBytes bytes = speak(header, what);
    said_ = {{bytes.begin(), bytes.end()}, std::move(payload)};
    deliver(receiver, what);
    return true;
  }

  bool finished() const { return finished_; }

 private:
  void deliver(Receiver& receiver, uint8_t what) {
    const auto& [header, payload] = said_;
    Delivery delivery = receiver.on_message(header, payload.size());
    const bool wanted = delivery.into.size() == payload.size() && (what & 64) == 0;
    if (wanted && !payload.empty()) {
      std::memcpy(delivery.into.data(), payload.data(), payload.size());
    }
    if (delivery.done) delivery.done(wanted);
  }

  HeaderBytes speak(Header& header, uint8_t what) {
    switch (header.kind) {
      case Kind::hello:
        header.sample = what & 32 ? 78 : 77;
        header.nonce = random_nonce();
        proposed_ = header;
        return encode(header);
      case Kind::challenge:
        if (!hello_) return encode(header);
        header.nonce = random_nonce();
        asked_.emplace(key_of(kSecret), 1, 0, hello_->nonce, header.nonce);
        return asked_->seal(header);
      case Kind::proof:
        if (!in_ || !proposed_) return encode(header);
        header.nonce = proposed_->nonce;
        return in_->seal(header);
      default:
        break;
    }
    const bool answers = header.kind == Kind::welcome || header.kind == Kind::reply ||
                         header.kind == Kind::progress || (what & 32) != 0;
    std::optional<Session>& session = answers ? asked_ : in_;
    return session && (what & 128) == 0 ? session->seal(header) : encode(header);
  }

  Script script_;
  std::pair<std::vector<std::byte>, std::vector<std::byte>> said_;  // last: header, payload
  std::atomic<bool> finished_{false};
  std::optional<Header> hello_, proposed_, fetch_;
  std::optional<Session> asked_, in_;  // in which the exchange asks, and in which the liar does
};

std::shared_ptr<tier::NodeCache> make_cache(const std::vector<uint64_t>& sizes) {
  struct Root {
    Root() {
      char pattern[] = "/tmp/nostall-fuzz-XXXXXX";
      path = ::mkdtemp(pattern);
    }
    ~Root() { std::filesystem::remove_all(path); }
    std::string path;
  };
  static const Root root;
  static uint64_t count = 0;
  return cache_below(root.path, "fuzz " + std::to_string(count++), tier::TierKind::ram, sizes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  set_log_sink([](LogLevel, const std::string&) {});
  std::vector<uint64_t> sizes;
  for (uint64_t s = 0; s < kSamples; ++s) sizes.push_back(bytes_of(s).size());
  const auto cache = make_cache(sizes);
  auto transport = std::make_unique<Liar>(Script(data, std::min<size_t>(size, 512)));
  const Liar& liar = *transport;
  ExchangeConfig config;
  config.rank = 1;
  config.node_of_rank = {0, 1};
  config.addresses = {"liar", "liar"};
  config.secret = kSecret;
  config.plan = 77;
  config.epoch_length = kSamples;
  config.timeout = std::chrono::milliseconds(20);
  Exchange exchange(std::move(transport), config, ownership_of(kSamples, 2), sizes, cache);
  std::vector<Fetch> requests;
  for (uint64_t s = 0; s < kSamples; s += 2) {
    auto bytes = std::make_shared<std::vector<std::byte>>(bytes_of(s));
    exchange.push(s, *bytes, bytes, {});
    auto into = std::make_shared<std::vector<std::byte>>(sizes[s]);
    requests.push_back({s, *into, into, Outcome::waiting});
  }
  const auto group = exchange.begin(std::move(requests));
  exchange.finish(*group, {});
  for (const Fetch& fetch : group->requests) {
    if (fetch.outcome == Outcome::waiting) std::abort();
    const auto right = bytes_of(fetch.sample);
    if (fetch.outcome == Outcome::here &&
        !std::equal(right.begin(), right.end(), fetch.into.begin(), fetch.into.end())) {
      std::abort();
    }
  }
  while (!liar.finished()) std::this_thread::yield();
  for (uint64_t s = 1; s < kSamples; s += 2) {
    if (cache->state(s) != tier::State::ready) continue;
    const auto held = cache->ram_view(s);
    const auto right = bytes_of(s);
    if (!held) continue;  // its memory was given back meanwhile
    if (!std::ranges::equal(held.bytes(), right)) std::abort();
  }
  return 0;
}
