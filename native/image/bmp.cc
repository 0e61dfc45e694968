// BMP: the header's variants since OS/2, uncompressed, with a palette or with masks of bits.
#include <algorithm>
#include <array>
#include <bit>
#include <string>

#include "image/decode.h"

namespace nostall::image {
namespace {

Error failed(const std::string& what) { return Error(ErrorKind::corruption, "BMP: " + what); }

enum Compression : uint32_t { kNone = 0, kMasks = 3, kMasksWithAlpha = 6 };

// Little-endian numbers; 0 behind the end.
class Bytes {
 public:
  explicit Bytes(std::span<const std::byte> bytes) : bytes_(bytes) {}
  uint32_t u16(size_t at) const { return u8(at) | u8(at + 1) << 8; }
  uint32_t u32(size_t at) const { return u16(at) | u16(at + 2) << 16; }
  int32_t i32(size_t at) const { return static_cast<int32_t>(u32(at)); }
  uint32_t u8(size_t at) const {
    return at < bytes_.size() ? static_cast<uint32_t>(bytes_[at]) : 0;
  }

 private:
  std::span<const std::byte> bytes_;
};

// One colour of a pixel of 16 or 32 bits.
struct Channel {
  uint32_t mask = 0;
  uint8_t value(uint32_t pixel) const {
    if (mask == 0) return 0;
    const int shift = std::countr_zero(mask);
    return static_cast<uint8_t>(uint64_t{(pixel & mask) >> shift} * 255 / (mask >> shift));
  }
};

struct Header {
  int64_t width = 0, height = 0;
  bool top_down = false;
  uint32_t bits = 0, pixels_at = 0;
  size_t palette_at = 0, palette_entry = 4, palette_entries = 0;
  std::array<Channel, 3> masks{};  // R G B
};

Result<Header> read_header(const Bytes& bytes, size_t size) {
  constexpr size_t kFile = 14, kCore = 12, kInfo = 40;
  Header header;
  header.pixels_at = bytes.u32(10);
  const uint32_t info = bytes.u32(kFile);
  uint32_t compression = kNone, colours = 0;
  if (info == kCore) {
    header.width = bytes.u16(18);
    header.height = bytes.u16(20);
    header.bits = bytes.u16(24);
    header.palette_entry = 3;
  } else if (info >= kInfo && info <= 124) {
    header.width = bytes.i32(18);
    const int64_t height = bytes.i32(22);
    header.top_down = height < 0;
    header.height = header.top_down ? -height : height;
    header.bits = bytes.u16(28);
    compression = bytes.u32(30);
    colours = bytes.u32(46);
  } else {
    return failed("a header of " + std::to_string(info) + " bytes is not known");
  }
  header.palette_at = kFile + info;
  const bool masks = compression == kMasks || compression == kMasksWithAlpha;
  if (masks && header.bits >= 16) {
    for (size_t c = 0; c < 3; ++c) header.masks[c].mask = bytes.u32(kFile + kInfo + 4 * c);
  } else if (compression != kNone) {
    return failed("compression " + std::to_string(compression) + " is not supported: save it " +
                  "uncompressed, or as PNG");
  } else if (header.bits == 16) {
    header.masks = {Channel{0x7c00}, Channel{0x3e0}, Channel{0x1f}};
  } else {
    header.masks = {Channel{0xff0000}, Channel{0xff00}, Channel{0xff}};
  }
  const auto known = {1u, 4u, 8u, 16u, 24u, 32u};
  if (std::find(known.begin(), known.end(), header.bits) == known.end()) {
    return failed("pixels of " + std::to_string(header.bits) + " bits");
  }
  if (header.bits <= 8) {
    const uint32_t most = 1u << header.bits;
    header.palette_entries = colours == 0 || colours > most ? most : colours;
    if (header.palette_at + header.palette_entries * header.palette_entry > size) {
      return failed("the palette is cut off");
    }
  }
  return header;
}

// Unpacks one row to R G B and a byte that is ignored.
void unpack(const Header& header, const Bytes& bytes, size_t row, uint8_t* out) {
  for (int64_t x = 0; x < header.width; ++x, out += 4) {
    const size_t bit = static_cast<size_t>(x) * header.bits, at = row + bit / 8;
    if (header.bits <= 8) {
      const size_t shift = 8 - header.bits - bit % 8;
      const uint32_t index = bytes.u8(at) >> shift & ((1u << header.bits) - 1);
      const size_t entry = header.palette_at + index * header.palette_entry;
      for (size_t c = 0; c < 3; ++c) {
        out[c] = index < header.palette_entries ? static_cast<uint8_t>(bytes.u8(entry + 2 - c)) : 0;
      }
    } else if (header.bits == 24) {
      for (size_t c = 0; c < 3; ++c) out[c] = static_cast<uint8_t>(bytes.u8(at + 2 - c));
    } else {
      const uint32_t pixel = header.bits == 16 ? bytes.u16(at) : bytes.u32(at);
      for (size_t c = 0; c < 3; ++c) out[c] = header.masks[c].value(pixel);
    }
  }
}

}  // namespace

Result<Bitmap> decode_bmp(std::span<const std::byte> encoded, uint64_t max_pixels, const Plan& plan,
                          Buffer& buffer) {
  const Bytes bytes(encoded);
  const auto read = read_header(bytes, encoded.size());
  if (!read) return read.error();
  const Header& header = read.value();
  if (auto error = refuse_size("BMP", header.width, header.height, max_pixels)) return *error;
  const size_t stride = (static_cast<size_t>(header.width) * header.bits + 31) / 32 * 4;
  const size_t wanted = header.pixels_at + stride * static_cast<size_t>(header.height);
  if (wanted > encoded.size()) {
    return failed("the file has " + std::to_string(encoded.size()) + " of its " +
                  std::to_string(wanted) + " bytes: it is truncated");
  }
  const size_t row = static_cast<size_t>(header.width) * 4;
  uint8_t* pixels = buffer.reserve(row * static_cast<size_t>(header.height));
  for (int64_t y = 0; y < header.height; ++y) {
    const int64_t stored = header.top_down ? y : header.height - 1 - y;
    unpack(header, bytes, header.pixels_at + stride * static_cast<size_t>(stored),
           pixels + row * static_cast<size_t>(y));
  }
  plan(header.width, header.height);
  return Bitmap{pixels, row, 0, 0, header.width, header.height, 0};
}

}  // namespace nostall::image
