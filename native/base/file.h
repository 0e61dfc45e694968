// base/file.h - file descriptors that close themselves, and the calls on them that can be replaced.
//
// Every read, write and allocation of the core's files goes through FileSystem, so that tests can
// fail, tear, delay and fill them. Functions return 0 or a byte count, or -errno; they retry EINTR
// and short transfers themselves.
// Thread-safety: FileSystem implementations are thread-safe; a Descriptor is a value with one
// owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace nostall {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) noexcept : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor();

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  void reset() noexcept;

 private:
  int fd_ = -1;
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual int open(const std::string& path, int flags, unsigned mode = 0600);
  // Reads until `into` is full or the end of the file; the count, or -errno.
  virtual int64_t pread(int fd, std::span<std::byte> into, uint64_t offset);
  // Writes all of `from`; its size, or -errno.
  virtual int64_t pwrite(int fd, std::span<const std::byte> from, uint64_t offset);
  // Makes [offset, offset + size) of the file exist on its device; 0, or -errno (-ENOSPC).
  virtual int allocate(int fd, uint64_t offset, uint64_t size);
  virtual int fsync(int fd);

  // The operating system's own.
  static FileSystem& real();
};

}  // namespace nostall
