// image/decode.h - the decoders behind one call: header first, then the region wanted.
//
// Every function is total: any bytes give pixels or an Error of kind corruption. No decoder
// allocates more than the header's size, which is checked against the caller's cap first.
// Thread-safety: free functions; a JpegDecoder is for one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "base/error.h"
#include "image/bitmap.h"
#include "image/geometry.h"

namespace nostall::image {

constexpr int64_t kMaxSide = 65535;  // of any image, in pixels

// What is wanted of an image once its size is known, in pixels of the full image.
struct Wanted {
  Box region;           // not empty, inside the image
  unsigned shrink = 0;  // a decoder may decode at 1/2^k, k <= shrink
};
using Plan = std::function<Wanted(int64_t width, int64_t height)>;

// Decodes one JPEG after another; no image depends on one before it. The thread that uses it constructs
// it, while no other one changes the environment (in Python: while the GIL is held): libjpeg-turbo, but
// that of our wheels (scripts/wheel), reads variables when a decoder is made, and when a thread decodes
// its first image, which the constructor therefore does; before glibc 2.41 getenv() is not safe beside
// setenv().
class JpegDecoder {
 public:
  JpegDecoder();  // throws std::bad_alloc
  ~JpegDecoder();
  JpegDecoder(JpegDecoder&&) noexcept;
  JpegDecoder& operator=(JpegDecoder&&) noexcept;

  // As decode() below.
  Result<Bitmap> decode(std::span<const std::byte> encoded, uint64_t max_pixels, const Plan& plan,
                        Buffer& buffer);

 private:
  class State;
  std::unique_ptr<State> state_;
};

// Decodes the region of `plan`, or more, into `buffer`; the Bitmap says where its pixels lie.
// Truncation gives the same verdict for every region: JPEG needs an end-of-image marker behind its
// first scan header, WebP all bytes of its RIFF header's size, the others are always decoded whole.
// Damage inside a JPEG is found in the rows down to the end of the region.
Result<Bitmap> decode(std::span<const std::byte> encoded, uint64_t max_pixels, const Plan& plan,
                      JpegDecoder& jpeg, Buffer& buffer);

// One a format; `encoded` begins with the format's signature.
Result<Bitmap> decode_png(std::span<const std::byte> encoded, uint64_t max_pixels, const Plan& plan,
                          Buffer& buffer);
Result<Bitmap> decode_webp(std::span<const std::byte> encoded, uint64_t max_pixels,
                           const Plan& plan, Buffer& buffer);
Result<Bitmap> decode_bmp(std::span<const std::byte> encoded, uint64_t max_pixels, const Plan& plan,
                          Buffer& buffer);
Result<Bitmap> decode_pnm(std::span<const std::byte> encoded, uint64_t max_pixels, const Plan& plan,
                          Buffer& buffer);
Result<Bitmap> decode_tiff(std::span<const std::byte> encoded, uint64_t max_pixels,
                           const Plan& plan, Buffer& buffer);

// The Error for a header that promises too much or nothing, if it does.
std::optional<Error> refuse_size(const char* format, int64_t width, int64_t height,
                                 uint64_t max_pixels);

}  // namespace nostall::image
