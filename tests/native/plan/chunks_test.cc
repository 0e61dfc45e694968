// What a node keeps of each chunk, against a walk through the job's epochs.
#include "plan/chunks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

namespace nostall::plan {
namespace {

constexpr uint64_t kAll = ~uint64_t{0} / 2;  // of a room: never full

struct Shape {
  uint64_t samples, per_rank, resident;
  uint32_t world, reuse, together, order_world;
};

JobSpec job(const Shape& shape) {
  JobSpec spec;
  spec.samples = shape.samples;
  spec.global_batch = shape.per_rank * shape.world;
  spec.world = shape.world;
  spec.order_world = shape.order_world;
  spec.epochs = 2 * shape.reuse;
  spec.seed = 7;
  spec.order = OrderKind::sub_batch;
  spec.sub_batches = {shape.reuse, shape.resident, shape.together};
  return spec;
}

std::vector<uint64_t> sizes_of(uint64_t samples) {
  std::vector<uint64_t> sizes;
  for (uint64_t s = 0; s < samples; ++s) sizes.push_back(10 + s % 7);
  return sizes;
}

bool nowhere(SampleId) { return false; }

// By chunk: the node's samples in the order of their first use, and how often it uses them.
struct Uses {
  std::vector<SampleId> first;
  std::map<SampleId, uint32_t> count;
};
std::map<uint64_t, Uses> walk(const JobSpec& spec, const Chunks& chunks, uint32_t first_rank,
                              uint32_t ranks) {
  std::map<uint64_t, Uses> found;
  uint64_t last = 0;
  for (uint32_t epoch = 0; epoch < spec.epochs; ++epoch) {
    const std::vector<SampleId> order = epoch_order(spec, epoch);
    for (uint64_t h = 0; h < batches_per_epoch(spec); ++h) {
      const uint64_t number = chunks.number(epoch, h);
      EXPECT_GE(number, last);
      EXPECT_LE(number, last + 1);
      last = number;
      if (!chunks.in_chunk(h)) continue;
      std::vector<uint64_t> positions;
      for (uint32_t r = first_rank; r < first_rank + ranks; ++r) {
        for (const uint64_t p : batch_positions(spec, r, spec.global_batch)) positions.push_back(p);
      }
      std::sort(positions.begin(), positions.end());
      Uses& uses = found[number];
      for (const uint64_t p : positions) {
        const SampleId sample = order[h * spec.global_batch + p];
        if (uses.count[sample]++ == 0) uses.first.push_back(sample);
      }
    }
  }
  return found;
}

TEST(Chunks, KeepWhatANodeUsesAgain) {
  for (const Shape& shape :
       {Shape{96, 2, 4, 4, 2, 1, 0}, Shape{101, 2, 4, 4, 3, 2, 0}, Shape{101, 2, 5, 4, 2, 4, 0},
        Shape{97, 3, 2, 2, 4, 2, 0}, Shape{101, 4, 3, 2, 2, 4, 4}, Shape{24, 1, 1, 4, 2, 1, 0}}) {
    const JobSpec spec = job(shape);
    validate(spec);
    const std::vector<uint64_t> sizes = sizes_of(spec.samples);
    const uint32_t ranks = shape.world / 2;
    for (const uint32_t first : {0u, ranks}) {
      const Chunks chunks(spec, first, ranks, sizes);
      for (const auto& [number, uses] : walk(spec, chunks, first, ranks)) {
        const KeptChunk kept = chunks.keep(number, {kAll, kAll}, nowhere);
        std::vector<SampleId> expected, filled;
        for (const SampleId s : uses.first) {
          if (uses.count.at(s) > 1) expected.push_back(s);
        }
        uint64_t end = 0;
        for (const uint32_t place : kept.fill) {
          filled.push_back(kept.samples[place]);
          EXPECT_EQ(kept.offsets[place], end);
          end += sizes[kept.samples[place]];
        }
        EXPECT_EQ(filled, expected) << "chunk " << number;
        EXPECT_TRUE(std::is_sorted(kept.samples.begin(), kept.samples.end()));
        for (uint64_t i = 0; i < kept.samples.size(); ++i) {
          EXPECT_EQ(kept.find(kept.samples[i]), i);
        }
        EXPECT_FALSE(kept.find(spec.samples));
      }
    }
  }
}

TEST(Chunks, AHalfHasRoomForTheLargest) {
  const JobSpec spec = job({128, 2, 4, 2, 2, 1, 0});
  const std::vector<uint64_t> sizes = sizes_of(spec.samples);
  const Chunks chunks(spec, 0, 2, sizes);
  const HalfShape half = chunks.shape(700, 0);
  EXPECT_EQ(half.places, 16);
  uint64_t largest = 0;
  for (uint64_t number = 0; number < 16; ++number) {
    uint64_t bytes = 0;
    const KeptChunk kept = chunks.keep(number, half, nowhere);
    EXPECT_EQ(kept.samples.size(), 16);
    for (const SampleId s : kept.samples) bytes += sizes[s];
    largest = std::max(largest, bytes);
  }
  EXPECT_EQ(half.bytes, largest);
}

TEST(Chunks, KeepNoMoreThanThereIsRoomFor) {
  const JobSpec spec = job({128, 2, 4, 2, 2, 1, 0});
  const std::vector<uint64_t> sizes(spec.samples, 10);
  const Chunks chunks(spec, 0, 2, sizes);
  // Of 160 bytes a chunk: half as much saves more than the same memory would for the whole job.
  const HalfShape half = chunks.shape(160, 0);
  EXPECT_EQ(half.bytes, 80);
  EXPECT_EQ(chunks.keep(3, half, nowhere).samples.size(), 8);
  EXPECT_EQ(chunks.keep(3, {kAll, 5}, nowhere).samples.size(), 5);
  const KeptChunk all = chunks.keep(3, {kAll, kAll}, nowhere);
  const auto even = [](SampleId s) { return s % 2 == 0; };
  const KeptChunk odd = chunks.keep(3, {kAll, kAll}, even);
  std::vector<SampleId> expected = all.samples;
  std::erase_if(expected, even);
  EXPECT_EQ(odd.samples, expected);
}

TEST(Chunks, TheWholeJobHasTheMemoryWhereThatSparesMore) {
  // One chunk is the whole round: halves hold at most what the tier could hold for ever.
  const JobSpec spec = job({128, 2, 32, 2, 2, 1, 0});
  const std::vector<uint64_t> sizes(spec.samples, 10);
  EXPECT_EQ(Chunks(spec, 0, 2, sizes).shape(1000, 0).places, 0);
  JobSpec plain = spec;
  plain.order = OrderKind::torch;
  EXPECT_FALSE(has_chunks(plain));
  EXPECT_TRUE(has_chunks(spec));
  plain = spec;
  plain.sub_batches.reuse = 1;
  EXPECT_FALSE(has_chunks(plain));
  plain = spec;
  plain.global_batch = 256;  // no whole batch
  EXPECT_FALSE(has_chunks(plain));
}

}  // namespace
}  // namespace nostall::plan
