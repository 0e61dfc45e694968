// The chunks of a PNG image are checked in one walk, what its IDAT chunks hold is decompressed by one
// call, and the filters of the rows are undone while rows are copied to their place. A filter adds to
// each byte a prediction from its neighbours, `Bpp` bytes to the left and a row above; the prediction
// from the left makes a chain through the row, which is why 3 and 4 channels go in parallel lanes.
#include "image/png_rows.h"

#include <libdeflate.h>

#include <cstdlib>
#include <cstring>
#include <memory>

namespace nostall::image {
namespace {

constexpr size_t kSignature = 8, kAround = 12;  // of a chunk: length, name, checksum
constexpr uint32_t kLongest = 0x7fffffff;       // a chunk, a side

uint32_t big_endian(const std::byte* from) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = value << 8 | std::to_integer<uint32_t>(from[i]);
  return value;
}

constexpr uint32_t name(const char (&letters)[5]) {
  uint32_t value = 0;
  for (int i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(letters[i]);
  return value;
}

struct Chunk {
  uint32_t name;
  std::span<const std::byte> data;
};

// The chunk at `at` if it is whole and its checksum is right.
std::optional<Chunk> chunk(std::span<const std::byte> encoded, size_t at) {
  if (at > encoded.size() || encoded.size() - at < kAround) return std::nullopt;
  const std::byte* const begin = encoded.data() + at;
  const uint32_t length = big_endian(begin);
  if (length > kLongest || encoded.size() - at - kAround < length) return std::nullopt;
  if (libdeflate_crc32(0, begin + 4, length + size_t{4}) != big_endian(begin + 8 + length)) {
    return std::nullopt;
  }
  return Chunk{big_endian(begin + 4), {begin + 8, length}};
}

// The nearest of left, above and above-left to left + above - above-left.
uint8_t paeth(int a, int b, int c) {
  const int pa = std::abs(b - c), pb = std::abs(a - c), pc = std::abs(a + b - 2 * c);
  return static_cast<uint8_t>(pa <= pb && pa <= pc ? a : pb <= pc ? b : c);
}

// Four bytes as numbers that can be subtracted.
using Bytes = uint8_t __attribute__((vector_size(4)));
using Lanes = int16_t __attribute__((vector_size(8)));

template <unsigned Bpp>
Lanes load(const uint8_t* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, 4);  // of 3 channels one byte too many, which is ignored
  return __builtin_convertvector(bytes, Lanes);
}

template <unsigned Bpp>
void store(uint8_t* to, Lanes value) {
  const Bytes bytes = __builtin_convertvector(value, Bytes);
  std::memcpy(to, &bytes, Bpp);
}

Lanes absolute(Lanes v) { return v < 0 ? -v : v; }

Lanes paeth(Lanes a, Lanes b, Lanes c) {
  const Lanes pa = absolute(b - c), pb = absolute(a - c), pc = absolute(a + b - c - c);
  return ((pa <= pb) & (pa <= pc)) ? a : (pb <= pc ? b : c);
}

// Calls predict(left, above, above-left) for each byte, or for the channels of each pixel.
template <unsigned Bpp, typename Predict>
void along(uint8_t* __restrict to, const uint8_t* __restrict from, const uint8_t* __restrict above,
           size_t size, const Predict& predict) {
  if constexpr (Bpp >= 3) {
    Lanes left{}, corner{};
    for (size_t i = 0; i < size; i += Bpp) {
      const Lanes up = load<Bpp>(above + i);
      left = (load<Bpp>(from + i) + predict(left, up, corner)) & 255;
      corner = up;
      store<Bpp>(to + i, left);
    }
  } else {
    int left[Bpp] = {}, corner[Bpp] = {};
    for (size_t i = 0; i < size; i += Bpp) {
      for (size_t k = 0; k < Bpp; ++k) {
        const int up = above[i + k];
        left[k] = (from[i + k] + predict(left[k], up, corner[k])) & 255;
        corner[k] = up;
        to[i + k] = static_cast<uint8_t>(left[k]);
      }
    }
  }
}

template <unsigned Bpp>
bool unfilter(int filter, uint8_t* __restrict to, const uint8_t* __restrict from,
              const uint8_t* __restrict above, size_t size) {
  switch (filter) {
    case 0:
      std::memcpy(to, from, size);
      return true;
    case 1:
      along<Bpp>(to, from, above, size, [](auto left, auto, auto) { return left; });
      return true;
    case 2:
      for (size_t i = 0; i < size; ++i) to[i] = static_cast<uint8_t>(from[i] + above[i]);
      return true;
    case 3:
      along<Bpp>(to, from, above, size,
                 [](auto left, auto up, auto) -> decltype(left) { return (left + up) >> 1; });
      return true;
    case 4:
      along<Bpp>(to, from, above, size, [](auto left, auto up, auto corner) -> decltype(left) {
        return paeth(left, up, corner);
      });
      return true;
    default:
      return false;
  }
}

}  // namespace

unsigned PngRows::channels() const {
  switch (color_) {
    case rgb:
      return 3;
    case grey_alpha:
      return 2;
    case rgb_alpha:
      return 4;
    default:
      return 1;
  }
}

bool PngRows::header(std::span<const std::byte> data) noexcept {
  if (data.size() != 13) return false;
  width_ = big_endian(data.data());
  height_ = big_endian(data.data() + 4);
  bits_ = std::to_integer<unsigned>(data[8]);
  color_ = static_cast<Color>(data[9]);
  const bool known = color_ == grey || color_ == rgb || color_ == indexed || color_ == grey_alpha ||
                     color_ == rgb_alpha;
  // Colours of 16 bits are rare: libspng scales them.
  const bool depth =
      bits_ == 8 || (color_ == grey && bits_ == 16) ||
      ((color_ == grey || color_ == indexed) && (bits_ == 1 || bits_ == 2 || bits_ == 4));
  const bool plain =
      data[10] == std::byte{0} && data[11] == std::byte{0} && data[12] == std::byte{0};
  return known && depth && plain && width_ > 0 && width_ <= kLongest && height_ > 0 &&
         height_ <= kLongest;
}

std::optional<PngRows> PngRows::open(std::span<const std::byte> encoded) noexcept {
  static constexpr unsigned char kBegin[] = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
  if (encoded.size() < kSignature || std::memcmp(encoded.data(), kBegin, kSignature) != 0) {
    return std::nullopt;
  }
  PngRows rows;
  size_t at = kSignature, streams = 0, streams_end = 0;
  for (bool first = true;; first = false) {
    const auto next = chunk(encoded, at);
    if (!next || first != (next->name == name("IHDR"))) return std::nullopt;
    if (first && !rows.header(next->data)) return std::nullopt;
    const size_t end = at + kAround + next->data.size();
    if (next->name == name("IEND")) break;
    if (next->name == name("PLTE")) {
      const size_t size = next->data.size();
      const bool fits = size > 0 && size % 3 == 0 && size <= size_t{3} << rows.bits_ &&
                        rows.color_ != grey && rows.color_ != grey_alpha;
      if (!fits || !rows.palette_.empty() || streams != 0) return std::nullopt;
      rows.palette_ = next->data;
    } else if (next->name == name("IDAT")) {
      if (streams != 0 && streams_end != at) return std::nullopt;
      if (streams == 0) streams = at;
      streams_end = end;
      rows.compressed_ += next->data.size();
    } else if (!first && (next->name & 0x20000000u) == 0) {
      return std::nullopt;  // a critical chunk that the format does not have
    }
    at = end;
  }
  if (streams == 0 || (rows.color_ == indexed && rows.palette_.empty())) return std::nullopt;
  rows.streams_ = encoded.subspan(streams, streams_end - streams);
  return rows;
}

size_t PngRows::scratch_size() const {
  const bool several = streams_.size() != compressed_ + kAround;
  return height_ * (stride() + 1) + stride() + (several ? compressed_ : 0);
}

bool PngRows::inflate(uint8_t* scratch) noexcept {
  const std::unique_ptr<libdeflate_decompressor, decltype(&libdeflate_free_decompressor)> inflater(
      libdeflate_alloc_decompressor(), &libdeflate_free_decompressor);
  if (!inflater) return false;
  const size_t size = height_ * (stride() + 1);
  const std::byte* compressed = streams_.data() + 8;
  if (streams_.size() != compressed_ + kAround) {
    uint8_t* const together = scratch + size + stride();
    uint8_t* to = together;
    for (size_t at = 0; at < streams_.size();) {
      const size_t length = big_endian(streams_.data() + at);
      std::memcpy(to, streams_.data() + at + 8, length);
      to += length;
      at += kAround + length;
    }
    compressed = reinterpret_cast<const std::byte*>(together);
  }
  std::memset(scratch + size, 0, stride());
  raw_ = scratch;
  none_ = scratch + size;
  return libdeflate_zlib_decompress(inflater.get(), compressed, compressed_, scratch, size,
                                    nullptr) == LIBDEFLATE_SUCCESS;
}

bool PngRows::next(uint8_t* to, const uint8_t* above) noexcept {
  const uint8_t* const from = raw_ + 1;
  const int filter = *raw_;
  const size_t size = stride();
  if (above == nullptr) above = none_;
  raw_ += size + 1;
  switch (bits_ * channels()) {
    case 16:
      return unfilter<2>(filter, to, from, above, size);
    case 24:
      return unfilter<3>(filter, to, from, above, size);
    case 32:
      return unfilter<4>(filter, to, from, above, size);
    default:  // of less than a byte as well
      return unfilter<1>(filter, to, from, above, size);
  }
}

}  // namespace nostall::image
