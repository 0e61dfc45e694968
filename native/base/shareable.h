// base/shareable.h - bytes that do not change any more, and of which a node needs one copy.
//
// They lie in this process's own memory until share() puts them into a file without a name, or
// adopt() finds the same bytes in the file of another process. The memory is exchanged in place:
// addresses stay, and threads may read meanwhile.
// Thread-safety: data() is written by one thread before others know it; all else is thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/error.h"
#include "base/file.h"
#include "base/mutex.h"

namespace nostall {

class Shareable {
 public:
  // Zeros, at the beginning of a page; `size` is above 0. Throws std::bad_alloc.
  explicit Shareable(uint64_t size);
  ~Shareable();
  Shareable(const Shareable&) = delete;
  Shareable& operator=(const Shareable&) = delete;

  std::byte* data() const noexcept { return data_; }
  uint64_t size() const noexcept { return size_; }

  // The bytes as a file that nothing can change; this process uses the file's memory from now on.
  // For as long as both exist, there are two copies. On an Error nothing has changed.
  Result<Descriptor> share();
  // Uses the file's memory instead of its own; false, and nothing has changed, if the file does not
  // hold these bytes or can still change.
  bool adopt(const Descriptor& file);
  bool is_shared() const;

 private:
  bool exchange(int file) NOSTALL_REQUIRES(mutex_);
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
  mutable Mutex mutex_;
  Descriptor file_ NOSTALL_GUARDED_BY(mutex_);
};

}  // namespace nostall
