// Walks of varints and of MessagePack's numbers.
#include "fields/numbers.h"

#include <bit>
#include <optional>
#include <string>

namespace nostall::fields {
namespace {

Error damaged(const std::string& what) { return Error(ErrorKind::corruption, what); }

Error cannot_hold(Type type) {
  return damaged("a number that is none of type " + std::string(name_of(type)));
}

// Lists of numbers, depth first. The first list at each depth has the length that all must have.
class Lists {
 public:
  Lists(std::span<const std::byte> bytes, Type type) : bytes_(bytes), type_(type) {}

  std::optional<Error> parse(std::span<const int64_t> wanted) {
    sides_.fill(-1);
    if (auto error = value(0)) return error;
    if (at_ != bytes_.size()) return damaged("bytes behind its number or list");
    for (size_t d = numbers_.dims; open_ && d < wanted.size(); ++d) {
      numbers_.shape[numbers_.dims++] = wanted[d] == kRagged ? 0 : wanted[d];
    }
    return {};
  }
  Numbers take() { return std::move(numbers_); }

 private:
  std::optional<uint64_t> big(size_t size) {
    if (size > bytes_.size() - at_) return {};
    uint64_t value = 0;
    for (size_t i = 0; i < size; ++i) value = value << 8 | static_cast<uint8_t>(bytes_[at_++]);
    return value;
  }
  std::optional<Error> value(size_t depth) {
    const auto first = big(1);
    if (!first) return damaged("its list is cut off");
    const auto b = static_cast<uint8_t>(*first);
    if (b >= 0x90 && b < 0xa0) return list(b & 15u, depth);
    if (b == 0xdc || b == 0xdd) {
      const auto count = big(b == 0xdc ? 2 : 4);
      if (!count) return damaged("its list is cut off");
      return list(*count, depth);
    }
    if (depth != numbers_.dims) {
      if (leaves_) return damaged("its lists are not all of one shape");
      numbers_.dims = depth;
    }
    if (open_) return damaged("its lists are not all of one shape");
    leaves_ = true;
    const size_t at = numbers_.values.size();
    numbers_.values.resize(at + size_of(type_));
    return number(b, numbers_.values.data() + at);
  }
  std::optional<Error> number(uint8_t b, std::byte* out) {
    const auto stored = [&](bool good) {
      return good ? std::optional<Error>() : std::optional<Error>(cannot_hold(type_));
    };
    if (b < 0x80) return stored(store_number(type_, uint64_t{b}, out));
    if (b >= 0xe0) return stored(store_number(type_, int64_t{static_cast<int8_t>(b)}, out));
    if (b == 0xc2 || b == 0xc3) return stored(store_number(type_, uint64_t{b} - 0xc2, out));
    const bool real = b == 0xca || b == 0xcb, whole = b >= 0xcc && b <= 0xd3;
    if (!real && !whole) return damaged("neither a number nor a list of numbers");
    const size_t size = real ? size_t{4} << (b - 0xca) : size_t{1} << ((b - 0xcc) & 3);
    const auto bits = big(size);
    if (!bits) return damaged("its number is cut off");
    if (real) {
      const double value = size == 4 ? double{std::bit_cast<float>(static_cast<uint32_t>(*bits))}
                                     : std::bit_cast<double>(*bits);
      return stored(store_number(type_, value, out));
    }
    if (b < 0xd0) return stored(store_number(type_, *bits, out));
    const auto shift = static_cast<unsigned>(64 - 8 * size);
    return stored(store_number(type_, static_cast<int64_t>(*bits << shift) >> shift, out));
  }
  std::optional<Error> list(uint64_t count, size_t depth) {
    if (depth == kMostDims) return damaged("it has too many dimensions");
    const auto side = static_cast<int64_t>(count);
    if (sides_[depth] == -1) {
      sides_[depth] = side;
      numbers_.shape[depth] = side;
    }
    if (sides_[depth] != side || (leaves_ && depth >= numbers_.dims)) {
      return damaged("its lists are not all of one shape");
    }
    if (count == 0) {
      if (!leaves_ && !open_) numbers_.dims = depth + 1;
      if (numbers_.dims != depth + 1) return damaged("its lists are not all of one shape");
      open_ = true;
    }
    for (uint64_t i = 0; i < count; ++i) {
      if (auto error = value(depth + 1)) return error;
    }
    return {};
  }

  std::span<const std::byte> bytes_;
  Type type_;
  size_t at_ = 0;
  std::array<int64_t, kMostDims> sides_{};
  bool leaves_ = false;  // there was a number
  bool open_ = false;    // there was an empty list
  Numbers numbers_;
};

}  // namespace

Result<Numbers> parse_varints(std::span<const std::byte> bytes, Type type) {
  Numbers numbers;
  numbers.dims = 1;
  numbers.values.reserve(bytes.size() * size_of(type));
  uint64_t value = 0;
  unsigned shift = 0;
  for (const std::byte byte : bytes) {
    if (shift > 63) return damaged("a varint of more than ten bytes");
    value |= (static_cast<uint64_t>(byte) & 0x7f) << shift;
    shift += 7;
    if ((byte & std::byte{0x80}) != std::byte{0}) continue;
    const size_t at = numbers.values.size();
    numbers.values.resize(at + size_of(type));
    if (!store_number(type, static_cast<int64_t>(value), numbers.values.data() + at)) {
      return cannot_hold(type);
    }
    ++numbers.shape[0];
    value = 0;
    shift = 0;
  }
  if (shift != 0) return damaged("its last varint does not end");
  return numbers;
}

Result<Numbers> parse_msgpack(std::span<const std::byte> bytes, Type type,
                              std::span<const int64_t> wanted) {
  Lists lists(bytes, type);
  if (auto error = lists.parse(wanted)) return *error;
  return lists.take();
}

}  // namespace nostall::fields
