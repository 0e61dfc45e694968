// A memory file, mapped for writing until it is sealed.
#include "base/sealed.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/own.h"

namespace nostall {
namespace {

constexpr int kSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
constexpr const char* kWhat = "memory that processes share";

}  // namespace

SealedMemory::SealedMemory(const std::string& name, uint64_t size)
    : size_(size), file_(memory_file(name).take()) {
  if (::ftruncate(file_.get(), static_cast<off_t>(size)) != 0) {
    throw io_error("cannot make", kWhat, errno);
  }
  map(file_.get(), true);
}

SealedMemory::SealedMemory(const Descriptor& file) {
  struct stat status {};
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || ::fstat(file.get(), &status) != 0) {
    throw Error(ErrorKind::io, "what another process shares can still change", EPERM);
  }
  size_ = static_cast<uint64_t>(status.st_size);
  map(file.get(), false);
}

SealedMemory::~SealedMemory() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

Descriptor SealedMemory::seal() {
  // Memory that can write keeps a file from being sealed.
  ::munmap(std::exchange(data_, nullptr), size_);
  if (::fcntl(file_.get(), F_ADD_SEALS, kSeals) != 0) throw io_error("cannot seal", kWhat, errno);
  map(file_.get(), false);
  return std::move(file_);
}

void SealedMemory::map(int file, bool writes) {
  // A sealed file is mapped only by a descriptor that cannot write.
  const Descriptor reads(
      writes ? -1
             : ::open(("/proc/self/fd/" + std::to_string(file)).c_str(), O_RDONLY | O_CLOEXEC));
  const int protection = writes ? PROT_READ | PROT_WRITE : PROT_READ;
  void* memory = ::mmap(nullptr, size_, protection, MAP_SHARED, writes ? file : reads.get(), 0);
  if (memory == MAP_FAILED) throw io_error("cannot map", kWhat, errno);
  data_ = static_cast<std::byte*>(memory);
}

}  // namespace nostall
