// base/mapping.h - a file mapped into memory, shared with other processes; or memory without a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "base/file.h"

namespace nostall {

class Mapping {
 public:
  Mapping() = default;
  // Maps the first `size` bytes, for reading and writing. The file must be that long; `name` is
  // what messages call it.
  static Result<Mapping> map(Descriptor file, const std::string& name, uint64_t size);
  // Zeros, of this process alone.
  static Result<Mapping> alone(const std::string& name, uint64_t size);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;

  std::byte* data() const noexcept { return data_; }
  uint64_t size() const noexcept { return size_; }
  int fd() const noexcept { return file_.get(); }

 private:
  static Result<Mapping> with_flags(int flags, Descriptor file, const std::string& name,
                                    uint64_t size);
  void unmap() noexcept;
  Descriptor file_;
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
};

}  // namespace nostall
