// Pages that the process may not write to, as those that the simulated device guards are: a system
// call that fills them fails with EFAULT, where a thread would die.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <span>

namespace nostall {

class ClosedMemory {
 public:
  // `open` pages that may be written, and `closed` ones behind them.
  ClosedMemory(size_t open, size_t closed)
      : page_(static_cast<size_t>(::sysconf(_SC_PAGESIZE))), bytes_((open + closed) * page_) {
    void* p = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<std::byte*>(p);
    std::memset(begin_, '?', bytes_);
    ::mprotect(begin_ + open * page_, closed * page_, PROT_READ);
  }
  ~ClosedMemory() { ::munmap(begin_, bytes_); }
  ClosedMemory(const ClosedMemory&) = delete;
  ClosedMemory& operator=(const ClosedMemory&) = delete;

  void reopen() { ::mprotect(begin_, bytes_, PROT_READ | PROT_WRITE); }
  size_t page() const { return page_; }
  std::span<std::byte> all() const { return {begin_, bytes_}; }

 private:
  size_t page_, bytes_;
  std::byte* begin_ = nullptr;
};

}  // namespace nostall
