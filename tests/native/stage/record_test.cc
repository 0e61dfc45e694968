// What a consumer was handed, read by another thread while batches are added.
#include "stage/record.h"

#include <gtest/gtest.h>

#include <thread>

namespace nostall::stage {
namespace {

constexpr uint64_t kSamples = 3;
constexpr size_t kKept = 50;

Batch batch_of(uint64_t number) {
  Batch batch;
  batch.position.batch = number;
  batch.samples.assign(kSamples, number);
  batch.origins[0].samples = kSamples;
  batch.substitutions.push_back({});
  return batch;
}

TEST(Record, IsOfOneMomentWhileBatchesAreAdded) {
  constexpr uint64_t kBatches = 5'000;
  Record record(kKept);
  record.begin(4);
  std::jthread consumer([&] {
    for (uint64_t i = 0; i < kBatches; ++i) record.add(batch_of(i), 0.5, 0.25);
  });
  uint64_t before = 0;
  while (before < kBatches) {
    const Taken taken = record.taken();
    ASSERT_GE(taken.batches, before);
    ASSERT_EQ(taken.samples, kSamples * taken.batches);
    ASSERT_EQ(taken.origins[0].samples, taken.samples);
    ASSERT_EQ(taken.substituted.size(), taken.batches);
    const Record::Columns columns = record.columns();
    ASSERT_LE(columns[0].size(), 2 * kKept);
    for (const auto& column : columns) ASSERT_EQ(column.size(), columns[0].size());
    for (size_t i = 1; i < columns[1].size(); ++i) ASSERT_EQ(columns[1][i], columns[1][i - 1] + 1);
    before = taken.batches;
  }
  EXPECT_EQ(record.taken().epoch, 4u);
}

}  // namespace
}  // namespace nostall::stage
