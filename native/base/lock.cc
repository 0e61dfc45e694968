#include "base/lock.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>
#include <utility>

namespace nostall {
namespace {

// Descriptors to close in a forked child. A fixed table of atomics, since only async-signal-safe
// operations are allowed between fork and exec. Beyond it a child merely keeps locks until it ends.
constexpr size_t kMaxOpen = 256;
std::array<std::atomic<int>, kMaxOpen>& registry() {
  static std::array<std::atomic<int>, kMaxOpen> fds = [] {
    pthread_atfork(nullptr, nullptr, [] {
      for (std::atomic<int>& fd : registry()) {
        const int value = fd.exchange(0);
        if (value > 0) ::close(value);
      }
    });
    return std::array<std::atomic<int>, kMaxOpen>{};
  }();
  return fds;
}

void remember(int fd) {
  for (std::atomic<int>& slot : registry()) {
    int none = 0;
    if (slot.compare_exchange_strong(none, fd)) return;
  }
}

void forget(int fd) {
  for (std::atomic<int>& slot : registry()) {
    int expected = fd;
    if (slot.compare_exchange_strong(expected, 0)) return;
  }
}

struct flock request(uint64_t byte, short type) {
  struct flock lock {};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(byte);
  lock.l_len = 1;
  return lock;
}

}  // namespace

Result<LockFile> LockFile::open(const std::string& path, bool create) {
  const int fd = FileSystem::real().open(path, O_RDWR | (create ? O_CREAT : 0), 0600);
  if (fd < 0) return io_error("cannot open", path, -fd);
  LockFile file(fd);
  file.pid_ = ::getpid();
  remember(fd);
  return file;
}

LockFile::LockFile(LockFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), pid_(other.pid_) {}

LockFile& LockFile::operator=(LockFile&& other) noexcept {
  if (this != &other) {
    close();
    fd_ = std::exchange(other.fd_, -1);
    pid_ = other.pid_;
  }
  return *this;
}

LockFile::~LockFile() { close(); }

void LockFile::close() noexcept {
  if (fd_ < 0) return;
  // In a forked child the number was closed already and may name another file by now.
  if (pid_ == ::getpid()) {
    forget(fd_);
    ::close(fd_);
  }
  fd_ = -1;
}

bool LockFile::try_lock(uint64_t byte, LockMode mode) noexcept {
  struct flock lock = request(byte, mode == LockMode::shared ? F_RDLCK : F_WRLCK);
  return ::fcntl(fd_, F_OFD_SETLK, &lock) == 0;
}

bool LockFile::lock(uint64_t byte, LockMode mode, std::chrono::nanoseconds timeout) noexcept {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  std::chrono::microseconds pause{50};
  while (!try_lock(byte, mode)) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(5000));
  }
  return true;
}

void LockFile::unlock(uint64_t byte) noexcept {
  struct flock lock = request(byte, F_UNLCK);
  ::fcntl(fd_, F_OFD_SETLK, &lock);
}

bool LockFile::is_held_elsewhere(uint64_t byte) const noexcept {
  struct flock lock = request(byte, F_RDLCK);
  return ::fcntl(fd_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_WRLCK;
}

bool LockFile::is_current(const std::string& path) const noexcept {
  struct stat mine {
  }, there{};
  return ::fstat(fd_, &mine) == 0 && ::stat(path.c_str(), &there) == 0 &&
         mine.st_ino == there.st_ino && mine.st_dev == there.st_dev;
}

}  // namespace nostall
