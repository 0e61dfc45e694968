// Pooled buffers: free ones are kept by capacity.
#include "stage/buffer.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

namespace nostall::stage {
namespace {
constexpr size_t kAlignment = 64;

// No object is larger; refused here, since not every allocator does so by throwing.
size_t possible(size_t bytes) {
  if (bytes > static_cast<size_t>(std::numeric_limits<ptrdiff_t>::max())) throw std::bad_alloc();
  return std::max<size_t>(bytes, 1);
}
constexpr size_t kSlack = size_t{64} << 10;
// From here on memory is mapped. glibc's malloc learns from blocks that come and go to keep those of up
// to 32 MiB in its arenas, one for each thread, and gives little of that back.
constexpr size_t kMapped = size_t{1} << 20;
// None that is much larger serves: a few bytes must not take the slab of a batch.
constexpr size_t most_for(size_t bytes) { return 2 * bytes + kSlack; }
constexpr unsigned kLooks = 16;  // at free buffers, for one that lies in this processor's cache
}  // namespace

std::shared_ptr<std::byte> take_from_heap(size_t bytes) {
  if (possible(bytes) >= kMapped) {
    void* mapped =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    return {static_cast<std::byte*>(mapped), [bytes](std::byte* p) { ::munmap(p, bytes); }};
  }
  return {static_cast<std::byte*>(::operator new (possible(bytes), std::align_val_t{kAlignment})),
          [](std::byte* p) { ::operator delete (p, std::align_val_t{kAlignment}); }};
}

std::shared_ptr<Buffer> BufferPool::lend(std::unique_ptr<Buffer> buffer) {
  return std::shared_ptr<Buffer>(buffer.release(), [pool = shared_from_this()](Buffer* b) {
    pool->put_back(std::unique_ptr<Buffer>(b));
  });
}

std::shared_ptr<Buffer> BufferPool::take_free(size_t bytes) {
  const int here = ::sched_getcpu();
  std::unique_ptr<Buffer> buffer;
  {
    const MutexLock lock(mutex_);
    const auto serves = [&](auto at) NOSTALL_REQUIRES(mutex_) {
      return at != free_.end() && at->first <= most_for(bytes);
    };
    auto best = free_.lower_bound(bytes);
    if (!serves(best)) return nullptr;
    auto near = best;
    for (unsigned i = 0; i < kLooks && serves(near); ++i, ++near) {
      if (near->second->processor() != here) continue;
      best = near;
      break;
    }
    buffer = std::move(best->second);
    free_bytes_ -= buffer->capacity();
    free_.erase(best);
  }
  buffer->set_processor(here);
  return lend(std::move(buffer));
}

std::shared_ptr<Buffer> BufferPool::take(size_t bytes) {
  if (auto buffer = take_free(bytes)) return buffer;
  auto buffer = std::make_unique<Buffer>(bytes, take_);
  bytes_.fetch_add(buffer->capacity(), std::memory_order_relaxed);
  buffer->set_processor(::sched_getcpu());
  return lend(std::move(buffer));
}

void BufferPool::put_back(std::unique_ptr<Buffer> buffer) noexcept {
  // A forked child may drop a batch of its parent's, whose threads may have held the lock.
  if (owner_ != ::getpid()) return;
  const MutexLock lock(mutex_);
  const size_t capacity = buffer->capacity();
  if (free_bytes_ + capacity <= keep_bytes_) {
    try {
      // Before others of its size: what was used last is taken next, and lies in a cache.
      free_.emplace_hint(free_.lower_bound(capacity), capacity, std::move(buffer));
      free_bytes_ += capacity;
      return;
    } catch (const std::bad_alloc&) {
      // No memory to remember it by: it is given back.
    }
  }
  bytes_.fetch_sub(capacity, std::memory_order_relaxed);
}

}  // namespace nostall::stage
