// Node caches of ten samples for tests: ranks as several caches of one process, with shared memory in a
// directory of the test's own.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../temporary.h"
#include "base/log.h"
#include "tier/node_cache.h"

namespace nostall::tier {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

class NodeCacheTest : public testing::Test {
 protected:
  void SetUp() override {
    fs::create_directory(root_ / "shm");
    set_log_sink([this](LogLevel, const std::string& message) {
      const std::scoped_lock lock(mutex_);
      warnings_.push_back(message);
    });
  }
  void TearDown() override { set_log_sink({}); }

  // Ten samples of 100 bytes, all in tier 0.
  static constexpr uint64_t kSamples = 10, kSize = 100;

  NodeCacheConfig config(uint32_t rank, uint32_t world, TierKind kind = TierKind::ram) const {
    NodeCacheConfig c;
    c.job = "test";
    c.local_rank = rank;
    c.local_world = world;
    c.dataset = 11;
    c.plan = 22;
    c.tiers = {{kind, 4096, (root_ / "disk").string(), false}};
    c.shm_directory = (root_ / "shm").string();
    return c;
  }
  static plan::Placement in_the_first_tier(TierKind kind) {
    const uint64_t record = kSize + record_overhead(kind);
    plan::Placement placed;
    placed.tier.assign(kSamples, 0);
    for (uint64_t s = 0; s < kSamples; ++s) placed.offset.push_back(s * record);
    placed.used = {kSamples * record};
    placed.fill.resize(1);
    return placed;
  }
  static std::unique_ptr<NodeCache> attach(const NodeCacheConfig& c) {
    const std::vector<uint64_t> sizes(kSamples, kSize);
    return NodeCache::attach(c, sizes, fixed(in_the_first_tier(c.tiers[0].kind)));
  }
  static std::vector<std::byte> bytes_of(uint64_t sample) {
    return std::vector<std::byte>(kSize, static_cast<std::byte>(sample + 1));
  }
  static void put(NodeCache& cache, uint64_t sample) {
    ASSERT_TRUE(cache.claim(sample));
    const auto bytes = bytes_of(sample);
    if (cache.kind(sample) == TierKind::file) {
      cache.file_write(sample, bytes);
      return;
    }
    const auto slot = cache.ram_slot(sample);
    ASSERT_EQ(slot.size(), kSize);
    std::memcpy(slot.data(), bytes.data(), kSize);
    cache.publish(sample);
  }
  size_t files() const {
    size_t n = 0;
    for (const auto& e : fs::recursive_directory_iterator(root_)) n += e.is_regular_file();
    return n;
  }

  const TemporaryFolder folder_;
  const fs::path root_ = folder_.path();
  std::mutex mutex_;
  std::vector<std::string> warnings_;
};

// Two halves of two places behind the ten samples; ranks are at no chunk yet.
inline NodeCacheConfig with_halves(NodeCacheConfig c) {
  c.halves = {0, {250, 2}};
  return c;
}
inline plan::KeptChunk chunk_of(std::vector<uint64_t> samples) {
  plan::KeptChunk kept;
  for (const uint64_t s : samples) {
    kept.fill.push_back(static_cast<uint32_t>(kept.samples.size()));
    kept.offsets.push_back(100 * kept.samples.size());
    kept.samples.push_back(s);
  }
  return kept;
}

}  // namespace nostall::tier
