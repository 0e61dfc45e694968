// Windows, whole documents and packed units: their segments, and their records.
#include "tokens/units.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <random>
#include <span>
#include <string>

#include "../records/memory_storage.h"
#include "base/crc32c.h"
#include "base/node_once.h"

namespace nostall::tokens {
namespace {

// Tokens 0, 1, 2, ... in files of these lengths; documents begin at `begins`.
std::shared_ptr<const Stream> stream_of(const std::vector<uint64_t>& files,
                                        std::vector<uint64_t> begins) {
  std::vector<std::string> contents;
  Index index;
  index.width = 2;
  uint16_t next = 0;
  for (uint32_t f = 0; f < files.size(); ++f) {
    std::vector<uint16_t> values(files[f]);
    for (uint16_t& v : values) v = next++;
    contents.emplace_back(reinterpret_cast<const char*>(values.data()), 2 * values.size());
    index.extents.push_back({f, 0, files[f]});
  }
  index.documents = std::make_shared<const Documents>(Documents::of(begins, next));
  return std::make_shared<const Stream>(std::make_shared<records::MemoryStorage>(contents),
                                        std::move(index));
}

// "0+4 7+1>": first token and length of each segment, and > where the next token is read too.
std::string text(const UnitSource& source) {
  std::string out;
  std::vector<Segment> segments;
  for (uint64_t u = 0; u < source.size(); ++u) {
    source.segments(u, segments);
    for (const Segment& s : segments) {
      out += std::to_string(s.begin) + "+" + std::to_string(s.length) + (s.next ? "> " : " ");
    }
    if (!out.empty()) out.back() = ';';
    out += ' ';
  }
  out.resize(out.size() - 2);
  return out;
}

// The golden vectors of docs/formats/tokens.md.
TEST(Units, AreThoseOfTheFormat) {
  const auto stream = stream_of({6, 0, 8}, {0, 4, 4, 6, 13});
  const auto windows = [&](Windows rule, bool overlap) {
    return text(UnitSource(stream, rule, overlap, 1));
  };
  EXPECT_EQ(windows({4, 4, false, false}, true), "0+4>; 4+4>; 8+4>");
  EXPECT_EQ(windows({4, 4, false, true}, true), "0+4>; 4+4>; 8+4>; 12+1>");
  EXPECT_EQ(windows({4, 4, false, true}, false), "0+4; 4+4; 8+4; 12+2");
  EXPECT_EQ(windows({4, 3, false, false}, false), "0+4; 3+4; 6+4; 9+4");
  EXPECT_EQ(windows({5, 5, true, true}, true), "0+4 4+1>; 5+1 6+4>; 10+3");
  const auto documents = [&](uint64_t length, Long longer) {
    return text(UnitSource(stream, whole_documents(stream->documents(), length, longer), true, 1));
  };
  EXPECT_EQ(documents(0, Long::cut), "0+4; 4+2; 6+7; 13+1");
  EXPECT_EQ(documents(3, Long::cut), "0+3>; 4+2; 6+3>; 13+1");
  EXPECT_EQ(documents(3, Long::split), "0+3>; 3+1; 4+2; 6+3>; 9+3>; 12+1; 13+1");
  EXPECT_THROW(documents(6, Long::refuse), Error);
  const std::vector<uint32_t> lengths{4, 0, 2, 7, 1};
  const UnitSource packed(stream, plan::pack(lengths, {6, plan::Packing::best_fit}), true, 1);
  EXPECT_EQ(text(packed), "6+6>; 0+4 4+2; 12+1 13+1");
}

// Every record has the ids that its segments name, wherever files end.
TEST(Units, HaveTheirIds) {
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    std::vector<uint64_t> begins{0};
    while (begins.back() < 500) begins.push_back(begins.back() + random() % 40);
    while (begins.back() > 500) begins.pop_back();
    const auto stream = stream_of({1 + random() % 200, 0, 100, 500}, begins);
    for (const bool by_document : {false, true}) {
      const UnitSource source(stream,
                              Windows{1 + random() % 90, 1 + random() % 90, by_document, true},
                              round % 2 == 0, 1);
      auto reader = source.make_reader(source::ReaderKind::pread, 4);
      std::vector<std::vector<std::byte>> memory(source.size());
      std::vector<source::ReadRequest> requests(source.size());
      for (uint64_t u = 0; u < source.size(); ++u) {
        memory[u].resize(source.sizes()[u]);
        requests[u] = {u, memory[u]};
      }
      reader->read(requests);
      std::vector<Segment> segments;
      for (uint64_t u = 0; u < source.size(); ++u) {
        ASSERT_EQ(requests[u].error, 0);
        const auto unit = source::UnitView::of(memory[u], 2).take();
        source.segments(u, segments);
        ASSERT_EQ(unit.segments(), segments.size());
        const std::byte* at = unit.ids();
        for (uint32_t s = 0; s < segments.size(); ++s) {
          ASSERT_EQ(unit.segment(s).length, segments[s].length);
          ASSERT_EQ(unit.segment(s).next, segments[s].next);
          for (uint64_t i = 0; i < segments[s].ids(); ++i, at += 2) {
            uint16_t id;
            std::memcpy(&id, at, 2);
            ASSERT_EQ(id, segments[s].begin + i);
          }
        }
      }
    }
  }
}

// Puts what `change` makes of a sealed packing in the place where the node looks for one.
void give_changed(NodeOnce& once, const std::vector<uint32_t>& lengths, const plan::PackSpec& spec,
                  const std::function<void(SealedMemory&)>& change) {
  const auto make = [&] {
    const auto block = plan::pack_block(lengths, spec);
    change(*block);
    std::vector<Descriptor> files;
    files.push_back(block->seal());
    return files;
  };
  once.get(
      make, [](const auto&) {}, std::chrono::seconds(20));
  EXPECT_TRUE(once.made());
}

TEST(Units, ArePackedHereWhereThoseOfTheNodeAreOfNoUse) {
  const std::vector<uint32_t> lengths(kPackedOnce, 3);
  std::vector<uint32_t> shorter = lengths;
  shorter[7] = 1;
  // A seed that no other process of these tests has at the same time.
  const plan::PackSpec spec{.capacity = 8, .seed = 2 * static_cast<uint64_t>(::getpid())};
  const plan::Units expected = plan::pack(lengths, spec);
  const auto check = [&](const char* what, const std::vector<uint32_t>& given,
                         const plan::PackSpec& given_spec,
                         const std::function<void(SealedMemory&)>& change) {
    NodeOnce once(packing_key(lengths, spec));
    give_changed(once, given, given_spec, change);
    const plan::Units units = packed(lengths, spec);
    EXPECT_TRUE(std::ranges::equal(units.pieces, expected.pieces)) << what;
    EXPECT_TRUE(std::ranges::equal(units.contents, expected.contents)) << what;
  };
  const auto same = [](SealedMemory&) {};
  check("damage", lengths, spec, [](SealedMemory& block) { block.data()[200] ^= std::byte{1}; });
  check("another layout", lengths, spec,
        [](SealedMemory& block) { block.data()[7] = std::byte{9}; });
  check("a shorter document", shorter, spec, same);
  check("more documents", std::vector<uint32_t>(kPackedOnce + 9, 3), spec, same);
  check("longer units", lengths, {.capacity = 9, .seed = spec.seed}, same);
}

// A file for each small packing would use up descriptors and mappings of a process.
TEST(Units, AreAFileOnlyWhereOthersCanUseIt) {
  const auto files = [] {
    std::ifstream maps("/proc/self/maps");
    const std::string all{std::istreambuf_iterator<char>(maps), {}};
    return all.find("nostall-packing") != std::string::npos;
  };
  const plan::PackSpec spec{.capacity = 8, .seed = 2 * static_cast<uint64_t>(::getpid()) + 1};
  const auto small = packed(std::vector<uint32_t>(kPackedOnce - 1, 3), spec);
  EXPECT_FALSE(files());
  const auto stream = stream_of({9}, {0, 4});
  const auto two = packed(stream->documents(), spec);
  EXPECT_FALSE(files());
  const auto large = packed(std::vector<uint32_t>(kPackedOnce, 3), spec);
  EXPECT_TRUE(files());
}

TEST(Units, HaveAKeyOfTheirLengths) {
  // CRC32C's polynomial, in one place or in the other: equal sums and checksums.
  const std::vector<uint32_t> one{0x05ec76f1, 1, 0, 0}, other{0, 0, 0x05ec76f1, 1};
  ASSERT_EQ(crc32c(std::as_bytes(std::span(one))), crc32c(std::as_bytes(std::span(other))));
  EXPECT_NE(packing_key(one, {.capacity = 8}), packing_key(other, {.capacity = 8}));
}

TEST(Units, SayWhatCannotBe) {
  const auto stream = stream_of({10}, {0, 4});
  EXPECT_THROW(UnitSource(stream, Windows{10, 10}, true, 1), Error);  // no token for the last label
  EXPECT_EQ(UnitSource(stream, Windows{10, 10}, false, 1).size(), 1u);
  EXPECT_THROW(UnitSource(stream, Pieces{{}, {{1, 3, 4}}}, false, 1), Error);
  EXPECT_THROW(UnitSource(stream, Pieces{{}, {{2, 0, 1}}}, false, 1), Error);
  EXPECT_THROW(UnitSource(stream, Pieces{{0, 2}, {{0, 0, 1}}}, false, 1), Error);
}

TEST(Units, ReportFilesThatChange) {
  const auto files = std::make_shared<records::MemoryStorage>(std::vector<std::string>{"abcdefgh"});
  Index index;
  index.extents = {{0, 0, 4}};
  index.documents = std::make_shared<const Documents>(Documents::of(std::vector<uint64_t>{0}, 4));
  const UnitSource source(std::make_shared<const Stream>(files, index), Windows{2, 2}, false, 1);
  std::vector<std::byte> memory(source.sizes()[0]);
  source::ReadRequest request{1, memory};
  source.make_reader(source::ReaderKind::pread, 1)->read({&request, 1});
  EXPECT_EQ(request.error, 0);
  files->change = "it was written to";
  source.make_reader(source::ReaderKind::pread, 1)->read({&request, 1});
  EXPECT_EQ(request.error, source::kWrongBytes);
  EXPECT_NE(request.why.find("memory/0: it was written to"), std::string::npos);
}

TEST(UnitView, IsFoundAtTheEnd) {
  std::vector<std::byte> record(source::unit_bytes(3, 1, 2));
  const uint32_t table[] = {2 * 2 + 1, 0, 2};
  std::memcpy(record.data() + source::unit_table(3, 1), table, sizeof table);
  std::vector<std::byte> both(24, std::byte{7});
  both.insert(both.end(), record.begin(), record.end());
  const auto mask = source::UnitView::last_of(both, 1).take();
  EXPECT_EQ(mask.bytes(), record.size());
  EXPECT_TRUE(mask.divided_as(source::UnitView::of(record, 1).take()));
  record[4] = std::byte{4};  // the first segment's next token goes to the second
  record[8] = std::byte{2};
  EXPECT_FALSE(mask.divided_as(source::UnitView::of(record, 1).take()));
  for (size_t cut = 0; cut < both.size(); ++cut) {
    const auto found = source::UnitView::last_of(std::span(both).first(cut), 1);
    EXPECT_TRUE(!found || found.value().bytes() <= cut);
  }
}

TEST(UnitView, TakesAnyBytes) {
  std::mt19937 random(3);
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::byte> bytes(random() % 40);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random() % 7);
    const auto unit = source::UnitView::of(bytes, 2);
    if (!unit) continue;
    uint64_t ids = 0;
    for (uint32_t s = 0; s < unit.value().segments(); ++s) {
      ids += unit.value().segment(s).length + (unit.value().segment(s).next ? 1 : 0);
    }
    EXPECT_EQ(source::unit_bytes(ids, 2, unit.value().segments()), bytes.size());
  }
}

}  // namespace
}  // namespace nostall::tokens
