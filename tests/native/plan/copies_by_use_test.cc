// Copies by next use, against the best of all choices at small sizes, and by what must hold at any size.
#include "plan/copies_by_use.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>

#include "base/error.h"
#include "base/fnv.h"
#include "base/random.h"

namespace nostall::plan {
namespace {

bool all(SampleId) { return true; }

std::vector<uint32_t> random_accesses(uint32_t seed, uint32_t samples, size_t count) {
  SampleRandom random(seed, 0, 0);
  std::vector<uint32_t> accesses(count);
  for (uint32_t& a : accesses) a = random.below(samples);
  return accesses;
}

// Follows the uses and checks each of them: a place holds what was put there last.
uint64_t hits(std::span<const uint64_t> sizes, const CopyPlaces& places,
              std::span<const uint32_t> accesses, size_t window) {
  CopiesByUse copies(sizes, places);
  std::map<uint32_t, uint32_t> in;  // place: sample
  uint64_t hits = 0;
  size_t known = 0;
  for (size_t i = 0; i < accesses.size(); ++i) {
    if (known < std::min(accesses.size(), i + window)) {
      const size_t more = std::min(accesses.size(), i + 2 * window) - known;
      copies.know(accesses.subspan(known, more), known + more == accesses.size());
      known += more;
    }
    const CopyUse use = copies.next();
    const bool is_there = std::ranges::any_of(in, [&](auto& p) { return p.second == accesses[i]; });
    EXPECT_EQ(use.held, is_there) << i;
    if (use.held) {
      EXPECT_EQ(in[use.place], accesses[i]) << i;
    }
    if (use.keep) {
      in[use.place] = accesses[i];
      const auto of = places.class_of(sizes[accesses[i]]);
      EXPECT_TRUE(of.has_value());
      EXPECT_LE(sizes[accesses[i]], places.classes()[of.value_or(0)].bytes);
    }
    EXPECT_EQ(use.held || use.keep, use.place != kNoPlace);
    hits += use.held ? 1 : 0;
  }
  EXPECT_LE(in.size(), places.count());
  EXPECT_THROW(copies.next(), Error);
  return hits;
}

// The most hits of any choice of what to keep, `held` a set of bits.
uint64_t best_hits(std::span<const uint32_t> accesses, size_t room, size_t at, uint32_t held,
                   std::map<std::pair<size_t, uint32_t>, uint64_t>& known) {
  if (at == accesses.size()) return 0;
  const auto [found, fresh] = known.try_emplace({at, held}, 0);
  if (!fresh) return found->second;
  const uint32_t bit = 1u << accesses[at], now = held | bit;
  uint64_t best = best_hits(accesses, room, at + 1, held, known);
  if (static_cast<size_t>(std::popcount(now)) <= room) {
    best = std::max(best, best_hits(accesses, room, at + 1, now, known));
  } else {
    for (uint32_t out = 1; out <= now; out <<= 1) {
      if ((held & out) != 0) {
        best = std::max(best, best_hits(accesses, room, at + 1, now & ~out, known));
      }
    }
  }
  best += (held & bit) != 0 ? 1 : 0;
  known[{at, held}] = best;
  return best;
}

TEST(CopiesByUse, HaveAsManyHitsAsTheBestChoice) {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    const uint32_t samples = 3 + seed % 5;
    const std::vector<uint64_t> sizes(samples, 100);
    const std::vector<uint32_t> accesses = random_accesses(seed, samples, 24);
    for (size_t room = 0; room <= samples; ++room) {
      const CopyPlaces places(sizes, all, room * 100 + 99);
      EXPECT_EQ(places.count(), room);
      std::map<std::pair<size_t, uint32_t>, uint64_t> known;
      EXPECT_EQ(hits(sizes, places, accesses, accesses.size()),
                best_hits(accesses, room, 0, 0, known))
          << seed << " " << room;
    }
  }
}

TEST(CopiesByUse, LoseLittleWhereTheFutureIsKnownInPart) {
  const std::vector<uint64_t> sizes(200, 100);
  const CopyPlaces places(sizes, all, 6000);
  uint64_t whole = 0, part = 0;
  for (uint32_t seed = 0; seed < 5; ++seed) {
    const std::vector<uint32_t> accesses = random_accesses(seed, 200, 5000);
    whole += hits(sizes, places, accesses, accesses.size());
    part += hits(sizes, places, accesses, 600);  // three times what a sample waits for on average
  }
  EXPECT_LE(part, whole);
  EXPECT_GT(static_cast<double>(part), 0.97 * static_cast<double>(whole));
}

TEST(CopiesByUse, StayInTheRoomWhateverTheSizes) {
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SampleRandom random(seed, 1, 0);
    std::vector<uint64_t> sizes(300);
    const auto copied = [](SampleId s) { return s % 3 > 0; };
    uint64_t others = 0;
    for (size_t s = 0; s < sizes.size(); ++s) {
      sizes[s] = random.below(1u << (1 + random.below(20)));
      if (copied(s)) others += sizes[s];
    }
    std::vector<uint32_t> accesses = random_accesses(seed, 300, 2000);
    std::erase_if(accesses, [&](uint32_t s) { return !copied(s); });
    for (const uint64_t room : {uint64_t{0}, others / 10, others / 2, 2 * others}) {
      const CopyPlaces places(sizes, copied, room);
      EXPECT_LE(places.bytes(), room);
      uint64_t end = 0;
      for (const CopyPlaces::Class& c : places.classes()) {
        for (uint32_t p = c.first; p < c.first + c.count; ++p) {
          EXPECT_EQ(places.begin_of(p), end);
          end += c.bytes;
        }
      }
      EXPECT_EQ(end, places.bytes());
      EXPECT_GE(places.bytes(), room == 2 * others ? others : room / 4);
      const uint64_t found = hits(sizes, places, accesses, 500);
      EXPECT_EQ(found == 0, room == 0);
    }
  }
}

TEST(CopiesByUse, AreTheSameInEveryRelease) {
  const std::vector<uint32_t> accesses = random_accesses(11, 50, 1000);
  std::vector<uint64_t> sizes;
  for (uint64_t s = 0; s < 50; ++s) sizes.push_back(100 + 37 * s);
  const CopyPlaces places(sizes, all, 20'000);
  CopiesByUse copies(sizes, places);
  copies.know(accesses, true);
  Fnv hash;
  for (size_t i = 0; i < accesses.size(); ++i) {
    const CopyUse use = copies.next();
    hash.number(use.place).number(use.held ? 1 : 0).number(use.keep ? 1 : 0);
  }
  EXPECT_EQ(hash.value(), 308138323393252261U);
}

}  // namespace
}  // namespace nostall::plan
