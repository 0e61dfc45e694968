// Snapshots, their files, checked copies and reads: every failing call, rates, gates and locks.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <future>
#include <random>
#include <semaphore>
#include <thread>

#include "../failing_files.h"
#include "../forked.h"
#include "../refuse.h"
#include "../temporary.h"
#include "base/activity.h"
#include "base/crc32c.h"
#include "checkpoint/snapshot.h"
#include "checkpoint/transfer.h"
#include "checkpoint/write.h"

namespace nostall::checkpoint {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

class CheckpointTest : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.path(name); }

  // A snapshot of odd pieces, one of them across blocks; `expected` is what it must hold.
  std::shared_ptr<Snapshot> snapshot_of(uint64_t bytes, unsigned threads = 2,
                                        Copying copying = Copying::at_once) {
    const std::string random = random_bytes(bytes, bytes);
    const auto* r = reinterpret_cast<const std::byte*>(random.data());
    state_.assign(r, r + bytes);
    const std::string header(64, 'h');
    const auto* h = reinterpret_cast<const std::byte*>(header.data());
    expected_.assign(h, h + header.size());
    expected_.insert(expected_.end(), state_.begin(), state_.end());
    std::vector<Piece> pieces;
    const std::vector<uint64_t> sizes{1, 0, 4097, 77777, 31, 5'000'001};
    uint64_t at = 0;
    for (size_t i = 0; at < bytes; ++i) {
      const uint64_t size = std::min(sizes[i % sizes.size()], bytes - at);
      pieces.push_back({state_.data() + at, size});
      at += size;
    }
    auto made = std::make_shared<Snapshot>(threads);
    made->begin({h, header.size()}, pieces, copying);
    return made;
  }

  static std::vector<std::byte> content(const std::string& file) {
    std::ifstream in(file, std::ios::binary | std::ios::ate);
    std::vector<std::byte> bytes(static_cast<size_t>(in.tellg()));
    in.seekg(0).read(reinterpret_cast<char*>(bytes.data()),
                     static_cast<std::streamsize>(bytes.size()));
    EXPECT_TRUE(in) << file;
    return bytes;
  }

  const TemporaryFolder folder_;
  std::vector<std::byte> state_, expected_;
};

// Fails, tears or delays what is asked of it.
class Faulty : public FileSystem {
 public:
  int64_t pwrite(int fd, std::span<const std::byte> from, uint64_t offset) override {
    if (++writes_ == fail_at_) return -fail_with_;
    if (is_direct(fd) && refuse_direct_) return -EINVAL;
    if (held_.valid() && held_.wait_for(60s) != std::future_status::ready) late_ = true;
    return FileSystem::pwrite(fd, from, offset);
  }
  static bool is_direct(int fd) { return (::fcntl(fd, F_GETFL) & O_DIRECT) != 0; }

  std::atomic<int> writes_{0};
  int fail_at_ = 0, fail_with_ = EIO;
  bool refuse_direct_ = false;
  std::shared_future<void> held_;  // writes wait for it
  std::atomic<bool> late_{false};  // in vain
};

TEST_F(CheckpointTest, StreamCopyTakesAnyAlignmentAndSize) {
  std::vector<std::byte> from(20000), to(20000);
  std::mt19937_64 random(1);
  for (auto& b : from) b = static_cast<std::byte>(random());
  for (uint64_t size : {0, 1, 31, 4095, 4096, 4097, 12345}) {
    for (uint64_t skew : {0, 1, 7, 33}) {
      std::fill(to.begin(), to.end(), std::byte{0xee});
      stream_copy(to.data() + skew + 1, from.data() + 2 * skew, size);
      ASSERT_EQ(std::memcmp(to.data() + skew + 1, from.data() + 2 * skew, size), 0);
      ASSERT_EQ(to[skew], std::byte{0xee});
      ASSERT_EQ(to[skew + 1 + size], std::byte{0xee});
    }
  }
}

TEST_F(CheckpointTest, WritesWhatTheStateWas) {
  for (const uint64_t bytes :
       {uint64_t{0}, uint64_t{1}, kAlignment - 64, kBlock - 64, kBlock, 3 * kBlock + 12345}) {
    auto snapshot = snapshot_of(bytes);
    snapshot->finish();
    std::fill(state_.begin(), state_.end(), std::byte{0});  // the training goes on
    const Written written = Write(snapshot, path("f"), {}).run();
    EXPECT_EQ(written.size, expected_.size());
    EXPECT_EQ(content(path("f")), expected_);
    ASSERT_EQ(written.crcs.size(), blocks_of(expected_.size()));
    for (size_t i = 0; i < written.crcs.size(); ++i) {
      EXPECT_EQ(written.crcs[i], crc32c(snapshot->block(i)));
    }
  }
}

TEST_F(CheckpointTest, SavesAndReadsBackWhereNoThreadIsToBeHad) {
  with_refused(kThreadCalls, EAGAIN, [&] {
    for (const Copying copying : {Copying::at_once, Copying::in_background}) {
      const auto snapshot = snapshot_of(3 * kBlock + 5000, 4, copying);
      snapshot->finish();
      const Written written = Write(snapshot, path("a"), {.threads = 3}).run();
      EXPECT_EQ(content(path("a")), expected_);
      FileCopy(path("a"), path("b"), written.size, written.crcs, {}).run();
      Memory memory(written.size, 3);
      EXPECT_THAT(read_checked(path("b"), written.size, written.crcs, &memory, 3).damaged,
                  testing::IsEmpty());
      EXPECT_EQ(std::memcmp(memory.data(), expected_.data(), expected_.size()), 0);
    }
  });
}

TEST_F(CheckpointTest, AWriterWaitsForNoCopyWhereNoThreadIsToBeHad) {
  with_refused(kThreadCalls, EAGAIN, [&] {
    const auto snapshot = snapshot_of(3 * kBlock + 5000, 4, Copying::in_background);
    Write(snapshot, path("f"), {}).run();  // before finish
    EXPECT_EQ(content(path("f")), expected_);
    EXPECT_EQ(snapshot->copied_bytes(), 0U);
  });
}

TEST_F(CheckpointTest, WritesWhileCopying) {
  auto snapshot = snapshot_of(5 * kBlock + 77, 2, Copying::in_background);
  Write write(snapshot, path("f"), {.threads = 2});
  std::thread writer([&] { write.run(); });
  snapshot->finish();
  writer.join();
  EXPECT_EQ(content(path("f")), expected_);
}

TEST_F(CheckpointTest, ReplacesALongerFile) {
  std::ofstream(path("f")) << std::string(100000, 'x');
  auto snapshot = snapshot_of(10);
  snapshot->finish();
  Write(snapshot, path("f"), {}).run();
  EXPECT_EQ(content(path("f")), expected_);
}

TEST_F(CheckpointTest, OneSnapshotServesManySaves) {
  auto snapshot = snapshot_of(kBlock * 2);
  snapshot->finish();
  const uint64_t capacity = snapshot->capacity();
  for (int i = 0; i < 5; ++i) {
    for (auto& b : state_) b = static_cast<std::byte>(i);
    snapshot->begin({}, {{state_.data(), state_.size()}},
                    i % 2 == 1 ? Copying::in_background : Copying::at_once);
    snapshot->finish();
    Write(snapshot, path("f"), {}).run();
    EXPECT_EQ(content(path("f")), state_);
  }
  EXPECT_EQ(snapshot->capacity(), capacity);
}

TEST_F(CheckpointTest, AForkedChildLosesNoMemoryWithTheSnapshotOfItsParent) {
  auto snapshot = snapshot_of(1 << 20);
  snapshot->finish();
  auto* const begin = const_cast<std::byte*>(snapshot->block(0).data());
  EXPECT_EQ(status_of_child([&] {
              // Where the parent's memory was, the system gives the child memory of its own if it may.
              void* const own = ::mmap(begin, kBlock, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
              const bool taken = own == begin;
              if (taken) *begin = std::byte{1};
              if (!taken && *begin != std::byte{0}) return 3;  // of the parent's state nothing
              snapshot.reset();
              return taken && *begin != std::byte{1} ? 4 : 0;
            }),
            0);
  EXPECT_TRUE(std::ranges::equal(snapshot->block(0).first(expected_.size()), expected_));
}

TEST_F(CheckpointTest, WritesBufferedWhereDirectIsRefused) {
  Faulty files;
  files.refuse_direct_ = true;
  auto snapshot = snapshot_of(2 * kBlock + 5);
  snapshot->finish();
  const Written written = Write(snapshot, path("f"), {.threads = 2}, nullptr, files).run();
  EXPECT_FALSE(written.direct);
  EXPECT_EQ(content(path("f")), expected_);
}

TEST_F(CheckpointTest, SaysWhatTheDiskRefused) {
  for (const int error : {ENOSPC, EIO}) {
    Faulty files;
    files.fail_at_ = 2;
    files.fail_with_ = error;
    auto snapshot = snapshot_of(4 * kBlock);
    snapshot->finish();
    Write write(snapshot, path("f"), {}, nullptr, files);
    try {
      write.run();
      FAIL() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::io);
      EXPECT_EQ(e.error_number(), error);
      EXPECT_THAT(e.what(), testing::HasSubstr(path("f")));
    }
  }
}

TEST_F(CheckpointTest, EveryCallThatFailsIsToldWithTheFile) {
  auto snapshot = snapshot_of(100);
  snapshot->finish();
  const auto told = [&](const std::string& call, int error, bool direct = true) -> std::string {
    FailingFiles files;
    files.errors[call] = error;
    try {
      Write(snapshot, path("f"), {.direct = direct}, nullptr, files).run();
      return "";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::io);
      EXPECT_EQ(e.error_number(), error);
      EXPECT_THAT(e.what(), testing::HasSubstr(path("f")));
      return e.what();
    }
  };
  using testing::HasSubstr;
  EXPECT_THAT(told("open", EROFS), HasSubstr("cannot make"));
  EXPECT_THAT(told("reserve", ENOSPC), HasSubstr("no room for "));
  EXPECT_THAT(told("reserve", EDQUOT), HasSubstr("no room for "));
  EXPECT_THAT(told("reserve", EIO), HasSubstr("cannot reserve "));
  EXPECT_EQ(told("reserve", EOPNOTSUPP), "");
  EXPECT_THAT(told("truncate", EIO), HasSubstr("cannot set the size"));
  EXPECT_THAT(told("fsync", EIO), HasSubstr("durable"));
  for (const int error : {EIO, ENOSPC, EDQUOT}) {
    EXPECT_THAT(told("write_back", error, false), HasSubstr("cannot write"));
  }
  for (const int error : {EINVAL, ESPIPE, ENOSYS, EOPNOTSUPP}) {
    EXPECT_EQ(told("write_back", error, false), "");
  }
}

TEST_F(CheckpointTest, HurryLiftsRateAndGate) {
  auto gate = std::make_shared<Gate>();
  gate->hold();
  auto snapshot = snapshot_of(8 * kBlock);
  snapshot->finish();
  // At this rate and with this gate the file would take minutes.
  Write write(snapshot, path("f"), {.rate = kBlock / 10, .gate_patience = 0.05}, gate);
  std::thread writer([&] { write.run(); });
  std::this_thread::sleep_for(50ms);
  const auto began = Clock::now();
  write.hurry();
  writer.join();
  EXPECT_LT(Clock::now() - began, 60s);
  EXPECT_EQ(content(path("f")), expected_);
}

// Storage that hangs: whoever writes waits for `answers`.
class HangingFiles : public FileSystem {
 public:
  int64_t pwrite(int fd, std::span<const std::byte> from, uint64_t offset) override {
    asked.release();
    answers.wait();
    return FileSystem::pwrite(fd, from, offset);
  }

  std::counting_semaphore<> asked{0};
  std::shared_future<void> answers;
};

TEST_F(CheckpointTest, HurryDoesNotWaitForStorage) {
  auto snapshot = snapshot_of(8 * kBlock);
  snapshot->finish();
  std::promise<void> answer;
  HangingFiles files;
  files.answers = answer.get_future().share();
  Write write(snapshot, path("f"), {}, nullptr, files);
  std::thread writer([&] { write.run(); });
  files.asked.acquire();
  std::future<void> hurried = std::async(std::launch::async, [&] { write.hurry(); });
  EXPECT_EQ(hurried.wait_for(60s), std::future_status::ready);
  answer.set_value();
  writer.join();
  EXPECT_EQ(content(path("f")), expected_);
}

TEST_F(CheckpointTest, ASnapshotThatIsBeingWrittenStaysAsItIs) {
  auto snapshot = snapshot_of(2 * kBlock);
  snapshot->finish();
  const uint64_t capacity = snapshot->capacity();
  std::promise<void> answer;
  HangingFiles files;
  files.answers = answer.get_future().share();
  Write write(snapshot, path("f"), {}, nullptr, files);
  std::thread writer([&] { write.run(); });
  files.asked.acquire();
  EXPECT_THROW(snapshot->reserve(2 * capacity), Error);
  EXPECT_THROW(snapshot->begin({}, {}, Copying::at_once), Error);
  answer.set_value();
  writer.join();
  EXPECT_EQ(content(path("f")), expected_);
  snapshot->reserve(2 * capacity);
  EXPECT_EQ(snapshot->capacity(), 2 * capacity);
}

// Takes what there is room for before it says that it is full.
class FullFiles : public FileSystem {
 public:
  int reserve(int fd, uint64_t size) override {
    EXPECT_EQ(FileSystem::reserve(fd, size / 2), 0);
    return -ENOSPC;
  }
};

TEST_F(CheckpointTest, WhatDoesNotFitLeavesTheRoomToOthers) {
  auto snapshot = snapshot_of(2 * kBlock);
  snapshot->finish();
  FullFiles files;
  EXPECT_THROW(Write(snapshot, path("f"), {}, nullptr, files).run(), Error);
  EXPECT_EQ(std::filesystem::file_size(path("f")), 0u);
}

TEST_F(CheckpointTest, KeepsTheRate) {
  auto snapshot = snapshot_of(4 * kBlock);
  snapshot->finish();
  const Written written = Write(snapshot, path("f"), {.rate = 40 * kBlock}).run();
  EXPECT_GE(written.seconds, 0.095);  // 5 blocks, the first for nothing
}

TEST_F(CheckpointTest, StopEndsAWriteAndACopyThatWaitForTheirRate) {
  const WriteOptions slow{.rate = kBlock / 1000};  // a quarter of an hour for a block
  const auto stopped = [](auto& transfer) {
    std::thread stopper([&] {
      std::this_thread::sleep_for(20ms);
      transfer.stop();
    });
    try {
      transfer.run();
      ADD_FAILURE() << "not stopped";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::stopped);
    }
    stopper.join();
  };
  auto snapshot = snapshot_of(8 * kBlock);
  snapshot->finish();
  Write write(snapshot, path("f"), slow);
  stopped(write);
  snapshot = snapshot_of(8 * kBlock);
  snapshot->finish();
  const Written written = Write(snapshot, path("g"), {}).run();
  FileCopy copy(path("g"), path("h"), written.size, written.crcs, slow);
  stopped(copy);
}

TEST_F(CheckpointTest, AHeldGateDelaysButNeverForEver) {
  auto gate = std::make_shared<Gate>();
  gate->hold();
  auto snapshot = snapshot_of(2 * kBlock);
  snapshot->finish();
  const Written written = Write(snapshot, path("f"), {.gate_patience = 0.03}, gate).run();
  EXPECT_GE(written.seconds, 0.085);  // three blocks
  EXPECT_TRUE(gate->is_held());
  EXPECT_EQ(content(path("f")), expected_);
}

TEST_F(CheckpointTest, AConsiderateWriteWaitsForOthersOfTheProcess) {
  auto gate = std::make_shared<Gate>();
  auto snapshot = snapshot_of(2 * kBlock);
  snapshot->finish();
  {
    const Activity reading;
    const Written kept =
        Write(snapshot, path("f"), {.gate_patience = 0.03, .considerate = true}, gate).run();
    EXPECT_GE(kept.seconds, 0.085);  // three blocks
    EXPECT_GE(gate->waited(), 85ms);
    EXPECT_FALSE(gate->wait_open(1ms, true));
    EXPECT_TRUE(gate->wait_open(1ms));
  }
  EXPECT_TRUE(gate->wait_open(60s, true));
  EXPECT_EQ(content(path("f")), expected_);
}

TEST_F(CheckpointTest, ALazyImageIsWrittenFromWhereItLies) {
  auto snapshot = snapshot_of(3 * kBlock + 999, 2, Copying::lazily);
  const Written written = Write(snapshot, path("f"), {}).run();
  EXPECT_EQ(snapshot->copied_bytes(), 0u);
  EXPECT_EQ(content(path("f")), expected_);
  EXPECT_EQ(written.crcs.size(), 4u);
  snapshot->finish();  // the update comes: there is nothing left to copy
  EXPECT_EQ(snapshot->copied_bytes(), 0u);
  // No one holds the state of the save any more.
  EXPECT_THROW(Write(snapshot, path("g"), {}).run(), Error);
}

TEST_F(CheckpointTest, WhatAnUpdateReachesIsCopiedBefore) {
  auto snapshot = snapshot_of(4 * kBlock, 2, Copying::lazily);
  auto gate = std::make_shared<Gate>();
  gate->hold();
  std::thread writer([&] { Write(snapshot, path("f"), {.gate_patience = 60}, gate).run(); });
  const std::vector<uint32_t> first{0, 2, 4};  // all in the first block
  snapshot->copy(first);
  EXPECT_EQ(snapshot->copied_bytes(), kBlock);
  std::fill(state_.begin(), state_.begin() + 80'000, std::byte{0});
  snapshot->copy(first);
  EXPECT_EQ(snapshot->copied_bytes(), kBlock);
  gate->release();
  writer.join();
  EXPECT_EQ(content(path("f")), expected_);
}

// The update comes while blocks are read: what was read of a block that was copied does not count.
// ThreadSanitizer is right that reading and updating overlap, which is the point of it.
#if defined(__SANITIZE_THREAD__)
constexpr bool kMayOverlap = false;
#else
constexpr bool kMayOverlap = true;
#endif

TEST_F(CheckpointTest, AnUpdateWaitsForNoReader) {
  for (int round = 0; round < 4; ++round) {
    auto snapshot = snapshot_of(3 * kBlock, 2, Copying::lazily);
    std::thread writer([&] { Write(snapshot, path("f"), {.threads = 2}).run(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(round));
    snapshot->finish();
    if (kMayOverlap) std::fill(state_.begin(), state_.end(), std::byte{0});
    writer.join();
    ASSERT_EQ(content(path("f")), expected_);
  }
}

TEST_F(CheckpointTest, CopiesAndReadsBack) {
  auto snapshot = snapshot_of(3 * kBlock + 999);
  snapshot->finish();
  const Written written = Write(snapshot, path("fast"), {}).run();
  const Written copied =
      FileCopy(path("fast"), path("durable"), written.size, written.crcs, {}).run();
  EXPECT_EQ(copied.crcs, written.crcs);
  EXPECT_EQ(content(path("durable")), expected_);
  Memory memory(written.size, 2);
  std::atomic<uint64_t> progress{0};
  const ReadReport report =
      read_checked(path("durable"), written.size, written.crcs, &memory, 3, &progress);
  EXPECT_TRUE(report.damaged.empty());
  EXPECT_EQ(progress, written.size);
  EXPECT_EQ(std::memcmp(memory.data(), expected_.data(), expected_.size()), 0);
}

TEST_F(CheckpointTest, FindsEveryFlippedBit) {
  auto snapshot = snapshot_of(2 * kBlock + 10);
  snapshot->finish();
  const Written written = Write(snapshot, path("f"), {}).run();
  std::mt19937_64 random(3);
  for (int trial = 0; trial < 20; ++trial) {
    const uint64_t at = random() % written.size;
    std::vector<std::byte> bytes = expected_;
    bytes[at] ^= std::byte(1u << (random() % 8));
    std::ofstream(path("f"), std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), std::ssize(bytes));
    const ReadReport report = read_checked(path("f"), written.size, written.crcs, nullptr, 2);
    EXPECT_EQ(report.damaged, std::vector<uint64_t>{at / kBlock});
    FileCopy copy(path("f"), path("g"), written.size, written.crcs, {.priority = Priority::normal});
    EXPECT_THROW(copy.run(), Error);
  }
}

TEST_F(CheckpointTest, RefusesAFileOfAnotherSize) {
  auto snapshot = snapshot_of(1000);
  snapshot->finish();
  const Written written = Write(snapshot, path("f"), {}).run();
  ASSERT_EQ(::truncate(path("f").c_str(), 999), 0);
  try {
    read_checked(path("f"), written.size, written.crcs, nullptr, 1);
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::corruption);
  }
  EXPECT_THROW(read_checked(path("none"), written.size, written.crcs, nullptr, 1), Error);
}

// The first write waits until the calls of the training thread are over: one that waited for the disk
// would wait for itself.
TEST_F(CheckpointTest, ASlowDiskDoesNotHoldTheTraining) {
  Faulty files;
  std::promise<void> over;
  files.held_ = over.get_future().share();
  auto snapshot = snapshot_of(3 * kBlock);
  snapshot->finish();
  Write write(snapshot, path("f"), {}, nullptr, files);
  std::thread writer([&] { write.run(); });
  over.set_value();
  writer.join();
  EXPECT_EQ(content(path("f")), expected_);
  EXPECT_FALSE(files.late_);
}

}  // namespace
}  // namespace nostall::checkpoint
