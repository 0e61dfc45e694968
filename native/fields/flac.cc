// Frames of blocks: a header, one subframe for each channel (a prediction and what it lacks), a CRC.
#include "fields/flac.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

namespace nostall::fields {
namespace {

constexpr uint32_t kMostOrder = 32;
constexpr uint64_t kMostValues = uint64_t{1} << 32;  // of all channels: 12 hours of CD sound
// A block is a few bytes where nothing sounds. Files that promise more for each byte are read first.
constexpr uint64_t kUsualFrames = 64;

Error damaged(const std::string& what) {
  return Error(ErrorKind::corruption, "it is no FLAC file that can be read: " + what);
}

uint32_t byte_at(std::span<const std::byte> bytes, size_t at) {
  return std::to_integer<uint32_t>(bytes[at]);
}

uint32_t big(std::span<const std::byte> bytes, size_t at, size_t size) {
  uint32_t value = 0;
  for (size_t i = 0; i < size; ++i) value = value << 8 | byte_at(bytes, at + i);
  return value;
}

template <typename Crc, uint32_t kPolynomial>
constexpr std::array<Crc, 256> table() {
  std::array<Crc, 256> out{};
  constexpr int kTop = 8 * sizeof(Crc) - 8;
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i << kTop;
    for (int bit = 0; bit < 8; ++bit) {
      crc = crc & (uint32_t{0x80} << kTop) ? crc << 1 ^ kPolynomial : crc << 1;
    }
    out[i] = static_cast<Crc>(crc);
  }
  return out;
}

constexpr auto kCrc8 = table<uint8_t, 0x07>();
constexpr auto kCrc16 = table<uint16_t, 0x8005>();

uint8_t crc8(std::span<const std::byte> bytes) {
  uint8_t crc = 0;
  for (const std::byte b : bytes) crc = kCrc8[crc ^ std::to_integer<uint8_t>(b)];
  return crc;
}

uint16_t crc16(std::span<const std::byte> bytes) {
  uint32_t crc = 0;
  for (const std::byte b : bytes) {
    crc = (crc << 8 & 0xffff) ^ kCrc16[crc >> 8 ^ std::to_integer<uint8_t>(b)];
  }
  return static_cast<uint16_t>(crc);
}

// Bits from the highest of each byte on. Behind the end there are zeros, and it is cut().
class Bits {
 public:
  explicit Bits(std::span<const std::byte> bytes) : bytes_(bytes) {}

  uint32_t take(uint32_t count) {  // up to 32
    if (count == 0) return 0;
    if (have_ < count) fill();
    const auto value = static_cast<uint32_t>(bits_ >> (64 - count));
    drop(count);
    return value;
  }
  int32_t take_signed(uint32_t count) {
    if (count == 0) return 0;
    const uint32_t shift = 32 - count;
    return static_cast<int32_t>(take(count) << shift) >> shift;
  }
  // The zeros before a one, which is taken too.
  uint64_t zeros() {
    uint64_t count = 0;
    for (;;) {
      if (have_ < 32) fill();
      if (bits_ != 0) {
        const auto here = static_cast<uint32_t>(std::countl_zero(bits_));
        if (here < have_) {
          drop(here);
          drop(1);
          return count + here;
        }
      }
      count += have_;
      bits_ = 0;
      have_ = 0;
      if (at_ >= bytes_.size()) {
        cut_ = true;
        return count;
      }
    }
  }
  bool cut() const noexcept { return cut_; }
  void align() { drop(have_ % 8); }
  size_t place() const noexcept { return at_ - have_ / 8; }  // of whole bytes

 private:
  void fill() {
    if (have_ <= 32 && bytes_.size() - at_ >= 4) {
      uint32_t next;
      std::memcpy(&next, bytes_.data() + at_, sizeof next);
      bits_ |= uint64_t{__builtin_bswap32(next)} << (32 - have_);
      have_ += 32;
      at_ += 4;
      return;
    }
    while (have_ <= 56 && at_ < bytes_.size()) {
      bits_ |= uint64_t{byte_at(bytes_, at_++)} << (56 - have_);
      have_ += 8;
    }
  }
  void drop(uint32_t count) {
    if (count > have_) {
      cut_ = true;
      count = have_;
    }
    bits_ = count == 64 ? 0 : bits_ << count;
    have_ -= count;
  }

  std::span<const std::byte> bytes_;
  size_t at_ = 0;
  uint64_t bits_ = 0;  // `have_` of them, at the top
  uint32_t have_ = 0;
  bool cut_ = false;
};

// ---- One channel of a block.

// What the prediction lacks, from out[order] on.
bool take_residual(Bits& bits, uint32_t order, std::span<int32_t> out) {
  const uint32_t method = bits.take(2);
  if (method > 1) return false;
  const uint32_t width = method == 0 ? 4 : 5, escape = (1u << width) - 1;
  const uint32_t partitions = bits.take(4);
  const size_t size = out.size() >> partitions;
  if (size << partitions != out.size() || size < order) return false;
  size_t at = order;
  for (size_t end = size; end <= out.size(); end += size) {
    const uint32_t low = bits.take(width);
    if (low == escape) {
      const uint32_t raw = bits.take(5);
      for (; at < end; ++at) out[at] = bits.take_signed(raw);
    } else {
      for (; at < end; ++at) {
        const uint64_t value = bits.zeros() << low | bits.take(low);
        if (value > UINT32_MAX) return false;
        const auto folded = static_cast<uint32_t>(value);
        out[at] = static_cast<int32_t>(folded >> 1 ^ (0u - (folded & 1)));
      }
    }
    if (bits.cut()) return false;
  }
  return true;
}

// Adds to each value what the ones before it predict. Sums of Sum never overflow for files that are
// sound, and wrap around for others.
template <typename Sum, size_t kOrder>
void predict(std::span<const int32_t> factors, uint32_t shift, std::span<int32_t> out) {
  using Wrapped = std::make_unsigned_t<Sum>;
  const size_t order = kOrder != 0 ? kOrder : factors.size();
  for (size_t i = order; i < out.size(); ++i) {
    Wrapped sum = 0;
    const int32_t* before = out.data() + i - 1;
    for (size_t k = 0; k < order; ++k) {
      sum += static_cast<Wrapped>(static_cast<Sum>(factors[k])) *
             static_cast<Wrapped>(static_cast<Sum>(*(before - static_cast<ptrdiff_t>(k))));
    }
    const Sum predicted = static_cast<Sum>(sum) >> shift;
    out[i] = static_cast<int32_t>(static_cast<uint32_t>(out[i]) + static_cast<uint32_t>(predicted));
  }
}

template <typename Sum>
void predict(std::span<const int32_t> factors, uint32_t shift, std::span<int32_t> out) {
  const auto of_order = [&]<size_t... kOrder>(std::index_sequence<kOrder...>) {
    return (
        (factors.size() == kOrder + 1 && (predict<Sum, kOrder + 1>(factors, shift, out), true)) ||
        ...);
  };
  if (!of_order(std::make_index_sequence<12>())) predict<Sum, 0>(factors, shift, out);
}

void predict(std::span<const int32_t> factors, uint32_t shift, uint32_t bits, uint32_t precision,
             std::span<int32_t> out) {
  if (factors.empty()) return;
  const auto sums = bits + precision + static_cast<uint32_t>(std::bit_width(factors.size()));
  if (sums <= 32) return predict<int32_t>(factors, shift, out);
  predict<int64_t>(factors, shift, out);
}

constexpr std::array<std::array<int32_t, 4>, 5> kFixed{
    {{}, {1}, {2, -1}, {3, -3, 1}, {4, -6, 4, -1}}};

bool take_channel(Bits& bits, uint32_t width, std::span<int32_t> out) {
  if (bits.take(1) != 0) return false;
  const uint32_t type = bits.take(6);
  uint32_t wasted = 0;
  if (bits.take(1) != 0) {
    const uint64_t more = bits.zeros() + 1;
    if (more >= width) return false;
    wasted = static_cast<uint32_t>(more);
    width -= wasted;
  }
  if (type == 0) {
    std::fill(out.begin(), out.end(), bits.take_signed(width));
  } else if (type == 1) {
    for (int32_t& value : out) value = bits.take_signed(width);
  } else {
    const bool fixed = type >= 8 && type <= 12;
    if (!fixed && type < 32) return false;
    const uint32_t order = fixed ? type - 8 : type - 31;
    if (order > out.size()) return false;
    for (uint32_t i = 0; i < order; ++i) out[i] = bits.take_signed(width);
    if (fixed) {
      if (!take_residual(bits, order, out)) return false;
      predict(std::span(kFixed[order]).first(order), 0, width, 4, out);
    } else {
      const uint32_t precision = bits.take(4) + 1;
      const int32_t shift = bits.take_signed(5);
      if (precision == 16 || shift < 0) return false;
      std::array<int32_t, kMostOrder> factors;
      for (uint32_t i = 0; i < order; ++i) factors[i] = bits.take_signed(precision);
      if (!take_residual(bits, order, out)) return false;
      predict(std::span(factors).first(order), static_cast<uint32_t>(shift), width, precision, out);
    }
  }
  if (wasted != 0) {
    for (int32_t& v : out) v = static_cast<int32_t>(static_cast<uint32_t>(v) << wasted);
  }
  return !bits.cut();
}

// ---- A block.

struct Header {
  uint32_t frames = 0, channels = 0, bits = 0;
  uint32_t joint = 0;  // 8: left and side, 9: side and right, 10: middle and side
};

bool take_number(Bits& bits) {  // of the frame, as UTF-8 would have it
  const uint32_t first = bits.take(8);
  const auto ones = static_cast<uint32_t>(std::countl_one(static_cast<uint8_t>(first)));
  if (ones == 1 || ones > 7) return false;
  for (uint32_t i = 1; i < ones; ++i) {
    if (bits.take(8) >> 6 != 2) return false;
  }
  return true;
}

bool take_header(std::span<const std::byte> bytes, Bits& bits, const Flac& flac, Header& out) {
  if (bits.take(15) != 0x7ffc) return false;
  bits.take(1);  // whether blocks differ in size
  const uint32_t size = bits.take(4), rate = bits.take(4), channels = bits.take(4);
  const uint32_t width = bits.take(3);
  if (bits.take(1) != 0 || !take_number(bits)) return false;
  if (size == 0 || rate == 15 || channels > 10) return false;
  out.frames = size == 1   ? 192
               : size < 6  ? 576u << (size - 2)
               : size == 6 ? bits.take(8) + 1
               : size == 7 ? bits.take(16) + 1
                           : 256u << (size - 8);
  if (rate >= 12) bits.take(rate == 12 ? 8 : 16);
  constexpr std::array<uint32_t, 8> kWidths{0, 8, 12, 0, 16, 20, 24, 32};
  out.bits = width == 0 ? flac.bits : kWidths[width];
  out.channels = channels < 8 ? channels + 1 : 2;
  out.joint = channels < 8 ? 0 : channels;
  const size_t end = bits.place();
  return bits.take(8) == crc8(bytes.first(end)) && !bits.cut() && out.bits == flac.bits &&
         out.channels == flac.channels && out.frames <= flac.block;
}

void split_joint(uint32_t joint, std::span<int32_t> first, std::span<int32_t> second) {
  for (size_t i = 0; i < first.size(); ++i) {
    const int64_t a = first[i], b = second[i];
    const int64_t twice = a * 2 + (b & 1);
    const int64_t left = joint == 8 ? a : joint == 9 ? a + b : (twice + b) >> 1;
    const int64_t right = joint == 8 ? a - b : joint == 9 ? b : (twice - b) >> 1;
    first[i] = static_cast<int32_t>(left);
    second[i] = static_cast<int32_t>(right);
  }
}

// ---- The file.

// Behind a tag of ID3, which FLAC files need not have.
std::span<const std::byte> behind_tag(std::span<const std::byte> bytes) noexcept {
  if (bytes.size() < 10 || std::memcmp(bytes.data(), "ID3", 3) != 0) return bytes;
  size_t size = 10;
  for (size_t i = 0; i < 4; ++i) size += size_t{byte_at(bytes, 6 + i) & 0x7f} << (7 * (3 - i));
  return size <= bytes.size() ? bytes.subspan(size) : bytes;
}

Result<Flac> parse_info(std::span<const std::byte> info) {
  if (info.size() < 34) return damaged("its description is cut off");
  Flac flac;
  flac.block = big(info, 2, 2);
  flac.rate = big(info, 10, 3) >> 4;
  flac.channels = (big(info, 12, 1) >> 1 & 7) + 1;
  flac.bits = (big(info, 12, 2) >> 4 & 31) + 1;
  flac.frames = uint64_t{big(info, 13, 1) & 15} << 32 | big(info, 14, 4);
  if (flac.block < 16 || flac.rate == 0 || flac.bits < 4 || flac.bits > 24) {
    return damaged(std::to_string(flac.bits) + " bits at " + std::to_string(flac.rate) +
                   " frames a second in blocks of " + std::to_string(flac.block) +
                   "; 4 to 24 bits are read");
  }
  return flac;
}

}  // namespace

bool is_flac(std::span<const std::byte> bytes) noexcept {
  const auto body = behind_tag(bytes);
  return body.size() >= 4 && std::memcmp(body.data(), "fLaC", 4) == 0;
}

FlacReader::FlacReader(const Flac& flac, image::Buffer& memory)
    : flac_(flac),
      values_(reinterpret_cast<int32_t*>(
                  memory.reserve(size_t{flac.block} * flac.channels * sizeof(int32_t))),
              size_t{flac.block} * flac.channels) {}

bool FlacReader::read_block() {
  Bits bits(flac_.blocks);
  Header header;
  if (!take_header(flac_.blocks, bits, flac_, header)) return false;
  for (uint32_t c = 0; c < header.channels; ++c) {
    const bool side =
        (header.joint == 9 && c == 0) || (header.joint != 9 && header.joint != 0 && c == 1);
    const auto channel = values_.subspan(size_t{c} * flac_.block, header.frames);
    if (!take_channel(bits, header.bits + (side ? 1 : 0), channel)) return false;
  }
  bits.align();
  const size_t end = bits.place();
  if (bits.take(16) != crc16(flac_.blocks.first(end)) || bits.cut()) return false;
  if (header.joint != 0) {
    split_joint(header.joint, values_.first(header.frames),
                values_.subspan(flac_.block, header.frames));
  }
  flac_.blocks = flac_.blocks.subspan(bits.place());
  count_ = header.frames;
  at_ = 0;
  return true;
}

uint32_t FlacReader::next_block() {
  count_ = at_ = 0;
  if (flac_.blocks.empty() || error_) return 0;
  if (!read_block()) {
    error_ = damaged("a block is damaged or cut off, " + std::to_string(flac_.blocks.size()) +
                     " bytes before its end");
    count_ = at_ = 0;
  }
  return count_;
}

bool FlacReader::read(std::span<float> out) {
  const float unit = 1.0f / static_cast<float>(1u << (flac_.bits - 1));
  const uint32_t channels = flac_.channels;
  for (size_t done = 0; done < out.size();) {
    if (at_ == count_ && next_block() == 0) {
      if (!error_) error_ = damaged("it has fewer frames than it promises");
      return false;
    }
    const auto frames =
        static_cast<uint32_t>(std::min<size_t>(count_ - at_, (out.size() - done) / channels));
    for (uint32_t c = 0; c < channels; ++c) {
      const int32_t* from = values_.data() + size_t{c} * flac_.block + at_;
      float* to = out.data() + done + c;
      for (uint32_t i = 0; i < frames; ++i) to[i * channels] = static_cast<float>(from[i]) * unit;
    }
    at_ += frames;
    done += size_t{frames} * channels;
  }
  return true;
}

Result<Flac> parse_flac(std::span<const std::byte> bytes, image::Buffer& memory) {
  if (!is_flac(bytes)) return damaged("its first bytes are others");
  std::span<const std::byte> rest = behind_tag(bytes).subspan(4);
  Flac flac;
  bool last = false;
  for (bool first = true; !last; first = false) {
    if (rest.size() < 4) return damaged("its description is cut off");
    const uint32_t head = byte_at(rest, 0);
    const size_t size = big(rest, 1, 3);
    last = head >> 7 != 0;
    if (size > rest.size() - 4 || ((head & 0x7f) == 0) != first) {
      return damaged("its description is cut off, or not the first of its parts");
    }
    if (first) {
      auto parsed = parse_info(rest.subspan(4, size));
      if (!parsed) return parsed.error();
      flac = parsed.value();
    }
    rest = rest.subspan(4 + size);
  }
  flac.blocks = rest;
  if (flac.frames == 0 || flac.frames > kUsualFrames * rest.size()) {
    FlacReader reader(flac, memory);
    uint64_t frames = 0;
    while (const uint32_t count = reader.next_block()) {
      if ((frames += count) * flac.channels > kMostValues) break;
    }
    if (reader.error()) return *reader.error();
    if (flac.frames > frames && frames * flac.channels <= kMostValues) {
      return damaged("it has fewer frames than it promises");
    }
    flac.frames = std::max(flac.frames, frames);
  }
  if (flac.frames * flac.channels > kMostValues) {
    return damaged(std::to_string(flac.frames) + " frames are more than one sample may have");
  }
  return flac;
}

}  // namespace nostall::fields
