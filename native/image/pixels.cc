// Turns uint8 arrays of known layout into bitmaps; the layout is checked once, when it is given.
#include "image/pixels.h"

#include <string>

#include "image/decode.h"

namespace nostall::image {

void check_pixels(const Pixels& pixels, uint64_t max_pixels) {
  if (pixels.channels != 1 && pixels.channels != 3) {
    throw Error(ErrorKind::usage, "samples of " + std::to_string(pixels.channels) +
                                      " channels are no images: 1 or 3 are");
  }
  if (pixels.height == 0 || pixels.width == 0 || pixels.height > kMaxSide ||
      pixels.width > kMaxSide || uint64_t{pixels.height} * pixels.width > max_pixels) {
    throw Error(ErrorKind::usage, "samples of " + std::to_string(pixels.height) + " x " +
                                      std::to_string(pixels.width) +
                                      " pixels: sides must be between 1 and " +
                                      std::to_string(kMaxSide) + ", and max_pixels in all");
  }
}

Result<Bitmap> unpack_pixels(std::span<const std::byte> sample, const Pixels& pixels,
                             Buffer& buffer) {
  const size_t area = size_t{pixels.height} * pixels.width;
  if (sample.size() != area * pixels.channels) {
    return Error(ErrorKind::corruption, std::to_string(sample.size()) + " bytes are not " +
                                            std::to_string(pixels.height) + " x " +
                                            std::to_string(pixels.width) + " pixels of " +
                                            std::to_string(pixels.channels) + " channels");
  }
  uint8_t* to = buffer.reserve(area * 4);
  const auto* from = reinterpret_cast<const uint8_t*>(sample.data());
  const size_t pixel = pixels.channels_first ? 1 : pixels.channels;
  const size_t channel = pixels.channels == 1 ? 0 : pixels.channels_first ? area : 1;
  const size_t red = pixels.bgr ? 2 * channel : 0, blue = 2 * channel - red;
  for (size_t i = 0; i < area; ++i, from += pixel, to += 4) {
    to[0] = from[red];
    to[1] = from[channel];
    to[2] = from[blue];
    to[3] = 0;
  }
  const auto width = static_cast<int64_t>(pixels.width);
  return Bitmap{to - area * 4, static_cast<size_t>(width) * 4,      0, 0,
                width,         static_cast<int64_t>(pixels.height), 0};
}

}  // namespace nostall::image
