// Golden vectors of the algorithms that processes and releases must agree on.
#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/fnv.h"
#include "base/log.h"
#include "base/random.h"

namespace nostall {
namespace {

std::span<const std::byte> bytes_of(const std::string& s) {
  return std::as_bytes(std::span(s.data(), s.size()));
}

TEST(Crc32c, GivesTheCheckValueOfTheStandard) {
  EXPECT_EQ(crc32c(bytes_of("123456789")), 0xE3069283u);
  EXPECT_EQ(crc32c({}), 0u);
}

TEST(Crc32c, IsTheSameForEveryLengthAndBeginning) {
  std::vector<std::byte> all(30'000);
  Mt19937 random(5);
  for (std::byte& b : all) b = static_cast<std::byte>(random());
  // Three blocks side by side, long and short, registers that are folded, what is left of them, and a
  // byte at a time.
  for (const size_t size : {7u, 255u, 256u, 257u, 511u, 512u, 767u, 768u, 769u, 1543u, 12'287u,
                            12'288u, 12'295u, 24'576u, 29'990u}) {
    for (const size_t begin : {0u, 1u, 5u, 8u}) {
      const auto bytes = std::span<const std::byte>(all).subspan(begin, size);
      uint32_t crc = 0;
      for (const std::byte& b : bytes) crc = crc32c({&b, 1}, crc);
      EXPECT_EQ(crc32c(bytes), crc) << size << " from " << begin;
      for (const Crc32cKernel& kernel : crc32c_kernels()) {
        EXPECT_EQ(kernel.add(bytes, ~7u), ~crc32c(bytes, 7)) << kernel.name << " " << size;
      }
    }
  }
}

TEST(Crc32c, ContinuesWhereItStopped) {
  const std::string text = "the quick brown fox jumps over the lazy dog";
  const auto all = bytes_of(text);
  for (size_t cut = 0; cut <= all.size(); ++cut) {
    EXPECT_EQ(crc32c(all.subspan(cut), crc32c(all.first(cut))), crc32c(all)) << cut;
  }
}

// Of the authors' test suite.
static_assert(Fnv().value() == 0xcbf29ce484222325u);
static_assert(Fnv().bytes("a").value() == 0xaf63dc4c8601ec8cu);
static_assert(Fnv().bytes("foobar").value() == 0x85944171f73967e8u);
static_assert(Fnv(Fnv().bytes("foo").value()).bytes("bar").value() == 0x85944171f73967e8u);
static_assert(Fnv().number('f').value() == Fnv().bytes({"f\0\0\0\0\0\0\0", 8}).value());

TEST(Mt19937, GivesTheReferenceStream) {
  Mt19937 generator(5489);
  uint32_t last = 0;
  for (int i = 0; i < 10000; ++i) last = generator();
  EXPECT_EQ(last, 4123659995u);  // the value that the C++ standard demands of the 10000th
}

TEST(Philox, GivesTheVectorsOfTheReferenceImplementation) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (std::array<uint32_t, 4>{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u}));
  EXPECT_EQ(
      philox4x32({0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}, {0xffffffffu, 0xffffffffu}),
      (std::array<uint32_t, 4>{0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu}));
}

TEST(SampleRandom, DependsOnSeedEpochAndSampleAlone) {
  SampleRandom a(1, 2, 3), b(1, 2, 3), other_epoch(1, 3, 3), other_sample(1, 2, 4);
  const uint32_t first = a.next();
  EXPECT_EQ(first, b.next());
  EXPECT_NE(first, other_epoch.next());
  EXPECT_NE(first, other_sample.next());
  for (int i = 0; i < 1000; ++i) {
    const double u = a.uniform();
    ASSERT_GE(u, 0.0);
    ASSERT_LT(u, 1.0);
    ASSERT_LT(a.below(7), 7u);
  }
}

// docs/formats/order.md
TEST(SampleRandom, OccurrencesHaveSeedsOfTheirOwn) {
  EXPECT_EQ(seed_of_occurrence(7, 0), 7u);
  EXPECT_EQ(seed_of_occurrence(7, 1), 0x4f840bad9f538ebfu);
  EXPECT_EQ(seed_of_occurrence(7, 2), 0xd50cf02a5ee8c140u);
  EXPECT_EQ(seed_of_occurrence(0, 1), 0x849a33143029907au);
}

TEST(Error, NamesPathAndReason) {
  const Error e = io_error("cannot open", "/data/x", ENOENT);
  EXPECT_STREQ(e.what(), "cannot open /data/x: No such file or directory");
  EXPECT_EQ(e.error_number(), ENOENT);
}

TEST(Log, ASinkThatThrowsDoesNotReachTheOneThatWarns) {
  set_log_sink([](LogLevel, const std::string&) { throw std::runtime_error("no"); });
  testing::internal::CaptureStderr();
  log(LogLevel::warning, "the disk is full");
  set_log_sink({});
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "nostall: warning: the disk is full\n");
}

}  // namespace
}  // namespace nostall
