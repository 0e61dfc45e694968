// Processes that find each other and share files without names.
#include "base/handover.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <optional>
#include <thread>

#include "../forked.h"
#include "base/error.h"

namespace nostall {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

Handover::Deadline soon() { return std::chrono::steady_clock::now() + 60s; }

std::string fresh_job() {
  static int count = 0;
  return "handover test " + std::to_string(::getpid()) + " " + std::to_string(++count);
}

Descriptor file_with(const std::string& text) {
  Descriptor file = memory_file("test").take();
  EXPECT_EQ(::pwrite(file.get(), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  return file;
}

std::string text_of(const Descriptor& file) {
  std::array<char, 64> text{};
  const ssize_t n = ::pread(file.get(), text.data(), text.size(), 0);
  return {text.data(), static_cast<size_t>(std::max<ssize_t>(n, 0))};
}

// A process that runs `work`, says so and then waits for its end.
class Child {
 public:
  template <typename Work>
  explicit Child(Work work) {
    int ends[2];
    EXPECT_EQ(::pipe(ends), 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      work([&] { EXPECT_EQ(::write(ends[1], "x", 1), 1); });
      ::_exit(0);
    }
    ::close(ends[1]);
    char said = 0;
    EXPECT_EQ(::read(ends[0], &said, 1), 1);
    ::close(ends[0]);
  }
  ~Child() { kill(); }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = 0;
};

// Takes a name as another program would.
Descriptor squat(const std::string& name, bool listening) {
  Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::memcpy(at.sun_path + 1, name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  EXPECT_EQ(::bind(socket.get(), reinterpret_cast<sockaddr*>(&at), size), 0);
  EXPECT_EQ(listening ? ::listen(socket.get(), 8) : 0, 0);
  return socket;
}

TEST(HandoverTest, WhoComesLaterGetsWhatTheOthersHave) {
  const std::string job = fresh_job();
  Handover first(job, 0, 3), second(job, 1, 3), third(job, 2, 3);
  EXPECT_TRUE(first.ask(soon()).empty());
  const Descriptor a = file_with("a"), c = file_with("c");
  first.give({a.get(), -1, c.get()});
  const auto files = second.ask(soon());
  ASSERT_EQ(files.size(), 3u);
  EXPECT_EQ(text_of(files[0]), "a");
  EXPECT_FALSE(files[1]);
  EXPECT_EQ(text_of(files[2]), "c");
  second.give({files[0].get(), -1, files[2].get()});
  first.stop();
  EXPECT_EQ(text_of(third.ask(soon()).at(2)), "c");
  second.stop();
  EXPECT_TRUE(third.ask(soon()).empty());
  Handover another(fresh_job(), 0, 3);
  first.give({a.get()});
  EXPECT_TRUE(another.ask(soon()).empty());
}

TEST(HandoverTest, NothingIsLeftOfAProcessThatIsKilled) {
  const std::string job = fresh_job();
  Handover me(job, 1, 2);
  Child other([&](auto ready) {
    Handover it(job, 0, 2);
    const Descriptor file = file_with("theirs");
    const auto turn = it.turn(soon());
    it.give({file.get()});
    ready();
    ::pause();
  });
  EXPECT_EQ(text_of(me.ask(soon()).at(0)), "theirs");
  try {
    static_cast<void>(me.turn(std::chrono::steady_clock::now() + 20ms));
    FAIL() << "two have the turn";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::peer);
    EXPECT_THAT(e.what(), HasSubstr("process " + std::to_string(other.pid())));
  }
  std::thread later([&] {
    const auto turn = me.turn(soon());
    EXPECT_TRUE(me.ask(soon()).empty());
  });
  other.kill();
  later.join();
}

TEST(HandoverTest, AStoppedProcessIsPassedOverOrNamed) {
  const std::string job = fresh_job();
  Handover me(job, 2, 3), second(job, 1, 3);
  Child stopped([&](auto ready) {
    Handover it(job, 0, 3);
    const Descriptor file = file_with("of the stopped one");
    it.give({file.get()});
    ready();
    ::pause();
  });
  ::kill(stopped.pid(), SIGSTOP);
  // Not before all its threads stand still.
  int status = 0;
  ASSERT_EQ(::waitpid(stopped.pid(), &status, WUNTRACED), stopped.pid());
  ASSERT_TRUE(WIFSTOPPED(status));
  try {
    me.ask(std::chrono::steady_clock::now() + 50ms);
    FAIL() << "answered";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::peer);
    EXPECT_THAT(e.what(), HasSubstr("process " + std::to_string(stopped.pid())));
  }
  const Descriptor file = file_with("of the second");
  second.give({file.get()});
  EXPECT_EQ(text_of(me.ask(soon()).at(0)), "of the second");
  // Nor is anything waited for at the names of a thousand that are not there.
  second.stop();
  Handover last(job, 1023, 1024), one(job, 5, 1024);
  last.give({file.get()});
  EXPECT_EQ(text_of(one.ask(soon()).at(0)), "of the second");
}

TEST(HandoverTest, AForkedChildKeepsNeitherNameNorTurn) {
  const std::string job = fresh_job();
  Handover me(job, 0, 2), other(job, 1, 2);
  const Descriptor file = file_with("mine");
  std::optional<Child> child;
  {
    const auto turn = me.turn(soon());
    me.give({file.get()});
    child.emplace([](auto ready) {
      ready();
      ::pause();
    });
    me.stop();
  }
  const auto turn = other.turn(soon());
  EXPECT_TRUE(other.ask(soon()).empty());
}

// Whether a socket with a name that begins so is open.
bool has_socket(const std::string& base) {
  for (int fd = 0; fd < 256; ++fd) {
    sockaddr_un at{};
    socklen_t size = sizeof at;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size) == 0 &&
        at.sun_family == AF_UNIX && std::memcmp(at.sun_path + 1, base.data(), base.size()) == 0) {
      return true;
    }
  }
  return false;
}

TEST(HandoverTest, AChildForkedAtAnyMomentKeepsNeitherNameNorTurn) {
  Handover me(fresh_job(), 0, 1);
  std::atomic<bool> ends{false};
  std::thread busy([&] {
    while (!ends) {
      const auto turn = me.turn(soon());
      me.give({});
      me.stop();
    }
  });
  int kept = 0;
  for (int i = 0; i < 100; ++i) {
    kept += status_of_child([&] { return has_socket(me.base()) ? 1 : 0; });
  }
  ends = true;
  busy.join();
  EXPECT_EQ(kept, 0);
}

TEST(HandoverTest, NamesThatOtherProgramsTookAreNotUsed) {
  const std::string job = fresh_job();
  Handover first(job, 0, 2), second(job, 1, 2);
  const std::string base = first.base();
  const Descriptor rank_name = squat(base + "0-0", false);  // and never listens
  const Descriptor file = file_with("mine");
  {
    const auto turn = first.turn(soon());
    first.give({file.get()});
  }
  EXPECT_EQ(text_of(second.ask(soon()).at(0)), "mine");
  first.stop();
  std::vector<Descriptor> all;
  for (const char* name : {"1-0", "2-0", "3-0"}) all.push_back(squat(base + name, true));
  try {
    first.give({file.get()});
    FAIL() << "given at a name of another program";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::io);
    EXPECT_THAT(e.what(), HasSubstr("@" + base + "0-0"));
  }
}

TEST(HandoverTest, AProcessThatStandsStillBeforeItListensHasTheTurn) {
  const std::string job = fresh_job();
  Handover me(job, 0, 1);
  std::optional<Descriptor> slow = squat(me.base() + "0-turn", false);
  try {
    // Longer than it takes for the name of another user's program to be passed over.
    static_cast<void>(me.turn(std::chrono::steady_clock::now() + 1500ms));
    FAIL() << "two have the turn";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::io);
    EXPECT_THAT(e.what(), HasSubstr("@" + me.base() + "0-turn"));
  }
  slow.reset();
  const auto turn = me.turn(soon());
  EXPECT_TRUE(has_socket(me.base() + "0-turn"));
}

TEST(HandoverTest, ANameWhoseOwnerTakesNoCallersIsNoRankThatHangs) {
  Handover me(fresh_job(), 0, 1);
  const std::string name = me.base() + "0-turn";
  const Descriptor stranger = squat(name, false);
  ASSERT_EQ(::listen(stranger.get(), 0), 0);
  sockaddr_un at{};
  at.sun_family = AF_UNIX;
  std::memcpy(at.sun_path + 1, name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  std::vector<Descriptor> callers;
  do {
    callers.emplace_back(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  } while (::connect(callers.back().get(), reinterpret_cast<sockaddr*>(&at), size) == 0);
  ASSERT_EQ(errno, EAGAIN);
  try {
    static_cast<void>(me.turn(std::chrono::steady_clock::now() + 20ms));
    FAIL() << "had the turn";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::io);
    EXPECT_THAT(e.what(), HasSubstr("@" + name));
  }
}

TEST(HandoverTest, WhatTheSystemRefusesToSendIsTold) {
  const std::string job = fresh_job();
  Handover me(job, 0, 2), other(job, 1, 2);
  // A number that no file which is opened meanwhile gets.
  const int closed = ::fcntl(file_with("closed").get(), F_DUPFD_CLOEXEC, 500);
  me.give({closed});
  ASSERT_EQ(::close(closed), 0);
  try {
    other.ask(soon());
    FAIL() << "taken for a rank that is gone";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::io);
    EXPECT_EQ(e.error_number(), EBADF);
  }
}

TEST(HandoverTest, AProcessWithoutAFreeDescriptorAnswers) {
  const std::string job = fresh_job();
  Handover me(job, 1, 2);
  Child full([&](auto ready) {
    const rlimit few{64, 64};
    ::setrlimit(RLIMIT_NOFILE, &few);
    Handover it(job, 0, 2);
    const Descriptor file = file_with("of a full table");
    it.give({file.get()});
    // The thread that gives has opened all that it needs when it has answered.
    it.ask(soon());
    while (::dup(0) >= 0) {
    }
    ready();
    ::pause();
  });
  EXPECT_EQ(text_of(me.ask(soon()).at(0)), "of a full table");
  EXPECT_EQ(text_of(me.ask(soon()).at(0)), "of a full table");
}

TEST(HandoverTest, ANameThatAnotherUserTookAndNeverListensAtIsPassedOver) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to be another user";
  Handover me(fresh_job(), 0, 1);
  Child stranger([&](auto ready) {
    if (::setuid(12345) != 0) ::_exit(1);
    const Descriptor turn_name = squat(me.base() + "0-turn", false);
    ready();
    ::pause();
  });
  const auto turn = me.turn(soon());
  EXPECT_TRUE(has_socket(me.base() + "1-turn"));
}

TEST(HandoverTest, OtherUsersGetNothingAndGiveNothing) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to be other users";
  const std::string job = fresh_job();
  Handover me(job, 0, 2);
  const Descriptor file = file_with("private");
  me.give({file.get()});
  const std::string base = me.base();
  Child stranger([&](auto ready) {
    if (::setuid(12345) != 0) ::_exit(1);
    // As they would call, with a name that is not theirs.
    Descriptor socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un at{};
    at.sun_family = AF_UNIX;
    const std::string name = base + "0-0";
    std::memcpy(at.sun_path + 1, name.data(), name.size());
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    char got = 0;
    if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&at), size) != 0 ||
        ::recv(socket.get(), &got, 1, 0) != 0) {
      ::_exit(1);
    }
    // And plant a file under ours, and the turn.
    const Descriptor turn_name = squat(base + "0-turn", true), planted = squat(base + "0-1", true);
    ready();
    ::pause();
  });
  me.stop();
  const auto turn = me.turn(soon());
  EXPECT_TRUE(me.ask(soon()).empty());
}

}  // namespace
}  // namespace nostall
