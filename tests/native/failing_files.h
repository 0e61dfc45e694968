// File systems of which chosen calls fail, or have something happen during them.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "base/file.h"

namespace nostall {

// Calls whose name is in `errors` fail with that number, all others are the system's own.
class FailingFiles : public FileSystem {
 public:
  int open(const std::string& path, int flags, unsigned mode) override {
    return fails("open") ? refused("open") : FileSystem::open(path, flags, mode);
  }
  int64_t pread(int fd, std::span<std::byte> into, uint64_t offset) override {
    return fails("pread") ? refused("pread") : FileSystem::pread(fd, into, offset);
  }
  int64_t pwrite(int fd, std::span<const std::byte> from, uint64_t offset) override {
    held.wait(true);
    return fails("pwrite") ? refused("pwrite") : FileSystem::pwrite(fd, from, offset);
  }
  int reserve(int fd, uint64_t size) override {
    return fails("reserve") ? refused("reserve") : FileSystem::reserve(fd, size);
  }
  int allocate(int fd, uint64_t offset, uint64_t size) override {
    return fails("allocate") ? refused("allocate") : FileSystem::allocate(fd, offset, size);
  }
  int truncate(int fd, uint64_t size) override {
    return fails("truncate") ? refused("truncate") : FileSystem::truncate(fd, size);
  }
  int fsync(int fd) override { return fails("fsync") ? refused("fsync") : FileSystem::fsync(fd); }
  int write_back(int fd, uint64_t offset, uint64_t size) override {
    return fails("write_back") ? refused("write_back") : FileSystem::write_back(fd, offset, size);
  }
  int rename(const std::string& from, const std::string& to, int directory) override {
    return fails("rename") ? refused("rename") : FileSystem::rename(from, to, directory);
  }
  int unlink(const std::string& path, int directory) override {
    return fails("unlink") ? refused("unlink") : FileSystem::unlink(path, directory);
  }
  int lock(int fd, short type, uint64_t byte) override {
    return fails("lock") ? refused("lock") : FileSystem::lock(fd, type, byte);
  }

  std::map<std::string, int> errors;
  std::atomic<bool> held{false};  // writes wait until it is false, and are notified

 private:
  bool fails(const std::string& call) const { return errors.contains(call); }
  int refused(const std::string& call) const { return -errors.at(call); }
};

// Calls `then` once, after the next block of a file is allocated.
class Meanwhile : public FileSystem {
 public:
  int allocate(int fd, uint64_t offset, uint64_t size) override {
    const int error = FileSystem::allocate(fd, offset, size);
    if (const auto work = std::exchange(then, {})) work();
    return error;
  }
  std::function<void()> then;
};

}  // namespace nostall
