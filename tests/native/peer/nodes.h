// Nodes of one rank each in one process: real tiers, messages through whatever transport a test
// gives them.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "peer/exchange.h"

namespace nostall::peer {

class Nodes : public testing::Test {
 protected:
  static constexpr uint64_t kSamples = 24;

  void SetUp() override {
    char pattern[] = "/tmp/nostall-peer-XXXXXX";
    root_ = ::mkdtemp(pattern);
    for (uint64_t s = 0; s < kSamples; ++s) sizes_.push_back(s % 3 == 0 ? 300'000 + s : 500 + s);
    set_log_sink([this](LogLevel, const std::string& message) {
      const std::scoped_lock lock(mutex_);
      warnings_.push_back(message);
    });
  }
  void TearDown() override {
    set_log_sink({});
    std::filesystem::remove_all(root_);
  }

  std::vector<std::byte> bytes_of(uint64_t sample) const {
    std::vector<std::byte> bytes(sizes_[sample]);
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>((sample * 31 + i * 7) & 0xff);
    }
    return bytes;
  }

  // Sample s belongs to node s % nodes; node (s + 1) % nodes reads it first.
  plan::Ownership ownership(uint32_t nodes) const {
    plan::Ownership o;
    for (uint64_t s = 0; s < kSamples; ++s) {
      o.owner.push_back(static_cast<uint32_t>(s % nodes));
      o.first_reader.push_back(static_cast<uint32_t>((s + 1) % nodes));
      o.first_access.push_back(s);
    }
    return o;
  }

  std::shared_ptr<tier::NodeCache> cache_of(uint32_t node, tier::TierKind kind) {
    const auto directory = root_ / ("node" + std::to_string(node));
    std::filesystem::create_directories(directory / "shm");
    tier::NodeCacheConfig c;
    c.job = "peer test";
    c.dataset = 11;
    c.plan = 22;
    c.tiers = {{kind, uint64_t{64} << 20, (directory / "disk").string(), false}};
    c.shm_directory = (directory / "shm").string();
    plan::Placement placement;
    placement.fill.resize(1);
    uint64_t at = 0;
    for (uint64_t s = 0; s < kSamples; ++s) {
      placement.tier.push_back(0);
      placement.offset.push_back(at);
      at += sizes_[s] + tier::record_overhead(kind);
    }
    placement.used = {at};
    return tier::NodeCache::attach(c, sizes_, tier::fixed(placement));
  }

  void put(tier::NodeCache& cache, uint64_t sample) const {
    ASSERT_TRUE(cache.claim(sample));
    const auto bytes = bytes_of(sample);
    if (cache.kind(sample) == tier::TierKind::file) {
      cache.file_write(sample, bytes);
      return;
    }
    std::memcpy(cache.ram_slot(sample).data(), bytes.data(), bytes.size());
    cache.publish(sample);
  }

  template <typename Condition>
  static bool eventually(Condition condition,
                         std::chrono::milliseconds limit = std::chrono::seconds(10)) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!condition()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }

  // Fetches one sample; its outcome, and its bytes in `into`.
  Outcome fetch(Exchange& exchange, uint64_t sample, std::vector<std::byte>& into) const {
    into.assign(sizes_[sample], std::byte{0});
    const auto group = exchange.begin({{sample, into, nullptr, Outcome::waiting}});
    exchange.finish(*group, {});
    return group->requests[0].outcome;
  }

  std::filesystem::path root_;
  std::vector<uint64_t> sizes_;
  std::mutex mutex_;
  std::vector<std::string> warnings_;
};

}  // namespace nostall::peer
