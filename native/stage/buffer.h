// stage/buffer.h - pooled memory for batches and for bytes on their way.
//
// A Buffer goes back to its pool when its last owner releases it. That may be a tensor that the
// user keeps for an hour, after the loader is gone. The pool keeps at most `keep_bytes` of free
// buffers. It never refuses a request: the stage bounds what is in flight, and the user what it
// keeps. Thread-safety: all functions may be called from any thread.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "base/mutex.h"

namespace nostall::stage {

// Where buffers get `bytes` from, aligned to 64 bytes; called from any thread. Throws std::bad_alloc
// or Error.
using TakeMemory = std::function<std::shared_ptr<std::byte>(size_t bytes)>;
std::shared_ptr<std::byte> take_from_heap(size_t bytes);

class Buffer {
 public:
  explicit Buffer(size_t capacity, const TakeMemory& take = take_from_heap)
      : capacity_(capacity), memory_(take(capacity)) {}
  std::byte* data() noexcept { return memory_.get(); }
  size_t capacity() const noexcept { return capacity_; }
  // The processor on which it was taken last, as far as the system says.
  int processor() const noexcept { return processor_; }
  void set_processor(int number) noexcept { processor_ = number; }

 private:
  size_t capacity_;
  int processor_ = -1;
  std::shared_ptr<std::byte> memory_;
};

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // Create with std::make_shared.
  explicit BufferPool(uint64_t keep_bytes, TakeMemory take = take_from_heap)
      : keep_bytes_(keep_bytes), take_(std::move(take)) {}

  // At least `bytes` long, aligned to 64 bytes. Throws what TakeMemory throws.
  std::shared_ptr<Buffer> take(size_t bytes);
  // The same of a free one; null if there is none that serves.
  std::shared_ptr<Buffer> take_free(size_t bytes);
  // Bytes in all buffers that live: free ones and ones in use.
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  std::shared_ptr<Buffer> lend(std::unique_ptr<Buffer> buffer);
  void put_back(std::unique_ptr<Buffer> buffer) noexcept;

  const pid_t owner_ = ::getpid();
  const uint64_t keep_bytes_;
  const TakeMemory take_;
  mutable Mutex mutex_;
  // By capacity: there may be thousands.
  std::multimap<size_t, std::unique_ptr<Buffer>> free_ NOSTALL_GUARDED_BY(mutex_);
  uint64_t free_bytes_ NOSTALL_GUARDED_BY(mutex_) = 0;
  std::atomic<uint64_t> bytes_{0};
};

}  // namespace nostall::stage
