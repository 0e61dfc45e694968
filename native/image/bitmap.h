// image/bitmap.h - decoded pixels between two steps: 4 bytes a pixel, R G B and one ignored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace nostall::image {

// Bytes that are kept from image to image; growing loses the contents. 64 readable bytes follow.
class Buffer {
 public:
  uint8_t* reserve(size_t bytes) {
    if (bytes + kSlack > size_) {
      size_ = 0;
      bytes_.reset();
      // Value-initialised: kernels read, and ignore, up to kSlack bytes behind the last pixel.
      bytes_ = std::make_unique<uint8_t[]>(bytes + kSlack);
      size_ = bytes + kSlack;
    }
    return bytes_.get();
  }

 private:
  static constexpr size_t kSlack = 64;
  std::unique_ptr<uint8_t[]> bytes_;
  size_t size_ = 0;
};

// A view of the region [x, x + width) x [y, y + height) of an image that was decoded at 1/2^shrink.
struct Bitmap {
  const uint8_t* pixels = nullptr;
  size_t stride = 0;  // bytes from row to row
  int64_t x = 0, y = 0, width = 0, height = 0;
  unsigned shrink = 0;
};

}  // namespace nostall::image
