// What processes of a node make once, also when one of them is killed while it does.
#include "base/node_once.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

#include "base/error.h"

namespace nostall {
namespace {

using namespace std::chrono_literals;

std::string fresh_key() {
  static int count = 0;
  return "once test " + std::to_string(::getpid()) + " " + std::to_string(++count);
}

std::vector<Descriptor> a_file() {
  std::vector<Descriptor> files;
  files.push_back(memory_file("once").take());
  return files;
}

std::vector<Descriptor> never() { throw std::logic_error("made twice"); }

void any(const std::vector<Descriptor>&) {}

ino_t number_of(const Descriptor& file) {
  struct stat status {};
  EXPECT_EQ(::fstat(file.get(), &status), 0);
  return status.st_ino;
}

// A process that makes what `key` names, or gives it: it says so, and does not come to an end.
pid_t one_that(const std::string& key, bool gives) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const auto stays = [&] {
      static_cast<void>(!::write(ends[1], "x", 1));
      for (;;) ::pause();
    };
    NodeOnce once(key);
    once.get(
        [&] {
          if (!gives) stays();
          return a_file();
        },
        any, 60s);
    stays();
  }
  ::close(ends[1]);
  char said = 0;
  EXPECT_EQ(::read(ends[0], &said, 1), 1);
  ::close(ends[0]);
  return child;
}

TEST(NodeOnce, GivesTheSameFilesForAsLongAsTheirMakerLives) {
  const std::string key = fresh_key();
  NodeOnce second(key), other(fresh_key());
  ino_t made = 0;
  {
    NodeOnce first(key);
    made = number_of(first.get(a_file, any, 60s).at(0));
    EXPECT_TRUE(first.made());
    EXPECT_EQ(number_of(second.get(never, any, 60s).at(0)), made);
    EXPECT_FALSE(second.made());
  }
  other.get(a_file, any, 60s);
  EXPECT_TRUE(other.made());
  NodeOnce late(key);
  late.get(a_file, any, 60s);
  EXPECT_TRUE(late.made());
}

TEST(NodeOnce, AnotherTakesOverFromOneThatIsKilled) {
  const std::string key = fresh_key();
  const pid_t maker = one_that(key, false);
  NodeOnce once(key);
  int waits = 0;
  once.get(a_file, any, 60s, [&] {
    // It waits for the first time: only now nothing is made.
    if (waits++ == 0) ::kill(maker, SIGKILL);
  });
  EXPECT_GE(waits, 1);
  EXPECT_TRUE(once.made());
  ::waitpid(maker, nullptr, 0);
}

TEST(NodeOnce, MakesItsOwnWhereAnotherTakesTooLong) {
  const std::string key = fresh_key();
  const pid_t maker = one_that(key, false);
  NodeOnce once(key), interrupted(key);
  once.get(a_file, any, 300ms);
  EXPECT_TRUE(once.made());
  EXPECT_THROW(interrupted.get(never, any, 60s, [] { throw std::runtime_error("interrupted"); }),
               std::runtime_error);
  ::kill(maker, SIGKILL);
  ::waitpid(maker, nullptr, 0);
}

TEST(NodeOnce, WaitsWithOneConnectionHoweverLong) {
  const std::string key = fresh_key();
  const std::string name = Handover(key, 0, 1).base() + "0-turn";
  // One that has the turn, on a system whose queue of callers has one place.
  Descriptor holder(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::memcpy(at.sun_path + 1, name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  ASSERT_EQ(::bind(holder.get(), reinterpret_cast<sockaddr*>(&at), size), 0);
  ASSERT_EQ(::listen(holder.get(), 0), 0);
  NodeOnce once(key), later(key);
  int waits = 0;
  const auto end_the_turn = [&] {
    if (++waits == 3) holder.reset();
  };
  const ino_t made = number_of(once.get(a_file, any, 60s, end_the_turn).at(0));
  EXPECT_EQ(waits, 3);
  // It had the turn: what it made is given.
  EXPECT_EQ(number_of(later.get(never, any, 60s).at(0)), made);
}

TEST(NodeOnce, CanBeInterruptedWhereTheOneThatHasItIsStopped) {
  const std::string key = fresh_key();
  const pid_t stopped = one_that(key, true);
  ::kill(stopped, SIGSTOP);
  EXPECT_EQ(::waitpid(stopped, nullptr, WUNTRACED), stopped);
  NodeOnce interrupted(key);
  EXPECT_THROW(interrupted.get(never, any, 60s, [] { throw std::runtime_error("interrupted"); }),
               std::runtime_error);
  ::kill(stopped, SIGKILL);
  ::waitpid(stopped, nullptr, 0);
}

TEST(NodeOnce, MakesItsOwnWhereOthersFilesAreOfNoUse) {
  const std::string key = fresh_key();
  NodeOnce first(key), second(key), third(key);
  const ino_t given = number_of(first.get(a_file, any, 60s).at(0));
  const auto refuse = [](const std::vector<Descriptor>&) {
    throw Error(ErrorKind::corruption, "of another version");
  };
  EXPECT_NE(number_of(second.get(a_file, refuse, 60s).at(0)), given);
  EXPECT_TRUE(second.made());
  EXPECT_EQ(number_of(third.get(never, any, 60s).at(0)), given);
}

TEST(NodeOnce, LetsTheNextOneTryWhatFailed) {
  const std::string key = fresh_key();
  NodeOnce first(key), second(key);
  EXPECT_THROW(first.get(never, any, 60s), std::logic_error);
  second.get(a_file, any, 60s);
  EXPECT_TRUE(second.made());
}

}  // namespace
}  // namespace nostall
