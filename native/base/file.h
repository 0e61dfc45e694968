// base/file.h - file descriptors that close themselves, and the calls on them that can be replaced.
//
// Every read, write, allocation, rename and lock of the core's files goes through FileSystem, so that
// tests can fail, tear, delay and fill them. Functions return 0 or a byte count, or -errno; they
// retry EINTR and short transfers themselves.
// Thread-safety: FileSystem implementations are thread-safe; a Descriptor is a value with one
// owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace nostall {

inline constexpr int kByPath = -100;  // AT_FDCWD

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

// Gives this process as many open files as it may have; false if it has them.
bool raise_open_files() noexcept;
// Whether a new descriptor is one of the upper half of those that this process may have, however many it
// is given: files and sockets of the program need these more than what can do without.
bool is_crowded(int fd) noexcept;

class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual int open(const std::string& path, int flags, unsigned mode = 0600);
  // Reads until `into` is full or the end of the file; the count, or -errno.
  virtual int64_t pread(int fd, std::span<std::byte> into, uint64_t offset);
  // Writes all of `from`; its size, or -errno.
  virtual int64_t pwrite(int fd, std::span<const std::byte> from, uint64_t offset);
  // Makes [offset, offset + size) of the file exist on its device; 0, or -errno (-ENOSPC, or -EINTR
  // where signals come faster than memory does), which may leave a part of it there: whoever has it
  // alone gives that back.
  virtual int allocate(int fd, uint64_t offset, uint64_t size);
  // Gives back what [offset, offset + size) has on its device, and makes it zeros; 0, or -errno.
  virtual int give_back(int fd, uint64_t offset, uint64_t size);
  // Reserves room for the first `size` bytes, where the file system does so without writing zeros;
  // 0, or -errno (-EOPNOTSUPP where it does not).
  virtual int reserve(int fd, uint64_t size);
  virtual int truncate(int fd, uint64_t size);
  virtual int fsync(int fd);
  // Writes what the cache has of these bytes to the device; 0, or -errno. They are durable after
  // fsync alone, which does not tell again what failed here.
  virtual int write_back(int fd, uint64_t offset, uint64_t size);
  // With a `directory`, which is open, paths mean their last component in it. A try that a signal
  // interrupted may have been done all the same, on a network's file system: a name that is missing at
  // the next one is no error if `to` is that file now, or if the name was to be removed.
  virtual int rename(const std::string& from, const std::string& to, int directory = kByPath);
  virtual int unlink(const std::string& path, int directory = kByPath);
  // At once: F_RDLCK, F_WRLCK or F_UNLCK of one byte for the open file; 0, or -errno (-EAGAIN where
  // another holds it).
  virtual int lock(int fd, short type, uint64_t byte);

  // The operating system's own.
  static FileSystem& real();
};

}  // namespace nostall
