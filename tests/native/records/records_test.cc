// Tables of records, their stored form, and reading them.
#include "records/records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <set>

#include "../readers.h"
#include "../temporary.h"
#include "base/crc32c.h"
#include "memory_storage.h"

namespace nostall::records {
namespace {

using namespace source;
using testing::HasSubstr;

void expect_equal(const RecordTable& a, const RecordTable& b) {
  EXPECT_EQ(a.kind, b.kind);
  EXPECT_EQ(a.stamp, b.stamp);
  ASSERT_EQ(a.files.size(), b.files.size());
  for (size_t i = 0; i < a.files.size(); ++i) {
    EXPECT_EQ(a.files[i].path, b.files[i].path);
    EXPECT_EQ(a.files[i].size, b.files[i].size);
    EXPECT_EQ(a.files[i].mtime_ns, b.files[i].mtime_ns);
  }
  EXPECT_EQ(a.file, b.file);
  EXPECT_EQ(a.offset, b.offset);
  EXPECT_EQ(a.length, b.length);
  EXPECT_EQ(a.label, b.label);
  EXPECT_EQ(a.head, b.head);
  EXPECT_EQ(a.parts, b.parts);
  EXPECT_EQ(a.part_offset, b.part_offset);
  EXPECT_EQ(a.part_length, b.part_length);
}

RecordTable small_table() {
  RecordTable t;
  t.kind = "tar";
  t.stamp = "all";
  t.files = {{"/data/a.tar", 5000, -7}, {"/data/b.tar", 1 << 20, 1'700'000'000'000'000'000}};
  t.file = {0, 1, 1, 0};
  t.offset = {512, 1024, 900'000, 0};
  t.length = {100, 0, 1000, 5000};
  t.label = {-1, 3, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
  t.head = {0, 16, 16, 0};
  return t;
}

// Of two samples with two fields: the second one lacks the first field.
RecordTable members_table() {
  RecordTable t;
  t.kind = "tar";
  t.stamp = "members=all";
  t.files = {{"a.tar", 10240, 5}};
  t.offset = {512, 2560};
  t.length = {1030, 4};
  t.label = {0, 7};
  t.parts = 2;
  t.part_offset = {1024, 0, kNoPart, 0};
  t.part_length = {6, 300, 0, 4};
  return t;
}

void repair(std::vector<std::byte>& bytes) {
  const uint32_t crc = crc32c(std::span(bytes).first(bytes.size() - 4));
  for (size_t i = 0; i < 4; ++i) bytes[bytes.size() - 4 + i] = std::byte(crc >> (8 * i));
}

TEST(RecordTable, SurvivesTheRoundTrip) {
  RecordTable one_file = small_table();
  one_file.file.clear();
  RecordTable same_heads = small_table();
  same_heads.head.assign(4, 16);
  RecordTable no_heads = small_table();
  no_heads.head.clear();
  RecordTable empty;
  RecordTable far;
  far.files = {{"", uint64_t{1} << 62, 0}};
  far.offset = {uint64_t{1} << 62, 0, (uint64_t{1} << 62) - 1};
  far.length = {0, uint64_t{1} << 62, 1};
  far.label = {0, 0, 0};
  RecordTable long_parts = members_table();
  long_parts.length = {uint64_t{1} << 40, kNoPart};
  long_parts.part_offset = {kNoPart - 1, 1, 0, kNoPart};
  long_parts.part_length = {kNoPart, kNoPart, kNoPart, 0};
  for (const RecordTable& table :
       {small_table(), one_file, same_heads, no_heads, empty, far, members_table(), long_parts}) {
    const auto bytes = serialize_records(table);
    const auto parsed = parse_records(bytes);
    ASSERT_TRUE(parsed) << parsed.error().what();
    expect_equal(parsed.value(), table);
    EXPECT_EQ(serialize_records(parsed.value()), bytes);
  }
}

// Bytes made by hand from docs/formats/records.md.
TEST(RecordTable, OfMembersIsStoredAsDocumented) {
  const std::string golden(
      "\x31\x4e\x53\x52\x02\x00\x00\x00\x03\x74\x61\x72\x0b\x6d\x65\x6d"
      "\x62\x65\x72\x73\x3d\x61\x6c\x6c\x01\x05\x61\x2e\x74\x61\x72\x80"
      "\x50\x0a\x02\x02\x00\x00\x80\x08\x8c\x10\x00\x81\x10\x0c\x8c\x10"
      "\xd8\x04\xf4\x0f\x83\x10\x0e\x00\x01\xcf\x04\xb5\x0e\x59\x1c",
      63);
  const auto bytes = std::as_bytes(std::span(golden));
  const auto parsed = parse_records(bytes);
  ASSERT_TRUE(parsed) << parsed.error().what();
  expect_equal(parsed.value(), members_table());
  const auto written = serialize_records(members_table());
  EXPECT_EQ(written, std::vector(bytes.begin(), bytes.end()));
}

TEST(RecordTable, RefusesMembersOutsideOfTheirRecord) {
  for (const uint32_t offset : {1025u, 5000u, kNoPart - 1}) {
    RecordTable t = members_table();
    t.part_offset[0] = offset;
    const auto parsed = parse_records(serialize_records(t));
    ASSERT_FALSE(parsed) << offset;
    EXPECT_THAT(parsed.error().what(), HasSubstr("a field cannot lie there"));
  }
}

TEST(RecordTable, TakesFewBytesARecord) {
  RecordTable t;
  t.files = {{"data.mdb", uint64_t{1} << 40, 1}};
  std::mt19937_64 random(1);
  uint64_t at = 8192;
  for (int i = 0; i < 100'000; ++i) {
    const uint64_t length = 90'000 + random() % 40'000;
    t.offset.push_back(at);
    t.length.push_back(length);
    t.label.push_back(static_cast<int64_t>(random() % 1000));
    at += (length + 16 + 4095) / 4096 * 4096;
  }
  t.head.assign(t.size(), 16);
  EXPECT_LT(serialize_records(t).size(), 12 * t.size());
  std::shuffle(t.label.begin(), t.label.end(), random);
  std::vector<uint64_t> order(t.size());
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random);
  RecordTable shuffled = t;
  for (size_t i = 0; i < order.size(); ++i) shuffled.offset[i] = t.offset[order[i]];
  EXPECT_LT(serialize_records(shuffled).size(), 12 * t.size());
}

TEST(RecordTable, RefusesEveryCutAndFlippedByte) {
  const auto bytes = serialize_records(small_table());
  for (size_t i = 0; i < bytes.size(); ++i) {
    const auto cut = parse_records(std::span(bytes).first(i));
    ASSERT_FALSE(cut) << i;
    EXPECT_EQ(cut.error().kind(), ErrorKind::corruption);
    auto damaged = bytes;
    damaged[i] ^= std::byte{0x40};
    EXPECT_FALSE(parse_records(damaged)) << i;
  }
}

// Behind a checksum that is right: what is taken would be written the same.
class OneForm : public testing::TestWithParam<bool> {};

TEST_P(OneForm, ForEveryContent) {
  const auto bytes = serialize_records(GetParam() ? members_table() : small_table());
  unsigned taken = 0;
  for (size_t i = 0; i + 4 < bytes.size(); ++i) {
    for (unsigned value = 0; value < 256; ++value) {
      auto bent = bytes;
      bent[i] = std::byte(value);
      repair(bent);
      const auto parsed = parse_records(bent);
      if (!parsed) continue;
      ++taken;
      ASSERT_EQ(serialize_records(parsed.value()), bent) << i << " " << value;
    }
    auto cut = std::vector(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(i) + 4);
    repair(cut);
    ASSERT_FALSE(parse_records(cut)) << i;
  }
  EXPECT_GT(taken, 1000u);
}

INSTANTIATE_TEST_SUITE_P(RecordTable, OneForm, testing::Bool());

class Overflow : public testing::TestWithParam<bool> {};

TEST_P(Overflow, IsStoodOrRefused) {
  RecordTable t = GetParam() ? members_table() : small_table();
  t.head.clear();
  auto bytes = serialize_records(t);
  // The file of the second sample: a step of the largest number from file 1.
  const std::string huge = "\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01";
  for (size_t at = 8; at + 4 < bytes.size(); ++at) {
    auto bent = bytes;
    bent.erase(bent.begin() + static_cast<ptrdiff_t>(at));
    for (size_t i = 0; i < huge.size(); ++i) {
      bent.insert(bent.begin() + static_cast<ptrdiff_t>(at + i), std::byte(huge[i]));
    }
    repair(bent);
    const auto parsed = parse_records(bent);
    if (parsed) {
      EXPECT_EQ(serialize_records(parsed.value()), bent);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(RecordTable, Overflow, testing::Bool());

// Random records of a few files, in any order, some of them overlapping or empty.
struct Data {
  std::shared_ptr<MemoryStorage> storage;
  RecordTable table;
  std::vector<std::string> contents;

  std::string bytes_of(uint64_t s) const {
    return contents[table.file_of(s)].substr(table.offset[s], table.length[s]);
  }
};

Data random_data(unsigned seed, size_t records, unsigned files, bool heads) {
  std::mt19937_64 random(seed);
  Data d;
  for (unsigned f = 0; f < files; ++f) d.contents.push_back(random_bytes(200'000, seed + f));
  d.storage = std::make_shared<MemoryStorage>(d.contents);
  d.table.kind = "test";
  d.table.files.assign(d.storage->files().begin(), d.storage->files().end());
  for (size_t i = 0; i < records; ++i) {
    const uint64_t offset = 16 + random() % 199'000;
    const uint64_t most = random() % 4 ? 300 : 30'000;
    if (files > 1) d.table.file.push_back(static_cast<uint32_t>(random() % files));
    d.table.offset.push_back(offset);
    d.table.length.push_back(random() % (std::min<uint64_t>(most, 200'000 - offset) + 1));
    d.table.label.push_back(static_cast<int64_t>(i));
    if (heads) d.table.head.push_back(static_cast<uint16_t>(random() % 17));
  }
  return d;
}

struct Requests {
  explicit Requests(const RecordSource& source, std::vector<uint64_t> samples) {
    memory.resize(samples.size());
    for (size_t i = 0; i < samples.size(); ++i) {
      memory[i].resize(source.sizes()[samples[i]]);
      ReadRequest r;
      r.sample = samples[i];
      r.into = std::as_writable_bytes(std::span(memory[i]));
      r.error = -1;
      r.once = i % 2 == 0;
      requests.push_back(std::move(r));
    }
  }
  std::vector<std::string> memory;
  std::vector<ReadRequest> requests;
};

TEST(RecordSource, ReadsWhatPlainReadsRead) {
  for (unsigned seed = 0; seed < 24; ++seed) {
    Data d = random_data(seed, 300, 1 + seed % 3, seed % 2);
    RecordOptions options;
    options.coalesce = seed % 4 != 3;
    options.max_read = seed % 5 ? uint64_t{1} << (10 + seed % 12) : 0;
    std::set<uint64_t> checked;
    options.check = [&](const KeptTable& t, uint64_t sample, std::span<const std::byte> head) {
      const std::string expected =
          d.contents[t.file_of(sample)].substr(t.offset[sample] - t.head[sample], t.head[sample]);
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(head.data()), head.size()), expected);
      checked.insert(sample);
      return std::string();
    };
    const RecordSource source(d.storage, d.table, options);
    const auto reader = source.make_reader(ReaderKind::pread, 4);
    std::mt19937 random(seed);
    for (const size_t count : {size_t{1}, size_t{7}, size_t{300}}) {
      std::vector<uint64_t> samples(count);
      for (auto& s : samples) s = random() % 300;  // the same one may come twice
      Requests r(source, samples);
      reader->read(r.requests);
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(r.requests[i].error, 0) << r.requests[i].why;
        ASSERT_EQ(r.memory[i], d.bytes_of(samples[i]));
        if (d.table.head_of(samples[i]) > 0) {
          EXPECT_TRUE(checked.count(samples[i])) << samples[i];
        }
      }
    }
    reader->read({});
  }
}

TEST(RecordSource, SharesItsTableWithTheNode) {
  const Data d = random_data(1, 300, 3, true);
  const RecordSource first(d.storage, d.table, {}), second(d.storage, d.table, {});
  Data other = random_data(1, 300, 3, true);
  other.table.head[7] ^= 1;
  const RecordSource different(d.storage, other.table, {});
  const auto file = first.shareable()->share();
  ASSERT_TRUE(file) << file.error().what();
  ASSERT_TRUE(second.shareable()->adopt(file.value()));
  EXPECT_FALSE(different.shareable()->adopt(file.value()));
  for (const RecordSource* source : {&first, &second}) {
    EXPECT_TRUE(source->shareable()->is_shared());
    const KeptTable& kept = source->table();
    EXPECT_TRUE(std::ranges::equal(kept.file, d.table.file));
    EXPECT_TRUE(std::ranges::equal(kept.offset, d.table.offset));
    EXPECT_TRUE(std::ranges::equal(source->sizes(), d.table.length));
    EXPECT_TRUE(std::ranges::equal(source->labels(), d.table.label));
    EXPECT_TRUE(std::ranges::equal(kept.head, d.table.head));
    // The order of the storage lies in the block too.
    std::vector<uint64_t> around;
    source->around(42, around);
    std::vector<uint64_t> same;
    different.around(42, same);
    EXPECT_EQ(around, same);
    EXPECT_FALSE(around.empty());
  }
}

TEST(RecordSource, LocatesTheFieldsOfItsRecords) {
  const auto storage =
      std::make_shared<MemoryStorage>(std::vector<std::string>{random_bytes(10240, 3)});
  const RecordSource source(storage, members_table(), {});
  ASSERT_EQ(source.fields(), 2u);
  std::vector<FieldBytes> fields(2);
  const auto at = [&](size_t field) {
    return std::string(reinterpret_cast<const char*>(fields[field].bytes.data()),
                       fields[field].bytes.size());
  };
  Requests r(source, {0, 1});
  source.make_reader(ReaderKind::pread, 1)->read(r.requests);
  ASSERT_TRUE(source.locate(0, r.requests[0].into, fields));
  EXPECT_EQ(at(0), storage->content().substr(512 + 1024, 6));
  EXPECT_EQ(at(1), storage->content().substr(512, 300));
  ASSERT_TRUE(source.locate(1, r.requests[1].into, fields));
  EXPECT_FALSE(fields[0].present);
  EXPECT_TRUE(fields[1].present);
  EXPECT_EQ(at(1), storage->content().substr(2560, 4));
  const auto cut = source.locate(0, r.requests[0].into.first(5), fields);
  ASSERT_FALSE(cut);
  EXPECT_EQ(cut.error().kind(), ErrorKind::corruption);

  RecordTable other = members_table();
  other.part_length[1] = 299;
  EXPECT_NE(RecordSource(storage, other, {}).fingerprint(), source.fingerprint());
  other.part_length[1] = 1031;
  EXPECT_THROW(RecordSource(storage, other, {}), Error);
  other.part_length.pop_back();
  EXPECT_THROW(RecordSource(storage, other, {}), Error);
}

class RealRecords : public testing::TestWithParam<ReaderKind> {};

TEST_P(RealRecords, AreReadFromRealFiles) {
  const TemporaryFolder folder;
  for (const Direct direct : {Direct::never, Direct::automatic, Direct::always}) {
    Data d = random_data(9, 500, 3, true);
    std::vector<std::string> paths;
    for (size_t f = 0; f < 3; ++f) paths.push_back(folder.write(std::to_string(f), d.contents[f]));
    const RecordSource source(open_files(paths, direct), d.table, {});
    const auto reader = source.make_reader(GetParam(), 8);
    std::vector<uint64_t> samples(500);
    std::iota(samples.begin(), samples.end(), 0u);
    Requests r(source, samples);
    for (int again = 0; again < 3; ++again) {
      reader->read(r.requests);
      for (size_t i = 0; i < samples.size(); ++i) {
        ASSERT_EQ(r.requests[i].error, 0) << r.requests[i].why;
        ASSERT_EQ(r.memory[i], d.bytes_of(i));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, RealRecords, testing::ValuesIn(reader_kinds()));

// n records of `size` bytes, `gap` apart, in one file.
Data regular(size_t n, uint64_t size, uint64_t gap) {
  Data d;
  d.contents = {random_bytes(n * (size + gap), 1)};
  d.storage = std::make_shared<MemoryStorage>(d.contents);
  d.table.files.assign(d.storage->files().begin(), d.storage->files().end());
  for (size_t i = 0; i < n; ++i) {
    d.table.offset.push_back(i * (size + gap));
    d.table.length.push_back(size);
    d.table.label.push_back(0);
  }
  return d;
}

TEST(RecordSource, ReadsNeighboursTogether) {
  const Data d = regular(1000, 3000, 100);
  std::vector<uint64_t> all(1000), far;
  std::iota(all.begin(), all.end(), 0u);
  std::shuffle(all.begin(), all.end(), std::mt19937(1));
  RecordOptions options;
  {
    const RecordSource source(d.storage, d.table, options);
    const uint64_t before = d.storage->ranges, bytes = d.storage->bytes;
    Requests r(source, all);
    source.make_reader(ReaderKind::pread, 1)->read(r.requests);
    EXPECT_LT(d.storage->ranges - before, 10u);  // 3.1 MB
    EXPECT_LT(d.storage->bytes - bytes, 3'200'000u);
  }
  options.coalesce = false;
  {
    const RecordSource source(d.storage, d.table, options);
    const uint64_t before = d.storage->ranges, bytes = d.storage->bytes;
    Requests r(source, all);
    source.make_reader(ReaderKind::pread, 1)->read(r.requests);
    EXPECT_EQ(d.storage->ranges - before, 1000u);
    EXPECT_EQ(d.storage->bytes - bytes, 3'000'000u);
    EXPECT_EQ(source.batch_bytes(), 0u);
    std::vector<uint64_t> out;
    source.around(500, out);
    EXPECT_TRUE(out.empty());
  }
}

TEST(RecordSource, TellsWhatLiesAround) {
  Data d = regular(1000, 3000, 100);
  // Ids in another order than places, in two runs with a hole of 4 MB between them.
  std::vector<uint64_t> order(1000);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), std::mt19937(2));
  d.contents[0] += std::string(4 << 20, 'x');
  d.storage = std::make_shared<MemoryStorage>(d.contents);
  for (size_t i = 0; i < 1000; ++i) {
    d.table.offset[i] = order[i] * 3100 + (order[i] < 500 ? 0 : 4 << 20);
  }
  const RecordSource source(d.storage, d.table, {});
  EXPECT_GE(source.batch_bytes(), 64u << 10);
  for (uint64_t sample = 0; sample < 1000; sample += 37) {
    std::vector<uint64_t> out;
    source.around(sample, out);
    EXPECT_GT(out.size(), 5u);
    EXPECT_LE((out.size() + 1) * 3100, source.batch_bytes() + 3100);
    std::vector<uint64_t> places{order[sample]};
    for (const uint64_t s : out) {
      EXPECT_NE(s, sample);
      EXPECT_EQ(order[s] < 500, order[sample] < 500);
      places.push_back(order[s]);
    }
    std::sort(places.begin(), places.end());
    for (size_t i = 1; i < places.size(); ++i) EXPECT_EQ(places[i], places[i - 1] + 1);
  }
  std::vector<uint64_t> first;
  RecordOptions options;
  options.max_read = 20'000;
  const RecordSource small(d.storage, d.table, options);
  small.around(7, first);
  EXPECT_LE((first.size() + 1) * 3100, 20'000u + 3100);
}

TEST(RecordSource, LooksAtFewNeighboursHoweverSmall) {
  for (const uint64_t size : {0u, 1u}) {
    const Data d = regular(20'000, size, 0);
    const RecordSource source(d.storage, d.table, {});
    std::vector<uint64_t> out{77};
    source.around(10'000, out);
    EXPECT_EQ(out.size(), 1025u);
    EXPECT_EQ(out[0], 77u);
    EXPECT_EQ(*std::min_element(out.begin() + 1, out.end()), 10'000u - 512);
  }
}

TEST(RecordSource, StaysWithinOneFile) {
  Data d = regular(10, 100, 0);
  d.contents.push_back(d.contents[0]);
  d.storage = std::make_shared<MemoryStorage>(d.contents);
  d.table.file = {0, 0, 0, 0, 0, 1, 1, 1, 1, 1};
  const RecordSource source(d.storage, d.table, {});
  std::vector<uint64_t> out;
  source.around(4, out);
  std::sort(out.begin(), out.end());
  EXPECT_EQ(out, (std::vector<uint64_t>{0, 1, 2, 3}));
}

TEST(RecordSource, GivesEachSampleItsOwnError) {
  const Data d = regular(100, 1000, 0);
  const RecordSource source(d.storage, d.table, {});
  // A bad place inside what is read together.
  d.storage->before = [](const RangeRead& r) {
    return r.offset <= 50'500 && 50'500 < r.offset + r.size() ? EIO : 0;
  };
  std::vector<uint64_t> all(100);
  std::iota(all.begin(), all.end(), 0u);
  Requests r(source, all);
  source.make_reader(ReaderKind::pread, 1)->read(r.requests);
  for (size_t i = 0; i < 100; ++i) {
    EXPECT_EQ(r.requests[i].error, i == 50 ? EIO : 0) << i;
    if (i != 50) {
      EXPECT_EQ(r.memory[i], d.bytes_of(i));
    }
  }
}

TEST(RecordSource, RefusesBytesBehindAWrongHead) {
  Data d = regular(100, 1000, 24);
  for (auto& offset : d.table.offset) offset += 16;
  d.table.head.assign(100, 16);
  RecordOptions options;
  options.check = [](const KeptTable&, uint64_t sample, std::span<const std::byte> head) {
    EXPECT_EQ(head.size(), 16u);
    return sample % 10 == 3 ? "page " + std::to_string(sample) + " is another one" : std::string();
  };
  for (const bool together : {true, false}) {
    options.coalesce = together;
    const RecordSource source(d.storage, d.table, options);
    std::vector<uint64_t> all(100);
    std::iota(all.begin(), all.end(), 0u);
    Requests r(source, all);
    source.make_reader(ReaderKind::pread, 1)->read(r.requests);
    for (size_t i = 0; i < 100; ++i) {
      EXPECT_EQ(r.requests[i].error, i % 10 == 3 ? kWrongBytes : 0);
      if (i == 13) {
        EXPECT_EQ(r.requests[i].why, "page 13 is another one");
      }
    }
  }
}

TEST(RecordSource, RefusesBytesOfAFileThatChanges) {
  const Data d = regular(20, 1000, 0);
  const RecordSource source(d.storage, d.table, {});
  const auto reader = source.make_reader(ReaderKind::pread, 1);
  Requests r(source, {1, 5, 19});
  reader->read(r.requests);
  EXPECT_EQ(r.requests[0].error, 0);
  d.storage->change = "it was written to since it was opened";
  reader->read(r.requests);
  for (const ReadRequest& request : r.requests) {
    EXPECT_EQ(request.error, kWrongBytes);
    EXPECT_THAT(request.why, HasSubstr("memory/0: it was written to"));
  }
  d.storage->change.clear();
  reader->read(r.requests);
  for (const ReadRequest& request : r.requests) {
    EXPECT_EQ(request.error, 0);
    EXPECT_EQ(request.why, "");
  }
}

TEST(RecordSource, AFileThatWasTouchedBeforeAnythingIsKnownOfItIsRefused) {
  const Data d = regular(20, 1000, 0);
  const RecordSource source(d.storage, d.table, {});
  const auto reader = source.make_reader(ReaderKind::pread, 1);
  Requests r(source, {1, 5, 19});
  d.storage->change = "it was written to since it was opened";
  d.storage->time = 7;
  reader->read(r.requests);
  EXPECT_EQ(r.requests[0].error, kWrongBytes);
  const std::string& content = d.storage->content();
  source.sums().agrees(3, std::as_bytes(std::span(content).subspan(d.table.offset[3], 1000)));
  reader->read(r.requests);
  EXPECT_EQ(r.requests[0].error, 0);
}

TEST(RecordSource, AFileThatWasOnlyTouchedIsTheSame) {
  const Data d = regular(20, 1000, 0);
  bool same = true;
  RecordOptions options;
  options.same = [&same](RangeReader&, const KeptTable&, uint32_t) { return same; };
  const RecordSource source(d.storage, d.table, options);
  const auto reader = source.make_reader(ReaderKind::pread, 1);
  Requests r(source, {1, 5, 19});
  const auto errors = [&] {
    reader->read(r.requests);
    return std::set<int>{r.requests[0].error, r.requests[1].error, r.requests[2].error};
  };
  EXPECT_EQ(errors(), std::set<int>{0});
  d.storage->change = "it was written to since it was opened";
  d.storage->time = 7;
  EXPECT_EQ(errors(), std::set<int>{0});
  // The content of a sample that was read before decides; what was found out is not asked again.
  d.storage->content()[d.table.offset[5] + 10] ^= 1;
  EXPECT_EQ(errors(), std::set<int>{0});
  d.storage->time = 8;
  EXPECT_EQ(errors(), std::set<int>{kWrongBytes});
  d.storage->content()[d.table.offset[5] + 10] ^= 1;
  EXPECT_EQ(errors(), std::set<int>{0});
  // And so does what the format says of itself.
  d.storage->time = 9;
  same = false;
  EXPECT_EQ(errors(), std::set<int>{kWrongBytes});
}

TEST(RecordSource, AFileThatGrewIsTheSameWhereItsFormatSaysSo) {
  const Data d = regular(20, 1000, 0);
  bool same = true;
  RecordOptions options;
  options.same = [&same](RangeReader&, const KeptTable&, uint32_t) { return same; };
  const RecordSource source(d.storage, d.table, options);
  const RecordSource other(d.storage, d.table, {});
  d.storage->change = "its size changed";
  d.storage->time = 7;
  d.storage->grown = 1;
  Requests r(source, {1});
  const auto error_of = [&r](const RecordSource& s) {
    s.make_reader(ReaderKind::pread, 1)->read(r.requests);
    return r.requests[0].error;
  };
  EXPECT_EQ(error_of(source), 0);
  EXPECT_EQ(error_of(other), kWrongBytes);
  d.storage->grown = 2;  // within the same tick of the clock
  same = false;
  EXPECT_EQ(error_of(source), kWrongBytes);
}

TEST(RecordSource, RefusesTablesThatAreNotOfTheseFiles) {
  const auto kind_of = [](const std::function<void(RecordTable&)>& bend) {
    Data d = regular(5, 100, 0);
    bend(d.table);
    try {
      const RecordSource source(d.storage, d.table, {});
    } catch (const Error& e) {
      return e.kind();
    }
    return ErrorKind::bug;
  };
  EXPECT_EQ(kind_of([](RecordTable& t) { t.offset[4] = 401; }), ErrorKind::corruption);
  EXPECT_EQ(kind_of([](RecordTable& t) { t.offset[4] = ~uint64_t{0}; }), ErrorKind::corruption);
  EXPECT_EQ(kind_of([](RecordTable& t) { t.length[4] = ~uint64_t{0}; }), ErrorKind::corruption);
  EXPECT_EQ(kind_of([](RecordTable& t) { t.file = {0, 0, 0, 0, 1}; }), ErrorKind::corruption);
  EXPECT_EQ(kind_of([](RecordTable& t) { t.head.assign(5, 1); }), ErrorKind::corruption);
  EXPECT_EQ(kind_of([](RecordTable& t) { t.label.pop_back(); }), ErrorKind::usage);
  EXPECT_EQ(kind_of([](RecordTable& t) { t.offset.pop_back(); }), ErrorKind::usage);
  EXPECT_EQ(kind_of([](RecordTable& t) { t.file = {0}; }), ErrorKind::usage);
  EXPECT_EQ(kind_of([](RecordTable& t) { t.head = {0}; }), ErrorKind::usage);
}

TEST(RecordSource, NamesSamplesAndDataSets) {
  Data d = regular(5, 100, 0);
  RecordOptions options;
  options.name = [](const KeptTable&, uint64_t s) { return "key" + std::to_string(s); };
  const RecordSource source(d.storage, d.table, options);
  EXPECT_EQ(source.describe(3), "memory/0 \"key3\" at offset 300");
  EXPECT_EQ(source.total_bytes(), 500u);
  std::set<uint64_t> prints{source.fingerprint()};
  const auto another = [&](const std::function<void(RecordTable&)>& bend) {
    RecordTable t = d.table;
    bend(t);
    prints.insert(RecordSource(d.storage, t, {}).fingerprint());
  };
  another([](RecordTable& t) { t.label[1] = 1; });
  another([](RecordTable& t) { t.offset[1] = 99; });
  another([](RecordTable& t) { t.length[1] = 99; });
  another([](RecordTable& t) { t.stamp = "x"; });
  another([](RecordTable& t) { t.kind = "x"; });
  another([](RecordTable& t) { t.files[0].path = "memory/1"; });
  EXPECT_EQ(prints.size(), 7u);
  another([](RecordTable& t) { t.files[0].path = "elsewhere/0"; });
  another([](RecordTable& t) { t.files[0].mtime_ns = 5; });
  another([](RecordTable& t) { t.stamp += " rules 2"; });
  EXPECT_EQ(prints.size(), 7u);
  another([](RecordTable& t) { t.stamp += " found x"; });
  EXPECT_EQ(prints.size(), 8u);
  another([](RecordTable& t) { t.stamp += " rules 12 found x"; });
  EXPECT_EQ(prints.size(), 8u);
}

TEST(RecordSource, BoundsWhatOneCallHolds) {
  // More than the 16 MiB that one call may hold.
  const Data large = regular(20, 1 << 20, 0), scattered = regular(60, 1000, 400'000);
  for (const Data* d : {&large, &scattered}) {
    const RecordSource source(d->storage, d->table, {});
    // Storage on which it pays to read through a megabyte.
    for (int i = 1; i < 100; ++i) source.cost().record(1, i % 2 ? 3e6 : 3e3, 30e-3);
    ASSERT_GE(source.batch_bytes(), 4u << 20);
    std::vector<uint64_t> all(d->table.size());
    std::iota(all.begin(), all.end(), 0u);
    Requests r(source, all);
    source.make_reader(ReaderKind::pread, 1)->read(r.requests);
    for (size_t i = 0; i < all.size(); ++i) ASSERT_EQ(r.memory[i], d->bytes_of(i));
    EXPECT_LE(d->storage->most_at_once, 16u << 20);
    EXPECT_LT(d->storage->ranges, 50u);
  }
}

}  // namespace
}  // namespace nostall::records
