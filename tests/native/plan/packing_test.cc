// Packing against best fit as it is defined, and by what holds of any packing.
#include "plan/packing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <set>

#include "base/error.h"
#include "base/random.h"
#include "plan/permutation.h"

namespace nostall::plan {
namespace {

using Lengths = std::vector<uint32_t>;

Lengths random_lengths(uint64_t seed, size_t documents, uint32_t most) {
  SampleRandom random(seed, 0, 0);
  Lengths lengths(documents);
  for (uint32_t& length : lengths) {
    // Many short ones, some empty, a few long.
    length = random.below(random.below(8) == 0 ? most : most / 4 + 1);
  }
  return lengths;
}

// The pieces of each unit with their lengths; each token comes at most once.
std::vector<Lengths> contents(const Units& units, const Lengths& lengths) {
  std::vector<Lengths> all;
  std::map<uint32_t, std::set<std::pair<uint32_t, uint32_t>>> taken;
  uint64_t tokens = 0;
  for (uint64_t u = 0; u < units.size(); ++u) {
    Lengths unit;
    uint32_t filled = 0;
    for (const Piece& piece : units[u]) {
      unit.push_back(units.length_of(piece, lengths[piece.document], filled));
      EXPECT_GT(unit.back(), 0u);
      filled += unit.back();
      EXPECT_TRUE(taken[piece.document].emplace(piece.begin, piece.begin + unit.back()).second);
    }
    EXPECT_LE(filled, units.capacity);
    tokens += filled;
    all.push_back(unit);
  }
  EXPECT_EQ(tokens, units.tokens);
  for (const auto& [document, pieces] : taken) {
    uint32_t end = 0;
    for (const auto& [begin, until] : pieces) {
      EXPECT_EQ(begin, end) << "document " << document;
      end = until;
    }
    const uint32_t length = lengths[document];
    EXPECT_EQ(end, units.longer == LongDocuments::cut ? std::min(length, units.capacity) : length);
  }
  const auto empty = std::count(lengths.begin(), lengths.end(), 0u);
  EXPECT_EQ(taken.size() + static_cast<size_t>(empty), lengths.size());
  return all;
}

// Best-fit decreasing, one document after the other.
std::multiset<Lengths> best_fit(Lengths lengths, uint32_t capacity) {
  std::sort(lengths.begin(), lengths.end(), std::greater<>());
  std::multimap<uint32_t, Lengths> rooms;
  for (const uint32_t length : lengths) {
    if (length == 0) continue;
    auto unit = rooms.lower_bound(length);
    if (unit == rooms.end()) unit = rooms.emplace(capacity, Lengths{});
    Lengths pieces = unit->second;
    const uint32_t room = unit->first - length;
    rooms.erase(unit);
    pieces.push_back(length);
    rooms.emplace(room, pieces);
  }
  std::multiset<Lengths> units;
  for (const auto& [room, pieces] : rooms) units.insert(pieces);
  return units;
}

TEST(Packing, BestFitFillsUnitsAsItDoesOneDocumentAfterTheOther) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const uint32_t capacity = 5 + static_cast<uint32_t>(seed * 7 % 90);
    const Lengths lengths = random_lengths(seed, 30 + seed * 5, capacity + 1);
    const Units units = pack(lengths, {.capacity = capacity, .seed = seed});
    const std::vector<Lengths> found = contents(units, lengths);
    const std::multiset<Lengths> expected = best_fit(lengths, capacity);
    // Where units have equal room, which one is taken is not defined: so many of each room it is.
    std::multiset<uint32_t> filled, filled_expected;
    for (const Lengths& unit : found) filled.insert(std::accumulate(unit.begin(), unit.end(), 0u));
    for (const Lengths& unit : expected) {
      filled_expected.insert(std::accumulate(unit.begin(), unit.end(), 0u));
    }
    EXPECT_EQ(filled, filled_expected) << "seed " << seed;
  }
}

TEST(Packing, UsesEveryTokenOnceForAllRules) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    const uint32_t capacity = 3 + static_cast<uint32_t>(seed);
    const Lengths lengths = random_lengths(seed, 200, capacity * 5);
    for (const Packing packing : {Packing::best_fit, Packing::concatenate}) {
      for (const LongDocuments longer : {LongDocuments::split, LongDocuments::cut}) {
        const Units units = pack(lengths, {capacity, packing, longer, seed});
        const std::vector<Lengths> all = contents(units, lengths);
        if (packing == Packing::concatenate) {
          EXPECT_EQ(units.size(), (units.tokens + capacity - 1) / capacity);
        }
      }
    }
  }
}

TEST(Packing, SeedsChooseTheDocumentsOfALength) {
  const Lengths lengths = random_lengths(1, 5000, 64);
  const PackSpec spec{.capacity = 64, .seed = 3};
  const Units one = pack(lengths, spec), again = pack(lengths, spec);
  EXPECT_TRUE(std::ranges::equal(one.pieces, again.pieces));
  PackSpec reseeded = spec;
  reseeded.seed = 4;
  const Units other = pack(lengths, reseeded);
  EXPECT_FALSE(std::ranges::equal(one.pieces, other.pieces));
  EXPECT_TRUE(std::ranges::equal(one.begins, other.begins));
  EXPECT_NE(fingerprint(spec), fingerprint(reseeded));
  EXPECT_EQ(fingerprint(spec), fingerprint(PackSpec{.capacity = 64, .seed = 3}));
}

// The lengths of a log-normal distribution, median 404 and mean 738.
Lengths web_documents(size_t documents) {
  SampleRandom random(7, 0, 0);
  Lengths lengths(documents);
  for (uint32_t& length : lengths) {
    double normal = -6.0;
    for (int i = 0; i < 12; ++i) normal += random.uniform();
    length = static_cast<uint32_t>(std::exp(std::log(404.0) + 1.098 * normal)) + 1;
  }
  return lengths;
}

TEST(Packing, WastesNextToNothingOfWebDocuments) {
  const Lengths lengths = web_documents(200'000);
  EXPECT_LT(pack(lengths, {.capacity = 4096}).waste(), 0.0005);
  EXPECT_LT(pack(lengths, {.capacity = 4096, .longer = LongDocuments::cut}).waste(), 0.0005);
}

TEST(Packing, RefusesWhatItCannotPack) {
  const Lengths lengths{3, 0, 9};
  PackSpec spec{.capacity = 8, .longer = LongDocuments::refuse};
  try {
    pack(lengths, spec);
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("document 2 has 9 tokens, more than the 8"));
  }
  spec.capacity = 9;
  EXPECT_EQ(pack(lengths, spec).size(), 2u);
  spec.capacity = 0;
  EXPECT_THROW(pack(lengths, spec), Error);
  spec.capacity = kMostCapacity + 1;
  EXPECT_THROW(pack(lengths, spec), Error);
  EXPECT_EQ(pack({}, {.capacity = 8}).size(), 0u);
  EXPECT_EQ(pack(Lengths{0, 0}, {.capacity = 8, .packing = Packing::concatenate}).size(), 0u);
}

// docs/formats/units.md
TEST(Packing, GivesTheGoldenUnits) {
  const Lengths lengths{5, 3, 8, 0, 21, 2, 2, 7, 1, 3};
  const auto text = [&](const Units& units) {
    std::string out;
    for (uint64_t u = 0; u < units.size(); ++u) {
      uint32_t filled = 0;
      if (u > 0) out += "; ";
      for (const Piece& piece : units[u]) {
        const uint32_t length = units.length_of(piece, lengths[piece.document], filled);
        if (filled > 0) out += " ";
        out += std::to_string(piece.document) + ":" + std::to_string(piece.begin) + "+" +
               std::to_string(length);
        filled += length;
      }
    }
    return out;
  };
  EXPECT_EQ(text(pack(lengths, {.capacity = 8, .seed = 1})),
            "4:0+8; 4:8+8; 2:0+8; 4:16+5 9:0+3; 0:0+5 1:0+3; 7:0+7 8:0+1; 6:0+2 5:0+2");
  EXPECT_EQ(text(pack(lengths, {8, Packing::best_fit, LongDocuments::cut, 1})),
            "2:0+8; 4:0+8; 0:0+5 9:0+3; 1:0+3 6:0+2 5:0+2 8:0+1; 7:0+7");
  EXPECT_EQ(text(pack(lengths, {8, Packing::concatenate, LongDocuments::split, 1})),
            "7:0+7 9:0+1; 9:1+2 1:0+3 2:0+3; 2:3+5 4:0+3; 4:3+8; 4:11+8; 4:19+2 8:0+1 6:0+2 5:0+2 "
            "0:0+1; 0:1+4");
}

TEST(KeyedPermutation, FillsFromAnyPosition) {
  for (const uint64_t n : {1u, 7u, 100u, 12345u}) {
    const KeyedPermutation permutation(n, 5, 2);
    for (uint64_t first = 0; first < n; first += 1 + n / 9) {
      std::vector<uint32_t> out(n - first);
      permutation.fill(out, first);
      for (uint64_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], permutation(first + i));
    }
  }
}

}  // namespace
}  // namespace nostall::plan
