// Conditions over a fork.
#include "base/mutex.h"

#include <gtest/gtest.h>

#include <optional>
#include <thread>

#include "../forked.h"

namespace nostall {
namespace {

// The thread that waits is not in the child, and will not leave the condition there.
TEST(Condition, AForkedChildDestroysOneThatIsWaitedFor) {
  Mutex mutex;
  std::optional<Condition> condition(std::in_place);
  bool waiting = false, go_on = false;
  std::jthread waiter([&] {
    MutexLock lock(mutex);
    waiting = true;
    while (!go_on) condition->wait(lock);
  });
  for (bool seen = false; !seen;) {
    const MutexLock lock(mutex);  // free again once the other thread waits
    seen = waiting;
  }
  EXPECT_EQ(status_of_child([&] {
              condition.reset();
              return 0;
            }),
            0);
  const MutexLock lock(mutex);
  go_on = true;
  condition->notify_all();
}

}  // namespace
}  // namespace nostall
