// Ranks as several caches of one process; shared memory in a directory of the test's own.
#include "tier/node_cache.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

#include "../failing_files.h"
#include "../refuse.h"
#include "base/error.h"
#include "base/handover.h"
#include "base/lock.h"
#include "caches.h"
#include "tier/names.h"

namespace nostall::tier {
namespace {

TEST_F(NodeCacheTest, WhatOneRankPutsTheOthersSee) {
  const auto a = attach(config(0, 2)), b = attach(config(1, 2));
  put(*a, 3);
  EXPECT_EQ(b->state(3), State::ready);
  const auto bytes = bytes_of(3);
  EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), b->ram_view(3).bytes().begin()));
  EXPECT_EQ(b->ram_bytes(), kSize);
  EXPECT_FALSE(b->claim(3));
}

TEST_F(NodeCacheTest, AHalfGoesOnWhenTheLastRankHasLeftItsChunk) {
  const auto a = attach(with_halves(config(0, 2))), b = attach(with_halves(config(1, 2)));
  const plan::KeptChunk first = chunk_of({2, 3}), third = chunk_of({3, 7});
  a->use_chunk(0);
  b->use_chunk(0);
  ASSERT_EQ(a->half_of(0, first), Half::here);
  EXPECT_EQ(b->half_of(0, first), Half::here);
  const uint64_t place = a->entry_of(0, 1);
  ASSERT_TRUE(a->claim(place));
  const auto slot = a->ram_slot(place);
  ASSERT_EQ(slot.size(), kSize);
  std::memset(slot.data(), 3, kSize);
  a->publish(place);
  EXPECT_EQ(b->state(place), State::ready);
  EXPECT_EQ(b->ram_view(place).bytes()[kSize - 1], std::byte{3});
  EXPECT_EQ(b->ram_bytes(), kSize);

  // One rank goes on; what the other one uses stays.
  a->use_chunk(1);
  EXPECT_EQ(a->half_of(2, third), Half::awaited);
  EXPECT_EQ(b->state(place), State::ready);
  b->use_chunk(1);
  EXPECT_EQ(a->half_of(2, third), Half::here);
  EXPECT_EQ(a->ram_bytes(), 0);
  EXPECT_EQ(b->state(a->entry_of(2, 1)), State::empty);
  // The place of the third chunk, in the memory of the first one.
  EXPECT_TRUE(b->claim(b->entry_of(2, 1)));
  EXPECT_EQ(b->ram_slot(b->entry_of(2, 1)).size(), kSize);
  b->abandon(b->entry_of(2, 1));
  EXPECT_EQ(b->half_of(0, first), Half::gone);
}

TEST_F(NodeCacheTest, AHalfStaysWhileARankReadsForItsChunk) {
  const auto a = attach(with_halves(config(0, 2))), b = attach(with_halves(config(1, 2)));
  const plan::KeptChunk kept = chunk_of({1});
  a->use_chunk(0);
  a->read_for_chunk(0);
  ASSERT_EQ(a->half_of(0, kept), Half::here);
  a->use_chunk(5);
  b->use_chunk(1);
  EXPECT_EQ(b->half_of(2, kept), Half::awaited);
  a->read_for_chunk(std::nullopt);
  EXPECT_EQ(b->half_of(2, kept), Half::here);
}

TEST_F(NodeCacheTest, RanksThatHaveLeftUseNoChunkAndThoseToComeUseAny) {
  const auto a = attach(with_halves(config(0, 2)));
  const plan::KeptChunk kept = chunk_of({1});
  a->use_chunk(0);
  ASSERT_EQ(a->half_of(0, kept), Half::here);
  a->use_chunk(1);
  EXPECT_EQ(a->half_of(2, kept), Half::awaited);  // of the rank that is to come
  auto b = attach(with_halves(config(1, 2)));
  EXPECT_EQ(a->half_of(2, kept), Half::awaited);  // it has not said where it begins
  b->use_chunk(0);
  EXPECT_EQ(a->half_of(2, kept), Half::awaited);
  b.reset();
  EXPECT_EQ(a->half_of(2, kept), Half::here);
  // Back to the begin: nobody uses what is there.
  a->use_chunk(0);
  EXPECT_EQ(a->half_of(0, kept), Half::here);
}

TEST_F(NodeCacheTest, HalvesStayWithinTheirTier) {
  NodeCacheConfig c = with_halves(config(0, 1));
  c.tiers[0].capacity = kSamples * kSize + 499;
  try {
    attach(c);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("two halves of 250 bytes do not fit into tier 0"),
              std::string::npos)
        << e.what();
  }
  c.tiers[0].capacity = kSamples * kSize + 500;
  EXPECT_NE(attach(c), nullptr);
}

TEST_F(NodeCacheTest, APlacementThatDoesNotGoWithTheTiersIsRefused) {
  const NodeCacheConfig c = config(0, 1);
  const std::vector<uint64_t> sizes(kSamples, kSize);
  const auto told = [&](const std::function<void(plan::Placement&)>& change) {
    plan::Placement placement = in_the_first_tier(TierKind::ram);
    change(placement);
    try {
      NodeCache::attach(c, sizes, fixed(placement));
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::usage);
      return std::string(e.what());
    }
    return std::string();
  };
  const std::string other = "the placement does not go with the tiers or the sizes";
  EXPECT_EQ(told([](auto& p) { p.tier.pop_back(); }), other);
  EXPECT_EQ(told([](auto& p) { p.offset.push_back(0); }), other);
  EXPECT_EQ(told([](auto& p) { p.used.push_back(0); }), other);
  const std::string beyond = "the placement puts sample 3 beyond the capacity of tier ";
  EXPECT_EQ(told([](auto& p) { p.offset[3] = 5000; }), beyond + "0");
  EXPECT_EQ(told([](auto& p) { p.offset[3] = 4096 - kSize + 1; }), beyond + "0");
  EXPECT_EQ(told([](auto& p) { p.tier[3] = 1; }), beyond + "1");
  EXPECT_EQ(told([](auto&) {}), "");
  EXPECT_EQ(files(), 0u);
}

TEST_F(NodeCacheTest, AHalfOfATierThatThereIsNotIsRefused) {
  NodeCacheConfig c = with_halves(config(0, 1));
  c.halves.tier = 1;
  try {
    attach(c);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("do not fit into tier 1"), std::string::npos) << e.what();
  }
}

// Each rank walks chunks as fast as it can, and finds in each half what was written for that chunk.
TEST_F(NodeCacheTest, ManyRanksPassHalvesOn) {
  constexpr uint32_t kRanks = 3;
  constexpr uint64_t kChunks = 200;
  const plan::KeptChunk kept = chunk_of({1, 2});
  std::vector<std::unique_ptr<NodeCache>> ranks;
  for (uint32_t r = 0; r < kRanks; ++r) ranks.push_back(attach(with_halves(config(r, kRanks))));
  std::atomic<uint64_t> filled = 0, wrong = 0;
  std::vector<std::jthread> threads;
  for (auto& rank : ranks) {
    threads.emplace_back([&, cache = rank.get()] {
      for (uint64_t chunk = 0; chunk < kChunks; ++chunk) {
        cache->use_chunk(chunk);
        while (cache->half_of(chunk, kept) != Half::here) cache->wait_for_half(1ms);
        for (uint64_t i = 0; i < 2; ++i) {
          const uint64_t entry = cache->entry_of(chunk, i);
          if (cache->claim(entry)) {
            std::memset(cache->ram_slot(entry).data(), static_cast<int>(chunk % 251), kSize);
            cache->publish(entry);
            ++filled;
          }
          cache->wait(entry, 60s, {});
          const RamView view = cache->ram_view(entry);
          wrong += !view || view.bytes()[0] != static_cast<std::byte>(chunk % 251) ||
                   view.bytes()[kSize - 1] != static_cast<std::byte>(chunk % 251);
        }
      }
      cache->use_chunk(kChunks);
    });
  }
  threads.clear();
  EXPECT_EQ(filled, 2 * kChunks);
  EXPECT_EQ(wrong, 0);
}

// Places for copies of samples 10 to 29, whose sizes differ, behind the ten samples that are placed.
class CopiesTest : public NodeCacheTest {
 protected:
  static constexpr uint64_t kAll = 30;
  CopiesTest() {
    for (uint64_t s = 0; s < kAll; ++s) sizes_.push_back(s < kSamples ? kSize : 40 + s);
  }
  plan::Placement placement(uint64_t room) const {
    plan::Placement placed = in_the_first_tier(TierKind::ram);
    placed.tier.resize(kAll, plan::kNoTier);
    placed.offset.resize(kAll, 0);
    placed.copies = plan::CopyPlaces(
        sizes_, [](uint64_t s) { return s >= kSamples; }, room);
    return placed;
  }
  std::unique_ptr<NodeCache> enter(uint32_t rank, uint32_t world, uint64_t room = 600) const {
    return NodeCache::attach(config(rank, world), sizes_, fixed(placement(room)));
  }
  std::vector<std::byte> bytes(uint64_t sample) const {
    return std::vector<std::byte>(sizes_[sample], static_cast<std::byte>(sample + 1));
  }
  static plan::CopyUse at(uint32_t place, uint32_t epoch = 0) {
    return {place, false, true, epoch};
  }
  bool keep(NodeCache& cache, uint32_t place, uint64_t sample, uint32_t epoch = 0) const {
    return cache.write_copy(at(place, epoch), sample, bytes(sample));
  }
  bool has(NodeCache& cache, uint32_t place, uint64_t sample) const {
    std::vector<std::byte> into(sizes_[sample]);
    const bool found = cache.read_copy(at(place), sample, into);
    if (found) {
      EXPECT_EQ(into, bytes(sample));
    }
    return found;
  }
  // A place of the largest samples: every other one fits there.
  uint32_t last_place() const { return placement(600).copies.count() - 1; }

  std::vector<uint64_t> sizes_;
};

TEST_F(CopiesTest, APlaceHasWhatAnyRankPutThereLast) {
  const auto a = enter(0, 2), b = enter(1, 2);
  const uint32_t place = last_place();
  EXPECT_FALSE(has(*a, place, 29));
  EXPECT_TRUE(keep(*a, place, 29));
  EXPECT_TRUE(has(*b, place, 29));
  EXPECT_EQ(b->ram_bytes(), sizes_[29]);
  EXPECT_TRUE(keep(*b, place, 10));
  EXPECT_FALSE(has(*a, place, 29));
  EXPECT_TRUE(has(*a, place, 10));
  EXPECT_EQ(b->ram_bytes(), sizes_[10]);
  EXPECT_FALSE(keep(*a, 0, 29));  // larger than the place
  put(*a, 3);                     // beside what is placed
  EXPECT_TRUE(has(*b, place, 10));
}

TEST_F(CopiesTest, ALaterCopyIsLeftToWhoIsAhead) {
  const auto a = enter(0, 2), b = enter(1, 2);
  const uint32_t place = last_place();
  EXPECT_TRUE(keep(*a, place, 29, 3));
  EXPECT_FALSE(keep(*b, place, 28, 2));
  EXPECT_TRUE(has(*b, place, 29));
  EXPECT_TRUE(keep(*b, place, 27, 3));
  EXPECT_TRUE(keep(*b, place, 28, 4));
  EXPECT_TRUE(keep(*a, place, 29, 1));  // three epochs before: of a job that has gone back
  EXPECT_TRUE(has(*a, place, 29));
}

TEST_F(CopiesTest, WrongBytesAreNeverGiven) {
  const auto cache = enter(0, 1);
  ASSERT_NE(cache->sums().of(29), sample_sum(bytes(10)));
  EXPECT_TRUE(cache->sums().agrees(29, bytes(29)));
  std::vector<std::byte> other = bytes(29);
  other[7] ^= std::byte{1};
  EXPECT_TRUE(cache->write_copy(at(last_place()), 29, other));
  EXPECT_FALSE(has(*cache, last_place(), 29));
  EXPECT_EQ(cache->ram_bytes(), 0u);
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("sample 29 in the RAM tier has changed"), std::string::npos);
  EXPECT_TRUE(keep(*cache, last_place(), 29));
  EXPECT_TRUE(has(*cache, last_place(), 29));
}

// The system refuses this process memory for what it notes, while it takes memory for a place.
TEST_F(CopiesTest, AClaimEndsWhereThereIsNoMemory) {
  class Exhausted : public FileSystem {
   public:
    int allocate(int fd, uint64_t offset, uint64_t size) override {
      if (exhausted) throw std::bad_alloc();
      return FileSystem::allocate(fd, offset, size);
    }
    bool exhausted = true;
  };
  Exhausted files;
  NodeCacheConfig c = config(0, 1);
  c.files = &files;
  const auto cache = NodeCache::attach(c, sizes_, fixed(placement(600)));
  EXPECT_FALSE(keep(*cache, last_place(), 29));
  ASSERT_TRUE(cache->claim(0));
  EXPECT_TRUE(cache->ram_slot(0).empty());
  EXPECT_EQ(cache->state(0), State::failed);
  files.exhausted = false;
  cache->try_again();
  EXPECT_TRUE(keep(*cache, last_place(), 29));
  put(*cache, 0);
}

TEST_F(CopiesTest, PlacesBeyondTheTierAreRefused) {
  NodeCacheConfig c = config(0, 1);
  c.tiers[0].capacity = 1500;
  EXPECT_THROW(NodeCache::attach(c, sizes_, fixed(placement(600))), Error);
  c = config(0, 1);
  plan::Placement placed = placement(600);
  placed.copy_tier = 1;
  EXPECT_THROW(NodeCache::attach(c, sizes_, fixed(placed)), Error);
  const auto none = enter(0, 1, 0);
  EXPECT_EQ(placement(0).copies.count(), 0u);
}

TEST_F(CopiesTest, RanksWithOtherPlacesAreRefused) {
  const auto a = enter(0, 2, 600);
  EXPECT_THROW(enter(1, 2, 500), Error);
}

// A rank dies in the middle of a copy, out of a place or into one: at memory that it may not touch.
TEST_F(CopiesTest, ADeadRankHoldsNoPlace) {
  int go[2];
  ASSERT_EQ(::pipe(go), 0);
  for (const bool reads : {true, false}) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::signal(SIGSEGV, SIG_DFL);
      char word = 0;
      if (::read(go[0], &word, 1) != 1) ::_exit(1);
      auto* closed = static_cast<std::byte*>(
          ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      const auto dies = enter(1, 2);
      if (reads) {
        (void)dies->read_copy(at(last_place()), 29, {closed, sizes_[29]});
      } else {
        (void)dies->write_copy(at(last_place()), 28, {closed, sizes_[28]});
      }
      ::_exit(0);
    }
    const auto cache = enter(0, 2);
    ASSERT_TRUE(keep(*cache, last_place(), 29));
    ASSERT_EQ(::write(go[1], "", 1), 1);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    EXPECT_EQ(has(*cache, last_place(), 29), reads);
    EXPECT_TRUE(keep(*cache, last_place(), 27));
    EXPECT_TRUE(has(*cache, last_place(), 27));
  }
  ::close(go[0]);
  ::close(go[1]);
}

TEST_F(CopiesTest, ManyRanksPutAndTakeAtOnce) {
  constexpr uint32_t kRanks = 3, kThreads = 2, kTurns = 4000;
  std::vector<std::unique_ptr<NodeCache>> ranks;
  for (uint32_t r = 0; r < kRanks; ++r) ranks.push_back(enter(r, kRanks));
  const uint32_t places = placement(600).copies.count();
  std::atomic<uint64_t> found = 0;
  std::vector<std::jthread> threads;
  for (uint32_t t = 0; t < kRanks * kThreads; ++t) {
    threads.emplace_back([&, t, cache = ranks[t % kRanks].get()] {
      for (uint64_t i = t; i < kTurns; ++i) {
        const uint64_t sample = kSamples + i / (4 * places) % 2;  // which fit into any place
        const auto place = static_cast<uint32_t>(i % places);
        if (has(*cache, place, sample)) {
          ++found;
        } else {
          keep(*cache, place, sample);
        }
      }
    });
  }
  threads.clear();
  EXPECT_GT(found, 0u);
  uint64_t bytes = 0;
  for (uint32_t p = 0; p < places; ++p) {
    for (uint64_t s = kSamples; s < kAll; ++s) bytes += has(*ranks[0], p, s) ? sizes_[s] : 0;
  }
  EXPECT_EQ(ranks[0]->ram_bytes(), bytes);
}

TEST_F(NodeCacheTest, FillingStopsWhereAnyLimitKeepsItsReserve) {
  const fs::path proc = root_ / "proc";
  fs::create_directories(proc / "self");
  const auto available = [&](int kilobytes) {
    std::ofstream(proc / "meminfo") << "MemTotal: 80 kB\nMemAvailable: " << kilobytes << " kB\n";
  };
  NodeCacheConfig c = config(0, 2), other = config(1, 2);
  c.proc_directory = other.proc_directory = proc.string();
  available(10);  // the reserve
  const auto a = attach(c), b = attach(other);
  ASSERT_TRUE(a->claim(0));
  EXPECT_TRUE(a->ram_slot(0).empty());
  EXPECT_EQ(a->state(0), State::failed);
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("MemAvailable"), std::string::npos) << warnings_[0];
  // All ranks take the answer of the first: nothing is tried again sample by sample.
  available(80);
  ASSERT_TRUE(b->claim(1));
  EXPECT_TRUE(b->ram_slot(1).empty());
  EXPECT_EQ(warnings_.size(), 1u);
  // At the next epoch it is looked at again, and given back only if the memory is there.
  available(10);
  b->try_again();
  EXPECT_EQ(a->state(0), State::failed);
  available(80);
  b->try_again();
  put(*a, 0);
  put(*b, 1);
  EXPECT_EQ(a->state(1), State::ready);
  // What failed for another reason stays so.
  a->reject(0);
  b->try_again();
  EXPECT_EQ(b->state(0), State::failed);
}

TEST_F(NodeCacheTest, AModestTierTakesNoMoreThanItLeaves) {
  constexpr uint64_t kMiB = uint64_t{1} << 20;
  NodeCacheConfig c = config(0, 1);
  c.tiers[0].capacity = 4 * kMiB;
  c.tiers[0].modest = true;
  c.proc_directory = (root_ / "proc").string();
  const std::vector<uint64_t> sizes(4, kMiB);
  const plan::Placement placement{
      {0, 0, 0, 0}, {0, kMiB, 2 * kMiB, 3 * kMiB}, {4 * kMiB}, {{0, 1, 2, 3}}};
  const auto cache = NodeCache::attach(c, sizes, fixed(placement));
  fs::create_directories(root_ / "proc" / "self");
  const auto gets_memory = [&](uint64_t sample, int used) {
    std::ofstream(root_ / "proc" / "meminfo")
        << "MemTotal: " << 16 * 1024 << " kB\nMemAvailable: " << (16 - used) * 1024 << " kB\n";
    return cache->claim(sample) && !cache->ram_slot(sample).empty();
  };
  // Of 16 MiB two are the reserve.
  EXPECT_TRUE(gets_memory(0, 13));
  EXPECT_FALSE(gets_memory(1, 13));
  EXPECT_TRUE(gets_memory(2, 12));
}

TEST_F(NodeCacheTest, AProcessMoreThanThereArePlacesForIsToldTheRemedy) {
  NodeCacheConfig c = config(0, 2);
  c.any_member = true;
  const auto one = attach(c), other = attach(c);
  try {
    attach(c);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    EXPECT_NE(std::string(e.what()).find("read with fewer processes"), std::string::npos)
        << e.what();
  }
}

// Two ranks, four samples of the size of a chunk, and a machine of 16 MiB of which two are the
// reserve.
class GivingBack : public NodeCacheTest {
 protected:
  static constexpr uint64_t kMiB = uint64_t{1} << 20;

  void SetUp() override {
    NodeCacheTest::SetUp();
    fs::create_directories(root_ / "proc" / "self");
    used(4);
  }
  void used(int mebibytes) const {
    const fs::path next = root_ / "proc" / "next";
    std::ofstream(next) << "MemTotal: " << 16 * 1024
                        << " kB\nMemAvailable: " << (16 - mebibytes) * 1024 << " kB\n";
    fs::rename(next, root_ / "proc" / "meminfo");
  }
  std::unique_ptr<NodeCache> enter(uint32_t rank, FileSystem* files = nullptr) const {
    NodeCacheConfig c = config(rank, 2);
    c.tiers[0].capacity = 4 * kMiB;
    c.proc_directory = (root_ / "proc").string();
    c.files = files;
    const plan::Placement placement{
        {0, 0, 0, 0}, {0, kMiB, 2 * kMiB, 3 * kMiB}, {4 * kMiB}, {{0, 1, 2, 3}}};
    return NodeCache::attach(c, std::vector<uint64_t>(4, kMiB), fixed(placement));
  }
  static bool fill(NodeCache& cache, uint64_t s) {
    const auto slot = cache.claim(s) ? cache.ram_slot(s) : std::span<std::byte>();
    if (slot.empty()) return false;
    std::memset(slot.data(), static_cast<int>(s) + 1, slot.size());
    cache.publish(s);
    return true;
  }
  template <typename Condition>
  static bool comes(const Condition& condition) {
    const auto deadline = std::chrono::steady_clock::now() + 60s;
    bool holds = condition();
    while (!holds && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(1ms);
      holds = condition();
    }
    return holds;
  }
  // The disk has a chunk back just before the cache knows it.
  static bool fills_again(NodeCache& cache, uint64_t s) {
    return comes([&] {
      cache.try_again();
      return fill(cache, s);
    });
  }
  static bool becomes(const NodeCache& cache, uint64_t s, State state) {
    return comes([&] { return cache.state(s) == state; });
  }
  // Of the file behind this process's mapping of the arena.
  uint64_t on_disk() const {
    struct stat status {};
    std::error_code ignored;
    for (const auto& e : fs::directory_iterator("/proc/self/fd")) {
      struct stat found {};
      const std::string target = fs::read_symlink(e.path(), ignored).string();
      if (target.starts_with((root_ / "shm").string()) && ::stat(e.path().c_str(), &found) == 0) {
        status = found;
      }
    }
    return static_cast<uint64_t>(status.st_blocks) * 512;
  }
  std::vector<std::string> told() {
    const std::scoped_lock lock(mutex_);
    return warnings_;
  }
  // Others need no more once something was given back: what is there by then stays, however long a
  // test takes to look.
  class Enough : public FileSystem {
   public:
    explicit Enough(const GivingBack& test) : test_(test) {}
    int give_back(int fd, uint64_t offset, uint64_t size) override {
      const int error = FileSystem::give_back(fd, offset, size);
      if (!std::exchange(given_, true)) test_.used(4);
      return error;
    }

   private:
    const GivingBack& test_;
    bool given_ = false;
  };
};

TEST_F(GivingBack, WhatOthersNeedOfAReserve) {
  const auto cache = enter(0);
  const std::shared_ptr<NodeCache> other = enter(1);
  for (const uint64_t s : {0, 1, 3}) ASSERT_TRUE(fill(*cache, s));
  ASSERT_TRUE(cache->claim(2));
  const auto filling = cache->ram_slot(2);
  auto read = shared_view(other, 3);
  ASSERT_TRUE(read);
  // Others want two MiB more. What is read stays until it was read, what is being filled until it
  // is filled.
  used(16);
  ASSERT_TRUE(becomes(*other, 3, State::failed));
  EXPECT_FALSE(other->ram_view(3));
  EXPECT_EQ(read->bytes()[5], std::byte{4});
  used(14);
  std::memset(filling.data(), 3, filling.size());
  EXPECT_EQ(other->state(2), State::filling);
  cache->publish(2);
  ASSERT_TRUE(becomes(*other, 2, State::failed));
  EXPECT_EQ(other->ram_view(1).bytes()[5], std::byte{2});
  EXPECT_GE(on_disk(), 3 * kMiB);
  read.reset();
  EXPECT_TRUE(comes([&] { return on_disk() <= 2 * kMiB; }));
  EXPECT_EQ(cache->ram_bytes(), 2 * kMiB);
  // In the next epoch there is room again.
  used(4);
  ASSERT_TRUE(fills_again(*cache, 3));
  EXPECT_EQ(other->ram_view(3).bytes()[5], std::byte{4});
  const auto warnings = told();
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("the RAM tier gives memory back"), std::string::npos) << warnings[0];
}

// Where signals are the reason, freeing memory is no remedy.
TEST_F(GivingBack, SaysWhyAChunkIsNotThere) {
  class NoRoom : public FileSystem {
   public:
    int allocate(int fd, uint64_t offset, uint64_t size) override {
      return full == 0 ? FileSystem::allocate(fd, offset, size) : -full;
    }
    int full = 0;
  };
  for (const int error : {ENOSPC, EINTR}) {
    NoRoom files;
    const auto cache = enter(0, &files);
    ASSERT_TRUE(fill(*cache, 0));
    files.full = error;
    ASSERT_TRUE(cache->claim(1));
    EXPECT_TRUE(cache->ram_slot(1).empty());
    EXPECT_EQ(cache->state(0), State::ready);
  }
  const auto warnings = told();
  ASSERT_EQ(warnings.size(), 2u);
  EXPECT_NE(warnings[0].find("No space left on device; the rest is read from the source: free"),
            std::string::npos)
      << warnings[0];
  EXPECT_TRUE(warnings[1].ends_with("for example; the rest is read from the source"))
      << warnings[1];
}

// Signals have a chunk taken in pieces, and there is room for the first of them only.
TEST_F(GivingBack, WhatIsThereOfAChunkThatWasNotToBeHad) {
  class HalfTheRoom : public FileSystem {
   public:
    int allocate(int fd, uint64_t offset, uint64_t size) override {
      if (!full) return FileSystem::allocate(fd, offset, size);
      EXPECT_EQ(FileSystem::allocate(fd, offset, size / 2), 0);
      return -ENOSPC;
    }
    bool full = false;
  };
  HalfTheRoom files;
  const auto cache = enter(0, &files);
  ASSERT_TRUE(fill(*cache, 0));
  files.full = true;
  ASSERT_TRUE(cache->claim(1));
  EXPECT_TRUE(cache->ram_slot(1).empty());
  EXPECT_TRUE(comes([&] { return on_disk() == kMiB; }));
  EXPECT_EQ(cache->state(0), State::ready);
  EXPECT_EQ(told().size(), 1u);  // of the chunk that is not there, and no word of others' need
  // In the next epoch it is asked for again.
  files.full = false;
  EXPECT_TRUE(fills_again(*cache, 1));
}

// A limit forbids a chunk to one rank while the system gives it to another.
TEST_F(GivingBack, AChunkThatARankHadAndAnotherWasRefused) {
  constexpr uint64_t kHalf = kMiB / 2;
  Meanwhile files;
  const auto enter_halves = [&](uint32_t rank) {
    NodeCacheConfig c = config(rank, 2);
    c.tiers[0].capacity = kMiB;
    c.proc_directory = (root_ / "proc").string();
    c.files = rank == 0 ? &files : nullptr;
    return NodeCache::attach(c, std::vector<uint64_t>(2, kHalf),
                             fixed({{0, 0}, {0, kHalf}, {kMiB}, {{0, 1}}}));
  };
  const auto one = enter_halves(0), other = enter_halves(1);
  uint64_t had = 0;
  files.then = [&] {
    used(14);
    ASSERT_TRUE(other->claim(1));
    EXPECT_TRUE(other->ram_slot(1).empty());
    had = on_disk();
  };
  ASSERT_TRUE(one->claim(0));
  EXPECT_TRUE(one->ram_slot(0).empty());
  EXPECT_EQ(had, kMiB);
  EXPECT_TRUE(comes([&] { return on_disk() == 0; }));
}

// What is marked already counts: more need costs one chunk more.
TEST_F(GivingBack, TakesNoMoreForWhatIsStillRead) {
  Enough files(*this);
  const std::shared_ptr<NodeCache> cache = enter(0, &files);
  for (const uint64_t s : {0, 1, 2, 3}) ASSERT_TRUE(fill(*cache, s));
  const auto read = shared_view(cache, 3);
  used(15);
  ASSERT_TRUE(becomes(*cache, 3, State::failed));
  used(16);
  ASSERT_TRUE(becomes(*cache, 2, State::failed));
  for (const uint64_t s : {0, 1}) EXPECT_EQ(cache->state(s), State::ready);
}

// It may be stopped for any time before it looks again.
TEST_F(GivingBack, IsNotKeptFromTheOtherRanksByTheOneThatDidItLast) {
  const auto cache = enter(0);
  const NodeCacheConfig c = config(1, 2);
  const Handover next("tiers " + c.shm_directory + " " + c.job, 1, 2);
  const auto files = next.ask(std::chrono::steady_clock::now() + 60s);
  LockFile catalogue(files.at(0));
  ASSERT_TRUE(fill(*cache, 2));
  used(16);
  ASSERT_TRUE(comes([&] { return on_disk() == 0; }));
  ASSERT_TRUE(
      comes([&] { return catalogue.try_lock(kEasing, LockMode::exclusive) == Locked::yes; }));
  catalogue.unlock(kEasing);
  // Nor is it told twice.
  used(4);
  const auto other = enter(1);
  ASSERT_TRUE(fills_again(*cache, 2));
  used(16);
  ASSERT_TRUE(comes([&] { return on_disk() == 0; }));
  EXPECT_EQ(told().size(), 1u);
}

TEST_F(GivingBack, AllThatThereIsWhereMoreIsNeeded) {
  const auto cache = enter(0);
  ASSERT_TRUE(fill(*cache, 2));
  used(16);
  EXPECT_TRUE(becomes(*cache, 2, State::failed));
  EXPECT_TRUE(comes([&] { return on_disk() == 0; }));
}

TEST_F(GivingBack, LooksAtWhatLiesInTheChunkAlone) {
  Enough files(*this);
  NodeCacheConfig c = config(0, 1);
  c.files = &files;
  c.tiers[0].capacity = 4 * kMiB;
  c.tiers.push_back({TierKind::file, 4096, (root_ / "disk").string(), false});
  c.proc_directory = (root_ / "proc").string();
  const plan::Placement placement{
      {0, 0, 0, 1, plan::kNoTier}, {0, kMiB, 2 * kMiB, 0, 0}, {2 * kMiB, 124}, {{0, 1, 2}, {3}}};
  const auto cache =
      NodeCache::attach(c, std::vector<uint64_t>{kMiB, kMiB, 0, 100, 100}, fixed(placement));
  for (const uint64_t s : {0, 1}) ASSERT_TRUE(fill(*cache, s));
  put(*cache, 3);
  used(15);
  ASSERT_TRUE(becomes(*cache, 1, State::failed));
  EXPECT_EQ(cache->state(0), State::ready);
  EXPECT_EQ(cache->state(3), State::ready);
  EXPECT_EQ(cache->state(4), State::empty);
}

TEST_F(GivingBack, CopiesThatComeAndGoToo) {
  Enough files(*this);
  NodeCacheConfig c = config(0, 1);
  c.files = &files;
  c.tiers[0].capacity = 4 * kMiB;
  c.proc_directory = (root_ / "proc").string();
  const std::vector<uint64_t> sizes(8, kMiB);
  plan::Placement placement;
  placement.tier.assign(8, plan::kNoTier);
  placement.offset.assign(8, 0);
  placement.used = {0};
  placement.copies = plan::CopyPlaces(
      sizes, [](uint64_t) { return true; }, 4 * kMiB);
  const auto cache = NodeCache::attach(c, sizes, fixed(placement));
  const auto at = [](uint32_t place) { return plan::CopyUse{place, false, true, 0}; };
  const std::vector<std::byte> bytes(kMiB, std::byte{1});
  std::vector<std::byte> into(kMiB);
  for (uint32_t p = 0; p < 4; ++p) EXPECT_TRUE(cache->write_copy(at(p), p, bytes));
  used(16);
  EXPECT_TRUE(comes([&] { return on_disk() <= 2 * kMiB; }));
  EXPECT_TRUE(cache->read_copy(at(0), 0, into));
  EXPECT_FALSE(cache->read_copy(at(3), 3, into));
  EXPECT_FALSE(cache->write_copy(at(3), 5, bytes));
  EXPECT_TRUE(comes([&] {
    cache->try_again();
    return cache->write_copy(at(3), 5, bytes);
  }));
  EXPECT_TRUE(cache->read_copy(at(3), 5, into));
}

// A rank dies that has views of three chunks and fills the other; its number stays free, or another
// process takes it.
class GivingBackAfterADeath : public GivingBack, public testing::WithParamInterface<bool> {};

TEST_P(GivingBackAfterADeath, FreesWhatTheDeadRankReadAndFilled) {
  int go[2];
  ASSERT_EQ(::pipe(go), 0);
  const pid_t child = ::fork();  // before there are threads
  if (child == 0) {
    char word = 0;
    if (::read(go[0], &word, 1) != 1) ::_exit(1);
    const auto dies = enter(1);
    const RamView views[] = {dies->ram_view(0), dies->ram_view(1), dies->ram_view(3)};
    const bool has_all =
        std::all_of(std::begin(views), std::end(views), [](auto& v) -> bool { return bool(v); });
    ::_exit(has_all && dies->claim(2) && !dies->ram_slot(2).empty() ? 0 : 1);
  }
  const Descriptor read_end(go[0]), write_end(go[1]);
  const auto cache = enter(0);
  for (const uint64_t s : {0, 1, 3}) ASSERT_TRUE(fill(*cache, s));
  ASSERT_EQ(::write(go[1], "", 1), 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  const auto next = GetParam() ? enter(1) : nullptr;
  EXPECT_EQ(on_disk(), 4 * kMiB);
  used(16);
  EXPECT_TRUE(comes([&] { return on_disk() == 0; }));
  EXPECT_EQ(cache->ram_bytes(), 0u);
  used(4);
  for (const uint64_t s : {0, 1, 2, 3}) EXPECT_TRUE(fills_again(*cache, s));
}

INSTANTIATE_TEST_SUITE_P(ItsNumber, GivingBackAfterADeath, testing::Bool());

TEST_F(GivingBack, IsToldWhereTheSystemTakesNone) {
  // Memory is then taken by writing to it.
  with_refused({SYS_fallocate}, EOPNOTSUPP, [&] {
    const auto cache = enter(0);
    for (const uint64_t s : {0, 1, 2, 3}) ASSERT_TRUE(fill(*cache, s));
    used(15);
    ASSERT_TRUE(comes([&] { return told().size() == 2; }));
    EXPECT_NE(told()[1].find("the RAM tier cannot give memory back"), std::string::npos)
        << told()[1];
    EXPECT_EQ(on_disk(), 4 * kMiB);
    EXPECT_EQ(cache->state(3), State::failed);
    EXPECT_EQ(cache->state(2), State::ready);
  });
  EXPECT_EQ(told().size(), 2u);
}

TEST_F(NodeCacheTest, NothingHasAName) {
  for (const TierKind kind : {TierKind::ram, TierKind::file}) {
    const auto a = attach(config(0, 2, kind)), b = attach(config(1, 2, kind));
    put(*b, 0);
    EXPECT_EQ(a->state(0), State::ready);
    EXPECT_EQ(files(), 0u);
  }
}

TEST_F(NodeCacheTest, ARankThatComesBackFindsWhatTheOthersKeep) {
  auto a = attach(config(0, 3, TierKind::file));
  put(*a, 0);
  const auto b = attach(config(1, 3, TierKind::file));
  put(*b, 1);
  // Also when the rank that made it has left.
  a.reset();
  const auto c = attach(config(2, 3, TierKind::file));
  a = attach(config(0, 3, TierKind::file));
  for (NodeCache* cache : {a.get(), b.get(), c.get()}) {
    std::vector<std::byte> into(kSize);
    for (const uint64_t s : {0, 1}) {
      ASSERT_EQ(cache->state(s), State::ready);
      EXPECT_TRUE(cache->file_read(s, into));
      EXPECT_EQ(into, bytes_of(s));
    }
  }
}

TEST_F(NodeCacheTest, RanksKeepOneCopyOfWhatTheyHaveAlike) {
  constexpr uint32_t kRanks = 4;
  std::vector<std::unique_ptr<Shareable>> listings;
  std::vector<std::unique_ptr<NodeCache>> ranks;
  for (uint32_t r = 0; r < kRanks; ++r) {
    listings.push_back(std::make_unique<Shareable>(1000));
    listings[r]->data()[5] = static_cast<std::byte>(r == 3 ? 2 : 1);
    auto c = config(r, kRanks);
    c.listing = listings[r].get();
    ranks.push_back(attach(c));
    if (r == 1) ranks[0].reset();  // the others have it from the ranks that are left
  }
  for (uint32_t r = 0; r < kRanks; ++r) EXPECT_EQ(listings[r]->is_shared(), r != 3) << r;
}

TEST_F(NodeCacheTest, AListingIsNotSharedWhereASecondCopyWouldUseAReserve) {
  const fs::path proc = root_ / "proc";
  fs::create_directories(proc / "self");
  std::ofstream(proc / "meminfo") << "MemTotal: 80 kB\nMemAvailable: 10 kB\n";
  Shareable first(1000), second(1000);
  NodeCacheConfig a = config(0, 2), b = config(1, 2);
  a.proc_directory = b.proc_directory = proc.string();
  a.listing = &first;
  b.listing = &second;
  const auto one = attach(a), other = attach(b);
  EXPECT_FALSE(first.is_shared());
  EXPECT_FALSE(second.is_shared());
}

TEST_F(NodeCacheTest, ATierThatCanNeverTakeMoreIsGivenUpAtTheFirstFailure) {
  for (const int error : {ENOSPC, EDQUOT, EROFS}) {
    FailingFiles files;
    files.errors["pwrite"] = error;
    auto c = config(0, 1, TierKind::file);
    c.files = &files;
    const auto cache = attach(c);
    put(*cache, 0);
    EXPECT_EQ(cache->state(0), State::failed);
    EXPECT_FALSE(cache->claim(1)) << error;
    EXPECT_NE(warnings_.back().find("the tier takes no more samples"), std::string::npos);
    EXPECT_NE(warnings_.back().find(std::strerror(error)), std::string::npos);
  }
}

TEST_F(NodeCacheTest, EveryRankPlansWithWhatTheFirstOneFoundKept) {
  const auto kept = [&](const std::string& job, uint32_t rank) {
    auto c = config(rank, 2, TierKind::file);
    c.job = job;
    c.tiers[0].keep = true;
    return c;
  };
  {
    const auto before = attach(kept("before", 0));
    put(*before, 2);
    put(*before, 7);
  }
  std::vector<std::unique_ptr<NodeCache>> ranks;
  for (const uint32_t rank : {0, 1}) {
    std::vector<uint64_t> samples;
    const Placer note = [&](std::span<const std::vector<plan::Resident>> found) {
      for (const plan::Resident& r : found[0]) samples.push_back(r.sample);
      return in_the_first_tier(TierKind::file);
    };
    ranks.push_back(
        NodeCache::attach(kept("after", rank), std::vector<uint64_t>(kSamples, kSize), note));
    EXPECT_EQ(samples, (std::vector<uint64_t>{2, 7})) << rank;
    EXPECT_EQ(ranks[rank]->state(7), State::ready);
  }
}

TEST_F(NodeCacheTest, AClaimIsExclusive) {
  std::vector<std::unique_ptr<NodeCache>> ranks;
  for (uint32_t r = 0; r < 4; ++r) ranks.push_back(attach(config(r, 4)));
  std::array<std::atomic<int>, kSamples> claims{};
  {
    std::vector<std::jthread> threads;
    for (auto& rank : ranks) {
      threads.emplace_back([&] {
        for (uint64_t s = 0; s < kSamples; ++s) claims[s] += rank->claim(s) ? 1 : 0;
      });
    }
  }
  for (const auto& c : claims) EXPECT_EQ(c, 1);
}

TEST_F(NodeCacheTest, WaitersWakeOnPublishAndOnAbandon) {
  const auto a = attach(config(0, 2)), b = attach(config(1, 2));
  for (const bool publish : {true, false}) {
    const uint64_t sample = publish ? 1 : 2;
    ASSERT_TRUE(a->claim(sample));
    std::jthread later([&] {
      std::this_thread::sleep_for(30ms);
      if (publish) {
        a->publish(sample);
      } else {
        a->abandon(sample);
      }
    });
    EXPECT_EQ(b->wait(sample, 60s, {}), publish ? State::ready : State::empty);
  }
}

TEST_F(NodeCacheTest, AWaitEndsWithItsDeadlineOrItsStop) {
  const auto a = attach(config(0, 2)), b = attach(config(1, 2));
  ASSERT_TRUE(a->claim(0));
  EXPECT_EQ(b->wait(0, 30ms, {}), State::filling);
  std::stop_source stop;
  stop.request_stop();
  EXPECT_EQ(b->wait(0, 10s, stop.get_token()), State::filling);
}

TEST_F(NodeCacheTest, AClaimOfARankThatLeftIsGivenBack) {
  const auto a = attach(config(0, 2));
  {
    const auto b = attach(config(1, 2));
    ASSERT_TRUE(b->claim(5));
  }
  EXPECT_EQ(a->state(5), State::empty);
  EXPECT_FALSE(a->dead_peer());
}

TEST_F(NodeCacheTest, RanksThatDisagreeAreRefused) {
  const auto a = attach(config(0, 2));
  for (const int what : {0, 1, 2}) {
    auto other = config(1, 2);
    (what == 0 ? other.dataset : other.plan) += what == 2 ? 0 : 1;
    if (what == 2) other.local_world = 3;
    try {
      attach(other);
      FAIL() << "not refused: " << what;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::peer);
      EXPECT_NE(std::string(e.what()).find("local rank 1"), std::string::npos) << e.what();
    }
  }
  EXPECT_TRUE(a->claim(0));
}

TEST_F(NodeCacheTest, WhatRanksDisagreeOnIsNamedWithBothValues) {
  auto first = config(0, 2);
  first.arguments = "batch_size=16\nseed=0\nfirst sample=/data/train/a.jpg\n";
  const auto a = attach(first);
  auto other = config(1, 2);
  other.plan += 1;
  other.arguments = "batch_size=8\nseed=0\nfirst sample=/data/val/a.jpg\n";
  try {
    attach(other);
    FAIL() << "not refused";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("batch_size (8 here, 16 there), first sample "
                                         "(/data/val/a.jpg here, /data/train/a.jpg there)"),
              std::string::npos)
        << e.what();
    EXPECT_EQ(std::string(e.what()).find("seed"), std::string::npos) << e.what();
  }
}

// Two ranks whose tier is kept; one goes on from a state while the other still uses what was there before.
TEST_F(NodeCacheTest, ARankThatHasLoadedAStateWaitsForThoseThatHaveNot) {
  const auto kept = [this](uint32_t rank, uint64_t loads) {
    auto c = config(rank, 2, TierKind::file);
    c.tiers[0].keep = true;
    c.plan += loads;
    c.loads = loads;
    return c;
  };
  auto a0 = attach(kept(0, 0)), a1 = attach(kept(1, 0));
  put(*a0, 0);
  a0.reset();
  std::promise<void> waits;
  std::unique_ptr<NodeCache> b0;
  std::thread early([&] {
    NodeCacheConfig c = kept(0, 1);
    c.waiting = [&waits, told = std::make_shared<std::once_flag>()] {
      std::call_once(*told, [&] { waits.set_value(); });
    };
    b0 = attach(c);
  });
  waits.get_future().wait();
  put(*a1, 1);
  a1.reset();
  const auto b1 = attach(kept(1, 1));
  early.join();
  put(*b0, 2);
  EXPECT_EQ(b1->state(0), State::ready);
  EXPECT_EQ(b1->state(1), State::ready);
  EXPECT_EQ(b1->state(2), State::ready);
  b0.reset();
  EXPECT_EQ(kept_records(kept(0, 1).tiers[0], 11, kSamples).records.size(), 3u);
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(NodeCacheTest, ARankWaitsOnlyForThoseThatMayBeLate) {
  auto first = config(0, 2);
  first.loads = 1;
  first.arguments = "states loaded=1\nfirst batch=3\n";
  const auto a = attach(first);
  const auto refused = [this](uint64_t loads, std::chrono::nanoseconds late) {
    auto other = config(1, 2);
    other.loads = loads;
    other.late = late;
    other.plan += 1;
    other.arguments = "states loaded=" + std::to_string(loads) + "\nfirst batch=5\n";
    try {
      attach(other);
    } catch (const Error& e) {
      return e.kind() == ErrorKind::peer ? std::string(e.what()) : "another kind";
    }
    return std::string();
  };
  const std::string batch = "first batch (5 here, 3 there);";
  EXPECT_NE(refused(0, 24h).find("states loaded (0 here, 1 there), " + batch), std::string::npos);
  EXPECT_NE(refused(1, 24h).find("on the " + batch), std::string::npos);
  EXPECT_NE(refused(2, 50ms).find("states loaded (2 here, 1 there), " + batch), std::string::npos);
  auto same = config(1, 2);
  same.loads = 2;
  put(*a, 0);
  EXPECT_EQ(attach(same)->state(0), State::ready);
}

TEST_F(NodeCacheTest, ArgumentsThatDoNotFitAreNotCalledDifferent) {
  const std::string rest = "seed=0\ntransform=" + std::string(3000, 't') + "\n";
  auto first = config(0, 2), other = config(1, 2);
  first.arguments = "batch_size=16\n" + rest;
  other.arguments = "batch_size=8\n" + rest;
  other.plan += 1;
  const auto a = attach(first);
  try {
    attach(other);
    FAIL() << "not refused";
  } catch (const Error& e) {
    const std::string told = e.what();
    EXPECT_NE(told.find("batch_size (8 here, 16 there)"), std::string::npos) << told;
    EXPECT_EQ(told.find("transform"), std::string::npos) << told;
  }
}

TEST_F(NodeCacheTest, ARankThatRunsAlreadyIsRefused) {
  const auto a = attach(config(0, 2));
  put(*a, 1);
  try {
    attach(config(0, 2));
    FAIL() << "not refused";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    EXPECT_NE(std::string(e.what()).find(std::to_string(::getpid())), std::string::npos);
  }
  EXPECT_EQ(a->state(1), State::ready);
}

// Writes other bytes than it is given, for one sample.
class FlippingDisk : public FileSystem {
 public:
  int64_t pwrite(int fd, std::span<const std::byte> from, uint64_t offset) override {
    std::vector<std::byte> bytes(from.begin(), from.end());
    if (offset == 5 * (100 + 24) + 24) bytes[50] ^= std::byte{1};
    return FileSystem::pwrite(fd, bytes, offset);
  }
};

TEST_F(NodeCacheTest, AFileTierChecksWhatItReads) {
  FlippingDisk flipping;
  auto c = config(0, 1, TierKind::file);
  c.files = &flipping;
  const auto cache = attach(c);
  put(*cache, 4);
  put(*cache, 5);
  std::vector<std::byte> into(kSize);
  EXPECT_TRUE(cache->file_read(4, into));
  EXPECT_EQ(into, bytes_of(4));
  EXPECT_FALSE(cache->file_read(5, into));
  EXPECT_EQ(cache->state(5), State::failed);
  EXPECT_TRUE(cache->file_read(4, into));
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("sample 5"), std::string::npos) << warnings_[0];
}

TEST_F(NodeCacheTest, SamplesOfAFileTierAreReadTogether) {
  FlippingDisk flipping;
  auto c = config(0, 1, TierKind::file);
  c.files = &flipping;
  const auto cache = attach(c);
  for (uint64_t s = 0; s < kSamples; ++s) put(*cache, s);
  std::atomic<bool> refused{false};
  RecordReader reader(4, refused);
  std::vector<std::vector<std::byte>> into(kSamples, std::vector<std::byte>(kSize));
  std::vector<TierRead> reads;
  for (uint64_t s = 0; s < kSamples; ++s) reads.push_back({s, into[s]});
  cache->file_read(reads, reader);
  for (uint64_t s = 0; s < kSamples; ++s) {
    EXPECT_EQ(reads[s].good, s != 5);
    EXPECT_EQ(cache->state(s), s == 5 ? State::failed : State::ready);
    EXPECT_EQ(into[s] == bytes_of(s), s != 5);
  }
  EXPECT_EQ(warnings_.size(), 1u);
}

// Counts the reads that are under way at the same time.
class CrowdedDisk : public FileSystem {
 public:
  int64_t pread(int fd, std::span<std::byte> into, uint64_t offset) override {
    const int now = ++under_way;
    int seen = most;
    while (now > seen && !most.compare_exchange_weak(seen, now)) {
    }
    std::this_thread::sleep_for(1ms);
    const int64_t n = FileSystem::pread(fd, into, offset);
    --under_way;
    return n;
  }
  std::atomic<int> under_way{0}, most{0};
};

TEST_F(NodeCacheTest, ATierHasNoMoreReadersThanItIsGiven) {
  CrowdedDisk disk;
  auto c = config(0, 1, TierKind::file);
  c.files = &disk;
  c.tiers[0].readers = 2;
  const auto cache = attach(c);
  for (uint64_t s = 0; s < kSamples; ++s) put(*cache, s);
  std::vector<std::thread> threads;
  for (uint64_t s = 0; s < kSamples; ++s) {
    threads.emplace_back([&, s] {
      std::vector<std::byte> into(kSize);
      EXPECT_TRUE(cache->file_read(s, into));
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_LE(disk.most, 2);
}

// No room, wherever it is asked for.
class FullDisk : public FileSystem {
 public:
  int allocate(int, uint64_t, uint64_t) override { return -ENOSPC; }
  int64_t pwrite(int, std::span<const std::byte>, uint64_t) override { return -ENOSPC; }
};

TEST_F(NodeCacheTest, AFullDiskIsOneWarningAndNoError) {
  FullDisk full;
  auto c = config(0, 1, TierKind::file);
  c.files = &full;
  const auto cache = attach(c);
  for (const uint64_t s : {0, 1}) {
    if (cache->claim(s)) cache->file_write(s, bytes_of(s));
  }
  EXPECT_EQ(cache->state(0), State::failed);
  EXPECT_EQ(cache->state(1), State::failed);
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("No space left"), std::string::npos);
}

TEST_F(NodeCacheTest, NothingIsMadeRightBelowTheRoot) {
  for (const std::string below : {"", "/job", "/../../nostall-unmounted/job"}) {
    for (const bool keep : {false, true}) {
      warnings_.clear();
      auto c = config(0, 1, TierKind::file);
      c.tiers[0].path = "/nostall-unmounted" + below;
      c.tiers[0].keep = keep;
      const auto cache = attach(c);
      EXPECT_FALSE(fs::exists("/nostall-unmounted"));
      ASSERT_EQ(warnings_.size(), 1u);
      EXPECT_NE(warnings_[0].find("/nostall-unmounted is not there"), std::string::npos)
          << warnings_[0];
      EXPECT_FALSE(cache->claim(0));
    }
  }
}

// What a tier warns of whose directory cannot be made.
class TierDirectoryTest : public NodeCacheTest {
 protected:
  std::string told_of(const std::string& directory) {
    std::string told;
    for (const bool keep : {false, true}) {
      warnings_.clear();
      auto c = config(0, 1, TierKind::file);
      c.tiers[0].path = directory;
      c.tiers[0].keep = keep;
      const auto cache = attach(c);
      EXPECT_FALSE(cache->claim(0));
      EXPECT_EQ(warnings_.size(), 1u);
      told = warnings_.empty() ? "" : warnings_[0];
      EXPECT_NE(told.find("cannot make the directory " + directory + ": "), std::string::npos)
          << told;
      EXPECT_NE(told.find("samples are read from the source: make the directory, or give the tier "
                          "another one"),
                std::string::npos)
          << told;
    }
    return told;
  }
};

TEST_F(TierDirectoryTest, CannotBeMadeInAFile) {
  const std::string file = folder_.path("file");
  std::ofstream(file) << "a file";
  const std::string told = told_of(file + "/a/b");
  EXPECT_NE(told.find("Not a directory (" + file + " is no directory)"), std::string::npos) << told;
}

TEST_F(TierDirectoryTest, CannotBeMadeWithoutPermission) {
  const std::string closed = folder_.path("closed");
  ASSERT_EQ(::mkdir(closed.c_str(), 0500), 0);
  std::string told;
  std::thread([&] {
    // Of this thread alone: root may write anywhere.
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct none[2] = {};
    ASSERT_EQ(::syscall(SYS_capset, &header, none), 0);
    told = told_of(closed + "/a/b");
  }).join();
  EXPECT_NE(told.find("Permission denied (in " + closed + ")"), std::string::npos) << told;
}

TEST_F(TierDirectoryTest, CannotBeWritten) {
  const std::string closed = folder_.path("closed");
  ASSERT_EQ(::mkdir(closed.c_str(), 0500), 0);
  for (const bool keep : {false, true}) {
    warnings_.clear();
    std::thread([&] {
      // Of this thread alone: root may write anywhere.
      __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
      __user_cap_data_struct none[2] = {};
      ASSERT_EQ(::syscall(SYS_capset, &header, none), 0);
      auto c = config(0, 1, TierKind::file);
      c.tiers[0].path = closed;
      c.tiers[0].keep = keep;
      const auto cache = attach(c);
      EXPECT_FALSE(cache->claim(0));
    }).join();
    ASSERT_EQ(warnings_.size(), 1u);
    EXPECT_EQ(warnings_[0],
              "cannot create a file in " + closed +
                  ": Permission denied; this file tier is not used, samples are read from the "
                  "source: let this user write there, or give the tier another directory");
  }
}

TEST_F(TierDirectoryTest, CannotBeMadeOnAReadOnlyFileSystem) {
  const std::string mounted = folder_.path("mounted");
  ASSERT_EQ(::mkdir(mounted.c_str(), 0700), 0);
  std::string told;
  std::thread([&] {
    // Of this thread alone, and with it the mount.
    if (::unshare(CLONE_NEWNS) != 0) return;
    if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return;
    if (::mount("none", mounted.c_str(), "tmpfs", MS_RDONLY, nullptr) != 0) return;
    told = told_of(mounted + "/a/b");
  }).join();
  if (told.empty()) GTEST_SKIP() << "this user cannot mount a file system";
  EXPECT_NE(told.find("Read-only file system (in " + mounted + ")"), std::string::npos) << told;
}

TEST_F(NodeCacheTest, NoMemoryIsOneWarningAndNoSignal) {
  FullDisk full;
  auto c = config(0, 1);
  c.files = &full;
  const auto cache = attach(c);
  for (const uint64_t s : {0, 1}) {
    ASSERT_TRUE(cache->claim(s));
    EXPECT_TRUE(cache->ram_slot(s).empty());
    EXPECT_EQ(cache->state(s), State::failed);
  }
  EXPECT_EQ(warnings_.size(), 1u);
}

TEST_F(NodeCacheTest, AKeptTierServesTheNextJobOnTheSameData) {
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].keep = true;
  {
    const auto cache = attach(c);
    put(*cache, 2);
    put(*cache, 7);
  }
  const auto kept = kept_records(c.tiers[0], c.dataset, kSamples).records;
  ASSERT_EQ(kept.size(), 2u);
  EXPECT_EQ(kept[1].sample, 7u);
  EXPECT_EQ(kept[1].sum, sample_sum(bytes_of(7)));
  EXPECT_TRUE(kept_records(c.tiers[0], c.dataset + 1, kSamples).records.empty());
  c.job = "another";
  c.plan = 99;
  const auto next = attach(c);
  EXPECT_EQ(next->state(2), State::ready);
  EXPECT_EQ(next->state(3), State::empty);
  std::vector<std::byte> into(kSize);
  EXPECT_TRUE(next->file_read(7, into));
  EXPECT_EQ(into, bytes_of(7));
  // A second job at the same time has a file of its own.
  c.job = "third";
  const auto third = attach(c);
  EXPECT_EQ(third->state(2), State::empty);
  put(*third, 2);
}

TEST_F(NodeCacheTest, TwoJobsDoNotSeeEachOther) {
  auto other = config(0, 1);
  other.job = "other";
  const auto a = attach(config(0, 1)), b = attach(other);
  put(*a, 0);
  EXPECT_EQ(b->state(0), State::empty);
}

TEST_F(NodeCacheTest, AnUnusableTierDirectoryIsAWarning) {
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].path = "/proc/no/such/place";
  const auto cache = attach(c);
  EXPECT_FALSE(cache->placed(0));
  EXPECT_FALSE(cache->claim(0));
  EXPECT_EQ(warnings_.size(), 1u);
}

// Fails the writes of one sample, then has no room from another one on.
class FailingDisk : public FileSystem {
 public:
  int64_t pwrite(int fd, std::span<const std::byte> from, uint64_t offset) override {
    const uint64_t record = 100 + 24;
    if (offset / record == 1) return -EIO;
    if (offset / record == 3) return -ENOSPC;
    return FileSystem::pwrite(fd, from, offset);
  }
};

TEST_F(NodeCacheTest, AFullTierTakesNoMoreOnAnyRankAndIsRead) {
  FailingDisk failing;
  auto c = config(0, 2, TierKind::file);
  c.files = &failing;
  const auto a = attach(c), b = attach(config(1, 2, TierKind::file));
  put(*a, 0);
  ASSERT_TRUE(a->claim(1));
  a->file_write(1, bytes_of(1));
  EXPECT_EQ(b->state(1), State::failed);
  // One error costs one sample.
  EXPECT_EQ(b->state(2), State::empty);
  put(*a, 2);
  ASSERT_TRUE(a->claim(3));
  a->file_write(3, bytes_of(3));
  for (const uint64_t s : {3, 4}) {
    EXPECT_EQ(b->state(s), State::failed);
    EXPECT_FALSE(b->claim(s));
  }
  for (const uint64_t s : {0, 2}) {
    EXPECT_TRUE(b->placed(s));
    ASSERT_EQ(b->state(s), State::ready);
    std::vector<std::byte> into(kSize);
    EXPECT_TRUE(b->file_read(s, into));
  }
}

// Locks of kept tiers, and of nothing else, fail.
class KeptLocksFail : public FileSystem {
 public:
  int lock(int fd, short type, uint64_t byte) override {
    const auto file = fs::read_symlink("/proc/self/fd/" + std::to_string(fd));
    return file.extension() == ".tier" ? -error : FileSystem::lock(fd, type, byte);
  }
  int error = 0;
};

class BrokenDisk : public FileSystem {
 public:
  int64_t pwrite(int, std::span<const std::byte>, uint64_t) override {
    ++writes;
    return -EIO;
  }
  int writes = 0;
};

TEST_F(NodeCacheTest, ADiskThatFailsAgainAndAgainIsLeftAlone) {
  BrokenDisk broken;
  constexpr uint64_t kMany = 100;
  auto c = config(0, 1, TierKind::file);
  c.files = &broken;
  c.tiers[0].capacity = kMany * (kSize + 24);
  plan::Placement placement;
  placement.tier.assign(kMany, 0);
  for (uint64_t s = 0; s < kMany; ++s) placement.offset.push_back(s * (kSize + 24));
  placement.used = {kMany * (kSize + 24)};
  placement.fill.resize(1);
  const auto cache = NodeCache::attach(c, std::vector<uint64_t>(kMany, kSize), fixed(placement));
  for (uint64_t s = 0; s < kMany; ++s) {
    if (cache->claim(s)) cache->file_write(s, bytes_of(s));
  }
  EXPECT_EQ(broken.writes, 16);
  EXPECT_EQ(cache->state(kMany - 1), State::failed);
  // Of the first write that fails, and of the last one.
  ASSERT_EQ(warnings_.size(), 2u);
  EXPECT_NE(warnings_[1].find("the tier takes no more samples"), std::string::npos);
}

TEST_F(NodeCacheTest, WithoutSharedMemoryThereIsNoRamTier) {
  auto c = config(0, 2);
  c.shm_directory = "/proc/no/such/place";
  const auto a = attach(c);
  c.local_rank = 1;
  const auto b = attach(c);
  for (NodeCache* cache : {a.get(), b.get()}) {
    EXPECT_FALSE(cache->placed(0));
    EXPECT_FALSE(cache->claim(0));
  }
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("there is no RAM tier"), std::string::npos) << warnings_[0];
}

TEST_F(NodeCacheTest, WithoutRoomForItsLengthThereIsNoRamTier) {
  FailingFiles files;
  files.errors["truncate"] = EIO;
  auto c = config(0, 1);
  c.files = &files;
  const auto cache = attach(c);
  EXPECT_FALSE(cache->claim(0));
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("Input/output error; there is no RAM tier"), std::string::npos);
}

TEST_F(NodeCacheTest, ATierWhoseFileCannotBeLockedIsNotKept) {
  const std::pair<int, const char*> cases[] = {{ENOLCK, "has no locks on bytes of a file"},
                                               {EIO, "Input/output error"}};
  for (const auto& [error, told] : cases) {
    warnings_.clear();
    KeptLocksFail files;
    files.error = error;
    auto c = config(0, 1, TierKind::file);
    c.tiers[0].keep = true;
    c.files = &files;
    {
      const auto cache = attach(c);
      put(*cache, 2);
      EXPECT_EQ(cache->state(2), State::ready);
    }
    ASSERT_EQ(warnings_.size(), 1u);
    EXPECT_NE(warnings_[0].find(told), std::string::npos) << warnings_[0];
    EXPECT_NE(warnings_[0].find("this tier is not kept"), std::string::npos);
    EXPECT_TRUE(kept_records(c.tiers[0], c.dataset, kSamples).records.empty());
  }
}

TEST_F(NodeCacheTest, ARankThatCannotLockTheCatalogueHasNoTiers) {
  FailingFiles files;
  files.errors["lock"] = EIO;
  auto c = config(0, 1);
  c.files = &files;
  const auto cache = attach(c);
  EXPECT_FALSE(cache->claim(0));
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("cannot lock the catalogue of the node's cache: Input/output error"),
            std::string::npos);
}

TEST_F(NodeCacheTest, WhatCannotBeKeptIsToldAndLeavesNothingHalfWritten) {
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].keep = true;
  { put(*attach(c), 2); }
  const std::pair<const char*, int> cases[] = {
      {"fsync", EIO}, {"pwrite", ENOSPC}, {"rename", EROFS}};
  for (const auto& [call, error] : cases) {
    warnings_.clear();
    FailingFiles files;
    c.files = &files;
    auto cache = attach(c);
    files.errors[call] = error;
    cache.reset();
    ASSERT_EQ(warnings_.size(), 1u);
    EXPECT_NE(warnings_[0].find("cannot keep the file tier: cannot write"), std::string::npos);
    EXPECT_NE(warnings_[0].find(std::strerror(error)), std::string::npos) << warnings_[0];
    for (const auto& e : fs::recursive_directory_iterator(root_)) {
      EXPECT_NE(e.path().extension(), ".tmp");
    }
    // The manifest of before holds.
    EXPECT_EQ(kept_records(c.tiers[0], c.dataset, kSamples).records.size(), 1u);
  }
}

TEST_F(NodeCacheTest, AKeptFileWhoseManifestCannotBeExaminedStays) {
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].keep = true;
  { put(*attach(c), 9); }
  const fs::path kept = root_ / "disk" / ("nostall-" + std::to_string(::geteuid()));
  for (const char* name : {"1.tier", "2.tier"}) {
    std::ofstream(kept / name).put('x');
    fs::permissions(kept / name, fs::perms(0600));
  }
  fs::create_symlink("1.tier.manifest", kept / "1.tier.manifest");  // ELOOP
  const auto cache = attach(c);
  EXPECT_TRUE(fs::exists(kept / "1.tier"));
  EXPECT_FALSE(fs::exists(kept / "2.tier"));
}

TEST_F(NodeCacheTest, AKeptFileThatCannotBeCutOrRemovedIsTold) {
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].keep = true;
  { put(*attach(c), 9); }
  FailingFiles files;
  files.errors = {{"truncate", EIO}, {"unlink", EROFS}};
  c.files = &files;
  std::ofstream(root_ / "disk" / ("nostall-" + std::to_string(::geteuid())) / "1.tier").put('x');
  for (const auto& e : fs::recursive_directory_iterator(root_ / "disk")) {
    if (e.is_regular_file()) fs::permissions(e.path(), fs::perms(0600));
  }
  c.tiers[0].capacity = 200;
  plan::Placement none;
  none.tier.assign(kSamples, plan::kNoTier);
  none.offset.assign(kSamples, 0);
  none.used = {0};
  none.fill.resize(1);
  const auto cache = NodeCache::attach(c, std::vector<uint64_t>(kSamples, kSize), fixed(none));
  ASSERT_EQ(warnings_.size(), 2u);
  EXPECT_NE(warnings_[0].find("cannot remove the abandoned tier"), std::string::npos);
  EXPECT_NE(warnings_[1].find("cannot shorten"), std::string::npos);
}

TEST_F(NodeCacheTest, APlacementBeyondTheCapacityIsRefused) {
  for (const TierKind kind : {TierKind::ram, TierKind::file}) {
    auto c = config(0, 1, kind);
    c.tiers[0].capacity = kSamples * (kSize + record_overhead(kind));
    EXPECT_NE(attach(c), nullptr);
    c.tiers[0].capacity -= 1;
    EXPECT_THROW(attach(c), Error);
  }
  EXPECT_EQ(files(), 0u);
}

TEST_F(NodeCacheTest, WhatCannotBeIsRefused) {
  const auto refused = [](const NodeCacheConfig& c, size_t samples = kSamples) {
    try {
      const std::vector<uint64_t> sizes(samples, kSize);
      NodeCache::attach(c, sizes, fixed(in_the_first_tier(TierKind::ram)));
      return std::string();
    } catch (const Error& error) {
      return error.kind() == ErrorKind::usage ? std::string(error.what()) : "another kind";
    }
  };
  EXPECT_NE(refused(config(0, 0)).find("0 of 0"), std::string::npos);
  EXPECT_NE(refused(config(2, 2)).find("2 of 2"), std::string::npos);
  EXPECT_NE(refused(config(0, 5000)).find("1024"), std::string::npos);
  auto many = config(0, 1);
  many.tiers.resize(9);
  EXPECT_NE(refused(many).find("at most 8"), std::string::npos);
  EXPECT_NE(refused(config(0, 1), kSamples + 1).find("placement"), std::string::npos);
}

// Another release, say, which hands over files of other numbers and lengths.
TEST_F(NodeCacheTest, FilesThatAreNotOfThisJobAreRefused) {
  const auto told = [this](size_t number, uint64_t arena) {
    const auto c = config(1, 2);
    std::vector<Descriptor> files;
    {
      const auto first = attach(config(0, 2));
      const Handover next("tiers " + c.shm_directory + " " + c.job, 1, 2);
      files = next.ask(std::chrono::steady_clock::now() + 60s);
    }
    EXPECT_EQ(::ftruncate(files[1].get(), static_cast<off_t>(arena)), 0);
    std::vector<int> given;
    for (const Descriptor& file : files) given.push_back(file.get());
    given.resize(number, -1);
    Handover other("tiers " + c.shm_directory + " " + c.job, 0, 2);
    other.give(given);
    try {
      attach(c);
      return std::string();
    } catch (const Error& error) {
      return error.kind() == ErrorKind::peer ? std::string(error.what()) : "another kind";
    }
  };
  EXPECT_EQ(told(6, kSamples * kSize), "");
  EXPECT_NE(told(6, kSamples * kSize - 1).find("size of the RAM tier"), std::string::npos);
  EXPECT_NE(told(5, kSamples * kSize).find("number of tiers"), std::string::npos);
}

TEST_F(NodeCacheTest, AJobThatStartsWhileAnotherOneLeavesAgreesOnWhatIsKept) {
  const auto kept = [&](const std::string& job, uint32_t rank) {
    auto c = config(rank, 2, TierKind::file);
    c.tiers[0].keep = true;
    c.job = job;
    return c;
  };
  // The ranks of the first job leave one after the other, and each writes what is there by then.
  auto a0 = attach(kept("a", 0)), a1 = attach(kept("a", 1));
  put(*a0, 0);
  const auto lists = std::make_shared<std::vector<size_t>>();
  const auto start = [&](uint32_t rank) {
    const Placer place = [lists](std::span<const std::vector<plan::Resident>> residents) {
      lists->push_back(residents[0].size());
      plan::Placement placement;
      placement.tier.assign(kSamples, 0);
      for (uint64_t s = 0; s < kSamples; ++s) placement.offset.push_back(s * (kSize + 24));
      placement.used = {kSamples * (kSize + 24)};
      placement.fill.resize(1);
      return placement;
    };
    return NodeCache::attach(kept("b", rank), std::vector<uint64_t>(kSamples, kSize), place);
  };
  a0.reset();
  put(*a1, 1);
  const auto b0 = start(0);
  a1.reset();
  const auto b1 = start(1);
  EXPECT_EQ(*lists, (std::vector<size_t>{0, 0}));
  put(*b0, 5);
  EXPECT_EQ(b1->state(5), State::ready);
  EXPECT_EQ(kept_records(kept("b", 0).tiers[0], 11, kSamples).records.size(), 2u);
}

TEST_F(NodeCacheTest, ATierIsKeptOnlyInADirectoryThatIsOurs) {
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].keep = true;
  const fs::path own = root_ / "disk" / ("nostall-" + std::to_string(::geteuid()));
  fs::create_directories(own);
  fs::permissions(own, fs::perms::all);
  {
    const auto cache = attach(c);
    put(*cache, 0);
    ASSERT_EQ(warnings_.size(), 1u);
    EXPECT_NE(warnings_[0].find(own.string()), std::string::npos) << warnings_[0];
    EXPECT_NE(warnings_[0].find("this tier is not kept: put that right"), std::string::npos)
        << warnings_[0];
  }
  EXPECT_EQ(files(), 0u);
  fs::permissions(own, fs::perms::owner_all);
  attach(c).reset();
  EXPECT_EQ(files(), 2u);
}

TEST_F(NodeCacheTest, AKeptFileIsCutToTheCapacityOfTheNextJob) {
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].keep = true;
  const auto size = [&] {
    for (const auto& e : fs::recursive_directory_iterator(root_ / "disk")) {
      if (e.path().extension() == ".tier") return e.file_size();
    }
    return uintmax_t{0};
  };
  {
    const auto cache = attach(c);
    for (uint64_t s = 0; s < kSamples; ++s) put(*cache, s);
  }
  ASSERT_EQ(size(), kSamples * (kSize + 24));
  c.tiers[0].capacity = 300;
  const std::vector<uint64_t> sizes(kSamples, kSize);
  plan::Placement placement;
  placement.tier.assign(kSamples, plan::kNoTier);
  placement.offset.assign(kSamples, 0);
  placement.tier[0] = 0;
  placement.used = {kSize + 24};
  placement.fill.resize(1);
  const auto cache = NodeCache::attach(c, sizes, fixed(placement));
  EXPECT_EQ(cache->state(0), State::ready);
  EXPECT_LE(size(), 300u);
}

// A writing is followed by a hundred times as long without one: no slow disk counts here, and a thread
// that was stopped for two seconds is waited for.
TEST_F(NodeCacheTest, WhatIsKeptIsWrittenDownWhileTheJobRuns) {
  class NoDisk : public FileSystem {
   public:
    int fsync(int) override { return 0; }
  };
  NoDisk files;
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].keep = true;
  c.keep_every = std::chrono::milliseconds(5);
  c.files = &files;
  const auto cache = attach(c);
  const auto written = [&](size_t records) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(300);
    size_t seen = 0;
    while (seen != records && std::chrono::steady_clock::now() < deadline) {
      seen = kept_records(c.tiers[0], 11, kSamples).records.size();
    }
    return seen;
  };
  put(*cache, 4);
  EXPECT_EQ(written(1), 1u);
  put(*cache, 5);
  EXPECT_EQ(written(2), 2u);
}

TEST_F(NodeCacheTest, WhatWasKeptSurvivesRanksThatDieAfterOneHasLeft) {
  const auto kept = [&](uint32_t rank) {
    auto c = config(rank, 2, TierKind::file);
    c.tiers[0].keep = true;
    return c;
  };
  const auto other = attach(kept(1));
  {
    const auto leaving = attach(kept(0));
    put(*leaving, 4);
  }
  // The other rank has not left, and may never do so.
  const auto records = kept_records(kept(0).tiers[0], 11, kSamples).records;
  ASSERT_EQ(records.size(), 1u);
  EXPECT_EQ(records[0].sample, 4u);
}

TEST_F(NodeCacheTest, ARecordThatWasPlantedIsFound) {
  // A whole record, header and all, of another content than the one that the manifest says.
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].keep = true;
  put(*attach(c), 2);
  const auto next = attach(c);
  for (const auto& e : fs::recursive_directory_iterator(root_ / "disk")) {
    if (e.path().extension() != ".tier") continue;
    const Descriptor file(::open(e.path().c_str(), O_RDWR));
    const std::vector<std::byte> other(kSize, std::byte{77});
    ASSERT_EQ(write_record(FileSystem::real(), file.get(), 2 * (kSize + kRecordHeader), 2,
                           sample_sum(other), other),
              0);
  }
  std::vector<std::byte> into(kSize);
  EXPECT_FALSE(next->file_read(2, into));
  EXPECT_EQ(next->state(2), State::empty);
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("another content"), std::string::npos) << warnings_[0];
}

// As by a job with less room that was killed before it wrote a manifest, or by a purge.
TEST_F(NodeCacheTest, WhatIsBeyondTheEndOfAKeptFileIsWrittenAgain) {
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].keep = true;
  const std::string file = kept_file_name(c.tiers[0].path, c.dataset);
  const uint64_t record = kSize + kRecordHeader;
  for (const uint64_t left : {3 * record, 3 * record - 1, uint64_t{0}}) {
    {
      const auto before = attach(c);
      for (uint64_t s = 0; s < kSamples; ++s) {
        if (before->state(s) == State::empty) put(*before, s);
      }
    }
    if (left > 0) {
      fs::resize_file(file, left);
    } else {
      fs::remove(file);
    }
    const auto cache = attach(c);
    for (uint64_t s = 0; s < kSamples; ++s) {
      EXPECT_EQ(cache->state(s), s < left / record ? State::ready : State::empty) << s;
    }
    EXPECT_EQ(cache->file_bytes(), left / record * record);
    put(*cache, 9);
    std::vector<std::byte> into(kSize);
    EXPECT_TRUE(cache->file_read(9, into));
    EXPECT_EQ(into, bytes_of(9));
  }
  EXPECT_TRUE(warnings_.empty());
}

class DamagedRecords : public NodeCacheTest {
 protected:
  // A rank of a job on a kept tier of which an earlier job wrote two records.
  NodeCacheConfig kept(uint32_t rank) const {
    auto c = config(rank, 2, TierKind::file);
    c.tiers[0].keep = true;
    return c;
  }
  void SetUp() override {
    NodeCacheTest::SetUp();
    const auto before = attach(kept(0));
    put(*before, 2);
    put(*before, 7);
  }
  void damage(uint64_t sample) const {
    const Descriptor file(
        ::open(kept_file_name(kept(0).tiers[0].path, 11).c_str(), O_RDWR | O_CLOEXEC));
    const std::byte wrong{99};
    const uint64_t at = sample * (kSize + kRecordHeader) + kRecordHeader + 5;
    ASSERT_EQ(FileSystem::real().pwrite(file.get(), {&wrong, 1}, at), 1);
  }
  // One by one, and as one of several.
  static bool read(NodeCache& cache, uint64_t sample, bool several) {
    std::vector<std::byte> into(kSize);
    if (!several) return cache.file_read(sample, into);
    std::atomic<bool> refused{false};
    RecordReader reader(4, refused);
    std::vector<TierRead> reads{{sample, into}};
    cache.file_read(reads, reader);
    return reads[0].good;
  }
};

TEST_F(DamagedRecords, OfAnEarlierJobAreWrittenAgainAndOfThisOneAreNot) {
  const auto a = attach(kept(0)), b = attach(kept(1));
  EXPECT_EQ(a->file_bytes(), 2 * (kSize + kRecordHeader));
  for (const bool several : {false, true}) {
    const uint64_t sample = several ? 7 : 2;
    const uint64_t with = b->file_bytes(), without = with - (kSize + kRecordHeader);
    damage(sample);
    EXPECT_FALSE(read(*a, sample, several));
    EXPECT_EQ(b->state(sample), State::empty);
    EXPECT_EQ(b->file_bytes(), without);
    put(*b, sample);
    EXPECT_TRUE(read(*a, sample, several));
    EXPECT_EQ(b->file_bytes(), with);
    damage(sample);
    EXPECT_FALSE(read(*a, sample, several));
    EXPECT_EQ(b->state(sample), State::failed);
    EXPECT_EQ(b->file_bytes(), without);
    EXPECT_FALSE(b->claim(sample));
  }
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("it is read from the source and written again"), std::string::npos)
      << warnings_[0];
}

// While one rank reads it, another one finds it damaged and writes it again.
TEST_F(DamagedRecords, AreNotTakenForWhatWasWrittenSince) {
  class Reading : public FileSystem {
   public:
    int64_t pread(int fd, std::span<std::byte> into, uint64_t offset) override {
      const int64_t n = FileSystem::pread(fd, into, offset);
      if (into.size() == kSize && then) std::exchange(then, {})();
      return n;
    }
    std::function<void()> then;
  };
  Reading files;
  auto c = kept(0);
  c.files = &files;
  const auto a = attach(c), b = attach(kept(1));
  damage(2);
  files.then = [&] {
    EXPECT_FALSE(read(*b, 2, false));
    put(*b, 2);
  };
  EXPECT_FALSE(read(*a, 2, false));
  EXPECT_EQ(a->state(2), State::ready);
  EXPECT_TRUE(read(*a, 2, false));
  EXPECT_EQ(a->file_bytes(), 2 * (kSize + kRecordHeader));
}

TEST_F(NodeCacheTest, WhatAKeptTierHoldsIsJudgedBeforeItIsUsed) {
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].keep = true;
  c.stamp = 5;
  {
    const auto cache = attach(c);
    put(*cache, 2);
    put(*cache, 7);
  }
  uint64_t stamp = 0;
  c.judge = [&stamp](const TierSpec&, Manifest& kept) {
    stamp = kept.stamp;
    std::erase_if(kept.records, [](const KeptRecord& r) { return r.sample == 2; });
  };
  const auto next = attach(c);
  EXPECT_EQ(stamp, 5u);
  EXPECT_EQ(next->state(2), State::empty);
  EXPECT_EQ(next->state(7), State::ready);
  EXPECT_EQ(next->sums().of(7), sample_sum(bytes_of(7)));
}

// It waits until its deadline is over.
TEST_F(NodeCacheTest, ARankWaitsForAnotherOneThatJudgesWhatIsKept) {
  const auto kept = [&](uint32_t rank) {
    auto c = config(rank, 2, TierKind::file);
    c.tiers[0].keep = true;
    return c;
  };
  { put(*attach(kept(0)), 2); }
  std::promise<void> judging, waited;
  auto first = kept(0), second = kept(1);
  first.judge = [&](const TierSpec&, Manifest&) {
    judging.set_value();
    waited.get_future().wait();
  };
  static constexpr auto kLimit = 300ms;
  bool told = false;
  const auto go_on = [&] {
    if (!std::exchange(told, true)) waited.set_value();
  };
  auto a = std::async(std::launch::async, [&] { return attach(first); });
  judging.get_future().wait();
  second.waiting = [&, begun = std::chrono::steady_clock::now()] {
    if (std::chrono::steady_clock::now() - begun > kLimit) go_on();
  };
  std::unique_ptr<NodeCache> b;
  // On a busy machine the handover itself may take longer, now and then.
  for (int attempt = 0; attempt < 50 && !b; ++attempt) {
    try {
      b = NodeCache::attach(second, std::vector<uint64_t>(kSamples, kSize),
                            fixed(in_the_first_tier(TierKind::file)), kLimit);
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).find("holds the set-up"), std::string::npos) << e.what();
      go_on();
    }
  }
  EXPECT_EQ(a.get()->state(2), State::ready);
  ASSERT_TRUE(b);
}

TEST_F(NodeCacheTest, ATierIsKeptWhereAnotherJobLooksAtItsFileMeanwhile) {
  class HeldForAMoment : public FileSystem {
   public:
    int lock(int fd, short type, uint64_t byte) override {
      const auto file = fs::read_symlink("/proc/self/fd/" + std::to_string(fd));
      return file.extension() == ".tier" && looks-- > 0 ? -EAGAIN
                                                        : FileSystem::lock(fd, type, byte);
    }
    int looks = 2;
  };
  HeldForAMoment files;
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].keep = true;
  c.files = &files;
  put(*attach(c), 2);
  EXPECT_LE(files.looks, 0);
  EXPECT_EQ(kept_records(c.tiers[0], c.dataset, kSamples).records.size(), 1u);
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(NodeCacheTest, ASampleWhoseChecksumWasForgottenIsNotKept) {
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].keep = true;
  {
    const auto cache = attach(c);
    put(*cache, 2);
    put(*cache, 7);
    cache->sums().forget(2);
  }
  std::vector<KeptRecord> kept = kept_records(c.tiers[0], c.dataset, kSamples).records;
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_EQ(kept[0].sample, 7u);
  EXPECT_EQ(attach(c)->state(2), State::empty);
  // Listed all the same, as by an earlier release.
  kept.push_back({2, 2 * (kSize + kRecordHeader), 0});
  std::ofstream manifest(manifest_name(kept_file_name(c.tiers[0].path, c.dataset)));
  const auto write = [&](std::span<const std::byte> bytes) {
    manifest.write(reinterpret_cast<const char*>(bytes.data()),
                   static_cast<std::streamsize>(bytes.size()));
    return 0;
  };
  write_manifest(
      c.dataset, c.stamp, kept.size(), [&, i = 0]() mutable { return kept[i++]; }, write);
  manifest.close();
  EXPECT_EQ(kept_records(c.tiers[0], c.dataset, kSamples).records.size(), 1u);
}

TEST_F(NodeCacheTest, AJobIsToldThatAnotherOneUsesTheKeptTier) {
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].keep = true;
  const auto first = attach(c);
  c.job = "another";
  const auto second = attach(c);
  put(*second, 3);
  EXPECT_EQ(second->state(3), State::ready);
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("a kept tier serves one at a time; this tier is not kept"),
            std::string::npos)
      << warnings_[0];
}

TEST_F(NodeCacheTest, ARankWithOtherFilesOfTheSameNamesHasNoTiers) {
  auto c = config(0, 2), other = config(1, 2);
  c.files_stamp = 1;
  other.files_stamp = 2;
  const auto a = attach(c);
  put(*a, 3);
  const auto b = attach(other);
  EXPECT_FALSE(b->placed(3));
  EXPECT_FALSE(b->claim(4));
  EXPECT_TRUE(a->claim(4));
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("lies elsewhere"), std::string::npos) << warnings_[0];
  EXPECT_NE(warnings_[0].find("local rank 1 has no tiers"), std::string::npos) << warnings_[0];
}

TEST_F(NodeCacheTest, WhatIsNoManifestIsNeitherReadNorWaitedFor) {
  auto c = config(0, 1, TierKind::file);
  c.tiers[0].keep = true;
  put(*attach(c), 2);
  fs::path manifest;
  for (const auto& e : fs::recursive_directory_iterator(root_ / "disk")) {
    if (e.path().extension() == ".manifest") manifest = e.path();
  }
  ASSERT_FALSE(manifest.empty());
  std::ofstream(manifest, std::ios::in).put('x');
  EXPECT_TRUE(kept_records(c.tiers[0], c.dataset, kSamples).records.empty());
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("the kept tier starts empty"), std::string::npos);
  warnings_.clear();
  fs::resize_file(manifest, uint64_t{1} << 42);
  EXPECT_TRUE(kept_records(c.tiers[0], c.dataset, kSamples).records.empty());
  fs::remove(manifest);
  ASSERT_EQ(::mkfifo(manifest.c_str(), 0600), 0);
  EXPECT_TRUE(kept_records(c.tiers[0], c.dataset, kSamples).records.empty());
  ASSERT_EQ(warnings_.size(), 2u);
  EXPECT_NE(warnings_[0].find("more than the data set's 10 samples"), std::string::npos);
  EXPECT_NE(warnings_[1].find("not a regular file"), std::string::npos);
}

TEST_F(NodeCacheTest, ARankThatPlacesItsSamplesForLongStillWaitsForTheOthers) {
  const auto first = attach(config(0, 2));
  const std::vector<uint64_t> sizes(kSamples, kSize);
  // A busy machine may take longer than this limit for the handover itself, now and then.
  static constexpr auto kLimit = 300ms;
  const auto slow = [](auto) {
    std::this_thread::sleep_for(kLimit);
    return in_the_first_tier(TierKind::ram);
  };
  std::unique_ptr<NodeCache> second;
  for (int attempt = 0; attempt < 50 && !second; ++attempt) {
    try {
      second = NodeCache::attach(config(1, 2), sizes, slow, kLimit);
    } catch (const Error& e) {
      ASSERT_EQ(e.kind(), ErrorKind::peer) << e.what();
    }
  }
  ASSERT_TRUE(second);
  put(*first, 4);
  EXPECT_EQ(second->state(4), State::ready);
}

TEST_F(NodeCacheTest, ARankThatIsPlacingItsSamplesIsFoundByTheNext) {
  const auto kept = [&](uint32_t rank) {
    auto c = config(rank, 3, TierKind::file);
    c.tiers[0].keep = true;
    return c;
  };
  auto first = attach(kept(0));
  std::unique_ptr<NodeCache> third;
  const std::vector<uint64_t> sizes(kSamples, kSize);
  const auto second = NodeCache::attach(kept(1), sizes, [&](auto) {
    // Meanwhile the one rank that had the cache leaves, and another one comes.
    first.reset();
    third = attach(kept(2));
    return in_the_first_tier(TierKind::file);
  });
  put(*third, 4);
  EXPECT_EQ(second->state(4), State::ready);
  EXPECT_TRUE(warnings_.empty());
}

class CountingDisk : public FileSystem {
 public:
  int fsync(int fd) override {
    ++flushes;
    return FileSystem::fsync(fd);
  }
  int flushes = 0;
};

TEST_F(NodeCacheTest, OnlyTheLastRankThatLeavesFlushesWhatIsKept) {
  CountingDisk disk;
  const auto kept = [&](uint32_t rank) {
    auto c = config(rank, 2, TierKind::file);
    c.tiers[0].keep = true;
    c.files = &disk;
    return c;
  };
  auto first = attach(kept(0)), second = attach(kept(1));
  put(*first, 4);
  first.reset();
  EXPECT_EQ(disk.flushes, 1);  // of the manifest
  put(*second, 5);
  second.reset();
  EXPECT_EQ(disk.flushes, 3);  // of the tier, too
  const auto records = kept_records(kept(0).tiers[0], 11, kSamples).records;
  ASSERT_EQ(records.size(), 2u);
  EXPECT_EQ(records[0].sample, 4u);
  EXPECT_EQ(records[1].sample, 5u);
}

}  // namespace
}  // namespace nostall::tier
