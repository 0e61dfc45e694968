// Builds PNG files from rows, with right checksums, and decodes them by libspng alone: for tests and
// fuzz/fuzz_image_png.cc.
#pragma once

#include <libdeflate.h>
#include <spng.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace nostall::image {

class PngBuilder {
 public:
  PngBuilder(uint32_t width, uint32_t height, uint8_t bits, uint8_t color, uint8_t interlace = 0) {
    std::vector<uint8_t> header;
    number(header, width);
    number(header, height);
    header.insert(header.end(), {bits, color, 0, 0, interlace});
    chunk("IHDR", header);
  }

  PngBuilder& chunk(std::string_view name, std::span<const uint8_t> data) {
    number(file_, static_cast<uint32_t>(data.size()));
    const size_t begin = file_.size();
    file_.insert(file_.end(), name.begin(), name.end());
    file_.insert(file_.end(), data.begin(), data.end());
    number(file_, libdeflate_crc32(0, file_.data() + begin, file_.size() - begin));
    return *this;
  }
  // The stream in IDAT chunks of at most `most` bytes.
  PngBuilder& stream(std::span<const uint8_t> compressed, size_t most) {
    do {
      const size_t size = std::min(most, compressed.size());
      chunk("IDAT", compressed.first(size));
      compressed = compressed.subspan(size);
    } while (!compressed.empty());
    return *this;
  }
  std::vector<uint8_t> end() {
    chunk("IEND", {});
    return file_;
  }

  // Rows that begin with the number of their filter, as a zlib stream.
  static std::vector<uint8_t> compress(std::span<const uint8_t> rows) {
    const std::unique_ptr<libdeflate_compressor, decltype(&libdeflate_free_compressor)> compressor(
        libdeflate_alloc_compressor(1), &libdeflate_free_compressor);
    std::vector<uint8_t> out(libdeflate_zlib_compress_bound(compressor.get(), rows.size()));
    out.resize(libdeflate_zlib_compress(compressor.get(), rows.data(), rows.size(), out.data(),
                                        out.size()));
    return out;
  }

 private:
  static void number(std::vector<uint8_t>& to, uint32_t value) {
    for (int shift = 24; shift >= 0; shift -= 8) to.push_back(static_cast<uint8_t>(value >> shift));
  }

  std::vector<uint8_t> file_{0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
};

// What libspng alone makes of the file; empty where it refuses it, or beyond the cap of these tests.
inline std::vector<uint8_t> by_libspng(const std::vector<uint8_t>& file, spng_format format) {
  const std::unique_ptr<spng_ctx, decltype(&spng_ctx_free)> png(spng_ctx_new(0), &spng_ctx_free);
  spng_set_png_buffer(png.get(), file.data(), file.size());
  size_t size = 0;
  if (spng_decoded_image_size(png.get(), format, &size) != 0 || size > 1 << 22) return {};
  std::vector<uint8_t> out(size);
  if (spng_decode_image(png.get(), out.data(), size, format, 0) != 0) return {};
  return out;
}

}  // namespace nostall::image
