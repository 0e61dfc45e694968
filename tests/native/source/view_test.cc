// Views: which samples, from which part, read together, with the checksums of the parts.
#include "source/view.h"

#include <gtest/gtest.h>

#include <map>

namespace nostall::source {
namespace {

// Sample i has i + 1 bytes, all of them `mark` + i; reads are counted, neighbours are i - 1 and i + 1.
class Marked : public Source {
 public:
  Marked(uint64_t samples, uint8_t mark) : mark_(mark) {
    for (uint64_t i = 0; i < samples; ++i) {
      sizes_.push_back(i + 1);
      labels_.push_back(static_cast<int64_t>(i % 3));
    }
  }
  uint64_t size() const override { return sizes_.size(); }
  std::span<const uint64_t> sizes() const override { return sizes_; }
  std::span<const int64_t> labels() const override { return labels_; }
  uint64_t total_bytes() const override { return size() * (size() + 1) / 2; }
  uint64_t fingerprint() const override { return mark_; }
  uint64_t stamp() const override { return stamp_; }
  std::string describe(uint64_t sample) const override {
    return std::to_string(mark_) + "/" + std::to_string(sample);
  }
  uint64_t batch_bytes() const override { return mark_; }
  void around(uint64_t sample, std::vector<uint64_t>& out) const override {
    if (sample > 0) out.push_back(sample - 1);
    if (sample + 1 < size()) out.push_back(sample + 1);
  }
  std::unique_ptr<Reader> make_reader(ReaderKind, unsigned depth) const override {
    ++readers_;
    depth_ = depth;
    return std::make_unique<MarkedReader>(*this);
  }

  uint64_t stamp_ = 1;
  mutable unsigned readers_ = 0, depth_ = 0;
  mutable std::vector<std::vector<uint64_t>> reads_;

 private:
  class MarkedReader : public Reader {
   public:
    explicit MarkedReader(const Marked& of) : of_(of) {}
    std::string_view name() const override { return "marked"; }
    void read(std::span<ReadRequest> requests) override {
      std::vector<uint64_t>& read = of_.reads_.emplace_back();
      for (ReadRequest& r : requests) {
        read.push_back(r.sample);
        if (r.sample == 7) {
          r.error = kWrongBytes;
          r.why = "it is the seventh";
        }
        std::fill(r.into.begin(), r.into.end(), std::byte(of_.mark_ + r.sample));
      }
    }

   private:
    const Marked& of_;
  };
  uint8_t mark_;
  std::vector<uint64_t> sizes_;
  std::vector<int64_t> labels_;
};

class Views : public testing::Test {
 protected:
  ViewSource view(std::optional<std::vector<uint64_t>> numbers, int64_t offset = 0) {
    std::optional<std::span<const uint64_t>> chosen;
    if (numbers) chosen = *numbers;
    return {{{first_, 0}, {second_, offset}}, chosen};
  }
  std::shared_ptr<Marked> first_ = std::make_shared<Marked>(10, 100);
  std::shared_ptr<Marked> second_ = std::make_shared<Marked>(5, 200);
};

TEST_F(Views, SamplesLieEndToEnd) {
  const ViewSource all = view(std::nullopt, 3), some = view({{12, 3, 3, 9, 10}});
  ASSERT_EQ(all.size(), 15u);
  EXPECT_EQ(all.total_bytes(), 55u + 15u);
  EXPECT_EQ(all.sizes()[9], 10u);
  EXPECT_EQ(all.sizes()[10], 1u);
  EXPECT_EQ(all.labels()[9], 0);
  EXPECT_EQ(all.labels()[11], 4);
  EXPECT_EQ(all.describe(11), "200/1");
  ASSERT_EQ(some.size(), 5u);
  const std::vector<uint64_t> sizes(some.sizes().begin(), some.sizes().end());
  EXPECT_EQ(sizes, (std::vector<uint64_t>{3, 4, 4, 10, 1}));
  EXPECT_EQ(some.describe(0), "200/2");
  EXPECT_EQ(some.origin(4), (std::pair<size_t, uint64_t>{1, 0}));
  EXPECT_EQ(some.batch_bytes(), 200u);
}

TEST_F(Views, APartIsAskedOnceForAllItsSamples) {
  const ViewSource some = view({{12, 3, 7, 9, 10}});
  const auto reader = some.make_reader(ReaderKind::automatic, 9);
  std::vector<std::vector<std::byte>> bytes;
  std::vector<ReadRequest> requests;
  for (uint64_t s = 0; s < some.size(); ++s) {
    bytes.emplace_back(some.sizes()[s]);
    requests.push_back({s, bytes.back()});
  }
  for (int turn = 0; turn < 2; ++turn) {
    first_->reads_.clear(), second_->reads_.clear();
    reader->read(requests);
    EXPECT_EQ(first_->reads_, (std::vector<std::vector<uint64_t>>{{3, 7, 9}}));
    EXPECT_EQ(second_->reads_, (std::vector<std::vector<uint64_t>>{{2, 0}}));
  }
  EXPECT_EQ(first_->readers_, 1u);
  EXPECT_EQ(second_->depth_, 9u);
  const std::vector<uint8_t> marks{202, 103, 107, 109, 200};
  for (size_t i = 0; i < marks.size(); ++i) {
    EXPECT_EQ(requests[i].sample, i);
    EXPECT_EQ(requests[i].error, i == 2 ? kWrongBytes : 0);
    EXPECT_EQ(bytes[i], std::vector<std::byte>(some.sizes()[i], std::byte(marks[i])));
  }
  EXPECT_EQ(read_error_text(requests[2]), "it is the seventh");
  // A part of which nothing is asked has no reader.
  const ViewSource one = view({{11}});
  ReadRequest request{0, bytes[0]};
  request.into = request.into.first(2);
  one.make_reader(ReaderKind::pread, 1)->read({&request, 1});
  EXPECT_EQ(first_->readers_, 1u);
}

TEST_F(Views, NeighboursAreThoseOfThePartThatAreShown) {
  const auto around = [](const ViewSource& view, uint64_t sample) {
    std::vector<uint64_t> near{99};
    view.around(sample, near);
    EXPECT_EQ(near.front(), 99u);
    near.erase(near.begin());
    return near;
  };
  const ViewSource rising = view({{2, 3, 5, 9, 10, 11}});
  EXPECT_EQ(around(rising, 0), std::vector<uint64_t>{1});  // 3, but not 1
  EXPECT_EQ(around(rising, 2), std::vector<uint64_t>{});
  EXPECT_EQ(around(rising, 3), std::vector<uint64_t>{});  // 10 is of the other part
  EXPECT_EQ(around(rising, 4), std::vector<uint64_t>{5});
  const ViewSource mixed = view({{11, 5, 4, 10, 6, 4}});
  EXPECT_EQ(around(mixed, 1), (std::vector<uint64_t>{2, 4}));
  EXPECT_EQ(around(mixed, 3), std::vector<uint64_t>{0});
  EXPECT_EQ(around(view(std::nullopt), 13), (std::vector<uint64_t>{12, 14}));
}

TEST_F(Views, ChecksumsAreThoseOfTheParts) {
  const ViewSource train = view({{12, 3}}), rest = view({{3, 4}});
  EXPECT_TRUE(train.sums().agrees(1, 77));
  EXPECT_EQ(first_->sums().of(3), 77u);
  EXPECT_EQ(rest.sums().of(0), 77u);
  EXPECT_FALSE(rest.sums().agrees(0, 78));
  second_->sums().agrees(2, 5);
  EXPECT_EQ(train.sums().known(), 2u);
  SampleSums learned(2);
  learned.agrees(1, 9);
  rest.sums().learn(learned);
  EXPECT_EQ(first_->sums().of(4), 9u);
  EXPECT_EQ(second_->sums().known(), 1u);
  first_->set_sums_file("beside/first.sums");
  EXPECT_EQ(train.sums_file_of(1), "beside/first.sums");
  EXPECT_EQ(train.sums_file_of(0), "");
}

TEST_F(Views, AnotherChoiceIsAnotherDataSet) {
  std::map<uint64_t, int> seen;
  ++seen[view(std::nullopt).fingerprint()];
  ++seen[view(std::nullopt, 1).fingerprint()];
  ++seen[view({{0, 1, 2}}).fingerprint()];
  ++seen[view({{0, 2, 1}}).fingerprint()];
  ++seen[view({{0, 1}}).fingerprint()];
  EXPECT_EQ(seen.size(), 5u);
  std::vector<uint64_t> all(15);
  for (uint64_t i = 0; i < all.size(); ++i) all[i] = i;
  EXPECT_EQ(view(all).fingerprint(), view(std::nullopt).fingerprint());
  const uint64_t stamp = view(all).stamp();
  second_->stamp_ = 2;
  EXPECT_NE(view(all).stamp(), stamp);
}

TEST_F(Views, RefusesWhatIsNotThere) {
  EXPECT_THROW(view({{0, 15}}), Error);
  EXPECT_THROW(view(std::vector<uint64_t>{}), Error);
}

}  // namespace
}  // namespace nostall::source
