// Open-file-description locks (fcntl F_OFD_SETLK). Descriptors of lock files are registered, so
// that a forked child closes its copies and never keeps the locks of its parent.
#include "base/lock.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <utility>

namespace nostall {

Result<LockFile> LockFile::open(const std::string& path, bool create) {
  const int flags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | (create ? O_CREAT : 0);
  const int fd = FileSystem::real().open(path, flags, 0600);
  if (fd < 0) return io_error("cannot open", path, -fd);
  const Descriptor file(fd);
  struct stat status {};
  if (::fstat(fd, &status) != 0) return io_error("cannot examine", path, errno);
  if (!S_ISREG(status.st_mode)) {
    return Error(ErrorKind::io, "cannot lock " + path + ": it is not a regular file; remove it");
  }
  return LockFile(file);
}

LockFile::LockFile(const Descriptor& file, FileSystem& files) : files_(&files), pid_(::getpid()) {
  NoForks held;
  fd_ = ::fcntl(file.get(), F_DUPFD_CLOEXEC, 0);
  if (fd_ < 0) throw io_error("cannot open", "a lock file once more", errno);
  held.close_in_children(fd_);
}

LockFile::LockFile(LockFile&& other) noexcept
    : files_(other.files_),
      fd_(std::exchange(other.fd_, -1)),
      pid_(other.pid_),
      error_number_(other.error_number_) {}

LockFile& LockFile::operator=(LockFile&& other) noexcept {
  if (this != &other) {
    close();
    files_ = other.files_;
    fd_ = std::exchange(other.fd_, -1);
    pid_ = other.pid_;
    error_number_ = other.error_number_;
  }
  return *this;
}

LockFile::~LockFile() { close(); }

void LockFile::close() noexcept {
  if (fd_ < 0) return;
  // In a forked child the number was closed already and may name another file by now.
  if (pid_ == ::getpid()) {
    Descriptor file(fd_);
    close_with_children(file);
  }
  fd_ = -1;
}

Locked LockFile::try_lock(uint64_t byte, LockMode mode) noexcept {
  error_number_ = -files_->lock(fd_, mode == LockMode::shared ? F_RDLCK : F_WRLCK, byte);
  switch (error_number_) {
    case 0:
      return Locked::yes;
    case EAGAIN:
      return Locked::elsewhere;
    case ENOLCK:
    case ENOTSUP:
    case EINVAL:
    case ENOSYS:
      return Locked::unsupported;
    default:
      return Locked::failed;
  }
}

void LockFile::unlock(uint64_t byte) noexcept { files_->lock(fd_, F_UNLCK, byte); }

namespace {

// The type of the exclusive lock that another file description has on the byte, or F_UNLCK; nothing
// where the system cannot say.
std::optional<short> held_elsewhere(int fd, uint64_t byte) noexcept {
  struct flock lock {};
  lock.l_type = F_RDLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(byte);
  lock.l_len = 1;
  if (::fcntl(fd, F_OFD_GETLK, &lock) != 0) return std::nullopt;
  return lock.l_type;
}

}  // namespace

bool LockFile::is_held_elsewhere(uint64_t byte) const noexcept {
  return held_elsewhere(fd_, byte) == F_WRLCK;
}

bool LockFile::is_free_elsewhere(uint64_t byte) const noexcept {
  const auto type = held_elsewhere(fd_, byte);
  return type && *type != F_WRLCK;
}

bool LockFile::is_current(const std::string& path, int directory) const noexcept {
  const char* name = path.c_str();
  if (directory != kByPath) name += path.find_last_of('/') + 1;
  struct stat mine {
  }, there{};
  return ::fstat(fd_, &mine) == 0 && ::fstatat(directory, name, &there, AT_SYMLINK_NOFOLLOW) == 0 &&
         mine.st_ino == there.st_ino && mine.st_dev == there.st_dev;
}

}  // namespace nostall
