// collective/arena.h - which parts of a rank's shared arena are in use.
//
// First fit over pages; memory exists from allocate to release only. A forked child has zeros of its own
// in its place.
// Thread-safety: none; its owner locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "collective/child_zeros.h"
#include "collective/shared_memory.h"

namespace nostall::collective {

class Arena {
 public:
  explicit Arena(SharedMemory& memory, uint32_t rank) : shared_(memory), rank_(rank) {}

  // nullptr if the arena has no such gap; throws Error(io) when the node has no memory for it.
  std::byte* allocate(uint64_t bytes);
  // False if `data` was not allocated here.
  bool release(const std::byte* data) noexcept;

 private:
  SharedMemory& shared_;
  const uint32_t rank_;
  struct Used {
    Used(uint64_t last, std::byte* data, uint64_t bytes) : end(last), zeros(data, bytes) {}
    uint64_t end;
    ChildZeros zeros;
  };
  std::map<uint64_t, Used> used_;  // by offset
};

}  // namespace nostall::collective
