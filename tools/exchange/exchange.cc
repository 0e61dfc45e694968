// nostall-exchange: how fast one rank fetches samples from the RAM tier of another node, through
// the whole exchange (authentication, CRC32C, receiving into place), to be held against
// ucx_perftest on the same link.
//
//   nostall-exchange ROLE LIBRARY TRANSPORTS DEVICES BYTES IN_FLIGHT SECONDS
// ROLE "pair" runs both ranks as two processes of this machine. "serve" and "ask" run one each, on
// two machines: both write their address to standard output as one line of hexadecimal digits and
// read the other's from standard input. "serve" ends when its input does; "ask" fails if the other
// does not answer for a minute. "pair" and "ask" print
// {"megabytes_per_s", "samples_per_s", "latency_us", "bytes", "in_flight"}: JSON, on one line.
#include "peer/exchange.h"

#include <sys/wait.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace nostall;

constexpr uint64_t kSamples = 256;
constexpr std::chrono::seconds kMeet{60};

uint64_t number(const char* text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  if (error != std::errc() || *end != '\0' || value == 0) {
    throw std::runtime_error(std::string(text) + " is not a positive number");
  }
  return value;
}

// One line of hexadecimal digits.
std::string read_address(int fd) {
  std::string text;
  int high = -1;
  for (char c = 0; ::read(fd, &c, 1) == 1 && c != '\n';) {
    const int digit = c >= 'a' ? c - 'a' + 10 : c - '0';
    if (digit < 0 || digit > 15) throw std::runtime_error("an address is not hexadecimal");
    if (high < 0) {
      high = digit;
    } else {
      text.push_back(static_cast<char>(high * 16 + digit));
      high = -1;
    }
  }
  if (text.empty()) throw std::runtime_error("the other side told no address");
  return text;
}

void write_address(int fd, const std::string& text) {
  std::string line;
  for (const char c : text) {
    line += "0123456789abcdef"[static_cast<uint8_t>(c) >> 4];
    line += "0123456789abcdef"[static_cast<uint8_t>(c) & 15];
  }
  line += '\n';
  if (::write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    throw std::runtime_error("the other side is gone");
  }
}

// Rank 0 has all samples, rank 1 asks for them.
struct Side {
  std::vector<uint64_t> sizes;
  std::shared_ptr<tier::NodeCache> cache;
  std::unique_ptr<peer::Transport> transport;

  Side(uint32_t rank, uint64_t bytes, char** argv, const std::filesystem::path& root)
      : sizes(kSamples, bytes) {
    const auto shm = root / ("node" + std::to_string(rank));
    std::filesystem::create_directories(shm);
    tier::NodeCacheConfig config;
    config.job = "nostall-exchange";
    config.tiers = {{tier::TierKind::ram, kSamples * (bytes + 64), "", false}};
    config.shm_directory = shm.string();
    plan::Placement placement;
    placement.fill.resize(1);
    for (uint64_t s = 0; s < kSamples; ++s) {
      placement.tier.push_back(0);
      placement.offset.push_back(s * bytes);
    }
    placement.used = {kSamples * bytes};
    cache = tier::NodeCache::attach(config, sizes, tier::fixed(placement));
    transport = peer::load_ucx(argv[2], {argv[3], argv[4]});
  }

  std::unique_ptr<peer::Exchange> meet(uint32_t rank, std::vector<std::string> addresses) {
    peer::ExchangeConfig config;
    config.rank = rank;
    config.node_of_rank = {0, 1};
    config.addresses = std::move(addresses);
    config.secret = "two processes of one benchmark";
    config.epoch_length = kSamples;
    plan::Ownership ownership;
    ownership.owner.assign(kSamples, 0);
    ownership.first_reader.assign(kSamples, 0);
    ownership.first_access.assign(kSamples, 0);
    return std::make_unique<peer::Exchange>(std::move(transport), config, std::move(ownership),
                                            sizes, cache);
  }
};

int serve(int in, int out, uint64_t bytes, char** argv, const std::filesystem::path& root) {
  Side side(0, bytes, argv, root);
  for (uint64_t s = 0; s < kSamples; ++s) {
    if (!side.cache->claim(s)) return 1;
    const auto slot = side.cache->ram_slot(s);
    std::memset(slot.data(), static_cast<int>(s), slot.size());
    side.cache->publish(s);
  }
  const std::string mine = side.transport->address();
  write_address(out, mine);
  const auto exchange = side.meet(0, {mine, read_address(in)});
  char end = 0;
  return ::read(in, &end, 1) >= 0 ? 0 : 1;
}

void measure(int in, int out, uint64_t bytes, uint64_t in_flight, uint64_t seconds, char** argv,
             const std::filesystem::path& root) {
  using Clock = std::chrono::steady_clock;
  Side side(1, bytes, argv, root);
  const std::string mine = side.transport->address();
  const std::string other = read_address(in);
  write_address(out, mine);
  const auto exchange = side.meet(1, {other, mine});
  const auto latest = Clock::now() + kMeet;
  while (exchange->where(0, 1) != peer::Where::there) {
    if (Clock::now() >= latest) {
      throw std::runtime_error("the other side did not answer for " +
                               std::to_string(kMeet.count()) + " s");
    }
    exchange->wait_for_progress(std::chrono::milliseconds(10), {});
  }
  // Two groups in flight, as a loader's fetch threads have: one is awaited, one is under way.
  const uint64_t half = std::max<uint64_t>(1, in_flight / 2);
  std::vector<std::vector<std::byte>> buffers(2 * half, std::vector<std::byte>(bytes));
  uint64_t next = 0, done = 0;
  const auto begin_group = [&](uint64_t which) {
    std::vector<peer::Fetch> requests;
    for (uint64_t i = 0; i < half; ++i) {
      requests.push_back(
          {next++ % kSamples, buffers[which * half + i], nullptr, peer::Outcome::waiting});
    }
    return exchange->begin(std::move(requests));
  };
  std::shared_ptr<peer::FetchGroup> groups[2] = {begin_group(0), begin_group(1)};
  Clock::time_point begun{};
  const auto warm = Clock::now() + std::chrono::milliseconds(500);
  for (uint64_t which = 0;; which ^= 1) {
    exchange->finish(*groups[which], {});
    for (const peer::Fetch& f : groups[which]->requests) {
      if (f.outcome != peer::Outcome::here) throw std::runtime_error("a sample did not come");
    }
    const auto now = Clock::now();
    if (begun == Clock::time_point{}) {
      if (now >= warm) begun = now;
    } else {
      done += half;
      if (now - begun >= std::chrono::seconds(seconds)) {
        exchange->finish(*groups[which ^ 1], {});
        break;
      }
    }
    groups[which] = begin_group(which);
  }
  const double took = std::chrono::duration<double>(Clock::now() - begun).count();
  const peer::ExchangeStats stats = exchange->stats();
  std::cout << "{\"megabytes_per_s\": " << static_cast<double>(done * bytes) / took / 1e6
            << ", \"samples_per_s\": " << static_cast<double>(done) / took << ", \"latency_us\": "
            << static_cast<double>(stats.fetch_nanoseconds) / 1e3 /
                   static_cast<double>(stats.fetched)
            << ", \"bytes\": " << bytes << ", \"in_flight\": " << 2 * half << "}\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) {
    std::cerr << "nostall-exchange pair|serve|ask LIBRARY TRANSPORTS DEVICES BYTES IN_FLIGHT "
                 "SECONDS\n";
    return 2;
  }
  const std::string role = argv[1];
  std::filesystem::path root;
  int status = 1;
  try {
    const uint64_t bytes = number(argv[5]), in_flight = number(argv[6]), seconds = number(argv[7]);
    char pattern[] = "/dev/shm/nostall-exchange-XXXXXX";
    if (!::mkdtemp(pattern)) throw std::runtime_error("cannot make a folder in /dev/shm");
    root = pattern;
    if (role == "serve") {
      status = serve(0, 1, bytes, argv, root);
    } else if (role == "ask") {
      measure(0, 1, bytes, in_flight, seconds, argv, root);
      status = 0;
    } else {
      int down[2], up[2];
      if (::pipe(down) != 0 || ::pipe(up) != 0) throw std::runtime_error("cannot make pipes");
      const pid_t child = ::fork();
      if (child == 0) {
        ::close(down[1]);
        ::close(up[0]);
        std::_Exit(serve(down[0], up[1], bytes, argv, root));
      }
      ::close(down[0]);
      ::close(up[1]);
      measure(up[0], down[1], bytes, in_flight, seconds, argv, root);
      ::close(down[1]);
      ::waitpid(child, &status, 0);
    }
  } catch (const std::exception& e) {
    std::cerr << "nostall-exchange: " << e.what() << "\n";
    status = 1;
  }
  if (!root.empty()) std::filesystem::remove_all(root);
  return status == 0 ? 0 : 1;
}
