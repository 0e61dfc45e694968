// PNG files of any header, palette and compressed stream, with right checksums: what image/png_rows.h
// reads must be what libspng reads.
//   3 bytes: width, height, and bits with colour; 1: entries of the palette; 1: size of IDAT chunks;
//   1: whether the rest is compressed here or is a stream as it stands
#include <spng.h>

#include <algorithm>
#include <cstdlib>

#include "../tests/native/image/png_builder.h"
#include "image/decode.h"
#include "image/labels.h"

namespace image = nostall::image;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static image::Buffer buffer;
  static constexpr uint8_t kColors[] = {0, 2, 3, 4, 6};
  if (size < 6) return 0;
  const uint8_t bits = static_cast<uint8_t>(1 << (data[2] % 5)), color = kColors[data[2] / 5 % 5];
  image::PngBuilder builder(data[0], data[1], bits, color);
  if (data[3] > 0) {
    std::vector<uint8_t> palette(size_t{data[3]} * 3, 1);
    for (size_t i = 0; i < palette.size(); ++i) palette[i] = static_cast<uint8_t>(i);
    builder.chunk("PLTE", palette);
  }
  const std::span<const uint8_t> rest(data + 6, size - 6);
  const auto stream = data[5] % 2 == 0 ? image::PngBuilder::compress(rest)
                                       : std::vector<uint8_t>(rest.begin(), rest.end());
  const auto file = builder.stream(stream, data[4] + size_t{1}).end();
  const auto bytes = std::as_bytes(std::span(file));

  const auto pixels = image::by_libspng(file, SPNG_FMT_RGBA8);
  const auto bitmap = image::decode_png(
      bytes, 1 << 16, [](int64_t, int64_t) { return image::Wanted{}; }, buffer);
  // 16 bits of grey are refused whatever they are.
  if (!(bits == 16 && color == 0) && bool(bitmap) != !pixels.empty()) std::abort();
  if (bitmap) {
    for (size_t i = 0; i < pixels.size(); i += 4) {
      if (!std::equal(&pixels[i], &pixels[i] + 3, bitmap.value().pixels + i)) std::abort();
    }
  }
  const auto labels = image::decode_labels(bytes, 1 << 16, buffer);
  const auto stored = image::by_libspng(file, SPNG_FMT_PNG);
  if (color == 0 || color == 3) {
    if (bool(labels) != !stored.empty()) std::abort();
    if (labels && bits >= 8 &&
        !std::equal(stored.begin(), stored.end(),
                    reinterpret_cast<const uint8_t*>(labels.value().values))) {
      std::abort();
    }
  } else if (labels) {
    std::abort();
  }
  return 0;
}
