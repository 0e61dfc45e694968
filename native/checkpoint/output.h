// checkpoint/output.h - a file that is written in blocks and then complete on its device.
//
// Thread-safety: write may be called by several threads, on different blocks.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>

#include "base/file.h"

namespace nostall::checkpoint {

class Output {
 public:
  // Makes or replaces the file and reserves `size` bytes of its device. Throws Error(io).
  Output(const std::string& path, uint64_t size, bool direct, FileSystem& files);
  // Bytes at an offset, both aligned (kAlignment), bytes past `size` being padding; 0, or -errno.
  int64_t write(std::span<const std::byte> bytes, uint64_t offset);
  // Cuts the padding and makes the file durable. Throws Error(io).
  void finish();
  bool is_direct() const noexcept { return direct_; }

 private:
  int64_t write_buffered(std::span<const std::byte> bytes, uint64_t offset);

  std::string path_;
  uint64_t size_;
  FileSystem& files_;
  Descriptor file_;
  Descriptor buffered_;  // where direct writing turns out to be refused
  std::atomic<bool> direct_{false};
};

}  // namespace nostall::checkpoint
