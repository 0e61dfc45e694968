// collective/arena.h - which parts of a rank's shared arena are in use.
//
// First fit over pages; memory exists from allocate to release only.
// Thread-safety: none; its owner locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

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
  std::map<uint64_t, uint64_t> used_;  // offset: end
};

}  // namespace nostall::collective
