// Readers without a plan share what they read, whoever comes and goes.
#include "stage/node_reader.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <future>
#include <thread>
#include <utility>

namespace nostall::stage {
namespace {

constexpr uint64_t kSamples = 64, kBytes = 1000;

// Sample i has all bytes i; reads are counted.
class Counted : public source::Source {
 public:
  Counted() : sizes_(kSamples, kBytes), labels_(kSamples) {}
  uint64_t size() const override { return kSamples; }
  std::span<const uint64_t> sizes() const override { return sizes_; }
  std::span<const int64_t> labels() const override { return labels_; }
  uint64_t total_bytes() const override { return kSamples * kBytes; }
  uint64_t fingerprint() const override { return 9; }
  std::string describe(uint64_t sample) const override {
    if (sample == nameless) throw std::bad_alloc();
    return "c" + std::to_string(sample);
  }
  std::unique_ptr<source::Reader> make_reader(source::ReaderKind, unsigned) const override {
    class Reader : public source::Reader {
     public:
      explicit Reader(const Counted& source) : source_(source) {}
      void read(std::span<source::ReadRequest> requests) override {
        if (source_.before_reads) source_.before_reads();
        for (auto& r : requests) {
          ++source_.reads;
          if (r.sample == source_.bad.load()) {
            r.error = ENOENT;
            continue;
          }
          std::memset(r.into.data(), static_cast<int>(r.sample), r.into.size());
          r.error = 0;
        }
      }
      std::string_view name() const override { return "counted"; }

     private:
      const Counted& source_;
    };
    return std::make_unique<Reader>(*this);
  }

  mutable std::atomic<uint64_t> reads{0}, bad{kSamples};
  uint64_t nameless = kSamples;
  std::function<void()> before_reads;

 private:
  std::vector<uint64_t> sizes_;
  std::vector<int64_t> labels_;
};

class NodeReaders : public testing::Test {
 protected:
  std::unique_ptr<NodeReader> make(std::vector<tier::TierSpec> tiers,
                                   std::function<void()> waiting = {}) {
    return std::make_unique<NodeReader>(
        source_, "node reader " + std::to_string(::getpid()) + std::to_string(number_),
        std::move(tiers), std::move(waiting));
  }
  static std::vector<tier::TierSpec> ram() {
    return {{tier::TierKind::ram, kSamples * kBytes, "", false}};
  }
  static void expect(NodeReader& reader, const std::vector<uint64_t>& samples) {
    std::vector<std::vector<std::byte>> bytes(samples.size(), std::vector<std::byte>(kBytes));
    std::vector<std::span<std::byte>> into(bytes.begin(), bytes.end());
    reader.read(samples, into);
    for (size_t i = 0; i < samples.size(); ++i) {
      for (const std::byte b : bytes[i]) ASSERT_EQ(b, std::byte(samples[i]));
    }
  }

  const std::shared_ptr<Counted> source_ = std::make_shared<Counted>();
  static inline int number_ = 0;
  void SetUp() override { ++number_; }
};

TEST_F(NodeReaders, ThreadsOfSeveralReadersReadEachSampleOnce) {
  std::vector<std::unique_ptr<NodeReader>> readers;
  for (int i = 0; i < 3; ++i) readers.push_back(make(ram()));
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < kSamples; i += 4) {
        const uint64_t first = (i + 16 * t) % kSamples;
        expect(*readers[t % 3], {first + 3, first, first + 1, first + 2, first});
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(source_->reads.load(), kSamples);
  EXPECT_EQ(readers[0]->ram_bytes(), kSamples * kBytes);
}

TEST_F(NodeReaders, SignalsAreHeardWhileAnotherComparesWhatAKeptTierHolds) {
  const auto folder = std::filesystem::temp_directory_path() /
                      ("nostall node reader " + std::to_string(::getpid()));
  std::filesystem::create_directory(folder);
  const std::vector<tier::TierSpec> kept{
      {tier::TierKind::file, kSamples * kBytes, folder.string(), true}};
  expect(*make(kept), {1, 2, 3});
  std::promise<void> compares, go_on;
  source_->before_reads = [&, gone = go_on.get_future().share(), told = false]() mutable {
    if (!std::exchange(told, true)) compares.set_value();
    gone.wait();
  };
  std::unique_ptr<NodeReader> first;
  std::thread comparing([&] { first = make(kept); });
  compares.get_future().wait();
  struct Interrupted {};
  EXPECT_THROW(make(kept, [] { throw Interrupted{}; }), Interrupted);
  go_on.set_value();
  comparing.join();
  source_->before_reads = {};
  expect(*first, {1, 2, 3});
  EXPECT_EQ(first->taken(Origin::source), 0u);
  first.reset();
  std::filesystem::remove_all(folder);
}

TEST_F(NodeReaders, TheNumberOfOneThatLeftIsTakenAgain) {
  auto first = make(ram());
  expect(*first, {1, 2});
  auto second = make(ram());
  first.reset();
  auto third = make(ram());
  auto fourth = make(ram());
  expect(*third, {1, 2, 3});
  expect(*fourth, {3});
  EXPECT_EQ(source_->reads.load(), 3u);
}

TEST_F(NodeReaders, AFailedReadIsNamedAndLeavesNoClaim) {
  auto reader = make(ram());
  source_->bad = 5;
  std::vector<std::byte> bytes(2 * kBytes);
  const std::vector<uint64_t> samples{5, 6};
  const std::vector<std::span<std::byte>> into{std::span(bytes).first(kBytes),
                                               std::span(bytes).last(kBytes)};
  try {
    reader->read(samples, into);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::io);
    EXPECT_STREQ(e.what(), "cannot read c5: No such file or directory");
  }
  source_->bad = kSamples;
  expect(*reader, {5, 6});
  EXPECT_EQ(reader->taken(Origin::ram), 1u);
  EXPECT_EQ(reader->taken(Origin::source), 2u);
}

TEST_F(NodeReaders, AnExceptionLeavesNoClaim) {
  auto reader = make(ram());
  source_->bad = source_->nameless = 5;
  EXPECT_THROW(expect(*reader, {4, 5, 6, 7}), std::bad_alloc);
  source_->bad = source_->nameless = kSamples;
  expect(*reader, {4, 5, 6, 7});
  expect(*reader, {4, 5, 6, 7});
  EXPECT_EQ(reader->taken(Origin::ram), 5u);  // 4 was kept before the exception
}

// Keeps sample 2 alone.
class Forgetful : public tier::Store {
 public:
  void put(uint64_t, uint64_t, std::span<const std::byte>) override { ++puts; }
  bool get(uint64_t, uint64_t sample, std::span<std::byte> into) override {
    if (sample != 2) return false;
    std::memset(into.data(), 2, into.size());
    return true;
  }
  std::atomic<int> puts{0};
};

TEST_F(NodeReaders, WhatAStoreDroppedIsPutAgainAndCountedOnce) {
  const auto store = std::make_shared<Forgetful>();
  tier::TierSpec spec{tier::TierKind::file, 2 * kSamples * kBytes, "forgetful", false};
  spec.store = store;
  auto reader = make({spec});
  expect(*reader, {1, 2});
  const uint64_t both = reader->file_bytes();
  expect(*reader, {1, 2});
  EXPECT_EQ(reader->file_bytes(), both / 2);
  expect(*reader, {1, 2});
  EXPECT_EQ(reader->file_bytes(), both);
  EXPECT_EQ(store->puts.load(), 3);
  EXPECT_EQ(reader->taken(Origin::file), 2u);
}

TEST_F(NodeReaders, WithoutTiersEverySampleIsRead) {
  auto reader = make({});
  expect(*reader, {1, 1, 2});
  EXPECT_EQ(source_->reads.load(), 3u);
}

}  // namespace
}  // namespace nostall::stage
