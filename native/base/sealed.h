// base/sealed.h - memory in a file without a name that is written once, and then mapped by others.
//
// One process makes it and writes; seal() ends that, and gives the file, which nothing can change any
// more. There is never a second copy. Thread-safety: one thread writes and seals before others know
// the memory; then it is immutable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/error.h"
#include "base/file.h"

namespace nostall {

class SealedMemory {
 public:
  // Zeros; parts that are not written to take no memory. `name` is seen in /proc. Throws Error(io).
  SealedMemory(const std::string& name, uint64_t size);
  // The memory of a sealed file. Throws Error(io) if it is none.
  explicit SealedMemory(const Descriptor& file);
  ~SealedMemory();
  SealedMemory(const SealedMemory&) = delete;
  SealedMemory& operator=(const SealedMemory&) = delete;

  std::byte* data() const noexcept { return data_; }
  uint64_t size() const noexcept { return size_; }
  // The file; addresses change. Throws Error(io).
  Descriptor seal();

 private:
  void map(int file, bool writes);
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
  Descriptor file_;  // until it is sealed
};

}  // namespace nostall
