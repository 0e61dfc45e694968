// stage/buffer.h - pooled memory for batches and for bytes on their way.
//
// A Buffer goes back to its pool when its last owner releases it. That may be a tensor that the
// user keeps for an hour, after the loader is gone. The pool keeps at most `keep_bytes` of free
// buffers. It never refuses a request: the stage bounds what is in flight, and the user what it
// keeps. Thread-safety: all functions may be called from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "base/mutex.h"

namespace nostall::stage {

class Buffer {
 public:
  explicit Buffer(size_t capacity);
  std::byte* data() noexcept { return memory_.get(); }
  size_t capacity() const noexcept { return capacity_; }

 private:
  struct Free {
    void operator()(std::byte* p) const noexcept;
  };
  size_t capacity_;
  std::unique_ptr<std::byte, Free> memory_;
};

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  // Create with std::make_shared.
  explicit BufferPool(uint64_t keep_bytes) : keep_bytes_(keep_bytes) {}

  // At least `bytes` long, aligned to 64 bytes. Throws std::bad_alloc.
  std::shared_ptr<Buffer> take(size_t bytes);
  // Bytes in all buffers that live: free ones and ones in use.
  uint64_t bytes() const;

 private:
  void put_back(std::unique_ptr<Buffer> buffer) noexcept;

  const uint64_t keep_bytes_;
  mutable Mutex mutex_;
  // By capacity: there may be thousands.
  std::multimap<size_t, std::unique_ptr<Buffer>> free_ NOSTALL_GUARDED_BY(mutex_);
  uint64_t bytes_ NOSTALL_GUARDED_BY(mutex_) = 0, free_bytes_ NOSTALL_GUARDED_BY(mutex_) = 0;
};

}  // namespace nostall::stage
