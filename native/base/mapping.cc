#include "base/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <utility>

namespace nostall {

Result<Mapping> Mapping::map(const std::string& path, uint64_t size) {
  Mapping result;
  const int fd = FileSystem::real().open(path, O_RDWR);
  if (fd < 0) return io_error("cannot open", path, -fd);
  result.file_ = Descriptor(fd);
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return io_error("cannot map", path, errno);
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
