// Chooses the decoder by an image's first bytes, and limits what a header may promise.
#include "image/decode.h"

#include <cstring>
#include <string>

namespace nostall::image {
namespace {

bool starts_with(std::span<const std::byte> bytes, size_t at, std::string_view text) {
  return bytes.size() >= at + text.size() &&
         std::memcmp(bytes.data() + at, text.data(), text.size()) == 0;
}

}  // namespace

std::optional<Error> refuse_size(const char* format, int64_t width, int64_t height,
                                 uint64_t max_pixels) {
  const std::string size = std::to_string(width) + "x" + std::to_string(height);
  if (width <= 0 || height <= 0) {
    return Error(ErrorKind::corruption, std::string(format) + " image of size " + size);
  }
  if (width > kMaxSide || height > kMaxSide ||
      static_cast<uint64_t>(width) * static_cast<uint64_t>(height) > max_pixels) {
    return Error(ErrorKind::corruption, std::string(format) + " image of size " + size +
                                            " exceeds the limit of " + std::to_string(max_pixels) +
                                            " pixels, " + std::to_string(kMaxSide) +
                                            " a side: raise max_pixels if it is genuine");
  }
  return std::nullopt;
}

Result<Bitmap> decode(std::span<const std::byte> encoded, uint64_t max_pixels, const Plan& plan,
                      Buffer& buffer) {
  if (starts_with(encoded, 0, "\xff\xd8")) return decode_jpeg(encoded, max_pixels, plan, buffer);
  if (starts_with(encoded, 0, "\x89PNG")) return decode_png(encoded, max_pixels, plan, buffer);
  if (starts_with(encoded, 0, "RIFF") && starts_with(encoded, 8, "WEBP")) {
    return decode_webp(encoded, max_pixels, plan, buffer);
  }
  return Error(ErrorKind::corruption,
               std::to_string(encoded.size()) + " bytes that are not a JPEG, PNG or WebP image");
}

}  // namespace nostall::image
