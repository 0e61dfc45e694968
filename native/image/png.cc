// PNG by libspng, always whole: every checksum is checked, whatever region is wanted.
#include <spng.h>

#include <memory>
#include <optional>
#include <string>

#include "image/decode.h"

namespace nostall::image {
namespace {

using Png = std::unique_ptr<spng_ctx, decltype(&spng_ctx_free)>;

Error failed(int code) {
  return Error(ErrorKind::corruption, std::string("PNG: ") + spng_strerror(code));
}

// The header, if its size is allowed.
std::optional<Error> open(std::span<const std::byte> encoded, uint64_t max_pixels, const Png& png,
                          spng_ihdr& header) {
  constexpr size_t kMaxChunk = size_t{64} << 20;
  if (!png) return failed(SPNG_EMEM);
  spng_set_chunk_limits(png.get(), kMaxChunk, kMaxChunk);
  if (int code = spng_set_png_buffer(png.get(), encoded.data(), encoded.size())) {
    return failed(code);
  }
  if (int code = spng_get_ihdr(png.get(), &header)) return failed(code);
  return refuse_size("PNG", header.width, header.height, max_pixels);
}

}  // namespace

Result<Bitmap> decode_png(std::span<const std::byte> encoded, uint64_t max_pixels, const Plan& plan,
                          Buffer& buffer) {
  const Png png(spng_ctx_new(0), &spng_ctx_free);
  spng_ihdr header{};
  if (auto error = open(encoded, max_pixels, png, header)) return *error;
  if (header.bit_depth == 16 && header.color_type == SPNG_COLOR_TYPE_GRAYSCALE) {
    return Error(ErrorKind::corruption,
                 "PNG: 16-bit grey, whose levels an RGB image cannot hold: read it as a mask, or "
                 "convert it to 8 bits");
  }

  const size_t size = size_t{header.width} * header.height * 4;
  uint8_t* pixels = buffer.reserve(size);
  if (int code = spng_decode_image(png.get(), pixels, size, SPNG_FMT_RGBA8, 0)) {
    return failed(code);
  }
  plan(header.width, header.height);
  return Bitmap{pixels, size_t{header.width} * 4, 0, 0, header.width, header.height, 0};
}

}  // namespace nostall::image
