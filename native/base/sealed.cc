// A memory file, mapped for writing until it is sealed.
#include "base/sealed.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/own.h"

namespace nostall {
namespace {

constexpr int kSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
constexpr const char* kWhat = "memory that processes share";

std::byte* map(int file, uint64_t size, int protection, std::byte* place = nullptr) {
  void* memory =
      ::mmap(place, size, protection, MAP_SHARED | (place != nullptr ? MAP_FIXED : 0), file, 0);
  if (memory == MAP_FAILED) throw io_error("cannot map", kWhat, errno);
  return static_cast<std::byte*>(memory);
}

// A sealed file is mapped only by a descriptor that cannot write.
Descriptor readable(const Descriptor& file) {
  return Descriptor(
      ::open(("/proc/self/fd/" + std::to_string(file.get())).c_str(), O_RDONLY | O_CLOEXEC));
}

}  // namespace

SealedMemory::SealedMemory(const std::string& name, uint64_t size)
    : size_(size), file_(memory_file(name).take()) {
  if (::ftruncate(file_.get(), static_cast<off_t>(size)) != 0) {
    throw io_error("cannot make", kWhat, errno);
  }
  // Memory that a child could write to would keep the file from being sealed.
  const NoForks held;
  data_ = map(file_.get(), size, PROT_READ | PROT_WRITE);
  writer_ = ::getpid();
  ::madvise(data_, size, MADV_DONTFORK);
}

SealedMemory::SealedMemory(const Descriptor& file) {
  struct stat status {};
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || ::fstat(file.get(), &status) != 0) {
    throw Error(ErrorKind::io, "what another process shares can still change", EPERM);
  }
  size_ = static_cast<uint64_t>(status.st_size);
  data_ = map(readable(file).get(), size_, PROT_READ);
}

SealedMemory::SealedMemory(uint64_t size) : size_(size) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, kFlags, -1, 0);
  if (memory == MAP_FAILED) throw io_error("cannot map", "memory of this process", errno);
  data_ = static_cast<std::byte*>(memory);
}

SealedMemory::~SealedMemory() {
  // In a child that does not have it, other memory may lie at these addresses.
  if (writer_ == 0 || writer_ == ::getpid()) ::munmap(data_, size_);
}

Descriptor SealedMemory::seal() {
  // Memory that can be written to keeps a file from being sealed.
  map(readable(file_).get(), size_, PROT_READ, data_);
  writer_ = 0;
  if (::fcntl(file_.get(), F_ADD_SEALS, kSeals) != 0) throw io_error("cannot seal", kWhat, errno);
  return std::move(file_);
}

}  // namespace nostall
