// The pipeline beside an owner that answers: one that has nothing, and one that is faster than the
// node's own disk.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <future>

#include "../peer/parts.h"
#include "../temporary.h"
#include "base/crc32c.h"
#include "peer/session.h"
#include "plan/locality.h"
#include "stage/loader.h"

namespace nostall::stage {
namespace {

using namespace std::chrono_literals;

constexpr const char* kSecret = "the secret of this job";
constexpr uint64_t kSamples = 4;

// One red pixel.
constexpr std::array<uint8_t, 69> kPng{
    0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a, 0x00, 0x00, 0x00, 0x0d, 0x49, 0x48,
    0x44, 0x52, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, 0x01, 0x08, 0x02, 0x00, 0x00,
    0x00, 0x90, 0x77, 0x53, 0xde, 0x00, 0x00, 0x00, 0x0c, 0x49, 0x44, 0x41, 0x54, 0x78,
    0xda, 0x63, 0xf8, 0xdf, 0xa0, 0x00, 0x00, 0x04, 0x21, 0x01, 0xa0, 0x73, 0x42, 0xe1,
    0x3c, 0x00, 0x00, 0x00, 0x00, 0x49, 0x45, 0x4e, 0x44, 0xae, 0x42, 0x60, 0x82};

class ImageSource : public source::Source {
 public:
  uint64_t size() const override { return kSamples; }
  std::span<const uint64_t> sizes() const override { return sizes_; }
  std::span<const int64_t> labels() const override { return labels_; }
  uint64_t total_bytes() const override { return kSamples * kPng.size(); }
  uint64_t fingerprint() const override { return 42; }
  std::string describe(uint64_t sample) const override { return "image " + std::to_string(sample); }
  std::unique_ptr<source::Reader> make_reader(source::ReaderKind, unsigned) const override {
    class Reader : public source::Reader {
     public:
      explicit Reader(const std::function<void()>& before_read) : before_read_(before_read) {}
      void read(std::span<source::ReadRequest> requests) override {
        if (before_read_) before_read_();
        for (auto& r : requests) std::memcpy(r.into.data(), kPng.data(), kPng.size());
      }
      std::string_view name() const override { return "image"; }

     private:
      const std::function<void()>& before_read_;
    };
    return std::make_unique<Reader>(before_read);
  }

  std::function<void()> before_read;

 private:
  const std::vector<uint64_t> sizes_ = std::vector<uint64_t>(kSamples, kPng.size());
  const std::vector<int64_t> labels_ = std::vector<int64_t>(kSamples, 0);
};

// Rank 1, seen from rank 0: says that it has everything, and answers that it has not; or what it has.
class Answering final : public peer::Transport {
 public:
  explicit Answering(std::span<const std::byte> has = {}) : has_(has) {}
  std::string address() override { return {}; }
  void connect(uint32_t, const std::string&) override {}
  void send(uint32_t, const peer::HeaderBytes& bytes, std::span<const std::byte>,
            std::function<void(bool)> done) override {
    if (done) done(true);
    const peer::Header asked = peer::decode(bytes).take();
    peer::Header answer;
    answer.from = 1;
    answer.request = asked.request;
    answer.sample = asked.sample;
    answer.progress = plan::kNever;
    if (asked.kind == peer::Kind::hello) {
      answer.kind = peer::Kind::challenge;
      answer.nonce = peer::random_nonce();
      session_ =
          std::make_unique<peer::Session>(peer::key_of(kSecret), 0, 1, asked.nonce, answer.nonce);
    } else if (asked.kind == peer::Kind::proof) {
      answer.kind = peer::Kind::welcome;
    } else if (asked.kind == peer::Kind::fetch) {
      answer.kind = peer::Kind::reply;
      answer.status = has_.empty() ? peer::Status::never : peer::Status::here;
      answer.length = has_.size();
      answer.crc = crc32c(has_);
    } else {
      return;
    }
    answers_.push_back(session_->seal(answer));
  }
  void drop(uint32_t) override {}
  bool progress(peer::Receiver& receiver) override {
    if (answers_.empty()) return false;
    const peer::HeaderBytes answer = answers_.front();
    answers_.pop_front();
    const peer::Header header = peer::decode(answer).take();
    const peer::Delivery to = receiver.on_message(answer, header.length);
    if (header.length > 0) {
      if (before_payload) before_payload();
      std::memcpy(to.into.data(), has_.data(), has_.size());
      to.done(true);
    }
    return true;
  }
  void wait(std::chrono::milliseconds) override { std::this_thread::sleep_for(1ms); }
  void wake() noexcept override {}

  std::function<void()> before_payload;

 private:
  const std::span<const std::byte> has_;
  std::unique_ptr<peer::Session> session_;
  std::deque<peer::HeaderBytes> answers_;
};

// Another rank of the node reads at once what this one gives up.
class QuickNeighbour final : public tier::NodeCache {
 public:
  explicit QuickNeighbour(std::unique_ptr<tier::NodeCache> cache) : cache_(std::move(cache)) {}
  tier::State state(uint64_t s) const noexcept override { return cache_->state(s); }
  tier::TierKind kind(uint64_t s) const noexcept override { return cache_->kind(s); }
  size_t tier_of(uint64_t s) const noexcept override { return cache_->tier_of(s); }
  bool placed(uint64_t s) const noexcept override { return cache_->placed(s); }
  bool claim(uint64_t s) noexcept override { return cache_->claim(s); }
  std::span<std::byte> ram_slot(uint64_t s) override { return cache_->ram_slot(s); }
  void file_write(uint64_t s, std::span<const std::byte> bytes) override {
    cache_->file_write(s, bytes);
  }
  void publish(uint64_t s) noexcept override { cache_->publish(s); }
  void abandon(uint64_t s) noexcept override {
    std::memcpy(cache_->ram_slot(s).data(), kPng.data(), kPng.size());
    cache_->publish(s);
  }
  tier::RamView ram_view(uint64_t s) const noexcept override { return cache_->ram_view(s); }
  bool file_read(uint64_t s, std::span<std::byte> into) override {
    return cache_->file_read(s, into);
  }
  void file_read(std::span<tier::TierRead> reads, tier::RecordReader& reader) override {
    cache_->file_read(reads, reader);
  }
  SampleSums& sums() noexcept override { return cache_->sums(); }
  void reject(uint64_t s) noexcept override { cache_->reject(s); }
  void try_again() override { cache_->try_again(); }
  tier::State wait(uint64_t s, std::chrono::nanoseconds timeout, std::stop_token stop) override {
    return cache_->wait(s, timeout, std::move(stop));
  }
  std::optional<tier::PeerFailure> dead_peer() const override { return {}; }
  uint64_t ram_bytes() const noexcept override { return cache_->ram_bytes(); }
  uint64_t file_bytes() const noexcept override { return cache_->file_bytes(); }

 private:
  std::unique_ptr<tier::NodeCache> cache_;
};

TEST(LoaderWithPeers, WhatANeighbourReadsAfterAPeerFailedIsGood) {
  const TemporaryFolder shm;
  LoaderConfig config;
  config.source = std::make_shared<ImageSource>();
  config.job.samples = config.job.global_batch = kSamples;
  const std::vector<image::Step> steps{image::Resize{2, 2}};
  config.program = std::make_shared<const fields::Program>(
      fields::Program::of_image(image::Pipeline::compile(steps)));

  tier::NodeCacheConfig tiers;
  tiers.job = "stage test";
  tiers.tiers = {{tier::TierKind::ram, kSamples * kPng.size(), "", false}};
  tiers.shm_directory = shm.path();
  const plan::NodeAccess access = plan::node_access(config.job, 0, 1);
  const plan::TierShape shape{kSamples * kPng.size(), 0};
  config.cache = std::make_shared<QuickNeighbour>(tier::NodeCache::attach(
      tiers, config.source->sizes(),
      tier::fixed(plan::place(config.source->sizes(), access, {&shape, 1}))));

  peer::ExchangeConfig peers;
  peers.node_of_rank = {0, 1};
  peers.addresses = {"", ""};
  peers.secret = kSecret;
  plan::Ownership ownership;
  ownership.owner.assign(kSamples, 1);
  ownership.first_reader.assign(kSamples, 1);
  ownership.first_access.assign(kSamples, 0);
  config.peers = std::make_shared<peer::Exchange>(std::make_unique<Answering>(), peers, ownership,
                                                  config.source->sizes(), config.cache);
  const auto exchange = config.peers;
  // Else the loader, whose consumer waits, may read for itself.
  const auto end = std::chrono::steady_clock::now() + 60s;
  while (exchange->where(0, 0) != peer::Where::there && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(1ms);
  }
  Loader loader(std::move(config));
  const auto batch = loader.next(60s);
  ASSERT_NE(batch, nullptr);
  EXPECT_EQ(exchange->stats().asked_in_vain, kSamples);
  EXPECT_EQ(batch->origins[size_t(Origin::ram)].samples, kSamples);
}

// Else another rank of the node would fill the place, and the payload would come on top of it.
TEST(LoaderWithPeers, AClaimLastsAsLongAsAPayloadIsOnItsWay) {
  const TemporaryFolder root;
  LoaderConfig config;
  const auto source = std::make_shared<ImageSource>();
  config.source = source;
  config.job.samples = config.job.global_batch = kSamples;
  config.fetchers = 1;
  const std::vector<uint64_t> sizes(kSamples, kPng.size());
  config.cache = peer::cache_below(root.path(), "on its way", tier::TierKind::ram, sizes);
  std::promise<void> failed, arrives;
  source->before_read = [&, comes = arrives.get_future().share()] {
    comes.wait_for(60s);
    failed.set_value();
    throw std::bad_alloc();
  };
  auto transport = std::make_unique<Answering>(std::as_bytes(std::span(kPng)));
  std::atomic<int> seen{-1};
  transport->before_payload = [&, cache = config.cache] {
    arrives.set_value();
    failed.get_future().wait_for(60s);
    std::this_thread::sleep_for(200ms);  // for the run to end, if it does not wait
    seen = static_cast<int>(cache->state(0));
  };
  peer::ExchangeConfig peers;
  peers.node_of_rank = {0, 1};
  peers.addresses = {"", ""};
  peers.secret = kSecret;
  plan::Ownership ownership;
  ownership.owner.assign(kSamples, plan::kNoOwner);
  ownership.owner[0] = 1;
  ownership.first_reader.assign(kSamples, 1);
  ownership.first_access.assign(kSamples, 0);
  config.peers =
      std::make_shared<peer::Exchange>(std::move(transport), peers, ownership, sizes, config.cache);
  const auto end = std::chrono::steady_clock::now() + 60s;
  while (config.peers->where(0, 0) != peer::Where::there &&
         std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(1ms);
  }
  {
    Loader loader(config);
    EXPECT_THROW(loader.next(60s), Error);
  }
  EXPECT_EQ(seen, static_cast<int>(tier::State::filling));
  for (uint64_t s = 0; s < kSamples; ++s) EXPECT_EQ(config.cache->state(s), tier::State::empty);
}

// Reads take so long that a busy machine is fast beside them.
class SlowDisk final : public FileSystem {
 public:
  int64_t pread(int fd, std::span<std::byte> into, uint64_t offset) override {
    ++reads;
    std::this_thread::sleep_for(300ms);
    return FileSystem::pread(fd, into, offset);
  }
  std::atomic<int> reads{0};
};

// A data set whose samples lie in this node's file tier, and at their owner too.
class BesideASlowDisk : public testing::Test {
 protected:
  void SetUp() override {
    config_.source = std::make_shared<ImageSource>();
    config_.job.samples = kSamples;
    config_.job.global_batch = 1;
    config_.job.epochs = kEpochs;
    config_.fetchers = 1;
    config_.depth = 1;
    tier::NodeCacheConfig tiers;
    tiers.job = "slow disk";
    const uint64_t room = kSamples * (kPng.size() + tier::record_overhead(tier::TierKind::file));
    tiers.tiers = {{tier::TierKind::file, room, root_.path("disk"), false}};
    tiers.shm_directory = root_.path();
    tiers.files = &disk_;
    const plan::NodeAccess access = plan::node_access(config_.job, 0, 1);
    const plan::TierShape shape{room, tier::record_overhead(tier::TierKind::file)};
    config_.cache = tier::NodeCache::attach(
        tiers, config_.source->sizes(),
        tier::fixed(plan::place(config_.source->sizes(), access, {&shape, 1})));
    for (uint64_t s = 0; s < kSamples; ++s) {
      ASSERT_TRUE(config_.cache->claim(s));
      config_.cache->file_write(s, std::as_bytes(std::span(kPng)));
    }
    disk_.reads = 0;
  }
  void TearDown() override { config_ = {}; }

  // Where the samples of all epochs were taken from.
  std::array<uint64_t, kOrigins> taken() {
    Loader loader(config_);
    std::array<uint64_t, kOrigins> samples{};
    for (uint64_t i = 0; i < kEpochs * kSamples; ++i) {
      const auto batch = loader.next(60s);
      if (!batch) break;
      for (size_t o = 0; o < kOrigins; ++o) samples[o] += batch->origins[o].samples;
    }
    return samples;
  }

  static constexpr uint32_t kEpochs = 10;
  const TemporaryFolder root_;
  SlowDisk disk_;
  LoaderConfig config_;
};

// By the fixed order of memory, own files, other nodes it would be the disk each time.
TEST_F(BesideASlowDisk, AnotherNodesMemoryIsReadInstead) {
  peer::ExchangeConfig peers;
  peers.node_of_rank = {0, 1};
  peers.addresses = {"", ""};
  peers.secret = kSecret;
  plan::Ownership ownership;
  ownership.owner.assign(kSamples, 1);
  ownership.first_reader.assign(kSamples, 1);
  ownership.first_access.assign(kSamples, 0);
  config_.peers =
      std::make_shared<peer::Exchange>(std::make_unique<Answering>(std::as_bytes(std::span(kPng))),
                                       peers, ownership, config_.source->sizes(), config_.cache);
  const auto end = std::chrono::steady_clock::now() + 60s;
  while (config_.peers->where(0, 0) != peer::Where::there &&
         std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(1ms);
  }
  const auto samples = taken();
  EXPECT_LE(disk_.reads * 2, static_cast<int>(kEpochs * kSamples));
  EXPECT_EQ(samples[size_t(Origin::file)] + samples[size_t(Origin::peer)], kEpochs * kSamples);
  EXPECT_GE(samples[size_t(Origin::peer)], samples[size_t(Origin::file)]);
}

// The speed of the source must be known: what reads from it takes from all nodes.
TEST_F(BesideASlowDisk, AFasterSourceIsReadInstead) {
  config_.expected_source = 1e-9;
  const auto samples = taken();
  EXPECT_LE(disk_.reads * 2, static_cast<int>(kEpochs * kSamples));
  EXPECT_GE(samples[size_t(Origin::source)], samples[size_t(Origin::file)]);
}

// Whoever seeks: ranks that begin at different places must deal an epoch alike.
TEST(LoaderWithPeers, SamplesGoToTheirOwnersAfterASeekToo) {
  const TemporaryFolder root;
  LoaderConfig config;
  config.source = std::make_shared<ImageSource>();
  config.job.samples = config.job.global_batch = kSamples;
  config.job.epochs = 4;
  config.job.world = 2;
  config.locality = true;
  const std::vector<uint64_t> sizes(kSamples, kPng.size());
  config.cache = peer::cache_below(root.path(), "after a seek", tier::TierKind::ram, sizes);
  peer::ExchangeConfig peers;
  peers.node_of_rank = {0, 1};
  peers.addresses = {"", ""};
  peers.secret = kSecret;
  plan::Ownership ownership;
  for (uint64_t s = 0; s < kSamples; ++s) {
    ownership.owner.push_back(s < kSamples / 2 ? 0 : 1);
    ownership.first_reader.push_back(ownership.owner.back());
    ownership.first_access.push_back(0);
  }
  config.peers =
      std::make_shared<peer::Exchange>(std::make_unique<Answering>(std::as_bytes(std::span(kPng))),
                                       peers, ownership, config.source->sizes(), config.cache);
  Loader loader(config);
  bool differs = false;
  for (const uint32_t begin : {0u, 1u, 2u, 1u, 3u, 0u}) {
    loader.seek({begin, 0});
    for (uint32_t e = begin; e < 4; ++e) {
      const auto batch = loader.next(60s);
      ASSERT_NE(batch, nullptr);
      ASSERT_EQ(batch->position, (Position{e, 0}));
      const std::vector<plan::SampleId> planned = plan::rank_epoch(config.job, e, 0).samples;
      // No owner has its samples in the epoch in which they are read for the first time.
      const std::vector<plan::SampleId> expected =
          e == 0 ? planned
                 : plan::local_rank_epoch(config.job, plan::epoch_order(config.job, e), 0,
                                          ownership, peers.node_of_rank)
                       .samples;
      EXPECT_EQ(batch->samples, expected) << "epoch " << e << " after a seek to " << begin;
      differs = differs || (e == begin && expected != planned);
    }
  }
  EXPECT_TRUE(differs);
}

}  // namespace
}  // namespace nostall::stage
