// Threads in a forked child, which has none of them.
#include "base/own_thread.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "../forked.h"
#include "base/crew.h"

namespace nostall {
namespace {

TEST(OwnThread, IsJoinedByItsProcess) {
  std::atomic<int> done{0};
  {
    OwnThread first([&] { ++done; }), second;
    EXPECT_TRUE(first.joinable());
    EXPECT_FALSE(second.joinable());
    second = std::move(first);
    EXPECT_FALSE(first.joinable());
    EXPECT_TRUE(second.joinable());
    const OwnThread third(std::move(second));
    EXPECT_TRUE(third.joinable());
  }
  EXPECT_EQ(done, 1);
  OwnThread joined([&] { ++done; });
  joined.join();
  EXPECT_EQ(done, 2);
  EXPECT_FALSE(joined.joinable());
}

// The child's own threads, which nobody joins, have the places of those that it lacks.
TEST(OwnThread, IsLeftAloneByAForkedChild) {
  std::atomic<bool> end{false};
  const auto wait = [&] { end.wait(false); };
  auto ended = std::make_unique<OwnThread>([] {});
  auto waits = std::make_unique<OwnThread>(wait);
  auto crew = std::make_unique<Crew>();
  EXPECT_EQ(crew->start(3, wait), 3u);
  EXPECT_EQ(status_of_child([&] {
              for (int i = 0; i < 16; ++i) std::thread(wait).detach();
              const bool has_none = !ended->joinable() && !waits->joinable();
              *waits = OwnThread();
              ended.reset();
              waits.reset();
              crew->join();
              crew.reset();
              return has_none ? 7 : 8;
            }),
            7);
  end = true;
  end.notify_all();
  EXPECT_TRUE(waits->joinable());
}

}  // namespace
}  // namespace nostall
