// The values of a PNG as they are stored, which the decoder for colours would scale. Plain images are
// read by image/png_rows.h, all others by libspng.
#include "image/labels.h"

#include <spng.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "image/decode.h"
#include "image/png_rows.h"

namespace nostall::image {
namespace {

// Pixels of 1, 2 or 4 bits, the first in the highest bits, to bytes; backwards, so that they may
// lie at the beginning of `to`.
void widen(uint8_t* to, const uint8_t* from, int64_t width, int64_t height, unsigned bits) {
  const int64_t stride = (width * bits + 7) / 8;
  const auto mask = static_cast<uint8_t>((1u << bits) - 1);
  for (int64_t y = height - 1; y >= 0; --y) {
    for (int64_t x = width - 1; x >= 0; --x) {
      const int64_t bit = x * bits;
      const unsigned shift = 8 - bits - static_cast<unsigned>(bit % 8);
      to[y * width + x] = static_cast<uint8_t>(from[y * stride + bit / 8] >> shift) & mask;
    }
  }
}

// The most that an image's rows and its values need, whichever come last.
size_t values_size(uint64_t width, uint64_t height, unsigned bits, size_t rows_size) {
  return std::max(rows_size, static_cast<size_t>(width * height * (bits == 16 ? 2 : 1)));
}

// The values of the image if it is plain, right, and of one channel.
std::optional<Labels> decode_plain(std::span<const std::byte> encoded, uint64_t max_pixels,
                                   Buffer& buffer) {
  auto rows = PngRows::open(encoded);
  if (!rows || rows->channels() != 1 ||
      refuse_size("PNG", rows->width(), rows->height(), max_pixels)) {
    return std::nullopt;
  }
  const size_t stride = rows->stride();
  const size_t size =
      values_size(rows->width(), rows->height(), rows->bits(), stride * rows->height());
  uint8_t* const values = buffer.reserve(size + rows->scratch_size());
  if (!rows->inflate(values + size)) return std::nullopt;
  for (uint32_t y = 0; y < rows->height(); ++y) {
    uint8_t* const row = values + y * stride;
    if (!rows->next(row, y == 0 ? nullptr : row - stride)) return std::nullopt;
  }
  const bool wide = rows->bits() == 16;
  if (wide && std::endian::native == std::endian::little) {
    for (size_t i = 0; i < size; i += 2) std::swap(values[i], values[i + 1]);
  }
  if (rows->bits() < 8) widen(values, values, rows->width(), rows->height(), rows->bits());
  return Labels{rows->width(), rows->height(), wide, reinterpret_cast<const std::byte*>(values)};
}

}  // namespace

Result<Labels> decode_labels(std::span<const std::byte> encoded, uint64_t max_pixels,
                             Buffer& buffer) {
  constexpr size_t kMaxChunk = size_t{64} << 20;
  const auto failed = [](int code) {
    return Error(ErrorKind::corruption, std::string("PNG: ") + spng_strerror(code));
  };
  if (encoded.size() < 4 || std::memcmp(encoded.data(), "\x89PNG", 4) != 0) {
    return Error(ErrorKind::corruption, std::to_string(encoded.size()) +
                                            " bytes that are not a PNG image, as masks must be");
  }
  if (const auto plain = decode_plain(encoded, max_pixels, buffer)) return *plain;
  const std::unique_ptr<spng_ctx, decltype(&spng_ctx_free)> png(spng_ctx_new(0), &spng_ctx_free);
  if (!png) return failed(SPNG_EMEM);
  spng_set_chunk_limits(png.get(), kMaxChunk, kMaxChunk);
  if (int code = spng_set_png_buffer(png.get(), encoded.data(), encoded.size())) {
    return failed(code);
  }
  spng_ihdr header{};
  if (int code = spng_get_ihdr(png.get(), &header)) return failed(code);
  if (auto error = refuse_size("PNG", header.width, header.height, max_pixels)) return *error;
  if (header.color_type != SPNG_COLOR_TYPE_GRAYSCALE &&
      header.color_type != SPNG_COLOR_TYPE_INDEXED) {
    return Error(ErrorKind::corruption,
                 "a mask of colours: store one number per pixel, as grey or by a palette");
  }
  size_t size = 0;
  if (int code = spng_decoded_image_size(png.get(), SPNG_FMT_PNG, &size)) return failed(code);
  const bool wide = header.bit_depth == 16;
  uint8_t* values =
      buffer.reserve(values_size(header.width, header.height, header.bit_depth, size));
  if (int code = spng_decode_image(png.get(), values, size, SPNG_FMT_PNG, 0)) return failed(code);
  if (header.bit_depth < 8) widen(values, values, header.width, header.height, header.bit_depth);
  return Labels{header.width, header.height, wide, reinterpret_cast<const std::byte*>(values)};
}

}  // namespace nostall::image
