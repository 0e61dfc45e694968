// base/lock.h - locks on bytes of a file, which the kernel drops when a process ends, however it
// ends.
//
// Open-file-description locks (F_OFD_*): they belong to the open file, so two loaders of one
// process exclude each other as two processes do. A descriptor used for locks must not be
// memory-mapped: a mapping inherited by a forked child would keep them. After a fork the child's
// copies of all lock files are closed, so that a child never keeps its dead parent's locks.
// Thread-safety: a LockFile belongs to one owner; is_held_elsewhere may be called from any thread.
#pragma once

#include <cstdint>
#include <string>

#include "base/error.h"
#include "base/own.h"

namespace nostall {

enum class LockMode { shared, exclusive };
// `unsupported`: the file system has no such locks (Lustre mounted without flock, some network and
// user-space file systems): no process holds it, and none can. `failed`: error_number() says why.
enum class Locked { yes, elsewhere, unsupported, failed };

class LockFile {
 public:
  LockFile() = default;
  // Opens, and with `create` makes, the file; symbolic links are not followed.
  static Result<LockFile> open(const std::string& path, bool create);
  // For a file that is open already: the locks belong to the open file, and are shared with it.
  explicit LockFile(const Descriptor& file, FileSystem& files = FileSystem::real());
  ~LockFile();
  LockFile(LockFile&& other) noexcept;
  LockFile& operator=(LockFile&& other) noexcept;

  // At once: whether the lock was had (or changed from the other mode).
  Locked try_lock(uint64_t byte, LockMode mode) noexcept;
  int error_number() const noexcept { return error_number_; }  // of the last try_lock
  void unlock(uint64_t byte) noexcept;
  // Whether another open file holds the byte exclusively.
  bool is_held_elsewhere(uint64_t byte) const noexcept;
  // Whether it is certain that nobody else has that: not where the system cannot say.
  bool is_free_elsewhere(uint64_t byte) const noexcept;
  // Whether the path still names this file, and not a new one or none. Relative to `directory` as
  // in open_own.
  bool is_current(const std::string& path, int directory = kByPath) const noexcept;

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  void close() noexcept;
  FileSystem* files_ = nullptr;
  int fd_ = -1;
  int pid_ = 0;
  int error_number_ = 0;
};

}  // namespace nostall
