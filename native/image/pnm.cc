// PNM, that is PBM, PGM and PPM, as text and as bytes: a header of decimal numbers, then the values.
#include <cmath>
#include <optional>
#include <string>

#include "image/decode.h"

namespace nostall::image {
namespace {

Error failed(const std::string& what) { return Error(ErrorKind::corruption, "PNM: " + what); }

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Numbers between white space and comments.
class Text {
 public:
  Text(std::span<const std::byte> bytes, size_t at)
      : bytes_(reinterpret_cast<const char*>(bytes.data())), size_(bytes.size()), at_(at) {}

  // The next number below 2^24; nothing where there is none.
  std::optional<uint32_t> number() {
    skip();
    if (at_ == size_ || !digit()) return std::nullopt;
    uint32_t value = 0;
    for (; at_ < size_ && digit(); ++at_) {
      value = value * 10 + static_cast<uint32_t>(bytes_[at_] - '0');
      if (value >= 1u << 24) return std::nullopt;
    }
    return value;
  }
  // The next digit 0 or 1, which need not stand alone.
  std::optional<uint32_t> bit() {
    skip();
    if (at_ == size_ || (bytes_[at_] != '0' && bytes_[at_] != '1')) return std::nullopt;
    return static_cast<uint32_t>(bytes_[at_++] - '0');
  }
  // Behind the one white space that ends the header.
  size_t end() const { return at_ + 1; }

 private:
  bool digit() const { return bytes_[at_] >= '0' && bytes_[at_] <= '9'; }
  void skip() {
    while (at_ < size_ && (is_space(bytes_[at_]) || bytes_[at_] == '#')) {
      if (bytes_[at_] == '#') {
        while (at_ < size_ && bytes_[at_] != '\n') ++at_;
      } else {
        ++at_;
      }
    }
  }

  const char* bytes_;
  size_t size_, at_;
};

struct Header {
  bool bits = false, text = false;
  size_t channels = 1;
  int64_t width = 0, height = 0;
  uint32_t most = 1;  // the value of white
};

std::optional<Error> read_header(Text& text, char kind, Header& header) {
  header.bits = kind == '1' || kind == '4';
  header.text = kind <= '3';
  header.channels = kind == '3' || kind == '6' ? 3 : 1;
  const auto width = text.number(), height = text.number();
  const auto most = header.bits ? std::optional(1u) : text.number();
  if (!width || !height || !most) return failed("the header is damaged");
  header.width = *width;
  header.height = *height;
  header.most = *most;
  if (header.most == 0 || header.most > 65535) {
    return failed("values up to " + std::to_string(header.most));
  }
  if (header.most > 255 && header.channels == 1) {
    return failed("16-bit grey, whose levels an RGB image cannot hold: convert it to 8 bits");
  }
  return std::nullopt;
}

// A value as 8 bits.
uint8_t scaled(const Header& header, uint32_t value) {
  if (header.bits) return value != 0 ? 0 : 255;  // 1 is black
  if (value >= header.most) return 255;
  if (header.most == 255) return static_cast<uint8_t>(value);
  return static_cast<uint8_t>(std::nearbyint(static_cast<double>(value) / header.most * 255));
}

void put(const Header& header, uint8_t* pixels, size_t value, uint8_t level) {
  uint8_t* pixel = pixels + value / header.channels * 4;
  if (header.channels == 3) {
    pixel[value % 3] = level;
  } else {
    pixel[0] = pixel[1] = pixel[2] = level;
  }
}

std::optional<Error> read_text(const Header& header, Text& text, size_t values, uint8_t* pixels) {
  for (size_t i = 0; i < values; ++i) {
    const auto value = header.bits ? text.bit() : text.number();
    if (!value) {
      return failed("value " + std::to_string(i) + " of " + std::to_string(values) +
                    " is missing or no number");
    }
    if (*value > header.most) {
      return failed("value " + std::to_string(i) + " is " + std::to_string(*value) +
                    ", above the greatest, " + std::to_string(header.most));
    }
    put(header, pixels, i, scaled(header, *value));
  }
  return std::nullopt;
}

void read_bytes(const Header& header, const std::byte* at, size_t values, uint8_t* pixels) {
  const auto byte = [at](size_t i) { return static_cast<uint32_t>(at[i]); };
  const auto width = static_cast<size_t>(header.width);
  for (size_t i = 0; i < values; ++i) {
    uint32_t value;
    if (header.bits) {
      const size_t x = i % width;
      value = byte(i / width * ((width + 7) / 8) + x / 8) >> (7 - x % 8) & 1;
    } else {
      value = header.most > 255 ? byte(2 * i) << 8 | byte(2 * i + 1) : byte(i);
    }
    put(header, pixels, i, scaled(header, value));
  }
}

}  // namespace

Result<Bitmap> decode_pnm(std::span<const std::byte> encoded, uint64_t max_pixels, const Plan& plan,
                          Buffer& buffer) {
  Text text(encoded, 2);
  Header header;
  if (auto error = read_header(text, static_cast<char>(encoded[1]), header)) return *error;
  if (auto error = refuse_size("PNM", header.width, header.height, max_pixels)) return *error;
  const auto width = static_cast<size_t>(header.width), height = static_cast<size_t>(header.height);
  const size_t values = width * height * header.channels;
  const size_t stored =
      header.bits ? (width + 7) / 8 * height : values * (header.most > 255 ? 2 : 1);
  // As text, two bytes are the least that a value takes; bits need no space.
  const size_t least = header.text ? (header.bits ? values : 2 * values - 1) : stored;
  if (text.end() + least > encoded.size() + (header.text ? 1 : 0)) {
    return failed("the file has " + std::to_string(encoded.size()) + " of its " +
                  std::to_string(text.end() + least) + " bytes: it is truncated");
  }
  uint8_t* pixels = buffer.reserve(width * height * 4);
  if (header.text) {
    if (auto error = read_text(header, text, values, pixels)) return *error;
  } else {
    read_bytes(header, encoded.data() + text.end(), values, pixels);
  }
  plan(header.width, header.height);
  return Bitmap{pixels, width * 4, 0, 0, header.width, header.height, 0};
}

}  // namespace nostall::image
