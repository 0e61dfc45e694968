#include "stage/buffer.h"

#include <algorithm>
#include <new>

namespace nostall::stage {
namespace {
constexpr size_t kAlignment = 64;
}

Buffer::Buffer(size_t capacity)
    : capacity_(capacity),
      memory_(static_cast<std::byte*>(
          ::operator new (std::max<size_t>(capacity, 1), std::align_val_t{kAlignment}))) {}

void Buffer::Free::operator()(std::byte* p) const noexcept {
  ::operator delete (p, std::align_val_t{kAlignment});
}

std::shared_ptr<Buffer> BufferPool::take(size_t bytes) {
  std::unique_ptr<Buffer> buffer;
  {
    const std::scoped_lock lock(mutex_);
    // The smallest that fits, so that ragged batches do not pin the largest buffers.
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if ((*it)->capacity() >= bytes &&
          (best == free_.end() || (*it)->capacity() < (*best)->capacity())) {
        best = it;
      }
    }
    if (best != free_.end()) {
      buffer = std::move(*best);
      free_.erase(best);
    }
  }
  if (!buffer) {
    buffer = std::make_unique<Buffer>(bytes);
    const std::scoped_lock lock(mutex_);
    bytes_ += buffer->capacity();
  }
  return std::shared_ptr<Buffer>(buffer.release(), [pool = shared_from_this()](Buffer* b) {
    pool->put_back(std::unique_ptr<Buffer>(b));
  });
}

void BufferPool::put_back(std::unique_ptr<Buffer> buffer) noexcept {
  const std::scoped_lock lock(mutex_);
  if (free_.size() < keep_) {
    free_.push_back(std::move(buffer));
    return;
  }
  // Full: keep the larger ones, they serve every request.
  auto smallest = std::min_element(free_.begin(), free_.end(), [](const auto& a, const auto& b) {
    return a->capacity() < b->capacity();
  });
  if (smallest != free_.end() && (*smallest)->capacity() < buffer->capacity()) {
    std::swap(*smallest, buffer);
  }
  bytes_ -= buffer->capacity();
}

uint64_t BufferPool::bytes() const {
  const std::scoped_lock lock(mutex_);
  return bytes_;
}

}  // namespace nostall::stage
