// Files that only their user can open, files without a name, and descriptors that children do not
// inherit. Every check is on the open descriptor (fstat), never on a path: a path may name another
// file a moment later.
#include "base/own.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"

namespace nostall {
namespace {

constexpr int kReplaceAttempts = 20;

// What keeps a file or directory from being this user's alone; empty if nothing does.
std::string foreign(const struct stat& status, mode_t kind) {
  if (S_ISLNK(status.st_mode)) return "it is a symbolic link";
  if ((status.st_mode & S_IFMT) != kind) {
    return kind == S_IFDIR ? "it is not a directory" : "it is not a regular file";
  }
  if (status.st_uid != ::geteuid()) return "it belongs to user " + std::to_string(status.st_uid);
  if ((status.st_mode & 077) != 0) {
    char mode[8];
    std::snprintf(mode, sizeof mode, "%04o", status.st_mode & 07777u);
    return std::string("other users may open it (its mode is ") + mode + ")";
  }
  if (kind == S_IFREG && status.st_nlink > 1) {
    return "it has " + std::to_string(status.st_nlink) + " names (hard links)";
  }
  return {};
}

Error refusal(const std::string& path, const std::string& why, int error_number = EPERM) {
  return Error(ErrorKind::io, "refusing to use " + path + ": " + why + "; remove it", error_number);
}

Result<Descriptor> opened(int fd, const char* what, const std::string& path) {
  if (fd < 0) return io_error(what, path, errno);
  return Descriptor(fd);
}

// Descriptors to close in a forked child. Forks hold the mutex, so that a child finds the list whole.
struct Children {
  Mutex forking;
  std::vector<int> closed NOSTALL_GUARDED_BY(forking);
};
Children& children() {
  static Children* const all = [] {
    pthread_atfork([]() NOSTALL_UNCHECKED { children().forking.lock(); },
                   []() NOSTALL_UNCHECKED { children().forking.unlock(); },
                   []() NOSTALL_UNCHECKED {
                     // Async-signal-safe: nothing is freed.
                     for (const int fd : children().closed) ::close(fd);
                     children().closed.clear();
                     children().forking.unlock();
                   });
    return new Children;  // for as long as threads may run
  }();
  return *all;
}

}  // namespace

Result<Descriptor> open_own(const std::string& path, int flags, int directory) {
  const std::string name = directory == kByPath ? path : path.substr(path.find_last_of('/') + 1);
  // Without O_NONBLOCK a FIFO in the file's place would block for ever.
  const int safely = O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK;
  const int existing = flags & ~(O_CREAT | O_EXCL | O_TRUNC);
  for (int attempt = 0; attempt < kReplaceAttempts; ++attempt) {
    struct stat status {};
    std::string why;
    Descriptor file(::openat(directory, name.c_str(), existing | safely));
    const int error = errno;
    if (file) {
      if (::fstat(file.get(), &status) != 0) return io_error("cannot examine", path, errno);
      why = foreign(status, S_IFREG);
      if (why.empty()) {
        if ((flags & O_TRUNC) != 0 && ::ftruncate(file.get(), 0) != 0) {
          return io_error("cannot empty", path, errno);
        }
        return file;
      }
    } else if (error == ENOENT) {
      if ((flags & O_CREAT) == 0) return io_error("cannot open", path, error);
      Descriptor made(
          ::openat(directory, name.c_str(), existing | safely | O_CREAT | O_EXCL, 0600));
      if (made) return made;
      if (errno != EEXIST && errno != EINTR) return io_error("cannot create", path, errno);
      continue;
    } else if (error == EINTR) {
      continue;
    } else {
      if (::fstatat(directory, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) {
        why = foreign(status, S_IFREG);
      }
      if (why.empty()) return io_error("cannot open", path, error);
    }
    if ((flags & O_CREAT) == 0 || ::unlinkat(directory, name.c_str(), 0) != 0) {
      return refusal(path, why);
    }
    log(LogLevel::warning, "removed " + path + ", which this job did not make: " + why);
  }
  return refusal(path, "another process makes it again and again");
}

Result<Descriptor> own_directory(const std::string& path) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return io_error("cannot create", path, errno);
  }
  Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  const int error = errno;
  struct stat status {};
  if (directory ? ::fstat(directory.get(), &status) != 0 : ::lstat(path.c_str(), &status) != 0) {
    return io_error("cannot examine", path, errno);
  }
  const std::string why = foreign(status, S_IFDIR);
  if (!why.empty()) return refusal(path, why);
  if (!directory) return io_error("cannot open", path, error);
  return directory;
}

Result<Descriptor> unnamed_file(const std::string& directory) {
  Descriptor file(::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (file) return file;
  if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL) {
    return io_error("cannot create a file in", directory, errno);
  }
  std::string name = directory + "/.nostall-XXXXXX";
  file = Descriptor(::mkostemp(name.data(), O_CLOEXEC));
  if (!file) return io_error("cannot create a file in", directory, errno);
  if (::unlink(name.c_str()) != 0) return io_error("cannot remove the name of", name, errno);
  return file;
}

Result<Descriptor> memory_file(const std::string& name) {
  constexpr unsigned kNeverExecuted = 8;  // MFD_NOEXEC_SEAL: some sites demand it, Linux 6.3 on
  constexpr unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  int fd = ::memfd_create(name.c_str(), flags | kNeverExecuted);
  if (fd < 0 && errno == EINVAL) fd = ::memfd_create(name.c_str(), flags);
  return opened(fd, "cannot make a file in memory for", name);
}

Result<Descriptor> reopen(int fd) {
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  return opened(::open(path.c_str(), O_RDWR | O_CLOEXEC), "cannot open once more", path);
}

void close_with_children(Descriptor& file) noexcept {
  // Closing may take for ever on storage that does not answer, and forks must not wait for that.
  // Until the number is forgotten it must not name what another thread opens: it names this.
  const Descriptor nothing(::eventfd(0, EFD_CLOEXEC));
  if (nothing) ::dup3(nothing.get(), file.get(), O_CLOEXEC);
  const MutexLock held(children().forking);
  std::erase(children().closed, file.get());
  file.reset();
}

NoForks::NoForks() NOSTALL_UNCHECKED { children().forking.lock(); }
NoForks::~NoForks() NOSTALL_UNCHECKED { children().forking.unlock(); }
void NoForks::close_in_children(int fd) NOSTALL_UNCHECKED { children().closed.push_back(fd); }

}  // namespace nostall
