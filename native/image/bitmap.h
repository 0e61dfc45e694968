// image/bitmap.h - decoded pixels between two steps: 4 bytes per pixel, R G B and one ignored.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

namespace nostall::image {

// Bytes that several threads' buffers hold: now, and at most so far. Thread-safe.
class HeldBytes {
 public:
  void change(size_t from, size_t to) noexcept {
    const uint64_t now = now_.fetch_add(to - from, std::memory_order_relaxed) + (to - from);
    uint64_t most = most_.load(std::memory_order_relaxed);
    while (now > most && !most_.compare_exchange_weak(most, now, std::memory_order_relaxed)) {
    }
  }
  uint64_t now() const noexcept { return now_.load(std::memory_order_relaxed); }
  uint64_t most() const noexcept { return most_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> now_{0}, most_{0};
};

// Bytes that are kept from image to image; growing loses the contents. 64 readable bytes follow.
class Buffer {
 public:
  explicit Buffer(HeldBytes* counted = nullptr) noexcept : counted_(counted) {}
  ~Buffer() { release(); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Throws std::bad_alloc.
  uint8_t* reserve(size_t bytes) {
    used_ = bytes + kSlack > used_ ? bytes + kSlack : used_;
    if (bytes + kSlack > size_) {
      release();
      // Zeroed: kernels read, and ignore, up to kSlack bytes behind the last pixel.
      bytes_.reset(static_cast<uint8_t*>(std::calloc(bytes + kSlack, 1)));
      if (!bytes_) throw std::bad_alloc();
      count(bytes + kSlack);
    }
    return bytes_.get();
  }
  void release() noexcept {
    bytes_.reset();
    count(0);
  }
  uint8_t* data() const noexcept { return bytes_.get(); }
  size_t size() const noexcept { return size_; }
  // The most that was reserved since it was asked last.
  size_t take_used() noexcept { return std::exchange(used_, 0); }

 private:
  struct Free {
    void operator()(uint8_t* p) const noexcept { std::free(p); }
  };
  void count(size_t size) noexcept {
    if (counted_ != nullptr) counted_->change(size_, size);
    size_ = size;
  }

  static constexpr size_t kSlack = 64;
  HeldBytes* counted_;
  std::unique_ptr<uint8_t, Free> bytes_;
  size_t size_ = 0, used_ = 0;
};

// A view of the region [x, x + width) x [y, y + height) of an image that was decoded at 1/2^shrink.
struct Bitmap {
  const uint8_t* pixels = nullptr;
  size_t stride = 0;  // bytes from row to row
  int64_t x = 0, y = 0, width = 0, height = 0;
  unsigned shrink = 0;
};

}  // namespace nostall::image
