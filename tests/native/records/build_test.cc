// The passes that make record tables, and the window they look through.
#include "records/build.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "../refuse.h"
#include "../temporary.h"
#include "memory_storage.h"
#include "records/file_window.h"

namespace nostall::records {
namespace {

using namespace source;
using testing::HasSubstr;

TEST(EachInParallel, GoesOnInTheCallerWhereNoThreadIsToBeHad) {
  const MemoryStorage storage({"content"});
  uint64_t sum = 0;
  with_refused(kThreadCalls, EAGAIN, [&] {
    each_in_parallel(storage, 100, 4, [&](RangeReader&, uint64_t i) { sum += i; });
  });
  EXPECT_EQ(sum, 4950u);
}

TEST(FileWindow, GivesTheBytesOfAnyPlace) {
  const std::string content = random_bytes(300'000, 1);
  const MemoryStorage storage({"other", content});
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  std::mt19937_64 random(2);
  for (const size_t ahead : {size_t{0}, size_t{1}, size_t{4096}, size_t{256} << 10}) {
    FileWindow window(*reader, storage, 1, ahead);
    EXPECT_EQ(window.file_size(), content.size());
    uint64_t at = 0;
    for (int i = 0; i < 2000; ++i) {
      at = i % 50 == 0 ? random() % content.size() : (at + random() % 900) % content.size();
      const size_t size = random() % (std::min<uint64_t>(content.size() - at, 9000)) + 1;
      const auto bytes = window.get(at, size);
      ASSERT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()),
                content.substr(at, size));
    }
  }
}

TEST(FileWindow, TellsOutsideFromUnreadable) {
  MemoryStorage storage({random_bytes(10'000, 1)});
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  FileWindow window(*reader, storage, 0);
  const uint64_t most = ~uint64_t{0};
  for (const auto& [offset, size] : std::vector<std::pair<uint64_t, size_t>>{
           {10'000, 1}, {9'999, 2}, {most, 1}, {0, most}, {5, most}, {most, most}, {20'000, 0}}) {
    EXPECT_TRUE(window.get(offset, size).empty());
    EXPECT_FALSE(window.error());
  }
  storage.before = [](const RangeRead&) { return EIO; };
  EXPECT_TRUE(window.get(0, 10).empty());
  ASSERT_TRUE(window.error());
  EXPECT_THAT(window.error()->what(), HasSubstr("memory/0 at offset 0"));
  // Nothing of a read that failed is given afterwards.
  EXPECT_TRUE(window.get(0, 10).empty());
  storage.before = {};
  EXPECT_EQ(window.get(0, 10).size(), 10u);
  EXPECT_FALSE(window.error());
  // A file that became shorter.
  storage.content().resize(5000);
  FileWindow again(*reader, storage, 0);
  EXPECT_TRUE(again.get(9'000, 1'000).empty());
  EXPECT_TRUE(again.error());
}

TEST(FileWindow, ReadsLittleWhereItJumps) {
  const MemoryStorage storage({std::string(20 << 20, 'x')});
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  // A busy machine makes a read of memory slow now and then, and slow reads are worth reading through.
  bool little = false;
  for (int attempt = 0; attempt < 50 && !little; ++attempt) {
    FileWindow window(*reader, storage, 0);
    const uint64_t before = storage.bytes;
    for (uint64_t at = 0; at < 20 << 20; at += 1 << 20) window.get(at, 100);
    little = storage.bytes - before < 400'000;
  }
  EXPECT_TRUE(little);
  FileWindow forward(*reader, storage, 0);
  const uint64_t before = storage.ranges;
  for (uint64_t at = 0; at + 100 <= 20 << 20; at += 100) forward.get(at, 100);
  EXPECT_LT(storage.ranges - before, 200u);
}

TEST(FileWindow, ReadsThroughJumpsWhereReadsTakeLong) {
  const std::string content = random_bytes(20 << 20, 1);
  MemoryStorage storage({content});
  // 20 ms for a read, so that a busy machine is fast beside it, and another millisecond for so many
  // bytes of it.
  uint64_t bytes_in_a_millisecond = 1 << 20;
  storage.before = [&](const RangeRead& r) {
    const auto ms = static_cast<double>(r.size()) / static_cast<double>(bytes_in_a_millisecond);
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(20.0 + ms));
    return 0;
  };
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  // One that takes longer by chance counts for long: then it is tried once more.
  const auto reads_of_jumps = [&](uint64_t jump, uint64_t jumps) {
    FileWindow window(*reader, storage, 0);
    const uint64_t before = storage.ranges;
    for (uint64_t at = 0; at < jumps * jump; at += jump) {
      const auto bytes = window.get(at, 100);
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()),
                content.substr(at, 100));
    }
    return storage.ranges - before;
  };
  uint64_t reads = 30;  // 20 MB, 2 MiB at a time
  for (int i = 0; i < 10 && reads >= 30; ++i) reads = reads_of_jumps(100'000, 200);
  EXPECT_LT(reads, 30u);
  bytes_in_a_millisecond = 4 << 10;  // 220 ms for a jump: each is skipped
  reads = 0;
  for (int i = 0; i < 10 && reads < 17; ++i) reads = reads_of_jumps(900'000, 20);
  EXPECT_GE(reads, 17u);
}

TEST(FileWindow, SkipsJumpsInFilesOfThisMachine) {
  class Files : public MemoryStorage {
   public:
    using MemoryStorage::MemoryStorage;
    bool is_local() const override { return true; }
  };
  Files storage({std::string(20 << 20, 'x')});
  storage.before = [](const RangeRead&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return 0;
  };
  const auto reader = storage.make_reader(ReaderKind::pread, 1);
  FileWindow window(*reader, storage, 0);
  for (uint64_t at = 0; at < 50; ++at) EXPECT_EQ(window.get(at * 200'000, 100).size(), 100u);
  EXPECT_EQ(storage.ranges, 50u);
  EXPECT_LT(storage.bytes, 1u << 20);
}

TEST(EachInParallel, DoesEveryPieceOnce) {
  const MemoryStorage storage({"x"});
  for (const unsigned threads : {0u, 1u, 4u}) {
    for (const uint64_t count : {0u, 1u, 3u, 1000u}) {
      std::vector<std::atomic<int>> done(count);
      uint64_t last = 12345;
      each_in_parallel(
          storage, count, threads, [&](RangeReader&, uint64_t i) { ++done[i]; },
          [&](uint64_t n) { last = n; });
      for (const auto& d : done) EXPECT_EQ(d, 1);
      EXPECT_EQ(last, count);
    }
  }
}

TEST(EachInParallel, EndsWithTheFirstError) {
  const MemoryStorage storage({"x"});
  std::atomic<uint64_t> done{0};
  try {
    each_in_parallel(storage, uint64_t{1} << 60, 4, [&](RangeReader&, uint64_t i) {
      if (i == 100) throw Error(ErrorKind::corruption, "the hundredth");
      ++done;
    });
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "the hundredth");
  }
  EXPECT_GE(done, 1u);
}

TEST(EachInParallel, StopsWhenTheUserDoes) {
  const MemoryStorage storage({"x"});
  EXPECT_THROW(each_in_parallel(
                   storage, uint64_t{1} << 60, 2,
                   [&](RangeReader&, uint64_t) {
                     std::this_thread::sleep_for(std::chrono::milliseconds(1));
                   },
                   [](uint64_t) { throw Error(ErrorKind::stopped, "stopped"); }),
               Error);
}

TEST(FindPayloads, TakesRecordsOfManyFilesInOrder) {
  std::vector<std::string> files(3);
  std::vector<uint32_t> file;
  std::vector<uint64_t> offset, length;
  for (unsigned i = 0; i < 500; ++i) {
    const unsigned f = i % 7 % 3;
    const std::string image(1 + i % 90, static_cast<char>(i));
    const std::string pickle = std::string("\x80\x03") + "C" + static_cast<char>(image.size()) +
                               image + "M" + static_cast<char>(i) + static_cast<char>(i >> 8) +
                               "\x86.";
    file.push_back(f);
    offset.push_back(files[f].size());
    length.push_back(pickle.size());
    files[f] += pickle;
  }
  const MemoryStorage storage(files);
  for (const unsigned threads : {1u, 3u}) {
    const auto payloads =
        find_payloads(storage, file, offset, length, PayloadKind::pickled, "", "", threads);
    ASSERT_EQ(payloads.size(), 500u);
    for (unsigned i = 0; i < 500; ++i) {
      ASSERT_EQ(payloads[i].label, i);
      ASSERT_EQ(files[file[i]].substr(payloads[i].offset, payloads[i].length),
                std::string(1 + i % 90, static_cast<char>(i)));
    }
  }
  length[321] -= 1;
  EXPECT_THROW(find_payloads(storage, file, offset, length, PayloadKind::pickled, "", "", 2),
               Error);
}

TEST(FindAllMembers, GivesThoseOfRecordsOfManyFilesInOrder) {
  std::vector<std::string> files(3);
  std::vector<uint32_t> file;
  std::vector<uint64_t> offset, length;
  for (unsigned i = 0; i < 500; ++i) {
    const unsigned f = i % 7 % 3;
    const std::string text(i % 30, static_cast<char>('a' + i % 26));
    std::string record = std::string("\xa1s") + static_cast<char>(0xa0 + text.size()) + text;
    if (i >= 400) record += std::string("\xa1n") + static_cast<char>(i % 128);
    record.insert(0, 1, static_cast<char>(i < 400 ? 0x81 : 0x82));
    file.push_back(f);
    offset.push_back(files[f].size());
    length.push_back(record.size());
    files[f] += record;
  }
  const MemoryStorage storage(files);
  for (const unsigned threads : {1u, 4u}) {
    const MembersFound found =
        find_all_members(storage, file, offset, length, MembersKind::msgpack, {}, threads);
    ASSERT_EQ(found.names, (std::vector<std::string>{"s", "n"}));
    ASSERT_EQ(found.types, (std::vector{MemberType::text, MemberType::integer}));
    for (unsigned i = 0; i < 500; ++i) {
      ASSERT_EQ(files[file[i]].substr(found.offset[2 * i], found.length[2 * i]),
                std::string(i % 30, static_cast<char>('a' + i % 26)));
      ASSERT_EQ(found.offset[2 * i + 1] == kNoMember, i < 400);
      if (i >= 400) {
        ASSERT_EQ(files[file[i]][found.offset[2 * i + 1]], static_cast<char>(i % 128));
      }
    }
  }
  length[321] -= 1;
  EXPECT_THROW(find_all_members(storage, file, offset, length, MembersKind::msgpack, {}, 4), Error);
}

TEST(FindAllMembers, OfTooManyNamesTogetherAreReadByName) {
  // Of 1,025 maps, each with a name of its own.
  std::string bytes;
  std::vector<uint64_t> offset, length;
  for (unsigned i = 0; i < 1025; ++i) {
    char record[8];
    std::snprintf(record, sizeof record, "\x81\xa4%04u", i);
    offset.push_back(bytes.size());
    length.push_back(7);
    bytes += record + std::string("\x07");
  }
  const MemoryStorage storage({bytes});
  const auto found = [&](std::span<const uint64_t> lengths, const std::vector<std::string>& names) {
    return find_all_members(storage, {}, offset, lengths, MembersKind::msgpack, names, 3);
  };
  EXPECT_EQ(found(std::span(length).first(1024), {}).names.size(), 1024u);
  EXPECT_THROW(found(length, {}), Error);
  const MembersFound one = found(length, {"1024"});
  EXPECT_EQ(one.offset[1024], offset[1024] + 6);
  EXPECT_EQ(one.offset[1023], kNoMember);
}

}  // namespace
}  // namespace nostall::records
