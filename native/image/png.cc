// PNG, always whole: every checksum is checked, whatever region is wanted. Plain images are read by
// image/png_rows.h, all others by libspng.
#include <spng.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "image/decode.h"
#include "image/png_rows.h"

namespace nostall::image {
namespace {

using Png = std::unique_ptr<spng_ctx, decltype(&spng_ctx_free)>;

Error failed(int code) {
  if (code == SPNG_EMEM) throw std::bad_alloc();
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

// A row of an image as R G B and one ignored; false for an index that the palette does not have.
bool expand(const PngRows& rows, const uint8_t* from, uint8_t* to) {
  const auto* palette = reinterpret_cast<const uint8_t*>(rows.palette().data());
  const size_t entries = rows.palette().size() / 3, width = rows.width();
  const auto put = [&](size_t x, const uint8_t* colour) {
    std::memcpy(to + 4 * x, colour, 3);
    to[4 * x + 3] = 255;
  };
  const auto put_grey = [&](size_t x, uint8_t level) {
    std::memset(to + 4 * x, level, 3), to[4 * x + 3] = 255;
  };
  switch (rows.color()) {
    case PngRows::rgb:
      for (size_t x = 0; x < width; ++x) put(x, from + 3 * x);
      return true;
    case PngRows::grey:
      for (size_t x = 0; x < width; ++x) put_grey(x, from[x]);
      return true;
    case PngRows::grey_alpha:
      for (size_t x = 0; x < width; ++x) put_grey(x, from[2 * x]);
      return true;
    case PngRows::indexed:
      for (size_t x = 0; x < width; ++x) {
        if (from[x] >= entries) return false;
        put(x, palette + size_t{3} * from[x]);
      }
      return true;
    case PngRows::rgb_alpha:
      std::memcpy(to, from, 4 * width);
      return true;
  }
  return false;
}

// The image if it is plain and right.
std::optional<Bitmap> decode_plain(std::span<const std::byte> encoded, uint64_t max_pixels,
                                   Buffer& buffer) {
  auto rows = PngRows::open(encoded);
  if (!rows || rows->bits() != 8 || refuse_size("PNG", rows->width(), rows->height(), max_pixels)) {
    return std::nullopt;
  }
  // The pixels, two rows before they become pixels, the scratch.
  const size_t stride = size_t{rows->width()} * 4, size = stride * rows->height();
  uint8_t* const pixels = buffer.reserve(size + 2 * stride + rows->scratch_size());
  uint8_t* pair[] = {pixels + size, pixels + size + stride};
  if (!rows->inflate(pixels + size + 2 * stride)) return std::nullopt;
  for (uint32_t y = 0; y < rows->height(); ++y) {
    uint8_t* const now = pair[y % 2];
    if (!rows->next(now, y == 0 ? nullptr : pair[1 - y % 2])) return std::nullopt;
    if (!expand(*rows, now, pixels + y * stride)) return std::nullopt;
  }
  return Bitmap{pixels, stride, 0, 0, rows->width(), rows->height(), 0};
}

}  // namespace

Result<Bitmap> decode_png(std::span<const std::byte> encoded, uint64_t max_pixels, const Plan& plan,
                          Buffer& buffer) {
  if (const auto plain = decode_plain(encoded, max_pixels, buffer)) {
    plan(plain->width, plain->height);
    return *plain;
  }
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
