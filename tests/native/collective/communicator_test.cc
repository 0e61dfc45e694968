// Collectives of ranks as threads: all sizes, algorithms and orders of arrival, and failures.
#include "collective/communicator.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <numeric>
#include <thread>

#include "../refuse.h"
#include "base/error.h"
#include "base/fnv.h"
#include "collective/algorithms.h"
#include "ranks.h"

namespace {
// What posix_fallocate gives in this thread for so many bytes; none: the system's answer.
thread_local std::function<int(off_t size)> room_for;
}  // namespace

// In place of the C library's.
extern "C" int posix_fallocate(int fd, off_t offset, off_t size) {
  if (const int error = room_for ? room_for(size) : 0) return error;
  return ::syscall(SYS_fallocate, fd, 0, offset, size) == 0 ? 0 : errno;
}

namespace nostall::collective {
namespace {

using testing::Delays;
using testing::kAll;
using testing::run_threads;

const Reducer& sum_of_ints() {
  static const Reducer reducer(Op::sum, DataType::int32);
  return reducer;
}

std::vector<int32_t> values_of(uint32_t rank, uint64_t count, int32_t salt = 0) {
  std::vector<int32_t> values(count);
  for (uint64_t i = 0; i < count; ++i) {
    values[i] = static_cast<int32_t>((i * 7 + 1) * (rank + 1)) + salt;
  }
  return values;
}

std::vector<int32_t> sum_over(uint32_t ranks, uint64_t count, int32_t salt = 0) {
  std::vector<int32_t> sum(count);
  for (uint32_t r = 0; r < ranks; ++r) {
    const auto values = values_of(r, count, salt);
    for (uint64_t i = 0; i < count; ++i) sum[i] += values[i];
  }
  return sum;
}

// Readers of a message that fits the window do not say what they have copied, so no slot comes back.
TEST(Communicator, AMessageThatGetsMemoryForItsFirstSegmentOnlyEndsOnAllRanks) {
  constexpr size_t kElement = 3 << 20;  // a segment each
  const Reducer left([](const void*, void*, uint64_t, void*) {}, nullptr, kElement, true);
  std::atomic<int> told{0};
  run_threads(2, [&](Communicator& c) {
    std::vector<int32_t> little = values_of(c.rank(), kElement / sizeof(int32_t));
    for (int i = 0; i < 2; ++i) {  // 3 MiB of the window of each of two steps
      c.allreduce(little.data(), little.data(), little.size(), sum_of_ints(),
                  {.algorithm = Algorithm::arrival_chain});
    }
    refuse({SYS_fallocate}, ENOSPC);
    std::vector<std::byte> data(2 * kElement);
    try {
      c.allreduce(data.data(), data.data(), 2, left, {.algorithm = Algorithm::arrival_chain});
    } catch (const Error& error) {
      told += std::string(error.what()).find("no shared memory") != std::string::npos ? 1 : 0;
    }
  });
  EXPECT_EQ(told, 2);
}

// The first calls get memory for two of the 64 segments, and later ones no more.
TEST(Communicator, AMessageGoesThroughWhatMemoryTheWindowHas) {
  run_threads(3, [](Communicator& c) {
    std::vector<int32_t> small(2000, 1), data(1 << 20);
    for (int i = 0; i < 2; ++i) c.allreduce(small.data(), small.data(), 2000, sum_of_ints());
    ASSERT_NO_FATAL_FAILURE(refuse({SYS_fallocate}, ENOSPC));
    for (const Order order : {Order::any, Order::fixed}) {
      std::fill(data.begin(), data.end(), static_cast<int32_t>(c.rank() + 1));
      c.allreduce(data.data(), data.data(), data.size(), sum_of_ints(), {.order = order});
      EXPECT_EQ(data, std::vector<int32_t>(data.size(), 6));
    }
    // One that fits the window is never sent on, and needs all of its memory.
    try {
      c.allreduce(data.data(), data.data(), 1 << 18, sum_of_ints());
      ADD_FAILURE() << "had memory";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), ::testing::HasSubstr("no shared memory for a message of 1048576"));
    }
  });
}

class Sizes : public ::testing::TestWithParam<uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Sizes, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(Sizes, AllreduceGivesTheSumByEveryAlgorithm) {
  run_threads(GetParam(), [](Communicator& c) {
    Delays delays(c.rank());
    for (const uint64_t count : {0U, 1U, 7U, 1000U, 1025U, 20'000U, 300'001U}) {
      const std::vector<int32_t> mine = values_of(c.rank(), count),
                                 sum = sum_over(c.ranks(), count);
      for (const Algorithm algorithm : kAll) {
        for (const bool in_place : {false, true}) {
          std::vector<int32_t> data = mine, out(count, -1);
          delays.maybe();
          int32_t* to = in_place ? data.data() : out.data();
          c.allreduce(data.data(), to, count, sum_of_ints(), {.algorithm = algorithm});
          ASSERT_EQ(std::vector<int32_t>(to, to + count), sum)
              << name_of(algorithm) << " of " << count;
        }
      }
    }
  });
}

TEST_P(Sizes, ReduceGivesTheSumToTheRootAlone) {
  run_threads(GetParam(), [](Communicator& c) {
    Delays delays(c.rank());
    for (const uint64_t count : {0U, 1U, 5000U, 200'001U}) {
      const std::vector<int32_t> mine = values_of(c.rank(), count),
                                 sum = sum_over(c.ranks(), count);
      for (uint32_t root = 0; root < c.ranks(); ++root) {
        for (const Algorithm algorithm :
             {Algorithm::cooperative, Algorithm::arrival_leader, Algorithm::arrival_chain,
              Algorithm::leader, Algorithm::binomial}) {
          std::vector<int32_t> data = mine;
          delays.maybe();
          c.reduce(data.data(), c.rank() == root ? data.data() : nullptr, count, sum_of_ints(),
                   root, {.algorithm = algorithm});
          ASSERT_EQ(data, c.rank() == root ? sum : mine)
              << name_of(algorithm) << " of " << count << " to " << root;
        }
      }
    }
  });
}

TEST_P(Sizes, BroadcastAllgatherReduceScatterAndBarrierAgree) {
  run_threads(GetParam(), [](Communicator& c) {
    Delays delays(c.rank() + 100);
    const uint32_t n = c.ranks();
    for (const uint64_t count : {0U, 3U, 6000U, 150'001U}) {
      const uint32_t root = static_cast<uint32_t>(count % n);
      for (const Algorithm algorithm : {Algorithm::cooperative, Algorithm::binomial}) {
        std::vector<int32_t> data = values_of(c.rank(), count);
        delays.maybe();
        c.broadcast(data.data(), 4 * count, root, {.algorithm = algorithm});
        ASSERT_EQ(data, values_of(root, count));
      }
      delays.maybe();
      std::vector<int32_t> mine = values_of(c.rank(), count), all(count * n), expected;
      c.allgather(mine.data(), all.data(), 4 * count);
      for (uint32_t r = 0; r < n; ++r) {
        const auto part = values_of(r, count);
        expected.insert(expected.end(), part.begin(), part.end());
      }
      ASSERT_EQ(all, expected);
      delays.maybe();
      std::vector<int32_t> share(count);
      const auto whole = values_of(c.rank(), count * n);
      c.reduce_scatter(whole.data(), share.data(), count, sum_of_ints());
      const auto sum = sum_over(n, count * n);
      const auto begin = sum.begin() + static_cast<std::ptrdiff_t>(count * c.rank());
      ASSERT_EQ(share, std::vector<int32_t>(begin, begin + static_cast<std::ptrdiff_t>(count)));
      c.barrier();
    }
  });
}

// The last rank gives twice as much as its share of the window holds, every third one nothing.
TEST_P(Sizes, AllgathervGivesEachItsOwnSizeAndPlace) {
  run_threads(GetParam(), [](Communicator& c) {
    Delays delays(c.rank() + 200);
    const uint32_t n = c.ranks();
    const auto count_of = [n](uint32_t rank, uint64_t most) -> uint64_t {
      return rank + 1 == n ? most : rank % 3 == 1 ? 0 : most / (rank + 2) + rank;
    };
    for (const uint64_t most : {0U, 5U, 9000U, 200'000U, 4'200'000U}) {
      if (n > 3 && most > 1'000'000) continue;
      std::vector<int32_t> mine = values_of(c.rank(), count_of(c.rank(), most));
      for (const bool in_place : {false, true}) {
        std::vector<std::vector<int32_t>> all(n);
        std::vector<Gathered> parts;
        for (uint32_t i = 0; i < n; ++i) {
          all[i].assign(count_of(i, most), -1);
          if (in_place && i == c.rank()) all[i] = mine;
          parts.push_back({all[i].data(), 4 * all[i].size()});
        }
        delays.maybe();
        c.allgatherv(in_place ? all[c.rank()].data() : mine.data(), parts);
        for (uint32_t i = 0; i < n; ++i) {
          ASSERT_EQ(all[i], values_of(i, count_of(i, most))) << "of rank " << i << ", " << most;
        }
      }
    }
  });
}

TEST(Allgatherv, GivesARankWithoutDataThoseOfTheNextAtTheSamePlace) {
  for (const uint64_t count : {4U, 50'000U}) {
    run_threads(3, [count](Communicator& c) {
      // Rank 1 has none, so that its place, where its data would come from too, is that of rank 2.
      std::vector<int32_t> all(2 * count, -1);
      const std::vector<Gathered> parts{
          {all.data(), 4 * count}, {all.data() + count, 0}, {all.data() + count, 4 * count}};
      auto* const own = static_cast<int32_t*>(parts[c.rank()].to);
      const std::vector<int32_t> mine = values_of(c.rank(), count);
      if (c.rank() != 1) std::copy(mine.begin(), mine.end(), own);
      c.allgatherv(own, parts);
      const std::vector<int32_t> first = values_of(0, count), last = values_of(2, count);
      EXPECT_TRUE(std::equal(first.begin(), first.end(), all.begin()));
      EXPECT_TRUE(
          std::equal(last.begin(), last.end(), all.begin() + static_cast<ptrdiff_t>(count)));
    });
  }
}

TEST(Allgatherv, RefusesPartsThatAreNotOneForEachRankOrOverlap) {
  run_threads(2, [](Communicator& c) {
    std::vector<std::byte> data(100);
    const std::vector<Gathered> one{{data.data(), 10}}, apart{{data.data(), 10}, {nullptr, 10}};
    EXPECT_THROW(c.allgatherv(data.data(), one), Error);
    EXPECT_THROW(c.allgatherv(data.data() + 50, apart), Error);
    const std::vector<Gathered> over{{data.data(), 20}, {data.data() + 40, 20}};
    EXPECT_THROW(c.allgatherv(data.data() + (c.rank() == 0 ? 45 : 5), over), Error);
    c.barrier();
  });
}

// Elements of each rank's block: one in three is empty, and borders lie inside of segments.
std::vector<uint64_t> blocks_of(uint32_t ranks, uint64_t most) {
  std::vector<uint64_t> counts(ranks);
  for (uint32_t r = 0; r < ranks; ++r) {
    counts[r] = r + 1 == ranks ? most : r % 3 == 1 ? 0 : most / (r + 2) + r;
  }
  return counts;
}

// `data` as this rank's input; the result goes to other memory, to the input's beginning, or to this
// rank's block of it.
template <typename T>
std::vector<T> scattered(Communicator& c, std::vector<T> data, std::span<const uint64_t> counts,
                         int place, const Reducer& reducer, Order order = Order::any) {
  const uint64_t begin = std::accumulate(counts.begin(), counts.begin() + c.rank(), uint64_t{0});
  const uint64_t mine = counts[c.rank()];
  std::vector<T> apart(mine);
  T* const out = place == 0 ? apart.data() : data.data() + (place == 1 ? 0 : begin);
  const std::vector<T> given = data;
  c.reduce_scatterv(data.data(), out, counts, reducer, order);
  const std::vector<T> result(out, out + mine);
  if (place != 0) std::copy_n(given.begin() + (out - data.data()), mine, out);
  EXPECT_EQ(data, given) << "what is no result has changed";
  return result;
}

TEST_P(Sizes, ReduceScattervGivesEachItsBlock) {
  run_threads(GetParam(), [](Communicator& c) {
    Delays delays(c.rank() + 300);
    for (const uint64_t most : {0U, 5U, 900U, 3000U, 20'000U, 300'000U, 3'000'000U}) {
      if (c.ranks() > 3 && most > 1'000'000) continue;
      const std::vector<uint64_t> counts = blocks_of(c.ranks(), most);
      const uint64_t all = std::accumulate(counts.begin(), counts.end(), uint64_t{0});
      const uint64_t begin =
          std::accumulate(counts.begin(), counts.begin() + c.rank(), uint64_t{0});
      const std::vector<int32_t> sum = sum_over(c.ranks(), all);
      const std::vector<int32_t> expected(
          sum.begin() + static_cast<ptrdiff_t>(begin),
          sum.begin() + static_cast<ptrdiff_t>(begin + counts[c.rank()]));
      for (const int place : {0, 1, 2}) {
        for (const Order order : {Order::any, Order::fixed}) {
          delays.maybe();
          ASSERT_EQ(scattered(c, values_of(c.rank(), all), counts, place, sum_of_ints(), order),
                    expected)
              << most << ", " << place;
        }
      }
    }
  });
}

TEST(ReduceScatterv, RefusesCountsThatAreNotOneForEachRankAndBuffersThatOverlap) {
  run_threads(3, [](Communicator& c) {
    std::vector<int32_t> data(60);
    const std::vector<uint64_t> two{10, 20}, three{10, 20, 30}, endless{1, ~uint64_t{0} / 8, 1};
    const auto call = [&](std::span<const uint64_t> counts, int32_t* out) {
      c.reduce_scatterv(data.data(), out, counts, sum_of_ints());
    };
    std::vector<int32_t> out(30);
    EXPECT_THROW(call(two, out.data()), Error);
    EXPECT_THROW(call(endless, out.data()), Error);
    EXPECT_THROW(call(three, data.data() + 5), Error);
    EXPECT_THROW(call(three, nullptr), Error);
    EXPECT_THROW(c.reduce_scatter(data.data(), data.data() + 5, 20, sum_of_ints()), Error);
    call(three, out.data());
  });
}

TEST_P(Sizes, FixedOrderHasTheSameBitsForAnyOrderOfArrival) {
  const uint32_t ranks = GetParam();
  const auto value = [](uint32_t rank, uint64_t i) {
    return 1.0F / static_cast<float>(1 + rank + i % 97) * (rank % 2 == 0 ? 1e5F : 1e-3F);
  };
  for (const uint64_t count : {100U, 3000U, 60'000U}) {
    std::vector<float> expected(count);
    for (uint64_t i = 0; i < count; ++i) {
      float sum = value(0, i);
      for (uint32_t r = 1; r < ranks; ++r) sum = sum + value(r, i);
      expected[i] = sum;
    }
    run_threads(ranks, [&](Communicator& c) {
      Delays delays(c.rank());
      const Reducer sum(Op::sum, DataType::float32);
      auto* shared = static_cast<float*>(c.allocate(4 * count));
      std::vector<float> own(count);
      for (int repeat = 0; repeat < 6; ++repeat) {
        for (float* data : {own.data(), shared}) {
          for (uint64_t i = 0; i < count; ++i) data[i] = value(c.rank(), i);
          delays.maybe();
          c.allreduce(data, data, count, sum, {.order = Order::fixed});
          ASSERT_EQ(std::memcmp(data, expected.data(), 4 * count), 0);
        }
        for (uint64_t i = 0; i < count; ++i) own[i] = value(c.rank(), i);
        std::vector<uint64_t> counts(ranks);
        for (uint32_t r = 0; r < ranks; ++r)
          counts[r] = count * (r + 1) / ranks - count * r / ranks;
        delays.maybe();
        const auto mine = scattered(c, own, counts, repeat % 3, sum, Order::fixed);
        ASSERT_EQ(std::memcmp(mine.data(), &expected[count * c.rank() / ranks], 4 * mine.size()),
                  0);
      }
    });
  }
}

// x -> a x + b modulo 2^32, composed: associative, not commutative.
struct Affine {
  uint32_t a, b;
  bool operator==(const Affine&) const = default;
};
void compose(const void* in, void* inout, uint64_t count, void*) {
  const auto* left = static_cast<const Affine*>(in);
  auto* right = static_cast<Affine*>(inout);
  for (uint64_t i = 0; i < count; ++i) {
    right[i] = {left[i].a * right[i].a, left[i].a * right[i].b + left[i].b};
  }
}

TEST_P(Sizes, KeepTheOrderOfOperationsThatDoNotCommute) {
  run_threads(GetParam(), [](Communicator& c) {
    const Reducer reducer(compose, nullptr, sizeof(Affine), false);
    Delays delays(c.rank());
    for (const uint64_t count : {1U, 900U, 70'000U}) {
      std::vector<Affine> expected(count);
      for (uint32_t r = 0; r < c.ranks(); ++r) {
        for (uint64_t i = 0; i < count; ++i) {
          Affine next{2 * r + 3, static_cast<uint32_t>(i) + r};
          if (r > 0) compose(&expected[i], &next, 1, nullptr);
          expected[i] = next;
        }
      }
      for (const Algorithm algorithm : kAll) {
        std::vector<Affine> data(count);
        for (uint64_t i = 0; i < count; ++i) {
          data[i] = {2 * c.rank() + 3, static_cast<uint32_t>(i) + c.rank()};
        }
        delays.maybe();
        std::vector<Affine> out(count);
        c.allreduce(data.data(), out.data(), count, reducer, {.algorithm = algorithm});
        ASSERT_EQ(out, expected) << name_of(algorithm) << " of " << count;
        if (algorithm == Algorithm::recursive_doubling || algorithm == Algorithm::ring ||
            algorithm == Algorithm::rsa) {
          continue;
        }
        const uint32_t root = c.ranks() - 1;
        delays.maybe();
        c.reduce(data.data(), data.data(), count, reducer, root, {.algorithm = algorithm});
        ASSERT_TRUE(c.rank() != root || data == expected) << name_of(algorithm);
      }
      // The elements of its block are those of the same place, so give it all of them.
      std::vector<uint64_t> counts(c.ranks());
      counts[count % c.ranks()] = count;
      std::vector<Affine> data(count);
      for (uint64_t i = 0; i < count; ++i) {
        data[i] = {2 * c.rank() + 3, static_cast<uint32_t>(i) + c.rank()};
      }
      delays.maybe();
      const auto mine = scattered(c, data, counts, 0, reducer);
      ASSERT_TRUE(counts[c.rank()] == 0 || mine == expected);
    }
  });
}

TEST(Communicator, ReducesSharedBuffersInPlaceAndOthersWithThem) {
  run_threads(3, [](Communicator& c) {
    Delays delays(c.rank());
    for (const uint64_t count : {2000U, 1'000'003U}) {
      auto* in = static_cast<int32_t*>(c.allocate(4 * count));
      auto* out = static_cast<int32_t*>(c.allocate(4 * count));
      ASSERT_NE(out, nullptr);
      for (int mixed = 0; mixed < 6; ++mixed) {
        std::vector<int32_t> own(count);
        const bool shares = mixed < 2 || (c.rank() + static_cast<uint32_t>(mixed)) % 3 != 0;
        int32_t* from = shares ? in : own.data();
        int32_t* to = shares ? (mixed % 2 == 0 ? in : out) : own.data();
        const auto values = values_of(c.rank(), count, mixed);
        std::memcpy(from, values.data(), 4 * count);
        delays.maybe();
        c.allreduce(from, to, count, sum_of_ints());
        ASSERT_EQ(std::vector<int32_t>(to, to + count), sum_over(c.ranks(), count, mixed));
      }
      c.barrier();
      c.release(in);
      c.release(out);
    }
    EXPECT_EQ(c.allocate(uint64_t{1} << 40), nullptr);
  });
}

// A signal has it taken in pieces, and there is room for the first of them only.
TEST(Communicator, AnAllocationThatFailsInItsMiddleTakesNothing) {
  const auto held = [] {
    uint64_t blocks = 0;
    for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
      struct stat status {};
      if (::stat(file.path().c_str(), &status) == 0)
        blocks += static_cast<uint64_t>(status.st_blocks);
    }
    return blocks;
  };
  run_threads(2, [&](Communicator& c) {
    c.barrier();
    if (c.rank() == 0) {
      const uint64_t before = held();
      std::vector<int> answers = {ENOSPC, 0, EINTR};
      room_for = [&](off_t) {
        const int error = answers.back();
        answers.pop_back();
        return error;
      };
      EXPECT_THROW(c.allocate(4 << 20), Error);
      room_for = nullptr;
      // The other rank is on its way to the barrier, and may be the first in a page of it.
      EXPECT_LT(held(), before + (64 << 10) / 512);
    }
    c.barrier();
  });
}

// Whichever rank is first: with ordinary buffers all take the chain; with shared ones the rank that has
// no room for a copy has all take it.
TEST(Communicator, ReducesWithARankWhoseArenaIsFullInAnyOrderOfArrival) {
  for (const uint32_t first : {0U, 1U, 2U}) {
    std::atomic<bool> is_first_there{false};
    run_threads(3, [&](Communicator& c) {
      constexpr uint64_t kCount = 131'072;
      const uint64_t arena = testing::config_of("", 0, 3).arena_bytes;
      auto* held = static_cast<int32_t*>(c.allocate(c.rank() == 0 ? arena : 4 * kCount));
      ASSERT_NE(held, nullptr);
      for (int call = 0; call < 4; ++call) {
        std::vector<int32_t> own(kCount);
        const bool shares = c.rank() == 1 || call == 3;
        int32_t* data = shares ? held : own.data();
        const auto values = values_of(c.rank(), kCount, call);
        std::memcpy(data, values.data(), 4 * kCount);
        if (call == 0 && c.rank() == first) is_first_there = true;
        while (!is_first_there) std::this_thread::yield();
        if (call == 0 && c.rank() != first) {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
        const Order order = call == 2 ? Order::fixed : Order::any;
        c.allreduce(data, data, kCount, sum_of_ints(), {.order = order});
        ASSERT_EQ(std::vector<int32_t>(data, data + kCount), sum_over(3, kCount, call));
      }
    });
  }
}

// Long runs of small calls of all kinds, with pauses in random places: no lost wake-up, no mix-up
// of one call's memory with another's.
TEST(Communicator, SurvivesManyCallsInARow) {
  for (const uint32_t ranks : {2U, 3U, 6U}) {
    run_threads(ranks, [](Communicator& c) {
      Delays same(42), own(c.rank());
      for (int call = 0; call < 1500; ++call) {
        const uint32_t kind = same.next() % 6, root = same.next() % c.ranks();
        const uint64_t count = same.next() % 8 == 0 ? same.next() % 30'000 : same.next() % 40;
        const Algorithm algorithm = kAll[same.next() % 8];
        const auto mine = values_of(c.rank(), count, call);
        std::vector<int32_t> out(count);
        own.maybe();
        switch (kind) {
          case 0:
          case 1:
            c.allreduce(mine.data(), out.data(), count, sum_of_ints(), {.algorithm = algorithm});
            ASSERT_EQ(out, sum_over(c.ranks(), count, call)) << name_of(algorithm);
            break;
          case 2:
            c.reduce(mine.data(), out.data(), count, sum_of_ints(), root);
            ASSERT_TRUE(c.rank() != root || out == sum_over(c.ranks(), count, call));
            break;
          case 3:
            out = mine;
            c.broadcast(out.data(), 4 * count, root);
            ASSERT_EQ(out, values_of(root, count, call));
            break;
          case 4: {
            std::vector<uint64_t> counts(c.ranks());
            counts[root] = count / 3;
            counts[(root + 1) % c.ranks()] = count - count / 3;
            out = scattered(c, mine, counts, 0, sum_of_ints());
            const auto begin = std::accumulate(counts.begin(), counts.begin() + c.rank(), 0);
            const auto sum = sum_over(c.ranks(), count, call);
            ASSERT_TRUE(std::equal(out.begin(), out.end(), sum.begin() + begin));
            break;
          }
          default:
            c.barrier();
        }
      }
    });
  }
}

TEST(Communicator, MessagesFarBeyondASmallWindowPassThroughIt) {
  for (const uint32_t ranks : {2U, 3U}) {
    const std::string job = testing::fresh_job();
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < ranks; ++r) {
      threads.emplace_back([&job, r, ranks] {
        CommunicatorConfig config = testing::config_of(job, r, ranks);
        config.window_bytes = 16 << 10;
        Communicator c(config);
        constexpr uint64_t kCount = 300'001;
        for (const Algorithm algorithm : {Algorithm::cooperative, Algorithm::arrival_chain}) {
          std::vector<int32_t> data = values_of(r, kCount);
          c.allreduce(data.data(), data.data(), kCount, sum_of_ints(), {.algorithm = algorithm});
          EXPECT_EQ(data, sum_over(ranks, kCount)) << name_of(algorithm);
        }
        // Blocks of many segments, and of a part of one.
        std::vector<uint64_t> counts{200'000, 100, 99'901};
        if (ranks == 2) counts = {100, 299'901};
        const auto begin = std::accumulate(counts.begin(), counts.begin() + r, 0);
        const auto sum = sum_over(ranks, kCount);
        for (const int place : {0, 1, 2}) {
          const auto mine = scattered(c, values_of(r, kCount), counts, place, sum_of_ints());
          EXPECT_TRUE(std::equal(mine.begin(), mine.end(), sum.begin() + begin));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(Communicator, CutsMessagesOfAnySizeIntoSegmentsThatAWordCounts) {
  constexpr uint64_t kTera = uint64_t{1} << 40, kWindow = 64 << 20;
  for (const uint32_t ranks : {2U, 3U}) {
    for (const uint64_t element : {1U, 4U, 12U, 4096U}) {
      for (const uint64_t bytes :
           {uint64_t{8192}, uint64_t{1} << 30, kTera, 9 * kTera, 500 * kTera}) {
        for (const bool whole : {false, true}) {
          const uint64_t count = bytes / element;
          const Segments cut = segments_of(count, element, ranks, whole, kWindow);
          EXPECT_LE(cut.count, kMostSegments) << bytes;
          EXPECT_LE(cut.elements * element, kWindow / 2);
          EXPECT_GE(cut.elements * cut.count, count);
          EXPECT_LT(cut.elements * (cut.count - 1), count);
        }
      }
    }
  }
}

TEST(Communicator, RefusesAMessageOfMoreSegmentsThanAWordCounts) {
  // Addresses without memory: what is refused is not read.
  constexpr uint64_t kWindow = 16 << 10, kBytes = (kMostSegments + 1) * (kWindow / 2);
  void* nowhere =
      ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(nowhere, MAP_FAILED);
  const std::string job = testing::fresh_job();
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      CommunicatorConfig config = testing::config_of(job, r, 2);
      config.window_bytes = kWindow;
      Communicator c(config);
      try {
        c.broadcast(nowhere, kBytes, 0);
        ADD_FAILURE() << "rank " << r;
      } catch (const Error& error) {
        // The second rank may get the error of the first one.
        EXPECT_THAT(error.what(), ::testing::AnyOf(::testing::HasSubstr("make the window larger"),
                                                   ::testing::HasSubstr("could not go on")));
      }
    });
  }
  for (std::thread& t : threads) t.join();
  ::munmap(nowhere, kBytes);
}

TEST(Communicator, SeveralAtOnceDoNotMix) {
  const std::string job = testing::fresh_job();
  std::vector<std::thread> threads;
  for (uint32_t r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      Communicator a(testing::config_of(job + "a", r, 3)), b(testing::config_of(job + "b", r, 3));
      const auto use = [r](Communicator& c, int32_t salt) {
        for (int i = 0; i < 50; ++i) {
          auto data = values_of(r, 3000, salt + i);
          c.allreduce(data.data(), data.data(), data.size(), sum_of_ints());
          ASSERT_EQ(data, sum_over(3, 3000, salt + i));
        }
      };
      std::thread other([&] { use(b, 1000); });
      use(a, 0);
      other.join();
    });
  }
  for (std::thread& t : threads) t.join();
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Communicator, NamesTheCallsThatDoNotMatch) {
  using ::testing::HasSubstr;
  run_threads(2, [](Communicator& c) {
    std::vector<int32_t> data(5000);
    const std::string what =
        error_of([&] { c.allreduce(data.data(), data.data(), 4000 + c.rank(), sum_of_ints()); });
    EXPECT_THAT(what, HasSubstr("4000 int32 elements, sum"));
    EXPECT_THAT(what, HasSubstr("4001 int32 elements, sum"));
    EXPECT_THAT(error_of([&] { c.barrier(); }), HasSubstr("broken"));
  });
  run_threads(2, [](Communicator& c) {
    int32_t value = 0;
    const std::string what =
        error_of([&] { c.rank() == 0 ? c.barrier() : c.broadcast(&value, 4, 0); });
    EXPECT_THAT(what, HasSubstr("barrier"));
    EXPECT_THAT(what, HasSubstr("broadcast of 4 bytes, from rank 0"));
  });
  for (const uint64_t bytes : {8u, 100'000u}) {
    run_threads(2, [bytes](Communicator& c) {
      // Each rank gives twice what the other one expects of it, and the sums are the same.
      const uint64_t of_0 = c.rank() == 0 ? 2 * bytes : bytes;
      std::vector<std::byte> mine(2 * bytes), out(3 * bytes);
      const std::vector<Gathered> parts{{out.data(), of_0}, {out.data() + of_0, 3 * bytes - of_0}};
      EXPECT_THAT(error_of([&] { c.allgatherv(mine.data(), parts); }),
                  HasSubstr("allgatherv in parts whose sizes have the hash "));
    });
    run_threads(2, [bytes](Communicator& c) {
      std::vector<int32_t> data(3 * bytes), mine(3 * bytes);
      const uint64_t of_0 = c.rank() == 0 ? 2 * bytes : bytes;
      const std::vector<uint64_t> counts{of_0, 3 * bytes - of_0};
      EXPECT_THAT(
          error_of([&] { c.reduce_scatterv(data.data(), mine.data(), counts, sum_of_ints()); }),
          HasSubstr(
              "reduce_scatterv of int32 elements, sum, in blocks whose sizes have the hash "));
      EXPECT_THAT(error_of([&] { c.barrier(); }), HasSubstr("broken"));
    });
  }
  for (const Algorithm algorithm : kAll) {
    run_threads(2, [&](Communicator& c) {
      int32_t value = 0;
      const Reducer other(Op::max, DataType::int32);
      EXPECT_THAT(error_of([&] {
                    c.allreduce(&value, &value, 1, c.rank() == 0 ? sum_of_ints() : other,
                                {.algorithm = algorithm});
                  }),
                  HasSubstr("int32 elements, max"))
          << name_of(algorithm);
    });
  }
}

// Calls from which a rank may leave before others arrive: it, or the rank that comes later, is told at
// once, the other one at its next call.
TEST(Communicator, NamesCallsThatDoNotMatchWhereBothRanksLeaveEarly) {
  using ::testing::HasSubstr;
  using Calls = std::function<void(Communicator&, int32_t*)>;
  const auto broadcast = [](uint32_t root) -> Calls {
    return [root](Communicator& c, int32_t* data) { c.broadcast(data, 4, root); };
  };
  const auto reduce = [](uint32_t root, Algorithm algorithm = Algorithm::cooperative) -> Calls {
    return [root, algorithm](Communicator& c, int32_t* data) {
      c.reduce(data, data, 1, sum_of_ints(), root, {.algorithm = algorithm});
    };
  };
  const std::vector<std::pair<Calls, Calls>> pairs{
      {broadcast(0), broadcast(1)},
      {reduce(1), reduce(0)},
      {broadcast(0), reduce(0)},
      {reduce(1, Algorithm::leader), reduce(0, Algorithm::leader)},
      {reduce(1, Algorithm::arrival_leader), broadcast(1)}};
  for (const auto& pair : pairs) {
    for (const uint32_t late : {0u, 1u}) {
      run_threads(2, [&](Communicator& c) {
        int32_t value = 1;
        if (c.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        const std::string what = error_of([&] {
          (c.rank() == 0 ? pair.first : pair.second)(c, &value);
          c.barrier();
        });
        EXPECT_THAT(what, HasSubstr("the ranks do not call the same"));
        EXPECT_THAT(what, ::testing::Not(HasSubstr("barrier")));
      });
    }
  }
}

TEST(Communicator, NamesOrdersAndAlgorithmsThatDoNotMatch) {
  using ::testing::AllOf;
  using ::testing::HasSubstr;
  for (const Algorithm one : kAll) {
    for (const Algorithm other : kAll) {
      for (const uint64_t count : {1u, 50'000u}) {
        if (one == other) continue;
        run_threads(2, [&](Communicator& c) {
          std::vector<int32_t> data(count);
          const Algorithm mine = c.rank() == 0 ? one : other;
          const auto named = [](Algorithm algorithm) {
            return algorithm == Algorithm::cooperative
                       ? "elements, sum"
                       : "elements, sum, by " + std::string(name_of(algorithm));
          };
          EXPECT_THAT(error_of([&] {
                        c.allreduce(data.data(), data.data(), count, sum_of_ints(),
                                    {.algorithm = mine});
                      }),
                      AllOf(HasSubstr(named(one)), HasSubstr(named(other))));
        });
      }
    }
  }
  for (const uint64_t count : {1u, 50'000u}) {
    run_threads(2, [&](Communicator& c) {
      std::vector<int32_t> data(2 * count);
      const Order mine = c.rank() == 0 ? Order::any : Order::fixed;
      EXPECT_THAT(error_of([&] {
                    c.allreduce(data.data(), data.data(), count, sum_of_ints(), {.order = mine});
                  }),
                  HasSubstr("int32 elements, sum, in fixed order"));
    });
    run_threads(2, [&](Communicator& c) {
      std::vector<int32_t> data(2 * count);
      const Order mine = c.rank() == 0 ? Order::any : Order::fixed;
      EXPECT_THAT(
          error_of([&] { c.reduce_scatter(data.data(), data.data(), count, sum_of_ints(), mine); }),
          HasSubstr("int32 elements, sum, in fixed order"));
    });
  }
}

TEST(Communicator, NamesTypesOfAsManyBytesThatDoNotMatch) {
  using ::testing::AllOf;
  using ::testing::HasSubstr;
  for (const uint64_t bytes : {8u, 200'000u}) {
    const auto of = [](Communicator& c) {
      return c.rank() == 0 ? DataType::float32 : DataType::int64;
    };
    run_threads(2, [&](Communicator& c) {
      std::vector<std::byte> data(bytes);
      const std::string what = error_of([&] {
        c.broadcast(data.data(), bytes, 0, {}, of(c));
        c.barrier();
      });
      EXPECT_THAT(what, AllOf(HasSubstr("bytes of float32, from rank 0"),
                              HasSubstr("bytes of int64, from rank 0")));
    });
    run_threads(2, [&](Communicator& c) {
      std::vector<std::byte> mine(bytes), all(2 * bytes);
      EXPECT_THAT(error_of([&] { c.allgather(mine.data(), all.data(), bytes, of(c)); }),
                  AllOf(HasSubstr("bytes of float32"), HasSubstr("bytes of int64")));
    });
    run_threads(2, [&](Communicator& c) {
      std::vector<std::byte> mine(bytes), all(2 * bytes);
      const std::vector<Gathered> parts{{all.data(), bytes}, {all.data() + bytes, bytes}};
      EXPECT_THAT(error_of([&] { c.allgatherv(mine.data(), parts, of(c)); }),
                  AllOf(HasSubstr("allgatherv of float32 in parts"),
                        HasSubstr("allgatherv of int64 in parts")));
    });
    run_threads(2, [&](Communicator& c) {
      std::vector<std::byte> data(2 * bytes);
      const auto nothing = [](const void*, void*, uint64_t, void*) {};
      const Reducer op(nothing, nullptr, c.rank() == 0 ? 4 : 8, true);
      EXPECT_THAT(error_of([&] { c.allreduce(data.data(), data.data(), bytes / 4, op); }),
                  AllOf(HasSubstr("elements of 4 bytes, an operation of the user"),
                        HasSubstr("elements of 8 bytes, an operation of the user")));
    });
  }
}

// Sizes of one sum, whose hashes have the same last 16 bits.
TEST(Communicator, ComparesTheSizesOfAnAllgathervWhole) {
  constexpr uint64_t kSum = 400'000;
  const auto hash = [](uint64_t of_0) {
    return static_cast<uint16_t>(Fnv().number(of_0).number(kSum - of_0).value());
  };
  uint64_t other = 1;
  while (hash(other) != hash(0)) ASSERT_LT(++other, kSum);
  run_threads(2, [other](Communicator& c) {
    const uint64_t of_0 = c.rank() == 0 ? other : 0;
    std::vector<std::byte> mine(kSum), out(kSum);
    const std::vector<Gathered> parts{{out.data(), of_0}, {out.data() + of_0, kSum - of_0}};
    c.set_timeout(std::chrono::seconds(20));
    EXPECT_THAT(error_of([&] { c.allgatherv(mine.data(), parts); }),
                ::testing::HasSubstr("the ranks do not call the same"));
  });
}

TEST(Communicator, EndsForAllRanksWithTheKindAndNumberThatItWasGiven) {
  struct Case {
    ErrorKind given, told;
    int number, told_number;
  };
  // An errno is of no use to others.
  for (const Case& c : {Case{ErrorKind::stopped, ErrorKind::stopped, 77, 77},
                        Case{ErrorKind::peer, ErrorKind::peer, 15, 15},
                        Case{ErrorKind::usage, ErrorKind::usage, 0, 0},
                        Case{ErrorKind::io, ErrorKind::peer, ENOSPC, 0}}) {
    run_threads(3, [&](Communicator& communicator) {
      if (communicator.rank() == 1) {
        EXPECT_NO_THROW(communicator.check());
        EXPECT_TRUE(communicator.end(Error(c.given, "the u in usage and the p in peer", c.number)));
        EXPECT_FALSE(communicator.end(Error(ErrorKind::bug, "too late")));
      }
      for (int call = 0; call < 3; ++call) {
        try {
          if (call < 2) communicator.barrier();
          if (call == 2) communicator.check();
          ADD_FAILURE() << "rank " << communicator.rank() << " was not told";
        } catch (const Error& error) {
          EXPECT_THAT(error.what(), ::testing::EndsWith(": the u in usage and the p in peer"));
          EXPECT_EQ(error.kind(), c.told);
          EXPECT_EQ(error.error_number(), c.told_number);
        }
      }
      EXPECT_EQ(communicator.ended_here(), communicator.rank() == 1);
    });
  }
}

TEST(Communicator, RefusesArgumentsThatCannotBe) {
  run_threads(2, [](Communicator& c) {
    std::vector<int32_t> data(100);
    int32_t* p = data.data();
    EXPECT_NE(error_of([&] { c.allreduce(p, p + 1, 50, sum_of_ints()); }), "");
    EXPECT_NE(error_of([&] { c.allreduce(nullptr, p, 50, sum_of_ints()); }), "");
    EXPECT_NE(
        error_of([&] { c.allreduce(reinterpret_cast<char*>(p) + 1, p + 50, 10, sum_of_ints()); }),
        "");
    EXPECT_NE(error_of([&] { c.broadcast(p, 4, 2); }), "");
    EXPECT_NE(error_of([&] { c.reduce(p, p, 4, sum_of_ints(), 0, {Algorithm::ring}); }), "");
    EXPECT_NE(error_of([&] { c.allreduce(p, p, ~uint64_t{0}, sum_of_ints()); }), "");
    // None of these reached the other rank.
    c.allreduce(p, p, 100, sum_of_ints());
  });
  CommunicatorConfig config = testing::config_of(testing::fresh_job(), 2, 2);
  EXPECT_THROW(Communicator{config}, Error);
}

TEST(Communicator, CountsWhatItDid) {
  run_threads(2, [](Communicator& c) {
    std::vector<int32_t> data(10);
    for (int i = 0; i < 3; ++i) c.allreduce(data.data(), data.data(), 10, sum_of_ints());
    EXPECT_EQ(c.stats().calls, 3U);
    EXPECT_EQ(c.stats().bytes, 120U);
  });
}

}  // namespace
}  // namespace nostall::collective
