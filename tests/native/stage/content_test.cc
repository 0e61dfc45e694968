// A byte that changes, wherever it lies, is found before it is in a batch.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <mutex>

#include "../temporary.h"
#include "base/log.h"
#include "stage/loader.h"

namespace nostall::stage {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kSamples = 32, kSide = 4, kBytes = kSide * kSide * 3, kBatch = 8;

// Sample i is a picture with all values i + 1; any may be changed.
class Pictures : public source::Source {
 public:
  Pictures() : sizes_(kSamples, kBytes), labels_(kSamples) {
    for (uint64_t i = 0; i < kSamples; ++i) contents_.emplace_back(kBytes, std::byte(i + 1));
  }
  uint64_t size() const override { return kSamples; }
  std::span<const uint64_t> sizes() const override { return sizes_; }
  std::span<const int64_t> labels() const override { return labels_; }
  uint64_t total_bytes() const override { return kSamples * kBytes; }
  uint64_t fingerprint() const override { return 7; }
  std::string describe(uint64_t sample) const override { return "p" + std::to_string(sample); }
  std::unique_ptr<source::Reader> make_reader(source::ReaderKind, unsigned) const override {
    class Reader : public source::Reader {
     public:
      explicit Reader(const Pictures& source) : source_(source) {}
      void read(std::span<source::ReadRequest> requests) override {
        for (auto& r : requests) {
          r.error = 0;
          std::memcpy(r.into.data(), source_.contents_[r.sample].data(), r.into.size());
          if (source_.wrong_reads.fetch_sub(1) > 0) r.into[5] ^= std::byte{8};
          ++source_.reads;
        }
      }
      std::string_view name() const override { return "pictures"; }

     private:
      const Pictures& source_;
    };
    return std::make_unique<Reader>(*this);
  }
  void flip(uint64_t sample) { contents_[sample][9] ^= std::byte{1}; }

  mutable std::atomic<int64_t> wrong_reads{0};  // the next ones get a wrong byte on their way
  mutable std::atomic<uint64_t> reads{0};

 private:
  std::vector<std::vector<std::byte>> contents_;
  std::vector<uint64_t> sizes_;
  std::vector<int64_t> labels_;
};

enum class Way { raw, transformed };

class Content : public testing::TestWithParam<Way> {
 protected:
  void SetUp() override {
    set_log_sink([this](LogLevel level, const std::string& message) {
      const std::scoped_lock lock(mutex_);
      if (level == LogLevel::warning) warnings_.push_back(message);
    });
  }
  void TearDown() override { set_log_sink({}); }

  LoaderConfig config_for(std::optional<tier::TierKind> kind) {
    LoaderConfig config;
    config.source = source_;
    config.job.samples = kSamples;
    config.job.global_batch = kBatch;
    config.job.epochs = 3;
    config.staging_bytes = 1;  // two batches, the least there is
    if (GetParam() == Way::transformed) {
      image::Options options;
      options.pixels = image::Pixels{kSide, kSide};
      config.program = std::make_shared<const fields::Program>(
          fields::Program::of_image(image::Pipeline::compile(
              std::vector<image::Step>{image::Resize{kSide, kSide}}, options)));
    }
    if (!kind) return config;
    const uint64_t record = kBytes + tier::record_overhead(*kind);
    tier::NodeCacheConfig node;
    node.job = "content" + folder_.path();
    node.tiers = {{*kind, kSamples * record, folder_.path(), false}};
    node.shm_directory = folder_.path();
    plan::Placement placement;
    placement.fill.resize(1);
    placement.tier.assign(kSamples, 0);
    for (uint64_t i = 0; i < kSamples; ++i) placement.offset.push_back(i * record);
    placement.used = {kSamples * record};
    cache_ = config.cache = tier::NodeCache::attach(node, source_->sizes(), tier::fixed(placement));
    return config;
  }
  // The next batches, each sample compared with its first content.
  static void take(Loader& loader, uint64_t batches) {
    for (uint64_t b = 0; b < batches; ++b) {
      const auto batch = loader.next(60s);
      ASSERT_NE(batch, nullptr);
      for (size_t i = 0; i < batch->samples.size(); ++i) {
        const std::byte* at = batch->buffer->data() + i * kBytes;
        for (uint64_t k = 0; k < kBytes; ++k) {
          ASSERT_EQ(at[k], std::byte(batch->samples[i] + 1)) << batch->samples[i];
        }
      }
    }
  }

  const TemporaryFolder folder_;
  const std::shared_ptr<Pictures> source_ = std::make_shared<Pictures>();
  std::shared_ptr<tier::NodeCache> cache_;
  std::mutex mutex_;
  std::vector<std::string> warnings_;
};

TEST_P(Content, AWrongByteInTheRamTierIsReadAnew) {
  Loader loader(config_for(tier::TierKind::ram));
  take(loader, kSamples / kBatch);
  loader.seek({2, 0});  // nothing of what was staged before is used
  for (uint64_t s = 0; s < kSamples; ++s) {
    auto* bytes = const_cast<std::byte*>(cache_->ram_view(s).bytes().data());
    bytes[s] ^= std::byte{4};
  }
  take(loader, kSamples / kBatch);
  EXPECT_EQ(source_->reads, 2 * kSamples);
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("in the RAM tier"), std::string::npos) << warnings_[0];
}

TEST_P(Content, AnotherContentOfTheSourceIsNamed) {
  Loader loader(config_for({}));
  take(loader, kSamples / kBatch);
  loader.seek({2, 0});
  source_->flip(11);
  try {
    take(loader, kSamples / kBatch);
    FAIL() << "not found";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::corruption);
    const std::string what = e.what();
    EXPECT_NE(what.find("p11"), std::string::npos) << what;
    EXPECT_NE(what.find("not those that were read first"), std::string::npos) << what;
  }
}

TEST_P(Content, AWrongByteOnTheWayFromTheSourceIsReadAgain) {
  Loader loader(config_for({}));
  take(loader, kSamples / kBatch);
  loader.seek({2, 0});
  source_->wrong_reads = 1;
  take(loader, kSamples / kBatch);
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("right ones at a second reading"), std::string::npos);
}

TEST_P(Content, AnotherContentOfTheSourceDoesNotReachTheFileTier) {
  for (uint64_t s = 0; s < kSamples; ++s) {
    source_->sums().agrees(s, std::vector<std::byte>(kBytes, std::byte(s + 1)));
  }
  auto config = config_for(tier::TierKind::file);
  cache_->sums().learn(source_->sums());
  config.on_error = OnError::substitute;
  source_->flip(11);
  Loader loader(std::move(config));
  uint64_t replaced = 0;
  for (uint64_t b = 0; b < kSamples / kBatch; ++b) {
    const auto batch = loader.next(60s);
    ASSERT_NE(batch, nullptr);
    replaced += batch->substitutions.size();
  }
  EXPECT_EQ(replaced, 1u);
  loader.close();
  EXPECT_EQ(cache_->state(11), tier::State::empty);
}

TEST_P(Content, WhatWasLearnedIsTheSourcesWhenTheTiersAreGone) {
  {
    Loader loader(config_for(tier::TierKind::ram));
    take(loader, kSamples / kBatch);
    loader.close();
  }
  EXPECT_EQ(source_->sums().known(), kSamples);
}

INSTANTIATE_TEST_SUITE_P(Ways, Content, testing::Values(Way::raw, Way::transformed),
                         [](const auto& way) {
                           return way.param == Way::raw ? "Raw" : "Transformed";
                         });

}  // namespace
}  // namespace nostall::stage
