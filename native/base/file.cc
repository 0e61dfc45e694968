// System calls on files, repeated after EINTR and after short transfers.
#include "base/file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace nostall {
namespace {
constexpr int kTries = 16;  // of a call that signals interrupt
constexpr uint64_t kSmallPiece = uint64_t{1} << 20;

static_assert(kByPath == AT_FDCWD);

const char* name_in(int directory, const std::string& path) {
  return path.c_str() + (directory == kByPath ? 0 : path.find_last_of('/') + 1);
}

// The call again for as long as signals interrupt it; 0, or -errno.
template <typename Call>
int uninterrupted(Call call) {
  while (call() != 0) {
    if (errno != EINTR) return -errno;
  }
  return 0;
}

}  // namespace

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

Descriptor::~Descriptor() { reset(); }

void Descriptor::reset() noexcept {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

bool raise_open_files() noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= limit.rlim_max) return false;
  limit.rlim_cur = limit.rlim_max;
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

bool is_crowded(int fd) noexcept {
  do {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
    if (static_cast<rlim_t>(fd) <= limit.rlim_cur / 2) return false;
  } while (raise_open_files());
  return true;
}

int FileSystem::open(const std::string& path, int flags, unsigned mode) {
  for (;;) {
    const int fd = ::open(path.c_str(), flags | O_CLOEXEC, mode);
    if (fd >= 0) return fd;
    if (errno != EINTR) return -errno;
  }
}

int64_t FileSystem::pread(int fd, std::span<std::byte> into, uint64_t offset) {
  size_t done = 0;
  while (done < into.size()) {
    const ssize_t n =
        ::pread(fd, into.data() + done, into.size() - done, static_cast<off_t>(offset + done));
    if (n == 0) break;
    if (n < 0) {
      if (errno == EINTR) continue;
      return -errno;
    }
    done += static_cast<size_t>(n);
  }
  return static_cast<int64_t>(done);
}

int64_t FileSystem::pwrite(int fd, std::span<const std::byte> from, uint64_t offset) {
  size_t done = 0;
  while (done < from.size()) {
    const ssize_t n =
        ::pwrite(fd, from.data() + done, from.size() - done, static_cast<off_t>(offset + done));
    if (n < 0) {
      if (errno == EINTR) continue;
      return -errno;
    }
    done += static_cast<size_t>(n);
  }
  return static_cast<int64_t>(done);
}

int FileSystem::allocate(int fd, uint64_t offset, uint64_t size) {
  // An interrupted call gives back all that it had. Where signals come at short intervals only small
  // ones come to their end.
  uint64_t piece = size;
  for (int tries = 0; size > 0;) {
    piece = std::min(piece, size);
    const int error = ::posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(piece));
    if (error == 0) {
      offset += piece;
      size -= piece;
      tries = 0;
    } else if (error != EINTR || (piece <= kSmallPiece && ++tries == kTries)) {
      return -error;
    } else {
      piece = std::max(kSmallPiece, piece / 2);
    }
  }
  return 0;
}

int FileSystem::give_back(int fd, uint64_t offset, uint64_t size) {
  return uninterrupted([&] {
    return ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                       static_cast<off_t>(size));
  });
}

int FileSystem::reserve(int fd, uint64_t size) {
  // Where signals come at short intervals the call may never come to its end.
  for (int tries = 0; tries < kTries; ++tries) {
    if (::fallocate(fd, 0, 0, static_cast<off_t>(size)) == 0) return 0;
    if (errno != EINTR) break;
  }
  return -errno;
}

int FileSystem::truncate(int fd, uint64_t size) {
  return uninterrupted([&] { return ::ftruncate(fd, static_cast<off_t>(size)); });
}

int FileSystem::rename(const std::string& from, const std::string& to, int directory) {
  const char *old = name_in(directory, from), *fresh = name_in(directory, to);
  struct stat moved {};
  const bool known = ::fstatat(directory, old, &moved, AT_SYMLINK_NOFOLLOW) == 0;
  for (bool again = false;; again = true) {
    if (::renameat(directory, old, directory, fresh) == 0) return 0;
    if (errno == EINTR) continue;
    const int error = errno;
    struct stat there {};
    const bool done = again && known && error == ENOENT &&
                      ::fstatat(directory, fresh, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
                      there.st_dev == moved.st_dev && there.st_ino == moved.st_ino;
    return done ? 0 : -error;
  }
}

int FileSystem::unlink(const std::string& path, int directory) {
  const char* name = name_in(directory, path);
  for (bool again = false;; again = true) {
    if (::unlinkat(directory, name, 0) == 0) return 0;
    if (errno != EINTR) return again && errno == ENOENT ? 0 : -errno;
  }
}

int FileSystem::lock(int fd, short type, uint64_t byte) {
  struct flock request {};
  request.l_type = type;
  request.l_whence = SEEK_SET;
  request.l_start = static_cast<off_t>(byte);
  request.l_len = 1;
  const int error = uninterrupted([&] { return ::fcntl(fd, F_OFD_SETLK, &request); });
  return error == -EACCES ? -EAGAIN : error;
}

int FileSystem::fsync(int fd) {
  return uninterrupted([&] { return ::fsync(fd); });
}

int FileSystem::write_back(int fd, uint64_t offset, uint64_t size) {
  constexpr unsigned kAll =
      SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
  return uninterrupted([&] {
    return ::sync_file_range(fd, static_cast<off_t>(offset), static_cast<off_t>(size), kAll);
  });
}

FileSystem& FileSystem::real() {
  static FileSystem instance;
  return instance;
}

}  // namespace nostall
