// PNG by libspng, always whole: every checksum is checked, whatever region is wanted.
#include <spng.h>

#include <memory>
#include <string>

#include "image/decode.h"

namespace nostall::image {

Result<Bitmap> decode_png(std::span<const std::byte> encoded, uint64_t max_pixels,
                          const Plan& plan, Buffer& buffer) {
  constexpr size_t kMaxChunk = size_t{64} << 20;
  const auto failed = [](int code) {
    return Error(ErrorKind::corruption, std::string("PNG: ") + spng_strerror(code));
  };
  const std::unique_ptr<spng_ctx, decltype(&spng_ctx_free)> png(spng_ctx_new(0), &spng_ctx_free);
  if (!png) return failed(SPNG_EMEM);
  spng_set_chunk_limits(png.get(), kMaxChunk, kMaxChunk);
  if (int code = spng_set_png_buffer(png.get(), encoded.data(), encoded.size())) {
    return failed(code);
  }
  spng_ihdr header{};
  if (int code = spng_get_ihdr(png.get(), &header)) return failed(code);
  if (auto error = refuse_size("PNG", header.width, header.height, max_pixels)) return *error;

  const size_t size = size_t{header.width} * header.height * 4;
  uint8_t* pixels = buffer.reserve(size);
  if (int code = spng_decode_image(png.get(), pixels, size, SPNG_FMT_RGBA8, 0)) {
    return failed(code);
  }
  plan(header.width, header.height);
  return Bitmap{pixels, size_t{header.width} * 4, 0, 0, header.width, header.height, 0};
}

}  // namespace nostall::image
