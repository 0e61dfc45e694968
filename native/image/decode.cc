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

// "P1" to "P6" and white space.
bool is_pnm(std::span<const std::byte> bytes) {
  if (bytes.size() < 3 || bytes[0] != std::byte{'P'}) return false;
  const auto kind = static_cast<char>(bytes[1]), space = static_cast<char>(bytes[2]);
  return kind >= '1' && kind <= '6' && (space == ' ' || (space >= '\t' && space <= '\r'));
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
                      JpegDecoder& jpeg, Buffer& buffer) {
  if (starts_with(encoded, 0, "\xff\xd8")) return jpeg.decode(encoded, max_pixels, plan, buffer);
  if (starts_with(encoded, 0, "\x89PNG")) return decode_png(encoded, max_pixels, plan, buffer);
  if (starts_with(encoded, 0, "RIFF") && starts_with(encoded, 8, "WEBP")) {
    return decode_webp(encoded, max_pixels, plan, buffer);
  }
  if (starts_with(encoded, 0, "BM")) return decode_bmp(encoded, max_pixels, plan, buffer);
  if (is_pnm(encoded)) return decode_pnm(encoded, max_pixels, plan, buffer);
  if (starts_with(encoded, 0, {"II*\0", 4}) || starts_with(encoded, 0, {"MM\0*", 4})) {
    return decode_tiff(encoded, max_pixels, plan, buffer);
  }
  return Error(ErrorKind::corruption,
               std::to_string(encoded.size()) +
                   " bytes that are not a JPEG, PNG, WebP, BMP, PNM or TIFF image");
}

}  // namespace nostall::image
