// Shared mappings of open files, and private ones of none (mmap).
#include "base/mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

namespace nostall {

Result<Mapping> Mapping::map(Descriptor file, const std::string& name, uint64_t size) {
  return with_flags(MAP_SHARED, std::move(file), name, size);
}

Result<Mapping> Mapping::alone(const std::string& name, uint64_t size) {
  return with_flags(MAP_PRIVATE | MAP_ANONYMOUS, Descriptor(), name, size);
}

Result<Mapping> Mapping::with_flags(int flags, Descriptor file, const std::string& name,
                                    uint64_t size) {
  Mapping result;
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, file.get(), 0);
  if (memory == MAP_FAILED) return io_error("cannot map", name, errno);
  result.file_ = std::move(file);
  result.data_ = static_cast<std::byte*>(memory);
  result.size_ = size;
  return result;
}

Mapping::Mapping(Mapping&& other) noexcept
    : file_(std::move(other.file_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    unmap();
    file_ = std::move(other.file_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

Mapping::~Mapping() { unmap(); }

void Mapping::unmap() noexcept {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace nostall
