// Threads that are ended in native code: which of them end the process.
#include "base/ended_threads.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

namespace nostall {
namespace {

int yes() { return 1; }
int no() { return 0; }

// As the frame of a library that takes Python's lock again.
void end_here() noexcept { pthread_exit(nullptr); }

// This program is the interpreter.
void keep(int (*shuts_down)()) {
  keep_ended_threads(reinterpret_cast<const void*>(&end_here), shuts_down);
}

bool sleeps(int thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  const size_t end = text.rfind(") ");
  return end != std::string::npos && text[end + 2] == 'S';
}

// A process with a thread that ends so; if `awaited`, it ends well once the thread sleeps.
[[noreturn]] void end_beside(void (*how)(), bool awaited) {
  std::atomic<int> number = 0;
  std::thread([&] {
    number = static_cast<int>(::gettid());
    how();
  }).detach();
  ::alarm(300);
  // A thread that ends the process may sleep on its way there, for a lock.
  while (!awaited) ::pause();
  while (number == 0 || !sleeps(number)) std::this_thread::yield();
  std::_Exit(0);
}

TEST(EndedThreads, SleepWhereTheyAreEnded) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT((keep(yes), end_beside(end_here, true)), testing::ExitedWithCode(0), "");
}

TEST(EndedThreads, AbortBeforeTheShutdown) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT((keep(no), end_beside(end_here, false)), testing::KilledBySignal(SIGABRT), "");
}

TEST(EndedThreads, TheThreadThatEndsTheProgramAborts) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT((keep(yes), end_here()), testing::KilledBySignal(SIGABRT), "");
}

}  // namespace
}  // namespace nostall
