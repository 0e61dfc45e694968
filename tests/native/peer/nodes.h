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

#include "../failing_files.h"
#include "../temporary.h"
#include "base/log.h"
#include "parts.h"
#include "peer/exchange.h"

namespace nostall::peer {

class Nodes : public testing::Test {
 protected:
  static constexpr uint64_t kSamples = 24;

  void SetUp() override {
    for (uint64_t s = 0; s < kSamples; ++s) sizes_.push_back(s % 3 == 0 ? 300'000 + s : 500 + s);
    set_log_sink([this](LogLevel, const std::string& message) {
      const std::scoped_lock lock(mutex_);
      warnings_.push_back(message);
    });
  }
  void TearDown() override { set_log_sink({}); }

  std::vector<std::byte> bytes_of(uint64_t sample) const {
    std::vector<std::byte> bytes(sizes_[sample]);
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>((sample * 31 + i * 7) & 0xff);
    }
    return bytes;
  }

  plan::Ownership ownership(uint32_t nodes) const { return ownership_of(kSamples, nodes); }

  std::shared_ptr<tier::NodeCache> cache_of(uint32_t node, tier::TierKind kind,
                                            const std::set<uint64_t>& unplaced = {}) {
    return cache_below(root_ / ("node" + std::to_string(node)), "peer test", kind, sizes_, &files_,
                       unplaced);
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
                         std::chrono::milliseconds limit = std::chrono::seconds(60)) {
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

  FailingFiles files_;
  const TemporaryFolder folder_;
  const std::filesystem::path root_ = folder_.path();
  std::vector<uint64_t> sizes_;
  std::mutex mutex_;
  std::vector<std::string> warnings_;
};

}  // namespace nostall::peer
