// First fit over whole pages; a map, by offset, of what is in use.
#include "collective/arena.h"

#include <algorithm>

namespace nostall::collective {

std::byte* Arena::allocate(uint64_t bytes) {
  constexpr uint64_t kPage = 4096;
  if (bytes > shared_.arena_bytes()) return nullptr;
  const uint64_t size = std::max(kPage, (bytes + kPage - 1) / kPage * kPage);
  uint64_t offset = 0;
  for (const auto& [begin, used] : used_) {
    if (begin - offset >= size) break;
    offset = used.end;
  }
  if (shared_.arena_bytes() - offset < size) return nullptr;
  shared_.allocate_arena(offset, size);
  std::byte* const data = shared_.arena(rank_) + offset;
  used_.try_emplace(offset, offset + size, data, size);
  return data;
}

bool Arena::release(const std::byte* data) noexcept {
  const auto found = used_.find(static_cast<uint64_t>(data - shared_.arena(rank_)));
  if (found == used_.end()) return false;
  shared_.release_arena(found->first, found->second.end - found->first);
  used_.erase(found);
  return true;
}

}  // namespace nostall::collective
