// Records made of parts and columns; tables that do not go together.
#include "source/composite.h"

#include <gtest/gtest.h>

#include <cstring>

namespace nostall::source {
namespace {

constexpr uint32_t kN = kNoPart;

// Part i is i + 1 bytes of value i; reads of `broken` fail.
class Parts : public Source {
 public:
  uint64_t size() const override { return sizes_.size(); }
  std::span<const uint64_t> sizes() const override { return sizes_; }
  std::span<const int64_t> labels() const override { return labels_; }
  uint64_t total_bytes() const override { return 21; }
  uint64_t fingerprint() const override { return 7; }
  std::string describe(uint64_t part) const override { return "part " + std::to_string(part); }
  uint64_t batch_bytes() const override { return 100; }
  void around(uint64_t part, std::vector<uint64_t>& out) const override {
    if (part + 1 < size()) out.push_back(part + 1);
  }
  std::unique_ptr<Reader> make_reader(ReaderKind, unsigned) const override {
    return std::make_unique<PartReader>(*this);
  }
  uint64_t broken = 100;
  mutable size_t most_at_once = 0;

 private:
  class PartReader : public Reader {
   public:
    explicit PartReader(const Parts& parts) : parts_(parts) {}
    void read(std::span<ReadRequest> requests) override {
      parts_.most_at_once = std::max(parts_.most_at_once, requests.size());
      for (ReadRequest& r : requests) {
        EXPECT_EQ(r.into.size(), r.sample + 1);
        std::memset(r.into.data(), static_cast<int>(r.sample), r.into.size());
        r.error = r.sample == parts_.broken ? ENOENT : 0;
      }
    }
    std::string_view name() const override { return "parts"; }

   private:
    const Parts& parts_;
  };
  std::vector<uint64_t> sizes_{1, 2, 3, 4, 5, 6};
  std::vector<int64_t> labels_{0, 0, 0, 0, 0, 0};
};

Column texts() {
  return {{std::byte{'a'}, std::byte{'b'}, std::byte{'c'}}, 0, {0, 1, 1, 3}, {1, 0, 1}};
}

CompositeSource::Table table_of(std::shared_ptr<const Source> parts) {
  const std::vector<std::byte> numbers{std::byte{10}, std::byte{11}, std::byte{12}};
  return {3,
          {"image", "mask", "text", "number"},
          std::move(parts),
          {0, 1, 2, kN, 4, 3},
          {texts(), {numbers, 1, {}, {}}},
          {}};
}

std::vector<std::byte> record_of(const Source& source, uint64_t sample) {
  std::vector<std::byte> record(source.sizes()[sample]);
  ReadRequest request{sample, record, 0};
  source.make_reader(ReaderKind::automatic, 4)->read({&request, 1});
  EXPECT_EQ(request.error, 0);
  return record;
}

TEST(Composite, FieldsLieWhereTheRecordHasThem) {
  const CompositeSource source(table_of(std::make_shared<Parts>()));
  ASSERT_EQ(source.fields(), 4u);
  EXPECT_EQ(source.total_bytes(), 3u + 3 + 9);
  for (uint64_t s = 0; s < 3; ++s) {
    const auto record = record_of(source, s);
    std::vector<FieldBytes> out(4);
    ASSERT_TRUE(source.locate(s, record, out));
    const std::vector<uint32_t> parts{0, 1, 2, kN, 4, 3};
    for (size_t f = 0; f < 2; ++f) {
      const uint32_t part = parts[s * 2 + f];
      EXPECT_EQ(out[f].present, part != kN);
      ASSERT_EQ(out[f].bytes.size(), part == kN ? 0 : part + 1);
      for (const std::byte b : out[f].bytes) EXPECT_EQ(b, std::byte(part));
    }
    EXPECT_EQ(out[2].present, s != 1);
    EXPECT_EQ(out[2].bytes.size(), (std::vector<size_t>{1, 0, 2}[s]));
    EXPECT_EQ(out[3].bytes[0], std::byte(10 + s));
  }
}

TEST(Composite, RecordsOfAnotherSizeAreAnError) {
  const CompositeSource source(table_of(std::make_shared<Parts>()));
  std::vector<FieldBytes> out(4);
  for (const size_t size : {0, 2, 4, 100}) {
    const std::vector<std::byte> record(size);
    const auto located = source.locate(0, record, out);
    ASSERT_FALSE(located);
    EXPECT_EQ(located.error().kind(), ErrorKind::corruption);
  }
}

TEST(Composite, PartsOfAllRequestsAreReadTogetherAndFailByName) {
  const auto parts = std::make_shared<Parts>();
  parts->broken = 4;
  const CompositeSource source(table_of(parts));
  std::vector<std::vector<std::byte>> records;
  std::vector<ReadRequest> requests;
  for (uint64_t s = 0; s < 3; ++s) records.emplace_back(source.sizes()[s]);
  for (uint64_t s = 0; s < 3; ++s) requests.push_back({s, records[s], 0});
  source.make_reader(ReaderKind::automatic, 4)->read(requests);
  EXPECT_EQ(parts->most_at_once, 5u);
  EXPECT_EQ(requests[0].error, 0);
  EXPECT_EQ(requests[2].error, ENOENT);
  EXPECT_EQ(requests[2].why, "part 4: No such file or directory");
  EXPECT_EQ(source.describe(2), "part 4");
}

TEST(Composite, ChosenFieldsAreAnotherRecord) {
  const auto parts = std::make_shared<Parts>();
  const CompositeSource source(table_of(parts));
  const std::vector<uint32_t> fields{1, 3};
  const auto chosen = source.select(fields);
  EXPECT_EQ(chosen->fields(), 2u);
  EXPECT_EQ(chosen->sizes()[0], 2u);
  EXPECT_EQ(chosen->sizes()[1], 0u);
  EXPECT_NE(chosen->fingerprint(), source.fingerprint());
  std::vector<FieldBytes> out(2);
  ASSERT_TRUE(chosen->locate(0, record_of(*chosen, 0), out));
  EXPECT_EQ(out[0].bytes.size(), 2u);
  EXPECT_EQ(out[1].bytes[0], std::byte{10});
  // A choice of a choice counts in its fields.
  const std::vector<uint32_t> last{1};
  const auto columns = chosen->select(last);
  EXPECT_EQ(columns->total_bytes(), 0u);
  EXPECT_EQ(columns->batch_bytes(), 0u);
  std::vector<FieldBytes> one(1);
  ASSERT_TRUE(columns->locate(2, record_of(*columns, 2), one));
  EXPECT_EQ(one[0].bytes[0], std::byte{12});
  const std::vector<uint32_t> twice{1, 1}, beyond{4};
  EXPECT_THROW(source.select(twice), Error);
  EXPECT_THROW(source.select(beyond), Error);
}

TEST(Composite, NeighboursArePartsNeighbours) {
  const CompositeSource source(table_of(std::make_shared<Parts>()));
  EXPECT_EQ(source.batch_bytes(), 100u);
  std::vector<uint64_t> near;
  source.around(0, near);  // parts 0 and 1; behind them lies part 2 of sample 1
  EXPECT_EQ(near, std::vector<uint64_t>{1});
}

TEST(Composite, TablesThatDoNotGoTogetherAreRefused) {
  const auto refused = [](const auto& spoil) {
    CompositeSource::Table table = table_of(std::make_shared<Parts>());
    spoil(table);
    EXPECT_THROW(CompositeSource{std::move(table)}, Error);
  };
  refused([](auto& t) { t.parts.pop_back(); });
  refused([](auto& t) { t.parts[0] = 6; });
  refused([](auto& t) { t.source = nullptr; });
  refused([](auto& t) { t.names = {"image"}; });
  refused([](auto& t) { t.labels = {1}; });
  refused([](auto& t) { t.columns[0].ends = {0, 1, 3}; });
  refused([](auto& t) { t.columns[0].ends = {0, 2, 1, 3}; });
  refused([](auto& t) { t.columns[0].ends = {0, 1, 1, 4}; });
  refused([](auto& t) { t.columns[0].present = {1}; });
  refused([](auto& t) { t.columns[1].width = 2; });
}

TEST(Sources, HaveARecordAndALabel) {
  const Parts parts;
  std::vector<FieldBytes> out(parts.fields());
  const std::vector<std::byte> record(3);
  ASSERT_TRUE(parts.locate(2, record, out));
  EXPECT_EQ(out[0].bytes.data(), record.data());
  EXPECT_EQ(out[1].bytes.size(), sizeof(int64_t));
}

}  // namespace
}  // namespace nostall::source
