// What a node's cache does where something is refused, missing or not as it should be: users' stores
// that throw and forget, system calls that fail, files and shared memory of other contents.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>

#include "../failing_files.h"
#include "../refuse.h"
#include "base/error.h"
#include "base/handover.h"
#include "caches.h"
#include "tier/catalog.h"
#include "tier/names.h"

namespace nostall::tier {
namespace {

class CacheRefusals : public NodeCacheTest {
 protected:
  NodeCacheConfig kept(uint32_t rank = 0, uint32_t world = 1) const {
    NodeCacheConfig c = config(rank, world, TierKind::file);
    c.tiers[0].keep = true;
    return c;
  }
  // The second tier, on another disk.
  TierSpec disk(uint64_t capacity = 4096) const {
    return {TierKind::file, capacity, (root_ / "other").string(), false};
  }
  static plan::Placement beside(plan::Placement placed) {
    placed.used.push_back(0);
    placed.fill.emplace_back();
    return placed;
  }
  static std::unique_ptr<NodeCache> attach_placed(const NodeCacheConfig& c,
                                                  const plan::Placement& placed,
                                                  uint64_t samples = kSamples) {
    return NodeCache::attach(c, std::vector<uint64_t>(samples, kSize), fixed(placed));
  }
  // What a rank of two hands to one that attaches.
  static std::vector<Descriptor> handed(const NodeCacheConfig& c) {
    const Handover next("tiers " + c.shm_directory + " " + c.job, 1, 2);
    return next.ask(std::chrono::steady_clock::now() + 60s);
  }
  // What attaching says that fails with an error of `kind`.
  static std::string told(const std::function<void()>& attaching, ErrorKind kind) {
    try {
      attaching();
      return {};
    } catch (const Error& e) {
      return e.kind() == kind ? e.what() : "another kind: " + std::string(e.what());
    }
  }
  bool warned(const std::string& words) {
    const std::scoped_lock lock(mutex_);
    return std::any_of(warnings_.begin(), warnings_.end(),
                       [&](const auto& w) { return w.find(words) != std::string::npos; });
  }
  std::string manifest() const {
    return manifest_name(kept_file_name((root_ / "disk").string(), 11));
  }
};

// A user's store, which may forget a sample or fail.
class Memory : public Store {
 public:
  void put(uint64_t, uint64_t sample, std::span<const std::byte> bytes) override {
    const std::scoped_lock lock(mutex_);
    if (fails) throw Error(ErrorKind::io, "the store is closed");
    kept[sample].assign(bytes.begin(), bytes.end());
  }
  bool get(uint64_t, uint64_t sample, std::span<std::byte> into) override {
    const std::scoped_lock lock(mutex_);
    if (fails) throw Error(ErrorKind::io, "the store is closed");
    const auto found = kept.find(sample);
    if (found == kept.end()) return false;
    std::copy(found->second.begin(), found->second.end(), into.begin());
    return true;
  }
  std::mutex mutex_;
  std::map<uint64_t, std::vector<std::byte>> kept;
  bool fails = false;
};

TEST_F(CacheRefusals, AStoreThatForgetsOrFailsCostsItsSamples) {
  const auto store = std::make_shared<Memory>();
  NodeCacheConfig c = config(0, 2, TierKind::file), other = config(1, 2, TierKind::file);
  c.tiers[0].store = other.tiers[0].store = store;
  c.tiers[0].path = other.tiers[0].path = "a store";
  const auto a = attach(c), b = attach(other);
  for (const uint64_t s : {0, 1, 2, 3}) put(*a, s);
  std::atomic<bool> refused{false};
  RecordReader reader(4, refused);
  std::vector<std::byte> first(kSize), second(kSize), third(kSize);
  store->kept.erase(1);
  store->kept[2][7] ^= std::byte{1};
  std::vector<TierRead> reads{{0, first}, {1, second}, {2, third}};
  b->file_read(reads, reader);
  EXPECT_TRUE(reads[0].good);
  EXPECT_EQ(first, bytes_of(0));
  // What was forgotten may be put again; what has changed may not.
  EXPECT_FALSE(reads[1].good);
  EXPECT_EQ(a->state(1), State::empty);
  EXPECT_FALSE(reads[2].good);
  EXPECT_EQ(a->state(2), State::failed);
  ASSERT_EQ(warnings_.size(), 1u);
  EXPECT_NE(warnings_[0].find("sample 2 in the tier a store: a record is of another content"),
            std::string::npos)
      << warnings_[0];
  EXPECT_EQ(a->file_bytes(), 2 * (kSize + kRecordHeader));
  put(*a, 1);
  EXPECT_TRUE(b->file_read(1, second));

  store->fails = true;
  EXPECT_FALSE(a->file_read(3, first));
  EXPECT_EQ(b->state(3), State::failed);
  EXPECT_TRUE(warned("sample 3 in the tier a store: the store is closed"));
  put(*b, 5);
  EXPECT_EQ(a->state(5), State::failed);
  b->file_read(std::span<TierRead>(), reader);  // nothing is asked of it
}

TEST_F(CacheRefusals, AnEarlierWarningSilencesNoneOfAnotherKind) {
  FailingFiles files;
  files.errors["allocate"] = ENOMEM;
  NodeCacheConfig c = config(0, 1);
  c.files = &files;
  const auto cache = attach(c);
  ASSERT_TRUE(cache->claim(0));
  EXPECT_TRUE(cache->ram_slot(0).empty());
  ASSERT_TRUE(warned("the RAM tier takes no more memory"));
  files.errors.clear();
  cache->try_again();
  put(*cache, 1);
  cache->reject(1);
  EXPECT_TRUE(warned("sample 1 in the RAM tier has changed since it was read (wrong CRC32C)"));
  put(*cache, 2);
  EXPECT_EQ(cache->ram_bytes(), kSize);
  cache->reject(2);
  cache->reject(2);
  EXPECT_EQ(cache->ram_bytes(), 0u);
  EXPECT_EQ(warnings_.size(), 2u);
}

TEST_F(CacheRefusals, AStoreThatCannotKeepSaysWhy) {
  const auto store = std::make_shared<Memory>();
  store->fails = true;
  NodeCacheConfig c = config(0, 1, TierKind::file);
  c.tiers[0].store = store;
  c.tiers[0].path = "a store";
  const auto cache = attach(c);
  put(*cache, 0);
  EXPECT_TRUE(warned("cannot keep samples in the tier a store: the store is closed"));
  EXPECT_EQ(cache->state(0), State::failed);
}

// Two readers find at once that a sample is forgotten: it is taken from the bytes in use once.
TEST_F(CacheRefusals, WhatTwoReadersMissIsCountedOnce) {
  class Forgetting : public Store {
   public:
    void put(uint64_t, uint64_t, std::span<const std::byte>) override {}
    bool get(uint64_t, uint64_t sample, std::span<std::byte> into) override {
      if (other != nullptr) std::exchange(other, nullptr)->file_read(sample, into);
      return false;
    }
    NodeCache* other = nullptr;
  };
  const auto store = std::make_shared<Forgetting>();
  NodeCacheConfig c = config(0, 2, TierKind::file), second = config(1, 2, TierKind::file);
  c.tiers[0].store = second.tiers[0].store = store;
  const auto a = attach(c), b = attach(second);
  put(*a, 0);
  put(*a, 1);
  store->other = b.get();
  std::vector<std::byte> into(kSize);
  EXPECT_FALSE(a->file_read(0, into));
  EXPECT_EQ(a->state(0), State::empty);
  EXPECT_EQ(a->file_bytes(), kSize + kRecordHeader);
}

TEST_F(CacheRefusals, WhatIsKnownOfASampleDecidesNotWhatIsWritten) {
  const auto cache = attach(config(0, 1, TierKind::file));
  ASSERT_TRUE(cache->sums().agrees(4, sample_sum(bytes_of(5))));
  put(*cache, 4);
  std::vector<std::byte> into(kSize);
  EXPECT_FALSE(cache->file_read(4, into));
  EXPECT_EQ(cache->state(4), State::failed);
}

TEST_F(CacheRefusals, ASampleWithoutAPlaceIsNeverClaimed) {
  plan::Placement placed = in_the_first_tier(TierKind::ram);
  placed.tier[3] = plan::kNoTier;
  const auto cache = attach_placed(config(0, 1), placed);
  EXPECT_FALSE(cache->placed(3));
  EXPECT_FALSE(cache->claim(3));
  EXPECT_EQ(cache->state(3), State::empty);
}

TEST_F(CacheRefusals, ThereIsNoRoomForTheHeaderOfALastRecord) {
  plan::Placement placed = in_the_first_tier(TierKind::file);
  placed.offset[9] = 4096 - kRecordHeader + 1;
  EXPECT_NE(told([&] { attach_placed(config(0, 1, TierKind::file), placed); }, ErrorKind::usage)
                .find("sample 9 beyond the capacity of tier 0"),
            std::string::npos);
}

TEST_F(CacheRefusals, HalvesOfAFileTierAreRefused) {
  const auto c = with_halves(config(0, 1, TierKind::file));
  EXPECT_NE(told([&] { attach(c); }, ErrorKind::usage).find("do not fit into tier 0"),
            std::string::npos);
}

TEST_F(CacheRefusals, ARankWithoutTiersHasNoHalves) {
  FailingFiles files;
  files.errors["lock"] = EIO;
  NodeCacheConfig c = with_halves(config(0, 1));
  c.files = &files;
  const auto cache = attach(c);
  EXPECT_EQ(cache->half_of(0, chunk_of({1})), Half::gone);
  EXPECT_TRUE(warned("has no tiers"));
}

TEST_F(CacheRefusals, APlaceThatChangedInHalvesIsNamedAsOne) {
  const auto cache = attach(with_halves(config(0, 1)));
  cache->use_chunk(0);
  ASSERT_EQ(cache->half_of(0, chunk_of({1})), Half::here);
  const uint64_t place = cache->entry_of(0, 0);
  cache->reject(place);
  EXPECT_EQ(cache->state(place), State::failed);
  EXPECT_TRUE(warned("a sample of sub-batches in the RAM tier has changed"));
}

// Another process has written nonsense where the places of halves are noted.
TEST_F(CacheRefusals, APlaceBeyondTheArenaIsEmpty) {
  const auto c = with_halves(config(0, 2));
  const auto cache = attach(c);
  cache->use_chunk(0);
  const auto other = attach(with_halves(config(1, 2)));
  other->use_chunk(0);
  ASSERT_EQ(cache->half_of(0, chunk_of({1, 2})), Half::here);
  const std::vector<Descriptor> files = handed(c);
  const uint64_t nonsense[2][2] = {{uint64_t{1} << 60, 100}, {0, uint64_t{1} << 60}};
  ASSERT_EQ(::pwrite(files.at(0).get(), nonsense, sizeof nonsense, sizeof(CatalogHeader)),
            static_cast<ssize_t>(sizeof nonsense));
  for (const uint64_t i : {0, 1}) EXPECT_TRUE(cache->ram_slot(cache->entry_of(0, i)).empty());
}

TEST_F(CacheRefusals, FileTiersStayWhereThereIsNoSharedMemory) {
  NodeCacheConfig c = config(0, 1);
  c.shm_directory = "/proc/no/such/place";
  c.tiers.push_back(disk());
  plan::Placement placed = beside(in_the_first_tier(TierKind::ram));
  placed.tier[9] = 1;
  placed.offset[9] = 0;
  placed.used[1] = kSize + kRecordHeader;
  const auto cache = attach_placed(c, placed);
  EXPECT_FALSE(cache->claim(0));
  put(*cache, 9);
  EXPECT_EQ(cache->state(9), State::ready);
}

TEST_F(CacheRefusals, TiersOfNothingNeedNoFiles) {
  NodeCacheConfig c = config(0, 2), other = config(1, 2);
  for (NodeCacheConfig* each : {&c, &other}) {
    each->tiers.push_back({TierKind::file, 0, (root_ / "none").string(), false});
  }
  plan::Placement none = beside(in_the_first_tier(TierKind::ram));
  none.tier.assign(kSamples, plan::kNoTier);
  none.used[0] = 0;
  const auto a = attach_placed(c, none), b = attach_placed(other, none);
  EXPECT_FALSE(b->claim(0));
  EXPECT_FALSE(fs::exists(root_ / "none"));
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(CacheRefusals, ATierThatTheFirstRankCannotUseIsUsedByNone) {
  NodeCacheConfig c = config(0, 2, TierKind::file), other = config(1, 2, TierKind::file);
  c.tiers[0].path = other.tiers[0].path = "/proc/no/such/place";
  const auto a = attach(c), b = attach(other);
  EXPECT_FALSE(b->claim(0));
  EXPECT_EQ(warnings_.size(), 1u);
}

TEST_F(CacheRefusals, WhatIsKeptElsewhereIsNotThere) {
  { put(*attach(kept()), 2); }
  plan::Placement moved = in_the_first_tier(TierKind::file);
  moved.offset[2] += 1000;
  EXPECT_EQ(attach_placed(kept(), moved)->state(2), State::empty);
  // Nor is what has no place any more.
  { put(*attach(kept()), 2); }
  moved.tier[2] = plan::kNoTier;
  EXPECT_EQ(attach_placed(kept(), moved)->state(2), State::empty);
}

TEST_F(CacheRefusals, AWaiterTakesBackTheClaimOfARankThatDies) {
  int go[2];
  ASSERT_EQ(::pipe(go), 0);
  const Descriptor read_end(go[0]), write_end(go[1]);
  const pid_t child = ::fork();  // before there are threads
  if (child == 0) {
    char word = 0;
    if (::read(go[0], &word, 1) != 1) ::_exit(1);
    const auto dies = attach(config(1, 2));
    ::_exit(dies->claim(0) ? 0 : 1);
  }
  const auto cache = attach(config(0, 2));
  EXPECT_FALSE(cache->dead_peer());
  ASSERT_EQ(::write(go[1], "x", 1), 1);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_EQ(status, 0);
  const auto dead = cache->dead_peer();
  ASSERT_TRUE(dead);
  EXPECT_EQ(dead->local_rank, 1u);
  EXPECT_EQ(dead->pid, child);
  EXPECT_EQ(cache->state(0), State::filling);
  EXPECT_EQ(cache->wait(0, 60s, {}), State::empty);
  // Its own claim is nobody else's to take back.
  ASSERT_TRUE(cache->claim(1));
  EXPECT_EQ(cache->wait(1, 1ms, {}), State::filling);
  const auto again = attach(config(1, 2));
  EXPECT_FALSE(cache->dead_peer());
}

TEST_F(CacheRefusals, AViewOfWhatIsNotReadyIsNone) {
  const std::shared_ptr<NodeCache> cache = attach(config(0, 1));
  EXPECT_EQ(shared_view(cache, 0), nullptr);
  put(*cache, 0);
  EXPECT_NE(shared_view(cache, 0), nullptr);
}

TEST_F(CacheRefusals, OnlyAKeptTierInADirectoryOfOursHasKeptRecords) {
  { put(*attach(kept()), 2); }
  TierSpec spec = kept().tiers[0];
  EXPECT_EQ(kept_records(spec, 11, kSamples).records.size(), 1u);
  spec.keep = false;
  EXPECT_TRUE(kept_records(spec, 11, kSamples).records.empty());
  spec.keep = true;
  spec.kind = TierKind::ram;
  EXPECT_TRUE(kept_records(spec, 11, kSamples).records.empty());
  spec.kind = TierKind::file;
  fs::permissions(kept_directory(spec.path), fs::perms::all);
  EXPECT_TRUE(kept_records(spec, 11, kSamples).records.empty());
}

TEST_F(CacheRefusals, RanksThatCannotBeFoundByOthersHaveNoTiers) {
  with_refused(kThreadCalls, EAGAIN, [&] {
    const auto cache = attach(config(0, 2));
    EXPECT_FALSE(cache->claim(0));
  });
  EXPECT_TRUE(warned("local rank 0 has no tiers"));
  // A single one need not be found, and gives no memory back.
  with_refused(kThreadCalls, EAGAIN, [&] { EXPECT_TRUE(attach(config(0, 1))->claim(0)); });
  EXPECT_TRUE(warned("the RAM tier gives no memory back to others"));
}

TEST_F(CacheRefusals, ARankThatCannotAskOthersHasNoTiers) {
  with_refused({SYS_socket}, EMFILE, [&] {
    for (const NodeCacheConfig& c : {config(0, 2), kept(0, 2)}) {
      const auto cache = attach(c);
      EXPECT_FALSE(cache->claim(0));
      EXPECT_EQ(cache->state(0), State::empty);
    }
  });
  EXPECT_TRUE(warned("local rank 0 has no tiers"));
}

TEST_F(CacheRefusals, ARankThatCannotSayThatItLeavesWritesNoManifest) {
  {
    auto cache = attach(kept(0, 2));
    put(*cache, 2);
    with_refused({SYS_socket}, EMFILE, [&] { cache.reset(); });
  }
  EXPECT_FALSE(fs::exists(manifest()));
}

TEST_F(CacheRefusals, WithoutACatalogueThatRanksShareThereAreNoTiers) {
  struct Case {
    std::vector<int> calls;
    int error;
    const char* told;
  };
  for (const Case& c : {Case{{SYS_ftruncate}, ENOSPC, "no memory for the catalogue"},
                        Case{{SYS_fallocate}, ENOSPC, "no memory for the catalogue"},
                        Case{{SYS_memfd_create}, ENOSYS, "cannot make a file in memory"},
                        Case{{SYS_openat}, ENOENT, "cannot open once more"}}) {
    warnings_.clear();
    with_refused(c.calls, c.error, [&] {
      const auto cache = attach(config(0, 1));
      for (uint64_t s = 0; s < kSamples; ++s) {
        EXPECT_FALSE(cache->claim(s));
        EXPECT_EQ(cache->state(s), State::empty);
      }
      EXPECT_FALSE(cache->dead_peer());
      EXPECT_TRUE(cache->sums().agrees(3, 77));
      EXPECT_FALSE(cache->sums().agrees(3, 78));
    });
    EXPECT_TRUE(warned(c.told));
    EXPECT_TRUE(warned("local rank 0 has no tiers"));
  }
}

TEST_F(CacheRefusals, WithoutMemoryForTheListOfKeptSamplesThereAreNoTiers) {
  { put(*attach(kept()), 2); }
  with_refused({SYS_pwrite64}, ENOSPC, [&] { EXPECT_FALSE(attach(kept())->claim(0)); });
  EXPECT_TRUE(warned("no memory for the list of kept samples"));
}

// The member's own lock is there, and the one that all ranks share is refused.
TEST_F(CacheRefusals, ARankThatCannotLockAsALivingOneHasNoTiers) {
  class NoSharedLocks : public FileSystem {
   public:
    int lock(int fd, short type, uint64_t byte) override {
      return type == F_RDLCK ? -EIO : FileSystem::lock(fd, type, byte);
    }
  };
  NoSharedLocks files;
  NodeCacheConfig c = config(0, 1);
  c.files = &files;
  EXPECT_FALSE(attach(c)->claim(0));
  EXPECT_TRUE(warned("cannot lock the catalogue of the node's cache: Input/output error"));
}

TEST_F(CacheRefusals, AKeptFileThatIsRemovedAgainAndAgainIsNotKept) {
  class Removing : public FileSystem {
   public:
    int lock(int fd, short type, uint64_t byte) override {
      const auto file = fs::read_symlink("/proc/self/fd/" + std::to_string(fd));
      if (file.extension() == ".tier") removed += fs::remove(file) ? 1 : 0;
      return FileSystem::lock(fd, type, byte);
    }
    int removed = 0;
  };
  Removing files;
  NodeCacheConfig c = kept();
  c.files = &files;
  put(*attach(c), 0);
  EXPECT_GT(files.removed, 1);
  EXPECT_TRUE(warned("other jobs remove"));
  EXPECT_FALSE(fs::exists(manifest()));
}

TEST_F(CacheRefusals, WhatIsNoFileCannotBeAKeptTier) {
  fs::create_directories(kept_directory((root_ / "disk").string()));
  fs::permissions(kept_directory((root_ / "disk").string()), fs::perms::owner_all);
  fs::create_directory(kept_file_name((root_ / "disk").string(), 11));
  const auto cache = attach(kept());
  put(*cache, 0);
  EXPECT_EQ(cache->state(0), State::ready);
  EXPECT_TRUE(warned("this tier is not kept"));
}

TEST_F(CacheRefusals, AManifestThatCannotBeWrittenIsTold) {
  auto cache = attach(kept());
  put(*cache, 0);
  fs::create_directory(manifest() + ".tmp");
  cache.reset();
  EXPECT_TRUE(warned("cannot keep the file tier: cannot write"));
  EXPECT_FALSE(fs::exists(manifest()));
}

// Files that another program hands over in place of a rank of this job.
TEST_F(CacheRefusals, ACatalogueOfAnotherLengthIsRefused) {
  for (const uint64_t length : {uint64_t{10}, sizeof(CatalogHeader) + 10}) {
    std::vector<Descriptor> files;
    {
      const auto first = attach(config(0, 2));
      files = handed(config(1, 2));
    }
    ASSERT_EQ(::ftruncate(files[0].get(), static_cast<off_t>(length)), 0);
    std::vector<int> given;
    for (const Descriptor& file : files) given.push_back(file.get());
    const NodeCacheConfig c = config(1, 2);
    Handover other("tiers " + c.shm_directory + " " + c.job, 0, 2);
    other.give(given);
    EXPECT_NE(told([&] { attach(c); }, ErrorKind::peer)
                  .find("their catalogue has " + std::to_string(length) + " bytes"),
              std::string::npos);
  }
}

TEST_F(CacheRefusals, AListOfKeptSamplesThatIsCutIsReadAsFarAsItGoes) {
  { put(*attach(kept()), 2); }
  for (const off_t length : {0, 16, 24}) {
    const auto first = attach(kept(0, 2));
    const std::vector<Descriptor> files = handed(kept(1, 2));
    ASSERT_EQ(::ftruncate(files.at(2).get(), length), 0);
    size_t seen = 9;
    const auto second = NodeCache::attach(kept(1, 2), std::vector<uint64_t>(kSamples, kSize),
                                          [&](std::span<const std::vector<plan::Resident>> found) {
                                            seen = found[0].size();
                                            return in_the_first_tier(TierKind::file);
                                          });
    EXPECT_EQ(seen, length == 24 ? 1u : 0u) << length;
  }
}

TEST_F(CacheRefusals, ADataSetOfMoreSamplesIsAnotherOne) {
  const auto first = attach(config(0, 2));
  plan::Placement placed = in_the_first_tier(TierKind::ram);
  placed.tier.push_back(plan::kNoTier);
  placed.offset.push_back(0);
  EXPECT_NE(told([&] { attach_placed(config(1, 2), placed, kSamples + 1); }, ErrorKind::peer)
                .find("places of samples in the tiers"),
            std::string::npos);
}

TEST_F(CacheRefusals, AListingIsSharedOnceAndByThoseThatHaveOne) {
  Shareable alone(1000), shared(1000), adopted(1000);
  NodeCacheConfig c = config(0, 1);
  c.listing = &alone;
  attach(c);
  EXPECT_FALSE(alone.is_shared());  // with nobody
  ASSERT_TRUE(shared.share());
  NodeCacheConfig first = config(0, 3), third = config(2, 3);
  first.listing = &shared;
  third.listing = &adopted;
  const auto a = attach(first), b = attach(config(1, 3)), d = attach(third);
  EXPECT_TRUE(adopted.is_shared());
}

// While one rank waits for memory from the system, another one takes the same.
TEST_F(CacheRefusals, TwoRanksThatTakeTheSameMemoryAgree) {
  Meanwhile files;
  NodeCacheConfig c = config(0, 2);
  c.files = &files;
  const auto a = attach(c), b = attach(config(1, 2));
  files.then = [&] { put(*b, 1); };
  put(*a, 0);
  for (const uint64_t s : {0, 1}) {
    const auto bytes = bytes_of(s);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), a->ram_view(s).bytes().begin()));
  }
}

}  // namespace
}  // namespace nostall::tier
