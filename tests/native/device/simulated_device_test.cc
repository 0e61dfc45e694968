// The runtime of the simulated accelerator, which torch's tests run on, without torch: its own threads
// and those of its callers, for ThreadSanitizer.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "runtime.h"

extern "C" {
void simdev_hold(int stream, int held);
void simdev_speed(int stream, double operation_seconds, double bytes_per_second);
void simdev_fail_after(uint64_t tasks);
void simdev_lose();
void simdev_virtual_time();
void simdev_pass_time(double seconds);
void simdev_reset();
const char* simdev_reports();
}

namespace simdev {
namespace {

using testing::HasSubstr;

constexpr size_t kBytes = 4096;

void copy(int stream, char* to, char* from) {
  const Range pinned{is_pinned(from) ? from : to, kBytes, is_pinned(to)};
  push(
      stream, "copy", {{from, kBytes, false}, {to, kBytes, true}}, kBytes,
      [=] { std::memcpy(reach(to), reach(from), kBytes); }, &pinned);
}

// What a loader does on one stream and its consumer on another.
void copies_and_uses(int device, int rounds) {
  const int side = new_stream(device), consumer = new_stream(device);
  auto* pinned = static_cast<char*>(take_pinned(kBytes));
  std::atomic<int> used{0};
  for (int i = 0; i < rounds; ++i) {
    auto* there = static_cast<char*>(take_device(device, kBytes));
    ASSERT_NE(there, nullptr);
    std::memset(pinned, i, kBytes);
    copy(side, there, pinned);
    Event copied;
    record(copied, side);
    block(copied, consumer);
    push(consumer, "use", {{there, kBytes, false}}, 0,
         [=, &used] { used += *static_cast<char*>(reach(there)) == static_cast<char>(i); });
    synchronize(copied);
    synchronize(consumer);
    EXPECT_TRUE(query(side));
    give_device(device, there, kBytes);
  }
  EXPECT_EQ(used, rounds);
  give_pinned(pinned, kBytes);
}

TEST(SimulatedDevice, StreamsOfSeveralThreadsKeepTheirOrder) {
  std::vector<std::thread> threads;
  for (const int device : {0, 1, 0}) threads.emplace_back(copies_and_uses, device, 50);
  for (auto& thread : threads) thread.join();
  EXPECT_STREQ(simdev_reports(), "");
}

TEST(SimulatedDevice, EventsAndWaitsOfAnIdleStreamTakeNoTask) {
  const int stream = new_stream(0), other = new_stream(0);
  Event event;
  record(event, stream);
  EXPECT_TRUE(query(event));
  block(event, other);
  EXPECT_TRUE(query(other));
  simdev_hold(stream, 1);
  record(event, stream);
  EXPECT_FALSE(query(event));
  block(event, other);
  EXPECT_FALSE(query(other));
  Event after;
  record(after, other);
  EXPECT_FALSE(query(after));
  simdev_hold(stream, 0);
  synchronize(after);
  EXPECT_TRUE(query(event));
}

TEST(SimulatedDevice, WaitsOfOneThreadSeeWhatAnotherReleases) {
  const int stream = new_stream(0);
  auto* pinned = static_cast<char*>(take_pinned(kBytes));
  auto* there = static_cast<char*>(take_device(0, kBytes));
  simdev_hold(stream, 1);
  copy(stream, there, pinned);
  Event copied;
  record(copied, stream);
  EXPECT_FALSE(query(copied));
  std::thread waiting([&] { synchronize(copied); });
  std::thread asking([&] {
    while (!query(copied)) std::this_thread::yield();
  });
  simdev_hold(stream, 0);
  waiting.join();
  asking.join();
  synchronize_device(0);
  EXPECT_STREQ(simdev_reports(), "");
}

// Another thread's copy is under way while this one touches its memory: the handler of the fault opens
// pages that streams use.
TEST(SimulatedDevice, MemoryOfAnUnfinishedCopyIsReportedWhileStreamsRun) {
  std::thread other(copies_and_uses, 1, 50);
  const int stream = new_stream(0);
  auto* pinned = static_cast<char*>(take_pinned(kBytes));
  auto* there = static_cast<char*>(take_device(0, kBytes));
  simdev_hold(stream, 1);
  copy(stream, there, pinned);
  EXPECT_TRUE(is_guarded(pinned, kBytes));
  pinned[17] = 1;
  simdev_hold(stream, 0);
  synchronize(stream);
  EXPECT_FALSE(is_guarded(pinned, kBytes));
  other.join();
  EXPECT_THAT(std::string(simdev_reports()), HasSubstr("reused: the host wrote memory"));
}

TEST(SimulatedDevice, AMissingEventIsReportedWhileStreamsRun) {
  std::thread other(copies_and_uses, 1, 50);
  const int side = new_stream(0), consumer = new_stream(0);
  auto* pinned = static_cast<char*>(take_pinned(kBytes));
  auto* there = static_cast<char*>(take_device(0, kBytes));
  copy(side, there, pinned);
  push(consumer, "use", {{there, kBytes, false}}, 0, [] {});
  synchronize_device(0);
  other.join();
  EXPECT_THAT(std::string(simdev_reports()), HasSubstr("and no event orders them"));
}

TEST(SimulatedDevice, AnErrorOfATaskAndALostDeviceAreTold) {
  const int stream = new_stream(0);
  push(stream, "fails", {}, 0, [] { throw std::runtime_error("of the task"); });
  synchronize(stream);
  EXPECT_THAT(std::string(simdev_reports()), HasSubstr("failed: of the task"));
  std::thread losing([] { simdev_fail_after(1); });
  losing.join();
  EXPECT_THROW(push(stream, "lost", {}, 0, [] {}), std::runtime_error);
  simdev_reset();
}

TEST(SimulatedDevice, WhoeverWaitsIsToldOfALostDevice) {
  const int stream = new_stream(0);
  simdev_hold(stream, 1);
  push(stream, "held", {}, 0, [] {});
  Event event;
  record(event, stream);
  std::atomic<int> told{0};
  std::vector<std::thread> waiting;
  for (int i = 0; i < 3; ++i) {
    waiting.emplace_back([&, i] {
      try {
        i == 0 ? synchronize(event) : i == 1 ? synchronize(stream) : synchronize_device(0);
      } catch (const std::runtime_error&) {
        ++told;
      }
    });
  }
  simdev_lose();
  for (std::thread& thread : waiting) thread.join();
  EXPECT_EQ(told, 3);
  EXPECT_THROW(push(stream, "after", {}, 0, [] {}), std::runtime_error);
  EXPECT_THROW(record(event, stream), std::runtime_error);
  EXPECT_THROW(query(event), std::runtime_error);
  EXPECT_THROW(block(event, stream), std::runtime_error);
  simdev_reset();
  synchronize(event);
  simdev_reports();
}

TEST(SimulatedDevice, TasksHaveTheTimeThatTheyWereGivenOnTheVirtualClock) {
  simdev_virtual_time();
  const int stream = new_stream(0);
  simdev_speed(stream, 2.0, 0);
  std::thread passing([] { simdev_pass_time(5.0); });
  passing.join();
  Event begin, end;
  record(begin, stream);
  push(stream, "work", {}, 0, [] {});
  record(end, stream);
  start_log();
  push(stream, "logged", {}, 0, [] {});
  synchronize(stream);
  EXPECT_DOUBLE_EQ(milliseconds(begin, end), 2000.0);
  const auto done = stop_log();
  ASSERT_EQ(done.size(), 1U);
  EXPECT_NEAR(done[0].end - done[0].begin, 2.0, 1e-6);
  simdev_reset();
}

}  // namespace
}  // namespace simdev
