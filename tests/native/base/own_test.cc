// Files in directories where other users may make files too.
#include "base/own.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "../failing_files.h"
#include "../forked.h"
#include "../temporary.h"
#include "base/lock.h"
#include "base/log.h"

namespace nostall {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class OwnFile : public testing::Test {
 protected:
  void SetUp() override {
    std::ofstream(root_ / "precious") << "precious";
    set_log_sink([this](LogLevel, const std::string& message) { warnings_.push_back(message); });
  }
  void TearDown() override { set_log_sink({}); }
  std::string precious() const {
    std::string text;
    std::ifstream(root_ / "precious") >> text;
    return text;
  }
  struct Plant {
    std::string what;  // what is wrong with it, as the message says
    std::function<void()> make;
    bool removable = true;
  };
  std::vector<Plant> plants() {
    std::vector<Plant> found = {
        {"symbolic link", [this] { fs::create_symlink(root_ / "precious", path_); }},
        {"symbolic link", [this] { fs::create_symlink(root_ / "nowhere", path_); }},
        {"names (hard links)", [this] { fs::create_hard_link(root_ / "precious", path_); }},
        {"not a regular file", [this] { ::mkfifo(path_.c_str(), 0600); }},
        {"not a regular file", [this] { fs::create_directory(path_); }, false},
        {"mode is 0644",
         [this] {
           Descriptor(::open(path_.c_str(), O_CREAT, 0600));
           ::chmod(path_.c_str(), 0644);
         }},
    };
    if (::geteuid() == 0) {
      found.push_back({"belongs to user 12345", [this] {
                         Descriptor(::open(path_.c_str(), O_CREAT, 0600));
                         ASSERT_EQ(::chown(path_.c_str(), 12345, 12345), 0);
                       }});
    }
    return found;
  }

  const TemporaryFolder folder_;
  const fs::path root_ = folder_.path(), path_ = root_ / "predictable";
  std::vector<std::string> warnings_;
};

TEST_F(OwnFile, IsMadeAndOpenedAgain) {
  const Descriptor made = open_own(path_, O_RDWR | O_CREAT).take();
  EXPECT_EQ(fs::status(path_).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  EXPECT_EQ(::write(made.get(), "abc", 3), 3);
  EXPECT_TRUE(open_own(path_, O_RDONLY));
  EXPECT_EQ(fs::file_size(path_), 3u);
  EXPECT_TRUE(open_own(path_, O_RDWR | O_CREAT | O_TRUNC));
  EXPECT_EQ(fs::file_size(path_), 0u);
  EXPECT_EQ(open_own(root_ / "none", O_RDWR).error().error_number(), ENOENT);
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(OwnFile, ReplacesWhatOthersPlantedAndTouchesNothingBehindIt) {
  for (const Plant& plant : plants()) {
    fs::permissions(root_ / "precious", fs::perms::owner_read | fs::perms::owner_write);
    plant.make();
    warnings_.clear();
    const auto file = open_own(path_, O_RDWR | O_CREAT | O_TRUNC);
    EXPECT_EQ(static_cast<bool>(file), plant.removable) << plant.what;
    const std::string told = file ? warnings_.at(0) : file.error().what();
    EXPECT_THAT(told, HasSubstr(path_.string()));
    EXPECT_THAT(told, HasSubstr(plant.what));
    EXPECT_EQ(file ? fs::file_size(path_) : 0, 0u);
    EXPECT_EQ(precious(), "precious");
    fs::remove_all(path_);
  }
}

TEST_F(OwnFile, IsRefusedRatherThanRemovedWhereItIsOnlyRead) {
  for (const Plant& plant : plants()) {
    fs::permissions(root_ / "precious", fs::perms::owner_read | fs::perms::owner_write);
    plant.make();
    const auto file = open_own(path_, O_RDONLY);
    ASSERT_FALSE(file) << plant.what;
    EXPECT_THAT(file.error().what(), HasSubstr(path_.string()));
    EXPECT_THAT(file.error().what(), HasSubstr(plant.what));
    EXPECT_TRUE(fs::exists(fs::symlink_status(path_)));
    fs::remove_all(path_);
  }
}

TEST_F(OwnFile, LiesInADirectoryThatNobodyElseMayEnter) {
  const fs::path directory = root_ / "ours";
  const Descriptor made = own_directory(directory).take();
  EXPECT_TRUE(own_directory(directory));
  EXPECT_TRUE(open_own(directory / "file", O_RDWR | O_CREAT, made.get()));
  EXPECT_TRUE(fs::exists(directory / "file"));
  fs::permissions(directory, fs::perms::group_write, fs::perm_options::add);
  EXPECT_THAT(own_directory(directory).error().what(), HasSubstr("its mode is 0720"));
  fs::create_directory_symlink(root_, root_ / "link");
  EXPECT_THAT(own_directory(root_ / "link").error().what(), HasSubstr("symbolic link"));
  EXPECT_THAT(own_directory(root_ / "precious").error().what(), HasSubstr("not a directory"));
}

TEST_F(OwnFile, WithoutANameIsGoneWithItsLastDescriptor) {
  const Descriptor file = unnamed_file(root_).take();
  const Descriptor again = reopen(file.get()).take();
  EXPECT_EQ(::write(file.get(), "abc", 3), 3);
  std::array<std::byte, 3> seen{};
  EXPECT_EQ(FileSystem::real().pread(again.get(), seen, 0), 3);
  // Locks belong to what was opened, not to the file.
  LockFile first(reopen(file.get()).take()), second(reopen(file.get()).take());
  EXPECT_EQ(first.try_lock(0, LockMode::exclusive), Locked::yes);
  EXPECT_EQ(second.try_lock(0, LockMode::exclusive), Locked::elsewhere);
  EXPECT_TRUE(second.is_held_elsewhere(0));
  EXPECT_EQ(std::distance(fs::directory_iterator(root_), fs::directory_iterator()), 1);
  EXPECT_THAT(unnamed_file(root_ / "none").error().what(), HasSubstr("none"));
}

TEST_F(OwnFile, LockTellsHeldFromImpossibleAndFailed) {
  FailingFiles files;
  LockFile lock(Descriptor(::open((root_ / "precious").c_str(), O_RDWR | O_CLOEXEC)), files);
  for (const int error : {ENOLCK, ENOTSUP, EINVAL, ENOSYS}) {
    files.errors["lock"] = error;
    EXPECT_EQ(lock.try_lock(0, LockMode::exclusive), Locked::unsupported) << error;
  }
  for (const int error : {EIO, ESTALE, EDEADLK}) {
    files.errors["lock"] = error;
    EXPECT_EQ(lock.try_lock(0, LockMode::exclusive), Locked::failed);
    EXPECT_EQ(lock.error_number(), error);
  }
  files.errors.clear();
  EXPECT_EQ(lock.try_lock(0, LockMode::exclusive), Locked::yes);
  ::mkfifo(path_.c_str(), 0600);
  EXPECT_THAT(LockFile::open(path_, true).error().what(), HasSubstr("not a regular file"));
}

// Two connected sockets; closing the first waits until the second takes what was written, or is gone.
struct Lingering {
  Lingering() {
    const Descriptor door(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const at = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(door.get(), at, size), 0);
    EXPECT_EQ(::listen(door.get(), 1), 0);
    EXPECT_EQ(::getsockname(door.get(), at, &size), 0);
    here = Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(here.get(), at, size), 0);
    there = Descriptor(::accept4(door.get(), nullptr, nullptr, SOCK_CLOEXEC));
    const linger patience{1, 3600};
    EXPECT_EQ(::setsockopt(here.get(), SOL_SOCKET, SO_LINGER, &patience, sizeof patience), 0);
    const std::vector<char> much(1 << 20);
    while (::send(here.get(), much.data(), much.size(), MSG_DONTWAIT) > 0) {
    }
  }
  Descriptor here, there;
};

std::string named(int fd) {
  std::error_code ignored;
  return fs::read_symlink("/proc/self/fd/" + std::to_string(fd), ignored).string();
}

TEST(CloseInChildren, KnowsAnyNumberOfThem) {
  constexpr int kMany = 400;
  std::vector<Descriptor> files;
  for (int i = 0; i < kMany; ++i) {
    files.push_back(memory_file("many").take());
    NoForks().close_in_children(files.back().get());
  }
  EXPECT_EQ(status_of_child([&] {
              int open = 0;
              for (const Descriptor& file : files) {
                open += ::fcntl(file.get(), F_GETFD) == -1 ? 0 : 1;
              }
              return std::min(open, 255);
            }),
            0);
  for (Descriptor& file : files) close_with_children(file);
}

TEST_F(OwnFile, AForkDoesNotWaitForAFileThatIsSlowToClose) {
  Lingering sockets;
  const int number = sockets.here.get();
  NoForks().close_in_children(number);
  const std::string before = named(number);
  std::atomic<bool> closed{false};
  std::thread closing([&] {
    close_with_children(sockets.here);
    closed = true;
  });
  while (named(number) == before) std::this_thread::yield();
  std::promise<int> forked;
  std::thread parent([&] {
    forked.set_value(status_of_child([&] { return ::fcntl(number, F_GETFD) == -1 ? 0 : 1; }));
  });
  auto status = forked.get_future();
  const bool in_time = status.wait_for(std::chrono::seconds(60)) == std::future_status::ready;
  EXPECT_FALSE(closed) << "it was not slow";
  sockets.there.reset();
  closing.join();
  parent.join();
  EXPECT_TRUE(in_time);
  EXPECT_EQ(status.get(), 0) << "the child has the file";
  EXPECT_EQ(named(number), "");
}

}  // namespace
}  // namespace nostall
