// collective/child_zeros.h - shared memory in whose place a forked child finds zeros of its own.
//
// A forked child does not inherit what ranks share. Holders of that memory may go on to read and write
// in the child: it finds zeros, not the end of the process (SIGSEGV).
// Thread-safety: objects are made and destroyed by any thread; a fork may come at any time.
#pragma once

#include <cstdint>

namespace nostall::collective {

class ChildZeros {
 public:
  // Of whole pages, while this lives.
  ChildZeros(void* data, uint64_t bytes);
  ~ChildZeros();
  ChildZeros(const ChildZeros&) = delete;
  ChildZeros& operator=(const ChildZeros&) = delete;

 private:
  struct Registry;
  void* const data_;
  const uint64_t bytes_;
  ChildZeros *previous_ = nullptr, *next_ = nullptr;
};

}  // namespace nostall::collective
