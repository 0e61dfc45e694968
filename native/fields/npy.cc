// The header is the text of a Python dictionary of three entries; only what NumPy writes is taken.
#include "fields/npy.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <string>
#include <string_view>

namespace nostall::fields {
namespace {
// Bytes that an array of an empty side would have if that side were 1.
constexpr uint64_t kMostOfNothing = uint64_t{1} << 20;

Error damaged(const std::string& what) {
  return Error(ErrorKind::corruption, "it is no .npy array that can be read: " + what);
}

// Walks the text of the header; `ok` is false for good once something else was there.
class Walker {
 public:
  explicit Walker(std::string_view text) : text_(text) {}

  bool ok() const { return ok_; }
  bool take(char c) {
    blanks();
    if (text_.empty() || text_.front() != c) return false;
    text_.remove_prefix(1);
    return true;
  }
  void expect(char c) { ok_ = take(c) && ok_; }
  std::string_view quoted() {
    blanks();
    if (text_.empty() || (text_[0] != '\'' && text_[0] != '"')) return fail();
    const size_t end = text_.find(text_[0], 1);
    if (end == std::string_view::npos) return fail();
    const std::string_view found = text_.substr(1, end - 1);
    text_.remove_prefix(end + 1);
    return found;
  }
  std::string_view word() {
    blanks();
    size_t end = 0;
    while (end < text_.size() && ((text_[end] | 0x20) >= 'a' && (text_[end] | 0x20) <= 'z')) ++end;
    const std::string_view found = text_.substr(0, end);
    text_.remove_prefix(end);
    return found;
  }
  int64_t number() {
    blanks();
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), value);
    if (error != std::errc() || value < 0) {
      fail();
      return 0;
    }
    text_.remove_prefix(static_cast<size_t>(end - text_.data()));
    return value;
  }
  bool at_end() {
    blanks();
    return text_.empty();
  }

 private:
  void blanks() {
    while (!text_.empty() && (text_[0] == ' ' || text_[0] == '\n' || text_[0] == '\t')) {
      text_.remove_prefix(1);
    }
  }
  std::string_view fail() {
    ok_ = false;
    return {};
  }
  std::string_view text_;
  bool ok_ = true;
};

Result<Type> type_of(std::string_view descr) {
  const auto refused = [&](const char* why) {
    return damaged("its values are '" + std::string(descr.substr(0, 40)) + "', " + why);
  };
  if (descr.size() < 2 || (descr[0] != '<' && descr[0] != '|' && descr[0] != '>')) {
    return refused("which is no type");
  }
  if (descr[1] == 'O') return refused("Python objects, which only pickle reads: it is never run");
  struct Known {
    std::string_view text;
    Type type;
  };
  constexpr Known kKnown[] = {{"b1", Type::boolean}, {"u1", Type::uint8},   {"u2", Type::uint16},
                              {"u4", Type::uint32},  {"u8", Type::uint64},  {"i1", Type::int8},
                              {"i2", Type::int16},   {"i4", Type::int32},   {"i8", Type::int64},
                              {"f2", Type::float16}, {"f4", Type::float32}, {"f8", Type::float64}};
  for (const Known& known : kKnown) {
    if (descr.substr(1) == known.text) return known.type;
  }
  return refused("which is none of the types of fields");
}

}  // namespace

Result<Npy> parse_npy(std::span<const std::byte> bytes) {
  constexpr std::string_view kMagic = "\x93NUMPY";
  const auto at = [&](size_t i) { return std::to_integer<size_t>(bytes[i]); };
  if (bytes.size() < 10 || std::memcmp(bytes.data(), kMagic.data(), kMagic.size()) != 0) {
    return damaged("its first bytes are others");
  }
  const size_t version = at(6);
  if (version < 1 || version > 3) return damaged("its version is " + std::to_string(version));
  const size_t head = version == 1 ? 10 : 12;
  if (bytes.size() < head) return damaged("it ends in its header");
  size_t length = at(8) | at(9) << 8;
  if (version > 1) length |= at(10) << 16 | at(11) << 24;
  if (length > bytes.size() - head) return damaged("it ends in its header");

  Walker text({reinterpret_cast<const char*>(bytes.data()) + head, length});
  Npy out;
  unsigned seen = 0;
  text.expect('{');
  while (text.ok() && !text.take('}')) {
    const std::string_view key = text.quoted();
    text.expect(':');
    if (key == "descr") {
      seen |= 1;
      const std::string_view descr = text.quoted();
      if (!text.ok()) return damaged("its values are no plain numbers");
      auto type = type_of(descr);
      if (!type) return type.error();
      out.type = type.value();
      out.big_endian = descr[0] == '>';
    } else if (key == "fortran_order") {
      seen |= 2;
      const std::string_view word = text.word();
      if (word != "True" && word != "False") return damaged("its header is none");
      out.fortran = word == "True";
    } else if (key == "shape") {
      seen |= 4;
      out.dims = 0;
      text.expect('(');
      while (text.ok() && !text.take(')')) {
        if (out.dims == kMostDims) {
          return damaged("it has more than " + std::to_string(kMostDims) + " dimensions");
        }
        out.shape[out.dims++] = text.number();
        if (!text.take(',')) {
          text.expect(')');
          break;
        }
      }
    } else {
      return damaged("its header is none");
    }
    if (!text.take(',')) {
      text.expect('}');
      break;
    }
  }
  if (!text.ok() || seen != 7 || !text.at_end()) return damaged("its header is none");
  out.fortran = out.fortran && out.dims > 1;
  uint64_t size = size_of(out.type);
  bool empty = false;
  for (size_t d = 0; d < out.dims; ++d) empty = empty || out.shape[d] == 0;
  for (size_t d = 0; d < out.dims; ++d) {
    // The sides of an array without values count too: a batch may be padded to them.
    const auto side = static_cast<uint64_t>(std::max<int64_t>(1, out.shape[d]));
    if (__builtin_mul_overflow(size, side, &size) || (empty && size > kMostOfNothing)) {
      return damaged("its shape is impossible");
    }
  }
  if (empty) size = 0;
  out.values = bytes.subspan(head + length);
  if (out.values.size() != size) {
    return damaged("its header promises " + std::to_string(size) + " bytes of values, but " +
                   std::to_string(out.values.size()) + " follow");
  }
  return out;
}

void put_in_order(const Npy& array, std::byte* out) {
  const size_t size = size_of(array.type);
  std::array<size_t, kMostDims> step{}, at{};  // of each side: bytes between values, and the place
  size_t bytes = size;
  for (size_t i = 0; i < array.dims; ++i) {
    const size_t d = array.fortran ? i : array.dims - 1 - i;
    step[d] = bytes;
    bytes *= static_cast<size_t>(array.shape[d]);
  }
  const std::byte* from = array.values.data();
  for (size_t left = array.values.size() / size; left > 0; --left, out += size) {
    if (array.big_endian) {
      std::reverse_copy(from, from + size, out);
    } else {
      std::memcpy(out, from, size);
    }
    for (size_t d = array.dims; d-- > 0;) {
      if (++at[d] < static_cast<size_t>(array.shape[d])) {
        from += step[d];
        break;
      }
      from -= step[d] * (at[d] - 1);
      at[d] = 0;
    }
  }
}

}  // namespace nostall::fields
