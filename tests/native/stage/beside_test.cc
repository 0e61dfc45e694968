// Neighbours that are cheaper to read along than to come back for fill the tiers, once.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <numeric>
#include <set>
#include <thread>

#include "../temporary.h"
#include "stage/loader.h"

namespace nostall::stage {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kSamples = 512, kGroup = 32, kBytes = 100;

// Groups of kGroup neighbours; sample i holds kBytes times i % 251.
class Neighbours : public source::Source {
 public:
  Neighbours() : sizes_(kSamples, kBytes), labels_(kSamples) {}
  uint64_t size() const override { return kSamples; }
  std::span<const uint64_t> sizes() const override { return sizes_; }
  std::span<const int64_t> labels() const override { return labels_; }
  uint64_t total_bytes() const override { return kSamples * kBytes; }
  uint64_t fingerprint() const override { return 7; }
  std::string describe(uint64_t sample) const override { return "n" + std::to_string(sample); }
  std::unique_ptr<source::Reader> make_reader(source::ReaderKind, unsigned) const override {
    return std::make_unique<GroupReader>(*this);
  }
  uint64_t batch_bytes() const override { return kGroup * kBytes; }
  void around(uint64_t sample, std::vector<uint64_t>& out) const override {
    const uint64_t first = sample / kGroup * kGroup;
    for (uint64_t s = first; s < first + kGroup; ++s) {
      if (s != sample) out.push_back(s);
    }
  }

  std::set<uint64_t> broken;
  mutable std::atomic<uint64_t> reads{0}, groups{0}, once{0};

 private:
  class GroupReader : public source::Reader {
   public:
    explicit GroupReader(const Neighbours& source) : source_(source) {}
    void read(std::span<source::ReadRequest> requests) override {
      // Slower than any tier, or it would be asked again instead of one.
      std::this_thread::sleep_for(std::chrono::milliseconds(1) * requests.size());
      std::set<uint64_t> touched;
      for (auto& r : requests) {
        ++source_.reads;
        source_.once += r.once ? 1 : 0;
        touched.insert(r.sample / kGroup);
        r.error = source_.broken.contains(r.sample) ? source::kWrongBytes : 0;
        if (r.error != 0) r.why = "broken on command";
        std::memset(r.into.data(), static_cast<int>(r.sample % 251), r.into.size());
      }
      source_.groups += touched.size();
    }
    std::string_view name() const override { return "groups"; }

   private:
    const Neighbours& source_;
  };
  std::vector<uint64_t> sizes_;
  std::vector<int64_t> labels_;
};

class Beside : public testing::TestWithParam<tier::TierKind> {
 protected:
  LoaderConfig config_for(const std::shared_ptr<Neighbours>& source, uint64_t kept) {
    tier::NodeCacheConfig node;
    node.job = "beside" + folder_.path();
    node.dataset = source->fingerprint();
    const uint64_t overhead = tier::record_overhead(GetParam());
    node.tiers = {{GetParam(), kept * (kBytes + overhead), folder_.path(), false}};
    node.shm_directory = folder_.path();
    plan::Placement placement;
    placement.fill.resize(1);
    for (uint64_t i = 0; i < kSamples; ++i) {
      placement.tier.push_back(i < kept ? 0 : plan::kNoTier);
      placement.offset.push_back(i < kept ? i * (kBytes + overhead) : 0);
    }
    placement.used = {kept * (kBytes + overhead)};
    LoaderConfig config;
    config.job.samples = kSamples;
    config.job.global_batch = 16;
    config.job.epochs = 2;
    config.job.seed = 3;
    config.source = source;
    config.staging_bytes = 16 * kBytes * 3;
    config.cache = tier::NodeCache::attach(node, source->sizes(), tier::fixed(placement));
    return config;
  }

  // All batches, compared with what the samples hold; the bytes that came from the source.
  static uint64_t run(Loader& loader, uint64_t batches) {
    uint64_t bytes = 0;
    for (uint64_t b = 0; b < batches; ++b) {
      const auto batch = loader.next(60s);
      if (!batch) throw std::runtime_error("no batch");
      bytes += batch->origins[size_t(Origin::source)].bytes;
      for (size_t i = 0; i < batch->samples.size(); ++i) {
        const auto value = static_cast<std::byte>(batch->samples[i] % 251);
        for (uint64_t k = 0; k < kBytes; ++k) {
          EXPECT_EQ(batch->buffer->data()[batch->offsets[i] + k], value);
        }
      }
    }
    return bytes;
  }

  const TemporaryFolder folder_;
};

TEST_P(Beside, EverySampleIsReadOnceAndGroupsTogether) {
  auto source = std::make_shared<Neighbours>();
  Loader loader(config_for(source, kSamples));
  EXPECT_EQ(run(loader, 2 * kSamples / 16), kSamples * kBytes);
  EXPECT_EQ(source->reads, kSamples);
  EXPECT_EQ(source->once, kSamples);
  // Two threads may meet in a group.
  EXPECT_LE(source->groups, 3 * kSamples / kGroup);
}

TEST_P(Beside, WhatTheTiersHaveNoRoomForIsReadWhenItIsNeeded) {
  auto source = std::make_shared<Neighbours>();
  Loader loader(config_for(source, kSamples / 2));
  run(loader, 2 * kSamples / 16);
  EXPECT_EQ(source->reads, kSamples / 2 + 2 * (kSamples / 2));
}

TEST_P(Beside, ABadNeighbourHurtsNobodyElse) {
  auto source = std::make_shared<Neighbours>();
  source->broken = {5};
  LoaderConfig config = config_for(source, kSamples);
  config.job.order = plan::OrderKind::user;
  std::vector<plan::SampleId> order(kSamples);
  std::iota(order.rbegin(), order.rend(), plan::SampleId{0});
  config.job.user_order = std::make_shared<const std::vector<plan::SampleId>>(std::move(order));
  Loader loader(config);
  EXPECT_LE(run(loader, kSamples / 16 - 1), (kSamples - 1) * kBytes);
  try {
    loader.next(60s);
    FAIL() << "the bad sample was handed out";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("broken on command"), std::string::npos)
        << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Tiers, Beside, testing::Values(tier::TierKind::ram, tier::TierKind::file),
                         [](const auto& tier) {
                           return tier.param == tier::TierKind::ram ? "Ram" : "File";
                         });

}  // namespace
}  // namespace nostall::stage
