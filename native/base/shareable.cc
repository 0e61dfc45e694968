// Memory whose owner can go over to the same bytes in a file (mmap at the same address).
#include "base/shareable.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <new>
#include <span>
#include <string>

#include "base/own.h"

namespace nostall {
namespace {

constexpr uint64_t kLarge = uint64_t{4} << 20;
constexpr int kListSeals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;

}  // namespace

Shareable::Shareable(uint64_t size) : size_(size) {
  void* memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(memory);
  // A fault for each small page takes longer than to fill it. Where there are no large ones, it fails.
  if (size >= kLarge) static_cast<void>(::madvise(memory, size, MADV_HUGEPAGE));
}

Shareable::~Shareable() { ::munmap(data_, size_); }

Result<Descriptor> Shareable::share() {
  const MutexLock lock(mutex_);
  if (file_) return reopen(file_.get());
  auto file = memory_file("nostall-listing");
  if (!file) return file;
  const int fd = file.value().get();
  const int64_t written = FileSystem::real().pwrite(fd, {data_, static_cast<size_t>(size_)}, 0);
  if (written < 0) return io_error("no memory for", "a shared list", static_cast<int>(-written));
  if (::fcntl(fd, F_ADD_SEALS, kListSeals) != 0)
    return io_error("cannot seal", "a shared list", errno);
  if (!exchange(fd)) return io_error("cannot map", "a shared list", ENOMEM);
  file_ = std::move(file).take();
  return reopen(file_.get());
}

bool Shareable::adopt(const Descriptor& file) {
  const MutexLock lock(mutex_);
  struct stat status {};
  const int seals = ::fcntl(file.get(), F_GET_SEALS);
  if (file_ || seals < 0 || (seals & kListSeals) != kListSeals ||
      ::fstat(file.get(), &status) != 0 || static_cast<uint64_t>(status.st_size) != size_ ||
      !exchange(file.get())) {
    return false;
  }
  auto own = reopen(file.get());
  if (own) file_ = std::move(own).take();
  return true;
}

bool Shareable::is_shared() const {
  const MutexLock lock(mutex_);
  return static_cast<bool>(file_);
}

bool Shareable::exchange(int file) {
  // A sealed file is mapped only by a descriptor that cannot write.
  const Descriptor readable(
      ::open(("/proc/self/fd/" + std::to_string(file)).c_str(), O_RDONLY | O_CLOEXEC));
  if (!readable) return false;
  void* there = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, readable.get(), 0);
  if (there == MAP_FAILED) return false;
  const bool same = std::memcmp(there, data_, size_) == 0;
  ::munmap(there, size_);
  // The kernel checks every limit before it takes the old memory away.
  return same &&
         ::mmap(data_, size_, PROT_READ, MAP_SHARED | MAP_FIXED, readable.get(), 0) == data_;
}

}  // namespace nostall
