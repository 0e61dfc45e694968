// base/sealed.h - memory in a file without a name that is written once, and then mapped by others.
//
// One process makes it and writes; seal() ends that, and gives the file, which nothing can change any
// more. There is never a second copy. A child that is forked before then does not have the memory.
// Thread-safety: one thread writes and seals before others know the memory; then it is immutable.
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
  // Memory of this process alone, which is never sealed. Throws Error(io).
  explicit SealedMemory(uint64_t size);
  ~SealedMemory();
  SealedMemory(const SealedMemory&) = delete;
  SealedMemory& operator=(const SealedMemory&) = delete;

  std::byte* data() const noexcept { return data_; }
  uint64_t size() const noexcept { return size_; }
  // The file; addresses stay. After an Error(io) that it throws the memory can still be read here.
  Descriptor seal();

 private:
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
  int writer_ = 0;   // the process that has it mapped for writing
  Descriptor file_;  // until it is sealed
};

}  // namespace nostall
