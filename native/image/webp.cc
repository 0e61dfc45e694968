// WebP by libwebp, cropped while decoding.
#include <webp/decode.h>

#include <algorithm>
#include <string>

#include "image/decode.h"

namespace nostall::image {
namespace {

Error failed(const std::string& what) { return Error(ErrorKind::corruption, "WebP: " + what); }

}  // namespace

Result<Bitmap> decode_webp(std::span<const std::byte> encoded, uint64_t max_pixels,
                           const Plan& plan, Buffer& buffer) {
  const auto* data = reinterpret_cast<const uint8_t*>(encoded.data());
  const uint64_t size = uint64_t{data[4]} | uint64_t{data[5]} << 8 | uint64_t{data[6]} << 16 |
                        uint64_t{data[7]} << 24;
  if (size + 8 > encoded.size()) {
    return failed("the file has " + std::to_string(encoded.size()) + " of its " +
                  std::to_string(size + 8) + " bytes: it is truncated");
  }
  WebPDecoderConfig config;
  if (!WebPInitDecoderConfig(&config)) return failed("the library has another version");
  if (WebPGetFeatures(data, encoded.size(), &config.input) != VP8_STATUS_OK) {
    return failed("the header is damaged");
  }
  const int width = config.input.width, height = config.input.height;
  if (auto error = refuse_size("WebP", width, height, max_pixels)) return *error;
  if (config.input.has_animation) return failed("animations are not supported");

  // Chroma is interpolated from its neighbours, and the library needs an even corner.
  const Box wanted = plan(width, height).region;
  const auto x = static_cast<int>(std::max<int64_t>(0, wanted.x - 2)) & ~1;
  const auto y = static_cast<int>(std::max<int64_t>(0, wanted.y - 2)) & ~1;
  const auto right = static_cast<int>(std::min<int64_t>(width, wanted.x + wanted.width + 2));
  const auto bottom = static_cast<int>(std::min<int64_t>(height, wanted.y + wanted.height + 2));
  Bitmap bitmap{nullptr, static_cast<size_t>(right - x) * 4, x, y, right - x, bottom - y, 0};
  const size_t bytes = bitmap.stride * static_cast<size_t>(bitmap.height);
  uint8_t* pixels = buffer.reserve(bytes);
  bitmap.pixels = pixels;

  config.options.use_cropping = 1;
  config.options.crop_left = x;
  config.options.crop_top = y;
  config.options.crop_width = right - x;
  config.options.crop_height = bottom - y;
  config.output.colorspace = MODE_RGBA;
  config.output.is_external_memory = 1;
  config.output.u.RGBA = {pixels, static_cast<int>(bitmap.stride), bytes};
  const VP8StatusCode status = WebPDecode(data, encoded.size(), &config);
  WebPFreeDecBuffer(&config.output);
  if (status == VP8_STATUS_OUT_OF_MEMORY) {
    // The library says the same of a damaged header of the alpha plane, which lossy images have.
    constexpr int kLossy = 1;
    const bool alpha_apart = config.input.has_alpha && config.input.format == kLossy;
    if (!alpha_apart) throw std::bad_alloc();
    Buffer probe;
    probe.reserve(4 * static_cast<size_t>(width) * static_cast<size_t>(height));  // or throws
  }
  if (status != VP8_STATUS_OK) return failed("damaged, code " + std::to_string(status));
  return bitmap;
}

}  // namespace nostall::image
